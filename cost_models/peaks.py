"""What each position of the pipeline holds at its peak: by kind, by phase, with the operation that makes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.calibrations import value
from cost_models.memory import (
    STATE_KINDS,
    BlockMemory,
    Footprints,
    block_memory,
    column_footprints,
    held_bytes_per_param,
    state_bytes,
    usable_bytes,
)
from cost_models.memory_phases import Evaluated, device_phases, fullest_node, host_phases
from cost_models.problem import Cells, Columns, ColumnShape, Problem, column_shape
from cost_models.records import (
    Decision,
    MemoryKind,
    RecordError,
)
from cost_models.schedules import Pipeline, max_held

FloatArray = NDArray[np.float64]

MOST_NAMED = 6
"""Virtual stages that the words of a peak name, each with its micro-batches in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One position of the pipeline at its peak."""

    device: int
    """Position in the pipeline."""
    ranks: tuple[int, int]
    """First and last rank of it, in the plan's rank order."""
    kinds: Mapping[str, float]
    """Kind -> bytes at the peak."""
    phases: Mapping[str, float]
    """Phase -> expected peak bytes (`memory_phases.PHASES`)."""
    operations: Mapping[str, str]
    """Phase -> the operation at its peak."""
    peak_phase: str
    """Phase of the peak."""
    peak_operation: str
    """Operation at the peak."""
    host: Mapping[str, float]
    """Phase -> bytes of each of its ranks in host memory; 0 left out."""

    @property
    def peak_bytes(self) -> float:
        """Expected peak."""
        return sum(self.kinds.values())


def decision_columns(decision: Decision, recompute_kinds: tuple[str, ...]) -> Columns:
    """The stages of a decision as columns, by virtual stage. RecordError on an unknown kind of recompute."""
    counts = []
    for stage in decision.stages:
        unknown = sorted(set(stage.recompute) - set(recompute_kinds))
        if unknown:
            raise RecordError(
                f"recompute {unknown[0]!r} of virtual stage {stage.virtual} is not known for runtime "
                f"{decision.runtime!r}; known: {', '.join(recompute_kinds)}"
            )
        counts.append([stage.recompute.get(kind, 0) for kind in recompute_kinds])
    return Columns(
        stage=np.array([stage.virtual for stage in decision.stages]),
        first=np.array([stage.blocks[0] for stage in decision.stages]),
        last=np.array([stage.blocks[1] for stage in decision.stages]),
        recompute_counts=np.array(counts),
    )


def asked_by(problem: Problem, decision: Decision) -> Problem:
    """The problem with the kinds of recompute that a decision uses: others need no price. RecordError on an unknown kind."""
    decision_columns(decision, problem.recompute_kinds)
    return problem.with_recompute({kind for stage in decision.stages for kind in stage.recompute})


def memory_report(problem: Problem, decision: Decision) -> tuple[DeviceMemory, ...]:
    """Expected bytes of each pipeline position at its peak: by kind, by phase, with the operation that makes the peak."""
    problem = asked_by(problem, decision)
    if len(problem.cluster.pools) > 1:
        return _on_pools(problem, decision)
    layout = decision.layout
    cells = Cells.of([layout], decision.ranks.order)
    columns = decision_columns(decision, problem.recompute_kinds)
    shape = column_shape(problem.model, columns)
    blocks = block_memory(problem, cells)
    footprints = column_footprints(problem, cells, blocks, 0, shape)
    vectors = max_held(Pipeline.of(layout, decision.num_micro_batches))
    host = _host_bytes(problem, cells, blocks, shape)
    layers = shape.largest_of_layers(np.broadcast_to(blocks.evaluated[0, :, None], blocks.activations[0].shape))
    logits = shape.head * (blocks.logits_saved[0] + blocks.split_softmax[0])
    found = []
    for device in range(layout.pp):
        mine = [stage.virtual for stage in decision.stages if stage.device == device]
        kinds, training = _at_peak(mine, footprints, vectors[device], columns, shape)
        kinds["context"] -= _given_back(problem, kinds)
        evaluated = Evaluated(layer_bytes=float(layers[mine].max()), logits_bytes=float(logits[mine].max()))
        phases = device_phases(problem.runtime, state_bytes(problem), kinds, evaluated, training)
        offloaded = {kind: float(values[mine].sum()) for kind, values in host.items()}
        peak = max(phases, key=lambda phase: (phases[phase].device_bytes, phase == "step 2"))
        found.append(
            DeviceMemory(
                device=device,
                ranks=(device * layout.world // layout.pp, (device + 1) * layout.world // layout.pp - 1),
                kinds=kinds,
                phases={name: phase.device_bytes for name, phase in phases.items()},
                operations={name: phase.operation for name, phase in phases.items()},
                peak_phase=peak,
                peak_operation=phases[peak].operation,
                host=host_phases(problem.runtime, kinds, offloaded),
            )
        )
    return tuple(found)


def _on_pools(problem: Problem, decision: Decision) -> tuple[DeviceMemory, ...]:
    """Each position as on its own pool."""
    pools = {stage.device: stage.pool for stage in decision.stages}
    if None in pools.values():
        raise RecordError("the decision does not say in which pool of the cluster each stage lies (stages[].pool)")
    reports = {pool: memory_report(problem.on_pool(pool), decision) for pool in {*pools.values()} if pool is not None}
    return tuple(reports[pool][device] for device, pool in sorted(pools.items()) if pool is not None)


def host_bytes_per_node(problem: Problem, devices: Sequence[DeviceMemory]) -> Mapping[str, float]:
    """Phase -> bytes in the host of the fullest node: what is offloaded, and what is copied there to load or to save."""
    whole = state_bytes(problem).weight * problem.model.num_params if problem.runtime.gathers_to_save else 0.0
    per_rank = [(one.ranks, one.host, {"save": whole} if one.device == 0 else {}) for one in devices]
    return fullest_node(per_rank, problem.cluster.pools[0].kind.gpus_per_node)


def _host_bytes(problem: Problem, cells: Cells, blocks: BlockMemory, shape: ColumnShape) -> Mapping[str, FloatArray]:
    """Kind of state -> (n,) bytes of each column that lie in the host."""
    params, routed = blocks.params.of_columns(0, shape)
    common = held_bytes_per_param(problem, cells, in_host=True)
    experts = held_bytes_per_param(problem, cells, experts=True, in_host=True)
    return {kind: common[kind][0] * params + experts[kind][0] * routed for kind in STATE_KINDS}


def _given_back(problem: Problem, kinds: Mapping[str, float]) -> float:
    """Near the limit the allocator gives back what it does not use before it fails: slack shrinks, and never refuses a run."""
    if problem.memory_kind not in (MemoryKind.RESERVED, MemoryKind.NVIDIA_SMI):
        return 0.0
    slack = value(problem.calibration, "memory.slack_bytes", problem.runtime.name)
    over = max(sum(kinds.values()) - usable_bytes(problem), 0.0)
    return min(over, slack, max(kinds["context"], 0.0))


def _at_peak(
    mine: Sequence[int],
    footprints: Footprints,
    vectors: tuple[tuple[int, ...], ...],
    columns: Columns,
    shape: ColumnShape,
) -> tuple[dict[str, float], str]:
    """(kind -> bytes, operation) of a device at the peak of training."""
    alive, waiting = footprints.per_micro_batch, footprints.per_waiting
    each = {kind: np.append(values[mine], waiting[kind][mine]) for kind, values in alive.items()}
    activations = np.sum(list(each.values()), axis=0)
    counts = max(vectors, key=lambda vector: float(np.dot(vector, activations)))
    kinds = {kind: float(values[mine].sum()) for kind, values in footprints.fixed.items()}
    kinds |= {kind: float(np.dot(counts, values)) for kind, values in each.items()}
    last = mine[-1]
    what = "head and loss" if shape.head[last] else f"block {int(columns.last[last])}"
    names = [*(f"of stage {v}" for v in mine), *(f"of stage {v} before their weight gradients" for v in mine)]
    held = [(int(count), name) for name, count in zip(names, counts, strict=True) if count]
    in_flight = ", ".join(f"{count} {name}" for count, name in held)
    if len(held) > MOST_NAMED:
        in_flight = f"{sum(count for count, _ in held)}, of {len(held)} of its {len(mine)} virtual stages"
    return kinds, f"start of the backward pass of {what} (micro-batches in flight: {in_flight})"
