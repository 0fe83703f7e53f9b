"""Measurements that are none, and several runs of one plan."""

from dataclasses import replace

import pytest
from records_for_tests import MEASUREMENT, plan

from cost_models.records import MeasuredMemory, Measurement, Measurements, MemoryKind, RecordError
from planner.compare import compare, measured_phases
from planner.errors import InputError


def run(phase: str, *samples: float, peak_bytes: int | None = None, rank_class: str = "stage 0") -> Measurement:
    memory = None if peak_bytes is None else MeasuredMemory(kind=MemoryKind.ALLOCATED, peak_bytes=peak_bytes)
    return replace(
        MEASUREMENT,
        key=phase,
        phase=phase,
        samples_s=samples,
        memory=memory,
        rank_class=rank_class,
        plan_sha256=plan().decision.sha256,
    )


@pytest.mark.parametrize("sample", [-1.0, float("nan"), float("inf"), 1e10, 1e-13])
def test_no_time_of_a_step(sample: float) -> None:
    with pytest.raises(RecordError, match="legal: 0, and 1e-12 to 1e"):
        replace(MEASUREMENT, samples_s=(1.0, sample))


def test_bytes_are_from_0() -> None:
    with pytest.raises(RecordError, match="peak_bytes=-5; legal: whole numbers from 0"):
        MeasuredMemory(kind=MemoryKind.RSS, peak_bytes=-5)
    with pytest.raises(RecordError, match="bytes=-1; legal"):
        replace(MEASUREMENT, bytes=-1)


def test_two_runs_of_one_plan_follow_one_another() -> None:
    """Their steps have nothing to do with one another: the slower of two is no step of either."""
    first, second = (
        [run("pipeline", *samples, rank_class=f"stage {stage}") for stage, samples in enumerate(stages)]
        for stages in (((1.0, 4.0), (2.0, 3.0)), ((5.0,), (6.0,)))
    )
    assert measured_phases([*first, *second]) == {"pipeline": (2.0, 4.0, 6.0)}


@pytest.mark.parametrize(
    "runs",
    [
        (run("pipeline", 1.0, 2.0), run("pipeline", 1.0, rank_class="stage 1")),
        (run("clip", 1.0, 2.0), run("reduce", 1.0)),
    ],
    ids=["stages", "merged phases"],
)
def test_unequal_numbers_of_steps(runs: tuple[Measurement, ...]) -> None:
    with pytest.raises(InputError, match=r"unequal numbers of steps \(2 of .*; 1 of "):
        measured_phases(runs)


def test_the_highest_peak_of_several_runs_counts() -> None:
    runs = [run("step", 1.0, peak_bytes=peak << 30, rank_class="all") for peak in (3, 7, 5)]
    (row,) = compare(plan(), Measurements(measurements=tuple(runs)))["memory"]
    assert row["measured_gib"] == 7.0
