"""Published runs as problems: each row of throughput.csv or memory.csv as (Problem, Layout, measured).

Nothing here looks at a measured value to make a prediction. What a row leaves out is taken as its README says.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cost_models.memory import memory_report
from cost_models.problem import RANK_ORDER, Cells, Columns, Problem
from cost_models.records import (
    Calibration,
    Cluster,
    Decision,
    Layout,
    MemoryKind,
    Model,
    Norm,
    Positions,
    Precision,
    Ranks,
    RecordError,
    Runtime,
    Schedule,
    Stage,
    Workload,
    normalised,
)
from cost_models.stage import price_blocks, price_columns
from planner.readers.clusters import cluster_from_facts
from planner.readers.runtimes import read_runtime

SUSPECT = {
    "nemo sft (packed short sequences)": ("r0792", "r0793", "r0794", "r0810", "r0811", "r0812", "r0828", "r0830"),
    "probably memory pressure": ("r1141", "r0021", "r0080", "r0140"),
}
"""Rows kept apart, by reason (published/README.md and the notes on the throw-away model)."""

STATED_NOWHERE_VPP = {f"r{number}": 12 for number in range(1014, 1022)}
"""nemotron4-340b: the releases before and after state 12."""

PRECISIONS = {
    "bf16": Precision.BF16,
    "bf16-pure": Precision.BF16,
    "bf16-amp": Precision.BF16,
    "bf16/fp16": Precision.BF16,
    "fp16": Precision.FP16,
    "fp8-hybrid": Precision.FP8,
    "fp8-cs": Precision.FP8,
    "fp8-amp": Precision.FP8,
    "mxfp8": Precision.FP8,
    "fp8-tensorwise": Precision.FP8,
}
"""Formats as published; nvfp4 has no record yet."""

RUNTIMES = {
    "Composer FSDP1": "llm-foundry",
    "NeMo 2 / Megatron-Core": "megatron-bridge",
    "Megatron-Bridge (Megatron-Core)": "megatron-bridge",
    "Megatron-DeepSpeed": "megatron-deepspeed",
    "Megatron-LM": "megatron-deepspeed",
    "Megatron-Core": "megatron",
}
"""Framework as published -> runtime. Megatron-LM of 2021 had neither fused attention nor sequence parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published row."""

    id: str
    source: str
    problem: Problem
    layout: Layout
    counts: Mapping[str, int]
    """Layers of each stage under each kind of recompute, at most; the rest keep everything."""
    measured_s: float | None
    memory_gib: float | None
    outcome: str
    row: Mapping[str, str]


def read_runs(path: Path, calibration: Calibration) -> tuple[list[Run], dict[str, str]]:
    """The rows that can be priced, and of the others id -> reason."""
    runs, refused = [], {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                runs.append(read_run(row, calibration))
            except ValueError as error:
                refused[row["id"]] = str(error)
    return runs, refused


def read_run(row: Mapping[str, str], calibration: Calibration) -> Run:
    """One row. ValueError says why it cannot be priced."""
    reason = next((why for why, ids in SUSPECT.items() if row["id"] in ids), None)
    if reason:
        raise RecordError(f"kept apart: {reason}")
    if row["attn_type"] == "mla":
        raise RecordError("pricing latent attention is not built yet")
    if row["experts"]:
        raise RecordError("pricing mixture-of-experts models is not built yet")
    if row["precision"] not in PRECISIONS:
        raise RecordError(f"precision {row['precision']} has no record yet")
    problem = Problem(
        model=_model(row),
        cluster=_cluster(row),
        workload=Workload(seq=int(row["seq"]), gbs=int(row["gbs"]), precision=PRECISIONS[row["precision"]]),
        runtime=_runtime(row),
        calibration=calibration,
        memory_kind=MemoryKind.NVIDIA_SMI if row["memory_kind"].startswith("nvidia") else MemoryKind.ALLOCATED,
    )
    layout = _layout(row)
    return Run(
        id=row["id"],
        source=row["source"],
        problem=problem,
        layout=layout,
        counts=_recompute(row),
        measured_s=float(row["step_s_best"]) if row["step_s_best"] else None,
        memory_gib=float(row["memory_gib"]) if row["memory_gib"] else None,
        outcome=row["outcome"],
        row=row,
    )


def _model(row: Mapping[str, str]) -> Model:
    learned = row["framework"] in ("Composer FSDP1", "Megatron-DeepSpeed", "Megatron-LM")
    return Model(
        name=row["model"],
        num_layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        ffn=int(row["ffn_hidden"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        vocab=int(row["vocab"]),
        tie_embeddings=row["tied_emb"] == "True",
        gated_mlp=row["glu"] == "True",
        norm=Norm.LAYERNORM if learned else Norm.RMSNORM,
        positions=Positions.LEARNED if learned else Positions.ROPE,
        max_positions=int(row["seq"]) if learned else 0,
    )


def _cluster(row: Mapping[str, str]) -> Cluster:
    facts: dict[str, object] = {
        "gpu": row["gpu"].split("-")[0] if row["gpu"].startswith("A100") else row["gpu"],
        "gpu_mem_gb": float(row["gpu_mem_gb"]) if row["gpu"].startswith("A100") else None,
        "gpus_per_node": int(row["gpus_per_node"]),
        "world": int(row["n_gpus"]),
        "inter": row["interconnect"],
    }
    per_node, world = int(row["gpus_per_node"]), int(row["n_gpus"])
    if world % per_node:
        facts |= {"nodes": 1, "gpus_per_node": world} if world < per_node else {}
    cluster = cluster_from_facts(facts)
    if "Omni-Path" not in row["interconnect"]:
        return cluster
    # bigscience's nodes reach a quarter of NVLink in all-reduces: a property of that cluster, with its own class of links
    pool = cluster.pools[0]
    intra = replace(pool.kind.intra, name="nvlink3-jean-zay")
    nic = replace(pool.kind.nic, name="omni-path", bandwidth_bytes_per_s=12.5e9)
    return replace(cluster, pools=(replace(pool, kind=replace(pool.kind, intra=intra, nic=nic, num_nics=4)),))


def _runtime(row: Mapping[str, str]) -> Runtime:
    runtime = read_runtime(RUNTIMES[row["framework"]])
    if row["flash_attn"] == "unfused":
        runtime = replace(runtime, name="megatron-unfused")
    if row["sp"] == "no":
        runtime = replace(runtime, sequence_parallel=False, overlaps_tp=False)
    if row["fsdp"] == "yes" or int(row["zero_stage"] or 0) >= 2:
        runtime = replace(runtime, zero_levels=(0, 1, 2, 3))
    return runtime


def _layout(row: Mapping[str, str]) -> Layout:
    tp, pp, cp = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    vpp = int(row["vpp"] or STATED_NOWHERE_VPP.get(row["id"], 1))
    return normalised(
        dp=int(row["n_gpus"]) // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        mbs=int(row["mbs"]),
        zero=int(row["zero_stage"] or 0),
        schedule=Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B,
    )


def _recompute(row: Mapping[str, str]) -> Mapping[str, int]:
    """Kind -> layers of each stage."""
    kind = row["recompute"]
    if kind == "full":
        return {"full": 10**6}
    if kind == "full-block":
        return {"full": int(row["recompute_detail"].split()[0])}
    return {"selective": 10**6} if kind == "selective" else {}


def stages_of(run: Run) -> Columns:
    """The split of the layers: equal where they divide, else embedding and head count as a layer each."""
    blocks, stages = run.problem.model.num_blocks, run.layout.num_virtual_stages
    layers = blocks - 2
    if layers % stages == 0:
        edges = np.arange(stages + 1) * (layers // stages) + 1
        edges[0], edges[-1] = 0, blocks
    else:
        each, rest = divmod(blocks, stages)
        edges = np.concatenate([[0], np.cumsum([each + (place < rest) for place in range(stages)])])
    first, last = edges[:-1], edges[1:] - 1
    num_layers = edges[1:] - edges[:-1] - (first == 0) - (last == blocks - 1)
    kinds = run.problem.recompute_kinds
    counts = np.zeros((stages, len(kinds)), dtype=np.int64)
    left = num_layers.copy()
    for kind, most in run.counts.items():
        counts[:, kinds.index(kind)] = np.minimum(left, most)
        left = left - counts[:, kinds.index(kind)]
    counts[:, 0] += left
    return Columns(stage=np.arange(stages), first=first, last=last, recompute_counts=counts)


def step_s(run: Run) -> float:
    """Predicted seconds of a step: (m - 1/v)·max load + Σ t / v + the longest tail."""
    layout = run.layout
    prices = price_columns(price_blocks(run.problem, Cells.of([layout])), 0, stages_of(run))
    loads = prices.t_s.reshape(layout.vpp, layout.pp).sum(axis=0)
    tails = prices.tail_s.reshape(layout.vpp, layout.pp).sum(axis=0)
    micro = layout.num_micro_batches(run.problem.workload.gbs)
    v = layout.vpp
    return float((micro - 1 / v) * loads.max() + prices.t_s.sum() / v + tails.max())


def with_calibration(runs: list[Run], calibration: Calibration) -> Iterator[Run]:
    """The same runs, priced with another calibration."""
    for run in runs:
        yield replace(run, problem=replace(run.problem, calibration=calibration))


def decision_of(run: Run) -> Decision:
    """The row as a decision."""
    columns, kinds, layout = stages_of(run), run.problem.recompute_kinds, run.layout
    stages = tuple(
        Stage(
            virtual=virtual,
            device=virtual % layout.pp,
            blocks=(int(columns.first[virtual]), int(columns.last[virtual])),
            recompute={kind: int(count) for kind, count in zip(kinds, columns.recompute_counts[virtual], strict=True)},
        )
        for virtual in range(layout.num_virtual_stages)
    )
    return Decision(
        runtime=run.problem.runtime.name,
        layout=layout,
        workload=run.problem.workload,
        num_micro_batches=layout.num_micro_batches(run.problem.workload.gbs),
        stages=stages,
        ranks=Ranks(order=RANK_ORDER),
        collectives={},
    )


def memory_bytes(run: Run) -> float:
    """Predicted peak of the rank that the row speaks of: the last one (Megatron's CI), else the fullest."""
    devices = memory_report(run.problem, decision_of(run))
    if "LAST rank" in run.row["memory_kind"]:
        return devices[-1].peak_bytes
    return max(device.peak_bytes for device in devices)
