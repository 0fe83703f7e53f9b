"""Shares of a step by coefficient: what is planted shows, and what the user's runs taught is told apart."""

from dataclasses import replace

import pytest
from cost_cases import problem as case

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Coefficient, normalised
from planner.decisions import decision_of_layout
from planner.predict import predict
from planner.readers.clusters import read_cluster
from planner.readers.runtimes import read_runtime
from planner.report.predict_text import predict_text, term_lines
from planner.rests_on import made_own, rests_on


@pytest.fixture
def problem() -> Problem:
    return case()


def test_a_share_is_what_the_step_grows_by(problem: Problem) -> None:
    """Against a recomputed step: 10% on a coefficient of time grows the step by 10% of its share."""
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    before = predict(problem, decision).step_s
    for term in rests_on(problem, decision):
        kind, _, name = term.name.partition("/")
        assert kind == "coefficients"
        if not name.startswith(("memory_ops.multiplier", "step.constant_s", "weights")):
            continue
        found = problem.calibration.coefficients[name]
        changed = {**problem.calibration.coefficients, name: replace(found, value=1.1 * found.value)}
        other = replace(problem, calibration=replace(problem.calibration, coefficients=changed))
        assert predict(other, decision).step_s / before - 1 == pytest.approx(0.1 * term.share, rel=0.15, abs=1e-4)


def test_what_ones_own_runs_taught_is_anchored(problem: Problem) -> None:
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    name = next(t.name for t in rests_on(problem, decision) if t.name.startswith("coefficients/matmul.efficiency"))
    key = name.partition("/")[2]
    old = problem.calibration.coefficients[key]
    learnt = {**problem.calibration.coefficients, key: replace(old, rows=old.rows + 5)}
    anchored = replace(problem, calibration=replace(problem.calibration, coefficients=learnt))
    bases = {term.name: term.basis for term in rests_on(anchored, decision)}
    assert bases[name] == "anchored"
    assert set(bases.values()) <= {"anchored", "calibrated", "table"}
    told = "\n".join(term_lines(rests_on(anchored, decision)))
    assert "anchored" in told
    assert "analytic" in told
    assert key in told


def test_nothing_of_ones_own_is_told_as_before(problem: Problem) -> None:
    problem = replace(problem, calibration=shipped())
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    terms, predicted = rests_on(problem, decision), predict(problem, decision)
    assert term_lines(terms) == []
    assert predict_text(problem, decision, predicted, {}, terms) == predict_text(problem, decision, predicted, {})


def test_a_coefficient_that_nobody_reads_is_no_term(problem: Problem) -> None:
    strange = Coefficient(value=1.0, unit="s", source="planted", date="2026-11-30")
    more = {**problem.calibration.coefficients, "step.constant_s.nobody": strange}
    other = replace(problem, calibration=replace(problem.calibration, coefficients=more))
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    assert all("nobody" not in term.name for term in rests_on(other, decision))


def test_copies_of_ones_own_change_no_price_and_stay_with_their_like(problem: Problem) -> None:
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    own = made_own(problem.calibration, [(problem, decision)])
    assert predict(replace(problem, calibration=own), decision).step_s == predict(problem, decision).step_s
    copies = own.coefficients.keys() - problem.calibration.coefficients.keys()
    family, runtime = problem.cluster.pools[0].kind.device.family, problem.runtime.name
    assert copies
    assert all(set(name.split(".")) & {family, runtime} for name in copies)
    slower = {**own.coefficients, **{name: replace(own.coefficients[name], value=0.1) for name in copies}}
    other = replace(problem, cluster=read_cluster("a100-80x8"), runtime=read_runtime("llm-foundry"))
    changed = replace(other, calibration=replace(own, coefficients=slower))
    assert predict(changed, decision).step_s == predict(other, decision).step_s


def test_runs_of_two_families_keep_what_they_share(problem: Problem) -> None:
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    other = replace(problem, cluster=read_cluster("a100-80x8"))
    assert made_own(problem.calibration, [(problem, decision), (other, decision)]) == problem.calibration


def test_a_copy_that_nobody_corrected_rests_on_what_it_was_copied_from(problem: Problem) -> None:
    decision = decision_of_layout(problem, normalised(dp=8, mbs=1))
    own = replace(problem, calibration=made_own(problem.calibration, [(problem, decision)]))
    assert "anchored" not in {term.basis for term in rests_on(own, decision)}
