"""What a layer and the head keep of a micro-batch, by kind of recompute: the terms are at the head of memory.py."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cost_models.calibrations import find, value, value_or
from cost_models.compute import element_bytes
from cost_models.experts import fullest_rows
from cost_models.problem import Problem
from cost_models.recompute import repeated
from cost_models.records import BlockKind, LayerKind, Precision
from cost_models.shares import Share, layer_share, shared_width

FloatArray = NDArray[np.float64]

OUTPUTS = ("attention", "mlp", "gated_mlp", "latents", "routed", "gated_routed", "routed_hidden")
"""Terms of a layer's activations that products and attention put out."""


MODULES_OF = {"torchtitan": "torch", "fsdp": "torch"}
"""Runtime -> the one whose modules and loss it trains with: what autograd keeps of these was counted there."""


SPLIT_SOFTMAX_COPIES = 2.0
"""Copies in fp32 of a rank's logits that torch's loss_parallel makes on its way to the softmax (counted in torch 2.13:
tests/processes/test_phases.py)."""


def layer_activation_bytes(
    problem: Problem,
    part: Share,
    recompute_kind: str,
    kind: BlockKind = BlockKind.DENSE,
    *,
    without_backward: bool = False,
) -> FloatArray:
    """Bytes that one layer keeps of one micro-batch under a kind of recompute, on one rank.

    without_backward: the most that it holds while it runs where nothing is kept (evaluation); `recompute_kind` is the first.
    """
    model, name = problem.model, problem.runtime.name
    modules = (MODULES_OF[name],) if name in MODULES_OF else ()
    family = problem.cluster.pools[0].kind.device.family
    scale = element_bytes(problem.workload.precision) / 2
    again = repeated(name, recompute_kind)
    residual = part.tokens * model.hidden / part.sequence_parts
    if again.keeps_input_only:
        return np.asarray(2.0 * scale * residual)
    gate = 1 if model.gated_mlp else 0
    attention = part.tokens * (part.queries + part.keys + part.values + part.outputs)
    width = shared_width(model, part, kind)
    elements = {
        "residual": residual,
        "gathered": np.where(part.tp > 1, part.tokens * model.hidden, residual),
        "attention": attention,
        "gated_mlp" if gate else "mlp": part.tokens * (1 + gate) * width,
    }
    if model.mla is not None:
        latents = model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)
        elements["latents"] = part.tokens / part.sequence_parts * latents
    if kind is BlockKind.MOE:
        moe = model.moe
        assert moe is not None
        rows = fullest_rows(problem, part)
        elements["gated_routed" if gate else "routed"] = rows * (1 + gate) * moe.moe_ffn / part.etp
        elements["routed_hidden"] = rows * model.hidden
        elements["router"] = part.tokens / part.sequence_parts * moe.num_experts
    if again.keeps_outputs_only:
        # the layer's input, and what the products and the attention put out (executor/sharding/recompute.py)
        outputs = sum(
            again.outputs_kept.get(what.removeprefix("gated_"), 1.0) * size
            for what, size in elements.items()
            if what in OUTPUTS
        )
        return np.asarray(2.0 * scale * (2 * residual + outputs))
    narrow = 0.0
    if problem.workload.precision.is_narrow:
        narrow = value_or(0.0, problem.calibration, "memory.activation.narrow_saved_bytes", name)
    taken_in = _inputs_of_products(problem, part, kind)
    terms = {}
    for what, size in elements.items():
        term = what.removeprefix("gated_")
        per_element = value_or(0.0, problem.calibration, f"memory.activation.{what}_bytes", family, name, *modules)
        whole = per_element * size - narrow * taken_in.get(term, 0.0)
        terms[term] = (1.0 - again.dropped.get(term, 0.0)) * whole
    scores = np.zeros_like(part.tokens)
    if "scores" not in again.dropped and find(problem.calibration, "attention.score_bytes", name) is not None:
        per_score = value(problem.calibration, "memory.activation.score_bytes", name)
        heads = part.queries / model.query_head_dim
        scores = per_score * part.mbs * heads / part.cp * float(problem.workload.seq) ** 2
    if without_backward:
        # what comes in, its norm, and of attention and MLP that which is at work: nothing else is kept
        attended = terms.pop("attention") + terms.pop("latents", 0.0) + scores
        del terms["residual"], terms["gathered"]
        return np.asarray(scale * (2 * 2.0 * residual + np.maximum(attended, sum(terms.values()))))
    return np.asarray(scale * (sum(terms.values()) + scores))


def kind_evaluated_bytes(problem: Problem, part: Share, kind: LayerKind) -> FloatArray:
    """The most that a kind of layer holds of one micro-batch while it runs without a backward pass."""
    own, share_of = layer_share(problem, part, kind)
    if kind.projector is not None:
        return kind_activation_bytes(problem, part, "none", kind)
    return layer_activation_bytes(own, share_of, "none", kind.kind, without_backward=True)


def kind_activation_bytes(problem: Problem, part: Share, recompute_kind: str, kind: LayerKind) -> FloatArray:
    """`layer_activation_bytes` of a kind of layer.

    A projector keeps what comes in, and what each matrix but the last puts out, before and behind the function between
    them; none of it is dropped but by a kind of recompute that keeps no more than what comes in, or no more than what
    matrices put out.
    """
    own, part = layer_share(problem, part, kind)
    if kind.projector is None:
        return layer_activation_bytes(own, part, recompute_kind, kind.kind)
    again = repeated(problem.runtime.name, recompute_kind)
    scale = element_bytes(problem.workload.precision) / 2
    came_in = part.tokens * kind.projector.projection[0] / part.sequence_parts
    if again.keeps_input_only:
        return np.asarray(2.0 * scale * came_in)
    between = part.tokens * sum(kind.projector.projection[1:-1]) / part.tp
    times = 1.0 if again.keeps_outputs_only else 2.0
    return np.asarray(2.0 * scale * (came_in + times * between))


def _inputs_of_products(problem: Problem, part: Share, kind: BlockKind) -> Mapping[str, FloatArray]:
    """Term of a layer's activations -> elements in it that only products take in: what narrow formats keep in 8 bits."""
    inputs = {
        "residual": 2 * part.tokens * problem.model.hidden / part.sequence_parts,  # outputs of both norms
        "attention": part.tokens * part.outputs,
        "mlp": part.tokens * shared_width(problem.model, part, kind),
    }
    if kind is BlockKind.MOE:
        moe, rows = problem.model.moe, fullest_rows(problem, part)
        assert moe is not None
        inputs |= {"routed": rows * moe.moe_ffn / part.etp, "routed_hidden": rows * problem.model.hidden}
    return inputs


def logit_bytes(problem: Problem, part: Share) -> tuple[FloatArray, FloatArray]:
    """(saved per micro-batch in flight, working) bytes of logits and loss."""
    name, precision = problem.runtime.name, problem.workload.precision
    # head and loss stay in 16 bits where the products of the layers are narrower
    which = (MODULES_OF.get(name, name), (Precision.BF16 if precision.is_narrow else precision).value)
    logits = part.tokens * part.vocab
    saved = value(problem.calibration, "memory.logits.saved_bytes", *which)
    working = value(problem.calibration, "memory.logits.working_bytes", *which)
    return saved * logits, working * logits + loss_parallel_bytes(problem, part)


def loss_parallel_bytes(problem: Problem, part: Share) -> FloatArray:
    """What a loss over a divided vocabulary holds beside its logits while it runs, with or without a backward pass."""
    copies = SPLIT_SOFTMAX_COPIES if MODULES_OF.get(problem.runtime.name, problem.runtime.name) == "torch" else 0.0
    return np.asarray(np.where(part.tp > 1, copies * 4.0 * part.tokens * part.vocab, 0.0))
