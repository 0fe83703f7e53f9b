"""Promised beside measured: what stands in one row means the same on both sides."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from records_for_tests import DECISION, MEASUREMENT, PREDICTION, plan

from cost_models.calibrations import shipped
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    MeasuredMemory,
    Measurement,
    Measurements,
    MemoryKind,
    Plan,
    Precision,
    Provenance,
    Workload,
    normalised,
    save,
)
from planner.compare import (
    Run,
    compare,
    fitted,
    fitted_on,
    measured_phases,
    predicted_phases,
    promise_with,
    ranking,
    read_measurements,
)
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.predict import predict
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.runtimes import read_runtime
from planner.report.tables import comparison_table, layouts_table, order_text, percent, seconds, table

GIB = 2**30


def run(phase: str, *samples: float, **fields: object) -> Measurement:
    values = {"memory": None, "rank_class": "stage 0", **fields}
    return replace(MEASUREMENT, key=phase, phase=phase, samples_s=samples, **values)  # type: ignore[arg-type]


def measured(*runs: Measurement) -> Measurements:
    return Measurements(measurements=runs)


def test_a_step_inside_and_outside_its_interval() -> None:
    inside = compare(plan(), measured(run("step", 4.0, 4.2, 4.4)))["rows"][0]
    outside = compare(plan(), measured(run("step", 5.0)))["rows"][0]
    assert (inside["inside"], outside["inside"]) == (True, False)
    assert inside["error"] == pytest.approx(4.0 / 4.2 - 1)
    assert inside["measured_low_s"] < inside["measured_s"] < inside["measured_high_s"]


def test_the_slowest_stage_of_each_step_counts_and_clipping_is_part_of_the_rest() -> None:
    phases = measured_phases(
        [
            run("optimizer", 1.0, 3.0, rank_class="stage 0"),
            run("optimizer", 2.0, 2.0, rank_class="stage 1"),
            run("clip", 0.25, 0.5),
            run("reduce", 0.5, 0.5),
        ]
    )
    assert phases == {"optimizer": (2.0, 3.0), "other": (0.75, 1.0)}


def test_phases_of_a_plan_without_a_pipeline_add_up_to_the_step() -> None:
    problem = real_problem()
    decision = decision_of_layout(problem, normalised(dp=8, zero=2, mbs=2))
    predicted = predict(problem, decision)
    phases = predicted_phases(predicted, decision.num_micro_batches)
    assert sum(seconds for phase, seconds in phases.items() if phase != "step") == pytest.approx(predicted.step_s)


def test_phases_of_a_pipeline_add_up_to_the_step() -> None:
    problem = real_problem()
    decision = decision_of_layout(problem, normalised(dp=2, pp=4, mbs=1))
    predicted = predict(problem, decision)
    phases = predicted_phases(predicted, decision.num_micro_batches)
    assert set(phases) == {"step", "pipeline", "optimizer", "other"}
    assert sum(seconds for phase, seconds in phases.items() if phase != "step") == pytest.approx(predicted.step_s)


def test_memory_of_another_kind_is_not_compared() -> None:
    peak = MeasuredMemory(kind=MemoryKind.RSS, peak_bytes=GIB)
    document = compare(plan(), measured(run("step", 4.0, memory=peak, rank_class="all")))
    assert document["memory"] == []
    assert any("rss" in reason and "allocated" in reason for reason in document["not_compared"])


def test_memory_of_the_same_kind_is() -> None:
    peak = MeasuredMemory(kind=MemoryKind.ALLOCATED, peak_bytes=GIB * 55 // 100)
    row = compare(plan(), measured(run("step", 4.0, memory=peak, rank_class="all")))["memory"][0]
    assert row["inside"] is True
    assert row["error"] == pytest.approx(0.5 / 0.55 - 1, abs=1e-6)


def test_a_phase_that_nobody_promised_is_listed_with_the_reason() -> None:
    document = compare(plan(), measured(run("step", 4.0), run("evaluation", 1.0)))
    assert [row["phase"] for row in document["rows"]] == ["step"]
    assert any(reason.startswith("evaluation:") for reason in document["not_compared"])


def test_measurements_of_another_plan_are_refused() -> None:
    with pytest.raises(InputError, match=rf"nothing was measured of this plan \(decision {DECISION.sha256[:12]}"):
        compare(plan(), measured(run("step", 4.0, plan_sha256="f" * 64)))
    with pytest.raises(InputError, match="no run at all"):
        compare(plan(), measured())


def test_an_edited_plan_promises_nothing() -> None:
    with pytest.raises(InputError, match="promises nothing"):
        compare(plan(predicted=None, certificate=None), measured(run("step", 4.0)))


def test_files_are_read_in_order(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save(measured(run("step", value)), tmp_path / name)
    found = read_measurements([tmp_path / "a", tmp_path / "b"])
    assert [one.samples_s for one in found.measurements] == [(1.0,), (2.0,)]


# The next calibration --------------------------------------------------------------------------------------------------


def real_problem() -> Problem:
    cluster = read_cluster("h100x8")
    return Problem(
        model=read_model("llama3-8b"),
        cluster=cluster,
        workload=Workload(seq=2048, gbs=64, precision=Precision.BF16),
        runtime=read_runtime("torch"),
        calibration=shipped(),
        memory_kind=memory_kind_of(cluster),
    )


def real_plan(problem: Problem, **layout: int) -> Plan:
    decision = decision_of_layout(problem, normalised(**layout))  # type: ignore[arg-type]
    base = plan()
    return replace(
        base,
        request=replace(
            base.request,
            model=problem.model,
            cluster=problem.cluster,
            workload=problem.workload,
            runtime=problem.runtime,
        ),
        decision=decision,
        predicted=predict(problem, decision),
        alternatives=(),
        provenance=Provenance(
            decision_sha256=decision.sha256, meshwright_version="", calibration="shipped", versions={}
        ),
    )


def slower_runs(one: Plan, factor: float) -> tuple[Measurement, ...]:
    assert one.predicted is not None
    phases = predicted_phases(one.predicted, one.decision.num_micro_batches)
    return tuple(run(phase, factor * s, plan_sha256=one.decision.sha256) for phase, s in phases.items() if s > 0)


def test_a_refit_on_slower_runs_predicts_slower_also_where_it_was_not_measured() -> None:
    problem = real_problem()
    seen, unseen = real_plan(problem, tp=2, dp=4, mbs=1), real_plan(problem, tp=2, dp=4, mbs=2)
    found = fitted(seen, measured(*slower_runs(seen, 1.5)))
    refitted = replace(problem, calibration=found)
    assert seen.predicted is not None
    assert unseen.predicted is not None
    assert predict(refitted, seen.decision).step_s == pytest.approx(1.5 * seen.predicted.step_s, rel=0.05)
    assert predict(refitted, unseen.decision).step_s > 1.3 * unseen.predicted.step_s


def test_a_refit_on_what_was_promised_changes_no_prediction() -> None:
    problem = real_problem()
    one = real_plan(problem, tp=8, mbs=4)
    found = fitted_on([Run(plan=one, measured=slower_runs(one, 1.0))])
    assert one.predicted is not None
    assert predict(replace(problem, calibration=found), one.decision).step_s == pytest.approx(
        one.predicted.step_s, rel=1e-6
    )


def test_what_a_run_took_beside_what_is_counted_comes_back() -> None:
    """A run of a GiB more than is counted: predicted again, it takes what it took, in any number of refits."""
    one = real_plan(real_problem(), dp=8, mbs=1)
    assert one.predicted is not None
    took = int((one.predicted.memory_gib_max + 1) * GIB)
    peak = MeasuredMemory(kind=MemoryKind.ALLOCATED, peak_bytes=took)
    runs = tuple(
        replace(each, memory=peak, rank_class="all") if each.phase == "step" else each for each in slower_runs(one, 1.0)
    )
    once = fitted_on([Run(plan=one, measured=runs)])
    for found in (once, fitted_on([Run(plan=one, measured=runs)], once)):
        assert promise_with(one, found).memory_gib_max * GIB == pytest.approx(took, rel=1e-6)


# Order -----------------------------------------------------------------------------------------------------------------


def test_every_pair_agrees_ties_or_disagrees() -> None:
    promised = {"a": 1.0, "b": 1.03, "c": 2.0, "d": 3.0}
    order = ranking(promised, {"a": 1.2, "b": 1.1, "c": 3.5, "d": 3.0}, pairwise_error=0.05)
    assert order["ties"] == [("a", "b")]
    assert order["disagrees"] == [("c", "d")]
    assert len(order["agrees"]) == 4
    assert order["same_order"] is False
    assert "5 pairs" in order_text(order)


def test_ties_alone_promise_no_order() -> None:
    order = ranking({"a": 1.0, "b": 1.01}, {"a": 2.0, "b": 1.0}, pairwise_error=0.05)
    assert order["same_order"] is True
    assert "no order was promised" in order_text(order)


# Tables ----------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_comparison() -> None:
    text = comparison_table(compare(plan(), measured(run("step", 4.0, 4.2), run("evaluation", 1.0))))
    assert "3.5 s .. 4.5 s" in text
    assert "not compared:" in text
    assert "evaluation" in text


def test_the_table_of_layouts_marks_the_choice_and_tells_the_order() -> None:
    row = {
        "predicted_s": 1.0,
        "predicted_low_s": 0.9,
        "predicted_high_s": 1.1,
        "measured_s": 1.05,
        "measured_low_s": 1.0,
        "measured_high_s": 1.2,
        "error": 1.0 / 1.05 - 1,
        "predicted_memory_gib": 0.25,
        "measured_memory_gib": None,
    }
    rows = [{**row, "layout": "dp2 mbs1", "chosen": True}, {**row, "layout": "tp2 mbs1", "chosen": False}]
    order = ranking({"dp2 mbs1": 1.0, "tp2 mbs1": 2.0}, {"dp2 mbs1": 1.05, "tp2 mbs1": 2.0}, 0.05)
    text = layouts_table({"layouts": rows, "order": order})
    assert "* dp2 mbs1" in text
    assert "256 MiB" in text
    assert "the promised order is the measured one in all 1 pairs" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (123.4, "123 s"), (1234.0, "1234 s"), (0.00001, "0.01 ms")]
)
def test_seconds_have_three_figures(value: float, text: str) -> None:
    assert seconds(value) == text


def test_shares_are_signed() -> None:
    assert (percent(0.125), percent(-0.5), percent(None)) == ("+12%", "-50%", "-")


def test_columns_are_aligned() -> None:
    assert table(("a", "b"), [("x", "1"), ("long", "22")]).splitlines() == [
        "a      b",
        "----  --",
        "x      1",
        "long  22",
    ]


def test_the_prediction_used_here_is_as_assumed() -> None:
    assert (PREDICTION.step_s_low, PREDICTION.step_s, PREDICTION.step_s_high) == (3.5, 4.0, 4.5)


# Where it went wrong -----------------------------------------------------------------------------------------------


def parts_run(stage: str, **seconds: float) -> list[Measurement]:
    """A run's parts, each of two equal samples; `wait_tp__all_gather` is that wait, of 4 calls of 1 MiB each."""
    found = []
    for name, value in seconds.items():
        wait = name.startswith("wait_")
        key = "part/wait " + name.removeprefix("wait_").replace("__", "/") if wait else f"part/{name}"
        size = {"calls": 4, "bytes": 4 * 2**20} if wait else {}
        found.append(run(key, value, value, rank_class=stage, **size))
    return found


def whole_run(plan_: Plan, *parts: Measurement, step_s: float, optimizer_s: float) -> Measurements:
    step = run("step", step_s, step_s, rank_class="all")
    update = run("optimizer", optimizer_s, optimizer_s)
    return measured(*(replace(one, plan_sha256=plan_.decision.sha256) for one in (step, update, *parts)))


def test_the_stage_that_computes_longest_stands_beside_the_promise_and_its_parts_add_up() -> None:
    promise = replace(plan(), predicted=PREDICTION)
    parts = [*parts_run("stage 1", compute=0.1), *parts_run("stage 0", compute=2.0, bubble=0.5, wait_pp__p2p=0.5)]
    where = compare(promise, whole_run(promise, *parts, step_s=4.0, optimizer_s=0.25))["where"]
    assert where["stage"] == "stage 0"
    rows = {row["part"]: row["measured_s"] for row in where["parts"]}
    assert rows == pytest.approx(
        {"compute": 2.0, "communication": 0.0, "bubble": 0.5, "optimizer": 0.25, "other": 1.25}
    )
    assert where["collectives"] == []
    for row in where["parts"]:
        assert row["difference_s"] == pytest.approx(row["predicted_s"] - row["measured_s"])


def test_the_collective_that_was_waited_for_longest_beyond_its_promise_is_named() -> None:
    promise = real_plan(real_problem(), tp=2, dp=4, zero=2, mbs=2)
    parts = parts_run("stage 0", compute=0.001, wait_tp__all_gather=50.0, wait_dp_shard__reduce_scatter=80.0)
    document = compare(promise, whole_run(promise, *parts, step_s=140.0, optimizer_s=0.001))
    where = document["where"]
    assert [row["axis"] for row in where["collectives"]] == ["dp_shard", "tp"]
    assert all(0 < row["alone_s"] < row["measured_s"] for row in where["collectives"])
    assert re.fullmatch(
        r"communication: \d+ s less were promised than measured, mostly for reduce_scatter over dp_shard",
        where["largest"],
    )
    assert "stood still" in comparison_table(document)
    assert document["tokens_per_s_per_gpu"]["measured"] == pytest.approx(promise.decision.workload.tokens / 140.0 / 8)


def test_a_run_that_does_not_say_its_parts_has_no_such_table() -> None:
    document = compare(plan(), measured(run("step", 4.0)))
    assert document["where"] is None
    assert "stood still" not in comparison_table(document)


def test_memory_by_phase_stands_beside_the_promise_of_that_phase() -> None:
    stage = PREDICTION.stages[0]
    memory = MeasuredMemory(kind=MemoryKind(PREDICTION.memory_kind), peak_bytes=3 * GIB)
    phase = next(iter(stage.phase_memory_bytes))
    found = compare(plan(), measured(run("step", 4.0), run(f"memory/{phase}", 1.0, memory=memory)))
    (row,) = found["memory_by_phase"]
    assert row["predicted_gib"] == pytest.approx(stage.phase_memory_bytes[phase] / GIB)
    assert row["measured_gib"] == 3
    assert "memory by phase" in comparison_table(found)
