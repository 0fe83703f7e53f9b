"""One rank: sums gradients by a ring of the workers and by parameter servers, on links that the parent changes in between.

Arguments: a folder with `cases.json`, then the places. A case is {"workers", "servers", "bytes", "chunks", "links"}; before the first case of
other links rank 0 leaves `wanted-N` and waits for `shaped-N`. It leaves `seconds.json`: for each case {"ring", "server"}.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.ranks import start
from planner.profiling.clock import Rule, sample

REPETITIONS = 7
RESHAPE_S = 60.0
RANKS_S = 400.0
POLL_S = 0.05
HEAD_START_S = 0.15
"""More than it takes to hear of the moment."""
TAGS = 1000
"""Tags of one algorithm of one case: what one has posted is not for another."""


class Wires:
    """Messages between ranks; what goes up in number and what goes down have connections of their own: both directions of
    one gloo connection go one after the other as often as not."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._up, self._down = (dist.new_group(list(range(ranks))) for _ in range(2))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Starts it."""
        return dist.isend(tensor, to, group=self._up if self._rank < to else self._down, tag=tag)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> Any:
        """Starts it; gloo's sender waits for this, so it is started early."""
        return dist.irecv(tensor, sender, group=self._up if sender < self._rank else self._down, tag=tag)


def ring(wires: Wires, rank: int, workers: Sequence[int], num_bytes: int, tag: int) -> Callable[[], None]:
    """Reduce-scatter and all-gather between neighbours, 2(w - 1) steps.

    Receives are always posted for the next time, as with registered buffers: gloo's sender asks whether they are, and the answer
    would be a further step.
    """
    count = len(workers)
    if rank not in workers:
        return lambda: None
    size = -(-num_bytes // 4 // count)
    buffer = torch.ones(size * count)
    pieces = buffer.chunk(count)
    place = workers.index(rank)
    after, before = workers[(place + 1) % count], workers[(place - 1) % count]
    inbox = [torch.empty(size) for _ in range(2 * (count - 1))]

    def posted() -> list[Any]:
        return [wires.receive(tensor, before, tag + step) for step, tensor in enumerate(inbox)]

    arrivals = posted()

    def once() -> None:
        nonlocal arrivals
        buffer.fill_(1.0)
        sends = []
        for step, arrival in enumerate(arrivals):
            sends.append(wires.send(pieces[(place - step) % count], after, tag + step))
            arrival.wait()
            piece = pieces[(place - step - 1) % count]
            if step < count - 1:
                piece.add_(inbox[step])
            else:
                piece.copy_(inbox[step])
        for work in sends:
            work.wait()
        if any(piece[0] != count for piece in pieces):
            raise RuntimeError("the ring did not add up")
        arrivals = posted()

    return once


def server(
    wires: Wires, rank: int, workers: Sequence[int], servers: Sequence[int], num_bytes: int, num_chunks: int, tag: int
) -> Callable[[], None]:
    """Push, add, pull: each server keeps an equal share; a chunk is pulled while the next one is pushed. Receives as in `ring`."""
    size = -(-num_bytes // 4 // len(servers) // num_chunks)
    chunks = range(num_chunks)
    own = {(server, chunk): torch.ones(size) for server in servers for chunk in chunks}
    inbox = {(worker, chunk): torch.empty(size) for worker in workers for chunk in chunks}
    sums = {pair: torch.empty(size) for pair in own if pair[0] != rank}
    others = [worker for worker in workers if worker != rank]

    def pushed() -> dict[tuple[int, int], Any]:
        mine = {(worker, chunk) for worker in others for chunk in chunks} if rank in servers else set()
        return {pair: wires.receive(inbox[pair], pair[0], tag + pair[1]) for pair in sorted(mine)}

    def pulled() -> list[Any]:
        wanted = sums if rank in workers else {}
        return [wires.receive(tensor, pair[0], tag + num_chunks + pair[1]) for pair, tensor in wanted.items()]

    pushes, pulls = pushed(), pulled()

    def serve(chunk: int) -> list[Any]:
        """Add what has come, and send the sum to everybody."""
        total = own[rank, chunk].clone() if rank in workers else torch.zeros(size)
        for worker in others:
            pushes[worker, chunk].wait()
            total += inbox[worker, chunk]
        return [wires.send(total, worker, tag + num_chunks + chunk) for worker in others]

    def once() -> None:
        nonlocal pushes, pulls
        sends: list[Any] = []
        if rank in workers:
            sends += [wires.send(own[pair], pair[0], tag + pair[1]) for pair in sums]
        if rank in servers:
            for chunk in chunks:
                sends += serve(chunk)
        for work in (*pulls, *sends):
            work.wait()
        if rank in workers and any(tensor[0] != len(workers) for tensor in sums.values()):
            raise RuntimeError("the server did not add up")
        pushes, pulls = pushed(), pulled()

    return once


def run(rank: int, folder: Path, ranks: int) -> None:
    """What one rank does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="10.9.0.1", MASTER_PORT="29557")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    wires = Wires(rank, ranks)
    links, found = None, []
    for number, case in enumerate(cases):
        if case["links"] != links:
            links = case["links"]
            dist.barrier()
            if rank == 0:
                _reshaped(folder, links)
            dist.barrier()
        workers, servers = case["workers"], case["servers"]
        calls = {
            "ring": ring(wires, rank, workers, case["bytes"], TAGS * (2 * number)),
            "server": server(wires, rank, workers, servers, case["bytes"], case["chunks"], TAGS * (2 * number + 1)),
        }
        taken = sample(calls, Rule(warmup=1, repetitions=REPETITIONS), before=lambda: begin_together(rank))
        slowest = torch.tensor([list(taken[name]) for name in calls], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(
            {name: min(row) for name, row in zip(calls, slowest.tolist(), strict=True)}
        )  # nothing shortens one
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()  # and no more: receives of a next time are posted, and the process ends here


def begin_together(rank: int) -> None:
    """All ranks return at the same moment: they share a clock, and a barrier lets them go as far apart as a message takes."""
    dist.barrier()
    moment = torch.tensor([time.monotonic() + HEAD_START_S], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, float(moment.item()) - time.monotonic()))


def _reshaped(folder: Path, links: int) -> None:
    (folder / f"wanted-{links}").touch()
    deadline = time.monotonic() + RESHAPE_S
    while not (folder / f"shaped-{links}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the parent has not shaped links {links} within {RESHAPE_S:.0f} s")
        time.sleep(POLL_S)


def main() -> None:
    folder, *places = sys.argv[1:]
    start(lambda rank: run(rank, Path(folder), len(places)), places, RANKS_S)


if __name__ == "__main__":
    main()
