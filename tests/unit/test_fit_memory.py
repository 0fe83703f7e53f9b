"""The fit of memory's coefficients: planted values come back, priors hold what no row tells, what is left out is not seen."""

import numpy as np
import pytest

from benchmarks.accuracy.fit_memory import FITTED_MEMORY, SAME_MEMORY, MemoryFit, priors, solved, without
from cost_models.calibrations import shipped

NAMES = tuple(name for name in FITTED_MEMORY if name not in SAME_MEMORY)


def planted(rows: int, outliers: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(changes of the coefficients, residuals at the priors, slopes); only the first five coefficients matter to a row."""
    random = np.random.default_rng(7)
    slopes = np.zeros((rows, len(NAMES)))
    slopes[:, :5] = random.uniform(0.05, 0.5, (rows, 5))
    change = np.zeros(len(NAMES))
    change[:5] = [0.03, -0.02, 0.01, 0.02, -0.03]
    residual = -slopes @ change  # predicted too little where the true coefficient is larger
    residual[:outliers] -= 0.5
    return change, residual, slopes


@pytest.mark.parametrize("outliers", [0, 20])
def test_planted_coefficients_come_back_and_outliers_do_not_rule(outliers: int) -> None:
    mean = np.zeros(len(NAMES))
    change, residual, slopes = planted(400, outliers)
    found = solved(mean, mean, residual, slopes)
    assert found[:5] == pytest.approx(change[:5], abs=0.02)
    assert found[5:] == pytest.approx(np.zeros(len(NAMES) - 5), abs=1e-9)  # no row tells: the prior


def test_a_row_that_is_left_out_is_not_seen() -> None:
    """One row alone tells a coefficient: without it the coefficient goes back to its prior."""
    mean = np.zeros(len(NAMES))
    slopes, residual = np.zeros((3, len(NAMES))), np.array([0.0, 0.0, -0.3])
    slopes[:2, 0], slopes[2, 1] = 0.5, 0.5
    logs = solved(mean, mean, residual, slopes)
    fitted = MemoryFit(names=NAMES, mean=mean, logs=logs, residual=residual + slopes @ logs, slopes=slopes)
    seen = float(slopes[2] @ logs)
    assert seen > 0.02
    assert float(without(fitted, np.array([False, False, True]))[2]) == pytest.approx(-seen, abs=1e-3)
    assert float(without(fitted, np.array([True, False, False]))[2]) == pytest.approx(0.0, abs=1e-3)


def test_what_is_shipped_stays_near_its_physical_value() -> None:
    before, now = priors(shipped()).coefficients, shipped().coefficients
    for name, spread in FITTED_MEMORY.items():
        assert abs(np.log(now[name].value / before[name].value)) < 3 * spread, name
    for name, origin in SAME_MEMORY.items():
        assert now[name].value == now[origin].value
