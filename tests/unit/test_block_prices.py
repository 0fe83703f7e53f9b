"""A block is priced once for all cells in which it costs the same: each cell must cost what it costs alone."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from cost_models.block_prices import distinct_rows, price_blocks
from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Workload
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
        skipped = ("problem", "cells", "fabric", "rates")
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
    together = _arrays(price_blocks(problem, cells))
    assert len(distinct_rows(problem, cells)[0]) < len(cells) / 4
    for index in np.random.default_rng(5).choice(len(cells), 40, replace=False).tolist():
        alone = _arrays(price_blocks(problem, cells.take(np.array([index]))))
        assert alone.keys() == together.keys()
        for name, values in alone.items():
            np.testing.assert_array_equal(values[0], together[name][index], err_msg=f"{name} of {cells.layout(index)}")
