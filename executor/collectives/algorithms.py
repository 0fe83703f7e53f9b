"""Sums of a tensor over the ranks of an axis, as lists of stages: flat, ring, hierarchical.

flat          the backend's all-reduce over all ranks of the axis
ring          2(n-1) steps between neighbours in rank order: reduce-scatter, then all-gather (Thakur, Rabenseifner, Gropp 2005)
hierarchical  reduce-scatter among the ranks of a node, all-reduce of each share between nodes, all-gather in the node

gloo's reduce-scatter takes as long as its all-reduce (524 against 522 ms for 4 MiB over shaped links, torch 2.13), so
within a node of CPUs it is an all-to-all of the shares and a local sum, which moves half as much.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from executor.collectives.lanes import Lane, StageOfCollective
from executor.collectives.nodes import Hierarchy


class Sum(ABC):
    """The sum of a tensor over the ranks of an axis, in place."""

    @abstractmethod
    def stages(self, buffer: Tensor) -> Sequence[StageOfCollective]:
        """The collectives that replace a flat, contiguous `buffer` by its sum over the ranks."""

    @abstractmethod
    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Every process group that it uses."""


class Flat(Sum):
    """The backend's own all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._lane = Lane(group)

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The axis's group."""
        yield self._lane.group

    def stages(self, buffer: Tensor) -> Sequence[StageOfCollective]:
        """One all-reduce."""
        launch = partial(dist.all_reduce, buffer, group=self._lane.group, async_op=True)
        return [StageOfCollective(lane=self._lane, launch=launch)]


class Ring(Sum):
    """Steps between neighbours. A step is an all-to-all in which all shares but the neighbour's are empty."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._lane = Lane(group)
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The axis's group."""
        yield self._lane.group

    def stages(self, buffer: Tensor) -> Sequence[StageOfCollective]:
        """n-1 steps that add what arrives, n-1 that keep it; after them every rank has every part's sum."""
        size, rank = self._size, self._rank
        parts = buffer.tensor_split(size)
        stages = []
        for step in range(2 * (size - 1)):
            sent, received = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            if step < size - 1:
                arrived = torch.empty_like(received)
                stages.append(self._step(sent, arrived, partial(_add, received, arrived)))
            else:
                stages.append(self._step(sent, received, None))
        return stages

    def _step(self, sent: Tensor, received: Tensor, finish: partial[None] | None) -> StageOfCollective:
        size, rank = self._size, self._rank
        launch = partial(
            dist.all_to_all_single,
            received,
            sent,
            [received.numel() if other == (rank - 1) % size else 0 for other in range(size)],
            [sent.numel() if other == (rank + 1) % size else 0 for other in range(size)],
            group=self._lane.group,
            async_op=True,
        )
        return StageOfCollective(lane=self._lane, launch=launch, finish=finish)


def _add(total: Tensor, arrived: Tensor) -> None:
    total += arrived


class Hierarchical(Sum):
    """Within nodes at the speed of nodes; only a node's share of the bytes crosses the network."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._scatter, self._between, self._gather = map(Lane, (hierarchy.scatter, hierarchy.between, hierarchy.gather))
        self._per_node = dist.get_world_size(hierarchy.scatter)

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """The two of the node and the one between nodes."""
        for lane in (self._scatter, self._between, self._gather):
            yield lane.group

    def stages(self, buffer: Tensor) -> Sequence[StageOfCollective]:
        """Three collectives, each in a lane of its own, so that those of several buckets go at once."""
        shares = self._per_node
        share_size = math.ceil(buffer.numel() / shares)
        whole = buffer
        if share_size * shares > buffer.numel():
            whole = buffer.new_zeros(share_size * shares)
            whole[: buffer.numel()] = buffer
        share = buffer.new_empty(share_size)
        back = partial(_copy_back, buffer, whole) if whole is not buffer else None
        between = partial(dist.all_reduce, share, group=self._between.group, async_op=True)
        gather = partial(dist.all_gather_single, whole, share, group=self._gather.group, async_op=True)
        return [
            self._scattered(whole, share),
            StageOfCollective(lane=self._between, launch=between),
            StageOfCollective(lane=self._gather, launch=gather, finish=back),
        ]

    def _scattered(self, whole: Tensor, share: Tensor) -> StageOfCollective:
        group = self._scatter.group
        if whole.device.type != "cpu":
            launch = partial(dist.reduce_scatter_single, share, whole, group=group, async_op=True)
            return StageOfCollective(lane=self._scatter, launch=launch)
        arrived = torch.empty_like(whole)
        launch = partial(dist.all_to_all_single, arrived, whole, group=group, async_op=True)
        add_up = partial(_sum_parts, arrived.view(self._per_node, -1), share)
        return StageOfCollective(lane=self._scatter, launch=launch, finish=add_up)


def _sum_parts(parts: Tensor, total: Tensor) -> None:
    torch.sum(parts, dim=0, out=total)


def _copy_back(buffer: Tensor, whole: Tensor) -> None:
    buffer.copy_(whole[: buffer.numel()])
