"""The contract: what was asked, what was decided, what is promised, and the proof."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from cost_models.records.cluster import Cluster
from cost_models.records.codec import SCHEMA_VERSION, UNSAID, RecordError, from_json, load, to_json
from cost_models.records.layout import Layout
from cost_models.records.model import Model
from cost_models.records.runtime import Runtime
from cost_models.records.workload import Workload

RANK_AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""Axes along which ranks are counted; expert parallelism divides ranks of dp, cp and tp again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What was asked, in full: the plan can be made again from this alone."""

    model: Model
    """The network."""
    cluster: Cluster
    """What it shall run on."""
    workload: Workload
    """What it is trained on."""
    runtime: Runtime
    """What it shall run with."""
    pin: str = ""
    """Pins, as given."""
    current: str | None = None
    """Today's layout, as text; null = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One virtual stage of the pipeline."""

    virtual: int
    """Number of the virtual stage, 0..S-1, in the order of the data."""
    device: int
    """Position in the pipeline that runs it, 0..pp-1."""
    blocks: tuple[int, ...]
    """[first, last], both inclusive."""
    recompute: Mapping[str, int]
    """Kind -> number of layers of this stage, counted from its first layer, kinds in this order."""
    pool: int | None = field(default=None, metadata=UNSAID)
    """Number, from 0, of the pool of the cluster that runs it; written only where the cluster has several."""

    def __post_init__(self) -> None:
        if len(self.blocks) != 2 or not 0 <= self.blocks[0] <= self.blocks[1]:
            raise RecordError(
                f"blocks={list(self.blocks)} of virtual stage {self.virtual}: expected [first, last], first ≤ last"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where each coordinate of the mesh lies."""

    order: tuple[str, ...]
    """Axes, innermost (nearest ranks) first: tp, cp, dp_shard, dp_replicate, pp."""
    permutation: tuple[int, ...] | None = None
    """permutation[position in that order] = rank; null = the identity."""

    def __post_init__(self) -> None:
        if len(set(self.order)) < len(self.order) or not set(self.order) <= set(RANK_AXES):
            raise RecordError(
                f"ranks.order={list(self.order)}: each of the axes {', '.join(RANK_AXES)} has one place at most; no other has one"
            )


class Binding(StrEnum):
    """Who decides on an algorithm."""

    DECIDED = "decided"
    PREDICTED = "predicted"


COMPRESSIONS = ("fp16", "bf16")
"""Types in which gradients may travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """The algorithm of an axis's collectives, and how gradients travel in them."""

    algorithm: str
    """For example ring, tree, hierarchical, default."""
    binding: Binding
    """decided: the executor must use it; predicted: the runtime's own choice, as we expect it."""
    compression: str | None = field(default=None, metadata=UNSAID)
    """fp16 or bf16: type of gradients on the wire, their sum included. Never chosen, only pinned; null = their own."""
    bucket_bytes: int | None = field(default=None, metadata=UNSAID)
    """Gradients that are reduced at once; null = the runtime's own size."""
    overlap: bool = field(default=True, metadata=UNSAID)
    """Behind the backward pass; false = the backward pass waits for each bucket."""

    def __post_init__(self) -> None:
        if self.compression not in (None, *COMPRESSIONS):
            raise RecordError(f"compression={self.compression!r}; legal: {', '.join(COMPRESSIONS)}, or null")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise RecordError(f"bucket_bytes={self.bucket_bytes}; legal: whole numbers from 1, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """All that an executor or a framework needs, beside the model."""

    runtime: str
    """Name of the runtime."""
    layout: Layout
    """Degrees and choices."""
    workload: Workload
    """Sequence length, batch, precision, optimizer."""
    num_micro_batches: int
    """Micro-batches of a step on each data-parallel rank."""
    stages: tuple[Stage, ...]
    """Virtual stages in the order of the data."""
    ranks: Ranks
    """Order of the axes, never hosts."""
    collectives: Mapping[str, CollectiveChoice]
    """Axis -> algorithm."""

    def __post_init__(self) -> None:
        layout = self.layout
        if self.num_micro_batches != layout.num_micro_batches(self.workload.gbs):
            raise RecordError(
                f"num_micro_batches={self.num_micro_batches}, but gbs/(dp·mbs) = {self.workload.gbs}/({layout.dp}·{layout.mbs})"
                f" = {layout.num_micro_batches(self.workload.gbs)}"
            )
        if len(self.stages) != layout.num_virtual_stages:
            raise RecordError(f"{len(self.stages)} stages, but pp·vpp = {layout.num_virtual_stages}")
        if [stage.virtual for stage in self.stages] != list(range(len(self.stages))):
            raise RecordError("stages are listed in the order of the data: virtual = 0, 1, 2, ...")
        if any(not 0 <= stage.device < layout.pp for stage in self.stages):
            raise RecordError(f"a stage names a device outside 0..{layout.pp - 1} (pp = {layout.pp})")
        pools = {(stage.device, stage.pool) for stage in self.stages}
        if len(pools) > len({device for device, _ in pools}) or len({pool is None for _, pool in pools}) > 1:
            raise RecordError(
                "stages: each position of the pipeline lies in one pool, and all stages name theirs or none does"
            )
        if self.stages[0].blocks[0] != 0 or any(a.blocks[1] + 1 != b.blocks[0] for a, b in pairwise(self.stages)):
            raise RecordError(
                "the stages' blocks are not a partition: each starts where the one before ends, the first at 0"
            )
        strange = sorted(set(self.collectives) - set(RANK_AXES))
        if strange:
            raise RecordError(f"collectives names {strange[0]!r}; legal axes: {', '.join(RANK_AXES)}")
        permutation = self.ranks.permutation
        if permutation is not None and sorted(permutation) != list(range(layout.world)):
            raise RecordError(
                f"ranks.permutation has {len(permutation)} entries; it must be a permutation of 0..{layout.world - 1}"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks that the stages cover."""
        return self.stages[-1].blocks[1] + 1

    @property
    def sha256(self) -> str:
        """Hash of the decision as JSON with sorted keys and no spaces."""
        text = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where the seconds of a step go on the device with the most work; they sum to step_s."""

    compute_s: float
    """Kernels, recompute included."""
    exposed_communication_s: float
    """Communication that nothing hides."""
    bubble_s: float
    """Waiting for other stages."""
    optimizer_s: float
    """The update."""
    other_s: float
    """The step's constant."""

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.compute_s + self.exposed_communication_s + self.bubble_s + self.optimizer_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What is promised of one position in the pipeline."""

    device: int
    """Position in the pipeline, 0..pp-1."""
    forward_s: float
    """Forward pass of one micro-batch, through all its virtual stages."""
    backward_s: float
    """Backward pass of one micro-batch, recompute included."""
    tail_s: float
    """After the last backward: gradient synchronisation left over, optimizer, constant."""
    memory_bytes: Mapping[str, float]
    """Kind (weights, gradients, optimizer, activations, logits, communication, context ...) -> bytes at the peak."""
    phase_memory_bytes: Mapping[str, float]
    """Phase (build, step 1, step 2 ...) -> expected peak bytes."""
    peak_phase: str
    """Phase of the peak."""
    peak_operation: str
    """Operation at the peak."""
    phase_operations: Mapping[str, str] = field(default_factory=dict)
    """Phase -> the operation at its peak."""


class Verdict(StrEnum):
    """Does it fit?"""

    OK = "ok"
    RISKY = "risky"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is promised of a step."""

    step_s: float
    """Expected seconds."""
    step_s_low: float
    """Lower end of the 80% interval."""
    step_s_high: float
    """Upper end of the 80% interval."""
    tokens_per_s_per_gpu: float
    """Tokens of a step / step_s / ranks."""
    tflops_per_gpu: float
    """Model FLOPs, see flops_formula."""
    mfu: float
    """Of the dense data-sheet peak, see mfu_peak_flops_per_s."""
    mfu_peak_flops_per_s: float
    """The peak used."""
    flops_formula: str
    """How model FLOPs are counted."""
    memory_gib_max: float
    """Expected peak of the fullest rank, GiB."""
    memory_gib_low: float
    """Lower end of its 80% interval."""
    memory_gib_high: float
    """Upper end, the one that the verdict reads."""
    memory_gib_usable: float
    """What the driver shows of a device."""
    memory_kind: str
    """How these bytes are counted."""
    memory_gib_by_kind: Mapping[str, float] = field(default_factory=dict)
    """allocated, reserved, nvidia-smi (resident memory alone on CPUs) -> the same peak by each way of counting, GiB."""
    host_gib_per_node: Mapping[str, float] = field(default_factory=dict)
    """Phase -> what the fullest node's host holds of the run, GiB: offloaded states and copies of checkpoints; 0 left out."""
    host_gib_usable: float | None = None
    """The host's memory; null = unknown."""
    verdict: Verdict
    """no: expected > usable; risky: upper > usable; ok otherwise."""
    parts: Parts
    """Where the time goes."""
    stages: tuple[StagePrediction, ...]
    """By position in the pipeline."""
    pairwise_error: float
    """Two layouts of this problem whose predicted times differ by a smaller share are a tie."""
    basis: Mapping[str, float]
    """measured, calibrated, table -> share of step_s that rests on each; they sum to 1."""
    worth_measuring: tuple[str, ...] = ()
    """Keys of operations and links whose measurement would narrow this most."""


USUAL_ORDER = "usual order"
"""Note of the alternative that is the choice itself in the usual rank order."""
NO_CANDIDATE = "today's layout is no candidate: "
"""How the restriction of a certificate begins that says why today's layout could not be chosen."""


class CertificateStatus(StrEnum):
    """What the solver proved for J."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the outer space that was looked into, with its bounds."""

    cell: str
    """Degrees of the cell, as layout text."""
    bound_s: float
    """No plan of this cell has a smaller J."""
    simulated_bound_s: float
    """No plan of this cell has a smaller simulated time."""
    objective_s: float | None = None
    """Best J of the cell; null where nothing below its siblings' best J, or nothing at all, fits."""
    reason: str
    """Why it is out, or 'chosen'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof, in numbers."""

    status: CertificateStatus
    """optimal: gap_objective is 0 up to the solver's tolerance."""
    objective_s: float
    """J*, the least J found."""
    bound_s: float
    """No plan of the space has a smaller J."""
    gap_objective: float | None
    """1 - bound/J*; null where the solver gives no bound."""
    objective_of_choice_s: float
    """J of the plan chosen: of those within δ of J*, the simplest within 2% of the least simulated time."""
    simulated_s: float
    """S of the plan chosen."""
    gap_simulated: float
    """1 - min R over all cells / S."""
    least_bound_s: float
    """min R: no plan of the space has a smaller simulated time."""
    least_bound_cell: str
    """The cell that sets it, as layout text."""
    num_cells: int
    """Cells of the space, each option counted."""
    limit_s: float
    """Cells whose bound is above this were left closed, and those whose bound is no better than a sibling's best J."""
    cells: tuple[Cell, ...]
    """The cells that were looked into. The bounds of the others follow from the request: `explain --certificate`."""
    worlds: tuple[int, ...]
    """Numbers of ranks that were searched."""
    at_risk: bool = False
    """No plan keeps the margin of memory: the space is that of plans that fit on expectation."""
    orders_below_s: tuple[float, ...] | None = field(default=None, metadata=UNSAID)
    """[J, R]: of cells in other rank orders than the usual one, those were searched that may have a plan with J up to the one or
    R below the other; absent = no other order was looked at."""
    seconds: float
    """Time of the search."""
    solver: str
    """Which solver decided."""
    restrictions: tuple[str, ...]
    """What was not in the space, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan, which can be written out like the choice."""

    decision: Decision
    """What it would be."""
    step_s: float
    """Predicted seconds."""
    memory_gib_max: float
    """Predicted peak of its fullest rank."""
    verdict: Verdict
    """Does it fit?"""
    note: str
    """tie, baseline, current, or what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a plan comes from."""

    decision_sha256: str
    """Hash of the decision; another one means that it was edited by hand."""
    meshwright_version: str
    """Version that made it."""
    calibration: str
    """Name of the calibration, with the hash of its file."""
    versions: Mapping[str, str]
    """Packages that took part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout with stages, ranks, collectives, predictions and proof."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    request: PlanRequest
    """What was asked."""
    decision: Decision
    """What was decided."""
    predicted: Prediction | None
    """What is promised; null after an edit by hand."""
    certificate: Certificate | None
    """The proof; null after an edit by hand."""
    alternatives: tuple[Alternative, ...] = ()
    """Ties, the baseline, today's layout, and the runners-up."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """What was not said and how it was taken."""
    provenance: Provenance
    """Where it comes from."""

    def __post_init__(self) -> None:
        if self.decision.num_blocks != self.request.model.num_blocks:
            raise RecordError(
                f"the stages cover {self.decision.num_blocks} blocks, but model {self.request.model.name!r} has "
                f"{self.request.model.num_blocks} (0 embedding, 1..{self.request.model.num_layers} layers, then norm and head)"
            )
        self._refuse_strange_pools()
        if self.decision.layout.world > self.request.cluster.num_gpus:
            raise RecordError(
                f"the layout needs {self.decision.layout.world} ranks, but cluster {self.request.cluster.name!r} has "
                f"{self.request.cluster.num_gpus} GPUs"
            )

    def _refuse_strange_pools(self) -> None:
        cluster, layout = self.request.cluster, self.decision.layout
        devices = {stage.device: stage.pool for stage in self.decision.stages}
        if len(cluster.pools) == 1:
            if {*devices.values()} - {None, 0}:
                raise RecordError(f"a stage names a pool, but cluster {cluster.name!r} has one kind of nodes")
            return
        for number, pool in enumerate(cluster.pools):
            needed = [*devices.values()].count(number) * layout.world // layout.pp
            if needed > pool.num_gpus:
                raise RecordError(f"the stages of pool {number} need {needed} GPUs, but it has {pool.num_gpus}")
        strange = next((pool for pool in devices.values() if pool not in range(len(cluster.pools))), 0)
        if strange != 0:
            raise RecordError(
                f"a stage's pool is {strange}, but cluster {cluster.name!r} has the pools 0..{len(cluster.pools) - 1}; "
                "each stage names one of them"
            )

    @property
    def edited(self) -> bool:
        """The decision is no longer the one that was predicted and proved."""
        return self.decision.sha256 != self.provenance.decision_sha256


def load_plan(path: Any) -> Plan:
    """The plan in a file; where the decision was edited by hand, without the prediction and the certificate."""
    return _without_old_promises(load(Plan, path))


def plan_of(document: Any, source: str) -> Plan:
    """As `load_plan`, of a document that was read already; `source` (a file's name) leads every error."""
    try:
        return _without_old_promises(from_json(Plan, document))
    except RecordError as error:
        raise RecordError(f"{source}: {error}") from None


def _without_old_promises(plan: Plan) -> Plan:
    return replace(plan, predicted=None, certificate=None) if plan.edited else plan
