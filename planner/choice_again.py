"""What a plan's file says of its choice, derived once more: the prediction, the alternatives', both gaps, what was left out.

The bounds prove J; what people read first are the step, its memory and the two gaps. Each follows from the request and the
decisions in the same file, so each can be derived again by anybody.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cost_models.problem import Problem
from cost_models.records import Certificate, CertificateStatus, Plan, to_json
from planner.predict import predict
from planner.search.best_first import AGREEMENT, PricedSpace, least_bound_of
from planner.search.space import Space

_ROUNDING = 1e-9
"""Relative; the same sums in the same order."""


def faults_of_choice(
    plan: Plan, proof: Certificate, problem: Problem, space: Space, priced: PricedSpace
) -> Iterator[str]:
    """What a plan says of its choice and does not come out again, in words."""
    predicted = predict(problem, plan.decision)
    if plan.predicted is not None:
        yield from _differences("predicted", to_json(plan.predicted), to_json(predicted))
    for number, other in enumerate(plan.alternatives):
        again = predict(problem, other.decision)
        told = replace(other, step_s=again.step_s, memory_gib_max=again.memory_gib_max, verdict=again.verdict)
        yield from _differences(f"alternatives[{number}]", to_json(other), to_json(told))
    yield from _differences("simulated_s", proof.simulated_s, predicted.step_s)
    yield from _objective_of_choice(plan, proof)
    gap = max(0.0, 1 - proof.bound_s / proof.objective_s)
    if proof.gap_objective is not None and abs(proof.gap_objective - gap) > AGREEMENT:
        yield f"gap_objective is {proof.gap_objective:.3g}, but 1 - bound/J* is {gap:.3g}"
    if proof.status is CertificateStatus.OPTIMAL and gap > AGREEMENT:
        yield f"the status is {proof.status}, but the bound is {gap:.2%} below J*"
    gap = max(0.0, 1 - proof.least_bound_s / predicted.step_s)
    if abs(proof.gap_simulated - gap) > AGREEMENT:
        yield f"gap_simulated is {proof.gap_simulated:.6g}, but 1 - min R/S is {gap:.6g}"
    least_s = least_bound_of(priced, predicted.step_s)
    if proof.least_bound_s > least_s * (1 + AGREEMENT):
        yield f"min R is said to be {proof.least_bound_s:.6g} s, but only {least_s:.6g} s bound every plan of the space"
    unsaid = [one for one in space.restrictions if one not in proof.restrictions]
    if unsaid:
        yield f"the space leaves out what the certificate does not say: {'; '.join(unsaid)}"


def _objective_of_choice(plan: Plan, proof: Certificate) -> Iterator[str]:
    """J of the choice is that of its cell; today's layout alone may be of none."""
    layout = str(replace(plan.decision.layout, recompute="none"))
    cells = [cell.objective_s for cell in proof.cells if cell.cell.startswith(layout) and cell.objective_s is not None]
    told_s = proof.objective_of_choice_s
    if told_s < proof.objective_s * (1 - AGREEMENT):
        yield f"J of the choice is said to be {told_s:.6g} s, below J* = {proof.objective_s:.6g} s"
    elif plan.request.current is None and all(abs(told_s - one_s) > AGREEMENT * one_s for one_s in cells):
        known = ", ".join(f"{one_s:.6g} s" for one_s in cells) or "none"
        yield f"J of the choice is said to be {told_s:.6g} s; its cell has {known}"


def _differences(name: str, told: Any, again: Any) -> Iterator[str]:
    """Where two documents differ, by the names of their fields; the first of each list alone."""
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        for key in sorted({*told, *again}):
            yield from _differences(f"{name}.{key}", told.get(key), again.get(key))
    elif _is_list(told) and _is_list(again) and len(told) == len(again):
        pairs = enumerate(zip(told, again, strict=True))
        found = (words for at, (one, other) in pairs for words in _differences(f"{name}[{at}]", one, other))
        yield from [next(found, "")] if not _is_alike(told, again) else []
    elif not _is_alike(told, again):
        yield f"{name} is said to be {told}; derived again: {again}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_alike(told: Any, again: Any) -> bool:
    if isinstance(told, float) and isinstance(again, float | int):
        return bool(abs(told - again) <= _ROUNDING * max(abs(told), abs(again)))
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        return set(told) == set(again) and all(_is_alike(told[key], again[key]) for key in told)
    if _is_list(told) and _is_list(again):
        return len(told) == len(again) and all(map(_is_alike, told, again))
    return bool(told == again)
