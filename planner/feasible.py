"""Whether anything fits: the space of a problem, and the exact answer to yes or no."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from cost_models.problem import Problem
from planner.errors import MeshwrightError
from planner.priced import Priced
from planner.readers.pins import Pins
from planner.space import Space, enumerate_cells


def space_of(problem: Problem, pins: Pins, worlds: Collection[int] | None = None) -> Space:
    """The space of a problem."""
    return enumerate_cells(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        pins=pins,
        worlds=worlds,
    )


def anything_fits(priced: Priced) -> bool:
    """Whether any plan fits; cells that need least by their floors are looked at first."""
    possible = np.isfinite(priced.bounds_below(np.inf)) & (priced.memory_floors_bytes <= priced.memory_limit_bytes)
    order = np.argsort(priced.memory_floors_bytes, kind="stable")
    return any(priced.fits(index) for index in order[possible[order]].tolist())


def is_feasible(problem: Problem, pins: Pins, worlds: Collection[int] | None = None) -> bool:
    """Whether a problem has any plan, be it one that fits on expectation only; what is illegal has none."""
    try:
        priced = Priced.of(problem, space_of(problem, pins, worlds), at_risk=True)
    except MeshwrightError:
        return False
    return anything_fits(priced)


def with_limit(priced: Priced, limit_bytes: float) -> Priced:
    """The same space and prices with another number of usable bytes on each device."""
    return replace(priced, memory_limit_bytes=limit_bytes)
