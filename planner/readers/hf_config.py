"""Hugging Face's config.json, read without transformers.

One table says what each model type's classes do without asking the file (norms, biases, positions, tied embeddings);
one table says under which names the files hold the dimensions. Parameter counts were compared with those of the
transformers classes (5.x), and the tests do it again where transformers is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models.records import LayerGroup, Mla, Model, Moe, Norm, Positions
from planner.errors import InputError
from planner.readers import hf_towers
from planner.readers.hf_layers import experts_of_layers, groups_of_layers, windows_of_layers

ALIASES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "d_model", "n_embd", "n_embed"),
    "ffn": ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "dense_ffn": ("intermediate_size_mlp",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_ffn": ("moe_intermediate_size",),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "num_dense_layers": ("first_k_dense_replace",),
    "num_mtp_layers": ("num_nextn_predict_layers",),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Field -> the keys under which files hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model type's classes do whatever its file says, and its defaults where the file is silent."""

    tie_default: bool
    """tie_word_embeddings where the file does not say: an absent key means the class's default."""
    gated_mlp: bool = True
    """Three matrices in the MLP."""
    norm: Norm = Norm.RMSNORM
    """Kind of norm."""
    norms_per_layer: int = 2
    """Norms of the residual stream in a layer."""
    positions: Positions = Positions.ROPE
    """Kind of positions."""
    extra_positions: int = 0
    """Rows of the learned positions beyond the file's number."""
    qk_norm: bool = False
    """Norms over query and key heads."""
    qkv_bias: bool = False
    """Biases of query, key and value, where the file has no key for them."""
    linear_bias: bool = False
    """Biases of the other projections, where the file has no key for them."""
    qkv_bias_key: str | None = None
    """The file's key for the biases of query, key and value."""
    linear_bias_keys: tuple[str, ...] = ()
    """The file's keys for the biases of the other projections: they must agree."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    router_bias: bool = False
    """A bias per expert in the router."""
    shared_experts: int = 0
    """Experts that see every token, where the file has no key for them."""
    shared_gate: bool = False
    """A gate in front of the shared experts."""
    window_default: int | None = None
    """Sliding window where the file does not say."""
    window_switch: str | None = None
    """The file's key that switches the window on; without it the window is off."""


_LAYER_NORM = {"norm": Norm.LAYERNORM, "gated_mlp": False}
_GPT = {**_LAYER_NORM, "qkv_bias": True, "linear_bias": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(tie_default=False, qkv_bias_key="attention_bias", linear_bias_keys=("attention_bias", "mlp_bias")),
    "granite": Family(
        tie_default=False, qkv_bias_key="attention_bias", linear_bias_keys=("attention_bias", "mlp_bias")
    ),
    "smollm3": Family(tie_default=True, qkv_bias_key="attention_bias", linear_bias_keys=("attention_bias", "mlp_bias")),
    "mistral": Family(tie_default=False, window_default=4096),
    "mixtral": Family(tie_default=False),
    "qwen2": Family(tie_default=False, qkv_bias=True, window_switch="use_sliding_window"),
    "qwen2_moe": Family(
        tie_default=False, qkv_bias=True, qkv_bias_key="qkv_bias", shared_gate=True, window_switch="use_sliding_window"
    ),
    "qwen3": Family(tie_default=False, qk_norm=True, window_switch="use_sliding_window"),
    "qwen3_moe": Family(tie_default=False, qk_norm=True, window_switch="use_sliding_window"),
    "deepseek_v2": Family(tie_default=False),
    "deepseek_v3": Family(tie_default=False, router_bias=True),
    "kimi_k2": Family(tie_default=False, router_bias=True),
    "glm4_moe": Family(tie_default=False, qkv_bias_key="attention_bias", router_bias=True),
    "phi3": Family(tie_default=False),
    "gemma": Family(tie_default=True),
    "gemma2": Family(tie_default=True, norms_per_layer=4),
    "gemma3_text": Family(tie_default=True, norms_per_layer=4, qk_norm=True),
    "llama4_text": Family(
        tie_default=False, qkv_bias_key="attention_bias", linear_bias_keys=("attention_bias",), shared_experts=1
    ),
    "starcoder2": Family(
        tie_default=True,
        **_GPT,  # type: ignore[arg-type]
        qkv_bias_key="use_bias",
        linear_bias_keys=("use_bias",),
    ),
    "gpt2": Family(tie_default=True, **_GPT, positions=Positions.LEARNED),  # type: ignore[arg-type]
    # positions 0 and 1 of OPT's table are reserved
    "opt": Family(
        tie_default=True,
        **_GPT,  # type: ignore[arg-type]
        positions=Positions.LEARNED,
        extra_positions=2,
        qkv_bias_key="enable_bias",
        linear_bias_keys=("enable_bias",),
    ),
    "gpt_neox": Family(tie_default=False, **_GPT),  # type: ignore[arg-type]
    "bloom": Family(tie_default=True, **_GPT, positions=Positions.NONE, embedding_norm=True),  # type: ignore[arg-type]
    "falcon": Family(tie_default=True, **_LAYER_NORM, qkv_bias_key="bias", linear_bias_keys=("bias",)),  # type: ignore[arg-type]
}
"""model_type -> what its classes do. Source: the transformers classes, version 5.24, read and counted 2026-11-30."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "whisper"), "an encoder with a decoder"),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "deberta", "deberta-v2", "electra", "modernbert"), "an encoder"),
    **dict.fromkeys(("clip", "siglip", "blip", "align"), "an image and a text encoder side by side"),
    **dict.fromkeys(("clip_text_model", "clip_vision_model", "vit", "dinov2", "swin", "convnext"), "an encoder"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "a state-space or recurrent network"),
    **dict.fromkeys(("jamba", "bamba", "zamba2", "nemotron_h", "qwen3_next", "lfm2"), "a hybrid with layers that are not attention"),
}  # fmt: skip
"""model_type -> what it is instead of a decoder of transformer layers."""


def is_hf_config(data: Mapping[str, Any]) -> bool:
    """Whether a JSON document is a Hugging Face config."""
    return "model_type" in data or "architectures" in data or "transformers_version" in data


def model_from_hf_config(data: Mapping[str, Any], name: str) -> Model:
    """The model of a parsed config.json.

    Raises InputError: by name and with the reason for what is neither a decoder-only transformer nor one behind a vision
    tower, and for what a Model cannot say (biases in half of the projections).
    """
    multimodal = str(data.get("model_type"))
    if multimodal in hf_towers.PROJECTORS:
        text = hf_towers.part(data, "text_config", hf_towers.DEFAULT_LANGUAGES[multimodal])
        text = {"tie_word_embeddings": data.get("tie_word_embeddings")} | text
        return hf_towers.with_towers(data, model_from_hf_config(text, name or multimodal))
    if multimodal in hf_towers.REFUSED:
        raise InputError(
            f"model_type {multimodal!r}: {hf_towers.REFUSED[multimodal]}; write the chain as a model of your own (layer_groups), "
            "or give its text_config as a file of its own, if the text part is what is trained"
        )
    model_type = _model_type(data)
    family = FAMILIES[model_type]
    hidden = _number(data, "hidden")
    heads = _number(data, "heads")
    mla = _mla(data, model_type)
    if not heads:
        raise InputError("the number of attention heads is 0; a whole number from 1 is needed")
    head_dim = _number(data, "head_dim", None) or hidden // heads
    learned = family.positions is Positions.LEARNED
    num_layers = _number(data, "num_layers")
    moe, groups = _layers(data, model_type, family, num_layers)
    return Model(
        name=name or model_type,
        num_layers=num_layers,
        hidden=hidden,
        ffn=_number(data, "dense_ffn", None) or _number(data, "ffn", None) or 4 * hidden,
        heads=heads,
        kv_heads=_kv_heads(data, model_type, heads),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else head_dim,
        vocab=_number(data, "vocab"),
        tie_embeddings=_flag(data, "tie_word_embeddings", family.tie_default),
        gated_mlp=family.gated_mlp,
        norm=family.norm,
        norms_per_layer=_norms_per_layer(data, model_type, family),
        positions=_positions(data, model_type, family),
        max_positions=_number(data, "max_positions") + family.extra_positions if learned else 0,
        embedding_norm=family.embedding_norm,
        qk_norm=_flag(data, "use_qk_norm", False) if model_type == "glm4_moe" else family.qk_norm,
        qkv_bias=_flag(data, family.qkv_bias_key, family.qkv_bias),
        linear_bias=_linear_bias(data, model_type, family),
        sliding_window=None if groups else _window(data, family),
        moe=moe,
        mla=mla,
        num_mtp_layers=_number(data, "num_mtp_layers", 0),
        layer_groups=groups,
    )


def _layers(
    data: Mapping[str, Any], model_type: str, family: Family, num_layers: int
) -> tuple[Moe | None, tuple[LayerGroup, ...]]:
    """(experts, groups of unlike layers): no groups where leading dense layers and one window say it all."""
    leading = _number(data, "num_dense_layers", 0)
    has_experts = _number(data, "num_experts", 0) > 0
    experts = experts_of_layers(data, model_type, num_layers, leading) if has_experts else []
    moe = _moe(data, family)
    windows = windows_of_layers(data, model_type, num_layers)
    if not family.window_switch or _flag(data, family.window_switch, False):
        mixed = len(set(windows)) > 1
    else:
        windows, mixed = [], False
    num_dense = experts.index(True) if True in experts else num_layers
    if moe and (mixed or not all(experts[num_dense:])):
        return moe, groups_of_layers(windows if mixed else [], experts)
    if mixed:
        return moe, groups_of_layers(windows, [])
    return (replace(moe, num_dense_layers=num_dense) if moe else None), ()


def _model_type(data: Mapping[str, Any]) -> str:
    said = data.get("model_type")
    if said is None:
        listed = data.get("architectures") or [""]
        architecture = str(listed[0] if isinstance(listed, list) else listed).lower()
        by_class = {kind.replace("_", ""): kind for kind in (*FAMILIES, *REFUSED)}
        found = [by_class[key] for key in by_class if architecture in (f"{key}forcausallm", f"{key}lmheadmodel")]
        said = found[0] if found else (architecture or None)
    kind = str(said)
    if kind in FAMILIES and not data.get("is_encoder_decoder"):
        return kind
    parts = [key for key in ("vision_config", "audio_config", "text_config") if key in data]
    if kind in REFUSED or data.get("is_encoder_decoder"):
        reason = REFUSED.get(kind, "an encoder with a decoder")
        raise InputError(f"model_type {kind!r} is {reason}; Meshwright plans decoder-only transformers")
    if parts:
        raise InputError(
            f"model_type {kind!r} is multimodal (it has {', '.join(parts)}); Meshwright plans decoder-only transformers: "
            "give its text_config as a file of its own, if the text part is what is trained"
        )
    raise InputError(
        f"model_type {said!r} is not known; known: {', '.join(sorted(FAMILIES))}. A saved Model record does as well: "
        "`meshwright profile llama3-8b -o model.json` writes one to start from"
    )


# One field each ----------------------------------------------------------------------------------------------------

_REQUIRED = object()


def _number(data: Mapping[str, Any], field: str, default: Any = _REQUIRED) -> Any:
    """The whole number that the file gives for a field, under any of its names; null counts as absent."""
    given = {key: data[key] for key in ALIASES[field] if data.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{key}={value!r}; a whole number from 0 is needed")
    if len(set(given.values())) > 1:
        raise InputError(
            f"{' and '.join(f'{key}={value}' for key, value in given.items())} contradict one another; keep one"
        )
    if given:
        return next(iter(given.values()))
    if default is _REQUIRED:
        raise InputError(f"lacks {field}: none of {', '.join(ALIASES[field])} is there")
    return default


def _flag(data: Mapping[str, Any], key: str | None, default: bool) -> bool:
    value = data.get(key) if key else None
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"{key}={value!r}; true or false is needed")
    return value


def _kv_heads(data: Mapping[str, Any], model_type: str, heads: int) -> int:
    if model_type == "falcon" and not _flag(data, "new_decoder_architecture", False):
        return 1 if _flag(data, "multi_query", True) else heads
    kv_heads: int = _number(data, "kv_heads", None) or heads
    return kv_heads


def _norms_per_layer(data: Mapping[str, Any], model_type: str, family: Family) -> int:
    if model_type != "falcon" or not _flag(data, "parallel_attn", True):
        return family.norms_per_layer
    count = data.get("num_ln_in_parallel_attn")
    if count is None:
        count = 2 if _flag(data, "new_decoder_architecture", False) else 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"num_ln_in_parallel_attn={count!r}; a whole number from 1 is needed")
    return count


def _positions(data: Mapping[str, Any], model_type: str, family: Family) -> Positions:
    if model_type == "falcon" and _flag(data, "alibi", False):
        return Positions.NONE
    if model_type == "opt" and data.get("word_embed_proj_dim") not in (None, data.get("hidden_size")):
        raise InputError(
            f"word_embed_proj_dim={data['word_embed_proj_dim']} differs from hidden_size={data.get('hidden_size')}: "
            "a projection behind the embedding is not supported"
        )
    return family.positions


def _linear_bias(data: Mapping[str, Any], model_type: str, family: Family) -> bool:
    said = {key: _flag(data, key, family.linear_bias) for key in family.linear_bias_keys}
    if len(set(said.values())) > 1:
        raise InputError(
            f"{', '.join(f'{key}={value}' for key, value in said.items())}: biases in only half of a {model_type} layer's "
            "projections are not supported"
        )
    return next(iter(said.values()), family.linear_bias)


def _window(data: Mapping[str, Any], family: Family) -> int | None:
    if family.window_switch and not _flag(data, family.window_switch, False):
        return None
    window = data.get("sliding_window", family.window_default)  # null is off, absent the default
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise InputError(f"sliding_window={window!r}; a whole number from 0, or null for none, is needed")
    return window or None


def _mla(data: Mapping[str, Any], model_type: str) -> Mla | None:
    if model_type not in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        return None
    return Mla(
        kv_lora_rank=_number(data, "kv_lora_rank"),
        qk_nope_head_dim=_number(data, "qk_nope_head_dim"),
        qk_rope_head_dim=_number(data, "qk_rope_head_dim"),
        v_head_dim=_number(data, "v_head_dim"),
        q_lora_rank=_number(data, "q_lora_rank", None),
    )


def _moe(data: Mapping[str, Any], family: Family) -> Moe | None:
    num_experts = _number(data, "num_experts", 0)
    if not num_experts:
        return None
    moe_ffn = _number(data, "moe_ffn", None) or _number(data, "ffn")  # Mixtral's experts are its intermediate_size wide
    shared = _number(data, "shared_ffn", None) or _number(data, "num_shared_experts", family.shared_experts) * moe_ffn
    return Moe(
        num_experts=num_experts,
        top_k=_number(data, "top_k"),
        moe_ffn=moe_ffn,
        shared_ffn=shared,
        router_bias=family.router_bias,
        shared_gate=family.shared_gate and shared > 0,
    )
