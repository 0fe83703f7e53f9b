"""Routed experts on one rank: router, moving tokens, grouped products, and the all-to-alls. Arrays over cells.

A rank's experts see `routed_rows` rows in all where every expert gets as many; the fullest rank of an expert-parallel group
sees (1 + imbalance) times that, and the others wait for it in the next all-to-all.
"""

from collections.abc import Mapping

import numpy as np

from cost_models import compute
from cost_models.calibrations import value
from cost_models.collectives import Collective, Fabric, collective_s
from cost_models.compute import Rates, Seconds
from cost_models.problem import Cells, Problem
from cost_models.recompute import repeated
from cost_models.shares import FloatArray, Share, activation_bytes_moved
from cost_models.traffic import Traffic

ROUTER_BYTES = 40.0
"""Bytes per score and forward pass in fp32: written, normalised, sorted, counted, masked (five kernels that read and write)."""


def fullest_rows(problem: Problem, part: Share) -> FloatArray:
    """(n,) rows of the fullest rank of an expert-parallel group."""
    moe = problem.model.moe
    assert moe is not None
    imbalance = value(problem.calibration, "experts.imbalance", problem.runtime.name)
    return np.asarray(part.routed_rows * np.where(part.local_experts < moe.num_experts, 1.0 + imbalance, 1.0))


def routed_pass(problem: Problem, rates: Rates, part: Share) -> tuple[Mapping[str, Seconds], Mapping[str, Seconds]]:
    """Forward and backward compute of the routed experts, by part of `recompute.WORK`."""
    model, moe = problem.model, problem.model.moe
    assert moe is not None
    rows, mine = fullest_rows(problem, part), part.tokens / part.sequence_parts
    hidden, width = np.full_like(rows, model.hidden), moe.moe_ffn / part.etp
    up = width * (2 if model.gated_mlp else 1)
    scores = np.full_like(rows, moe.num_experts)

    def grouped(m: FloatArray, n: FloatArray, k: FloatArray, *, over_rows: bool = False) -> Seconds:
        return compute.grouped_matmul_s(rates, m, n, k, part.local_experts, over_rows=over_rows)

    moved = compute.moved_s(rates, rates.permute_bytes, rows * model.hidden * rates.element_bytes / 2)
    function = compute.moved_s(
        rates, rates.memory, activation_bytes_moved(model) * rows * width * rates.element_bytes / 2
    )
    choice = compute.moved_s(rates, rates.memory, ROUTER_BYTES * mine * moe.num_experts)
    forward = {
        "router": compute.matmul_s(rates, mine, scores, hidden, wide=True) + choice,
        "permutation": moved,
        "experts": grouped(rows, up, hidden) + grouped(rows, hidden, width),
        "expert_activation": function + compute.moved_s(rates, rates.cast_bytes, rows * (model.hidden + width)),
    }
    backward = {
        "router": compute.matmul_s(rates, mine, hidden, scores, wide=True)
        + compute.matmul_s(rates, scores, hidden, mine, wide=True)
        + choice,
        "permutation": moved,
        "experts": grouped(rows, hidden, up)
        + grouped(rows, width, hidden)
        + grouped(hidden, up, rows, over_rows=True)
        + grouped(width, hidden, rows, over_rows=True),
        "expert_activation": forward["expert_activation"].scaled(2.0),
    }
    return forward, backward


def exchanges(problem: Problem, cells: Cells, fabric: Fabric, part: Share) -> Seconds:
    """All-to-alls to the experts and back in one pass.

    With etp > 1 the rows of an expert are gathered over its ranks, and the parts of its output are summed up and scattered.
    """
    element = compute.element_bytes(problem.workload.precision)
    gathered = part.routed_rows * problem.model.hidden * element
    world = cells.world
    sent = gathered / part.etp
    both_ways = collective_s(fabric, Collective.ALL_TO_ALL, sent, *cells.expert_group, world=world).scaled(2.0)
    group = (cells.etp, cells.expert_strides[0])
    around = collective_s(fabric, Collective.ALL_GATHER, gathered, *group, world=world) + collective_s(
        fabric, Collective.REDUCE_SCATTER, gathered, *group, world=world
    )
    return both_ways + around


def routed_traffic(problem: Problem, exchanged: Seconds, kind: str) -> Traffic:
    """The `exchanges` of a pass, once in either pass, and those that the recompute `kind` repeats."""
    again = repeated(problem.runtime.name, kind)
    return Traffic(forward=exchanged, backward=exchanged + exchanged.scaled(again.exchanges))
