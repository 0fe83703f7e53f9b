"""What one layout would do: step time with its interval, throughput, memory of each stage, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cost_models.compute import FloatArray, multiplied_as
from cost_models.intervals import pairwise_error, step_interval_s
from cost_models.links import backend_of
from cost_models.memory import memory_lower, memory_upper, moved_states, usable_bytes
from cost_models.offload import offload_s
from cost_models.peaks import DeviceMemory, asked_by, decision_columns, host_bytes_per_node, memory_report
from cost_models.placement import Placement, price_placed
from cost_models.pressure import slowdown_share
from cost_models.records import Binding, Decision, MemoryKind, Parts, Prediction, StagePrediction, Verdict
from cost_models.schedules import Pipeline
from cost_models.simulation import Simulation, simulate
from cost_models.stage import Cells, ColumnPrices, Problem, operations_needed, price_blocks, price_columns
from cost_models.step import StageParts, busiest_device, step_parts
from cost_models.units import GIB

FLOPS_FORMULA = (
    "6 x (active parameters - embedding look-up) + 6 x layers x seq x (query width + value width) a token, "
    "attention not halved for causality, no recompute"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """One decision with its prices and its simulated step: what a timeline draws."""

    pipeline: Pipeline
    """Schedule and sizes."""
    prices: ColumnPrices
    """One column for each virtual stage."""
    parts: StageParts
    """The pieces of the step, parts apart."""
    simulation: Simulation
    """Start and end of each operation."""


def cells_of(problem: Problem, decision: Decision) -> Cells:
    """A decision as a cell: its layout, its rank order, and the algorithm that it decides on for the replicas' gradients."""
    found, choice = Cells.of([decision.layout], decision.ranks.order), decision.collectives.get("dp_replicate")
    if choice is None or choice.binding is not Binding.DECIDED:
        return found
    # gloo has the ring alone: what it does by itself, with its measured curves
    plain = choice.algorithm == "ring" and backend_of(problem.cluster) == "gloo"
    return replace(found, sync="default" if plain else choice.algorithm)


def simulated(problem: Problem, decision: Decision) -> Simulated:
    """Prices a decision and plays its schedule."""
    problem, layout = asked_by(problem, decision), decision.layout
    cells = cells_of(problem, decision)
    columns = decision_columns(decision, problem.recompute_kinds)
    if len(problem.cluster.pools) > 1:
        prices = price_placed(problem, cells, Placement.of(decision), columns)
    else:
        prices = price_columns(price_blocks(problem, cells), 0, columns)
    pipeline = Pipeline.of(layout, decision.num_micro_batches)
    parts = prices.parts(pipeline)
    if problem.offload:
        on_device = 0.0 if "optimizer" in moved_states(problem) else 1.0
        offloaded_s = offload_s(problem, decision, memory_report(problem, decision))
        parts = replace(parts, optimizer_s=on_device * parts.optimizer_s + offloaded_s)
    return Simulated(pipeline=pipeline, prices=prices, parts=parts, simulation=simulate(pipeline, parts.times()))


def predict(problem: Problem, decision: Decision) -> Prediction:
    """The prediction for a decision of this problem. Raises RecordError for what cannot be priced, by name."""
    step = simulated(problem, decision)
    devices = memory_report(problem, decision)
    step_s = step.simulation.step_s
    basis = basis_of(step, decision.num_micro_batches)
    world = decision.layout.world
    pools = pools_of(problem, decision)
    intervals = [step_interval_s(one, step_s, world=world, basis=basis) for one in _distinct(pools)]
    low_s, high_s = min(low for low, _ in intervals), max(high for _, high in intervals)
    full, tightest = _fullest(devices, pools)
    peak_bytes = full.peak_bytes
    usable, upper = usable_bytes(tightest), memory_upper(problem, peak_bytes)
    host, host_usable = _host_bytes(devices, pools)
    verdict = verdict_of(peak_bytes, upper, usable)
    if problem.offload and host_usable is not None and host.get("step 2", 0.0) > host_usable:
        verdict = Verdict.NO
    workload = problem.workload
    flops_per_s = problem.model.model_flops_per_token(workload.seq) * workload.tokens / step_s / world
    peak_flops_per_s = sum(map(peak_flops, pools)) / len(pools)
    return Prediction(
        step_s=step_s,
        step_s_low=low_s,
        step_s_high=high_s * (1 + slowdown_share(tightest, peak_bytes)),
        tokens_per_s_per_gpu=workload.tokens / step_s / world,
        tflops_per_gpu=flops_per_s / 1e12,
        mfu=flops_per_s / peak_flops_per_s,
        mfu_peak_flops_per_s=peak_flops_per_s,
        flops_formula=FLOPS_FORMULA,
        memory_gib_max=peak_bytes / GIB,
        memory_gib_low=memory_lower(problem, peak_bytes) / GIB,
        memory_gib_high=upper / GIB,
        memory_gib_usable=usable / GIB,
        memory_kind=problem.memory_kind.value,
        memory_gib_by_kind=_by_kind(problem, decision),
        host_gib_per_node={phase: size / GIB for phase, size in host.items()},
        host_gib_usable=None if host_usable is None else host_usable / GIB,
        verdict=verdict,
        parts=_parts(step),
        stages=_stages(step, decision, devices),
        pairwise_error=max(map(pairwise_error, _distinct(pools))),
        basis=basis,
        worth_measuring=operations_needed(tightest, [decision.layout])[:5],
    )


def pools_of(problem: Problem, decision: Decision) -> tuple[Problem, ...]:
    """(pp,) the problem of each position of the pipeline: on the pool that it lies in."""
    if len(problem.cluster.pools) == 1:
        return (problem,) * decision.layout.pp
    where = Placement.of(decision)
    found = {pool: problem.on_pool(pool) for pool in where.used}
    return tuple(found[pool] for pool in where.pools)


def fullest_position(problem: Problem, decision: Decision) -> tuple[DeviceMemory, Problem]:
    """The position that is fullest for the size of its GPU, and the problem on its pool, which says what that GPU may hold."""
    return _fullest(memory_report(problem, decision), pools_of(problem, decision))


def _distinct(pools: tuple[Problem, ...]) -> list[Problem]:
    return list({id(one): one for one in pools}.values())


def _fullest(devices: tuple[DeviceMemory, ...], pools: tuple[Problem, ...]) -> tuple[DeviceMemory, Problem]:
    """The position that is fullest for the size of its GPU, and its problem."""
    return max(zip(devices, pools, strict=True), key=lambda one: one[0].peak_bytes / max(usable_bytes(one[1]), 1.0))


def _host_bytes(
    devices: tuple[DeviceMemory, ...], pools: tuple[Problem, ...]
) -> tuple[Mapping[str, float], int | None]:
    """Phase -> bytes of the fullest node's host, and the least memory of a host; None where one is not known."""
    found: dict[str, float] = {}
    for pool in _distinct(pools):
        mine = [device for device, where in zip(devices, pools, strict=True) if where is pool]
        each = mine[0].ranks[1] - mine[0].ranks[0] + 1
        moved = [replace(one, ranks=(n * each, (n + 1) * each - 1)) for n, one in enumerate(mine)]
        for phase, size in host_bytes_per_node(pool, moved).items():
            found[phase] = max(found.get(phase, 0.0), size)
    have = [pool.cluster.pools[0].kind.host_memory_bytes for pool in _distinct(pools)]
    return found, None if None in have else min(size for size in have if size is not None)


def _by_kind(problem: Problem, decision: Decision) -> dict[str, float]:
    """The same peak by each way of counting, GiB: three on accelerators; a CPU has resident memory alone."""
    kinds: tuple[MemoryKind, ...] = (MemoryKind.ALLOCATED, MemoryKind.RESERVED, MemoryKind.NVIDIA_SMI)
    if problem.memory_kind is MemoryKind.RSS:
        kinds = (MemoryKind.RSS,)
    reports = {kind: memory_report(replace(problem, memory_kind=kind), decision) for kind in kinds}
    return {kind.value: max(one.peak_bytes for one in devices) / GIB for kind, devices in reports.items()}


def verdict_of(expected_bytes: float, upper_bytes: float, usable: float) -> Verdict:
    """no: expected > usable; risky: upper > usable; ok otherwise."""
    if expected_bytes > usable:
        return Verdict.NO
    return Verdict.RISKY if upper_bytes > usable else Verdict.OK


def peak_flops(problem: Problem) -> float:
    """Dense data-sheet peak of the device in the workload's precision, or in what its products are widened to, FLOP/s."""
    device = problem.cluster.pools[0].kind.device
    precision = multiplied_as(device, problem.workload.precision.value)
    found = device.peak_flops_per_s.get(precision)
    if found is None:
        known = ", ".join(sorted(device.peak_flops_per_s))
        from planner.errors import InputError

        raise InputError(f"precision {precision} on {device.name}: no peak is known; known there: {known}")
    return found


def _parts(step: Simulated) -> Parts:
    parts = step_parts(step.pipeline, step.parts)
    return Parts(
        compute_s=parts.compute_s,
        exposed_communication_s=parts.exposed_communication_s,
        bubble_s=parts.bubble_s,
        optimizer_s=parts.optimizer_s,
        other_s=parts.other_s,
    )


def seconds_by_basis(step: Simulated, num_micro_batches: int) -> FloatArray:
    """Seconds of the busiest device in a step that rest on measured, calibrated and table values."""
    mine = list(step.pipeline.stages_of_devices[busiest_device(step.simulation)])
    seconds = num_micro_batches * step.prices.basis_s[mine].sum(axis=0) + step.prices.tail_basis_s[mine].sum(axis=0)
    return np.asarray(seconds)


def basis_of(step: Simulated, num_micro_batches: int) -> dict[str, float]:
    """Shares of the busiest device's seconds that rest on measured, calibrated and table values."""
    seconds = seconds_by_basis(step, num_micro_batches)
    shares = seconds / seconds.sum()
    return dict(zip(("measured", "calibrated", "table"), map(float, shares), strict=True))


def _stages(step: Simulated, decision: Decision, devices: tuple[DeviceMemory, ...]) -> tuple[StagePrediction, ...]:
    times = step.parts.times()
    backward_s = times.backward_s
    if times.input_grad_s is not None and times.weight_grad_s is not None:
        backward_s = times.input_grad_s + times.weight_grad_s
    forward_s, backward_s = step.pipeline.by_device(times.forward_s), step.pipeline.by_device(backward_s)
    return tuple(
        StagePrediction(
            device=device.device,
            forward_s=float(forward_s[device.device]),
            backward_s=float(backward_s[device.device]),
            tail_s=float(times.tail_s[device.device]),
            memory_bytes=device.kinds,
            phase_memory_bytes=device.phases,
            peak_phase=device.peak_phase,
            peak_operation=device.peak_operation,
            phase_operations=device.operations,
        )
        for device in devices
    )
