"""Which kinds of recompute a search offers to stages: those that no mixture of others makes needless.

A stage's layers may be of two kinds, so that a kind counts which lies below the line between two others, in the plane of a
layer's time and the bytes that it keeps: the lower convex hull.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from cost_models.block_prices import price_distinct
from cost_models.problem import Cells, Problem
from cost_models.schedules import FloatArray
from cost_models.stage import LAYERS

LEAST_GAIN = 1e-3
"""Part of a layer's time that a kind must save, in some cell, against the best mixture of the others: below it choosing it gains
less than a hundredth of what two layouts are predicted off against each other."""


def worthwhile_kinds(problem: Problem, cells: Cells, kinds: Sequence[str]) -> tuple[str, ...]:
    """Of the `kinds`, in their order: the fastest and the thriftiest, and those that gain `LEAST_GAIN` in any cell, on any pool."""
    if len(kinds) < 2:
        return tuple(kinds)
    seconds, kept = [], []
    for pool in range(len(problem.cluster.pools)):
        prices, _ = price_distinct(problem.on_pool(pool), cells, kinds)
        places = [prices.recompute_kinds.index(kind) for kind in kinds]
        block_s, block_bytes = prices.forward_s + prices.backward_s, prices.activation_bytes
        seconds.append(block_s[:, LAYERS][:, :, places].reshape(-1, len(kinds)))
        kept.append(block_bytes[:, LAYERS][:, :, places].reshape(-1, len(kinds)))
    chosen = on_hull(np.concatenate(seconds), np.concatenate(kept))
    return tuple(kinds[place] for place in chosen)


def on_hull(seconds: FloatArray, kept_bytes: FloatArray, least_gain: float = LEAST_GAIN) -> list[int]:
    """Numbers of the kinds, of arrays (rows, kinds), without those that gain no more than `least_gain` in any row; the one that
    gains least goes first, since the others may gain more without it."""
    left = list(range(seconds.shape[1]))
    while len(left) > 1:
        gains = [_gain(seconds, kept_bytes, kind, [other for other in left if other != kind]) for kind in left]
        least = int(np.argmin(gains[::-1]))
        if gains[::-1][least] > least_gain:
            break
        left.pop(len(left) - 1 - least)
    return left


def _gain(seconds: FloatArray, kept_bytes: FloatArray, kind: int, others: Sequence[int]) -> float:
    """The most, over all rows, that a kind saves of a layer's time against the best one or two others that keep no more bytes."""
    own_s, own_bytes = seconds[:, kind], kept_bytes[:, kind]
    best_s = np.full(len(seconds), np.inf)
    for one in others:
        best_s = np.where(kept_bytes[:, one] <= own_bytes, np.minimum(best_s, seconds[:, one]), best_s)
    for more, less in itertools.permutations(others, 2):
        above, below = kept_bytes[:, more], kept_bytes[:, less]
        between = (above > own_bytes) & (below < own_bytes)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (above - own_bytes) / (above - below)
            mixed_s = seconds[:, more] + share * (seconds[:, less] - seconds[:, more])
        best_s = np.where(between, np.minimum(best_s, mixed_s), best_s)
    return float(((best_s - own_s) / seconds.min(axis=1)).max())
