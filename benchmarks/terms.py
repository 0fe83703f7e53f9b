"""Single terms on this machine's CPU: products, attention and gloo's collectives, measured, against what a calibration made
at other shapes and sizes says of them. Two processes at once, as many threads each as there are cores to share."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.registry import benchmark
from cost_models import compute
from cost_models.calibrations import shipped
from cost_models.collectives import collective_s, fabric
from cost_models.fit import fit
from cost_models.problem import Problem
from cost_models.records import Calibration, Measurement, Model, Precision, Workload
from planner.profiling.local import measured_cluster
from planner.profiling.session import Request, measure
from planner.readers.runtimes import read_runtime

RANKS = 2
CALIBRATED_MATMULS = ((256, 512, 512), (1024, 512, 512), (512, 1024, 1024), (1024, 1024, 512))
ASKED_MATMULS = (
    (64, 256, 256),
    (128, 128, 1024),
    (512, 512, 512),
    (256, 2048, 512),
    (1024, 2048, 1024),
    (512, 512, 64),
)
"""(m, n, k): smaller, flatter, longer and with a shorter inner dimension than the calibrated ones."""
CALIBRATED_ATTENTIONS = ((1, 256, 8, 8, 64), (2, 512, 8, 8, 64))
ASKED_ATTENTIONS = ((1, 128, 4, 4, 64), (1, 1024, 8, 8, 64), (4, 256, 8, 2, 64))
"""(batch, seq, heads, kv heads, head_dim)."""
MOST_S = 240.0
"""Time-out of the whole session."""


def _keys(matmuls: Iterable[tuple[int, ...]], attentions: Iterable[tuple[int, ...]]) -> list[str]:
    found = ["matmul/fp32/" + "x".join(map(str, sides)) for sides in matmuls]
    for sides in attentions:
        found += [f"attention/fp32/{'x'.join(map(str, sides))}/{way}" for way in ("forward", "backward")]
    return found


@benchmark("terms")
def terms(published: Path | None = None) -> Mapping[str, Any]:
    """Ratios of predicted to measured seconds, by term; the median of the absolute error of each kind."""
    known = [*_keys(CALIBRATED_MATMULS, CALIBRATED_ATTENTIONS), f"memory_bound/fp32/{48 << 20}", "launch/fp32"]
    asked = _keys(ASKED_MATMULS, ASKED_ATTENTIONS)
    request = Request(operations=(*known, *asked), group_sizes=(RANKS,), ranks=RANKS, timeout_s=MOST_S)
    taken = measure(request).measurements
    links = [one for one in taken if one.kind.value == "collective" and not one.key.startswith("overlap")]
    # every second size of a collective is calibrated, and those between are asked for
    sizes = sorted({int(one.key.split("/")[2]) for one in links})
    known_links = [one for one in links if int(one.key.split("/")[2]) in sizes[::2]]
    cluster = measured_cluster(RANKS, [one for one in taken if one.key in known or one in known_links])
    problem = Problem(
        model=Model(name="any", num_layers=1, hidden=512, ffn=512, heads=8, kv_heads=8, head_dim=64, vocab=512),
        cluster=cluster,
        workload=Workload(seq=256, gbs=2, precision=Precision.FP32),
        runtime=read_runtime("torch"),
        calibration=shipped(),
    )
    calibration = fit(
        problem,
        [one for one in taken if one.key in known or one in known_links],
        name="terms",
        date=date.today().isoformat(),
    )
    problem = replace(problem, calibration=calibration)
    rows = [
        _row(one, predicted, sizes)
        for one in taken
        if one.key not in known and one not in known_links and (predicted := _predicted(problem, one)) is not None
    ]
    return {
        "ranks": RANKS,
        "calibrated_at": {"operations": known, "collective_bytes": sizes[::2]},
        "median_error": _errors(rows),
        "rows": rows,
    }


def _row(one: Measurement, predicted_s: float, sizes: list[int]) -> dict[str, Any]:
    measured_s = median(one.samples_s)
    beyond = one.kind.value == "collective" and int(one.key.split("/")[2]) > sizes[::2][-1]
    return {
        "term": one.key,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "ratio": round(predicted_s / measured_s, 3),
        "beyond_what_was_calibrated": beyond,
    }


def _errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row["term"].split("/")[0], []).append(abs(row["ratio"] - 1))
    return {kind: round(float(np.median(errors)), 3) for kind, errors in sorted(by_kind.items())}


def _predicted(problem: Problem, one: Measurement) -> float | None:
    """Seconds of the term, from coefficients and curves alone: its own key was not measured, as far as the calibration knows."""
    what, *parts = one.key.split("/")
    unmeasured = _without_operations(problem.calibration)
    rates = compute.rates(problem.cluster.pools[0].kind.device, problem.workload, problem.runtime, unmeasured)
    if what == "matmul":
        m, n, k = (float(side) for side in parts[1].split("x"))
        return float(compute.matmul_s(rates, m, n, k).total)
    if what == "attention":
        batch, seq, heads, _, head_dim = (float(side) for side in parts[1].split("x"))
        return float(compute.attention_s(rates, batch, seq, heads, head_dim, backward=parts[2] == "backward").total)
    if what in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p"):
        links = fabric(problem.cluster, problem.calibration)
        return float(collective_s(links, what, float(parts[1]), float(parts[0]), 1).total)
    return None


def _without_operations(calibration: Calibration) -> Calibration:
    """Measured products and attention left out; the rates of the machine stay."""
    rates = {key: s for key, s in calibration.operations_s.items() if key.startswith(("memory_bound", "launch"))}
    return replace(calibration, operations_s=rates)
