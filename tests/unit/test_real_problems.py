"""`choose` against brute force on small problems with real prices: every plan of every cell is written down.

Odd counts of GPUs, one pool or two, models of alike and unlike layers and with experts, pins, and memory that is often short.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from random_problems import every_column, random_problem

from planner.choose import choose
from planner.errors import InfeasibleError
from planner.search.best_first import Candidate
from planner.search.exhaustive import best_plan, flaw
from planner.search.pooled import price
from planner.search.priced import Priced
from planner.what_if.feasible import space_of

SEEDS, PARTS = 54, 3
MOST_CELLS = 60
"""Larger spaces take brute force too long."""


def _least_s(priced: Priced) -> float | None:
    """J of the best plan of all."""
    found = []
    for index in range(len(priced.space)):
        if priced.bounds.played[index]:  # test_played.py holds these against `predict`
            played = priced.cell(index, np.inf).played
            found += [] if played is None else [played.objective_s]
            continue
        best = best_plan([every_column(priced, index)])
        found += [] if best is None else [best.objective_s]
    return min(found, default=None)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_choice_has_the_least_j_of_all_plans(part: int) -> None:
    compared = on_pools = short = 0
    for seed in range(part, SEEDS, PARTS):
        problem, pins = random_problem(seed)
        try:
            space = space_of(problem, pins)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                choose(problem, pins=pins)
            continue
        if len(space) > MOST_CELLS:
            continue
        with_margin, to_the_brim = price(problem, space), price(problem, space, at_risk=True)
        least_s, at_risk = _least_s(with_margin), False
        if least_s is None:
            least_s, at_risk = _least_s(to_the_brim), True
        if least_s is None:
            with pytest.raises(InfeasibleError):
                choose(problem, pins=pins)
            continue
        answer = choose(problem, pins=pins)
        assert answer.choice.objective_s == pytest.approx(least_s, rel=1e-6), seed
        assert answer.at_risk == at_risk, seed
        for plan in answer.choice.near:
            assert flaw(plan.cell, plan.picks.tolist(), plan.objective_s) is None, seed
            assert plan.simulated_s >= answer.choice.least_bound_s, seed
            assert pins.allows(replace(plan.cell.layout, recompute="none")), seed
            assert _kinds(plan, answer.priced.prices.recompute_kinds) <= {"none", "full"}, seed
        compared += 1
        on_pools += len(problem.cluster.pools) > 1
        short += "full" in _kinds(answer.choice.chosen, answer.priced.prices.recompute_kinds)
    assert compared > 5
    assert on_pools > 0
    assert short > 0


def _kinds(plan: Candidate, names: Sequence[str]) -> set[str]:
    """Kinds of recompute that a plan uses."""
    counts = plan.cell.columns.recompute_counts[plan.picks].sum(axis=0)
    return {name for name, count in zip(names, counts.tolist(), strict=True) if count}
