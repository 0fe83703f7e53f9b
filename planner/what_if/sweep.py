"""One question over many sizes: GPUs, batches or sequences; which size is enough, fastest, cheapest, and where more stops paying.

The workload is held as it was asked, but for what is swept: over GPUs the batch stays the same (strong scaling), since the
batch is the training's matter, never the planner's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cost_models.calibrations import identity
from cost_models.intervals import pairwise_error
from cost_models.records import Calibration, Plan
from planner.advice import problem_of
from planner.errors import InfeasibleError, InputError, NotYetError, TimeLimitError
from planner.plan import make_plan, worlds_of
from planner.readers.pins import parse_pins
from planner.readers.requests import CompleteRequest
from planner.what_if.changes import Question, with_gpus
from planner.what_if.feasible import is_feasible, space_of
from planner.what_if.infeasible import MOST_COUNTS
from planner.what_if.sweep_points import AXES, Axis, parse_sweep

_KNEE_SHARE = 0.5
"""Of the tokens/s that a GPU brings at the cheapest size: an added GPU that brings less is beyond the knee."""
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One size of the sweep."""

    value: int
    request: CompleteRequest
    gpus: str | None
    """As `plan --gpus` takes it."""

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks that the plan may have."""
        cluster = self.request.cluster
        return worlds_of(self.gpus, cluster.num_gpus, cluster.pools[0].kind.gpus_per_node)


def sweep(
    request: CompleteRequest,
    text: str,
    *,
    calibration: Calibration,
    gpus: str | None = None,
    time_limit_s: float | None = None,
    price_per_gpu_hour: float | None = None,
    version: str = "0",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The plans of a request over the sizes in `text` (`gpus=64..1024`, `batch=256,512`), and what follows from them.

    Keys: axis, points (one a size, in order), answers, pairwise_error, complete, seconds, calibration. A size is planned,
    infeasible, or not reached where `time_limit_s` ended before it; answers speak of the planned ones alone. InputError for a
    text that is no sweep, or a size that the request cannot have; InfeasibleError where no size has a plan; TimeLimitError
    where none was reached.
    """
    axis, values = parse_sweep(text)
    _refuse(request, axis, gpus, price_per_gpu_hour, time_limit_s)
    asked = [_asked(request, axis, value, gpus) for value in values]
    begun = time.monotonic()
    points = list(_points(asked, axis, calibration, time_limit_s, version, progress))
    price(points, price_per_gpu_hour)
    fewest = None
    if axis is Axis.GPUS:
        left_s = None if time_limit_s is None else time_limit_s - (time.monotonic() - begun)
        fewest = _fewest_between(request, points, calibration, left_s)
    error = pairwise_error(problem_of(request, calibration))
    document = {
        "axis": axis.value,
        "points": points,
        "answers": answers(points, axis, error) | {"fewest_between": fewest},
        "pairwise_error": error,
        "price_per_gpu_hour": price_per_gpu_hour,
        "complete": all(point["status"] != "not reached" for point in points),
        "seconds": time.monotonic() - begun,
        "calibration": identity(calibration),
    }
    if not any(point["step_s"] is not None for point in points):
        raise _no_plan(request, axis, points, time_limit_s)
    return document


def _refuse(
    request: CompleteRequest, axis: Axis, gpus: str | None, price_per_gpu_hour: float | None, time_limit_s: float | None
) -> None:
    if request.layout is not None:
        raise InputError(
            f"a sweep has no layout of today ({request.layout}): it runs at one size alone; leave it out, or pin what must hold"
        )
    if axis is Axis.GPUS and gpus is not None:
        raise InputError(f"--gpus {gpus} beside --sweep gpus=...: say the numbers of GPUs once, in the sweep")
    if axis is Axis.GPUS and len(request.cluster.pools) > 1:
        raise NotYetError(
            f"cluster {request.cluster.name!r} has {len(request.cluster.pools)} kinds of nodes: sweeps over GPUs of several kinds "
            "are not planned yet"
        )
    if price_per_gpu_hour is not None and not 0 < price_per_gpu_hour < float("inf"):
        raise InputError(f"--price {price_per_gpu_hour:g}: the price of a GPU for an hour is a number above 0")
    if time_limit_s is not None and not time_limit_s >= 0:
        raise InputError(f"--time-limit {time_limit_s:g}: seconds from 0 are needed")


def _asked(request: CompleteRequest, axis: Axis, value: int, gpus: str | None) -> _Asked:
    if axis is Axis.GPUS:
        # a part of a node is still a node of the cluster
        return _Asked(value=value, request=replace(request, cluster=with_gpus(request.cluster, value)), gpus=str(value))
    workload = replace(request.workload, **{AXES[axis].field: value})  # type: ignore[arg-type]
    return _Asked(value=value, request=replace(request, workload=workload), gpus=gpus)


def _points(
    asked: Sequence[_Asked],
    axis: Axis,
    calibration: Calibration,
    time_limit_s: float | None,
    version: str,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One point a size; each has an equal part of the time that is left."""
    begun = time.monotonic()
    for number, one in enumerate(asked):
        spent_s = time.monotonic() - begun
        left_s = None if time_limit_s is None else time_limit_s - spent_s
        if left_s is not None and left_s <= 0:
            yield _point(one) | {"status": "not reached", "why": "the time limit ended before this size"}
            continue
        share_s = None if left_s is None else left_s / (len(asked) - number)
        eta = f", about {spent_s / number * (len(asked) - number):.0f} s left" if number else ""
        progress(f"{axis.value}={one.value:,} ({number + 1} of {len(asked)}{eta})")
        at = time.monotonic()
        point = _planned(one, calibration, share_s, version)
        yield point | {"seconds": time.monotonic() - at}


def _planned(one: _Asked, calibration: Calibration, limit_s: float | None, version: str) -> dict[str, Any]:
    """The point with its plan, or why it has none."""
    begun = time.monotonic()
    problem = problem_of(one.request, calibration)
    pins = parse_pins(one.request.pin, one.request.runtime.recompute_kinds)
    question = Question(problem=problem, pins=pins, worlds=one.worlds)
    if not is_feasible(question):
        return _point(one) | {"status": "infeasible", "why": _why(question)}
    left_s = None if limit_s is None else max(limit_s - (time.monotonic() - begun), 1e-3)
    try:
        plan = make_plan(one.request, calibration=calibration, gpus=one.gpus, time_limit_s=left_s, version=version)
    except InfeasibleError as error:  # a plan exists, but the time ended before it was found
        return _point(one) | {"status": "infeasible", "why": str(error).split("\n")[0]}
    except TimeLimitError as error:
        return _point(one) | {"status": "not reached", "why": str(error)}
    return _point(one) | _numbers(one, plan)


def _fewest_between(
    request: CompleteRequest, points: Sequence[dict[str, Any]], calibration: Calibration, left_s: float | None
) -> int | None:
    """The least number of GPUs with a plan between the last size without and the first with one: whole nodes, or GPUs of a node.

    None where no size without a plan stands before the first with one, or the time ended, or there are too many to try.
    """
    first = next((place for place, point in enumerate(points) if point["step_s"] is not None), 0)
    if not first or points[first - 1]["status"] != "infeasible":
        return None
    below, enough = points[first - 1]["value"], points[first]["value"]
    per_node = request.cluster.pools[0].kind.gpus_per_node
    grain = 1 if enough <= per_node else per_node
    counts = [count for count in range(below // grain * grain + grain, enough, grain) if count > below]
    pins = parse_pins(request.pin, request.runtime.recompute_kinds)
    question = Question(problem=problem_of(request, calibration), pins=pins)
    begun = time.monotonic()
    for count in counts if len(counts) <= MOST_COUNTS else ():
        if left_s is not None and time.monotonic() - begun > left_s:
            return None
        if is_feasible(question.on(count)):
            return count
    return enough if len(counts) <= MOST_COUNTS else None


def _why(question: Question) -> str:
    try:
        space_of(question.problem, question.pins, question.worlds)
    except InfeasibleError as error:
        return "; ".join([str(error).split("\n")[0], *error.relaxations[:1]])
    return "no layout fits into memory"


def _point(one: _Asked) -> dict[str, Any]:
    """A point without a plan."""
    workload, cluster = one.request.workload, one.request.cluster
    empty = dict.fromkeys(
        (
            "why", "layout", "step_s", "step_s_low", "step_s_high", "tokens_per_s", "tokens_per_s_per_gpu",
            "gpu_s_per_million_tokens", "price_per_million_tokens", "mfu", "memory_gib_max", "verdict", "gap_objective", "seconds",
        )
    )  # fmt: skip
    return {
        "value": one.value,
        "gpus": max(one.worlds),
        "idle_gpus": cluster.num_gpus - max(one.worlds),
        "gbs": workload.gbs,
        "seq": workload.seq,
        "status": "",
    } | empty


def _numbers(one: _Asked, plan: Plan) -> dict[str, Any]:
    predicted, certificate = plan.predicted, plan.certificate
    assert predicted is not None
    assert certificate is not None
    world = plan.decision.layout.world
    tokens_per_s = one.request.workload.tokens / predicted.step_s
    return {
        "gpus": world,
        "idle_gpus": one.request.cluster.num_gpus - world,
        "status": certificate.status.value,
        "layout": str(plan.decision.layout),
        "step_s": predicted.step_s,
        "step_s_low": predicted.step_s_low,
        "step_s_high": predicted.step_s_high,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
        "gpu_s_per_million_tokens": world / tokens_per_s * 1e6,
        "mfu": predicted.mfu,
        "memory_gib_max": predicted.memory_gib_max,
        "verdict": predicted.verdict.value,
        "gap_objective": certificate.gap_objective,
    }


def price(points: Sequence[dict[str, Any]], price_per_gpu_hour: float | None) -> None:
    """Fills in the price of a million tokens, in the currency of the price."""
    for point in points:
        if price_per_gpu_hour is not None and point["gpu_s_per_million_tokens"] is not None:
            point["price_per_million_tokens"] = point["gpu_s_per_million_tokens"] / _HOUR_S * price_per_gpu_hour


def answers(points: Sequence[dict[str, Any]], axis: Axis, error: float) -> dict[str, Any]:
    """What follows from the points that have a plan: values of the axis, None where there is none.

    least and most: that fit. fastest: most tokens/s; cheapest: fewest GPU-seconds a token; each with its ties, the sizes that
    are within `error`, the model's between two layouts. knee: the last size before an added GPU brings less than half of what one
    brings at the cheapest (over GPUs); the least size within `error` of the fastest (over batches and sequences).
    fewer_is_faster: sizes that fewer GPUs beat.
    fewest_between (added by `sweep`): the least number of GPUs with a plan, where a size without one stands before the first.
    """
    planned = [point for point in points if point["step_s"] is not None]
    if not planned:
        return dict.fromkeys(("least", "most", "fastest", "cheapest", "knee"), None) | {"fewer_is_faster": []}
    planned.sort(key=lambda point: point["value"])
    return {
        "least": planned[0]["value"],
        "most": planned[-1]["value"],
        "fastest": _best(planned, lambda point: point["tokens_per_s"], error),
        "cheapest": _best(planned, lambda point: 1 / point["gpu_s_per_million_tokens"], error),
        "knee": _knee(planned) if axis is Axis.GPUS else _saturated(planned, error),
        "fewer_is_faster": _fewer_is_faster(planned, error) if axis is Axis.GPUS else [],
    }


def _best(planned: Sequence[dict[str, Any]], rate: Callable[[dict[str, Any]], float], error: float) -> dict[str, Any]:
    best = max(planned, key=rate)
    ties = [point["value"] for point in planned if point is not best and rate(best) / rate(point) - 1 <= error]
    return {"value": best["value"], "ties": ties}


def _knee(planned: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last size before the first whose added GPUs bring less than half; None where none does.

    A size that a smaller one beats is passed over: it tells of its own divisors, not of size.
    """
    front = [point for place, point in enumerate(planned) if all(_slower(one, point) for one in planned[:place])]
    most = max(point["tokens_per_s"] / point["gpus"] for point in planned)
    for before, after in pairwise(front):
        each = (after["tokens_per_s"] - before["tokens_per_s"]) / (after["gpus"] - before["gpus"])
        if each < _KNEE_SHARE * most:
            return {"value": before["value"], "next": after["value"], "share_of_added_gpu": each / most}
    return None


def _slower(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tokens_per_s"] < other["tokens_per_s"])


def _saturated(planned: Sequence[dict[str, Any]], error: float) -> dict[str, Any] | None:
    fastest = max(point["tokens_per_s"] for point in planned)
    found = next(point for point in planned if fastest / point["tokens_per_s"] - 1 <= error)
    return {"value": found["value"], "next": None, "share_of_added_gpu": None}


def _fewer_is_faster(planned: Sequence[dict[str, Any]], error: float) -> list[dict[str, Any]]:
    """Each size that a smaller one beats, with the fastest such; within the model's error where that is so."""
    found = []
    for place, more in enumerate(planned):
        smaller = planned[:place]
        fewer = min(smaller, key=lambda point: point["step_s"], default=None)
        if fewer is not None and fewer["step_s"] < more["step_s"]:
            gain = more["step_s"] / fewer["step_s"] - 1
            found.append({"more": more["value"], "fewer": fewer["value"], "gain": gain, "within_error": gain <= error})
    return found


def _no_plan(
    request: CompleteRequest, axis: Axis, points: Sequence[dict[str, Any]], time_limit_s: float | None
) -> InfeasibleError | TimeLimitError:
    late = [point["value"] for point in points if point["status"] == "not reached"]
    tried = [point for point in points if point["status"] == "infeasible"]
    if late:
        limit = "" if time_limit_s is None else f" of {time_limit_s:g} s"
        return TimeLimitError(
            f"the time limit{limit} ended before the first plan of the sweep; infeasible: {len(tried)}, not reached: {len(late)} "
            f"of {len(points)} sizes"
        )
    sizes = ", ".join(str(point["value"]) for point in tried)
    return InfeasibleError(
        f"{request.model.name} has no plan at any size of the sweep, {axis.value} = {sizes}",
        relaxations=(
            *dict.fromkeys(point["why"] for point in tried),
            f"`plan` at one size tells what would have to change, `--sweep` takes larger {AXES[axis].words}"
            if axis is Axis.GPUS
            else f"`plan` at one size tells what would have to change, `--sweep` takes smaller {AXES[axis].words}",
        ),
    )
