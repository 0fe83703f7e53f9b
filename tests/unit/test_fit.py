"""The fit gives back what was planted; where nothing tells, the prior stays."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import CPU, MODEL, NODE, cluster
from cost_cases import problem as case

from cost_models import blocks, compute
from cost_models.collectives import curve_s
from cost_models.fit import fit
from cost_models.peaks import memory_report
from cost_models.problem import Cells, Problem
from cost_models.records import (
    Calibration,
    Coefficient,
    Layout,
    Link,
    MeasuredMemory,
    Measurement,
    MeasurementKind,
    MemoryKind,
    Precision,
    RecordError,
    Workload,
)
from cost_models.shares import share
from planner.decisions import decision_of_layout

WHERE = {"machine": "toy machine", "versions": {}}
DAY = "2026-11-30"


def op(key: str, *samples: float) -> Measurement:
    return Measurement(kind=MeasurementKind.OP, key=key, samples_s=samples, **WHERE)


def collective(key: str, *samples: float) -> Measurement:
    return Measurement(kind=MeasurementKind.COLLECTIVE, key=key, samples_s=samples, **WHERE)


@pytest.fixture
def problem() -> Problem:
    kind = replace(
        NODE, device=CPU, gpus_per_node=2, num_nics=1, intra=Link(name="loopback", bandwidth_bytes_per_s=1e9)
    )
    return case(cluster=cluster(1, kind), workload=Workload(seq=256, gbs=8, precision=Precision.FP32))


def fitted(problem: Problem, *measurements: Measurement) -> Calibration:
    return fit(problem, measurements, name="here", date=DAY)


def test_operations_are_taken_over_as_their_medians(problem: Problem) -> None:
    found = fitted(problem, op("matmul/fp32/64x64x64", 3.0, 1.0, 2.0))
    assert found.operations_s["matmul/fp32/64x64x64"] == 2.0
    assert (found.name, found.machine, found.date) == ("here", "toy machine", DAY)


def test_a_planted_efficiency_of_products_is_found_again(problem: Problem) -> None:
    name = "matmul.efficiency.cpu.fp32"
    planted = 0.37
    truth = replace(problem, calibration=with_coefficient(problem.calibration, name, planted))
    rates = compute.rates(truth.cluster.pools[0].kind.device, truth.workload, truth.runtime, truth.calibration)
    shapes = [(512, 512, 512), (1024, 512, 2048), (2048, 2048, 512)]
    rows = [op("matmul/fp32/{}x{}x{}".format(*s), float(compute.matmul_s(rates, *s).total)) for s in shapes]
    found = fitted(problem, *rows).coefficients[name]
    assert found.value == pytest.approx(planted, rel=1e-9)
    assert found.residual == pytest.approx(0.0, abs=1e-9)
    assert found.rows == len(shapes)
    assert "toy machine" in found.source


def test_the_residual_is_the_spread_about_the_fit(problem: Problem) -> None:
    name = "matmul.efficiency.cpu.fp32"
    rates = compute.rates(problem.cluster.pools[0].kind.device, problem.workload, problem.runtime, problem.calibration)
    s = float(compute.matmul_s(rates, 512, 512, 512).total)
    t = float(compute.matmul_s(rates, 256, 256, 1024).total)
    found = fitted(problem, op("matmul/fp32/512x512x512", 1.1 * s), op("matmul/fp32/256x256x1024", t / 1.1))
    assert found.coefficients[name].residual == pytest.approx(math.sqrt(2) * math.log(1.1))


def test_what_a_whole_layer_takes_beside_its_products_is_its_memory_bound_work(problem: Problem) -> None:
    planted = 2.5
    name = "memory_ops.multiplier.cpu.torch"
    truth = replace(problem, calibration=with_coefficient(problem.calibration, name, planted))
    rates = compute.rates(truth.cluster.pools[0].kind.device, truth.workload, truth.runtime, truth.calibration)
    part = share(truth, Cells.of([Layout()]))
    sides = [int(side[0]) for side in blocks.layer_sides(truth, part)]
    rows = [
        op(blocks.layer_key("fp32", MODEL.gated_mlp, direction).format(*sides), float(one.total.total[0]))
        for direction, one in zip(("forward", "backward"), blocks.layer_pass(truth, rates, part), strict=True)
    ]
    found = fitted(problem, *rows).coefficients[name].value
    # the weights' traffic is counted with it: a few per cent at this size
    assert found == pytest.approx(planted, rel=0.25)
    assert fitted(problem, *rows).operations_s[rows[0].key] == rows[0].samples_s[0]


def test_collectives_become_rising_curves(problem: Problem) -> None:
    found = fitted(
        problem,
        collective("all_reduce/2/4096/loopback", 2e-4),
        collective("all_reduce/2/1024/loopback", 5e-4),  # noise: a smaller message that took longer
        collective("all_reduce/2/1048576/loopback", 1e-3, 3e-3, 2e-3),
        collective("overlap/all_reduce/2/4194304/loopback", 1e-2),
    )
    curve = found.curves["all_reduce/2/loopback"]
    assert curve.sizes_bytes == (1024.0, 4096.0, 1048576.0)
    assert curve.seconds == (2e-4, 2e-4, 2e-3)
    assert curve_s(curve, np.array([1048576.0]))[0] == pytest.approx(2e-3)
    assert [key for key in found.curves if key.startswith("overlap")] == []


def test_dispatch_is_what_a_small_layer_takes_longer_less_its_collectives(problem: Problem) -> None:
    rows = [op("dispatch/plain/2/layer", 1e-3), op("dispatch/tp/2/layer", 9e-3)]
    rows += [collective(f"{call}/2/1024/loopback", 5e-4) for call in ("all_gather", "reduce_scatter")]
    found = fitted(problem, *rows)
    assert found.coefficients["dispatch.layer_s.tp.cpu.torch"].value == pytest.approx(9e-3 - 1e-3 - 8 * 5e-4)
    assert not any(key.startswith("dispatch/") for key in found.operations_s)


def test_the_context_is_what_one_layer_takes_beside_its_tensors(problem: Problem) -> None:
    """Planted: a run that took exactly what is predicted, and 12,345 bytes; then one that took less than its tensors."""
    name = "memory.context_bytes.rss.cpu"
    small = replace(problem, memory_kind=MemoryKind.RSS, model=replace(problem.model, num_layers=1))
    small = replace(small, workload=replace(problem.workload, gbs=4))
    decision = decision_of_layout(small, Layout(dp_replicate=2, mbs=2))
    kinds = memory_report(small, decision)[0].kinds
    tensors = int(sum(kinds.values()) - kinds["context"])

    def context(peak_bytes: int) -> Measurement:
        peak = MeasuredMemory(kind=MemoryKind.RSS, peak_bytes=peak_bytes)
        return Measurement(kind=MeasurementKind.RUN, key="context/2/2", samples_s=(0.0,), memory=peak, **WHERE)

    launch = op("launch/fp32", 1e-6)
    assert fitted(problem, launch, context(tensors + 12345)).coefficients[name].value == pytest.approx(12345, abs=1)
    assert fitted(problem, launch, context(tensors // 2)).coefficients[name].value == 0.0


def test_the_interval_is_as_wide_as_the_measurements_scatter(problem: Problem) -> None:
    name = "interval.measured.cpu.torch"
    steady = fitted(problem, op("launch/fp32", *[1.0] * 9))
    wild = fitted(problem, op("launch/fp32", *[float(2**n) for n in range(11)]))
    assert name not in steady.coefficients
    assert wild.coefficients[name].value == pytest.approx(math.log(2) * 8 / 2)


def test_nothing_to_fit_is_said(problem: Problem) -> None:
    with pytest.raises(RecordError, match="nothing to fit"):
        fitted(problem)


def with_coefficient(calibration: Calibration, name: str, value: float) -> Calibration:
    one = Coefficient(value=value, unit="1", source="planted", date=DAY)
    return replace(calibration, coefficients={**calibration.coefficients, name: one})
