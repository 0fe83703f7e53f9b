"""What the operations of a model take on this machine: exactly the shapes that a prediction names, timed one by one.

Keys, and what their seconds hold:

    matmul/<precision>/MxNxK                            one (M, K) x (N, K)ᵀ -> (M, N), 2MNK FLOPs
    attention/<precision>/BxSxHxKVxD/forward|backward   causal attention of B sequences of S tokens, H query and KV key heads of D
    layer/<precision>/BxSxHIDDEN/HxKVxD/FFN[g]/forward|backward   a whole layer; g = gated MLP
    head/<precision>/BxSxHIDDENxVOCAB/forward|backward  norm, head and mean loss
    embedding/<precision>/BxSxHIDDENxVOCAB/forward|backward       the look-up
    memory_bound/<precision>/BYTES                      an element-wise sum of two tensors into a third, BYTES in all
    optimizer/<name>/PARAMS                             gradients clipped, and one update of PARAMS fp32 parameters
    launch/<precision>                                  one element-wise operation on four elements, its graph included

All processes time the same key at the same moment, from a barrier to a common duration, so that each finds cores, caches
and memory as busy as the run will. Samples of all ranks count alike. A whole layer is the one that will run: a
`package.module:factory` that takes a Model and gives a layer called as `layer(hidden, position_embeddings=(cos, sin))`.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models.records import Measurement, MeasurementKind, Model, RecordError, Workload
from planner.profiling.clock import OVERSUBSCRIBED_SAMPLE_S, SAMPLE_S, Rule, machine, sample, shares_cores, versions

if TYPE_CHECKING:
    import torch

MEMORY_BOUND_BYTES = 48 << 20
"""Three tensors of 16 MiB: more than the caches of a core hold, as the tensors of a step together are."""
KEY_BUDGET_S = 0.12
"""Seconds for a key on each process, where each process has a core."""
STACKED_LAYERS = 4
"""Layers of one call, each with its own weights: alone, a layer would find its weights and activations in the caches."""
PASSES = 3
"""Times that the list of keys is gone through: a disturbance of some seconds spoils one pass, and the median drops it."""
MOST_SAMPLES = 21
"""Samples of a key on one rank; more would only swell the file."""

DIRECTIONS = ("forward", "backward")

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
            keys |= dict.fromkeys(_attention_keys(model, workload, tp, mbs))
            keys |= dict.fromkeys(block_keys(model, workload, tp, mbs))
    keys[f"memory_bound/{precision}/{MEMORY_BOUND_BYTES}"] = None
    keys[f"optimizer/{workload.optimizer.value}/{model.num_params}"] = None
    keys[f"launch/{precision}"] = None
    return tuple(keys)


def _attention_keys(model: Model, workload: Workload, tp: int, mbs: int) -> tuple[str, ...]:
    shape = f"{mbs}x{workload.seq}x{model.heads // tp}x{model.kv_heads // tp}x{model.head_dim}"
    return tuple(f"attention/{workload.precision.value}/{shape}/{direction}" for direction in DIRECTIONS)


def block_keys(model: Model, workload: Workload, tp: int, mbs: int) -> tuple[str, ...]:
    """Keys of the whole blocks as one of tp ranks has them: layer, head with loss, embedding."""
    precision, rows = workload.precision.value, f"{mbs}x{workload.seq}x{model.hidden}"
    heads = f"{model.heads // tp}x{model.kv_heads // tp}x{model.head_dim}"
    layer = f"layer/{precision}/{rows}/{heads}/{model.ffn // tp}{'g' if model.gated_mlp else ''}"
    vocab = math.ceil(model.vocab / tp)
    ends = (f"{end}/{precision}/{rows}x{vocab}" for end in ("head", "embedding"))
    return tuple(f"{block}/{direction}" for block in (layer, *ends) for direction in DIRECTIONS)


def linear_shapes(model: Model, tp: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of each product on one of tp ranks: q with k and v, output, up with gate, down, head.

    What the price of a stage counts as one product is timed as one.
    """
    queries, keys = model.heads * model.head_dim // tp, model.kv_heads * model.head_dim // tp
    ffn = model.ffn // tp
    return (
        (queries + 2 * keys, model.hidden),
        (model.hidden, queries),
        (ffn * (2 if model.gated_mlp else 1), model.hidden),
        (model.hidden, ffn),
        (math.ceil(model.vocab / tp), model.hidden),
    )


def time_operations(
    keys: Sequence[str],
    *,
    ranks: int = 1,
    threads: int = 1,
    device: str = "cpu",
    budget_s: float | None = None,
    barrier: Call | None = None,
    layer: str = "",
) -> tuple[Measurement, ...]:
    """Seconds of each key on this process, warm-up left out; `barrier` lines the processes up before each key.

    `layer` is the factory of whole layers. `budget_s` bounds the whole (at least one sample a key); without it each key gets KEY_BUDGET_S.
    """
    import torch

    share = KEY_BUDGET_S if budget_s is None else min(KEY_BUDGET_S, budget_s / max(1, len(keys)))
    shared_cores = shares_cores(ranks, threads)
    if shared_cores:
        # one sample of one length on all processes at once: whoever ended early would leave the others a whole core
        rule = Rule(warmup=0, repetitions=1, sample_s=OVERSUBSCRIBED_SAMPLE_S)
    else:
        share /= PASSES
        rule = Rule(
            warmup=1, repetitions=max(1, MOST_SAMPLES // PASSES), sample_s=min(SAMPLE_S, share / 2), budget_s=share
        )
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else None
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(keys, ())
    moved: dict[str, int | None] = {}
    for _ in range(1 if shared_cores else PASSES):
        for key in samples:
            call, moved[key] = operation(key, device, layer)
            call()  # allocations and kernels' first use, before the others are waited for
            if barrier is not None:
                barrier()
            taken = sample({key: call}, rule, synchronise=synchronise)[key]
            samples[key] += tuple(seconds / _units(key) for seconds in taken)
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


def operation(key: str, device: str = "cpu", layer: str = "") -> tuple[Call, int | None]:
    """The call that a key names, ready to run, and the bytes that it touches where that has a meaning."""
    family, *parts = key.split("/")
    build = _FAMILIES.get(family)
    if build is None:
        raise RecordError(f"operation {key!r}: unknown family {family!r}; known: {', '.join(_FAMILIES)}")
    try:
        return build(parts, Bench(device=device, layer=layer))
    except (ValueError, IndexError) as error:
        raise RecordError(f"operation {key!r}: not understood ({error}); legal forms: {', '.join(_FORMS)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What operations are built on and with."""

    device: str
    """As torch names it."""
    layer: str
    """package.module:factory of whole layers, or empty."""


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


def _matmul(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch
    from torch.nn import functional

    precision, shape = parts
    m, n, k = _sizes(shape, 3)
    a, b = (torch.randn(rows, k, device=bench.device, dtype=_dtype(precision)) for rows in (m, n))
    return (lambda: functional.linear(a, b)), a.element_size() * (m * k + n * k + m * n)


def _attention(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch
    from torch.nn import functional

    precision, shape, direction = parts
    batch, seq, heads, kv_heads, dim = _sizes(shape, 5)
    like: dict[str, Any] = {
        "device": bench.device,
        "dtype": _dtype(precision),
        "requires_grad": direction == "backward",
    }
    q = torch.randn(batch, seq, heads, dim, **like)
    k, v = (torch.randn(batch, seq, kv_heads, dim, **like) for _ in range(2))

    def forward() -> Any:
        views = [x.transpose(1, 2) for x in (q, k, v)]
        return functional.scaled_dot_product_attention(
            views[0], views[1], views[2], is_causal=True, enable_gqa=heads != kv_heads
        )

    return _direction(forward, (q, k, v), direction), None


def _layer(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch

    precision, rows, heads, ffn, direction = parts
    batch, seq, hidden = _sizes(rows, 3)
    num_heads, kv_heads, head_dim = _sizes(heads, 3)
    model = Model(
        name="one layer",
        num_layers=1,
        hidden=hidden,
        ffn=int(ffn.removesuffix("g")),
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=1,
        gated_mlp=ffn.endswith("g"),
    )
    build = _factory(bench.layer)
    stack = [build(model).to(device=bench.device, dtype=_dtype(precision)) for _ in range(STACKED_LAYERS)]
    like: dict[str, Any] = {"device": bench.device, "dtype": _dtype(precision)}
    x = torch.randn(batch, seq, hidden, requires_grad=True, **like)
    rope = tuple(torch.ones(1, seq, head_dim, **like) for _ in range(2))

    def forward() -> Any:
        out = x
        for layer in stack:
            out = layer(out, position_embeddings=rope)
        return out

    return _direction(forward, (x,), direction, adds_up=True), None


def _units(key: str) -> int:
    """How often one call does what its key names."""
    return STACKED_LAYERS if key.startswith("layer/") else 1


def _factory(name: str) -> Callable[[Model], Any]:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"a whole layer needs a factory, package.module:factory, and {name!r} is none")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def _head(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch
    from torch.nn import functional

    precision, rows, direction = parts
    batch, seq, hidden, vocab = _sizes(rows, 4)
    like: dict[str, Any] = {"device": bench.device, "dtype": _dtype(precision), "requires_grad": True}
    x, scale = torch.randn(batch * seq, hidden, **like), torch.ones(hidden, **like)
    weight = torch.full(
        (vocab, hidden), 0.02, **like
    )  # small logits: a saturated softmax has denormal gradients, which are slow
    targets = torch.randint(vocab, (batch * seq,), device=bench.device)

    def forward() -> Any:
        logits = functional.linear(functional.rms_norm(x, (hidden,), scale), weight)
        return functional.cross_entropy(logits.float(), targets)

    return _direction(forward, (x, scale, weight), direction, adds_up=True), None


def _embedding(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch
    from torch.nn import functional

    precision, rows, direction = parts
    batch, seq, hidden, vocab = _sizes(rows, 4)
    weight = torch.randn(vocab, hidden, device=bench.device, dtype=_dtype(precision), requires_grad=True)
    tokens = torch.randint(vocab, (batch, seq), device=bench.device)
    return _direction(lambda: functional.embedding(tokens, weight), (weight,), direction, adds_up=True), None


def _direction(forward: Callable[[], Any], inputs: Sequence[Any], direction: str, *, adds_up: bool = False) -> Call:
    """The forward itself, graph included, or a backward through one kept graph.

    `adds_up`: gradients are added to `.grad`, as a run does with those of its parameters after the first micro-batch.
    """
    import torch

    if direction == "forward":
        return forward
    if direction != "backward":
        raise ValueError(f"direction {direction!r}; legal: {', '.join(DIRECTIONS)}")
    out = forward()
    gradient = torch.full_like(out, 1e-3)
    if adds_up:
        return lambda: out.backward(gradient, retain_graph=True)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _memory_bound(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch

    precision, size = parts
    dtype = _dtype(precision)
    count = max(1, int(size) // (3 * dtype.itemsize))
    a, b, out = (torch.ones(count, device=bench.device, dtype=dtype) for _ in range(3))
    return (lambda: torch.add(a, b, out=out)), 3 * count * dtype.itemsize


def _optimizer(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
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
    parameters = [torch.nn.Parameter(torch.zeros(piece, device=bench.device)) for piece in pieces]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = kinds[name](parameters, lr=1e-4)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return update, None


_OPTIMIZER_PIECE = 1 << 16
"""Parameters in one tensor of the optimizer's timing: a matrix of a small layer."""


def _launch(parts: list[str], bench: Bench) -> tuple[Call, int | None]:
    import torch

    (precision,) = parts
    x = torch.ones(4, device=bench.device, dtype=_dtype(precision), requires_grad=True)
    return (lambda: x.mul(1.0)), None


_FAMILIES: dict[str, Callable[[list[str], Bench], tuple[Call, int | None]]] = {
    "matmul": _matmul,
    "attention": _attention,
    "layer": _layer,
    "head": _head,
    "embedding": _embedding,
    "memory_bound": _memory_bound,
    "optimizer": _optimizer,
    "launch": _launch,
}

_FORMS = (
    "matmul/PRECISION/MxNxK",
    "attention/PRECISION/BxSxHxKVxD/forward|backward",
    "layer/PRECISION/BxSxHIDDEN/HxKVxD/FFN[g]/forward|backward",
    "head|embedding/PRECISION/BxSxHIDDENxVOCAB/forward|backward",
    "memory_bound/PRECISION/BYTES",
    "optimizer/NAME/PARAMS",
    "launch/PRECISION",
)
