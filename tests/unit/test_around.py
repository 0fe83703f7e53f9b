"""What stands around a plan: its neighbours are predictions, what relaxing gives is solved anew, ties are ties."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_questions import hold, with_memory

from cost_models.calibrations import shipped
from cost_models.records import Plan, Verdict, parse_layout, save
from executor.cli import main
from planner.decisions import decision_of_layout, refuse_illegal
from planner.errors import InfeasibleError, InputError
from planner.explain import problem_of_plan, why_not
from planner.plan import make_plan
from planner.predict import predict
from planner.readers.pins import pins_of_layout
from planner.readers.requests import CompleteRequest, complete, read_request
from planner.report.around_text import binds_text, neighbours_text
from planner.report.explain_text import why_not_text
from planner.report.plan_text import plan_text
from planner.report.words import WIDTH
from planner.what_if.around import PARTS, around
from planner.what_if.what_binds import what_binds

SMALL = {"num_layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50304}


def request(**changed: Any) -> CompleteRequest:
    base = {"model": "llama3-8b", "cluster": "h100x16", "workload": {"seq": 4096, "gbs": 64}}
    return complete(read_request(base | changed))


def plan_of(asked: CompleteRequest) -> Plan:
    return make_plan(asked, calibration=shipped(), version="test")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(request())


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return plan_of(request(pin="tp=8, pp=2"))


@pytest.fixture(scope="module")
def tight() -> Plan:
    """So little memory that stages recompute a part of their layers."""
    asked = request(cluster="h100x8", workload={"seq": 8192, "gbs": 16}, pin="tp=1")
    made = plan_of(replace(asked, cluster=with_memory(asked.cluster, 46)))
    assert made.decision.layout.recompute == "stages"
    return made


# Neighbours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["plan", "pinned", "tight"])
def test_every_neighbour_is_a_prediction_with_its_true_reason(which: str, request: pytest.FixtureRequest) -> None:
    made: Plan = request.getfixturevalue(which)
    problem, chosen = problem_of_plan(made), made.predicted
    assert chosen is not None
    document = around(made)
    assert len(document["neighbours"]) > 10
    for one in document["neighbours"]:
        predicted = predict(problem, decision_of_layout(problem, parse_layout(one["layout"])))
        assert (one["step_s"], one["memory_gib_max"], one["verdict"]) == (
            predicted.step_s,
            predicted.memory_gib_max,
            predicted.verdict,
        )
        assert one["against"] == pytest.approx(predicted.step_s / chosen.step_s - 1)
        assert (one["answer"] in ("risky", "does not fit")) == (predicted.verdict is not Verdict.OK)
        if one["answer"] == "does not fit":
            over = predicted.memory_gib_max - predicted.memory_gib_usable
            assert one["reason"].startswith(f"{over:.1f} GiB too many on stage ")
        elif one["answer"] == "risky":
            assert one["reason"].startswith(f"up to {predicted.memory_gib_high - predicted.memory_gib_usable:.1f} GiB")
        else:
            tie = 1 / (1 + chosen.pairwise_error) <= predicted.step_s / chosen.step_s <= 1 + chosen.pairwise_error
            assert (one["answer"] == "tie") == tie
            if predicted.step_s > chosen.step_s:
                most = max(
                    PARTS, key=lambda part: getattr(predicted.parts, PARTS[part]) - getattr(chosen.parts, PARTS[part])
                )
                assert one["reason"].startswith(f"{most} +")


def test_neighbours_differ_by_one_choice_and_the_dp_that_follows(plan: Plan) -> None:
    mine = plan.decision.layout
    for one in around(plan)["neighbours"]:
        other = parse_layout(one["layout"])
        differs = {
            name
            for name in ("tp", "pp", "cp", "mbs", "zero", "recompute", "schedule", "vpp")
            if getattr(mine, name) != getattr(other, name)
        }
        if not differs:
            assert (mine.dp_shard, mine.dp_replicate) != (other.dp_shard, other.dp_replicate)
        elif differs != {"schedule", "vpp"}:
            assert len(differs - {"schedule", "vpp"} or differs) == 1, one["change"]
        assert other.world == mine.world


def test_a_plan_whose_stages_differ_has_the_best_of_each_kind(tight: Plan) -> None:
    document = around(tight)
    changes = [one["change"] for one in document["neighbours"]]
    assert {"recompute stages -> none", "recompute stages -> full"} <= set(changes)
    assert len(changes) == len(set(changes))


def test_what_is_refused_breaks_the_law_that_is_named() -> None:
    made = plan_of(request(model=SMALL, workload={"seq": 1024, "gbs": 48}, pin="tp=1"))
    document = around(made)
    assert document["refused"]
    for one in document["refused"]:
        if one["code"] != "PRICE":
            with pytest.raises(InputError, match=one["code"]):
                refuse_illegal(problem_of_plan(made), parse_layout(one["layout"]))


def test_neighbours_against_the_pins_say_so(pinned: Plan) -> None:
    for one in around(pinned)["neighbours"]:
        layout = parse_layout(one["layout"])
        assert one["breaks_pins"] == [pin for pin in ("tp=8", "pp=2") if getattr(layout, pin[:2]) != int(pin[3:])]
    assert "(against the pin tp=8)" in " ".join(neighbours_text(around(pinned)).split())


@pytest.fixture(scope="module")
def binding(plan: Plan, pinned: Plan) -> dict[str, Any]:
    return {"plan": what_binds(plan), "pinned": what_binds(pinned)}


# What binds -------------------------------------------------------------------------------------------------------------


def test_every_relaxation_is_solved_again(pinned: Plan, binding: dict[str, Any]) -> None:
    document = binding["pinned"]
    assert pinned.predicted is not None
    mine = pinned.decision.workload.tokens / pinned.predicted.step_s
    asked = request(pin="tp=8, pp=2")
    device_gib = asked.cluster.pools[0].kind.device.memory_bytes / 2**30
    for one in document["relaxed"]:
        changed = asked
        if one["limit"] == "memory":
            changed = replace(asked, cluster=with_memory(asked.cluster, device_gib * one["factor"]))
        elif one["limit"] == "batch":
            changed = replace(asked, workload=replace(asked.workload, gbs=64 * one["factor"]))
        elif one["limit"] == "pin":
            changed = replace(asked, pin={"tp=8": "pp=2", "pp=2": "tp=8"}[one["change"].split()[-1]])
        else:
            continue
        again = plan_of(changed).predicted
        assert again is not None
        least = again.step_s if one["limit"] == "batch" else min(again.step_s, pinned.predicted.step_s)
        assert one["step_s"] == pytest.approx(least, rel=1e-9)
        assert one["gain"] == pytest.approx(changed.workload.tokens / one["step_s"] / mine - 1)
        assert one["within_error"] == (one["gain"] <= document["pairwise_error"])
    assert "pin" in document["binds"]
    assert "links in a node" in document["binds"]


def test_more_of_anything_is_never_worse(binding: dict[str, Any]) -> None:
    gains: dict[str, list[float]] = {}
    for one in binding["plan"]["relaxed"]:
        if one["limit"] != "batch":
            gains.setdefault(one["limit"], []).append(one["gain"])
    assert min(map(min, gains.values())) >= -1e-12
    assert gains["memory"] == sorted(gains["memory"])
    assert set(gains) == {"memory", "compute", "links in a node", "links between nodes"}


def test_where_memory_binds_more_of_it_gains(tight: Plan) -> None:
    document = what_binds(tight)
    assert "memory" in document["binds"]
    assert document["memory"]["left_gib"] < 2
    text = binds_text(document)
    assert "+100% memory in each GPU (92 GiB)" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_parts_sum_to_the_step(binding: dict[str, Any]) -> None:
    document = binding["plan"]
    assert sum(one["share"] for one in document["parts"]) == pytest.approx(1.0)


# Why not ----------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_names_the_place_and_changes_that_are_solved_again(plan: Plan) -> None:
    answer = why_not(plan, "tp1 pp1 zero0")
    assert answer["answer"] == "does not fit"
    memory = answer["memory"]
    assert memory["ranks"] == [0, 15]
    assert memory["over_gib"] == pytest.approx(memory["expected_gib"] - memory["usable_gib"])
    problem = problem_of_plan(plan)
    found = re.search(r"\((pp.*)\)$", answer["smallest_change"])
    assert found is not None
    assert predict(problem, decision_of_layout(problem, parse_layout(found[1]))).verdict is Verdict.OK
    assert {change["kind"] for change in answer["changes"]} >= {"without_pin", "device_memory_gib"}
    for change in answer["changes"]:
        hold((problem, pins_of_layout("tp1 pp1 zero0"), (16,)), change)
    assert "(ranks 0..15)" in why_not_text(answer)


def test_where_no_single_change_of_the_layout_is_enough_what_else_would_do_is_told() -> None:
    made = plan_of(request(model="llama3-70b", cluster="h100x64"))
    answer = why_not(made, "tp1 pp1 zero0 mbs1 rc=none")
    assert answer["answer"] == "does not fit"
    assert answer["smallest_change"]
    for change in answer["changes"]:
        hold((problem_of_plan(made), pins_of_layout("tp1 pp1 zero0 mbs1 rc=none"), (64,)), change)


def test_what_the_pins_kept_out_may_be_faster_and_says_why(pinned: Plan) -> None:
    answer = why_not(pinned, "tp1")
    assert answer["answer"] == "faster"
    assert ("PIN", "the plan was asked for with the pin tp=8, which excludes it") in [
        (reason["code"], reason["message"]) for reason in answer["reasons"]
    ]
    assert answer["best"]["step_s"] < answer["chosen"]["step_s"]


def test_a_slower_layout_is_slower_by_its_parts(plan: Plan) -> None:
    answer = why_not(plan, "tp8")
    assert answer["answer"] == "slower"
    whole = sum(part["other_s"] - part["chosen_s"] for part in answer["parts"])
    assert whole == pytest.approx(answer["best"]["step_s"] - answer["chosen"]["step_s"])


def test_a_schedule_is_asked_for_with_a_pipeline(plan: Plan) -> None:
    assert plan.decision.layout.pp == 1
    assert parse_layout(why_not(plan, "sched=gpipe")["best"]["layout"]).pp > 1


# Ties -------------------------------------------------------------------------------------------------------------------


def test_alternatives_within_the_models_error_are_ties(plan: Plan) -> None:
    assert plan.predicted is not None
    notes = set()
    for other in plan.alternatives:
        if other.note in ("tie", "slower"):
            within = abs(other.step_s / plan.predicted.step_s - 1) <= plan.predicted.pairwise_error
            assert (other.note == "tie") == within
            notes.add(other.note)
            assert re.search(
                rf"^{other.note} .*{re.escape(f'{other.step_s / plan.predicted.step_s - 1:+.1%}')}",
                plan_text(plan),
                re.MULTILINE,
            )
    assert "tie" in notes


@pytest.mark.parametrize("alternative", [True, False])
def test_todays_layout_is_kept_where_the_gain_is_below_the_error(plan: Plan, alternative: bool) -> None:
    ties = [other for other in plan.alternatives if other.note == "tie" and other.decision.layout.recompute != "stages"]
    today = str(ties[0].decision.layout) if alternative else "tp8 pp2 mbs1 rc=full"
    made = plan_of(request(layout=today))
    assert made.predicted is not None
    current = next(other for other in made.alternatives if other.note == "current")
    gain = current.step_s / made.predicted.step_s - 1
    assert gain >= 0
    assert (gain <= made.predicted.pairwise_error) == alternative
    assert ("keep yours" in plan_text(made)) == alternative


# The command line -------------------------------------------------------------------------------------------------------


def test_from_the_command_line(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    save(plan, path)
    for flag, key in (("--binds", "relaxed"), ("--neighbours", "neighbours")):
        assert main(["explain", str(path), flag, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[key]
    neighbour = around(plan)["neighbours"][0]
    arguments = ["--model", "llama3-8b", "--cluster", "h100x16", "--batch", "64", "--seq", "4096"]
    assert main(["predict", *arguments, "--layout", neighbour["layout"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["step_s"] == neighbour["step_s"]
    assert main(["explain", str(path), "--binds", "--neighbours"]) == 2
    assert "--binds and --neighbours: each is an answer of its own" in capsys.readouterr().err


def test_a_plan_edited_by_hand_has_nothing_around_it(plan: Plan) -> None:
    edited = replace(plan, predicted=None, certificate=None)
    for asked in (around, what_binds):
        with pytest.raises(InputError, match="promises nothing"):
            asked(edited)


def test_an_infeasible_request_names_its_changes_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama3-70b", "--cluster", "h100x8", "--batch", "64", "--seq", "4096", "--json"]
    assert main(arguments) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["kind"] == InfeasibleError.__name__
    assert {change["kind"] for change in document["changes"]} >= {"gpus", "device_memory_gib"}
