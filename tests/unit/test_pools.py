"""Mixed clusters: where stages lie, what they cost there, and the choice against every plan written down."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from random_problems import every_column

from cost_models.calibrations import shipped
from cost_models.collectives import Collective, collective_s, fabric
from cost_models.peaks import memory_report
from cost_models.placement import Placement, hop_table_s, price_pools
from cost_models.problem import Cells, Problem
from cost_models.records import (
    Cluster,
    FabricException,
    Pool,
    Precision,
    RecordError,
    Schedule,
    Workload,
    from_json,
    normalised,
    to_json,
)
from cost_models.records.plan import Stage, plan_of
from planner.certificate import derived_again
from planner.choose import choose
from planner.decisions import decision_of, decision_of_layout, decision_of_stages
from planner.errors import InfeasibleError, InputError
from planner.explain import why_not
from planner.plan import make_plan
from planner.predict import predict, simulated
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.node_presets import preset_cluster
from planner.readers.pins import parse_pins
from planner.readers.requests import complete, read_request
from planner.readers.runtimes import read_runtime
from planner.report.plan_text import plan_text
from planner.search.arrangements import MOST_ORDERS, arrangements, legal_pipelines
from planner.search.best_first import search
from planner.search.exhaustive import best_plan, lower_bound_of, objective_of, plans
from planner.search.incumbent import least_objective
from planner.search.least_r import least_lower_bound_s
from planner.search.pooled import Pooled, price
from planner.search.stages import CellProblem
from planner.what_if.feasible import space_of

LLAMA = read_model("llama3-8b")
TINY = replace(LLAMA, name="tiny", num_layers=4, hidden=2048, ffn=8192, heads=16, kv_heads=8, head_dim=128, vocab=32000)


def mixed(cluster: Cluster | str, *, model=LLAMA, gbs: int = 48, seq: int = 4096, runtime: str = "megatron") -> Problem:
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    narrow = any("bf16" not in pool.kind.device.peak_flops_per_s for pool in cluster.pools)
    return Problem(
        model=model,
        cluster=cluster,
        workload=Workload(seq=seq, gbs=gbs, precision=Precision.FP16 if narrow else Precision.BF16),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )


def layers_of_pools(plan) -> dict[int, int]:
    """Layers of each pool."""
    found: dict[int, int] = {}
    for stage in plan.stages:
        found[stage.pool] = found.get(stage.pool, 0) + sum(stage.recompute.values())
    return found


def twins(name: str, num_gpus: int) -> Cluster:
    """The preset's GPUs in two pools of equal nodes with unlike names."""
    (pool,) = preset_cluster(name, num_gpus // 2).pools
    other = replace(pool, kind=replace(pool.kind, name="the same under another name"))
    return Cluster(name="twins", pools=(pool, other))


# Arrangements ------------------------------------------------------------------------------------------------------------


def test_stages_are_in_the_ratio_of_the_gpus_and_the_order_of_the_pools_comes_first() -> None:
    assert arrangements([8, 16], 24, 3) == ((0, 1, 1), (1, 1, 0), (1, 0, 1))
    assert len(arrangements([8, 8, 8], 24, 3)) == 6
    assert len(set(arrangements([64, 128, 64], 256, 4))) == 12
    assert len(arrangements([8, 8 * 23], 8 * 24, 24)) == 24
    assert arrangements([8, 16], 24, 4) == ()
    assert arrangements([8, 16], 24, 1) == ()
    found = arrangements([64, 128, 64], 256, 8)
    assert len(found) == 6
    assert found[0] == (0, 0, 1, 1, 1, 1, 2, 2)
    assert legal_pipelines([64, 128, 64]) == 4
    assert legal_pipelines([8, 12]) == 5


@pytest.mark.parametrize("gpus", [(8, 8), (4, 12), (8, 16, 8)])
def test_of_idle_gpus_one_pool_at_most_is_used_in_part(gpus: tuple[int, ...]) -> None:
    for world in range(2, sum(gpus)):
        for pp in [n for n in range(1, world + 1) if world % n == 0]:
            each = world // pp
            for one in arrangements(gpus, world, pp):
                counts = [one.count(pool) for pool in range(len(gpus))]
                assert sum(counts) == pp
                assert all(count * each <= have for count, have in zip(counts, gpus, strict=True))
                partly = [n for n, have in zip(counts, gpus, strict=True) if 0 < n < have // each]
                assert len(partly) <= 1
                orders = math.factorial(pp) // math.prod(math.factorial(count) for count in counts)
                assert orders <= MOST_ORDERS or len(list(itertools.groupby(one))) == len(set(one))
    assert (0,) in arrangements(gpus, gpus[0], 1)


def test_the_permutation_puts_each_stage_on_the_gpus_of_its_pool() -> None:
    assert Placement((0, 1, 1)).permutation(6) is None
    assert Placement((1, 1, 0)).permutation(6) == (2, 3, 4, 5, 0, 1)
    assert Placement((1, 0, 1)).permutation(6) == (2, 3, 0, 1, 4, 5)


# Prices ------------------------------------------------------------------------------------------------------------------


def test_a_hop_between_pools_takes_the_slower_sides_network() -> None:
    problem = mixed("h100x8+a100-80x16+v100-32x8")
    layout = normalised(tp=8, pp=4)
    cells = Cells.of([layout])
    prices = price_pools(problem, cells, (0, 1, 2))
    table = hop_table_s(prices, 0, Placement((0, 1, 1, 2)))[:, 1]
    num_bytes = float(prices[0].hop_bytes[0])

    def alone_s(pool: int) -> float:
        far = fabric(
            replace(problem.cluster.pool(pool), pools=(replace(problem.cluster.pools[pool], num_nodes=2),)), shipped()
        )
        return float(collective_s(far, Collective.P2P, num_bytes, 2, 8).total)

    hidden = 1 - table[1] / alone_s(1)  # inside pool 1, from node to node
    assert 0 <= hidden < 1
    assert table[0] >= table[1]  # h100's network is faster than a100's, so a100's counts
    assert table[0] == pytest.approx(max(alone_s(0), alone_s(1)) * (1 - hidden), rel=1e-9)
    assert table[2] > table[1]  # v100's is the slowest


@pytest.mark.parametrize("pools", [(0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1)])
def test_equal_pools_under_two_names_cost_what_one_pool_does(pools: tuple[int, ...]) -> None:
    two, one = mixed(twins("h100", 16)), mixed("h100x16")
    layout = normalised(tp=2, pp=4, dp=2, mbs=2, zero=1)
    blocks = [(0, 9), (10, 17), (18, 25), (26, 33)]
    stages = tuple(
        Stage(virtual=n, device=n, blocks=b, recompute={"none": b[1] - b[0] + (n in (1, 2))}, pool=pool)
        for n, (b, pool) in enumerate(zip(blocks, pools, strict=True))
    )
    mine = decision_of_stages(two, layout, stages)
    plain = decision_of_stages(one, layout, tuple(replace(stage, pool=None) for stage in stages))
    if pools == (0, 0, 1, 1):  # as ranks lie in one pool: the second and third stage are in two nodes
        assert simulated(two, mine).simulation.step_s == simulated(one, plain).simulation.step_s
        assert predict(two, mine).memory_gib_max == predict(one, plain).memory_gib_max
    else:
        assert simulated(two, mine).simulation.step_s == pytest.approx(
            simulated(one, plain).simulation.step_s, rel=0.02
        )
    assert mine.ranks.permutation == Placement(pools).permutation(16)


def test_equal_pools_are_planned_as_one() -> None:
    pins = parse_pins("pp=2|4, sched=1f1b")
    two = choose(mixed(twins("a100-80", 16)), pins=pins)
    one = choose(mixed("a100-80x16"), pins=pins)
    assert two.choice.objective_s == pytest.approx(one.choice.objective_s, rel=1e-9)
    assert two.choice.chosen.simulated_s == pytest.approx(one.choice.chosen.simulated_s, rel=1e-9)
    assert two.choice.gap_objective == 0


def test_a_pool_twice_as_fast_gets_about_twice_the_layers() -> None:
    slow, fast = preset_cluster("a100-80", 8).pools[0], preset_cluster("a100-80", 8).pools[0]
    device = fast.kind.device
    twice = {
        name: {precision: 2 * rate for precision, rate in getattr(device, name).items()}
        for name in ("peak_flops_per_s", "matmul_flops_per_s")
    }
    device = replace(device, memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s, **twice)
    fast = replace(fast, kind=replace(fast.kind, name="twice", device=device))
    problem = mixed(Cluster(name="c", pools=(slow, fast)), model=replace(LLAMA, num_layers=60), gbs=192)
    answer = choose(problem, pins=parse_pins("pp=2, sched=1f1b"))
    layers = layers_of_pools(decision_of(problem, answer.choice.chosen))
    assert 1.7 <= layers[1] / layers[0] <= 2.4


def test_a_pool_with_little_memory_recomputes_or_holds_less() -> None:
    (pool,) = preset_cluster("h100", 8).pools
    held = {}
    for size in (40, 24, 14):
        kind = replace(pool.kind, name="less", device=replace(pool.kind.device, memory_bytes=size * 2**30))
        cluster = Cluster(name="c", pools=(pool, replace(pool, kind=kind)))
        problem = mixed(cluster)
        decision = decision_of(problem, choose(problem, pins=parse_pins("pp=2, tp=2, mbs=1, sched=1f1b")).choice.chosen)
        devices = memory_report(problem, decision)
        for stage in decision.stages:
            limit = (80 if stage.pool == 0 else size) * 2**30
            assert devices[stage.device].peak_bytes < limit
        small = next(stage for stage in decision.stages if stage.pool == 1)
        held[size] = small.recompute.get("full", 0), sum(small.recompute.values())
    assert held[40][0] < held[24][0] < held[14][0]  # layers that keep nothing but their input
    assert held[14][1] < held[40][1]


def test_exceptions_of_a_node_stay_with_its_pool() -> None:
    cluster = replace(read_cluster("h100x16+a100-80x16"), exceptions=(FabricException(node=3, nic_factor=0.5),))
    assert cluster.pool(0).exceptions == ()
    assert cluster.pool(1).exceptions == (FabricException(node=1, nic_factor=0.5),)
    assert cluster.pool(1).num_gpus == 16
    assert read_cluster("h100x16").pool(0) == read_cluster("h100x16")


# Every plan --------------------------------------------------------------------------------------------------------------


def scaled_peak(cell: CellProblem, picks: tuple[int, ...], weights: tuple[float, ...]) -> float:
    """Bytes of the fullest device at its fullest moment, each divided by the weight of its pool."""
    columns, pp = cell.columns, cell.layout.pp
    return max(
        sum(
            columns.state_bytes[pick] + alive * columns.activation_bytes[pick]
            for alive, pick in zip(vector, picks[device::pp], strict=True)
        )
        / weights[cell.pools[device]]
        for device, vectors in enumerate(cell.in_flight)
        for vector in vectors
    )


def limited(priced: Pooled, limits: list[float]) -> Pooled:
    """With so many bytes on the devices of each pool."""
    pools = tuple(replace(one, memory_limit_bytes=limit) for one, limit in zip(priced.of_pools, limits, strict=False))
    return replace(priced, of_pools=pools, memory_limit_bytes=max(limits[: len(pools)]))


def recomputed(cell: CellProblem, picks: tuple[int, ...]) -> int:
    return int(cell.columns.recompute_counts[list(picks), 1:].sum())


CLUSTERS = ["h100x2+a100-80x2", "a100-80x1+v100-32x2", "h100x1+a100-80x1+v100-32x2"]
WEIGHTS = (1.0, 0.6, 0.8)
"""Memory of the devices of each pool, for that of the first."""


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("share", [-0.01, 0.01, 0.5, 9.0])
def test_columns_and_bounds_of_every_arrangement_against_every_plan(cluster: str, share: float) -> None:
    problem = mixed(cluster, model=replace(TINY, num_layers=3), gbs=12, seq=8192)
    roomy = price(problem, space_of(problem, parse_pins("")))
    assert isinstance(roomy, Pooled)
    compared = tight = 0
    for index in range(0, len(roomy.space), max(1, len(roomy.space) // 16)):
        whole = every_column(roomy.without_limit(), index)
        peaks = {picks: scaled_peak(whole, picks, WEIGHTS) for picks in plans(whole)}
        plain = min(peak for picks, peak in peaks.items() if not recomputed(whole, picks))
        least = min(peaks.values())
        if plain == least and share < 0:
            continue
        unit = least + share * (plain - least)
        priced = limited(roomy, [unit * weight for weight in WEIGHTS])
        cell = replace(whole, memory_limit_bytes=np.array([unit * WEIGHTS[pool] for pool in whole.pools]))
        best, bound_s = best_plan([cell]), priced.bounds_below(np.inf, np.array([index]))[0]
        assert priced.fits(index) == (best is not None)
        found = least_objective(priced.cell(index, np.inf))
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        assert priced.objective_bounds_s[index] <= bound_s <= best.objective_s * (1 + 1e-9)
        below_s = best.objective_s * (1 + 1e-9)
        assert priced.bounds_below(below_s, np.array([index]))[0] <= below_s
        narrow = least_objective(priced.cell(index, below_s))
        assert narrow is not None
        assert narrow.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        least_r = min(lower_bound_of(cell, picks) for picks in plans(cell))
        assert priced.simulated_bounds_s[index] <= least_r * (1 + 1e-9)
        assert priced.simulated_bounds_below(least_r * (1 + 1e-9), np.array([index]))[0] <= least_r * (1 + 1e-9)
        if cell.layout.vpp == 1:
            exact = least_lower_bound_s(priced.cell_for_bound(index, 2 * least_r), 2 * least_r)
            assert exact == pytest.approx(least_r, rel=1e-9)
        compared += 1
        tight += recomputed(cell, best.picks) > 0
    assert compared > 5 if share > 0 else not compared
    assert (tight > 0) == (0 < share < 1)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("share", [0.2, 0.5, 9.0])
def test_the_choice_is_the_best_of_every_plan(cluster: str, share: float) -> None:
    problem = mixed(cluster, model=replace(TINY, num_layers=3), gbs=6, seq=8192)
    roomy = price(problem, space_of(problem, parse_pins("zero<=1")))
    assert isinstance(roomy, Pooled)
    cells = [every_column(roomy.without_limit(), index) for index in range(len(roomy.space))]
    least = sorted(min(scaled_peak(cell, picks, WEIGHTS) for picks in plans(cell)) for cell in cells)
    unit = least[0] + share * (least[-1] - least[0])
    priced = limited(roomy, [unit * weight for weight in WEIGHTS])
    choice = search(priced, delta=0.0)
    limits = [np.array([unit * WEIGHTS[pool] for pool in cell.pools]) for cell in cells]
    best = best_plan([replace(cell, memory_limit_bytes=limit) for cell, limit in zip(cells, limits, strict=True)])
    assert best is not None
    assert choice.objective_s == pytest.approx(best.objective_s, rel=1e-6)
    assert choice.gap_objective == 0
    assert choice.chosen.cell.pools in priced.space.arrangements


def scattered(priced: Pooled) -> Pooled:
    """The space where the stages of a pool need not be neighbours: every order of the stages' pools."""
    space = priced.space
    shapes = {tuple(sorted(one)): sorted(set(itertools.permutations(one))) for one in space.arrangements}
    every = tuple(dict.fromkeys(one for orders in shapes.values() for one in orders))
    assert space.arrangement is not None
    row, number = [], []
    for index in range(len(space)):
        pools = space.pools(index)
        if pools == tuple(sorted(pools)):
            orders = shapes[pools]
            row += [index] * len(orders)
            number += [every.index(one) for one in orders]
    placed = replace(
        space,
        cells=space.cells.take(np.array(row)),
        families=np.arange(len(row)),
        arrangement=np.array(number),
        arrangements=every,
    )
    return price(priced.problem, placed)  # type: ignore[return-value]


@pytest.mark.parametrize(("cluster", "num_layers"), [("h100x3+a100-80x6", 8), ("h100x4+a100-80x4", 16)])
def test_orders_of_stages_that_are_not_tried_are_no_better(cluster: str, num_layers: int) -> None:
    """Every order of every pipeline, against those that the space holds."""
    problem = mixed(cluster, model=replace(TINY, num_layers=num_layers), gbs=36, seq=4096)
    priced = price(problem, space_of(problem, parse_pins("zero<=1, sched=1f1b")))
    assert isinstance(priced, Pooled)
    some, every = search(priced, delta=0.0), search(scattered(priced), delta=0.0)
    assert len(scattered(priced).space) > len(priced.space)
    assert every.objective_s <= some.objective_s * (1 + 1e-9)
    assert some.objective_s <= every.objective_s * 1.01


def test_a_slow_pool_at_both_ends_takes_embedding_and_head() -> None:
    problem = mixed("h100x2+v100-16x4", model=replace(TINY, num_layers=6), gbs=24, seq=4096)
    priced = price(problem, space_of(problem, parse_pins("zero<=1")))
    assert search(priced, delta=0.0).chosen.cell.pools == (1, 0, 1)


# Decisions, plans and doors -----------------------------------------------------------------------------------------------


def planned(cluster: str, **changes: object):
    document = {
        "model": "llama3-8b",
        "cluster": cluster,
        "workload": {"seq": 4096, "gbs": 48},
        "runtime": "megatron",
        **changes,
    }
    return complete(read_request(document, "a test"))


def test_a_plan_says_where_its_stages_lie_and_can_be_read_back_and_proved_again() -> None:
    plan = make_plan(planned("a100-80x8+h100x8"), calibration=shipped())
    pools = {stage.device: stage.pool for stage in plan.decision.stages}
    assert set(pools.values()) == {0, 1}
    assert layers_of_pools(plan.decision)[1] > layers_of_pools(plan.decision)[0]
    assert plan.certificate is not None
    assert plan.predicted is not None
    assert plan.certificate.status == "optimal"
    assert any("neighbours" in one for one in plan.certificate.restrictions)
    again = plan_of(json.loads(json.dumps(to_json(plan))), "a test")
    assert again == plan
    assert derived_again(again)["faults"] == []
    text = plan_text(plan)
    assert "a100-80" in text
    assert "h100" in text
    problem = mixed("a100-80x8+h100x8")
    assert predict(problem, plan.decision).step_s == plan.predicted.step_s
    assert plan.predicted.step_s == pytest.approx(plan.certificate.simulated_s, rel=1e-9)


def test_a_single_pool_is_not_named_in_a_plan() -> None:
    plan = make_plan(planned("h100x8"), calibration=shipped())
    assert "pool" not in to_json(plan.decision.stages[0])
    assert plan.decision.ranks.permutation is None


def test_idle_gpus_are_named() -> None:
    plan = make_plan(planned("h100x8+v100-32x8"), calibration=shipped(), gpus="8")
    assert {stage.pool for stage in plan.decision.stages} == {0}
    assert "8 v100-32 idle" in plan_text(plan).replace("\n", " ")
    assert plan.decision.workload.precision == Precision.FP16


def test_what_does_not_fit_is_said_of_the_gpu_that_is_fullest_for_its_size() -> None:
    plan = make_plan(planned("a100-80x8+v100-16x8"), calibration=shipped())
    assert plan.predicted is not None
    assert plan.predicted.memory_gib_usable < 16  # the A100 holds more, and has more left
    assert (
        max(max(one.phase_memory_bytes.values()) for one in plan.predicted.stages)
        > plan.predicted.memory_gib_max * 2**30
    )
    memory = why_not(plan, "tp1 pp2 zero0 mbs4")["memory"]
    assert memory["usable_gib"] == plan.predicted.memory_gib_usable
    assert memory["over_gib"] == pytest.approx(memory["expected_gib"] - memory["usable_gib"])


def test_plans_name_pools_that_exist_and_have_room() -> None:
    plan = to_json(make_plan(planned("a100-80x8+h100x8"), calibration=shipped()))
    for pool, words in ((7, "has the pools 0..1"), (0, "need 16 GPUs, but it has 8"), (None, "all stages name theirs")):
        edited = json.loads(json.dumps(plan))
        for stage in edited["decision"]["stages"][: 1 if pool != 0 else None]:
            stage["pool"] = pool
        with pytest.raises(RecordError, match=words):
            plan_of(edited, "a test")
    stage = from_json(Stage, {"virtual": 0, "device": 0, "blocks": [0, 1], "recompute": {}})
    assert stage.pool is None


def test_a_layout_of_today_lies_in_the_order_of_the_pools() -> None:
    problem = mixed("h100x8+a100-80x8")
    decision = decision_of_layout(problem, normalised(tp=4, pp=4, mbs=1), world=16)
    assert [stage.pool for stage in decision.stages] == [0, 0, 1, 1]
    assert decision.ranks.permutation is None
    with pytest.raises(InputError, match=r"pools of 8 \+ 8 GPUs.*legal pp on 16 GPUs: 2, 4, 8, 16"):
        decision_of_layout(problem, normalised(tp=4, dp=4, mbs=1), world=16)


def test_a_request_says_where_the_stages_of_its_layout_lie() -> None:
    layout = {"tp": 4, "pp": 4, "mbs": 1, "dp": 1, "pools": [1, 1, 0, 0]}
    request = planned("h100x8+a100-80x8", layout=layout)
    assert request.pools == (1, 1, 0, 0)
    assert request.layout is not None
    problem = mixed("h100x8+a100-80x8")
    decision = decision_of_layout(problem, request.layout, world=16, pools=request.pools)
    assert [stage.pool for stage in decision.stages] == [1, 1, 0, 0]
    assert decision.ranks.permutation is not None
    plan = make_plan(request, calibration=shipped())
    (today,) = [one for one in plan.alternatives if one.note == "current"]
    assert [stage.pool for stage in today.decision.stages] == [1, 1, 0, 0]
    unsaid = planned("h100x8+a100-80x8", layout={key: value for key, value in layout.items() if key != "pools"})
    assert unsaid.pools == ()
    assert "order" in unsaid.defaults["layout.pools"]


@pytest.mark.parametrize(
    ("cluster", "pools", "words"),
    [
        ("h100x8+a100-80x8", [0, 1], r"a pool for each of the pp=4 stages is needed; legal numbers: 0, 1"),
        ("h100x8+a100-80x8", [0, 1, 2, 0], "legal numbers: 0, 1"),
        ("h100x8+a100-80x8", [0, 0, 0, 1], "3 stages of 4 GPUs need 12 GPUs of pool 0, which has 8"),
        ("h100x16", [0, 0, 0, 0], "has one pool; leave it out"),
    ],
)
def test_pools_of_a_layout_that_cannot_be_are_refused(cluster: str, pools: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planned(cluster, layout={"tp": 4, "pp": 4, "mbs": 1, "dp": 1, "pools": pools})


def test_stages_that_fill_no_pool_are_refused_with_the_legal_pipelines() -> None:
    with pytest.raises(InfeasibleError, match="multiples of 3"):
        space_of(mixed("h100x8+a100-80x16"), parse_pins("pp=4|8"))


def test_schedules_without_a_formula_are_left_out_by_name() -> None:
    space = space_of(mixed("h100x8+a100-80x8", runtime="generic"), parse_pins(""))
    assert Schedule.ZBV not in set(space.cells.schedule.tolist())
    assert any("played" in one for one in space.restrictions)


def test_a_pool_more_is_never_worse_and_faster_gpus_are_faster() -> None:
    pins = parse_pins("pp=2, sched=1f1b")
    slow = choose(mixed("a100-80x8+v100-32x8", gbs=96), pins=pins).choice.objective_s
    fast = choose(
        replace(mixed("a100-80x8+h100x8", gbs=96), workload=Workload(seq=4096, gbs=96, precision=Precision.FP16)),
        pins=pins,
    )
    assert fast.choice.objective_s < slow


def test_objectives_of_the_search_are_those_of_plain_arithmetic() -> None:
    problem = mixed("h100x8+a100-80x8")
    chosen = choose(problem, pins=parse_pins("pp=2")).choice.chosen
    assert objective_of(chosen.cell, chosen.picks.tolist()) == pytest.approx(chosen.objective_s, rel=1e-9)


def test_clusters_are_joined_by_plus() -> None:
    cluster = read_cluster("h100x64 + a100-80x128+v100-32x64")
    assert [pool.num_gpus for pool in cluster.pools] == [64, 128, 64]
    assert cluster.num_gpus == 256
    assert from_json(Cluster, to_json(cluster)) == cluster
    assert len(read_cluster("h100x8+h100x16").pools) == 1
    (pool,) = read_cluster("a100-80x8").pools
    assert read_cluster("h100x8+a100-80x8").pools[1] == pool == Pool(kind=pool.kind, num_nodes=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100x64+a100x8", r"joined by \+.*near names: a100-40x8, a100-80x8"),
        ("h100x8+", r"nothing on one side of a \+"),
        ("h100x12+a100-80x8", "do not fill whole nodes"),
        ("h100x8+a100-80x0", "zero GPUs"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_of_the_whole(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_cluster(text)


def test_the_default_precision_is_one_that_every_pool_has() -> None:
    request = planned("h100x8+v100-32x8")
    assert request.workload.precision == Precision.FP16
    assert "v100-32 has no bf16" in request.defaults["workload.precision"]
    assert planned("h100x8+a100-80x8").workload.precision == Precision.BF16


def test_the_command_plans_on_a_mixed_cluster(tmp_path) -> None:
    arguments = [
        "--model",
        "llama3-8b",
        "--cluster",
        "a100-80x8+h100x8",
        "--batch",
        "48",
        "--seq",
        "4096",
        "--runtime",
        "megatron",
    ]
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "executor"]
    told = subprocess.run(
        [*command, "plan", *arguments, "-o", str(out)], capture_output=True, text=True, timeout=100, check=True
    )
    assert (
        "on"
        in told.stdout.splitlines()[[line.startswith("stage") for line in told.stdout.splitlines()].index(True)].split()
    )
    again = subprocess.run(
        [*command, "predict", str(out), "--json"], capture_output=True, text=True, timeout=100, check=True
    )
    plan = json.loads(out.read_text())
    assert json.loads(again.stdout)["predicted"]["step_s"] == plan["predicted"]["step_s"]
