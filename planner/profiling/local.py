"""This machine as a cluster whose devices are the processes of a run: its facts as they were measured here."""

import os
from collections.abc import Iterable

from cost_models.records import Cluster, Measurement, RecordError
from planner.profiling.clock import summarise
from planner.readers.node_presets import local_cluster

BYTES_LEFT = 0.1
"""Share of the memory that the system and everybody else keep."""


def measured_cluster(ranks: int, measurements: Iterable[Measurement]) -> Cluster:
    """The machine as `ranks` equal devices: memory divided; rates the best that `measurements` hold.

    Needs a matmul, a memory_bound and, for more than one rank, a p2p measurement, because nobody prints a data sheet of a
    process that shares its cores; raises RecordError naming what is missing.
    """
    by_family: dict[str, list[Measurement]] = {}
    for one in measurements:
        by_family.setdefault(one.key.split("/")[0], []).append(one)
    wanted = ("matmul", "memory_bound", "p2p") if ranks > 1 else ("matmul", "memory_bound")
    missing = [family for family in wanted if family not in by_family]
    if missing:
        raise RecordError(
            f"this machine as a cluster needs measurements of {', '.join(missing)}; measure them (`probe`, `profile --measure`)"
        )
    rates: dict[str, float] = {}
    for one in by_family["matmul"]:
        precision = one.key.split("/")[1]
        rates[precision] = max(rates.get(precision, 0.0), _flops(one.key) / summarise(one.samples_s).median)
    memory_bytes = total_memory_bytes()
    return local_cluster(
        ranks,
        int(memory_bytes * (1 - BYTES_LEFT)) // ranks,
        matmul_flops_per_s=rates,
        memory_bandwidth_bytes_per_s=max(map(_bytes_per_s, by_family["memory_bound"])),
        bandwidth_bytes_per_s=max(map(_bytes_per_s, by_family["p2p"])) if ranks > 1 else None,
        host_memory_bytes=memory_bytes,
        name=f"this machine x {ranks}",
    )


def total_memory_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _flops(key: str) -> float:
    m, n, k = (int(side) for side in key.split("/")[2].split("x"))
    return 2.0 * m * n * k


def _bytes_per_s(one: Measurement) -> float:
    return (one.bytes or 0) / summarise(one.samples_s).median
