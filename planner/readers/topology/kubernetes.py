"""Labels of Kubernetes nodes: what a node is, and where it hangs (`kubectl get nodes -o json`, `-o yaml`, `--show-labels`).

Labels of the fabric come in families, one from each cloud or tool; the first that most nodes have is taken, nearest level
first: topograph (tier-0 is nearest), EKS (layer 3 is nearest), GKE (sub-block, block), OCI (rack, network block).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import InputError
from planner.readers.topology.hostlists import MOST_HOSTS
from planner.readers.topology.seen import SeenFabric, SeenHost, SeenLevel
from planner.readers.topology.text import shown

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "topograph": tuple(f"fabric.topograph.run/tier-{tier}" for tier in range(6)),
    "topograph (old)": tuple(f"network.topology.nvidia.com/{name}" for name in ("leaf", "spine", "core")),
    "EKS": tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (3, 2, 1)),
    "GKE": tuple(f"cloud.google.com/gce-topology-{name}" for name in ("subblock", "block")),
    "OCI": tuple(f"oci.oraclecloud.com/host.{name}" for name in ("rack_id", "network_block_id")),
}
"""Name -> labels, nearest to the node first (topograph docs/reference/node-labels.md lists them)."""

DOMAINS = (
    "nvidia.com/gpu.clique",
    "accelerator.topograph.run/sub-domain",
    "accelerator.topograph.run/domain",
    "topology.k8s.aws/ultraserver-id",
)
"""Labels of a fast domain across nodes, the most particular first; gpu.clique is absent where NVLink ends at the node."""

_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
_COUNTS = ("nvidia.com/gpu", "amd.com/gpu")
_LABELLED = re.compile(r"^NAME\s+STATUS\b.*\bLABELS\s*$", re.MULTILINE)


def is_kubernetes(data: Any) -> bool:
    """An object of kind Node, or a list of objects."""
    return isinstance(data, Mapping) and data.get("kind") in ("Node", "NodeList", "List") and "apiVersion" in data


def is_labelled_list(text: str) -> bool:
    """What `kubectl get nodes --show-labels` prints."""
    return bool(_LABELLED.search(text))


def read_labelled_list(text: str, source: str) -> list[SeenFabric]:
    """The same of the table with labels in its last column."""
    lines = text[_LABELLED.search(text).start() :].split("\n")[1:]  # type: ignore[union-attr]
    nodes: list[Node] = []
    for line in lines:
        words = line.split()
        if not words:
            break
        if len(words) < 3 or "=" not in words[-1]:
            raise InputError(
                f"{source}: {shown(line)}: the last column of a node is its labels, key=value,...: cut off?"
            )
        labels = dict(part.partition("=")[::2] for part in words[-1].split(","))
        nodes.append((words[0], labels, {}, words[1].split(",")[0] == "Ready" and "SchedulingDisabled" not in words[1]))
    return [_fabric(nodes, source)]


def read_kubernetes(data: Mapping[str, Any], source: str) -> list[SeenFabric]:
    """The nodes with accelerators, in the order of their switches. Raises InputError where there are none."""
    items = data.get("items", []) if data["kind"] != "Node" else [data]
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InputError(f"{source}: items of a list of nodes: a list of objects is needed")
    if other := next((item for item in items if item.get("kind", "Node") != "Node"), None):
        raise InputError(
            f"{source}: has a {shown(str(other.get('kind')))}; only nodes are read: `kubectl get nodes -o json`"
        )
    if len(items) > MOST_HOSTS:
        raise InputError(f"{source}: {len(items):,} nodes; up to {MOST_HOSTS:,} are planned for")
    return [_fabric([_node(item, source) for item in items], source)]


Node = tuple[str, Mapping[str, str], Mapping[str, str], bool]
"""Name, labels, capacity, and whether work may be placed on it."""


def _node(item: Mapping[str, Any], source: str) -> Node:
    metadata, status, spec = (_object(item, key, source) for key in ("metadata", "status", "spec"))
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{source}: a node without metadata.name")
    labels = {key: str(value) for key, value in _object(metadata, "labels", source).items()}
    capacity = {key: str(value) for key, value in _object(status, "capacity", source).items()}
    conditions = status.get("conditions", [])
    ready = (
        [c.get("status") for c in conditions if isinstance(c, Mapping) and c.get("type") == "Ready"]
        if isinstance(conditions, list)
        else []
    )
    return (
        name,
        labels,
        capacity,
        str(spec.get("unschedulable", "false")).lower() != "true" and "False" not in ready and "Unknown" not in ready,
    )


def _object(item: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    value = item.get(key) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"{source}: {key} of a node is a {type(value).__name__}; an object is needed")
    return value


def _fabric(nodes: Sequence[Node], source: str) -> SeenFabric:
    source = f"{source} (Kubernetes labels)"
    found: list[tuple[SeenHost, Mapping[str, str]]] = []
    idle, bare = 0, 0
    for name, labels, capacity, may_run in nodes:
        host = _host(name, labels, capacity, source)
        if host is None:
            bare += 1
        elif not may_run:
            idle += 1
        else:
            found.append((host, labels))
    if not found:
        raise InputError(
            f"{source}: none of {len(nodes)} nodes has an accelerator that work may use (nvidia.com/gpu.count, or nvidia.com/gpu or "
            "amd.com/gpu in status.capacity)"
        )
    _refuse_twice([host.name for host, _ in found], source)
    notes = []
    if bare:
        notes.append(f"{bare} nodes without accelerators left out")
    if idle:
        notes.append(f"{idle} nodes that are not ready, or closed to work, left out")
    keys, family = _family([labels for _, labels in found], len(found))
    if family:
        notes.append(f"switches by the labels of {family}")
    ordered, levels, lost = _placed(found, keys)
    if lost:
        notes.append(f"{lost} nodes lack a label of the fabric and stand apart")
    return SeenFabric(source=source, hosts=ordered, levels=levels, notes=tuple(notes))


def _refuse_twice(names: Sequence[str], source: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{source}: node {twice} is listed twice")


def _host(name: str, labels: Mapping[str, str], capacity: Mapping[str, str], source: str) -> SeenHost | None:
    """The node, where it has accelerators."""
    said = labels.get("nvidia.com/gpu.count") or next((capacity[key] for key in _COUNTS if key in capacity), "")
    product = next((labels[key] for key in _PRODUCTS if labels.get(key)), None)
    if not said and product is None:
        return None
    if said and not (said.isdigit() and len(said) < 5):
        raise InputError(f"{source}: node {name}: {shown(said)} accelerators; a whole number is needed")
    if product is not None and "MIG-" in product.upper():
        raise InputError(
            f"{source}: node {name} offers slices of a GPU ({product}); a training run takes whole ones: turn MIG off"
        )
    if said and not int(said):
        return None
    memory = labels.get("nvidia.com/gpu.memory", "")
    return SeenHost(
        name=name,
        gpu=product,
        num_gpus=int(said) if said else None,
        memory_bytes=int(memory) * 2**20 if memory.isdigit() and len(memory) < 9 else None,
        domain=next((labels[key] for key in DOMAINS if labels.get(key)), None),
    )


def _family(labels: Sequence[Mapping[str, str]], count: int) -> tuple[tuple[str, ...], str]:
    """Labels of the fabric, nearest first, and whose they are; zones above them where there are several."""
    chosen: tuple[str, ...] = ()
    name = ""
    for family, keys in FAMILIES.items():
        present = tuple(key for key in keys if 2 * sum(key in some for some in labels) > count)
        if present:
            chosen, name = present, family
            break
    zone = "topology.kubernetes.io/zone"
    if len({some.get(zone) for some in labels}) > 1:
        chosen, name = (*chosen, zone), f"{name} and zones" if name else "zones"
    return chosen, name


def _placed(
    found: Sequence[tuple[SeenHost, Mapping[str, str]]], keys: Sequence[str]
) -> tuple[tuple[SeenHost, ...], tuple[SeenLevel, ...], int]:
    """Hosts in the order of their paths, the levels below what joins all, and how many hosts lack a label."""
    if not keys:
        return tuple(host for host, _ in found), (), 0
    paths = [tuple(labels.get(key, "") for key in reversed(keys)) for _, labels in found]
    order = sorted(range(len(found)), key=lambda index: paths[index])
    levels: list[SeenLevel] = []
    for depth in range(len(keys), 0, -1):
        switches = list(dict.fromkeys(paths[index][:depth] for index in order))
        if len(switches) == 1:
            break
        below = [
            path[:depth]
            for path in (
                dict.fromkeys(paths[index][: depth + 1] for index in order)
                if depth < len(keys)
                else (paths[index] for index in order)
            )
        ]
        sizes = Counter(below)
        levels.append(
            SeenLevel(
                name=_level_name(keys[len(keys) - depth], len(levels)),
                sizes=tuple(sizes[switch] for switch in switches),
            )
        )
    lost = sum("" in path for path in paths)
    return tuple(found[index][0] for index in order), tuple(levels), lost


def _level_name(key: str, height: int) -> str:
    known = {
        "subblock": "sub-block",
        "block": "block",
        "rack_id": "rack",
        "network_block_id": "network block",
        "zone": "zone",
    }
    last = re.split(r"[/.]|gce-topology-", key)[-1]
    return known.get(last, ("leaf", "spine", "core")[height] if height < 3 else f"level {height + 1}")
