"""The search over several cells: the same J as brute force, a true certificate, and bugs that are caught."""

import dataclasses

import numpy as np
import pytest
from random_cells import MadeUpSpace, random_cell, random_space, without_misfits

from planner.errors import InfeasibleError, InternalError, TimeLimitError
from planner.search.best_first import DELTA, search
from planner.search.exhaustive import best_plan, lower_bound_of, objective_of, plans
from planner.search.reduction import needed_columns
from planner.solver import SolverName


def test_search_finds_the_best_plan_of_200_spaces() -> None:
    found = 0
    for seed in range(200):
        space = random_space(seed)
        best = best_plan(space.cells)
        if best is None:
            with pytest.raises(InfeasibleError):
                search(space)
            continue
        choice = search(space)
        assert choice.objective_s == pytest.approx(best.objective_s, rel=1e-6)
        assert choice.status == "optimal"
        assert choice.gap_objective == pytest.approx(0.0, abs=1e-6)
        least = min(lower_bound_of(cell, picks) for cell in space.cells for picks in plans(cell))
        assert choice.least_bound_s <= least * (1 + 1e-12)
        assert choice.simulated_s >= choice.least_bound_s
        found += 1
    assert found > 150


def test_each_bound_of_the_certificate_holds() -> None:
    for seed in range(40):
        space = random_space(seed)
        if best_plan(space.cells) is None:
            continue
        choice = search(space)
        told, best_of_family = {verdict.index: verdict for verdict in choice.cells}, {}
        for index, family in enumerate(space.families.tolist()):
            best = best_plan([space.cells[index]])
            verdict = told.get(index)
            if best is None:
                assert verdict is None or verdict.objective_s is None
                continue
            best_of_family[family] = min(best_of_family.get(family, np.inf), best.objective_s)
            if verdict is not None:
                assert verdict.bound_s <= best.objective_s * (1 + 1e-9)
                if verdict.objective_s is not None:
                    assert verdict.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        looked_into = {int(space.families[index]) for index in told}
        for family, best_s in best_of_family.items():
            assert family in looked_into or best_s >= choice.limit_s * (1 - 1e-9)
        assert sum(verdict.reason == "chosen" for verdict in choice.cells) == 1


def test_the_choice_is_the_one_of_least_simulated_time_within_delta() -> None:
    for seed in range(40):
        space = random_space(seed)
        if best_plan(space.cells) is None:
            continue
        choice = search(space)
        assert choice.chosen is choice.near[0]
        for plan in choice.near:
            assert plan.objective_s <= (1 + DELTA) * choice.objective_s * (1 + 1e-9)
            assert plan.simulated_s >= choice.simulated_s
            assert plan.objective_s == pytest.approx(objective_of(plan.cell, plan.picks.tolist()), rel=1e-9)
        families = [int(space.families[plan.cell.index]) for plan in choice.near]
        assert len(families) == len(set(families))


def test_with_no_slack_the_plan_of_least_j_is_the_choice() -> None:
    for seed in range(60):
        space = random_space(seed)
        if best_plan(space.cells) is not None:
            choice = search(space, delta=0.0)
            assert choice.near
            assert choice.chosen.objective_s == pytest.approx(choice.objective_s, rel=1e-6)


def test_cbc_gives_the_same() -> None:
    for seed in range(6):
        space = random_space(seed)
        if best_plan(space.cells):
            choices = [search(space, solver=solver) for solver in SolverName]
            assert choices[0].objective_s == pytest.approx(choices[1].objective_s, rel=1e-6)


def planted(space: MadeUpSpace, index: int, bound_s: float) -> MadeUpSpace:
    copy = dataclasses.replace(space)
    copy.objective_bounds_s[index] = bound_s
    return copy


def test_a_planted_bound_that_is_too_high_is_caught() -> None:
    caught = 0
    for seed in range(20):
        space = random_space(seed, num_cells=1)
        best = best_plan(space.cells)
        if best is not None:
            with pytest.raises(InternalError, match="below its bound"):
                search(planted(space, best.cell.index, 1.05 * best.objective_s))
            caught += 1
    assert caught > 10


def test_a_search_that_misses_the_best_plan_is_caught_by_the_ilp(monkeypatch: pytest.MonkeyPatch) -> None:
    import planner.search.best_first as module

    def second_best(cell: object) -> object:
        found = module_least(cell)
        if found is None:
            return None
        ranked = sorted((objective_of(cell, picks), picks) for picks in plans(cell))
        worse = [entry for entry in ranked if entry[0] > found.objective_s * 1.001]
        return dataclasses.replace(found, objective_s=worse[0][0], picks=np.array(worse[0][1])) if worse else found

    module_least = module.least_objective
    monkeypatch.setattr(module, "least_objective", second_best)
    caught = 0
    for seed in range(12):
        space = random_space(seed, num_cells=2)
        if sum(best_plan([cell]) is not None for cell in space.cells) < 2:
            continue
        with pytest.raises(InternalError, match="one of them is wrong"):
            search(space, delta=1.0)
        caught += 1
    assert caught > 5


def test_a_time_limit_without_any_plan_is_an_error() -> None:
    with pytest.raises(TimeLimitError, match="time limit of 0 s"):
        search(random_space(0), time_limit_s=0.0)


def test_a_time_limit_is_never_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    import planner.search.best_first as module
    from planner.solver import TimedOut

    monkeypatch.setattr(module, "solve", lambda *arguments, **options: TimedOut())
    space = random_space(1)
    choice = search(space, time_limit_s=60.0)
    best = best_plan(space.cells)
    assert best is not None
    assert choice.status == "feasible"
    assert choice.bound_s < choice.objective_s
    assert choice.bound_s <= best.objective_s


def test_the_columns_of_every_plan_below_a_limit_are_kept() -> None:
    dropped = 0
    for seed in range(150):
        cell = without_misfits(random_cell(seed))
        values = sorted(objective_of(cell, picks) for picks in plans(cell))
        if not values:
            continue
        for limit_s in (values[0], values[len(values) // 10], values[len(values) // 2]):
            kept = set(needed_columns(cell, limit_s).tolist())
            used = {pick for picks in plans(cell) if objective_of(cell, picks) <= limit_s for pick in picks}
            assert used <= kept
            dropped += len(cell.columns) - len(kept)
    assert dropped > 1000
