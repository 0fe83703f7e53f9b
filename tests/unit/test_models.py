"""Models: presets with the published counts, Hugging Face files, what is refused, and what `profile` shows."""

import json
from dataclasses import replace

import pytest

from cost_models.data import rows
from cost_models.records import BlockKind, Model, Moe, from_json, save, to_json
from planner.errors import InputError
from planner.readers.hf_config import FAMILIES, model_from_hf_config
from planner.readers.models import model_document, model_names, read_model

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "llava1.5-7b": 7_063_427_072,
    "gemma3-27b": 27_432_406_640,
    "llama4-scout": 108_641_793_536,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    assert read_model(name).num_params == PUBLISHED[name] == rows("models")[name]["published_params"]


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [("gpt3-175b", 174.6, 1), ("megatron-530b", 529.6, 1), ("megatron-1t", 1008.0, 1), ("megatron-22b", 22, 0)],
)
def test_rounded_counts_are_the_published_ones(name, billions, digits):
    assert round(read_model(name).num_params / 1e9, digits) == billions


@pytest.mark.parametrize("name", ["megatron-22b", "megatron-530b", "megatron-1t"])
def test_megatron_is_the_formula_of_narayanan_and_the_final_norm(name):
    m = read_model(name)
    layers, h, vocab, seq = m.num_layers, m.hidden, m.vocab, m.max_positions
    # P = 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h)), arXiv 2104.04473, equation 2
    assert m.num_params - 2 * h == 12 * layers * h * h + 13 * layers * h + (vocab + seq) * h


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.2), ("deepseek-v3", 37.6)],
)
def test_active_parameters(name, billions):
    # the model cards say 12.9, 3.3, 22 and 37 billion
    assert read_model(name).active_params == pytest.approx(billions * 1e9, rel=0.02)


def test_each_row_has_its_birth_certificate():
    for name, row in rows("models").items():
        assert row["source"], name
        assert row["date"], name
        assert from_json(Model, {"name": name, **row["fields"]}).num_params > 0


@pytest.mark.parametrize(
    "spelling", ["llama3-8b", "LLAMA3-8B", "Llama-3-8B", "llama3_8b", " llama-3.1-8b ", "meta-llama/Meta-Llama-3-8B"]
)
def test_spellings_of_a_preset(spelling):
    assert read_model(spelling).name == "llama3-8b"


def test_aliases_are_unambiguous():
    spellings = [alias for name, row in rows("models").items() for alias in (name, *row["aliases"])]
    assert len(spellings) == len(set(spellings))
    with pytest.raises(InputError):
        read_model("llama-38b")  # digits never grow together: this is not llama3-8b


def test_an_unknown_preset_lists_the_near_names_and_the_way_to_all():
    with pytest.raises(InputError, match=r"'lama3-8b' is not a preset.*near names: llama3-8b.*help models"):
        read_model("lama3-8b")
    with pytest.raises(InputError, match=r"known names: gpt3-175b, .*deepseek-v3"):
        read_model("zzz")
    with pytest.raises(InputError, match=r"there is no such file.*llama3-8b"):
        read_model("nowhere/config.json")


# Hugging Face ------------------------------------------------------------------------------------------------------

SAMPLES = {
    "llama3_8b.json": "llama3-8b",
    "llama3_70b.json": "llama3-70b",
    "llama3.1_405b.json": "llama3-405b",
    "mixtral_8x7b.json": "mixtral-8x7b",
    "qwen3-8B_config.json": "qwen3-8b",
    "qwen3-30B-A3B_config.json": "qwen3-30b-a3b",
    "qwen3-235B-A22B_config.json": "qwen3-235b-a22b",
    "deepseek_v3_config.json": "deepseek-v3",
}


@pytest.mark.parametrize("file", SAMPLES)
def test_real_files_are_the_presets(shared, file):
    found = read_model(str(shared / "samples" / "hf_config" / file))
    preset = read_model(SAMPLES[file])
    assert to_json(replace(found, name="")) == to_json(replace(preset, name=""))


def test_an_image_and_text_encoder_is_refused_by_name(shared):
    with pytest.raises(InputError, match=r"clip_vit_l14\.json: model_type 'clip' is an image and a text encoder"):
        read_model(str(shared / "samples" / "hf_config" / "clip_vit_l14.json"))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def read(**changes):
    data = LLAMA | changes
    return model_from_hf_config({key: value for key, value in data.items() if value != "absent"}, "m")


def test_what_a_silent_file_means():
    assert read().kv_heads == 4  # absent: as many as heads
    assert read(head_dim=None).head_dim == 16  # null: hidden / heads
    assert read(head_dim=32).head_dim == 32
    assert not read().tie_embeddings  # the class's default
    assert read(model_type="gemma").tie_embeddings
    assert not read(model_type="gemma", tie_word_embeddings=False).tie_embeddings
    assert read(model_type="mistral").sliding_window == 4096
    assert read(model_type="mistral", sliding_window=None).sliding_window is None
    assert read(model_type="qwen2", sliding_window=4096).sliding_window is None  # needs use_sliding_window
    assert read(model_type="qwen2", sliding_window=4096, use_sliding_window=True).sliding_window == 4096


def test_a_class_name_stands_in_for_the_type():
    assert read(model_type="absent", architectures=["Qwen3ForCausalLM"]).qk_norm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, r"hidden_size='64'; a whole number"),
        ({"hidden_size": True}, r"hidden_size=True; a whole number"),
        ({"hidden_size": "absent"}, r"lacks hidden: none of hidden_size, d_model, n_embd"),
        ({"n_layer": 3}, r"num_hidden_layers=2 and n_layer=3 contradict one another"),
        ({"num_key_value_heads": 3}, r"heads=4 is not divisible by kv_heads=3; legal kv_heads: 1, 2, 4"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes'; true or false"),
        ({"attention_bias": True}, r"attention_bias=True, mlp_bias=False: biases in only half"),
        ({"model_type": "t5"}, r"model_type 't5' is an encoder with a decoder"),
        ({"model_type": "bert"}, r"'bert' is an encoder; Meshwright plans decoder-only"),
        ({"model_type": "mamba2"}, r"'mamba2' is a state-space"),
        ({"is_encoder_decoder": True}, r"is an encoder with a decoder"),
        (
            {"model_type": "idefics3", "vision_config": {}, "text_config": {}},
            r"'idefics3' is multimodal \(it has vision_config",
        ),
        ({"model_type": "mllama"}, r"'mllama': its language model looks at the image in layers of cross-attention"),
        (
            {"model_type": "qwen2_vl"},
            r"'qwen2_vl': it takes images of any size.*write the chain as a model of your own",
        ),
        ({"model_type": "llava"}, r"text_config is absent; an object with its dimensions"),
        (
            {"model_type": "llava", "text_config": {}, "vision_config": {"model_type": "vit"}},
            r"vision_config.model_type='vit' is not known; known: clip_vision_model, siglip",
        ),
        ({"model_type": "zzz"}, r"model_type 'zzz' is not known; known: bloom, deepseek_v2"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 0},
            r"decoder_sparse_step=0; a whole number from 1",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 3},
            r"decoder_sparse_step=3: none of the 2 layers has experts",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [2]},
            r"mlp_only_layers has layer 2; layers are 0..1",
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, r"not one word for each of the 2 layers"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "linear_attention"]},
            r"'linear_attention': only attention is priced; known words: sliding_attention",
        ),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"lacks top_k"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}, r"top_k=4 of num_experts=2"),
        ({"model_type": "deepseek_v3"}, r"lacks kv_lora_rank"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, changes, words):
    data = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"config\.json: .*{words}"):
        read_model(str(path))


def test_damaged_files_are_one_clear_error(tmp_path):
    path = tmp_path / "config.json"
    for text, words in [
        ("{", "truncated or damaged"),
        ("[]", "expected an object that describes a model"),
        ("{}", "neither"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            read_model(str(path))
    path.write_text('{"schema_version": 99, "model": {}}')
    with pytest.raises(InputError, match="schema_version 99 is newer than"):
        read_model(str(path))


# The counts of transformers' own classes, for configurations that differ where families differ.
_BASE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = _BASE | {"intermediate_size": 96, "num_key_value_heads": 2}
_MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLASSES = {
    "llama": _LLAMA,
    "llama, tied, biases": _LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, head_dim": _LLAMA | {"head_dim": 32},
    "granite": _LLAMA,
    "smollm3": _LLAMA | {"pad_token_id": 0},
    "mistral": _LLAMA,
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA | _MOE | {"num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen2_moe, every second layer": _LLAMA
    | _MOE
    | {"num_experts": 4, "shared_expert_intermediate_size": 48, "num_hidden_layers": 6, "decoder_sparse_step": 2},
    "qwen3": _LLAMA | {"head_dim": 32},
    "qwen3_moe": _LLAMA | _MOE | {"num_experts": 4, "head_dim": 32},
    "qwen3_moe, a dense layer": _LLAMA | _MOE | {"num_experts": 4, "head_dim": 32, "mlp_only_layers": [1]},
    "llama4_text": _LLAMA
    | {"num_hidden_layers": 6, "intermediate_size_mlp": 160, "num_local_experts": 4, "num_experts_per_tok": 1}
    | {"interleave_moe_layer_step": 2, "head_dim": 16},
    "llama4_text, all layers": _LLAMA
    | {"intermediate_size_mlp": 160, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}
    | {"interleave_moe_layer_step": 1},
    "deepseek_v2": _BASE
    | _MLA
    | _MOE
    | {"intermediate_size": 96, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": _BASE
    | _MLA
    | _MOE
    | {"intermediate_size": 96, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "glm4_moe": _LLAMA
    | _MOE
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
    | {"attention_bias": True, "head_dim": 16, "n_group": 1, "topk_group": 1},
    "phi3": _LLAMA | {"pad_token_id": 0},
    "gemma": _LLAMA | {"head_dim": 32},
    "gemma2": _LLAMA | {"head_dim": 32},
    "gemma3_text": _LLAMA | {"head_dim": 32},
    "starcoder2": _LLAMA,
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "opt": _BASE | {"ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64},
    "gpt_neox": _BASE | {"intermediate_size": 96},
    "bloom": {"vocab_size": 256, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "falcon": _BASE,
    "falcon, 40b": _BASE | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, no multi-query": _BASE | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
}


def test_every_family_has_its_class_counted():
    assert set(FAMILIES) - {"kimi_k2"} == {case.split(",")[0] for case in CLASSES}  # kimi_k2 is deepseek_v3's class


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CLASSES)
def test_counts_are_those_of_the_transformers_classes(case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = case.split(",")[0]
    config = transformers.AutoConfig.for_model(kind, **CLASSES[case])
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in network.parameters())
    ours = model_from_hf_config(CLASSES[case] | {"model_type": kind}, case)
    # transformers keeps the router's bias as a buffer; DeepSeek's report counts it
    routed = sum(count for one, count in ours.layers_of_kinds if one.kind is BlockKind.MOE)
    biases = routed * ours.moe.num_experts if ours.moe and ours.moe.router_bias else 0
    assert ours.num_params - biases == counted


_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP |= {"image_size": 56, "patch_size": 14}
_GEMMA = _LLAMA | {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 16}
_LLAMA4 = CLASSES["llama4_text"] | {"pad_token_id": 0}
TOWERS = {
    "llava": {
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": {"model_type": "clip_vision_model", **_CLIP},
        "vision_feature_layer": -1,
    },
    "llava, siglip, two layers": {
        "text_config": {"model_type": "qwen2", **_LLAMA},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_CLIP},
        "vision_feature_layer": [-2, -1],
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_GEMMA},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_CLIP},
        "mm_tokens_per_image": 4,
    },
    "llama4": {
        "text_config": {"model_type": "llama4_text", **_LLAMA4},
        "vision_config": {"model_type": "llama4_vision_model", **_CLIP}
        | {"intermediate_size": 128, "projector_input_dim": 44, "projector_output_dim": 44, "vision_output_dim": 44},
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TOWERS)
def test_counts_of_towers_are_those_of_the_transformers_classes(case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = case.split(",")[0]
    config = transformers.AutoConfig.for_model(kind, **TOWERS[case])
    with torch.device("meta"):
        network = transformers.AutoModelForImageTextToText.from_config(config)
    ours = model_from_hf_config(TOWERS[case] | {"model_type": kind}, case)
    assert ours.num_params == sum(parameter.numel() for parameter in network.parameters())


def test_windows_and_experts_of_single_layers():
    gemma = model_from_hf_config(TOWERS["gemma3"] | {"model_type": "gemma3"}, "g")
    names = [(group.name, group.count, group.window) for group in gemma.layer_groups]
    assert names[2:] == [("projector", 1, None), *(("language", n, w) for n, w in ((5, 16), (1, 0), (1, 16)))]
    assert [group.tokens for group in gemma.layer_groups[:3]] == [16, 16, 4]
    types = ["full_attention", "sliding_attention", "full_attention"]
    listed = model_from_hf_config({"model_type": "gemma2", "layer_types": types, **_LLAMA, "head_dim": 32}, "g")
    assert [group.window for group in listed.layer_groups] == [0, 4096, 0]
    alike = model_from_hf_config(
        _LLAMA | {"model_type": "qwen3", "head_dim": 32, "layer_types": ["full_attention"] * 3}, "q"
    )
    assert not alike.layer_groups
    assert alike.sliding_window is None
    step = CLASSES["qwen2_moe, every second layer"]
    mixed = model_from_hf_config(step | {"model_type": "qwen2_moe"}, "m")
    assert [group.experts for group in mixed.layer_groups] == [False, True] * 3


# Documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_the_blocks_of_a_profile_sum_to_the_model(name):
    model = read_model(name)
    document = model_document(model, seq=2048)
    blocks = document["blocks"]
    assert sum(block["count"] for block in blocks) == model.num_blocks
    assert sum(block["total_params"] for block in blocks) == document["num_params"] == model.num_params
    assert sum(block["count"] * block["active_params"] for block in blocks) == model.active_params
    assert sum(b["count"] * b["flops_per_token"] for b in blocks) == pytest.approx(model.model_flops_per_token(2048))
    assert blocks[0]["kind"] == "embedding"


def test_flops_of_llama3_8b_by_hand():
    # 6 x (8,030,261,248 - 525,336,576 of the look-up) + 12 x 32 layers x 8192 x 4096
    assert read_model("llama3-8b").model_flops_per_token(8192) == 6 * (8030261248 - 525336576) + 12 * 32 * 8192 * 4096


def test_saved_models_and_profiles_read_back(tmp_path):
    for name in ("llama-tiny", "deepseek-v3"):
        model = read_model(name)
        save(model, tmp_path / "model.json")
        (tmp_path / "profile.json").write_text(json.dumps(model_document(model)))
        (tmp_path / "request.json").write_text(json.dumps({"model": name}))
        for file in ("model.json", "profile.json", "request.json"):
            assert read_model(str(tmp_path / file)) == model
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model(str(tmp_path)).hidden == 64


def test_an_empty_sequence_is_refused():
    with pytest.raises(InputError, match="at least one token"):
        model_document(read_model("llama-tiny"), seq=0)


def test_the_gate_of_shared_experts_and_the_norm_behind_the_embedding_count():
    base = read_model("qwen3-30b-a3b")
    moe = Moe(num_experts=4, top_k=2, moe_ffn=32, shared_ffn=64)
    gated = Moe(num_experts=4, top_k=2, moe_ffn=32, shared_ffn=64, shared_gate=True)

    assert replace(base, moe=gated).num_params - replace(base, moe=moe).num_params == base.num_layers * base.hidden
    assert replace(base, embedding_norm=True).num_params - base.num_params == base.hidden


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "attention heads is 0"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window='4096'; a whole number"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window=-4"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": "x"}, "num_ln_in_parallel_attn='x'"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": ["a", 1]},
            "mlp_only_layers=.*a list of numbers",
        ),
    ],
)
def test_odd_values_of_a_config(tmp_path, change, words):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100, "moe_intermediate_size": 8} | change  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        read_model(str(path))
