"""All that one change away from a plan: faster, a tie, slower, too large or illegal, each with its reason.

A neighbour is a layout as people run it (as many layers on every stage, one kind of recompute), so `predict` of its text gives
the same numbers. A plan whose stages differ in recompute has neighbours of each kind, and of each the best is told.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cost_models.memory import memory_upper, usable_bytes
from cost_models.problem import Problem
from cost_models.records import Calibration, Layout, Plan, Prediction, Verdict
from cost_models.records.layout import STAGES
from cost_models.units import GIB
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.explain import problem_of_plan
from planner.predict import fullest_position, predict
from planner.readers.pins import Pins, parse_pins
from planner.what_if.neighbours import Neighbour, Refused, by_fit_and_speed, judged

PARTS = {
    "compute": "compute_s",
    "exposed communication": "exposed_communication_s",
    "pipeline bubble": "bubble_s",
    "optimizer": "optimizer_s",
    "constant": "other_s",
}
"""A part of a step in words -> its field of Parts."""


def around(plan: Plan, calibration: Calibration | None = None) -> dict[str, Any]:
    """Every layout on as many ranks that differs from the plan's by one choice.

    Keys: plan {layout, step_s}, pairwise_error, neighbours [{change, layout, answer (faster, tie, slower, risky, does not fit),
    step_s, against, memory_gib_max, verdict, reason, breaks_pins}] the best first, refused [{change, layout, code, reason}]. InputError where
    the plan has no prediction, or another calibration.
    """
    problem = problem_of_plan(plan, calibration)
    if plan.predicted is None:
        raise InputError("the plan was edited by hand and promises nothing; make a new one with `meshwright plan`")
    pins = parse_pins(plan.request.pin, plan.request.runtime.recompute_kinds)
    found: dict[str, Neighbour] = {}
    refused: dict[str, Refused] = {}
    for one in _one_change_away(problem, plan.decision.layout):
        if isinstance(one, Refused):
            refused.setdefault(one.change, one)
        elif one.change not in found or by_fit_and_speed(one) < by_fit_and_speed(found[one.change]):
            found[one.change] = one
    neighbours = sorted(found.values(), key=by_fit_and_speed)
    return {
        "plan": {"layout": str(plan.decision.layout), "step_s": plan.predicted.step_s},
        "pairwise_error": plan.predicted.pairwise_error,
        "neighbours": [_told(problem, one, plan.predicted) | _pinned(pins, one.layout) for one in neighbours],
        "refused": [
            {"change": one.change, "layout": str(one.layout), "code": one.code, "reason": one.message}
            for change, one in refused.items()
            if change not in found
        ],
    }


def _one_change_away(problem: Problem, layout: Layout) -> Iterator[Neighbour | Refused]:
    if layout.recompute != STAGES:
        yield from judged(problem, layout)
        return
    for kind in problem.recompute_kinds:
        base = replace(layout, recompute=kind)
        yield Neighbour(
            change=f"recompute {STAGES} -> {kind}",
            layout=base,
            predicted=predict(problem, decision_of_layout(problem, base)),
        )
        yield from (one for one in judged(problem, base) if one.layout.recompute == kind)


def _pinned(pins: Pins, layout: Layout) -> dict[str, Any]:
    return {"breaks_pins": [str(pin) for pin in pins.broken(layout)]}


def _told(problem: Problem, one: Neighbour, chosen: Prediction) -> dict[str, Any]:
    predicted, error = one.predicted, chosen.pairwise_error
    if predicted.verdict is not Verdict.OK:
        answer = "does not fit" if predicted.verdict is Verdict.NO else "risky"
        reason = over(problem, one.layout)
    else:
        answer = "tie"
        if not chosen.step_s / (1 + error) <= predicted.step_s <= chosen.step_s * (1 + error):
            answer = "slower" if predicted.step_s > chosen.step_s else "faster"
        reason = difference(chosen, predicted)
    return {
        "change": one.change,
        "layout": str(one.layout),
        "answer": answer,
        "step_s": predicted.step_s,
        "against": predicted.step_s / chosen.step_s - 1,
        "memory_gib_max": predicted.memory_gib_max,
        "verdict": predicted.verdict.value,
        "reason": reason,
    }


def difference(chosen: Prediction, other: Prediction) -> str:
    """The part of the step that changes most in the direction of the whole, and the one that goes most against it."""
    changes = {words: getattr(other.parts, field) - getattr(chosen.parts, field) for words, field in PARTS.items()}
    whole = other.step_s - chosen.step_s
    if not whole:
        return "the same step"
    sign = 1 if whole > 0 else -1
    most = max(changes, key=lambda words: sign * changes[words])
    least = min(changes, key=lambda words: sign * changes[words])
    told = [f"{most} {_seconds(changes[most])}"]
    if sign * changes[least] < -0.1 * abs(whole):
        told.append(f"{least} {_seconds(changes[least])}")
    return ", ".join(told)


def over(problem: Problem, layout: Layout) -> str:
    """Which device holds too much, where, and by how much; for what fits on expectation only, at the upper end."""
    fullest, where = fullest_position(problem, decision_of_layout(problem, layout))
    usable, upper = usable_bytes(where), memory_upper(problem, fullest.peak_bytes)
    place = f"stage {fullest.device}, {fullest.peak_phase}"
    if fullest.peak_bytes > usable:
        return f"{(fullest.peak_bytes - usable) / GIB:.1f} GiB too many on {place}"
    if upper > usable:
        return f"up to {(upper - usable) / GIB:.1f} GiB too many on {place}"
    return "the host has too little memory"


def _seconds(change: float) -> str:
    sign = "+" if change >= 0 else "-"
    size = abs(change)
    return f"{sign}{size:.3g} s" if size >= 1 else f"{sign}{size * 1e3:.3g} ms"
