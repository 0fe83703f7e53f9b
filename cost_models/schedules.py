"""Pipeline schedules: what is legal, what each device does in which order, and what it holds meanwhile.

A schedule is a list of operations for each device: F (forward), B (whole backward), or I and W (a backward split into the
gradient of the inputs and that of the weights), each of one virtual stage and one micro-batch. Everything else is read
from these lists: memory in flight (here) and time (`simulation.py`). A further schedule is one row of `_ROWS` and one
function of `operation_lists.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cost_models import operation_lists
from cost_models.operation_lists import (
    Operation,
    OperationArrays,
    OperationKind,
    Operations,
    arrays_of_words,
    micro_batches_per_round,
)
from cost_models.records.layout import SPLIT_BACKWARD, V_PLACED, Layout, Schedule

__all__ = [
    "MOST_OPERATIONS",
    "WITH_FORMULA",
    "FloatArray",
    "IntArray",
    "Operation",
    "OperationKind",
    "Operations",
    "Pipeline",
    "ScheduleError",
    "ScheduleNeed",
    "device_of_stage",
    "devices_of_stages",
    "held",
    "in_flight",
    "max_held",
    "max_in_flight",
    "micro_batches_per_round",
    "operation_arrays",
    "operations",
    "schedule_needs",
    "splits_backward",
    "stages_of_device",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class ScheduleError(ValueError):
    """A pipeline that its schedule cannot run, or operation lists that can never finish."""

    exit_code = 2


# --- what is legal ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleNeed:
    """One law of a schedule on (num_devices, num_virtual_per_device, num_micro_batches)."""

    law: str
    """The law in words."""
    holds: Callable[[int, int, int], bool]
    """The predicate on (num_devices, num_virtual_per_device, num_micro_batches)."""
    legal: Callable[[int, int, int], str]
    """The legal values next to the wrong one, in words; arguments as in `holds`."""


def _rounds_are_equal(num_devices: int, num_micro_batches: int) -> bool:
    return num_micro_batches % max(1, num_micro_batches // num_devices) == 0


def _legal_interleaved_micro_batches(num_devices: int, num_micro_batches: int) -> str:
    below = next(m for m in range(num_micro_batches, 0, -1) if _rounds_are_equal(num_devices, m))
    above = next(
        m for m in range(num_micro_batches, num_micro_batches + num_devices) if _rounds_are_equal(num_devices, m)
    )
    return f"{below} or {above} micro-batches (every multiple of {num_devices} is legal)"


_ONE_STAGE_A_DEVICE = ScheduleNeed(
    law="this schedule has one virtual stage on each device",
    holds=lambda num_devices, num_virtual, num_micro: num_virtual == 1,
    legal=lambda num_devices, num_virtual, num_micro: "1 virtual stage a device, or the schedule interleaved",
)
_MORE_STAGES_A_DEVICE = ScheduleNeed(
    law="an interleaved or looped schedule has at least two virtual stages on each device",
    holds=lambda num_devices, num_virtual, num_micro: num_virtual >= 2,
    legal=lambda num_devices, num_virtual, num_micro: "2 or more virtual stages a device, or the schedule 1f1b",
)
_TWO_STAGES_A_DEVICE = ScheduleNeed(
    law="a V-shaped schedule has exactly two virtual stages on each device",
    holds=lambda num_devices, num_virtual, num_micro: num_virtual == 2,
    legal=lambda num_devices, num_virtual, num_micro: "2 virtual stages a device, or a looped schedule",
)
_FILLED_V = ScheduleNeed(
    law="dualpipev needs at least as many micro-batches as virtual stages",
    holds=lambda num_devices, num_virtual, num_micro: num_micro >= num_devices * num_virtual,
    legal=lambda num_devices, num_virtual, num_micro: f"{num_devices * num_virtual} or more micro-batches, or zbv",
)
_FILLED_PIPELINE = ScheduleNeed(
    law="1f1b needs at least as many micro-batches as pipeline stages",
    holds=lambda num_devices, num_virtual, num_micro: num_micro >= num_devices,
    legal=lambda num_devices, num_virtual, num_micro: f"{num_devices} or more micro-batches, or the schedule gpipe",
)
_EQUAL_ROUNDS = ScheduleNeed(
    law="interleaved needs micro-batches that divide into max(1, num_micro_batches // num_devices) equal rounds",
    holds=lambda num_devices, num_virtual, num_micro: _rounds_are_equal(num_devices, num_micro),
    legal=lambda num_devices, num_virtual, num_micro: _legal_interleaved_micro_batches(num_devices, num_micro),
)


def schedule_needs(schedule: Schedule) -> tuple[ScheduleNeed, ...]:
    """The laws of `schedule`; all must hold. Those on micro-batches are the ones that torch 2.13 enforces."""
    return _ROWS[schedule].needs


def splits_backward(schedule: Schedule) -> bool:
    """Whether `schedule` splits the backward into I and W operations."""
    return schedule in SPLIT_BACKWARD


WITH_FORMULA = frozenset({Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED})
"""Schedules whose objective J is a formula; the others' is their simulated time."""

MOST_OPERATIONS = 2**20
"""Operations of a step that is played one by one: some seconds and 100 MB; 64 stages x 4,096 micro-batches are half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A schedule and the numbers that it unfolds over. Legal by construction; ScheduleError otherwise."""

    schedule: Schedule
    num_devices: int
    """Pipeline degree pp."""
    num_virtual_per_device: int
    """Virtual stages v on each device."""
    num_micro_batches: int

    def __post_init__(self) -> None:
        numbers = (self.num_devices, self.num_virtual_per_device, self.num_micro_batches)
        names = ("num_devices", "num_virtual_per_device", "num_micro_batches")
        for name, number in zip(names, numbers, strict=True):
            if number < 1:
                raise ScheduleError(f"{name}={number} is not a positive number; legal: 1, 2, ...")
        if self.num_operations > MOST_OPERATIONS:
            raise ScheduleError(
                f"num_micro_batches={numbers[2]} on {self.num_stages} virtual stages are {self.num_operations} operations; at most "
                f"{MOST_OPERATIONS} are played; take larger micro-batches, more dp, or a smaller global batch"
            )
        for need in schedule_needs(self.schedule):
            if not need.holds(*numbers):
                raise ScheduleError(
                    f"schedule={self.schedule} with num_devices={numbers[0]}, num_virtual_per_device={numbers[1]}, "
                    f"num_micro_batches={numbers[2]}: {need.law}; legal: {need.legal(*numbers)}"
                )

    @classmethod
    def of(cls, layout: Layout, num_micro_batches: int) -> Self:
        """The pipeline of a layout. On one device with one stage every schedule but gpipe is plain accumulation, as 1f1b is."""
        plain = layout.num_virtual_stages == 1 and layout.schedule is not Schedule.GPIPE
        return cls(
            schedule=Schedule.ONE_F_ONE_B if plain else layout.schedule,
            num_devices=layout.pp,
            num_virtual_per_device=layout.vpp,
            num_micro_batches=num_micro_batches,
        )

    @property
    def num_stages(self) -> int:
        """Number of virtual stages S = v * pp."""
        return self.num_devices * self.num_virtual_per_device

    @property
    def num_operations(self) -> int:
        """Forward and backward of every micro-batch on every virtual stage, at most: where a backward is split it counts twice."""
        return (3 if splits_backward(self.schedule) else 2) * self.num_stages * self.num_micro_batches

    @property
    def stages_of_devices(self) -> tuple[tuple[int, ...], ...]:
        """For each device, its virtual stages, ascending."""
        return tuple(
            stages_of_device(device, self.num_devices, self.num_virtual_per_device, self.schedule)
            for device in range(self.num_devices)
        )

    def by_device(self, stage_values: FloatArray) -> FloatArray:
        """(pp,) sums of (S,) values over the virtual stages of each device."""
        device = devices_of_stages(self.schedule, self.num_devices, self.num_virtual_per_device)
        return np.asarray(np.bincount(device, weights=stage_values, minlength=self.num_devices))


# --- who does what, in which order --------------------------------------------------------------------------------------


def devices_of_stages(schedule: Schedule, num_devices: int, num_virtual_per_device: int) -> IntArray:
    """(S,) the device that runs each virtual stage: stage mod pp, or down and up a V."""
    stage = np.arange(num_devices * num_virtual_per_device, dtype=np.intp)
    looped = stage % num_devices
    down = stage // num_devices % 2 == 0
    return np.where(down, looped, num_devices - 1 - looped) if schedule in V_PLACED else looped


def device_of_stage(stage: int, num_devices: int, schedule: Schedule = Schedule.INTERLEAVED) -> int:
    """The device that runs virtual stage `stage`."""
    return int(devices_of_stages(schedule, num_devices, stage // num_devices + 1)[stage])


def stages_of_device(
    device: int, num_devices: int, num_virtual_per_device: int, schedule: Schedule = Schedule.INTERLEAVED
) -> tuple[int, ...]:
    """The virtual stages of `device`, ascending."""
    devices = devices_of_stages(schedule, num_devices, num_virtual_per_device)
    return tuple(np.flatnonzero(devices == device).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    needs: tuple[ScheduleNeed, ...]
    word: Callable[[int, int, int, int], Sequence[int] | IntArray]
    """The word of a device: (num_devices, num_virtual_per_device, num_micro_batches, device) -> letters."""


_ROWS = {
    Schedule.GPIPE: _Row(needs=(_ONE_STAGE_A_DEVICE,), word=operation_lists.gpipe),
    Schedule.ONE_F_ONE_B: _Row(needs=(_ONE_STAGE_A_DEVICE, _FILLED_PIPELINE), word=operation_lists.one_f_one_b),
    Schedule.INTERLEAVED: _Row(needs=(_MORE_STAGES_A_DEVICE, _EQUAL_ROUNDS), word=operation_lists.interleaved),
    Schedule.LOOPED_BFS: _Row(needs=(_MORE_STAGES_A_DEVICE,), word=operation_lists.looped_bfs),
    Schedule.INTERLEAVED_ZB: _Row(
        needs=(_MORE_STAGES_A_DEVICE, _EQUAL_ROUNDS), word=operation_lists.interleaved_zero_bubble
    ),
    Schedule.ZBV: _Row(needs=(_TWO_STAGES_A_DEVICE,), word=operation_lists.zero_bubble_v),
    Schedule.DUALPIPEV: _Row(needs=(_TWO_STAGES_A_DEVICE, _FILLED_V), word=operation_lists.dual_pipe_v),
    Schedule.V_HALF: _Row(needs=(_TWO_STAGES_A_DEVICE,), word=operation_lists.v_half),
    Schedule.V_MIN: _Row(needs=(_TWO_STAGES_A_DEVICE,), word=operation_lists.v_min),
}


def operation_arrays(pipeline: Pipeline) -> OperationArrays:
    """The operations of each device in order, as arrays."""
    numbers = (pipeline.num_devices, pipeline.num_virtual_per_device, pipeline.num_micro_batches)
    word = _ROWS[pipeline.schedule].word
    return arrays_of_words(
        [word(*numbers, device) for device in range(pipeline.num_devices)],
        pipeline.stages_of_devices,
        descending=pipeline.schedule is Schedule.LOOPED_BFS,
    )


def operations(schedule: Schedule, num_devices: int, num_virtual_per_device: int, num_micro_batches: int) -> Operations:
    """The operations of each device, in the order in which torch 2.13 runs them. ScheduleError where a law is broken."""
    pipeline = Pipeline(
        schedule=schedule,
        num_devices=num_devices,
        num_virtual_per_device=num_virtual_per_device,
        num_micro_batches=num_micro_batches,
    )
    return operation_arrays(pipeline).lists()


# --- memory in flight ---------------------------------------------------------------------------------------------------


def in_flight(device_operations: Iterable[Operation]) -> tuple[tuple[int, ...], ...]:
    """The maximal in-flight vectors of one device's list, in descending order.

    A vector counts, for each virtual stage of the device in ascending order, the micro-batches whose activations are
    alive: from their F to the end of their B, or of their W where the backward is split (W still needs the inputs).
    A vector that another one dominates in every entry is left out: no memory row needs it.
    """
    listed = operation_lists.arrays_of_lists((tuple(device_operations),))
    return _maximal(_held(listed.kind, listed.stage).sum(axis=2), listed.kind)


def held(device_operations: Iterable[Operation]) -> tuple[tuple[int, ...], ...]:
    """The maximal vectors of one device's list that tell two states apart; twice as many entries as `in_flight` has.

    First the micro-batches of each virtual stage between F and the end of B or I, then those between I and the end of W:
    what is kept of a micro-batch changes at I.
    """
    listed = operation_lists.arrays_of_lists((tuple(device_operations),))
    counts = _held(listed.kind, listed.stage)
    return _maximal(np.concatenate([counts[:, :, 0], counts[:, :, 1]], axis=1), listed.kind)


def _held(kind: IntArray, stage: IntArray) -> IntArray:
    """(N, stages, 2) micro-batches before their I or B, and between I and W, after each operation of one device."""
    own = stage[:, None] == np.unique(stage)[None, :]
    starts, gradient = kind == operation_lists.FORWARD, kind == operation_lists.INPUT_GRAD
    ends = gradient | (kind == operation_lists.BACKWARD)
    before = starts.astype(np.intp) - ends
    between = gradient.astype(np.intp) - (kind == operation_lists.WEIGHT_GRAD)
    return np.cumsum(own[:, :, None] * np.stack([before, between], axis=1)[:, None, :], axis=0)


def _maximal(moments: IntArray, kind: IntArray) -> tuple[tuple[int, ...], ...]:
    """The vectors that no other one dominates; only an F or I before anything but an F can leave one behind."""
    following = np.append(kind[1:], operation_lists.BACKWARD)
    grows = (kind == operation_lists.FORWARD) | (kind == operation_lists.INPUT_GRAD)
    peaks = np.unique(moments[grows & (following != operation_lists.FORWARD)], axis=0)
    below = np.asarray((peaks[:, None, :] <= peaks[None, :, :]).all(axis=2))
    np.fill_diagonal(below, False)
    return tuple(sorted(map(tuple, peaks[~below.any(axis=1)].tolist()), reverse=True))


def _of_each_device(pipeline: Pipeline) -> Iterable[tuple[IntArray, IntArray]]:
    arrays = operation_arrays(pipeline)
    for start, length in zip(arrays.first.tolist(), arrays.lengths.tolist(), strict=True):
        yield arrays.kind[start : start + length], arrays.stage[start : start + length]


@lru_cache(maxsize=256)
def max_in_flight(pipeline: Pipeline) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each device, its maximal in-flight vectors (see `in_flight`): one memory row each."""
    return tuple(_maximal(_held(kind, stage).sum(axis=2), kind) for kind, stage in _of_each_device(pipeline))


@lru_cache(maxsize=64)
def max_held(pipeline: Pipeline) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each device, its maximal vectors with both states of a split backward (see `held`)."""
    states = [(_held(kind, stage), kind) for kind, stage in _of_each_device(pipeline)]
    return tuple(_maximal(np.concatenate([counts[:, :, 0], counts[:, :, 1]], axis=1), kind) for counts, kind in states)
