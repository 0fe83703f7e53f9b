"""A second search of the same problem reuses what the first found out, and answers as if it were the first."""

import math

import pytest

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Workload
from planner.choose import Answer, choose
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.pins import parse_pins
from planner.readers.runtimes import read_runtime
from planner.search import known


def _problem(cluster: str = "h100x16", runtime: str = "torchtitan") -> Problem:
    return Problem(
        model=read_model("llama3-8b"),
        cluster=read_cluster(cluster),
        workload=Workload(seq=4096, gbs=96),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )


def _facts(answer: Answer) -> list[object]:
    choice = answer.choice
    return [
        str(answer.layout(choice.chosen)),
        choice.objective_s,
        choice.bound_s,
        choice.simulated_s,
        choice.least_bound_s,
        [str(answer.layout(plan)) for plan in choice.near],
    ]


@pytest.mark.parametrize("cluster", ["h100x16", "h100x8+a100-80x8"])
def test_a_warm_search_answers_as_a_cold_one(cluster: str) -> None:
    asked = [parse_pins(text) for text in ("", "tp=2", "pp>=2", "mbs<=2, zero=2|3", "")]
    cold = []
    for pins in asked:
        known._problems.clear()
        cold.append(_facts(choose(_problem(cluster), pins=pins)))
    known._problems.clear()
    for pins, expected in zip(asked, cold, strict=True):
        assert _facts(choose(_problem(cluster), pins=pins)) == expected
    (kept,) = [one for one in known._problems.values() if one.best]
    assert kept.decided
    assert all(math.isfinite(best.objective_s) for _, best in kept.best.values())


def test_another_problem_knows_nothing_of_it() -> None:
    known._problems.clear()
    choose(_problem())
    other = known.known_of(_problem(runtime="torch"), 1.0, ("none",))
    assert not other.best
    for number in range(10):
        known.known_of(_problem(), float(number), ("none",))
    assert len(known._problems) == 8
