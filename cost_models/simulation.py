"""When each operation of a pipeline's step runs: operation lists played in order.

- a device runs its list in order, one operation at a time;
- F of stage s needs F of stage s-1 of the same micro-batch, and one hop;
- B and I of stage s need B or I of stage s+1 of the same micro-batch, and one hop; on the last stage its own F;
- a hop is latency on the edge: it occupies no device, and durations exclude it ("hops out");
- what is left at the end (gradient synchronisation, optimizer, constant) starts after the device's last operation.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cost_models.operation_lists import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    WEIGHT_GRAD,
    OperationArrays,
    OperationKind,
    Operations,
    arrays_of_lists,
)
from cost_models.schedules import FloatArray, IntArray, Pipeline, ScheduleError, operation_arrays


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


def _wire(arrays: OperationArrays) -> _Wiring:
    lengths, first, device = arrays.lengths, arrays.first, arrays.device
    if not len(lengths) or not lengths.all():
        raise ScheduleError(f"operation lists of lengths {lengths.tolist()}: each device needs at least one operation")
    source, hop = _sources(arrays, device)
    by_wave, sizes = _waves(arrays, source, device)
    total = len(source)
    place = np.full(total + 1, total, dtype=np.intp)
    place[by_wave] = np.arange(total, dtype=np.intp)
    previous = np.arange(-1, total - 1, dtype=np.intp)
    previous[first] = total
    ends = np.cumsum(sizes).tolist()
    return _Wiring(
        device=device,
        kind=arrays.kind,
        stage=arrays.stage,
        micro_batch=arrays.micro_batch,
        first=first,
        by_wave=by_wave,
        bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        before=place[previous[by_wave]],
        source=place[source[by_wave]],
        hop=hop[by_wave],
    )


def _sources(arrays: OperationArrays, device: IntArray) -> tuple[IntArray, IntArray]:
    """For each operation, the operation of the neighbouring stage that it waits for (N: none), and the hop between."""
    kind, stage, micro = arrays.kind, arrays.stage, arrays.micro_batch
    total, num_stages, num_micro = len(kind), int(stage.max()) + 1, int(micro.max()) + 1
    ids = np.arange(total, dtype=np.intp)
    place = np.full((3, num_stages, num_micro), total, dtype=np.intp)
    # a whole backward gives what an input gradient gives: they share a table
    for table, members in enumerate((kind == FORWARD, (kind == BACKWARD) | (kind == INPUT_GRAD), kind == WEIGHT_GRAD)):
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
    split = kind[gradient] == INPUT_GRAD
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
    hop = np.where(kind == FORWARD, stage - 1, stage)
    return source, np.where(source == total, num_stages - 1, hop)


def _waves(arrays: OperationArrays, source: IntArray, device: IntArray) -> tuple[IntArray, list[int]]:
    """Plays the lists in lock-step, one operation of each ready device at a time; ScheduleError where nobody is ready.

    (N,) the operations in that order, and how many are played at a time.
    """
    total, first = len(source), arrays.first
    # every list gets one place more, which is never ready: so a device that is done needs no special case
    always, never = total + len(first), total + len(first) + 1
    place = np.append(np.arange(total, dtype=np.intp) + device, always)
    awaited = np.full(total + len(first), never, dtype=np.intp)
    awaited[place[:total]] = place[source]
    done = np.zeros(never + 1, dtype=bool)
    done[always] = True
    pointer = first + np.arange(len(first), dtype=np.intp)
    ends = pointer + arrays.lengths
    waves: list[IntArray] = []
    while True:
        ready = done[awaited[pointer]]
        now = pointer[ready]
        if not len(now):
            break
        done[now] = True
        pointer += ready
        waves.append(now)
    late = np.flatnonzero(pointer < ends)
    if len(late):
        named = ", ".join(f"device {d} waits at {arrays.operation(int(pointer[d]) - d)}" for d in late[:4].tolist())
        raise ScheduleError(f"these operation lists deadlock: {named}")
    back = np.zeros(total + len(first), dtype=np.intp)
    back[place[:total]] = np.arange(total, dtype=np.intp)
    return back[np.concatenate(waves)], [len(wave) for wave in waves]


# a planner simulates many plans of few shapes; a wiring of 65,000 operations holds 4 MB
@lru_cache(maxsize=32)
def _wiring_of(pipeline: Pipeline) -> _Wiring:
    return _wire(operation_arrays(pipeline))


def forget() -> None:
    """Drops the wirings that were kept, so that the next simulation of a pipeline is a first one."""
    _wiring_of.cache_clear()


def simulate(pipeline: Pipeline, times: StageTimes) -> Simulation:
    """Plays one step of `pipeline`; `times` for its S virtual stages and pp devices (ValueError otherwise).

    The wiring of a pipeline is kept: 64 devices x 512 micro-batches take some 4 ms of CPU, and 15 the first time.
    """
    if len(times.forward_s) != pipeline.num_stages:
        raise ValueError(f"times of {len(times.forward_s)} virtual stages for a pipeline of {pipeline.num_stages}")
    return _play(_wiring_of(pipeline), times)


def device_work_s(pipeline: Pipeline, times: StageTimes) -> FloatArray:
    """(pp,) seconds of each device's operations in one step, without its tail: what no order of them can shorten."""
    wiring = _wiring_of(pipeline)
    return np.asarray(np.add.reduceat(_durations(wiring.kind, wiring.stage, times), wiring.first))


def operation_counts(pipeline: Pipeline, device: int) -> IntArray:
    """(kinds, S) how often a device runs each kind of operation on each virtual stage in one step."""
    wiring = _wiring_of(pipeline)
    mine = wiring.device == device
    code = wiring.kind[mine] * pipeline.num_stages + wiring.stage[mine]
    return np.bincount(code, minlength=len(KINDS) * pipeline.num_stages).reshape(len(KINDS), pipeline.num_stages)


def simulate_operations(lists: Operations, times: StageTimes) -> Simulation:
    """Plays any operation lists, stages on whatever devices they name. ScheduleError where they cannot finish."""
    wiring = _wire(arrays_of_lists(lists))
    if len(times.forward_s) != int(wiring.stage.max()) + 1:
        raise ValueError(f"times of {len(times.forward_s)} virtual stages for lists of {int(wiring.stage.max()) + 1}")
    return _play(wiring, times)


def _play(wiring: _Wiring, times: StageTimes) -> Simulation:
    num_devices, total = len(wiring.first), len(wiring.by_wave)
    if len(times.tail_s) != num_devices:
        raise ValueError(f"tail_s has {len(times.tail_s)} entries for {num_devices} devices")
    duration = _durations(wiring.kind, wiring.stage, times)
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
        kinds=KINDS,
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


def _durations(kind: IntArray, stage: IntArray, times: StageTimes) -> FloatArray:
    """(N,) seconds of each operation."""
    by_kind = (times.forward_s, times.backward_s, times.input_grad_s, times.weight_grad_s)
    if any(seconds is None and (kind == code).any() for code, seconds in enumerate(by_kind)):
        raise ValueError("this schedule splits the backward: input_grad_s and weight_grad_s are needed")
    table = np.array([np.zeros_like(times.forward_s) if seconds is None else seconds for seconds in by_kind])
    return np.asarray(table[kind, stage], dtype=np.float64)
