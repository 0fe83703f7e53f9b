"""Which measurements would matter: operations and links that a prediction rests on without having been measured."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cost_models import blocks, compute
from cost_models.collectives import Collective, collective_s, fabric, link_classes
from cost_models.compute import FloatArray, Seconds
from cost_models.problem import Cells, IntArray, Problem
from cost_models.records import BlockKind, Gather, Layout
from cost_models.shares import Share, layer_params, layer_products, layer_share, share

Weighted = Iterator[tuple[str, tuple[FloatArray, ...], FloatArray]]
"""Key format, its columns, and the seconds of a micro-batch that it decides."""


def operations_needed(problem: Problem, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Measurement keys of the operations of these layouts that nobody has measured, the largest share of time first.

    Whole blocks on CPUs, where caches and threads make the sum of parts a poor guide; products and attention elsewhere.
    """
    cells = Cells.of(layouts)
    part = share(problem, cells)
    device = problem.cluster.pools[0].kind.device
    rates = compute.rates(device, problem.workload, problem.runtime, problem.calibration)
    of = _whole_blocks if device.family == "cpu" else _operations
    return _largest_first(of(problem, rates, part), problem.calibration.operations_s)


def _largest_first(weighted: Weighted, known: Iterable[str]) -> tuple[str, ...]:
    seconds: dict[str, float] = defaultdict(float)
    for key, columns, weights in weighted:
        for *sides, weight in zip(*columns, weights, strict=True):
            if min(sides) >= 1:
                seconds[key.format(*(int(side) for side in sides))] += float(weight)
    for name in known:
        seconds.pop(name, None)
    return tuple(sorted(seconds, key=lambda name: (-seconds[name], name)))


def _whole_blocks(problem: Problem, rates: compute.Rates, part: Share) -> Weighted:
    head, embedding = blocks.head_pass(problem, rates, part), blocks.embedding_pass(problem, rates, part)
    end_sides = blocks.end_sides(problem, part)
    for direction in ("forward", "backward"):
        for own, mine, _, count in _unlike_but_for_experts(problem, part):
            dense = blocks.layer_passes(own, rates, mine, BlockKind.DENSE, ("none",))["none"]
            layer: Seconds = getattr(dense, direction)
            key = blocks.layer_key(rates.precision, own.model.gated_mlp, direction)
            yield key, blocks.layer_sides(own, mine), layer.total * count
        yield blocks.head_key(rates.precision, direction), end_sides, getattr(head, direction).total
        yield blocks.embedding_key(rates.precision, direction), end_sides, getattr(embedding, direction).total


def _operations(problem: Problem, rates: compute.Rates, part: Share) -> Weighted:
    model = problem.model
    wide = rates.wide_precision
    hidden = np.full_like(part.tokens, model.hidden)
    head = (part.tokens, part.vocab, hidden)
    kinds = list(_layers(problem, part))
    shapes = [
        (rates.precision, count, False, sides)
        for own, mine, kind, count in kinds
        for products in layer_products(own.model, mine, kind).values()
        for sides in products
    ]
    for precision, count, is_wide, (m, n, k) in [*shapes, (wide, 1, True, head)]:
        for sides in ((m, n, k), (m, k, n), (n, k, m)):
            seconds = compute.matmul_s(rates, *sides, wide=is_wide)
            yield blocks.matmul_key(precision), sides, seconds.total * count
    for own, mine, kind, count in _unlike_but_for_experts(problem, part):
        passes = blocks.layer_pass(own, rates, mine, kind)
        for direction, side in zip(("forward", "backward"), passes, strict=True):
            key = blocks.attention_key(rates.precision, direction)
            yield key, blocks.attention_sides(own, mine), side.attention.total * count


def _layers(problem: Problem, part: Share) -> Iterator[tuple[Problem, Share, BlockKind, int]]:
    """Each kind of layer with attention: the problem and the share of it alone, and the layers of it."""
    for kind, count in problem.model.layers_of_kinds:
        if kind.projector is None:
            yield *layer_share(problem, part, kind), kind.kind, count


def _unlike_but_for_experts(problem: Problem, part: Share) -> list[tuple[Problem, Share, BlockKind, int]]:
    """`_layers`; of a plain model, whose kinds differ in nothing else, all layers as its last."""
    kinds = list(_layers(problem, part))
    return kinds if problem.model.layer_groups else [(*kinds[-1][:3], problem.model.num_layers)]


def links_needed(problem: Problem, layouts: Sequence[Layout]) -> tuple[str, ...]:
    """Keys `collective/ranks/bytes/link class` of the collectives of these layouts without a measured curve, the largest
    share of a micro-batch's time first. Bytes are those of one call.
    """
    cells = Cells.of(layouts)
    part = share(problem, cells)
    links = fabric(problem.cluster, problem.calibration)
    seconds: dict[str, float] = defaultdict(float)
    for kind, num_bytes, (size, stride), count in _calls(problem, cells, part):
        size, stride, num_bytes, count = np.broadcast_arrays(size, stride, num_bytes, count)
        classes = link_classes(links, size, stride, cells.world)
        times = collective_s(links, kind, num_bytes, size, stride, world=cells.world).total * count
        for ranks, length, name, time in zip(size, num_bytes, classes, times, strict=True):
            if time > 0 and f"{kind.value}/{int(ranks)}/{name}" not in links.curves:
                seconds[f"{kind.value}/{int(ranks)}/{int(length)}/{name}"] += float(time)
    return tuple(sorted(seconds, key=lambda name: (-seconds[name], name)))


def _calls(
    problem: Problem, cells: Cells, part: Share
) -> Iterator[tuple[Collective, FloatArray, tuple[IntArray, IntArray], FloatArray]]:
    """(collective, bytes of one call, group, calls in a micro-batch) of every kind of traffic."""
    element, tensor = compute.element_bytes(problem.workload.precision), (cells.tp, cells.stride("tp"))
    gathered = (cells.zero >= 2) * np.where(cells.gather == Gather.USE, 2.0, 1.0)
    for own, mine, kind, count in _unlike_but_for_experts(problem, part):
        hidden = mine.tokens * own.model.hidden * element
        params, layers = np.add(*layer_params(own.model, mine, kind)), np.full_like(hidden, count)
        if problem.runtime.sequence_parallel:
            yield Collective.ALL_GATHER, hidden, tensor, 4 * layers
            yield Collective.REDUCE_SCATTER, hidden, tensor, 4 * layers
        else:
            yield Collective.ALL_REDUCE, hidden, tensor, 4 * layers
        times = np.where(cells.zero == 1, 1.0, gathered)
        yield Collective.ALL_GATHER, params * element, cells.shard_group, layers * times
        yield Collective.REDUCE_SCATTER, params * 4.0, cells.shard_group, layers * (cells.zero >= 1)
        yield Collective.ALL_REDUCE, params * 4.0, cells.replica_group, layers
    ends = np.where(cells.pp > 1, 2, 1)
    text = part.tokens * problem.model.hidden * element / part.sequence_parts
    yield Collective.P2P, text, (ends, cells.stride("pp")), 2.0 * (ends - 1)
