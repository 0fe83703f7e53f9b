"""Pipeline schedules: what each device does, in which order, and when.

A schedule is a list of operations for each device: F (forward), B (whole backward), or I and W (a backward split into the
gradient of the inputs and that of the weights), each of one virtual stage and one micro-batch. Everything else is read
from these lists: memory in flight (`max_in_flight`) and time (`simulate`). A further schedule is one row of `_ROWS`.

The orders are those that torch.distributed.pipelining 2.13 plays (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B);
the tests compare them with torch itself.

Time, as `simulate` plays it:
  - a device runs its list in order, one operation at a time;
  - F of stage s needs F of stage s-1 of the same micro-batch, and one hop;
  - B and I of stage s need B or I of stage s+1 of the same micro-batch, and one hop; on the last stage its own F;
  - a hop is latency on the edge: it occupies no device, and durations exclude it ("hops out");
  - what is left at the end (gradient synchronisation, optimizer, constant) starts after the device's last operation.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.records.layout import SPLIT_BACKWARD, Schedule

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class OperationKind(StrEnum):
    """What an operation computes, in the letters that torch prints too."""

    FORWARD = "F"
    BACKWARD = "B"
    """Whole backward: gradients of inputs and weights in one go."""
    INPUT_GRAD = "I"
    """Gradient of the inputs alone: all that the previous stage waits for."""
    WEIGHT_GRAD = "W"
    """Gradient of the weights alone: nobody waits for it before the end of the step."""


class Operation(NamedTuple):
    """One entry of a device's list. A tuple, not a dataclass: a large step has 65,000 of them."""

    kind: OperationKind
    stage: int
    """Virtual stage, 0 .. num_devices * num_virtual_per_device - 1."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value} s{self.stage} m{self.micro_batch}"


Operations = tuple[tuple[Operation, ...], ...]
"""For each device of the pipeline, its operations in order."""


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


def micro_batches_per_round(num_devices: int, num_micro_batches: int) -> int:
    """Micro-batches that the interleaved schedule takes through one chunk before it turns to the next chunk.

    torch 2.13 makes max(1, num_micro_batches // num_devices) equal rounds of them.
    """
    return num_micro_batches // max(1, num_micro_batches // num_devices)


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
    law="the interleaved schedule has at least two virtual stages on each device",
    holds=lambda num_devices, num_virtual, num_micro: num_virtual >= 2,
    legal=lambda num_devices, num_virtual, num_micro: "2 or more virtual stages a device, or the schedule 1f1b",
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
    """The laws of `schedule`; all must hold. Those on micro-batches are the ones that torch 2.13 enforces.

    ScheduleError where the operation lists of the schedule are not known.
    """
    if schedule not in _ROWS:
        known = ", ".join(_ROWS)
        raise ScheduleError(f"schedule={schedule}: its operation lists are not known yet; known: {known}")
    return _ROWS[schedule].needs


def splits_backward(schedule: Schedule) -> bool:
    """Whether `schedule` splits the backward into I and W operations."""
    return schedule in SPLIT_BACKWARD


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

    @property
    def num_stages(self) -> int:
        """Number of virtual stages S = v * pp."""
        return self.num_devices * self.num_virtual_per_device

    @property
    def num_operations(self) -> int:
        """Forward and backward of every micro-batch on every virtual stage."""
        return 2 * self.num_stages * self.num_micro_batches


# --- who does what, in which order --------------------------------------------------------------------------------------


def device_of_stage(stage: int, num_devices: int) -> int:
    """The device that runs virtual stage `stage` under looped placement."""
    return stage % num_devices


def stages_of_device(device: int, num_devices: int, num_virtual_per_device: int) -> tuple[int, ...]:
    """The virtual stages of `device` under looped placement, ascending."""
    return tuple(range(device, num_devices * num_virtual_per_device, num_devices))


def _chunk_order(pipeline: Pipeline) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forwards: a round of micro-batches through each chunk, then the next round."""
    num_micro = pipeline.num_micro_batches
    per_round = micro_batches_per_round(pipeline.num_devices, num_micro)
    return [
        (chunk, micro_batch)
        for first in range(0, num_micro, per_round)
        for chunk in range(pipeline.num_virtual_per_device)
        for micro_batch in range(first, first + per_round)
    ]


def _forwards_then_one_each(pipeline: Pipeline, device: int, ahead: int) -> tuple[Operation, ...]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left.

    The backwards run through the chunks from the last to the first, otherwise in the order of the forwards.
    """
    num_devices, last_chunk = pipeline.num_devices, pipeline.num_virtual_per_device - 1
    # one chunk needs no rounds, and 1f1b allows numbers of micro-batches that do not divide into them
    order = _chunk_order(pipeline) if last_chunk else [(0, micro) for micro in range(pipeline.num_micro_batches)]
    forwards = [Operation(OperationKind.FORWARD, chunk * num_devices + device, micro) for chunk, micro in order]
    backwards = [
        Operation(OperationKind.BACKWARD, (last_chunk - chunk) * num_devices + device, micro) for chunk, micro in order
    ]
    in_turn = [operation for pair in zip(forwards[ahead:], backwards, strict=False) for operation in pair]
    return tuple(forwards[:ahead] + in_turn + backwards[len(forwards) - ahead :])


def _gpipe(pipeline: Pipeline, device: int) -> tuple[Operation, ...]:
    return _forwards_then_one_each(pipeline, device, ahead=pipeline.num_micro_batches)


def _one_f_one_b(pipeline: Pipeline, device: int) -> tuple[Operation, ...]:
    return _forwards_then_one_each(pipeline, device, ahead=pipeline.num_devices - 1 - device)


def _interleaved(pipeline: Pipeline, device: int) -> tuple[Operation, ...]:
    num_devices, num_virtual = pipeline.num_devices, pipeline.num_virtual_per_device
    num_micro = pipeline.num_micro_batches
    per_round = micro_batches_per_round(num_devices, num_micro)
    ahead = min((num_virtual - 1) * per_round + 2 * (num_devices - 1 - device), num_virtual * num_micro)
    return _forwards_then_one_each(pipeline, device, ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    needs: tuple[ScheduleNeed, ...]
    operations_of_device: Callable[[Pipeline, int], tuple[Operation, ...]]


_ROWS = {
    Schedule.GPIPE: _Row(needs=(_ONE_STAGE_A_DEVICE,), operations_of_device=_gpipe),
    Schedule.ONE_F_ONE_B: _Row(needs=(_ONE_STAGE_A_DEVICE, _FILLED_PIPELINE), operations_of_device=_one_f_one_b),
    Schedule.INTERLEAVED: _Row(needs=(_MORE_STAGES_A_DEVICE, _EQUAL_ROUNDS), operations_of_device=_interleaved),
}


def _operations_of(pipeline: Pipeline) -> Operations:
    of_device = _ROWS[pipeline.schedule].operations_of_device
    return tuple(of_device(pipeline, device) for device in range(pipeline.num_devices))


def operations(schedule: Schedule, num_devices: int, num_virtual_per_device: int, num_micro_batches: int) -> Operations:
    """The operations of each device, in the order in which torch 2.13 runs them. ScheduleError where a law is broken."""
    return _operations_of(
        Pipeline(
            schedule=schedule,
            num_devices=num_devices,
            num_virtual_per_device=num_virtual_per_device,
            num_micro_batches=num_micro_batches,
        )
    )


# --- memory in flight ---------------------------------------------------------------------------------------------------


def in_flight(device_operations: Iterable[Operation]) -> tuple[tuple[int, ...], ...]:
    """The maximal in-flight vectors of one device's list, in descending order.

    A vector counts, for each virtual stage of the device in ascending order, the micro-batches whose activations are
    alive: from their F to the end of their B, or of their W where the backward is split (W still needs the inputs).
    A vector that another one dominates in every entry is left out: no memory row needs it.
    """
    listed = list(device_operations)
    stages = sorted({operation.stage for operation in listed})
    alive = dict.fromkeys(stages, 0)
    peaks: set[tuple[int, ...]] = set()
    for operation, following in zip(listed, [*listed[1:], None], strict=True):
        if operation.kind is OperationKind.FORWARD:
            alive[operation.stage] += 1
            if following is None or following.kind is not OperationKind.FORWARD:
                peaks.add(tuple(alive.values()))
        elif operation.kind is not OperationKind.INPUT_GRAD:
            alive[operation.stage] -= 1
    return tuple(
        sorted(
            (q for q in peaks if not any(q != r and all(a <= b for a, b in zip(q, r, strict=True)) for r in peaks)),
            reverse=True,
        )
    )


@lru_cache(maxsize=256)
def max_in_flight(pipeline: Pipeline) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each device, its maximal in-flight vectors (see `in_flight`): one memory row each."""
    return tuple(in_flight(listed) for listed in _operations_of(pipeline))


# --- time ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of one step's pieces. S virtual stages on pp devices; all finite and not negative, ValueError otherwise."""

    forward_s: FloatArray
    """(S,) forward of one micro-batch, with exposed communication inside the stage, without hops."""
    backward_s: FloatArray
    """(S,) whole backward of one micro-batch, recompute included, likewise."""
    hop_s: FloatArray
    """(S-1,) one hop from stage s to s+1, or back: each micro-batch crosses it once in either direction. 0 inside a device."""
    tail_s: FloatArray
    """(pp,) what a device still does after its last operation: gradient synchronisation left over, optimizer, constant."""
    input_grad_s: FloatArray | None = None
    """(S,) gradient of the inputs alone; needed where a schedule has I operations."""
    weight_grad_s: FloatArray | None = None
    """(S,) gradient of the weights alone; needed where a schedule has W operations. I + W may cost more than B."""

    def __post_init__(self) -> None:
        num_stages = np.shape(self.forward_s)[0]
        wanted = {"forward_s": num_stages, "backward_s": num_stages, "hop_s": num_stages - 1, "tail_s": None}
        for name in ("input_grad_s", "weight_grad_s"):
            if getattr(self, name) is not None:
                wanted[name] = num_stages
        for name, length in wanted.items():
            values = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, values)
            if values.ndim != 1 or (length is not None and len(values) != length):
                raise ValueError(f"{name} has shape {values.shape}; {num_stages} virtual stages need ({length},)")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"{name}={values.tolist()}: seconds are finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """When each operation of a step runs. N operations, device by device, in the order of the devices' lists."""

    kinds: tuple[OperationKind, ...]
    """What the numbers in `kind` mean."""
    device: IntArray
    """(N,)"""
    kind: IntArray
    """(N,) index into `kinds`."""
    stage: IntArray
    """(N,) virtual stage."""
    micro_batch: IntArray
    """(N,)"""
    start_s: FloatArray
    """(N,) from the start of the step."""
    end_s: FloatArray
    """(N,)"""
    device_busy_s: FloatArray
    """(pp,) sum of the durations of the device's operations, without its tail."""
    device_end_s: FloatArray
    """(pp,) end of the device's last operation, where its tail starts."""
    tail_s: FloatArray
    """(pp,)"""

    @property
    def critical_device(self) -> int:
        """The device that is done last, the first of them in a tie."""
        return int(np.argmax(self.device_end_s + self.tail_s))

    @property
    def step_s(self) -> float:
        """Seconds of the step: when the last device has finished its tail."""
        return float(np.max(self.device_end_s + self.tail_s))


_KINDS = tuple(OperationKind)
_F, _B, _I, _W = range(len(_KINDS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wiring:
    """Operation lists as arrays, with who waits for whom and an order in which everybody has been served.

    A wave holds at most one operation of each device, all of whose predecessors stand in earlier waves, so that a wave
    is a few array calls whatever the number of devices. Node N is the start of the step.
    """

    device: IntArray
    kind: IntArray
    stage: IntArray
    micro_batch: IntArray
    first: IntArray
    """(pp,) index of each device's first operation; its last is before the next one's first."""
    by_wave: IntArray
    """(N,) operation at each place of the order."""
    bounds: tuple[tuple[int, int], ...]
    """Places of each wave."""
    before: IntArray
    """(N,) place of the previous operation of the same device; N for none."""
    source: IntArray
    """(N,) place of the operation on the neighbouring stage whose result is awaited; N for none."""
    hop: IntArray
    """(N,) hop that this result crosses; S-1 for none."""


def _wire(lists: Operations) -> _Wiring:
    code = {kind: index for index, kind in enumerate(_KINDS)}
    flat = [operation for listed in lists for operation in listed]
    lengths = np.array([len(listed) for listed in lists], dtype=np.intp)
    if not len(lists) or not lengths.all():
        raise ScheduleError(f"operation lists of lengths {lengths.tolist()}: each device needs at least one operation")
    first = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.intp)
    device = np.repeat(np.arange(len(lists), dtype=np.intp), lengths)
    kind = np.array([code[operation.kind] for operation in flat], dtype=np.intp)
    stage = np.array([operation.stage for operation in flat], dtype=np.intp)
    micro = np.array([operation.micro_batch for operation in flat], dtype=np.intp)
    source, hop = _sources(lists, kind, stage, micro, device)
    waves = _waves(lists, first, lengths, source, device)
    total = len(flat)
    by_wave = np.concatenate(waves)
    place = np.full(total + 1, total, dtype=np.intp)
    place[by_wave] = np.arange(total, dtype=np.intp)
    previous = np.arange(-1, total - 1, dtype=np.intp)
    previous[first] = total
    ends = np.cumsum([len(wave) for wave in waves]).tolist()
    return _Wiring(
        device=device,
        kind=kind,
        stage=stage,
        micro_batch=micro,
        first=first,
        by_wave=by_wave,
        bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        before=place[previous[by_wave]],
        source=place[source[by_wave]],
        hop=hop[by_wave],
    )


def _sources(
    lists: Operations, kind: IntArray, stage: IntArray, micro: IntArray, device: IntArray
) -> tuple[IntArray, IntArray]:
    """For each operation, the operation of the neighbouring stage that it waits for (N: none), and the hop between."""
    total, num_stages, num_micro = len(kind), int(stage.max()) + 1, int(micro.max()) + 1
    ids = np.arange(total, dtype=np.intp)
    place = np.full((3, num_stages, num_micro), total, dtype=np.intp)
    # a whole backward gives what an input gradient gives: they share a table
    for table, members in enumerate((kind == _F, (kind == _B) | (kind == _I), kind == _W)):
        place[table, stage[members], micro[members]] = ids[members]
        if np.count_nonzero(place[table] < total) != np.count_nonzero(members):
            raise ScheduleError(
                f"an operation of kind {'FBW'[table]} occurs twice for one virtual stage and micro-batch"
            )
    forward, gradient, weight = place
    if (forward == total).any() or (gradient == total).any():
        absent, letter = (forward, "F") if (forward == total).any() else (gradient, "B or I")
        s, k = np.argwhere(absent == total)[0]
        raise ScheduleError(
            f"{letter} of virtual stage {s}, micro-batch {k} is missing: each needs one F and one backward"
        )
    split = kind[gradient] == _I
    if not np.array_equal(split, weight < total):
        raise ScheduleError(
            "each I needs one W of the same virtual stage and micro-batch, and nothing else may have a W"
        )
    in_order = (device[forward] == device[gradient]) & (forward < gradient)
    in_order &= ~split | ((device[gradient] == device[np.minimum(weight, total - 1)]) & (gradient < weight))
    if not in_order.all():
        s, k = np.argwhere(~in_order)[0]
        raise ScheduleError(f"virtual stage {s}, micro-batch {k}: forward, backward and W must follow on one device")
    source = np.full(total, total, dtype=np.intp)
    source[forward[1:]] = forward[:-1]
    source[gradient[:-1]] = gradient[1:]
    hop = np.where(kind == _F, stage - 1, stage)
    return source, np.where(source == total, num_stages - 1, hop)


def _waves(lists: Operations, first: IntArray, lengths: IntArray, source: IntArray, device: IntArray) -> list[IntArray]:
    """Plays the lists in lock-step, one operation of each ready device at a time; ScheduleError where nobody is ready."""
    total = len(source)
    done = np.zeros(total + 1, dtype=bool)
    done[total] = True
    pointer, stop = first.copy(), first + lengths
    waves: list[IntArray] = []
    while len(waiting := pointer[pointer < stop]):
        ready = waiting[done[source[waiting]]]
        if not len(ready):
            named = [lists[device[i]][i - first[device[i]]] for i in waiting[:4]]
            raise ScheduleError(
                "these operation lists deadlock: "
                + ", ".join(f"device {device[i]} waits at {op}" for i, op in zip(waiting, named, strict=False))
            )
        done[ready] = True
        pointer[device[ready]] += 1
        waves.append(ready)
    return waves


# a planner simulates many plans of few shapes; a wiring of 65,000 operations holds 4 MB
@lru_cache(maxsize=32)
def _wiring_of(pipeline: Pipeline) -> _Wiring:
    return _wire(_operations_of(pipeline))


def simulate(pipeline: Pipeline, times: StageTimes) -> Simulation:
    """Plays one step of `pipeline`; `times` for its S virtual stages and pp devices (ValueError otherwise).

    The wiring of a pipeline is kept: 64 devices x 512 micro-batches take some 10 ms, and ten times that the first time.
    """
    if len(times.forward_s) != pipeline.num_stages:
        raise ValueError(f"times of {len(times.forward_s)} virtual stages for a pipeline of {pipeline.num_stages}")
    return _play(_wiring_of(pipeline), times)


def simulate_operations(lists: Operations, times: StageTimes) -> Simulation:
    """Plays any operation lists, stages on whatever devices they name. ScheduleError where they cannot finish."""
    wiring = _wire(lists)
    if len(times.forward_s) != int(wiring.stage.max()) + 1:
        raise ValueError(f"times of {len(times.forward_s)} virtual stages for lists of {int(wiring.stage.max()) + 1}")
    return _play(wiring, times)


def _play(wiring: _Wiring, times: StageTimes) -> Simulation:
    num_devices, total = len(wiring.first), len(wiring.by_wave)
    if len(times.tail_s) != num_devices:
        raise ValueError(f"tail_s has {len(times.tail_s)} entries for {num_devices} devices")
    duration = _durations(wiring, times)
    ordered = duration[wiring.by_wave]
    latency = np.append(times.hop_s, 0.0)[wiring.hop]
    before, source = wiring.before, wiring.source
    end = np.zeros(total + 1)
    for low, high in wiring.bounds:
        arrival = end[source[low:high]] + latency[low:high]
        end[low:high] = np.maximum(end[before[low:high]], arrival) + ordered[low:high]
    end_s = np.empty(total)
    end_s[wiring.by_wave] = end[:total]
    last = np.append(wiring.first[1:], total) - 1
    return Simulation(
        kinds=_KINDS,
        device=wiring.device,
        kind=wiring.kind,
        stage=wiring.stage,
        micro_batch=wiring.micro_batch,
        start_s=end_s - duration,
        end_s=end_s,
        device_busy_s=np.add.reduceat(duration, wiring.first),
        device_end_s=end_s[last],
        tail_s=times.tail_s,
    )


def _durations(wiring: _Wiring, times: StageTimes) -> FloatArray:
    """(N,) seconds of each operation."""
    by_kind = (times.forward_s, times.backward_s, times.input_grad_s, times.weight_grad_s)
    if any(seconds is None and (wiring.kind == kind).any() for kind, seconds in enumerate(by_kind)):
        raise ValueError("this schedule splits the backward: input_grad_s and weight_grad_s are needed")
    table = np.array([np.zeros_like(times.forward_s) if seconds is None else seconds for seconds in by_kind])
    return np.asarray(table[wiring.kind, wiring.stage], dtype=np.float64)
