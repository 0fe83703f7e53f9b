"""A table of runs, each row predicted: `predict --runs`. A row is answered, or says why it cannot be."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cost_models.intervals import step_interval_s
from cost_models.memory import memory_lower, memory_upper, usable_bytes
from cost_models.peaks import memory_report
from cost_models.pressure import slowdown_share
from cost_models.records import Calibration, Decision
from cost_models.units import GIB
from planner.decisions import refuse_illegal
from planner.predict import basis_of, simulated, verdict_of
from planner.readers.runs import Run, decision_of_run, digest_of, read_rows, read_run, warnings_of

PROGRESS_EVERY = 100
"""Rows between two lines of progress; shorter tables are silent."""

ANSWERS = (
    *("step_s", "step_s_low", "step_s_high", "memory_gib", "memory_gib_low", "memory_gib_high", "fits"),
    "in_sample",
)

EXCUSED = ("MICROBATCHES_MOD_PP",)
"""Laws that a table may break: Megatron's --microbatch-group-size-per-virtual-pipeline-stage, of which no column tells, lifts
this one (tests of its own CI run 5 micro-batches on 4 stages)."""

Progress = Callable[[str], object]


def predict_runs(
    path: str | Path, calibration: Calibration, progress: Progress = lambda text: None
) -> dict[str, list[dict[str, Any]]]:
    """{"rows": [one answer a row, in the file's order]}. InputError where the file is no table of runs.

    `progress` hears how far it is, and first a line, `warning: ...`, for each thing that the table says and nothing follows.
    """
    rows = read_rows(path)
    for warning in warnings_of(path, rows):
        progress(f"warning: {warning}")
    answers = []
    for number, row in enumerate(rows):
        if number and number % PROGRESS_EVERY == 0:
            progress(f"{number} of {len(rows)} rows")
        answers.append(answer_of_row(row, calibration))
    return {"rows": answers}


def answer_of_row(row: Mapping[str, str], calibration: Calibration) -> dict[str, Any]:
    """One row of `read_rows`: what cannot be predicted is None, and `error` says why."""
    answer: dict[str, Any] = {"id": row["id"]} | dict.fromkeys(ANSWERS)
    answer["in_sample"] = digest_of(row) in calibration.fitted_on
    errors = []
    try:
        run = read_run(row, calibration)
        refuse_illegal(run.problem, run.layout, excused=EXCUSED)
    except ValueError as error:
        return answer | {"error": " ".join(str(error).split())}
    for part in (_time, _memory):
        try:
            answer |= part(run)
        except ValueError as error:
            errors.append(str(error))
    return answer | {"error": "; ".join(dict.fromkeys(errors)) or None}


def _time(run: Run) -> dict[str, Any]:
    decision = decision_of_run(run)
    step = simulated(run.problem, decision)
    step_s = step.simulation.step_s
    low_s, high_s = step_interval_s(
        run.problem, step_s, world=run.layout.world, basis=basis_of(step, decision.num_micro_batches)
    )
    return {"step_s": step_s, "step_s_low": low_s, "step_s_high": high_s * (1 + _pressure(run, decision))}


def _pressure(run: Run, decision: Decision) -> float:
    """How much the upper end rises near full memory; 0 where the memory cannot be priced (`_memory` says why)."""
    try:
        fullest = max(device.peak_bytes for device in memory_report(run.problem, decision))
    except ValueError:
        return 0.0
    return slowdown_share(run.problem, fullest)


def _memory(run: Run) -> dict[str, Any]:
    problem = run.problem
    peaks = [device.peak_bytes for device in memory_report(problem, decision_of_run(run))]
    own, fullest = peaks[-1] if run.last_rank else max(peaks), max(peaks)
    return {
        "memory_gib": own / GIB,
        "memory_gib_low": memory_lower(problem, own) / GIB,
        "memory_gib_high": memory_upper(problem, own) / GIB,
        "fits": verdict_of(fullest, memory_upper(problem, fullest), usable_bytes(problem)).value,
    }
