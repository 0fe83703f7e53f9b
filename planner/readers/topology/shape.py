"""A node from inside -> what a cluster record says of it: its fast domain, the rate of a GPU into it, and its interfaces.

NVLinks are counted, and whether a switch joins them follows from the count: where the links that a GPU's row names add up
to more than it has, all of them lead to a switch and every pair may use them all; else each pair has its own, and a GPU's
rate is their sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.readers.topology.seen import SeenGpu, SeenNode, Way

NVLINKS: Mapping[str, tuple[int, float, str]] = {
    "volta": (6, 25e9, "nvlink2"),
    "ampere": (12, 25e9, "nvlink3"),
    "hopper": (18, 25e9, "nvlink4"),
    "blackwell": (18, 50e9, "nvlink5"),
}
"""Family -> NVLinks of a GPU, bytes/s of one in one direction, class (cost_models/data/links.json; NVIDIA data sheets)."""
BRIDGED = ("a6000", "a40", "rtx3090")
"""Ampere with GDDR: four NVLinks of 14.0625 GB/s to one neighbour (NVIDIA RTX A6000 data sheet: 112.5 GB/s both ways)."""
_BRIDGED_LINKS = (4, 14.0625e9, "nvlink3")

PAYLOAD = {26.562: 25.0, 53.125: 50.0, 25.781: 25.0}
"""What `nvidia-smi nvlink -s` shows (signalling, GB/s) -> what the data sheet calls the link's bandwidth."""


def nvlinks_of(device: str, family: str) -> tuple[int, float, str] | None:
    """Links of a GPU, bytes/s of one, their class; None where it has none."""
    return _BRIDGED_LINKS if device in BRIDGED else NVLINKS.get(family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domains:
    """Which GPUs of a node reach one another over links of their own."""

    groups: tuple[tuple[int, ...], ...]
    """Joined by NVLink or xGMI, over other GPUs too; largest first; one of one GPU has no such link."""
    links: tuple[int, ...]
    """Of each GPU into its group: through a switch the bond, else the sum over its peers."""
    is_switched: bool
    """A switch joins them: every pair may use all links of both."""
    indirect: tuple[tuple[int, int], ...]
    """Pairs of one group without a link of their own."""

    @property
    def whole(self) -> bool:
        """All GPUs are in one group."""
        return len(self.groups) == 1

    @property
    def off(self) -> tuple[int, ...]:
        """GPUs without a link, where most others are in one group."""
        largest = len(self.groups[0])
        rest = [group for group in self.groups[1:] if len(group) == 1]
        if largest > 2 and len(rest) == len(self.groups) - 1 and 2 * largest > largest + len(rest):
            return tuple(sorted(group[0] for group in rest))
        return ()


def domains_of(node: SeenNode, most_links: int | None) -> Domains:
    """The fast domains of a node; `most_links` is what a GPU of its kind has (None = unknown: 18)."""
    import networkx as nx  # a tenth of a second that only pasted files ask for

    count = len(node.gpus)
    graph = nx.Graph()
    graph.add_nodes_from(range(count))
    fast = {pair: path for pair, path in node.paths.items() if path.way.is_fast}
    graph.add_edges_from(fast)
    groups = sorted(
        (tuple(sorted(group)) for group in nx.connected_components(graph)), key=lambda group: (-len(group), group)
    )
    sums, best = [0] * count, [0] * count
    for (i, j), path in fast.items():
        for gpu in (i, j):
            sums[gpu] += path.links
            best[gpu] = max(best[gpu], path.links)
    nvlink = any(path.way is Way.NVLINK for path in fast.values())
    switched = nvlink and max(sums, default=0) > (most_links or 18)
    group_of = {gpu: number for number, group in enumerate(groups) for gpu in group}
    indirect = tuple(
        pair for pair, path in node.paths.items() if group_of[pair[0]] == group_of[pair[1]] and not path.links
    )
    return Domains(
        groups=tuple(groups), links=tuple(best if switched else sums), is_switched=switched, indirect=indirect
    )


def fabric_nics(node: SeenNode, expected: int | None) -> tuple[tuple[int, ...], str]:
    """Numbers of the interfaces that training uses, and why the others are left out ("" where none is).

    An interface counts that is the nearest of some GPU; where that is more than GPUs, two ports of one card (often the host's
    own) yield to single ones, and names that say storage to all others. `expected` is what the node is sold with.
    """
    every = tuple(range(len(node.nics)))
    if not every or not node.nic_ways:
        return every, ""
    nearest: set[int] = set()
    for gpu in range(len(node.gpus)):
        best = min(node.nic_ways[gpu, nic].distance for nic in every)
        nearest |= {nic for nic in every if node.nic_ways[gpu, nic].distance == best}
    found, why = tuple(sorted(nearest)), "farther from every GPU than others are"
    found, why = _without(found, _named_otherwise(node, found), why, "named for storage or management")
    if len(found) > max(len(node.gpus), expected or 0):
        paired = {nic for pair in node.twins for nic in pair if pair[0] in found and pair[1] in found}
        found, why = _without(found, tuple(nic for nic in found if nic in paired), why, "two ports of one card")
    left = [node.nics[nic].name for nic in every if nic not in found]
    return found, f"{', '.join(left[:8])}: {why}" if left else ""


def _without(found: Sequence[int], odd: Sequence[int], why: str, reason: str) -> tuple[tuple[int, ...], str]:
    kept = tuple(nic for nic in found if nic not in odd)
    return (kept, reason if kept != tuple(found) else why) if kept else (tuple(found), why)


def _named_otherwise(node: SeenNode, found: Sequence[int]) -> tuple[int, ...]:
    words = ("stor", "mgmt", "bond", "eth", "eno")
    return tuple(nic for nic in found if any(word in node.nics[nic].name.lower() for word in words))


def merged(node: SeenNode, other: SeenNode) -> SeenNode:
    """One node seen twice, by commands of two kinds: the nearest way of both, and of each device all that either knows."""
    paths = {}
    for pair, path in node.paths.items():
        second = other.paths[pair]
        paths[pair] = min(path, second, key=lambda one: (one.way.distance, -one.links))
    more = max(node, other, key=lambda one: (any(nic.bytes_per_s for nic in one.nics), len(one.nics)))
    gpus = tuple(
        SeenGpu(
            name=one.name or two.name,
            memory_bytes=one.memory_bytes or two.memory_bytes,
            place=one.place or two.place,
            pcie_bytes_per_s=one.pcie_bytes_per_s or two.pcie_bytes_per_s,
        )
        for one, two in zip(node.gpus, other.gpus, strict=True)
    )
    return replace(
        node,
        source=f"{node.source} and {other.source}",
        gpus=gpus,
        paths=paths,
        nics=more.nics,
        nic_ways=more.nic_ways,
        twins=more.twins,
        knows_nics=node.knows_nics or other.knows_nics,
        knows_links=node.knows_links or other.knows_links,
        asymmetric=node.asymmetric or other.asymmetric,
        num_hosts=max(node.num_hosts, other.num_hosts),
        notes=(*node.notes, *other.notes),
    )
