"""A cluster as a networkx graph: a derived view, for drawing, paths and cuts.

Nodes of the graph are devices, network interfaces and switches; an edge carries `bandwidth_bytes_per_s`, nominal and in one
direction, and `link`, its class. The view is either the whole cluster, or one fast domain with one path to the top of the
fabric, which stands for all the others: 32,768 devices then cost as little as 72.

  domain switch ── devices            intra bandwidth of a device, times intra_factor of its node
  device ── device                    in a mesh and a cube mesh instead: each pair's own links
  island ── devices                   faster links of a few devices of a node
  NUMA node ── devices, interfaces    the devices' way to the host, the interfaces' bandwidth; NUMA nodes of a host are joined
                                      by what the devices of one of them bring. Where the way to the host is unknown, or is
                                      the fast domain itself, interfaces hang on the domain's switch
  interface ── switch of its rail     bandwidth of the interface, times nic_factor of its node
  switch ── switch above              what a full switch of children brings / oversubscription, times the factor of a slow
                                      uplink; `latency_s` where the level has one (regions)

With rails each interface of a node has its own plane of switches, else all interfaces share one.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import networkx as nx

from cost_models.links import cube_links
from cost_models.records import Cluster, DomainShape, FabricException, NodeKind, RecordError

BANDWIDTH = "bandwidth_bytes_per_s"
"""Name of the edges' attribute, for networkx's `capacity=`."""

Expand = Literal["domain", "all"]


def graph(cluster: Cluster, expand: Expand = "domain") -> "nx.Graph[str]":
    """The cluster's graph: all of it, or one domain of each pool with its path up.

    Names: `gpu/<rank>`, `nic/<node>/<index>`, `numa/<node>/<index>`, `island/<node>/<index>`, `domain/<number>`,
    `switch/<plane>/<level>/<number>`.
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
    factor = exception.intra_factor if exception else 1.0
    for index in range(kind.gpus_per_node):
        view.add_node(f"gpu/{first_gpu + index}", kind="gpu", node=node, device=kind.device.name)
    _add_domain(view, kind, first_gpu, domain, factor)
    if kind.island is not None:
        for index in range(kind.gpus_per_node):
            island = f"island/{node}/{index // kind.island.num_gpus}"
            view.add_node(island, kind="switch", level="island")
            link = kind.island.link
            _join(view, f"gpu/{first_gpu + index}", island, link.bandwidth_bytes_per_s * factor, link.name)
    beside: dict[int, list[str]] = {}
    for gpu_index, nic_index in _beside(kind):
        beside.setdefault(nic_index, []).append(f"gpu/{first_gpu + gpu_index}")
    hosts = _add_host(view, kind, node, first_gpu)
    for index in range(kind.num_nics):
        nic = f"nic/{node}/{index}"
        view.add_node(nic, kind="nic", node=node, beside=tuple(beside[index]))
        within = hosts[index * len(hosts) // kind.num_nics] if hosts else f"domain/{domain}"
        _join(view, within, nic, kind.nic.bandwidth_bytes_per_s, kind.nic.name)


def _add_domain(view: "nx.Graph[str]", kind: NodeKind, first_gpu: int, domain: int, factor: float) -> None:
    """What joins the devices of a node in their fast domain: a switch, or links of each pair."""
    own = range(first_gpu, first_gpu + kind.gpus_per_node)
    intra = kind.intra.bandwidth_bytes_per_s * factor
    if kind.shape is DomainShape.SWITCHED or kind.domain_size == 1:
        view.add_node(f"domain/{domain}", kind="switch", level="domain")
        for gpu in own:
            _join(view, f"gpu/{gpu}", f"domain/{domain}", intra, kind.intra.name)
        return
    cube = cube_links() if kind.shape is DomainShape.CUBE_MESH else None
    base = first_gpu - first_gpu % kind.domain_size
    for gpu in own:
        for other in range(base, gpu):
            part = 1 / (kind.domain_size - 1) if cube is None else cube[other - base, gpu - base] / cube[0].sum()
            if part:
                _join(view, f"gpu/{other}", f"gpu/{gpu}", intra * part, kind.intra.name)


def _add_host(view: "nx.Graph[str]", kind: NodeKind, node: int, first_gpu: int) -> list[str]:
    """The NUMA nodes of a host, each with its part of the devices; none where the way to them is unknown or the fast domain."""
    link = kind.host_link
    if link is None or (link.name == kind.intra.name and kind.shape is DomainShape.SWITCHED):
        return []
    names = [f"numa/{node}/{index}" for index in range(kind.numa_nodes)]
    view.add_nodes_from(names, kind="switch", level="numa")
    for index in range(kind.gpus_per_node):
        numa = names[index * len(names) // kind.gpus_per_node]
        _join(view, f"gpu/{first_gpu + index}", numa, link.bandwidth_bytes_per_s, link.name)
    for one, other in pairwise(names):
        _join(view, one, other, link.bandwidth_bytes_per_s * kind.gpus_per_node / len(names), "socket")
    return names


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
    slow = {(one.level, one.switch): one.factor for one in cluster.slow_uplinks}
    for level, described in enumerate(cluster.fabric):
        above: dict[tuple[int, int], float] = {}
        for (plane, number), child in below.items():
            uplink = child * described.radix / described.oversubscription
            parent = number // radices[level + 1] if level + 1 < len(radices) else 0
            _join(
                view,
                _switch(view, cluster, plane, level, number),
                _switch(view, cluster, plane, level + 1, parent),
                uplink * slow.get((described.name, number), 1.0),
                described.name,
                described.latency_s,
            )
            above[plane, parent] = max(uplink, above.get((plane, parent), 0.0))
        below = above


def _switch(view: "nx.Graph[str]", cluster: Cluster, plane: int, level: int, number: int) -> str:
    name = f"switch/{plane}/{level}/{number}"
    label = cluster.fabric[level].name if level < len(cluster.fabric) else "top"
    view.add_node(name, kind="switch", level=label, plane=plane)
    return name


def _join(
    view: "nx.Graph[str]", a: str, b: str, bandwidth_bytes_per_s: float, link: str, latency_s: float = 0.0
) -> None:
    view.add_edge(
        a, b, **{BANDWIDTH: bandwidth_bytes_per_s, "link": link} | ({"latency_s": latency_s} if latency_s else {})
    )


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
    """The representative path of a device: what joins it to the interface beside it, then switch by switch to the top."""
    nic = next(name for name, data in view.nodes(data=True) if gpu in data.get("beside", ()))
    between = (set(view.neighbors(gpu)) & set(view.neighbors(nic))) or {*nx.shortest_path(view, gpu, nic)[1:-1]}
    path = [gpu, *sorted(between), nic]
    while higher := [near for near in view.neighbors(path[-1]) if _level(near) > _level(path[-1])]:
        path.append(higher[0])
    return path


def _level(name: str) -> int:
    return int(name.split("/")[2]) if name.startswith("switch/") else -1
