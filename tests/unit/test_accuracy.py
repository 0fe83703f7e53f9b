"""The accuracy benchmark: its arithmetic on small numbers, and no published run that turns from fits to does not fit unsaid."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import verdicts
from benchmarks.accuracy.coefficients import FITTED, SAME_AS, is_share
from benchmarks.accuracy.fit_published import Configuration, configurations, fit, linearised, own_names, priors
from benchmarks.accuracy.memory import capacity
from benchmarks.accuracy.pricing import Pricer, with_values, without
from benchmarks.accuracy.published import APART, CORRECTIONS, mended, read_published
from benchmarks.accuracy.scores import asked_widths, by_source, errors, macro, order
from benchmarks.accuracy.splits import Predicted, refitted
from cost_models.calibrations import shipped
from cost_models.records import Layout, Verdict
from planner.predict import simulated
from planner.readers.runs import digest_of, read_run
from tests.unit.test_runs import OLD, ROW


def configured(*changes: dict[str, str], source: str = "s", measured_s: float = 10.0) -> list[Configuration]:
    runs = [read_run(change, shipped()) for change in changes]
    return [
        Configuration(run=run, source=source, model=run.problem.model.name, ids=(str(index),), measured_s=measured_s)
        for index, run in enumerate(runs)
    ]


# Verdicts ----------------------------------------------------------------------------------------------------------------


def test_no_published_run_turns_unsaid(shared: Path):
    before, because, calibration = verdicts.expected()
    lines = verdicts.turned(before, verdicts.verdicts(shared / "published", shipped()))
    assert not lines, "\n".join([*lines, f"answers of {calibration}", verdicts.ADVICE])
    assert verdicts.in_changelog(because), f"CHANGELOG.md no longer says {because!r}"


def test_a_turned_row_is_seen():
    before = {"a.csv": {"r1": "ok", "r2": "no", "r3": "risky", "r4": "ok", "r5": "unanswered"}}
    after = {"a.csv": {"r1": "no", "r2": "risky", "r3": "ok", "r4": "unanswered", "r5": "no"}}
    assert verdicts.turned(before, after) == [
        "a.csv r1: ok -> no",
        "a.csv r2: no -> risky",
        "a.csv r4: ok -> unanswered",
    ]
    assert verdicts.turned(before, before) == []


def test_new_answers_need_a_word_in_the_changelog(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verdicts, "verdicts", lambda folder, calibration: {"memory.csv": {"r1": "ok"}})
    monkeypatch.setattr(verdicts, "EXPECTED", tmp_path / "verdicts.json")
    assert verdicts.main(["x", "--because", "no line says this"]) == 2
    assert not (tmp_path / "verdicts.json").exists()
    assert verdicts.main(["x", "--because", "By effect on the user."]) == 0
    assert verdicts.expected()[0] == {"memory.csv": {"r1": "ok"}}
    assert verdicts.main(["x"]) == 0
    monkeypatch.setattr(verdicts, "verdicts", lambda folder, calibration: {"memory.csv": {"r1": "no"}})
    assert verdicts.main(["x"]) == 1
    assert "memory.csv r1: ok -> no" in capsys.readouterr().out


# Scores ------------------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_ratio():
    assert errors([math.log(1.1), math.log(0.9), 0.0]) == {"n": 3, "median": 0.1, "p90": 0.1, "bias": 0.0}


def test_each_source_counts_once():
    small, large = configured(ROW, source="small"), configured(*[ROW] * 9, source="large")
    scored = by_source([*small, *large], [math.log(1.5), *[0.0] * 9])
    assert scored["macro"]["median"] == 0.25
    assert macro({}) == {}


def test_order_by_hand():
    scored = order([1.0, 2.0, 3.0, 3.05], [1.0, 3.0, 2.0, 4.0], [Layout()] * 4)
    assert scored["tau"] == pytest.approx((5 - 1) / 6)
    assert (scored["pairs_apart"], scored["pairs_right"]) == (5, 4)
    assert scored["regret_first"] == 0
    assert order([2.0, 1.0], [1.0, 2.0], [Layout()] * 2)["regret_first"] == 1.0
    assert order([2.0, 1.0], [1.0, 1.01], [Layout(pp=4), Layout()])["regret_first"] == 0.0
    assert order([2.0, 1.0], [1.0, 2.0], [Layout()] * 2)["regret_best_of_three"] == 0.0


def test_widths_asked_cover_four_of_five():
    ones = configured(*[ROW] * 10)
    logs = [0.01 * index for index in range(1, 11)]
    found = [
        Predicted(step_s=10 * math.exp(log), low_s=1, high_s=2, basis={"measured": 0, "calibrated": 1.0, "table": 0.0})
        for log in logs
    ]
    assert 0.075 <= asked_widths(ones, found)["calibrated"] <= 0.09


def test_capacity_questions_by_hand():
    class Row:
        def __init__(self, own: float, high: float):
            self.own_gib, self.own_high_gib, self.row = own, high, type("R", (), {"memory_gib": 100.0})()

    scored = capacity([Row(100, 104), Row(90, 93), Row(130, 140)])
    assert scored["3%"] == {
        "false_ok": pytest.approx(1 / 3, abs=1e-4),
        "false_no": pytest.approx(1 / 3, abs=1e-4),
        "risky": pytest.approx(1 / 6, abs=1e-4),
    }
    assert scored["25%"]["false_ok"] == 0
    assert Verdict.OK == "ok"


# Pricing and fitting -----------------------------------------------------------------------------------------------------


def test_a_run_is_priced_as_it_is_simulated():
    pricer = Pricer()
    for row in (ROW, OLD):
        run = read_run(row, shipped())
        assert pricer.step_s(run, shipped()) == pytest.approx(
            simulated(run.problem, pricer.decision(run)).simulation.step_s, rel=1e-9
        )


def test_only_what_is_read_is_priced_again():
    pricer, run = Pricer(), read_run(OLD, shipped())
    first = pricer.step_s(run, shipped())
    before = pricer.priced
    other = with_values(shipped(), {"matmul.efficiency.hopper.bf16": 0.1, "memory.margin": 9.0})
    assert pricer.step_s(run, other) == first
    assert pricer.priced == before
    assert pricer.step_s(run, with_values(shipped(), {"matmul.efficiency.ampere.fp16": 0.5})) > first


def test_a_missing_coefficient_gives_way_to_a_less_specific_one():
    pricer, run = Pricer(), read_run(OLD, shipped())
    assert "link.efficiency.nvlink3-jean-zay" in pricer.reads(run, shipped())
    assert "link.efficiency.nvlink3-jean-zay" not in pricer.reads(
        run, without(shipped(), ["link.efficiency.nvlink3-jean-zay"])
    )


def test_who_has_not_seen_a_group_does_not_have_what_it_alone_taught():
    ones = [*configured(OLD, source="old"), *configured(ROW, source="new")]
    own = own_names(Pricer(), ones, priors(shipped()), "old", lambda one: one.source)
    assert "link.efficiency.nvlink3-jean-zay" in own
    assert all(name.split(".")[-1] not in ("hopper", "megatron-bridge") for name in own)


def test_a_planted_efficiency_is_found_again():
    rows = [ROW | {"mbs": mbs, "seq": seq} for mbs in ("1", "2") for seq in ("4096", "8192")]
    pricer, truth = Pricer(), with_values(shipped(), {"matmul.efficiency.hopper.bf16": 0.75})
    ones = [
        replace(one, measured_s=pricer.step_s(one.run, truth), ids=(str(index),))
        for index, one in enumerate(configured(*rows))
    ]
    linear = linearised(pricer, ones, shipped())
    found = fit(pricer, linear, priors(shipped()))
    was = abs(math.log(shipped().coefficients["matmul.efficiency.hopper.bf16"].value / 0.75))
    assert abs(math.log(found.coefficients["matmul.efficiency.hopper.bf16"].value / 0.75)) < 0.75 * was
    assert (
        found.coefficients["matmul.efficiency.ampere.bf16"].value
        == priors(shipped()).coefficients["matmul.efficiency.ampere.bf16"].value
    )
    assert found.coefficients["matmul.efficiency.hopper.bf16"].rows == 4
    assert found.coefficients["matmul.efficiency.ampere.bf16"].rows == 0
    errors_left = pricer.logs([one.run for one in ones], found) - np.log([one.measured_s for one in ones])
    assert np.max(np.abs(errors_left)) < 0.05


def test_a_users_few_rows_bring_predictions_nearer():
    rows = [ROW | {"gbs": gbs} for gbs in ("128", "256", "512")]
    pricer, truth = Pricer(), with_values(shipped(), {"matmul.efficiency.hopper.bf16": 0.7})
    ones = [replace(one, measured_s=pricer.step_s(one.run, truth)) for one in configured(*rows)]
    learnt = refitted(pricer, ones[:2], shipped())
    unseen = ones[2]
    was, now = (abs(math.log(pricer.step_s(unseen.run, c) / unseen.measured_s)) for c in (shipped(), learnt))
    assert now < 0.5 * was
    assert all(one.value <= 1 for name, one in learnt.coefficients.items() if name.startswith("overlap"))


def test_shares_are_told_from_other_coefficients():
    assert is_share("overlap.tp")
    assert is_share("matmul.efficiency.hopper.fp8")
    assert not is_share("matmul.efficiency.blackwell.gb300.fp8")
    assert not is_share("logits.bytes")
    assert set(SAME_AS.values()) <= set(FITTED)


def test_the_shipped_calibration_knows_what_it_was_fitted_on(shared):
    table = read_published(shared / "published" / "throughput.csv", shipped())
    known = set(shipped().fitted_on)
    assert {one.run.digest for one in configurations(table.rows)} == known
    assert digest_of(ROW) not in known


# Rows ----------------------------------------------------------------------------------------------------------------------


def test_rows_that_are_mended_or_kept_apart_are_in_the_tables(shared):
    table = read_published(shared / "published" / "throughput.csv", shipped())
    assert set(table.apart) == {one for group in APART for one in group.ids}
    assert {one for group in CORRECTIONS for one in group.ids} <= set(table.corrected)
    assert len(table.rows) + len(table.apart) + len(table.refused) == sum(table.sources.values())


def test_mending_changes_inputs_alone():
    row = ROW | {"id": "r1014", "flags": "", "note": "", "step_s_best": "4.36"}
    changed, told = mended(row)
    assert {name for name in row if row[name] != changed[name]} == {"vpp"}
    assert "states 12" in told or "state 12" in told
    assert mended(row | {"id": "r1"})[1] == ""
