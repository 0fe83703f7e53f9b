"""Whether anything fits, exactly; and the plan that shows it."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from cost_models.problem import Problem
from cost_models.records import Decision, Prediction
from planner.decisions import decision_of
from planner.errors import InfeasibleError, MeshwrightError
from planner.predict import predict
from planner.readers.pins import Pins
from planner.search.best_first import search
from planner.search.pooled import price
from planner.search.priced import Priced
from planner.search.space import Space, enumerate_cells
from planner.search.worthwhile import worthwhile_kinds
from planner.solver import preferred_solver
from planner.what_if.changes import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan and what it does."""

    decision: Decision
    predicted: Prediction


def space_of(problem: Problem, pins: Pins, worlds: Collection[int] | None = None) -> Space:
    """The space of a problem; of the kinds of recompute that no pin names, those that are worth searching."""
    space = enumerate_cells(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        pins=pins,
        worlds=worlds,
    )
    if "recompute" in pins.fields:
        return space
    return replace(space, recompute_kinds=worthwhile_kinds(problem, space.cells, space.recompute_kinds))


def anything_fits(priced: Priced) -> bool:
    """Whether any plan fits; cells that need least by their floors are looked at first."""
    possible = np.isfinite(priced.bounds_below(np.inf)) & (priced.memory_floors_bytes <= priced.memory_limit_bytes)
    order = np.argsort(priced.memory_floors_bytes, kind="stable")
    return any(priced.fits(index) for index in order[possible[order]].tolist())


def is_feasible(question: Question) -> bool:
    """Whether a question has any plan, be it one that fits on expectation only; what is illegal has none."""
    try:
        space = space_of(question.problem, question.pins, question.worlds)
        return anything_fits(price(question.problem, space, at_risk=True))
    except MeshwrightError:
        return False


def solved(question: Question, *, time_limit_s: float | None = None) -> Found | None:
    """The plan of least objective, with the margin of memory where that can be had; None where nothing is legal or fits.

    TimeLimitError where `time_limit_s` ended before the first plan.
    """
    try:
        space = space_of(question.problem, question.pins, question.worlds)
    except MeshwrightError:
        return None
    for at_risk in (False, True):
        try:
            found = search(
                price(question.problem, space, at_risk=at_risk),
                delta=0.0,
                time_limit_s=time_limit_s,
                solver=preferred_solver(),
            )
        except InfeasibleError:
            continue
        decision = decision_of(question.problem, found.chosen)
        return Found(decision=decision, predicted=predict(question.problem, decision))
    return None
