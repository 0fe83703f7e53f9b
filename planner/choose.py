"""From a problem to the choice: space, prices, search; beside it today's layout and the handbook's."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cost_models.problem import Problem
from cost_models.records import CertificateStatus, Layout, RecordError, Schedule, Stage
from cost_models.records.layout import STAGES
from planner.decisions import layout_of, stages_of
from planner.errors import InfeasibleError, InputError
from planner.pace import Pace, Tell
from planner.readers.pins import Pins
from planner.search.arrangements import Arrangement
from planner.search.best_first import DELTA, SLACKS, Candidate, Choice, candidate, search
from planner.search.incumbent import least_objective
from planner.search.nesting import Joined, continued, orders_searched, other_orders
from planner.search.pooled import price
from planner.search.priced import Priced
from planner.search.space import enumerate_cells
from planner.solver import SolverName, preferred_solver
from planner.what_if.changes import Question
from planner.what_if.feasible import space_of
from planner.what_if.illegal import nothing_legal
from planner.what_if.infeasible import nothing_fits

_LOOKED_AT_TOGETHER = 64
"""Cells whose bounds are asked for in one call while the handbook's layout is looked for."""
_ZERO_OF_HANDBOOK = (1, 0, 2, 3)
"""ZeRO level that people take first: the distributed optimizer where the runtime has it, else plain data parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The choice among all cells, and the two layouts that people compare it with."""

    problem: Problem
    priced: Priced
    """The space that was searched, with its prices, in the usual rank order."""
    other: Priced | None
    """Those cells in other rank orders that may be better; None = none may."""
    orders_below_s: tuple[float, ...] | None
    """J and R below which a cell in another rank order was one of them; None = no other order was looked at."""
    choice: Choice
    at_risk: bool
    """Nothing fits with the memory margin; these plans fit on expectation."""
    baseline: Candidate | None
    """The handbook's layout: smallest tp·pp that fits, tp inside the fast domain, the rest dp."""
    current: Candidate | None
    """Today's layout with its best split, where it fits and the runtime can do it."""
    current_note: str
    """Why today's layout is no candidate; empty otherwise."""

    @property
    def every(self) -> Priced | Joined:
        """All cells that were searched, numbered as in the choice."""
        return self.priced if self.other is None else Joined(usual=self.priced, other=self.other)

    def stages(self, of: Candidate) -> tuple[Stage, ...]:
        """The stages of a plan."""
        return stages_of(of)

    def layout(self, of: Candidate) -> Layout:
        """The layout of a plan, with its recompute."""
        return layout_of(of)


def choose(
    problem: Problem,
    *,
    pins: Pins | None = None,
    worlds: Collection[int] | None = None,
    current: Layout | None = None,
    current_pools: Arrangement = (),
    delta: float = DELTA,
    time_limit_s: float | None = None,
    solver: SolverName | None = None,
    tell: Tell | None = None,
) -> Answer:
    """The plan for a problem, on `worlds` ranks (all GPUs of the cluster by default).

    A `current` layout that fits, breaks no pin and has one of these numbers of ranks is always a candidate. InfeasibleError, with the smallest changes that
    would do, where nothing fits; TimeLimitError where the time ended before the first plan.
    """
    pins, begun = pins or Pins(), time.monotonic()
    solver, question = solver or preferred_solver(), Question.of(problem, pins, worlds)
    try:
        space = space_of(problem, pins, worlds)
    except InfeasibleError as error:
        raise nothing_legal(question, error, time_limit_s, tell) from None
    today, note = _current(problem, current, current_pools)
    if current is not None and not note:
        note = _excluded(current, pins, worlds or (problem.cluster.num_gpus,))
    always = [today] if today is not None and not note else []
    for at_risk in (False, True):
        priced = price(problem, space, at_risk=at_risk)
        how: dict[str, Any] = {"delta": delta, "solver": solver, "always": always, "pace": Pace(tell=tell)}
        try:
            choice = search(priced, time_limit_s=time_limit_s, **how)
        except InfeasibleError:
            continue
        other, below_s = None, None
        if choice.status is CertificateStatus.OPTIMAL and orders_searched(problem):
            below_s = (choice.limit_s, choice.least_bound_s)
            other = other_orders(priced, objective_below_s=below_s[0], simulated_below_s=below_s[1])
        if other is not None:
            left_s = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - begun))
            choice = continued(priced, other, choice, time_limit_s=left_s, **how)
        handbook = priced if not pins.pins else price(problem, space_of(problem, Pins(), worlds), at_risk=at_risk)
        return Answer(
            problem=problem,
            priced=priced,
            other=other,
            orders_below_s=below_s,
            choice=choice,
            at_risk=at_risk,
            baseline=_baseline(handbook),
            current=today,
            current_note=note,
        )
    left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - begun)
    raise nothing_fits(question, priced, left_s, tell)


def best_plan(priced: Priced, index: int) -> Candidate | None:
    """The plan of least J of one cell, simulated; None where nothing fits."""
    bound_s = float(priced.bounds_below(np.inf, np.array([index]))[0])
    if not np.isfinite(bound_s) or not priced.fits(index):
        return None
    for slack in SLACKS:
        cell = priced.cell(index, bound_s * slack)
        found = least_objective(cell)
        if found is not None and found.objective_s <= bound_s * slack:
            return candidate(cell, found.picks, found.objective_s)
    return None


def _excluded(current: Layout, pins: Pins, worlds: Collection[int]) -> str:
    """Why today's layout, which fits, may not be the answer; empty where it may."""
    broken = pins.broken(current)
    if broken:
        return (
            f"the pins {', '.join(map(str, broken))} exclude it"
            if len(broken) > 1
            else f"the pin {broken[0]} excludes it"
        )
    return (
        ""
        if current.world in worlds
        else f"it is a layout of {current.world:,} GPUs, and the plan is for other numbers"
    )


def _current(problem: Problem, layout: Layout | None, pools: Arrangement) -> tuple[Candidate | None, str]:
    """Today's layout as a candidate, numbered -1, or why it is none."""
    if layout is None:
        return None, ""
    kinds: tuple[str, ...] = (layout.recompute,)
    if layout.recompute == STAGES:
        kinds = problem.recompute_kinds
    elif layout.recompute not in problem.recompute_kinds:
        known = ", ".join(problem.recompute_kinds)
        raise InputError(
            f"--current: recompute {layout.recompute!r} is not a kind of {problem.runtime.name}; legal: {known}"
        )
    try:
        space = enumerate_cells(
            model=problem.model,
            cluster=problem.cluster,
            workload=problem.workload,
            runtime=problem.runtime,
            worlds=(),
            extra=(replace(layout, recompute="none"),),
        )
        space = replace(space, recompute_kinds=kinds)
        if pools:
            only = {"cells": space.cells.take(np.zeros(1, dtype=np.int64)), "families": np.zeros(1, dtype=np.int64)}
            space = replace(space, **only, arrangement=np.zeros(1, dtype=np.int64), arrangements=(pools,))  # type: ignore[arg-type]
        found = best_plan(price(problem, space, at_risk=True), 0)
    except (RecordError, ValueError, InfeasibleError) as error:
        return None, str(error)
    if found is None:
        return None, "it does not fit into the devices' memory, as modelled"
    return replace(found, cell=replace(found.cell, index=-1)), ""


def _baseline(priced: Priced) -> Candidate | None:
    """The handbook's layout: one sequence a micro-batch, plain 1f1b, the smallest tp·pp that fits, the rest dp."""
    cells = priced.space.cells
    domain = priced.problem.cluster.domain_size
    usual = (cells.vpp == 1) & (cells.mbs == 1) & (cells.cp == 1) & (cells.ep == 1) & (cells.tp <= domain)
    usual &= (cells.schedule == Schedule.ONE_F_ONE_B) & ((cells.dp_replicate == 1) | (cells.zero == 0))
    usual &= cells.world == cells.world.max()
    preference = np.array([_ZERO_OF_HANDBOOK.index(int(zero)) for zero in cells.zero])
    order = np.lexsort((preference, cells.pp, cells.tp * cells.pp))
    order = order[usual[order]]
    for some in np.array_split(order, max(1, len(order) // _LOOKED_AT_TOGETHER)):
        for index in some[np.isfinite(priced.bounds_below(np.inf, some))].tolist():
            found = best_plan(priced, index)
            if found is not None:
                return found
    return None
