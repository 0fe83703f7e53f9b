"""Where the parts of a module are: by name, as data, one row per module type.

Everything that splits a module reads its row here and nothing else about it. A layer is called as
`layer(hidden_states, position_embeddings=(cos, sin))`, and calls its attention with `hidden_states=` by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cost_models.records import Model
from executor.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Names of the parts: the first six from the whole module, the others from a layer."""

    embedding: str
    """nn.Embedding of the tokens."""
    layers: str
    """Sequence of the layers."""
    norm: str
    """Last norm."""
    head: str
    """nn.Linear to the vocabulary, without bias."""
    rotary: str
    """Module without parameters: (hidden_states, position_ids) -> (cos, sin)."""
    attention_norm: str
    """Norm before the attention."""
    attention: str
    """The attention; has `head_dim`."""
    queries: str
    """Projection of the queries, then of keys, values and output."""
    keys: str
    values: str
    output: str
    mlp_norm: str
    """Norm before the MLP."""
    mlp: str
    """The MLP."""
    gate: str
    """Gate of the MLP; the module may lack it."""
    up: str
    down: str
    needs: tuple[tuple[str, tuple[object, ...], str], ...] = ()
    """(attribute, legal values, why): settings of the module without which the result would be wrong."""


ANATOMIES: dict[str, Anatomy] = {
    "executor.decoder.Decoder": Anatomy(
        embedding="embedding",
        layers="layers",
        norm="norm",
        head="head",
        rotary="rotary",
        attention_norm="attention_norm",
        attention="attention",
        queries="attention.q",
        keys="attention.k",
        values="attention.v",
        output="attention.o",
        mlp_norm="mlp_norm",
        mlp="mlp",
        gate="mlp.gate",
        up="mlp.up",
        down="mlp.down",
    ),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": Anatomy(
        embedding="model.embed_tokens",
        layers="model.layers",
        norm="model.norm",
        head="lm_head",
        rotary="model.rotary_emb",
        attention_norm="input_layernorm",
        attention="self_attn",
        queries="self_attn.q_proj",
        keys="self_attn.k_proj",
        values="self_attn.v_proj",
        output="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        needs=(
            (
                "config._attn_implementation",
                ("sdpa", "flash_attention_2", "flash_attention_3"),
                "no mask is passed, and only these kernels are causal without one",
            ),
            ("config.attention_dropout", (0, 0.0), "dropout draws other numbers in every layout"),
            (
                "model.gradient_checkpointing",
                (False,),
                "the plan says which layers are computed again; switch off the checkpointing of its own",
            ),
        ),
    ),
}
"""Module type -> where its parts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What the weights of a module say of its size; fields as in the Model record."""

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tie_embeddings: bool
    gated_mlp: bool


WEIGHT_DTYPES = (torch.float32, torch.float64)


def anatomy_of(module: nn.Module) -> Anatomy:
    """The row of a module's type, or of the nearest type that it inherits from; RefusedError if nobody described one."""
    for kind in type(module).__mro__:
        row = ANATOMIES.get(f"{kind.__module__}.{kind.__qualname__}")
        if row is not None:
            _check_needs(module, row)
            return row
    known = ", ".join(name.rsplit(".", 1)[1] for name in ANATOMIES)
    inner = getattr(
        module, "_orig_mod", getattr(module, "module", None)
    )  # as torch.compile and as DDP and others call it
    if isinstance(inner, nn.Module):
        raise RefusedError(
            f"the model is wrapped already, in {type(module).__name__}: give the {type(inner).__name__} inside it; the plan says "
            "what is put around it"
        )
    if not isinstance(module, nn.Module):
        raise RefusedError(f"the model is a {type(module).__name__}; legal: a torch.nn.Module, one of {known}")
    raise RefusedError(
        f"{type(module).__module__}.{type(module).__qualname__} is not described; known modules: {known}. Add a row to "
        "executor.anatomy.ANATOMIES which says where embedding, layers, norm, head and the projections are"
    )


def check_plain(module: nn.Module, row: Anatomy) -> None:
    """RefusedError unless the parameters are as a constructor leaves them, and each is of a part that a stage would hold.

    Whatever else it has would be left out of training without a word, or trained as another model than was planned.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise RefusedError(
                f"{name} has no values (device meta): build the model with its weights, on the CPU if it is large; a model that "
                "a plan was applied to is not given twice"
            )
        if isinstance(parameter, DTensor):
            raise RefusedError(
                f"{name} is divided already (DTensor): give the model as it was built; the plan divides it"
            )
        if parameter.is_inference():
            raise RefusedError(
                f"{name} was made under torch.inference_mode and cannot be trained: build the model outside it"
            )
        if parameter.dtype not in WEIGHT_DTYPES:
            raise RefusedError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}; legal: float32 (`model.float()`): weights, gradients "
                "and optimizer state are fp32 here, and a plan in bf16 computes in it without giving them up"
            )
    known = tuple(f"{part}." for part in (row.embedding, row.layers, row.norm, row.head))
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not name.startswith(known):
            raise RefusedError(
                f"{name} is in no part that is trained here ({', '.join(known)[:-1]}): without it the module would be another. "
                "Leave it out, or describe the module in executor.anatomy.ANATOMIES"
            )
        first = names.setdefault(id(parameter), name)
        if first != name and {first, name} != {f"{row.embedding}.weight", f"{row.head}.weight"}:
            raise RefusedError(
                f"{first} and {name} are one parameter, and their stages would train two; legal: the head's weight may be the "
                "embedding's, others are of their own"
            )


def _check_needs(module: nn.Module, row: Anatomy) -> None:
    for attribute, legal, why in row.needs:
        value: object = module
        for part in attribute.split("."):
            value = getattr(value, part, None)
        if value not in legal:
            raise RefusedError(
                f"{type(module).__name__}.{attribute} = {value!r}: {why}; legal values: {', '.join(map(repr, legal))}"
            )


def part_of(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule at a dotted name; None where the module has none there."""
    current: nn.Module | None = module
    for part in name.split("."):
        current = None if current is None else getattr(current, part, None)
    return current


def weight_of(module: nn.Module, name: str) -> nn.Parameter:
    """The weight of the submodule at a dotted name, which must have one."""
    part = part_of(module, name)
    weight = None if part is None else getattr(part, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise RefusedError(f"{type(module).__name__} has no weight at {name!r}, where its anatomy says that one is")
    return weight


def dimensions_of(module: nn.Module, row: Anatomy) -> Dimensions:
    """Sizes, read from the weights of a whole module."""
    layers = part_of(module, row.layers)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise RefusedError(f"{type(module).__name__}.{row.layers} is not a list of layers")
    vocab, hidden = weight_of(module, row.embedding).shape
    whole: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden": hidden,
        "vocab": vocab,
        "tie_embeddings": weight_of(module, row.head) is weight_of(module, row.embedding),
    }
    first, *others = [_layer_dimensions(layer, row) for layer in layers]
    for index, other in enumerate(others, start=1):
        if other != first:
            name, size = next((name, size) for name, size in other.items() if size != first[name])
            raise RefusedError(
                f"{name} is {first[name]} in {row.layers}.0 and {size} in {row.layers}.{index}: a plan is for layers that are alike"
            )
    return Dimensions(**whole, **first)


def _layer_dimensions(layer: nn.Module, row: Anatomy) -> dict[str, Any]:
    head_dim = int(getattr(part_of(layer, row.attention), "head_dim"))  # noqa: B009 (a Tensor | Module to mypy otherwise)
    return {
        "ffn": weight_of(layer, row.up).shape[0],
        "heads": weight_of(layer, row.queries).shape[0] // head_dim,
        "kv_heads": weight_of(layer, row.keys).shape[0] // head_dim,
        "head_dim": head_dim,
        "gated_mlp": part_of(layer, row.gate) is not None,
    }


def check_against(dimensions: Dimensions, model: Model) -> None:
    """RefusedError, with every difference, unless the module is the network that was planned for."""
    differences = [
        f"{name}: {getattr(dimensions, name)}, planned {getattr(model, name)}"
        for name in Dimensions.__slots__
        if getattr(dimensions, name) != getattr(model, name)
    ]
    if differences:
        raise RefusedError(
            f"the module is not the model of the plan ({model.name}): {'; '.join(differences)}. Build the module that was "
            "planned for, or plan for this one"
        )
