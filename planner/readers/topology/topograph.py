"""The model files of topograph: switches by name with their children, and blocks of nodes that hang on them."""

from collections.abc import Mapping
from typing import Any

from planner.errors import InputError
from planner.readers.topology.fabric_tree import Switch, arranged
from planner.readers.topology.hostlists import MOST_HOSTS, expand
from planner.readers.topology.seen import SeenFabric, SeenHost
from planner.readers.topology.slurm import blocked
from planner.readers.topology.text import shown


def is_topograph(data: Any) -> bool:
    """An object with a list `blocks` whose entries have `nodes`."""
    blocks = data.get("blocks") if isinstance(data, Mapping) else None
    return isinstance(blocks, list) and all(isinstance(block, Mapping) and "nodes" in block for block in blocks)


def read_topograph(data: Mapping[str, Any], source: str, *, below: str | None = None) -> list[SeenFabric]:
    """The tree, or the blocks where no switch is described. Raises InputError."""
    source = f"{source} (topograph)"
    hosts = [(str(block.get("switch", "")), _hosts(block, source)) for block in data["blocks"]]
    if sum(len(some) for _, some in hosts) > MOST_HOSTS:
        raise InputError(f"{source}: more than {MOST_HOSTS:,} nodes")
    described = data.get("switches") or {}
    if not isinstance(described, Mapping):
        raise InputError(
            f"{source}: switches is a {type(described).__name__}; an object by the name of the switch is needed"
        )
    if not described:
        return [blocked({f"block {n}": [host.name for host in some] for n, (_, some) in enumerate(hosts)}, (), source)]
    children = {name: _children(switch, name, source) for name, switch in described.items()}
    known = set(children) | {child for some in children.values() for child in some}
    on: dict[str, list[SeenHost]] = {}
    for switch, some in hosts:
        if switch not in known:
            raise InputError(
                f"{source}: a block hangs on {shown(switch) if switch else 'no switch'}, which `switches` does not know"
            )
        on.setdefault(switch, []).extend(some)
    switches = {
        name: Switch(name=name, children=children.get(name, ()), hosts=tuple(on.get(name, ()))) for name in known
    }
    return [arranged(_with_nodes(switches, list(children)), source, below=below)]


def _hosts(block: Mapping[str, Any], source: str) -> list[SeenHost]:
    said = block["nodes"]
    if not isinstance(said, list) or not said or not all(isinstance(entry, str) for entry in said):
        raise InputError(f'{source}: nodes of a block: a list of names is needed, as in ["n[1-4]", n9]')
    notes = block.get("annotations") or {}
    found = (
        [value for key, value in notes.items() if str(key).endswith("/domain")] if isinstance(notes, Mapping) else []
    )
    domain = str(found[0]) if found else None
    return [SeenHost(name=name, domain=domain) for entry in said for name in expand(entry, source)]


def _children(switch: Any, name: str, source: str) -> tuple[str, ...]:
    children = (switch or {}).get("switches", []) if isinstance(switch, Mapping | None) or switch == "" else None
    if not isinstance(children, list) or not all(isinstance(child, str) for child in children):
        raise InputError(f"{source}: switch {shown(name)}: `switches` is a list of names")
    return tuple(children)


def _with_nodes(switches: Mapping[str, Switch], order: list[str]) -> dict[str, Switch]:
    """The switches with a node below them, those of the file first: models name switches that stand empty."""
    names = [*order, *sorted(set(switches) - set(order))]
    full = {name for name in names if switches[name].hosts}
    while more := {name for name in names if name not in full and full & set(switches[name].children)}:
        full |= more
    return {
        name: Switch(
            name=name,
            children=tuple(child for child in switches[name].children if child in full),
            hosts=switches[name].hosts,
        )
        for name in names
        if name in full
    }
