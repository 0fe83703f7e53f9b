"""Which ranks of an axis share a node, and the process groups within nodes and between them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from executor.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """This rank's groups. Scatter and gather are of the same ranks: two collectives at once need two groups."""

    scatter: dist.ProcessGroup
    """The ranks of its node."""
    between: dist.ProcessGroup
    """The ranks of the other nodes that hold the same share."""
    gather: dist.ProcessGroup
    """The ranks of its node again."""


def by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    """The ranks of one group of an axis, node by node: ranks are numbered through nodes in order.

    RefusedError where a hierarchy has nothing to do or no equal shares.
    """
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[rank // ranks_per_node].append(rank)
    counts = sorted({len(members) for members in nodes.values()})
    if len(nodes) < 2 or counts[0] < 2 or len(counts) > 1:
        raise RefusedError(
            f"hierarchical over ranks {list(ranks)} with {ranks_per_node} ranks in a node: {len(nodes)} nodes hold "
            f"{' or '.join(map(str, counts))} of them; legal: at least 2 nodes, each with the same number of them, at least 2"
        )
    return [nodes[node] for node in sorted(nodes)]


def build_hierarchy(groups: Sequence[Sequence[int]], ranks_per_node: int) -> Hierarchy:
    """This rank's groups, `groups` being all groups of the axis; a collective of all ranks of the process group."""
    divided = [by_node(group, ranks_per_node) for group in groups]
    within = [members for nodes in divided for members in nodes]
    between = [list(members) for nodes in divided for members in zip(*nodes, strict=True)]
    return Hierarchy(scatter=_own_group(within), between=_own_group(between), gather=_own_group(within))


def _own_group(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
    return group
