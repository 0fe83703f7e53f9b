"""The only import of pulp. HiGHS first, CBC where HiGHS is absent; outcomes are named for what they mean.

PuLP's `status` says "Optimal" of a timed-out answer too, so outcomes are read from `sol_status` and, for HiGHS, from its
own bound. No returned point is believed: each is rounded and checked against the rows by our own arithmetic.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pulp

from planner.errors import InternalError, MeshwrightError
from planner.formulation.program import Program, Row, Sense

TOLERANCE = 1e-6
"""Largest violation of a row, in the row's own unit, that is rounding; rows are scaled to about 1."""
_HIGHS_TOLERANCE = 1e-9
"""HiGHS' own feasibility tolerances: 100 times finer than its default, so that rows as good as hold exactly."""


class SolverName(StrEnum):
    """The solvers that PuLP drives for us."""

    HIGHS = "highs"
    CBC = "cbc"


class SolverMissingError(MeshwrightError):
    """No solver can be started, or the one that was started did not come back."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal:
    """Proved: no point of the programme is better than `objective`, up to the solver's tolerance."""

    objective: float
    values: tuple[float, ...]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasible:
    """A point that satisfies every row; the time ended before it was proved to be the best."""

    objective: float
    values: tuple[float, ...]
    bound: float | None
    """No point is better than this; null where the solver tells no bound (CBC)."""

    @property
    def gap(self) -> float | None:
        """1 - bound / objective; null where there is no bound."""
        if self.bound is None:
            return None
        return 0.0 if self.objective == 0 else max(0.0, 1 - self.bound / self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No point satisfies every row."""

    conflict: tuple[tuple[str, float], ...]
    """Rows that would have to give way, and by how much in the row's unit: a smallest total stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The time ended before any point was found."""

    bound: float | None = None


Outcome = Optimal | Feasible | Infeasible | TimedOut


def available_solvers() -> tuple[SolverName, ...]:
    """The solvers that can be started here, the preferred one first."""
    found = []
    if pulp.HiGHS().available():
        found.append(SolverName.HIGHS)
    if pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path).available():
        found.append(SolverName.CBC)
    return tuple(found)


def solve(
    program: Program,
    *,
    start: Sequence[float] | None = None,
    time_limit_s: float | None = None,
    solver: SolverName | None = None,
    explain: bool = True,
) -> Outcome:
    """Minimises `program` to a gap of zero, beginning at `start` where one is given.

    With `explain`, an infeasible programme is solved once more with elastic rows, and the conflict names those that had
    to stretch. SolverMissingError where neither HiGHS nor CBC can be started.
    """
    chosen = solver or preferred_solver()
    if time_limit_s is not None and time_limit_s <= 0:
        return TimedOut()
    problem, variables = _to_pulp(program, start)
    engine = _engine(chosen, time_limit_s, start)
    with _silenced():
        try:
            problem.solve(engine)
        except pulp.PulpSolverError as error:
            where = f" ({engine.path})" if chosen is SolverName.CBC else ""
            raise SolverMissingError(
                f"the solver {chosen.value}{where} was started and did not come back with an answer: killed, out of memory, or not "
                "that program; plan again, give it more memory, or install the other one (package highspy is HiGHS, PuLP brings CBC)"
            ) from error
    return _outcome(program, problem, variables, chosen, explain, time_limit_s)


def preferred_solver() -> SolverName:
    """HiGHS, or CBC where it is absent. SolverMissingError where neither can be started."""
    found = available_solvers()
    if not found:
        raise SolverMissingError(
            "no solver can be started: neither HiGHS (package highspy) nor CBC (PuLP brings it) is here; "
            "`pip install highspy` installs one (predict and check do without)"
        )
    return found[0]


def _to_pulp(program: Program, start: Sequence[float] | None) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The same programme in PuLP's terms. Numbered names: PuLP changes the brackets in ours, and sorts by name."""
    problem = pulp.LpProblem("choice", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"v{number:07d}", 0, high, pulp.LpInteger if integer else pulp.LpContinuous)
        for number, (high, integer) in enumerate(zip(program.highs, program.integer, strict=True))
    ]
    problem.objective = pulp.LpAffineExpression(
        [(variables[number], c) for number, c in enumerate(program.objective) if c]
    )
    senses = {
        Sense.EQUAL: pulp.LpConstraintEQ,
        Sense.AT_MOST: pulp.LpConstraintLE,
        Sense.AT_LEAST: pulp.LpConstraintGE,
    }
    for number, row in enumerate(program.rows):
        terms = [(variables[v], c) for v, c in zip(row.variables, row.coefficients, strict=True)]
        problem.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression(terms), senses[row.sense], f"r{number}", row.constant)
        )
    if start is not None:
        for variable, value in zip(variables, start, strict=True):
            variable.setInitialValue(value, check=False)
    return problem, variables


class _StartedHighs(pulp.HiGHS):  # type: ignore[misc]  # pulp has no types
    """HiGHS through PuLP, begun at a solution. PuLP's own `warmStart` option of this solver does nothing."""

    start: tuple[float, ...] | None = None

    def callSolver(self, lp: Any) -> None:  # noqa: N802 (PuLP's name)
        """Hands the start over, then solves."""
        if self.start is not None:
            import highspy

            solution = highspy.HighsSolution()
            by_column = sorted((variable.index, variable.name) for variable in lp.variables())
            solution.col_value = [self.start[int(name[1:])] for _, name in by_column]
            lp.solverModel.setSolution(solution)
        super().callSolver(lp)


def _engine(chosen: SolverName, time_limit_s: float | None, start: Sequence[float] | None) -> Any:
    if chosen is SolverName.CBC:
        return pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            msg=False,
            timeLimit=time_limit_s,
            gapRel=0.0,
            gapAbs=0.0,
            threads=1,
            warmStart=start is not None,
            options=["primalTolerance 1e-9", "integerTolerance 1e-9"],
        )
    engine = _StartedHighs(
        msg=False,
        timeLimit=time_limit_s,
        gapRel=0.0,
        gapAbs=_HIGHS_TOLERANCE,
        threads=1,
        mip_feasibility_tolerance=_HIGHS_TOLERANCE,
        primal_feasibility_tolerance=_HIGHS_TOLERANCE,
        dual_feasibility_tolerance=_HIGHS_TOLERANCE,
    )
    engine.start = None if start is None else tuple(start)
    return engine


_DESCRIPTOR_LOCK = threading.Lock()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """HiGHS prints a banner from C even when silenced, and standard output may be a JSON document."""
    with _DESCRIPTOR_LOCK:
        sys.stdout.flush()
        try:
            kept = os.dup(1)
        except OSError:  # standard output is closed: nothing can be spoilt
            yield
            return
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(sink)


def _outcome(
    program: Program,
    problem: pulp.LpProblem,
    variables: list[pulp.LpVariable],
    chosen: SolverName,
    explain: bool,
    time_limit_s: float | None,
) -> Outcome:
    status, bound = problem.sol_status, None
    if chosen is SolverName.HIGHS:
        info = problem.solverModel.getInfo()
        bound = info.mip_dual_bound if any(program.integer) else info.objective_function_value
        if not abs(bound) < 1e29:  # HiGHS writes 'no bound' as an infinity
            bound = None
    if status == pulp.LpSolutionInfeasible:
        return Infeasible(conflict=_conflict(program, chosen, time_limit_s) if explain else ())
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return TimedOut(bound=bound)
    # a variable of no row has no value
    values = tuple(
        float(round(variable.varValue or 0.0)) if integer else float(variable.varValue or 0.0)
        for variable, integer in zip(variables, program.integer, strict=True)
    )
    worst = max(program.rows, key=lambda row: row.violation(values), default=None)
    if worst is not None and worst.violation(values) > TOLERANCE:
        if status == pulp.LpSolutionOptimal:
            raise InternalError(
                f"{chosen.value} calls a point optimal that breaks row {worst.name} by {worst.violation(values):.3g}"
            )
        return TimedOut(bound=bound)
    objective = program.value(values)
    if status == pulp.LpSolutionOptimal:
        return Optimal(objective=objective, values=values, bound=objective if bound is None else min(bound, objective))
    return Feasible(objective=objective, values=values, bound=bound)


def _conflict(program: Program, chosen: SolverName, time_limit_s: float | None) -> tuple[tuple[str, float], ...]:
    """Rows that stretch in the least total stretch: the soft ones alone where that is enough, else any."""
    for soft_only in (True, False):
        elastic = Program(
            names=list(program.names),
            highs=list(program.highs),
            integer=list(program.integer),
            objective=[0.0] * len(program.objective),
        )
        stretches: dict[int, str] = {}
        for row in program.rows:
            if soft_only and not row.soft:
                elastic.rows.append(row)
                continue
            added = [
                (elastic.add_variable(f"stretch{sign:+d} {row.name}", objective=1.0), float(sign))
                for sign in (1, -1)
                if row.sense is Sense.EQUAL or (sign < 0) == (row.sense is Sense.AT_MOST)
            ]
            stretches |= {variable: row.name for variable, _ in added}
            elastic.rows.append(
                Row(
                    name=row.name,
                    variables=[*row.variables, *(variable for variable, _ in added)],
                    coefficients=[*row.coefficients, *(coefficient for _, coefficient in added)],
                    sense=row.sense,
                    constant=row.constant,
                )
            )
        if not stretches:
            continue
        outcome = solve(elastic, solver=chosen, time_limit_s=time_limit_s, explain=False)
        if isinstance(outcome, Optimal | Feasible):
            return tuple(
                (name, outcome.values[variable])
                for variable, name in stretches.items()
                if outcome.values[variable] > TOLERANCE
            )
    return ()
