"""The plan: a whole request in, the choice with its prediction, its proof and its alternatives out."""

import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version as version_of

import numpy as np

from cost_models.calibrations import identity
from cost_models.problem import RANK_ORDER, Problem
from cost_models.records import (
    Alternative,
    Calibration,
    Decision,
    Plan,
    PlanRequest,
    Prediction,
    Provenance,
)
from cost_models.records.plan import USUAL_ORDER
from planner.advice import problem_of
from planner.certificate import certificate_of
from planner.choose import Answer, choose
from planner.decisions import decision_of, refuse_illegal
from planner.errors import InputError
from planner.pace import Tell
from planner.predict import predict
from planner.readers.pins import parse_pins
from planner.readers.requests import CompleteRequest

MOST_ALTERNATIVES = 6
"""Runners-up that a plan keeps, beside the baseline and today's layout."""


def make_plan(
    request: CompleteRequest,
    *,
    calibration: Calibration,
    gpus: str | None = None,
    time_limit_s: float | None = None,
    version: str = "0",
    tell: Tell | None = None,
) -> Plan:
    """The plan of about the least simulated time, the simplest of those that tie, with its certificate.

    The request's layout is today's: always a candidate. `tell` gets a line now and then, where it takes seconds. `gpus` is "N" (exactly) or "..N" (at most). Raises InfeasibleError with
    the smallest changes that would do, TimeLimitError where no plan was known in time, InputError for what is wrong.
    """
    if time_limit_s is not None and not time_limit_s >= 0:
        raise InputError(f"--time-limit {time_limit_s:g}: seconds from 0 are needed")
    problem = problem_of(request, calibration)
    worlds = worlds_of(gpus, request.cluster.num_gpus, request.cluster.gpus_per_node)
    if request.layout is not None:
        refuse_illegal(problem, request.layout, min(request.layout.world, request.cluster.num_gpus))
    pins = parse_pins(request.pin, request.runtime.recompute_kinds)
    answer = choose(
        problem,
        pins=pins,
        worlds=worlds,
        current=request.layout,
        current_pools=request.pools,
        time_limit_s=time_limit_s,
        tell=tell,
    )
    decision = decision_of(problem, answer.choice.chosen)
    predicted = predict(problem, decision)
    return Plan(
        request=PlanRequest(
            model=request.model,
            cluster=request.cluster,
            workload=request.workload,
            runtime=request.runtime,
            pin=request.pin,
            current=None if request.layout is None else str(request.layout),
        ),
        decision=decision,
        predicted=predicted,
        certificate=certificate_of(answer),
        alternatives=_alternatives(answer, predicted, decision),
        defaults=dict(request.defaults),
        provenance=Provenance(
            decision_sha256=decision.sha256,
            meshwright_version=version,
            calibration=identity(calibration),
            versions=_versions(answer.choice.solver),
        ),
    )


def worlds_of(gpus: str | None, have: int, per_node: int) -> tuple[int, ...]:
    """Numbers of ranks to search: all GPUs, exactly N, or with "..N" N and every smaller number of whole nodes (of GPUs within
    a node), since a count that fits no batch may lose to a smaller one.
    """
    if gpus is None:
        return (have,)
    most = gpus.removeprefix("..")
    if not most.isdecimal() or not 1 <= int(most) <= have:
        raise InputError(
            f"--gpus {gpus}: give N (exactly) or ..N (at most), with N from 1 to the cluster's {have} GPUs"
        )
    limit = int(most)
    if not gpus.startswith(".."):
        return (limit,)
    return tuple(sorted({limit, *range(1, min(per_node, limit) + 1), *range(per_node, limit + 1, per_node)}))


def _alternatives(answer: Answer, predicted: Prediction, decision: Decision) -> tuple[Alternative, ...]:
    """Today's layout and the handbook's, then the runners-up by simulated time."""
    problem, found = answer.problem, []
    for note, plan in (("current", answer.current), ("baseline", answer.baseline)):
        if plan is not None:
            found.append(_alternative(problem, decision_of(problem, plan), predicted, note))
    if decision.ranks.order != RANK_ORDER:
        usual = replace(decision, ranks=replace(decision.ranks, order=RANK_ORDER))
        found.append(_alternative(problem, usual, predicted, USUAL_ORDER))
    others = [decision_of(problem, plan) for plan in answer.choice.near]
    for other in [one for one in others if one != decision][:MOST_ALTERNATIVES]:
        found.append(_alternative(problem, other, predicted, ""))
    return tuple(found)


def _alternative(problem: Problem, decision: Decision, chosen: Prediction, note: str) -> Alternative:
    predicted = predict(problem, decision)
    tie = abs(predicted.step_s / chosen.step_s - 1) <= chosen.pairwise_error
    return Alternative(
        decision=decision,
        step_s=predicted.step_s,
        memory_gib_max=predicted.memory_gib_max,
        verdict=predicted.verdict,
        note=note or ("tie" if tie else "slower"),
    )


def _versions(solver: str) -> Mapping[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "pulp": version_of("pulp"), "solver": solver}
