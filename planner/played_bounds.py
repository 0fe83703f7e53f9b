"""Bounds of cells whose plans are played: R of each of their few plans, for many cells in one array call.

The splits are known, so each device's work is, and what passes before it begins. A plan that does not fit by what its first
and its last device hold at the very least is left out. What is not counted (hops, buffers) only makes a plan slower or larger.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cost_models.records import Schedule
from cost_models.schedules import FloatArray, IntArray, Pipeline, devices_of_stages, max_in_flight, splits_backward
from cost_models.stage import late_s
from planner.floors import vectors_of
from planner.played import kinds_with, split_counts

if TYPE_CHECKING:
    from planner.bounds import Bounds


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


def played_bounds(bounds: "Bounds", among: IntArray) -> FloatArray:
    """Of the cells `among`, all of them played: no plan that fits has a smaller R; infinite where none fits."""
    cells, num_micro = bounds.cells, bounds.num_micro_batches
    found = np.full(len(among), np.inf)
    keys = [
        (cells.schedule[index], int(cells.pp[index]), int(cells.vpp[index]), int(num_micro[index]))
        for index in among.tolist()
    ]
    groups: dict[tuple[Schedule, int, int, int], list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    for (schedule, pp, vpp, micro), members in groups.items():
        pipeline = Pipeline(
            schedule=schedule, num_devices=pp, num_virtual_per_device=vpp, num_micro_batches=micro
        )
        here = np.array(members)
        found[here] = _of_alike(bounds, among[here], pipeline)
    return found


def _of_alike(bounds: "Bounds", where: IntArray, pipeline: Pipeline) -> FloatArray:
    """Of cells with one pipeline."""
    problem, names = bounds.problem, bounds.prices.recompute_kinds
    places = tuple(problem.block_places.tolist())
    shape = (pipeline.num_devices, pipeline.num_virtual_per_device)
    allowed = kinds_with(pipeline.schedule, problem.runtime, tuple(names[kind] for kind in bounds.kinds))
    least = np.full(len(where), np.inf)
    for split in _splits(places, len(problem.kinds), pipeline.schedule, *shape):
        for kind in (kind for kind in bounds.kinds if names[kind] in allowed):
            fits = _may_fit(bounds, where, pipeline, split, kind)
            if fits.any():
                least = np.minimum(least, np.where(fits, _least_s(bounds, where, pipeline, split, kind), np.inf))
    return least


def _least_s(bounds: "Bounds", where: IntArray, pipeline: Pipeline, split: _Split, kind: int) -> FloatArray:
    """R of one plan of each cell, without hops."""
    forward_s = bounds.prices.forward_s[where, :, kind]
    both_s = forward_s + bounds.backward_s[where, :, kind]
    work_s = pipeline.num_micro_batches * (both_s @ split.of_devices.T)
    first_s, last_s = (_tail_s(bounds, where, split, kind, device) for device in (0, pipeline.num_devices - 1))
    ends_s = forward_s @ split.before[-1] + work_s[:, -1] + last_s
    anywhere_s = (forward_s @ split.before.T + work_s).max(axis=1) + bounds.constant_s
    if splits_backward(pipeline.schedule):
        return np.maximum(anywhere_s, ends_s)
    return np.maximum.reduce([anywhere_s, ends_s, (both_s @ split.before.T + work_s).max(axis=1) + first_s])


def _tail_s(bounds: "Bounds", where: IntArray, split: _Split, kind: int, device: int) -> FloatArray:
    """What a device still does after its last operation: update, exchanges left over, the step's constant."""
    prices, params = bounds.prices, bounds.prices.memory.params
    unlike, times = np.unique(split.blocks[split.devices == device], axis=0, return_counts=True)
    cell, rows = np.repeat(where, len(unlike)), np.tile(unlike, (len(where), 1))
    common = (rows * params.common[cell]).sum(axis=1)
    routed = (rows * params.experts[cell]).sum(axis=1)
    left_s, hides = np.zeros(len(cell)), prices.slower[cell] * bounds.hidden_share
    for exchanged_s, seconds in zip(
        late_s(prices, cell, common, routed), (prices.backward_s, prices.forward_s), strict=True
    ):
        room_s = (rows * seconds[cell, :, kind]).sum(axis=1)
        left_s += np.maximum(exchanged_s - hides * room_s, exchanged_s / np.maximum(rows.sum(axis=1), 1))
    parts = prices.optimizer_parts
    spent_s = left_s + bounds.update_s(common / parts[0][cell] + routed / parts[1][cell])
    return np.asarray(bounds.constant_s + spent_s.reshape(len(where), -1) @ times)


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

