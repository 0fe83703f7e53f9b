"""Where a prediction went wrong: compute, which collective, or the bubble. A plan's promise and the parts of a measured step.

A run says of each stage what its busiest rank did inside the phases: compute, standing still for each collective, and what is
left of a pipeline (the bubble). The promise says the same of the device with the most work. So the stage that computes
longest stands beside it. Differences are seconds of a step: they say which error matters, where shares would not.

A collective's own promise is its closed form for the calls and bytes that ran, with nothing to hide behind. A rank stands
still for less where compute hides it, and for more where the link is slower than promised, or where another rank came late.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.collectives import Collective, collective_s, fabric
from cost_models.problem import Problem
from cost_models.records import Decision, Measurement, Prediction

PART, WAIT, MEMORY = "part/", "part/wait ", "memory/"
"""How keys begin of what lies inside the phases, of a collective's waits, and of peaks of memory by phase."""
HOPS = "pp/p2p"
"""Waits for other stages: they are what the bubble is made of."""


def is_inside(one: Measurement) -> bool:
    """It lies inside a phase, or counts memory: no part of the step beside the phases."""
    return (one.phase or one.key).startswith((PART, MEMORY))


def where_it_went_wrong(
    predicted: Prediction, own: Sequence[Measurement], problem: Problem, decision: Decision
) -> dict[str, Any] | None:
    """Rows of parts and of collectives, and the largest difference in words; None where the run did not say its parts."""
    stages: dict[str, dict[str, Measurement]] = {}
    for one in own:
        if one.key.startswith(PART):
            stages.setdefault(one.rank_class or "all", {})[one.key] = one
    if not stages:
        return None
    stage, parts = max(stages.items(), key=lambda item: _median(item[1].get(f"{PART}compute")))
    phases = {one.key: one for one in own if one.rank_class == stage}
    waits = {key.removeprefix(WAIT): one for key, one in parts.items() if key.startswith(WAIT)}
    step = next((one for one in own if one.key == "step"), None)
    own_parts: dict[str, list[Measurement | None]] = {
        "compute": [parts.get(f"{PART}compute")],
        "communication": [one for name, one in waits.items() if name != HOPS],
        "bubble": [parts.get(f"{PART}bubble")],
        "optimizer": [phases.get("optimizer")],
    }
    measured = {name: math.fsum(map(_median, found)) for name, found in own_parts.items()}
    told = [one.samples_s for found in own_parts.values() for one in found if one is not None]
    rest = [total - sum(of_step) for total, *of_step in zip(step.samples_s if step else (), *told, strict=False)]
    measured["other"] = max(0.0, statistics.median(rest)) if rest else 0.0
    promised = {
        "compute": predicted.parts.compute_s,
        "communication": predicted.parts.exposed_communication_s,
        "bubble": predicted.parts.bubble_s,
        "optimizer": predicted.parts.optimizer_s,
        "other": predicted.parts.other_s,
    }
    rows = [
        {"part": name, "predicted_s": promised[name], "measured_s": seconds, "difference_s": promised[name] - seconds}
        for name, seconds in measured.items()
        if promised[name] or seconds
    ]
    collectives = [_collective(name, one, problem, decision) for name, one in waits.items() if name != HOPS]
    collectives.sort(key=lambda row: -row["measured_s"])
    return {"stage": stage, "parts": rows, "collectives": collectives, "largest": _largest(rows, collectives)}


def _median(one: Measurement | None) -> float:
    return statistics.median(one.samples_s) if one is not None else 0.0


def _collective(name: str, one: Measurement, problem: Problem, decision: Decision) -> dict[str, Any]:
    axis, _, operation = name.partition("/")
    alone_s = None
    known = operation in {item.value for item in Collective} and axis in decision.ranks.order
    if known and one.calls and one.bytes and len(problem.cluster.pools) == 1:
        stride = 1
        for inner in decision.ranks.order[: decision.ranks.order.index(axis)]:
            stride *= getattr(decision.layout, inner)
        links = fabric(problem.cluster, problem.calibration)
        size = getattr(decision.layout, axis)
        alone_s = one.calls * float(collective_s(links, operation, one.bytes / one.calls, size, stride).total)
    return {
        "axis": axis,
        "operation": operation,
        "calls": one.calls,
        "bytes": one.bytes,
        "alone_s": alone_s,
        "measured_s": _median(one),
    }


def _largest(rows: Sequence[Mapping[str, Any]], collectives: Sequence[Mapping[str, Any]]) -> str:
    """The part with the largest difference; of communication the collective that was waited for longest beyond its promise."""
    worst = max(rows, key=lambda row: abs(row["difference_s"]))
    more = "less" if worst["difference_s"] < 0 else "more"
    said = f"{worst['part']}: {abs(worst['difference_s']):.3g} s {more} were promised than measured"
    if worst["part"] != "communication" or not collectives:
        return said
    beyond = [(row["measured_s"] - (row["alone_s"] or 0.0), row) for row in collectives]
    row = max(beyond, key=lambda item: item[0] if worst["difference_s"] < 0 else -item[0])[1]
    return f"{said}, mostly for {row['operation']} over {row['axis']}"
