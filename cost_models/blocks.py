"""Which operations a block makes on one rank, and what they take: compute by block kind and recompute, and the traffic of
tensor and context parallelism inside the block. Arrays over cells.

T = mbs·seq/cp tokens of a micro-batch on a rank. q, k, v are one product, gate and up are one product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models import compute
from cost_models.collectives import Collective, Fabric, collective_s
from cost_models.compute import Rates, Seconds
from cost_models.problem import Cells, Problem
from cost_models.records import Model, RecordError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Shares of a layer's forward pass that are computed again in its backward pass."""

    matmuls: float = 0.0
    """Of the four products."""
    last_matmul: bool = True
    """The last product counts among them; nothing behind it needs its output, so torch stops before it."""
    output_matmul_with_tp: bool = False
    """The product behind the attention, where tp > 1."""
    attention: float = 0.0
    """Of the attention itself."""
    memory_ops: float = 0.0
    """Of norms, activation function, residuals."""
    gathers: float = 0.0
    """Of the all-gathers of tensor parallelism."""
    reductions: float = 0.0
    """Of its reduce-scatters or all-reduces."""


_FULL = Repeated(matmuls=1.0, attention=1.0, memory_ops=1.0, gathers=1.0, reductions=1.0)
_REPEATED: Mapping[str, Mapping[str, Repeated]] = {
    # core attention (Korthikanti 2022, section 5): scores, softmax, dropout and the product with the values
    "": {"none": Repeated(), "selective": Repeated(attention=1.0), "full": _FULL},
    # executor/sharding/recompute.py keeps the products and the attention, and computes again what is bound by memory;
    # with tp > 1 the output projection and both gathers too. Neither kind repeats a layer's last product.
    "torch": {
        "none": Repeated(),
        "selective": Repeated(output_matmul_with_tp=True, memory_ops=1.0, gathers=1.0),
        "full": Repeated(matmuls=1.0, last_matmul=False, attention=1.0, memory_ops=1.0, gathers=1.0, reductions=0.5),
    },
}


def repeated(runtime_name: str, kind: str) -> Repeated:
    """What a kind of recompute repeats in a runtime. RecordError lists the known kinds."""
    kinds = _REPEATED.get(runtime_name, _REPEATED[""])
    if kind not in kinds:
        raise RecordError(f"recompute {kind!r} is not known for runtime {runtime_name!r}; known: {', '.join(kinds)}")
    return kinds[kind]


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
    queries: FloatArray
    """Width of the local queries."""
    keys_values: FloatArray
    """Width of the local keys, and of the local values; a head is never split."""
    ffn: FloatArray
    """Local width of the MLP."""
    vocab: FloatArray
    """Local rows of embedding and head, padded as the runtime pads."""


def share(problem: Problem, cells: Cells) -> Share:
    """What one rank of each cell holds of a block."""
    model, runtime = problem.model, problem.runtime
    tp, cp, mbs = cells.tp.astype(float), cells.cp.astype(float), cells.mbs.astype(float)
    multiple = float(runtime.vocab_multiple)
    return Share(
        tokens=mbs * problem.workload.seq / cp,
        mbs=mbs,
        tp=tp,
        cp=cp,
        sequence_parts=tp if runtime.sequence_parallel else np.ones_like(tp),
        queries=model.query_width / tp,
        keys_values=np.maximum(model.kv_heads / tp, 1.0) * model.head_dim,
        ffn=model.ffn / tp,
        vocab=np.ceil(model.vocab / (multiple * tp)) * multiple,
    )


def layer_matmuls(model: Model, part: Share) -> tuple[tuple[FloatArray, FloatArray, FloatArray], ...]:
    """(m, n, k) of the four products of a layer's forward pass: qkv, output, up (with gate), down."""
    hidden = np.full_like(part.tokens, model.hidden)
    up = part.ffn * (2 if model.gated_mlp else 1)
    return (
        (part.tokens, part.queries + 2 * part.keys_values, hidden),
        (part.tokens, hidden, part.queries),
        (part.tokens, up, hidden),
        (part.tokens, hidden, part.ffn),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """A layer of one micro-batch, by what it does."""

    matmuls: Seconds
    output_matmul: Seconds
    """The product behind the attention, one of them."""
    last_matmul: Seconds
    """The product that ends the layer, one of them."""
    attention: Seconds
    memory_ops: Seconds

    @property
    def total(self) -> Seconds:
        """All of it."""
        return self.matmuls + self.attention + self.memory_ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Forward and backward compute of a block."""

    forward: Seconds
    backward: Seconds


def matmul_key(precision: str) -> str:
    """Format of the Measurement key of a product (m, n, k)."""
    return f"matmul/{precision}/" + "{}x{}x{}"


def attention_key(precision: str, direction: str) -> str:
    """Format of the Measurement key of attention (batch, seq, heads, kv_heads, head_dim)."""
    return f"attention/{precision}/" + "{}x{}x{}x{}x{}/" + direction


def layer_key(precision: str, gated: bool, direction: str) -> str:
    """Format of the key of a whole local layer (batch, seq, hidden, heads, kv_heads, head_dim, ffn)."""
    return f"layer/{precision}/" + "{}x{}x{}/{}x{}x{}/{}" + ("g" if gated else "") + f"/{direction}"


def head_key(precision: str, direction: str) -> str:
    """Format of the key of norm, head and loss (batch, seq, hidden, local vocabulary)."""
    return f"head/{precision}/" + "{}x{}x{}x{}/" + direction


def embedding_key(precision: str, direction: str) -> str:
    """Format of the key of the look-up (batch, seq, hidden, local vocabulary)."""
    return f"embedding/{precision}/" + "{}x{}x{}x{}/" + direction


def _matmul(problem: Problem, rates: Rates, m: FloatArray, n: FloatArray, k: FloatArray, wide: bool = False) -> Seconds:
    seconds = compute.matmul_s(rates, m, n, k, wide=wide)
    precision = "bf16" if wide and rates.precision == "fp8" else rates.precision
    key = matmul_key(precision)
    return compute.measured_or(problem.calibration, seconds, f"matmul/{precision}/", key, (m, n, k))


def _attention(problem: Problem, rates: Rates, part: Share, backward: bool) -> Seconds:
    model, seq = problem.model, problem.workload.seq
    heads = part.queries / model.head_dim
    seconds = compute.attention_s(
        rates,
        part.mbs,
        seq,
        heads,
        model.head_dim,
        backward=backward,
        window=model.sliding_window,
        parts=part.cp,
    )
    direction = "backward" if backward else "forward"
    key = attention_key(rates.precision, direction)
    return compute.measured_or(problem.calibration, seconds, "attention/", key, attention_sides(problem, part))


def attention_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `attention_key`; -1 where a part of the sequence makes it another operation."""
    model = problem.model
    whole = np.where(part.cp > 1, -1.0, part.mbs)
    seq, head_dim = (np.full_like(part.mbs, side) for side in (problem.workload.seq, model.head_dim))
    return whole, seq, part.queries / model.head_dim, part.keys_values / model.head_dim, head_dim


def layer_pass(problem: Problem, rates: Rates, part: Share) -> tuple[LayerSeconds, LayerSeconds]:
    """A dense layer's forward and backward pass without recompute, by what it does.

    Memory-bound bytes: 20·h on the residual stream, 4 on q, k, v, (4 + 2·gate) on the MLP's width, in 16-bit elements,
    twice in the backward pass; then the casts of fp8; then the local weights.
    """
    model = problem.model
    shapes = layer_matmuls(model, part)
    forward = [_matmul(problem, rates, m, n, k) for m, n, k in shapes]
    backward = [_matmul(problem, rates, m, k, n) + _matmul(problem, rates, n, k, m) for m, n, k in shapes]
    gate = 1 if model.gated_mlp else 0
    bytes_16 = (
        20 * model.hidden / part.sequence_parts + 4 * (part.queries + 2 * part.keys_values) + (4 + 2 * gate) * part.ffn
    ) * part.tokens
    moved = compute.moved_s(rates, rates.memory, bytes_16 * rates.element_bytes / 2)
    cast = compute.moved_s(rates, rates.cast_bytes, part.tokens * (2 * model.hidden + part.queries + part.ffn))
    weights = compute.moved_s(rates, rates.traffic_bytes, layer_params(model, part))
    return (
        LayerSeconds(
            matmuls=_sum(forward),
            output_matmul=forward[1],
            last_matmul=forward[3],
            attention=_attention(problem, rates, part, backward=False),
            memory_ops=moved + cast + weights.scaled(1 / 3),
        ),
        LayerSeconds(
            matmuls=_sum(backward),
            output_matmul=backward[1],
            last_matmul=backward[3],
            attention=_attention(problem, rates, part, backward=True),
            memory_ops=moved.scaled(2.0) + cast.scaled(2.0) + weights.scaled(2 / 3),
        ),
    )


def _sum(parts: list[Seconds]) -> Seconds:
    total = parts[0]
    for further in parts[1:]:
        total = total + further
    return total


def layer_params(model: Model, part: Share) -> FloatArray:
    """Parameters of a dense layer on one rank: matrices divided over tp, norms whole."""
    norms = model.norms_per_layer * model.norm_params
    matrices = model.block_params(1) - norms
    # keys and values are copied where tp > kv_heads
    copied = 2 * model.hidden * (part.keys_values - model.kv_heads * model.head_dim / part.tp)
    return np.asarray(matrices / part.tp + copied + norms, dtype=float)


def dense_pass(problem: Problem, rates: Rates, part: Share, kinds: tuple[str, ...]) -> dict[str, Pass]:
    """A dense layer's compute by kind of recompute; a measured whole layer beats its operations."""
    model = problem.model
    forward, backward = layer_pass(problem, rates, part)
    floored = [
        compute.with_floor(side.total, rates.launch_s, rates.launch_s.value * weight)
        for side, weight in ((forward, 1 / 3), (backward, 2 / 3))
    ]
    sides = layer_sides(problem, part)
    plain = [
        compute.measured_or(
            problem.calibration, seconds, "layer/", layer_key(rates.precision, model.gated_mlp, direction), sides
        )
        for seconds, direction in zip(floored, ("forward", "backward"), strict=True)
    ]
    passes = {}
    for kind in kinds:
        again = repeated(problem.runtime.name, kind)
        share_again = _share_again(again, forward, part)
        passes[kind] = Pass(forward=plain[0], backward=plain[1] + plain[0].scaled(share_again))
    return passes


def _share_again(again: Repeated, forward: LayerSeconds, part: Share) -> FloatArray:
    """Share of the forward pass that is computed again."""
    matmuls = forward.matmuls.total - (0.0 if again.last_matmul else forward.last_matmul.total)
    seconds = (
        again.matmuls * matmuls
        + again.attention * forward.attention.total
        + again.memory_ops * forward.memory_ops.total
    )
    if again.output_matmul_with_tp:
        seconds = seconds + np.where(part.tp > 1, forward.output_matmul.total, 0.0)
    return np.asarray(seconds / forward.total.total, dtype=float)


def layer_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `layer_key`; -1 where a part of the sequence makes it another operation."""
    model, seq, like = problem.model, problem.workload.seq, np.full_like
    return (
        np.where(part.cp > 1, -1.0, part.mbs),
        like(part.mbs, seq),
        like(part.mbs, model.hidden),
        part.queries / model.head_dim,
        part.keys_values / model.head_dim,
        like(part.mbs, model.head_dim),
        part.ffn,
    )


def head_pass(problem: Problem, rates: Rates, part: Share) -> Pass:
    """Final norm, product with the vocabulary, and the loss over its logits."""
    hidden = np.full_like(part.tokens, problem.model.hidden)
    forward = _matmul(problem, rates, part.tokens, part.vocab, hidden, wide=True)
    backward = _matmul(problem, rates, part.tokens, hidden, part.vocab, wide=True) + _matmul(
        problem, rates, part.vocab, hidden, part.tokens, wide=True
    )
    loss = compute.moved_s(rates, rates.logit_bytes, part.tokens * part.vocab * rates.element_bytes / 2)
    norm = compute.moved_s(
        rates, rates.memory, 4 * part.tokens * hidden / part.sequence_parts * rates.element_bytes / 2
    )
    return _ends(problem, rates, part, "head", forward + loss + norm, backward + loss + norm.scaled(2.0))


def embedding_pass(problem: Problem, rates: Rates, part: Share) -> Pass:
    """Look-up of T rows, and the scattered sum of their gradients."""
    moved = compute.moved_s(rates, rates.memory, 4 * part.tokens * problem.model.hidden * rates.element_bytes / 2)
    return _ends(problem, rates, part, "embedding", moved, moved.scaled(2.0))


def end_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `head_key` and `embedding_key`; -1 where a part of the sequence makes it another operation."""
    whole = np.where(part.cp > 1, -1.0, part.mbs)
    seq, hidden = (np.full_like(part.mbs, side) for side in (problem.workload.seq, problem.model.hidden))
    return whole, seq, hidden, part.vocab


def _ends(problem: Problem, rates: Rates, part: Share, what: str, forward: Seconds, backward: Seconds) -> Pass:
    key_of = head_key if what == "head" else embedding_key
    sides = end_sides(problem, part)
    pair = [
        compute.measured_or(problem.calibration, seconds, f"{what}/", key_of(rates.precision, direction), sides)
        for seconds, direction in ((forward, "forward"), (backward, "backward"))
    ]
    return Pass(forward=pair[0], backward=pair[1])


# --- traffic of tensor and context parallelism inside a block -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Communication inside a block and one micro-batch, before anything hides it."""

    forward: Seconds
    backward: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorCalls:
    """The collectives around one product that is split over tp, for the hidden state of a micro-batch."""

    gather: Seconds
    """With sequence parallelism: the all-gather before it. Without, nothing."""
    reduction: Seconds
    """The reduce-scatter behind it; without sequence parallelism the all-reduce."""


def tensor_calls(problem: Problem, cells: Cells, fabric: Fabric, part: Share) -> TensorCalls:
    """Seconds of T·h through each collective of tensor parallelism."""
    num_bytes = part.tokens * problem.model.hidden * compute.element_bytes(problem.workload.precision)
    stride = cells.stride("tp")
    if problem.runtime.sequence_parallel:
        return TensorCalls(
            gather=collective_s(fabric, Collective.ALL_GATHER, num_bytes, cells.tp, stride),
            reduction=collective_s(fabric, Collective.REDUCE_SCATTER, num_bytes, cells.tp, stride),
        )
    whole = collective_s(fabric, Collective.ALL_REDUCE, num_bytes, cells.tp, stride)
    return TensorCalls(gather=Seconds.zeros(num_bytes.shape), reduction=whole)


def tensor_traffic(problem: Problem, calls: TensorCalls, kind: str) -> Traffic:
    """Tensor parallelism in a layer: with sequence parallelism two all-gathers and two reduce-scatters each way, else two
    all-reduces; and those of the forward pass that the recompute `kind` repeats.
    """
    again = repeated(problem.runtime.name, kind)
    forward = calls.gather.scaled(2.0) + calls.reduction.scaled(2.0)
    repeats = calls.gather.scaled(2.0 * again.gathers) + calls.reduction.scaled(2.0 * again.reductions)
    return Traffic(forward=forward, backward=forward + repeats)


def end_traffic(cells: Cells, fabric: Fabric, part: Share, calls: TensorCalls) -> tuple[Traffic, Traffic]:
    """(embedding, head) of a vocabulary that is divided over tp: a reduction behind the look-up, a gather before the head,
    and three all-reduces of one number a token in the loss (largest logit, sum, the label's logit).
    """
    loss = collective_s(fabric, Collective.ALL_REDUCE, part.tokens * 4.0, cells.tp, cells.stride("tp"))
    embedding = Traffic(forward=calls.reduction, backward=calls.gather)
    return embedding, Traffic(forward=calls.gather + loss.scaled(3.0), backward=calls.reduction)


def context_traffic(problem: Problem, cells: Cells, fabric: Fabric, part: Share) -> Traffic:
    """Context parallelism in a layer: keys and values of the whole sequence come around, their gradients go back."""
    element = compute.element_bytes(problem.workload.precision)
    num_bytes = part.tokens * part.cp * 2 * part.keys_values * element
    group = (cells.cp, cells.stride("cp"))
    gather = collective_s(fabric, Collective.ALL_GATHER, num_bytes, *group)
    scatter = collective_s(fabric, Collective.REDUCE_SCATTER, num_bytes, *group)
    return Traffic(forward=gather, backward=gather + scatter)
