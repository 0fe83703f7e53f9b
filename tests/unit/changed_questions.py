"""Questions with one thing changed, by arithmetic of the tests' own; and what a change that was told must do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cost_models.problem import Problem
from cost_models.records import Cluster, Verdict
from planner.choose import choose
from planner.decisions import decision_of
from planner.errors import InfeasibleError
from planner.predict import predict
from planner.readers.pins import Pins
from planner.search.best_first import search
from planner.search.pooled import price
from planner.what_if.feasible import space_of

GIB = 2**30


def has_plan(problem: Problem, pins: Pins, worlds: tuple[int, ...] | None = None) -> bool:
    try:
        search(price(problem, space_of(problem, pins, worlds), at_risk=True), delta=0.0)
    except InfeasibleError:
        return False
    return True


def with_memory(cluster: Cluster, gib: float) -> Cluster:
    """The same GPUs with another memory each."""
    pool = cluster.pools[0]
    device = replace(pool.kind.device, memory_bytes=round(gib * GIB))
    return replace(cluster, pools=(replace(pool, kind=replace(pool.kind, device=device)),))


def on(cluster: Cluster, gpus: int) -> tuple[Cluster, tuple[int, ...] | None]:
    """So many GPUs, by arithmetic of this test's own."""
    if gpus <= cluster.num_gpus:
        return cluster, (gpus,)
    pool = cluster.pools[0]
    assert gpus % pool.kind.gpus_per_node == 0
    return replace(cluster, pools=(replace(pool, num_nodes=gpus // pool.kind.gpus_per_node),)), None


def applied(
    problem: Problem, pins: Pins, worlds: tuple[int, ...] | None, kind: str, value: Any
) -> tuple[Problem, Pins, tuple[int, ...] | None]:
    """The question with one thing changed."""
    if kind == "gpus":
        cluster, worlds = on(problem.cluster, value)
        return replace(problem, cluster=cluster), pins, worlds
    if kind == "device_memory_times":
        pools = tuple(
            replace(
                one,
                kind=replace(
                    one.kind,
                    device=replace(
                        one.kind.device, memory_bytes=int(one.kind.device.memory_bytes * round(value * 100)) // 100
                    ),
                ),
            )
            for one in problem.cluster.pools
        )
        return replace(problem, cluster=replace(problem.cluster, pools=pools)), pins, worlds
    if kind == "device_memory_gib":
        return replace(problem, cluster=with_memory(problem.cluster, value)), pins, worlds
    if kind == "without_pin":
        dropped = value.split(", ")
        return problem, Pins(pins=tuple(pin for pin in pins.pins if str(pin) not in dropped)), worlds
    if kind in ("seq", "gbs"):
        return replace(problem, workload=replace(problem.workload, **{kind: value})), pins, worlds
    assert kind == "offload"
    return replace(problem, offload=tuple(value)), pins, worlds


def hold(question: tuple[Problem, Pins, tuple[int, ...] | None], change: Mapping[str, Any]) -> None:
    """The change makes it fit, with the numbers told; what is too little does not."""
    problem, pins, worlds = applied(*question, change["kind"], change["value"])
    answer = choose(problem, pins=pins, worlds=worlds, delta=0.0)
    decision = decision_of(problem, answer.choice.chosen)
    predicted = predict(problem, decision)
    assert str(decision.layout) == change["layout"]
    assert predicted.step_s == pytest.approx(change["step_s"], rel=1e-9)
    assert predicted.memory_gib_max == pytest.approx(change["memory_gib_max"], rel=1e-9)
    assert predicted.verdict == change["verdict"] != Verdict.NO
    if change["too_little"] is not None:
        assert not has_plan(*applied(*question, change["kind"], change["too_little"]))
