"""Outcomes of the solvers: what they mean, and that a start is used."""

import random

import pytest

from planner.formulation.program import Program, Row, Sense
from planner.solver import (
    Feasible,
    Infeasible,
    Optimal,
    SolverName,
    TimedOut,
    _StartedHighs,
    _to_pulp,
    available_solvers,
    solve,
)

BOTH = pytest.mark.parametrize("solver", list(SolverName))


def covering(num: int = 12, least: int = 5) -> Program:
    draw = random.Random(1)
    program = Program()
    for number in range(num):
        program.add_variable(f"x[{number}]", objective=draw.uniform(0.1, 1.0), binary=True)
    program.rows.append(
        Row(
            name="cover[0]",
            variables=range(num),
            coefficients=[1.0] * num,
            sense=Sense.AT_LEAST,
            constant=least,
        )
    )
    return program


def makespan(jobs: int = 40, machines: int = 7) -> Program:
    """Jobs on machines, least makespan: takes a solver far longer than any limit given here."""
    draw = random.Random(2)
    program = Program()
    longest = program.add_variable("makespan", objective=1.0)
    place = [[program.add_variable(f"x[{j},{k}]", binary=True) for k in range(machines)] for j in range(jobs)]
    seconds = [draw.uniform(1, 2) for _ in range(jobs)]
    for j in range(jobs):
        program.rows.append(
            Row(name=f"once[{j}]", variables=place[j], coefficients=[1.0] * machines, sense=Sense.EQUAL, constant=1.0)
        )
    for k in range(machines):
        program.rows.append(
            Row(
                name=f"load[{k}]",
                variables=[*(place[j][k] for j in range(jobs)), longest],
                coefficients=[*seconds, -1.0],
                sense=Sense.AT_MOST,
                constant=0.0,
            )
        )
    return program


def one_machine(program: Program) -> list[float]:
    """The worst start: every job on machine 0."""
    values = [1.0 if name.endswith(",0]") else 0.0 for name in program.names]
    values[0] = sum(program.rows[-1].coefficients[:-1])
    return values


def test_both_solvers_are_here() -> None:
    assert available_solvers() == (SolverName.HIGHS, SolverName.CBC)


@BOTH
def test_optimal(solver: SolverName) -> None:
    program = covering()
    outcome = solve(program, solver=solver)
    assert isinstance(outcome, Optimal)
    assert outcome.objective == pytest.approx(sum(sorted(program.objective)[:5]), rel=1e-9)
    assert outcome.bound == pytest.approx(outcome.objective, rel=1e-6)


@BOTH
def test_an_infeasible_programme_names_the_soft_rows_that_must_give_way(solver: SolverName) -> None:
    program = covering()
    program.rows.append(
        Row(
            name="memory[0]",
            variables=range(12),
            coefficients=[1.0] * 12,
            sense=Sense.AT_MOST,
            constant=3.0,
            soft=True,
        )
    )
    outcome = solve(program, solver=solver)
    assert isinstance(outcome, Infeasible)
    assert [name for name, _ in outcome.conflict] == ["memory[0]"]
    assert outcome.conflict[0][1] == pytest.approx(2.0, abs=1e-6)


def test_a_conflict_without_soft_rows_names_any() -> None:
    program = covering(least=13)
    outcome = solve(program)
    assert isinstance(outcome, Infeasible)
    assert outcome.conflict == (("cover[0]", pytest.approx(1.0)),)


@BOTH
def test_out_of_time_is_never_optimal(solver: SolverName) -> None:
    program = makespan()
    outcome = solve(program, solver=solver, time_limit_s=0.3, start=one_machine(program))
    assert isinstance(outcome, Feasible | TimedOut)
    if isinstance(outcome, Feasible) and solver is SolverName.HIGHS:
        assert outcome.bound is not None
        assert 0 <= (outcome.gap or 0.0) < 1
    if isinstance(outcome, Feasible) and solver is SolverName.CBC:
        assert outcome.bound is None
        assert outcome.gap is None


def test_no_time_at_all() -> None:
    assert solve(covering(), time_limit_s=0.0) == TimedOut()


def test_highs_begins_at_the_start_that_it_is_given() -> None:
    # without any time to search, the only point it can know is the start
    program = makespan()
    start = one_machine(program)
    values = {}
    for given in (tuple(start), None):
        problem, variables = _to_pulp(program, None)
        engine = _StartedHighs(msg=False, mip_heuristic_effort=0.0, presolve="off", timeLimit=1e-9)
        engine.start = given
        problem.solve(engine)
        values[given] = problem.solverModel.getInfo().objective_function_value
        del variables
    assert values[tuple(start)] == pytest.approx(start[0])
    assert values[None] != pytest.approx(start[0])


@BOTH
def test_standard_output_stays_clean(solver: SolverName, capfd: pytest.CaptureFixture[str]) -> None:
    solve(covering(), solver=solver)
    assert capfd.readouterr().out == ""


def test_violation_of_each_sense() -> None:
    rows = {sense: Row(name="r[0]", variables=[0], coefficients=[2.0], sense=sense, constant=3.0) for sense in Sense}
    assert rows[Sense.EQUAL].violation([1.0]) == 1.0
    assert rows[Sense.AT_MOST].violation([1.0]) == 0.0
    assert rows[Sense.AT_LEAST].violation([1.0]) == 1.0
    assert rows[Sense.AT_MOST].violation([2.0]) == 1.0
