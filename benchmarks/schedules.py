"""Pipeline schedules in order: predicted against published throughput of six schedules on one node.

16 layers of Llama 2 7B, sequences of 4,096, pp 8 on 8 MI300X, bf16 (AMD's blog on the pipelines of Primus). Batch sizes are not
published, so ratios to 1f1b alone count, for several numbers of micro-batches; no number is fitted to these rows.
"""

import csv
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.registry import benchmark
from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Precision, Schedule, Workload, normalised
from planner.decisions import decision_of_layout
from planner.predict import simulated
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.runtimes import read_runtime

NAMES = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved-1f1b": Schedule.INTERLEAVED,
    "zero-bubble": Schedule.INTERLEAVED_ZB,
    "zbv": Schedule.ZBV,
    "v-half": Schedule.V_HALF,
    "v-min": Schedule.V_MIN,
}
"""The publication's names."""
MICRO_BATCHES = (16, 32, 64)
"""Of one sequence each; the publication does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published schedule."""

    schedule: Schedule
    vpp: int
    tokens_per_s_per_gpu: float


def read_rows(folder: Path | None) -> tuple[Row, ...]:
    """Rows of schedules.csv. FileNotFoundError where there is none."""
    path = (folder or Path()) / "schedules.csv"
    if folder is None or not path.is_file():
        raise FileNotFoundError(f"{path} is absent")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            Row(
                schedule=NAMES[row["schedule"]],
                vpp=int(row["vpp"]),
                tokens_per_s_per_gpu=float(row["tokens_per_s_per_gpu"]),
            )
            for row in csv.DictReader(file)
        )


def problem_of(num_micro_batches: int) -> Problem:
    """What was run, with that many sequences a step; Megatron with every schedule stands for Primus, which trains with it."""
    return Problem(
        model=replace(read_model("llama2-7b"), num_layers=16),
        cluster=read_cluster("mi300xx8"),
        workload=Workload(seq=4096, gbs=num_micro_batches, precision=Precision.BF16),
        runtime=replace(read_runtime("megatron"), schedules=tuple(Schedule)),
        calibration=shipped(),
    )


def predicted_step_s(problem: Problem, row: Row) -> float:
    """Seconds of a step under the row's schedule."""
    layout = normalised(pp=8, vpp=row.vpp, schedule=row.schedule)
    return simulated(problem, decision_of_layout(problem, layout)).simulation.step_s


def ratios(seconds: Sequence[float]) -> list[float]:
    """Throughputs over that of the first."""
    return [seconds[0] / one for one in seconds]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of pairs in the same order less the share in the opposite order."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


@benchmark("schedules")
def schedules_in_order(published: Path | None) -> Mapping[str, Any]:
    """By number of micro-batches: Kendall's tau, and each schedule's throughput over 1f1b's, predicted beside published."""
    rows = read_rows(published)
    measured = [row.tokens_per_s_per_gpu / rows[0].tokens_per_s_per_gpu for row in rows]
    found = []
    for count in MICRO_BATCHES:
        problem = problem_of(count)
        predicted = ratios([predicted_step_s(problem, row) for row in rows])
        found.append(
            {
                "micro_batches": count,
                "kendall_tau": round(kendall_tau(predicted, measured), 3),
                "over_1f1b": {
                    row.schedule.value: {"predicted": round(mine, 3), "published": round(theirs, 3)}
                    for row, mine, theirs in zip(rows, predicted, measured, strict=True)
                },
            }
        )
    return {"rows": found}
