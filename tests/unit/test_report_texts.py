"""Texts for people: golden where nothing but the code decides, held to the width, and sturdy where data are thin."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records_for_tests as given
from hypothesis import given as drawn
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.laws import LAWS
from cost_models.problem import Problem
from cost_models.records import (
    FabricException,
    FabricLevel,
    MeasuredMemory,
    Measurement,
    MeasurementKind,
    Measurements,
    MemoryKind,
    Pool,
    Prediction,
    Severity,
    Verdict,
    parse_layout,
)
from cost_models.units import GIB
from executor.cli.arguments import VERBS
from planner.check import check
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.explain import against
from planner.predict import predict
from planner.readers.clusters import read_cluster
from planner.readers.models import model_document, model_names, read_model
from planner.readers.node_presets import cluster_names, local_cluster
from planner.readers.pins import parse_pins
from planner.readers.runtimes import read_runtime, runtime_names
from planner.report import explain_text, words
from planner.report.check_text import check_text
from planner.report.explain_text import against_text, certificate_text, why_not_text
from planner.report.help_text import EXAMPLE, TOPICS, topic_text
from planner.report.plan_text import chain_lines, plan_text
from planner.report.plots import comparison_plot
from planner.report.predict_text import predict_text
from planner.report.probe_text import probe_text
from planner.report.profile_text import flops_of, measurements_text, profile_text

Golden = Callable[[str, str], None]


def fits(text: str) -> None:
    long = [line for line in text.splitlines() if len(line) > words.WIDTH]
    assert not long, f"{len(long)} lines are longer than {words.WIDTH}, the first: {long[0]}"
    assert not any(line != line.rstrip() for line in text.splitlines())


# Words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 µs"),
        (11, "11.0 s"),
        (0.0123456, "12.3 ms"),
        (0.9996, "1.00 s"),
        (999.7, "1,000 s"),
        (4321, "4,321 s"),
        (1e-7, "0.100 µs"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert words.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 MiB"), (GIB, "1.0 GiB"), (2048 * GIB, "2,048 GiB"), (100 * 2**20, "100 MiB"), (2**20, "1 MiB")],
)
def test_memory(value: float, text: str) -> None:
    assert words.memory(value) == text


def test_rates_and_counts() -> None:
    assert words.bandwidth(50e9) == "50.0 GB/s"
    assert words.flop_rate(989e12) == "989 TFLOP/s"
    assert words.flop_rate(5e10) == "50.0 GFLOP/s"
    assert words.billions(8_030_261_248) == "8.03 B"
    assert words.joined([]) == ""
    assert words.joined(["a", "b", "c"], "or") == "a, b or c"
    assert words.counted(1, "error") == "1 error"


@drawn(st.floats(min_value=1e-9, max_value=1e6))
def test_a_duration_is_right_to_a_percent_and_has_its_unit(seconds: float) -> None:
    number, unit = words.duration(seconds).split()
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert abs(float(number.replace(",", "")) * scale - seconds) <= 0.0051 * seconds + 1e-12


@drawn(
    st.lists(st.sampled_from(["3.2 GiB", "12.5 ms", "and", "a-hyphenated-word", "x" * 30, "100 TFLOP/s"]), max_size=60)
)
def test_wrapped_text_keeps_its_words_its_width_and_numbers_beside_their_units(parts: list[str]) -> None:
    text = words.row("name", " ".join(parts))
    fits(text)
    assert text.split() == ["name", *" ".join(parts).split()]
    assert not any(line.rstrip().endswith(("3.2", "12.5", "100")) for line in text.splitlines())


# Plans and predictions ---------------------------------------------------------------------------------------------


def prediction(**fields: Any) -> Prediction:
    """Two stages, as the decision has."""
    first = given.PREDICTION.stages[0]
    last = replace(first, device=1, memory_bytes={"weights": 2.0 * GIB, "activations": 0.25 * GIB, "logits": 0.5 * GIB})
    first = replace(first, memory_bytes={"weights": 3.0 * GIB, "activations": 1.5 * GIB, "context": 1000.0})
    first, last = (
        replace(stage, phase_memory_bytes={"build": 2.0 * GIB, "step 2": sum(stage.memory_bytes.values())})
        for stage in (first, last)
    )
    values: dict[str, Any] = {
        "stages": (first, last),
        "memory_gib_max": 4.5,
        "memory_gib_low": 4.0,
        "memory_gib_high": 5.0,
    }
    return replace(given.PREDICTION, **({**values, "memory_gib_usable": 79.6} | fields))


PROBLEM = Problem(
    model=given.MODEL,
    cluster=given.cluster(),
    workload=given.WORKLOAD,
    runtime=given.RUNTIME,
    calibration=given.CALIBRATION,
)


def test_predict_golden(golden: Golden) -> None:
    text = predict_text(PROBLEM, given.DECISION, prediction(), {"workload.precision": "bf16"})
    golden("predict.txt", text + "\n")
    fits(text)


def test_predict_says_each_verdict_in_words() -> None:
    texts = {verdict: predict_text(PROBLEM, given.DECISION, prediction(verdict=verdict), {}) for verdict in Verdict}
    assert "fits: even the upper end" in texts[Verdict.OK]
    assert "risky: expected to fit, but" in texts[Verdict.RISKY]
    assert "does not fit: more is expected" in texts[Verdict.NO]


def test_predict_without_the_optional_parts() -> None:
    text = predict_text(PROBLEM, given.DECISION, prediction(worth_measuring=()), {})
    assert "not said" not in text
    assert "measure " not in text


def test_a_small_models_memory_is_in_mib_and_alike_stages_share_a_line() -> None:
    stage = replace(given.PREDICTION.stages[0], memory_bytes={"weights": 5e6}, phase_memory_bytes={"step 2": 5e6})
    text = predict_text(PROBLEM, given.DECISION, prediction(stages=(stage, replace(stage, device=1))), {})
    assert "at its peak, MiB" in text
    assert "\n0..1 " in text


def test_plan_golden(golden: Golden) -> None:
    text = plan_text(given.plan(predicted=prediction()))
    golden("plan.txt", text + "\n")
    fits(text)


def test_a_plan_edited_by_hand_says_so() -> None:
    assert "changed by hand" in plan_text(given.plan(predicted=None, certificate=None))


# Check -------------------------------------------------------------------------------------------------------------

REQUEST = {
    "model": {"num_layers": 32, "hidden": 5120, "ffn": 13824, "heads": 40, "kv_heads": 10, "vocab": 32000},
    "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": 4},
    "workload": {"seq": 4096, "gbs": 8},
    "runtime": "torch",
    "layout": {"tp": 4, "mbs": 1, "zero": 0},
}


def test_check_tells_errors_first_and_every_code() -> None:
    document = check(REQUEST)
    shuffled = {**document, "findings": list(reversed(document["findings"]))}
    text = check_text(shuffled)
    fits(text)
    assert text.startswith("verdict    no: ")
    assert all(found["code"] in text for found in document["findings"])
    places = [text.index(f"\n{severity} ") for severity in Severity if f"\n{severity} " in text]
    assert places == sorted(places)
    assert "kv_heads=10 is not divisible by tp=4" in text
    assert "legal tp on 4 GPUs: 1, 2" in " ".join(text.split())


def test_check_says_values_and_legal_ones_that_the_message_leaves_out_and_no_others() -> None:
    found = {
        "code": "X",
        "severity": "warning",
        "message": "tp=4 is odd",
        "values": {"tp": 4, "sp": True, "states_bytes": 5},
        "legal": {"tp": list(range(1, 30)), "pp": []},
    }
    text = check_text({"verdict": "risky", "findings": [found], "unchecked": [], "predicted": None, "better": None})
    assert "with sp=true\n" in text
    assert "legal tp: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 13 more" in text
    assert "legal pp" not in text


@pytest.mark.parametrize(
    ("better", "said"),
    [
        (None, ""),
        ("take tp=2", "better     take tp=2"),
        ({"change": "tp=2", "layout": "tp2 dps2", "gain": 0.25, "step_s": 1.5, "verdict": "ok"}, "+25.0% tokens/s"),
        ({"note": "x", "step_s": None}, "better     note x"),
    ],
)
def test_check_better_and_predicted_in_any_shape(better: Any, said: str) -> None:
    predicted = {"model_states": {"fullest_device_gib": 1.0}, "step_s": 2.0, "memory_gib_max": 3.0, "verdict": "risky"}
    text = check_text(
        {"verdict": "ok", "findings": [], "unchecked": ["A: b"], "predicted": predicted, "better": better}
    )
    assert said in text
    assert "2.00 s a step" in text
    assert "1.0 GiB on the fullest device" in text
    assert text.endswith("unchecked  A: b")


def test_check_of_real_cases_fits_the_width(shared: Path) -> None:
    texts = 0
    for path in sorted((shared / "cases").rglob("*.json"))[::5]:
        document = json.loads(path.read_text(encoding="utf-8"))
        try:
            found = check(document)
        except (InputError, AttributeError):
            continue
        fits(check_text(found))
        texts += 1
    assert texts > 5


# Explanations ------------------------------------------------------------------------------------------------------

CHOSEN = {"layout": "tp4 dps16 zero2", "step_s": 4.0}
WHY_NOT: dict[str, Any] = {
    "layout": "tp4 pp8",
    "answer": "does not fit",
    "reasons": [
        {
            "code": "LAYERS_MOD_PP",
            "message": "num_layers=30 is not divisible by pp=8",
            "values": {"num_layers": 30, "pp": 8, "vpp": 1},
            "legal": {"pp": [1, 2]},
        }
    ],
    "best": {"layout": "tp4 pp8 dps2 zero2", "step_s": 4.5, "memory_gib_max": 85.25, "verdict": "no"},
    "chosen": CHOSEN,
    "parts": [
        {"name": "compute", "chosen_s": 3.0, "other_s": 3.0},
        {"name": "pipeline bubble", "chosen_s": 0.0, "other_s": 0.75},
        {"name": "exposed communication", "chosen_s": 1.0, "other_s": None},
    ],
    "memory": {
        "device": 0,
        "phase": "step 2",
        "operation": "backward of micro-batch 3",
        "over_gib": 7.5,
        "usable_gib": 77.75,
        "expected_gib": 85.25,
    },
    "smallest_change": "mbs=1 instead of 2 would fit: 70.1 GiB",
}


def test_why_not_golden(golden: Golden) -> None:
    text = why_not_text(WHY_NOT)
    golden("why_not.txt", text + "\n")
    fits(text)


@pytest.mark.parametrize("answer", ["illegal", "does not fit", "slower", "tie", "chosen", "faster"])
def test_why_not_with_next_to_nothing(answer: str) -> None:
    bare = dict.fromkeys(WHY_NOT) | {"layout": "tp3", "answer": answer, "reasons": [], "parts": []}
    text = why_not_text(bare)
    assert f"answer     {answer}: " in text
    assert "None" not in text


def test_why_not_sums_its_parts_with_signs() -> None:
    faster = [{"name": "compute", "chosen_s": 2.0, "other_s": 1.5}]
    assert "-500 ms" in why_not_text(WHY_NOT | {"parts": faster})


def test_against_golden(golden: Golden) -> None:
    first, second = given.DECISION.stages
    other = given.plan(
        decision=replace(
            given.DECISION,
            num_micro_batches=2,
            layout=replace(given.DECISION.layout, mbs=2),
            stages=(
                replace(first, blocks=(0, 3), recompute={"full": 3}),
                replace(second, blocks=(4, 5), recompute={"none": 1}),
            ),
        ),
        predicted=prediction(step_s=4.5, memory_gib_max=4.25, parts=replace(given.PREDICTION.parts, bubble_s=1.5)),
    )
    text = against_text(against(given.plan(predicted=prediction()), other))
    golden("against.txt", text + "\n")
    fits(text)


def test_against_says_where_one_promises_nothing_and_where_nothing_differs() -> None:
    plan, edited = given.plan(predicted=prediction()), given.plan(predicted=None, certificate=None)
    table = [line.split() for line in against_text(against(plan, edited)).splitlines()]
    assert ["step", "4.00", "s", "-"] in table
    assert against_text(against(plan, plan)).endswith("the plans do not differ")


def test_against_names_every_row_of_the_document() -> None:
    names = {line["name"] for line in against(given.plan(), given.plan())["rows"]}
    assert names - {"layout"} == set(explain_text._AGAINST)


def test_certificate_golden(golden: Golden) -> None:
    cells = [
        {
            "cell": "pp2",
            "bound_s": 4.2,
            "simulated_bound_s": 4.0,
            "objective_s": None,
            "reason": "its bound is above J*",
            "opened": False,
        },
        {
            "cell": "tp2",
            "bound_s": 3.8,
            "simulated_bound_s": 3.7,
            "objective_s": 4.0,
            "reason": "chosen",
            "opened": True,
        },
        {"cell": "tp4", "bound_s": None, "simulated_bound_s": None, "objective_s": None, "reason": "fits nowhere"},
    ]
    document = {
        "status": "optimal",
        "objective_s": 4.0,
        "bound_s": 4.0,
        "gap_objective": 0.0,
        "gap_simulated": 0.05,
        "simulated_s": 3.9,
        "solver": "HiGHS",
        "least_bound_s": 3.7,
        "least_bound_cell": "tp2",
        "cells": cells,
        "faults": [],
        "restrictions": ["tp per stage", "unequal micro-batch shares"],
    }
    text = certificate_text(document)
    golden("certificate.txt", text + "\n")
    fits(text)
    for sign, meaning in (("J is", "the objective"), ("J* is", "the least J"), ("δ is", "simulated")):
        assert any(sign in line and meaning in line for line in text.splitlines())
    bare = dict.fromkeys(document) | {"status": "feasible", "cells": [], "restrictions": []}
    assert "not proved" in certificate_text(bare)
    assert "it does not hold" in certificate_text(document | {"faults": ["tp4 was left closed, but its bound is 3 s"]})


# Profiles, measurements, clusters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_profile_of_every_preset(name: str) -> None:
    model = read_model(name)
    text = profile_text(model_document(model, 4096))
    fits(text)
    assert f"{model.num_params:,}" in text


def test_flops_of_keys() -> None:
    assert flops_of("matmul/bf16/2x3x5") == 60
    assert flops_of("attention/bf16/1x8x4x2x16/forward") == 2 * 8 * 8 * 4 * 16
    assert flops_of("attention/bf16/1x8x4x2x16/backward") == 2.5 * 2 * 8 * 8 * 4 * 16
    assert flops_of("head/fp32/1x8x64x512/backward") == 2 * 2 * 8 * 64 * 512
    for key in (
        "step",
        "launch/bf16",
        "all_reduce/2/1024/loopback",
        "matmul/bf16/2x3",
        "matmul",
        "layer/bf16/1x2x3",
        "optimizer/adamw/10",
    ):
        assert flops_of(key) is None


def test_flops_of_a_layer_are_those_of_its_parts() -> None:
    model, tokens, seq = given.MODEL, 2 * 128, 128
    key = f"layer/fp32/2x128x{model.hidden}/{model.heads}x{model.kv_heads}x{model.head_dim}/{model.ffn}g/forward"
    norms = 2 * model.hidden
    attention = 2 * 2 * seq * seq * model.heads * model.head_dim
    assert flops_of(key) == 2 * tokens * (model.block_params(1) - norms) + attention


def measured(key: str, kind: MeasurementKind = MeasurementKind.OP, **fields: Any) -> Measurement:
    values: dict[str, Any] = {
        "samples_s": (0.001, 0.002, 0.003),
        "machine": "toy CPU, 2 cores",
        "versions": {"torch": "2.13.0"},
    }
    return Measurement(kind=kind, key=key, **(values | fields))


def test_measurements_golden(golden: Golden) -> None:
    memory = MeasuredMemory(kind=MemoryKind.RSS, peak_bytes=300 * 2**20)
    taken = (
        measured("matmul/fp32/128x256x512"),
        measured("launch/fp32", samples_s=(0.0,)),
        measured("all_reduce/2/1048576/loopback", MeasurementKind.COLLECTIVE, bytes=1048576),
        measured("overlap/all_reduce/2/4194304/alone", MeasurementKind.COLLECTIVE, bytes=4194304),
        measured("step", MeasurementKind.RUN, phase="forward", rank_class="stage 0", memory=memory, note="tp2 dps2"),
    )
    text = measurements_text(Measurements(measurements=taken))
    golden("measurements.txt", text + "\n")
    fits(text)


def test_no_measurements() -> None:
    assert measurements_text(Measurements(measurements=())) == "nothing was measured"


@pytest.mark.parametrize("name", cluster_names())
def test_probe_of_every_preset(name: str) -> None:
    fits(probe_text(read_cluster(f"{name}x144")))


def test_probe_golden(golden: Golden) -> None:
    fabric = (FabricLevel(name="leaf", radix=2), FabricLevel(name="spine", radix=2, oversubscription=2.0))
    bad = (FabricException(node=3, nic_factor=0.5, note="one interface is missing"),)
    text = probe_text(given.cluster(8, fabric=fabric, exceptions=bad, rails=False))
    golden("probe.txt", text + "\n")
    fits(text)


def test_probe_shares_follow_the_oversubscription() -> None:
    fabric = (FabricLevel(name="leaf", radix=2, oversubscription=4.0),)
    text = probe_text(given.cluster(8, fabric=fabric))
    # 2 interfaces of 10 GB/s over 4 devices, and a quarter of that above the leaf
    assert "below one leaf" in text
    assert "5.00 GB/s" in text
    assert "1.25 GB/s" in text


def test_probe_of_this_machine_and_of_two_kinds_of_nodes() -> None:
    local = local_cluster(2, 2**30, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=1e10)
    text = probe_text(local)
    assert "2 ranks in 1 node" in text
    assert "50.0 GFLOP/s" in text
    mixed = replace(read_cluster("h100x16"), pools=(*read_cluster("h100x16").pools, *read_cluster("a100-80x8").pools))
    assert "dgx-h100: inside a fast domain" in probe_text(mixed)
    assert isinstance(mixed.pools[0], Pool)


# Help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_renders(topic: str) -> None:
    text = topic_text(topic, VERBS)
    assert text.startswith(f"{topic}: ")
    assert len(text.splitlines()) > 4
    fits(text)


def test_the_overview_lists_verbs_and_topics() -> None:
    text = topic_text(None, VERBS)
    fits(text)
    assert all(f"  {name} " in text for name in (*VERBS, *TOPICS))


def test_topics_are_made_from_the_data() -> None:
    assert all(law.code in topic_text("laws", VERBS) for law in LAWS)
    assert all(name in topic_text("models", VERBS) for name in model_names())
    assert all(name in topic_text("clusters", VERBS) for name in cluster_names())
    assert all(f"\n{name} " in topic_text("runtimes", VERBS) for name in runtime_names())
    assert str(EXAMPLE) in topic_text("layout", VERBS)


def test_the_example_of_pins_is_one() -> None:
    text = topic_text("pins", VERBS)
    example = text.split('--pin "')[1].split('"')[0]
    assert len(parse_pins(example).pins) == 4


def test_the_example_of_a_request_is_one() -> None:
    text = topic_text("requests", VERBS)
    assert check(json.loads(text[text.index("{") :]))["verdict"] == "ok"


def test_a_topic_is_found_by_its_singular_and_a_verb_is_one() -> None:
    assert topic_text("Law", VERBS) == topic_text("laws", VERBS)
    assert topic_text("exit codes".replace(" ", "_"), VERBS).startswith("exit-codes")
    assert topic_text("plan", VERBS).startswith(f"plan: {VERBS['plan'][0]}")


@pytest.mark.parametrize(("topic", "near"), [("modles", "models"), ("runtme", "runtimes")])
def test_an_unknown_topic_names_the_near_ones(topic: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"{topic}.*not known; did you mean {near}.*Topics: layout, pins"):
        topic_text(topic, VERBS)


def test_a_topic_near_nothing_lists_all() -> None:
    with pytest.raises(InputError, match=r"is not known\. Topics: layout"):
        topic_text("zzzzzz", VERBS)


# The picture -------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {
        "layout": "tp2 dps2 mbs2 zero2 gather=micro sched=1f1b",
        "predicted_s": 0.84,
        "low_s": 0.72,
        "high_s": 0.98,
        "measured_s": [0.86, 0.9],
        "predicted_gib": 0.61,
        "measured_gib": 0.66,
    },
    {"layout": "tp4", "predicted_s": 1.4, "low_s": None, "high_s": None, "measured_s": [], "predicted_gib": None},
]


def test_the_picture_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = comparison_plot(ROWS, tmp_path / "a.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert [one.name for one in tmp_path.iterdir()] == ["a.png"]
    assert comparison_plot(ROWS, tmp_path / "b.png").read_bytes() == content


def test_a_picture_of_other_numbers_is_another(tmp_path: Path) -> None:
    other = [{**ROWS[0], "measured_s": [0.3]}, ROWS[1]]
    first, second = (comparison_plot(rows, tmp_path / f"{i}.png") for i, rows in enumerate((ROWS, other)))
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize(
    "row",
    [
        {"layout": "tp1"},
        {"layout": "tp1", "predicted_s": 0.0, "measured_s": [0.0], "measured_gib": 0.0},
        {"layout": "tp1", "predicted_s": float("nan"), "measured_s": None},
        {"layout": "tp1", "predicted_s": 1e-4, "low_s": 2e-4, "high_s": 0.5e-4},
    ],
)
def test_a_picture_of_next_to_nothing(row: dict[str, Any], tmp_path: Path) -> None:
    assert comparison_plot([row], tmp_path / "a.png").is_file()


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        comparison_plot([], tmp_path / "a.png")


def test_a_short_layout_is_read_as_it_was_meant() -> None:
    layout = parse_layout("pp2 dps16 tp2 ep8 etp1 mbs2 zero1")
    assert words.short_layout(layout) == "pp2 dps16 tp2 ep8 etp1 mbs2 zero1 sched=1f1b"
    one = replace(layout, ep=1)
    assert "etp1" in words.short_layout(one, has_experts=True).split()
    assert "etp1" not in words.short_layout(one).split()


def test_many_virtual_stages_have_a_line_a_device() -> None:
    def lines(num_layers: int, vpp: int) -> list[str]:
        whole = replace(
            PROBLEM,
            model=replace(PROBLEM.model, num_layers=num_layers),
            cluster=read_cluster("h100x2"),
            runtime=read_runtime("megatron"),
            calibration=shipped(),
        )
        layout = parse_layout(f"pp2 vpp{vpp} dp1 mbs1 sched=interleaved rc=full")
        decision = decision_of_layout(whole, layout)
        text = predict_text(whole, decision, predict(whole, decision), {})
        fits(text)
        return text.splitlines()

    few, many = lines(8, 4), lines(100, 50)
    assert "fwd, bwd, tail and memory are those of the device: all of its virtual stages together" in few
    assert any(line.startswith("0      0       embedding, layer 1 ") for line in few)
    assert len(many) < 50
    assert any(line.startswith("0       full ") and "embedding, layers 1, 3, 5" in line for line in many)
    assert any("layers 2, 4, 6" in line for line in many)
    assert any("of its 50 virtual stages" in line for line in many)


def test_many_laws_that_were_not_judged_share_a_line() -> None:
    texts = [f"LAW_{letter}: not stated: tp, states (a, b)" for letter in "ABCDEFGHI"]
    document = {
        "verdict": "ok",
        "findings": [],
        "predicted": None,
        "better": None,
        "unchecked": [*texts, "runtime: odd"],
    }
    lines = check_text(document).splitlines()
    assert lines[-2] == "unchecked  9 laws, which `--json` names, for want of tp, states (a, b)"
    assert lines[-1].strip() == "runtime: odd"
    assert "LAW_A" in check_text({**document, "unchecked": texts[:8]})


def test_a_chain_of_unlike_layers_says_which_numbers_are_what() -> None:
    assert chain_lines(read_model("llava1.5-7b")) == ["layers: 1 patches, 2-25 vision, 26 projector, 27-58 language"]
    assert chain_lines(read_model("gemma3-27b"))[0].endswith("29 projector, 30-91 language")
    assert chain_lines(read_model("llama3-8b")) == []
