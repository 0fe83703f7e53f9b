"""Nodes as sold, by name: the presets, their devices and links from the tables, and this machine as a cluster."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cost_models.data import rows
from cost_models.records import Cluster, Device, Link, NodeKind, Pool
from planner.errors import InputError
from planner.readers.plausible import refuse_too_many


def cluster_names() -> tuple[str, ...]:
    """Names of all presets: nodes as sold, to be written with a number of GPUs, as in h100x64."""
    return tuple(rows("nodes"))


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
        kind = part_of_node(kind, num_gpus)
    num_nodes = max(1, num_gpus // per_node)
    kind = replace(kind, domain_nodes=min(kind.domain_nodes, num_nodes))
    return Cluster(name=f"{name}x{num_gpus}", pools=(Pool(kind=kind, num_nodes=num_nodes),))


def part_of_node(kind: NodeKind, gpus: int) -> NodeKind:
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


def _row(table: str, name: str, what: str) -> dict[str, Any]:
    found = rows(table).get(name)
    if found is None:
        near = difflib.get_close_matches(name, rows(table), n=3) or list(rows(table))
        raise InputError(f"{what} {name!r} is not in the table; near names: {', '.join(near)}")
    return found


def node_name(text: str) -> str | None:
    """The preset that somebody calls `text`: its name, as it is sold, or an alias; None where there is none."""
    wanted = spelling(text)
    for name, row in rows("nodes").items():
        if wanted in map(spelling, (name, row["sold_as"], *row["aliases"])):
            return name
    return None


def spelling(text: str) -> str:
    """A name without case, blanks, underscores and dots."""
    return re.sub(r"[\s_.]+", "-", text.strip().lower())
