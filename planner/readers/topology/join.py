"""Several pasted files -> one cluster: the inside of a node from one, the fabric from another, measured curves over both.

Records get nominal facts; what was timed becomes curves. What no file says is taken as the device is sold, and every such
fact is an assumption that the answer states. What the files say of one another must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cost_models.records import Calibration, Cluster, FabricException, FabricLevel, Pool
from planner.errors import InputError, NotYetError
from planner.readers.plausible import refuse_implausible, refuse_too_many
from planner.readers.topology.kinds import Looked, device_of_node, host_link_of, kind_of
from planner.readers.topology.measured import measured_calibration
from planner.readers.topology.pieces import Pieces
from planner.readers.topology.products import device_of
from planner.readers.topology.seen import (
    SeenFabric,
    SeenHost,
)
from planner.readers.topology.shape import Domains
from planner.readers.topology.words import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One cluster, and everything that it was made of."""

    cluster: Cluster
    """Nominal facts."""
    assumptions: tuple[str, ...]
    """What no file says, and how it was taken."""
    pieces: Pieces
    """What was seen."""
    domains: Domains | None = None
    """Fast domains inside the node that was seen."""
    nics: tuple[int, ...] = ()
    """Interfaces of the node that count."""
    measured: Calibration | None = None
    """What was timed, and nothing else; None where nothing was."""


def joined(pieces: Pieces, words: Words) -> Joined:
    """The cluster of the pieces and the words. Raises InputError for what is missing, naming what would tell, or contradicts."""
    if pieces.base is not None:
        return _over(pieces.base, pieces, words)
    said = list(_notes(pieces))
    hosts = _hosts(pieces, words, said)
    mixed = _mixed(pieces, hosts, words, said)
    if mixed is not None:
        return _finished(mixed, pieces, said, None, ())
    pools: list[Pool] = []
    shown = Looked()
    odd: tuple[FabricException, ...] = ()
    first = 0
    for (product, memory, count), group in groupby(
        hosts, key=lambda host: (host.gpu, host.memory_bytes, host.num_gpus)
    ):
        members = list(group)
        device = device_of_node(product, memory, pieces, words)
        kind, looked = kind_of(device, count, members, pieces, words, said)
        if looked != Looked() and shown == Looked():
            shown = looked
            odd = tuple(replace(one, node=first) for one in (looked.inside.odd if looked.inside else ()))
        pools.append(Pool(kind=kind, num_nodes=len(members)))
        first += len(members)
    if odd and first > 1:
        said.append("what is odd is of the one node that was seen, number 0; the others are taken as their kind")
    cluster = Cluster(
        name=words.name or _name(pools),
        pools=tuple(_together(pools)),
        fabric=_levels(pieces.fabric, words, said),
        exceptions=odd,
    )
    return _finished(cluster, pieces, said, shown.inside.domains if shown.inside else None, shown.nics)


def _finished(
    cluster: Cluster, pieces: Pieces, said: Sequence[str], domains: Domains | None, nics: tuple[int, ...]
) -> Joined:
    refuse_implausible(cluster)
    return Joined(
        cluster=cluster,
        assumptions=tuple(dict.fromkeys(said)),
        pieces=pieces,
        domains=domains,
        nics=nics,
        measured=measured_calibration(cluster, pieces),
    )


def _over(base: Cluster, pieces: Pieces, words: Words) -> Joined:
    """Measured tables over a cluster that is described as a whole."""
    if other := next(
        (one for one in (pieces.node, pieces.devices, pieces.nvlinks, pieces.p2p, pieces.fabric) if one), None
    ):
        raise InputError(
            f"{base.name} describes the whole cluster, and {other.source} a part of it; leave one of them out"
        )
    if any(getattr(words, word) is not None for word in ("gpu", "nodes", "gpus_per_node", "inter", "oversubscription")):
        raise InputError(
            f"{base.name} describes the whole cluster; facts beside it (gpu=, nodes=, inter= ...) are for pasted files"
        )
    cluster = replace(base, name=words.name) if words.name else base
    return _finished(cluster, pieces, tuple(_notes(pieces)), None, ())


def _notes(pieces: Pieces) -> list[str]:
    """What the readers had to decide."""
    some = [piece for piece in (pieces.node, pieces.fabric, *pieces.collectives) if piece is not None]
    return [f"{piece.source}: {note}" for piece in some for note in piece.notes]


# Nodes and devices -------------------------------------------------------------------------------------------------


def _hosts(pieces: Pieces, words: Words, said: list[str]) -> list[SeenHost]:
    """Every node, alike ones side by side; without a fabric as many as are said."""
    inside = _gpus_inside(pieces, words)
    if pieces.fabric is None:
        count = (
            words.nodes
            or _measured_nodes(pieces)
            or (pieces.node.num_hosts if pieces.node else 0)
            or (1 if inside else 0)
        )
        if not count:
            raise InputError(
                "no file tells how many nodes there are; add nodes=N, a hostfile, or Slurm's topology.conf"
            )
        refuse_too_many(count * (inside or 1))
        if pieces.node is not None and words.nodes is None and count == 1:
            said.append("one node, the one that was seen (nodes=N for more, or a file of the fabric)")
        return [SeenHost(name="node", num_gpus=inside)] * count
    refuse_too_many(len(pieces.fabric.hosts) * (inside or 1))
    hosts = list(pieces.fabric.hosts)
    if inside is not None:
        hosts = [replace(host, num_gpus=_agreed(host, inside, pieces)) for host in hosts]
    if words.nodes not in (None, len(hosts)):
        raise InputError(f"nodes={words.nodes}, and {pieces.fabric.source} has {len(hosts):,}; leave nodes= out")
    kinds = list(dict.fromkeys((host.gpu, host.memory_bytes, host.num_gpus) for host in hosts))
    if len(kinds) > 1:
        runs = sum(1 for _ in groupby((host.gpu, host.memory_bytes, host.num_gpus) for host in hosts))
        if runs > len(kinds):
            said.append(
                "nodes of a kind stand together: kinds alternate below the switches, and pools are numbered one after the other"
            )
        hosts.sort(key=lambda host: kinds.index((host.gpu, host.memory_bytes, host.num_gpus)))
    return hosts


def _gpus_inside(pieces: Pieces, words: Words) -> int | None:
    """GPUs of a node, from what looked inside; None where nothing did."""
    found = {
        one.source: count
        for one, count in (
            (pieces.node, len(pieces.node.gpus) if pieces.node else 0),
            (pieces.devices, len(pieces.devices.gpus) if pieces.devices else 0),
            (pieces.nvlinks, len(pieces.nvlinks.bytes_per_s) if pieces.nvlinks else 0),
            (pieces.p2p, pieces.p2p.num_gpus if pieces.p2p else 0),
        )
        if one is not None
    }
    if words.gpus_per_node is not None:
        found["gpus_per_node="] = words.gpus_per_node
    if len(set(found.values())) > 1:
        (one, n), *others = found.items()
        other, m = next((source, count) for source, count in others if count != n)
        raise InputError(
            f"{one}: {n} GPUs, and {other}: {m}; these are two kinds of nodes, or a container hides GPUs from one of them"
        )
    if found:
        return next(iter(found.values()))
    each = {
        one.num_ranks // one.num_nodes
        for one in pieces.collectives
        if one.num_nodes and one.num_ranks % one.num_nodes == 0
    }
    return next(iter(each)) if len(each) == 1 else None


def _measured_nodes(pieces: Pieces) -> int | None:
    found = [one.num_nodes for one in pieces.collectives if one.num_nodes]
    return max(found) if found else None


def _agreed(host: SeenHost, inside: int, pieces: Pieces) -> int:
    """GPUs of a host, from the fabric and from inside."""
    if host.num_gpus is not None and host.num_gpus != inside:
        fabric = pieces.fabric.source if pieces.fabric else ""
        raise InputError(
            f"{fabric}: {host.name} has {host.num_gpus} GPUs, and the node that was looked into {inside}; give files of one kind of node"
        )
    return inside


def _mixed(pieces: Pieces, hosts: Sequence[SeenHost], words: Words, said: list[str]) -> Cluster | None:
    """One node with GPUs of several kinds: a pool of each, joined by the host's links; None where they are all alike."""
    listed = pieces.devices.gpus if pieces.devices else pieces.node.gpus if pieces.node else ()
    devices = [device_of(gpu.name, gpu.memory_bytes, "the list of GPUs") for gpu in listed if gpu.name]
    if len({device.name for device in devices}) < 2 or words.gpu is not None:
        return None
    if len(hosts) > 1:
        raise NotYetError("nodes with several kinds of GPUs each: only one such node is read yet")
    groups = {device.name: [i for i, other in enumerate(devices) if other.name == device.name] for device in devices}
    pools = []
    bridge = min(
        (link for link in (host_link_of(device, pieces) for device in devices) if link is not None),
        key=lambda link: link.bandwidth_bytes_per_s,
    )
    for name, members in groups.items():
        device = devices[members[0]]
        part = _part(pieces, members)
        kind, _ = kind_of(device, len(members), [SeenHost(name="node")], part, replace(words, gpus_per_node=None), said)
        pools.append(
            Pool(kind=replace(kind, name=f"{len(members)} x {name} of one node", nic=bridge, num_nics=1), num_nodes=1)
        )
    order = ",".join(str(index) for members in groups.values() for index in members)
    said.append(
        f"one node with {' and '.join(f'{len(m)} {n}' for n, m in groups.items())}: pools that meet over {bridge.name}; start ranks with CUDA_VISIBLE_DEVICES={order}"
    )
    return Cluster(
        name=words.name or "+".join(f"{name}x{len(members)}" for name, members in groups.items()), pools=tuple(pools)
    )


def _part(pieces: Pieces, members: Sequence[int]) -> Pieces:
    """The pieces of some GPUs of a node."""
    number = {gpu: index for index, gpu in enumerate(members)}
    node = pieces.node
    if node is not None:
        node = replace(
            node,
            gpus=tuple(node.gpus[gpu] for gpu in members),
            paths={(number[i], number[j]): path for (i, j), path in node.paths.items() if i in number and j in number},
            nic_ways={(number[i], nic): way for (i, nic), way in node.nic_ways.items() if i in number},
            asymmetric=(),
        )
    devices = (
        replace(pieces.devices, gpus=tuple(pieces.devices.gpus[gpu] for gpu in members)) if pieces.devices else None
    )
    return Pieces(node=node, devices=devices, dates={})


# The fabric, and names --------------------------------------------------------------------------------------------


def _levels(fabric: SeenFabric | None, words: Words, said: list[str]) -> tuple[FabricLevel, ...]:
    if fabric is None or not fabric.levels:
        if words.oversubscription is not None:
            raise InputError(
                "oversubscription= needs the switches: add Slurm's topology.conf or another file of the fabric"
            )
        return ()
    uneven = [level for level in fabric.levels if len(set(level.sizes)) > 1]
    for level in uneven:
        said.append(
            f"switches of level {level.name} have {min(level.sizes)} to {max(level.sizes)} below them: all are taken as the fullest"
        )
    if words.oversubscription is None:
        said.append(
            "every level of switches at full bisection: no file says what its links carry (oversubscription=2 says it of the nearest)"
        )
    return tuple(
        FabricLevel(
            name=level.name,
            radix=max(level.sizes),
            oversubscription=words.oversubscription or 1.0 if index == 0 else 1.0,
        )
        for index, level in enumerate(fabric.levels)
    )


def _together(pools: Sequence[Pool]) -> list[Pool]:
    """Neighbouring pools of one kind as one."""
    found: list[Pool] = []
    for pool in pools:
        if found and found[-1].kind == pool.kind:
            found[-1] = replace(pool, num_nodes=pool.num_nodes + found[-1].num_nodes)
        else:
            found.append(pool)
    return found


def _name(pools: Sequence[Pool]) -> str:
    return "+".join(f"{pool.kind.device.name}x{pool.num_gpus}" for pool in _together(pools)) + " (as seen)"
