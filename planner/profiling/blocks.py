"""What the operations of a model take on this machine: exactly the shapes that a prediction names, timed one by one.

Keys, and what their seconds hold:

    matmul/<precision>/MxNxK                            one (M, K) x (N, K)ᵀ -> (M, N), 2MNK FLOPs
    attention/<precision>/BxSxHxKVxD/forward|backward   causal attention of B sequences of S tokens, H query and KV key heads of D
    memory_bound/<precision>/BYTES                      an element-wise sum of two tensors into a third, BYTES in all
    cross_entropy/<precision>/TOKENSxVOCAB/forward|backward
    optimizer/<name>/PARAMS                             one update of PARAMS fp32 parameters
    launch/<precision>                                  one element-wise operation of a few elements, autograd included

All processes time the same key at the same moment, from a barrier to a common duration, so that each finds cores, caches
and memory as busy as the run will. Samples of all ranks count alike.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models.records import Measurement, MeasurementKind, Model, RecordError, Workload
from planner.profiling.clock import Rule, machine, sample, sample_length_s, versions

if TYPE_CHECKING:
    import torch

LAUNCH_CHAIN = 16
"""Operations in the chain whose mean is the time of a launch: long against the clock, short against a layer."""
KEY_BUDGET_S = 0.12
"""Seconds for a key on each process: four samples of the length that a shared core needs."""
PASSES = 3
"""Times that the list of keys is gone through: a disturbance of some seconds spoils one pass, and the median drops it."""
MOST_SAMPLES = 21
"""Samples of a key on one rank; more would only swell the file."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Which layouts' operations to time."""

    tp: tuple[int, ...] = (1,)
    """Tensor-parallel degrees."""
    mbs: tuple[int, ...] = (1,)
    """Sequences in a micro-batch."""


def keys_of(model: Model, workload: Workload, shapes: Shapes) -> tuple[str, ...]:
    """Keys of the operations of a model's blocks, forward and backward, without repetition.

    A linear layer (M tokens, N outputs, K inputs) has three products: the forward's M×N×K, the backward's M×K×N for the
    input and N×K×M for the weight. Degrees that do not divide the model's widths are left out.
    """
    keys: dict[str, None] = {}
    precision = workload.precision.value
    for tp in shapes.tp:
        if any(width % tp for width in (model.heads, model.kv_heads, model.ffn)):
            continue
        for mbs in shapes.mbs:
            tokens = mbs * workload.seq
            for n, k in linear_shapes(model, tp):
                for m_n_k in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
                    keys["matmul/{}/{}x{}x{}".format(precision, *m_n_k)] = None
            heads = f"{mbs}x{workload.seq}x{model.heads // tp}x{model.kv_heads // tp}x{model.head_dim}"
            vocab = f"{tokens}x{math.ceil(model.vocab / tp)}"
            for direction in ("forward", "backward"):
                keys[f"attention/{precision}/{heads}/{direction}"] = None
                keys[f"cross_entropy/{precision}/{vocab}/{direction}"] = None
            size = {"fp32": 4}.get(precision, 2)
            keys[f"memory_bound/{precision}/{3 * tokens * model.hidden * size}"] = None
    keys[f"optimizer/{workload.optimizer.value}/{model.num_params}"] = None
    keys[f"launch/{precision}"] = None
    return tuple(keys)


def linear_shapes(model: Model, tp: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of each linear layer on one of tp ranks: queries, keys, values, output, MLP, head."""
    queries, values = model.heads * model.head_dim // tp, model.kv_heads * model.head_dim // tp
    ffn = model.ffn // tp
    attention = ((queries, model.hidden), (values, model.hidden), (values, model.hidden), (model.hidden, queries))
    mlp = ((ffn, model.hidden),) * (2 if model.gated_mlp else 1) + ((model.hidden, ffn),)
    return (*attention, *mlp, (math.ceil(model.vocab / tp), model.hidden))


def time_operations(
    keys: Sequence[str],
    *,
    ranks: int = 1,
    threads: int = 1,
    device: str = "cpu",
    budget_s: float | None = None,
    barrier: Call | None = None,
) -> tuple[Measurement, ...]:
    """Seconds of each key on this process, warm-up left out; `barrier` lines the processes up before each key.

    `budget_s` bounds the whole (at least one sample a key); without it each key gets KEY_BUDGET_S.
    """
    import torch

    share = KEY_BUDGET_S if budget_s is None else min(KEY_BUDGET_S, budget_s / max(1, len(keys)))
    share /= PASSES
    rule = Rule(
        warmup=1,
        repetitions=max(1, MOST_SAMPLES // PASSES),
        sample_s=min(sample_length_s(ranks, threads), share / 2),
        budget_s=share,
    )
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else None
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(keys, ())
    moved: dict[str, int | None] = {}
    for _ in range(PASSES):
        for key in samples:
            call, moved[key] = operation(key, device)
            call()  # allocations and kernels' first use, before the others are waited for
            if barrier is not None:
                barrier()
            samples[key] += sample({key: call}, rule, synchronise=synchronise)[key]
    where, packages = machine_of(device), versions()
    return tuple(
        Measurement(
            kind=MeasurementKind.OP,
            key=key,
            samples_s=taken,
            bytes=moved[key],
            machine=where,
            versions=packages,
            note=f"{ranks} busy processes x {threads} threads",
        )
        for key, taken in samples.items()
    )


def machine_of(device: str) -> str:
    """The accelerator's name, or the processor's line."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return machine()


# One operation a key -----------------------------------------------------------------------------------------------


def operation(key: str, device: str = "cpu") -> tuple[Call, int | None]:
    """The call that a key names, ready to run, and the bytes that it touches where that has a meaning."""
    family, *parts = key.split("/")
    build = _FAMILIES.get(family)
    if build is None:
        raise RecordError(f"operation {key!r}: unknown family {family!r}; known: {', '.join(_FAMILIES)}")
    try:
        return build(parts, device)
    except (ValueError, IndexError) as error:
        raise RecordError(
            f"operation {key!r}: not understood ({error}); the forms are in the text of this module"
        ) from None


def _dtype(precision: str) -> "torch.dtype":
    import torch

    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in known:
        raise ValueError(f"precision {precision!r}; measurable: {', '.join(known)}")
    return known[precision]


def _sizes(text: str, count: int) -> list[int]:
    sizes = [int(part) for part in text.split("x")]
    if len(sizes) != count or min(sizes) < 1:
        raise ValueError(f"{text!r} has not {count} sizes from 1")
    return sizes


def _matmul(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch
    import torch.nn.functional as F

    precision, shape = parts
    m, n, k = _sizes(shape, 3)
    a, b = (torch.randn(rows, k, device=device, dtype=_dtype(precision)) for rows in (m, n))
    return (lambda: F.linear(a, b)), a.element_size() * (m * k + n * k + m * n)


def _attention(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch
    import torch.nn.functional as F

    precision, shape, direction = parts
    batch, seq, heads, kv_heads, dim = _sizes(shape, 5)
    like: dict[str, Any] = {"device": device, "dtype": _dtype(precision), "requires_grad": direction == "backward"}
    q = torch.randn(batch, seq, heads, dim, **like)
    k, v = (torch.randn(batch, seq, kv_heads, dim, **like) for _ in range(2))

    def forward() -> Any:
        views = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=heads != kv_heads)

    return _direction(forward, (q, k, v), direction), None


def _cross_entropy(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch
    import torch.nn.functional as F

    precision, shape, direction = parts
    tokens, vocab = _sizes(shape, 2)
    logits = torch.randn(tokens, vocab, device=device, dtype=_dtype(precision), requires_grad=direction == "backward")
    targets = torch.randint(vocab, (tokens,), device=device)
    return _direction(lambda: F.cross_entropy(logits.float(), targets), (logits,), direction), None


def _direction(forward: Callable[[], Any], inputs: Sequence[Any], direction: str) -> Call:
    """The forward itself, or a backward through one kept graph."""
    import torch

    if direction == "forward":
        return forward
    if direction != "backward":
        raise ValueError(f"direction {direction!r}; legal: forward, backward")
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _memory_bound(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch

    precision, size = parts
    dtype = _dtype(precision)
    count = max(1, int(size) // (3 * dtype.itemsize))
    a, b, out = (torch.ones(count, device=device, dtype=dtype) for _ in range(3))
    return (lambda: torch.add(a, b, out=out)), 3 * count * dtype.itemsize


def _optimizer(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch

    name, size = parts
    kinds: Mapping[str, Callable[..., Any]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    if name not in kinds:
        raise ValueError(f"optimizer {name!r}; measurable: {', '.join(kinds)}")
    whole, rest = divmod(int(size), _OPTIMIZER_PIECE)
    pieces = [_OPTIMIZER_PIECE] * whole + ([rest] if rest else [])
    parameters = [torch.nn.Parameter(torch.zeros(piece, device=device)) for piece in pieces]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return kinds[name](parameters, lr=1e-4).step, None


_OPTIMIZER_PIECE = 1 << 16
"""Parameters in one tensor of the optimizer's timing: a matrix of a small layer."""


def _launch(parts: list[str], device: str) -> tuple[Call, int | None]:
    import torch

    (precision,) = parts
    x = torch.ones(4, device=device, dtype=_dtype(precision), requires_grad=True)

    def chain() -> None:
        for _ in range(LAUNCH_CHAIN):
            x.mul(1.0)

    return chain, None


_FAMILIES: dict[str, Callable[[list[str], str], tuple[Call, int | None]]] = {
    "matmul": _matmul,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "memory_bound": _memory_bound,
    "optimizer": _optimizer,
    "launch": _launch,
}
