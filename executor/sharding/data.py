"""Data parallelism: DDP where nothing is sharded, FSDP2 for ZeRO 2 and 3, both with replicas of shards where planned.

zero 0, tp 1   DDP: gradients are averaged in buckets during the last backward pass of a step.
zero 0, tp > 1 `replicate`, which composes with DTensor where DDP does not. It holds a second copy of each weight from the
               layer's forward to its backward pass.
zero 2         FSDP, parameters gathered once a micro-batch (reshard_after_forward=False).
zero 3         FSDP, parameters gathered at each use (reshard_after_forward=True).
Units of sharding are the blocks: embedding, each layer, norm with head (one unit for embedding and head where tied).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cost_models.records import Layout, Precision
from executor.collectives.hook import Synchronisation, average_bucket
from executor.stage import StageModule


def shard_data(
    stage: StageModule,
    layout: Layout,
    mesh: DeviceMesh,
    precision: Precision,
    synchronisation: Synchronisation | None = None,
) -> nn.Module:
    """The stage, replicated or sharded over the data-parallel axes of `mesh`; a new module for DDP, else in place.

    `synchronisation` is how DDP averages gradients, where the plan decides that.
    """
    if layout.dp == 1:
        return stage
    if layout.zero == 0 and layout.tp == 1:
        replicas = DistributedDataParallel(
            stage,
            process_group=mesh["dp_replicate"].get_group(),
            bucket_cap_mb=synchronisation.bucket_mib if synchronisation is not None else None,
            forward_sync_buffers=False,  # the only buffers are constants
            init_sync=False,  # `apply` has compared the weights of all ranks
            gradient_as_bucket_view=True,
        )
        if synchronisation is not None:
            replicas.register_comm_hook(synchronisation, average_bucket)
        return replicas
    policy = MixedPrecisionPolicy()
    if precision is Precision.BF16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout.tp > 1:  # the embedding's output is a view of a DTensor; hidden states are never changed in place here
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in _units(stage):
        _shard_unit(unit, layout, mesh, policy)
    _shard_unit(stage, layout, mesh, policy)
    return stage


def _units(stage: StageModule) -> Iterator[nn.Module | list[nn.Module]]:
    """What is gathered and reduced at once. Tied weights stay with the root, which gathers once for both ends."""
    anatomy = stage.anatomy
    tied = stage.has_embedding and stage.has_head
    if tied:
        tied = stage.get_submodule(anatomy.embedding).weight is stage.get_submodule(anatomy.head).weight
    if stage.has_embedding and not tied:
        yield stage.get_submodule(anatomy.embedding)
    for _, layer in stage.named_layers():
        yield layer
    if stage.has_head and not tied:
        yield [stage.get_submodule(anatomy.norm), stage.get_submodule(anatomy.head)]


def _shard_unit(
    unit: nn.Module | list[nn.Module], layout: Layout, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    if layout.zero == 0:
        replicate(unit, mesh=mesh["dp_replicate"], mp_policy=policy)
        return
    dp_mesh = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
    fully_shard(unit, mesh=dp_mesh, reshard_after_forward=layout.zero == 3, mp_policy=policy)


@contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: nothing is synchronised before it must be.

    Replicated gradients wait for the last micro-batch. Sharded ones are reduce-scattered in each, or they would not be
    sharded; only the sum over replicas of shards waits.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, ReplicateModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
    yield
