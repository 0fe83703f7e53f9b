"""What is odd about a cluster that was seen, what that costs a plan, and what to do about it.

The cost is priced as a plan's collectives are (cost_models.collectives): one all-reduce of 1 GB, now, and as it would be if
the oddity were mended. Nothing is odd that the product is sold with, but for what it is often taken for something else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cost_models.calibrations import shipped
from cost_models.collectives import collective_s, fabric
from cost_models.data import rows
from cost_models.records import Cluster, NodeKind
from planner.readers.cluster_facts import node_with
from planner.readers.node_presets import node_kind
from planner.readers.topology.curves import regimes
from planner.readers.topology.join import Joined
from planner.readers.topology.seen import SeenCollective, SeenNode, Way
from planner.readers.topology.shape import nvlinks_of

PRICED_BYTES = 1e9
"""Message whose all-reduce tells what an oddity costs: gradients of half a billion parameters in 16 bits."""
SLOWER_THAN_PREDICTED = 1.5
"""Times that a measured all-reduce may take of what its links predict before it is odd: published tables lie within it."""


class Severity(StrEnum):
    """How much it matters."""

    ERROR = "error"
    """Broken: mend it before a long run."""
    WARNING = "warning"
    """Costs speed, and the plan reckons with it."""
    INFO = "info"
    """To be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it costs: seconds of one all-reduce of PRICED_BYTES."""

    what: str
    """Over which ranks."""
    now_s: float
    """As it is."""
    mended_s: float
    """As it should be."""

    @property
    def times(self) -> float:
        """How much longer it takes."""
        return self.now_s / self.mended_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One oddity."""

    code: str
    """A word for programs."""
    severity: Severity
    """How much it matters."""
    message: str
    """What was seen."""
    advice: str
    """What to do."""
    cost: Cost | None = None
    """What it costs; None where no all-reduce tells."""
    values: Mapping[str, Any]
    """The numbers of the message."""


def findings(seen: Joined) -> tuple[Finding, ...]:
    """Everything odd, the worst first."""
    found = [*_inside(seen), *_interfaces(seen), *_switches(seen), *_measured(seen)]
    order = list(Severity)
    return tuple(sorted(found, key=lambda one: (order.index(one.severity), -(one.cost.times if one.cost else 0))))


def verdict(found: tuple[Finding, ...]) -> str:
    """`broken`, `odd` or `as it should be`: by the worst finding."""
    worst = {one.severity for one in found}
    return "broken" if Severity.ERROR in worst else "odd" if Severity.WARNING in worst else "as it should be"


def finding_document(one: Finding) -> dict[str, Any]:
    """A finding as plain data."""
    cost = one.cost
    return {
        "code": one.code,
        "severity": one.severity.value,
        "message": one.message,
        "advice": one.advice,
        "cost": {"what": cost.what, "now_s": cost.now_s, "mended_s": cost.mended_s, "times": cost.times}
        if cost
        else None,
        "values": dict(one.values),
    }


# What it costs -----------------------------------------------------------------------------------------------------


def all_reduce_s(cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-reduce of PRICED_BYTES over every `stride`-th rank of the first pool, `ranks` of them, all groups at once."""
    return float(collective_s(fabric(cluster.pool(0), shipped()), "all_reduce", PRICED_BYTES, ranks, stride).total)


def _cost(now: Cluster, mended: Cluster, ranks: int, what: str, stride: int = 1) -> Cost | None:
    if ranks < 2:
        return None
    cost = Cost(
        what=f"an all-reduce of 1 GB over {what}",
        now_s=all_reduce_s(now, ranks, stride),
        mended_s=all_reduce_s(mended, ranks, stride),
    )
    return cost if cost.times > 1.005 else None


def _with_kind(cluster: Cluster, **changes: Any) -> Cluster:
    """The cluster with another kind of node in its first pool."""
    first, *others = cluster.pools
    return replace(cluster, pools=(replace(first, kind=replace(first.kind, **changes)), *others))


def _two_nodes(cluster: Cluster) -> Cluster:
    """At least two nodes, so that interfaces matter: what one node's cost is told for a pair of them."""
    first, *others = cluster.pools
    nodes = max(first.num_nodes, 2 * first.kind.domain_nodes)
    return replace(cluster, pools=(replace(first, num_nodes=nodes), *others))


def _sold(kind: NodeKind) -> NodeKind:
    """The node that the device is sold in."""
    return node_kind(node_with(kind.device, kind.gpus_per_node))


# Inside a node -----------------------------------------------------------------------------------------------------


def _inside(seen: Joined) -> Iterator[Finding]:
    node, domains = seen.pieces.node, seen.domains
    cluster, kind = seen.cluster, seen.cluster.pools[0].kind
    if node is not None and domains is not None:
        yield from _off(seen, node)
        yield from _several_domains(seen, node)
        yield from _pairs(seen, node)
        yield from _fewer_links(seen)
        if node.asymmetric:
            pairs = ", ".join(f"GPU{i}-GPU{j}" for i, j in node.asymmetric[:6])
            yield Finding(
                code="ASYMMETRIC_LINKS",
                severity=Severity.WARNING,
                message=f"{pairs} read differently either way; the worse one counts",
                advice="reset the links (restart the fabric manager, then the node), and paste the matrix again",
                values={"pairs": [list(pair) for pair in node.asymmetric]},
            )
    yield from _hidden(seen)
    yield from _no_copies(seen)
    bad = [one for one in cluster.exceptions if one.intra_factor < 1 or one.nic_factor < 1]
    if node is None and bad:
        mended = replace(cluster, exceptions=())
        listed = "; ".join(f"node {one.node}: {one.note or 'slower than its kind'}" for one in bad[:6])
        yield Finding(
            code="SLOW_NODES",
            severity=Severity.WARNING,
            message=f"{len(bad)} of {cluster.num_nodes:,} nodes are not as their kind: {listed}",
            advice="leave them out, or mend them: the slowest member sets the pace of every ring",
            cost=_cost(
                cluster, mended, kind.gpus_per_node * (2 if cluster.num_nodes > 1 else 1), "ranks that meet one of them"
            ),
            values={"nodes": [one.node for one in bad]},
        )


def _off(seen: Joined, node: SeenNode) -> Iterator[Finding]:
    """GPUs without a fast link, where the others have one."""
    off = seen.domains.off if seen.domains else ()
    if not off:
        return
    kind = seen.cluster.pools[0].kind
    names = ", ".join(f"GPU{gpu}" for gpu in off)
    fast = next(path.way.value for path in node.paths.values() if path.way.is_fast)
    rest = kind.gpus_per_node - len(off)
    yield Finding(
        code="GPU_OFF_NVLINK",
        severity=Severity.ERROR,
        message=f"{names} has no {fast} to any other GPU, and the other {rest} have: every collective with it goes over the host",
        advice=f"look at it with `nvidia-smi nvlink -s -i {off[0]}` and the fabric manager's log; until it is mended run on the "
        f"other {rest} (CUDA_VISIBLE_DEVICES), or leave the node out",
        cost=_cost(
            seen.cluster,
            replace(seen.cluster, exceptions=()),
            kind.gpus_per_node,
            f"the {kind.gpus_per_node} GPUs of the node",
        ),
        values={"gpus": list(off)},
    )


def _several_domains(seen: Joined, node: SeenNode) -> Iterator[Finding]:
    domains = seen.domains
    assert domains is not None
    if domains.whole or domains.off or len(domains.groups[0]) == 1:
        return
    kind = seen.cluster.pools[0].kind
    sizes = sorted({len(group) for group in domains.groups})
    fast = next(path.way.value for path in node.paths.values() if path.way.is_fast)
    shown = " ".join("{" + ",".join(map(str, group)) + "}" for group in domains.groups[:8])
    sold = _sold(kind).intra
    yield Finding(
        code="SEVERAL_DOMAINS",
        severity=Severity.WARNING,
        message=f"{fast} joins GPUs in groups of {' and '.join(map(str, sizes))}: {shown}; between groups it is {kind.intra.name}",
        advice=f"keep tensor parallelism within {sizes[-1]} GPUs that stand together, and start ranks so that they do "
        f"(CUDA_VISIBLE_DEVICES={','.join(str(gpu) for group in domains.groups for gpu in group)})",
        cost=_cost(
            seen.cluster,
            _with_kind(seen.cluster, intra=sold),
            kind.gpus_per_node,
            f"all {kind.gpus_per_node} GPUs, against one domain of {sold.name}",
        )
        if rows("links").get(sold.name, {}).get("kind") == "domain"
        else None,
        values={"groups": [list(group) for group in domains.groups]},
    )


def _pairs(seen: Joined, node: SeenNode) -> Iterator[Finding]:
    """Pairs with fewer links than others of a domain that gives every pair the same."""
    domains = seen.domains
    assert domains is not None
    largest = domains.groups[0]
    if len(largest) < 3:
        return
    paths = {pair: node.paths[pair] for pair in node.paths if pair[0] in largest and pair[1] in largest}
    counts = [path.links for path in paths.values()]
    usual = max(set(counts), key=lambda count: (counts.count(count), count))
    if not domains.is_switched and counts.count(usual) < 0.8 * len(counts):
        return  # built with unlike pairs: a cube mesh
    worst = max(usual, *counts)
    slow = {pair: path for pair, path in paths.items() if path.links < usual}
    lone = [gpu for gpu in largest if sum(gpu in pair for pair in slow) > len(largest) / 2]
    for gpu in lone:
        own = max(node.paths[tuple(sorted((gpu, other)))].links for other in largest if other != gpu)  # type: ignore[index]
        yield Finding(
            code="LINKS_DOWN",
            severity=Severity.ERROR,
            message=f"GPU{gpu} has {own} links where the others have {worst}",
            advice=f"`nvidia-smi nvlink -s -i {gpu}` lists the links that are down; reseat or replace, and leave it out meanwhile",
            cost=_cost(
                seen.cluster,
                replace(seen.cluster, exceptions=()),
                len(node.gpus),
                f"the {len(node.gpus)} GPUs of the node",
            ),
            values={"gpu": gpu, "links": own, "usual": worst},
        )
    rest = {pair: path for pair, path in slow.items() if not set(pair) & set(lone)}
    if rest:
        listed = ", ".join(
            f"GPU{i}-GPU{j} ({f'{path.links} of {usual} links' if path.links else path.way.value})"
            for (i, j), path in list(rest.items())[:6]
        )
        yield Finding(
            code="SLOW_PAIR",
            severity=Severity.WARNING,
            message=f"{len(rest)} of {len(paths)} pairs are slower than the others: {listed}",
            advice="rings go around a slow pair, all-to-alls and pipeline hops do not: keep its two GPUs out of one expert group, "
            "and mend the link",
            values={"pairs": [list(pair) for pair in rest]},
        )


def _fewer_links(seen: Joined) -> Iterator[Finding]:
    """All GPUs alike, and with fewer links than their kind has."""
    kind, domains = seen.cluster.pools[0].kind, seen.domains
    sold = _sold(kind)
    own = nvlinks_of(kind.device.name, kind.device.family)
    if (
        domains is None
        or own is None
        or not domains.is_switched
        or rows("links").get(sold.intra.name, {}).get("kind") != "domain"
    ):
        return
    have = max(domains.links)
    full = round(sold.intra.bandwidth_bytes_per_s / own[1])
    if have < full:
        yield Finding(
            code="FEWER_LINKS_THAN_SOLD",
            severity=Severity.WARNING,
            message=f"{have} NVLinks on every GPU, and a {kind.device.name} is sold with {full}",
            advice="`nvidia-smi nvlink -s` lists which are down; is gpu= the right product?",
            cost=_cost(
                seen.cluster,
                _with_kind(seen.cluster, intra=sold.intra),
                kind.gpus_per_node,
                f"the {kind.gpus_per_node} GPUs of a node",
            ),
            values={"links": have, "sold_with": full},
        )


def _hidden(seen: Joined) -> Iterator[Finding]:
    node = seen.pieces.node
    if node is None or len(seen.cluster.pools) > 1:
        return
    kind = seen.cluster.pools[0].kind
    sold = _sold(kind)
    count = len(node.gpus)
    if count < sold.gpus_per_node and rows("links").get(sold.intra.name, {}).get("kind") == "domain":
        yield Finding(
            code="GPUS_HIDDEN",
            severity=Severity.INFO if count & (count - 1) == 0 else Severity.WARNING,
            message=f"{count} GPUs are visible, and a {sold.name} has {sold.gpus_per_node}: a container or a scheduler may hide the others",
            advice="paste the matrix from the host, or say how many you may use; counts that are no power of two leave few layouts"
            if count & (count - 1)
            else "paste the matrix from the host if the run may use them all",
            values={"visible": count, "sold_with": sold.gpus_per_node},
        )


def _no_copies(seen: Joined) -> Iterator[Finding]:
    p2p = seen.pieces.p2p
    if p2p is None or not p2p.refused:
        return
    total = p2p.num_gpus * (p2p.num_gpus - 1) // 2
    (i, j), why = next(iter(p2p.refused.items()))
    yield Finding(
        code="NO_PEER_COPIES",
        severity=Severity.WARNING,
        message=f"{len(p2p.refused)} of {total} pairs of GPUs may not copy directly (GPU{i}-GPU{j}: {why}): NCCL goes through the host's memory",
        advice="each byte crosses PCIe twice and the latency of a step grows: prefer data or pipeline parallelism to tensor parallelism "
        "here; a driver or a BIOS setting (ACS, IOMMU) may allow them",
        values={"refused": [list(pair) for pair in p2p.refused], "pairs": total},
    )


# Interfaces --------------------------------------------------------------------------------------------------------


def _interfaces(seen: Joined) -> Iterator[Finding]:
    cluster, kind = seen.cluster, seen.cluster.pools[0].kind
    node = seen.pieces.node
    if seen.nics and kind.num_nics < kind.gpus_per_node and len(cluster.pools) == 1:
        sold = _sold(kind)
        now = replace(_two_nodes(cluster), exceptions=())
        mended = _with_kind(now, num_nics=kind.gpus_per_node)
        yield Finding(
            code="FEW_INTERFACES",
            severity=Severity.WARNING
            if kind.num_nics < sold.num_nics * kind.gpus_per_node / sold.gpus_per_node
            else Severity.INFO,
            message=f"{kind.num_nics} interfaces for {kind.gpus_per_node} GPUs of a node: {kind.gpus_per_node / kind.num_nics:g} GPUs share one",
            advice="keep what talks much inside a node, let the data parallel groups cross it, and reduce hierarchically; one interface "
            "for each GPU where nodes are added",
            cost=_cost(now, mended, 2 * kind.domain_size, "two fast domains, against an interface for each GPU"),
            values={"interfaces": kind.num_nics, "gpus": kind.gpus_per_node},
        )
    if node is not None and node.nic_ways and seen.nics:
        nearest = {
            gpu: min((node.nic_ways[gpu, nic] for nic in seen.nics), key=lambda way: way.distance)
            for gpu in range(len(node.gpus))
        }
        best = min(nearest.values(), key=lambda way: way.distance)
        far = [gpu for gpu, way in nearest.items() if way in (Way.NODE, Way.SYS) and way.distance > best.distance]
        if far:
            yield Finding(
                code="FAR_INTERFACE",
                severity=Severity.WARNING,
                message=f"{', '.join(f'GPU{gpu}' for gpu in far)} reach their nearest interface over the processors "
                f"({', '.join(sorted({nearest[gpu].value for gpu in far}))}), others over {best.value}",
                advice="GPUDirect is slow or off there: set NCCL_NET_GDR_LEVEL, or move the interface to their PCIe switch",
                values={"gpus": far},
            )


# Switches ----------------------------------------------------------------------------------------------------------


def _switches(seen: Joined) -> Iterator[Finding]:
    cluster = seen.cluster
    narrow = [level for level in cluster.fabric if level.oversubscription > 1]
    if narrow and cluster.num_nodes > 1:
        mended = replace(cluster, fabric=tuple(replace(level, oversubscription=1.0) for level in cluster.fabric))
        total = 1.0
        for level in narrow:
            total *= level.oversubscription
        below = narrow[0].radix * cluster.pools[0].kind.gpus_per_node
        yield Finding(
            code="OVERSUBSCRIBED",
            severity=Severity.WARNING,
            message=f"{' and '.join(f'{level.name} {level.oversubscription:g}:1' for level in narrow)} oversubscribed: all that leaves "
            f"a {narrow[0].name} gets 1/{total:g} of the interfaces",
            advice=f"keep groups that talk much below one {narrow[0].name} ({below:,} GPUs), and let the pipeline or a hierarchical "
            "data parallel group cross it",
            cost=_cost(
                cluster,
                mended,
                cluster.pools[0].num_gpus // below,
                f"one GPU below each {narrow[0].name}, all such groups at once",
                below,
            ),
            values={"oversubscription": total},
        )
    yield from _slow_uplinks(cluster)
    for row in seen.pieces.fabric.levels if seen.pieces.fabric else ():
        if len(set(row.sizes)) > 1:
            least, most = min(row.sizes), max(row.sizes)
            yield Finding(
                code="UNEVEN_SWITCHES",
                severity=Severity.INFO,
                message=f"switches of level {row.name} have {least} to {most} below them",
                advice="jobs of whole switches place best; ranks are numbered along the switches",
                values={"level": row.name, "least": least, "most": most},
            )


def _slow_uplinks(cluster: Cluster) -> Iterator[Finding]:
    """Switches whose way up is not as that of the others."""
    if not cluster.slow_uplinks:
        return
    worst = min(cluster.slow_uplinks, key=lambda slow: slow.factor)
    below = cluster.nodes_below(worst.level) * cluster.pools[0].kind.gpus_per_node
    yield Finding(
        code="SLOW_UPLINK",
        severity=Severity.WARNING,
        message=f"{len(cluster.slow_uplinks)} switches with slow links upwards; the worst is {worst.level} {worst.switch} at "
        f"{worst.factor:.0%}{f' ({worst.note})' if worst.note else ''}",
        advice=f"mend it, or keep what crosses it small: ranks {worst.switch * below:,} to {(worst.switch + 1) * below - 1:,} lie below",
        cost=_cost(
            cluster,
            replace(cluster, slow_uplinks=()),
            cluster.pools[0].num_gpus // below,
            f"one GPU below each {worst.level}, all such groups at once",
            below,
        ),
        values={"level": worst.level, "switch": worst.switch, "factor": worst.factor},
    )


# Measured ----------------------------------------------------------------------------------------------------------


def _measured(seen: Joined) -> Iterator[Finding]:
    for one in seen.pieces.collectives:
        odd = [point for point in one.points if point.is_outlier]
        if odd:
            sizes = ", ".join(f"{point.size_bytes:,}" for point in odd[:6])
            yield Finding(
                code="OUTLIERS",
                severity=Severity.WARNING if len(odd) * 4 > len(one.points) else Severity.INFO,
                message=f"{one.source}: {len(odd)} of {len(one.points)} sizes are slower than larger messages are ({sizes} bytes); left out of the curve",
                advice="measure these again (more iterations, an idle network); if they stay, NCCL changes its algorithm there: NCCL_DEBUG=INFO",
                values={"sizes_bytes": [point.size_bytes for point in odd]},
            )
        yield from _slower_than_links(seen, one)


def _slower_than_links(seen: Joined, one: SeenCollective) -> Iterator[Finding]:
    """Against what the links predict at the largest size."""
    largest = max(
        (point for point in one.points if not point.is_outlier), key=lambda point: point.size_bytes, default=None
    )
    if largest is None or largest.size_bytes < 2**26 or len(seen.cluster.pools) > 1:
        return
    links = fabric(seen.cluster, shipped())
    stride = 1 if one.collective != "p2p" or seen.cluster.num_nodes == 1 else seen.cluster.pools[0].kind.domain_size
    ranks = 2 if one.collective == "p2p" else one.num_ranks
    predicted_s = float(collective_s(links, one.collective, float(largest.size_bytes), ranks, stride).total)
    if largest.seconds > SLOWER_THAN_PREDICTED * predicted_s:
        rate = regimes(one.points).bytes_per_s
        yield Finding(
            code="SLOWER_THAN_ITS_LINKS",
            severity=Severity.WARNING,
            message=f"{one.source}: {largest.size_bytes:,} bytes take {largest.seconds * 1e3:.4g} ms, and these links should do it in "
            f"{predicted_s * 1e3:.4g} ms ({largest.seconds / predicted_s:.1f} times)",
            advice="NCCL_DEBUG=INFO shows which interfaces and algorithm it took; look for one slow interface, PCIe at half its width, "
            "or a busy network. Plans with these files take the measured curve",
            values={"measured_s": largest.seconds, "predicted_s": predicted_s, "bytes_per_s": rate},
        )
