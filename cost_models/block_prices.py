"""The price of each kind of block in every cell at once: kernels, and the communication that nothing hides.

What hides behind what, up to a share that is a coefficient:
  tensor parallelism     behind products, where the runtime overlaps it (overlap.tp) and its group keeps inside a fast
                         domain: what overlaps it writes into the other ranks' memory (Transformer Engine's user buffers
                         need NVLink between all ranks of the group)
  context parallelism    a ring behind the block's attention (overlap.cp), and while the device waits for launches
  expert parallelism     a share (overlap.ep; overlap.ep.scheduled where the runtime plays two micro-batches against each
                         other) behind the block's compute, and all of it while the device waits for launches
  gathers of ZeRO 2, 3   behind the compute of their own block (overlap.fsdp)
The slowest of many ranks sets the pace: all of it is lengthened by (1 + straggler·log2(ranks/8)).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models import blocks, compute, experts, memory, traffic
from cost_models.blocks import Pass
from cost_models.calibrations import find, rate, value, value_or
from cost_models.collectives import Collective, Fabric, collective_s, crosses, fabric
from cost_models.compute import Rates, Seconds
from cost_models.memory import BlockMemory
from cost_models.problem import Cells, IntArray, Problem
from cost_models.records import SPLIT_BACKWARD, BlockKind, ContextExchange, Gather, LayerKind, RecordError
from cost_models.shares import Share, layer_share, share
from cost_models.split_backward import SplitPrices, split_seconds
from cost_models.traffic import Traffic

FloatArray = NDArray[np.float64]

EMBEDDING, LAYERS, HEAD = 0, slice(1, -1), -1
"""Places of the kinds of blocks in the arrays: `Problem.kinds`."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
    distinct_basis_s: FloatArray
    """[row, kind, recompute, 3]: the seconds above, by what they rest on (measured, calibrated, table)."""
    rows: IntArray
    """[cell] its row there: what only a chosen plan is asked for is kept once for all cells alike."""
    activation_bytes: FloatArray
    """Kept per micro-batch in flight."""
    hop_bytes: FloatArray
    """[cell] of the hidden state between two stages, a rank's part of it."""
    slower: FloatArray
    """[cell] factor by which the slowest rank is slower."""
    memory: BlockMemory
    """Bytes by block."""
    fabric: Fabric
    """The cluster, as collectives see it."""
    rates: Rates
    """Looked-up rates of the device."""
    split: SplitPrices | None = None
    """The backward pass in two pieces; None where no cell's schedule splits it."""
    between: Fabric | None = None
    """What the exchange between first and last stage finds where these lie in unlike pools; None = one pool."""

    @cached_property
    def hop_tables_s(self) -> dict[tuple[int, float], FloatArray]:
        """(cell, hidden states of a hop) -> (pp,) seconds from each device to the next, as far as they were asked for."""
        return {}

    @cached_property
    def params(self) -> FloatArray:
        """[cell, kind] parameters on one rank, before data parallelism divides them."""
        return self.memory.params.common + self.memory.params.experts

    @cached_property
    def optimizer_parts(self) -> tuple[IntArray, IntArray]:
        """[cell] parts into which ZeRO divides the update: of all but the routed experts, and of these."""
        divides = self.cells.zero >= 1
        shard, routed = self.cells.shard_group[0], self.cells.expert_shard_group[0]
        return np.where(divides, shard, 1), np.where(divides, routed, 1)

    @cached_property
    def forward_s(self) -> FloatArray:
        """[cell, kind, recompute] forward pass, exposed communication included."""
        return self.forward_compute_s + self.forward_exposed_s

    @cached_property
    def backward_s(self) -> FloatArray:
        """[cell, kind, recompute] backward pass, exposed communication included."""
        return self.backward_compute_s + self.backward_exposed_s

    def __len__(self) -> int:
        return len(self.cells)

    def basis_s(self, cell: int) -> FloatArray:
        """[kind, recompute, 3] the seconds of a cell by what they rest on."""
        return np.asarray(self.distinct_basis_s[self.rows[cell]])

    def spread(self, cells: Cells, row: IntArray, recompute_kinds: tuple[str, ...]) -> "BlockPrices":
        """The prices of `cells` under these kinds of recompute, where cell i costs what `row[i]` costs here."""
        kinds = [self.recompute_kinds.index(kind) for kind in recompute_kinds]

        def of(values: FloatArray) -> FloatArray:
            return np.asarray(values[:, :, kinds][row])

        return replace(
            self,
            cells=cells,
            recompute_kinds=recompute_kinds,
            forward_compute_s=of(self.forward_compute_s),
            backward_compute_s=of(self.backward_compute_s),
            forward_exposed_s=of(self.forward_exposed_s),
            backward_exposed_s=of(self.backward_exposed_s),
            distinct_basis_s=self.distinct_basis_s[:, :, kinds],
            rows=self.rows[row],
            activation_bytes=of(self.activation_bytes),
            hop_bytes=self.hop_bytes[row],
            slower=self.slower[row],
            memory=self.memory.spread(self.problem, cells, row, kinds),
            split=None if self.split is None else self.split.spread(row, kinds),
        )


def _supported(problem: Problem, cells: Cells) -> None:
    if problem.recompute_kinds[:1] != ("none",):
        raise RecordError(f"runtime {problem.runtime.name!r}: its first kind of recompute must be none")
    model = problem.model
    heads = min((one.model.heads for one in model.layer_kinds if one.projector is None), default=model.heads)
    wrong = np.flatnonzero(cells.tp > heads)
    if len(wrong):
        raise RecordError(f"tp={int(cells.tp[wrong[0]])} is more than the {heads} heads of model {model.name!r}")
    num_experts = model.moe.num_experts if model.moe else 1
    wrong = np.flatnonzero(num_experts % cells.ep)
    if len(wrong):
        raise RecordError(
            f"ep={int(cells.ep[wrong[0]])} does not divide the {num_experts} experts of model {model.name!r}"
            if model.moe
            else f"ep={int(cells.ep[wrong[0]])}, but model {model.name!r} has no experts; legal ep: 1"
        )


def price_blocks(problem: Problem, cells: Cells, recompute_kinds: Sequence[str] | None = None) -> BlockPrices:
    """Price every kind of block in every cell, under some kinds of recompute (all), the first always none. RecordError by
    name for what is not known or not built yet.

    Many cells differ in what no block feels (pp, virtual stages, how data parallelism is split): a block is priced once for
    all cells in which it costs the same.
    """
    distinct, row = price_distinct(problem, cells, recompute_kinds)
    return distinct.spread(cells, row, distinct.recompute_kinds)


def price_distinct(
    problem: Problem, cells: Cells, recompute_kinds: Sequence[str] | None = None
) -> tuple[BlockPrices, IntArray]:
    """The different prices among those of `price_blocks`, and (n,) the number of each cell's."""
    _supported(problem, cells)
    first, row = distinct_rows(problem, cells)
    asked = problem if recompute_kinds is None else problem.with_recompute(recompute_kinds)
    return replace(_price_each(asked, cells.take(first)), problem=problem), row


_CODE_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, odd: Knuth, The Art of Computer Programming 3, section 6.4."""


def distinct_rows(problem: Problem, cells: Cells) -> tuple[IntArray, IntArray]:
    """(a cell for each different price, (n,) the number of each cell's price)."""
    sharded = (cells.zero >= 2) & (cells.shard_group[0] > 1)
    each = sharded & ~synchronised_late(problem, cells)
    codes = {gather: code for code, gather in enumerate(Gather, start=1)}
    felt = [
        *(cells.tp, cells.cp, cells.ep, cells.etp, cells.mbs, cells.world),
        *(cells.stride("tp"), cells.stride("cp"), *cells.expert_strides),
        np.array([schedule in SPLIT_BACKWARD for schedule in cells.schedule.tolist()]),
        sharded,
        np.where(each, np.array([codes[gather] for gather in cells.gather.tolist()]), 0),
        *(np.where(each, part, 0) for group in (cells.shard_group, cells.expert_shard_group) for part in group),
    ]
    # one sort of 64-bit codes in place of one for each column; that no two rows share a code is looked at
    code = np.zeros(len(cells), dtype=np.uint64)
    for values in felt:
        code = code * _CODE_FACTOR + values.astype(np.uint64)
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    assert all((values == values[first][row]).all() for values in felt)
    return first, row


def _price_each(problem: Problem, cells: Cells) -> BlockPrices:
    """`price_blocks` of cells that all differ."""
    links = fabric(problem.cluster, problem.calibration)
    device = problem.cluster.pools[0].kind.device
    rates = compute.rates(device, problem.workload, problem.runtime, problem.calibration)
    part = share(problem, cells)
    held = memory.block_memory(problem, cells, part)
    slower = _slower(problem, cells)
    rows = _rows(problem, cells, links, rates, part)
    hidden = _hidden(problem, cells, links)
    gathers = _gathers(problem, cells, links, held)
    forward, backward, forward_open, backward_open = _priced(rows, hidden, gathers)
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
        distinct_basis_s=sum(stacks) * slower[:, None, None, None],
        rows=np.arange(len(cells)),
        activation_bytes=_activation_bytes(held, len(problem.recompute_kinds)),
        hop_bytes=part.tokens * problem.model.hidden / part.hop_parts * rates.element_bytes,
        slower=slower,
        memory=held,
        fabric=links,
        rates=rates,
        split=_split(problem, rates, rows, hidden, gathers, slower) if _splits(cells) else None,
    )


def _slower(problem: Problem, cells: Cells) -> FloatArray:
    per_doubling = value(problem.calibration, "straggler.per_doubling")
    return np.asarray(1.0 + per_doubling * np.log2(np.maximum(cells.world / 8.0, 1.0)))


def _stack(by_kind: list[list[Seconds]]) -> FloatArray:
    """[kind][recompute] Seconds -> [cell, kind, recompute, 3]."""
    return np.stack([np.stack([item.stacked() for item in row], axis=1) for row in by_kind], axis=1)


def _activation_bytes(held: BlockMemory, num_recompute: int) -> FloatArray:
    embedding, head = (
        np.repeat(values[:, None, None], num_recompute, axis=2)
        for values in (held.embedding_activations, held.logits_saved)
    )
    return np.concatenate([embedding, held.activations, head], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """One kind of block under one kind of recompute, before anything is hidden."""

    passed: Pass
    tensor: Traffic
    context: Traffic | None = None
    experts: Traffic | None = None


def _rows(problem: Problem, cells: Cells, links: Fabric, rates: Rates, part: Share) -> list[list[_Row]]:
    """[kind][recompute] every block."""
    calls = traffic.tensor_calls(problem, cells, links, part)
    layers = [_layer_rows(problem, cells, links, rates, part, kind) for kind in problem.layer_kinds]
    num_recompute = len(problem.recompute_kinds)
    embedding_traffic, head_traffic = traffic.end_traffic(cells, links, part, calls)
    embedding = _Row(passed=blocks.embedding_pass(problem, rates, part), tensor=embedding_traffic)
    head = _Row(passed=blocks.head_pass(problem, rates, part), tensor=head_traffic)
    if problem.model.num_mtp_layers:
        head = _looking_ahead(problem, rates, part, head, layers[problem.layer_places[-1]][0])
    return [[embedding] * num_recompute, *layers, [head] * num_recompute]


def _gathers(problem: Problem, cells: Cells, links: Fabric, held: BlockMemory) -> list[Traffic]:
    """[kind] what ZeRO gathers and reduces of a block in every micro-batch."""
    common, routed = held.params.common, held.params.experts
    return [
        _shard_traffic(problem, cells, links, common[:, place], routed[:, place]) for place in range(common.shape[1])
    ]


def _priced(rows: list[list[_Row]], hidden: "_Hidden", gathers: list[Traffic]) -> tuple[list[list[Seconds]], ...]:
    """Forward compute, backward compute, forward exposed, backward exposed, each [kind][recompute]."""
    columns: tuple[list[list[Seconds]], ...] = ([], [], [], [])
    for kind_rows, gather in zip(rows, gathers, strict=True):
        once: dict[int, tuple[Seconds, Seconds]] = {}  # embedding and head are one row under every recompute
        for row in kind_rows:
            if id(row) not in once:
                once[id(row)] = _exposed(row, hidden, gather)
        opened = [once[id(row)] for row in kind_rows]
        columns[0].append([row.passed.forward for row in kind_rows])
        columns[1].append([row.passed.backward for row in kind_rows])
        columns[2].append([pair[0] for pair in opened])
        columns[3].append([pair[1] for pair in opened])
    return columns


def _splits(cells: Cells) -> bool:
    return not SPLIT_BACKWARD.isdisjoint(cells.schedule.tolist())


def _split(
    problem: Problem,
    rates: Rates,
    rows: list[list[_Row]],
    hidden: "_Hidden",
    gathers: list[Traffic],
    slower: FloatArray,
) -> SplitPrices:
    """The backward passes in two pieces; communication has only the first one to hide behind."""
    floors = [None, *(blocks.layer_launch(rates, one.kind, one.projector) for one in problem.layer_kinds), None]
    arrays: tuple[list[list[FloatArray]], ...] = ([], [], [])
    for kind_rows, gather, floor in zip(rows, gathers, floors, strict=True):
        pieces = [split_seconds(problem, row.passed, floor) for row in kind_rows]
        opened = [
            _exposed(
                replace(row, passed=replace(row.passed, backward=row.passed.backward.rescaled_to(early))),
                hidden,
                gather,
            )[1]
            for row, (early, _) in zip(kind_rows, pieces, strict=True)
        ]
        arrays[0].append([early for early, _ in pieces])
        arrays[1].append([seconds.total for seconds in opened])
        arrays[2].append([late for _, late in pieces])
    stacked = [np.moveaxis(np.array(values), -1, 0) * slower[:, None, None] for values in arrays]
    return SplitPrices(input_grad_compute_s=stacked[0], input_grad_exposed_s=stacked[1], weight_grad_s=stacked[2])


def _layer_rows(
    problem: Problem, cells: Cells, links: Fabric, rates: Rates, part: Share, kind: LayerKind
) -> list[_Row]:
    """A kind of layer under each kind of recompute."""
    problem, part = layer_share(problem, part, kind)
    passes = blocks.layer_passes(problem, rates, part, kind.kind, problem.recompute_kinds, kind.projector)
    passes = {name: _with_dispatch(problem, cells, passed) for name, passed in passes.items()}
    if kind.projector is not None:
        return [
            _Row(
                passed=passes[name],
                tensor=traffic.projector_traffic(problem, cells, links, part, kind.projector, name),
            )
            for name in problem.recompute_kinds
        ]
    calls = traffic.tensor_calls(problem, cells, links, part)
    around = traffic.context_traffic(problem, cells, links, part)
    exchanged = experts.exchanges(problem, cells, links, part) if kind.kind is BlockKind.MOE else None
    return [
        _Row(
            passed=passes[name],
            tensor=traffic.tensor_traffic(problem, part, calls, kind.kind, name),
            context=around,
            experts=None if exchanged is None else experts.routed_traffic(problem, exchanged, name),
        )
        for name in problem.recompute_kinds
    ]


def _looking_ahead(problem: Problem, rates: Rates, part: Share, head: _Row, layer: _Row) -> _Row:
    """The head with the layers that predict later tokens: each a layer, the projection that joins its inputs, and a head.

    DeepSeek-V3, section 2.2.
    """
    count = problem.model.num_mtp_layers
    join = blocks.join_pass(problem, rates, part)

    def added(one: Pass | Traffic, *others: Pass | Traffic | None) -> tuple[Seconds, Seconds]:
        forward, backward = one.forward, one.backward
        for other in others:
            if other is not None:
                forward = forward + other.forward.scaled(count)
                backward = backward + other.backward.scaled(count)
        return forward, backward

    passed, tensor = added(head.passed, head.passed, layer.passed, join), added(head.tensor, head.tensor, layer.tensor)
    assert layer.passed.attention_s is not None
    attention = layer.passed.attention_s
    late_s = np.zeros_like(part.tokens)
    for one, times in ((head.passed, 1 + count), (layer.passed, count), (join, count)):
        if one.weight_grad_s is not None:
            late_s = late_s + times * one.weight_grad_s
    return _Row(
        passed=Pass(
            forward=passed[0],
            backward=passed[1],
            weight_grad_s=late_s,
            attention_s=(attention[0] * count, attention[1] * count),
        ),
        tensor=Traffic(forward=tensor[0], backward=tensor[1]),
        context=None if layer.context is None else layer.context.scaled(count),
        experts=None if layer.experts is None else layer.experts.scaled(count),
    )


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
            passed = replace(
                passed, forward=passed.forward + added.scaled(1 / 3), backward=passed.backward + added.scaled(2 / 3)
            )
    return passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Hidden:
    """Shares of communication that can hide."""

    tensor: FloatArray
    """[cell]"""
    context: float
    experts: float
    gathers: float


def _hidden(problem: Problem, cells: Cells, links: Fabric) -> _Hidden:
    runtime, calibration = problem.runtime, problem.calibration
    which = (problem.cluster.pools[0].kind.device.family, runtime.name)
    tensor = np.zeros(len(cells))
    if runtime.overlaps_tp:
        far = crosses(links.domain_size, cells.world, cells.tp, cells.stride("tp"))
        tensor = np.where(far, 0.0, value(calibration, "overlap.tp", *which))
    ring = runtime.context_exchange is ContextExchange.RING
    return _Hidden(
        tensor=tensor,
        context=value(calibration, "overlap.cp", *which) if ring else 0.0,
        experts=value(calibration, "overlap.ep.scheduled" if runtime.overlaps_ep else "overlap.ep", *which),
        gathers=value(calibration, "overlap.fsdp", *which),
    )


def _exposed(row: _Row, hidden: _Hidden, gathers: Traffic) -> tuple[Seconds, Seconds]:
    """What is left of a block's communication, forward and backward."""
    sides = []
    for way, side in enumerate(("forward", "backward")):
        work_s = getattr(row.passed, side).total
        tensor, gather = getattr(row.tensor, side), getattr(gathers, side)
        left = _left(tensor, hidden.tensor, work_s)
        # a device that waits for launches exchanges meanwhile: first the ring, then the experts' tokens
        idle_s = np.zeros_like(work_s) if row.passed.idle_s is None else row.passed.idle_s[way]
        if row.context is not None and row.passed.attention_s is not None:
            seen = _left(getattr(row.context, side), 1.0, row.passed.attention_s[way] * hidden.context)
            ring = _left(seen, 1.0, idle_s)
            left, idle_s = left + ring, idle_s - (seen.total - ring.total)
        if row.experts is not None:
            left = left + _left(_left(getattr(row.experts, side), hidden.experts, work_s), 1.0, idle_s)
        sides.append(left + _left(gather, 1.0, work_s * hidden.gathers))
    return sides[0], sides[1]


def _left(seconds: Seconds, hideable: FloatArray | float, room_s: FloatArray) -> Seconds:
    """`seconds` less what hides: at most the share `hideable` of them, in at most `room_s` of work."""
    total = seconds.total
    if not total.any():
        return seconds
    return seconds.rescaled_to(np.maximum(total - np.minimum(total * hideable, room_s), 0.0))


# --- data parallelism -----------------------------------------------------------------------------------------------------


def synchronised_late(problem: Problem, cells: Cells) -> NDArray[np.bool_]:
    """Cells where shards are gathered once and gradients reduced once a step, whatever ZeRO says."""
    if not problem.runtime.unsharded_gradients_with_pp:
        return np.zeros(len(cells), dtype=bool)
    return cells.pp > 1


def _shard_traffic(problem: Problem, cells: Cells, links: Fabric, common: FloatArray, routed: FloatArray) -> Traffic:
    """Gathers and reduce-scatters of one block in every micro-batch: zero 2 reduces, gather=micro gathers once,
    gather=use twice. Routed experts have a group of their own.
    """
    each = (cells.zero >= 2) & ~synchronised_late(problem, cells)
    twice = each & (cells.gather == Gather.USE)
    once = twice | (each & (cells.gather == Gather.MICRO))
    element = compute.element_bytes(problem.workload.precision)
    forward = backward = Seconds.zeros(common.shape)
    for params, group in ((common, cells.shard_group), (routed, cells.expert_shard_group)):
        if each.any() and params.any():
            gather = collective_s(links, Collective.ALL_GATHER, params * element, *group, world=cells.world)
            reduced = collective_s(
                links, Collective.REDUCE_SCATTER, params * reduce_bytes(problem), *group, world=cells.world
            )
            forward = forward + gather.scaled(once)
            backward = backward + gather.scaled(twice) + reduced.scaled(each)
    return Traffic(forward=forward, backward=backward)


def reduce_bytes(problem: Problem) -> float:
    """Bytes per parameter in which gradients are summed over ranks: those they are held in, unless the runtime differs."""
    precision = problem.workload.precision.value
    own = f"sync.gradient_bytes.{problem.runtime.name}.{precision}"
    return value_or(memory.state_bytes(problem).gradient, problem.calibration, own)
