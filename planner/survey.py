"""`probe FILE...`: the cluster of pasted files as one document, which `--cluster` reads back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cost_models.records import SCHEMA_VERSION, to_json
from planner.fabric_findings import Finding, finding_document, verdict
from planner.readers.topology.curves import regimes
from planner.readers.topology.join import Joined
from planner.readers.topology.seen import SeenCollective


def is_bare(seen: Joined) -> bool:
    """A preset or a cluster file and nothing beside it: its document is the cluster itself."""
    pieces = seen.pieces
    return not (seen.assumptions or seen.measured or pieces.node or pieces.fabric or pieces.devices or pieces.p2p)


def survey_document(seen: Joined, found: tuple[Finding, ...]) -> dict[str, Any]:
    """Cluster, what was measured, assumptions, verdict and findings; the cluster alone where nothing was pasted."""
    if is_bare(seen) and not found:
        cluster: dict[str, Any] = to_json(seen.cluster)
        return cluster
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "cluster": to_json(seen.cluster)}
    if seen.measured is not None:
        document["calibration"] = to_json(seen.measured)
    return document | {
        "assumptions": list(seen.assumptions),
        "verdict": verdict(found),
        "findings": [finding_document(one) for one in found],
        "node": _node(seen),
        "collectives": [_collective(one) for one in seen.pieces.collectives],
    }


STRUCTURAL = frozenset(
    {"GPU_OFF_NVLINK", "SEVERAL_DOMAINS", "LINKS_DOWN", "SLOW_PAIR", "ASYMMETRIC_LINKS", "NO_PEER_COPIES", "FAR_INTERFACE",
     "UNEVEN_SWITCHES"}
)  # fmt: skip
"""Findings that hold whatever the GPUs are."""


def structural(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What is odd whatever the GPUs are; without costs, which depend on them."""
    return tuple(replace(one, cost=None) for one in found if one.code in STRUCTURAL)


def gpus_per_node(seen: Joined) -> int | None:
    """GPUs of a node, where a file tells; None where they were taken as sold."""
    pieces = seen.pieces
    inside = any((pieces.node, pieces.devices, pieces.nvlinks, pieces.p2p))
    told = inside or (pieces.fabric is not None and all(host.num_gpus for host in pieces.fabric.hosts))
    return seen.cluster.gpus_per_node if told else None


def structure_document(seen: Joined, found: tuple[Finding, ...], missing: str) -> dict[str, Any]:
    """What files tell that do not name the GPU: `cluster` is null, and `missing` says what would name it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "cluster": None,
        "missing": missing,
        "nodes": seen.cluster.num_nodes,
        "gpus_per_node": gpus_per_node(seen),
        "verdict": verdict(found),
        "findings": [finding_document(one) for one in found],
        "node": _node(seen),
    }


def _node(seen: Joined) -> Mapping[str, Any] | None:
    """The inside of the node that was seen."""
    node, domains = seen.pieces.node, seen.domains
    if node is None:
        return None
    return {
        "source": node.source,
        "gpus": [
            {
                "place": gpu.place,
                "links": domains.links[index] if domains else None,
                "interfaces": [
                    {"name": node.nics[nic].name, "way": node.nic_ways[index, nic].value}
                    for nic in nearest_interfaces(seen, index)
                ],
            }
            for index, gpu in enumerate(node.gpus)
        ],
        "domains": [list(group) for group in domains.groups] if domains else None,
        "interfaces": [node.nics[nic].name for nic in seen.nics],
    }


def nearest_interfaces(seen: Joined, gpu: int) -> tuple[int, ...]:
    """Numbers of the interfaces that lie nearest to a GPU, of those that count."""
    node = seen.pieces.node
    if node is None or not node.nic_ways:
        return ()
    ways = {nic: node.nic_ways[gpu, nic] for nic in seen.nics if (gpu, nic) in node.nic_ways}
    least = min((way.distance for way in ways.values()), default=0)
    return tuple(nic for nic, way in ways.items() if way.distance == least)


def _collective(one: SeenCollective) -> Mapping[str, Any]:
    found = regimes(one.points)
    return {
        "source": one.source,
        "collective": one.collective,
        "num_ranks": one.num_ranks,
        "num_nodes": one.num_nodes,
        "best_bus_bytes_per_s": one.bus_bytes_per_s,
        "latency_s": found.latency_s,
        "bytes_per_s": found.bytes_per_s,
        "points": [[point.size_bytes, point.seconds, point.is_outlier] for point in one.points],
    }
