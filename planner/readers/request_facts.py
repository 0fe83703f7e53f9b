"""What a request states, as operands of the laws; what it does not state stays unknown."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models.facts import Facts, facts_of_model
from cost_models.records import (
    Cluster,
    Device,
    Gather,
    Model,
    Optimizer,
    Precision,
    RecordError,
    Runtime,
    Schedule,
    StateBytes,
)
from cost_models.records.near_names import did_you_mean
from planner.errors import InputError
from planner.readers.cluster_facts import cluster_and_defaults, device_from_facts
from planner.readers.clusters import cluster_of_document, read_cluster
from planner.readers.models import model_of, read_model
from planner.readers.request_keys import meant
from planner.readers.requests import Request, bytes_of, default_precision, widened
from planner.readers.runtimes import is_known, read_runtime

_GIB = 2**30

_MODEL_NEEDS = ("num_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tie_embeddings", "gated_mlp")
"""Dimensions from which parameters can be counted stage by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A request as the laws see it."""

    facts: Facts
    """Operands; None = not stated, or not known."""
    runtime: Runtime
    """The record of its framework."""
    model: Model | None
    """The model, where its dimensions are complete."""
    notes: tuple[str, ...]
    """What was not used or could not be read, in words."""


def facts_of(request: Request) -> Stated:
    """Operands that the request states, or that follow from what it states. Raises InputError for values that cannot be."""
    notes = [f"{path}: not a known key, not used{meant(path)}" for path in request.ignored]
    if request.runtime is not None and not is_known(request.runtime):
        notes.append(
            f"runtime: there is no record of {request.runtime!r}; judged as generic, by the laws that all share"
        )
    runtime = read_runtime(request.runtime or "generic")
    precision = _precision(request, runtime, notes)
    runtime = replace(runtime, state_bytes=_state_bytes(request, runtime, precision, notes))
    model, dimensions = _model_facts(request, notes)
    facts = Facts(
        **dimensions,
        **_cluster_facts(request, notes),
        seq=_count(request.workload, "seq", request.source),
        gbs=_count(request.workload, "gbs", request.source),
        precision=precision,
        device_precisions=_precisions(request),
    )
    return Stated(facts=_with_layout(facts, request, runtime, notes), runtime=runtime, model=model, notes=tuple(notes))


def _precision(request: Request, runtime: Runtime, notes: list[str]) -> str:
    """As stated, else bf16, or what a device without bf16 can do."""
    devices = _devices(request)
    if "precision" in request.workload:
        notes += [f"{key}: {told}" for key, told in widened(str(request.workload["precision"]), devices).items()]
        return str(request.workload["precision"])
    precision = default_precision(devices, runtime) if devices else Precision.BF16
    without = next((device for device in devices if Precision.BF16 not in device.peak_flops_per_s), None)
    if without is not None and precision is not Precision.BF16:
        notes.append(f"workload.precision: not stated, judged as {precision}: {without.name} has no bf16")
    return precision.value


def _precisions(request: Request) -> tuple[str, ...] | None:
    """Formats of matrix products that every device has, where the table or a file knows it."""
    devices = _devices(request)
    if not devices:
        return None
    common = set.intersection(*({*one.matmul_flops_per_s, *one.peak_flops_per_s} for one in devices))
    return tuple(one.value for one in Precision if one.value in common)


def _devices(request: Request) -> list[Device]:
    """The devices, one of each pool; none where neither the table nor a file knows it."""
    said = request.cluster
    if isinstance(said, str):
        return [pool.kind.device for pool in read_cluster(said).pools]
    try:
        if said and "pools" in said:
            return [pool.kind.device for pool in cluster_of_document(said)[0].pools]
        return [device_from_facts(str(said["gpu"]), _size(said, "gpu_mem_gb"))] if said else []
    except (KeyError, InputError):
        return []


def _state_bytes(request: Request, runtime: Runtime, precision: str, notes: list[str]) -> dict[str, StateBytes]:
    """Bytes per parameter by precision: as the request says them, else the runtime's, for the optimizer that is stated."""
    said = bytes_of(request)
    if said is not None:
        return {precision: said}
    optimizer = str(request.workload.get("optimizer", Optimizer.ADAMW)).lower()
    if optimizer in (Optimizer.ADAM, Optimizer.ADAMW):
        return dict(runtime.state_bytes)
    if optimizer == Optimizer.SGD:
        return {key: replace(row, optimizer=row.optimizer - _MOMENTS) for key, row in runtime.state_bytes.items()}
    notes.append(
        f"workload.optimizer: {optimizer!r} is not known, so the bytes of its state are not; say workload.bytes "
        '{"weight", "grad", "optim"} per parameter'
    )
    return {}


_MOMENTS = 8
"""Bytes per parameter of Adam's two fp32 moments (arXiv 1910.02054, section 3.1); plain SGD has none."""


def _count(section: Mapping[str, Any], key: str, source: str) -> int | None:
    value = section.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"{source}: {key}={value!r}; a whole number from 1 is needed")
    return value


def _model_facts(request: Request, notes: list[str]) -> tuple[Model | None, dict[str, Any]]:
    said = request.model
    model = None
    if said is None:
        return None, {}
    if isinstance(said, str):
        model = read_model(said)
    elif set(said) <= {"name", "dims_source"}:
        try:
            model = read_model(str(said.get("name")))
        except (InputError, RecordError):
            return None, {}
    elif all(key in said for key in _MODEL_NEEDS) and _moe_is_whole(said.get("moe")):
        try:
            model = model_of(
                {"name": "model"} | {k: v for k, v in said.items() if k not in ("num_params", "dims_source")}
            )
        except (InputError, RecordError) as error:
            notes.append(f"model: {error}")
    if model is not None:
        return model, facts_of_model(model)
    assert isinstance(said, Mapping)
    counts = ("num_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "num_params")
    facts = {key: _count(said, key, request.source) for key in counts}
    moe_said = said.get("moe")
    if isinstance(moe_said, Mapping):
        facts |= {key: _count(moe_said, key, request.source) for key in ("num_experts", "moe_ffn")}
        # The width of a dense layer divides nothing where every layer has experts, and nobody says which have.
        facts["ffn"] = None if moe_said.get("dense_layers") else 0
    return None, facts | {"tie_embeddings": said.get("tie_embeddings")}


def _moe_is_whole(moe: Any) -> bool:
    return moe is None or (
        isinstance(moe, Mapping) and None not in (moe.get("num_experts"), moe.get("top_k"), moe.get("moe_ffn"))
    )


def _cluster_facts(request: Request, notes: list[str]) -> dict[str, Any]:
    """World, domain and memories. A preset or file says all; facts say what they say, and the GPU's table the rest."""
    said = request.cluster
    if said is None:
        return {}
    if isinstance(said, str):
        return _facts_of_cluster(read_cluster(said))
    if "pools" in said:
        return _facts_of_cluster(cluster_of_document(said)[0])
    counts = {key: _count(said, key, request.source) for key in ("nodes", "gpus_per_node", "world")}
    nodes, per_node, world = counts["nodes"], counts["gpus_per_node"], counts["world"]
    if world is None and nodes and per_node:
        world = nodes * per_node
    host = _size(said, "host_mem_gb")
    return {
        "world": world,
        "gpus_per_node": per_node,
        "domain_size": _domain_size(said, per_node),
        "device_bytes": _device_bytes(said, notes),
        "host_bytes": None if host is None else int(host * _GIB),
    }


def _facts_of_cluster(cluster: Cluster) -> dict[str, Any]:
    kinds = [pool.kind for pool in cluster.pools]
    hosts = [kind.host_memory_bytes for kind in kinds if kind.host_memory_bytes]
    return {
        "world": cluster.num_gpus,
        "gpus_per_node": kinds[0].gpus_per_node if len(kinds) == 1 else None,
        "domain_size": min(kind.domain_size for kind in kinds),
        "device_bytes": min(kind.device.memory_bytes for kind in kinds),
        "host_bytes": min(hosts) if len(hosts) == len(kinds) else None,
    }


def _domain_size(said: Mapping[str, Any], per_node: int | None) -> int | None:
    """The fast domain of a GPU that is sold in racks with one; of any other, the node."""
    try:
        cluster, _ = cluster_and_defaults({**said, "gpus_per_node": per_node})
    except (InputError, RecordError):
        return per_node
    return max(per_node or 0, cluster.pools[0].kind.domain_size) if per_node else None


def _device_bytes(said: Mapping[str, Any], notes: list[str]) -> int | None:
    """What the driver of a known GPU shows; of an unknown one the nominal size, which no driver exceeds."""
    size = _size(said, "gpu_mem_gb")
    try:
        return device_from_facts(str(said["gpu"]), size).memory_bytes
    except (KeyError, InputError):
        if size is not None:
            notes.append(
                f"cluster.gpu: {said.get('gpu')!r} is not in the table; its memory is taken as the nominal {size} GiB"
            )
        return int(size * _GIB) if size is not None else None


def _size(said: Mapping[str, Any], key: str) -> float | None:
    size = said.get(key)
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0):
        raise InputError(f"cluster {key}={size!r}: a positive number is needed")
    return size


def _with_layout(facts: Facts, request: Request, runtime: Runtime, notes: list[str]) -> Facts:
    """The layout's operands: an absent degree is 1, absent dp is world/(tp·pp·cp), in a layout that says any degree."""
    said = request.layout
    facts = replace(
        facts,
        mbs=said.get("mbs"),
        microbatches=said.get("microbatches"),
        zero=said.get("zero"),
        schedule=Schedule(said["schedule"]) if "schedule" in said else None,
        recompute=_recompute(request, runtime, notes),
        sp=said.get("sp"),
        offload_optimizer=_offloads(said.get("offload_optimizer")),
        offload_param=_offloads(said.get("offload_param")),
    )
    if not request.states_layout:
        if said:
            notes.append("layout: no degree is stated, so none is assumed")
        return replace(facts, num_micro_batches=facts.microbatches)
    ulysses = said.get("ulysses")
    tp, pp, vpp, ep = (said.get(key, 1) for key in ("tp", "pp", "vpp", "ep"))
    cp = said.get("cp", ulysses or 1)
    if "cp" not in said and ulysses:
        notes.append(f"layout.cp: not stated; ulysses={ulysses} divides the sequence, so cp={ulysses}")
    facts = replace(facts, tp=tp, pp=pp, vpp=vpp, ep=ep, cp=cp, ulysses=ulysses)
    facts = _with_dp(facts, said, runtime)
    facts = replace(facts, etp=_etp(said, facts, runtime, notes))
    return replace(facts, num_micro_batches=_num_micro_batches(facts))


def _recompute(request: Request, runtime: Runtime, notes: list[str]) -> str | None:
    said = request.layout.get("recompute")
    if said is None or said in runtime.recompute_kinds:
        return None if said is None else str(said)
    if request.runtime is None or is_known(request.runtime):
        raise InputError(
            f"{request.source}: layout.recompute={said!r} is no kind of {runtime.name}{did_you_mean(said, runtime.recompute_kinds)} "
            f"Legal values: {', '.join(runtime.recompute_kinds)}"
        )
    notes.append(f"layout.recompute: {said!r} is not known, not judged; known: {', '.join(runtime.recompute_kinds)}")
    return None


def _offloads(said: Any) -> bool | None:
    return None if said is None else said not in (False, "none", "")


def _etp(said: Mapping[str, Any], facts: Facts, runtime: Runtime, notes: list[str]) -> int | None:
    """Stated, or the runtime's default; None where the ranks do not divide by that, so that something else must have been
    said where it runs."""
    if "etp" in said:
        return int(said["etp"])
    tp, ep = facts.tp or 1, facts.ep or 1
    if tp == 1 or runtime.etp_default != "tp" or not facts.num_experts:
        return 1
    if None not in (facts.dp, facts.cp) and (facts.dp or 1) * (facts.cp or 1) * tp % (ep * tp) == 0:
        return tp
    notes.append(
        f"layout.etp: not stated, judged as 1; {runtime.name} itself takes etp=tp={tp} where none is given, and then "
        f"ep·etp = {ep}·{tp} = {ep * tp} must divide dp·cp·tp: say etp"
    )
    return None


def _with_dp(facts: Facts, said: Mapping[str, Any], runtime: Runtime) -> Facts:
    """dp and its parts, zero and gather; a bare dp with zero ≥ 1 is dp_shard, and zero with nothing to divide over is 0."""
    replicas, shards, dp = said.get("dp_replicate"), said.get("dp_shard"), said.get("dp")
    model_parallel = math.prod(degree or 1 for degree in (facts.tp, facts.pp, facts.cp))
    if dp is None and (replicas or shards):
        dp = (replicas or 1) * (shards or 1)
    if dp is None and facts.world and facts.world % model_parallel == 0:
        dp = facts.world // model_parallel
    zero = facts.zero
    if dp == 1:
        replicas, shards = 1, 1
    elif dp is not None and replicas is None and shards is None and not said.get("hsdp"):
        if zero == 0:
            replicas, shards = dp, 1
        elif zero is not None:
            replicas, shards = 1, dp
    elif dp is not None and shards is not None and replicas is None and dp % shards == 0:
        replicas = dp // shards
    elif dp is not None and replicas is not None and shards is None and dp % replicas == 0:
        shards = dp // replicas
    if zero and shards == 1 and facts.cp == 1:
        zero = 0
    gather = said.get("gather")
    if gather is None and zero is not None:
        gather = {0: "step", 1: "step", 2: runtime.zero2_gather, 3: "use"}[zero]
    return replace(
        facts,
        dp=dp,
        dp_replicate=replicas,
        dp_shard=shards,
        zero=zero,
        gather=None if gather is None else Gather(gather),
    )


def _num_micro_batches(facts: Facts) -> int | None:
    if facts.microbatches is not None:
        return facts.microbatches
    if facts.gbs is None or facts.dp is None or facts.mbs is None or facts.gbs % (facts.dp * facts.mbs):
        return None
    return facts.gbs // (facts.dp * facts.mbs)
