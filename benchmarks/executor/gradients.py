"""Seconds of a step by the way its gradients are summed, on four hosts with fast links in pairs and slow ones between them."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.registry import benchmark
from benchmarks.testbed.network import shaped_network, unavailable

NEAR_BITS_PER_S, FAR_BITS_PER_S = 1e9, 100e6
ROUNDS = 5
TIMEOUT_S = 250.0


def measured_ways(rounds: int = ROUNDS) -> dict[str, Any]:
    """What `gradient_ranks` found on the shaped network: seconds and error by way, bytes of the gradients."""
    program = Path(__file__).with_name("gradient_ranks.py")
    with tempfile.TemporaryDirectory() as folder, shaped_network(NEAR_BITS_PER_S, FAR_BITS_PER_S) as network:
        out = Path(folder, "out.json")
        network.run(program, [str(Path(folder, "rendezvous")), str(out), str(rounds)], timeout_s=TIMEOUT_S)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@benchmark("gradients")
def gradients(published: Path | None = None) -> Mapping[str, Any]:
    """Medians of steps in turn; `against_flat` is how many times as fast as DDP's own all-reduce."""
    why_not = unavailable()
    if why_not is not None:
        return {"skipped": why_not, "text": f"gradients: skipped, {why_not}"}
    found = measured_ways()
    flat_s = median(found["seconds"]["flat"])
    rows = [
        {
            "way": name,
            "median_s": round(median(seconds), 4),
            "least_s": round(min(seconds), 4),
            "most_s": round(max(seconds), 4),
            "against_flat": round(flat_s / median(seconds), 2),
            "gradient_error": found["errors"][name],
        }
        for name, seconds in found["seconds"].items()
    ]
    lines = [
        f"{found['gradient_bytes'] / 2**20:.1f} MiB of gradients, 4 ranks, 1 Gbit/s in pairs, 100 Mbit/s between them"
    ]
    lines += [
        f"{row['way']:<24}{1e3 * row['median_s']:8.0f} ms ({1e3 * row['least_s']:.0f} .. {1e3 * row['most_s']:.0f})  "
        f"{row['against_flat']:.2f} x flat  off by {row['gradient_error']:.0e}"
        for row in rows
    ]
    return {"gradient_bytes": found["gradient_bytes"], "rounds": ROUNDS, "rows": rows, "text": "\n".join(lines)}
