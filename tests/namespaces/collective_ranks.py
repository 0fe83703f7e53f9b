"""One rank: times gloo's collectives between the near, between the far and between all hosts, and writes what it found.

Arguments: a rendezvous file, an output file, sizes in bytes with commas, then the places. A key is `collective/where/size`; where = near, far, all.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.testbed.ranks import start
from planner.profiling.clock import Rule, sample
from planner.profiling.links import Group, collective

WHERE = {"near": ((0, 1), (2, 3)), "far": ((0, 2), (1, 3)), "all": ((0, 1, 2, 3),)}
TIMES = {"near": 6, "far": 1, "all": 1}
"""Bytes of a size: what passes a fast link is longer, so that it takes as long as the machine's own delays are short."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
PASSES = 3
"""Times that everything is gone through: what disturbs the machine for some seconds spoils one pass."""
REPETITIONS, MANY_REPETITIONS = 1, 4
"""In each pass. Many for short messages, where something may come between, and where both directions of a link are used at
once: as often as not gloo's all-to-all then sends one after the other and takes twice as long."""
RANK_TIMEOUT_S = 90.0


def groups(rank: int) -> dict[str, Group]:
    """This rank's group of each kind."""
    own = {}
    for where, sets in WHERE.items():
        for ranks in sets:
            handle = dist.new_group(list(ranks))
            if rank in ranks:
                own[where] = Group(ranks=ranks, handle=handle, rank=rank)
    return own


def two_levels(inner: Group, outer: Group, num_bytes: int) -> Callable[[], object]:
    """An all-reduce as reduce-scatter in one group, all-reduce of the shares in the other, all-gather in the first."""
    steps = [
        collective("reduce_scatter", num_bytes, inner, "cpu"),
        collective("all_reduce", num_bytes // len(inner.ranks), outer, "cpu"),
        collective("all_gather", num_bytes, inner, "cpu"),
    ]
    return lambda: [step() for step in steps]


def calls_of(own: dict[str, Group], num_bytes: int) -> dict[str, Callable[[], object]]:
    """What this rank times of one size, by key."""
    calls: dict[str, Callable[[], object]] = {
        f"{name}/{where}/{num_bytes}": collective(name, num_bytes * TIMES[where], group, "cpu")
        for where, group in own.items()
        for name in COLLECTIVES
        if name != "p2p" or where != "all"
    }
    calls[f"matched/all/{num_bytes}"] = two_levels(own["near"], own["far"], num_bytes)
    calls[f"mismatched/all/{num_bytes}"] = two_levels(own["far"], own["near"], num_bytes)
    return calls


def measure(rank: int, rendezvous: str, out: Path, sizes: list[int]) -> None:
    """What one rank does."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    own = groups(rank)
    calls = {key: call for num_bytes in sizes for key, call in calls_of(own, num_bytes).items()}
    seconds: dict[str, float] = dict.fromkeys(calls, float("inf"))
    for turn in range(PASSES):
        for key, call in calls.items():
            many = "/near/" in key or key.startswith(("all_to_all", "all_gather"))
            rule = Rule(warmup=int(turn == 0), repetitions=MANY_REPETITIONS if many else REPETITIONS)
            samples = sample({key: call}, rule, before=dist.barrier)[key]
            # the least: other work on the machine only ever lengthens it; there and back is two messages
            seconds[key] = min(seconds[key], min(samples) * (0.5 if key.startswith("p2p") else 1.0))
    keys = sorted(seconds)
    slowest = torch.tensor([seconds[key] for key in keys], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        out.write_text(json.dumps(dict(zip(keys, slowest.tolist(), strict=True))), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    rendezvous, out, sizes, *places = sys.argv[1:]
    torch.set_num_threads(1)
    start(
        lambda rank: measure(rank, rendezvous, Path(out), [int(size) for size in sizes.split(",")]),
        places,
        RANK_TIMEOUT_S,
    )


if __name__ == "__main__":
    main()
