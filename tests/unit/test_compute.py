"""Seconds of operations: closed forms, limits, monotonicity, and that nothing unknown costs zero."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import calibrations, compute, units
from cost_models.calibrations import Rate, shipped
from cost_models.records import Calibration, Coefficient, Optimizer, Precision, RecordError, Workload
from tests.unit.cost_cases import CPU, DEVICE, RUNTIME

SIDES = st.integers(min_value=1, max_value=2**16)


def rates(precision: Precision = Precision.BF16, **changes: object) -> compute.Rates:
    found = compute.rates(DEVICE, Workload(seq=8, gbs=1, precision=precision), RUNTIME, shipped())
    return replace(found, **changes)  # type: ignore[arg-type]


def test_a_large_product_runs_at_the_efficient_roof() -> None:
    found = rates()
    side = 2**20
    expected = 2.0 * side**3 / (found.matmul_flops_per_s * found.matmul_efficiency.value)
    assert compute.matmul_s(found, side, side, side).total == pytest.approx(expected, rel=1e-3)


def test_a_thin_product_costs_its_bytes() -> None:
    found = rates(wave=0.0, inner=0.0)
    m, n, k = 1, 8192, 8192
    moved = 2.0 * (m * k + k * n + m * n)
    assert compute.matmul_s(found, m, n, k).total == pytest.approx(moved / found.bytes_per_s)


def test_a_small_product_costs_one_wave_of_tiles() -> None:
    found = rates(inner=0.0, bytes_per_s=1e30)
    wave_flops = 2.0 * 4096 * found.wave * found.multiprocessors * compute.TILE_ELEMENTS
    floor_s = wave_flops / (found.matmul_flops_per_s * found.matmul_efficiency.value)
    assert compute.matmul_s(found, 1, 1, 4096).total == pytest.approx(floor_s, rel=1e-5)


@given(SIDES, SIDES, SIDES, st.integers(min_value=0, max_value=2), st.integers(min_value=1, max_value=64))
def test_a_larger_product_is_never_faster(m: int, n: int, k: int, axis: int, more: int) -> None:
    sides = [m, n, k]
    before = compute.matmul_s(rates(), *sides).total
    sides[axis] += more
    assert compute.matmul_s(rates(), *sides).total >= before * (1 - 1e-12)


@given(SIDES, SIDES, SIDES, st.floats(min_value=1.0, max_value=8.0))
def test_a_faster_device_is_never_slower(m: int, n: int, k: int, factor: float) -> None:
    found = rates()
    roof = replace(found, matmul_flops_per_s=found.matmul_flops_per_s * factor)
    memory = replace(found, bytes_per_s=found.bytes_per_s * factor)
    before = compute.matmul_s(found, m, n, k).total
    assert compute.matmul_s(roof, m, n, k).total <= before
    assert compute.matmul_s(memory, m, n, k).total <= before


def test_flash_attention_counts_the_causal_half() -> None:
    found = rates()
    flops = 4.0 * 2 * 16 * 4096 * 4096 * 128 / 2
    expected = flops / (found.wide_flops_per_s * found.attention_efficiency.value)
    forward = compute.attention_s(found, 2, 4096, 16, 128)
    assert forward.total == pytest.approx(expected)
    backward = compute.attention_s(found, 2, 4096, 16, 128, backward=True)
    assert backward.total == pytest.approx(expected * found.backward_ratio)


def test_a_window_as_long_as_the_sequence_is_no_window() -> None:
    whole = compute.attention_s(rates(), 1, 4096, 16, 128).total
    assert compute.attention_s(rates(), 1, 4096, 16, 128, window=4096).total == pytest.approx(whole)
    assert compute.attention_s(rates(), 1, 4096, 16, 128, window=512).total < whole


def test_unfused_attention_costs_bytes_per_score_and_misaligned_heads_cost_more() -> None:
    found = rates(score_bytes=Rate(value=10.0, fitted=True))
    scores = 2.0 * 16 * 1024 * 1024
    products = 4.0 * scores * 128 / (found.wide_flops_per_s * found.unfused_efficiency)
    moved = 10.0 * scores / found.bytes_per_s
    assert compute.attention_s(found, 2, 1024, 16, 128).total == pytest.approx(products + moved)
    aligned = compute.attention_s(found, 2, 1024, 16, 112).total
    assert compute.attention_s(found, 2, 1024, 16, 108).total > 2 * aligned


def test_measured_beats_calibrated_and_carries_its_basis() -> None:
    calibration = replace(shipped(), operations_s={"matmul/bf16/128x256x512": 0.5})
    m, n, k = np.array([128, 128]), np.array([256, 257]), np.array([512, 512])
    seconds = compute.matmul_s(rates(), m, n, k)
    found = compute.measured_or(calibration, seconds, "matmul/bf16/", "matmul/bf16/{}x{}x{}", (m, n, k))
    assert found.total[0] == 0.5
    assert found.measured.tolist() == [0.5, 0.0]
    assert found.total[1] == seconds.total[1]


def test_the_floor_is_the_longer_of_launches_and_work() -> None:
    one = compute.Seconds.resting_on(Rate(value=1.0, fitted=False), np.array([0.0, 1.0, 100.0]))
    floored = compute.with_floor(one, Rate(value=1.0, fitted=False), 1.0).total
    assert floored[0] == pytest.approx(1.0)
    assert 1.0 < floored[1] < 1.2
    assert floored[2] == pytest.approx(100.0, rel=1e-6)


def test_measured_rates_of_a_machine_replace_its_coefficients() -> None:
    measured = {"memory_bound/fp32/1000000": 1e-4, "optimizer/adamw/1000": 2e-6, "launch/fp32": 1e-5}
    calibration = replace(shipped(), operations_s=measured)
    workload = Workload(seq=8, gbs=1, precision=Precision.FP32)
    found = compute.rates(CPU, workload, RUNTIME, calibration)
    assert found.bytes_per_s == pytest.approx(1e10)
    assert compute.moved_s(found, found.optimizer_bytes, 5000.0).total == pytest.approx(1e-5)
    operations = calibrations.value(calibration, "launch.operations_per_layer")
    assert found.launch_s.value == pytest.approx(1e-5 * operations)


def test_a_cpu_has_no_waves_of_tiles() -> None:
    """Measured: small products on a core run at the rate of large ones; a GPU's quantisation made them twice too slow."""
    found = compute.rates(CPU, Workload(seq=8, gbs=1, precision=Precision.FP32), RUNTIME, shipped())
    rate = found.matmul_flops_per_s * found.matmul_efficiency.value
    for m, n, k in ((64, 256, 256), (128, 128, 1024), (512, 512, 64)):
        assert compute.matmul_s(found, m, n, k).total == pytest.approx(2.0 * m * n * k / rate, rel=1e-9)


def test_an_unknown_family_lists_the_known_ones() -> None:
    unknown = replace(DEVICE, family="gaudi")
    with pytest.raises(RecordError, match=r"matmul\.efficiency\.gaudi.*known under"):
        compute.rates(unknown, Workload(seq=8, gbs=1), RUNTIME, shipped())


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(RecordError, match=r"precision 'fp8' is not known for device 'cpu'; known there: fp32"):
        compute.rates(CPU, Workload(seq=8, gbs=1, precision=Precision.FP8), RUNTIME, shipped())


def test_the_most_particular_coefficient_wins() -> None:
    def one(value: float, rows: int = 0) -> Coefficient:
        return Coefficient(value=value, unit="1", source="a test", date="2026-11-30", rows=rows)

    calibration = Calibration(
        name="t",
        machine="any",
        date="2026-11-30",
        coefficients={"a.b": one(1), "a.b.y": one(2), "a.b.x": one(3, rows=5), "a.b.x.y": one(4)},
    )
    assert calibrations.value(calibration, "a.b", "x", "y") == 4
    assert calibrations.rate(calibration, "a.b", "x", "z") == Rate(value=3, fitted=True)
    assert calibrations.value(calibration, "a.b", "w", "y") == 2
    assert calibrations.value(calibration, "a.b", "w") == 1
    with pytest.raises(RecordError, match=r"no coefficient a\.c; known under a\.c: none"):
        calibrations.value(calibration, "a.c")


def test_every_shipped_coefficient_has_a_birth_certificate() -> None:
    for name, coefficient in shipped().coefficients.items():
        assert all((coefficient.source, coefficient.unit, coefficient.date)), name
        assert 0 <= coefficient.value < np.inf, name
        # margins and widths are residuals themselves
        if coefficient.rows and not name.startswith(("memory.margin", "interval.")):
            assert coefficient.residual is not None, name


def test_a_lean_optimizer_moves_fewer_bytes() -> None:
    adam = compute.rates(DEVICE, Workload(seq=8, gbs=1), RUNTIME, shipped())
    sgd = compute.rates(DEVICE, Workload(seq=8, gbs=1, optimizer=Optimizer.SGD), RUNTIME, shipped())
    assert sgd.optimizer_bytes.value < adam.optimizer_bytes.value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (units.from_gib(2), 2**31),
        (units.gib(2**31), 2),
        (units.from_gigabits(400), 50e9),
        (units.gigabits(50e9), 400),
        (units.from_gigabytes(3.35e3), 3.35e12),
        (units.gigabytes(3e9), 3),
        (units.ms(0.25), 250),
        (units.from_ms(250), 0.25),
        (units.tflops(9.89e14), 989),
        (units.from_tflops(989), 9.89e14),
    ],
)
def test_units(value: float, expected: float) -> None:
    assert value == pytest.approx(expected, rel=1e-12)
