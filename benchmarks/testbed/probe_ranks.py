"""One rank of a live probe in each host, found over TCP as under torchrun. Arguments: the output file, seconds of time-out, then
the places."""

import os
import sys

from benchmarks.testbed.ranks import start
from cost_models.records import save
from planner.profiling.probe import ProbeRequest, take_part


def probe(rank: int, out: str, timeout_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="10.9.0.1", MASTER_PORT="29555")
    found = take_part(
        ProbeRequest(ranks=4, backend="gloo", timeout_s=timeout_s),
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    if found is not None:
        save(found, out)


def main() -> None:
    import torch.distributed  # noqa: F401  -- once, before the ranks are forked

    out, timeout_s, *places = sys.argv[1:]
    start(lambda rank: probe(rank, out, float(timeout_s)), places, 100.0)


if __name__ == "__main__":
    main()
