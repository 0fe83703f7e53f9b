"""Multimodal configs of Hugging Face: a vision tower, a projector and a language model as one chain of layers.

Every sample is taken to have one image of the size that the config names: its patches are the tower's tokens. Towers that
take images of any size, and language models that look at the tower in layers of their own (cross-attention), are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cost_models.records import LayerGroup, Model, Norm
from planner.errors import InputError

CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
    "llama4_text": {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202048,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "llama4_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "vision_output_dim": 7680,
    },
}
"""model_type -> what its class takes where a part's config is silent. Source: the transformers classes, version 5.x."""

REFUSED: Mapping[str, str] = {
    "mllama": "its language model looks at the image in layers of cross-attention, which are not priced",
    "qwen2_vl": "it takes images of any size, and the config does not say how many patches a sample has",
    "qwen2_5_vl": "it takes images of any size, and the config does not say how many patches a sample has",
    "qwen3_vl": "it takes images of any size, and the config does not say how many patches a sample has",
}
"""model_type -> why it is not read."""


def part(data: Mapping[str, Any], key: str, default_type: str) -> dict[str, Any]:
    """The config of a part of a multimodal model, with what its class takes where it is silent."""
    said = data.get(key)
    if not isinstance(said, Mapping):
        raise InputError(
            f"{key} is {'absent' if said is None else repr(said)}; an object with its dimensions is needed"
        )
    model_type = str(said.get("model_type", default_type))
    given = {name: value for name, value in said.items() if value is not None}
    return {**CLASS_DEFAULTS.get(model_type, {}), **given, "model_type": model_type}


def with_towers(data: Mapping[str, Any], language: Model) -> Model:
    """The language model with the vision tower of `data` and the projector in front of it."""
    model_type = str(data["model_type"])
    groups, width, tokens = _tower(part(data, "vision_config", DEFAULT_TOWERS[model_type]))
    towers = (*groups, *PROJECTORS[model_type](data, width, tokens, language.hidden))
    own = language.layer_groups or (LayerGroup(count=language.num_layers),)
    own = tuple(replace(group, name="language") for group in own)
    moe, num_leading = language.moe, language.moe.num_dense_layers if language.moe else 0
    if moe is not None and not language.layer_groups and num_leading:
        moe = replace(moe, num_dense_layers=0)
        own = (
            LayerGroup(name="language", count=num_leading, experts=False),
            LayerGroup(name="language", count=language.num_layers - num_leading),
        )
    towers = tuple(_plain(group, language) for group in towers)
    total = sum(group.count for group in (*towers, *own))
    return replace(language, num_layers=total, moe=moe, layer_groups=(*towers, *own))


def _plain(group: LayerGroup, language: Model) -> LayerGroup:
    """Layers of a tower have neither the language model's experts nor its latent attention, nor its window and norms of heads."""
    if group.projection:
        return group
    return replace(
        group,
        experts=False if language.moe else None,
        latent=False if language.mla else None,
        window=0 if language.sliding_window else None,
        qk_norm=False if language.qk_norm else None,
        norms_per_layer=2 if language.norms_per_layer != 2 else None,
    )


def _tower(vision: Mapping[str, Any]) -> tuple[tuple[LayerGroup, ...], int, int]:
    """(patches and layers, width that they put out, patches of an image) of a vision config."""
    model_type = vision["model_type"]
    if model_type not in ("clip_vision_model", "siglip_vision_model", "llama4_vision_model"):
        raise InputError(
            f"vision_config.model_type={model_type!r} is not known; known: clip_vision_model, siglip_vision_model, "
            "llama4_vision_model"
        )
    hidden, patch, side = (_whole(vision, key) for key in ("hidden_size", "patch_size", "image_size"))
    heads, patches = _whole(vision, "num_attention_heads"), (side // patch) ** 2
    if hidden % heads:
        raise InputError(f"vision_config: hidden_size={hidden} is not divisible by num_attention_heads={heads}")
    # a token for the whole image, its embedding, and norms: CLIP and Llama 4 before and behind their layers, SigLIP behind
    has_class = model_type != "siglip_vision_model"
    tokens = patches + has_class
    other = (tokens + has_class) * hidden + (4 * hidden if has_class else hidden + 2 * hidden)
    stem = LayerGroup(
        name="patches", projection=(3 * patch**2, hidden), tokens=tokens, other_params=other, linear_bias=False
    )
    layers = LayerGroup(
        name="vision",
        count=_whole(vision, "num_hidden_layers"),
        hidden=hidden,
        ffn=_whole(vision, "intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        gated_mlp=False,
        norm=Norm.LAYERNORM,
        qkv_bias=True,
        linear_bias=True,
        causal=False,
        tokens=tokens,
    )
    return (stem, layers), hidden, patches


def _llava(data: Mapping[str, Any], width: int, patches: int, hidden: int) -> tuple[LayerGroup, ...]:
    """Two matrices on the patches, without the token for the whole image unless the file keeps it."""
    rows = patches + (data.get("vision_feature_select_strategy", "default") == "full")
    bias = data.get("multimodal_projector_bias", True)
    layers = data.get("vision_feature_layer", -2)
    width *= len(layers) if isinstance(layers, list) else 1
    return (LayerGroup(name="projector", projection=(width, hidden, hidden), tokens=rows, linear_bias=bool(bias)),)


def _gemma3(data: Mapping[str, Any], width: int, patches: int, hidden: int) -> tuple[LayerGroup, ...]:
    """A norm and one matrix on patches that were averaged to a fixed number."""
    del patches
    rows = _whole({"mm_tokens_per_image": 256} | dict(data), "mm_tokens_per_image")
    return (
        LayerGroup(name="projector", projection=(width, hidden), tokens=rows, other_params=width, linear_bias=False),
    )


def _llama4(data: Mapping[str, Any], width: int, patches: int, hidden: int) -> tuple[LayerGroup, ...]:
    """Neighbouring patches side by side, two matrices, and one to the width of the language model."""
    vision = part(data, "vision_config", "llama4_vision_model")
    ratio = vision["pixel_shuffle_ratio"]
    rows, wide = round(patches * ratio**2), round(width / ratio**2)
    into, out = _whole(vision, "projector_input_dim"), _whole(vision, "projector_output_dim")
    return (LayerGroup(name="projector", projection=(wide, into, out, hidden), tokens=rows, linear_bias=False),)


PROJECTORS: Mapping[str, Callable[[Mapping[str, Any], int, int, int], tuple[LayerGroup, ...]]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "llama4": _llama4,
}
"""model_type of a multimodal config -> the blocks between its tower and its language model."""
DEFAULT_TOWERS = {"llava": "clip_vision_model", "gemma3": "siglip_vision_model", "llama4": "llama4_vision_model"}
DEFAULT_LANGUAGES = {"llava": "llama", "gemma3": "gemma3_text", "llama4": "llama4_text"}


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key}={value!r}; a whole number from 1 is needed")
    return value
