"""Schedules that the search does not open are priced for who names them: why not, what would help, today's layout."""

from dataclasses import replace

import pytest

from cost_models.calibrations import shipped
from cost_models.records import Precision, Schedule, Verdict, Workload, normalised
from planner.choose import choose
from planner.explain import why_not
from planner.neighbours import neighbours
from planner.plan import make_plan
from planner.predict import predict
from planner.readers.pins import parse_pins, pins_of_layout
from planner.readers.requests import complete, read_request
from planner.readers.runtimes import read_runtime
from planner.report.explain_text import why_not_text
from planner.unsearched import best_unsearched, chunk_counts
from tests.unit.cost_cases import MODEL, cluster, problem

TITAN = read_runtime("torchtitan")


def asked(**changes):
    workload = Workload(seq=2048, gbs=32, precision=Precision.BF16)
    return problem(runtime=TITAN, cluster=cluster(1), workload=workload, **changes)


def test_the_fastest_layout_with_a_named_schedule_is_found():
    found = best_unsearched(asked(), pins_of_layout("pp4 sched=zbv"), 8)
    assert found is not None
    layout = found.layout
    assert (layout.pp, layout.vpp, layout.schedule, layout.world) == (4, 2, Schedule.ZBV, 8)
    assert predict(asked(), found).verdict is Verdict.OK
    one_dp = best_unsearched(asked(), pins_of_layout("pp4 tp1 sched=zbv mbs1"), 8)
    assert one_dp is not None
    assert (one_dp.layout.dp, one_dp.layout.zero, one_dp.layout.mbs) == (
        2,
        2,
        1,
    )  # the law of split backwards with sharding
    assert predict(asked(), found).step_s <= predict(asked(), one_dp).step_s


@pytest.mark.parametrize("text", ["pp4 sched=1f1b", "pp4", "pp1 sched=zbv", "pp4 vpp3 sched=zbv", "pp4 sched=vmin"])
def test_nothing_is_found_where_the_schedule_is_searched_or_not_the_runtimes_or_illegal(text):
    assert best_unsearched(asked(), pins_of_layout(text), 8) is None


def test_any_of_several_named_schedules():
    found = best_unsearched(asked(), parse_pins("pp=4, schedule=zbv|loopedbfs"), 8)
    assert found is not None
    assert found.layout.schedule in (Schedule.ZBV, Schedule.LOOPED_BFS)


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
    assert answer["answer"] in ("slower", "tie", "faster")
    assert answer["best"]["step_s"] > 0
    assert sum(part["other_s"] for part in answer["parts"]) == pytest.approx(answer["best"]["step_s"])
    assert text.split("sched=")[1] in why_not_text(answer)


def test_why_not_says_faster_where_it_is(planned):
    lame = replace(planned.predicted, step_s=10 * planned.predicted.step_s)
    answer = why_not(replace(planned, predicted=lame), "pp4 sched=zbv")
    assert answer["answer"] == "faster"
    assert "priced, but not searched" in why_not_text(answer)


def test_why_not_of_an_illegal_schedule_names_the_law_alone(planned):
    answer = why_not(planned, "pp4 sched=vmin")
    assert answer["answer"] == "illegal"
    assert "SCHEDULE_VPP" not in {reason["code"] for reason in answer["reasons"]}
    assert "SCHEDULE_UNSUPPORTED" in {reason["code"] for reason in answer["reasons"]}


def test_a_change_of_schedule_is_among_the_neighbours():
    found = neighbours(asked(), normalised(pp=4, tp=2, mbs=1))
    schedules = {one.layout.schedule for one in found}
    assert schedules >= {Schedule.ZBV, Schedule.DUALPIPEV, Schedule.INTERLEAVED_ZB, Schedule.INTERLEAVED}


def test_todays_layout_with_such_a_schedule_is_no_candidate_and_says_why():
    answer = choose(
        asked(model=replace(MODEL, num_layers=8)), current=normalised(pp=4, tp=2, vpp=2, schedule=Schedule.ZBV)
    )
    assert answer.current is None
    assert "zbv is priced (`predict`), but not searched" in answer.current_note
