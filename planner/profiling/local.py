"""This machine as a cluster: one node whose devices are the processes of a run. Nominal facts, or what was measured here."""

import os
from collections.abc import Iterable

from cost_models.records import Cluster, Device, Link, Measurement, NodeKind, Pool, RecordError
from planner.profiling.clock import summarise

CPU_DEVICE = "cpu"
"""Name and family of a device that is a process on a CPU."""
LOOPBACK = "loopback"
"""Class of the links between processes of one machine."""
BYTES_LEFT = 0.1
"""Share of the memory that the system and everybody else keep."""


def local_cluster(ranks: int, measurements: Iterable[Measurement]) -> Cluster:
    """The machine as `ranks` equal devices: memory divided; rates the best that `measurements` hold.

    Needs a matmul, a memory_bound and a p2p (or another link) measurement, because nobody prints a data sheet of a process
    that shares its cores; raises RecordError naming what is missing.
    """
    by_family: dict[str, list[Measurement]] = {}
    for one in measurements:
        by_family.setdefault(one.key.split("/")[0], []).append(one)
    missing = [family for family in ("matmul", "memory_bound") if family not in by_family]
    links = by_family.get("p2p") or by_family.get("all_gather") or []
    if missing or (not links and ranks > 1):
        names = ", ".join([*missing, *([] if links or ranks == 1 else ["p2p"])])
        raise RecordError(
            f"this machine as a cluster needs measurements of {names}; measure them (`probe`, `profile --measure`)"
        )
    rates: dict[str, float] = {}
    for one in by_family["matmul"]:
        precision = one.key.split("/")[1]
        rates[precision] = max(rates.get(precision, 0.0), _flops(one.key) / summarise(one.samples_s).median)
    link = Link(name=LOOPBACK, bandwidth_bytes_per_s=_best_bytes_per_s(links) if links else 1e9)
    device = Device(
        name=CPU_DEVICE,
        family=CPU_DEVICE,
        memory_bytes=int(total_memory_bytes() * (1 - BYTES_LEFT)) // ranks,
        memory_bandwidth_bytes_per_s=_largest_bytes_per_s(by_family["memory_bound"]),
        peak_flops_per_s=rates,
        matmul_flops_per_s=rates,
    )
    kind = NodeKind(name="this machine", device=device, gpus_per_node=ranks, intra=link, nic=link, num_nics=1)
    return Cluster(name=f"this machine x {ranks}", pools=(Pool(kind=kind, num_nodes=1),))


def total_memory_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _flops(key: str) -> float:
    m, n, k = (int(side) for side in key.split("/")[2].split("x"))
    return 2.0 * m * n * k


def _best_bytes_per_s(measurements: Iterable[Measurement]) -> float:
    return max((one.bytes or 0) / summarise(one.samples_s).median for one in measurements)


def _largest_bytes_per_s(measurements: Iterable[Measurement]) -> float:
    """The rate of the largest block: small ones stay in a cache."""
    largest = max(measurements, key=lambda one: one.bytes or 0)
    return (largest.bytes or 0) / summarise(largest.samples_s).median
