"""A plan made true on a module: `executor.apply`, the call that a user's own script makes.

parallel = executor.apply(plan, model)                      # on each rank, the model built alike on each
optimizer = torch.optim.AdamW(parallel.parameters())
for inputs, labels in loader:
    loss = parallel.step(inputs, labels)                    # forward and backward of all micro-batches
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cost_models.records import Decision, Plan, Precision, load_plan
from executor.anatomy import Anatomy, anatomy_of, check_against, check_plain, dimensions_of, part_of
from executor.collectives.choice import set_nccl_environment, synchronisation_of
from executor.collectives.hook import Synchronisation
from executor.errors import RefusedError
from executor.mesh import (
    AXES,
    START_TIMEOUT_S,
    build_mesh,
    limit_waits,
    local_device,
    mark_progress,
    naming_the_late,
    start_process_group,
)
from executor.phases import Phases
from executor.refusals import check as refuse
from executor.refusals import sequence_law
from executor.sharding.data import accumulating, shard_data
from executor.sharding.pipeline import Pipeline, sum_tied_gradients
from executor.sharding.recompute import wrap_layers
from executor.sharding.tensor import reduce_partial_gradients, shard_tensors
from executor.stage import StageModule, original_name
from executor.waits import Waits

_APPLIED: WeakSet[nn.Module] = WeakSet()
"""Modules that are taken over: hooks of a first plan would run under a second one."""
IGNORE = -100
"""Label of a position that has no loss (the convention of torch and transformers)."""


def apply(
    plan: Plan | str | Path, model: nn.Module, *, check: bool = True, timeout_s: float = START_TIMEOUT_S
) -> "Parallel":
    """Split `model` over the ranks as `plan` says; called on every rank, with the model built alike on each.

    `plan` is a Plan or the path of a plan's file. Joins the process group if the script has not;
    `timeout_s` is how long a rank waits for others. The model is taken over: the parts of this rank are sharded in place,
    the weights of all others are freed. `check` compares what came out with the plan, and gradients of a shrunken model with
    one process's (`executor.selfcheck`; seconds). Raises RefusedError (a ValueError) for what cannot be made true, before
    any rank waits, and WrongResultError where the check finds a fault.
    """
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    if not isinstance(plan, Plan):
        raise RefusedError(f"the plan is a {type(plan).__name__}; legal: a Plan, or the path of a plan's file")
    decision = plan.decision
    anatomy = anatomy_of(model)
    if model in _APPLIED:
        raise RefusedError(
            "a plan was applied to this model already, which took it over: build it anew for another one"
        )
    check_plain(model, anatomy)
    dimensions = dimensions_of(model, anatomy)
    check_against(dimensions, plan.request.model)
    refuse(plan)
    set_nccl_environment(decision)
    start_process_group(timeout_s)
    with naming_the_late():
        mesh = build_mesh(decision)
        _check_alike(model)
        synchronisation = synchronisation_of(decision, mesh, plan.request.cluster.domain_size)
    _APPLIED.add(model)
    parallel = divided(decision, model, mesh, synchronisation)
    limit_waits(parallel.groups(), timeout_s)
    if check:
        from executor.verify import check_at_start  # which reads what is built here

        with naming_the_late():
            check_at_start(plan, parallel, model)
    return parallel


def divided(
    decision: Decision, model: nn.Module, mesh: DeviceMesh, synchronisation: Synchronisation | None
) -> "Parallel":
    """A legal module split over a mesh that stands."""
    anatomy = anatomy_of(model)
    dimensions = dimensions_of(model, anatomy)
    whole_sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    stages, virtual = _own_stages(decision, model, anatomy, mesh)
    return Parallel(
        decision=decision,
        mesh=mesh,
        stages=stages,
        virtual=virtual,
        hidden=dimensions.hidden,
        vocab=dimensions.vocab,
        weight_dtype=next(stages[0].parameters()).dtype,
        tied_across_stages=dimensions.tie_embeddings and decision.layout.pp > 1,
        whole_sizes=whole_sizes,
        synchronisation=synchronisation,
    )


@torch.no_grad()
def _check_alike(model: nn.Module) -> None:
    """Ranks that built different weights would train a patchwork of several models."""
    sums = torch.stack([p.sum(dtype=torch.float64) for p in model.parameters()])
    for (name, _), total in zip(model.named_parameters(), sums.tolist(), strict=True):
        if not math.isfinite(total):  # which a collective's minimum may leave out
            raise RefusedError(
                f"{name} holds NaN or infinity on rank {dist.get_rank()}: look where the weights come from"
            )
    sums = sums.to(local_device())
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    different = [name for (name, _), a, b in zip(model.named_parameters(), low, high, strict=True) if a != b]
    if different:
        raise RefusedError(
            f"the weights of {different[0]} (and {len(different) - 1} more) differ between ranks: seed before the model is "
            "built, or load the same checkpoint on each rank"
        )


def _own_stages(
    decision: Decision, model: nn.Module, anatomy: Anatomy, mesh: DeviceMesh
) -> tuple[tuple[StageModule, ...], tuple[int, ...]]:
    """The virtual stages of this rank, split over tp, with recompute; the weights of all other blocks are freed."""
    layout, num_blocks = decision.layout, decision.num_blocks
    device = mesh.get_local_rank("pp")
    own = [stage for stage in decision.stages if stage.device == device]
    stages = tuple(StageModule(model, anatomy, (s.blocks[0], s.blocks[1]), num_blocks) for s in own)
    kept = {id(part) for stage in stages for name in stage.unit_names for part in stage.get_submodule(name).modules()}
    for name in (anatomy.embedding, anatomy.norm, anatomy.head):
        _free(part_of(model, name), kept)
    layers = part_of(model, anatomy.layers)
    assert layers is not None
    for layer in layers.children():
        _free(layer, kept)
    bf16 = decision.workload.precision is Precision.BF16
    for stage, planned in zip(stages, own, strict=True):
        stage.compute_dtype = torch.bfloat16 if bf16 else None
        # tp and FSDP move a weight to the GPU as they cut it, so that no rank ever holds a whole stage there.
        whole = layout.tp == 1 and layout.zero == 0
        (stage if whole else stage.get_submodule(anatomy.rotary)).to(local_device())
        if layout.tp > 1:
            shard_tensors(stage, mesh["tp"])
        wrap_layers(stage, dict(planned.recompute), layout.tp)
    return stages, tuple(stage.virtual for stage in own)


def _free(part: nn.Module | None, kept: set[int]) -> None:
    assert part is not None
    if id(part) not in kept:
        part.to("meta")


class Parallel:
    """A module split over the ranks, as its training loop sees it."""

    def __init__(
        self,
        *,
        decision: Decision,
        mesh: DeviceMesh,
        stages: tuple[StageModule, ...],
        virtual: tuple[int, ...],
        hidden: int,
        vocab: int,
        weight_dtype: torch.dtype,
        tied_across_stages: bool,
        whole_sizes: Mapping[str, int],
        synchronisation: Synchronisation | None = None,
    ) -> None:
        layout = decision.layout
        self.decision = decision
        self.mesh = mesh
        self.device = local_device()
        self.vocab = vocab
        """Rows of the embedding: token ids lie below."""
        self.stages = stages
        """The virtual stages of this rank, split over tp, not yet wrapped in DDP."""
        self.virtual = virtual
        self.synchronisation = synchronisation
        """How gradients of replicas are averaged where the plan decides that; None = by DDP itself."""
        self.modules = tuple(
            shard_data(stage, layout, mesh, decision.workload.precision, synchronisation) for stage in stages
        )
        """The same, wrapped: what is called."""
        self.dp_rank = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")
        """Which slice of the global batch is this rank's, 0..dp-1."""
        self._batch_group = _group(mesh, ("dp_replicate", "dp_shard"))
        self._loss_group = _group(mesh, ("pp", "dp_replicate", "dp_shard"))
        self.tied_across_stages = tied_across_stages
        """Two stages hold the embedding's weight, which is the head's too."""
        self.whole_sizes = whole_sizes
        """Name -> number of elements of every parameter of the undivided module."""
        bf16 = decision.workload.precision is Precision.BF16
        self._autocast = bf16 and (layout.dp == 1 or (layout.zero == 0 and layout.tp == 1))
        self._pipeline = Pipeline(
            decision=decision,
            modules=self.modules,
            virtual=virtual,
            mesh=mesh["pp"],
            device=self.device,
            hidden=hidden,
            boundary_dtype=torch.bfloat16 if bf16 else weight_dtype,
            seq_parts=layout.tp,
        )
        self._schedules: dict[tuple[int, int], _PipelineSchedule] = {}
        self.phases = Phases(self.device)
        """Seconds of the last steps by phase, where switched on."""
        self._num_targets: Tensor = torch.ones((), device=self.device)
        self._num_steps = 0

    def measure_phases(self) -> None:
        """Time the phases of every step from now on, and what it waits for in them."""
        axes = [(self.mesh[axis].get_group(), axis) for axis in AXES if self.mesh[axis].size() > 1]
        if self.synchronisation is not None:
            axes += [(group, "dp_replicate") for group in self.synchronisation.how.groups()]
        self.phases.enabled = True
        self.phases.waits = Waits(axes, [m for m in self.modules if isinstance(m, DistributedDataParallel)])
        self.phases.waits.listen()

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Every process group of this rank's axes."""
        yield from self.mesh.get_all_groups()
        yield from filter(None, (self._batch_group, self._loss_group))
        if self.synchronisation is not None:
            yield from self.synchronisation.how.groups()

    # What an optimizer and a checkpoint see -------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters (DTensors where sharded) under their names in the whole module."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                yield original_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: what the optimizer gets."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `named_parameters`, but a weight that two stages share has one name in both, the embedding's."""
        anatomy = self.stages[0].anatomy
        for name, parameter in self.named_parameters():
            is_tied_head = self.tied_across_stages and name == f"{anatomy.head}.weight"
            yield (f"{anatomy.embedding}.weight" if is_tied_head else name), parameter

    # One step -------------------------------------------------------------------------------------------------------

    def step(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Forward and backward of one step; returns the loss, the mean over all tokens of the global batch, on all ranks.

        `inputs` are token ids: the global batch (gbs, T), of which each rank takes its slice, or this rank's slice alone
        (gbs/dp, T). `labels[b, t]` is the token that position t shall predict, IGNORE for none; None = the next input.
        Gradients are added to `.grad`, as `backward()` does. Where the whole batch has no target, the loss is 0.
        RefusedError for a batch that is none; LateRankError, with its name, where a rank was lost.
        """
        self._check_batch(inputs, labels)
        if labels is None:
            labels = _next_tokens(inputs)
        inputs, labels = self._own_slice(inputs), self._own_slice(labels)
        with naming_the_late():
            mark_progress(self._num_steps)
            self._num_steps += 1
            return self.step_slice(inputs, labels)

    def _check_batch(self, inputs: Tensor, labels: Tensor | None) -> None:
        if not torch.is_grad_enabled():
            raise RefusedError(
                "a step needs gradients, and they are switched off (torch.no_grad, inference_mode) around it"
            )
        for what, batch, none in (("inputs", inputs, None), ("labels", labels, IGNORE)):
            if batch is None:
                continue
            whole = isinstance(batch, Tensor) and not (batch.is_floating_point() or batch.is_complex())
            if not whole or batch.dim() != 2 or 0 in batch.shape:
                found = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
                raise RefusedError(
                    f"{what}: {found}; legal: whole numbers of shape (sequences, tokens), none of them 0"
                )
            # Under tp no shard holds a token beyond the vocabulary, and all would go on with zeros. On a GPU this is a wait.
            if batch.device.type == "cpu" or self._num_steps == 0:
                least, most = torch.aminmax(batch)
                if least >= 0 and most < self.vocab:
                    continue
                strange = batch[(batch < 0) | (batch >= self.vocab)]
                strange = strange if none is None else strange[strange != none]
                if strange.numel():
                    legal = f"0 to {self.vocab - 1}" + ("" if none is None else f", and {none} for none")
                    raise RefusedError(f"{what} hold {int(strange[0])}; legal: {legal}")

    def step_slice(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """As `step`, with this rank's slice of a batch of any size: (rows, T), rows a multiple of the micro-batches."""
        layout = self.decision.layout
        if labels.shape != inputs.shape:
            raise RefusedError(
                f"labels {tuple(labels.shape)} and inputs {tuple(inputs.shape)} differ; legal: one label per input"
            )
        if inputs.shape[0] % self.decision.num_micro_batches:
            raise RefusedError(
                f"{inputs.shape[0]} sequences do not make {self.decision.num_micro_batches} equal micro-batches; legal: its multiples"
            )
        broken = sequence_law(inputs.shape[1], layout.tp)
        if broken:
            raise RefusedError(broken)
        self._num_targets = (labels != IGNORE).sum()
        if self._batch_group is not None:
            dist.all_reduce(self._num_targets, group=self._batch_group)
        before = self._set_aside()
        self._num_targets.clamp_(min=1)  # a batch without targets: 0, where 0/0 would end the training
        with ExitStack() as contexts:
            if layout.tp > 1:
                contexts.enter_context(loss_parallel())
            if self._autocast:
                contexts.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            run = self._accumulate if layout.pp == 1 else self._run_pipeline
            loss = run(inputs, labels) / layout.dp
        with self.phases("reduce"):
            if self._loss_group is not None:
                dist.all_reduce(loss, group=self._loss_group)
            self._finish_gradients(before)
        return loss

    def _own_slice(self, batch: Tensor) -> Tensor:
        gbs, dp = self.decision.workload.gbs, self.decision.layout.dp
        rows = batch.shape[0]
        multiple = self.decision.num_micro_batches
        if rows == gbs and dp > 1:
            batch = batch.view(dp, gbs // dp, -1)[self.dp_rank]
        elif rows != gbs // dp:
            raise RefusedError(
                f"a batch of {rows} sequences; legal: {gbs} (the global batch) or {gbs // dp} (this rank's slice of it, "
                f"{multiple} micro-batches of {self.decision.layout.mbs})"
            )
        return batch.to(self.device, torch.long)

    def _accumulate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of this rank's slice, times dp; gradients in place."""
        count = self.decision.num_micro_batches
        total = torch.zeros((), device=self.device)
        module = self.modules[0]
        for index, (x, y) in enumerate(zip(inputs.chunk(count), labels.chunk(count), strict=True)):
            with accumulating(module, last=index == count - 1):
                with self.phases("forward"):
                    loss = self._share_of_loss(module(x), y)
                with self.phases("backward"):
                    loss.backward()
            total += loss.detach()
        return total

    def _run_pipeline(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """As `_accumulate`; zero where another stage has the loss."""
        count = self.decision.num_micro_batches
        shape = (inputs.shape[0] // count, inputs.shape[1])
        if shape not in self._schedules:
            self._schedules[shape] = self._pipeline.schedule(*shape, self._share_of_loss)
            self.phases.time_chunks(self._schedules[shape])
        losses: list[Tensor] = []
        with self.phases("pipeline"):
            self._schedules[shape].step(
                *([inputs] if self.stages[0].has_embedding else []),
                target=labels if self.stages[-1].has_head else None,
                losses=losses if self.stages[-1].has_head else None,
                return_outputs=False,
            )
        total = torch.zeros((), device=self.device)
        return total + sum(loss.detach() for loss in losses) if losses else total

    def _share_of_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of a micro-batch over the tokens of the global batch, times dp: data parallelism averages."""
        summed = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        if isinstance(summed, DTensor):
            summed = summed.to_local()
        return summed * (self.decision.layout.dp / self._num_targets)

    def _finish_gradients(self, before: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """What data parallelism leaves undone: norms under sequence parallelism, and a tied weight in two stages.

        `before` are gradients of earlier steps that were set aside: what is summed here is this step's alone.
        """
        if self.decision.layout.tp > 1 and self.decision.layout.dp == 1:
            reduce_partial_gradients(list(self.parameters()))
        for weight in self._tied_weights():
            sum_tied_gradients(weight, self.mesh["pp"])
        for weight, gradient in before:
            assert weight.grad is not None
            weight.grad += gradient

    def _tied_weights(self) -> Iterator[nn.Parameter]:
        """This rank's weights that another stage holds too, and trains."""
        if self.tied_across_stages:
            for stage in self.stages:
                name = stage.anatomy.embedding if stage.has_embedding else stage.anatomy.head
                if stage.has_embedding or stage.has_head:
                    weight = stage.get_submodule(name).weight
                    if weight.requires_grad:
                        yield weight

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the gradients of earlier steps from tied weights: both ends have them, and would add them once more."""
        before = [(weight, weight.grad) for weight in self._tied_weights() if weight.grad is not None]
        for weight, _ in before:
            weight.grad = None
        return before

    # Norm of the gradients ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before, on all ranks."""
        if not max_norm >= 0:
            raise RefusedError(f"max_norm={max_norm}; legal: numbers from 0")
        gradients = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        squares = torch.zeros((), device=self.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm([_local(grad) for _, grad in gradients])).float()
            copies = torch.tensor([float(self.num_copies(p)) for p, _ in gradients], device=self.device)
            squares = (norms.square() / copies).sum()
        with naming_the_late():
            dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6: as torch.nn.utils.clip_grad_norm_
        if gradients:
            torch._foreach_mul_([_local(grad) for _, grad in gradients], factor)
        return norm

    def num_copies(self, parameter: nn.Parameter) -> int:
        """Ranks that hold the same part of a parameter: each counts that part of the norm."""
        copies = self.decision.layout.dp * self.decision.layout.tp
        if isinstance(parameter, DTensor):
            for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
                copies //= 1 if placement.is_replicate() else size
        return copies * (2 if self.tied_across_stages and self._is_tied(parameter) else 1)

    def _is_tied(self, parameter: nn.Parameter) -> bool:
        return any(
            parameter is stage.get_submodule(name).weight
            for stage in self.stages
            for name, there in ((stage.anatomy.embedding, stage.has_embedding), (stage.anatomy.head, stage.has_head))
            if there
        )


def _next_tokens(inputs: Tensor) -> Tensor:
    """Each position predicts the input after it, the last one nothing."""
    return functional.pad(inputs[:, 1:], (0, 1), value=IGNORE)


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
    """The group of all ranks along these axes together; None where that is one rank."""
    wide = tuple(axis for axis in axes if mesh[axis].size() > 1)
    if not wide:
        return None
    if len(wide) == 1:
        return mesh[wide[0]].get_group()
    return mesh[wide]._flatten("_".join(wide)).get_group()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
