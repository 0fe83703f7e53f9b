"""What a prediction's time rests on, coefficient by coefficient.

The share of a coefficient is |d log step / d log value|: the part of the step that grows with it. A share counts what the
coefficient decides on the critical path and nothing else, so that what is hidden behind something counts for nothing. Shares
need not sum to 1: a launch floor beside a kernel, or an overlap, takes from others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models.calibrations import NotedCoefficients, shipped
from cost_models.problem import Problem
from cost_models.records import Calibration, Coefficient, Decision
from cost_models.refit import parameters_of, scaled, with_links
from planner.predict import simulated

CHANGE = 0.01
"""Change of the logarithm of a value by which its share is found."""
LEAST_SHARE = 0.001
"""Smaller shares are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One thing that a step's time rests on."""

    name: str
    """`coefficients/matmul.efficiency.hopper.bf16`, `operations/layer/forward`, `curves/all_reduce`."""
    share: float
    """|d log step / d log value|."""
    basis: str
    """anchored (fitted on runs of one's own, or measured), calibrated (on published runs), table."""
    rows: int
    """Data that it was fitted on; 0 where it is the table's."""


def rests_on(problem: Problem, decision: Decision) -> tuple[Term, ...]:
    """What the decision's step time rests on, the largest share first."""
    calibration = with_links(problem.calibration, [problem.cluster])
    noted = NotedCoefficients(calibration.coefficients)
    here = _log_step(replace(problem, calibration=replace(calibration, coefficients=noted)), decision)
    terms = []
    for parameter in parameters_of(calibration):
        kind, _, key = parameter.partition("/")
        if kind == "coefficients" and key not in noted.read:
            continue
        moved = scaled(calibration, {parameter: math.exp(-CHANGE)})  # down, for shares must stay below 1
        share = abs(_log_step(replace(problem, calibration=moved), decision) - here) / CHANGE
        if share >= LEAST_SHARE:
            terms.append(_term(calibration, parameter, share))
    return tuple(sorted(terms, key=lambda term: (-term.share, term.name)))


def _term(calibration: Calibration, parameter: str, share: float) -> Term:
    kind, _, key = parameter.partition("/")
    if kind != "coefficients":
        return Term(name=parameter, share=share, basis="anchored", rows=1)
    found = calibration.coefficients[key]
    parts = set(key.split("."))
    before = max((one.rows for name, one in shipped().coefficients.items() if set(name.split(".")) <= parts), default=0)
    if found.rows > before:
        return Term(name=parameter, share=share, basis="anchored", rows=found.rows)
    return Term(name=parameter, share=share, basis="calibrated" if found.rows else "table", rows=found.rows)


def made_own(calibration: Calibration, runs: Sequence[tuple[Problem, Decision]]) -> Calibration:
    """The calibration with coefficients of the runs' own device family and runtime beside those that all share, of equal value.

    What the runs teach then stays with their like, and nobody else's predictions move. Runs of several families or runtimes
    keep what they share, for together they say more of it. Which names are looked up is seen, not listed: a pricing reads them.
    """
    families = {problem.cluster.pools[0].kind.device.family for problem, _ in runs}
    runtimes = {problem.runtime.name for problem, _ in runs}
    if len(families) != 1 or len(runtimes) != 1:
        return calibration
    family, runtime = families.pop(), runtimes.pop()
    copies: dict[str, Coefficient] = {}
    for name in _read(calibration, runs):
        base = name.removesuffix(f".{runtime}").removesuffix(f".{family}")
        for own in (f"{base}.{family}.{runtime}", f"{base}.{family}", f"{base}.{runtime}"):
            if own not in calibration.coefficients and own != name:
                copies.setdefault(own, calibration.coefficients[name])
    tried = replace(calibration, coefficients={**copies, **calibration.coefficients})
    kept = {own: copies[own] for own in _read(tried, runs) & copies.keys()}
    return replace(calibration, coefficients={**calibration.coefficients, **kept})


def _read(calibration: Calibration, runs: Sequence[tuple[Problem, Decision]]) -> set[str]:
    """Names of the coefficients that the runs' step times are made of."""
    noted = NotedCoefficients(calibration.coefficients)
    for problem, decision in runs:
        _log_step(replace(problem, calibration=replace(calibration, coefficients=noted)), decision)
    return {name for name in noted.read if not name.startswith(("memory.", "interval."))}


def _log_step(problem: Problem, decision: Decision) -> float:
    return float(np.log(simulated(problem, decision).simulation.step_s))
