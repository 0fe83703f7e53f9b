"""What a wrong gradient is made of: the weights with which it holds each micro-batch, found by least squares.

The gradient of a step is the sum of the gradients g_i of all micro-batches i, each once. A wrong one is often sum w_i g_i
with other weights: own micro-batches only where the sum over ranks is missing, 1/dp of all where it is divided twice.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.parallelize import IGNORE, Parallel

MOST_MICRO_BATCHES = 64
"""Each costs a pass of one process through the whole module."""
EXPLAINED = 1e-2
"""A gradient is a sum of those of the micro-batches where the residual is a smaller share of it."""
SAME = 1e-2
"""Weights that differ less are the same."""


def in_words(
    parallel: Parallel,
    reference: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    name: str,
    gradient: Tensor | None,
    idle: tuple[str, ...],
) -> str:
    """What is wrong with a gradient (undivided, of the parameter `name`), led by a colon; empty where nothing fits.

    `inputs` and `labels` are the global batch, one row a micro-batch, in the order of the data-parallel ranks; `idle` are
    parameters without any gradient.
    """
    if idle:
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        return f": {idle[0]}{more} took no part in the step, the layer was left out"
    if gradient is None or not gradient.isfinite().all() or not 1 < len(inputs) <= MOST_MICRO_BATCHES:
        return ""
    weights = _weights(reference, inputs, labels, name, gradient)
    if weights is None:
        return ""
    count = parallel.decision.num_micro_batches
    own = slice(parallel.dp_rank * count, (parallel.dp_rank + 1) * count)
    others = torch.cat([weights[: own.start], weights[own.stop :]])
    if len(others) and _alike(others, 0.0) and not _alike(weights[own], 0.0):
        return (
            f": it holds the micro-batches of data-parallel rank {parallel.dp_rank} alone, the sum over the data-parallel "
            "ranks is missing"
        )
    if _alike(weights, float(weights[0])):
        return f": every micro-batch counts {float(weights[0]):.3g} times, the sum is divided by a wrong number"
    wrong = [index for index, weight in enumerate(weights.tolist()) if abs(weight - 1) > SAME]
    shown = ", ".join(
        f"micro-batch {index % count} of data-parallel rank {index // count} counts {float(weights[index]):.3g} times"
        for index in wrong[:3]
    )
    return f": {shown}" + (f" and {len(wrong) - 3} more are wrong" if len(wrong) > 3 else "") if wrong else ""


def _alike(weights: Tensor, value: float) -> bool:
    return bool(((weights - value).abs() <= SAME).all())


def _weights(reference: nn.Module, inputs: Tensor, labels: Tensor, name: str, gradient: Tensor) -> Tensor | None:
    """The weight of each micro-batch in the gradient; None where it is no sum of theirs."""
    parameter = dict(reference.named_parameters(remove_duplicate=False))[name]
    total = (labels != IGNORE).sum()
    columns = []
    for x, y in zip(inputs, labels, strict=True):
        output = reference(x[None])
        logits = getattr(output, "logits", output)
        loss = functional.cross_entropy(logits[0].float(), y, ignore_index=IGNORE, reduction="sum") / total
        columns.append(torch.autograd.grad(loss, parameter)[0].flatten().double())
    matrix, wanted = torch.stack(columns, dim=1), gradient.flatten().double()
    if matrix.shape[0] < matrix.shape[1]:
        return None
    weights = torch.linalg.lstsq(matrix.cpu(), wanted.cpu()[:, None]).solution[:, 0]
    residual = (matrix.cpu() @ weights - wanted.cpu()).norm() / wanted.norm().cpu().clamp(min=1e-30)
    return weights if float(residual) <= EXPLAINED else None
