"""A block is priced once for all cells in which it costs the same: each cell must cost what it costs alone."""

from dataclasses import fields, is_dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from cost_models.block_prices import distinct_rows, price_blocks
from cost_models.calibrations import shipped
from cost_models.problem import Cells, Problem
from cost_models.records import Workload, normalised
from planner.choose import space_of
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.pins import Pins
from planner.readers.runtimes import read_runtime


def _arrays(prices: object, path: str = "") -> dict[str, np.ndarray]:
    """Every array of prices, by its path."""
    if isinstance(prices, np.ndarray):
        return {path: prices}
    if isinstance(prices, dict):
        parts = prices.items()
    elif is_dataclass(prices):
        skipped = ("problem", "cells", "fabric", "rates", "distinct_basis_s", "rows")
        parts = [(entry.name, getattr(prices, entry.name)) for entry in fields(prices) if entry.name not in skipped]  # type: ignore[assignment]
    else:
        return {}
    return {name: values for key, part in parts for name, values in _arrays(part, f"{path}.{key}").items()}


@pytest.mark.parametrize(
    ("model", "runtime"), [("mixtral-8x7b", "megatron"), ("llama3-8b", "torch"), ("deepseek-v3", "megatron")]
)
def test_each_cell_of_a_space_costs_what_it_costs_alone(model: str, runtime: str) -> None:
    problem = Problem(
        model=read_model(model),
        cluster=read_cluster("h100x32"),
        workload=Workload(seq=4096, gbs=96),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )
    cells = space_of(problem, Pins()).cells
    prices = price_blocks(problem, cells)
    together = _arrays(prices)
    assert len(distinct_rows(problem, cells)[0]) < len(cells) / 4
    for index in np.random.default_rng(5).choice(len(cells), 40, replace=False).tolist():
        one = price_blocks(problem, cells.take(np.array([index])))
        np.testing.assert_array_equal(one.basis_s(0), prices.basis_s(index))
        alone = _arrays(one)
        assert alone.keys() == together.keys()
        for name, values in alone.items():
            np.testing.assert_array_equal(values[0], together[name][index], err_msg=f"{name} of {cells.layout(index)}")


def test_a_search_prices_the_kinds_of_recompute_that_it_uses() -> None:
    problem = Problem(
        model=read_model("llama3-8b"),
        cluster=read_cluster("h100x8"),
        workload=Workload(seq=4096, gbs=96),
        runtime=read_runtime("megatron"),
        calibration=shipped(),
    )
    cells = space_of(problem, Pins()).cells
    every, few = price_blocks(problem, cells), price_blocks(problem, cells, ("full",))
    assert few.recompute_kinds == ("none", "full")
    places = [every.recompute_kinds.index(kind) for kind in few.recompute_kinds]
    np.testing.assert_array_equal(few.backward_s, every.backward_s[..., places])
    np.testing.assert_array_equal(few.activation_bytes, every.activation_bytes[..., places])
    np.testing.assert_array_equal(few.basis_s(3), every.basis_s(3)[:, places])


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("seq", [512, 1024, 2048, 4096, 16384])
def test_a_faster_device_is_never_slower_with_a_ring(tp: int, seq: int) -> None:
    """What a ring hides behind shrinks with the attention, but where launches set the pace the device then waits for longer."""
    cluster = read_cluster("h100x16")
    (pool,) = cluster.pools
    device = pool.kind.device
    total_s = []
    for factor in (1.0, 1.1, 1.5, 2.0, 4.0):
        faster = replace(
            device,
            peak_flops_per_s={name: factor * flops for name, flops in device.peak_flops_per_s.items()},
            matmul_flops_per_s={name: factor * flops for name, flops in device.matmul_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s,
        )
        kind = replace(pool.kind, device=faster)
        problem = Problem(
            model=read_model("llama3-8b"),
            cluster=replace(cluster, pools=(replace(pool, kind=kind),)),
            workload=Workload(seq=seq, gbs=64),
            runtime=read_runtime("megatron"),
            calibration=shipped(),
        )
        prices = price_blocks(problem, Cells.of([normalised(tp=tp, cp=2, dp=8 // tp)]))
        total_s.append(prices.forward_s[0] + prices.backward_s[0])
    for slow, fast in pairwise(total_s):
        assert (fast <= slow * (1 + 1e-12)).all()
