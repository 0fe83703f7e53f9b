"""Two plans on two clusters: which axes moved, over which links their groups go, and what either plan costs on the other's cluster.

The same model on as many GPUs of another network gets another plan where a group would meet a slower link there. So each
decision is priced on both clusters: what staying would have cost, part by part, is the reason for what moved.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cost_models.collectives import groups_of, link_classes
from cost_models.links import fabric
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.rank_orders import moved_axes
from cost_models.records import Calibration, Decision, Plan, RecordError, to_json
from planner.errors import MeshwrightError
from planner.explain import problem_of_plan
from planner.predict import predict

MOVING = ("tp", "cp", "ep", "pp", "vpp", "dp_replicate", "dp_shard", "mbs", "zero")
"""Degrees and options that a network moves."""


def elsewhere(plan: Plan, other: Plan, calibration: Calibration | None = None) -> dict[str, Any] | None:
    """{"moved": {axis: [this, other]}, "this", "other": what each plan and the other's would take on its cluster, and its links}.

    None where the two are not about one question on two clusters of as many GPUs, or one of them is not priced here.
    """
    asked = [
        (one.request.model, one.decision.workload, one.request.runtime, one.decision.layout.world)
        for one in (plan, other)
    ]
    mixed = any(len(one.request.cluster.pools) > 1 for one in (plan, other))
    if asked[0] != asked[1] or plan.request.cluster == other.request.cluster or mixed:
        return None
    if plan.predicted is None or other.predicted is None:
        return None
    try:
        here, there = (problem_of_plan(one, calibration) for one in (plan, other))
        return {
            "moved": _moved(plan.decision, other.decision),
            "this": _on(here, plan.decision, other.decision),
            "other": _on(there, other.decision, plan.decision),
        }
    except (MeshwrightError, RecordError):
        return None


def _moved(this: Decision, other: Decision) -> Mapping[str, list[Any]]:
    pairs = {name: [getattr(one.layout, name) for one in (this, other)] for name in MOVING}
    pairs["order"] = [moved_axes(one)[0] or "usual" for one in (this, other)]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _on(problem: Problem, own: Decision, stranger: Decision) -> dict[str, Any]:
    """What a cluster's own plan takes there, and the one made for the other cluster."""
    mine, theirs = (predict(problem, decision) for decision in (own, stranger))
    return {
        "cluster": problem.cluster.name,
        "own_s": mine.step_s,
        "stranger_s": theirs.step_s,
        "stranger_verdict": theirs.verdict.value,
        "own_parts": to_json(mine.parts),
        "stranger_parts": to_json(theirs.parts),
        "own_links": links_of(problem, own),
        "stranger_links": links_of(problem, stranger),
    }


def links_of(problem: Problem, decision: Decision) -> dict[str, dict[str, Any]]:
    """Axis -> its degree, the class of the slowest link of its groups, and how many members of a group share a fast domain."""
    links, cells = fabric(problem.cluster, problem.calibration), Cells.of([decision.layout], decision.ranks.order)
    found = {}
    for axis in RANK_ORDER:
        size, stride = (np.asarray(one, dtype=float) for one in (getattr(cells, axis), cells.stride(axis)))
        if size[0] > 1:
            found[axis] = {
                "degree": int(size[0]),
                "link": str(link_classes(links, size, stride, cells.world)[0]),
                "inside": int(groups_of(links, size, stride, cells.world).inside[0]),
            }
    return found
