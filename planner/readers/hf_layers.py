"""What a config.json says of its layers one by one: which have experts, which have a window."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from cost_models.records import LayerGroup
from planner.errors import InputError

WINDOWED = ("sliding_attention", "chunked_attention")
"""Words of layer_types for attention to some tokens. A chunk is read as a window of its size: an upper bound of the work."""
FULL = "full_attention"

PATTERNS: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "gemma2": (lambda layer: layer % 2 == 0, "sliding_window"),
    "gemma3_text": (lambda layer: (layer + 1) % 6 != 0, "sliding_window"),
    "llama4_text": (lambda layer: (layer + 1) % 4 != 0, "attention_chunk_size"),
}
"""model_type -> (whether layer 0.. has a window where the file lists no layer_types, the file's key for its size).

Source: the transformers configuration classes, version 5.x.
"""
WINDOW_DEFAULTS = {"gemma2": 4096, "gemma3_text": 4096, "llama4_text": 8192}
"""Sizes where the file is silent."""


def windows_of_layers(data: Mapping[str, Any], model_type: str, num_layers: int) -> list[int]:
    """Window of each layer, 0 = none; empty where all layers are as the file says of the whole model."""
    listed, pattern = data.get("layer_types"), PATTERNS.get(model_type)
    if listed is None and pattern is None:
        return []
    key = pattern[1] if pattern else "sliding_window"
    window = data.get(key, WINDOW_DEFAULTS.get(model_type))
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise InputError(f"{key}={window!r}; a whole number from 0, or null for none, is needed")
    if listed is None:
        assert pattern is not None
        every = data.get("sliding_window_pattern") if model_type == "gemma3_text" else None
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InputError(f"sliding_window_pattern={every!r}; a whole number from 1 is needed")
        has = (lambda layer: (layer + 1) % every != 0) if every else pattern[0]
        return [(window or 0) if has(layer) else 0 for layer in range(num_layers)]
    known = (*WINDOWED, FULL)
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise InputError(f"layer_types has not one word for each of the {num_layers} layers")
    unknown = [word for word in listed if word not in known]
    if unknown:
        raise InputError(f"layer_types has {unknown[0]!r}: only attention is priced; known words: {', '.join(known)}")
    if not window and any(word in WINDOWED for word in listed):
        raise InputError(f"layer_types has layers with a window, but {key} is {window!r}; give its size")
    return [(window or 0) if word in WINDOWED else 0 for word in listed]


def experts_of_layers(data: Mapping[str, Any], model_type: str, num_layers: int, num_leading: int) -> list[bool]:
    """Whether each layer has experts: behind the leading dense ones, at intervals where the file says so, not where listed."""
    step_key, offset = "decoder_sparse_step", 1
    if "moe_layer_freq" in data:
        step_key, offset = "moe_layer_freq", 0
    if "interleave_moe_layer_step" in data or model_type == "llama4_text":
        step_key = "interleave_moe_layer_step"
    step = data.get(step_key, 1)
    if isinstance(step, list) and len(step) == num_layers and all(one in (0, 1) for one in step):
        return [bool(one) for one in step]  # moe_layer_freq of MiniMax and Megatron: one number a layer
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise InputError(f"{step_key}={step!r}; a whole number from 1 is needed")
    if step > num_layers:
        raise InputError(f"{step_key}={step}: none of the {num_layers} layers has experts; take num_experts out")
    dense = _listed(data, "mlp_only_layers", num_layers)
    listed = _listed(data, "moe_layers", num_layers)
    if listed:
        return [layer in listed for layer in range(num_layers)]
    return [layer >= num_leading and (layer + offset) % step == 0 and layer not in dense for layer in range(num_layers)]


def _listed(data: Mapping[str, Any], key: str, num_layers: int) -> list[int]:
    listed = data.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise InputError(f"{key}={listed!r}; a list of numbers of layers is needed")
    wrong = [layer for layer in listed if not 0 <= layer < num_layers]
    if wrong:
        raise InputError(f"{key} has layer {wrong[0]}; layers are 0..{num_layers - 1}")
    return listed


def groups_of_layers(windows: Sequence[int], experts: Sequence[bool]) -> tuple[LayerGroup, ...]:
    """Runs of like layers; an empty list = as the model has it."""
    num_layers = max(len(windows), len(experts))
    rows = [(windows[layer] if windows else None, experts[layer] if experts else None) for layer in range(num_layers)]
    return tuple(
        LayerGroup(count=len(list(run)), window=window, experts=routed) for (window, routed), run in groupby(rows)
    )
