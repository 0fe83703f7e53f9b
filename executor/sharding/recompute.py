"""Recompute: what a layer keeps between its forward and its backward pass.

none       everything that autograd asks for.
selective  the layer's input, and the outputs of these operations alone: the matmuls of queries, keys, values, output
           projection, gate and up; attention (its output and the softmax statistics of each row). Norms, rotary embedding,
           activation function and the product with the gate are computed again: no matmul and no attention is. With tensor
           parallelism the reduce-scattered output of the attention is kept instead of the projection's partial sum, which
           is tp times larger: that one matmul is then computed again, and so are both all-gathers.
full       the layer's input alone; all of the layer up to its last matmul is computed again.

The last matmul of a layer is never kept and never computed again: nothing behind it needs its output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from executor.anatomy import part_of
from executor.stage import StageModule

KINDS = ("none", "selective", "full")
"""Kinds of recompute, by the names that plans for the runtime `torch` use."""

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default)
ATTENTIONS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


class KeepMatmulsAndAttention:
    """Policy of one pass through one layer; counts the matmuls, since their order in a layer is fixed."""

    def __init__(self, dropped: frozenset[int], reduce_scatters: int) -> None:
        self.dropped = dropped
        self.num_matmuls = 0
        self.reduce_scatters = reduce_scatters

    def __call__(self, _context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Keep or compute again, for the next operation of the pass."""
        if operation in MATMULS:
            index = self.num_matmuls
            self.num_matmuls += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if index in self.dropped else CheckpointPolicy.MUST_SAVE
        if operation is torch.ops._c10d_functional.reduce_scatter_tensor.default and self.reduce_scatters:
            self.reduce_scatters -= 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_SAVE if operation in ATTENTIONS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts(dropped: frozenset[int], reduce_scatters: int) -> Any:
    """Contexts of the first pass and of the recomputation, each with its own count."""
    first, again = (KeepMatmulsAndAttention(dropped, reduce_scatters) for _ in range(2))

    def policy(context: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (again if context.is_recompute else first)(context, *args, **kwargs)

    return create_selective_checkpoint_contexts(policy)


def wrap_layers(stage: StageModule, counts: dict[str, int], tp: int) -> None:
    """Wrap the layers of a stage, in place: `counts` of each kind from its first layer on, in the order of `counts`."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    for (name, layer), kind in zip(list(stage.named_layers()), kinds, strict=False):
        if kind == "none":
            continue
        context: Callable[[], Any] | None = None
        if kind == "selective":
            gated = part_of(layer, stage.anatomy.gate) is not None
            context = partial(_selective_contexts, *_dropped(gated, tp))
        extra = {} if context is None else {"context_fn": context}
        stage.place(name, checkpoint_wrapper(layer, preserve_rng_state=False, **extra))


def _dropped(gated: bool, tp: int) -> tuple[frozenset[int], int]:
    """Which matmuls of a layer are not kept (q 0, k 1, v 2, o 3, then the MLP's), and how many reduce-scatters are."""
    last = 6 if gated else 5
    return (frozenset({3, last}), 1) if tp > 1 else (frozenset({last}), 0)


def kind_of(layer: torch.nn.Module) -> str:
    """The kind that a layer of a stage realises, read from its wrapper."""
    if not isinstance(layer, CheckpointWrapper):
        return "none"
    return "selective" if "context_fn" in layer.checkpoint_fn.keywords else "full"
