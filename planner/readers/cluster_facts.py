"""A cluster from the few facts that a request states: `gpu`, counts, memory, and links in people's words."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cost_models.data import rows
from cost_models.records import Cluster, Device, Link, NodeKind, Pool
from planner.errors import InputError
from planner.readers.node_presets import device, link, node_kind, part_of_node

FACT_KEYS = ("name", "nodes", "gpus_per_node", "world", "gpu", "gpu_mem_gb", "host_mem_gb", "intra", "inter")
"""Keys of the short form of a cluster, as request files write it; null counts as absent."""

_GIB = 2**30
_BYTES_PER_GBIT = 125_000_000


def cluster_from_facts(facts: Mapping[str, Any]) -> Cluster:
    """The cluster of the short form: FACT_KEYS, of which `gpu` and a number of GPUs are needed, the rest as sold."""
    return cluster_and_defaults(facts)[0]


def cluster_and_defaults(facts: Mapping[str, Any]) -> tuple[Cluster, dict[str, str]]:
    """The cluster of the short form, and what was not said: `cluster.<key>` -> how it was taken.

    Raises InputError for an unknown key or GPU, and where the counts are absent or contradict one another.
    """
    said = {key: value for key, value in facts.items() if value is not None}
    defaults: dict[str, str] = {}
    if "gpu" not in said:
        raise InputError(f"the cluster does not say which gpu; known: {', '.join(rows('devices'))}")
    size = _positive(said, "gpu_mem_gb") if "gpu_mem_gb" in said else None
    found = device_from_facts(str(said["gpu"]), size)
    kind = node_kind(node_with(found, said.get("gpus_per_node")))
    nodes, per_node = _counts(said, kind, defaults)
    if per_node < kind.gpus_per_node:
        kind = part_of_node(kind, per_node)
    elif per_node > kind.gpus_per_node:
        kind = replace(kind, name=f"node-of-{per_node}-{found.name}", domain_nodes=1)
    kind = replace(kind, device=found, gpus_per_node=per_node, domain_nodes=min(kind.domain_nodes, nodes))
    if "host_mem_gb" in said:
        kind = replace(kind, host_memory_bytes=int(_positive(said, "host_mem_gb") * _GIB))
    elif kind.host_memory_bytes:
        defaults["cluster.host_mem_gb"] = f"{kind.host_memory_bytes / _GIB:.0f} ({kind.name})"
    kind = _with_links(kind, said, nodes, defaults)
    name = str(said.get("name") or f"{found.name}x{nodes * per_node}")
    return Cluster(name=name, pools=(Pool(kind=kind, num_nodes=nodes),)), defaults


def device_from_facts(gpu: str, gpu_mem_gb: float | None = None) -> Device:
    """The device that people call `gpu` (H100-80G, A100, RTX3090, NVIDIA A100-SXM4-80GB ...), told apart by its memory.

    `gpu_mem_gb` is the nominal size. A known GPU has the bytes that its driver shows; one that is sold with another size
    than the table's gets that size less what drivers keep. Raises InputError where the name is unknown or says too little.
    """
    model, size = _model_and_size(gpu)
    size = size if size is not None else gpu_mem_gb
    variants = {n: r for n, r in rows("devices").items() if model in map(_plain, (r["model"], n, *r["aliases"]))}
    if not variants:
        near = difflib.get_close_matches(model, [_plain(row["model"]) for row in rows("devices").values()], n=3)
        hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "."
        raise InputError(f"gpu {gpu!r} is not known{hint} Known: {', '.join(rows('devices'))}")
    fitting = [name for name, row in variants.items() if size is None or size in row["nominal_gb"]]
    if len(fitting) == 1:
        return device(fitting[0])
    if size is None:
        sizes = ", ".join(str(row["nominal_gb"][0]) for row in variants.values())
        raise InputError(f"gpu {gpu!r} is sold with several sizes of memory; give gpu_mem_gb, one of: {sizes}")
    if size <= 0:
        raise InputError(f"gpu_mem_gb={size}; a positive size is needed")
    sold = [nominal for row in variants.values() for nominal in row["nominal_gb"]]
    if not min(sold) / _ODD_SIZE <= size <= max(sold) * _ODD_SIZE:
        raise InputError(
            f"gpu_mem_gb={size:g}: {gpu} is sold with {', '.join(map(str, sorted(set(sold))))}; the unit is GB, as in 80"
        )
    return replace(device(next(iter(variants))), memory_bytes=int(size * _GIB * _SHOWN_SHARE))


_ODD_SIZE = 8
"""Times that a GPU's memory may differ from what is sold: its smallest slice is an eighth."""
_SHOWN_SHARE = 0.99
"""Least share of the nominal GiB that drivers show: 81251 of 81920 MiB (A100), 183359 of 184320 (B200)."""


def _model_and_size(gpu: str) -> tuple[str, float | None]:
    text = re.sub(r"\(.*?\)", " ", gpu)  # remarks
    text = re.sub(r"\b(nvidia|amd|instinct|tesla|geforce|rtx)\b|\brtx(?=\d)", " ", text.lower())
    text = re.sub(r"[\s_-]*sxm\d?", "", text).strip(" -_")
    match = re.fullmatch(r"(.+?)[\s_-]+(\d+)\s*(?:g|gb|gib)?(?:[\s_-]*hbm\w+)?", text)
    return (_plain(match[1]), float(match[2])) if match else (_plain(text), None)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def node_with(found: Device, gpus_per_node: Any) -> str:
    """The node that a device is sold in, by preference one with that many GPUs."""
    names = [name for name, row in rows("nodes").items() if row["device"] == found.name]
    same = [name for name in names if rows("nodes")[name]["gpus_per_node"] == gpus_per_node]
    return (same or names)[0]


def _counts(said: Mapping[str, Any], kind: NodeKind, defaults: dict[str, str]) -> tuple[int, int]:
    """Nodes and GPUs in each of them, from any two of nodes, gpus_per_node and world."""
    nodes, per_node, world = (_count(said, key) for key in ("nodes", "gpus_per_node", "world"))
    if per_node is None:
        if nodes and world and world % nodes == 0:
            per_node = world // nodes
        else:
            per_node = min(kind.gpus_per_node, world or kind.gpus_per_node)
            defaults["cluster.gpus_per_node"] = f"{per_node} ({kind.name})"
    if nodes is None:
        if world is None:
            raise InputError("the cluster does not say how many GPUs; give nodes or world")
        if world % per_node and world > per_node:
            raise InputError(f"world={world} does not fill whole nodes of gpus_per_node={per_node}; give nodes as well")
        nodes, per_node = max(1, world // per_node), min(per_node, world)
        defaults["cluster.nodes"] = f"{nodes} (world / gpus_per_node)"
    if world is not None and world > nodes * per_node:
        raise InputError(f"world={world} is more than nodes·gpus_per_node = {nodes}·{per_node} = {nodes * per_node}")
    return nodes, per_node


def _count(said: Mapping[str, Any], key: str) -> int | None:
    value = said.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"cluster {key}={value!r}: a whole number from 1 is needed (zero GPUs train nothing)")
    return value


def _positive(said: Mapping[str, Any], key: str) -> float:
    value = said[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise InputError(f"cluster {key}={value!r}: a positive number is needed")
    return float(value)


def _with_links(kind: NodeKind, said: Mapping[str, Any], nodes: int, defaults: dict[str, str]) -> NodeKind:
    intra = str(said.get("intra", "")).lower()
    if intra.startswith(("pcie", "shm")):
        kind = replace(kind, intra=link(rows("devices")[kind.device.name]["host_link"]), domain_nodes=1)
    elif intra in rows("links"):
        kind = replace(kind, intra=link(intra))
    elif kind.gpus_per_node > 1:
        defaults["cluster.intra"] = f"{kind.intra.name} ({kind.name})"
    fabric = read_interconnect(str(said.get("inter", "")), kind)
    if fabric is not None:
        return replace(kind, nic=fabric[0], num_nics=fabric[1])
    if nodes > 1:
        defaults["cluster.inter"] = f"{kind.num_nics} x {kind.nic.name} ({kind.name})"
    return kind


_RATE = r"(\d+(?:\.\d+)?)\s*g(?:b|bit|bits)?(?:ps|/s)?"


_GENERATIONS = {
    "edr": "ib-edr",
    "hdr": "ib-hdr",
    "ndr": "ib-ndr",
    "xdr": "ib-xdr",
    "omni-path": "omni-path",
    "opa": "omni-path",
}


def read_interconnect(text: str, kind: NodeKind) -> tuple[Link, int] | None:
    """One network interface and their number per node, from what people write; None where the text gives no number.

    Understood: a class of the table (`ib-ndr`), `8 x 200 Gbps`, `400 Gb/GPU`, `340 Gbps per node`, `8x HDR200`,
    `4 Omni-Path links`, `10GbE`; rates are Gbit/s in one direction. `kind` gives the GPUs and interfaces of a node.
    """
    lowered = text.strip().lower()
    if rows("links").get(lowered, {}).get("kind") in ("network", "local"):
        return link(lowered), kind.num_nics
    generations = "|".join(_GENERATIONS)
    if match := re.search(rf"(\d+)\s*x?\s*({generations})", lowered):
        return link(_GENERATIONS[match[2]]), int(match[1])
    if match := re.search(rf"(\d+)\s*[x×]\s*{_RATE}", lowered):
        return _network(kind, float(match[2])), int(match[1])
    if match := re.search(rf"{_RATE}\s*(?:/|per)\s*gpu", lowered):
        return _network(kind, float(match[1])), kind.gpus_per_node
    if match := re.search(rf"{_RATE}\s*(?:roce|ib|efa)?\s*(?:/\s*node|per node|inter-node)", lowered):
        return _of_node(kind, float(match[1]))
    if match := re.search(r"(\d+)\s*gbe", lowered):
        return Link(name=f"ethernet-{match[1]}", bandwidth_bytes_per_s=float(match[1]) * _BYTES_PER_GBIT), 1
    if match := re.fullmatch(rf"<?\s*{_RATE}", lowered):
        return _network(kind, float(match[1])), 1
    return None


def _of_node(kind: NodeKind, gbit_per_s: float) -> tuple[Link, int]:
    """Interfaces of a node from what they carry together: a whole number of its own class, where these are no more than it has,
    else as many as it has with an equal part each."""
    own = gbit_per_s * _BYTES_PER_GBIT / kind.nic.bandwidth_bytes_per_s
    if own.is_integer() and 1 <= own <= kind.num_nics:
        return kind.nic, int(own)
    return _network(kind, gbit_per_s / kind.num_nics), kind.num_nics


def _network(kind: NodeKind, gbit_per_s: float) -> Link:
    """A network link of that rate: the node's own class where it has this rate, else the class of the same rate."""
    rate = gbit_per_s * _BYTES_PER_GBIT
    if kind.nic.bandwidth_bytes_per_s == rate:
        return kind.nic
    same = [n for n, r in rows("links").items() if r["kind"] == "network" and r["bandwidth_bytes_per_s"] == rate]
    # an unlisted rate keeps its number under the class of the node, whose latency it shares
    return Link(name=same[0] if same else kind.nic.name, bandwidth_bytes_per_s=rate)
