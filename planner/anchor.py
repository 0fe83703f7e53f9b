"""From a plan for many GPUs to the run on few that says most of it.

What people can measure before a large run is one node. The reduced plan keeps what decides how long a kernel takes and how
much it holds (sequence, micro-batch, zero, recompute, experts of a rank, layers of a device) and gives up copies: data
parallelism first, then the pipeline, then experts, the sequence's parts and tensor parallelism. A kind of parallelism that
the plan has is kept at degree 2 while there are GPUs for it, since what is not there at all cannot be measured.

What is then measured goes through `meshwright compare small.json measurement.json --fit calibration.json` into a
calibration; `meshwright predict plan.json --calibration calibration.json` says what of the full plan rests on it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

from cost_models.calibrations import identity
from cost_models.law_terms import divisors
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    Calibration,
    Cluster,
    Decision,
    Gather,
    Layout,
    Model,
    Plan,
    PlanRequest,
    Pool,
    Provenance,
    Ranks,
    Schedule,
    Stage,
    Verdict,
    to_json,
)
from cost_models.records.layout import STAGES
from cost_models.schedules import devices_of_stages
from planner.advice import problem_of
from planner.decisions import decision_of_stages, refuse_illegal
from planner.errors import InfeasibleError, InputError
from planner.predict import predict
from planner.rests_on import Term, rests_on

ROUNDS = 4
"""Micro-batches for each stage of the reduced pipeline: fill and drain are a fifth of the step, and the update is seen too."""
RUNS_HERE = "torch"
"""The runtime whose plans `run` makes true; for others the reduced run is a request, which says what to configure there."""
LEAST_SENSITIVITY = 0.005
"""Share of the reduced run's time from which it says something of a coefficient: repeats of a run differ by more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One thing of which the reduced run has less."""

    name: str
    """A degree, or layers, experts, micro-batches, sequences."""
    full: int
    """In the plan."""
    small: int
    """In the reduced run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A reduced run and what it says of the full one."""

    plan: Plan
    """The reduced plan, predicted; it has no certificate, for nothing was searched."""
    reductions: tuple[Reduction, ...]
    """What it has less of."""
    seen: tuple[Term, ...]
    """What the full plan's time rests on and the reduced run measures."""
    unseen: tuple[Term, ...]
    """What stays as it is: no run of this size says anything of it."""

    @property
    def document(self) -> dict[str, Any]:
        """As JSON data; `plan` where `run` takes it, else `request`."""
        layout = self.plan.decision.layout
        small = {"plan": to_json(self.plan)} if self.is_run_here else {"request": request_of(self.plan)}
        return {
            "layout": str(layout),
            "gpus": layout.world,
            **small,
            "reduced": [to_json(one) for one in self.reductions],
            "measured": [to_json(term) for term in self.seen],
            "stays": [to_json(term) for term in self.unseen],
        }

    @property
    def is_run_here(self) -> bool:
        """`meshwright run` takes the plan."""
        return self.plan.decision.runtime == RUNS_HERE


def anchor(plan: Plan, gpus: int, calibration: Calibration, *, version: str = "0") -> Anchor:
    """The run on at most `gpus` GPUs of the plan's kind that says most of the plan.

    Raises InputError where there are not fewer GPUs than the plan has, or too few for what cannot be given up;
    InfeasibleError where not even one layer fits.
    """
    full = plan.decision
    if not 1 <= gpus < full.layout.world:
        raise InputError(
            f"--anchor {gpus}: the plan has {full.layout.world} ranks; give a number from 1 to {full.layout.world - 1}, or "
            "measure the plan itself"
        )
    if plan.request.model.layer_groups:
        raise InputError(
            f"--anchor {gpus}: model {plan.request.model.name!r} is a chain of unlike layers (layer_groups), and fewer of them "
            "are another model; measure the plan itself, or anchor the plan of one of its parts"
        )
    layout = reduced_layout(full.layout, gpus)
    most = max(1, _layers_of_device(full) // layout.vpp)
    for per_stage in range(most, 0, -1):
        problem = _reduced_problem(plan, layout, gpus, per_stage, calibration)
        refuse_illegal(problem, layout)
        decision = _decision(problem, layout, full, per_stage)
        predicted = predict(problem, decision)
        if predicted.verdict is Verdict.OK or (per_stage == 1 and predicted.verdict is Verdict.RISKY):
            break
    else:
        raise InfeasibleError(
            f"one layer a stage of {layout} is expected to take {predicted.memory_gib_max:.1f} GiB, and "
            f"{predicted.memory_gib_usable:.1f} GiB are usable; give more GPUs than {gpus}"
        )
    small = Plan(
        request=PlanRequest(
            model=problem.model, cluster=problem.cluster, workload=problem.workload, runtime=problem.runtime
        ),
        decision=decision,
        predicted=predicted,
        certificate=None,
        defaults={"anchor": f"a reduced run of plan {full.sha256[:12]}: {full.layout}"},
        provenance=Provenance(
            decision_sha256=decision.sha256,
            meshwright_version=version,
            calibration=identity(calibration),
            versions=plan.provenance.versions,
        ),
    )
    measured = {term.name for term in rests_on(problem, decision) if term.share >= LEAST_SENSITIVITY}
    terms = rests_on(problem_of(plan.request, calibration), full)
    return Anchor(
        plan=small,
        reductions=tuple(_reductions(plan, small)),
        seen=tuple(term for term in terms if term.name in measured),
        unseen=tuple(term for term in terms if term.name not in measured),
    )


# Degrees -------------------------------------------------------------------------------------------------------------

_DEGREES = ("tp", "cp", "ep", "dp_shard", "dp_replicate", "pp")
"""What is kept longest first."""
_KINDS = ("tp", "cp", "ep")
"""Parallelism whose collectives stand between the layers' kernels: kept at 2 before another is kept at more."""


def reduced_layout(full: Layout, gpus: int) -> Layout:
    """The layout of the reduced run: the degrees of most worth whose product is at most `gpus`.

    Of all divisors of the plan's degrees those are taken that keep, in this order: what zero divides over; tensor, sequence
    and expert parallelism at all; then tp, cp, ep, dp_shard, dp_replicate and last pp as large as may be.
    """
    best = max(_legal_degrees(full, gpus), key=lambda one: _worth(full, one))
    divided, piped = best["dp_shard"] * best["cp"] > 1, best["pp"] > 1
    return Layout(
        **best,
        vpp=full.vpp if piped else 1,
        mbs=full.mbs,
        zero=full.zero if divided else 0,
        gather=full.gather if divided else Gather.STEP,
        schedule=full.schedule if piped else Schedule.ONE_F_ONE_B,
        recompute=full.recompute,
    )


def _legal_degrees(full: Layout, gpus: int) -> Iterator[dict[str, int]]:
    """All degrees that divide the plan's, for at most `gpus` ranks; experts on whole parts of dp·cp·tp."""
    for degrees in product(*(divisors(getattr(full, name)) for name in _DEGREES)):
        one = dict(zip(_DEGREES, degrees, strict=True))
        ranks = one["tp"] * one["cp"] * one["dp_shard"] * one["dp_replicate"]
        one["etp"] = math.gcd(full.etp, one["tp"])
        if ranks * one["pp"] <= gpus and ranks % (one["ep"] * one["etp"]) == 0:
            yield one


def _worth(full: Layout, one: Mapping[str, int]) -> tuple[int, ...]:
    divides = full.zero == 0 or one["dp_shard"] * one["cp"] > 1
    kinds = sum(one[name] > 1 for name in _KINDS)
    return (int(divides), kinds, *(one[name] for name in _DEGREES))


def on_hand(cluster: Cluster, gpus: int) -> Cluster:
    """`gpus` GPUs of the cluster's first pool: a part of one node, or as many whole nodes."""
    kind = cluster.pools[0].kind
    if gpus < kind.gpus_per_node:
        nics = max(1, kind.num_nics * gpus // kind.gpus_per_node)
        kind = replace(kind, gpus_per_node=gpus, num_nics=nics, domain_nodes=1)
    nodes = gpus // kind.gpus_per_node
    kind = replace(kind, domain_nodes=min(kind.domain_nodes, nodes))
    name = f"{kind.device.name}x{nodes * kind.gpus_per_node}"
    return replace(cluster, name=name, pools=(Pool(kind=kind, num_nodes=nodes),), exceptions=())


# The reduced problem -------------------------------------------------------------------------------------------------


def _layers_of_device(decision: Decision) -> int:
    """Layers that the device with most of them holds."""
    counts = [0] * decision.layout.pp
    for stage in decision.stages:
        counts[stage.device] += sum(stage.recompute.values())
    return max(counts)


def _reduced_problem(plan: Plan, layout: Layout, gpus: int, per_stage: int, calibration: Calibration) -> Problem:
    full = plan.decision
    cluster = on_hand(plan.request.cluster, gpus)
    micro = min(full.num_micro_batches, ROUNDS * layout.pp)
    return Problem(
        model=reduced_model(plan.request.model, per_stage * layout.num_virtual_stages, full.layout.ep, layout.ep),
        cluster=cluster,
        workload=replace(full.workload, gbs=layout.dp * layout.mbs * micro),
        runtime=plan.request.runtime,
        calibration=calibration,
        memory_kind=memory_kind_of(cluster),
    )


def reduced_model(model: Model, num_layers: int, full_ep: int, ep: int) -> Model:
    """The model with fewer layers, both kinds of them where it has both, and as many experts on each rank."""
    num_layers = min(num_layers, model.num_layers)
    moe = model.moe
    if moe is not None:
        experts = moe.num_experts // full_ep * ep
        dense = round(moe.num_dense_layers * num_layers / model.num_layers)
        if 0 < moe.num_dense_layers < model.num_layers and num_layers > 1:
            dense = min(max(dense, 1), num_layers - 1)
        moe = replace(moe, num_experts=experts, top_k=min(moe.top_k, experts), num_dense_layers=dense)
    name = f"{model.name}-{num_layers}-of-{model.num_layers}-layers"
    return replace(model, name=name, num_layers=num_layers, moe=moe)


def _decision(problem: Problem, layout: Layout, full: Decision, per_stage: int) -> Decision:
    """As many layers on every virtual stage, recomputed as in the full plan's stage with most layers, in proportion."""
    per_stage = min(per_stage, problem.model.num_layers // layout.num_virtual_stages)
    fullest = max(full.stages, key=lambda stage: sum(stage.recompute.values()))
    recompute = in_proportion(fullest.recompute, per_stage)
    stages = even_stages(layout, per_stage, recompute)
    kind = next(iter(recompute)) if len(recompute) == 1 else STAGES
    found = decision_of_stages(problem, replace(layout, recompute=kind), stages)
    return replace(found, ranks=Ranks(order=full.ranks.order))


def even_stages(layout: Layout, per_stage: int, recompute: Mapping[str, int]) -> tuple[Stage, ...]:
    """As many layers on every virtual stage, recomputed alike; the embedding in the first, the head in the last."""
    count = layout.num_virtual_stages
    blocks = [per_stage + (number == 0) + (number == count - 1) for number in range(count)]
    edges = [0, *accumulate(blocks)]
    devices = devices_of_stages(layout.schedule, layout.pp, layout.vpp)
    return tuple(
        Stage(virtual=number, device=int(devices[number]), blocks=(first, end - 1), recompute=recompute)
        for number, (first, end) in enumerate(pairwise(edges))
    )


def in_proportion(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """Whole counts that sum to `total`, in the proportion of `counts`, the largest remainders rounded up."""
    of = sum(counts.values())
    exact = {kind: count * total / of for kind, count in counts.items()}
    found = {kind: int(share) for kind, share in exact.items()}
    for kind in sorted(exact, key=lambda one: found[one] - exact[one])[: total - sum(found.values())]:
        found[kind] += 1
    return {kind: count for kind, count in found.items() if count}


def _reductions(plan: Plan, small: Plan) -> Iterator[Reduction]:
    full, less = plan.decision, small.decision
    pairs = [(name, getattr(full.layout, name), getattr(less.layout, name)) for name in (*_DEGREES, "vpp", "zero")]
    pairs.append(("layers", plan.request.model.num_layers, small.request.model.num_layers))
    if plan.request.model.moe is not None and small.request.model.moe is not None:
        pairs.append(("experts", plan.request.model.moe.num_experts, small.request.model.moe.num_experts))
    pairs.append(("micro-batches", full.num_micro_batches, less.num_micro_batches))
    pairs.append(("sequences of a step", full.workload.gbs, less.workload.gbs))
    for name, before, after in pairs:
        if before != after:
            yield Reduction(name=name, full=before, small=after)


def request_of(plan: Plan) -> dict[str, Any]:
    """The reduced run as a request file: what to configure in the plan's own framework, and what `predict` takes."""
    layout, workload = plan.decision.layout, plan.decision.workload
    counts: Counter[str] = Counter()
    for stage in plan.decision.stages:
        counts.update(stage.recompute)
    common = counts.most_common(1)[0][0]
    return {
        "model": to_json(plan.request.model),
        "cluster": to_json(plan.request.cluster),
        "workload": {
            "seq": workload.seq,
            "gbs": workload.gbs,
            "precision": workload.precision.value,
            "optimizer": workload.optimizer.value,
        },
        "runtime": plan.decision.runtime,
        "layout": str(replace(layout, recompute=common)),
    }
