"""The plan: a whole request in, the choice with its prediction, its proof and its alternatives out."""

import platform
from collections.abc import Mapping
from importlib.metadata import version as version_of

import numpy as np

from cost_models.calibrations import identity
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    Alternative,
    Calibration,
    Cell,
    Certificate,
    Decision,
    Plan,
    PlanRequest,
    Prediction,
    Provenance,
    Verdict,
)
from planner.baseline import handbook
from planner.decisions import candidate_of_layout, decision_of_picks
from planner.errors import InfeasibleError, InputError
from planner.least_gpus import relaxations
from planner.predict import predict
from planner.priced import Priced
from planner.readers.pins import parse_pins
from planner.readers.requests import CompleteRequest
from planner.search import Candidate, Choice, search
from planner.space import Space, enumerate_cells

MOST_ALTERNATIVES = 6
"""Runners-up that a plan keeps, beside the baseline and today's layout."""


def make_plan(
    request: CompleteRequest,
    *,
    calibration: Calibration,
    gpus: str | None = None,
    time_limit_s: float | None = None,
    version: str = "0",
) -> Plan:
    """The plan of least simulated time, with its certificate.

    The request's layout is today's: always a candidate. `gpus` is "N" (exactly) or "..N" (at most). Raises InfeasibleError with
    the smallest changes that would do, TimeLimitError where no plan was known in time, InputError for what is wrong.
    """
    problem = Problem(
        model=request.model,
        cluster=request.cluster,
        workload=request.workload,
        runtime=request.runtime,
        calibration=calibration,
        memory_kind=memory_kind_of(request.cluster),
    )
    worlds = worlds_of(gpus, request.cluster.num_gpus, request.cluster.pools[0].kind.gpus_per_node)
    today = None
    if request.layout is not None:
        world = min(request.layout.world, request.cluster.num_gpus)
        today = candidate_of_layout(problem, request.layout, world=world)
    space = enumerate_cells(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        pins=parse_pins(request.pin),
        worlds=worlds,
    )
    choice = _choose(problem, space, today, time_limit_s, worlds)
    decision = decision_of_picks(problem, choice.chosen.cell, choice.chosen.picks)
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
        certificate=_certificate(choice, space),
        alternatives=_alternatives(problem, choice, predicted, decision, today, max(worlds)),
        defaults=dict(request.defaults),
        provenance=Provenance(
            decision_sha256=decision.sha256,
            meshwright_version=version,
            calibration=identity(calibration),
            versions=_versions(choice.solver),
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


def _choose(
    problem: Problem, space: Space, today: Candidate | None, time_limit_s: float | None, worlds: tuple[int, ...]
) -> Choice:
    """The choice among plans that surely fit; where there is none, among those that are expected to."""
    always = [] if today is None or not _fits(problem, today) else [today]
    for at_risk in (False, True):
        priced = Priced.of(problem, space, at_risk=at_risk)
        try:
            return search(priced, time_limit_s=time_limit_s, always=always)
        except InfeasibleError:
            continue
    raise InfeasibleError(
        f"{problem.model.name} does not fit on {max(worlds)} GPUs of {problem.cluster.name} under any layout of this space",
        relaxations=relaxations(problem, space, max(worlds)),
    )


def _fits(problem: Problem, candidate: Candidate) -> bool:
    decision = decision_of_picks(problem, candidate.cell, candidate.picks)
    return predict(problem, decision).verdict is not Verdict.NO


def _certificate(choice: Choice, space: Space) -> Certificate:
    return Certificate(
        status=choice.status,
        objective_s=choice.objective_s,
        bound_s=choice.bound_s,
        gap_objective=choice.gap_objective,
        objective_of_choice_s=choice.chosen.objective_s,
        simulated_s=choice.simulated_s,
        gap_simulated=choice.gap_simulated,
        cells=tuple(
            Cell(
                cell=str(space.cells.layout(verdict.index)),
                bound_s=verdict.bound_s,
                simulated_bound_s=verdict.simulated_bound_s,
                objective_s=verdict.objective_s,
                reason=verdict.reason,
            )
            for verdict in choice.cells
        ),
        cells_opened=choice.cells_opened,
        seconds=choice.seconds,
        solver=choice.solver,
        restrictions=space.restrictions,
    )


def _alternatives(
    problem: Problem,
    choice: Choice,
    predicted: Prediction,
    decision: Decision,
    today: Candidate | None,
    world: int,
) -> tuple[Alternative, ...]:
    found = []
    if today is not None:
        found.append(_alternative(problem, decision_of_picks(problem, today.cell, today.picks), predicted, "current"))
    plain = handbook(problem, world)
    if plain is not None:
        found.append(_alternative(problem, plain, predicted, "baseline"))
    for candidate in choice.near:
        other = decision_of_picks(problem, candidate.cell, candidate.picks)
        if other != decision and len(found) < MOST_ALTERNATIVES + 2:
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
