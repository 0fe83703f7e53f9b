"""Collectives in the groups that a probe found: inside fast domains, between them, and of all; sizes by decade.

Keys are those of `links`: `<collective>/<ranks>/<bytes>/<link class>`. A group's class is that of its slowest link.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from cost_models.records import Measurement, MeasurementKind
from planner.profiling.blocks import machine_of, time_operations
from planner.profiling.clock import Rule, sample, versions
from planner.profiling.domains import Domains
from planner.profiling.links import COLLECTIVES, Group, collective
from planner.profiling.meeting import Meeting
from planner.profiling.probed_cluster import FAR, NEAR

if TYPE_CHECKING:
    from planner.profiling.probe import ProbeRequest

SMALLEST_BYTES = 1_000
"""Each size is ten times the one before."""
LARGEST_BYTES = {"gloo": 10_000_000, "nccl": 1_000_000_000}
"""Sizes go up to here, where they are fast enough."""
LONGEST_S = 0.25
"""The next decade is left out where it would take longer."""
REPETITIONS = 5
OPERATIONS = {
    "gloo": ("matmul/fp32/512x512x512", "matmul/bf16/512x512x512", "memory_bound/fp32/67108864"),
    "nccl": ("matmul/bf16/8192x8192x8192", "memory_bound/bf16/67108864"),
}
"""What a cluster of devices that no table knows takes its rates from."""


def groups_of(members: Sequence[int], domains: Domains) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """(link class, groups that work at once) of each kind and size: 2, 4 ... and the whole of domains, of domains, of all."""
    inside = [tuple(rank for rank in domain if rank in members) for domain in domains]
    inside = [domain for domain in inside if domain]
    width = min(map(len, inside))
    for size in _sizes(width):
        yield (
            NEAR,
            tuple(
                domain[first : first + size] for domain in inside for first in range(0, len(domain) - size + 1, size)
            ),
        )
    across = [tuple(domain[place] for domain in inside) for place in range(width)]
    for size in _sizes(len(inside)):
        yield (
            FAR,
            tuple(group[first : first + size] for group in across for first in range(0, len(group) - size + 1, size)),
        )
    if len(inside) > 1 and len(members) > len(inside):
        yield FAR, (tuple(rank for domain in inside for rank in domain),)


def _sizes(most: int) -> list[int]:
    return sorted(
        {2**power for power in range(1, most.bit_length()) if 2**power <= most} | ({most} if most > 1 else set())
    )


def time_groups(
    members: Sequence[int],
    domains: Domains,
    meeting: Meeting,
    device: str,
    request: "ProbeRequest",
    told: Callable[[str], object],
) -> list[Measurement]:
    """This rank's samples; every one of `members` calls it. RuntimeError where one of them is late."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=max(30.0, 3 * request.timeout_s))
    store = dist.PrefixStore("members", meeting.store)
    place = {rank: number for number, rank in enumerate(members)}
    dist.init_process_group(
        request.backend, store=store, rank=place[meeting.rank], world_size=len(members), timeout=timeout
    )
    try:
        ranks = int(os.environ["WORLD_SIZE"])
        taken = list(
            time_operations(
                OPERATIONS[request.backend],
                ranks=ranks,
                threads=torch.get_num_threads(),
                device=device,
                budget_s=1.0,
                barrier=dist.barrier,
            )
        )
        told("timed operations")
        for link_class, groups in groups_of(members, domains):
            taken += _time_class(link_class, groups, meeting.rank, place, device, request.backend)
        told("timed collectives")
        dist.barrier()
        return taken
    finally:
        dist.destroy_process_group()


def _time_class(
    link_class: str,
    groups: tuple[tuple[int, ...], ...],
    rank: int,
    place: dict[int, int],
    device: str,
    backend: str,
) -> list[Measurement]:
    """All collectives of groups of one size; all of them work at the same time."""
    import torch
    import torch.distributed as dist

    own: Group | None = None
    for group in groups:
        numbers = [place[member] for member in group]
        handle = dist.new_group(numbers)
        if rank in group:
            own = Group(ranks=tuple(numbers), handle=handle, rank=place[rank])
    size = len(groups[0])
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else None
    taken = []
    for name in COLLECTIVES[:-1]:
        num_bytes, seconds, expected_s = SMALLEST_BYTES, 0.0, 0.0
        latency_s = math.inf
        while num_bytes <= LARGEST_BYTES[backend] and expected_s <= LONGEST_S:
            call = collective(name, num_bytes, own, device) if own is not None else lambda: None
            rule = Rule(warmup=1, repetitions=REPETITIONS, calls=4 if seconds < 0.005 else 1)
            samples = sample({name: call}, rule, before=dist.barrier, synchronise=synchronise)[name]
            slowest = torch.tensor([sorted(samples)[len(samples) // 2] if own is not None else 0.0], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = float(slowest.item())
            latency_s = min(latency_s, seconds)
            expected_s = latency_s + 10 * (seconds - latency_s)  # a long latency must not end the curve
            if own is not None:
                taken.append(
                    Measurement(
                        kind=MeasurementKind.COLLECTIVE,
                        key=f"{name}/{size}/{num_bytes}/{link_class}",
                        samples_s=samples,
                        bytes=num_bytes,
                        machine=machine_of(device),
                        versions=versions(),
                        note=f"{len(groups)} groups at once",
                    )
                )
            num_bytes *= 10
    return taken
