"""One rank of the demo's measuring session: operations, links, and what each parallelism costs a layer. torchrun starts it."""

import json
import os
import sys
from pathlib import Path

import torch

from cost_models.records import Measurements, from_json, save
from executor.cli.bench_job import Job
from executor.dispatch import measure_context, time_dispatch
from executor.settings import Settings
from planner.profiling.ranks import joined, say
from planner.profiling.session import gathered, measured_here
from planner.readers.runtimes import read_runtime


def main(folder: Path) -> None:
    """Reads bench.json; rank 0 leaves measurements.json."""
    job = from_json(Job, json.loads((folder / "bench.json").read_text(encoding="utf-8")))
    request, settings = job.session, Settings(check=False, timeout_s=job.session.timeout_s)
    with joined(backend="gloo", timeout_s=request.timeout_s) as (rank, ranks):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        say(rank, "timing what DTensor and FSDP cost a layer")
        runtime = read_runtime("torch")
        own = [measure_context(job.model, job.seq, job.mbs, runtime, settings), *time_dispatch(runtime, settings)]
        own += measured_here(request, rank, ranks)
        results = gathered(own, rank, ranks)
    if os.environ["RANK"] == "0":
        save(Measurements(measurements=results), folder / "measurements.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
