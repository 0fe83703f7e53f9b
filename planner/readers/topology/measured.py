"""Measured tables -> a calibration of nothing but curves; what the links cannot have done is refused."""

from dataclasses import replace

from cost_models.records import Calibration, Cluster, Curve, Link, NodeKind
from planner.errors import InputError
from planner.readers.topology.curves import curve_of
from planner.readers.topology.pieces import Pieces
from planner.readers.topology.seen import SeenCollective

MOST_TIMES_BOUND = 1.1
"""What a measured bus bandwidth may exceed the bound of its links by: nominal rates are rounded."""
LEAST_SHARE = 0.02
"""Of the links' bandwidth that the best message must reach: sockets over one slow interface stay above it."""


def measured_calibration(cluster: Cluster, pieces: Pieces) -> Calibration | None:
    """Everything that the pieces timed: what a document of a probe holds, and the tables over it."""
    curves = measured_curves(cluster, pieces)
    if not curves:
        return pieces.measured
    date = max(curve.date for curve in curves.values())
    fresh = Calibration(name="measured tables", machine=cluster.name, date=date, coefficients={}, curves=curves)
    return fresh if pieces.measured is None else with_measured(pieces.measured, fresh)


def with_measured(base: Calibration, measured: Calibration | None) -> Calibration:
    """A calibration over which what was measured takes precedence; `base` itself where nothing was."""
    if measured is None:
        return base
    return replace(
        base,
        name=f"{base.name} + {measured.name}",
        machine=measured.machine,
        date=max(base.date, measured.date),
        coefficients={**base.coefficients, **measured.coefficients},
        operations_s={**base.operations_s, **measured.operations_s},
        curves={**base.curves, **measured.curves},
    )


def measured_curves(cluster: Cluster, pieces: Pieces) -> dict[str, Curve]:
    """Measured tables as curves of the class of links that binds them. Raises InputError where links cannot do what a table says."""
    found: dict[str, Curve] = {}
    for one in pieces.collectives:
        kind = cluster.pools[0].kind
        if len(cluster.pools) > 1:
            raise InputError(
                f"{one.source}: a measured table of a cluster with several kinds of nodes; measure each kind alone"
            )
        if one.num_ranks > cluster.num_gpus:
            raise InputError(
                f"{one.source}: measured on {one.num_ranks} ranks, and the cluster has {cluster.num_gpus} GPUs; say nodes=N"
            )
        across = one.num_ranks > kind.domain_size or (one.num_nodes or 1) > kind.domain_nodes
        link = kind.nic if across else _inside_link(kind, one.num_ranks)
        bound = bound_bytes_per_s(kind, one.collective, one.num_ranks, across)
        refuse_impossible(one, link, bound)
        ranks = 2 if one.collective == "p2p" else one.num_ranks
        key = f"{one.collective}/{ranks}/{link.name}"
        if key in found:
            raise InputError(f"{one.source}: {key} was measured in another file too; give the one that holds")
        found[key] = curve_of(one.points, f"{one.source}", pieces.dates.get(one.source, "unknown"))
    return found


def _inside_link(kind: NodeKind, num_ranks: int) -> Link:
    """What joins so many neighbours of a node: their island's links, or those of the fast domain."""
    return kind.island.link if kind.island is not None and num_ranks <= kind.island.num_gpus else kind.intra


def bound_bytes_per_s(kind: NodeKind, collective: str, num_ranks: int, across: bool) -> float:
    """What no bus bandwidth exceeds. Between nodes a group meets all interfaces of a node, and two nodes exchange halves; an
    all-reduce by a tree or in the switches passes each byte once where the bus bandwidth counts it twice."""
    if across:
        return 2.0 * kind.node_bandwidth_bytes_per_s
    return (2.0 if collective == "all_reduce" else 1.0) * _inside_link(kind, num_ranks).bandwidth_bytes_per_s


def refuse_impossible(one: SeenCollective, link: Link, bound: float) -> None:
    """Raises InputError for a table that its links cannot have produced, or of which they would carry fifty times as much."""
    best, where = one.bus_bytes_per_s, f"{one.source}: the best busbw is {one.bus_bytes_per_s / 1e9:.4g} GB/s"
    if best > MOST_TIMES_BOUND * bound:
        raise InputError(
            f"{where}, and {one.num_ranks} ranks over {link.name} cannot exceed {bound / 1e9:.4g} GB/s: another cluster's table, or another "
            "interconnect (inter=, gpu=)"
        )
    if best < LEAST_SHARE * bound and max(point.size_bytes for point in one.points) >= 2**26:
        raise InputError(
            f"{where}, {best / bound:.1%} of what {link.name} carries: NCCL ran over sockets (NCCL_DEBUG=INFO shows NET/Socket), or "
            "the table is of another cluster; mend it and measure again, or leave it out"
        )
