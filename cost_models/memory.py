"""Bytes on each rank, by kind and phase.

Bytes that stay (states, gathered copies, working sets, communication buffers, context) and bytes per micro-batch in flight
(activations, logits) are kept apart: how many micro-batches are in flight is the schedule's matter.

  states       parameters x the runtime's bytes per parameter; ZeRO divides optimizer (1), gradients (2), weights (3) by
               dp_shard·cp. In a pipeline some runtimes keep gradients whole and parameters gathered until the last
               micro-batch, whatever ZeRO says (runtime.unsharded_gradients_with_pp).
  gathered     zero 3: the unit at work and the next one; gather=micro: every parameter of the stage
  activations  of a layer: residual·T·h/parts + gathered·T·h + attention·T·(q+k+v+out)/tp + mlp·T·(1+gate)·ffn/tp (a gated
               MLP keeps 3 times 2 bytes for 2·ffn, another 2 times 2 bytes for ffn) + score·mbs·s²·heads/tp, the last only
               where attention is not fused (Korthikanti 2022, equations 1 to 4, regrouped); what narrow products take in is
               kept in 8 bits where the runtime does so; gathered: what a runtime keeps whole on every tensor-parallel rank; latent attention adds its
               latents, routed experts routed·R·(1+gate)·ffn/etp + routed_hidden·R·h + router·T·experts for R routed rows
  logits       saved and working bytes per logit of the rank's part of the vocabulary
  working      what a layer that recomputes holds while its backward pass runs, or what the loss holds while it runs: these
               two never meet, since the logits of a micro-batch are gone before its first layer's backward pass
  buckets      gradients on their way between whole replicas (torch's DistributedDataParallel)
  receives     what stages hand on, a buffer for each micro-batch of a step (torch.distributed.pipelining)
  context      what no tensor of the model accounts for: workspaces of matrix products, with routed experts a second set
               (grouped products run on several streams); counted by the allocator's reserve also what it keeps and does
               not use (slack); by nvidia-smi also the driver's context and communication buffers

"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.activations import (
    kind_activation_bytes,
    kind_evaluated_bytes,
    logit_bytes,
    loss_parallel_bytes,
)
from cost_models.calibrations import find, value, value_or
from cost_models.compute import element_bytes
from cost_models.problem import Cells, ColumnShape, IntArray, Problem
from cost_models.records import (
    SPLIT_BACKWARD,
    Gather,
    MemoryKind,
    Optimizer,
    Precision,
    RecordError,
    StateBytes,
)
from cost_models.residuals import residual_bytes
from cost_models.shares import Share, kind_params, share
from cost_models.split_backward import held_share

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
    """Parameters of each kind of block on one rank, before data parallelism divides them."""

    common: FloatArray
    """[cell, kind] all but the routed experts; the head without weights that are the embedding's."""
    experts: FloatArray
    """[cell, kind] routed experts."""
    tied_copy: FloatArray
    """[cell] the head's weights where they are the embedding's: a copy, where the stage has no embedding."""

    def of_columns(self, cell: int, shape: ColumnShape) -> tuple[FloatArray, FloatArray]:
        """(n,) parameters of each column of a cell: all but the routed experts, and these."""
        apart = shape.head * (1 - shape.embedding)
        common = shape.sum_of_blocks(self.common[cell]) + apart * self.tied_copy[cell]
        return common, shape.sum_of_blocks(self.experts[cell])

    def largest_unit(self, cell: int, shape: ColumnShape) -> FloatArray:
        """(n,) parameters of the largest block of each column."""
        units = self.common[cell] + self.experts[cell]
        units[-1] += self.tied_copy[cell]
        return shape.largest_of_blocks(units)


def local_params(problem: Problem, part: Share) -> LocalParams:
    """Vocabulary and matrices are divided over tp, experts over ep·etp; norms and learned positions are whole.

    The head holds the layers that predict later tokens, each with the projection that joins its two inputs.
    """
    model = problem.model
    table = model.hidden * part.vocab
    tied = 1.0 if model.tie_embeddings else 0.0
    layers = [kind_params(problem, part, kind) for kind in problem.layer_kinds]
    joins = 2.0 * model.hidden**2 / part.tp + 3 * model.norm_params
    ahead = [model.num_mtp_layers * part_of for part_of in layers[problem.layer_places[-1]]]
    nothing = np.zeros_like(part.tokens)
    head = model.norm_params + (1 - tied) * table + ahead[0] + model.num_mtp_layers * joins
    return LocalParams(
        common=np.stack([table + model.hidden * model.max_positions, *(common for common, _ in layers), head], axis=1),
        experts=np.stack([nothing, *(routed for _, routed in layers), ahead[1]], axis=1),
        tied_copy=tied * table,
    )


# --- footprints of columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockMemory:
    """What `column_footprints` needs of every cell, priced once."""

    params: LocalParams
    per_param: Mapping[str, FloatArray]
    """Kind -> [cell] bytes that each local parameter takes as long as the step lasts (`held_bytes_per_param`)."""
    per_expert_param: Mapping[str, FloatArray]
    """The same of routed experts."""
    activations: FloatArray
    """[cell, layer kind, recompute] bytes that a layer keeps of a micro-batch."""
    embedding_activations: FloatArray
    """[cell] of the embedding."""
    logits_saved: FloatArray
    """[cell] of the head, the layers that predict later tokens with it."""
    logits_working: FloatArray
    """[cell] while the loss runs."""
    evaluated: FloatArray
    """[cell, layer kind] the most that a layer holds while it runs without a backward pass."""
    split_softmax: FloatArray
    """[cell] what a loss over a divided vocabulary holds beside them; part of logits_working."""
    hop_bytes: FloatArray
    """[cell] what one stage hands to the next of a micro-batch."""

    def spread(self, problem: Problem, cells: Cells, row: IntArray, kinds: Sequence[int]) -> "BlockMemory":
        """The bytes of `cells` under these kinds of recompute, where the blocks of cell i are those of `row[i]` here."""
        params = self.params
        return BlockMemory(
            params=LocalParams(common=params.common[row], experts=params.experts[row], tied_copy=params.tied_copy[row]),
            per_param=held_bytes_per_param(problem, cells),
            per_expert_param=held_bytes_per_param(problem, cells, experts=True),
            activations=self.activations[..., kinds][row],
            embedding_activations=self.embedding_activations[row],
            logits_saved=self.logits_saved[row],
            logits_working=self.logits_working[row],
            evaluated=self.evaluated[row],
            split_softmax=self.split_softmax[row],
            hop_bytes=self.hop_bytes[row],
        )


def block_memory(problem: Problem, cells: Cells, part: Share | None = None) -> BlockMemory:
    """Bytes by block, for every cell."""
    part = share(problem, cells) if part is None else part
    saved, working = logit_bytes(problem, part)
    activations = np.stack(
        [
            np.stack([kind_activation_bytes(problem, part, name, kind) for name in problem.recompute_kinds], axis=-1)
            for kind in problem.layer_kinds
        ],
        axis=1,
    )
    head_norm = element_bytes(problem.workload.precision) * 2 * part.tokens * problem.model.hidden / part.sequence_parts
    ahead = problem.model.num_mtp_layers
    return BlockMemory(
        params=local_params(problem, part),
        per_param=held_bytes_per_param(problem, cells),
        per_expert_param=held_bytes_per_param(problem, cells, experts=True),
        activations=activations,
        embedding_activations=8.0 * part.tokens,  # token ids and labels, 64-bit
        logits_saved=(1 + ahead) * (saved + head_norm) + ahead * activations[:, problem.layer_places[-1], 0],
        logits_working=working,
        evaluated=np.stack([kind_evaluated_bytes(problem, part, kind) for kind in problem.layer_kinds], axis=1),
        split_softmax=loss_parallel_bytes(problem, part),
        hop_bytes=element_bytes(problem.workload.precision) * part.tokens * problem.model.hidden / part.sequence_parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprints:
    """Bytes of columns by kind; arrays (n,). Together: sum(fixed) + q·sum(per_micro_batch) + q_W·sum(per_waiting)."""

    fixed: Mapping[str, FloatArray]
    """Kind -> bytes that do not depend on how many micro-batches are in flight."""
    per_micro_batch: Mapping[str, FloatArray]
    """Kind -> bytes of each micro-batch in flight; where the backward is split, until the end of I."""
    per_waiting: Mapping[str, FloatArray]
    """Kind -> bytes of each micro-batch between I and W."""

    @property
    def fixed_bytes(self) -> FloatArray:
        """(n,) w_c."""
        return np.asarray(np.sum(list(self.fixed.values()), axis=0))

    @property
    def activation_bytes(self) -> FloatArray:
        """(n,) a_c."""
        return np.asarray(np.sum(list(self.per_micro_batch.values()), axis=0))


def held_bytes_per_param(
    problem: Problem, cells: Cells, *, experts: bool = False, in_host: bool = False
) -> Mapping[str, FloatArray]:
    """Kind -> (n,) bytes that each local parameter of a cell takes as long as the step lasts: what grows with parameters alone.

    experts: of the routed experts, which ZeRO divides over what ep and etp leave. in_host: what is offloaded, and nothing else.
    """
    divided = _divided_bytes_per_param(problem, cells, experts=experts)
    moved = moved_states(problem)
    return {kind: np.where((kind in moved) == in_host, values, 0.0) for kind, values in divided.items()}


def moved_states(problem: Problem) -> frozenset[str]:
    """Kinds of state that are offloaded to the host."""
    names = {"weight": "weights", "gradient": "gradients", "optimizer": "optimizer"}
    return frozenset(names[kind] for what in problem.offload for kind in problem.runtime.offload_moves[what])


def _divided_bytes_per_param(problem: Problem, cells: Cells, *, experts: bool) -> Mapping[str, FloatArray]:
    per, element = state_bytes(problem), element_bytes(problem.workload.precision)
    shard = (cells.expert_shard_group if experts else cells.shard_group)[0]
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
    params, routed = memory.params.of_columns(cell, shape)
    largest = memory.params.largest_unit(cell, shape)
    share_of = 1.0 / int(cells.vpp[cell])
    held = {
        kind: values[cell] * params + memory.per_expert_param[kind][cell] * routed
        for kind, values in memory.per_param.items()
    }
    buffers = np.zeros_like(params)
    moved = moved_states(problem)
    in_units = cells.zero[cell] == 3 or cells.gather[cell] == Gather.MICRO
    if in_units or "gradients" in moved:
        buffers = per.gradient * largest * share_of  # one unit's gradient before it is reduce-scattered, or copied
    if (in_units or "weights" in moved) and not memory.per_param["gathered"][cell]:
        held["gathered"] = element * np.minimum(GATHERED_UNITS * largest, params + routed) * share_of
    working = _working_bytes(memory, cell, shape) * share_of
    residual = residual_bytes(problem)
    # a looped device recomputes other stages' layers too, when no logits are alive
    gone = memory.logits_saved[cell] if cells.vpp[cell] == 1 else 0.0
    return Footprints(
        fixed={
            **held,
            "working": np.where(shape.head > 0, np.maximum(working - gone, memory.logits_working[cell]), working),
            "communication": buffers,
            **_buffers_of_torch(problem, cells, memory, cell, shape, params + routed),
            "context": np.full_like(params, counted_context_bytes(problem) * share_of),
            **({"residual": np.full_like(params, residual * share_of)} if residual else {}),
        },
        per_micro_batch={
            "activations": shape.sum_of_layers(memory.activations[cell])
            + shape.embedding * memory.embedding_activations[cell],
            "logits": shape.head * memory.logits_saved[cell],
        },
        per_waiting=_waiting(problem, memory, cell, shape, cells.schedule[cell] in SPLIT_BACKWARD),
    )


BUCKETED = ("torch", "fsdp")
"""Runtimes that average gradients of whole replicas by DistributedDataParallel."""
RECEIVES_APART = ("torch", "fsdp", "torchtitan")
"""Runtimes whose pipelines are those of torch.distributed.pipelining."""


def _buffers_of_torch(
    problem: Problem, cells: Cells, memory: BlockMemory, cell: int, shape: ColumnShape, params: FloatArray
) -> Mapping[str, FloatArray]:
    """Kind -> (n,) what torch keeps to communicate; kinds that a cell has not are left out. Both counted with torch 2.13
    (tests/processes/test_phases.py).

    buckets: of gradients, beside those that the micro-batches before the last add up; of one micro-batch these are one.
    receives: for every micro-batch of a step what a pipeline stage is handed, from the first step on.
    """
    name, found = problem.runtime.name, {}
    dp, tp = int(cells.dp_replicate[cell] * cells.dp_shard[cell]), int(cells.tp[cell])
    num_micro_batches = problem.workload.gbs / (dp * int(cells.mbs[cell]))
    if name in BUCKETED and cells.zero[cell] == 0 and dp > 1 and tp == 1 and num_micro_batches > 1:
        found["buckets"] = state_bytes(problem).gradient * params
    if name in RECEIVES_APART and cells.pp[cell] > 1:
        ends = (1 - shape.embedding) + (1 - shape.head)
        found["receives"] = num_micro_batches * memory.hop_bytes[cell] * ends
    return found


def _waiting(
    problem: Problem, memory: BlockMemory, cell: int, shape: ColumnShape, splits: bool
) -> Mapping[str, FloatArray]:
    """What W still needs of a micro-batch after its I: as if nothing were recomputed; nothing where the backward is whole."""
    held = held_share(problem) if splits else 0.0
    whole = memory.activations[cell, :, :1]
    layers = shape.sum_of_layers(np.broadcast_to(whole, memory.activations[cell].shape))
    return {
        "activations": held * (layers + shape.embedding * memory.embedding_activations[cell]),
        "logits": held * shape.head * memory.logits_saved[cell],
    }


def _working_bytes(memory: BlockMemory, cell: int, shape: ColumnShape) -> FloatArray:
    """(n,) what a layer that recomputes holds while its backward pass runs: all that it did not keep."""
    whole = memory.activations[cell, :, :1]
    missing = np.maximum(whole - memory.activations[cell], 0.0)
    return shape.largest_of_layers(missing)


def context_bytes(problem: Problem) -> float:
    """Bytes that every device has whatever it holds: context, and what measured runs took beside all that is counted."""
    return counted_context_bytes(problem) + residual_bytes(problem)


def counted_context_bytes(problem: Problem) -> float:
    """Bytes of this memory kind that no tensor of the step accounts for.

    Where they were measured as one number (`memory.context_bytes.KIND`), that number; else the sum of what each way of
    counting adds: workspaces (allocated), the allocator's slack (reserved), the driver's context and communication
    buffers (nvidia-smi).
    """
    family, kind = problem.cluster.pools[0].kind.device.family, problem.memory_kind
    own = f"memory.context_bytes.{kind.value}"
    if kind is MemoryKind.ALLOCATED or find(problem.calibration, own, family) is not None:
        return value(problem.calibration, own, family) + _grouped_bytes(problem, family)
    if kind is MemoryKind.RSS:
        return value(problem.calibration, own, family)
    counted = value(problem.calibration, "memory.context_bytes.allocated", family) + _grouped_bytes(problem, family)
    counted += value(problem.calibration, "memory.slack_bytes", problem.runtime.name)
    if kind is MemoryKind.NVIDIA_SMI:
        counted += value(problem.calibration, "memory.outside_bytes.reserved", family)
    return counted


def _grouped_bytes(problem: Problem, family: str) -> float:
    """Workspaces of the grouped products of routed experts."""
    if problem.model.moe is None or not problem.runtime.groups_experts:
        return 0.0
    return value_or(0.0, problem.calibration, "memory.grouped_workspace_bytes", family)


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
