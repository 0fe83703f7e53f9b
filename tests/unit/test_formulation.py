"""The programme, its rows and its point, against plain arithmetic."""

from collections import Counter

import numpy as np
import pytest
from random_cells import random_cell, without_misfits

from planner.formulation.choice import formulate
from planner.search.exhaustive import best_plan, flaw, objective_of, plans
from planner.search.incumbent import least_objective
from planner.search.least_r import least_lower_bound_s
from planner.search.stages import CellProblem
from planner.solver import Infeasible, Optimal, SolverName, solve

SEEDS = range(200)


def feasible(seed: int) -> CellProblem | None:
    cell = without_misfits(random_cell(seed))
    return cell if best_plan([cell]) else None


@pytest.mark.parametrize("seed", range(25))
def test_the_point_of_a_plan_satisfies_every_row_and_has_its_j(seed: int) -> None:
    cell = without_misfits(random_cell(seed))
    problem = formulate([cell], unit_s=7.0)
    for picks in list(plans(cell))[:40]:
        point = problem.point(cell, picks)
        assert max(row.violation(point) for row in problem.program.rows) < 1e-9
        assert problem.program.value(point) * 7.0 == pytest.approx(objective_of(cell, picks), rel=1e-9)
        assert cell.objective_s(picks) == pytest.approx(objective_of(cell, picks), rel=1e-12)
        found, taken = problem.read(point)
        assert found is cell
        assert tuple(taken.tolist()) == picks


def test_rows_are_named_by_family_and_index() -> None:
    cells = [random_cell(seed, index) for index, seed in enumerate(range(12))]
    names = [row.name for row in formulate(cells, unit_s=1.0).program.rows]
    assert len(names) == len(set(names))
    families = Counter(name.split("[")[0] for name in names)
    assert set(families) == {
        "choice", "start", "flow", "finish", "load", "load_forward", "load_backward", "tail", "memory",
    }  # fmt: skip
    assert families["choice"] == 1
    assert families["start"] == families["finish"] == len(cells)


def test_a_plan_that_does_not_fit_breaks_a_memory_row() -> None:
    broken = 0
    for seed in SEEDS:
        cell = random_cell(seed)
        if cell.layout.vpp == 1:
            continue
        problem, kept = formulate([cell], unit_s=1.0), set(plans(cell))
        stages = [range(where.start, where.stop) for where in cell.stage_slices]
        heaviest = tuple(max(stage, key=lambda n: cell.columns.activation_bytes[n]) for stage in stages)
        if heaviest not in kept:
            point = problem.point(cell, heaviest)
            rows = [row.name for row in problem.program.rows if row.violation(point) > 1e-9]
            assert rows
            assert all(name.startswith("memory[") for name in rows)
            broken += 1
    assert broken > 3


@pytest.mark.parametrize("solver", list(SolverName))
def test_ilp_search_and_brute_force_agree_on_200_cells(solver: SolverName) -> None:
    solved = 0
    for seed in SEEDS:
        cell = without_misfits(random_cell(seed))
        best, found = best_plan([random_cell(seed)]), least_objective(cell)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        assert flaw(cell, found.picks.tolist(), found.objective_s) is None
        # CBC takes a process a solve: every third cell is enough for it
        if solver is SolverName.CBC and seed % 3:
            continue
        problem = formulate([cell], unit_s=best.objective_s)
        outcome = solve(problem.program, start=problem.point(cell, found.picks), solver=solver)
        assert isinstance(outcome, Optimal)
        assert outcome.objective == pytest.approx(1.0, rel=1e-6)
        same, picks = problem.read(outcome.values)
        assert flaw(same, picks.tolist(), same.objective_s(picks)) is None
        solved += 1
    assert solved > 40


def test_an_infeasible_cell_is_told_in_memory_rows() -> None:
    told = 0
    for seed in SEEDS:
        cell = random_cell(seed)
        if cell.layout.vpp == 1 or best_plan([cell]):
            continue
        outcome = solve(formulate([cell], unit_s=1.0).program)
        assert isinstance(outcome, Infeasible)
        assert outcome.conflict
        assert all(name.startswith("memory[") for name, _ in outcome.conflict)
        told += 1
    assert told


def test_least_r_of_a_cell_is_that_of_brute_force() -> None:
    from planner.search.exhaustive import lower_bound_of

    compared = 0
    for seed in SEEDS:
        cell = feasible(seed)
        if cell is None or cell.layout.vpp > 1:
            continue
        least = min(lower_bound_of(cell, picks) for picks in plans(cell))
        assert least_lower_bound_s(cell, np.inf) == pytest.approx(least, rel=1e-12)
        assert least_lower_bound_s(cell, 0.9 * least) == pytest.approx(0.9 * least)
        compared += 1
    assert compared > 50
