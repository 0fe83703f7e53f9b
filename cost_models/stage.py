"""The price of pipeline stages: arrays in, arrays out. The only place that prices one.

`price_blocks` prices each kind of block in every cell at once; `price_columns` adds blocks up to the stages of one cell.
A column's time per micro-batch is the sum of its blocks, so the search may count identical layers; what a column has
besides (hops, gradient synchronisation, optimizer, the step's constant, memory) is added per column.

What hides behind what, up to a share that is a coefficient:
  tensor parallelism     behind products, where the runtime overlaps it (overlap.tp) and its group keeps inside a fast
                         domain: what overlaps it writes into the other ranks' memory (Transformer Engine's user buffers
                         need NVLink between all ranks of the group)
  context parallelism    behind the block's attention and products (overlap.cp)
  gathers of ZeRO 2, 3   behind the compute of their own block (overlap.fsdp)
  hops                   behind other micro-batches, where the runtime posts them early (overlap.p2p)
  end of the step        gradients behind the last micro-batch's backward pass, gathered weights behind the first one's
                         forward pass (overlap.dp); the last block's part is always seen
The slowest of many ranks sets the pace: all of it is lengthened by (1 + straggler·log2(ranks/8)).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models import blocks, compute, memory
from cost_models.blocks import Pass, Share, Traffic
from cost_models.calibrations import find, rate, value, value_or
from cost_models.collectives import Collective, Fabric, collective_s, crosses, fabric, hop_s
from cost_models.compute import Rates, Seconds
from cost_models.memory import BlockMemory, Footprints, memory_report, memory_upper, usable_bytes
from cost_models.needs import links_needed, operations_needed
from cost_models.problem import RANK_ORDER, Cells, Columns, ColumnShape, Problem, column_shape
from cost_models.records import BlockKind, Gather, RecordError

__all__ = [
    "RANK_ORDER",
    "BlockPrices",
    "Cells",
    "ColumnPrices",
    "Columns",
    "Problem",
    "links_needed",
    "memory_report",
    "memory_upper",
    "operations_needed",
    "price_blocks",
    "price_columns",
    "usable_bytes",
]

FloatArray = NDArray[np.float64]

EMBEDDING, LAYER, HEAD = 0, 1, 2
"""Places of the kinds of blocks in the arrays."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPrices:
    """Prices of one block of each kind and one micro-batch, arrays [cell, kind, recompute]; seconds and bytes."""

    problem: Problem
    """What was priced."""
    cells: Cells
    """Where."""
    kinds: tuple[BlockKind, ...]
    """Kinds of blocks."""
    recompute_kinds: tuple[str, ...]
    """Kinds of recompute; embedding and head cost the same under each."""
    forward_compute_s: FloatArray
    """Kernels of the forward pass."""
    backward_compute_s: FloatArray
    """Kernels of the backward pass, recompute included."""
    forward_exposed_s: FloatArray
    """Communication in the forward pass that nothing hides."""
    backward_exposed_s: FloatArray
    """The same in the backward pass."""
    basis_s: FloatArray
    """[cell, kind, recompute, 3]: the seconds above, by what they rest on (measured, calibrated, table)."""
    activation_bytes: FloatArray
    """Kept per micro-batch in flight."""
    params: FloatArray
    """[cell, kind] parameters on one rank, before data parallelism divides them."""
    hop_bytes: FloatArray
    """[cell] of the hidden state between two stages."""
    slower: FloatArray
    """[cell] factor by which the slowest rank is slower."""
    memory: BlockMemory
    """Bytes by block."""
    fabric: Fabric
    """The cluster, as collectives see it."""
    rates: Rates
    """Looked-up rates of the device."""

    @property
    def forward_s(self) -> FloatArray:
        """[cell, kind, recompute] forward pass, exposed communication included."""
        return self.forward_compute_s + self.forward_exposed_s

    @property
    def backward_s(self) -> FloatArray:
        """[cell, kind, recompute] backward pass, exposed communication included."""
        return self.backward_compute_s + self.backward_exposed_s

    def __len__(self) -> int:
        return len(self.cells)


def _supported(problem: Problem, cells: Cells) -> None:
    if problem.recompute_kinds[:1] != ("none",):
        raise RecordError(f"runtime {problem.runtime.name!r}: its first kind of recompute must be none")
    wrong = np.flatnonzero(cells.tp > problem.model.heads)
    if len(wrong):
        raise RecordError(
            f"tp={int(cells.tp[wrong[0]])} is more than the {problem.model.heads} heads of model {problem.model.name!r}"
        )


def price_blocks(problem: Problem, cells: Cells) -> BlockPrices:
    """Price every kind of block in every cell. RecordError by name for what is not known or not built yet."""
    _supported(problem, cells)
    links = fabric(problem.cluster, problem.calibration)
    device = problem.cluster.pools[0].kind.device
    rates = compute.rates(device, problem.workload, problem.runtime, problem.calibration)
    part = blocks.share(problem, cells)
    held = memory.block_memory(problem, cells, part)
    slower = _slower(problem, cells)
    forward, backward, forward_open, backward_open = _priced(problem, cells, links, rates, part, held)
    stacks = [_stack(side) for side in (forward, backward, forward_open, backward_open)]
    totals = [stack.sum(axis=-1) * slower[:, None, None] for stack in stacks]
    return BlockPrices(
        problem=problem,
        cells=cells,
        kinds=problem.kinds,
        recompute_kinds=problem.recompute_kinds,
        forward_compute_s=totals[0],
        backward_compute_s=totals[1],
        forward_exposed_s=totals[2],
        backward_exposed_s=totals[3],
        basis_s=sum(stacks) * slower[:, None, None, None],
        activation_bytes=_activation_bytes(held, len(problem.recompute_kinds)),
        params=np.stack([held.params.embedding, held.params.layer, held.params.head], axis=1),
        hop_bytes=part.tokens * problem.model.hidden / part.sequence_parts * rates.element_bytes,
        slower=slower,
        memory=held,
        fabric=links,
        rates=rates,
    )


def _slower(problem: Problem, cells: Cells) -> FloatArray:
    per_doubling = value(problem.calibration, "straggler.per_doubling")
    return np.asarray(1.0 + per_doubling * np.log2(np.maximum(cells.world / 8.0, 1.0)))


def _stack(by_kind: list[list[Seconds]]) -> FloatArray:
    """[kind][recompute] Seconds -> [cell, kind, recompute, 3]."""
    return np.stack([np.stack([item.stacked() for item in row], axis=1) for row in by_kind], axis=1)


def _activation_bytes(held: BlockMemory, num_recompute: int) -> FloatArray:
    ends = [
        np.repeat(values[:, None], num_recompute, axis=1) for values in (held.embedding_activations, held.logits_saved)
    ]
    return np.stack([ends[0], held.activations, ends[1]], axis=1)


def _priced(
    problem: Problem, cells: Cells, links: Fabric, rates: Rates, part: Share, held: BlockMemory
) -> tuple[list[list[Seconds]], ...]:
    """Forward compute, backward compute, forward exposed, backward exposed, each [kind][recompute]."""
    kinds = problem.recompute_kinds
    dense = blocks.dense_pass(problem, rates, part, kinds)
    calls = blocks.tensor_calls(problem, cells, links, part)
    embedding_traffic, head_traffic = blocks.end_traffic(cells, links, part, calls)
    around = blocks.context_traffic(problem, cells, links, part)
    rows: list[tuple[list[Pass], list[Traffic], Traffic | None, FloatArray]] = [
        (
            [blocks.embedding_pass(problem, rates, part)] * len(kinds),
            [embedding_traffic] * len(kinds),
            None,
            held.params.embedding,
        ),
        (
            [_with_dispatch(problem, cells, dense[kind]) for kind in kinds],
            [blocks.tensor_traffic(problem, calls, kind) for kind in kinds],
            around,
            held.params.layer,
        ),
        (
            [blocks.head_pass(problem, rates, part)] * len(kinds),
            [head_traffic] * len(kinds),
            None,
            held.params.head + held.params.tied_copy,
        ),
    ]
    columns: tuple[list[list[Seconds]], ...] = ([], [], [], [])
    hidden_tp = _hidden_tp(problem, cells, links)
    for passes, traffics, ring, params in rows:
        gathers = _shard_traffic(problem, cells, links, params)
        opened = [
            _exposed(problem, passed, traffic, hidden_tp, ring, gathers)
            for passed, traffic in zip(passes, traffics, strict=True)
        ]
        columns[0].append([passed.forward for passed in passes])
        columns[1].append([passed.backward for passed in passes])
        columns[2].append([pair[0] for pair in opened])
        columns[3].append([pair[1] for pair in opened])
    return columns


def _with_dispatch(problem: Problem, cells: Cells, passed: Pass) -> Pass:
    """A layer with what its parallelism costs the host: DTensor's dispatch, FSDP's hooks; a third of it forward.

    Nothing where nobody measured it: on accelerators it hides behind the kernels, on CPUs it does not.
    """
    family, runtime, calibration = (
        problem.cluster.pools[0].kind.device.family,
        problem.runtime.name,
        problem.calibration,
    )
    for axis, used in (("tp", cells.tp > 1), ("fsdp", (cells.zero >= 2) & (cells.shard_group[0] > 1))):
        if find(calibration, f"dispatch.layer_s.{axis}", family, runtime) is not None:
            cost = rate(calibration, f"dispatch.layer_s.{axis}", family, runtime)
            added = Seconds.resting_on(cost, cost.value * used)
            passed = Pass(forward=passed.forward + added.scaled(1 / 3), backward=passed.backward + added.scaled(2 / 3))
    return passed


def _hidden_tp(problem: Problem, cells: Cells, links: Fabric) -> FloatArray:
    """[cell] share of tensor-parallel collectives that can hide behind products."""
    if not problem.runtime.overlaps_tp:
        return np.zeros(len(cells))
    family = problem.cluster.pools[0].kind.device.family
    share = value(problem.calibration, "overlap.tp", family, problem.runtime.name)
    return np.where(crosses(links.domain_size, links.num_gpus, cells.tp, cells.stride("tp")), 0.0, share)


def _exposed(
    problem: Problem, passed: Pass, traffic: Traffic, hidden_tp: FloatArray, ring: Traffic | None, gathers: Traffic
) -> tuple[Seconds, Seconds]:
    """What is left of a block's communication, forward and backward."""
    runtime, calibration = problem.runtime, problem.calibration
    family = problem.cluster.pools[0].kind.device.family
    hidden_cp = value(calibration, "overlap.cp", family, runtime.name)
    hidden_fsdp = value(calibration, "overlap.fsdp", family, runtime.name)
    sides = []
    for work, tensor, around, gather in (
        (passed.forward, traffic.forward, None if ring is None else ring.forward, gathers.forward),
        (passed.backward, traffic.backward, None if ring is None else ring.backward, gathers.backward),
    ):
        left = _left(tensor, tensor.total * hidden_tp, work.total)
        if around is not None:
            left = left + _left(around, around.total, work.total * hidden_cp)
        sides.append(left + _left(gather, gather.total, work.total * hidden_fsdp))
    return sides[0], sides[1]


def _left(seconds: Seconds, hideable_s: FloatArray, room_s: FloatArray) -> Seconds:
    """`seconds` less what hides: at most `hideable_s` of them, in at most `room_s` of work."""
    total = seconds.total
    return seconds.rescaled_to(np.maximum(total - np.minimum(hideable_s, room_s), 0.0))


# --- data parallelism -----------------------------------------------------------------------------------------------------


def _synchronised_late(problem: Problem, cells: Cells) -> NDArray[np.bool_]:
    """Cells where shards are gathered once and gradients reduced once a step, whatever ZeRO says."""
    return (cells.pp > 1) & problem.runtime.unsharded_gradients_with_pp


def _shard_traffic(problem: Problem, cells: Cells, links: Fabric, params: FloatArray) -> Traffic:
    """Gathers and reduce-scatters of one block in every micro-batch: zero 2 reduces, gather=micro gathers once,
    gather=use twice.
    """
    size, stride = cells.shard_group
    each = (cells.zero >= 2) & ~_synchronised_late(problem, cells)
    weight = params * compute.element_bytes(problem.workload.precision)
    gather = collective_s(links, Collective.ALL_GATHER, weight, size, stride)
    reduced = collective_s(links, Collective.REDUCE_SCATTER, params * reduce_bytes(problem), size, stride)
    twice = each & (cells.gather == Gather.USE)
    once = twice | (each & (cells.gather == Gather.MICRO))
    return Traffic(forward=gather.scaled(once), backward=gather.scaled(twice) + reduced.scaled(each))


def reduce_bytes(problem: Problem) -> float:
    """Bytes per parameter in which gradients are summed over ranks: those they are held in, unless the runtime differs."""
    precision = problem.workload.precision.value
    own = f"sync.gradient_bytes.{problem.runtime.name}.{precision}"
    return value_or(memory.state_bytes(problem).gradient, problem.calibration, own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Late:
    """What a column exchanges once a step, before anything hides it; (n,) seconds."""

    gradients: Seconds
    """Behind the last micro-batch's backward pass."""
    weights: Seconds
    """Behind the first micro-batch's forward pass."""


def _late_traffic(prices: BlockPrices, cell: int, params: FloatArray) -> Late:
    problem, cells, links = prices.problem, prices.cells, prices.fabric
    zero = int(cells.zero[cell])
    (shard, shard_stride), (copies, copy_stride) = (
        (int(group[0][cell]), int(group[1][cell])) for group in (cells.shard_group, cells.replica_group)
    )
    gradient = params * reduce_bytes(problem)
    weight = params * compute.element_bytes(problem.workload.precision)
    divided = shard if zero >= 1 else 1
    gradients = collective_s(links, Collective.ALL_REDUCE, gradient / divided, copies, copy_stride)
    weights = Seconds.zeros(params.shape)
    late = bool(_synchronised_late(problem, cells)[cell])
    if zero == 1 or (zero >= 2 and late):
        gradients = gradients + collective_s(links, Collective.REDUCE_SCATTER, gradient, shard, shard_stride)
    if zero == 1 or (zero >= 2 and (late or cells.gather[cell] is Gather.STEP)):
        weights = collective_s(links, Collective.ALL_GATHER, weight, shard, shard_stride)
    return Late(gradients=gradients, weights=weights)


# --- columns --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnPrices:
    """Prices of the columns of one cell; arrays (n,)."""

    forward_compute_s: FloatArray
    backward_compute_s: FloatArray
    forward_exposed_s: FloatArray
    backward_exposed_s: FloatArray
    hop_in_s: FloatArray
    """One crossing of the hop from the stage before; a micro-batch crosses it forward and backward."""
    hop_out_s: FloatArray
    """One crossing of the hop to the stage behind."""
    sync_s: FloatArray
    """Gradients and weights exchanged at the end of the step, as far as nothing hides them."""
    optimizer_s: FloatArray
    """The update."""
    constant_s: FloatArray
    """The step's constant, spread over the columns of a device."""
    fixed_bytes: FloatArray
    """w_c: bytes whatever is in flight, from the second step on."""
    activation_bytes: FloatArray
    """a_c: bytes per micro-batch in flight."""
    basis_s: FloatArray
    """(n, 3) forward and backward seconds by what they rest on (measured, calibrated, table)."""
    tail_basis_s: FloatArray
    """(n, 3) the tail, likewise."""
    footprints: Footprints
    """Bytes by kind."""

    @property
    def forward_s(self) -> FloatArray:
        """Forward pass of a micro-batch, exposed communication in, hops out."""
        return self.forward_compute_s + self.forward_exposed_s

    @property
    def backward_s(self) -> FloatArray:
        """Backward pass of a micro-batch, exposed communication in, hops out."""
        return self.backward_compute_s + self.backward_exposed_s

    @property
    def t_s(self) -> FloatArray:
        """t_c: both passes, and half of each hop at either end in either direction."""
        return self.forward_s + self.backward_s + self.hop_in_s + self.hop_out_s

    @property
    def tail_s(self) -> FloatArray:
        """tail_c: what the device still does after its last backward pass."""
        return self.sync_s + self.optimizer_s + self.constant_s

    def __len__(self) -> int:
        return len(self.forward_compute_s)


def price_columns(prices: BlockPrices, cell: int, columns: Columns) -> ColumnPrices:
    """Price the columns of one cell."""
    problem, cells = prices.problem, prices.cells
    shape = column_shape(problem.model, columns)
    sums = [
        _added(values, cell, shape)
        for values in (
            prices.forward_compute_s,
            prices.backward_compute_s,
            prices.forward_exposed_s,
            prices.backward_exposed_s,
        )
    ]
    params = prices.memory.params.of_columns(cell, shape)
    sync = _sync(prices, cell, shape, params, forward_s=sums[0] + sums[2], backward_s=sums[1] + sums[3])
    divided = int(cells.shard_group[0][cell]) if cells.zero[cell] >= 1 else 1
    update = compute.moved_s(prices.rates, prices.rates.optimizer_bytes, params / divided)
    family = problem.cluster.pools[0].kind.device.family
    constant = rate(problem.calibration, "step.constant_s", family, problem.runtime.name)
    constants = Seconds.resting_on(constant, np.full(len(columns), constant.value / int(cells.vpp[cell])))
    footprints = memory.column_footprints(problem, cells, prices.memory, cell, shape)
    return ColumnPrices(
        forward_compute_s=sums[0],
        backward_compute_s=sums[1],
        forward_exposed_s=sums[2],
        backward_exposed_s=sums[3],
        hop_in_s=_hops(prices, cell, columns.stage - 1),
        hop_out_s=_hops(prices, cell, columns.stage),
        sync_s=sync.total,
        optimizer_s=update.total,
        constant_s=constants.total,
        fixed_bytes=footprints.fixed_bytes,
        activation_bytes=footprints.activation_bytes,
        basis_s=np.stack([_added(prices.basis_s[..., rest], cell, shape) for rest in range(3)], axis=1),
        tail_basis_s=(sync + update + constants).stacked(),
        footprints=footprints,
    )


def _added(values: FloatArray, cell: int, shape: ColumnShape) -> FloatArray:
    """(n,) sum of [cell, kind, recompute] values over the blocks of each column."""
    ends = shape.embedding * values[cell, EMBEDDING, 0] + shape.head * values[cell, HEAD, 0]
    return np.asarray(shape.layers @ values[cell, LAYER] + ends)


def _sync(
    prices: BlockPrices,
    cell: int,
    shape: ColumnShape,
    params: FloatArray,
    *,
    forward_s: FloatArray,
    backward_s: FloatArray,
) -> Seconds:
    """What is left of the exchanges at the end of the step; the last block's part is always seen."""
    problem = prices.problem
    family, runtime = problem.cluster.pools[0].kind.device.family, problem.runtime
    hides = value(problem.calibration, "overlap.dp", family, runtime.name) if runtime.overlaps_dp else 0.0
    late = _late_traffic(prices, cell, params)
    num_blocks = np.maximum(shape.num_layers + shape.embedding + shape.head, 1)
    left = []
    for traffic, room_s in ((late.gradients, backward_s), (late.weights, forward_s)):
        total = traffic.total
        left.append(traffic.rescaled_to(np.maximum(total - hides * room_s, total / num_blocks)))
    tied = _tied_exchange(prices, cell, shape)
    return (left[0] + left[1] + tied).scaled(prices.slower[cell])


def _tied_exchange(prices: BlockPrices, cell: int, shape: ColumnShape) -> Seconds:
    """Embedding and head of one weight in two stages: the two add up their gradients at the end of the step."""
    apart = shape.embedding != shape.head
    copies = prices.memory.params.tied_copy[cell] * reduce_bytes(prices.problem)
    pp, stride = int(prices.cells.pp[cell]), int(prices.cells.stride("pp")[cell])
    if not copies or pp == 1:
        return Seconds.zeros(apart.shape)
    exchanged = collective_s(prices.fabric, Collective.ALL_REDUCE, copies, 2, stride * (pp - 1))
    return Seconds(
        measured=exchanged.measured * apart, calibrated=exchanged.calibrated * apart, table=exchanged.table * apart
    )


def _hops(prices: BlockPrices, cell: int, stage: NDArray[np.int64]) -> FloatArray:
    """(n,) seconds of one crossing from virtual stage `stage` to the next; 0 at the ends and inside a device."""
    cells = prices.cells
    pp, num_stages = int(cells.pp[cell]), int(cells.num_virtual_stages[cell])
    if pp == 1:
        return np.zeros(len(stage))
    stride = int(cells.stride("pp")[cell])
    num_bytes = prices.hop_bytes[cell]
    family = prices.problem.cluster.pools[0].kind.device.family
    seen = 1.0 - value(prices.problem.calibration, "overlap.p2p", family, prices.problem.runtime.name)
    by_device = seen * hop_s(prices.fabric, num_bytes, stride, pp)
    inside = (stage >= 0) & (stage < num_stages - 1)
    return np.where(inside, by_device[np.mod(stage, pp)], 0.0)
