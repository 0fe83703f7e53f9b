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
LL and Simple); the faster one counts. What the links are and perform is in links.py, a parameter server in server.py.

A group meets what is slow where some group of its axis does: the slowest sets the pace. The world of a group is the run's,
not the cluster's: ranks that are not there cross nothing.

Thakur, Rabenseifner, Gropp 2005 (ring and tree costs); gloo's reduce-scatter was measured to take as long as its
all-reduce (torch 2.13, gloo over shaped links: 524 against 522 ms).
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.compute import Seconds
from cost_models.links import Fabric, FloatArray, fabric, factor_at, link_bytes_per_s
from cost_models.records import Curve, RecordError

__all__ = [
    "Algorithm",
    "Collective",
    "Fabric",
    "Groups",
    "collective_s",
    "crosses",
    "curve_s",
    "fabric",
    "group_bytes_per_s",
    "groups_of",
    "hop_s",
    "hops_s",
    "link_bytes_per_s",
    "link_classes",
    "members",
]

E = TypeVar("E", bound=StrEnum)

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


def members(unit: int, size: NDArray[Any], stride: NDArray[Any]) -> FloatArray:
    """Ranks of an aligned unit of `unit` over the groups that share its way out: a group's share of it (all = it stays inside).

    Where units and groups are aligned these are the group's members there. Elsewhere a unit meets the ends of up to two
    blocks of groups, and so twice as many.
    """
    span = size * stride
    whole = (span <= unit) & (np.mod(unit, span) == 0)
    whole_units = (np.mod(span, unit) == 0) | (stride >= unit)
    inside = np.clip(unit // stride, 1, size)
    apart = np.clip(unit // (2 * stride), 1, np.maximum(size - 1, 1))
    return np.where(whole, size, np.where(whole_units, inside, np.minimum(apart, inside)))


def crosses(unit: int, world: ArrayLike, size: NDArray[Any], stride: NDArray[Any]) -> NDArray[np.bool_]:
    """Does a group of the axis leave a unit of `unit` ranks, where the run has `world` of them?"""
    span = size * stride
    straddles = (members(unit, size, stride) < size) | ((span <= unit) & (np.mod(unit, span) != 0))
    return np.asarray(straddles & (np.asarray(world) > unit) & (size > 1))


def link_classes(
    fabric: Fabric, size: ArrayLike, stride: ArrayLike, world: ArrayLike | None = None
) -> NDArray[np.str_]:
    """The class of the slowest link of each group."""
    size, stride = (np.asarray(value, dtype=float) for value in (size, stride))
    return _classes(fabric, groups_of(fabric, size, stride, world))


def _classes(fabric: Fabric, groups: "Groups") -> NDArray[np.str_]:
    near = np.where(groups.in_island, fabric.island.name, fabric.intra.name) if fabric.island else fabric.intra.name
    return np.where(groups.outside, fabric.network.name, near)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The groups of an axis on the fabric, as arrays."""

    size: FloatArray
    stride: FloatArray
    inside: FloatArray
    """Members in one fast domain; all where the group stays inside."""
    outside: NDArray[np.bool_]
    """The group leaves its domain."""
    beyond: tuple[NDArray[np.bool_], ...] = ()
    """For each level of switches: the group leaves one switch."""
    below: tuple[FloatArray, ...] = ()
    """For each level: the group's share of a switch's uplinks, in shares of one device."""
    in_island: NDArray[np.bool_] = field(default_factory=lambda: np.array(False))
    """The group stays among devices that faster links join."""
    first: FloatArray | int = 0
    """First of the ranks that such a group may have."""
    last: FloatArray | int = 0
    """Last of them."""

    @property
    def domains(self) -> FloatArray:
        """Fast domains that a group touches."""
        return np.asarray(np.ceil(self.size / self.inside))

    @property
    def depth(self) -> FloatArray:
        """Steps of a tree."""
        return np.asarray(np.ceil(np.log2(np.maximum(self.size, 1))))


def groups_of(fabric: Fabric, size: FloatArray, stride: FloatArray, world: ArrayLike | None = None) -> Groups:
    """Where the groups (size, stride) of a run of `world` ranks (the cluster's GPUs) lie."""
    # on several pools each is priced alone: a run has no more ranks here than there are GPUs
    ranks = np.minimum(fabric.num_gpus if world is None else world, fabric.num_gpus)
    inside = members(fabric.domain_size, size, stride)
    outside = crosses(fabric.domain_size, ranks, size, stride)
    small = fabric.island_size
    return Groups(
        size=size,
        stride=stride,
        inside=np.where(outside, np.minimum(inside, np.maximum(size - 1, 1)), size),
        outside=outside,
        beyond=tuple(crosses(level.unit, ranks, size, stride) for level in fabric.levels),
        below=tuple(members(level.unit, size, stride) for level in fabric.levels),
        in_island=~crosses(small, ranks, size, stride) if small > 1 else np.zeros(size.shape, dtype=bool),
        last=np.asarray(ranks - 1),
    )


def intra_bytes_per_s(fabric: Fabric, groups: Groups) -> FloatArray:
    """Bandwidth of one device to the members of its group in its fast domain: in a mesh that of the links to these."""
    inside, found = groups.inside, np.full(groups.inside.shape, fabric.intra.bytes_per_s)
    if fabric.domain_shares:
        shares = np.array(fabric.domain_shares)
        found = found * shares[np.clip(inside.astype(np.int64), 1, len(shares)) - 1]
    if fabric.island is not None:
        found = np.where(groups.in_island, fabric.island.bytes_per_s, found)
    return np.asarray(found * factor_at(fabric.slow_domains, groups.first, groups.last))


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
    slow = factor_at(fabric.slow_nics, groups.first, groups.last)
    out = np.minimum(shares * fabric.network.bytes_per_s, fabric.flow_bytes_per_s) * slow
    intra = intra_bytes_per_s(fabric, groups)
    bound = np.where(groups.outside, out, intra)
    bound = np.where(groups.outside & (groups.inside > 1), np.minimum(bound, intra), bound)
    for level, beyond, below in zip(fabric.levels, groups.beyond, groups.below, strict=True):
        through = level.bytes_per_s * factor_at(level.slow, groups.first, groups.last)
        bound = np.where(beyond, np.minimum(bound, below * through), bound)
    return np.asarray(bound, dtype=float)


def _far_latency_s(fabric: Fabric, groups: Groups, *, ring: bool = False) -> FloatArray:
    """What the levels of switches add to one step; with `ring`, to all steps of a ring, which leaves each switch once."""
    added = np.zeros(groups.size.shape)
    for level, beyond, below in zip(fabric.levels, groups.beyond, groups.below, strict=True):
        if level.latency_s:
            times = np.ceil(groups.size / below) - 1 if ring else 1.0
            added = added + np.where(beyond, times * level.latency_s, 0.0)
    return added


def collective_s(
    fabric: Fabric,
    name: str,
    num_bytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike,
    algorithm: str = Algorithm.DEFAULT,
    *,
    world: ArrayLike | None = None,
) -> Seconds:
    """Seconds of one collective on each of an axis's groups; arrays broadcast. A group of one costs 0.

    `world` is the number of ranks of the run (all GPUs of the cluster where nobody says it).

    A measured curve for (collective, ranks, link class) beats the closed form. RecordError lists the known names.
    """
    kind, how = _known(Collective, name, "collective"), _known(Algorithm, algorithm, "algorithm")
    ranks = fabric.num_gpus if world is None else world
    num_bytes, size, stride, ranks = np.broadcast_arrays(
        *(np.asarray(value, dtype=float) for value in (num_bytes, size, stride, ranks))
    )
    active = (size > 1) & (num_bytes > 0)
    if not active.any():
        return Seconds.zeros(active.shape)
    return _seconds(fabric, kind, how, num_bytes, groups_of(fabric, size, stride, ranks))


def _seconds(fabric: Fabric, kind: Collective, how: Algorithm, num_bytes: FloatArray, groups: Groups) -> Seconds:
    """Seconds of a collective on groups, wherever they lie."""
    active, together = (groups.size > 1) & (num_bytes > 0), kind not in ALONE
    if kind is Collective.ALL_TO_ALL:
        groups = replace(groups, below=tuple(np.ones_like(below) for below in groups.below))
    if fabric.curves and how is Algorithm.HIERARCHICAL:
        return _levels_by_curves(fabric, num_bytes, groups)
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
        curve_s = _curve_s(fabric, kind, num_bytes, groups)
        # curves are of links as they should be: one that is slow, and met, takes what the closed form says
        counts = active & ~np.isnan(curve_s) & ~(_meets_slow(fabric, groups) & (closed > np.nan_to_num(curve_s)))
        seconds = seconds.where(counts, np.nan_to_num(curve_s))
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
    step_s = np.where(
        groups.outside, fabric.network.step_s + _far_latency_s(fabric, groups), _near_step_s(fabric, groups)
    )
    if kind is Collective.P2P:
        return np.asarray(fabric.launch_s + step_s + num_bytes / bytes_per_s)
    if kind is Collective.ALL_TO_ALL:
        return _all_to_all_s(fabric, num_bytes, groups, bytes_per_s, step_s)
    if kind is Collective.ALL_REDUCE and how is Algorithm.HIERARCHICAL:
        return _hierarchical_s(fabric, num_bytes, groups, bytes_per_s)
    if kind is Collective.BROADCAST:
        return np.asarray(fabric.launch_s + groups.depth * step_s + num_bytes / bytes_per_s)
    ring = _ring_s(fabric, kind, num_bytes, groups, bytes_per_s)
    alone = how is Algorithm.DEFAULT and fabric.backend == "gloo"
    if kind is not Collective.ALL_REDUCE or how is Algorithm.RING or alone:
        return np.asarray(fabric.launch_s + ring)
    tree = _tree_s(fabric, num_bytes, groups, bytes_per_s)
    return np.asarray(fabric.launch_s + (tree if how is Algorithm.TREE else np.minimum(ring, tree)))


def _ring_s(
    fabric: Fabric, kind: Collective, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray
) -> FloatArray:
    """Once around a ring, or twice: an all-reduce, and what gloo does for a reduce-scatter."""
    whole = kind is Collective.ALL_REDUCE or (kind is Collective.REDUCE_SCATTER and fabric.backend == "gloo")
    wire_s = (groups.size - 1) / groups.size * num_bytes / bytes_per_s
    slower = np.where(groups.outside, fabric.ring_plateau, 1.0) if kind is Collective.ALL_REDUCE else 1.0
    return np.asarray((2.0 if whole else 1.0) * (_ring_latency_s(fabric, groups) * slower + wire_s))


def _tree_s(fabric: Fabric, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray) -> FloatArray:
    """Up and down a tree: a chain of the members in a domain, then log2 of the domains."""
    hops_s = (groups.inside - 1) * fabric.intra.tree_step_s
    hops_s = hops_s + np.ceil(np.log2(np.maximum(groups.domains, 1))) * fabric.network.tree_step_s
    hops_s = hops_s + _far_latency_s(fabric, groups)
    return np.asarray(2.0 * (hops_s + num_bytes / (bytes_per_s * TREE_SHARE)))


def _ring_latency_s(fabric: Fabric, groups: Groups) -> FloatArray:
    """Latency of size-1 steps around the ring: one hop leaves each domain, the others stay inside."""
    far = np.where(groups.outside, groups.domains - 1, 0.0)
    near_s = (groups.size - 1 - far) * _near_step_s(fabric, groups)
    return np.asarray(near_s + far * fabric.network.step_s + _far_latency_s(fabric, groups, ring=True))


def _near_step_s(fabric: Fabric, groups: Groups) -> FloatArray:
    """Latency of a step inside a domain."""
    if fabric.island is None:
        return np.full(groups.size.shape, fabric.intra.step_s)
    return np.where(groups.in_island, fabric.island.step_s, fabric.intra.step_s)


def _meets_slow(fabric: Fabric, groups: Groups) -> NDArray[np.bool_]:
    """Whether a group of the axis meets a node or an uplink that is slow."""
    met = ~groups.outside | (groups.inside > 1)
    found = met & (factor_at(fabric.slow_domains, groups.first, groups.last) < 1)
    found = found | (groups.outside & (factor_at(fabric.slow_nics, groups.first, groups.last) < 1))
    for level, beyond in zip(fabric.levels, groups.beyond, strict=True):
        found = found | (beyond & (factor_at(level.slow, groups.first, groups.last) < 1))
    return np.asarray(found)


def _all_to_all_s(
    fabric: Fabric, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray, step_s: FloatArray
) -> FloatArray:
    near_s = num_bytes * (groups.inside - 1) / groups.size / intra_bytes_per_s(fabric, groups)
    far_s = num_bytes * (groups.size - groups.inside) / groups.size / bytes_per_s
    return np.asarray(fabric.launch_s + groups.depth * step_s + np.maximum(near_s, far_s))


def _hierarchical_s(fabric: Fabric, num_bytes: FloatArray, groups: Groups, bytes_per_s: FloatArray) -> FloatArray:
    """Reduce-scatter in the domain, all-reduce of the shares between domains, all-gather; a ring where domains hold unequal
    parts of a group."""
    inside, domains = groups.inside, groups.domains
    scatter = 2.0 if fabric.backend == "gloo" else 1.0
    near = (inside - 1) * _near_step_s(fabric, groups)
    near = near + (inside - 1) / inside * num_bytes / intra_bytes_per_s(fabric, groups)
    between = groups_of(fabric, domains, groups.stride * inside, np.asarray(groups.last) + 1)
    share = group_bytes_per_s(fabric, between)
    steps_s = (domains - 1) * fabric.network.step_s + _far_latency_s(fabric, between, ring=True)
    far = 2 * (steps_s + (domains - 1) / domains * num_bytes / inside / share)
    stages = np.where(groups.outside, 3.0, 1.0)
    levels_s = stages * fabric.launch_s + (1 + scatter) * near + np.where(groups.outside, far, 0.0)
    ring_s = fabric.launch_s + _ring_s(fabric, Collective.ALL_REDUCE, num_bytes, groups, bytes_per_s)
    return np.where(np.mod(groups.size, inside) == 0, levels_s, ring_s)


def _levels_by_curves(fabric: Fabric, num_bytes: FloatArray, groups: Groups) -> Seconds:
    """A hierarchical all-reduce as the three collectives that it is made of, each from its own curve where there is one."""
    ranks, inside = np.asarray(groups.last) + 1, groups.inside
    near = groups_of(fabric, inside, groups.stride, ranks)
    between = groups_of(fabric, groups.domains, groups.stride * inside, ranks)
    found = Seconds.zeros(num_bytes.shape)
    for kind, part, sent in (
        (Collective.REDUCE_SCATTER, near, num_bytes),
        (Collective.ALL_REDUCE, between, num_bytes / inside),
        (Collective.ALL_GATHER, near, num_bytes),
    ):
        found = found + _seconds(fabric, kind, Algorithm.DEFAULT, sent, part)
    ring = _seconds(fabric, Collective.ALL_REDUCE, Algorithm.DEFAULT, num_bytes, groups)
    levels = groups.outside & (np.mod(groups.size, inside) == 0) & (inside > 1)
    return found.scaled(levels) + ring.scaled(~levels)


def _curve_s(fabric: Fabric, kind: Collective, num_bytes: FloatArray, groups: Groups) -> FloatArray:
    """Seconds from measured curves; nan where there is none."""
    seconds = np.full(num_bytes.shape, np.nan)
    classes = _classes(fabric, groups)
    for name in np.unique(classes):
        for ranks in np.unique(groups.size):
            wanted = 2 if kind is Collective.P2P else int(ranks)
            curve = fabric.curves.get(f"{kind.value}/{wanted}/{name}")
            if curve is not None:
                here = (classes == name) & (groups.size == ranks)
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


def hop_s(fabric: Fabric, num_bytes: ArrayLike, stride: int, num_devices: int, world: int | None = None) -> FloatArray:
    """(num_devices,) seconds of the p2p from each pipeline device to the next one; the last one's goes to the first.

    Device p of the pipeline owns ranks p·stride .. (p+1)·stride - 1, where pp is the outermost axis. All of its ranks send
    at once. With pp further in, positions repeat along the `world` and these are the slowest hops of all repetitions.
    """
    position = np.arange(num_devices)
    return hops_s(fabric, num_bytes, stride, position, np.mod(position + 1, num_devices), world)


def hops_s(
    fabric: Fabric,
    num_bytes: ArrayLike,
    stride: int,
    position: NDArray[np.int64],
    following: NDArray[np.int64],
    world: int | None = None,
) -> FloatArray:
    """As `hop_s`, from the pipeline devices `position` to those in `following`."""
    ranks = min(fabric.num_gpus if world is None else world, fabric.num_gpus)
    block = stride * (int(max(position.max(initial=0), following.max(initial=0))) + 1)
    repeats = ranks > block and ranks % block == 0 and world is not None

    def leaves(unit: int) -> NDArray[np.bool_]:
        if repeats and block % unit and (unit % block or ranks > unit):
            # positions of a later repetition lie otherwise in their units: count them all
            begins = np.arange(0, ranks, block)[:, None]
            firsts = [begins + where * stride for where in (position, following)]
            away = (firsts[0] // unit != firsts[1] // unit) | (
                (firsts[0] + stride - 1) // unit != (firsts[1] + stride - 1) // unit
            )
            return np.asarray(away.any(axis=0))
        same = position * stride // unit == following * stride // unit
        same &= ((position + 1) * stride - 1) // unit == ((following + 1) * stride - 1) // unit
        return np.asarray(~same & (ranks > unit))

    two = np.full(len(position), 2.0)
    everywhere = np.zeros(len(position)), np.full(len(position), ranks - 1.0)
    first, last = (
        everywhere
        if repeats
        else (np.minimum(position, following) * stride, (np.maximum(position, following) + 1) * stride - 1)
    )
    outside = leaves(fabric.domain_size)
    groups = Groups(
        size=two,
        stride=np.full(len(position), float(stride)),
        inside=np.where(outside, 1.0, two),
        outside=outside,
        beyond=tuple(leaves(level.unit) for level in fabric.levels),
        # of a switch's devices only those of one position send
        below=tuple(np.full(len(position), max(level.unit / stride, 1.0)) for level in fabric.levels),
        in_island=~leaves(fabric.island_size) if fabric.island_size > 1 else np.zeros(len(position), dtype=bool),
        first=first,
        last=last,
    )
    sent = np.broadcast_to(np.asarray(num_bytes, dtype=float), two.shape)
    return _seconds(fabric, Collective.P2P, Algorithm.DEFAULT, sent, groups).total
