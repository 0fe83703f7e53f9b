"""A model by name or from a file: a preset, a Hugging Face config.json, a saved Model or profile, a plan."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cost_models.data import rows
from cost_models.records import SCHEMA_VERSION, BlockKind, Model, RecordError, from_json, to_json
from planner.errors import InputError
from planner.readers.documents import There, named_path, part_of, read_document
from planner.readers.hf_config import is_hf_config, model_from_hf_config

FLOPS_FORMULA = "6 x active parameters per token (look-up out, head in) + non-causal attention, no recompute"
"""How model FLOPs are counted (PaLM, arXiv 2204.02311, appendix B)."""

_WEIGHT_BYTES = 2
"""Bytes of a weight in bf16, the format in which matrix products read it."""


def model_names() -> tuple[str, ...]:
    """Names of all presets, without their aliases."""
    return tuple(rows("models"))


def read_model(name_or_path: str) -> Model:
    """The model that a person names: a preset (case does not matter), or the path of a file.

    A file may be a config.json of Hugging Face (or the folder that holds one), a saved Model, a saved profile
    (`model_document`), a request or a plan. Raises InputError: unknown names list the near ones.
    """
    text = name_or_path.strip()
    path, there = named_path(text)
    module, colon, factory = text.partition(":")
    if colon and there is There.NOTHING and re.fullmatch(r"[A-Za-z_][\w.]*", module) and factory.isidentifier():
        raise InputError(
            f"model {text!r} is code, which only `profile` runs: `meshwright profile {text} -o model.json` traces it, and "
            "--model model.json takes what it found"
        )
    if there is There.FOLDER and (path / "config.json").is_file():
        path, there = path / "config.json", There.FILE
    if there is There.FILE:
        return _model_from_file(path)
    preset = _preset(text)
    if preset is not None:
        return preset
    if there is There.FOLDER:
        raise InputError(f"model {text!r}: this folder has no config.json; name the file itself")
    if text.endswith(".json") or "/" in text or "\\" in text:
        raise InputError(
            f"model {text!r}: there is no such file, and no preset of that name; give the path of a config.json, "
            f"or one of the presets: {', '.join(model_names())}"
        )
    raise InputError(_unknown(text))


_NEEDED = ("num_layers", "hidden", "ffn", "heads", "vocab")
"""Dimensions that nothing else implies."""


def model_from_facts(facts: Mapping[str, Any]) -> Model:
    """The model of the short form: a preset's name, or the dimensions that nothing implies and any others."""
    return model_and_defaults(facts)[0]


def model_and_defaults(facts: Mapping[str, Any]) -> tuple[Model, dict[str, str]]:
    """The model of the short form, and what was not said: `model.<key>` -> how it was taken.

    Raises InputError where a needed dimension is absent, RecordError where one is of the wrong kind or contradicts another.
    """
    said = {
        key: value for key, value in facts.items() if value is not None and key not in ("num_params", "dims_source")
    }
    name = said.setdefault("name", "model")
    if "num_layers" not in said and (total := _layers_of_groups(said.get("layer_groups"))):
        said["num_layers"] = total
    if not isinstance(name, str):
        raise InputError(f"model.name={name!r}; a text is needed")
    if set(said) == {"name"} and "name" in facts:
        return read_model(name), {}
    missing = [key for key in _NEEDED if key not in said]
    if missing:
        raise InputError(
            f"the model lacks {', '.join(missing)}; give the dimensions {', '.join(_NEEDED)} at least, or a preset's name"
        )
    for key in (*_NEEDED, "kv_heads", "head_dim"):
        value = said.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"model.{key}={value!r}; a whole number from 1 is needed")
    hidden, heads = said["hidden"], said["heads"]
    if "head_dim" not in said and hidden % heads:
        raise InputError(f"hidden={hidden} is not divisible by heads={heads}; give head_dim")
    defaults: dict[str, str] = {}
    for key, value in (("kv_heads", heads), ("head_dim", hidden // heads)):
        if key not in said:
            said[key], defaults[f"model.{key}"] = value, f"{value}"
    for key in ("tie_embeddings", "gated_mlp", "norm", "positions"):
        if key not in said:
            default = next(field.default for field in fields(Model) if field.name == key)
            defaults[f"model.{key}"] = str(default).lower()
    return model_of(said), defaults


def _layers_of_groups(groups: Any) -> int:
    """Layers of groups that are well written, else 0: the record says what is wrong with them."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        return 0
    counts = [group.get("count", 1) for group in groups]
    return sum(counts) if all(isinstance(count, int) and not isinstance(count, bool) for count in counts) else 0


def model_of(values: Mapping[str, Any]) -> Model:
    """The model of whole dimensions, experts spelled as in a request. Raises RecordError where they contradict one another."""
    data = dict(values)
    if isinstance(data.get("moe"), Mapping):
        moe = {key: value for key, value in data["moe"].items() if value is not None}
        if "dense_layers" in moe:
            moe["num_dense_layers"] = moe.pop("dense_layers")
        data["moe"] = moe
    return from_json(Model, data, "model")


def _preset(text: str) -> Model | None:
    by_spelling = {_spelling(alias): name for name, row in rows("models").items() for alias in (name, *row["aliases"])}
    # a hub's name (owner/name) is known by its last part
    name = by_spelling.get(_spelling(text.rsplit("/", 1)[-1]))
    return None if name is None else from_json(Model, {"name": name, **rows("models")[name]["fields"]})


def _spelling(name: str) -> str:
    """One spelling for `Llama-3-8B`, `llama3_8b` and `llama3-8b`; digits never grow together."""
    return re.sub(r"(?<=[a-z])-(?=\d)", "", re.sub(r"[\s_]+", "-", name.strip().lower()))


def _unknown(text: str) -> str:
    spellings = {alias: name for name, row in rows("models").items() for alias in (name, *row["aliases"])}
    near = dict.fromkeys(
        spellings[match] for match in difflib.get_close_matches(text.lower(), spellings, n=5, cutoff=0.5)
    )
    hint = f"near names: {', '.join(near)}" if near else f"known names: {', '.join(model_names())}"
    return (
        f"model {text!r} is not a preset, and there is no such file; {hint}. "
        "`meshwright help models` lists all presets; the path of a Hugging Face config.json does as well"
    )


def _model_from_file(path: Path) -> Model:
    data = read_document(path, "a model")
    try:
        if is_hf_config(data):
            # config.json says nothing of its own name: the folder usually does
            return model_from_hf_config(data, name=path.resolve().parent.name if path.stem == "config" else path.stem)
        inner = part_of(data, "model")
        if isinstance(inner, str):
            return read_model(inner)
        if not isinstance(inner, dict) or not {"name", "num_layers"} & set(inner):
            raise InputError(
                "neither a Hugging Face config.json (it has model_type or architectures), nor a saved model or profile, "
                "nor a request or plan"
            )
        return model_from_facts(inner)
    except (InputError, RecordError) as error:
        raise InputError(f"{path}: {error}") from None


# What `profile M` shows -------------------------------------------------------------------------------------------


def model_document(model: Model, seq: int = 4096) -> dict[str, Any]:
    """The blocks of a model with their parameters, model FLOPs and bytes, as plain data; `read_model` reads it back.

    `seq` (tokens) sets the length at which attention is counted. FLOPs are forward and backward, by FLOPS_FORMULA;
    bytes are those of the weights in bf16, and of the residual stream that a block hands on per token. FLOPs of layers on
    tokens of their own are per token of the text, of which a sample has `seq`.
    """
    if seq < 1:
        raise InputError(f"seq={seq}: a sequence has at least one token")
    return {
        "schema_version": SCHEMA_VERSION,
        "model": to_json(model),
        "seq": seq,
        "num_params": model.num_params,
        "active_params": model.active_params,
        "flops_per_token": model.model_flops_per_token(seq),
        "flops_formula": FLOPS_FORMULA,
        "weight_bytes": _WEIGHT_BYTES * model.num_params,
        "blocks": _block_rows(model, seq),
    }


def _block_rows(model: Model, seq: int) -> list[dict[str, Any]]:
    """The embedding, each kind of layer, and the head."""
    head = model.num_blocks - 1
    embedding_flops = 6.0 * (model.block_params(0) - model.hidden * (model.vocab + model.max_positions))
    head_flops = 6.0 * (model.block_params(head) + (model.hidden * model.vocab if model.tie_embeddings else 0))
    layers = [
        _row(
            kind=one.kind,
            count=count,
            block=1 + _first_layer(model, place),
            params=one.params,
            idle=one.idle_params,
            flops=one.flops(seq) * (1 if one.tokens is None else one.tokens / seq),
            attention=one.attention_flops(seq) * (1 if one.tokens is None else one.tokens / seq),
            hidden=one.model.hidden,
        )
        | ({"tokens": one.tokens or seq, "name": _name_of(model, place)} if model.layer_groups else {})
        for place, (one, count) in enumerate(model.layers_of_kinds)
    ]
    ends = [
        _row(
            kind=model.block_kind(block),
            count=1,
            block=block,
            params=model.block_params(block),
            flops=flops,
            hidden=hidden,
        )
        for block, flops, hidden in ((0, embedding_flops, model.hidden), (head, head_flops, 0))
    ]
    return [ends[0], *layers, ends[1]]


def _first_layer(model: Model, place: int) -> int:
    """Layers in front of the first of the kind at `place` in `layer_kinds`."""
    before = 0
    for kind, count in model.layer_runs:
        if kind == place:
            break
        before += count
    return before


def _name_of(model: Model, place: int) -> str:
    """What the group with the first layer of a kind is called."""
    first, until = _first_layer(model, place), 0
    for group in model.layer_groups:
        until += group.count
        if first < until:
            return group.name
    return ""


def _row(
    *,
    kind: BlockKind,
    count: int,
    block: int,
    params: int,
    flops: float,
    hidden: int,
    idle: int = 0,
    attention: float = 0,
) -> dict[str, Any]:
    return {
        "kind": kind.value,
        "count": count,
        "first_block": block,
        "params": params,
        "active_params": params - idle,
        "total_params": count * params,
        "flops_per_token": flops,
        "attention_flops_per_token": float(attention),
        "weight_bytes": _WEIGHT_BYTES * params,
        "output_bytes_per_token": _WEIGHT_BYTES * hidden,
    }
