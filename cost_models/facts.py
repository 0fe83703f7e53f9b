"""The shape of a law: its operands as one flat record, the law itself, and what is said of a breach."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.records import BlockKind, Gather, Layout, Model, Runtime, Schedule, Severity, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Every operand of every law, flat; None = unknown."""

    num_layers: int | None = None
    """Transformer layers."""
    hidden: int | None = None
    """Width of the residual stream."""
    ffn: int | None = None
    """Width of the MLP of a dense layer; 0 where every layer has experts."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads."""
    kv_heads_of_groups: tuple[int, ...] | None = None
    """Those of each kind of layer, where layers differ; `kv_heads` is then their greatest common divisor."""
    head_dim: int | None = None
    """Width of a head."""
    vocab: int | None = None
    """Rows of the embedding, not padded."""
    tie_embeddings: bool | None = None
    """The head uses the embedding's weights."""
    num_experts: int | None = None
    """Routed experts of a layer; 0 in a dense model."""
    moe_ffn: int | None = None
    """Width of one routed expert."""
    latent_attention: bool | None = None
    """Keys and values are compressed (MLA)."""
    num_params: int | None = None
    """Parameters of the whole model."""
    world: int | None = None
    """Ranks."""
    gpus_per_node: int | None = None
    """Devices of a node."""
    domain_size: int | None = None
    """Devices of one fast domain, which may be more than a node."""
    device_bytes: int | None = None
    """Memory of a device."""
    device_precisions: tuple[str, ...] | None = None
    """Formats of matrix products that the device has."""
    host_bytes: int | None = None
    """Memory of a node's host."""
    dp: int | None = None
    """Data-parallel degree."""
    dp_replicate: int | None = None
    """Copies of the sharded groups."""
    dp_shard: int | None = None
    """Ranks over which ZeRO divides."""
    cp: int | None = None
    """Context-parallel degree."""
    tp: int | None = None
    """Tensor-parallel degree."""
    ep: int | None = None
    """Expert-parallel degree, inside dp·cp·tp."""
    etp: int | None = None
    """Tensor-parallel degree of the experts; None where neither the request nor the runtime settles it."""
    pp: int | None = None
    """Pipeline stages."""
    vpp: int | None = None
    """Virtual stages on each device."""
    mbs: int | None = None
    """Sequences of a micro-batch."""
    microbatches: int | None = None
    """Micro-batches of a step, as the request states them."""
    num_micro_batches: int | None = None
    """The same, stated or worked out from gbs, dp and mbs."""
    zero: int | None = None
    """ZeRO level."""
    gather: Gather | None = None
    """When sharded parameters are gathered."""
    schedule: Schedule | None = None
    """Order of the micro-batches."""
    recompute: str | None = None
    """Kind of recompute, by the runtime's name."""
    sp: bool | None = None
    """Sequence parallelism beside tensor parallelism."""
    ulysses: int | None = None
    """Ranks over which attention heads are exchanged for sequence."""
    offload_optimizer: bool | None = None
    """Optimizer state lies in host memory."""
    offload_param: bool | None = None
    """Parameters lie in host memory."""
    seq: int | None = None
    """Tokens of a sequence."""
    gbs: int | None = None
    """Sequences of a step."""
    precision: str | None = None
    """Format of the matrix products."""
    states_bytes: int | None = None
    """Model states on the fullest device: weights, gradients, optimizer, nothing else; at least."""
    states_bytes_all: int | None = None
    """Model states of the whole model, each byte counted once."""
    host_states_bytes: int | None = None
    """Model states offloaded to one node's host."""


def facts_of_model(model: Model) -> dict[str, Any]:
    """The operands of a model. Of unlike layers the greatest common divisor of heads and of widths: what divides it divides each.

    ffn: of the layers with a plain MLP, and of what a projector's matrices hand to one another; 0 where there is neither.
    """
    same = ("num_layers", "hidden", "head_dim", "vocab", "tie_embeddings", "num_params")
    kinds = [one.model for one in model.layer_kinds if one.projector is None] or [model]
    widths = [one.model.ffn for one in model.layer_kinds if one.kind is BlockKind.DENSE]
    widths += [width for one in model.layer_kinds if one.projector for width in one.projector.projection[1::2]]
    kv_heads = {one.kv_heads for one in kinds}
    return {name: getattr(model, name) for name in same} | {
        "heads": math.gcd(*(one.heads for one in kinds)),
        "kv_heads": math.gcd(*kv_heads),
        "kv_heads_of_groups": tuple(sorted(kv_heads)) if len(kv_heads) > 1 else None,
        "ffn": math.gcd(*widths),
        "num_experts": model.moe.num_experts if model.moe else 0,
        "moe_ffn": model.moe.moe_ffn if model.moe else None,
        "latent_attention": model.mla is not None,
    }


def facts_of_run(
    *,
    model: Model,
    workload: Workload,
    runtime: Runtime,
    layout: Layout,
    world: int | None = None,
    domain_size: int | None = None,
) -> Facts:
    """The operands of a layout that is known in full. `world` is the layout's own where no cluster is named.

    Sequence parallelism is the runtime's way; micro-batches are unknown where gbs is not divisible by dp·mbs.
    """
    count, rest = divmod(workload.gbs, layout.dp * layout.mbs)
    degrees = ("dp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp", "vpp", "mbs")
    choices = ("zero", "gather", "schedule", "recompute")
    return Facts(
        **facts_of_model(model),
        **{name: getattr(layout, name) for name in (*degrees, *choices)},
        world=layout.world if world is None else world,
        domain_size=domain_size,
        num_micro_batches=None if rest else count,
        sp=runtime.sequence_parallel and layout.tp > 1,
        seq=workload.seq,
        gbs=workload.gbs,
        precision=workload.precision.value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """One law; `holds` is cheap, the words are made only for a breach."""

    code: str
    """Name of the law in findings."""
    statement: str
    """The law, in one line."""
    operands: tuple[str, ...]
    """Fields of Facts that must be known."""
    optional: tuple[str, ...] = ()
    """Fields of Facts that change the judgement where they are known."""
    predicate: Callable[[Facts, Runtime | None], bool]
    """True where the law holds; called with all operands known."""
    void: Callable[[Facts], bool] = lambda facts: False
    """True where the law has nothing to say, whatever is unknown (tp = 1 and the like)."""
    severity: Severity = Severity.ERROR
    """Where the runtime says nothing else."""
    says: Callable[[Facts, Runtime | None], str]
    """The breach with its numbers."""
    legal_keys: tuple[str, ...] = ()
    """Operands whose legal values are listed, each with the others as they are."""
    legal_with: tuple[str, ...] = ()
    """Codes of the laws that listed values keep too, where these are errors and can be judged."""
    legal_more: Callable[[Facts, Runtime | None], Mapping[str, list[Any]]] = lambda facts, runtime: {}
    """Further legal values, worked out by hand."""
    offer: Callable[[Facts, Runtime | None], str]
    """What to do."""

    def missing(self, facts: Facts) -> tuple[str, ...]:
        """Operands that are not known."""
        return tuple(name for name in self.operands if getattr(facts, name) is None)

    def holds(self, facts: Facts, runtime: Runtime | None = None) -> bool | None:
        """True or False; None where an operand is unknown and matters."""
        if self.void(facts):
            return True
        for name in self.operands:
            if getattr(facts, name) is None:
                return None
        return self.predicate(facts, runtime)

    def severity_of(self, runtime: Runtime) -> Severity:
        """How this runtime takes a breach."""
        return runtime.severities.get(self.code, self.severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken law."""

    code: str
    """The law."""
    severity: Severity
    """As the runtime takes it."""
    message: str
    """The numbers, the law, the legal values, what to do."""
    values: Mapping[str, Any]
    """Operands."""
    legal: Mapping[str, list[Any]]
    """Operand -> its legal values, the others as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """A law that was not judged."""

    code: str
    """The law."""
    missing: tuple[str, ...]
    """Operands that are not known."""
