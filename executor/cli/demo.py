"""The main job on this machine: measure it, plan for it, run what was planned and other layouts, and compare.

For each number of ranks: one measuring session (operations of the model and links, with as many busy processes and threads
as the run will have), one plan, and one torchrun that runs the chosen layout and others, a step of each in turn.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from cost_models.calibrations import shipped
from cost_models.fit import fit
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    Calibration,
    Decision,
    Layout,
    Measurements,
    Model,
    Plan,
    Precision,
    Runtime,
    Verdict,
    Workload,
    load,
    normalised,
    print_layout,
    save,
)
from cost_models.records.codec import make_folder
from executor.cli.arguments import installed_version
from executor.cli.bench_job import LAYER, Job
from executor.cli.outcome import Outcome
from executor.cli.ranks import ranks_here
from executor.cli.running import started_here
from executor.settings import REFERENCE_KEY, Settings
from planner.compare import compare, ranking
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.plan import make_plan
from planner.predict import predict, simulated
from planner.profiling.blocks import Shapes, block_keys, keys_of
from planner.profiling.clock import shares_cores, threads_per_rank
from planner.profiling.local import measured_cluster
from planner.profiling.session import Request
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime
from planner.report.plots import comparison_plot
from planner.report.tables import layouts_table
from planner.report.timeline import write_timeline

WORLDS = (2, 4)
"""Numbers of ranks."""
MODEL = Model(
    name="demo-llama-7m",
    num_layers=8,
    hidden=256,
    ffn=768,
    heads=8,
    kv_heads=4,
    head_dim=32,
    vocab=2048,
)
"""Small enough for a step of about a second on two cores, large enough for its products to outweigh Python."""
WORKLOAD = Workload(seq=256, gbs=8, precision=Precision.FP32)
"""8 sequences: every layout below finds at least one micro-batch a rank, and pipelines of one copy find eight."""
PIN = "mbs<=2, recompute=none"
"""Micro-batches that were profiled; activations are no concern at this size."""
MICRO_BATCHES = (1, 2)
"""Sizes that are profiled."""
STEPS = 5
"""Steps of each layout that count."""
MOST_LAYOUTS = {2: 5, 4: 6}
"""Layouts that are run, by number of ranks: the chosen one, and the best of other families."""
NOTABLE_SLOWDOWN = 0.1
"""Drift of the machine between profile and run that is told beside the errors."""
TIMEOUT_S = 600.0
"""Of each session and each run, for machines that do other work too: on two idle cores the whole takes under five minutes."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was found for one number of ranks."""

    ranks: int
    """How many."""
    calibration: Calibration
    """Fitted on the session."""
    plans: tuple[Plan, ...]
    """The choice first, then the other layouts."""
    runs: Measurements
    """Of all of them."""
    document: dict[str, Any]
    """Rows and order, as `layouts_table` prints them."""


def demo(out: Path, progress: Progress) -> Outcome:
    """The whole job; leaves its files in the folder `out`. Exit code 0 where it ran to the end, whatever the errors are."""
    started = time.monotonic()
    make_folder(out)
    for stale in out.glob("plan-*.json"):
        stale.unlink()  # another demo's layouts would be taken for this one's

    def say(text: str) -> None:
        progress(f"[{time.monotonic() - started:5.1f} s] {text}")

    runtime = read_runtime("torch")
    worlds = [one_world(ranks, out, runtime, say) for ranks in WORLDS]
    pictures = [_picture(world, out) for world in worlds]
    document = {
        "model": MODEL.name,
        "num_params": MODEL.num_params,
        "worlds": [world.document for world in worlds],
        "files": sorted(str(path) for path in [*out.glob("*.json"), *pictures]),
        "seconds": time.monotonic() - started,
    }
    return Outcome(document=document, text=lambda: demo_text(document))


def one_world(ranks: int, out: Path, runtime: Runtime, say: Progress) -> World:
    """Measure, plan, run and compare with `ranks` processes."""
    say(f"{ranks} ranks: measuring this machine")
    taken = _session(ranks, out, say)
    cluster = measured_cluster(ranks, taken.measurements)
    problem = Problem(
        model=MODEL,
        cluster=cluster,
        workload=WORKLOAD,
        runtime=runtime,
        calibration=shipped(),
        memory_kind=memory_kind_of(cluster),
    )
    calibration = fit(problem, taken.measurements, name=f"this machine, {ranks} ranks", date=date.today().isoformat())
    save(cluster, out / f"cluster-{ranks}.json")
    save(calibration, out / f"calibration-{ranks}.json")
    say(f"{ranks} ranks: planning")
    chosen = make_plan(
        CompleteRequest(
            model=MODEL, cluster=cluster, workload=WORKLOAD, runtime=runtime, layout=None, pin=PIN, defaults={}
        ),
        calibration=calibration,
        version=installed_version(),
    )
    save(chosen, out / f"plan-{ranks}.json")
    problem = replace(problem, calibration=calibration)
    plans = (chosen, *others(problem, chosen, MOST_LAYOUTS[ranks] - 1))
    _timeline(problem, chosen, out / f"timeline-{ranks}.json")
    say(f"{ranks} ranks: running {len(plans)} layouts, a step of each in turn")
    runs = _run(ranks, plans, out, say)
    document = world_document(ranks, plans, runs) | {
        "slowdown": slowdown(taken, runs),
        "shares_cores": shares_cores(ranks, threads_per_rank(ranks)),
    }
    return World(ranks=ranks, calibration=calibration, plans=plans, runs=runs, document=document)


# Measuring -----------------------------------------------------------------------------------------------------------


def operations_of(ranks: int) -> tuple[str, ...]:
    """Keys that are timed: products and attention of one sequence, whole blocks of every size of micro-batch."""
    degrees = tuple(degree for degree in (1, 2, 4) if degree <= ranks)
    keys = dict.fromkeys((REFERENCE_KEY, *keys_of(MODEL, WORKLOAD, Shapes(tp=degrees, mbs=MICRO_BATCHES[:1]))))
    for tp in degrees:
        for mbs in MICRO_BATCHES:
            keys |= dict.fromkeys(block_keys(MODEL, WORKLOAD, tp, mbs))
    return tuple(keys)


def _session(ranks: int, out: Path, say: Progress) -> Measurements:
    folder = _fresh(out / f"session-{ranks}")
    request = Request(
        operations=operations_of(ranks),
        group_sizes=tuple(size for size in WORLDS if size <= ranks),
        ranks=ranks,
        layer=LAYER,
        timeout_s=TIMEOUT_S,
    )
    save(Job(session=request, model=MODEL, seq=WORKLOAD.seq, mbs=MICRO_BATCHES[1]), folder / "bench.json")
    ranks_here(
        "executor.cli.bench",
        folder,
        num_ranks=ranks,
        timeout_s=TIMEOUT_S,
        progress=lambda line: say(f"{ranks} ranks: {line}"),
        what=f"measuring this machine on {ranks} ranks",
    )
    return load(Measurements, folder / "measurements.json")


def _fresh(folder: Path) -> Path:
    """The folder, empty: what a former demo left would be taken for this one's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _run(ranks: int, plans: Sequence[Plan], out: Path, say: Progress) -> Measurements:
    runs = started_here(
        list(plans),
        Settings(steps=STEPS, timeout_s=TIMEOUT_S),
        timeout_s=TIMEOUT_S,
        progress=lambda text: say(f"{ranks} ranks: {text.strip()}"),
    )
    save(runs, out / f"measurements-{ranks}.json")
    for plan in plans[1:]:
        save(plan, out / f"plan-{ranks}-{short(plan.decision.layout).replace(' ', '-')}.json")
    return runs


# Layouts -------------------------------------------------------------------------------------------------------------


def families(ranks: int) -> tuple[dict[str, Any], ...]:
    """Ways to use all ranks along one axis or two, as what a layout says beside its micro-batches."""
    single: list[dict[str, Any]] = [
        {"dp": ranks},
        {"dp": ranks, "zero": 3},
        {"tp": ranks},
        {"pp": ranks},
        {"dp": ranks, "zero": 2},
    ]
    if ranks < 4:
        return tuple(single)
    half = ranks // 2
    return (*single[:4], {"dp": half, "tp": 2}, {"dp": half, "pp": 2})


def others(problem: Problem, chosen: Plan, most: int) -> tuple[Plan, ...]:
    """The best predicted layout of each family but the chosen one's, in a fixed order; legal, and expected to fit."""
    found = []
    taken = _family(chosen.decision.layout)
    for family in families(chosen.decision.layout.world):
        candidates = list(_predicted(problem, chosen, family))
        if candidates and _family(candidates[0].decision.layout) != taken:
            found.append(min(candidates, key=lambda plan: plan.predicted.step_s if plan.predicted else float("inf")))
    return tuple(found[:most])


def _family(layout: Layout) -> tuple[int, ...]:
    return (layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.zero)


def _predicted(problem: Problem, chosen: Plan, family: dict[str, Any]) -> Iterable[Plan]:
    for mbs in MICRO_BATCHES:
        try:
            decision = decision_of_layout(problem, normalised(**family, mbs=mbs))
        except InputError:
            continue  # illegal at this size: too few micro-batches for a pipeline, say
        predicted = predict(problem, decision)
        if predicted.verdict is not Verdict.NO:
            yield plan_of(chosen, decision, replace(predicted))


def plan_of(chosen: Plan, decision: Decision, predicted: Any) -> Plan:
    """Another layout of the chosen plan's request, with its own promise and no proof."""
    return replace(
        chosen,
        decision=decision,
        predicted=predicted,
        certificate=None,
        alternatives=(),
        provenance=replace(chosen.provenance, decision_sha256=decision.sha256),
    )


# What came of it -----------------------------------------------------------------------------------------------------


def world_document(ranks: int, plans: Sequence[Plan], runs: Measurements) -> dict[str, Any]:
    """Rows by layout, the fastest promised first, and whether that order was the measured one."""
    rows = sorted((_row(plan, runs, chosen=plan is plans[0]) for plan in plans), key=lambda row: row["predicted_s"])
    assert plans[0].predicted is not None
    order = ranking(
        {row["layout"]: row["predicted_s"] for row in rows},
        {row["layout"]: row["measured_s"] for row in rows},
        plans[0].predicted.pairwise_error,
    )
    return {"ranks": ranks, "machine": runs.measurements[0].machine, "layouts": rows, "order": order}


def slowdown(profile: Measurements, runs: Measurements) -> float:
    """How many times longer the reference product took during the runs than during the profile: 1 on a machine left alone."""
    then, now = (
        next(median(one.samples_s) for one in found.measurements if one.key == REFERENCE_KEY)
        for found in (profile, runs)
    )
    return now / then


def _row(plan: Plan, runs: Measurements, *, chosen: bool) -> dict[str, Any]:
    found = compare(plan, runs)
    step = next(row for row in found["rows"] if row["phase"] == "step")
    memory: dict[str, Any] = next((row for row in found["memory"] if row["ranks"] == "all"), {})
    return {
        "layout": short(plan.decision.layout),
        "text": print_layout(plan.decision.layout),
        "chosen": chosen,
        **{key: step[key] for key in step if key not in ("phase", "samples")},
        "predicted_memory_gib": memory.get("predicted_gib"),
        "measured_memory_gib": memory.get("measured_gib"),
        "memory_error": memory.get("error"),
        "picture": found["picture"] | {"layout": short(plan.decision.layout)},
    }


def short(layout: Layout) -> str:
    """The layout without the degrees that are 1: what people say."""
    said = [f"dp{layout.dp}"] if layout.dp > 1 else []
    said += [f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "vpp") if getattr(layout, axis) > 1]
    said += [f"zero{layout.zero}"] if layout.zero else []
    return " ".join([*said, f"mbs{layout.mbs}", *([f"{layout.schedule}"] if layout.pp > 1 else [])])


def _timeline(problem: Problem, plan: Plan, path: Path) -> None:
    step = simulated(problem, plan.decision)
    tails = {"gradient synchronisation": step.parts.sync_s, "optimizer": step.parts.optimizer_s}
    write_timeline(path, step.simulation, {**tails, "constant": step.parts.constant_s})


def _picture(world: World, out: Path) -> Path:
    rows = [row["picture"] for row in world.document["layouts"]]
    title = f"Predicted and measured, {world.ranks} ranks"
    return comparison_plot(rows, out / f"predicted-and-measured-{world.ranks}.png", title=title)


def demo_text(document: dict[str, Any]) -> str:
    """The tables, and where the files are."""
    blocks = [f"{document['model']}: {document['num_params']:,} parameters, {WORKLOAD.gbs} sequences of {WORKLOAD.seq}"]
    for world in document["worlds"]:
        told = f"{world['ranks']} ranks on {world['machine']}\n{layouts_table(world)}"
        if world["shares_cores"]:
            told += (
                "\nnote: these ranks share cores. A rank that waits leaves its core to the others, so pipelines, which wait "
                "most, come out faster than promised: the promise counts on a device for each rank"
            )
        if abs(world["slowdown"] - 1) > NOTABLE_SLOWDOWN:
            told += (
                f"\nnote: while the layouts ran, this machine took {world['slowdown']:.2f} times as long for the same product "
                "as while it was profiled: other programs were busy then or now, and every error above has this in it"
            )
        blocks.append(told)
    files = "\n".join(f"  {path}" for path in document["files"])
    blocks.append(f"files (timelines open in ui.perfetto.dev):\n{files}")
    blocks.append(f"{document['seconds']:.0f} s in all")
    return "\n\n".join(blocks)
