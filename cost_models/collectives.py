"""Seconds of a collective on groups of ranks.

A group is (size, stride): ranks start, start + stride, ... in the plan's rank order, innermost axis first. All groups of an
axis work at once, so a node's network interfaces are shared by all its devices: a group with k members in a fast domain
moves k shares of one device (gloo's one ring no more than one interface). Every level of switches above is one more such bound with its own share.

Bytes are those of the whole tensor: the buffer of an all-reduce or a broadcast, the gathered output of an all-gather, the
unreduced input of a reduce-scatter, what one rank sends in an all-to-all, the message of a p2p.

  ring    all_reduce 2(n-1) steps, 2(n-1)/n of the bytes; all_gather, reduce_scatter half of both
  tree    all_reduce up and down: a chain in each domain, log2 of the domains between them; 2 times the bytes, at the share of
          the bandwidth that trees reach (NCCL takes the faster of both, so do we; gloo has the ring alone)
  hierarchical  reduce-scatter in the domain, all-reduce of the shares between domains, all-gather in the domain

Small messages take a protocol of low latency at half the bandwidth and no more than a ceiling, large ones the other (NCCL's
LL and Simple); the faster one counts. Efficiency and latencies: the calibration's for the class of links, else those of
data/links.json, else the calibration's for any link of that place.

Thakur, Rabenseifner, Gropp 2005 (ring and tree costs); gloo's reduce-scatter was measured to take as long as its
all-reduce (torch 2.13, gloo over shaped links: 524 against 522 ms).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.calibrations import Rate, rate, value_or
from cost_models.compute import Seconds
from cost_models.records import Calibration, Cluster, Curve, Link, RecordError

FloatArray = NDArray[np.float64]
E = TypeVar("E", bound=StrEnum)

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

TREE_SHARE = 0.92
"""Share of the bandwidth that a tree reaches (NCCL src/graph/tuning.cc)."""


class Collective(StrEnum):
    """What a group of ranks does together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


ALONE = frozenset({Collective.ALL_TO_ALL, Collective.P2P})
"""Each rank sends for itself; elsewhere the members of a domain share one way out."""


class Algorithm(StrEnum):
    """How an all-reduce goes about it."""

    DEFAULT = "default"
    """The faster of ring and tree."""
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


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
    num_peers: float = 1.0
    """Direct links that a device's bandwidth is the sum of, one to each peer (a mesh); 1 = through a switch, all of it to any peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A cluster as collectives see it: one device's share of every level."""

    num_gpus: int
    """Devices of the cluster."""
    domain_size: int
    """Devices of a fast domain."""
    intra: LinkCost
    """Inside a fast domain."""
    network: LinkCost
    """Between domains: one device's share of its node's interfaces."""
    levels: tuple[tuple[int, float], ...]
    """(devices below one switch, bytes/s of one device through its uplinks), nearest first."""
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

    @property
    def small_protocol(self) -> "Fabric":
        """The same fabric in the protocol for small messages: other latencies, half of every bandwidth, a ceiling inside."""
        intra, network = (
            replace(
                link,
                step_s=link.small_step_s,
                tree_step_s=link.small_tree_step_s,
                bytes_per_s=link.bytes_per_s * SMALL_PROTOCOL_SHARE,
            )
            for link in (self.intra, self.network)
        )
        return replace(
            self,
            intra=replace(intra, bytes_per_s=min(intra.bytes_per_s, intra.small_bytes_per_s)),
            network=network,
            levels=tuple((unit, through * SMALL_PROTOCOL_SHARE) for unit, through in self.levels),
            flow_bytes_per_s=self.flow_bytes_per_s * SMALL_PROTOCOL_SHARE,
            ring_plateau=1.0,
        )


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
    # the slowest member sets the pace of a ring, so one bad node slows every group that may meet it
    intra_factor = min((item.intra_factor for item in cluster.exceptions), default=1.0)
    nic_factor = min((item.nic_factor for item in cluster.exceptions), default=1.0)
    share = kind.node_bandwidth_bytes_per_s / kind.gpus_per_node * nic_factor
    intra = _link_cost(kind.intra.name, kind.intra.bandwidth_bytes_per_s * intra_factor, "intra", calibration)
    network = _link_cost(kind.nic.name, share, "network", calibration)
    # the flags of the protocol for small messages are the devices' work, so their links know the ceiling between nodes too
    between = _link_table().get(kind.intra.name, {}).get("small_message_bytes_per_s_between_nodes", math.inf)
    network = replace(network, small_bytes_per_s=between)
    levels, unit, through = [], kind.gpus_per_node, network.bytes_per_s
    for level in cluster.fabric:
        unit *= level.radix
        through /= level.oversubscription
        levels.append((unit, through))
    return Fabric(
        num_gpus=cluster.num_gpus,
        domain_size=kind.domain_size,
        intra=intra,
        network=network,
        levels=tuple(levels),
        flow_bytes_per_s=network.bytes_per_s * kind.gpus_per_node / kind.num_nics if backend == "gloo" else math.inf,
        backend=backend,
        devices_per_nic=max(kind.gpus_per_node // kind.num_nics, 1),
        detour_share=value_or(1.0, calibration, DETOUR, backend),
        launch_s=rate(calibration, "collective.launch_s", backend).value,
        ring_plateau=RING_PLATEAU if backend == "nccl" else 1.0,
        curves=dict(calibration.curves),
    )


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
    row = _link_table().get(name, {})

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
        num_peers=row.get("num_peers", 1.0),
    )


def members(unit: int, size: NDArray[Any], stride: NDArray[Any]) -> FloatArray:
    """Members of a group inside one aligned unit of `unit` ranks (the fewest of any group; all = it stays inside)."""
    span = size * stride
    aligned = (span <= unit) & (np.mod(unit, span) == 0)
    inside = np.clip(unit // stride, 1, size)
    straddling = (span <= unit) & ~aligned
    return np.where(aligned, size, np.where(straddling, np.maximum(size - 1, 1), inside))


def crosses(unit: int, num_gpus: int, size: NDArray[Any], stride: NDArray[Any]) -> NDArray[np.bool_]:
    """Does a group of the axis leave a unit of `unit` ranks? Never, where the cluster is no larger."""
    return (members(unit, size, stride) < size) & (num_gpus > unit) & (size > 1)


def link_classes(fabric: Fabric, size: ArrayLike, stride: ArrayLike) -> NDArray[np.str_]:
    """The class of the slowest link of each group."""
    size, stride = (np.asarray(value, dtype=float) for value in (size, stride))
    outside = crosses(fabric.domain_size, fabric.num_gpus, size, stride)
    return np.where(outside, fabric.network.name, fabric.intra.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The groups of an axis on the fabric, as arrays."""

    size: FloatArray
    stride: FloatArray
    inside: FloatArray
    """Members in one fast domain; all where the group stays inside."""
    outside: NDArray[np.bool_]
    """The group leaves its domain."""

    @property
    def domains(self) -> FloatArray:
        """Fast domains that a group touches."""
        return np.asarray(np.ceil(self.size / self.inside))

    @property
    def depth(self) -> FloatArray:
        """Steps of a tree."""
        return np.asarray(np.ceil(np.log2(np.maximum(self.size, 1))))


def groups_of(fabric: Fabric, size: FloatArray, stride: FloatArray) -> Groups:
    """Where the groups (size, stride) lie."""
    inside = members(fabric.domain_size, size, stride)
    outside = (inside < size) & (fabric.num_gpus > fabric.domain_size) & (size > 1)
    return Groups(size=size, stride=stride, inside=np.where(outside, inside, size), outside=outside)


def intra_bytes_per_s(fabric: Fabric, inside: FloatArray) -> FloatArray:
    """Bandwidth of one device to `inside` members of its fast domain, itself among them: in a mesh that of the links to these."""
    return fabric.intra.bytes_per_s * np.clip((inside - 1) / fabric.intra.num_peers, 1 / fabric.intra.num_peers, 1.0)


def _takes_detours(fabric: Fabric, groups: Groups) -> NDArray[np.bool_]:
    """Where devices share interfaces: several members in a domain, no two of them at one interface.

    A ring enters a domain at one member and leaves it at another. Neighbours share an interface, which then carries both
    directions; members far apart have one each, and those carry one direction, or the traffic goes through the host.
    """
    apart = (groups.inside > 1) & (groups.stride >= fabric.devices_per_nic) & groups.outside
    return np.asarray(apart & (fabric.devices_per_nic > 1))


def group_bytes_per_s(fabric: Fabric, groups: Groups, *, together: bool = True) -> FloatArray:
    """Bandwidth that one ring of a group finds: the least over the levels that it crosses.

    together = the members of a domain share one way out (a ring); otherwise each sends for itself (all-to-all, p2p).
    """
    shares = groups.inside if together else np.ones_like(groups.inside)
    if together:
        shares = np.where(_takes_detours(fabric, groups), fabric.detour_share * shares, shares)
    out = np.minimum(shares * fabric.network.bytes_per_s, fabric.flow_bytes_per_s)
    intra = intra_bytes_per_s(fabric, groups.inside)
    bound = np.where(groups.outside, out, intra)
    bound = np.where(groups.outside & (groups.inside > 1), np.minimum(bound, intra), bound)
    for unit, through in fabric.levels:
        here = members(unit, groups.size, groups.stride) if together else 1.0
        beyond = crosses(unit, fabric.num_gpus, groups.size, groups.stride)
        bound = np.where(beyond, np.minimum(bound, here * through), bound)
    return np.asarray(bound, dtype=float)


def collective_s(
    fabric: Fabric,
    name: str,
    num_bytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike,
    algorithm: str = Algorithm.DEFAULT,
) -> Seconds:
    """Seconds of one collective on each of an axis's groups; arrays broadcast. A group of one costs 0.

    A measured curve for (collective, ranks, link class) beats the closed form. RecordError lists the known names.
    """
    kind, how = _known(Collective, name, "collective"), _known(Algorithm, algorithm, "algorithm")
    num_bytes, size, stride = np.broadcast_arrays(
        *(np.asarray(value, dtype=float) for value in (num_bytes, size, stride))
    )
    active = (size > 1) & (num_bytes > 0)
    if not active.any():
        return Seconds.zeros(active.shape)
    groups, together = groups_of(fabric, size, stride), kind not in ALONE
    small = fabric.small_protocol
    ceiling = np.where(groups.outside, small.network.small_bytes_per_s, small.intra.small_bytes_per_s)
    closed = np.minimum(
        _closed_s(fabric, kind, how, num_bytes, groups, group_bytes_per_s(fabric, groups, together=together)),
        _closed_s(
            small,
            kind,
            how,
            num_bytes,
            groups,
            np.minimum(group_bytes_per_s(small, groups, together=together), ceiling),
        ),
    )
    near = Seconds.resting_on(fabric.intra.rest, np.where(active & ~groups.outside, closed, 0.0))
    far = Seconds.resting_on(fabric.network.rest, np.where(active & groups.outside, closed, 0.0))
    seconds = near + far
    if fabric.curves and how is Algorithm.DEFAULT:
        curve_s = _curve_s(fabric, kind, num_bytes, size, stride)
        seconds = seconds.where(active & ~np.isnan(curve_s), np.nan_to_num(curve_s))
    return seconds


def _known(enum: type[E], name: str, what: str) -> E:
    try:
        return enum(name)
    except ValueError:
        listed = ", ".join(item.value for item in enum)
        raise RecordError(f"{what} {name!r} is not known; known: {listed}") from None


def _closed_s(
    fabric: Fabric,
    kind: Collective,
    how: Algorithm,
    num_bytes: FloatArray,
    groups: Groups,
    bytes_per_s: FloatArray,
) -> FloatArray:
    step_s = np.where(groups.outside, fabric.network.step_s, fabric.intra.step_s)
    if kind is Collective.P2P:
        return np.asarray(fabric.launch_s + step_s + num_bytes / bytes_per_s)
    if kind is Collective.ALL_TO_ALL:
        return _all_to_all_s(fabric, num_bytes, groups, bytes_per_s, step_s)
    if kind is Collective.ALL_REDUCE and how is Algorithm.HIERARCHICAL:
        return _hierarchical_s(fabric, num_bytes, groups)
    if kind is Collective.BROADCAST:
        return np.asarray(fabric.launch_s + groups.depth * step_s + num_bytes / bytes_per_s)
    whole = kind is Collective.ALL_REDUCE or (kind is Collective.REDUCE_SCATTER and fabric.backend == "gloo")
    passes = 2.0 if whole else 1.0
    wire_s = (groups.size - 1) / groups.size * num_bytes / bytes_per_s
    slower = np.where(groups.outside, fabric.ring_plateau, 1.0) if kind is Collective.ALL_REDUCE else 1.0
    ring = passes * (_ring_latency_s(fabric, groups) * slower + wire_s)
    alone = how is Algorithm.DEFAULT and fabric.backend == "gloo"
    if kind is not Collective.ALL_REDUCE or how is Algorithm.RING or alone:
        return np.asarray(fabric.launch_s + ring)
    tree = _tree_s(fabric, num_bytes, groups, bytes_per_s)
    return np.asarray(fabric.launch_s + (tree if how is Algorithm.TREE else np.minimum(ring, tree)))


def _tree_s(fabric: Fabric, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray) -> FloatArray:
    """Up and down a tree: a chain of the members in a domain, then log2 of the domains."""
    hops_s = (groups.inside - 1) * fabric.intra.tree_step_s
    hops_s = hops_s + np.ceil(np.log2(np.maximum(groups.domains, 1))) * fabric.network.tree_step_s
    return np.asarray(2.0 * (hops_s + num_bytes / (bytes_per_s * TREE_SHARE)))


def _ring_latency_s(fabric: Fabric, groups: Groups) -> FloatArray:
    """Latency of size-1 steps around the ring: one hop leaves each domain, the others stay inside."""
    far = np.where(groups.outside, groups.domains - 1, 0.0)
    return np.asarray((groups.size - 1 - far) * fabric.intra.step_s + far * fabric.network.step_s)


def _all_to_all_s(
    fabric: Fabric, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray, step_s: FloatArray
) -> FloatArray:
    near_s = num_bytes * (groups.inside - 1) / groups.size / intra_bytes_per_s(fabric, groups.inside)
    far_s = num_bytes * (groups.size - groups.inside) / groups.size / bytes_per_s
    return np.asarray(fabric.launch_s + groups.depth * step_s + np.maximum(near_s, far_s))


def _hierarchical_s(fabric: Fabric, num_bytes: FloatArray, groups: Groups) -> FloatArray:
    inside, domains = groups.inside, groups.domains
    scatter = 2.0 if fabric.backend == "gloo" else 1.0
    near = (inside - 1) * fabric.intra.step_s + (inside - 1) / inside * num_bytes / intra_bytes_per_s(fabric, inside)
    between = groups_of(fabric, domains, groups.stride * inside)
    share = group_bytes_per_s(fabric, between)
    far = 2 * ((domains - 1) * fabric.network.step_s + (domains - 1) / domains * num_bytes / inside / share)
    stages = np.where(groups.outside, 3.0, 1.0)
    return np.asarray(stages * fabric.launch_s + (1 + scatter) * near + np.where(groups.outside, far, 0.0))


def _curve_s(
    fabric: Fabric, kind: Collective, num_bytes: FloatArray, size: FloatArray, stride: FloatArray
) -> FloatArray:
    """Seconds from measured curves; nan where there is none."""
    seconds = np.full(num_bytes.shape, np.nan)
    classes = link_classes(fabric, size, stride)
    for name in np.unique(classes):
        for ranks in np.unique(size):
            wanted = 2 if kind is Collective.P2P else int(ranks)
            curve = fabric.curves.get(f"{kind.value}/{wanted}/{name}")
            if curve is not None:
                here = (classes == name) & (size == ranks)
                seconds[here] = curve_s(curve, num_bytes[here])
    return seconds


def curve_s(curve: Curve, num_bytes: FloatArray) -> FloatArray:
    """Seconds of `num_bytes` on a curve: linear in log-log, straight on beyond its ends, never falling with size."""
    size = np.log(np.asarray(curve.sizes_bytes))
    seconds = np.log(np.maximum.accumulate(np.asarray(curve.seconds)))
    if len(size) == 1:
        return np.asarray(np.exp(seconds[0]) * np.maximum(num_bytes / curve.sizes_bytes[0], 1.0))
    at = np.log(np.maximum(num_bytes, 1.0))
    piece = np.clip(np.searchsorted(size, at) - 1, 0, len(size) - 2)
    slope = (seconds[piece + 1] - seconds[piece]) / (size[piece + 1] - size[piece])
    return np.asarray(np.exp(seconds[piece] + slope * (at - size[piece])))


def hop_s(fabric: Fabric, num_bytes: ArrayLike, stride: int, num_devices: int) -> FloatArray:
    """(num_devices,) seconds of the p2p from each pipeline device to the next one; the last one's goes to the first.

    Device p of the pipeline owns ranks p·stride .. (p+1)·stride - 1, where pp is the outermost axis. All of its ranks send
    at once. With pp further in, positions repeat within one domain and these are the hops of the first of them.
    """
    position = np.arange(num_devices)
    return hops_s(fabric, num_bytes, stride, position, np.mod(position + 1, num_devices))


def hops_s(
    fabric: Fabric, num_bytes: ArrayLike, stride: int, position: NDArray[np.int64], following: NDArray[np.int64]
) -> FloatArray:
    """As `hop_s`, from the pipeline devices `position` to those in `following`."""
    domain = fabric.domain_size
    stays = (position * stride // domain == following * stride // domain) & (
        ((position + 1) * stride - 1) // domain == ((following + 1) * stride - 1) // domain
    )
    reach = np.where(stays | (fabric.num_gpus <= domain), 1, max(domain, stride))
    return collective_s(fabric, Collective.P2P, num_bytes, 2, reach).total
