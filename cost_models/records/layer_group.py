"""Runs of like layers, of which a chain of unlike layers is made: what differs from the model's own dimensions.

A chain is a tuple of groups in the order in which a sample passes them: a vision tower, a projector, a language model;
dense layers between layers with experts; layers with a window between layers without. What a group leaves out is the
model's. A group is either layers, or one projector (`projection`): a multi-layer perceptron that changes the width.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from cost_models.records.codec import UNSAID, RecordError


class Norm(StrEnum):
    """RMSNorm has one vector of weights, LayerNorm a weight and a bias."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


OF_A_LAYER = (
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "head_dim",
    "gated_mlp",
    "norm",
    "norms_per_layer",
    "qk_norm",
    "qkv_bias",
    "linear_bias",
    "causal",
)
"""Fields of a group that take the place of the model's field of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """A run of like layers, or one projector. Null = as the model has it."""

    count: int = 1
    """Layers in it, one after another; 1 of a projector."""
    name: str = field(default="", metadata=UNSAID)
    """What people call it (vision, language)."""
    hidden: int | None = field(default=None, metadata=UNSAID)
    """Width of the residual stream."""
    ffn: int | None = field(default=None, metadata=UNSAID)
    """Width of the MLP."""
    heads: int | None = field(default=None, metadata=UNSAID)
    """Query heads."""
    kv_heads: int | None = field(default=None, metadata=UNSAID)
    """Key and value heads."""
    head_dim: int | None = field(default=None, metadata=UNSAID)
    """Width of a head."""
    gated_mlp: bool | None = field(default=None, metadata=UNSAID)
    """The MLP has a gate."""
    norm: Norm | None = field(default=None, metadata=UNSAID)
    """Kind of normalisation."""
    norms_per_layer: int | None = field(default=None, metadata=UNSAID)
    """Normalisations of the residual stream in a layer."""
    qk_norm: bool | None = field(default=None, metadata=UNSAID)
    """A norm over each query and key head."""
    qkv_bias: bool | None = field(default=None, metadata=UNSAID)
    """Biases in the query, key and value projections."""
    linear_bias: bool | None = field(default=None, metadata=UNSAID)
    """Biases in the attention's output projection and in the MLP, or in a projector's matrices."""
    causal: bool | None = field(default=None, metadata=UNSAID)
    """Tokens see only those before them."""
    window: int | None = field(default=None, metadata=UNSAID)
    """Tokens that a query sees back; 0 = all, null = the model's sliding_window."""
    tokens: int | None = field(default=None, metadata=UNSAID)
    """Tokens of a sample here, where these are not the text's (the patches of its images); null = the workload's seq."""
    experts: bool | None = field(default=None, metadata=UNSAID)
    """Whether its layers have the model's experts in place of an MLP; null = they have where the model has any."""
    latent: bool | None = field(default=None, metadata=UNSAID)
    """Whether its layers have the model's latent attention; null = they have where the model has it."""
    projection: tuple[int, ...] = field(default=(), metadata=UNSAID)
    """Widths of a projector: what comes in, between its matrices, and goes out; empty = layers of attention and MLP."""
    other_params: int = field(default=0, metadata=UNSAID)
    """Parameters of a projector that are no matrices of it: position embeddings, class tokens, norms before and behind."""

    def __post_init__(self) -> None:
        what = f"group {self.name!r}" if self.name else "a group of layers"
        if self.count < 1:
            raise RecordError(f"count={self.count} of {what}: a whole number from 1 is needed")
        for name, least in (("window", 0), ("tokens", 1), ("other_params", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RecordError(f"{name}={value} of {what}: a whole number from {least} is needed")
        if not self.projection:
            if self.other_params:
                raise RecordError(f"other_params={self.other_params} of {what}: only a projector has any")
            return
        if len(self.projection) < 2 or min(self.projection) < 1:
            raise RecordError(f"projection={list(self.projection)} of {what}: two widths from 1 at least are needed")
        if self.count != 1:
            raise RecordError(f"count={self.count} of {what}: a projector is one block; give each a group of its own")
        layers_own = [name for name in OF_A_LAYER if name != "linear_bias"]
        said = [name for name in (*layers_own, "window", "experts", "latent") if getattr(self, name) is not None]
        if said:
            raise RecordError(f"{', '.join(said)} of {what}: a projector has no attention and no MLP; leave it out")

    @property
    def matrix_params(self) -> int:
        """Parameters of a projector's matrices, their biases with them where it has any."""
        pairs = list(pairwise(self.projection))
        return sum(into * out + (out if self.linear_bias else 0) for into, out in pairs)

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of a layer that the group says, by the model's names."""
        return {name: getattr(self, name) for name in OF_A_LAYER if getattr(self, name) is not None}


assert set(OF_A_LAYER) <= {entry.name for entry in fields(LayerGroup)}
