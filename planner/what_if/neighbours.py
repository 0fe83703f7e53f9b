"""Layouts that differ from one by a single choice, each priced: which change helps most, and what each would cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_models.facts import facts_of_run
from cost_models.law_terms import divisors
from cost_models.laws import LAWS, finding, first_breach
from cost_models.problem import Problem
from cost_models.records import Gather, Layout, Prediction, Schedule, Verdict
from cost_models.records.layout import LEGAL_GATHER
from planner.decisions import decision_of_layout
from planner.predict import predict
from planner.search.walk import chunk_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One change of a layout, and what it would do."""

    change: str
    """In words, as `tp 4 -> 8`."""
    layout: Layout
    """The layout after it."""
    predicted: Prediction
    """What it would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One change of a layout that is not possible."""

    change: str
    """In words, as `tp 4 -> 8`."""
    layout: Layout
    """The layout after it."""
    code: str
    """The law that it breaks; PRICE where it cannot be priced."""
    message: str
    """In words."""


def neighbours(problem: Problem, layout: Layout) -> tuple[Neighbour, ...]:
    """All legal layouts on as many ranks that differ by one choice, priced, the fastest that fits first."""
    return tuple(sorted((one for one in judged(problem, layout) if isinstance(one, Neighbour)), key=by_fit_and_speed))


def by_fit_and_speed(neighbour: Neighbour) -> tuple[int, float]:
    """What fits before what may fit before what does not, and the faster first."""
    order = {Verdict.OK: 0, Verdict.RISKY: 1, Verdict.NO: 2}
    return order[neighbour.predicted.verdict], neighbour.predicted.step_s


def judged(problem: Problem, layout: Layout) -> Iterator[Neighbour | Refused]:
    """All layouts on as many ranks that differ by one choice: priced, or refused with the law."""
    for change, other in _changes(problem, layout):
        facts = facts_of_run(
            model=problem.model,
            workload=problem.workload,
            runtime=problem.runtime,
            layout=other,
            domain_size=problem.cluster.domain_size,
        )
        broken = first_breach(LAWS, facts, problem.runtime)
        if broken is not None:
            told = finding(broken, facts, problem.runtime)
            yield Refused(change=change, layout=other, code=told.code, message=told.message)
            continue
        try:
            predicted = predict(problem, decision_of_layout(problem, other))
        except ValueError as error:  # a schedule whose operation lists are not known, or more stages than blocks
            yield Refused(change=change, layout=other, code="PRICE", message=str(error).replace("\n", " "))
            continue
        yield Neighbour(change=change, layout=other, predicted=predicted)


def best_change(problem: Problem, layout: Layout, predicted: Prediction) -> Neighbour | None:
    """The single change that helps most: one that makes the layout fit, else the fastest that is beyond the model's error."""
    for neighbour in neighbours(problem, layout):
        better_fit = predicted.verdict is not Verdict.OK and neighbour.predicted.verdict is Verdict.OK
        faster = neighbour.predicted.step_s * (1 + predicted.pairwise_error) < predicted.step_s
        if better_fit or (faster and neighbour.predicted.verdict is Verdict.OK):
            return neighbour
    return None


def _changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    world = layout.world
    for axis in ("tp", "pp", "cp") if problem.runtime.context_parallel else ("tp", "pp"):
        now = getattr(layout, axis)
        for degree in divisors(world):
            others = layout.cp * layout.tp * layout.pp // now * degree
            if degree != now and world % others == 0:
                changed = _with_dp(layout, world // others, **{axis: degree})
                if changed is None:
                    continue
                beside = f"dp {layout.dp} -> {changed.dp}"
                if axis == "tp" and now > 1 and layout.etp == now:  # experts are divided as the layers are
                    changed, beside = replace(changed, etp=degree), f"{beside}, etp {now} -> {degree}"
                yield f"{axis} {now} -> {degree} ({beside})", changed
    for mbs in divisors(problem.workload.gbs // layout.dp) if problem.workload.gbs % layout.dp == 0 else ():
        if mbs != layout.mbs:
            yield f"mbs {layout.mbs} -> {mbs}", replace(layout, mbs=mbs)
    levels = problem.runtime.zero_levels_with_pp if layout.pp > 1 else problem.runtime.zero_levels
    for zero in levels:
        if zero != layout.zero and layout.dp > 1:
            gather = Gather(problem.runtime.zero2_gather if zero == 2 else LEGAL_GATHER[zero][0])
            split = (layout.dp, 1) if zero == 0 else (1, layout.dp)
            yield (
                f"zero {layout.zero} -> {zero}",
                replace(layout, zero=zero, gather=gather, dp_replicate=split[0], dp_shard=split[1]),
            )
    if layout.zero:
        for shard in divisors(layout.dp):
            if shard != layout.dp_shard and (shard > 1 or layout.cp > 1):
                yield (
                    f"dp_shard {layout.dp_shard} -> {shard} (dp_replicate {layout.dp_replicate} -> {layout.dp // shard})",
                    replace(layout, dp_shard=shard, dp_replicate=layout.dp // shard),
                )
    yield from _expert_changes(problem, layout)
    for kind in problem.recompute_kinds:
        if kind != layout.recompute:
            yield f"recompute {layout.recompute} -> {kind}", replace(layout, recompute=kind)
    yield from _schedule_changes(problem, layout)


def _expert_changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    moe = problem.model.moe
    if moe is None:
        return
    for ep in divisors(moe.num_experts) if problem.runtime.expert_parallel else ():
        if ep != layout.ep:
            yield f"ep {layout.ep} -> {ep}", replace(layout, ep=ep)
    for etp in sorted({1, layout.tp} - {layout.etp}):
        yield f"etp {layout.etp} -> {etp}", replace(layout, etp=etp)


def _schedule_changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    if layout.pp == 1:
        return
    for schedule in problem.runtime.schedules:
        for vpp in chunk_counts(schedule, problem.model.num_layers, layout.pp):
            if (schedule, vpp) != (layout.schedule, layout.vpp):
                now = f"{layout.schedule} vpp{layout.vpp}"
                yield f"{now} -> {schedule} vpp{vpp}", replace(layout, schedule=schedule, vpp=vpp)


def _with_dp(layout: Layout, dp: int, **degrees: int) -> Layout | None:
    """The layout with other degrees on as many ranks; None where its sharding cannot follow."""
    if layout.zero == 0:
        split = (dp, 1)
    elif dp % layout.dp_replicate == 0 and dp > layout.dp_replicate:
        split = (layout.dp_replicate, dp // layout.dp_replicate)
    else:
        split = (1, dp)
    if layout.zero and split[1] == 1 and degrees.get("cp", layout.cp) == 1:
        return None
    changed = replace(
        layout,
        dp_replicate=split[0],
        dp_shard=split[1],
        tp=degrees.get("tp", layout.tp),
        pp=degrees.get("pp", layout.pp),
        cp=degrees.get("cp", layout.cp),
    )
    return replace(changed, schedule=Schedule.ONE_F_ONE_B, vpp=1) if changed.pp == 1 else changed
