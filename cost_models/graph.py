"""A cluster as a networkx graph: a derived view, for drawing, paths and cuts.

Nodes of the graph are devices, network interfaces and switches; an edge carries `bandwidth_bytes_per_s`, nominal and in one
direction, and `link`, its class. The view is either the whole cluster, or one fast domain with one path to the top of the
fabric, which stands for all the others: 32,768 devices then cost as little as 72.

  domain switch ── devices            intra bandwidth of a device, times intra_factor of its node
  domain switch ── interface          bandwidth of the interface: every device of the node may use it (`beside` names the near)
  interface ── switch of its rail     bandwidth of the interface, times nic_factor of its node
  switch ── switch above              what a full switch of children brings / oversubscription

With rails each interface of a node has its own plane of switches, else all interfaces share one.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import networkx as nx

from cost_models.records import Cluster, FabricException, NodeKind, RecordError

BANDWIDTH = "bandwidth_bytes_per_s"
"""Name of the edges' attribute, for networkx's `capacity=`."""

Expand = Literal["domain", "all"]


def graph(cluster: Cluster, expand: Expand = "domain") -> "nx.Graph[str]":
    """The cluster's graph: all of it, or one domain of each pool with its path up.

    Names: `gpu/<rank>`, `nic/<node>/<index>`, `domain/<number>`, `switch/<plane>/<level>/<number>`.
    """
    if expand not in ("domain", "all"):
        raise RecordError(f"expand={expand!r}; legal values: domain, all")
    view: nx.Graph[str] = nx.Graph(name=cluster.name, expand=expand)
    exceptions = {exception.node: exception for exception in cluster.exceptions}
    leaves: list[tuple[int, NodeKind]] = []
    first_node = first_gpu = first_domain = 0
    for pool in cluster.pools:
        kind = pool.kind
        shown = pool.num_nodes if expand == "all" else min(kind.domain_nodes, pool.num_nodes)
        for index in range(shown):
            node = first_node + index
            domain = first_domain + index // kind.domain_nodes
            _add_node(view, kind, node, first_gpu + index * kind.gpus_per_node, domain, exceptions.get(node))
            leaves.append((node, kind))
        first_node += pool.num_nodes
        first_gpu += pool.num_gpus
        first_domain += -(-pool.num_nodes // kind.domain_nodes)
    if cluster.num_nodes > 1:
        _add_fabric(view, cluster, leaves, exceptions)
    return view


def _add_node(
    view: "nx.Graph[str]", kind: NodeKind, node: int, first_gpu: int, domain: int, exception: FabricException | None
) -> None:
    """The devices and interfaces of a node, under the switch of its fast domain."""
    intra = kind.intra.bandwidth_bytes_per_s * (exception.intra_factor if exception else 1.0)
    view.add_node(f"domain/{domain}", kind="switch", level="domain")
    for index in range(kind.gpus_per_node):
        gpu = f"gpu/{first_gpu + index}"
        view.add_node(gpu, kind="gpu", node=node, device=kind.device.name)
        _join(view, gpu, f"domain/{domain}", intra, kind.intra.name)
    beside: dict[int, list[str]] = {}
    for gpu_index, nic_index in _beside(kind):
        beside.setdefault(nic_index, []).append(f"gpu/{first_gpu + gpu_index}")
    for index in range(kind.num_nics):
        nic = f"nic/{node}/{index}"
        view.add_node(nic, kind="nic", node=node, beside=tuple(beside[index]))
        _join(view, f"domain/{domain}", nic, kind.nic.bandwidth_bytes_per_s, kind.nic.name)


def _beside(kind: NodeKind) -> Iterable[tuple[int, int]]:
    """(device, interface) pairs that lie side by side; every device and every interface is in one at least."""
    count = max(kind.gpus_per_node, kind.num_nics)
    return ((i * kind.gpus_per_node // count, i * kind.num_nics // count) for i in range(count))


def _add_fabric(
    view: "nx.Graph[str]",
    cluster: Cluster,
    leaves: list[tuple[int, NodeKind]],
    exceptions: dict[int, FabricException],
) -> None:
    """The switches: level by level, each plane for itself, until one switch joins everything."""
    radices = [level.radix for level in cluster.fabric]
    below: dict[tuple[int, int], float] = {}  # (plane, switch) -> the widest child
    for node, kind in leaves:
        factor = exceptions[node].nic_factor if node in exceptions else 1.0
        for index in range(kind.num_nics):
            plane = index if cluster.rails else 0
            number = node // radices[0] if radices else 0
            switch = _switch(view, cluster, plane, 0, number)
            bandwidth = kind.nic.bandwidth_bytes_per_s
            _join(view, f"nic/{node}/{index}", switch, bandwidth * factor, kind.nic.name)
            # an uplink is sized for a full switch of the best nodes, whether or not all its ports are in use
            into_plane = bandwidth * (1 if cluster.rails else kind.num_nics)
            below[plane, number] = max(into_plane, below.get((plane, number), 0.0))
    for level, described in enumerate(cluster.fabric):
        above: dict[tuple[int, int], float] = {}
        for (plane, number), child in below.items():
            uplink = child * described.radix / described.oversubscription
            parent = number // radices[level + 1] if level + 1 < len(radices) else 0
            _join(
                view,
                _switch(view, cluster, plane, level, number),
                _switch(view, cluster, plane, level + 1, parent),
                uplink,
                described.name,
            )
            above[plane, parent] = max(uplink, above.get((plane, parent), 0.0))
        below = above


def _switch(view: "nx.Graph[str]", cluster: Cluster, plane: int, level: int, number: int) -> str:
    name = f"switch/{plane}/{level}/{number}"
    label = cluster.fabric[level].name if level < len(cluster.fabric) else "top"
    view.add_node(name, kind="switch", level=label, plane=plane)
    return name


def _join(view: "nx.Graph[str]", a: str, b: str, bandwidth_bytes_per_s: float, link: str) -> None:
    view.add_edge(a, b, **{BANDWIDTH: bandwidth_bytes_per_s, "link": link})


# Questions that one asks of it -------------------------------------------------------------------------------------


def cut_bytes_per_s(view: "nx.Graph[str]", sources: Iterable[str], sinks: Iterable[str]) -> float:
    """The most that all `sources` together can send to all `sinks` (max-flow = min-cut), bytes/s in one direction."""
    joined: nx.Graph[Any] = view.copy()
    for end, members in (("from", sources), ("to", sinks)):
        # edges without a capacity are infinite to networkx
        joined.add_edges_from((end, member) for member in members)
    return float(nx.minimum_cut_value(joined, "from", "to", capacity=BANDWIDTH))


def widest_path_bytes_per_s(view: "nx.Graph[str]", a: str, b: str) -> float:
    """The bandwidth of the best single path from a to b: its narrowest edge, bytes/s in one direction."""
    tree = nx.maximum_spanning_tree(view, weight=BANDWIDTH)
    path = nx.shortest_path(tree, a, b)
    return float(min(tree.edges[edge][BANDWIDTH] for edge in pairwise(path)))


def gpus_of(view: "nx.Graph[str]", nodes: Iterable[int]) -> list[str]:
    """The devices of some nodes, in order."""
    wanted = set(nodes)
    return [name for name, data in view.nodes(data=True) if data["kind"] == "gpu" and data["node"] in wanted]


def path_to_top(view: "nx.Graph[str]", gpu: str) -> list[str]:
    """The representative path of a device: its domain, the interface beside it, then switch by switch to the top."""
    domain = next(iter(view.neighbors(gpu)))
    nic = next(near for near in view.neighbors(domain) if gpu in view.nodes[near].get("beside", ()))
    path = [gpu, domain, nic]
    while higher := [near for near in view.neighbors(path[-1]) if _level(near) > _level(path[-1])]:
        path.append(higher[0])
    return path


def _level(name: str) -> int:
    return int(name.split("/")[2]) if name.startswith("switch/") else -1
