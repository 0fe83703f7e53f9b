"""Tensor parallelism with sequence parallelism, by torch's own styles.

Projections into heads and MLP are split by their outputs, those out of them by their inputs; embedding and head by the
vocabulary (unevenly where it does not divide); norms are whole on every rank, but live on the tensor-parallel mesh, since a
norm of gradients over two kinds of tensors is an error in torch. Between blocks each rank holds (B, T/tp, hidden).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from executor.anatomy import Anatomy, part_of
from executor.stage import StageModule

SEQUENCE = Shard(1)
"""Placement of hidden states between blocks."""


def shard_tensors(stage: StageModule, mesh: DeviceMesh) -> None:
    """Split the parts of a stage over the `tp` mesh, in place."""
    anatomy = stage.anatomy
    tied = stage.has_embedding and stage.has_head and _tied(stage)
    styles: dict[str, ParallelStyle] = {}
    if stage.has_embedding:
        styles[anatomy.embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
    for name, layer in stage.named_layers():
        styles |= {f"{name}.{part}": style for part, style in _layer_styles(anatomy, layer).items()}
    if stage.has_head:
        styles[anatomy.norm] = SequenceParallel()
        styles[anatomy.head] = ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(stage, mesh, styles)
    if tied:  # each style made its own shard of the one weight
        stage.get_submodule(anatomy.head).weight = stage.get_submodule(anatomy.embedding).weight
    if stage.has_embedding and stage.get_submodule(anatomy.embedding).weight.requires_grad:
        stage.get_submodule(anatomy.embedding).weight.register_hook(_as_sharded)
    stage.sequence_parts = mesh.size()


def _as_sharded(gradient: Tensor) -> Tensor:
    """The part of the embedding's gradient that belongs to this rank: torch computes all of it on each, whole.

    Costs no communication, and lasts where no data parallelism takes the parameter over (FSDP cuts as it reduces).
    """
    return gradient.redistribute(placements=[Shard(0)]) if isinstance(gradient, DTensor) else gradient


def _tied(stage: StageModule) -> bool:
    head, embedding = stage.get_submodule(stage.anatomy.head), stage.get_submodule(stage.anatomy.embedding)
    return head.weight is embedding.weight


def _layer_styles(anatomy: Anatomy, layer: nn.Module) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        anatomy.attention_norm: SequenceParallel(),
        anatomy.attention: PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": SEQUENCE}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        anatomy.mlp_norm: SequenceParallel(),
        anatomy.mlp: PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
    }
    for name in (anatomy.queries, anatomy.keys, anatomy.values, anatomy.gate, anatomy.up):
        if part_of(layer, name) is not None:
            styles[name] = ColwiseParallel()
    for name in (anatomy.output, anatomy.down):
        styles[name] = RowwiseParallel(output_layouts=SEQUENCE)
    return styles


@torch.no_grad()
def reduce_partial_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of whole weights over the ranks that each saw a part of the sequence: one all-reduce for all.

    FSDP does this itself as it reduces; without it torch leaves such gradients unsummed until somebody reads them.
    """
    pending = [
        (parameter, parameter.grad)
        for parameter in parameters
        if isinstance(parameter.grad, DTensor) and any(isinstance(p, Partial) for p in parameter.grad.placements)
    ]
    if not pending:
        return
    mesh = pending[0][1].device_mesh
    assert mesh.ndim == 1
    assert all(grad.device_mesh == mesh for _, grad in pending)
    flat = torch.cat([grad.to_local().flatten() for _, grad in pending])
    dist.all_reduce(flat, group=mesh.get_group())
    for (parameter, grad), part in zip(pending, flat.split([p.numel() for p, _ in pending]), strict=True):
        parameter.grad = DTensor.from_local(part.view(grad.shape), mesh, [Replicate()], run_check=False)
