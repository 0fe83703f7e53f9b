"""Rank orders: groups of every order written out rank by rank, and prices that feel what `places` says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.block_prices import price_blocks
from cost_models.calibrations import shipped
from cost_models.collectives import Collective, collective_s
from cost_models.links import fabric
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.rank_orders import evenly_spaced, in_other_orders, moved_axes, orders_of, places
from cost_models.records import Gather, Layout, Ranks, Workload
from cost_models.stage import late_s
from planner.decisions import decision_of_layout
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.runtimes import read_runtime

EVERY = tuple(itertools.permutations(RANK_ORDER))


def ranks_of(layout, order):
    """Ranks by coordinate in RANK_ORDER, written out."""
    degrees = [getattr(layout, axis) for axis in order]
    flat = np.arange(layout.world).reshape(degrees[::-1])
    inside_out = np.transpose(flat)  # axes as in `order`
    return np.transpose(inside_out, [order.index(axis) for axis in RANK_ORDER])


def spaced(ranks):
    """The one distance between neighbours of every group along the last axis; None where there are several."""
    steps = {step for group in ranks.reshape(-1, ranks.shape[-1]) for step in np.diff(np.sort(group)).tolist()}
    return next(iter(steps)) if len(steps) == 1 else (None if steps else 1)


def joined(ranks, axes):
    """Groups over several axes, one a row."""
    places_of = [RANK_ORDER.index(axis) for axis in axes]
    rest = [place for place in range(len(RANK_ORDER)) if place not in places_of]
    moved = np.transpose(ranks, [*rest, *places_of])
    return moved.reshape(*moved.shape[: len(rest)], -1)


@given(st.sampled_from(EVERY), st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5), st.booleans())
def test_groups_are_those_written_out(order, degrees, divided):
    named = dict(zip(RANK_ORDER, degrees, strict=True))
    if not divided:
        named["dp_shard"] = 1
    zero = 1 if divided and named["dp_shard"] * named["cp"] > 1 else 0
    if zero == 0 and named["dp_shard"] > 1:
        return
    layout = Layout(**named, zero=zero)
    cells, ranks = Cells.of([layout], order), ranks_of(layout, order)
    for axis in RANK_ORDER:
        if named[axis] > 1:
            assert cells.stride(axis)[0] == spaced(joined(ranks, [axis]))
    shard, replicas = (
        joined(ranks, ["cp", "dp_shard"]),
        joined(ranks, ["dp_replicate"] if zero else ["cp", "dp_replicate"]),
    )
    needed = shard if zero else replicas
    assert bool(evenly_spaced(cells, experts=False)[0]) == (spaced(needed) is not None)
    if spaced(needed) is not None:
        size, stride = cells.shard_group if zero else cells.replica_group
        assert size[0] == needed.shape[-1]
        assert size[0] == 1 or stride[0] == spaced(needed)


def problem_of(cluster="h100x64", model="llama2-7b", runtime="torch", gbs=64):
    return Problem(
        model=read_model(model),
        cluster=read_cluster(cluster),
        workload=Workload(seq=4096, gbs=gbs),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )


LAYOUTS = [
    Layout(tp=2, pp=4, dp_shard=8, zero=3, gather=Gather.USE),
    Layout(tp=4, pp=2, dp_shard=2, dp_replicate=4, zero=3, gather=Gather.USE),
    Layout(tp=2, pp=2, dp_replicate=16),
    Layout(tp=2, cp=2, pp=4, dp_shard=4, zero=1),
]


def test_orders_with_equal_places_cost_the_same_and_are_counted_once():
    problem = problem_of(runtime="generic")
    cells = Cells.of(LAYOUTS)
    links = fabric(problem.cluster, problem.calibration)
    orders = tuple(order for order in EVERY if order != RANK_ORDER)
    found, row = in_other_orders(links, cells, (RANK_ORDER, *orders), experts=False)
    for number in range(len(LAYOUTS)):
        seen = {}
        kept = {found.rank_order(index) for index in np.flatnonzero(row == number).tolist()}
        for order in EVERY:
            one = Cells.of([LAYOUTS[number]], order)
            if not evenly_spaced(one, experts=False)[0]:
                assert order not in kept
                continue
            prices = price_blocks(problem, one)
            cost = (
                *prices.forward_exposed_s.ravel().tolist(),
                *np.concatenate(late_s(prices, np.array([0]), np.array([1e9]), np.array([0.0]))).tolist(),
            )
            place = tuple(places(links, one, experts=False)[0].tolist())
            assert cost == pytest.approx(seen.setdefault(place, cost))
        usual = tuple(places(links, Cells.of([LAYOUTS[number]]), experts=False)[0].tolist())
        assert len(kept) == len(seen) - (usual in seen)


@pytest.mark.parametrize("cluster", ["h100x64", "a100-80x64", "mi300xx64", "v100-32x64", "gb200x144"])
@given(
    st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER]),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.floats(1e3, 1e10),
)
def test_no_group_is_faster_than_the_nearest_ranks(cluster, kind, size, stride, num_bytes):
    links = fabric(read_cluster(cluster), shipped())
    near, far = (collective_s(links, kind, num_bytes, size, step).total for step in (1, stride))
    assert near <= far * (1 + 1e-12)


def test_what_runtimes_can_be_told():
    assert orders_of(read_runtime("torchtitan")) == (RANK_ORDER,)
    assert orders_of(read_runtime("megatron")) == (RANK_ORDER, ("tp", "cp", "pp", "dp_shard", "dp_replicate"))
    every = orders_of(read_runtime("torch"))
    assert len(every) == 60
    assert all(order.index("tp") < order.index("cp") for order in every)


def test_routed_experts_keep_their_place_beside_a_pipeline_inside():
    order = ("tp", "cp", "pp", "dp_shard", "dp_replicate")
    whole = Layout(tp=2, pp=2, dp_shard=8, ep=2, zero=1)
    apart = Layout(tp=2, pp=2, dp_shard=8, ep=4, zero=1)
    cells = Cells.of([whole, apart], order)
    assert evenly_spaced(cells, experts=True).tolist() == [True, False]
    # ep over the two tp ranks, then the pipeline, then eight ranks of edp
    assert [int(one[0]) for one in cells.expert_strides] == [1, 1, 4]
    assert [int(one[0]) for one in cells.expert_shard_group] == [8, 4]


def test_what_moved_is_said():
    problem = problem_of("h100x16")
    decision = decision_of_layout(problem, Layout(tp=2, pp=2, dp_shard=4, zero=3, gather=Gather.USE))
    assert moved_axes(decision) == ("", "", "")
    inside = replace(decision, ranks=Ranks(order=("tp", "pp", "cp", "dp_shard", "dp_replicate")))
    assert moved_axes(inside) == ("tp, pp, dp_shard", "tp, dp_shard, pp", "pp lies inside dp_shard")
