"""One answer by three ways: brute force, the combinatorial search and the ILP, on cells and spaces of every kind."""

from collections import Counter

import numpy as np
import pytest
from random_cells import any_cell, random_cell, short_of_memory, varied_space, without_misfits

from planner.errors import InfeasibleError
from planner.formulation.choice import formulate
from planner.search.best_first import search
from planner.search.exhaustive import best_plan, flaw, lower_bound_of, plans
from planner.search.incumbent import least_objective
from planner.search.least_r import least_lower_bound_s
from planner.search.stages import CellProblem
from planner.solver import Optimal, solve

CELLS, SPACES, PARTS = 600, 200, 6
"""Seeds, in parts that each have the time-out of a test."""


def _kind(cell: CellProblem) -> str:
    if cell.played is not None:
        return "played"
    return f"{cell.layout.schedule.value}{' on pools' if cell.pools else ''}"


def test_every_kind_of_cell_is_drawn_often() -> None:
    drawn = Counter(_kind(any_cell(seed)) for seed in range(CELLS))
    assert len(drawn) == 7  # three schedules, on one pool and on several, and those that are played
    assert min(drawn.values()) > CELLS / 20, drawn


@pytest.mark.parametrize("part", range(PARTS))
def test_ilp_search_and_brute_force_agree_on_cells_of_every_kind(part: int) -> None:
    solved: Counter[str] = Counter()
    for seed in range(part, CELLS, PARTS):
        cell = any_cell(seed)
        best, found = best_plan([cell]), least_objective(without_misfits(cell))
        if best is None:
            assert found is None, seed
            continue
        assert found is not None, seed
        kept = without_misfits(cell)
        assert found.objective_s == pytest.approx(best.objective_s, rel=1e-9), seed
        assert flaw(kept, found.picks.tolist(), found.objective_s) is None, seed
        problem = formulate([kept], unit_s=best.objective_s)
        outcome = solve(problem.program, start=problem.point(kept, found.picks))
        assert isinstance(outcome, Optimal), seed
        assert outcome.objective == pytest.approx(1.0, rel=1e-6), seed
        same, picks = problem.read(outcome.values)
        assert flaw(same, picks.tolist(), same.objective_s(picks)) is None, seed
        if cell.layout.vpp == 1:
            least_s = min(lower_bound_of(cell, picks) for picks in plans(cell))
            assert least_lower_bound_s(kept, np.inf) == pytest.approx(least_s, rel=1e-9), seed
        solved[_kind(cell)] += 1
    assert len(solved) >= 6, solved
    assert sum(solved.values()) > 0.5 * CELLS / PARTS


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8, 0.98])
def test_unlike_chunks_that_are_short_of_memory(share: float) -> None:
    recomputed = 0
    for seed in range(100):
        cell = random_cell(seed, larger=True)
        if cell.layout.vpp == 1:
            continue
        cell = short_of_memory(cell, share)
        best, found = best_plan([cell]), least_objective(cell)
        assert best is not None, seed
        assert found is not None, seed
        assert found.objective_s == pytest.approx(best.objective_s, rel=1e-9), seed
        assert flaw(cell, found.picks.tolist(), found.objective_s) is None, seed
        recomputed += bool(cell.columns.recompute_counts[found.picks, 1].any())
    assert recomputed > 10


@pytest.mark.parametrize("part", range(PARTS))
def test_the_search_is_brute_force_on_spaces_of_every_kind(part: int) -> None:
    found = 0
    for seed in range(part, SPACES, PARTS):
        space = varied_space(seed)
        best = best_plan(space.cells)
        if best is None:
            with pytest.raises(InfeasibleError):
                search(space)
            continue
        choice = search(space)
        assert choice.status == "optimal"
        assert choice.objective_s == pytest.approx(best.objective_s, rel=1e-6), seed
        assert choice.bound_s == pytest.approx(best.objective_s, rel=1e-6), seed
        for plan in choice.near:
            whole = space.cells[plan.cell.index]
            assert flaw(plan.cell, plan.picks.tolist(), plan.objective_s) is None, seed
            assert plan.objective_s >= best_plan([whole]).objective_s * (1 - 1e-9), seed
        least_s = min(lower_bound_of(cell, picks) for cell in space.cells for picks in plans(cell))
        assert choice.least_bound_s <= least_s * (1 + 1e-12), seed
        found += 1
    assert found > 0.7 * SPACES / PARTS
