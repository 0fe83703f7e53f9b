"""Why not another layout; two plans side by side; the proof in full."""

from typing import Any

from cost_models.calibrations import identity, shipped
from cost_models.facts import facts_of_run
from cost_models.laws import breaches
from cost_models.memory import memory_upper, usable_bytes
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    V_PLACED,
    Calibration,
    Decision,
    Layout,
    Plan,
    Prediction,
    RecordError,
    Severity,
    Verdict,
    normalised,
    parse_tokens,
    to_json,
)
from cost_models.units import GIB
from planner.decisions import decision_of, decision_of_layout
from planner.errors import InfeasibleError, InputError
from planner.predict import fullest_position, predict
from planner.readers.pins import Op, Pin, Pins, parse_pins, pins_of_layout
from planner.search.best_first import search
from planner.search.pooled import price
from planner.search.space import enumerate_cells
from planner.solver import preferred_solver
from planner.what_if.changes import Question
from planner.what_if.feasible import space_of
from planner.what_if.infeasible import nothing_fits
from planner.what_if.neighbours import neighbours

_PARTS = ("compute_s", "exposed_communication_s", "bubble_s", "optimizer_s", "other_s")


def why_not(plan: Plan, layout: str, calibration: Calibration | None = None) -> dict[str, Any]:
    """Why the plan is not `layout`, of which what is not said is free: illegal, does not fit, or slower, with numbers.

    Keys: layout, answer ("illegal", "does not fit", "slower", "tie", "chosen", "faster"), reasons, best, chosen, parts, memory,
    smallest_change, changes (every change that makes it fit, each solved again). Faster can be only what the plan's search was
    not to find: its pins exclude it, its time ended, or its schedule is not searched; `reasons` says which. Raises InputError
    where `layout` is not a layout's text.
    """
    pins = pins_of_layout(layout)
    if "schedule" in pins.fields and "pp" not in pins.fields:  # without a pipeline every schedule is the same
        pins = Pins(pins=(*pins.pins, Pin(field="pp", op=Op.AT_LEAST, values=(2,))))
    problem = problem_of_plan(plan, calibration)
    chosen = plan.predicted or predict(problem, plan.decision)
    answer: dict[str, Any] = {
        "layout": layout,
        "reasons": [],
        "best": None,
        "chosen": {"layout": str(plan.decision.layout), "step_s": chosen.step_s},
        "parts": [],
        "memory": None,
        "smallest_change": None,
        "changes": [],
    }
    question = Question(problem=problem, pins=pins, worlds=(plan.decision.layout.world,))
    try:
        space = enumerate_cells(
            model=problem.model,
            cluster=problem.cluster,
            workload=problem.workload,
            runtime=problem.runtime,
            pins=pins,
            worlds=(plan.decision.layout.world,),
        )
    except InfeasibleError as error:
        return answer | {"answer": "illegal", "reasons": _illegal(problem, layout, plan, str(error))}
    try:
        found = search(price(problem, space), solver=preferred_solver())
    except InfeasibleError:
        # of the layouts asked for, the one that overflows least; arrangements of a layout are one here
        layouts = {space.cells.layout(i, kind): None for i in range(len(space)) for kind in space.recompute_kinds}
        options = [decision_of_layout(problem, one) for one in layouts]
        return answer | _does_not_fit(question, min(options, key=lambda decision: _peak(problem, decision)))
    decision = decision_of(problem, found.chosen)
    return answer | _slower(problem, decision, plan, chosen)


def problem_of_plan(plan: Plan, calibration: Calibration | None = None) -> Problem:
    """The problem that a plan answers, with the runtime and workload of its decision.

    Raises InputError where `calibration` is not the one that the plan was made with: their seconds must not be compared.
    """
    calibration = calibration or shipped()
    if plan.predicted is not None and plan.provenance.calibration != identity(calibration):
        raise InputError(
            f"the plan was made with calibration {plan.provenance.calibration[:40]}..., not with {identity(calibration)[:40]}...; "
            "name the plan's own with --calibration, or make the plan again"
        )
    return Problem(
        model=plan.request.model,
        cluster=plan.request.cluster,
        workload=plan.decision.workload,
        runtime=plan.request.runtime,
        calibration=calibration,
        memory_kind=memory_kind_of(plan.request.cluster),
    )


def _illegal(problem: Problem, text: str, plan: Plan, enumerated: str) -> list[dict[str, Any]]:
    """The laws that the layout breaks with what it does not say taken from as little as possible; else what closed the space."""
    try:
        layout = _filled(text, plan.decision.layout.world)
    except RecordError as error:
        return [{"code": "LAYOUT", "message": str(error), "values": {}, "legal": {}}]
    facts = facts_of_run(
        model=problem.model,
        workload=problem.workload,
        runtime=problem.runtime,
        layout=layout,
        world=plan.decision.layout.world,
        domain_size=problem.cluster.domain_size,
    )
    found = [one for one in breaches(facts, problem.runtime)[0] if one.severity is Severity.ERROR]
    if not found:
        return [{"code": "SPACE", "message": enumerated, "values": {}, "legal": {}}]
    return [
        {"code": one.code, "message": one.message, "values": to_json(one.values), "legal": to_json(one.legal)}
        for one in found
    ]


def _filled(text: str, world: int) -> Layout:
    """A layout in part, with absent degrees 1 and absent dp the rest of the world."""
    said: dict[str, Any] = dict(parse_tokens(text))
    if "schedule" in said and "pp" not in said:  # the least pipeline
        said["pp"] = next((pp for pp in range(2, world + 1) if world % pp == 0), 1)
    if not {"dp", "dp_replicate", "dp_shard"} & set(said):
        said["dp"] = max(1, world // (said.get("tp", 1) * said.get("pp", 1) * said.get("cp", 1)))
    if said.get("schedule") in V_PLACED:
        said.setdefault("vpp", 2)
    return normalised(**said)


def _peak(problem: Problem, decision: Decision) -> float:
    """How full the fullest device is, for the size of its GPU."""
    fullest, where = fullest_position(problem, decision)
    return fullest.peak_bytes / max(usable_bytes(where), 1.0)


def _does_not_fit(question: Question, decision: Decision) -> dict[str, Any]:
    problem = question.problem
    fullest, where = fullest_position(problem, decision)
    usable = usable_bytes(where)
    # what fits on expectation, but not with its margin, is no plan either: then the upper end is what is over
    over = fullest.peak_bytes if fullest.peak_bytes > usable else memory_upper(problem, fullest.peak_bytes)
    fitting = next(
        (one for one in neighbours(problem, _one_recompute(decision)) if one.predicted.verdict is Verdict.OK), None
    )
    told = nothing_fits(question, price(problem, space_of(problem, question.pins, question.worlds)))
    change = told.relaxations[0] if told.relaxations else None
    if fitting is not None:
        change = (
            f"{fitting.change}: fits with {fitting.predicted.memory_gib_max:.1f} GiB, {fitting.predicted.step_s:.3g} s a step "
            f"({fitting.layout})"
        )
    return {
        "answer": "does not fit",
        "best": _told(problem, decision, predict(problem, decision)),
        "memory": {
            "device": fullest.device,
            "ranks": list(fullest.ranks),
            "phase": fullest.peak_phase,
            "operation": fullest.peak_operation,
            "expected_gib": fullest.peak_bytes / GIB,
            "upper_gib": memory_upper(problem, fullest.peak_bytes) / GIB,
            "usable_gib": usable / GIB,
            "over_gib": (over - usable) / GIB,
        },
        "smallest_change": change,
        "changes": [dict(one) for one in told.document["changes"]],
    }


def _one_recompute(decision: Decision) -> Layout:
    """The decision's layout with the commonest recompute of its stages."""
    counts: dict[str, int] = {}
    for stage in decision.stages:
        for kind, count in stage.recompute.items():
            counts[kind] = counts.get(kind, 0) + count
    degrees = {name: getattr(decision.layout, name) for name in decision.layout.__dataclass_fields__}
    return Layout(**degrees | {"recompute": max(counts, key=lambda kind: counts[kind]) if counts else "none"})


def _slower(problem: Problem, decision: Decision, plan: Plan, chosen: Prediction) -> dict[str, Any]:
    other = predict(problem, decision)
    if decision == plan.decision:
        answer = "chosen"
    elif other.step_s * (1 + chosen.pairwise_error) < chosen.step_s:
        answer = "faster"
    elif other.step_s <= chosen.step_s * (1 + chosen.pairwise_error):
        answer = "tie"
    else:
        answer = "slower"
    return {
        "answer": answer,
        "reasons": _not_found(decision.layout, plan) if other.step_s < chosen.step_s else [],
        "best": _told(problem, decision, other),
        "parts": [
            {
                "name": name.removesuffix("_s"),
                "chosen_s": getattr(chosen.parts, name),
                "other_s": getattr(other.parts, name),
            }
            for name in _PARTS
        ],
    }


def _not_found(layout: Layout, plan: Plan) -> list[dict[str, Any]]:
    """Why a plan's search did not choose a faster layout."""
    pins = parse_pins(plan.request.pin, plan.request.runtime.recompute_kinds)
    told = [("PIN", f"the plan was asked for with the pin {pin}, which excludes it") for pin in pins.broken(layout)]
    if plan.certificate is not None and plan.certificate.gap_objective:
        told.append(("TIME", "the time limit of the plan's search ended before it was proved to be the best"))
    return [{"code": code, "message": message, "values": {}, "legal": {}} for code, message in told]


def _told(problem: Problem, decision: Decision, predicted: Prediction) -> dict[str, Any]:
    return {
        "layout": str(decision.layout),
        "step_s": predicted.step_s,
        "memory_gib_max": predicted.memory_gib_max,
        "verdict": predicted.verdict.value,
    }


# Two plans, and the proof -----------------------------------------------------------------------------------------------


def against(plan: Plan, other: Plan) -> dict[str, Any]:
    """Two plans side by side: {"rows": [{"name", "this", "other"}]}, what differs first."""
    rows = [{"name": name, "this": this, "other": that} for name, this, that in _rows(plan, other)]
    rows.sort(key=lambda row: row["this"] == row["other"])
    return {"rows": rows}


def _rows(plan: Plan, other: Plan) -> list[tuple[str, Any, Any]]:
    def pair(name: str, read: Any) -> tuple[str, Any, Any]:
        return name, read(plan), read(other)

    def promised(field: str) -> Any:
        return lambda p: None if p.predicted is None else to_json(getattr(p.predicted, field))

    rows = [
        pair("model", lambda p: p.request.model.name),
        pair("cluster", lambda p: p.request.cluster.name),
        pair("batch", lambda p: p.decision.workload.gbs),
        pair("seq", lambda p: p.decision.workload.seq),
        pair("precision", lambda p: p.decision.workload.precision.value),
        pair("optimizer", lambda p: p.decision.workload.optimizer.value),
        pair("runtime", lambda p: p.decision.runtime),
        pair("layout", lambda p: str(p.decision.layout)),
        pair("micro-batches", lambda p: p.decision.num_micro_batches),
        pair("stages", lambda p: [list(stage.blocks) for stage in p.decision.stages]),
        pair("recompute", lambda p: [dict(stage.recompute) for stage in p.decision.stages]),
    ]
    names = ("step_s", "step_s_low", "step_s_high", "tokens_per_s_per_gpu", "mfu", "memory_gib_max", "memory_gib_high")
    rows += [pair(name, promised(name)) for name in names]
    for part in _PARTS:
        rows.append(pair(part, lambda p, part=part: None if p.predicted is None else getattr(p.predicted.parts, part)))
    rows.append(pair("calibration", lambda p: p.provenance.calibration))
    return rows
