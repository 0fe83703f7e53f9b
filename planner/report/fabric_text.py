"""A cluster that was seen, for a terminal: its node, its tree of switches, what was measured, and the verdict."""

import math
import string
from collections.abc import Iterator

from cost_models.records import Cluster, Pool
from planner.fabric_findings import Finding, verdict
from planner.readers.topology.curves import regimes
from planner.readers.topology.join import Joined
from planner.readers.topology.seen import SeenNode
from planner.report.words import bandwidth, columns, counted, duration, row
from planner.survey import gpus_per_node, nearest_interfaces

MOST_GPUS_SHOWN = 16
"""GPUs of a node that have a line each."""


def fabric_text(seen: Joined, found: tuple[Finding, ...]) -> str:
    """The picture in characters and the verdict; what stands below `probe_text`."""
    parts = [_tree(seen.cluster)]
    if seen.pieces.node is not None:
        parts.append(_node(seen, seen.pieces.node))
    if seen.pieces.collectives:
        parts.append(_measured(seen))
    parts.append(_verdict(found))
    if seen.assumptions:
        parts.append(["assumed, since no file says it:", *(row("  -", text) for text in seen.assumptions)])
    return "\n\n".join("\n".join(part) for part in parts)


def structure_text(seen: Joined, found: tuple[Finding, ...], missing: str) -> str:
    """The same of files that do not name the GPU: nothing that depends on what it is."""
    cluster = seen.cluster
    each = gpus_per_node(seen)
    counts = counted(cluster.num_nodes, "node") + (f" of {counted(each, 'GPU')}" if each else "")
    parts = [[row("seen", counts)]]
    if cluster.fabric:
        parts.append(_tree(cluster, f"{cluster.num_nodes:,} nodes"))
    if seen.pieces.node is not None:
        parts.append(_node(seen, seen.pieces.node))
    return "\n\n".join("\n".join(part) for part in [*parts, _verdict(found), [row("missing", missing)]])


# The tree ----------------------------------------------------------------------------------------------------------


def _tree(cluster: Cluster, nodes: str | None = None) -> list[str]:
    """Switches from the top down, one line a level; then the nodes with what they bring, or as `nodes` says."""
    lines = []
    indent = ""
    planes = 1 if nodes is not None else max(pool.kind.num_nics for pool in cluster.pools) if cluster.rails else 1
    if cluster.num_nodes > 1:
        rails = f", in {planes} planes (one for each interface of a node)" if planes > 1 else ""
        lines.append(f"top{'' if cluster.fabric else ': one full-bisection switch'}{rails}")
        for name, count, below, narrow in reversed(list(_levels(cluster))):
            up = "" if narrow == 1 else f", {narrow:g}:1 upwards"
            lines.append(f"{indent}+- {count:,} x {name}, {below} below each{up}")
            lines += [
                f"{indent}   ! {name} {slow.switch}: {slow.factor:.0%} of its links upwards{f': {slow.note}' if slow.note else ''}"
                for slow in cluster.slow_uplinks
                if slow.level == name
            ]
            indent += "   "
    first = 0
    if nodes is not None:
        lines.append(f"{indent}+- {nodes}")
    for pool in cluster.pools if nodes is None else ():
        lines.append(f"{indent}+- {_pool(pool)}")
        for bad in cluster.exceptions:
            if first <= bad.node < first + pool.num_nodes:
                share = min(bad.intra_factor, bad.nic_factor)
                lines.append(f"{indent}   ! node {bad.node}: {share:.0%}: {bad.note or 'slower than its kind'}")
        first += pool.num_nodes
    return [row("drawing", lines[0]), *(f"{'':11}{line}".rstrip() for line in lines[1:])]


def _levels(cluster: Cluster) -> Iterator[tuple[str, int, int, float]]:
    """(name, switches, children of one, oversubscription), nearest to the nodes first."""
    below = cluster.num_nodes
    for level in cluster.fabric:
        count = math.ceil(below / level.radix)
        yield level.name, count, min(level.radix, below), level.oversubscription
        below = count


def _pool(pool: Pool) -> str:
    kind = pool.kind
    shared = f", {kind.domain_nodes} nodes a domain" if kind.domain_nodes > 1 else ""
    if kind.island is not None:
        link = kind.island.link
        shared += f", islands of {kind.island.num_gpus} ({link.name} {bandwidth(link.bandwidth_bytes_per_s)} each)"
    return (
        f"{pool.num_nodes:,} x {kind.name}: {kind.gpus_per_node} {kind.device.name} = {kind.intra.name} "
        f"{bandwidth(kind.intra.bandwidth_bytes_per_s)} each{shared} = {kind.num_nics} x {kind.nic.name} "
        f"{bandwidth(kind.nic.bandwidth_bytes_per_s)}"
    )


# The node ----------------------------------------------------------------------------------------------------------


def _node(seen: Joined, node: SeenNode) -> list[str]:
    """A line a GPU: its domain, links, place and nearest interfaces; then the pairs, where they are not all alike."""
    domains = seen.domains
    letters = {
        gpu: string.ascii_uppercase[number % 26] if len(group) > 1 else "-"
        for number, group in enumerate(domains.groups if domains else ())
        for gpu in group
    }
    table = [["GPU", "domain", "links", "place", "nearest interfaces"]]
    for gpu, seen_gpu in list(enumerate(node.gpus))[:MOST_GPUS_SHOWN]:
        near = nearest_interfaces(seen, gpu)
        names = ", ".join(node.nics[nic].name for nic in near[:4]) + (", ..." if len(near) > 4 else "")
        way = f" ({node.nic_ways[gpu, near[0]].value})" if near else "-"
        links = str(domains.links[gpu]) if domains and domains.links[gpu] else "-"
        table.append([str(gpu), letters.get(gpu, "?"), links, seen_gpu.place or "?", names + way])
    lines = [row("node", f"as {node.command} shows it"), *columns(table, right=(0, 2))]
    if len(node.gpus) > MOST_GPUS_SHOWN:
        lines.append(f"and {len(node.gpus) - MOST_GPUS_SHOWN} more")
    kinds = {(path.way, path.links) for path in node.paths.values()}
    if len(kinds) > 1 and len(node.gpus) <= MOST_GPUS_SHOWN:
        lines += ["", *_pairs(node)]
    return lines


def _pairs(node: SeenNode) -> list[str]:
    count = len(node.gpus)
    table = [["", *(f"{gpu}" for gpu in range(count))]]
    for i in range(count):
        words = []
        for j in range(count):
            path = node.paths.get((min(i, j), max(i, j)))
            words.append("." if path is None else str(path.links) if path.links else path.way.value)
        table.append([str(i), *words])
    return [*columns(table, right=range(count + 1)), "links between two GPUs, or the way over the host"]


# Measured ----------------------------------------------------------------------------------------------------------


def _measured(seen: Joined) -> list[str]:
    table = [["collective", "ranks", "sizes", "left out", "latency", "bandwidth", "best busbw"]]
    for one in seen.pieces.collectives:
        both = regimes(one.points)
        table.append(
            [
                one.collective,
                f"{one.num_ranks:,}",
                f"{len(one.points)}",
                f"{sum(point.is_outlier for point in one.points)}",
                duration(both.latency_s) if both.latency_s is not None else "-",
                bandwidth(both.bytes_per_s) if both.bytes_per_s else "-",
                bandwidth(one.bus_bytes_per_s),
            ]
        )
    return [
        row("measured", f"{counted(len(seen.pieces.collectives), 'table')}; plans with these files take the curves"),
        *columns(table, right=(1, 2, 3, 4, 5, 6)),
        "latency of the smallest messages; bandwidth of the largest, as bytes of the whole tensor over seconds",
    ]


# The verdict -------------------------------------------------------------------------------------------------------


def _verdict(found: tuple[Finding, ...]) -> list[str]:
    if not found:
        return [row("verdict", "as it should be: nothing odd was found")]
    lines = [row("verdict", f"{verdict(found)}: {counted(len(found), 'finding')}")]
    for one in found:
        lines += ["", row(one.severity.value, f"{one.code}: {one.message}")]
        if one.cost is not None:
            lines.append(
                row(
                    "  costs",
                    f"{one.cost.what} takes {duration(one.cost.now_s)} in place of {duration(one.cost.mended_s)} "
                    f"({one.cost.times:.2g} times)",
                )
            )
        lines.append(row("  do", one.advice))
    return lines
