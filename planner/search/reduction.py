"""Which columns of a cell a plan of at most some J can use: the others need not be in the programme.

Every plan through a column has Σt, a fullest device and a longest tail of at least what the best chains through it have, each
taken alone. A column whose three together cost more than the limit is in no plan below it. With v = 1 the chains are paths
over (stage, blocks done), found once forwards and once backwards; with v > 1 every stage has its blocks, and the lightest
column of each other stage does.
"""

import numpy as np

from cost_models.schedules import FloatArray, IntArray
from planner.search.stages import CellProblem

_ROUNDING = 1e-9
"""Share of the limit by which a bound must exceed it, so that rounding drops nothing."""


def needed_columns(cell: CellProblem, below_s: float) -> IntArray:
    """Numbers of the columns that a plan with J ≤ `below_s` may use, ascending."""
    if cell.played is not None:
        return np.arange(len(cell.columns) if cell.played.objective_s <= below_s else 0)
    least = _through_chunks(cell) if cell.layout.vpp > 1 else _through_paths(cell)
    return np.flatnonzero(least <= below_s * (1 + _ROUNDING))


def _through_paths(cell: CellProblem) -> FloatArray:
    """v = 1: (N,) J of every plan through a column is at least this."""
    columns, weight = cell.columns, cell.steady_micro_batches
    half = columns.half_hops_s
    loads = [columns.load_s]
    if cell.two_loads:
        loads = [columns.forward_s + half, columns.backward_s + half]
    fullest = sum(_best_through(cell, seconds, np.maximum) for seconds in loads)
    return np.asarray(
        (weight * fullest if weight > 0 else 0.0)
        + _best_through(cell, columns.load_s, np.add)
        + _best_through(cell, columns.tail_s, np.maximum)
    )


def _best_through(cell: CellProblem, amount: FloatArray, combine: np.ufunc) -> FloatArray:
    """(N,) the least sum, or the least maximum, of `amount` over the paths through each column; infinite where there is none."""
    first, end = cell.columns.first, cell.columns.last + 1
    before, after = np.empty(len(amount)), np.empty(len(amount))
    reached = np.full(cell.num_blocks + 1, np.inf)
    reached[0] = 0.0
    for where in cell.stage_slices:
        before[where] = reached[first[where]]
        reached = np.full(cell.num_blocks + 1, np.inf)
        np.minimum.at(reached, end[where], combine(before[where], amount[where]))
    reached = np.full(cell.num_blocks + 1, np.inf)
    reached[-1] = 0.0
    for where in reversed(cell.stage_slices):
        after[where] = reached[end[where]]
        reached = np.full(cell.num_blocks + 1, np.inf)
        np.minimum.at(reached, first[where], combine(after[where], amount[where]))
    return np.asarray(combine(combine(before, amount), after))


def _through_chunks(cell: CellProblem) -> FloatArray:
    """v > 1: (N,) J of every plan through a column is at least this."""
    columns, pp, vpp = cell.columns, cell.layout.pp, cell.layout.vpp
    device = columns.stage % pp

    def on_devices(amount: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(N,) the least of a column's device with it, and the least of the fullest device then."""
        least = np.full(cell.num_stages, np.inf)
        np.minimum.at(least, columns.stage, amount)
        own = least.reshape(vpp, pp).sum(axis=0)
        with_it = own[device] + amount - least[columns.stage]
        return with_it, np.maximum(with_it, own.max())

    load, fullest = on_devices(columns.load_s)
    total = np.full(pp, np.inf)
    np.minimum.at(total, device, load)
    tails = on_devices(columns.tail_s)[1]
    return np.asarray(cell.steady_micro_batches * fullest + (total.sum() + load - total[device]) / vpp + tails)
