"""Rank orders as options of cells: the choice against every cell in every order, solved one by one."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.calibrations import shipped
from cost_models.problem import RANK_ORDER, Problem
from cost_models.rank_orders import in_other_orders, moved_axes, orders_of
from cost_models.records import Workload, from_json, to_json
from cost_models.records.plan import USUAL_ORDER, Plan
from planner.certificate import derived_again
from planner.choose import choose
from planner.errors import MeshwrightError
from planner.plan import make_plan
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.pins import parse_pins
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime
from planner.report.plan_text import plan_text
from planner.search.incumbent import least_objective
from planner.search.nesting import other_orders
from planner.search.pooled import price
from planner.what_if.feasible import space_of


def problem_of(*, gpus, per_node=4, nics=1, nic_gbit=25.0, layers=4, seq=512, gbs=16, runtime="torch", fabric=()):
    """A small dense model on nodes whose network is thin."""
    cluster = read_cluster("h100x8")
    kind = cluster.pools[0].kind
    nic = replace(kind.nic, bandwidth_bytes_per_s=nic_gbit * 1e9 / 8)
    kind = replace(kind, gpus_per_node=per_node, num_nics=nics, nic=nic)
    pool = replace(cluster.pools[0], kind=kind, num_nodes=gpus // per_node)
    model = replace(read_model("llama2-7b"), num_layers=layers)
    return Problem(
        model=model,
        cluster=replace(cluster, pools=(pool,), fabric=fabric),
        workload=Workload(seq=seq, gbs=gbs),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )


def by_brute_force(problem, pins, at_risk=False):
    """(J*, order) over all cells in all orders."""
    usual = price(problem, space_of(problem, pins), at_risk=at_risk)
    cells, row = in_other_orders(usual.prices.fabric, usual.space.cells, orders_of(problem.runtime), experts=False)
    space = replace(usual.space, cells=cells, families=usual.families[row])
    spaces = [usual] + ([price(problem, space, at_risk=at_risk)] if len(row) else [])
    best = (np.inf, RANK_ORDER)
    for priced in spaces:
        for index in np.argsort(priced.objective_bounds_s, kind="stable").tolist():
            if priced.objective_bounds_s[index] > best[0]:
                break
            found = least_objective(priced.cell(index, np.inf))
            if found is not None and found.objective_s < best[0] * (1 - 1e-12):
                best = (found.objective_s, priced.space.cells.rank_order(index))
    return best


CASES = [
    {"gpus": 8, "seq": 256, "gbs": 8},
    {"gpus": 8, "seq": 2048, "gbs": 16, "nic_gbit": 10.0},
    {"gpus": 16, "seq": 512, "gbs": 16},
    {"gpus": 8, "per_node": 2, "seq": 1024, "gbs": 16, "nic_gbit": 5.0},
    {"gpus": 8, "seq": 1024, "gbs": 32, "runtime": "megatron", "nic_gbit": 5.0},
    {"gpus": 12, "per_node": 4, "seq": 512, "gbs": 12, "layers": 6},
]
PIN = "tp=2, pp=2, dp=4, mbs=1"
PINS = ["", PIN, "tp=2", "pp=2, zero=3", "dp=4, pp=2"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choice_is_the_best_of_every_cell_in_every_order(case):
    problem = problem_of(**case)
    for text in PINS:
        pins = parse_pins(text, problem.runtime.recompute_kinds)
        try:
            space_of(problem, pins)
        except MeshwrightError:
            continue
        answer = choose(problem, pins=pins)
        best_s, _ = by_brute_force(problem, pins, at_risk=answer.at_risk)
        assert answer.choice.objective_s == pytest.approx(best_s, rel=1e-6), text
        assert answer.choice.least_bound_s <= answer.choice.simulated_s


def planned(problem, pin=""):
    request = CompleteRequest(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        layout=None,
        pin=pin,
        defaults={},
    )
    return make_plan(request, calibration=shipped())


@pytest.fixture(scope="module")
def moved():
    """A plan in another order than the usual: few tokens, so gradients weigh more than tensor parallelism's exchanges."""
    return planned(problem_of(gpus=16, seq=512, gbs=16), PIN)


def test_a_plan_in_another_order_says_which_axis_moved_and_what_staying_costs(moved):
    assert moved.decision.ranks.order != RANK_ORDER
    _, _, words = moved_axes(moved.decision)
    text = plan_text(moved)
    assert words in text
    usual = next(other for other in moved.alternatives if other.note == USUAL_ORDER)
    assert usual.decision.ranks.order == RANK_ORDER
    assert usual.decision.stages == moved.decision.stages
    assert moved.predicted is not None
    assert usual.step_s > moved.predicted.step_s
    assert f"({usual.step_s / moved.predicted.step_s - 1:+.1%})" in text


def test_its_file_reads_back_and_its_certificate_comes_out_again(moved):
    assert from_json(Plan, to_json(moved), "here") == moved
    document = derived_again(moved)
    assert document["faults"] == []
    assert any(" order " in cell["cell"] for cell in document["cells"])


def test_a_limit_of_other_orders_that_was_made_up_is_found(moved):
    proof = moved.certificate
    assert proof is not None
    assert proof.orders_below_s is not None
    less = replace(moved, certificate=replace(proof, orders_below_s=(proof.objective_s * 0.5, 0.0)))
    assert derived_again(less)["faults"]


def test_orders_are_looked_at_only_where_groups_can_leave_their_domain():
    near = choose(problem_of(gpus=4), pins=parse_pins("", ()))
    assert near.orders_below_s is None
    assert near.other is None
    far = choose(problem_of(gpus=8, runtime="torchtitan"), pins=parse_pins("", ()))
    assert far.orders_below_s is None


def test_what_is_closed_by_arithmetic_holds_no_better_plan():
    problem = problem_of(gpus=8, seq=1024, gbs=16)
    usual = price(problem, space_of(problem, parse_pins("", ())))
    every = other_orders(usual, objective_below_s=np.inf, simulated_below_s=np.inf)
    assert every is not None
    limit_s = float(np.sort(every.bounds_below(np.inf))[len(every.space) // 4])
    few = other_orders(usual, objective_below_s=limit_s, simulated_below_s=0.0)
    assert few is not None
    assert len(few.space) < len(every.space)
    kept = {few.space.name(index) for index in range(len(few.space))}
    below = every.bounds_below(limit_s) <= limit_s
    assert {every.space.name(index) for index in np.flatnonzero(below).tolist()} <= kept
