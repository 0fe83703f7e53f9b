"""What one rank holds of a block: widths, rows, products and parameters. Arrays over cells.

T = mbs·seq/cp tokens of a micro-batch on a rank. q, k, v are one product, gate and up are one product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.problem import Cells, Problem
from cost_models.records import BlockKind, LayerKind, Model

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One rank's part of the work, as arrays over cells."""

    tokens: FloatArray
    """T: tokens of a micro-batch on a rank."""
    mbs: FloatArray
    tp: FloatArray
    cp: FloatArray
    sequence_parts: FloatArray
    """Parts of norms and residuals: tp with sequence parallelism, else 1."""
    hop_parts: FloatArray
    """Parts in which the hidden state goes from stage to stage: tp where the runtime divides it, else 1."""
    queries: FloatArray
    """Width of the local queries."""
    keys: FloatArray
    """Width of the local keys; a head is never split."""
    values: FloatArray
    """Width of the local values."""
    outputs: FloatArray
    """Width of what the local heads put out."""
    ffn: FloatArray
    """Local width of a dense layer's MLP."""
    vocab: FloatArray
    """Local rows of embedding and head, padded as the runtime pads."""
    routed_rows: FloatArray
    """Rows that the routed experts of a rank see, where all experts see as many; 0 in a dense model."""
    local_experts: FloatArray
    """Routed experts on a rank, each divided over etp."""
    etp: FloatArray
    ep: FloatArray


def share(problem: Problem, cells: Cells) -> Share:
    """What one rank of each cell holds of a block."""
    return _share(problem, {name: getattr(cells, name).astype(float) for name in _DEGREES})


_DEGREES = ("tp", "cp", "mbs", "ep", "etp")


def layer_share(problem: Problem, part: Share, kind: LayerKind) -> tuple[Problem, Share]:
    """The problem of a kind of layer alone, and what one rank holds of it; `part` is of the problem itself."""
    own = problem.of_layer(kind)
    return own, part if own is problem else _share(own, {name: getattr(part, name) for name in _DEGREES})


def _share(problem: Problem, degrees: Mapping[str, FloatArray]) -> Share:
    model, runtime = problem.model, problem.runtime
    tp, cp, mbs, ep, etp = (degrees[name] for name in _DEGREES)
    multiple = float(runtime.vocab_multiple)
    tokens = mbs * problem.workload.seq / cp
    heads = model.heads / tp
    kv_heads = heads if model.mla else np.maximum(model.kv_heads / tp, 1.0)
    moe = model.moe
    return Share(
        tokens=tokens,
        mbs=mbs,
        tp=tp,
        cp=cp,
        sequence_parts=tp if runtime.sequence_parallel else np.ones_like(tp),
        hop_parts=tp if runtime.sequence_parallel or runtime.scatters_hops else np.ones_like(tp),
        queries=heads * model.query_head_dim,
        keys=kv_heads * model.query_head_dim,
        values=kv_heads * model.value_head_dim,
        outputs=heads * model.value_head_dim,
        ffn=model.ffn / tp,
        vocab=np.ceil(model.vocab / (multiple * tp)) * multiple,
        # etp ranks work on the rows of one expert, and each of the tp ranks brings its part of the tokens
        routed_rows=tokens * (moe.top_k if moe else 0) * etp / tp,
        local_experts=(moe.num_experts if moe else 0) / ep,
        etp=etp,
        ep=ep,
    )


Product = tuple[FloatArray, FloatArray, FloatArray]
"""(m, n, k) of a product of the forward pass."""


def attention_products(model: Model, part: Share) -> Mapping[str, tuple[Product, ...]]:
    """Part of `recompute.WORK` -> the products around a layer's attention.

    Latent attention projects down on every tensor-parallel rank, for its part of the sequence, and up for its heads.
    """
    hidden, tokens = np.full_like(part.tokens, model.hidden), part.tokens
    output = ((tokens, hidden, part.outputs),)
    mla = model.mla
    if mla is None:
        return {"projections": ((tokens, part.queries + part.keys + part.values, hidden),), "output": output}
    mine, like = tokens / part.sequence_parts, np.full_like
    rotated = (
        part.queries / model.query_head_dim * mla.qk_rope_head_dim
    )  # the key's rotated part is shared, not projected
    latent = like(tokens, mla.kv_lora_rank)
    down = [(mine, like(tokens, mla.kv_lora_rank + mla.qk_rope_head_dim), hidden)]
    up = [(tokens, part.keys - rotated + part.values, latent)]
    if mla.q_lora_rank:
        down.append((mine, like(tokens, mla.q_lora_rank), hidden))
        up.append((tokens, part.queries, like(tokens, mla.q_lora_rank)))
    else:
        down.append((tokens, part.queries, hidden))
    return {"projections": tuple(down), "up_projections": tuple(up), "output": output}


def mlp_products(model: Model, part: Share, width: FloatArray) -> Mapping[str, tuple[Product, ...]]:
    """Part of `recompute.WORK` -> the products of an MLP of a local width."""
    hidden = np.full_like(part.tokens, model.hidden)
    up = width * (2 if model.gated_mlp else 1)
    return {"mlp_up": ((part.tokens, up, hidden),), "mlp_down": ((part.tokens, hidden, width),)}


def shared_width(model: Model, part: Share, kind: BlockKind) -> FloatArray:
    """Local width of the MLP that every token of a layer passes: the dense one, or the shared experts'."""
    if kind is BlockKind.MOE:
        assert model.moe is not None
        return np.asarray(model.moe.shared_ffn / part.tp)
    return part.ffn


def layer_products(model: Model, part: Share, kind: BlockKind = BlockKind.DENSE) -> Mapping[str, tuple[Product, ...]]:
    """Part of `recompute.WORK` -> (m, n, k) of the products of a layer's forward pass; routed experts apart."""
    width = shared_width(model, part, kind)
    return {**attention_products(model, part), **(mlp_products(model, part, width) if width.any() else {})}


def layer_params(model: Model, part: Share, kind: BlockKind = BlockKind.DENSE) -> tuple[FloatArray, FloatArray]:
    """(all but the routed experts, routed experts): parameters of a layer on one rank.

    Matrices are divided over tp; norms, router and the projections down to latents are whole on every rank.
    """
    norms, whole = float(model.norms_per_layer * model.norm_params), 0.0
    if (mla := model.mla) is not None:
        latents = mla.kv_lora_rank + (mla.q_lora_rank or 0)
        whole = model.hidden * (latents + mla.qk_rope_head_dim) + latents
    divided = model.attention_params - whole
    routed = np.zeros_like(part.tokens)
    if kind is BlockKind.MOE:
        moe = model.moe
        assert moe is not None
        divided += model.mlp_params(moe.shared_ffn) if moe.shared_ffn else 0
        whole += model.router_params
        routed = part.local_experts * model.expert_params / part.etp
    else:
        divided += model.mlp_params(model.ffn)
    # keys and values are copied where tp > kv_heads
    copied = (
        0.0 if model.mla else model.hidden * (part.keys + part.values - 2 * model.kv_heads * model.head_dim / part.tp)
    )
    return np.asarray(divided / part.tp + copied + whole + norms, dtype=float), routed


def kind_params(problem: Problem, part: Share, kind: LayerKind) -> tuple[FloatArray, FloatArray]:
    """`layer_params` of a kind of layer; a projector's matrices are divided over tp, the rest of it is whole on every rank."""
    if kind.projector is None:
        own, part = layer_share(problem, part, kind)
        return layer_params(own.model, part, kind.kind)
    local = kind.projector.matrix_params / part.tp + kind.projector.other_params
    return np.asarray(local, dtype=float), np.zeros_like(part.tokens)


def activation_bytes_moved(model: Model) -> float:
    """Bytes that the function between an MLP's products moves for each element of its width, in 16 bits."""
    return 6.0 if model.gated_mlp else 4.0
