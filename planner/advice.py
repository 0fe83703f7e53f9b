"""`check` in full: the laws and the model states, then what the layout would do and the single change that helps most."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_models.calibrations import shipped
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import Calibration, PlanRequest, RecordError, Verdict, to_json
from planner.check import check
from planner.decisions import decision_of_layout
from planner.errors import InputError, NotYetError
from planner.predict import predict
from planner.readers.requests import CompleteRequest, Request, complete, read_request
from planner.what_if.neighbours import best_change


def problem_of(request: CompleteRequest | PlanRequest, calibration: Calibration | None = None) -> Problem:
    """The problem that a whole request, or a plan's, states."""
    return Problem(
        model=request.model,
        cluster=request.cluster,
        workload=request.workload,
        runtime=request.runtime,
        calibration=calibration or shipped(),
        memory_kind=memory_kind_of(request.cluster),
        offload=request.offload if isinstance(request, CompleteRequest) else (),
    )


def advise(source: Request | str | Path | Mapping[str, Any], calibration: Calibration | None = None) -> dict[str, Any]:
    """The document of `check` (planner/check.py) with `predicted` and `better`, where the request is whole.

    A memory that is expected to overflow makes the verdict no, one that may overflow makes it risky.
    """
    request = source if isinstance(source, Request) else read_request(source)
    document = check(request)
    stated = _stated_layout(request)
    if document["verdict"] == Verdict.NO or stated is None:
        return document
    problem, layout = problem_of(stated, calibration), stated.layout
    assert layout is not None
    try:
        predicted = predict(problem, decision_of_layout(problem, layout, pools=stated.pools))
    except ValueError as error:  # what cannot be priced, by name
        document["unchecked"].append(f"prediction: {error}")
        return document
    document["predicted"] = {**(document["predicted"] or {}), **to_json(predicted)}
    order = [Verdict.OK, Verdict.RISKY, Verdict.NO]
    document["verdict"] = max(Verdict(document["verdict"]), predicted.verdict, key=order.index).value
    change = best_change(problem, layout, predicted)
    if change is not None:
        document["better"] = {
            "change": change.change,
            "layout": str(change.layout),
            "step_s": change.predicted.step_s,
            "gain": predicted.step_s / change.predicted.step_s - 1,
            "memory_gib_max": change.predicted.memory_gib_max,
            "verdict": change.predicted.verdict.value,
        }
    return document


def _stated_layout(request: Request) -> CompleteRequest | None:
    """The request filled in, where it states all that a prediction stands on; nothing that matters is guessed."""
    needed = [key for key in ("seq", "gbs") if key not in request.workload]
    if needed or not request.states_layout or ("mbs" not in request.layout and "microbatches" not in request.layout):
        return None
    try:
        whole = complete(request, needs_layout=True)
    except (InputError, NotYetError, RecordError):
        return None
    return whole if whole.layout is not None else None
