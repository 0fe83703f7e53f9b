"""A cluster by name (`h100x64`), from a file, or from the few facts that a request states."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_models.data import rows
from cost_models.records import Cluster, Device, Link, NodeKind, Pool, RecordError, from_json
from cost_models.records.near_names import did_you_mean
from planner.errors import InputError
from planner.readers.documents import There, named_path, part_of, read_document
from planner.readers.plausible import refuse_implausible, refuse_too_many

FACT_KEYS = ("name", "nodes", "gpus_per_node", "world", "gpu", "gpu_mem_gb", "host_mem_gb", "intra", "inter")
"""Keys of the short form of a cluster, as request files write it; null counts as absent."""

_PRESET_AND_COUNT = re.compile(r"(.+?)\s*[x×*]\s*(-?\d+)")

_GIB = 2**30
_BYTES_PER_GBIT = 125_000_000


def cluster_names() -> tuple[str, ...]:
    """Names of all presets: nodes as sold, to be written with a number of GPUs, as in h100x64."""
    return tuple(rows("nodes"))


def read_cluster(name_or_path: str) -> Cluster:
    """The cluster that a person names: preset x GPUs (`a100-80x1024`), several joined by + (`h100x64+a100-80x128`), or the path
    of a JSON file.

    A file holds a Cluster record, its short form (`cluster_from_facts`), a request or a plan. Fewer GPUs than a node has
    make one smaller node; more must fill whole nodes. Raises InputError; unknown names list the near ones.
    """
    text = name_or_path.strip()
    path, there = named_path(text)
    if there is There.FILE:
        return _cluster_from_file(path)
    if there is There.FOLDER:
        raise InputError(
            f"cluster {text!r}: this is a folder; name a cluster file in it, or preset x GPUs as in h100x64"
        )
    if text.endswith(".json") or "/" in text or "\\" in text:
        raise InputError(
            f"cluster {text!r}: there is no such file; give the path of a cluster file, or preset x GPUs as in h100x64"
        )
    parts = [part.strip() for part in text.split("+")]
    if len(parts) > 1:
        return _mixed_cluster(text, parts)
    match = _PRESET_AND_COUNT.fullmatch(text.lower())
    if match is None:
        return _refuse_name(text)
    name = _node_name(match[1])
    if name is None:
        return _refuse_name(match[1], match[2])
    return preset_cluster(name, int(match[2]))


def _mixed_cluster(text: str, parts: list[str]) -> Cluster:
    """Pools of presets side by side on one network, in the order given."""
    pools: list[Pool] = []
    for part in parts:
        match = _PRESET_AND_COUNT.fullmatch(part.lower())
        name = None if match is None else _node_name(match[1])
        try:
            if not part:
                raise InputError("there is nothing on one side of a +")
            if match is None or name is None:
                _refuse_name(part if match is None else match[1], "64" if match is None else match[2])
            else:
                pools += preset_cluster(name, int(match[2])).pools
        except InputError as error:
            raise InputError(f"cluster {text!r} (pools joined by +, as in h100x64+a100-80x128): {error}") from None
    cluster = _with_joined_pools(Cluster(name="+".join(parts), pools=tuple(pools)))
    refuse_too_many(cluster.num_gpus)
    return cluster


def preset_cluster(name: str, num_gpus: int) -> Cluster:
    """`num_gpus` GPUs in nodes of the preset `name`.

    Raises InputError for none at all, and for a count that leaves a node part-filled beside full ones.
    """
    kind = node_kind(name)
    per_node = kind.gpus_per_node
    if num_gpus < 1:
        raise InputError(f"cluster {name}x{num_gpus} has zero GPUs; write at least one, as in {name}x{per_node}")
    refuse_too_many(num_gpus)
    if num_gpus > per_node and num_gpus % per_node:
        below = num_gpus // per_node * per_node
        raise InputError(
            f"cluster {name}x{num_gpus}: a {kind.name} has {per_node} GPUs, and {num_gpus} do not fill whole nodes; "
            f"legal near counts: {below}, {below + per_node}. Unlike nodes side by side go into a cluster file"
        )
    if num_gpus < per_node:
        kind = _part_of_node(kind, num_gpus)
    num_nodes = max(1, num_gpus // per_node)
    kind = replace(kind, domain_nodes=min(kind.domain_nodes, num_nodes))
    return Cluster(name=f"{name}x{num_gpus}", pools=(Pool(kind=kind, num_nodes=num_nodes),))


def _part_of_node(kind: NodeKind, gpus: int) -> NodeKind:
    """A node of which only some GPUs are used, with their share of the interfaces; the host's memory stays whole."""
    nics = max(1, kind.num_nics * gpus // kind.gpus_per_node)
    return replace(kind, name=f"{kind.name} ({gpus} of {kind.gpus_per_node})", gpus_per_node=gpus, num_nics=nics)


def device(name: str) -> Device:
    """The device of a row of the table."""
    row = _row("devices", name, "device")
    return Device(name=name, **{key: row[key] for key in _DEVICE_FIELDS})


_DEVICE_FIELDS = (
    "family",
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "peak_flops_per_s",
    "matmul_flops_per_s",
)


def host_link(device_name: str) -> Link | None:
    """The way from a device to its host; None where nobody says."""
    name = rows("devices")[device_name].get("host_link")
    return link(name) if name else None


def link(name: str) -> Link:
    """The class of links of a row of the table."""
    return Link(name=name, bandwidth_bytes_per_s=_row("links", name, "link")["bandwidth_bytes_per_s"])


def node_kind(name: str) -> NodeKind:
    """The node of a preset, as sold."""
    row = _row("nodes", name, "node")
    return NodeKind(
        name=row["sold_as"],
        device=device(row["device"]),
        gpus_per_node=row["gpus_per_node"],
        intra=link(row["intra"]),
        domain_nodes=row["domain_nodes"],
        nic=link(row["nic"]),
        num_nics=row["num_nics"],
        host_memory_bytes=row["host_memory_bytes"],
        host_link=host_link(row["device"]),
    )


def local_cluster(
    num_ranks: int,
    memory_bytes: int,
    *,
    matmul_flops_per_s: Mapping[str, float],
    memory_bandwidth_bytes_per_s: float,
    bandwidth_bytes_per_s: float | None = None,
    peak_flops_per_s: Mapping[str, float] | None = None,
    host_memory_bytes: int | None = None,
    name: str | None = None,
) -> Cluster:
    """This machine as a cluster of `num_ranks` CPU processes, from facts that were measured here.

    `memory_bytes` is what one rank may use; rates are those of one rank while all are busy. Without a data sheet the
    peak is the measured rate. The loopback's bandwidth is the table's stand-in until it is given.
    """
    if num_ranks < 1:
        raise InputError(f"num_ranks={num_ranks}: a cluster has at least one rank")
    loopback = link("loopback")
    if bandwidth_bytes_per_s is not None:
        loopback = Link(name="loopback", bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    cpu = Device(
        name="cpu",
        family="cpu",
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        peak_flops_per_s=dict(peak_flops_per_s or matmul_flops_per_s),
        matmul_flops_per_s=dict(matmul_flops_per_s),
    )
    kind = NodeKind(
        name="this-machine",
        device=cpu,
        gpus_per_node=num_ranks,
        intra=loopback,
        nic=loopback,
        num_nics=1,
        host_memory_bytes=host_memory_bytes,
    )
    return Cluster(name=name or f"cpux{num_ranks}", pools=(Pool(kind=kind, num_nodes=1),))


# Names -------------------------------------------------------------------------------------------------------------


def _row(table: str, name: str, what: str) -> dict[str, Any]:
    found = rows(table).get(name)
    if found is None:
        near = difflib.get_close_matches(name, rows(table), n=3) or list(rows(table))
        raise InputError(f"{what} {name!r} is not in the table; near names: {', '.join(near)}")
    return found


def _node_name(text: str) -> str | None:
    wanted = _spelling(text)
    for name, row in rows("nodes").items():
        if wanted in map(_spelling, (name, row["sold_as"], *row["aliases"])):
            return name
    return None


def _spelling(text: str) -> str:
    return re.sub(r"[\s_.]+", "-", text.strip().lower())


def _refuse_name(text: str, count: str = "64") -> Cluster:
    if _spelling(text).startswith(("cpu", "local")):
        raise InputError(
            f"cluster {text!r}: this machine is measured, not looked up; `meshwright probe --ranks N -o cluster.json` does it"
        )
    name = _node_name(text)
    if name is not None:
        per_node = rows("nodes")[name]["gpus_per_node"]
        raise InputError(f"cluster {text!r} does not say how many GPUs; write preset x GPUs, as in {name}x{per_node}")
    base = re.sub(r"x\d+$", "", _spelling(text))
    variants = [other for other in cluster_names() if other.startswith(f"{base}-")]
    near = variants or difflib.get_close_matches(base, cluster_names(), n=4, cutoff=0.5)
    hint = f"near names: {', '.join(f'{other}x{count}' for other in near)}" if near else "no name is near"
    raise InputError(
        f"cluster {text!r} is not a preset, and there is no such file; {hint}. Presets, each with x and a number of GPUs: "
        f"{', '.join(cluster_names())}"
    )


def _cluster_from_file(path: Path) -> Cluster:
    data = read_document(path, "a cluster")
    try:
        inner = part_of(data, "cluster")
        if isinstance(inner, str):
            return read_cluster(inner)
        if isinstance(inner, dict) and {"pools", "gpu", "gpus_per_node", "nodes", "world"} & set(inner):
            return cluster_of_document(inner)[0]
        raise InputError(
            f"neither a saved cluster (it has pools), nor its short form (keys: {', '.join(FACT_KEYS)}), nor a request or plan"
        )
    except (InputError, RecordError) as error:
        raise InputError(f"{path}: {error}") from None


def cluster_of_document(data: Mapping[str, Any]) -> tuple[Cluster, dict[str, str]]:
    """The cluster of a document, a whole record or the short form, and what was not said: `cluster.<key>` -> how it was taken.

    Raises InputError or RecordError for an unknown key or word, and for what no cluster has.
    """
    if "pools" not in data:
        return _strictly_from_facts(data)
    cluster = _with_joined_pools(from_json(Cluster, data))
    refuse_implausible(cluster)
    families = {pool.kind.device.family == "cpu" for pool in cluster.pools}
    if len(families) > 1:
        raise InputError(
            f"cluster {cluster.name!r} has pools of CPU processes and of GPUs: one run counts its memory in one way and talks over "
            "one backend; legal: pools of GPUs, or of CPU processes"
        )
    return _told_apart(cluster), {}


def _strictly_from_facts(facts: Mapping[str, Any]) -> tuple[Cluster, dict[str, str]]:
    for key, value in facts.items():
        if key not in FACT_KEYS:
            hint = did_you_mean(key, FACT_KEYS)
            raise InputError(f"cluster has an unknown key {key!r}{hint} Known keys: {', '.join(FACT_KEYS)}")
        if key in ("name", "gpu", "intra", "inter") and not isinstance(value, str | None):
            raise InputError(f"cluster {key}={value!r}: a text is needed")
    cluster, defaults = cluster_and_defaults(facts)
    for key, words in (
        ("intra", "nvlink, pcie, shm, or a class"),
        ("inter", "a rate as in `8 x 400 Gbps`, `400 Gbps per GPU`, `3200 Gbps per node` or `8x NDR`, or a class"),
    ):
        if facts.get(key) is not None and not _is_understood(key, facts[key], cluster.pools[0].kind):
            raise InputError(
                f"cluster {key}={facts[key]!r} is not understood; say {words} of: {', '.join(rows('links'))}"
            )
    refuse_implausible(cluster)
    if facts.get("world") not in (None, cluster.num_gpus):
        raise InputError(
            f"world={facts['world']} is not nodes·gpus_per_node = {cluster.num_gpus}; leave world out (--gpus N plans on fewer)"
        )
    return cluster, defaults


def _is_understood(key: str, text: str, kind: NodeKind) -> bool:
    if key == "inter":
        return read_interconnect(text, kind) is not None
    return text.lower() in rows("links") or text.lower().startswith(("pcie", "shm", "nv"))


def _with_joined_pools(cluster: Cluster) -> Cluster:
    """Neighbouring pools of one kind are one pool."""
    pools = [cluster.pools[0]]
    for pool in cluster.pools[1:]:
        if pool.kind == pools[-1].kind:
            pools[-1] = replace(pool, num_nodes=pool.num_nodes + pools[-1].num_nodes)
        else:
            pools.append(pool)
    return replace(cluster, pools=tuple(pools))


def _told_apart(cluster: Cluster) -> Cluster:
    """A cluster that has a preset's name and is not it says so."""
    match = _PRESET_AND_COUNT.fullmatch(cluster.name)
    if match is None or _node_name(match[1]) is None:
        return cluster
    try:
        is_it = preset_cluster(_node_name(match[1]) or "", int(match[2])) == cluster
    except InputError:
        is_it = False
    return cluster if is_it else replace(cluster, name=f"{cluster.name} (changed)")


# The short form ----------------------------------------------------------------------------------------------------


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
    kind = node_kind(_node_with(found, said.get("gpus_per_node")))
    nodes, per_node = _counts(said, kind, defaults)
    if per_node < kind.gpus_per_node:
        kind = _part_of_node(kind, per_node)
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


def _node_with(found: Device, gpus_per_node: Any) -> str:
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
