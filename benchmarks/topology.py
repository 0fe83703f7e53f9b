"""What topology is worth: data-parallel configurations and pipelines on a shaped network, predicted and measured in one run.

Two pairs of hosts, fast within and slow between. A live probe measures the links; the cost model prices each configuration with what
the probe found; then each runs in our executor, a step of each in turn. Needs root, Linux and iproute2.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from benchmarks.registry import benchmark
from benchmarks.testbed import plan_ranks_file, probe_ranks_file
from benchmarks.testbed.links import Links, two_pairs
from benchmarks.testbed.network import Network, network, unavailable
from cost_models.calibrations import shipped
from cost_models.collectives import Collective, collective_s, fabric
from cost_models.problem import RANK_ORDER, Problem
from cost_models.records import (
    Binding,
    Calibration,
    Cluster,
    CollectiveChoice,
    Decision,
    Device,
    Link,
    Model,
    NodeKind,
    Plan,
    PlanRequest,
    Pool,
    Precision,
    Provenance,
    Ranks,
    Workload,
    parse_layout,
    print_layout,
    save,
)
from planner.decisions import decision_of_layout
from planner.plan import make_plan
from planner.predict import predict
from planner.profiling.blocks import block_keys
from planner.profiling.pairs import robust_s
from planner.readers.clusters import read_cluster
from planner.readers.probes import calibration_with
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime

FAST_BITS_PER_S, SLOW_BITS_PER_S = 4e8, 4e7
"""Ten to one, as in a node of eight with one slow way out; slow enough for two cores that others use too to keep up with."""
STEPS = 3
WAIT_S = 600.0
"""For another testbed to end."""
MODEL = Model(
    name="topology-3m", num_layers=4, hidden=192, ffn=512, heads=4, kv_heads=2, head_dim=48, vocab=2048, gated_mlp=True
)
"""11 MiB of gradients: a second on the slow links, and little else."""
WORKLOAD = Workload(seq=16, gbs=4, precision=Precision.FP32)
REPLICAS_INSIDE = ("tp", "cp", "dp_replicate", "dp_shard", "pp")
"""Rank order that puts shards across the slow links."""


PICK, WORST = "the planner's choice", "the same, worst order of ranks"


def choice(algorithm: str, compression: str | None = None) -> CollectiveChoice:
    """A way to sum gradients that the executor must take."""
    return CollectiveChoice(algorithm=algorithm, binding=Binding.DECIDED, compression=compression)


CONFIGURATIONS: Mapping[str, tuple[str, tuple[str, ...], CollectiveChoice | None]] = {
    "DDP flat": ("dpr4 mbs1 zero0", RANK_ORDER, None),
    "DDP hierarchical": ("dpr4 mbs1 zero0", RANK_ORDER, choice("hierarchical")),
    "DDP hierarchical fp16": ("dpr4 mbs1 zero0", RANK_ORDER, choice("hierarchical", "fp16")),
    "HSDP, shards in fast pairs": ("dpr2 dps2 mbs1 zero3", RANK_ORDER, None),
    "HSDP, shards across slow links": ("dpr2 dps2 mbs1 zero3", REPLICAS_INSIDE, None),
    "ZeRO-2": ("dps4 mbs1 zero2", RANK_ORDER, None),
    "ZeRO-3": ("dps4 mbs1 zero3", RANK_ORDER, None),
}
"""Name -> layout, rank order, how gradients of replicas are summed."""


@benchmark("topology")
def topology(published: Path | None = None) -> Mapping[str, Any]:
    """Seven data-parallel configurations, the planner's choice and its worst order of ranks, predicted and measured."""
    return _unless_unavailable("topology", data_parallel)


@benchmark("pipelines")
def pipeline_schedules(published: Path | None = None) -> Mapping[str, Any]:
    """Three schedules on four stages, with fast links and with a slow one in the middle, predicted and measured."""
    return _unless_unavailable("pipelines", pipelines)


def _unless_unavailable(name: str, measure: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
    why_not = unavailable()
    if why_not is not None:
        return {"skipped": why_not, "text": f"{name}: skipped: {why_not}"}
    found = measure()
    return found | {"text": text(found)}


def data_parallel() -> dict[str, Any]:
    """The seven configurations, from the probe of the same network."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, network(_links(), wait_s=WAIT_S) as net:
        place = Path(folder)
        cluster, calibration = probe(net, place)
        problem = Problem(
            model=MODEL, cluster=cluster, workload=WORKLOAD, runtime=read_runtime("torch"), calibration=calibration
        )
        decisions = {name: decision_for(problem, *how) for name, how in CONFIGURATIONS.items()}
        picked = picked_by_planner(problem)
        decisions[PICK] = picked
        decisions[WORST] = worst_order(problem, picked)
        measured = run(net, place, {name: plan_of(problem, one) for name, one in decisions.items()}, STEPS)
    alone_s = robust_s(tuple(measured.pop("alone")))
    rows: list[dict[str, Any]] = [
        {
            "configuration": name,
            "predicted_s": alone_s + communication_s(problem, decision),
            "measured_s": robust_s(tuple(measured[name])),
            "samples_s": measured[name],
        }
        for name, decision in decisions.items()
    ]
    return {
        "fast_bits_per_s": FAST_BITS_PER_S,
        "slow_bits_per_s": SLOW_BITS_PER_S,
        "alone_s": alone_s,
        "rows": rows,
        "order_as_measured": same_order(rows),
        "picked": f"{print_layout(picked.layout)}, ranks {' '.join(picked.ranks.order)}",
        "gain_of_rank_order": _seconds(rows, WORST) / _seconds(rows, PICK),
        "best_allowed": min(
            (row for row in rows if "fp16" not in str(row["configuration"])), key=lambda row: float(row["measured_s"])
        )["configuration"],
    }


def picked_by_planner(problem: Problem) -> Decision:
    """What `plan` chooses on the probed cluster among data-parallel layouts."""
    request = CompleteRequest(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        layout=None,
        pin="tp=1, pp=1, mbs=1, recompute=none",
        defaults={},
    )
    return make_plan(request, calibration=problem.calibration).decision


def worst_order(problem: Problem, decision: Decision) -> Decision:
    """The same layout with the axes nested so that it is predicted to be slowest; only axes of more than one rank count."""
    axes = [axis for axis in RANK_ORDER if getattr(decision.layout, axis) > 1]
    rest = [axis for axis in RANK_ORDER if axis not in axes]
    orders = [
        replace(decision, ranks=replace(decision.ranks, order=(*rest[:2], *order, *rest[2:])))
        for order in permutations(axes)
    ]
    return max(orders, key=lambda one: predict(problem, one).step_s)


def _seconds(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return next(float(row["measured_s"]) for row in rows if row["configuration"] == name)


def same_order(rows: Sequence[Mapping[str, Any]], tie: float = 0.03) -> bool:
    """Does the predicted order hold in the measured times, pairs that are predicted within `tie` of one another left aside?"""
    return all(
        one["measured_s"] < other["measured_s"]
        for one in rows
        for other in rows
        if one["predicted_s"] * (1 + tie) < other["predicted_s"]
    )


PIPELINE_MODEL = Model(
    name="topology-pipeline",
    num_layers=8,
    hidden=512,
    ffn=64,
    heads=8,
    kv_heads=8,
    head_dim=64,
    vocab=64,
    gated_mlp=True,
)
"""256 KiB of activations between stages; its layers sleep."""
PIPELINE_WORKLOAD = Workload(seq=128, gbs=4, precision=Precision.FP32)
LAYER_S = (0.1, 0.2)
"""Seconds that a layer sleeps forwards and backwards."""
SCHEDULES = {
    "GPipe": "pp4 mbs1 zero0 sched=gpipe",
    "1F1B": "pp4 mbs1 zero0 sched=1f1b",
    "interleaved": "pp4 vpp2 mbs1 zero0 sched=interleaved",
}
FAST_STAGES_BITS_PER_S, SLOW_STAGES_BITS_PER_S = 4e8, 2e7


def pipelines() -> dict[str, Any]:
    """Three schedules on four stages whose compute is a sleep, all links fast, and slow between the second and the third stage."""
    rows = []
    for where, far in (("fast links", FAST_STAGES_BITS_PER_S), ("a slow link", SLOW_STAGES_BITS_PER_S)):
        problem = Problem(
            model=PIPELINE_MODEL,
            cluster=nominal_cluster(FAST_STAGES_BITS_PER_S, far),
            workload=PIPELINE_WORKLOAD,
            runtime=read_runtime("torch"),
            calibration=sleeping(shipped()),
        )
        decisions = {name: decision_of_layout(problem, parse_layout(layout)) for name, layout in SCHEDULES.items()}
        plans = {name: plan_of(problem, one) for name, one in decisions.items()}
        links = two_pairs(FAST_STAGES_BITS_PER_S, far)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, network(links, wait_s=WAIT_S) as net:
            measured = run(net, Path(folder), plans, STEPS, LAYER_S)
        rows += [
            {
                "configuration": f"{name}, {where}",
                "predicted_s": predict(problem, decision).step_s,
                "measured_s": robust_s(tuple(measured[name])),
                "samples_s": measured[name],
            }
            for name, decision in decisions.items()
        ]
    return {
        "layer_s": LAYER_S,
        "fast_bits_per_s": FAST_STAGES_BITS_PER_S,
        "slow_bits_per_s": SLOW_STAGES_BITS_PER_S,
        "rows": rows,
        "order_as_measured": same_order(rows),
    }


def nominal_cluster(near_bits_per_s: float, far_bits_per_s: float) -> Cluster:
    """The two pairs as a person would write them down: a pair is a node, each host has a link of its own to the others."""
    cpu = Device(
        name="cpu",
        family="cpu",
        memory_bytes=4 * 2**30,
        memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"fp32": 5e10},
        matmul_flops_per_s={"fp32": 5e10},
    )
    kind = NodeKind(
        name="pair",
        device=cpu,
        gpus_per_node=2,
        intra=Link(name="ethernet-1", bandwidth_bytes_per_s=near_bits_per_s / 8),
        nic=Link(name="ethernet-1", bandwidth_bytes_per_s=far_bits_per_s / 8),
        num_nics=2,
    )
    return Cluster(name="two pairs", pools=(Pool(kind=kind, num_nodes=2),))


def sleeping(calibration: Calibration) -> Calibration:
    """With layers that take what they sleep."""
    layers = [key for key in block_keys(PIPELINE_MODEL, PIPELINE_WORKLOAD, 1, 1) if key.startswith("layer/")]
    return replace(calibration, operations_s={**calibration.operations_s, **dict(zip(layers, LAYER_S, strict=True))})


def text(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"{found['fast_bits_per_s'] / 1e6:.0f} Mbit/s in pairs, {found['slow_bits_per_s'] / 1e6:.0f} between"]
    lines += [f"{'':34s}{'predicted':>10s}{'measured':>10s}{'error':>8s}"]
    for row in sorted(found["rows"], key=lambda row: row["measured_s"]):
        error = row["predicted_s"] / row["measured_s"] - 1
        lines.append(f"{row['configuration']:34s}{row['predicted_s']:8.3f} s{row['measured_s']:8.3f} s{error:+8.1%}")
    lines.append(f"predicted order {'holds' if found['order_as_measured'] else 'does NOT hold'}")
    if "picked" in found:
        best, gain = found["best_allowed"], found["gain_of_rank_order"]
        lines.append(f"the planner's choice: {found['picked']}")
        lines.append(f"the fastest measured that leaves the numbers as they are: {best}")
        lines.append(f"the choice's order of ranks against the worst one: {gain:.1f} times as fast")
    return "\n".join(lines)


def _links() -> Links:
    return two_pairs(FAST_BITS_PER_S, SLOW_BITS_PER_S)


def probe(net: Network, folder: Path) -> tuple[Cluster, Calibration]:
    """The network as the live probe finds it."""
    out = folder / "probe.json"
    net.run(probe_ranks_file(), [str(out), "10"], timeout_s=150)
    return read_cluster(str(out)), calibration_with(out, shipped())


def decision_for(
    problem: Problem, layout: str, order: tuple[str, ...], collective: CollectiveChoice | None
) -> Decision:
    """A configuration as the executor reads it."""
    decision = decision_of_layout(problem, parse_layout(layout))
    collectives = dict(decision.collectives)
    if collective is not None:
        collectives["dp_replicate"] = collective
    return replace(decision, ranks=Ranks(order=order), collectives=collectives)


def plan_of(problem: Problem, decision: Decision) -> Plan:
    """A decision as a plan's file."""
    return Plan(
        request=PlanRequest(
            model=problem.model, cluster=problem.cluster, workload=problem.workload, runtime=problem.runtime
        ),
        decision=decision,
        predicted=None,
        certificate=None,
        provenance=Provenance(
            decision_sha256=decision.sha256, meshwright_version="0", calibration=problem.calibration.name, versions={}
        ),
    )


def run(
    net: Network, folder: Path, plans: Mapping[str, Plan], steps: int, sleep: Sequence[float] | None = None
) -> dict[str, list[float]]:
    """Seconds of the slowest rank of each step of each plan."""
    names = {name: f"plan{number}" for number, name in enumerate(plans)}
    for name, plan in plans.items():
        save(plan, folder / f"{names[name]}.json")
    asked = {"plans": list(names.values()), "steps": steps, "sleep": sleep}
    (folder / "plans.json").write_text(json.dumps(asked), encoding="utf-8")
    net.run(plan_ranks_file(), [str(folder)], timeout_s=420)
    taken = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    return {name: taken[file] for name, file in (names | {"alone": "alone"}).items() if file in taken}


def communication_s(problem: Problem, decision: Decision) -> float:
    """Exposed communication of a step; of replicas whose sum is chosen, that sum."""
    chosen = decision.collectives.get("dp_replicate")
    if chosen is None or (chosen.algorithm == "default" and chosen.compression is None):
        return predict(problem, decision).parts.exposed_communication_s
    assert decision.layout.dp_replicate == decision.layout.world
    links = fabric(problem.cluster, problem.calibration)
    num_bytes = (4.0 if chosen.compression is None else 2.0) * problem.model.num_params
    return float(
        collective_s(links, Collective.ALL_REDUCE, num_bytes, decision.layout.world, 1, chosen.algorithm).total
    )
