"""The choice on real models: what it is compared with, and what is said when nothing fits."""

import math
from dataclasses import replace

import pytest

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Schedule, Workload, normalised
from planner.choose import Answer, choose
from planner.errors import InfeasibleError
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.pins import parse_pins
from planner.readers.runtimes import read_runtime
from planner.search.best_first import DELTA, _Search, candidate
from planner.search.exhaustive import flaw
from planner.search.priced import Priced
from planner.solver import SolverName
from planner.what_if.feasible import space_of


def problem(model: str, cluster: str, *, gbs: int = 64, seq: int = 8192) -> Problem:
    return Problem(
        model=read_model(model),
        cluster=read_cluster(cluster),
        workload=Workload(gbs=gbs, seq=seq),
        runtime=read_runtime("torch"),
        calibration=shipped(),
    )


@pytest.fixture(scope="module")
def answer() -> Answer:
    return choose(problem("llama3-8b", "h100x16"), current=normalised(tp=8, pp=2, mbs=1, recompute="full"))


def test_the_choice_is_proved_and_whole(answer: Answer) -> None:
    choice = answer.choice
    assert choice.status == "optimal"
    assert choice.gap_objective == pytest.approx(0.0, abs=1e-6)
    assert 0 <= choice.gap_simulated < 0.5
    assert choice.bound_s <= choice.objective_s <= choice.chosen.objective_s * (1 + 1e-9)
    assert 0 < len(choice.cells) < len(answer.priced.space) / 10
    assert flaw(choice.chosen.cell, choice.chosen.picks.tolist(), choice.chosen.objective_s) is None
    stages = answer.stages(choice.chosen)
    assert stages[0].blocks[0] == 0
    assert stages[-1].blocks[1] == answer.problem.model.num_blocks - 1
    assert sum(sum(stage.recompute.values()) for stage in stages) == answer.problem.model.num_layers


def test_today_and_the_handbook_are_never_faster(answer: Answer) -> None:
    for other in (answer.current, answer.baseline):
        assert other is not None
        assert other.simulated_s >= answer.choice.simulated_s
    assert answer.current is not None
    assert answer.layout(answer.current).recompute == "full"
    assert answer.current_note == ""
    baseline = answer.baseline
    assert baseline is not None
    layout = baseline.cell.layout
    assert (layout.mbs, layout.vpp, layout.schedule) == (1, 1, Schedule.ONE_F_ONE_B)
    assert layout.world == 16


def test_every_near_plan_is_within_delta(answer: Answer) -> None:
    for plan in answer.choice.near:
        assert plan.objective_s <= answer.choice.objective_s * (1 + DELTA) * (1 + 1e-9)
        assert plan.simulated_s >= plan.cell.lower_bound_s(plan.picks) * (1 - 1e-9)
        assert plan.simulated_s >= answer.choice.least_bound_s * (1 - 1e-9)


def test_delta_is_no_less_than_what_j_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.search.best_first.MOST_SIMULATED", 10_000)
    # every cell within half of J*, of all schedules, with real prices
    question = problem("llama3-8b", "h100x16", gbs=32)
    priced = Priced.of(question, space_of(question, parse_pins("zero!=3")))
    opened = _Search(space=priced, delta=0.5, deadline=math.inf, solver=SolverName.HIGHS)
    opened.open_cells()
    missed = {}
    for index, optimum in opened.optima.items():
        plan = candidate(opened.opened[index], optimum.picks, optimum.objective_s)
        missed[str(plan.cell.layout)] = abs(plan.simulated_s / plan.objective_s - 1)
    assert len(missed) > 50
    assert max(missed.values()) <= DELTA, max(missed, key=missed.__getitem__)


def test_pins_hold() -> None:
    pinned = choose(problem("llama3-8b", "h100x16"), pins=parse_pins("tp=2, pp=4, recompute=full"))
    layout = pinned.layout(pinned.choice.chosen)
    assert (layout.tp, layout.pp, layout.recompute) == (2, 4, "full")
    assert pinned.baseline is not None
    assert pinned.baseline.simulated_s > 0


def test_a_layout_of_today_that_does_not_fit_says_so() -> None:
    answer = choose(problem("llama3-8b", "h100x8", gbs=8), current=normalised(dp=8, mbs=1))
    assert answer.current is None
    assert "does not fit" in answer.current_note


def test_today_outside_the_pins_is_shown_but_not_chosen() -> None:
    answer = choose(problem("llama3-8b", "h100x16"), pins=parse_pins("tp=8"), current=normalised(dp=16, zero=3, mbs=1))
    assert answer.current is not None
    assert answer.current.simulated_s < answer.choice.simulated_s
    assert answer.layout(answer.choice.chosen).tp == 8


def test_nothing_fits_names_changes_that_do() -> None:
    question = problem("llama3-70b", "h100x8")
    with pytest.raises(InfeasibleError, match="fits on 8 x h100 under no layout") as told:
        choose(question)
    words = "\n".join(told.value.relaxations)
    assert "16 GPUs of this kind" in words
    assert "GiB usable" in words
    cluster = question.cluster
    bigger = replace(cluster, pools=(replace(cluster.pools[0], num_nodes=2),))
    assert choose(replace(question, cluster=bigger)).choice.simulated_s > 0


def test_a_pin_that_makes_it_impossible_is_named() -> None:
    with pytest.raises(InfeasibleError, match="without the pin zero=0"):
        choose(problem("llama3-70b", "h100x16"), pins=parse_pins("zero=0, pp=1, recompute=full"))


@pytest.mark.parametrize("num_gpus", [3, 5, 6, 7, 12])
def test_any_number_of_gpus(num_gpus: int) -> None:
    found = choose(problem("llama3-8b", "h100x7" if num_gpus < 8 else "h100x16", gbs=60), worlds=(num_gpus,))
    assert found.layout(found.choice.chosen).world == num_gpus
