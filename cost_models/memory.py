"""Bytes on each rank, by kind and phase.

Bytes that stay (states, gathered copies, working sets, communication buffers, context) and bytes per micro-batch in flight
(activations, logits) are kept apart: how many micro-batches are in flight is the schedule's matter.

  states       parameters x the runtime's bytes per parameter; ZeRO divides optimizer (1), gradients (2), weights (3) by
               dp_shard·cp. In a pipeline some runtimes keep gradients whole and parameters gathered until the last
               micro-batch, whatever ZeRO says (runtime.unsharded_gradients_with_pp).
  gathered     zero 3: the unit at work and the next one; gather=micro: every parameter of the stage
  activations  of a layer: residual·T·h/parts + gathered·T·h + attention·T·(2q + 2kv)/tp + mlp·T·(1+gate)·ffn/tp
               + score·mbs·s²·heads/tp, the last only where attention is not fused (Korthikanti 2022, equations 1 to 4,
               regrouped); gathered: what a runtime keeps whole on every tensor-parallel rank
  logits       saved and working bytes per logit of the rank's part of the vocabulary
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.blocks import Share, layer_params, share
from cost_models.calibrations import find, value, value_or
from cost_models.compute import element_bytes
from cost_models.problem import Cells, Columns, ColumnShape, Problem, column_shape
from cost_models.records import Decision, Gather, Model, Optimizer, Precision, RecordError, StateBytes
from cost_models.schedules import Pipeline, max_in_flight

FloatArray = NDArray[np.float64]

MOMENT_BYTES = 8.0
"""Two fp32 moments of Adam, which plain SGD does not have."""
GATHERED_UNITS = 2
"""FSDP holds the unit at work and the one it prefetches (torch FSDP2, one explicit prefetch)."""

STATE_KINDS = ("weights", "gradients", "optimizer")
"""What stays from step to step."""


def state_bytes(problem: Problem) -> StateBytes:
    """Bytes per parameter of this runtime, precision and optimizer. RecordError lists the known precisions."""
    runtime, workload = problem.runtime, problem.workload
    known = runtime.state_bytes
    if workload.precision.value not in known:
        raise RecordError(
            f"runtime {runtime.name!r} has no bytes per parameter for precision {workload.precision.value!r}; "
            f"known: {', '.join(sorted(known))}"
        )
    found = known[workload.precision.value]
    if workload.optimizer is Optimizer.SGD:
        return StateBytes(
            weight=found.weight, gradient=found.gradient, optimizer=max(found.optimizer - MOMENT_BYTES, 0.0)
        )
    return found


# --- parameters -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalParams:
    """Parameters of each kind of block on one rank, before data parallelism divides them; arrays over cells."""

    embedding: FloatArray
    layer: FloatArray
    head: FloatArray
    """Final norm, and the head's own weights where they are not the embedding's."""
    tied_copy: FloatArray
    """The head's weights where they are the embedding's: a copy, where the stage has no embedding."""

    def of_columns(self, cell: int, shape: ColumnShape) -> FloatArray:
        """(n,) parameters of each column of a cell."""
        apart = shape.head * (1 - shape.embedding)
        return np.asarray(
            shape.num_layers * self.layer[cell]
            + shape.embedding * self.embedding[cell]
            + shape.head * self.head[cell]
            + apart * self.tied_copy[cell]
        )

    def largest_unit(self, cell: int, shape: ColumnShape) -> FloatArray:
        """(n,) parameters of the largest block of each column."""
        layer = np.where(shape.num_layers > 0, self.layer[cell], 0.0)
        ends = np.maximum(shape.embedding * self.embedding[cell], shape.head * (self.head[cell] + self.tied_copy[cell]))
        return np.asarray(np.maximum(layer, ends))


def local_params(model: Model, part: Share) -> LocalParams:
    """Vocabulary and matrices are divided over tp; norms and learned positions are whole."""
    table = model.hidden * part.vocab
    tied = 1.0 if model.tie_embeddings else 0.0
    return LocalParams(
        embedding=table + model.hidden * model.max_positions,
        layer=layer_params(model, part),
        head=model.norm_params + (1 - tied) * table,
        tied_copy=tied * table,
    )


# --- activations ----------------------------------------------------------------------------------------------------------


def layer_activation_bytes(problem: Problem, part: Share, kind: str) -> FloatArray:
    """Bytes that one layer keeps of one micro-batch under a kind of recompute, on one rank."""
    model, name = problem.model, problem.runtime.name
    family = problem.cluster.pools[0].kind.device.family
    scale = element_bytes(problem.workload.precision) / 2
    residual = part.tokens * model.hidden / part.sequence_parts
    if kind == "full":
        return np.asarray(2.0 * scale * residual)
    gate = 1 if model.gated_mlp else 0
    if kind == "selective" and name == "torch":
        # its input, and what the products and the attention put out (executor/sharding/recompute.py)
        outputs = 2 * part.queries + 2 * part.keys_values + (1 + gate) * part.ffn
        return np.asarray(2.0 * scale * (2 * residual + part.tokens * outputs))
    gathered = np.where(part.tp > 1, part.tokens * model.hidden, residual)
    attention = part.tokens * (2 * part.queries + 2 * part.keys_values)
    kept = sum(
        value_or(0.0, problem.calibration, f"memory.activation.{what}_bytes", family, name) * elements
        for what, elements in (
            ("residual", residual),
            ("gathered", gathered),
            ("attention", attention),
            ("mlp", part.tokens * (1 + gate) * part.ffn),
        )
    )
    scores = np.zeros_like(part.tokens)
    if kind != "selective" and find(problem.calibration, "attention.score_bytes", name) is not None:
        per_score = value(problem.calibration, "memory.activation.score_bytes", name)
        heads = part.queries / model.head_dim
        scores = per_score * part.mbs * heads / part.cp * float(problem.workload.seq) ** 2
    return np.asarray(scale * (kept + scores))


def logit_bytes(problem: Problem, part: Share) -> tuple[FloatArray, FloatArray]:
    """(saved per micro-batch in flight, working) bytes of logits and loss."""
    which = (problem.runtime.name, problem.workload.precision.value)
    logits = part.tokens * part.vocab
    saved = value(problem.calibration, "memory.logits.saved_bytes", *which)
    working = value(problem.calibration, "memory.logits.working_bytes", *which)
    return saved * logits, working * logits


# --- footprints of columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockMemory:
    """What `column_footprints` needs of every cell, priced once."""

    params: LocalParams
    per_param: Mapping[str, FloatArray]
    """Kind -> [cell] bytes that each local parameter takes as long as the step lasts (`held_bytes_per_param`)."""
    activations: FloatArray
    """[cell, recompute] bytes that a layer keeps of a micro-batch."""
    embedding_activations: FloatArray
    """[cell] of the embedding."""
    logits_saved: FloatArray
    """[cell] of the head."""
    logits_working: FloatArray
    """[cell] while the loss runs."""


def block_memory(problem: Problem, cells: Cells, part: Share | None = None) -> BlockMemory:
    """Bytes by block, for every cell."""
    part = share(problem, cells) if part is None else part
    saved, working = logit_bytes(problem, part)
    by_kind = [layer_activation_bytes(problem, part, kind) for kind in problem.recompute_kinds]
    head_norm = element_bytes(problem.workload.precision) * 2 * part.tokens * problem.model.hidden / part.sequence_parts
    return BlockMemory(
        params=local_params(problem.model, part),
        per_param=held_bytes_per_param(problem, cells),
        activations=np.stack(by_kind, axis=-1),
        embedding_activations=8.0 * part.tokens,  # token ids and labels, 64-bit
        logits_saved=saved + head_norm,
        logits_working=working,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprints:
    """Bytes of columns by kind; arrays (n,). Together: sum(fixed) + q·sum(per_micro_batch)."""

    fixed: Mapping[str, FloatArray]
    """Kind -> bytes that do not depend on how many micro-batches are in flight."""
    per_micro_batch: Mapping[str, FloatArray]
    """Kind -> bytes of each micro-batch in flight."""

    @property
    def fixed_bytes(self) -> FloatArray:
        """(n,) w_c."""
        return np.asarray(np.sum(list(self.fixed.values()), axis=0))

    @property
    def activation_bytes(self) -> FloatArray:
        """(n,) a_c."""
        return np.asarray(np.sum(list(self.per_micro_batch.values()), axis=0))


def held_bytes_per_param(problem: Problem, cells: Cells) -> Mapping[str, FloatArray]:
    """Kind -> (n,) bytes that each local parameter of a cell takes as long as the step lasts: what grows with parameters alone."""
    per, element = state_bytes(problem), element_bytes(problem.workload.precision)
    shard = cells.shard_group[0]
    whole_in_pp = (cells.zero >= 2) & (cells.pp > 1) & problem.runtime.unsharded_gradients_with_pp
    divides_weights = (cells.zero == 3) | (cells.gather == Gather.MICRO)
    stays_gathered = divides_weights & (whole_in_pp | (cells.gather == Gather.MICRO))
    if problem.runtime.name == "torch":
        # a second copy from a layer's forward to its backward pass: `replicate`'s, or what autocast casts to bf16
        casts = problem.workload.precision is not Precision.FP32
        stays_gathered = stays_gathered | ((cells.zero == 0) & (casts | ((cells.tp > 1) & (cells.dp > 1))))
    return {
        "weights": per.weight / np.where(divides_weights, shard, 1),
        "gradients": per.gradient / np.where((cells.zero >= 2) & ~whole_in_pp, shard, 1),
        "optimizer": per.optimizer / np.where(cells.zero >= 1, shard, 1),
        "gathered": np.where(stays_gathered, float(element), 0.0),
    }


def column_footprints(problem: Problem, cells: Cells, memory: BlockMemory, cell: int, shape: ColumnShape) -> Footprints:
    """Bytes of the columns of one cell, from the second step on. What a device has once is spread over its vpp columns."""
    per, element = state_bytes(problem), element_bytes(problem.workload.precision)
    params = memory.params.of_columns(cell, shape)
    largest = memory.params.largest_unit(cell, shape)
    share_of = 1.0 / int(cells.vpp[cell])
    held = {kind: values[cell] * params for kind, values in memory.per_param.items()}
    buffers = np.zeros_like(params)
    if cells.zero[cell] == 3 or cells.gather[cell] == Gather.MICRO:
        buffers = per.gradient * largest * share_of  # one unit's gradient before it is reduce-scattered
        if not memory.per_param["gathered"][cell]:
            held["gathered"] = element * np.minimum(GATHERED_UNITS * largest, params) * share_of
    working = _working_bytes(memory, cell, shape) * share_of
    return Footprints(
        fixed={
            **held,
            "working": working + shape.head * memory.logits_working[cell],
            "communication": buffers,
            "context": np.full_like(params, context_bytes(problem) * share_of),
        },
        per_micro_batch={
            "activations": shape.layers @ memory.activations[cell]
            + shape.embedding * memory.embedding_activations[cell],
            "logits": shape.head * memory.logits_saved[cell],
        },
    )


def _working_bytes(memory: BlockMemory, cell: int, shape: ColumnShape) -> FloatArray:
    """(n,) what a layer that recomputes holds while its backward pass runs: all that it did not keep."""
    whole = memory.activations[cell, 0]
    missing = np.maximum(whole - memory.activations[cell], 0.0)
    return np.asarray(np.max(np.where(shape.layers > 0, missing[None, :], 0.0), axis=1))


def context_bytes(problem: Problem) -> float:
    """Bytes of this memory kind that no tensor of the step accounts for: workspaces; for nvidia-smi also the driver's."""
    family = problem.cluster.pools[0].kind.device.family
    return value(problem.calibration, f"memory.context_bytes.{problem.memory_kind.value}", family)


def usable_bytes(problem: Problem) -> float:
    """What bytes of this kind may grow to: the driver's total, less what this kind does not count (context, buffers)."""
    device = problem.cluster.pools[0].kind.device
    outside = value(problem.calibration, f"memory.outside_bytes.{problem.memory_kind.value}", device.family)
    return max(device.memory_bytes - outside, 0.0)


def memory_upper(problem: Problem, expected_bytes: float) -> float:
    """Upper end of the 80% interval of a peak: one-sided margin from measured rows of this runtime."""
    margin = value(problem.calibration, "memory.margin", problem.runtime.name, problem.memory_kind.value)
    return float(expected_bytes) * (1.0 + margin)


def memory_lower(problem: Problem, expected_bytes: float) -> float:
    """Lower end of the 80% interval of a peak."""
    margin = value(problem.calibration, "memory.margin_below", problem.runtime.name, problem.memory_kind.value)
    return float(expected_bytes) * (1.0 - margin)


# --- the report -----------------------------------------------------------------------------------------------------------


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
    """Phase -> expected peak bytes."""
    peak_phase: str
    """Phase of the peak."""
    peak_operation: str
    """Operation at the peak."""

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


def memory_report(problem: Problem, decision: Decision) -> tuple[DeviceMemory, ...]:
    """Expected bytes of each pipeline position at its peak: by kind, by phase, with the operation that makes the peak."""
    layout = decision.layout
    cells = Cells.of([layout], decision.ranks.order)
    columns = decision_columns(decision, problem.recompute_kinds)
    shape = column_shape(problem.model, columns)
    footprints = column_footprints(problem, cells, block_memory(problem, cells), 0, shape)
    pipeline = Pipeline(
        schedule=layout.schedule,
        num_devices=layout.pp,
        num_virtual_per_device=layout.vpp,
        num_micro_batches=decision.num_micro_batches,
    )
    vectors = max_in_flight(pipeline)
    return tuple(
        _device_memory(device, layout.world // layout.pp, footprints, decision, vectors[device], columns, shape)
        for device in range(layout.pp)
    )


def _device_memory(
    device: int,
    ranks_each: int,
    footprints: Footprints,
    decision: Decision,
    vectors: tuple[tuple[int, ...], ...],
    columns: Columns,
    shape: ColumnShape,
) -> DeviceMemory:
    mine = [stage.virtual for stage in decision.stages if stage.device == device]
    activations = footprints.activation_bytes[mine]
    counts = max(vectors, key=lambda vector: float(np.dot(vector, activations)))
    kinds = {kind: float(values[mine].sum()) for kind, values in footprints.fixed.items()}
    kinds |= {kind: float(np.dot(counts, values[mine])) for kind, values in footprints.per_micro_batch.items()}
    total = sum(kinds.values())
    first_step = total - kinds["optimizer"]  # states of the optimizer appear in its first update
    states = sum(kinds[kind] for kind in STATE_KINDS)
    phases = {
        "build": kinds["weights"] + kinds["context"],
        "step 1": max(first_step, states + kinds["context"]),
        "step 2": total,
    }
    stage = mine[-1]
    block = int(columns.last[stage])
    what = "head and loss" if shape.head[stage] else f"block {block}"
    in_flight = ", ".join(f"{count} of stage {virtual}" for virtual, count in zip(mine, counts, strict=True) if count)
    return DeviceMemory(
        device=device,
        ranks=(device * ranks_each, (device + 1) * ranks_each - 1),
        kinds=kinds,
        phases=phases,
        peak_phase=max(phases, key=lambda phase: phases[phase]),
        peak_operation=f"start of the backward pass of {what} (micro-batches in flight: {in_flight})",
    )
