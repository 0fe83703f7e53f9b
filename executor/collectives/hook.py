"""The hook by which DDP hands over its buckets of gradients while the backward pass goes on."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from executor.collectives.algorithms import Sum
from executor.collectives.lanes import run_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation:
    """How the gradients of replicas are averaged: what DDP's hook is given as its state."""

    how: Sum
    """The algorithm, with its groups."""
    num_replicas: int
    """The sum is divided by this."""
    compressed: torch.dtype | None = None
    """The type on the wire, in which the sum is made too; None = the gradients' own."""
    bucket_mib: float | None = None
    """Gradients of a bucket, MiB; None = what DDP takes by itself."""
    overlap: bool = True
    """Return while the sum goes on; otherwise the backward pass waits for it."""


def average_bucket(state: Synchronisation, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average one bucket over the replicas; the future of its buffer. (DDP asks for these names of parameters.)"""
    buffer = bucket.buffer()
    wire = buffer if state.compressed is None else buffer.to(state.compressed)
    wire.div_(state.num_replicas)  # before the sum: halves do not overflow
    future = run_stages(state.how.stages(wire), wire)
    if wire is not buffer:
        future = future.then(lambda done: buffer.copy_(done.value()))
    if not state.overlap:
        future.wait()
    return future
