"""What is supported, and what its price rests on: runtime x device x feature, made from the records alone.

A feature is priced on a small run with it and, where it is a way to divide work, on the same run without it. Its cell is
what most of its seconds rest on, as every prediction counts them:

    measured     this very operation or collective was timed (operations and curves of the calibration)
    calibrated   a coefficient that was fitted on runs
    untested     neither, and the runtime's record says that nobody has checked it there
    table        neither, but the record was checked: a data sheet, a publication, a prior
    -            the runtime or the device does not have it, or nothing prices it
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cost_models.problem import Problem
from cost_models.recompute import is_priced
from cost_models.records import (
    SPLIT_BACKWARD,
    V_PLACED,
    Calibration,
    Cluster,
    Layout,
    Mla,
    Model,
    Moe,
    Precision,
    RecordError,
    Runtime,
    Schedule,
    Workload,
    normalised,
)
from planner.anchor import even_stages
from planner.decisions import decision_of_stages, refuse_illegal
from planner.errors import MeshwrightError
from planner.predict import seconds_by_basis, simulated
from planner.readers.node_presets import cluster_names, local_cluster, node_kind, preset_cluster
from planner.readers.requests import default_precision

FloatArray = NDArray[np.float64]

BASES = ("measured", "calibrated", "table")
"""What seconds rest on, in the order of `predict`."""
UNTESTED, ABSENT = "untested", "-"
DENSE = Model(name="dense", num_layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
MOE = replace(DENSE, name="experts", ffn=4096, moe=Moe(num_experts=16, top_k=2, moe_ffn=4096))
LATENT = replace(
    DENSE,
    name="latent attention",
    kv_heads=32,
    mla=Mla(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)
PLAIN = Layout()
WORKLOAD = Workload(seq=4096, gbs=16)
"""16 sequences: enough micro-batches for every schedule below."""
_ALL = re.compile(r"^(everything|all of it|training)\b")
_GPUS = re.compile(r"\bNCCL\b|\bon GPUs\b")
"""Words of a record's `untested` that speak of all features, and of GPUs alone; what stands in brackets is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that a runtime may do."""

    name: str
    """As people call it."""
    words: str
    """How a record's `untested` names it: a regular expression."""
    model: Model = DENSE
    layout: Layout = PLAIN
    without: Layout | None = None
    """The same run without it; None = the whole run is what counts."""
    precision: Precision | None = None
    """None = what the device and the runtime have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One cell."""

    runtime: str
    device: str
    """Family of devices."""
    feature: str
    rests_on: str
    """measured, calibrated, table, untested or -."""


def support(runtime: Runtime, calibration: Calibration) -> tuple[Support, ...]:
    """Every feature of the runtime on every family of devices, features in order."""
    priced: Priced = {}
    return tuple(
        Support(
            runtime=runtime.name,
            device=family,
            feature=feature.name,
            rests_on=_rests_on(runtime, cluster, feature, calibration, priced),
        )
        for feature in features(runtime)
        for family, cluster in clusters().items()
    )


def features(runtime: Runtime) -> Iterator[Feature]:
    """What is asked of a runtime: everything that any runtime has, and its own kinds of recompute."""
    two = normalised(dp=2)
    for precision in Precision:
        yield Feature(name=f"dense, {precision}", words=rf"\b{precision}\b", precision=precision)
    yield Feature(name="latent attention", words="latent", model=LATENT)
    yield Feature(name="experts", words="expert|MoE", model=MOE)
    yield Feature(name="dp", words=r"data parallel|\bDDP\b", layout=two, without=PLAIN)
    for level in (1, 2, 3):
        layout = normalised(dp=2, zero=level, micro_gather=runtime.zero2_gather)
        yield Feature(name=f"zero {level}", words=rf"ZeRO (\d(,| and) )*{level}\b", layout=layout, without=PLAIN)
    yield Feature(name="tp", words="tensor parallel", layout=Layout(tp=2), without=PLAIN)
    yield Feature(name="cp", words="context parallel", layout=Layout(cp=2), without=PLAIN)
    etp = Layout(dp_replicate=2, ep=2)
    yield Feature(name="ep", words="expert parallel", model=MOE, layout=etp, without=two)
    for schedule in Schedule:
        looped = schedule not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
        words = r"\bPP\b|pipeline" + ("|split the backward" if schedule in SPLIT_BACKWARD else "")
        layout = Layout(pp=2, vpp=2 if looped or schedule in V_PLACED else 1, schedule=schedule)
        yield Feature(name=f"pp {schedule}", words=words, layout=layout, without=PLAIN)
    for kind in runtime.recompute_kinds[1:]:
        words = rf"recompute.*\b{re.escape(kind)}\b"
        yield Feature(name=f"recompute {kind}", words=words, layout=Layout(recompute=kind), without=PLAIN)
    for what in ("optimizer", "param"):
        yield Feature(name=f"offload {what}", words="offload")


@cache
def clusters() -> Mapping[str, Cluster]:
    """Family of devices -> two nodes of the first kind that has it; CPUs last."""
    found: dict[str, Cluster] = {}
    for name in cluster_names():
        kind = node_kind(name)
        found.setdefault(kind.device.family, preset_cluster(name, 2 * kind.gpus_per_node))
    found["cpu"] = local_cluster(
        16, 64 << 30, matmul_flops_per_s={"fp32": 5e10, "bf16": 5e10}, memory_bandwidth_bytes_per_s=1e10
    )
    return found


# One cell ------------------------------------------------------------------------------------------------------------


Priced = dict[tuple[str, str, Layout, Precision | None], FloatArray]
"""Family, model, layout and precision -> seconds: many features are held against the same run without them."""


def _rests_on(runtime: Runtime, cluster: Cluster, feature: Feature, calibration: Calibration, priced: Priced) -> str:
    family = cluster.pools[0].kind.device.family
    if feature.name.startswith("offload"):  # priced from tables and guesses: nobody compared it with a run
        return UNTESTED if feature.name.split()[1] in runtime.offload_moves else ABSENT
    if not _has(runtime, cluster, feature):
        return ABSENT
    try:
        seconds = _seconds(runtime, cluster, feature, feature.layout, calibration)
        if feature.without is not None:
            key = family, feature.model.name, feature.without, feature.precision
            if key not in priced:
                priced[key] = _seconds(runtime, cluster, feature, feature.without, calibration)
            more = np.maximum(seconds - priced[key], 0.0)
            seconds = more if more.sum() > 0 else seconds
    except (MeshwrightError, RecordError):
        return ABSENT  # illegal there, or a coefficient that nobody knows
    basis = BASES[int(np.argmax(seconds))]
    return UNTESTED if basis == "table" and is_untested(runtime, feature, family) else basis


def _has(runtime: Runtime, cluster: Cluster, feature: Feature) -> bool:
    layout, device = feature.layout, cluster.pools[0].kind.device
    precision = feature.precision
    if device.family != "cpu" and not runtime.executes_gpus:
        return False
    if precision is not None and not (
        precision.value in device.peak_flops_per_s and precision.value in runtime.state_bytes
    ):
        return False
    if layout.recompute != "none" and not is_priced(runtime.name, layout.recompute):
        return False
    return (
        (layout.pp == 1 or layout.schedule in runtime.schedules)
        and layout.zero in (0, *runtime.zero_levels)
        and (layout.cp == 1 or runtime.context_parallel)
        and (layout.ep == 1 or runtime.expert_parallel)
    )


def _seconds(
    runtime: Runtime, cluster: Cluster, feature: Feature, layout: Layout, calibration: Calibration
) -> FloatArray:
    """Seconds of the busiest device by what they rest on; kinds of recompute that are not asked for are not priced."""
    runtime = replace(runtime, recompute_kinds=tuple(dict.fromkeys((runtime.recompute_kinds[0], layout.recompute))))
    precision = feature.precision or default_precision([pool.kind.device for pool in cluster.pools], runtime)
    problem = Problem(
        model=feature.model,
        cluster=cluster,
        workload=replace(WORKLOAD, precision=precision),
        runtime=runtime,
        calibration=calibration,
    )
    refuse_illegal(problem, layout)
    per_stage = feature.model.num_layers // layout.num_virtual_stages
    decision = decision_of_stages(problem, layout, even_stages(layout, per_stage, {layout.recompute: per_stage}))
    return seconds_by_basis(simulated(problem, decision), decision.num_micro_batches)


def is_untested(runtime: Runtime, feature: Feature, family: str) -> bool:
    """The runtime's record says that nobody has checked the feature there, by its name or with all the rest."""
    return any(_names(text, feature, family, tuple(features(runtime))) for text in runtime.untested)


def _names(text: str, feature: Feature, family: str, every: Sequence[Feature]) -> bool:
    text = re.sub(r"\(.*?\)", "", text)
    if _GPUS.search(text) and family == "cpu":
        return False
    if any(re.search(one.words, text, re.IGNORECASE) for one in every):
        return re.search(feature.words, text, re.IGNORECASE) is not None
    return bool(_ALL.search(text) or _GPUS.search(text))
