"""The price of pipeline stages: arrays in, arrays out. The only place that prices one.

`price_blocks` (block_prices.py) prices each kind of block in every cell at once; `price_columns` adds blocks up to the
stages of one cell. A column's time per micro-batch is the sum of its blocks, so the search may count identical layers; what
a column has besides (hops, gradient synchronisation, optimizer, the step's constant, memory) is added per column.

What hides behind what, beside what hides inside a block:
  hops                   behind other micro-batches, where the runtime posts them early (overlap.p2p); of a schedule without
                         a formula behind what its operation lists leave between a send and its use
  end of the step        gradients behind the last micro-batch's backward pass, gathered weights behind the first one's
                         forward pass (overlap.dp); the last block's part is always seen
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models import compute, memory
from cost_models.block_prices import EMBEDDING, HEAD, LAYERS, BlockPrices, price_blocks, reduce_bytes, synchronised_late
from cost_models.calibrations import rate, value
from cost_models.collectives import Collective, collective_s, hop_s
from cost_models.compute import Seconds
from cost_models.memory import Footprints, memory_upper, usable_bytes
from cost_models.needs import links_needed, operations_needed
from cost_models.peaks import memory_report
from cost_models.problem import RANK_ORDER, Cells, Columns, ColumnShape, Problem, column_shape
from cost_models.records import SPLIT_BACKWARD, Gather
from cost_models.records.layout import V_PLACED
from cost_models.schedules import WITH_FORMULA, Pipeline, devices_of_stages
from cost_models.split_backward import SplitPrices
from cost_models.step import StageParts

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LAYERS",
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Late:
    """What a column exchanges once a step, before anything hides it; (n,) seconds."""

    gradients: Seconds
    """Behind the last micro-batch's backward pass."""
    weights: Seconds
    """Behind the first micro-batch's forward pass."""


def _late_traffic(prices: BlockPrices, cell: int | NDArray[np.int64], params: FloatArray, *, experts: bool) -> Late:
    """Of all but the routed experts, or of these; `cell` is one for all `params`, or one for each."""
    problem, cells, links = prices.problem, prices.cells, prices.fabric
    zero, world = cells.zero[cell], cells.world[cell]
    groups = (
        (cells.expert_shard_group, cells.expert_replica_group) if experts else (cells.shard_group, cells.replica_group)
    )
    (shard, shard_stride), (copies, copy_stride) = ((group[0][cell], group[1][cell]) for group in groups)
    gradient = params * reduce_bytes(problem)
    weight = params * compute.element_bytes(problem.workload.precision)
    summed, how = gradient / np.where(zero >= 1, shard, 1), "default" if experts else cells.sync
    gradients = collective_s(links, Collective.ALL_REDUCE, summed, copies, copy_stride, how, world=world)
    weights = Seconds.zeros(params.shape)
    late = synchronised_late(problem, cells)[cell]
    scattered = (zero == 1) | ((zero >= 2) & late)
    gathered = (zero == 1) | ((zero >= 2) & (late | (cells.gather[cell] == Gather.STEP)))
    if np.any(scattered):
        reduced = collective_s(links, Collective.REDUCE_SCATTER, gradient, shard, shard_stride, world=world)
        gradients = gradients + reduced.scaled(scattered)
    if np.any(gathered):
        weights = collective_s(links, Collective.ALL_GATHER, weight, shard, shard_stride, world=world).scaled(gathered)
    return Late(gradients=gradients, weights=weights)


def hidden_share(problem: Problem) -> float:
    """The share of a device's last passes behind which exchanges at the end of the step hide."""
    family, runtime = problem.cluster.pools[0].kind.device.family, problem.runtime
    return value(problem.calibration, "overlap.dp", family, runtime.name) if runtime.overlaps_dp else 0.0


def late_s(
    prices: BlockPrices, cell: NDArray[np.int64], common: FloatArray, routed: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(n,) seconds, on the slowest rank, in which so many parameters of each cell are exchanged at the end of a step before
    anything hides it: gradients, and weights. It never falls when there are more parameters.
    """
    late = [_late_traffic(prices, cell, common, experts=False)]
    if routed.any():
        late.append(_late_traffic(prices, cell, routed, experts=True))
    slower = prices.slower[cell]
    return (
        np.asarray(sum(one.gradients.total for one in late) * slower),
        np.asarray(sum(one.weights.total for one in late) * slower),
    )


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
    split: SplitPrices | None = None
    """The backward pass in two pieces; None where the schedule does not split it."""

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

    def parts(self, pipeline: Pipeline) -> StageParts:
        """The pieces of a step of which these columns are the virtual stages."""
        split = self.split
        return StageParts(
            forward_compute_s=self.forward_compute_s,
            forward_exposed_s=self.forward_exposed_s,
            backward_compute_s=self.backward_compute_s,
            backward_exposed_s=self.backward_exposed_s,
            hop_s=self.hop_out_s[:-1],
            sync_s=pipeline.by_device(self.sync_s),
            optimizer_s=pipeline.by_device(self.optimizer_s),
            constant_s=pipeline.by_device(self.constant_s),
            input_grad_compute_s=None if split is None else split.input_grad_compute_s,
            input_grad_exposed_s=None if split is None else split.input_grad_exposed_s,
            weight_grad_s=None if split is None else split.weight_grad_s,
        )


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
    common, routed = prices.memory.params.of_columns(cell, shape)
    sync = _sync(prices, cell, shape, common, routed, forward_s=sums[0] + sums[2], backward_s=sums[1] + sums[3])
    divided = prices.optimizer_parts
    updated = common / divided[0][cell] + routed / divided[1][cell]
    update = compute.moved_s(prices.rates, prices.rates.optimizer_bytes, updated)
    family = problem.cluster.pools[0].kind.device.family
    constant = rate(problem.calibration, "step.constant_s", family, problem.runtime.name)
    constants = Seconds.resting_on(constant, np.full(len(columns), constant.value / int(cells.vpp[cell])))
    footprints = memory.column_footprints(problem, cells, prices.memory, cell, shape)
    return ColumnPrices(
        forward_compute_s=sums[0],
        backward_compute_s=sums[1],
        forward_exposed_s=sums[2],
        backward_exposed_s=sums[3],
        hop_in_s=_hops_behind(prices, cell, columns.stage - 1, np.maximum(columns.first - 1, 0)),
        hop_out_s=_hops_behind(prices, cell, columns.stage, columns.last),
        sync_s=sync.total,
        optimizer_s=update.total,
        constant_s=constants.total,
        fixed_bytes=footprints.fixed_bytes,
        activation_bytes=footprints.activation_bytes,
        basis_s=np.stack([_summed(prices.basis_s(cell)[..., rest], shape) for rest in range(3)], axis=1),
        tail_basis_s=(sync + update + constants).stacked(),
        footprints=footprints,
        split=_split_columns(prices, cell, shape),
    )


def _split_columns(prices: BlockPrices, cell: int, shape: ColumnShape) -> SplitPrices | None:
    if prices.split is None or prices.cells.schedule[cell] not in SPLIT_BACKWARD:
        return None
    return SplitPrices(
        input_grad_compute_s=_added(prices.split.input_grad_compute_s, cell, shape),
        input_grad_exposed_s=_added(prices.split.input_grad_exposed_s, cell, shape),
        weight_grad_s=_added(prices.split.weight_grad_s, cell, shape),
    )


def _added(values: FloatArray, cell: int, shape: ColumnShape) -> FloatArray:
    """(n,) sum of [cell, kind, recompute] values over the blocks of each column."""
    return _summed(values[cell], shape)


def _summed(values: FloatArray, shape: ColumnShape) -> FloatArray:
    """(n,) sum of [kind, recompute] values over the blocks of each column."""
    ends = shape.embedding * values[EMBEDDING, 0] + shape.head * values[HEAD, 0]
    return np.asarray(shape.sum_of_layers(values[LAYERS]) + ends)


def _sync(
    prices: BlockPrices,
    cell: int,
    shape: ColumnShape,
    common: FloatArray,
    routed: FloatArray,
    *,
    forward_s: FloatArray,
    backward_s: FloatArray,
) -> Seconds:
    """What is left of the exchanges at the end of the step; the last block's part is always seen."""
    hides = hidden_share(prices.problem)
    late = [_late_traffic(prices, cell, common, experts=False)]
    if routed.any():
        late.append(_late_traffic(prices, cell, routed, experts=True))
    num_blocks = np.maximum(shape.num_layers + shape.embedding + shape.head, 1)
    left = Seconds.zeros(common.shape)
    for exchanged, room_s in (
        ([one.gradients for one in late], backward_s),
        ([one.weights for one in late], forward_s),
    ):
        together = exchanged[0] if len(exchanged) == 1 else exchanged[0] + exchanged[1]
        total = together.total
        left = left + together.rescaled_to(np.maximum(total - hides * room_s, total / num_blocks))
    tied = _tied_exchange(prices, cell, shape)
    return (left + tied).scaled(prices.slower[cell])


def _tied_exchange(prices: BlockPrices, cell: int, shape: ColumnShape) -> Seconds:
    """Embedding and head of one weight in two stages: the two add up their gradients at the end of the step."""
    apart = shape.embedding != shape.head
    copies = prices.memory.params.tied_copy[cell] * reduce_bytes(prices.problem)
    pp, stride = int(prices.cells.pp[cell]), int(prices.cells.stride("pp")[cell])
    together = prices.cells.schedule[cell] in V_PLACED  # a V begins and ends on one device
    if not copies or pp == 1 or together:
        return Seconds.zeros(apart.shape)
    world = None if prices.between else prices.cells.world[cell]
    links = prices.between or prices.fabric
    exchanged = collective_s(links, Collective.ALL_REDUCE, copies, 2, stride * (pp - 1), world=world)
    return exchanged.scaled(apart)


def gathered_hop_s(prices: BlockPrices, cell: int, factor: float = 1.0) -> float:
    """Seconds in which parts of a hidden state that came one to each tensor-parallel rank become whole again."""
    runtime, cells = prices.problem.runtime, prices.cells
    if runtime.sequence_parallel or not runtime.scatters_hops:
        return 0.0
    tp = int(cells.tp[cell])
    whole = prices.hop_bytes[cell] * factor * tp
    return float(
        collective_s(
            prices.fabric, Collective.ALL_GATHER, whole, tp, cells.stride("tp")[cell], world=cells.world[cell]
        ).total
    )


def _hops_behind(prices: BlockPrices, cell: int, stage: NDArray[np.int64], block: NDArray[np.int64]) -> FloatArray:
    """(n,) `_hops` of what the blocks in front of the hops, the last of their stages, hand on."""
    if not prices.problem.model.layer_groups:
        return _hops(prices, cell, stage)
    factors = prices.problem.hop_factors[prices.problem.block_places[block]]
    seconds = np.zeros(len(stage))
    for factor in np.unique(factors).tolist():
        seconds = np.where(factors == factor, _hops(prices, cell, stage, factor), seconds)
    return seconds


def _hop_table_s(prices: BlockPrices, cell: int, factor: float) -> FloatArray:
    """(pp,) seconds from each device of a cell to the next, of `factor` hidden states; worked out once."""
    if (cell, factor) in prices.hop_tables_s:
        return prices.hop_tables_s[cell, factor]
    cells = prices.cells
    pp, num_bytes = int(cells.pp[cell]), prices.hop_bytes[cell] * factor
    stride = int(cells.stride("pp")[cell])
    family = prices.problem.cluster.pools[0].kind.device.family
    hidden = value(prices.problem.calibration, "overlap.p2p", family, prices.problem.runtime.name)
    # the share is of a formula that adds hops to the work; where the lists are played, they say what hides a hop
    seen = 1.0 - hidden if cells.schedule[cell] in WITH_FORMULA else 1.0
    gathered_s = gathered_hop_s(prices, cell, factor)
    prices.hop_tables_s[cell, factor] = seen * (
        hop_s(prices.fabric, num_bytes, stride, pp, int(cells.world[cell])) + gathered_s
    )
    return prices.hop_tables_s[cell, factor]


def _hops(prices: BlockPrices, cell: int, stage: NDArray[np.int64], factor: float = 1.0) -> FloatArray:
    """(n,) seconds of one crossing from virtual stage `stage` to the next; 0 at the ends and inside a device."""
    cells = prices.cells
    pp, num_stages = int(cells.pp[cell]), int(cells.num_virtual_stages[cell])
    if pp == 1:
        return np.zeros(len(stage))
    by_device = _hop_table_s(prices, cell, factor)
    inside = (stage >= 0) & (stage < num_stages - 1)
    if cells.schedule[cell] not in V_PLACED:
        return np.where(inside, by_device[np.mod(stage, pp)], 0.0)
    devices = devices_of_stages(cells.schedule[cell], pp, num_stages // pp)
    here, there = devices[np.clip(stage, 0, num_stages - 1)], devices[np.clip(stage + 1, 0, num_stages - 1)]
    return np.where(inside & (here != there), by_device[np.minimum(here, there)], 0.0)
