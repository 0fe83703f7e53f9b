"""What several files hold, sorted by what they are of; of each kind there is one, and what two files say of it agrees."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cost_models.records import Calibration, Cluster
from planner.errors import InputError, NotYetError
from planner.readers.documents import There, named_path
from planner.readers.topology.formats import read_seen
from planner.readers.topology.seen import (
    Seen,
    SeenCollective,
    SeenDevices,
    SeenFabric,
    SeenGpu,
    SeenHost,
    SeenNode,
    SeenNvlinks,
    SeenP2p,
)
from planner.readers.topology.shape import merged
from planner.readers.topology.words import Words

T = TypeVar("T")
MOST_FILES = 64
"""Files of one cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What all files hold, sorted."""

    node: SeenNode | None = None
    devices: SeenDevices | None = None
    nvlinks: SeenNvlinks | None = None
    p2p: SeenP2p | None = None
    fabric: SeenFabric | None = None
    collectives: tuple[SeenCollective, ...] = ()
    dates: Mapping[str, str] = field(default_factory=dict)
    """Source of a measured table -> day of its file (ISO)."""
    base: Cluster | None = None
    """A whole cluster of our own beside them."""
    measured: Calibration | None = None
    """What a document of a probe holds beside its cluster."""


def gathered(paths: Sequence[str], words: Words) -> tuple[Pieces, list[tuple[str, dict[str, Any]]]]:
    """All files read and sorted, and the documents of our own among them. Raises InputError."""
    if len(paths) > MOST_FILES:
        raise InputError(f"{len(paths)} files for one cluster; {MOST_FILES} at most")
    found: list[Seen] = []
    documents: list[tuple[str, dict[str, Any]]] = []
    dates: dict[str, str] = {}
    for text in paths:
        path, there = named_path(text)
        if there is not There.FILE:
            what = "a folder; name the files in it" if there is There.FOLDER else "there is no such file"
            raise InputError(f"cluster {text!r}: {what}")
        seen = read_seen(path, words)
        if isinstance(seen, dict):
            documents.append((str(path), seen))
            continue
        day = datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()
        dates |= {one.source: day for one in seen if isinstance(one, SeenCollective)}
        found += seen
    nodes = [one for one in found if isinstance(one, SeenNode)]
    pieces = Pieces(
        node=_one_node(nodes),
        devices=_devices([one for one in found if isinstance(one, SeenDevices)]),
        nvlinks=_only([one for one in found if isinstance(one, SeenNvlinks)]),
        p2p=_p2p([one for one in found if isinstance(one, SeenP2p)]),
        fabric=_one_fabric([one for one in found if isinstance(one, SeenFabric)]),
        collectives=tuple(one for one in found if isinstance(one, SeenCollective)),
        dates=dates,
    )
    return pieces, documents


# One of each -------------------------------------------------------------------------------------------------------


def _only(found: Sequence[T]) -> T | None:
    """The one thing of its kind; the same twice is one."""
    different = [
        one
        for index, one in enumerate(found)
        if all(_without_source(one) != _without_source(other) for other in found[:index])
    ]
    if len(different) > 1:
        sources = " and ".join(str(getattr(one, "source", "")) for one in different[:2])
        raise InputError(
            f"{sources} say different things of the same: two nodes? Give one file of each kind; unlike nodes are pools of a cluster file"
        )
    return different[0] if different else None


def _without_source(one: Any) -> Any:
    """The same without where it was read."""
    return replace(one, source="")


def _one_node(nodes: Sequence[SeenNode]) -> SeenNode | None:
    """The node; seen by commands of several kinds it is put together."""
    whole: SeenNode | None = None
    for command in dict.fromkeys(node.command for node in nodes):
        one = _only([node for node in nodes if node.command == command])
        assert one is not None
        if whole is not None and len(whole.gpus) != len(one.gpus):
            raise InputError(
                f"{whole.source} shows {len(whole.gpus)} GPUs, and {one.source} {len(one.gpus)}: two kinds of nodes, or a container "
                "hides some from one of them; paste both from the same place"
            )
        whole = one if whole is None else merged(whole, one)
    return whole


def _devices(found: Sequence[SeenDevices]) -> SeenDevices | None:
    """The list of GPUs with all that any of its files knows of them."""
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        alike = len(first.gpus) == len(other.gpus) and all(map(_may_be_one, first.gpus, other.gpus))
        if not alike:
            raise InputError(f"{first.source} and {other.source} list different GPUs; give the files of one node")
        first = replace(first, gpus=tuple(map(_both, first.gpus, other.gpus)))
    return first


def _may_be_one(one: SeenGpu, two: SeenGpu) -> bool:
    """The same product; plain nvidia-smi ends a long name in dots."""
    short, full = sorted((one.name or "", two.name or ""), key=lambda name: not name.endswith("..."))
    return short == full or (short.endswith("...") and full.startswith(short.removesuffix("...")))


def _both(one: SeenGpu, two: SeenGpu) -> SeenGpu:
    """What either knows of a GPU."""
    return replace(
        one,
        name=max(one.name or "", two.name or "", key=lambda name: (not name.endswith("..."), len(name))),
        memory_bytes=one.memory_bytes or two.memory_bytes,
        pcie_bytes_per_s=one.pcie_bytes_per_s or two.pcie_bytes_per_s,
    )


def _p2p(found: Sequence[SeenP2p]) -> SeenP2p | None:
    """`topo -p2p` of reads, writes and NVLink: refused is what any of them refuses."""
    if not found:
        return None
    if len({one.num_gpus for one in found}) > 1:
        raise InputError(f"{found[0].source} and {found[1].source} are of different numbers of GPUs")
    return replace(found[0], refused={pair: why for one in found for pair, why in one.refused.items()})


def _one_fabric(found: Sequence[SeenFabric]) -> SeenFabric | None:
    """The fabric; a hostfile beside a tree says which of its nodes are used."""
    trees = [one for one in found if one.levels]
    lists = [one for one in found if not one.levels]
    tree, used = _only(trees), _only(lists)
    if tree is None or used is None:
        return tree or used
    known = {host.name: host for host in used.hosts}
    absent = set(known) - {host.name for host in tree.hosts}
    if absent:
        raise InputError(f"{used.source} names {sorted(absent)[0]}, which {tree.source} does not have")
    if len(known) < len(tree.hosts):
        raise NotYetError(
            f"{used.source} uses {len(known):,} of the {len(tree.hosts):,} nodes of {tree.source}: a part of a tree is taken by "
            "switch=NAME, or with --gpus N; single nodes of it are not picked yet"
        )
    hosts = tuple(replace(host, **_facts_of(known[host.name])) for host in tree.hosts)
    return replace(tree, hosts=hosts, source=f"{tree.source} and {used.source}", notes=(*tree.notes, *used.notes))


def _facts_of(host: SeenHost) -> dict[str, Any]:
    facts = {name: getattr(host, name) for name in ("gpu", "num_gpus", "memory_bytes", "domain")}
    return {name: value for name, value in facts.items() if value is not None}
