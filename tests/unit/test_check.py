"""`check`: the document, the verdict, and the arithmetic of model states against slower ways to count."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.laws import LAW
from cost_models.records import RecordError, StateBytes, normalised
from planner.advice import problem_of
from planner.check import _least_full, check, model_states
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.predict import simulated
from planner.readers.request_facts import facts_of
from planner.readers.requests import complete, read_request

GIB = 2**30

LLAMA_7B = {
    "name": "llama2-7b", "num_layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "kv_heads": 32, "head_dim": 128,
    "vocab": 32000, "tie_embeddings": False, "gated_mlp": True,
}  # fmt: skip
NUM_PARAMS = 6_738_415_616  # as published with the weights
EXPERTS = {**LLAMA_7B, "ffn": 1024, "moe": {"num_experts": 8, "top_k": 2, "moe_ffn": 1024}}


def request(layout, *, model=LLAMA_7B, world=8, runtime="megatron", gpu="A100-40G", **workload):
    cluster = {"nodes": max(1, world // 8), "gpus_per_node": min(8, world), "gpu": gpu}
    workload = {"precision": "bf16", "optimizer": "adamw", **workload}
    return {"model": model, "cluster": cluster, "workload": workload, "runtime": runtime, "layout": layout}


def states(layout, **more):
    return model_states(facts_of(read_request(request(layout, **more))))


def codes(document):
    return {finding["code"] for finding in check(document)["findings"]}


# The document --------------------------------------------------------------------------------------------------------


def test_the_document_has_its_keys_and_is_json():
    answer = check(request({"tp": 3, "dp": 2}))
    assert list(answer) == ["verdict", "findings", "unchecked", "predicted", "better"]
    assert json.loads(json.dumps(answer)) == answer
    assert list(answer["findings"][0]) == ["code", "severity", "message", "values", "legal"]
    assert answer["verdict"] == "no"
    assert answer["better"] is None


def test_verdicts():
    assert check(request({"tp": 2, "dp": 4, "zero": 1}))["verdict"] == "ok"
    assert check(request("tp16 zero1", world=16))["verdict"] == "risky"
    assert check(request({"tp": 5}))["verdict"] == "no"
    tied = {**LLAMA_7B, "tie_embeddings": True}
    answer = check(request({"tp": 2, "pp": 4, "zero": 1}, model=tied))
    assert [finding["severity"] for finding in answer["findings"]] == ["info"]
    assert answer["verdict"] == "ok"


def test_what_is_not_stated_is_listed_not_guessed():
    answer = check({"model": {"name": "mine", "heads": 12}, "layout": {"tp": 4}})
    assert answer["findings"] == []
    assert "KV_HEADS_MOD_TP: not stated: kv_heads" in answer["unchecked"]
    assert any(text.startswith("MEM_STATES_GT_HBM: not stated: what model states take") for text in answer["unchecked"])


def test_a_layout_without_any_degree_is_no_layout():
    answer = check(request({"zero": 1}))
    assert answer["findings"] == []
    assert "layout: no degree is stated, so none is assumed" in answer["unchecked"]


def test_states_that_fit_nowhere_need_no_layout():
    answer = check(request({}, world=2))
    assert [finding["code"] for finding in answer["findings"]] == ["MEM_STATES_GT_HBM"]
    assert "divided evenly over all 2" in answer["findings"][0]["message"]
    assert answer["findings"][0]["legal"] == {"least_gpus": [3]}


def test_predictions_and_advice_have_their_place():
    answer = check(
        request("tp2 zero1"), predict=lambda request: {"step_s": 1.0}, improve=lambda request: {"layout": "tp4"}
    )
    assert answer["predicted"]["step_s"] == 1.0
    assert answer["predicted"]["model_states"]["whole_model_gib"] == pytest.approx(NUM_PARAMS * 18 / GIB)
    assert answer["better"] == {"layout": "tp4"}


@pytest.mark.parametrize("mark", [{"inference": True}, {"lora": True}])
def test_what_is_out_of_scope_has_laws_but_no_memory(mark):
    answer = check(request("tp8", gpu="V100-16G", **mark), predict=lambda request: {"step_s": 1.0})
    assert answer["findings"] == []
    assert answer["predicted"] is None
    assert any("is not priced" in text for text in answer["unchecked"])
    assert {finding["code"] for finding in check(request("tp3", **mark))["findings"]} >= {"HEADS_MOD_TP"}


def test_check_imports_no_torch():
    script = (
        "import sys, json; from planner.check import check; "
        "check(json.loads(sys.argv[1])); bad = {'torch', 'pulp', 'matplotlib'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(request("tp2"))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_not_a_request():
    with pytest.raises(InputError, match="its keys are model, cluster"):
        check({"modle": {}})
    with pytest.raises(InputError, match="cannot be read"):
        check("/nowhere/request.json")


# Model states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, bytes_on_rank",
    [
        ("dp8 zero0", 18 * NUM_PARAMS),
        ("dp8 zero1", (6 + 12 / 8) * NUM_PARAMS),
        ("tp2 dp4 zero1", (6 + 12 / 4) * NUM_PARAMS / 2),
        ("cp2 dp4 zero1", (6 + 12 / 8) * NUM_PARAMS),
        ("dpr4 dps2 zero1", (6 + 12 / 2) * NUM_PARAMS),
    ],
)
def test_megatron_bytes_are_the_published_form(layout, bytes_on_rank):
    """18 bytes per parameter, 6 + 12/(dp·cp) with the distributed optimizer."""
    found = states(layout)
    assert found.least_bytes == found.most_bytes == pytest.approx(bytes_on_rank)


@pytest.mark.parametrize("zero, share", [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_zero_levels(zero, share):
    found = states(f"dp8 zero{zero}", runtime="deepspeed")
    assert found.most_bytes == pytest.approx(share * NUM_PARAMS)


def test_the_reports_own_arithmetic():
    """Llama-2-7B with pure data parallelism: about 113 GiB without a divided optimizer, about 47 GiB with it (8 GPUs)."""
    assert states("dp8 zero0").most_bytes / GIB == pytest.approx(113, abs=0.5)
    assert states("dp8 zero1").most_bytes / GIB == pytest.approx(47, abs=0.5)


def _slow_stage(model_params, num_layers, pp, embedding, head):
    """Parameters of each stage, one layer at a time."""
    held = [0] * pp
    held[0] += embedding
    held[-1] += head
    for layer in range(num_layers):
        held[layer * pp // num_layers] += model_params
    return held


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("tied", [False, True])
def test_the_fullest_stage(pp, tied):
    world = max(8, pp)
    facts = facts_of(
        read_request(request({"pp": pp, "zero": 0}, model={**LLAMA_7B, "tie_embeddings": tied}, world=world))
    )
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    table = 32000 * 4096
    head = 4096 + (table if not tied or pp > 1 else 0)
    held = _slow_stage(layer, 32, pp, table, head)
    assert model_states(facts).most_bytes == pytest.approx(18 * max(held))


def test_experts_are_divided_over_their_own_ranks():
    """dp·cp·tp = edp·ep·etp: with ep=4 on dp=8 an expert lies on 2 ranks, and ZeRO divides its state over these."""
    expert = 32 * 8 * 3 * 4096 * 1024
    model = facts_of(read_request(request("dp8 ep4 zero1", model=EXPERTS))).model
    dense = model.num_params - expert
    found = states("dp8 ep4 zero1", model=EXPERTS)
    assert found.most_bytes == pytest.approx(dense * (6 + 12 / 8) + expert / 4 * (6 + 12 / 2))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8))
def test_the_least_full_split_is_that_of_brute_force(weights, parts):
    best = min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))
        for count in range(min(parts, len(weights)))
        for cuts in itertools.combinations(range(1, len(weights)), count)
    )
    ends = _least_full([float(weight) for weight in weights], parts)
    assert len(ends) <= parts
    assert [end for pair in ends for end in pair][1:-1] == [
        end for pair in itertools.pairwise(ends) for end in (pair[0][1],) * 2
    ]
    assert max(sum(weights[a:b]) for a, b in ends) == pytest.approx(best)


LAYOUTS = st.builds(
    lambda tp, pp, dp, zero: {"tp": tp, "pp": pp, "dp": dp, "zero": zero},
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
)


@given(LAYOUTS)
def test_more_division_never_takes_more(layout):
    def held(**changes):
        now = {**layout, **changes}
        return states(now, runtime="deepspeed", world=now["tp"] * now["pp"] * now["dp"] * 8).most_bytes

    assert held(tp=2 * layout["tp"]) <= held()
    assert held(zero=min(3, layout["zero"] + 1)) <= held()
    assert held(dp=2 * layout["dp"]) <= held()
    assert held() >= 16 * NUM_PARAMS / (layout["tp"] * layout["pp"] * layout["dp"])


def test_an_unstated_zero_is_between_best_and_worst():
    found = states("dp8")
    assert found.least_bytes == states("dp8 zero1").most_bytes
    assert found.most_bytes == states("dp8 zero0").most_bytes
    undecided = request("dp8", gpu="A100-80G")
    assert codes(undecided) == set()
    assert any("by how zero divides them" in text for text in check(undecided)["unchecked"])
    assert codes(request("dp8", gpu="V100-32G")) == {"MEM_STATES_GT_HBM"}
    assert codes(request("tp8", gpu="V100-32G")) == set()


def test_offload_moves_what_the_runtime_moves():
    def of(runtime, **offload):
        return states({"dp": 8, "zero": 3 if runtime != "megatron" else 1, **offload}, runtime=runtime)

    kept = of("deepspeed", offload_optimizer="cpu")
    assert kept.most_bytes == pytest.approx(2 / 8 * NUM_PARAMS)
    assert kept.host_bytes == pytest.approx(14 * NUM_PARAMS)
    assert of("deepspeed", offload_optimizer="cpu", offload_param="cpu").host_bytes == pytest.approx(16 * NUM_PARAMS)
    assert of("fsdp", offload_param=True).most_bytes == 0
    assert of("megatron", offload_optimizer="cpu").host_bytes == pytest.approx(12 * NUM_PARAMS)
    assert of("deepspeed", offload_optimizer="none").host_bytes is None


def test_bytes_that_are_stated_win():
    found = states("dp8 zero0", bytes={"weight": 4, "grad": 4, "optim": 8})
    assert found.bytes_per_param == StateBytes(weight=4, gradient=4, optimizer=8)
    assert found.most_bytes == pytest.approx(16 * NUM_PARAMS)


def test_optimizers():
    assert states("dp8 zero0", optimizer="sgd").most_bytes == pytest.approx(10 * NUM_PARAMS)
    assert states("dp8 zero0", optimizer="adamw 8bit") is None
    assert any("say workload.bytes" in text for text in check(request("dp8", optimizer="adamw 8bit"))["unchecked"])


def test_a_rack_is_one_domain():
    gb200 = request("tp16 zero1", world=72, gpu="GB200")
    gb200["cluster"] = {"nodes": 18, "gpus_per_node": 4, "gpu": "GB200"}
    gb200["layout"] = "tp8 zero1"
    assert "TP_SPANS_NODES" not in codes(gb200)
    hopper = {**gb200, "cluster": {"nodes": 18, "gpus_per_node": 4, "gpu": "H100-80G"}}
    assert "TP_SPANS_NODES" in codes(hopper)


def test_a_preset_cluster_says_everything():
    answer = check({"model": LLAMA_7B, "cluster": "h100x16", "layout": "tp8 dp2 zero1", "runtime": "megatron"})
    assert answer["findings"] == []
    assert answer["predicted"]["model_states"]["device_gib"] == pytest.approx(79.6, abs=0.1)


def test_the_law_of_the_world_decides_what_is_counted():
    stated = facts_of(read_request(request({"tp": 8, "pp": 2, "dp": 1})))
    assert LAW["WORLD_MOD_MP"].holds(stated.facts) is False
    assert model_states(stated).least_bytes == pytest.approx(18 * NUM_PARAMS / 8)
    fits = replace(stated, facts=replace(stated.facts, world=16))
    assert model_states(fits).least_bytes > 18 * NUM_PARAMS / 16


@pytest.mark.parametrize("ep", [1, 4])
def test_an_unstated_etp_is_the_runtimes(ep):
    said, unsaid = ({"tp": 2, "dp": 4, "ep": ep, "zero": 1, **etp} for etp in ({"etp": 2}, {}))
    assert states(said, model=EXPERTS) == states(unsaid, model=EXPERTS)
    assert not any("etp" in str(one) for one in check(request(unsaid, model=EXPERTS))["unchecked"])


def test_a_precision_that_the_device_has_not():
    found = check(request("dp8", precision="fp8"))["findings"]
    assert next(one for one in found if one["code"] == "PRECISION_UNSUPPORTED")["legal"] == {
        "precision": ["fp32", "bf16", "fp16"]
    }
    for gpu, precision in (("A100-80G", "bf16"), ("H100-80G", "fp8"), ("B200-180G", "nvfp4"), ("V100-32G", "bf16")):
        assert "PRECISION_UNSUPPORTED" not in codes(request("dp8", gpu=gpu, precision=precision)), (gpu, precision)


def test_check_and_predict_take_bf16_where_the_device_widens_it_and_say_so():
    """A V100 has no bf16: torch emulates it at fp32's rate, so it runs, several times slower than in fp16."""
    asked = {
        precision: request("dp8", gpu="V100-32G", seq=2048, gbs=64, precision=precision)
        for precision in ("bf16", "fp16", "fp32")
    }
    assert "PRECISION_UNSUPPORTED" not in codes(asked["bf16"])
    assert any("v100-32 has no bf16 and multiplies in fp32" in one for one in check(asked["bf16"])["unchecked"])
    completed = {key: complete(read_request(one), needs_layout=True) for key, one in asked.items()}
    assert "multiplies in fp32" in dict(completed["bf16"].defaults)["workload.precision"]
    seconds = {}
    for precision, one in completed.items():
        problem = problem_of(one)
        seconds[precision] = simulated(problem, decision_of_layout(problem, normalised(dp=8))).simulation.step_s
    assert 3 * seconds["fp16"] < seconds["bf16"] <= seconds["fp32"]


def test_fp8_is_not_widened():
    problem = problem_of(complete(read_request(request("dp8", seq=2048, gbs=64, precision="fp8")), needs_layout=True))
    with pytest.raises(
        RecordError, match="precision 'fp8' is not known for device 'a100-40'; known there: bf16, fp16, fp32"
    ):
        simulated(problem, decision_of_layout(problem, normalised(dp=8)))
