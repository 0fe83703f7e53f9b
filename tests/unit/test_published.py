"""The shipped calibration against published runs, and that no prediction looks at an answer."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.published import Run, memory_bytes, read_run, read_runs, step_s
from cost_models.calibrations import shipped

ANSWERS = (
    "measured_step_s",
    "step_s_best",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "memory_gib",
    "note",
)


@pytest.fixture(scope="module")
def runs(shared: Path) -> list[Run]:
    return read_runs(shared / "published" / "throughput.csv", shipped())[0]


def test_step_times_of_dense_models(runs: list[Run]) -> None:
    by_source: dict[str, list[float]] = defaultdict(list)
    for run in runs[::3]:
        assert run.measured_s is not None
        by_source[run.source].append(abs(step_s(run) / run.measured_s - 1))
    assert len(by_source) == 7
    medians = {source: float(np.median(errors)) for source, errors in by_source.items()}
    assert max(medians.values()) < 0.10, medians
    assert np.mean(list(medians.values())) < 0.055, medians
    assert np.median(np.concatenate(list(by_source.values()))) < 0.045


def test_predictions_do_not_see_the_answers(runs: list[Run]) -> None:
    for run in runs[::60]:
        blank = {key: ("" if key in ANSWERS else value) for key, value in run.row.items()}
        assert step_s(read_run(blank, shipped())) == step_s(run)


def test_every_row_is_priced_or_refused_with_a_reason(shared: Path, runs: list[Run]) -> None:
    _, refused = read_runs(shared / "published" / "throughput.csv", shipped())
    assert len(runs) + len(refused) == 706
    assert all(refused.values())
    assert len(refused) == 83


def test_memory_of_the_ordinary_rows_of_megatron_core(shared: Path) -> None:
    rows, _ = read_runs(shared / "published" / "memory.csv", shipped())
    special = ("offload", "cudagraph", "loss_fusion", "defer_embedding", "tunable_overlap", "impl=local", "lts")
    errors = [
        memory_bytes(run) / 2**30 / run.memory_gib - 1
        for run in rows
        if run.source.startswith("Megatron-LM CI")
        and run.memory_gib
        and not any(word in run.row["note"].lower() for word in special)
    ]
    assert len(errors) > 90
    assert np.median(np.abs(errors)) < 0.025
    assert np.quantile(np.abs(errors), 0.9) < 0.08
