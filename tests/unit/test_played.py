"""Schedules without a formula: their plans are played, searched by their simulated time, and answer like all others."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.calibrations import shipped
from cost_models.records import Precision, Schedule, Verdict, Workload, normalised
from planner.choose import choose
from planner.decisions import decision_of, decision_of_layout
from planner.explain import why_not
from planner.plan import make_plan
from planner.predict import predict
from planner.readers.pins import parse_pins
from planner.readers.requests import complete, read_request
from planner.readers.runtimes import read_runtime
from planner.report.explain_text import why_not_text
from planner.search.best_first import search
from planner.search.exhaustive import flaw
from planner.search.incumbent import least_objective
from planner.search.played import is_played, kinds_with, split_counts
from planner.search.priced import Priced
from planner.search.walk import chunk_counts
from planner.what_if.feasible import space_of
from planner.what_if.neighbours import neighbours
from tests.unit.cost_cases import MODEL, cluster, problem

TITAN = read_runtime("torchtitan")


def asked(**changes):
    workload = Workload(seq=2048, gbs=32, precision=Precision.BF16)
    return problem(runtime=TITAN, cluster=cluster(1), workload=workload, **changes)


PLAYED = "zbv|dualpipev|interleavedzb|loopedbfs"


def _predictions(priced: Priced, index: int) -> list:
    """What `predict` says of every split and kind of recompute of a cell."""
    question, found = priced.problem, []
    schedule = priced.layout(index).schedule
    for kind in kinds_with(schedule, question.runtime, priced.space.recompute_kinds):
        found.append(predict(question, decision_of_layout(question, priced.space.cells.layout(index, kind))))
    return found


@pytest.mark.parametrize("num_layers", [4, 7])
def test_the_least_time_of_each_cell_is_the_least_that_predict_gives(num_layers):
    """J of a cell against `predict` on each of its plans, written out; its bounds stand below."""
    question = asked(model=replace(MODEL, num_layers=num_layers))
    priced = Priced.of(question, space_of(question, parse_pins(f"pp=2|4, tp<=2, mbs=1, zero=2|3, schedule={PLAYED}")))
    kinds = set()
    for index in range(len(priced.space)):
        layout = priced.layout(index)
        assert is_played(layout.schedule, num_layers, layout.pp, layout.vpp)
        found = least_objective(priced.cell(index, np.inf))
        fitting = [one.step_s for one in _predictions(priced, index) if one.verdict is Verdict.OK]
        if found is None:
            assert not fitting
            continue
        assert found.objective_s == pytest.approx(min(fitting), rel=1e-9)
        every = np.array([index])
        assert priced.objective_bounds_s[index] <= found.objective_s * (1 + 1e-9)
        assert priced.bounds_below(found.objective_s * (1 + 1e-9), every)[0] <= found.objective_s * (1 + 1e-9)
        assert priced.simulated_bounds_below(found.objective_s, every)[0] <= found.objective_s * (1 + 1e-9)
        assert priced.cell(index, found.objective_s * 0.999).played is None
        kinds.add(layout.schedule)
    assert len(kinds) == 4


def test_memory_of_a_played_plan_is_that_of_its_prediction():
    question = asked()
    priced = Priced.of(question, space_of(question, parse_pins(f"pp=4, tp=1, mbs=1, schedule={PLAYED}")))
    for index in range(len(priced.space)):
        whole = priced.cell(index, np.inf)
        best = least_objective(whole)
        assert best is not None
        assert flaw(whole, best.picks.tolist(), best.objective_s) is None
        tight = replace(
            priced, memory_limit_bytes=0.999 * 2**30 * min(p.memory_gib_max for p in _predictions(priced, index))
        )
        assert least_objective(tight.cell(index, np.inf)) is None
        assert not tight.fits(index)


def test_the_search_chooses_the_fastest_of_all_schedules():
    question = asked()
    space = space_of(question, parse_pins("pp=4, tp=1, dp_shard=2, zero=2, mbs=1"))
    assert {Schedule(one) for one in space.cells.schedule.tolist()} >= {
        Schedule.ZBV,
        Schedule.LOOPED_BFS,
        Schedule.ONE_F_ONE_B,
    }
    priced = Priced.of(question, space)
    choice = search(priced)
    best = [least_objective(priced.cell(index, np.inf)) for index in range(len(space))]
    assert choice.objective_s == pytest.approx(min(one.objective_s for one in best if one is not None), rel=1e-9)
    predicted = predict(question, decision_of(question, choice.chosen))
    assert predicted.step_s == pytest.approx(choice.simulated_s, rel=1e-9)


def test_layers_that_do_not_divide_have_two_splits():
    assert split_counts(8, 4) == [[3, 2, 2, 3]]
    assert split_counts(7, 4) == [[2, 2, 2, 3], [2, 2, 3, 2]] or len(split_counts(7, 4)) == 2
    assert all(sum(blocks) == 9 for blocks in split_counts(7, 4))


def test_chunks_by_schedule():
    assert chunk_counts(Schedule.ZBV, 30, 4) == [2]
    assert chunk_counts(Schedule.LOOPED_BFS, 32, 4) == [2, 4, 8]
    assert chunk_counts(Schedule.GPIPE, 32, 4) == [1]


@pytest.fixture(scope="module")
def planned():
    request = {
        "model": {
            "num_layers": 16,
            "hidden": 2048,
            "ffn": 5632,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "vocab": 32000,
        },
        "cluster": "h100x8",
        "workload": {"seq": 2048, "gbs": 32, "precision": "bf16"},
        "runtime": "torchtitan",
        "pin": "pp=4",
    }
    return make_plan(complete(read_request(request)), calibration=shipped())


@pytest.mark.parametrize(
    "text", ["pp4 sched=zbv", "pp4 vpp2 sched=dualpipev", "pp4 vpp2 sched=interleavedzb", "pp4 sched=loopedbfs"]
)
def test_why_not_answers_with_numbers(planned, text):
    answer = why_not(planned, text)
    assert answer["answer"] in ("slower", "tie", "faster", "chosen")
    assert answer["best"]["step_s"] > 0
    assert sum(part["other_s"] for part in answer["parts"]) == pytest.approx(answer["best"]["step_s"])
    assert text.split("sched=")[1] in why_not_text(answer)


def test_why_not_of_an_illegal_schedule_names_the_law_alone(planned):
    answer = why_not(planned, "pp4 sched=vmin")
    assert answer["answer"] == "illegal"
    assert "SCHEDULE_VPP" not in {reason["code"] for reason in answer["reasons"]}
    assert "SCHEDULE_UNSUPPORTED" in {reason["code"] for reason in answer["reasons"]}


def test_a_change_of_schedule_is_among_the_neighbours():
    found = neighbours(asked(), normalised(pp=4, tp=2, mbs=1))
    schedules = {one.layout.schedule for one in found}
    assert schedules >= {Schedule.ZBV, Schedule.DUALPIPEV, Schedule.INTERLEAVED_ZB, Schedule.INTERLEAVED}


def test_todays_layout_with_such_a_schedule_is_a_candidate():
    today = normalised(pp=4, tp=2, vpp=2, schedule=Schedule.ZBV)
    answer = choose(asked(model=replace(MODEL, num_layers=8)), current=today)
    assert answer.current is not None
    assert answer.current.simulated_s >= answer.choice.simulated_s
