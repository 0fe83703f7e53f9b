"""One rank of the demo's measuring session: operations, links, and what each parallelism costs a layer. torchrun starts it."""

import json
import os
import sys
from pathlib import Path

from cost_models.records import Measurements, from_json, save
from executor.dispatch import time_dispatch
from executor.measure import Settings
from planner.profiling.ranks import joined, say
from planner.profiling.session import Request, gathered, measured_here
from planner.readers.runtimes import read_runtime

LAYER = "executor.decoder:Layer"
"""The layer that will run is the layer that is timed."""


def main(folder: Path) -> None:
    """Reads request.json; rank 0 leaves measurements.json."""
    request = from_json(Request, json.loads((folder / "request.json").read_text(encoding="utf-8")))
    with joined(backend="gloo", timeout_s=request.timeout_s) as (rank, ranks):
        say(rank, "timing what DTensor and FSDP cost a layer")
        own = [*time_dispatch(read_runtime("torch"), Settings(check=False, timeout_s=request.timeout_s))]
        own += measured_here(request, rank, ranks)
        results = gathered(own, rank, ranks)
    if os.environ["RANK"] == "0":
        save(Measurements(measurements=results), folder / "measurements.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
