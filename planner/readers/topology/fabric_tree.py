"""A tree of switches with names -> levels, and the nodes in the order of their switches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner.errors import InputError
from planner.readers.topology.seen import SeenFabric, SeenHost, SeenLevel

LEVEL_NAMES = ("leaf", "spine", "core")
"""Of switches by their height above the nodes; higher ones are numbered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch, or one block of nodes, as a file describes it."""

    name: str
    """Unique."""
    children: tuple[str, ...] = ()
    """Switches below it."""
    hosts: tuple[SeenHost, ...] = ()
    """Nodes that hang on it."""


def arranged(
    switches: Mapping[str, Switch],
    source: str,
    *,
    below: str | None = None,
    level_name: Callable[[int], str] | None = None,
) -> SeenFabric:
    """The fabric of a tree; `below` takes the part under one switch.

    Raises InputError: no switch, a switch that nothing describes, two parents with unlike children, a ring, a node twice,
    several trees that nothing joins (no run spans them; each is offered as `switch=NAME`), or an unknown `below`.
    """
    if not switches:
        raise InputError(f"{source}: describes no switch")
    switches, notes = _with_one_parent(switches, source)
    if below is not None and below not in switches:
        listed = ", ".join(list(switches)[:12]) + (", ..." if len(switches) > 12 else "")
        raise InputError(f"{source}: switch={below} is not there; it describes {listed}")
    root = below or _root(switches, source)
    order = _depth_first(switches, root, source)
    heights = _heights(switches, order)
    hosts = tuple(host for name in order for host in switches[name].hosts)
    _refuse_twice(hosts, source)
    if not hosts:
        raise InputError(f"{source}: no node hangs on switch {root}")
    name_of = level_name or level_name_of
    levels = tuple(
        SeenLevel(name=name_of(height), sizes=_sizes(switches, order, heights, height))
        for height in range(heights[root])
    )
    return SeenFabric(source=source, hosts=hosts, levels=levels, notes=notes)


def level_name_of(height: int) -> str:
    """leaf, spine, core, then by number."""
    return LEVEL_NAMES[height] if height < len(LEVEL_NAMES) else f"level {height + 1}"


def _sizes(
    switches: Mapping[str, Switch], order: list[str], heights: Mapping[str, int], height: int
) -> tuple[int, ...]:
    here = [switches[name] for name in order if heights[name] == height]
    return tuple(len(switch.hosts) or len(switch.children) for switch in here)


def _with_one_parent(switches: Mapping[str, Switch], source: str) -> tuple[dict[str, Switch], tuple[str, ...]]:
    """Parents with the same children are parallel switches, and count as one."""
    by_children: dict[tuple[str, ...], list[str]] = {}
    for name, switch in switches.items():
        if switch.children:
            by_children.setdefault(tuple(sorted(switch.children)), []).append(name)
    twins = {name: group[0] for group in by_children.values() for name in group[1:]}
    kept = {
        name: replace(switch, children=tuple(dict.fromkeys(twins.get(child, child) for child in switch.children)))
        for name, switch in switches.items()
        if name not in twins
    }
    parents: dict[str, str] = {}
    for name, switch in kept.items():
        for child in switch.children:
            if child in parents:
                raise InputError(
                    f"{source}: switch {child} hangs on {parents[child]} and on {name}, which have other children besides: no tree. "
                    "Say which one carries the traffic, and leave the other out"
                )
            parents[child] = name
    notes = tuple(
        f"switches {', '.join(group[:4])}{', ...' if len(group) > 4 else ''} have the same children and count as one"
        for group in by_children.values()
        if len(group) > 1
    )
    return kept, notes


def _root(switches: Mapping[str, Switch], source: str) -> str:
    below = {child for switch in switches.values() for child in switch.children}
    roots = [name for name in switches if name not in below]
    if not roots:
        raise InputError(f"{source}: every switch hangs on another one: the switches form a ring, no tree")
    if len(roots) > 1:
        listed = ", ".join(roots[:8]) + (", ..." if len(roots) > 8 else "")
        raise InputError(
            f"{source}: {len(roots)} trees that no switch joins ({listed}), and no run spans them; choose one with "
            f"switch={roots[0]}, or add the switch above them"
        )
    return roots[0]


def _depth_first(switches: Mapping[str, Switch], root: str, source: str) -> list[str]:
    """Switches from the root down, the first child first; a ring and an absent switch are refused."""
    order: list[str] = []
    waiting, seen = [root], {root}
    while waiting:
        name = waiting.pop()
        order.append(name)
        for child in reversed(switches[name].children):
            if child not in switches:
                raise InputError(
                    f"{source}: switch {name} names {child}, and nothing describes {child}: the file was cut off?"
                )
            if child in seen:
                raise InputError(f"{source}: switch {child} is below itself: the switches form a ring, no tree")
            seen.add(child)
            waiting.append(child)
        if switches[name].hosts and switches[name].children:
            raise InputError(
                f"{source}: switch {name} has both nodes and switches below it; put its nodes on a leaf switch of their own"
            )
    return order


def _heights(switches: Mapping[str, Switch], order: list[str]) -> dict[str, int]:
    heights: dict[str, int] = {}
    for name in reversed(order):
        heights[name] = max((heights[child] + 1 for child in switches[name].children), default=0)
    return heights


def _refuse_twice(hosts: tuple[SeenHost, ...], source: str) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise InputError(f"{source}: node {host.name} hangs on two switches; it has one place")
        seen.add(host.name)
