"""The keys of a request, section by section, and the values of those that take one of a few words."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from cost_models.records import Gather, LayerGroup, Model, Moe, Norm, Positions, Precision, Schedule
from cost_models.records.layout_text import KEYS
from cost_models.records.near_names import did_you_mean, near_names
from planner.errors import InputError
from planner.readers.cluster_facts import FACT_KEYS

SECTIONS = ("model", "cluster", "workload", "runtime", "layout", "pin")
"""Keys of a request."""

ENVELOPE = frozenset(
    [
        "schema_version",
        "id",
        "source",
        "title",
        "classes",
        "tags",
        "observed",
        "expected",
        "expect_codes",
        "expect_feasible",
        "numeric_target",
        "config_source",
        "defaults",
        "their_config",
    ]
)
"""Further keys of a document that describe the request and change nothing."""

MODEL_KEYS = frozenset(field.name for field in fields(Model)) | {"num_params", "dims_source"}
GROUP_KEYS = frozenset(field.name for field in fields(LayerGroup))
"""Keys of each of a model's `layer_groups`."""
MOE_KEYS = frozenset(field.name for field in fields(Moe)) | {"dense_layers"}
CLUSTER_KEYS = frozenset(FACT_KEYS)
WORKLOAD_KEYS = frozenset(("seq", "gbs", "precision", "optimizer", "mbs", "bytes"))
LAYOUT_KEYS = frozenset(KEYS.values()) | frozenset(
    ("framework", "microbatches", "sp", "ulysses", "hsdp", "offload_optimizer", "offload_param", "pools")
)
SECTION_KEYS: Mapping[str, frozenset[str]] = {
    "model": MODEL_KEYS,
    "cluster": CLUSTER_KEYS,
    "workload": WORKLOAD_KEYS,
    "layout": LAYOUT_KEYS,
}
"""Section of a request -> its keys."""

SPELLINGS = {"dpr": "dp_replicate", "dps": "dp_shard", "vp": "vpp", "sched": "schedule", "rc": "recompute"}

OUT_OF_SCOPE: Mapping[str, str] = {
    "inference": "inference",
    "lora": "training of adapters",
    "adapter": "training of adapters",
    "peft": "training of adapters",
    "frozen_base_bytes": "training of adapters (a frozen base)",
    "packing": "sequence packing",
    "dynamic_bsz": "reinforcement learning with co-located sampling",
}
"""Keys that say that a run is none that Meshwright prices, and what it is."""

NOT_ALL_TRAINED = ("inference", "lora", "adapter", "peft", "frozen_base_bytes")

SAMPLERS = ("verl", "nemo-rl", "openrlhf", "skyrl", "art")
"""Frameworks of reinforcement learning: their training shares its GPUs with sampling."""

DEGREES = ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "vpp", "ulysses")
"""Keys of a layout that make it one; where none is said, the layout is not said."""

WORDS: Mapping[str, Mapping[str, type[StrEnum]]] = {
    "model": {"norm": Norm, "positions": Positions},
    "workload": {"precision": Precision},
    "layout": {"schedule": Schedule, "gather": Gather},
}
"""Section -> key -> the words that may stand there. Kinds of recompute are the runtime's, and optimizers an open set."""

_BOOLEANS = frozenset(field.name for field in fields(Model) if field.type in (bool, "bool")) | {"sp", "hsdp"}
_OFFLOADS = frozenset(("offload_optimizer", "offload_param"))
_TEXTS = frozenset(("recompute", "optimizer", "framework"))


def with_known_values(said: Mapping[str, Any], section: str, source: str) -> dict[str, Any]:
    """The section with its words in lower case. Raises InputError for a word that is none of those that its key takes."""
    return {key: _known_value(section, key, value, source) for key, value in said.items()}


def _known_value(section: str, key: str, value: Any, source: str) -> Any:
    words = [word.value for word in WORDS[section][key]] if key in WORDS.get(section, {}) else []
    if key in _OFFLOADS and not isinstance(value, bool):
        words = ["none", "cpu", "nvme"]
    if words:
        text = str(value).lower()
        if not isinstance(value, str) or text not in words:
            hint = did_you_mean(text, words)
            raise InputError(f"{source}: {section}.{key}={value!r} is not known{hint} Legal values: {', '.join(words)}")
        return text
    if key in _BOOLEANS and not isinstance(value, bool):
        raise InputError(f"{source}: {section}.{key}={value!r}; true or false is needed")
    if key in _TEXTS and not isinstance(value, str):
        raise InputError(f"{source}: {section}.{key}={value!r}; a text is needed")
    return value.lower() if key in ("recompute", "optimizer") else value


def refuse_unknown_keys(paths: Iterable[str], source: str) -> None:
    """Raises InputError for the first of the keys (`section.key`), with what it may mean or where it belongs."""
    for path in paths:
        known = sorted(_keys_beside(path))
        raise InputError(
            f"{source}: {path!r} is not a key of a request{meant(path) or '.'} Known there: {', '.join(known)}"
        )


def meant(path: str) -> str:
    """What an unknown key may mean, as words that go on behind it: near names, or the section where it belongs; may be empty."""
    section, _, key = path.rpartition(".")
    if near := near_names(key, _keys_beside(path)):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    for other, keys in SECTION_KEYS.items():
        if other != section and (near := near_names(key, keys)):
            return f"; did you mean {near[0]!r} in {other}?"
    return ""


def _keys_beside(path: str) -> Iterable[str]:
    section = path.rpartition(".")[0]
    return MOE_KEYS if section == "model.moe" else SECTION_KEYS.get(section, SECTIONS)
