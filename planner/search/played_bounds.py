"""Bounds of cells whose plans are played: R of each of their few plans, for many cells in one array call.

The splits are known, so each device's work is, and what passes before it begins. A plan that does not fit by what its first
and its last device hold at the very least is left out. What is not counted (hops, buffers) only makes a plan slower or larger.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cost_models.records import Schedule
from cost_models.schedules import FloatArray, IntArray, Pipeline, devices_of_stages, max_in_flight, splits_backward
from planner.search.floors import vectors_of
from planner.search.played import kinds_with, split_counts

if TYPE_CHECKING:
    from planner.search.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Split:
    """One split of the blocks over virtual stages; blocks are counted by kind, in the order of `Problem.kinds`."""

    blocks: IntArray
    """(S, kinds) of each virtual stage."""
    devices: IntArray
    """(S,) where it lies."""
    of_devices: IntArray
    """(pp, kinds) of each device."""
    before: IntArray
    """(pp, kinds) of the virtual stages 0 .. p-1."""


@lru_cache(maxsize=4096)
def _splits(places: tuple[int, ...], num_kinds: int, schedule: Schedule, pp: int, vpp: int) -> tuple[_Split, ...]:
    """places: the kind of each block."""
    done = np.zeros((len(places) + 1, num_kinds), dtype=np.int64)
    np.cumsum(np.array(places)[:, None] == np.arange(num_kinds), axis=0, out=done[1:])
    devices = devices_of_stages(schedule, pp, vpp)
    found = []
    for counts in split_counts(len(places) - 2, pp * vpp):
        edges = np.concatenate([[0], np.cumsum(counts)])
        blocks = done[edges[1:]] - done[edges[:-1]]
        of_devices = np.zeros((pp, num_kinds), dtype=np.int64)
        np.add.at(of_devices, devices, blocks)
        found.append(_Split(blocks=blocks, devices=devices, of_devices=of_devices, before=done[edges[:pp]]))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plans:
    """One split under one kind of recompute, of some cells with one pipeline."""

    place: IntArray
    """(n,) which of the cells asked for."""
    cell: IntArray
    """(n,) their numbers in the space."""
    split: _Split
    kind: int
    ends_s: FloatArray
    """(n, 2) least end of a step by what the first device waits for, and by what the last one does, tails out."""
    anywhere_s: FloatArray
    """(n,) least end of a step by any device, without its tail."""


def played_bounds(bounds: "Bounds", among: IntArray, below_s: float) -> FloatArray:
    """Of the cells `among`, all of them played: no plan that fits and has R ≤ `below_s` has a smaller R; infinite where there
    is none."""
    cells, num_micro = bounds.cells, bounds.num_micro_batches
    groups: dict[tuple[Schedule, int, int, int], list[int]] = {}
    for place, index in enumerate(among.tolist()):
        schedule, pp, vpp, micro = cells.schedule[index], cells.pp[index], cells.vpp[index], num_micro[index]
        # of more micro-batches an interleaved pipeline has no more in flight: `vectors_of`
        key = (schedule, int(pp), int(vpp), int(min(micro, 4 * pp) if schedule is Schedule.INTERLEAVED else micro))
        groups.setdefault(key, []).append(place)
    worth: list[_Plans] = []
    for (schedule, pp, vpp, micro), members in groups.items():
        pipeline = Pipeline(schedule=schedule, num_devices=pp, num_virtual_per_device=vpp, num_micro_batches=micro)
        worth.extend(_plans(bounds, np.array(members), among[members], pipeline, below_s))
    found = np.full(len(among), np.inf)
    if worth:
        step_s = _with_tails(bounds, worth)
        np.minimum.at(found, np.concatenate([plans.place for plans in worth]), step_s)
    return np.where(found <= below_s, found, np.inf)


def _plans(bounds: "Bounds", place: IntArray, cell: IntArray, pipeline: Pipeline, below_s: float) -> Iterator[_Plans]:
    """Of cells with one pipeline, whatever its micro-batches, the plans that may fit and may be below."""
    problem, names = bounds.problem, bounds.prices.recompute_kinds
    places = tuple(problem.block_places.tolist())
    shape = (pipeline.num_devices, pipeline.num_virtual_per_device)
    allowed = kinds_with(pipeline.schedule, problem.runtime, tuple(names[kind] for kind in bounds.kinds))
    for split in _splits(places, len(problem.kinds), pipeline.schedule, *shape):
        for kind in (kind for kind in bounds.kinds if names[kind] in allowed):
            ends_s, anywhere_s = _ends(bounds, cell, pipeline, split, kind)
            kept = np.flatnonzero(np.maximum(ends_s.max(axis=1), anywhere_s) + bounds.constant_s <= below_s)
            if len(kept):
                kept = kept[_may_fit(bounds, cell[kept], pipeline, split, kind)]
            if len(kept):
                yield _Plans(
                    place=place[kept],
                    cell=cell[kept],
                    split=split,
                    kind=kind,
                    ends_s=ends_s[kept],
                    anywhere_s=anywhere_s[kept],
                )


def may_fit(bounds: "Bounds", index: int, pipeline: Pipeline, number: int, kind: int) -> bool:
    """Whether the plan of a cell with its split of this number, all layers under one kind of recompute, is not known to be too
    large: asked before it is priced."""
    problem = bounds.problem
    shape = (pipeline.num_devices, pipeline.num_virtual_per_device)
    splits = _splits(tuple(problem.block_places.tolist()), len(problem.kinds), pipeline.schedule, *shape)
    return bool(_may_fit(bounds, np.array([index]), pipeline, splits[number], kind)[0])


def _ends(
    bounds: "Bounds", where: IntArray, pipeline: Pipeline, split: _Split, kind: int
) -> tuple[FloatArray, FloatArray]:
    """When the first and the last device are done before their tails, and any device at least; hops out."""
    forward_s = bounds.prices.forward_s[where, :, kind]
    both_s = forward_s + bounds.backward_s[where, :, kind]
    work_s = bounds.num_micro_batches[where, None] * (both_s @ split.of_devices.T)
    done_s = forward_s @ split.before.T + work_s
    first_s = done_s[:, 0]
    if not splits_backward(pipeline.schedule):
        # the last gradient still passes the stages before, and only then the first device begins its tail
        first_s = (both_s @ split.before.T + work_s).max(axis=1)
    return np.column_stack([first_s, done_s[:, -1]]), np.asarray(done_s.max(axis=1))


def _with_tails(bounds: "Bounds", worth: Sequence[_Plans]) -> FloatArray:
    """R of all these plans, one after the other: the tails of all first and last devices in one array call."""
    cells, blocks, times, plan, end, kinds = [], [], [], [], [], []
    offset = 0
    for plans in worth:
        num = len(plans.cell)
        for which, device in enumerate((0, int(plans.split.devices.max()))):
            unlike, count = np.unique(plans.split.blocks[plans.split.devices == device], axis=0, return_counts=True)
            cells.append(np.repeat(plans.cell, len(unlike)))
            plan.append(np.repeat(offset + np.arange(num), len(unlike)))
            blocks.append(np.tile(unlike, (num, 1)))
            times.append(np.tile(count, num))
            end.append(np.full(num * len(unlike), which))
            kinds.append(np.full(num * len(unlike), plans.kind))
        offset += num
    cell, rows, kind = np.concatenate(cells), np.concatenate(blocks), np.concatenate(kinds)
    spent_s = bounds.chunk_tails_s(cell, rows, kind)
    tails_s = np.full((offset, 2), bounds.constant_s)
    np.add.at(tails_s, (np.concatenate(plan), np.concatenate(end)), np.concatenate(times) * spent_s)
    ends_s = (np.concatenate([plans.ends_s for plans in worth]) + tails_s).max(axis=1)
    anywhere_s = np.concatenate([plans.anywhere_s for plans in worth]) + bounds.constant_s
    return np.asarray(np.maximum(ends_s, anywhere_s))


def _may_fit(bounds: "Bounds", where: IntArray, pipeline: Pipeline, split: _Split, kind: int) -> np.ndarray:
    """(n,) whether the first and the last device hold no more than they may: states, and activations in flight."""
    memory, column = bounds.memory, bounds.kinds.index(kind)
    state = np.column_stack(
        [memory.end_state_bytes[where, 0], memory.layer_state_bytes[where], memory.end_state_bytes[where, 1]]
    )
    kept = np.column_stack(
        [
            memory.end_activation_bytes[where, 0],
            memory.layer_activation_bytes[where, :, column],
            memory.end_activation_bytes[where, 1],
        ]
    )
    vectors = vectors_of(pipeline) if pipeline.schedule is Schedule.INTERLEAVED else max_in_flight(pipeline)
    fits = np.ones(len(where), dtype=bool)
    for device in (0, pipeline.num_devices - 1):
        blocks = split.blocks[split.devices == device]
        alive = (kept @ blocks.T) @ np.array(vectors[device]).T
        held = state @ blocks.sum(axis=0) + memory.device_bytes[where] + alive.max(axis=1)
        fits &= held <= memory.limit_bytes
    return fits
