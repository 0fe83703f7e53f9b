"""A second plan in one process, one change from the first: python -m benchmarks.planning_again REQUEST.json -> JSON on stdout."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from cost_models.calibrations import shipped
from cost_models.records import Plan
from planner.errors import MeshwrightError
from planner.plan import make_plan
from planner.readers.requests import complete, read_request


def main(path: Path) -> int:
    """Plans the request, then with tp pinned to what was chosen, then to anything else, then with one node less."""
    document = json.loads(path.read_text(encoding="utf-8"))
    begun = time.process_time()
    chosen, first = _planned(document)
    assert chosen is not None, "the request of the benchmark has a plan"
    tp, have = chosen.decision.layout.tp, chosen.request.cluster.num_gpus
    per_node = chosen.request.cluster.pools[0].kind.gpus_per_node
    changes: dict[str, tuple[dict[str, Any], str | None]] = {
        f"--pin tp={tp}": ({**document, "pin": f"tp={tp}"}, None),
        f"--pin tp!={tp}": ({**document, "pin": f"tp!={tp}"}, None),
        f"--gpus {have - per_node}": (document, str(have - per_node)),
        f"--gpus ..{have - per_node}": (document, f"..{have - per_node}"),
    }
    found = {change: _planned(asked, gpus)[1] for change, (asked, gpus) in changes.items()}
    print(json.dumps({"first": first, "then": found, "all_cpu_s": round(time.process_time() - begun, 2)}))
    return 0


def _planned(document: dict[str, Any], gpus: str | None = None) -> tuple[Plan | None, dict[str, Any]]:
    """A plan and what it took; why there is none, where there is none."""
    began = time.process_time()
    try:
        plan = make_plan(complete(read_request(document)), calibration=shipped(), gpus=gpus)
    except MeshwrightError as error:
        return None, {"cpu_s": round(time.process_time() - began, 2), "no_plan": str(error).splitlines()[0][:200]}
    proof = plan.certificate
    assert proof is not None
    taken = {"cpu_s": round(time.process_time() - began, 2), "search_wall_s": round(proof.seconds, 2)}
    return plan, {**taken, "cells": proof.num_cells, "opened": len(proof.cells), "simulated_s": proof.simulated_s}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
