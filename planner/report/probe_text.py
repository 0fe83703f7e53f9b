"""A cluster as people read it: nodes, devices, links, fabric, and what its paths carry."""

from cost_models.data import rows
from cost_models.records import Cluster, Link, NodeKind, Pool
from cost_models.units import gigabits
from planner.report.words import bandwidth, columns, counted, duration, flop_rate, memory, row


def probe_text(cluster: Cluster) -> str:
    """The facts of a cluster, nominal and in one direction where they are bandwidths."""
    word = _device_word(cluster)
    lines = [
        row("cluster", f"{cluster.name}: {counted(cluster.num_gpus, word)} in {counted(cluster.num_nodes, 'node')}")
    ]
    lines += [row("nodes", _node(pool, word)) for pool in cluster.pools]
    lines += ["", *_device_lines(cluster), "", *_link_lines(cluster)]
    lines += ["", *_fabric_lines(cluster), "", *_path_lines(cluster, word)]
    return "\n".join(lines)


def _device_word(cluster: Cluster) -> str:
    return "rank" if all(pool.kind.device.family == "cpu" for pool in cluster.pools) else "GPU"


def _kinds(cluster: Cluster) -> list[NodeKind]:
    """Each kind of node once."""
    return list({pool.kind.name: pool.kind for pool in cluster.pools}.values())


def _node(pool: Pool, word: str) -> str:
    kind = pool.kind
    host = f", host memory {memory(kind.host_memory_bytes)}" if kind.host_memory_bytes else ", host memory unknown"
    shared = f" over {kind.domain_nodes} nodes" if kind.domain_nodes > 1 else ""
    return (
        f"{pool.num_nodes:,} x {kind.name}: {counted(kind.gpus_per_node, word)} {kind.device.name}, fast domain of "
        f"{kind.domain_size}{shared} ({kind.intra.name}), {counted(kind.num_nics, 'interface')} {kind.nic.name} = "
        f"{_gbit(kind.node_bandwidth_bytes_per_s)} a node{host}"
    )


def _device_lines(cluster: Cluster) -> list[str]:
    """What a device has, a line for each precision."""
    table = [["device", "family", "memory", "bandwidth", "precision", "peak", "measured", "share"]]
    for device in {kind.device.name: kind.device for kind in _kinds(cluster)}.values():
        facts = [
            device.name,
            device.family,
            memory(device.memory_bytes),
            bandwidth(device.memory_bandwidth_bytes_per_s),
        ]
        for precision, peak in device.peak_flops_per_s.items():
            best = device.matmul_flops_per_s.get(precision)
            guess = "~" if f"matmul_flops_per_s.{precision}" in _guessed("devices", device.name) else ""
            shares = [guess + flop_rate(best), f"{best / peak:.0%}"] if best else ["-", "-"]
            table.append([*facts, precision, flop_rate(peak), *shares])
            facts = [""] * len(facts)
    note = "memory is what the driver shows; peak is the data sheet's, dense; measured is the best product of matrices, ~ a guess"
    return [*columns(table, right=(2, 3, 5, 6, 7)), note]


def _gbit(bytes_per_s: float) -> str:
    rate = gigabits(bytes_per_s)
    return f"{rate:,.0f} Gbit/s" if rate >= 10 else f"{rate:.3g} Gbit/s"


def _link_lines(cluster: Cluster) -> list[str]:
    """Classes of links: nominal bandwidth, and what the table knows of them."""
    table = [["link", "where", "nominal", "", "reached", "latency"]]
    for kind in _kinds(cluster):
        for link, where in ((kind.intra, "fast domain, each device"), (kind.nic, "each interface")):
            line = [link.name, where, bandwidth(link.bandwidth_bytes_per_s), *_link_facts(link)]
            if line not in table:
                table.append(line)
    return columns(table, right=(2, 3, 4, 5))


def _link_facts(link: Link) -> list[str]:
    """Gbit/s, the share that large collectives reach, latency of a step; dashes for a class that nobody has read."""
    known = rows("links").get(link.name)
    gbit = _gbit(link.bandwidth_bytes_per_s)
    if known is None:
        return [gbit, "-", "-"]
    reached, latency = ("~" if key in _guessed("links", link.name) else "" for key in ("efficiency", "latency_s"))
    return [gbit, f"{reached}{known['efficiency']:.0%}", latency + duration(known["latency_s"])]


def _guessed(table: str, name: str) -> frozenset[str]:
    """Fields of a row of the tables that nobody has measured or read; none for a name that is in no table."""
    return frozenset(rows(table).get(name, {}).get("guess", ()))


def _fabric_lines(cluster: Cluster) -> list[str]:
    rails = "one plane of switches for each interface of a node" if cluster.rails else "one plane for all interfaces"
    if cluster.num_nodes == 1:
        lines = [row("fabric", "none: one node")]
    elif not cluster.fabric:
        lines = [row("fabric", f"full bisection; {rails}")]
    else:
        lines = [row("fabric", rails)]
        for level in cluster.fabric:
            over = "full bisection" if level.oversubscription == 1 else f"{level.oversubscription:g}:1 oversubscribed"
            lines.append(row("", f"{level.name}: {level.radix} below a switch, {over} upwards"))
    for bad in cluster.exceptions:
        parts = [
            f"{share:.0%} of its {what}"
            for share, what in ((bad.nic_factor, "interfaces"), (bad.intra_factor, "fast domain"))
            if share != 1
        ]
        lines.append(row("but", f"node {bad.node} has {', '.join(parts) or 'something odd'}: {bad.note or 'no note'}"))
    return lines


def _path_lines(cluster: Cluster, word: str) -> list[str]:
    """Share of one device when all send at once, level by level: what a collective of that reach gets at most."""
    table = [["path", "nodes", f"one {word}'s share", "against the domain"]]
    for kind in _kinds(cluster):
        inside = kind.intra.bandwidth_bytes_per_s
        prefix = f"{kind.name}: " if len(_kinds(cluster)) > 1 else ""
        table.append([f"{prefix}inside a fast domain", f"{kind.domain_nodes}", bandwidth(inside), ""])
        share = kind.node_bandwidth_bytes_per_s / kind.gpus_per_node
        nodes = 1
        for name, radix, oversubscription in _levels(cluster):
            nodes = min(nodes * radix, cluster.num_nodes)
            if nodes > kind.domain_nodes:
                table.append([f"{prefix}{name}", f"{nodes:,}", bandwidth(share), f"{share / inside:.1%}"])
            share /= oversubscription
            if nodes == cluster.num_nodes:
                break
    return [*columns(table, right=(1, 2, 3)), f"nominal, with every {word} sending at once"]


def _levels(cluster: Cluster) -> list[tuple[str, int, float]]:
    """(name, children, oversubscription) of each level, the top that joins all last."""
    levels = [(f"below one {level.name}", level.radix, level.oversubscription) for level in cluster.fabric]
    return [*levels, ("through the top", max(cluster.num_nodes, 1), 1.0)]
