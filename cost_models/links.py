"""Links as they perform: from a cluster's nominal facts, tables and calibration to what one device finds at each level.

  island, domain    one device's bandwidth into it; in a mesh, to so many of its members
  network           one device's share of its node's interfaces
  levels            one device's share of a switch's uplinks, where all devices below send at once

Efficiency and latencies: the calibration's for the class of links, else those of data/links.json, else the calibration's
for any link of that place. What is not as it should be (a node, an uplink) holds for the ranks there and what they meet.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.calibrations import Rate, rate, value_or
from cost_models.records import Calibration, Cluster, Curve, DomainShape, Link, NodeKind, RecordError

FloatArray = NDArray[np.float64]

SMALL_PROTOCOL_SHARE = 0.5
"""NCCL's LL sends a flag with every 4 bytes of data: half the bandwidth (NCCL documentation, protocols)."""

RING_PLATEAU = 1.4
"""Times its latency that a ring's all-reduce of large messages has between nodes ("plateau effect of ring": NVIDIA/nccl
src/graph/tuning.cc, from compute capability 8)."""

DETOUR = "link.efficiency_apart"
"""Coefficient: part of a node's way out that a ring uses whose members there have no interface in common."""
TREE_HOP_S = {"intra": 28e-6, "network": 50e-6}
"""Latency of one hop of a tree, large messages: that of a chunk of 256 kB (NVIDIA/nccl src/graph/tuning.cc, 01afd20a)."""

SMALL_TREE_HOP_S = {"intra": 0.52e-6, "network": 5e-6}
"""The same, small messages (its LL)."""

CUBE_LINKS = ((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2))
"""Links of a quad of DGX-1V, (device, device, number); the other quad has the same (`nvidia-smi topo -m` of a DGX-1 with
V100: six links a device)."""
CUBE_ACROSS = (2, 2, 1, 1)
"""Links from device i of the first quad to i + 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One class of links as it performs."""

    name: str
    """Class."""
    bytes_per_s: float
    """Nominal bandwidth of one device times the efficiency of the class."""
    step_s: float
    """Latency of one step of an algorithm, large messages."""
    small_step_s: float
    """The same of the protocol for small messages, at half the bandwidth."""
    rest: Rate
    """The efficiency, and what it rests on."""
    tree_step_s: float
    """Latency of one hop of a tree, large messages."""
    small_tree_step_s: float
    """The same, small messages."""
    small_bytes_per_s: float = math.inf
    """Ceiling of a group's bandwidth in the protocol for small messages."""

    @property
    def small_protocol(self) -> "LinkCost":
        """The same in the protocol for small messages: other latencies, half the bandwidth."""
        return replace(
            self,
            step_s=self.small_step_s,
            tree_step_s=self.small_tree_step_s,
            bytes_per_s=self.bytes_per_s * SMALL_PROTOCOL_SHARE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Ranks that find a part of the bandwidth alone."""

    first: int
    """The first of them."""
    last: int
    """The last."""
    factor: float
    """The part."""


def factor_at(slow: tuple[Slow, ...], first: ArrayLike, last: ArrayLike) -> FloatArray:
    """The least factor that any of the ranks first..last finds; 1 where none is slow."""
    first, last = np.asarray(first), np.asarray(last)
    found = np.ones(np.broadcast(first, last).shape)
    for one in slow:
        found = np.where((one.first <= last) & (one.last >= first), np.minimum(found, one.factor), found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of switches, from below."""

    name: str
    """As in the cluster."""
    unit: int
    """Devices below one switch."""
    bytes_per_s: float
    """One device's share of its uplinks."""
    latency_s: float = 0.0
    """What the way through them adds to a step."""
    slow: tuple[Slow, ...] = ()
    """Switches whose uplinks are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A cluster as collectives see it: one device's share of every level."""

    num_gpus: int
    """Devices of the cluster: the world, where nobody says another."""
    domain_size: int
    """Devices of a fast domain."""
    intra: LinkCost
    """Inside a fast domain."""
    network: LinkCost
    """Between domains: one device's share of its node's interfaces."""
    levels: tuple[Level, ...]
    """Switches, nearest first."""
    flow_bytes_per_s: float
    """Bound of one ring out of a domain: one interface for gloo, which has one ring; NCCL opens one per interface."""
    backend: str
    """nccl or gloo."""
    launch_s: float
    """Constant of one collective."""
    devices_per_nic: int
    """Devices that share one interface."""
    detour_share: float
    """What a ring finds of its way out of a domain whose members there have no interface in common."""
    ring_plateau: float
    """Times its latency that a ring's all-reduce has between domains."""
    curves: dict[str, Curve]
    """Measured, `collective/ranks/link class`."""
    domain_shares: tuple[float, ...] = ()
    """Part of a device's bandwidth into the domain that reaches n members, itself among them, n from 1; () = all of it."""
    island_size: int = 1
    """Devices with faster links among themselves; 1 = none."""
    island: LinkCost | None = None
    """Inside an island."""
    slow_domains: tuple[Slow, ...] = ()
    """Ranks whose fast domain is slow."""
    slow_nics: tuple[Slow, ...] = ()
    """Ranks whose way out is slow."""

    @property
    def small_protocol(self) -> "Fabric":
        """The same fabric in the protocol for small messages: other latencies, half of every bandwidth, a ceiling inside."""
        intra = self.intra.small_protocol
        island = None if self.island is None else self.island.small_protocol
        return replace(
            self,
            intra=replace(intra, bytes_per_s=min(intra.bytes_per_s, intra.small_bytes_per_s)),
            island=island and replace(island, bytes_per_s=min(island.bytes_per_s, island.small_bytes_per_s)),
            network=self.network.small_protocol,
            levels=tuple(replace(level, bytes_per_s=level.bytes_per_s * SMALL_PROTOCOL_SHARE) for level in self.levels),
            flow_bytes_per_s=self.flow_bytes_per_s * SMALL_PROTOCOL_SHARE,
            ring_plateau=1.0,
        )

    @property
    def unhindered(self) -> "Fabric":
        """The same where nothing is slow and no switch above the nodes binds: no hop is faster than here."""
        return replace(self, slow_domains=(), slow_nics=(), levels=())


def backend_of(cluster: Cluster) -> str:
    """gloo where the ranks are CPU processes, else nccl (RCCL counts as nccl)."""
    return "gloo" if cluster.pools[0].kind.device.family == "cpu" else "nccl"


def fabric(cluster: Cluster, calibration: Calibration) -> Fabric:
    """What collectives need of a cluster. One kind of node only: RecordError by name otherwise."""
    if len(cluster.pools) > 1:
        kinds = ", ".join(pool.kind.name for pool in cluster.pools)
        raise RecordError(f"cluster {cluster.name!r} mixes {kinds}: pricing several kinds of nodes is not built yet")
    kind = cluster.pools[0].kind
    backend = backend_of(cluster)
    share = kind.node_bandwidth_bytes_per_s / kind.gpus_per_node
    network = _link_cost(kind.nic.name, share, "network", calibration)
    # the flags of the protocol for small messages are the devices' work, so their links know the ceiling between nodes too
    between = _link_table().get(kind.intra.name, {}).get("small_message_bytes_per_s_between_nodes", math.inf)
    network = replace(network, small_bytes_per_s=between)
    return Fabric(
        num_gpus=cluster.num_gpus,
        domain_size=kind.domain_size,
        intra=_link_cost(kind.intra.name, kind.intra.bandwidth_bytes_per_s, "intra", calibration),
        network=network,
        levels=_levels(cluster, network.bytes_per_s),
        flow_bytes_per_s=network.bytes_per_s * kind.gpus_per_node / kind.num_nics if backend == "gloo" else math.inf,
        backend=backend,
        devices_per_nic=max(kind.gpus_per_node // kind.num_nics, 1),
        detour_share=value_or(1.0, calibration, DETOUR, backend),
        launch_s=rate(calibration, "collective.launch_s", backend).value,
        ring_plateau=RING_PLATEAU if backend == "nccl" else 1.0,
        curves=dict(calibration.curves),
        domain_shares=domain_shares(kind),
        island_size=kind.island.num_gpus if kind.island else 1,
        island=_link_cost(kind.island.link.name, kind.island.link.bandwidth_bytes_per_s, "intra", calibration)
        if kind.island
        else None,
        slow_domains=_slow_nodes(cluster, "intra_factor"),
        slow_nics=_slow_nodes(cluster, "nic_factor"),
    )


def _slow_nodes(cluster: Cluster, what: str) -> tuple[Slow, ...]:
    """Ranks of the nodes that have a factor below 1; a slow fast domain is slow for all nodes that share it."""
    kind = cluster.pools[0].kind
    found = []
    for item in cluster.exceptions:
        if getattr(item, what) < 1:
            unit = kind.domain_size if what == "intra_factor" else kind.gpus_per_node
            first = item.node * kind.gpus_per_node // unit * unit
            found.append(Slow(first=first, last=first + unit - 1, factor=getattr(item, what)))
    return tuple(found)


def _levels(cluster: Cluster, share_bytes_per_s: float) -> tuple[Level, ...]:
    levels, unit, through = [], cluster.pools[0].kind.gpus_per_node, share_bytes_per_s
    for level in cluster.fabric:
        unit *= level.radix
        through /= level.oversubscription
        slow = tuple(
            Slow(first=one.switch * unit, last=(one.switch + 1) * unit - 1, factor=one.factor)
            for one in cluster.slow_uplinks
            if one.level == level.name
        )
        levels.append(Level(name=level.name, unit=unit, bytes_per_s=through, latency_s=level.latency_s, slow=slow))
    return tuple(levels)


def cube_links() -> NDArray[np.int64]:
    """(8, 8) links between each two devices of a DGX-1V."""
    links = np.zeros((8, 8), dtype=np.int64)
    for one, other, count in CUBE_LINKS:
        for quad in (0, 4):
            links[one + quad, other + quad] = links[other + quad, one + quad] = count
    for device, count in enumerate(CUBE_ACROSS):
        links[device, device + 4] = links[device + 4, device] = count
    return links


def domain_shares(kind: NodeKind) -> tuple[float, ...]:
    """Part of a device's bandwidth that reaches n members of its domain, n from 1: () where a switch joins them.

    Of a cube mesh that of the poorest member of the poorest aligned group of n.
    """
    size = kind.domain_size
    if kind.shape is DomainShape.CUBE_MESH:
        links = cube_links()
        poorest = [
            min(
                int(links[np.ix_(group, group)].sum(axis=1).min())
                for group in (list(range(first, min(first + count, size))) for first in range(0, size, count))
                if len(group) == count
            )
            for count in range(2, size + 1)
        ]
        return tuple(np.maximum([poorest[0], *poorest], 1) / links.sum(axis=1).max())
    peers = size - 1 if kind.shape is DomainShape.MESH else _link_table().get(kind.intra.name, {}).get("num_peers", 1)
    if peers <= 1:
        return ()
    return tuple(min(max(count - 1, 1) / peers, 1.0) for count in range(1, size + 1))


@lru_cache(maxsize=1)
def _link_table() -> Mapping[str, Mapping[str, float]]:
    path = resources.files("cost_models.data").joinpath("links.json")
    links: Mapping[str, Mapping[str, float]] = json.loads(path.read_text(encoding="utf-8"))["links"]
    return links


def link_bytes_per_s(link: Link, calibration: Calibration) -> float:
    """What a link carries in one direction: its nominal bandwidth times the efficiency of its class."""
    return _link_cost(link.name, link.bandwidth_bytes_per_s, "intra", calibration).bytes_per_s


def _link_cost(name: str, bytes_per_s: float, place: str, calibration: Calibration) -> LinkCost:
    """A class of links as it performs, from the most particular source that knows it."""
    row: Mapping[str, Any] = _link_table().get(name, {})

    def best(what: str, column: str) -> Rate:
        own = calibration.coefficients.get(f"{what}.{name}")
        if own is None and column in row:
            return Rate(value=row[column], fitted=False)
        return rate(calibration, what, name, place)

    efficiency = best("link.efficiency", "efficiency")
    step_s = best("link.latency_s", "latency_s").value
    small_step_s = best("link.small_latency_s", "small_message_latency_s").value
    return LinkCost(
        name=name,
        bytes_per_s=bytes_per_s * efficiency.value,
        step_s=step_s,
        small_step_s=small_step_s,
        rest=efficiency,
        tree_step_s=max(TREE_HOP_S[place], step_s),
        small_tree_step_s=max(SMALL_TREE_HOP_S[place], small_step_s),
        small_bytes_per_s=row.get("small_message_bytes_per_s", math.inf),
    )
