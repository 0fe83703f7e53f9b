"""Request files: read, refused with near names, completed with every default listed."""

import json

import pytest

from cost_models.records import Gather, Schedule, parse_layout
from planner.errors import InputError, NotYetError
from planner.readers.request_facts import facts_of
from planner.readers.request_keys import meant
from planner.readers.requests import complete, read_request

WHOLE = {
    "model": "llama3-8b",
    "cluster": "h100x64",
    "workload": {"seq": 8192, "gbs": 512, "precision": "bf16", "optimizer": "adamw"},
    "runtime": "megatron",
    "layout": {"tp": 4, "pp": 2, "cp": 1, "dp": 8, "zero": 1, "mbs": 1, "vpp": 2, "ep": 1, "etp": 1, "recompute": "selective",
               "schedule": "interleaved"},
    "pin": "tp=4",
}  # fmt: skip
DIMENSIONS = {"name": "mine", "num_layers": 4, "hidden": 256, "ffn": 512, "heads": 8, "vocab": 1000}


def changed(**sections):
    return {**WHOLE, **{key: value for key, value in sections.items() if value is not ...}}


def without(*keys):
    return {key: value for key, value in WHOLE.items() if key not in keys}


def completed(document, **more):
    return complete(read_request(document), **more)


# Reading -------------------------------------------------------------------------------------------------------------


def test_a_file_and_its_document_are_one(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(WHOLE))
    from_file = read_request(path)
    assert from_file.source == str(path)
    assert complete(from_file).layout == completed(WHOLE).layout


def test_null_is_absent():
    document = changed(layout={**WHOLE["layout"], "ulysses": None, "sp": None}, pin=None)
    assert completed(document).layout == completed(WHOLE).layout


def test_the_other_form_is_the_same_request():
    layout = {key: value for key, value in WHOLE["layout"].items() if key != "mbs"}
    other = {
        "id": "x1", "title": "", "observed": {}, "expect_codes": [], "source": "https://example.org",
        "model": "llama3-8b", "cluster": "h100x64",
        "workload": {**WHOLE["workload"], "mbs": 1},
        "their_config": {**layout, "framework": "megatron"},
        "pin": "tp=4",
    }  # fmt: skip
    assert complete(read_request(other)) == completed(WHOLE)


def test_a_layout_may_be_text():
    assert (
        completed(changed(layout="tp4 pp2 dp8 zero1 mbs1 vpp2 sched=interleaved rc=selective")).layout
        == completed(WHOLE).layout
    )


@pytest.mark.parametrize(
    "document, words",
    [
        ({"nonsense": 1}, "not a request; its keys are model, cluster"),
        (changed(workload=[1]), "workload is .* expected an object"),
        (changed(runtime=3), "runtime is 3; expected a text"),
        (changed(layout={"tp": 0}), r"layout.tp=0; a whole number from 1"),
        (changed(layout={"tp": "8"}), r"layout.tp='8'; a whole number"),
        (changed(layout={"tp": True}), r"layout.tp=True; a whole number"),
        (changed(layout={"dp": 4, "dp_replicate": "2", "dp_shard": "2"}), r"layout.dp_replicate='2'; a whole number"),
        (changed(layout="tp0"), r"layout.tp=0; a whole number from 1"),
        (changed(layout="tp8 zero9"), r"layout.zero=9; legal values: 0, 1, 2, 3"),
        (changed(layout="tp8 tensor_parallel=4"), r"request: layout .*did you mean 'tp'"),
        (changed(layout="recompute=full"), r"did you mean 'rc'\?"),
        (changed(layout={"tp": 2, "zero": 4}), r"legal values: 0, 1, 2, 3"),
        (changed(layout={"dpr": 2, "dp_replicate": 2}), "says dp_replicate twice"),
        (changed(layout={"dp": 4, "dp_replicate": 3, "dp_shard": 2}), "say dp alone"),
        (changed(layout={"tp": 2, "recompute": "stages"}), "a request names one kind"),
        (changed(their_config={"tp": 2}), "two names of one thing"),
        (changed(layout={"framework": "torch", "tp": 1}), "runtime 'megatron' and framework 'torch'"),
        (changed(workload={**WHOLE["workload"], "mbs": 2}), "say it once"),
    ],
)
def test_what_is_no_request(document, words):
    with pytest.raises(InputError, match=words):
        read_request(document)


def test_a_damaged_file_is_told_by_its_place(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(WHOLE)[:40])
    with pytest.raises(InputError, match=r"request.json: not JSON: it ends in the middle \(line 1"):
        read_request(path)


# Completing ----------------------------------------------------------------------------------------------------------


def test_a_whole_request_has_no_defaults_but_its_own():
    request = completed(WHOLE)
    assert request.defaults == {}
    assert request.layout == parse_layout("tp4 pp2 vpp2 dps8 zero1 mbs1 sched=interleaved rc=selective")
    assert (request.model.name, request.cluster.num_gpus, request.runtime.name) == ("llama3-8b", 64, "megatron")
    assert request.pin == "tp=4"


def test_what_is_not_said_is_defaulted_and_listed():
    request = completed(
        {
            "model": DIMENSIONS,
            "cluster": {"gpu": "H100", "nodes": 1},
            "workload": {"seq": 128, "gbs": 64},
            "layout": {"tp": 2},
        }
    )
    said = request.defaults
    assert request.runtime.name == said["runtime"] == "torch"
    assert said["layout.dp"] == "4 (world/(tp·pp·cp))"
    assert request.layout.dp == 4
    assert {"model.kv_heads": "8", "model.head_dim": "32", "model.tie_embeddings": "false"}.items() <= said.items()
    assert {"workload.precision": "bf16", "workload.optimizer": "adamw", "layout.mbs": "1"}.items() <= said.items()
    assert {"layout.pp", "layout.cp", "layout.vpp", "layout.zero", "layout.schedule", "layout.recompute"} <= set(said)
    assert "cluster.gpus_per_node" in said


@pytest.mark.parametrize(
    ("cluster", "runtime", "precision"),
    [
        ("v100-16x8", "megatron", "fp16"),
        ("t4x8", "deepspeed", "fp16"),
        ("v100-32x8", "torch", "fp32"),
        ({"gpu": "V100-32G", "nodes": 1}, "megatron", "fp16"),
        ("a100-80x8", "torch", "bf16"),
    ],
)
def test_the_default_precision_is_what_the_device_and_the_runtime_can_do(cluster, runtime, precision):
    document = changed(cluster=cluster, runtime=runtime, workload={"seq": 128, "gbs": 64}, layout={"tp": 2})
    request = completed(document)
    assert request.workload.precision == precision
    assert request.defaults["workload.precision"].startswith(precision)
    assert ("no bf16" in request.defaults["workload.precision"]) == (precision != "bf16")
    assert facts_of(read_request(document)).facts.precision == precision


def test_plan_needs_no_layout_and_predict_does():
    assert completed(without("layout")).layout is None
    with pytest.raises(InputError, match="there is no layout"):
        completed(without("layout"), needs_layout=True)


@pytest.mark.parametrize("absent, words", [("model", "no model"), ("cluster", "no cluster"), ("workload", "lacks seq")])
def test_what_nothing_implies_is_asked_for(absent, words):
    with pytest.raises(InputError, match=words):
        completed(without(absent))


def test_missing_dimensions_are_named():
    with pytest.raises(InputError, match="the model lacks ffn, vocab"):
        completed(changed(model={"name": "x", "num_layers": 2, "hidden": 8, "heads": 2}))
    with pytest.raises(InputError, match="not divisible by kv_heads"):
        completed(changed(model={**DIMENSIONS, "kv_heads": 3}))
    with pytest.raises(InputError, match="give head_dim"):
        completed(changed(model={**DIMENSIONS, "heads": 7}))


@pytest.mark.parametrize(
    "document, words",
    [
        (changed(layout={"tp": 4, "zeroo": 1}), r"'layout.zeroo' is not a key.*did you mean 'zero'"),
        (changed(workload={**WHOLE["workload"], "sequence": 1}), r"'workload.sequence'.*Known there: .*seq"),
        (changed(model={**DIMENSIONS, "num_layer": 4}), r"'model.num_layer'.*did you mean 'num_layers'"),
        (changed(modell="llama3-8b"), r"'modell'.*did you mean 'model'"),
    ],
)
def test_unknown_keys_are_errors_for_plan_and_listed_by_check(document, words):
    with pytest.raises(InputError, match=words):
        completed(document)
    notes = facts_of(read_request(document)).notes
    assert any("not a known key, not used" in note for note in notes)


@pytest.mark.parametrize(
    "document, words",
    [
        (changed(workload={**WHOLE["workload"], "inference": True}), "inference is not planned"),
        (changed(layout={"tp": 2, "lora": 8}), "training of adapters"),
        (changed(layout={"tp": 2, "packing": True}), "sequence packing"),
        (changed(runtime="verl-megatron"), "reinforcement learning"),
        (changed(layout={"tp": 2, "ulysses": 2}), "layout.ulysses=2 is not priced yet"),
        (changed(layout={"tp": 2, "offload_optimizer": "cpu"}), "not planned yet: the search does not choose it"),
        (changed(runtime="torch", layout={"tp": 2, "sp": False}), "always divides the sequence"),
    ],
)
def test_what_is_not_built_is_refused_by_name(document, words):
    with pytest.raises(NotYetError, match=words):
        completed(document)


@pytest.mark.parametrize(
    "layout, words",
    [
        ({"tp": 3}, r"world=64 is not divisible by tp·pp·cp = 3"),
        ({"tp": 2, "dp": 6, "dp_shard": 4, "zero": 1}, r"dp=6 is not divisible by dp_shard=4"),
        ({"tp": 2, "recompute": "everything"}, r"not a kind of megatron; legal: none, selective"),
        ({"tp": 2, "schedule": "fast"}, r"Legal values: gpipe, 1f1b"),
        ({"tp": 2, "microbatches": 5}, r"gbs=512 is not dp·mbs·microbatches = 32·mbs·5"),
        ({"tp": 2, "hsdp": True, "zero": 3}, r"say dp_replicate and dp_shard"),
        ({"tp": 2, "zero": 1, "gather": "use"}, r"legal gather there: step"),
    ],
)
def test_layouts_that_cannot_be(layout, words):
    with pytest.raises(InputError, match=words):
        completed(changed(layout=layout))


def test_zero_and_gather_follow_the_runtime():
    def layout_of(text, runtime):
        return completed(changed(layout=text, runtime=runtime)).layout

    assert layout_of("dp64 zero2", "deepspeed").gather is Gather.STEP
    assert layout_of("dp64 zero2", "torch").gather is Gather.MICRO
    assert layout_of("dp64 zero3", "torch").dp_shard == 64
    assert layout_of("dp64", "torch").dp_replicate == 64
    assert layout_of("dps8 zero3", "torch").dp == 8
    assert layout_of("tp8 pp8 zero3", "torch").zero == 0
    assert layout_of("pp4 vpp2", "torch").schedule is Schedule.INTERLEAVED


def test_micro_batches_imply_mbs():
    assert completed(changed(layout={"tp": 2, "microbatches": 4})).layout.mbs == 4
    assert completed(changed(layout={"tp": 2, "microbatches": 4, "mbs": 4})).layout.mbs == 4


def test_the_runtimes_etp():
    moe = {**DIMENSIONS, "moe": {"num_experts": 8, "top_k": 2, "moe_ffn": 64, "dense_layers": 1}}
    layout = {"tp": 4, "ep": 4}
    megatron = completed(changed(model=moe, layout=layout))
    assert megatron.layout.etp == 4
    assert megatron.defaults["layout.etp"] == "4 (megatron's)"
    assert megatron.model.moe.num_dense_layers == 1
    assert completed(changed(model=moe, layout=layout, runtime="torchtitan")).layout.etp == 1
    assert completed(changed(model=moe, layout={"tp": 4})).layout.etp == 4, "without ep too"
    assert completed(changed(layout={"tp": 4})).layout.etp == 1, "a dense model has no experts to divide"


def test_bytes_replace_the_runtimes():
    request = completed(changed(workload={**WHOLE["workload"], "bytes": {"weight": 2, "grad": 2, "optim": 4}}))
    assert request.runtime.state_bytes["bf16"].total == 8
    with pytest.raises(InputError, match="an object of bytes per parameter"):
        completed(changed(workload={**WHOLE["workload"], "bytes": 18}))


def test_an_unknown_framework_is_generic_and_said():
    request = completed(changed(runtime="mlx", layout={"tp": 2}))
    assert request.runtime.name == "generic"
    assert request.defaults["runtime"] == "generic (there is no record of 'mlx')"


def test_sequence_parallelism_is_a_choice_where_the_runtime_has_it():
    assert completed(changed(layout={"tp": 2, "sp": False})).runtime.sequence_parallel is False
    assert completed(changed(layout={"tp": 2})).runtime.sequence_parallel is True


# What a request states -----------------------------------------------------------------------------------------------


def test_stated_degrees():
    facts = facts_of(read_request(changed(layout={"tp": 4}))).facts
    assert (facts.tp, facts.pp, facts.cp, facts.ep, facts.vpp, facts.dp) == (4, 1, 1, 1, 1, 16)
    assert facts.zero is facts.dp_shard is facts.schedule is facts.recompute is facts.sp is None


@pytest.mark.parametrize(
    "layout, expected",
    [
        ({"dp": 64, "zero": 0}, (64, 64, 1, 0)),
        ({"dp": 64, "zero": 3}, (64, 1, 64, 3)),
        ({"dp": 64, "zero": 3, "hsdp": True}, (64, None, None, 3)),
        ({"dp": 64, "dp_shard": 8, "zero": 3}, (64, 8, 8, 3)),
        ({"dp_replicate": 4, "dp_shard": 16, "zero": 1}, (64, 4, 16, 1)),
        ({"tp": 8, "pp": 8, "zero": 1}, (1, 1, 1, 0)),
        ({"tp": 8, "cp": 8, "zero": 1}, (1, 1, 1, 1)),
        ({"tp": 3, "zero": 1}, (None, None, None, 1)),
    ],
)
def test_dp_and_zero_as_stated(layout, expected):
    facts = facts_of(read_request(changed(layout=layout))).facts
    assert (facts.dp, facts.dp_replicate, facts.dp_shard, facts.zero) == expected


def test_ulysses_divides_the_sequence():
    facts = facts_of(read_request(changed(layout={"ulysses": 4}))).facts
    assert (facts.cp, facts.dp, facts.ulysses) == (4, 16, 4)


def test_micro_batches_stated_or_worked_out():
    assert facts_of(read_request(changed(layout={"dp": 64, "mbs": 2}))).facts.num_micro_batches == 4
    stated = facts_of(read_request(changed(layout={"dp": 64, "microbatches": 3}))).facts
    assert (stated.num_micro_batches, stated.microbatches) == (3, 3)
    assert facts_of(read_request(changed(layout={"dp": 64, "mbs": 3}))).facts.num_micro_batches is None


def test_memory_of_known_and_unknown_gpus():
    def device_bytes(**cluster):
        return facts_of(read_request(changed(cluster={"nodes": 1, "gpus_per_node": 8, **cluster}))).facts.device_bytes

    assert device_bytes(gpu="H100-80G", gpu_mem_gb=80) < 80 * 2**30
    assert device_bytes(gpu="some card", gpu_mem_gb=48) == 48 * 2**30
    assert device_bytes(gpu="any") is None
    assert device_bytes() is None


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("layout", {"schedule": "Chimera"}, r"layout.schedule='Chimera' is not known\. Legal values: gpipe, 1f1b"),
        ("layout", {"schedule": "1F1b "}, r"did you mean '1f1b'\?"),
        ("layout", {"sched": "foo"}, "layout.schedule='foo' is not known"),
        ("layout", {"schedule": 3}, "layout.schedule=3 is not known"),
        ("layout", {"gather": "never"}, r"layout.gather='never'.*Legal values: use, micro, step"),
        ("layout", {"recompute": "some"}, r"recompute='?some'? is (no|not a) kind of megatron.*none, selective, full"),
        ("layout", {"recompute": True}, "layout.recompute=True; a text is needed"),
        ("layout", {"sp": "yes"}, "layout.sp='yes'; true or false is needed"),
        ("layout", {"offload_param": "disk"}, "layout.offload_param='disk'.*Legal values: none, cpu, nvme"),
        ("layout", {"mbs": "2"}, "layout.mbs='2'; a whole number from 1"),
        ("workload", {"precision": 7}, "workload.precision=7 is not known.*Legal values: fp32, bf16"),
        ("workload", {"precision": "bf61"}, "did you mean 'bf16'"),
        ("workload", {"optimizer": 3}, "workload.optimizer=3; a text is needed"),
        ("workload", {"mbs": 0}, "layout.mbs=0; a whole number from 1"),
        ("model", {**DIMENSIONS, "norm": "batchnorm"}, "model.norm='batchnorm' is not known.*rmsnorm, layernorm"),
        ("model", {**DIMENSIONS, "tie_embeddings": "true"}, "model.tie_embeddings='true'; true or false is needed"),
    ],
)
def test_values_that_nobody_knows_are_errors_of_every_verb(section, change, words):
    document = changed(**{section: change if section == "model" else {**WHOLE[section], **change}})
    if "sched" in change:
        del document["layout"]["schedule"]
    if section == "workload" and "mbs" in change:
        del document["layout"]["mbs"]
    for read in (lambda: facts_of(read_request(document)), lambda: completed(document)):
        with pytest.raises(InputError, match=words):
            read()


def test_words_are_read_without_regard_to_case():
    document = changed(workload={**WHOLE["workload"], "precision": "BF16", "optimizer": "AdamW"})
    assert completed(document) == completed(WHOLE)
    assert facts_of(read_request(document)) == facts_of(read_request(WHOLE))


def test_a_kind_of_recompute_that_an_unknown_framework_may_have_is_told():
    notes = facts_of(read_request(changed(runtime="oneflow", layout={"tp": 2, "recompute": "some"}))).notes
    assert any("layout.recompute: 'some' is not known, not judged" in note for note in notes)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("workload.batch_size", "did you mean 'gbs'"),
        ("workload.GlobalBatchSize", "did you mean 'gbs'"),
        ("workload.seq_len", "did you mean 'seq'"),
        ("workload.dtype", "did you mean 'precision'"),
        ("model.num_hidden_layers", "did you mean 'num_layers'"),
        ("model.moe.num_experts_per_tok", "did you mean 'top_k'"),
        ("cluster.num_gpus", "did you mean 'world'"),
        ("cluster.num_nodes", "did you mean 'nodes'"),
        ("layout.tensor_model_parallel_size", "did you mean 'tp'"),
        ("layout.zero_stage", "did you mean 'zero'"),
        ("layout.gradient_accumulation_steps", "did you mean 'microbatches'"),
        ("workload.tp", "did you mean 'tp' in layout"),
        ("gbs", "did you mean 'gbs' in workload"),
        ("batch_size", "did you mean 'gbs' in workload"),
        ("parallelism", "did you mean 'layout'"),
        ("layout.zzzzzz", ""),
    ],
)
def test_an_unknown_key_names_what_it_may_mean(path, words):
    assert words in meant(path)
    assert bool(words) == bool(meant(path))


@pytest.mark.parametrize(
    "model, words",
    [
        ({**DIMENSIONS, "heads": "8"}, "model.heads='8'; a whole number from 1"),
        ({**DIMENSIONS, "heads": 0}, "model.heads=0; a whole number from 1"),
        ({**DIMENSIONS, "hidden": 256.5}, "model.hidden=256.5; a whole number"),
        ({**DIMENSIONS, "moe": {"num_experts": 8, "topk": 2}}, "'model.moe.topk'.*did you mean 'top_k'"),
        ({**DIMENSIONS, "moe": 3}, r"model\.moe is 3; expected"),
        ({"name": 7}, "model.name=7; a text is needed"),
        ({}, "the model lacks num_layers, hidden"),
    ],
)
def test_dimensions_of_the_wrong_kind(model, words):
    with pytest.raises(InputError, match=words):
        completed(changed(model=model))
