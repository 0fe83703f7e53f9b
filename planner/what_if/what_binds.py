"""What binds a plan: the parts of its step, its memory, and what each limit would give if it were relaxed, solved again.

A gain is of tokens/s. Where the plan itself stays possible under a change, it is a candidate too: more is never told to be worse.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cost_models.memory import memory_upper, usable_bytes
from cost_models.records import Calibration, Decision, Link, NodeKind, Plan, Prediction
from cost_models.units import GIB
from planner.choose import choose
from planner.decisions import decision_of
from planner.errors import InfeasibleError, InputError
from planner.explain import problem_of_plan
from planner.predict import fullest_position, predict
from planner.readers.pins import parse_pins
from planner.what_if.changes import Question
from planner.what_if.feasible import is_feasible

_MEMORY_FACTORS = (1.1, 1.25, 2.0, 64.0)
"""Of each device's memory; the last one is as good as without end."""
_BATCH_FACTORS = (2, 4)
_RATE_FACTOR = 2.0
_PARTS = ("compute_s", "exposed_communication_s", "bubble_s", "optimizer_s", "other_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relaxation:
    """One limit, relaxed."""

    limit: str
    """memory, batch, compute, links in a node, links between nodes, pin."""
    words: str
    """The change, with its number."""
    factor: float | None
    """What the limit is multiplied with; None for a pin."""
    question: Question
    keeps_plan: bool
    """The plan stays legal, and as good as it was."""


def what_binds(
    plan: Plan, calibration: Calibration | None = None, *, time_limit_s: float | None = None
) -> dict[str, Any]:
    """Parts of the step, the memory's room, and the gain of relaxing each limit.

    Keys: plan {layout, step_s, tokens_per_s}, parts [{name, seconds, share}], memory {device, ranks, phase, operation,
    expected_gib, upper_gib, usable_gib, left_gib}, relaxed [{limit, change, factor, layout, step_s, tokens_per_s, gain,
    within_error, verdict, why}], binds (limits whose relaxing gains more than `pairwise_error`), pairwise_error. `time_limit_s` is
    for each of the solves. InputError where the plan has no prediction, or another calibration.
    """
    problem = problem_of_plan(plan, calibration)
    if plan.predicted is None:
        raise InputError("the plan was edited by hand and promises nothing; make a new one with `meshwright plan`")
    predicted, error = plan.predicted, plan.predicted.pairwise_error
    pins = parse_pins(plan.request.pin, plan.request.runtime.recompute_kinds)
    question = Question(problem=problem, pins=pins, worlds=(plan.decision.layout.world,))
    relaxed = [_solved(one, plan.decision, predicted, time_limit_s) for one in _relaxations(question, plan.decision)]
    gains = {one["limit"]: one["gain"] for one in relaxed if one["gain"] is not None and not one["within_error"]}
    return {
        "plan": {
            "layout": str(plan.decision.layout),
            "step_s": predicted.step_s,
            "tokens_per_s": problem.workload.tokens / predicted.step_s,
        },
        "parts": [
            {
                "name": name.removesuffix("_s"),
                "seconds": getattr(predicted.parts, name),
                "share": getattr(predicted.parts, name) / predicted.step_s,
            }
            for name in _PARTS
        ],
        "memory": _memory(question, plan.decision),
        "relaxed": relaxed,
        "binds": sorted(gains),
        "pairwise_error": error,
    }


def _relaxations(question: Question, decision: Decision) -> Iterator[_Relaxation]:
    problem = question.problem
    have = problem.cluster.pools[0].kind.device.memory_bytes
    for factor in _MEMORY_FACTORS:
        more = f"{factor - 1:+.0%} memory in each GPU" if factor <= 2 else "memory without end"
        alone = len(problem.cluster.pools) == 1
        words = f"{more} ({have * factor / GIB:.0f} GiB)" if factor <= 2 and alone else more
        yield _Relaxation(
            limit="memory", words=words, factor=factor, keeps_plan=True,
            question=question.with_kinds(partial(_more_memory, factor=factor)),
        )  # fmt: skip
    for times in _BATCH_FACTORS:
        gbs = problem.workload.gbs * times
        yield _Relaxation(
            limit="batch", words=f"{times} times the batch ({gbs:,} sequences; other training)", factor=times,
            keeps_plan=False, question=question.with_workload(gbs=gbs),
        )  # fmt: skip
    kind = problem.cluster.pools[0].kind
    yield _Relaxation(
        limit="compute",
        words=f"matrix products {_RATE_FACTOR:g} times as fast",
        factor=_RATE_FACTOR,
        keeps_plan=True,
        question=question.with_kinds(_faster_device),
    )
    if decision.layout.world > 1 and kind.gpus_per_node > 1:
        yield _links(question, "intra")
    if decision.layout.world > kind.gpus_per_node:
        yield _links(question, "nic")
    for pin in question.pins.pins:
        yield _Relaxation(
            limit="pin",
            words=f"without the pin {pin}",
            factor=None,
            keeps_plan=True,
            question=question.without_pins([pin]),
        )


def _more_memory(kind: NodeKind, factor: float) -> NodeKind:
    return replace(kind, device=replace(kind.device, memory_bytes=round(kind.device.memory_bytes * factor)))


def _faster(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * _RATE_FACTOR)


def _faster_device(kind: NodeKind) -> NodeKind:
    rates = {
        name: {precision: rate * _RATE_FACTOR for precision, rate in getattr(kind.device, name).items()}
        for name in ("peak_flops_per_s", "matmul_flops_per_s")
    }
    return replace(kind, device=replace(kind.device, **rates))  # type: ignore[arg-type]


def _links(question: Question, name: str) -> _Relaxation:
    """Links of every kind of node: `intra` in a node, `nic` between nodes."""
    limit = {"intra": "links in a node", "nic": "links between nodes"}[name]
    changed = question.with_kinds(lambda kind: replace(kind, **{name: _faster(getattr(kind, name))}))  # type: ignore[arg-type]
    return _Relaxation(
        limit=limit,
        words=f"{limit} {_RATE_FACTOR:g} times as fast",
        factor=_RATE_FACTOR,
        question=changed,
        keeps_plan=True,
    )


def _solved(one: _Relaxation, of_plan: Decision, before: Prediction, time_limit_s: float | None) -> dict[str, Any]:
    """The best plan under a change, and what it gains."""
    question, found = one.question, []
    if one.keeps_plan:
        found.append((of_plan, predict(question.problem, of_plan)))
    why = None
    if not is_feasible(question):
        why = "no layout is legal and fits with it"
    else:
        try:
            answer = choose(question.problem, pins=question.pins, worlds=question.worlds, time_limit_s=time_limit_s)
            decision = decision_of(question.problem, answer.choice.chosen)
            found.append((decision, predict(question.problem, decision)))
        except InfeasibleError as error:
            why = str(error).split("\n")[0]
    told: dict[str, Any] = {"limit": one.limit, "change": one.words, "factor": one.factor}
    if not found:
        blank = ("layout", "step_s", "tokens_per_s", "gain", "within_error", "verdict")
        return told | dict.fromkeys(blank) | {"why": why}
    decision, predicted = min(found, key=lambda pair: pair[1].step_s)
    rate = question.problem.workload.tokens / predicted.step_s
    gain = rate / (of_plan.workload.tokens / before.step_s) - 1
    return told | {
        "layout": str(decision.layout),
        "step_s": predicted.step_s,
        "tokens_per_s": rate,
        "gain": gain,
        "within_error": gain <= before.pairwise_error,
        "verdict": predicted.verdict.value,
        "why": why,
    }


def _memory(question: Question, decision: Decision) -> dict[str, Any]:
    """The fullest device, and what is left on it at worst."""
    problem = question.problem
    fullest, where = fullest_position(problem, decision)
    usable, upper = usable_bytes(where), memory_upper(problem, fullest.peak_bytes)
    return {
        "device": fullest.device,
        "ranks": list(fullest.ranks),
        "phase": fullest.peak_phase,
        "operation": fullest.peak_operation,
        "expected_gib": fullest.peak_bytes / GIB,
        "upper_gib": upper / GIB,
        "usable_gib": usable / GIB,
        "left_gib": (usable - upper) / GIB,
    }
