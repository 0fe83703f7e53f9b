"""Two residuals of memory: planted bytes come back, and are added, never multiplied."""

from dataclasses import replace

import pytest
from cost_cases import problem as case

from cost_models.memory import context_bytes, counted_context_bytes
from cost_models.peaks import memory_report
from cost_models.problem import Problem
from cost_models.records import Calibration, MemoryKind, normalised
from cost_models.residuals import NAME, RankMemory, residual_bytes, residuals, without_residuals
from planner.decisions import decision_of_layout

GIB = float(2**30)


@pytest.fixture
def problem() -> Problem:
    return case()


def with_found(problem: Problem, runs: list[RankMemory]) -> Problem:
    found = dict(residuals(problem, runs, machine="here", date="2026-11-30"))
    coefficients = {**problem.calibration.coefficients, **found}
    return replace(problem, calibration=replace(problem.calibration, coefficients=coefficients))


def peak(problem: Problem, kind: MemoryKind) -> float:
    problem = replace(problem, memory_kind=kind)
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    return max(device.peak_bytes for device in memory_report(problem, decision))


def test_both_kinds_come_back_to_the_byte(problem: Problem) -> None:
    allocated, reserved = peak(problem, MemoryKind.ALLOCATED), peak(problem, MemoryKind.RESERVED)
    buffers = reserved - allocated
    measured = {MemoryKind.ALLOCATED: allocated + 3 * GIB, MemoryKind.RESERVED: allocated + 3 * GIB + buffers + GIB}
    run = RankMemory(analytic_bytes=allocated, buffers_bytes=buffers, measured=measured)
    anchored = with_found(problem, [run])
    assert peak(anchored, MemoryKind.ALLOCATED) == pytest.approx(measured[MemoryKind.ALLOCATED])
    assert peak(anchored, MemoryKind.RESERVED) == pytest.approx(measured[MemoryKind.RESERVED])


def test_bytes_are_added_to_a_larger_run_not_multiplied(problem: Problem) -> None:
    allocated = peak(problem, MemoryKind.ALLOCATED)
    run = RankMemory(analytic_bytes=allocated, buffers_bytes=0.0, measured={MemoryKind.ALLOCATED: allocated - GIB})
    larger = replace(problem, model=replace(problem.model, num_layers=2 * problem.model.num_layers))
    anchored = replace(with_found(problem, [run]), model=larger.model)
    assert peak(anchored, MemoryKind.ALLOCATED) == pytest.approx(peak(larger, MemoryKind.ALLOCATED) - GIB)


def test_without_an_allocator_there_is_one(problem: Problem) -> None:
    problem = replace(problem, memory_kind=MemoryKind.RSS)
    run = RankMemory(analytic_bytes=GIB, buffers_bytes=0.0, measured={MemoryKind.RSS: 1.5 * GIB})
    found = dict(residuals(problem, [run], machine="here", date="2026-11-30"))
    family = problem.cluster.pools[0].kind.device.family
    assert list(found) == [f"{NAME}.rss.{family}.{problem.runtime.name}"]
    assert residual_bytes(with_found(problem, [run])) == pytest.approx(0.5 * GIB)


def test_nothing_measured_changes_nothing(problem: Problem) -> None:
    assert residual_bytes(problem) == 0.0
    assert context_bytes(problem) == counted_context_bytes(problem)
    assert with_found(problem, []) == problem


def test_the_median_of_several_runs_says_on_what(problem: Problem) -> None:
    runs = [
        RankMemory(analytic_bytes=0.0, buffers_bytes=0.0, measured={MemoryKind.ALLOCATED: size})
        for size in (1.0, 2.0, 9.0)
    ]
    (coefficient,) = dict(residuals(problem, runs, machine="here", date="2026-11-30")).values()
    assert (coefficient.value, coefficient.rows) == (2.0, 3)
    assert "allocated - analytic" in coefficient.source


def test_an_old_residual_is_taken_off_before_a_new_one_is_found(problem: Problem) -> None:
    run = RankMemory(analytic_bytes=0.0, buffers_bytes=0.0, measured={MemoryKind.ALLOCATED: GIB})
    anchored: Calibration = with_found(problem, [run]).calibration
    assert without_residuals(anchored) == problem.calibration
