"""Which operations a block makes on one rank, and what they take: compute by block kind and recompute. Arrays over cells."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cost_models import compute
from cost_models.calibrations import Rate, value
from cost_models.compute import Rates, Seconds
from cost_models.experts import routed_pass
from cost_models.problem import Problem
from cost_models.recompute import Repeated, repeated
from cost_models.records import BlockKind, ContextExchange, LayerGroup
from cost_models.shares import FloatArray, Share, activation_bytes_moved, layer_params, layer_products, shared_width

PRODUCTS = ("projections", "up_projections", "output", "mlp_up", "mlp_down", "router", "experts")
"""Parts of `recompute.WORK` that are products."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """One pass of a layer and one micro-batch, by what it does."""

    parts: Mapping[str, Seconds]
    """Part of `recompute.WORK` -> its seconds."""
    weight_grad_s: FloatArray | None = None
    """Of a backward pass: what of its seconds goes into gradients of weights, which nothing waits for."""

    @property
    def total(self) -> Seconds:
        """All of it."""
        return _sum(list(self.parts.values()))

    @property
    def matmuls(self) -> Seconds:
        """Its products."""
        return _sum([seconds for name, seconds in self.parts.items() if name in PRODUCTS])

    @property
    def attention(self) -> Seconds:
        """The attention itself."""
        return self.parts["core"]

    @property
    def memory_ops(self) -> Seconds:
        """What is bound by memory."""
        return _sum([seconds for name, seconds in self.parts.items() if name not in (*PRODUCTS, "core")])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Forward and backward compute of a block."""

    forward: Seconds
    backward: Seconds
    weight_grad_s: FloatArray | None = None
    """What of the backward seconds goes into gradients of weights; None = nothing."""
    attention_s: tuple[FloatArray, FloatArray] | None = None
    """Forward and backward seconds of attention, without recompute; None = there is none."""
    idle_s: tuple[FloatArray, FloatArray] | None = None
    """Forward and backward seconds in which the device waits for launches; None = it never does."""


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
    precision = rates.wide_precision if wide else rates.precision
    key = matmul_key(precision)
    return compute.measured_or(problem.calibration, seconds, f"matmul/{precision}/", key, (m, n, k))


def _attention(problem: Problem, rates: Rates, part: Share, backward: bool) -> Seconds:
    model, seq = problem.model, problem.workload.seq
    seconds = compute.attention_s(
        rates,
        part.mbs,
        seq,
        part.queries / model.query_head_dim,
        (model.query_head_dim + model.value_head_dim) / 2,
        backward=backward,
        window=model.sliding_window,
        parts=part.cp,
        causal=model.causal,
    )
    if problem.runtime.context_exchange is not ContextExchange.ALL_TO_ALL:
        overhead = value(problem.calibration, "attention.ring_overhead", problem.runtime.name)
        seconds = seconds.scaled(1.0 + overhead * (1.0 - 1.0 / part.cp))
    direction = "backward" if backward else "forward"
    key = attention_key(rates.precision, direction)
    return compute.measured_or(problem.calibration, seconds, "attention/", key, attention_sides(problem, part))


def attention_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `attention_key`; -1 where a part of the sequence, or sight of all of it, makes it another operation."""
    model = problem.model
    whole = np.where((part.cp > 1) | (not model.causal), -1.0, part.mbs)
    seq, head_dim = (np.full_like(part.mbs, side) for side in (problem.workload.seq, model.query_head_dim))
    return whole, seq, part.queries / head_dim, part.keys / head_dim, head_dim


def layer_pass(
    problem: Problem, rates: Rates, part: Share, kind: BlockKind = BlockKind.DENSE
) -> tuple[LayerSeconds, LayerSeconds]:
    """A layer's forward and backward pass without recompute, by what it does.

    Memory-bound bytes: 20·h on the residual stream, 4 on q, k, v, (4 + 2·gate) on the MLP's width, in 16-bit elements,
    twice in the backward pass; then the casts of fp8; then the local weights.
    """
    model, width = problem.model, shared_width(problem.model, part, kind)
    products = layer_products(model, part, kind)
    forward = {name: _sum([_matmul(problem, rates, *sides) for sides in all_]) for name, all_ in products.items()}
    inputs = {name: _sum([_matmul(problem, rates, m, k, n) for m, n, k in all_]) for name, all_ in products.items()}
    weights_of = {name: _sum([_matmul(problem, rates, n, k, m) for m, n, k in all_]) for name, all_ in products.items()}
    backward = {name: inputs[name] + weights_of[name] for name in products}
    moved = {
        "norms": 20 * part.tokens * model.hidden / part.sequence_parts,
        "rotation": 4 * part.tokens * (part.queries + part.keys + part.values),
        "activation": activation_bytes_moved(model) * part.tokens * width,
    }
    for name, size in moved.items():
        forward[name] = compute.moved_s(rates, rates.memory, size * rates.element_bytes / 2)
    forward["casts"] = compute.moved_s(rates, rates.cast_bytes, part.tokens * (2 * model.hidden + part.outputs + width))
    backward |= {name: forward[name].scaled(2.0) for name in (*moved, "casts")}
    if kind is BlockKind.MOE:
        routed = routed_pass(problem, rates, part)
        forward.update(routed[0])
        backward.update(routed[1])
    weights = compute.moved_s(rates, rates.traffic_bytes, np.add(*layer_params(model, part, kind)))
    for direction, share_of in ((forward, 1 / 3), (backward, 2 / 3)):
        direction["weights"] = weights.scaled(share_of)
    forward["core"] = _attention(problem, rates, part, backward=False)
    backward["core"] = _attention(problem, rates, part, backward=True)
    # of the routed experts' products half, of all else that is bound by memory nothing
    late = [
        *weights_of.values(),
        *(backward[name].scaled(0.5) for name in PRODUCTS if name in backward and name not in products),
    ]
    weight_grad_s = np.asarray(sum(seconds.total for seconds in (*late, backward["weights"])))
    return LayerSeconds(parts=forward), LayerSeconds(parts=backward, weight_grad_s=weight_grad_s)


def projector_pass(
    problem: Problem, rates: Rates, part: Share, projector: LayerGroup
) -> tuple[LayerSeconds, LayerSeconds]:
    """A projector's forward and backward pass: its matrices in pairs, the first of a pair divided over tp by what it puts out,
    the second by what it takes in; a function between any two.

    Memory-bound bytes: 4 for each element that comes in or goes out, 4 on the widths between, in 16-bit elements, twice in
    the backward pass; then the casts of fp8; then the local weights.
    """
    widths, tokens, like = projector.projection, part.tokens, np.full_like
    products = [
        (tokens, like(tokens, out), like(tokens, into) / part.tp)
        if number % 2
        else (tokens, like(tokens, out) / part.tp, like(tokens, into))
        for number, (into, out) in enumerate(pairwise(widths))
    ]
    between = tokens * sum(widths[1:-1]) / part.tp
    forward, backward, late = {}, {}, []
    for name, all_ in (("mlp_up", products[:-1]), ("mlp_down", products[-1:])):
        if all_:
            forward[name] = _sum([_matmul(problem, rates, *sides) for sides in all_])
            late.append(_sum([_matmul(problem, rates, n, k, m) for m, n, k in all_]))
            backward[name] = _sum([_matmul(problem, rates, m, k, n) for m, n, k in all_]) + late[-1]
    moved = {"norms": 4 * tokens * (widths[0] + widths[-1]) / part.sequence_parts, "activation": 4 * between}
    for name, size in moved.items():
        forward[name] = compute.moved_s(rates, rates.memory, size * rates.element_bytes / 2)
    forward["casts"] = compute.moved_s(rates, rates.cast_bytes, tokens * widths[0] + between)
    backward |= {name: forward[name].scaled(2.0) for name in (*moved, "casts")}
    params = projector.matrix_params / part.tp + projector.other_params
    weights = compute.moved_s(rates, rates.traffic_bytes, params)
    for direction, share_of in ((forward, 1 / 3), (backward, 2 / 3)):
        direction["weights"] = weights.scaled(share_of)
        direction["core"] = Seconds.zeros(tokens.shape)
    weight_grad_s = np.asarray(sum(seconds.total for seconds in (*late, backward["weights"])))
    return LayerSeconds(parts=forward), LayerSeconds(parts=backward, weight_grad_s=weight_grad_s)


def _sum(parts: list[Seconds]) -> Seconds:
    total = parts[0]
    for further in parts[1:]:
        total = total + further
    return total


def layer_passes(
    problem: Problem,
    rates: Rates,
    part: Share,
    kind: BlockKind,
    recompute_kinds: tuple[str, ...],
    projector: LayerGroup | None = None,
) -> dict[str, Pass]:
    """A layer's compute by kind of recompute; a measured whole layer beats its operations."""
    if projector is None:
        forward, backward = layer_pass(problem, rates, part, kind)
    else:
        forward, backward = projector_pass(problem, rates, part, projector)
    launch = layer_launch(rates, kind, projector)
    plain = [
        compute.with_floor(side.total, launch, launch.value * weight)
        for side, weight in ((forward, 1 / 3), (backward, 2 / 3))
    ]
    if kind is BlockKind.DENSE and problem.model.mla is None:
        sides, gated = layer_sides(problem, part), problem.model.gated_mlp
        plain = [
            compute.measured_or(problem.calibration, seconds, "layer/", layer_key(rates.precision, gated, way), sides)
            for seconds, way in zip(plain, ("forward", "backward"), strict=True)
        ]
    assert backward.weight_grad_s is not None
    floored_s = compute.with_floor(forward.total, launch, launch.value / 3).total
    weight_grad_s = plain[1].total * (backward.weight_grad_s / backward.total.total)
    idle_s = tuple(
        np.maximum(floored.total - side.total.total, 0.0)
        for floored, side in zip(plain, (forward, backward), strict=True)
    )
    passes = {}
    for name in recompute_kinds:
        again = _again(repeated(problem.runtime.name, name), forward, part, launch)
        whole = plain[1] + plain[0].scaled(again.total / floored_s)
        passes[name] = Pass(
            forward=plain[0],
            backward=whole,
            weight_grad_s=weight_grad_s,
            attention_s=(forward.attention.total, backward.attention.total),
            idle_s=(idle_s[0], idle_s[1]),
        )
    return passes


def layer_launch(rates: Rates, kind: BlockKind, projector: LayerGroup | None) -> Rate:
    """Launches of a layer's forward and backward pass; a projector's by its matrices, of which a layer has four."""
    if projector is not None:
        return replace(rates.launch_s, value=rates.launch_s.value * (len(projector.projection) - 1) / 4)
    return rates.moe_launch_s if kind is BlockKind.MOE else rates.launch_s


def _again(again: Repeated, forward: LayerSeconds, part: Share, launch: Rate) -> Seconds:
    """What is computed again of a forward pass, under the launches of as many of its parts."""
    seconds, parts = Seconds.zeros(part.tokens.shape), np.zeros_like(part.tokens)
    for name, once in forward.parts.items():
        repeats = again.work.get(name, 0.0) + (again.output_with_tp and name == "output") * (part.tp > 1)
        seconds, parts = seconds + once.scaled(repeats), parts + repeats
    return compute.with_floor(seconds, launch, launch.value / 3 * parts / len(forward.parts))


def layer_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `layer_key`; -1 where a part of the sequence makes it another operation."""
    model, seq, like = problem.model, problem.workload.seq, np.full_like
    return (
        np.where((part.cp > 1) | (not model.causal), -1.0, part.mbs),
        like(part.mbs, seq),
        like(part.mbs, model.hidden),
        part.queries / model.head_dim,
        part.keys / model.head_dim,
        like(part.mbs, model.head_dim),
        part.ffn,
    )


def head_pass(problem: Problem, rates: Rates, part: Share) -> Pass:
    """Final norm, product with the vocabulary, and the loss over its logits."""
    hidden = np.full_like(part.tokens, problem.model.hidden)
    forward = _matmul(problem, rates, part.tokens, part.vocab, hidden, wide=True)
    late = _matmul(problem, rates, part.vocab, hidden, part.tokens, wide=True)
    backward = _matmul(problem, rates, part.tokens, hidden, part.vocab, wide=True) + late
    loss = compute.moved_s(rates, rates.logit_bytes, part.tokens * part.vocab * rates.element_bytes / 2)
    norm = compute.moved_s(
        rates, rates.memory, 4 * part.tokens * hidden / part.sequence_parts * rates.element_bytes / 2
    )
    return _ends(problem, rates, part, "head", forward + loss + norm, backward + loss + norm.scaled(2.0), late)


def join_pass(problem: Problem, rates: Rates, part: Share) -> Pass:
    """The projection of two normalised hidden states to one, in front of a layer that predicts later tokens."""
    rows = part.tokens
    wide, narrow = np.full_like(rows, 2 * problem.model.hidden), problem.model.hidden / part.tp
    norms = compute.moved_s(
        rates, rates.memory, 8 * rows * problem.model.hidden / part.sequence_parts * rates.element_bytes / 2
    )
    forward = _matmul(problem, rates, rows, narrow, wide)
    late = _matmul(problem, rates, narrow, wide, rows)
    backward = _matmul(problem, rates, rows, wide, narrow) + late
    return Pass(forward=forward + norms, backward=backward + norms.scaled(2.0), weight_grad_s=late.total)


def embedding_pass(problem: Problem, rates: Rates, part: Share) -> Pass:
    """Look-up of T rows, and the scattered sum of their gradients: nothing is before it, so all of that is for weights."""
    moved = compute.moved_s(rates, rates.memory, 4 * part.tokens * problem.model.hidden * rates.element_bytes / 2)
    return _ends(problem, rates, part, "embedding", moved, moved.scaled(2.0), moved.scaled(2.0))


def end_sides(problem: Problem, part: Share) -> tuple[FloatArray, ...]:
    """Columns of `head_key` and `embedding_key`; -1 where a part of the sequence makes it another operation."""
    whole = np.where(part.cp > 1, -1.0, part.mbs)
    seq, hidden = (np.full_like(part.mbs, side) for side in (problem.workload.seq, problem.model.hidden))
    return whole, seq, hidden, part.vocab


def _ends(
    problem: Problem, rates: Rates, part: Share, what: str, forward: Seconds, backward: Seconds, late: Seconds
) -> Pass:
    """`late` = what of the backward pass goes into gradients of weights."""
    key_of = head_key if what == "head" else embedding_key
    sides = end_sides(problem, part)
    pair = [
        compute.measured_or(problem.calibration, seconds, f"{what}/", key_of(rates.precision, direction), sides)
        for seconds, direction in ((forward, "forward"), (backward, "backward"))
    ]
    weight_grad_s = pair[1].total * (late.total / backward.total)
    return Pass(forward=pair[0], backward=pair[1], weight_grad_s=weight_grad_s)
