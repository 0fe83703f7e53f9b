"""Published runs with what was measured: the rows, what was mended in them, and what is kept apart, by name and with evidence.

Nothing here looks at a measured value to make a prediction: predictions see the columns of `planner.readers.runs.INPUTS`.
"""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cost_models.records import Calibration
from planner.readers.runs import INPUTS, Run, read_run

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """An input that a row states wrongly, or not at all."""

    ids: Sequence[str]
    """Rows."""
    column: str
    value: str
    """What is read instead."""
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Rows that are predicted, but neither fitted nor counted."""

    ids: Sequence[str]
    """Rows."""
    evidence: str


CORRECTIONS = (
    Correction(
        ids=tuple(f"r{number}" for number in range(1014, 1022)),
        column="vpp",
        value="12",
        evidence="nemotron4-340b: the releases before and after state 12; without virtual stages all eight are 33 to 38% off alike",
    ),
)

APART = (
    Apart(
        ids=("r0792", "r0793", "r0794", "r0810", "r0811", "r0812", "r0828", "r0830"),
        evidence="fine-tuning on packed short sequences, whose FLOPs the source counts otherwise; vpp not stated",
    ),
    Apart(
        ids=("r1141",),
        evidence="9.84 s, half the micro-batch takes 4.97 s and nothing else changes: short of memory, it seems",
    ),
    Apart(
        ids=("r0021", "r0080", "r0140"),
        evidence="21 to 28% slower than the same work on more GPUs, at the smallest count on which it fits: allocator retries, it seems",
    ),
)

MEMORY_APART = (
    Apart(
        ids=("r0256",),
        evidence="65 GB, though the same layout with twice the micro-batch (r0257) takes 56: swapped, it seems",
    ),
    Apart(ids=("r0297",), evidence="38 GB, though the same layout in the same table (r0296) takes 44"),
    Apart(
        ids=("r0262",),
        evidence="ZeRO-0 with the fp16 optimizer of which nobody else published memory: 8 GB more than its states say",
    ),
)
"""Rows whose memory is kept apart."""

UNGROUPED = (
    "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
    "gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer",
    "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
    "gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel",
    "gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel",
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel",
)
"""Tests of mixtures of experts whose model_config.yaml does not say --moe-grouped-gemm; all others' of these tables do."""

BF16_OPTIMIZER = "bf16_optimizer_fp32_gradacc"
"""Flag of rows whose gradients are added up in fp32: bf16 under DeepSpeed's BF16_Optimizer, other rows ran fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row that can be predicted."""

    id: str
    source: str
    model: str
    run: Run
    measured_s: float | None
    memory_gib: float | None
    outcome: str
    row: Mapping[str, str]
    """As published, mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A file of published runs."""

    rows: tuple[Published, ...]
    """Counted."""
    apart: Mapping[str, str]
    """Id -> evidence: left out of fit and count."""
    refused: Mapping[str, str]
    """Id -> why no prediction is possible."""
    corrected: Mapping[str, str]
    """Id -> what was mended, with the evidence."""
    sources: Mapping[str, int]
    """Source -> rows in the file."""
    source_of: Mapping[str, str]
    """Id -> source."""


def read_published(path: Path, calibration: Calibration, *, memory: bool = False) -> Table:
    """Every row of a published table; of `memory` or of step times."""
    rows, refused, corrected = [], {}, {}
    apart = {one: group.evidence for group in (MEMORY_APART if memory else APART) for one in group.ids}
    sources: dict[str, int] = {}
    source_of = {}
    with path.open(newline="") as stream:
        for raw in csv.DictReader(stream):
            row, told = mended(raw)
            sources[row["source"]] = sources.get(row["source"], 0) + 1
            source_of[row["id"]] = row["source"]
            if told:
                corrected[row["id"]] = told
            if row["id"] in apart:
                continue
            try:
                rows.append(published(row, calibration))
            except ValueError as error:
                refused[row["id"]] = str(error)
    return Table(
        rows=tuple(rows),
        apart={one: why for one, why in apart.items() if one in source_of},
        refused=refused,
        corrected=corrected,
        sources=sources,
        source_of=source_of,
    )


def mended(row: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """The row with its inputs corrected, and what was done to it."""
    told = []
    row = dict(row)
    for one in CORRECTIONS:
        if row["id"] in one.ids:
            row[one.column] = one.value
            told.append(f"{one.column}={one.value}: {one.evidence}")
    if BF16_OPTIMIZER in row["flags"] and row["precision"] == "bf16/fp16":
        row["precision"] = "bf16"
        told.append("precision=bf16: its source says so (bf16 optimizer, gradients added up in fp32)")
    if "impl=local" in row["note"] and row["flash_attn"] == "auto":
        row["flash_attn"] = "unfused"
        told.append("flash_attn=unfused: the test runs Megatron's local layers, whose attention is not fused")
    if not groups_experts(row):
        told.append("experts one after the other: the test's configuration does not set --moe-grouped-gemm")
    return row, "; ".join(told)


def groups_experts(row: Mapping[str, str]) -> bool:
    """Whether the products of routed experts ran as groups, as the test's own configuration says."""
    test = re.search(r"test moe/(\S+?)(?:_dp_last)?(?:_1node)?;", row["note"])
    return test is None or test[1] not in UNGROUPED


def published(row: Mapping[str, str], calibration: Calibration) -> Published:
    """One row. ValueError says why it cannot be predicted."""
    run = read_run({name: row[name].strip() for name in ("id", *INPUTS)}, calibration)
    if not groups_experts(row):
        runtime = replace(run.problem.runtime, groups_experts=False)
        run = replace(run, problem=replace(run.problem, runtime=runtime), digest=f"{run.digest} ungrouped")
    return Published(
        id=row["id"],
        source=row["source"],
        model=row["model"].split("-proxy")[0],
        run=run,
        measured_s=float(row["step_s_best"]) if row["step_s_best"] else None,
        memory_gib=float(row["memory_gib"]) if row["memory_gib"] else None,
        outcome=row["outcome"],
        row=row,
    )


def with_calibration(run: Run, calibration: Calibration) -> Run:
    """The same run, priced with another calibration."""
    return replace(run, problem=replace(run.problem, calibration=calibration))


def grouped(rows: Iterable[Published], key: Callable[[Published], K]) -> dict[K, list[Published]]:
    """Rows by key, in their order."""
    groups: dict[K, list[Published]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
