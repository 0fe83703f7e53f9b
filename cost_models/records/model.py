"""A network as the planner sees it: dimensions, blocks, exact parameter counts and model FLOPs.

Blocks are numbered over the whole model: 0 the embedding, 1..L the layers, L+1 the final norm, the head and the loss.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cost_models.records.codec import UNSAID, RecordError
from cost_models.records.layer_group import LayerGroup, Norm

MOST_LAYERS = 100_000
"""A hundred times the deepest transformer that was trained (1,000 layers: DeepNet, arXiv 2203.00555)."""
MOST_WIDTH = 2**31 - 1
"""Largest dimension that a 32-bit index of a kernel reaches."""


class Positions(StrEnum):
    """How the order of tokens gets in; learned positions are parameters of the embedding."""

    ROPE = "rope"
    LEARNED = "learned"
    NONE = "none"


class BlockKind(StrEnum):
    """The kinds of blocks that a stage may hold."""

    EMBEDDING = "embedding"
    DENSE = "dense"
    MOE = "moe"
    PROJECTOR = "projector"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """The experts of a mixture-of-experts layer."""

    num_experts: int
    """Routed experts in a layer."""
    top_k: int
    """Routed experts that see each token."""
    moe_ffn: int
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Total width of the experts that see every token; 0 = none."""
    num_dense_layers: int = 0
    """Leading layers that have a plain MLP instead of experts."""
    router_bias: bool = False
    """A bias per expert in the router (DeepSeek-V3's load balancing)."""
    shared_gate: bool = False
    """A gate, one row of hidden, in front of the shared experts (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise RecordError(
                f"top_k={self.top_k} of num_experts={self.num_experts}: top_k lies between 1 and num_experts"
            )
        if self.moe_ffn < 1:
            raise RecordError(f"moe_ffn={self.moe_ffn}: the width of an expert is a whole number from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention: keys and values pass through a narrow shared projection (DeepSeek-V2, section 2.1)."""

    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """Part of a head's query and key without rotation."""
    qk_rope_head_dim: int
    """Part of a head's query and key with rotation; the key's is shared by all heads."""
    v_head_dim: int
    """Width of a head's value."""
    q_lora_rank: int | None = None
    """Width of the compressed queries; null = queries are projected at once."""


class _Noting:
    """A place beside the fields of a model where it notes what follows from them; no part of it."""

    __slots__ = ("_noted",)
    _noted: "tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(_Noting):
    """Dimensions of a transformer: a decoder of like layers, or a chain of unlike ones. Nominal facts only, no seconds."""

    name: str
    """How people call it."""
    num_layers: int
    """Transformer layers, L."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Width of the MLP of a dense layer."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; equal to heads without grouped-query attention."""
    head_dim: int
    """Width of a head; not always hidden / heads."""
    vocab: int
    """Rows of the embedding, as published (not padded)."""
    tie_embeddings: bool = False
    """The head uses the embedding's weights."""
    gated_mlp: bool = True
    """The MLP has a gate (SwiGLU and kin): three matrices instead of two."""
    norm: Norm = Norm.RMSNORM
    """Kind of normalisation."""
    norms_per_layer: int = 2
    """Normalisations of the residual stream in a layer."""
    positions: Positions = Positions.ROPE
    """Kind of positions."""
    max_positions: int = 0
    """Rows of the learned positions; 0 where positions are not learned."""
    embedding_norm: bool = False
    """A norm behind the embedding (BLOOM)."""
    qk_norm: bool = False
    """A norm over each query and key head (one vector of head_dim for each of the two)."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections."""
    linear_bias: bool = False
    """Biases in the attention's output projection and in the MLP."""
    sliding_window: int | None = None
    """Tokens that a query sees back; null = all."""
    moe: Moe | None = None
    """Experts; null = a dense model."""
    mla: Mla | None = None
    """Latent attention; null = ordinary heads."""
    num_mtp_layers: int = 0
    """Further layers that predict later tokens, each with a joining projection; not in num_params."""
    causal: bool = field(default=True, metadata=UNSAID)
    """Tokens see only those before them."""
    layer_groups: tuple[LayerGroup, ...] = field(default=(), metadata=UNSAID)
    """Groups of unlike layers in their order, num_layers in all; empty = all layers are alike but for `moe`."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            most = MOST_LAYERS if name == "num_layers" else MOST_WIDTH
            if not 1 <= getattr(self, name) <= most:
                raise RecordError(
                    f"{name}={getattr(self, name)} of model {self.name!r}: a whole number from 1 to {most:,} is needed"
                )
        if self.heads % self.kv_heads:
            low = [n for n in range(1, math.isqrt(self.heads) + 1) if self.heads % n == 0]
            legal = ", ".join(map(str, sorted({*low, *(self.heads // n for n in low)})))
            raise RecordError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; legal kv_heads: {legal}"
            )
        if self.positions is Positions.LEARNED and self.max_positions < 1:
            raise RecordError("learned positions need max_positions, the number of their rows")
        if self.layer_groups:
            self._refuse_broken_chain()
            object.__setattr__(self, "_noted", self._kinds_of_chain())

    # Blocks ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """K = L + 2: embedding, layers, and the norm with head and loss."""
        return self.num_layers + 2

    def block_kind(self, block: int) -> BlockKind:
        """The kind of block 0..K-1."""
        if not 0 <= block < self.num_blocks:
            raise RecordError(f"block {block} of model {self.name!r}: blocks are 0..{self.num_blocks - 1}")
        if block == 0:
            return BlockKind.EMBEDDING
        if block == self.num_blocks - 1:
            return BlockKind.HEAD
        return self.layer_kind(block).kind

    def layer_kind(self, block: int) -> "LayerKind":
        """What block 1..L is."""
        until = 0
        for place, count in self.layer_runs:
            until += count
            if 1 <= block <= until:
                return self.layer_kinds[place]
        raise RecordError(f"block {block} of model {self.name!r} is no layer: layers are 1..{self.num_layers}")

    @property
    def layer_kinds(self) -> "tuple[LayerKind, ...]":
        """Unlike kinds of layers, each once, in the order in which the model first has them."""
        return self._kinds_and_runs[0]

    @property
    def layer_runs(self) -> tuple[tuple[int, int], ...]:
        """(place in `layer_kinds`, count) of each run of like layers, in the order of the model."""
        return self._kinds_and_runs[1]

    @property
    def _kinds_and_runs(self) -> "tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]":
        if not self.layer_groups:
            num_dense = self.num_layers if self.moe is None else min(self.moe.num_dense_layers, self.num_layers)
            counts = [(BlockKind.DENSE, num_dense), (BlockKind.MOE, self.num_layers - num_dense)]
            found = [(kind, count) for kind, count in counts if count]
            kinds = tuple(LayerKind(kind=kind, model=self) for kind, _ in found)
            return kinds, tuple((place, count) for place, (_, count) in enumerate(found))
        try:
            return self._noted
        except AttributeError:  # a copy that was not built from its fields has no notes
            object.__setattr__(self, "_noted", self._kinds_of_chain())
            return self._noted

    def _kinds_of_chain(self) -> "tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]":
        places: dict[LayerKind, int] = {}
        runs: list[tuple[int, int]] = []
        for group in self.layer_groups:
            place = places.setdefault(self._kind_of(group), len(places))
            if runs and runs[-1][0] == place:
                runs[-1] = (place, runs[-1][1] + group.count)
            else:
                runs.append((place, group.count))
        return tuple(places), tuple(runs)

    def _kind_of(self, group: LayerGroup) -> "LayerKind":
        """A layer of a group as the layer of a model of nothing else."""
        plain = replace(self, layer_groups=(), num_layers=1, num_mtp_layers=0)
        if group.projection:
            bias = self.linear_bias if group.linear_bias is None else group.linear_bias
            plain = replace(plain, hidden=group.projection[-1], moe=None, mla=None, sliding_window=None)
            own = replace(group, name="", linear_bias=bias)
            return LayerKind(kind=BlockKind.PROJECTOR, model=plain, tokens=group.tokens, projector=own)
        routed = self.moe is not None and group.experts is not False
        window = self.sliding_window if group.window is None else group.window or None
        try:
            plain = replace(
                plain,
                **group.changes,
                sliding_window=window,
                moe=self.moe if routed else None,
                mla=self.mla if group.latent is not False else None,
            )
        except RecordError as error:
            raise RecordError(f"group {group.name!r} of the chain: {error}") from None
        return LayerKind(kind=BlockKind.MOE if routed else BlockKind.DENSE, model=plain, tokens=group.tokens)

    def _refuse_broken_chain(self) -> None:
        """RecordError where the groups do not follow on one another, or ask for what the model has not."""
        total = sum(group.count for group in self.layer_groups)
        if total != self.num_layers:
            raise RecordError(f"num_layers={self.num_layers}, but the groups of the chain have {total} layers in all")
        if self.moe is not None and self.moe.num_dense_layers:
            raise RecordError(
                f"moe.num_dense_layers={self.moe.num_dense_layers} beside a chain: the chain says which layers have "
                "experts (experts: false where not); leave it at 0"
            )
        width, on_text = self.hidden, True
        for number, group in enumerate(self.layer_groups):
            for what, has in (("experts", self.moe), ("latent", self.mla)):
                if getattr(group, what) and has is None:
                    raise RecordError(
                        f"layer_groups[{number}].{what}=true, but the model has no {'moe' if what == 'experts' else 'mla'}"
                    )
            own = group.projection[-1] if group.projection else group.hidden or self.hidden
            if not group.projection and own != width:
                raise RecordError(
                    f"layer_groups[{number}] has hidden={own}, and {width} comes in: between unlike widths a projector is needed "
                    f"(projection: [{width}, {own}])"
                )
            if group.tokens is None and not on_text and own != self.hidden:
                raise RecordError(
                    f"layer_groups[{number}] is the first of the text's again and is {own} wide: the text joins at hidden={self.hidden}"
                )
            width, on_text = own, group.tokens is None
        if width != self.hidden or not on_text:
            raise RecordError(
                f"the chain ends {width} wide on {'the text' if on_text else 'tokens of its own'}: the head needs the text's "
                f"tokens (no `tokens` in the last group) at hidden={self.hidden}"
            )

    # Parameters --------------------------------------------------------------------------------------------------

    @property
    def query_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a head's value and output."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.query_head_dim

    @property
    def value_width(self) -> int:
        """Width of the attention's output before its projection."""
        return self.heads * self.value_head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.hidden * (2 if self.norm is Norm.LAYERNORM else 1)

    @property
    def attention_params(self) -> int:
        """Parameters of the attention of one layer."""
        if self.mla:
            return self._mla_params()
        kv_width = self.kv_heads * self.head_dim
        weights = self.hidden * (2 * self.query_width + 2 * kv_width)
        biases = (self.query_width + 2 * kv_width if self.qkv_bias else 0) + (self.hidden if self.linear_bias else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _mla_params(self) -> int:
        mla = self.mla
        assert mla is not None
        if mla.q_lora_rank:
            query = self.hidden * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * self.query_width
        else:
            query = self.hidden * self.query_width
        shared = self.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        expand = mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + shared + expand + self.value_width * self.hidden

    def mlp_params(self, width: int) -> int:
        """Parameters of an MLP (or of one expert) of the given width."""
        matrices = 3 if self.gated_mlp else 2
        return matrices * self.hidden * width + ((matrices - 1) * width + self.hidden if self.linear_bias else 0)

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert; 0 in a dense model."""
        return self.mlp_params(self.moe.moe_ffn) if self.moe else 0

    def block_params(self, block: int) -> int:
        """Parameters of a block. A tied head counts nothing here: its weights are the embedding's."""
        kind = self.block_kind(block)
        if kind is BlockKind.EMBEDDING:
            return self.hidden * (self.vocab + self.max_positions) + (self.norm_params if self.embedding_norm else 0)
        if kind is BlockKind.HEAD:
            return self.norm_params + (0 if self.tie_embeddings else self.hidden * self.vocab)
        return self.layer_kind(block).params

    def _layer_params(self, *, routed: bool) -> int:
        """Parameters of a layer of attention and MLP, or experts."""
        common = self.attention_params + self.norms_per_layer * self.norm_params
        if not routed:
            return common + self.mlp_params(self.ffn)
        moe = self.moe
        assert moe is not None
        shared = self.mlp_params(moe.shared_ffn) if moe.shared_ffn else 0
        return common + self.router_params + shared + moe.num_experts * self.expert_params

    @property
    def router_params(self) -> int:
        """Parameters of the router of one layer, the gate of its shared experts with it; 0 in a dense model."""
        if self.moe is None:
            return 0
        rows = self.moe.num_experts + (1 if self.moe.shared_gate else 0)
        return self.hidden * rows + (self.moe.num_experts if self.moe.router_bias else 0)

    @property
    def layers_of_kinds(self) -> "tuple[tuple[LayerKind, int], ...]":
        """(kind, layers of it), in the order of `layer_kinds`."""
        counts: Counter[int] = Counter()
        for place, count in self.layer_runs:
            counts[place] += count
        return tuple((kind, counts[place]) for place, kind in enumerate(self.layer_kinds))

    @property
    def num_params(self) -> int:
        """All parameters, tied weights once, without multi-token-prediction layers."""
        layers = sum(kind.params * count for kind, count in self.layers_of_kinds)
        return self.block_params(0) + layers + self.block_params(self.num_blocks - 1)

    @property
    def active_params(self) -> int:
        """Parameters that take part in a token's forward pass, the look-up of the embedding included."""
        return self.num_params - sum(kind.idle_params * count for kind, count in self.layers_of_kinds)

    # FLOPs -------------------------------------------------------------------------------------------------------

    def model_flops_per_token(self, seq: int) -> float:
        """Model FLOPs of a token of the text, forward and backward, without recompute.

        6 x active parameters (the embedding's look-up out, the head in) + 12·L·seq·width of attention, not halved for
        causality (the convention of PaLM, appendix B). Layers on tokens of their own count as often as a sample has these.
        """
        look_up = self.hidden * (self.vocab + self.max_positions)
        head_of_tied = self.hidden * self.vocab if self.tie_embeddings else 0
        apart = [(kind, count) for kind, count in self.layers_of_kinds if kind.tokens is not None]
        elsewhere = sum(kind.active_params * n for kind, n in apart)
        elsewhere += sum(one.projector.other_params for one in self.layer_kinds if one.projector and one.tokens is None)
        matmul = self.active_params - look_up + head_of_tied - elsewhere
        attention = sum(kind.attention_flops(seq) * n for kind, n in self.layers_of_kinds if kind.tokens is None)
        own = sum(kind.flops(seq) * count * (kind.tokens or 0) / seq for kind, count in apart)
        return 6.0 * matmul + attention + own


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One kind of layer of a model, as the layer of a model that has no other."""

    kind: BlockKind
    """DENSE, MOE or PROJECTOR."""
    model: Model
    """The dimensions that hold in it; of a plain model that model itself."""
    tokens: int | None = None
    """Tokens of a sample; null = the text's."""
    projector: LayerGroup | None = None
    """The projector; null = a layer of attention and MLP."""

    @property
    def params(self) -> int:
        """Parameters of one layer."""
        if self.projector is None:
            return self.model._layer_params(routed=self.kind is BlockKind.MOE)
        return self.projector.matrix_params + self.projector.other_params

    @property
    def idle_params(self) -> int:
        """Parameters that a token does not see: those of the experts it is not sent to."""
        moe = self.model.moe
        return (moe.num_experts - moe.top_k) * self.model.expert_params if self.kind is BlockKind.MOE and moe else 0

    @property
    def active_params(self) -> int:
        """The others."""
        return self.params - self.idle_params

    def attention_flops(self, seq: int) -> int:
        """FLOPs of attention for one of its tokens, forward and backward, over all of a sample's."""
        tokens = seq if self.tokens is None else self.tokens
        return 0 if self.projector else 6 * tokens * (self.model.query_width + self.model.value_width)

    def flops(self, seq: int) -> float:
        """Model FLOPs of one of its tokens, forward and backward: 6 x active parameters + attention."""
        matrices = self.active_params if self.projector is None else self.projector.matrix_params
        return 6.0 * matrices + self.attention_flops(seq)
