"""Seconds of a training step, from the seconds of its pipeline stages: the objective J, the bound R, the simulation's parts.

    tau    load of the fullest device: max over devices p of  sum of t_s over the virtual stages s of p
    t_s    forward + backward of one micro-batch, with half of each hop at either end: every hop counts once in sum(t)
    kappa  the longest tail of a device
    J      (m - 1/v) tau + sum(t) / v + kappa                       1f1b (v = 1) and interleaved
           (m - 1) (tau_F + tau_B) + sum(t) + kappa                 gpipe: forward and backward each have their own fullest device
           S                                                        loopedbfs, and where the backward is split
    R      max over p of  max( A_p + m W_p + tail_0,  F_p + m W_p + tail_p )
    S      `simulation.simulate`

           where the backward is split: max over p of  F_p + work of p + tail_p,  work = the durations of p's operations

m micro-batches, v virtual stages on each of pp devices; W_p is the load of device p, A_p and F_p are forward + backward
and forward of the *virtual* stages 0 .. p-1, all without hops.

J ranks plans, R bounds them. Why R <= S: device p cannot start before the first micro-batch has passed stages 0 .. p-1, and
works m W_p; with whole backwards its last operation is a backward, whose gradient still has to pass stages p-1 .. 0, and
only then device 0 starts its tail. Where the backward is split, the last operation may be a W, which nobody waits for.

J >= S for gpipe always. For 1f1b it takes `objective_is_upper_bound`; a backward no shorter than the forward is not
enough (forward 0, 1/2, 0 and backward 1, 1/2, 0 on three devices with six micro-batches: J = 7, S = 7.5).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.records.layout import Schedule
from cost_models.schedules import WITH_FORMULA, FloatArray, Pipeline, splits_backward
from cost_models.simulation import Simulation, StageTimes, device_work_s, operation_counts, simulate

# --- the objective J ----------------------------------------------------------------------------------------------------


def _with_half_hops(seconds: FloatArray, hop_s: FloatArray) -> FloatArray:
    """(S,) one direction of each stage, with half of the hops at either end."""
    half = hop_s / 2
    return np.asarray(seconds + np.append(half, 0.0) + np.append(0.0, half))


def stage_load_s(times: StageTimes) -> FloatArray:
    """(S,) t: forward and backward of one micro-batch on each virtual stage, half of each hop at either end."""
    return _with_half_hops(times.forward_s, times.hop_s) + _with_half_hops(times.backward_s, times.hop_s)


def _check_sizes(pipeline: Pipeline, times: StageTimes) -> None:
    if len(times.forward_s) != pipeline.num_stages or len(times.tail_s) != pipeline.num_devices:
        raise ValueError(
            f"times of {len(times.forward_s)} virtual stages and {len(times.tail_s)} devices "
            f"for a pipeline of {pipeline.num_stages} and {pipeline.num_devices}"
        )


def objective_s(pipeline: Pipeline, times: StageTimes) -> float:
    """J in seconds: what the choice of a plan minimises. An estimate of S, except as `objective_is_upper_bound` says."""
    _check_sizes(pipeline, times)
    if pipeline.schedule not in WITH_FORMULA:
        return simulate(pipeline, times).step_s
    num_virtual, num_micro = pipeline.num_virtual_per_device, pipeline.num_micro_batches
    forward_s = _with_half_hops(times.forward_s, times.hop_s)
    backward_s = _with_half_hops(times.backward_s, times.hop_s)
    sum_s = float(forward_s.sum() + backward_s.sum())
    if pipeline.schedule == Schedule.GPIPE:
        fullest_s = float(forward_s.max() + backward_s.max())
    else:
        fullest_s = float(pipeline.by_device(forward_s + backward_s).max())
    return (num_micro - 1 / num_virtual) * fullest_s + sum_s / num_virtual + float(times.tail_s.max())


def objective_is_upper_bound(pipeline: Pipeline, times: StageTimes) -> bool:
    """Whether J >= S is proved: gpipe; schedules whose J is S; and 1f1b with no stage much lighter than those before it.

    For 1f1b: for every device p, the mean t of the stages after p is at least the longest forward (half hops in) of stages
    0 .. p; or the same with the longest backward. It holds wherever B >= F and no stage is lighter than half the heaviest.
    Proof: let the half hops occupy the devices, which only delays. In steady state, by induction over the operation lists,
        end of B(p, k)        <=  k tau + sum(t) - sum of the backwards of stages 0 .. p-1
        end of F(p, k + w_p)  <=  k tau + sum(t) - sum of the backwards of stages 0 .. p,       w_p = pp - 1 - p
    since each operation adds no more than t_p <= tau. What remains is the end of the warm-up, k = 0, where device p has
    seen forwards alone, w_p + 1 of them behind the slowest before it; that gives the condition. Read backwards in time,
    1f1b is 1f1b with F and B exchanged; that gives the other one.
    """
    _check_sizes(pipeline, times)
    if pipeline.schedule == Schedule.GPIPE or pipeline.schedule not in WITH_FORMULA:
        return True
    if pipeline.schedule != Schedule.ONE_F_ONE_B:
        return False
    load_s = stage_load_s(times)
    num_after = np.arange(pipeline.num_devices - 1, -1, -1)
    after_s = np.append(np.cumsum(load_s[::-1])[::-1][1:], 0.0)
    return any(
        bool((num_after * np.maximum.accumulate(_with_half_hops(seconds, times.hop_s)) <= after_s).all())
        for seconds in (times.forward_s, times.backward_s)
    )


# --- the bound R --------------------------------------------------------------------------------------------------------


def lower_bound_s(pipeline: Pipeline, times: StageTimes) -> float:
    """R in seconds: no simulation of this plan is shorter."""
    _check_sizes(pipeline, times)
    num_devices = pipeline.num_devices
    forwards_passed_s = np.append(0.0, np.cumsum(times.forward_s))[:num_devices]
    if splits_backward(pipeline.schedule):
        return float((forwards_passed_s + device_work_s(pipeline, times) + times.tail_s).max())
    stage_s = times.forward_s + times.backward_s
    work_s = pipeline.num_micro_batches * pipeline.by_device(stage_s)
    passed_s = np.append(0.0, np.cumsum(stage_s))[:num_devices]
    ends_s = np.maximum(passed_s + times.tail_s[0], forwards_passed_s + times.tail_s) + work_s
    return float(ends_s.max())


# --- bounds of a cell, before any plan of it is known -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellFloors:
    """What every plan of a cell costs at least, for arrays of cells (any common shape), hops out."""

    total_s: FloatArray
    """T: sum over the blocks of the least forward + backward of one micro-batch."""
    device_load_s: FloatArray
    """Some device has at least this load per micro-batch: max of T / pp and whole blocks that do not divide evenly."""
    block_s: FloatArray
    """t_min: the least forward + backward of any block."""
    block_forward_s: FloatArray
    """The least forward of any block."""
    tail_s: FloatArray
    """Every device has at least this tail."""


def cell_floors(
    num_devices: ArrayLike,
    block_counts: ArrayLike,
    block_forward_s: ArrayLike,
    block_backward_s: ArrayLike,
    tail_s: ArrayLike = 0.0,
) -> CellFloors:
    """Floors from the blocks of the model, by kind.

    num_devices, tail_s: (...,); block_counts: (..., kinds) how many blocks of each kind; block_forward_s and
    block_backward_s: (..., kinds) the least seconds that any plan of the cell can pay for one of them. ValueError where a
    cell has fewer blocks than devices: it has no plan.
    """
    devices = np.asarray(num_devices, dtype=np.int64)
    counts = np.asarray(block_counts, dtype=np.int64)
    forward_s = np.asarray(block_forward_s, dtype=np.float64)
    whole_s = forward_s + np.asarray(block_backward_s, dtype=np.float64)
    if (counts.sum(axis=-1) < devices).any():
        raise ValueError("a cell has fewer blocks than pipeline devices; each virtual stage holds at least one block")
    counts, whole_s, forward_s = np.broadcast_arrays(counts, whole_s, forward_s)
    total_s = (counts * whole_s).sum(axis=-1)
    # of the n blocks that cost x or more, some device holds ceil(n / pp)
    falling = np.argsort(-whole_s, axis=-1)
    num_as_long = np.take_along_axis(counts, falling, axis=-1).cumsum(axis=-1)
    least_s = np.take_along_axis(whole_s, falling, axis=-1)
    whole_blocks_s = (-(-num_as_long // devices[..., None]) * least_s).max(axis=-1)
    exists = counts > 0
    return CellFloors(
        total_s=total_s,
        device_load_s=np.maximum(total_s / devices, whole_blocks_s),
        block_s=np.where(exists, whole_s, np.inf).min(axis=-1),
        block_forward_s=np.where(exists, forward_s, np.inf).min(axis=-1),
        tail_s=np.asarray(tail_s, dtype=np.float64),
    )


def closed_objective_bound_s(
    floors: CellFloors, num_virtual_per_device: ArrayLike, num_micro_batches: ArrayLike
) -> FloatArray:
    """(...,) seconds that J of every plan of a cell reaches, whatever the split and the (known) schedule."""
    num_virtual = np.asarray(num_virtual_per_device, dtype=np.float64)
    num_micro = np.asarray(num_micro_batches, dtype=np.float64)
    return (num_micro - 1 / num_virtual) * floors.device_load_s + floors.total_s / num_virtual + floors.tail_s


def closed_lower_bound_s(
    floors: CellFloors,
    num_devices: ArrayLike,
    num_virtual_per_device: ArrayLike,
    num_micro_batches: ArrayLike,
    whole_backward: ArrayLike = True,
) -> FloatArray:
    """(...,) seconds that R, and so S, of every plan of a cell reaches.

    v = 1 and whole backwards: T / (1 - (1 - 1/m)^pp), where A_p + m W_p is the same for every p. Otherwise the mean over p,
    m T / pp + (pp - 1)/2 x, with x the least block: its forward + backward (each of the virtual stages 0 .. p-1 holds a
    block), or its forward alone where the backward is split, since then only F_p counts. Either way m times the load floor.
    """
    devices = np.asarray(num_devices, dtype=np.float64)
    num_micro = np.asarray(num_micro_batches, dtype=np.float64)
    whole = np.asarray(whole_backward, dtype=bool)
    least_s = np.where(whole, floors.block_s, floors.block_forward_s)
    mean_s = num_micro * floors.total_s / devices + (devices - 1) / 2 * least_s
    with np.errstate(divide="ignore"):  # m = 1: log(0), and the bound is T
        geometric_s = floors.total_s / -np.expm1(devices * np.log1p(-1 / num_micro))
    one_chunk: NDArray[np.bool_] = np.asarray(num_virtual_per_device) == 1
    bound_s = np.where(one_chunk & whole, geometric_s, mean_s)
    return np.maximum(bound_s, num_micro * floors.device_load_s) + floors.tail_s


# --- where the seconds of a simulated step go ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageParts:
    """Seconds of the pieces of a step, computing and exposed communication apart; shapes as in `StageTimes`."""

    forward_compute_s: FloatArray
    """(S,)"""
    forward_exposed_s: FloatArray
    """(S,) communication inside the forward that nothing hides."""
    backward_compute_s: FloatArray
    """(S,) recompute included."""
    backward_exposed_s: FloatArray
    """(S,)"""
    hop_s: FloatArray
    """(S-1,)"""
    sync_s: FloatArray
    """(pp,) gradient synchronisation that is left after the last backward."""
    optimizer_s: FloatArray
    """(pp,)"""
    constant_s: FloatArray
    """(pp,) what each step costs besides."""
    input_grad_compute_s: FloatArray | None = None
    """(S,) gradient of the inputs alone, recompute included; needed where the schedule splits the backward."""
    input_grad_exposed_s: FloatArray | None = None
    """(S,) communication of the backward pass that nothing hides where it is split."""
    weight_grad_s: FloatArray | None = None
    """(S,) gradient of the weights alone: nothing is communicated in it."""

    def times(self, *, hops: bool = True) -> StageTimes:
        """The same step with the parts added up; without hops, as if they took no time."""
        hop_s = np.asarray(self.hop_s, dtype=np.float64)
        input_grad_s = self.input_grad_compute_s
        if input_grad_s is not None and self.input_grad_exposed_s is not None:
            input_grad_s = input_grad_s + self.input_grad_exposed_s
        return StageTimes(
            forward_s=self.forward_compute_s + self.forward_exposed_s,
            backward_s=self.backward_compute_s + self.backward_exposed_s,
            hop_s=hop_s if hops else np.zeros_like(hop_s),
            tail_s=self.sync_s + self.optimizer_s + self.constant_s,
            input_grad_s=input_grad_s,
            weight_grad_s=self.weight_grad_s,
        )

    def work_s(self, pipeline: Pipeline, device: int) -> tuple[float, float]:
        """Seconds that a device computes, and that it waits for communication inside its stages, in all its operations."""
        zero = np.zeros_like(self.forward_compute_s)
        compute = (self.forward_compute_s, self.backward_compute_s, self.input_grad_compute_s, self.weight_grad_s)
        exposed = (self.forward_exposed_s, self.backward_exposed_s, self.input_grad_exposed_s, None)
        counts = operation_counts(pipeline, device)
        totals = [
            float(sum((counts[kind] * (zero if part is None else part)).sum() for kind, part in enumerate(parts)))
            for parts in (compute, exposed)
        ]
        return totals[0], totals[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the seconds of a simulated step go, on the device with the most work. They add up to `step_s`."""

    compute_s: float
    exposed_communication_s: float
    """Inside the stages, gradient synchronisation left over, and what the hops add to the step."""
    bubble_s: float
    """Idle time that would be there with hops that take no time."""
    optimizer_s: float
    other_s: float
    """The step's constant."""

    @property
    def step_s(self) -> float:
        """Their sum."""
        return math.fsum((self.compute_s, self.exposed_communication_s, self.bubble_s, self.optimizer_s, self.other_s))


_ROUNDING = 1e-13
"""Share of a step below which idle time is what adding up in another order leaves over."""


def busiest_device(simulation: Simulation) -> int:
    """The device with the most work, its tail included; of equal ones the one that is done last."""
    work_s = simulation.device_busy_s + simulation.tail_s
    busiest = np.flatnonzero(work_s >= work_s.max() * (1 - _ROUNDING))
    return int(max(busiest, key=lambda device: (simulation.device_end_s[device], device)))


def step_parts(pipeline: Pipeline, parts: StageParts) -> StepParts:
    """Simulates the step and says where its time goes on the device with the most work: the one that binds.

    The hops' share is the simulated step minus that of the same step with free hops: waiting for a neighbour that computes
    is bubble, waiting for bytes is communication. It never exceeds the idle time, since the device's own work and tail fit
    into the shorter step as well.
    """
    times = parts.times()
    _check_sizes(pipeline, times)
    simulation = simulate(pipeline, times)
    device = busiest_device(simulation)
    free_hops_s = simulate(pipeline, parts.times(hops=False)).step_s if times.hop_s.any() else simulation.step_s
    compute_s, exposed_s = parts.work_s(pipeline, device)
    sync_s, optimizer_s, constant_s = (
        float(seconds[device]) for seconds in (parts.sync_s, parts.optimizer_s, parts.constant_s)
    )
    idle_s = simulation.step_s - math.fsum((compute_s, exposed_s, sync_s, optimizer_s, constant_s))
    hops_s = simulation.step_s - free_hops_s
    bubble_s = idle_s - hops_s
    return StepParts(
        compute_s=compute_s,
        exposed_communication_s=math.fsum((exposed_s, sync_s, hops_s)),
        bubble_s=bubble_s if bubble_s > _ROUNDING * simulation.step_s else 0.0,
        optimizer_s=optimizer_s,
        other_s=constant_s,
    )
