"""The request file: {"model", "cluster", "workload", "runtime", "layout", "pin"}, one JSON document, null = absent.

`check` judges what a request states and leaves the rest unknown (`facts_of` in request_facts.py); `plan` and `predict` need
a whole one (`complete`), default the rest and list it. Files of collected faults, which call the layout `their_config`, put
the framework into it and sometimes mbs into the workload, are read too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.compute import multiplied_as
from cost_models.records import (
    Cluster,
    Device,
    Layout,
    Model,
    Optimizer,
    Precision,
    RecordError,
    Runtime,
    Schedule,
    StateBytes,
    Workload,
    from_json,
    normalised,
    parse_tokens,
)
from cost_models.records.layout_text import KEYS
from planner.errors import InputError, NotYetError
from planner.readers.clusters import cluster_of_document, read_cluster
from planner.readers.documents import named_path, read_document
from planner.readers.models import model_and_defaults, read_model
from planner.readers.plausible import refuse_implausible_workload
from planner.readers.request_keys import (
    CLUSTER_KEYS,
    DEGREES,
    ENVELOPE,
    LAYOUT_KEYS,
    MODEL_KEYS,
    MOE_KEYS,
    NOT_ALL_TRAINED,
    OUT_OF_SCOPE,
    SAMPLERS,
    SECTIONS,
    SPELLINGS,
    WORKLOAD_KEYS,
    refuse_unknown_keys,
    with_known_values,
)
from planner.readers.runtimes import is_known, read_runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it was written, spelled one way, nothing filled in."""

    model: Mapping[str, Any] | str | None
    """Dimensions, or a preset's name or a path."""
    cluster: Mapping[str, Any] | str | None
    """Facts, or a preset's name or a path."""
    workload: Mapping[str, Any]
    """seq gbs precision optimizer bytes."""
    runtime: str | None
    """Name of the framework, as written."""
    layout: Mapping[str, Any]
    """Field of a layout -> value; mbs is here wherever it was written."""
    pin: str
    """Pins, as written."""
    ignored: tuple[str, ...]
    """Keys that are not known, as section.key."""
    scope: tuple[str, ...]
    """What of it is outside of what Meshwright prices."""
    trains_all: bool
    """Every parameter is trained: neither inference nor adapters."""
    source: str
    """The file, for errors."""

    @property
    def states_layout(self) -> bool:
        """At least one degree is said."""
        return any(key in self.layout for key in DEGREES)


def read_request(source: str | Path | Mapping[str, Any], name: str | None = None) -> Request:
    """A request from a file, or from its parsed document; `name` leads the errors of that. InputError where it is not one."""
    if isinstance(source, Mapping):
        return _request_of(source, name or "request")
    path, _ = named_path(str(source))
    return _request_of(read_document(path, "a request"), str(path))


def _request_of(document: Mapping[str, Any], source: str) -> Request:
    known = {key: value for key, value in document.items() if value is not None}
    if "decision" in known:
        raise InputError(f"{source}: this is a plan, not a request; `predict` and `explain` take plans")
    if not set(known) & {*SECTIONS, "their_config"}:
        raise InputError(f"{source}: not a request; its keys are {', '.join(SECTIONS)}")
    ignored = [key for key in known if key not in SECTIONS and key not in ENVELOPE]
    if "layout" in known and "their_config" in known:
        raise InputError(f"{source}: layout and their_config are two names of one thing; say one")
    layout = _layout_of(known.get("layout", known.get("their_config")), source)
    workload = with_known_values(_section(known, "workload", source), "workload", source)
    scope = [text for key, text in OUT_OF_SCOPE.items() if layout.get(key) or workload.get(key)]
    if "mbs" in workload:
        if layout.get("mbs", workload["mbs"]) != workload["mbs"]:
            raise InputError(
                f"{source}: mbs={layout['mbs']} in the layout and {workload['mbs']} in the workload; say it once"
            )
        layout["mbs"] = workload.pop("mbs")
        _refuse_no_count(layout, "mbs", source)
    runtime, framework = known.get("runtime"), layout.pop("framework", None)
    if runtime and framework and runtime != framework:
        raise InputError(f"{source}: runtime {runtime!r} and framework {framework!r}; say one")
    name = runtime or framework
    if isinstance(name, str) and any(name.lower().startswith(sampler) for sampler in SAMPLERS):
        scope.append("reinforcement learning with co-located sampling")
    model = _section_or_text(known, "model", source)
    if isinstance(model, Mapping):
        model = with_known_values(model, "model", source)
    sections = {
        "model": (model, MODEL_KEYS),
        "cluster": (
            _section_or_text(known, "cluster", source),
            CLUSTER_KEYS | {"pools", "fabric", "rails", "exceptions"},
        ),
        "workload": (workload, WORKLOAD_KEYS),
        "layout": (layout, LAYOUT_KEYS),
    }
    for section, (value, legal) in sections.items():
        if isinstance(value, Mapping):
            ignored += [f"{section}.{key}" for key in value if key not in legal]
    if isinstance(model, Mapping) and isinstance(model.get("moe"), Mapping):
        ignored += [f"model.moe.{key}" for key in model["moe"] if key not in MOE_KEYS]
    return Request(
        model=model,
        cluster=sections["cluster"][0],
        workload=workload,
        runtime=_text(name, "runtime", source),
        layout=layout,
        pin=_text(known.get("pin"), "pin", source) or "",
        ignored=tuple(key for key in ignored if key.rsplit(".", 1)[-1] not in OUT_OF_SCOPE),
        scope=tuple(dict.fromkeys(scope)),
        trains_all=not any(layout.get(key) or workload.get(key) for key in NOT_ALL_TRAINED),
        source=source,
    )


def _text(value: Any, name: str, source: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise InputError(f"{source}: {name} is {value!r}; expected a text")


def _section(document: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{source}: {name} is {value!r}; expected an object")
    return {key: item for key, item in value.items() if item is not None}


def _section_or_text(document: Mapping[str, Any], name: str, source: str) -> dict[str, Any] | str | None:
    value = document.get(name)
    if value is None or isinstance(value, str):
        return value
    return _section(document, name, source)


def _layout_of(value: Any, source: str) -> dict[str, Any]:
    """The layout's fields, from its text or its object; numbers and words are checked, spellings made one."""
    layout: dict[str, Any] = {}
    if isinstance(value, str):
        try:
            layout = dict(parse_tokens(value))
        except RecordError as error:
            raise InputError(f"{source}: {error}") from None
    else:
        said = _section({"layout": value} if value is not None else {}, "layout", source)
        for key, item in said.items():
            field = SPELLINGS.get(key, key)
            if field in layout:
                raise InputError(f"{source}: the layout says {field} twice; say it once")
            layout[field] = item
        layout = with_known_values(layout, "layout", source)
    for field in (*DEGREES, "mbs", "microbatches", "zero"):
        _refuse_no_count(layout, field, source)
    if layout.get("zero", 0) > 3:
        raise InputError(f"{source}: layout.zero={layout['zero']}; legal values: 0, 1, 2, 3")
    if "dp" in layout and "dp_replicate" in layout and "dp_shard" in layout:
        if layout["dp"] != layout["dp_replicate"] * layout["dp_shard"]:
            raise InputError(
                f"{source}: the layout says dp beside dp_replicate and dp_shard; say dp alone, or both of its parts"
            )
        del layout["dp"]
    if layout.get("recompute") == "stages":
        raise InputError(
            f"{source}: recompute=stages is what a plan says whose stages differ; a request names one kind"
        )
    return layout


def _refuse_no_count(layout: Mapping[str, Any], field: str, source: str) -> None:
    number, least = layout.get(field), 0 if field == "zero" else 1
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
        raise InputError(f"{source}: layout.{field}={number!r}; a whole number from {least} is needed")


# Whole requests, for plan and predict -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRequest:
    """What plan and predict work on."""

    model: Model
    """The network."""
    cluster: Cluster
    """What it runs on."""
    workload: Workload
    """What it is trained on."""
    runtime: Runtime
    """What it runs with."""
    layout: Layout | None
    """The layout to predict, or today's; None where the request has none."""
    pin: str
    """Pins, as written."""
    defaults: Mapping[str, str]
    """What was not said -> how it was taken."""
    offload: tuple[str, ...] = ()
    """What lies in host memory: optimizer, param."""
    pools: tuple[int, ...] = ()
    """Of each position of the layout's pipeline, the number of its pool; empty = nobody says, or there is one."""


def complete(request: Request, *, needs_layout: bool = False) -> CompleteRequest:
    """The request with everything filled in. Raises InputError for what is wrong or absent, NotYetError by name."""
    _refuse_scope(request)
    refuse_unknown_keys(request.ignored, request.source)
    defaults: dict[str, str] = {}
    model = _model(request, defaults)
    cluster = _cluster(request, defaults)
    runtime = _runtime(request, defaults)
    workload = _workload(request, cluster, runtime, defaults)
    layout = None
    if request.states_layout or request.layout:
        layout = _layout(request, runtime, workload, cluster.num_gpus, defaults, has_experts=model.moe is not None)
    elif needs_layout:
        raise InputError(f"{request.source}: there is no layout; say one, as in `tp8 pp4 dp4 zero1 mbs1`")
    return CompleteRequest(
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=_with_bytes(runtime, request, workload),
        layout=layout,
        pin=request.pin,
        defaults=defaults,
        offload=_offload(request, runtime, needs_layout),
        pools=() if layout is None else _pools(request, cluster, layout, defaults),
    )


def _pools(request: Request, cluster: Cluster, layout: Layout, defaults: dict[str, str]) -> tuple[int, ...]:
    """Where the stages of a layout lie on a mixed cluster, where the request says it."""
    said = request.layout.get("pools")
    if len(cluster.pools) == 1:
        if said is not None:
            raise InputError(
                f"{request.source}: layout.pools={said}, but cluster {cluster.name!r} has one pool; leave it out"
            )
        return ()
    if said is None:
        defaults["layout.pools"] = "in the order of the cluster's pools"
        return ()
    numbers = range(len(cluster.pools))
    if not isinstance(said, list) or len(said) != layout.pp or any(one not in numbers for one in said):
        raise InputError(
            f"{request.source}: layout.pools={said!r}: the number of a pool for each of the pp={layout.pp} stages is needed; "
            f"legal numbers: {', '.join(map(str, numbers))}"
        )
    for number, pool in enumerate(cluster.pools):
        needed = said.count(number) * layout.world // layout.pp
        if needed > pool.num_gpus:
            raise InputError(
                f"{request.source}: layout.pools={said}: {said.count(number)} stages of {layout.world // layout.pp} GPUs need "
                f"{needed} GPUs of pool {number}, which has {pool.num_gpus}"
            )
    return tuple(said)


def _offload(request: Request, runtime: Runtime, given: bool) -> tuple[str, ...]:
    """What the layout offloads to host memory, priced where a layout is `given` to be predicted."""
    said = {what: request.layout.get(f"offload_{what}") for what in ("optimizer", "param")}
    said = {what: where for what, where in said.items() if where not in (None, False, "none")}
    for what, where in said.items():
        asked = f"{request.source}: layout.offload_{what}={where}"
        if not given:
            raise NotYetError(
                f"{asked} is not planned yet: the search does not choose it (`predict` prices a layout with it)"
            )
        if where == "nvme":
            raise NotYetError(f"{asked} is not priced yet; cpu is (`check` judges the laws of both)")
        if what not in runtime.offload_moves:
            known = ", ".join(f"offload_{one}" for one in runtime.offload_moves) or "nothing"
            raise InputError(f"{asked}: runtime {runtime.name} offloads {known}")
    return tuple(said)


def _refuse_scope(request: Request) -> None:
    if request.scope:
        raise NotYetError(
            f"{request.source}: {' and '.join(request.scope)} is not planned or predicted yet; Meshwright prices full-parameter "
            "training (`check` judges the laws of such a request)"
        )
    if request.layout.get("ulysses") not in (None, False, 1, "none"):
        raise NotYetError(
            f"{request.source}: layout.ulysses={request.layout['ulysses']} is not priced yet (`check` judges its laws)"
        )


def _model(request: Request, defaults: dict[str, str]) -> Model:
    said = request.model
    if said is None:
        raise InputError(f"{request.source}: there is no model; name a preset, an HF config.json, or dimensions")
    if isinstance(said, str):
        return read_model(said)
    try:
        model, more = model_and_defaults(said)
    except (InputError, RecordError) as error:
        raise InputError(f"{request.source}: {error}") from None
    defaults |= more
    return model


def _cluster(request: Request, defaults: dict[str, str]) -> Cluster:
    said = request.cluster
    if said is None:
        raise InputError(f"{request.source}: there is no cluster; name one, as in h100x64, or a cluster file")
    if isinstance(said, str):
        return read_cluster(said)
    try:
        cluster, more = cluster_of_document(said)
    except (InputError, RecordError) as error:
        raise InputError(f"{request.source}: {error}") from None
    defaults |= more
    return cluster


def _runtime(request: Request, defaults: dict[str, str]) -> Runtime:
    if request.runtime is None:
        defaults["runtime"] = "torch"
        return read_runtime("torch")
    if not is_known(request.runtime):
        defaults["runtime"] = f"generic (there is no record of {request.runtime!r})"
    runtime = read_runtime(request.runtime)
    sp = request.layout.get("sp")
    if sp is not None and bool(sp) != runtime.sequence_parallel:
        if runtime.name == "torch":
            raise NotYetError(
                f"{request.source}: runtime torch always divides the sequence over tp; sp={sp} is not built"
            )
        return replace(runtime, sequence_parallel=bool(sp))
    return runtime


def default_precision(devices: Sequence[Device], runtime: Runtime) -> Precision:
    """The precision where none is said: bf16, or with a device without it the next best that all devices and runtime have."""
    for precision in (Precision.BF16, Precision.FP16, Precision.FP32):
        if all(precision in device.peak_flops_per_s for device in devices) and precision in runtime.state_bytes:
            return precision
    return Precision.BF16


def widened(precision: str, devices: Sequence[Device]) -> dict[str, str]:
    """What a precision becomes on devices that widen it, in words; empty where none does."""
    wide = {one.name: multiplied_as(one, precision) for one in devices if multiplied_as(one, precision) != precision}
    told = ", ".join(f"{name} has no {precision} and multiplies in {other}" for name, other in wide.items())
    return {"workload.precision": f"{precision} ({told}: fp16 is several times as fast)"} if wide else {}


def _workload(request: Request, cluster: Cluster, runtime: Runtime, defaults: dict[str, str]) -> Workload:
    said = {key: value for key, value in request.workload.items() if key != "bytes"}
    for key, meaning in (("seq", "tokens of a sequence; --seq"), ("gbs", "sequences of a step; --batch")):
        if key not in said:
            raise InputError(f"{request.source}: the workload lacks {key} ({meaning} on the command line)")
    if "precision" not in said:
        devices = [pool.kind.device for pool in cluster.pools]
        said["precision"] = default_precision(devices, runtime).value
        without = next((device for device in devices if Precision.BF16 not in device.peak_flops_per_s), None)
        why = "" if without is None else f" ({without.name} has no bf16)"
        defaults["workload.precision"] = f"{said['precision']}{why}"
    else:
        defaults |= widened(str(said["precision"]), [pool.kind.device for pool in cluster.pools])
    if "optimizer" not in said:
        defaults["workload.optimizer"] = Optimizer.ADAMW.value
    try:
        workload = from_json(Workload, said, "workload")
    except RecordError as error:
        raise InputError(f"{request.source}: {error}") from None
    refuse_implausible_workload(workload)
    return workload


def bytes_of(request: Request) -> StateBytes | None:
    """Bytes per parameter, where the request says them: {weight, grad, optim}."""
    said = request.workload.get("bytes")
    if said is None:
        return None
    names = {
        "weight": "weight",
        "grad": "gradient",
        "gradient": "gradient",
        "optim": "optimizer",
        "optimizer": "optimizer",
    }
    try:
        return from_json(StateBytes, {names.get(key, key): value for key, value in said.items()}, "workload.bytes")
    except (RecordError, AttributeError):
        raise InputError(
            f"{request.source}: workload.bytes={said!r}; expected an object of bytes per parameter: weight, grad, optim"
        ) from None


def _with_bytes(runtime: Runtime, request: Request, workload: Workload) -> Runtime:
    said = bytes_of(request)
    if said is None:
        return runtime
    return replace(runtime, state_bytes={**runtime.state_bytes, workload.precision.value: said})


def _layout(
    request: Request,
    runtime: Runtime,
    workload: Workload,
    world: int,
    defaults: dict[str, str],
    *,
    has_experts: bool,
) -> Layout:
    """The layout of a request: an absent degree is 1, absent dp is world/(tp·pp·cp), absent etp the runtime's."""
    said = {key: value for key, value in request.layout.items() if key in KEYS.values()}
    for key in ("tp", "pp", "cp", "ep", "vpp"):
        if key not in said:
            said[key], defaults[f"layout.{key}"] = 1, "1"
    if "etp" not in said:
        said["etp"] = said["tp"] if runtime.etp_default == "tp" and has_experts else 1
        defaults["layout.etp"] = f"{said['etp']} ({runtime.name}'s)"
    said.setdefault("zero", 0)
    if "zero" not in request.layout:
        defaults["layout.zero"] = "0"
    _fill_dp(said, request, world, defaults)
    _fill_mbs(said, request, workload, defaults)
    if "schedule" not in said:
        said["schedule"] = (Schedule.INTERLEAVED if said["vpp"] > 1 else Schedule.ONE_F_ONE_B).value
        defaults["layout.schedule"] = said["schedule"]
    if "recompute" not in said:
        said["recompute"] = "none"
        defaults["layout.recompute"] = "none"
    elif said["recompute"] not in runtime.recompute_kinds:
        raise InputError(
            f"{request.source}: recompute={said['recompute']} is not a kind of {runtime.name}; legal: {', '.join(runtime.recompute_kinds)}"
        )
    try:
        said["schedule"] = Schedule(said["schedule"])
        return normalised(micro_gather=runtime.zero2_gather, **said)
    except RecordError as error:
        raise InputError(f"{request.source}: layout: {error}") from None


def _fill_dp(said: dict[str, Any], request: Request, world: int, defaults: dict[str, str]) -> None:
    """dp and its parts; the world's GPUs where nothing is said."""
    model_parallel = said["tp"] * said["pp"] * said["cp"]
    if not {"dp", "dp_replicate", "dp_shard"} & set(said):
        if world % model_parallel:
            raise InputError(
                f"{request.source}: world={world} is not divisible by tp·pp·cp = {model_parallel}, so that dp cannot be worked out; "
                "say dp, or take degrees that divide the world"
            )
        said["dp"] = world // model_parallel
        defaults["layout.dp"] = f"{said['dp']} (world/(tp·pp·cp))"
    if "dp" in said and {"dp_replicate", "dp_shard"} & set(said):
        part, other = ("dp_shard", "dp_replicate") if "dp_shard" in said else ("dp_replicate", "dp_shard")
        if said["dp"] % said[part]:
            raise InputError(f"{request.source}: dp={said['dp']} is not divisible by {part}={said[part]}")
        said[other] = said.pop("dp") // said[part]
    if request.layout.get("hsdp") and "dp" in said and said["zero"] >= 1:
        raise InputError(f"{request.source}: hsdp without its two sizes; say dp_replicate and dp_shard")


def _fill_mbs(said: dict[str, Any], request: Request, workload: Workload, defaults: dict[str, str]) -> None:
    """mbs, from the number of micro-batches where that is said."""
    dp = said["dp"] if "dp" in said else said.get("dp_replicate", 1) * said.get("dp_shard", 1)
    count = request.layout.get("microbatches")
    if count is not None:
        mbs, rest = divmod(workload.gbs, dp * count)
        if rest or said.get("mbs", mbs) != mbs or not mbs:
            raise InputError(
                f"{request.source}: gbs={workload.gbs} is not dp·mbs·microbatches = {dp}·{said.get('mbs', 'mbs')}·{count}"
            )
        said["mbs"] = mbs
    elif "mbs" not in said:
        said["mbs"], defaults["layout.mbs"] = 1, "1"
