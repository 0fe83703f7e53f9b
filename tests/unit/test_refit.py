"""Refitting on whole runs: planted truths are found, what the runs do not tell stays, and one odd run moves little."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Calibration, Coefficient, Curve, Decision, Precision, RecordError, Workload, normalised
from cost_models.refit import (
    BOOTSTRAPS,
    LEAST_SPREAD,
    ROBUST,
    SURE,
    TAIL,
    Row,
    parameters_of,
    prior_spread,
    refit,
    scaled,
    weight_of_refit,
)
from planner.decisions import decision_of_layout
from planner.predict import simulated
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.runtimes import read_runtime

DAY = "2026-11-30"

PRIOR = Calibration(
    name="prior",
    machine="any",
    date=DAY,
    coefficients={
        "step.constant_s.cpu": Coefficient(value=0.1, unit="s", source="guess", date=DAY),
        "memory.margin": Coefficient(value=0.1, unit="1", source="guess", date=DAY),
        "unused_s": Coefficient(value=1.0, unit="s", source="guess", date=DAY),
    },
    operations_s={
        "layer/fp32/1x4x8/1x1x8/16/forward": 1.0,
        "layer/fp32/1x4x8/1x1x8/16/backward": 2.0,
        "head/fp32/1x4x8x32/forward": 0.5,
    },
    curves={"all_reduce/2/loopback": Curve(sizes_bytes=(1.0,), seconds=(0.4,), source="guess", date=DAY)},
)


def two_runs(calibration: Calibration) -> list[float]:
    """Two runs: one computes alone, the other communicates too."""
    operations = calibration.operations_s
    compute_s = operations["layer/fp32/1x4x8/1x1x8/16/forward"] + operations["layer/fp32/1x4x8/1x1x8/16/backward"]
    constant_s = calibration.coefficients["step.constant_s.cpu"].value
    return [compute_s + constant_s, compute_s + calibration.curves["all_reduce/2/loopback"].seconds[0]]


def rows(seconds: list[float], spread: float = 0.001) -> list[Row]:
    return [Row(label=str(index), measured_s=value, spread=spread) for index, value in enumerate(seconds)]


def test_a_refit_on_its_own_predictions_changes_nothing() -> None:
    found = refit(PRIOR, rows(two_runs(PRIOR)), two_runs, name="again", date=DAY)
    assert all(factor == pytest.approx(1.0, abs=1e-6) for factor in found.multipliers.values())
    assert found.before == pytest.approx((0.0, 0.0), abs=1e-12)


def test_a_refit_explains_the_runs_better_and_leaves_alone_what_they_do_not_touch() -> None:
    truth = scaled(PRIOR, {"operations/layer/forward": 1.5, "operations/layer/backward": 1.5, "curves/all_reduce": 3.0})
    found = refit(PRIOR, rows(two_runs(truth)), two_runs, name="again", date=DAY)
    assert max(map(abs, found.after)) < 0.1 * max(map(abs, found.before))
    assert found.multipliers["curves/all_reduce"] > 1.5
    assert "operations/head/forward" not in found.multipliers
    assert found.calibration.coefficients["unused_s"] == PRIOR.coefficients["unused_s"]
    assert found.calibration.operations_s["head/fp32/1x4x8x32/forward"] == 0.5


def test_the_less_a_measurement_repeats_the_more_of_the_prior_stays() -> None:
    measured = [2.0 * value for value in two_runs(PRIOR)]
    sure = refit(PRIOR, rows(measured, spread=0.02), two_runs, name="again", date=DAY)
    unsure = refit(PRIOR, rows(measured, spread=2.0), two_runs, name="again", date=DAY)
    assert sum(map(abs, sure.after)) < sum(map(abs, unsure.after)) < sum(map(abs, unsure.before))


def test_the_minimum_is_one() -> None:
    """No step along any parameter makes what is minimised smaller: arithmetic that does not come from the solver."""
    measured = [1.7 * two_runs(PRIOR)[0], 1.2 * two_runs(PRIOR)[1]]
    found = refit(PRIOR, rows(measured, spread=0.1), two_runs, name="again", date=DAY)

    def cost(multipliers: dict[str, float]) -> float:
        predicted = two_runs(scaled(PRIOR, multipliers))
        residuals = [math.log(m / p) / 0.1 for m, p in zip(measured, predicted, strict=True)]
        misfit = sum(2 * ROBUST**2 * (math.sqrt(1 + (r / ROBUST) ** 2) - 1) for r in residuals)
        moved = [math.log(f) / prior_spread(PRIOR, name) for name, f in multipliers.items()]
        return misfit + sum((TAIL + 1) * math.log(1 + x**2 / TAIL) for x in moved)

    least = cost(dict(found.multipliers))
    for name in found.multipliers:
        for factor in (0.97, 1.03):
            assert cost(found.multipliers | {name: found.multipliers[name] * factor}) > least


def test_a_refitted_coefficient_says_on_what() -> None:
    def idle(calibration: Calibration) -> list[float]:
        """Two runs that are the constant alone."""
        return [calibration.coefficients["step.constant_s.cpu"].value] * 2

    found = refit(PRIOR, rows([0.2, 0.21]), idle, name="again", date="2026-12-01")
    coefficient = found.calibration.coefficients["step.constant_s.cpu"]
    assert "coefficients/step.constant_s.cpu" in found.learnt
    assert (coefficient.rows, coefficient.date) == (2, "2026-12-01")
    assert "refitted on 2 rows" in coefficient.source


def test_memory_and_intervals_are_not_refitted_on_seconds() -> None:
    assert not any("memory" in name or "interval" in name for name in parameters_of(PRIOR))


def test_no_rows_are_an_error() -> None:
    with pytest.raises(RecordError, match="nothing to refit"):
        refit(PRIOR, [], two_runs, name="again", date=DAY)


def test_one_odd_run_moves_little() -> None:
    """Nine runs as promised and one of ten times the seconds: a squared loss would follow it."""
    prior = replace(PRIOR, operations_s={"layer/fp32/1x4x8/1x1x8/16/forward": 1.0}, curves={}, coefficients={})
    odd = refit(
        prior,
        rows([1.0] * 9 + [10.0]),
        lambda c: [c.operations_s["layer/fp32/1x4x8/1x1x8/16/forward"]] * 10,
        name="",
        date=DAY,
    )
    assert abs(math.log(odd.multipliers["operations/layer/forward"])) < LEAST_SPREAD


def many_runs(calibration: Calibration) -> list[float]:
    """Six alike, of compute alone."""
    return [two_runs(calibration)[0]] * 6


def test_where_the_prior_predicts_left_out_runs_best_it_stays() -> None:
    """Runs that scatter about what was promised: the mean of the others is further from each than the promise."""
    measured = [s * factor for s, factor in zip(many_runs(PRIOR), (1.2, 0.8, 1.2, 0.8, 1.2, 0.8), strict=True)]
    found = refit(PRIOR, rows(measured, spread=0.02), many_runs, name="again", date=DAY)
    assert found.width == 0.0
    assert found.after == found.before
    assert set(found.multipliers.values()) == {1.0}
    assert not found.learnt
    assert found.calibration.coefficients == PRIOR.coefficients
    assert found.calibration.operations_s == PRIOR.operations_s


def test_runs_that_agree_are_learnt_from() -> None:
    found = refit(PRIOR, rows([1.3 * s for s in many_runs(PRIOR)], spread=0.02), many_runs, name="again", date=DAY)
    assert found.width > 0
    assert found.sure is not None
    assert found.sure > SURE
    assert max(abs(left) for left in found.after) < 0.02


def test_rows_of_too_few_runs_say_nothing_of_runs_that_are_left_out() -> None:
    measured = [s * factor for s, factor in zip(many_runs(PRIOR), (1.2, 0.8, 1.2, 0.8, 1.2, 0.8), strict=True)]
    of_two = [replace(row, run=str(place % 2)) for place, row in enumerate(rows(measured, spread=0.02))]
    found = refit(PRIOR, of_two, many_runs, name="again", date=DAY)
    assert (found.width, found.sure) == (1.0, None)


def test_a_gain_that_rests_on_one_run_is_not_sure() -> None:
    """Five runs as promised within their noise and one that took half as long again: the mean gains by the odd one alone."""
    runs = [str(place) for place in range(6)]
    of_prior, of_refit = np.array([0.0] * 5 + [20.0]), np.array([0.5] * 5 + [10.0])
    assert of_refit.sum() < of_prior.sum()
    assert weight_of_refit(of_prior, of_refit, runs) < SURE
    assert weight_of_refit(of_prior, np.array([0.0] * 5 + [20.0]), runs) == pytest.approx(0.5)


def test_the_weight_of_a_refit_is_that_of_the_likelihoods_where_runs_gain_alike() -> None:
    """Where every run gains as much, no bootstrap changes the sum: 1 / (1 + exp(-gain / 2))."""
    found = weight_of_refit(np.full(8, 1.0), np.full(8, 0.5), [str(place) for place in range(8)])
    assert found == pytest.approx(1 / (1 + math.exp(-8 * 0.5 / 2)))


def test_the_weight_of_a_refit_swaps_with_what_is_compared() -> None:
    rng = np.random.default_rng(1)
    one, other, runs = rng.exponential(2.0, 12), rng.exponential(2.0, 12), [str(place // 2) for place in range(12)]
    assert weight_of_refit(one, other, runs) + weight_of_refit(other, one, runs) == pytest.approx(1.0)
    assert abs(weight_of_refit(one, one, runs) - 0.5) < 1 / BOOTSTRAPS


def test_what_the_runs_do_not_tell_apart_keeps_its_rows() -> None:
    """A constant of a tenth of a step moves with the step, but nothing says that it was the constant."""
    found = refit(PRIOR, rows([1.1 * s for s in two_runs(PRIOR)], spread=0.5), two_runs, name="again", date=DAY)
    assert "coefficients/step.constant_s.cpu" in found.multipliers
    assert "coefficients/step.constant_s.cpu" not in found.learnt
    assert found.calibration.coefficients["step.constant_s.cpu"].rows == 0


# Planted truths ------------------------------------------------------------------------------------------------------


def runs_of(seqs: tuple[int, ...]) -> list[tuple[Problem, Decision]]:
    """Layouts of an 8 B model on a node, by sequence length."""
    found = []
    for seq in seqs:
        problem = Problem(
            model=read_model("llama3-8b"),
            cluster=read_cluster("h100x8"),
            workload=Workload(seq=seq, gbs=64, precision=Precision.BF16),
            runtime=read_runtime("megatron"),
            calibration=shipped(),
        )
        found.append((problem, decision_of_layout(problem, normalised(dp=4, tp=2, zero=1, recompute="full"))))
    return found


def seconds_of(runs: list[tuple[Problem, Decision]], calibration: Calibration) -> list[float]:
    return [
        simulated(replace(problem, calibration=calibration), decision).simulation.step_s for problem, decision in runs
    ]


PLANTED = {
    "coefficients/attention.efficiency.hopper.megatron": ((4096, 8192, 16384, 32768, 65536), (2048,)),
    "coefficients/matmul.efficiency.hopper.bf16": ((1024, 2048, 4096, 8192, 16384), (65536,)),
}
"""Operation that is twice as slow in truth -> sequences of the five runs, and of runs that they are not."""


@pytest.mark.parametrize("operation", PLANTED)
def test_an_operation_that_is_twice_as_slow_is_found_from_five_runs_and_the_others_stay(operation: str) -> None:
    """With a noise of 3%, as repeats have; the others stay within their noise, and no other run is predicted worse than by half as much again."""
    seen, unseen = (runs_of(seqs) for seqs in PLANTED[operation])
    truth = scaled(shipped(), {operation: 0.5})
    noise = np.exp(np.random.default_rng(5).normal(0.0, 0.03, len(seen)))
    measured = [float(s) for s in np.asarray(seconds_of(seen, truth)) * noise]
    found = refit(
        shipped(), rows(measured, spread=0.03), lambda calibration: seconds_of(seen, calibration), name="", date=DAY
    )
    assert found.multipliers[operation] == pytest.approx(0.5, rel=0.1)
    assert operation in found.learnt
    moved = {name: abs(math.log(factor)) for name, factor in found.multipliers.items() if name != operation}
    assert max(moved.values()) < 0.15
    for before, after, true in zip(
        seconds_of(unseen, shipped()),
        seconds_of(unseen, found.calibration),
        seconds_of(unseen, truth),
        strict=True,
    ):
        assert abs(math.log(after / true)) < max(abs(math.log(before / true)), 0.045)


def test_runs_as_promised_make_no_other_run_worse() -> None:
    """Five runs that only scatter move other runs by less than they scatter."""
    seen, unseen = runs_of((4096, 4096, 4096, 8192, 8192)), runs_of((1024, 65536))
    noise = np.exp(np.random.default_rng(6).normal(0.0, 0.05, len(seen)))
    measured = [float(s) for s in np.asarray(seconds_of(seen, shipped())) * noise]
    found = refit(
        shipped(), rows(measured, spread=0.05), lambda calibration: seconds_of(seen, calibration), name="", date=DAY
    )
    pairs = zip(seconds_of(unseen, shipped()), seconds_of(unseen, found.calibration), strict=True)
    assert max(abs(math.log(after / before)) for before, after in pairs) < 0.05
