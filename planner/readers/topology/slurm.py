"""Slurm's topology: topology.conf (tree and block), topology.yaml, and what `scontrol show topology` prints.

A tree is switches; blocks are groups of neighbouring nodes that pair up to the larger BlockSizes. Neither says what a link
carries: LinkSpeed is a number without a unit that Slurm itself does not use (topology.conf(5)).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from planner.errors import InputError, NotYetError
from planner.readers.topology.fabric_tree import Switch, arranged
from planner.readers.topology.hostlists import MOST_HOSTS, count, expand
from planner.readers.topology.seen import SeenFabric, SeenHost, SeenLevel
from planner.readers.topology.text import plain_lines, shown

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "Level", "BlockName", "BlockSizes", "BlockIndex", "BlockSize")
_LINE = re.compile(
    r"^[ \t]*(?:SwitchName|BlockName|BlockSizes|AggregatedBlock|RingName)[ \t]*=", re.IGNORECASE | re.MULTILINE
)
_FIELD = re.compile(r"(\w+)[ \t]*=[ \t]*(\"[^\"]*\"|\S*)")
_LATER = {"ring": "RingName", "torus3d": "toruses"}


# topology.conf and scontrol ----------------------------------------------------------------------------------------


def is_slurm(text: str) -> bool:
    """A line that begins with SwitchName=, BlockName= or BlockSizes=, whatever its case."""
    return "=" in text and any(_LINE.match(line) for line in plain_lines(text))


def read_slurm(text: str, source: str, *, below: str | None = None) -> list[SeenFabric]:
    """The tree or the blocks. Raises InputError where it is damaged, NotYetError for rings."""
    switches: dict[str, Switch] = {}
    blocks: dict[str, tuple[str, ...]] = {}
    sizes: list[int] = []
    left = MOST_HOSTS
    lines = _lines(text, source)
    _refuse_too_many(lines, source)
    for number, fields in lines:
        place = f"{source}, line {number}"
        if "ringname" in fields:
            raise NotYetError(f"{place}: a ring of nodes (topology/ring) is not read yet; trees and blocks are")
        if "aggregatedblock" in fields:
            continue  # scontrol's sums of blocks, whose sizes BlockSizes gives
        if "switchname" in fields:
            switch = _switch(fields, place, left)
            if switch.name in switches:
                raise InputError(f"{place}: switch {switch.name} is described twice")
            switches[switch.name] = switch
            left -= len(switch.hosts)
        elif "blockname" in fields:
            names = expand(_said(fields, "nodes", place), place, left)
            if fields["blockname"] in blocks:
                raise InputError(f"{place}: block {fields['blockname']} is described twice")
            blocks[fields["blockname"]] = tuple(names)
            left -= len(names)
        elif "blocksizes" in fields:
            sizes = _block_sizes(fields["blocksizes"].split(","), place)
    if switches and blocks:
        raise InputError(f"{source}: has both SwitchName and BlockName; a cluster has a tree or blocks")
    if blocks or not switches:
        return [blocked(blocks, sizes, f"{source} (Slurm blocks)")]
    return [arranged(switches, f"{source} (Slurm tree)", below=below)]


def _lines(text: str, source: str) -> list[tuple[int, Mapping[str, str]]]:
    """(number, fields by lower-case name) of every line that describes something; `\\` at its end continues a line."""
    found: list[tuple[int, Mapping[str, str]]] = []
    pending = ""
    for number, raw in enumerate(plain_lines(text), 1):
        line = pending + raw.split("#", 1)[0].rstrip()
        if line.endswith("\\"):
            pending = line[:-1] + " "
            continue
        pending = ""
        if not _LINE.match(line):
            if "=" in line and (near := re.match(r"\s*(switch\w*|block\w*|nodes?)\s*=", line, re.IGNORECASE)):
                raise InputError(
                    f"{source}, line {number}: {shown(near[1])} begins no line; known keys: {', '.join(_KEYS)}"
                )
            continue
        found.append((number, {key.lower(): value.strip('"') for key, value in _FIELD.findall(line)}))
    return found


def _refuse_too_many(lines: Sequence[tuple[int, Mapping[str, str]]], source: str) -> None:
    """Raises InputError where all lines together name more nodes than are planned for, before a name is made."""
    total = sum(
        count(fields["nodes"], f"{source}, line {number}")
        for number, fields in lines
        if fields.get("nodes") and not fields.get("switches")
    )
    if total > MOST_HOSTS:
        raise InputError(f"{source}: names {total:,} nodes in all; up to {MOST_HOSTS:,} are planned for")


def _switch(fields: Mapping[str, str], place: str, left: int) -> Switch:
    name = _said(fields, "switchname", place)
    children = tuple(expand(fields["switches"], place)) if fields.get("switches") else ()
    if children:
        return Switch(name=name, children=children)  # beside its switches scontrol lists all nodes below them
    if int(fields.get("level", "0") if fields.get("level", "0").isdigit() else 0) > 0:
        raise InputError(f"{place}: switch {name} has a level above 0 and no Switches=")
    names = expand(_said(fields, "nodes", place), place, left)
    return Switch(name=name, hosts=tuple(SeenHost(name=host) for host in names))


def _said(fields: Mapping[str, str], key: str, place: str) -> str:
    value = fields.get(key, "")
    if not value:
        spelt = next((known for known in _KEYS if known.lower() == key), key)
        raise InputError(f"{place}: {spelt}= has no value: the line was cut off?")
    if value.upper() == "ALL":
        raise InputError(f"{place}: {key}=ALL names no nodes; write them down, as in node[01-64]")
    return value


def _block_sizes(texts: Sequence[str], place: str) -> list[int]:
    if not all(text.strip().isdigit() and len(text.strip()) < 8 and int(text) for text in texts):
        raise InputError(f"{place}: BlockSizes={','.join(texts)[:60]}; whole numbers from 1 are needed, as in 8,16,32")
    return sorted({int(text) for text in texts})


def blocked(blocks: Mapping[str, Sequence[str]], sizes: Sequence[int], source: str) -> SeenFabric:
    """Blocks of nodes side by side, paired up to the larger sizes. Raises InputError where there are none."""
    if not blocks:
        raise InputError(f"{source}: names no block, and no switch")
    if empty := next((name for name, names in blocks.items() if not names), None):
        raise InputError(f"{source}: block {empty} has no nodes")
    hosts = tuple(SeenHost(name=name, domain=block) for block, names in blocks.items() for name in names)
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise InputError(f"{source}: node {host.name} is in two blocks")
        seen.add(host.name)
    here = [len(names) for names in blocks.values()]
    levels, base = [], min(sizes, default=0)
    if base > min(here):
        raise InputError(f"{source}: a block of {min(here)} nodes is smaller than the least of BlockSizes ({base})")
    if len(blocks) > 1:
        levels.append(SeenLevel(name="block", sizes=tuple(here)))
    groups = len(blocks)
    for smaller, larger in pairwise(sizes):
        step = larger // smaller
        if larger % smaller or step & (step - 1):
            raise InputError(f"{source}: BlockSizes {smaller}, {larger}: each is a power of two times the one before")
        if groups <= step:
            break
        full, rest = divmod(groups, step)
        levels.append(SeenLevel(name=f"block of {larger}", sizes=(step,) * full + ((rest,) if rest else ())))
        groups = full + bool(rest)
    return SeenFabric(source=source, hosts=hosts, levels=tuple(levels))


# topology.yaml -----------------------------------------------------------------------------------------------------


def is_slurm_yaml(data: Any) -> bool:
    """A list of objects with `topology`."""
    return isinstance(data, list) and bool(data) and all(isinstance(item, dict) and "topology" in item for item in data)


def read_slurm_yaml(
    data: Sequence[Mapping[str, Any]], source: str, *, topology: str | None = None, below: str | None = None
) -> list[SeenFabric]:
    """The cluster's default topology, or the one that is named (`topology=`)."""
    names = [str(item["topology"]) for item in data]
    if topology is not None and topology not in names:
        raise InputError(f"{source}: topology={topology} is not there; it has {', '.join(names[:20])}")
    default = next(
        (name for name, item in zip(names, data, strict=True) if item.get("cluster_default") == "true"), None
    )
    chosen = topology or default or (names[0] if len(names) == 1 else None)
    if chosen is None:
        raise InputError(
            f"{source}: has the topologies {', '.join(names[:20])}, none of them the default; choose one with topology={names[0]}"
        )
    item = data[names.index(chosen)]
    place = f"{source} (topology {chosen})"
    if "tree" in item:
        return [arranged(_yaml_switches(item["tree"], place), place, below=below)]
    if "block" in item:
        blocks, sizes = _yaml_blocks(item["block"], place)
        return [blocked(blocks, sizes, place)]
    if "flat" in item:
        raise InputError(
            f"{place}: is flat: it tells no nodes and no switches; give a hostfile, or nodes=N, in its place"
        )
    for kind in _LATER:
        if kind in item:
            raise NotYetError(f"{place}: {kind} is not read yet; tree and block are")
    raise InputError(f"{place}: has none of tree, block and flat")


def _yaml_list(data: Any, key: str, place: str) -> list[Mapping[str, Any]]:
    inner = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(inner, list) or not inner or not all(isinstance(entry, Mapping) for entry in inner):
        found = f"the text {shown(data)}" if isinstance(data, str) else f"a {type(data).__name__}"
        raise InputError(f"{place}: an object with a list {key!r} is needed here, and {found} is there")
    return inner


def _yaml_switches(data: Any, place: str) -> dict[str, Switch]:
    switches: dict[str, Switch] = {}
    left = MOST_HOSTS
    for entry in _yaml_list(data, "switches", place):
        fields = {
            key.lower(): ",".join(value) if isinstance(value, list) else str(value) for key, value in entry.items()
        }
        fields["switchname"], fields["switches"] = fields.get("switch", ""), fields.get("children", "")
        switch = _switch(fields, place, left)
        if switch.name in switches:
            raise InputError(f"{place}: switch {switch.name} is described twice")
        switches[switch.name] = switch
        left -= len(switch.hosts)
    return switches


def _yaml_blocks(data: Any, place: str) -> tuple[dict[str, tuple[str, ...]], list[int]]:
    blocks: dict[str, tuple[str, ...]] = {}
    left = MOST_HOSTS
    for entry in _yaml_list(data, "blocks", place):
        name = str(entry.get("block", ""))
        if not name or name in blocks:
            raise InputError(f"{place}: block {shown(name)} has no name, or is described twice")
        said = entry.get("nodes", "")
        names = expand(",".join(said) if isinstance(said, list) else str(said), place, left)
        blocks[name] = tuple(names)
        left -= len(names)
    sizes = data.get("block_sizes", [])
    return blocks, _block_sizes([str(size) for size in sizes], place) if isinstance(sizes, list) and sizes else []
