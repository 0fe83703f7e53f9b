"""Six schedules on published throughput: their order, and what V-min loses. Batch sizes are unknown, so several must do."""

from dataclasses import replace

import pytest

from benchmarks import registry
from benchmarks.schedules import MICRO_BATCHES, kendall_tau, predicted_step_s, problem_of, ratios, read_rows
from cost_models.records import Schedule


@pytest.fixture
def rows(shared):
    return read_rows(shared / "published")


@pytest.mark.parametrize("num_micro_batches", [*MICRO_BATCHES, 24, 48])
def test_the_order_of_schedules_is_the_published_one(rows, num_micro_batches):
    problem = problem_of(num_micro_batches)
    predicted = ratios([predicted_step_s(problem, row) for row in rows])
    measured = [row.tokens_per_s_per_gpu / rows[0].tokens_per_s_per_gpu for row in rows]
    assert kendall_tau(predicted, measured) >= 0.7
    v_min = [row.schedule for row in rows].index(Schedule.V_MIN)
    assert abs(predicted[v_min] - measured[v_min]) <= 0.10
    assert predicted[v_min] == min(predicted)


def test_a_split_that_is_dear_puts_the_schedules_out_of_order(rows):
    """The order rests on the split's cost: at twice the weight gradients' time it is gone."""
    problem = problem_of(32)
    dear = dict(problem.calibration.coefficients)
    dear["schedule.split.weight_grad"] = replace(dear["schedule.split.weight_grad"], value=2.0)
    problem = replace(problem, calibration=replace(problem.calibration, coefficients=dear))
    predicted = ratios([predicted_step_s(problem, row) for row in rows])
    assert kendall_tau(predicted, [row.tokens_per_s_per_gpu for row in rows]) < 0.5


def test_kendall_tau():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)


def test_benchmarks_register_themselves_and_write_dated_results(tmp_path, monkeypatch):
    known = registry.benchmarks()
    assert set(known) >= {"simulation", "schedules"}
    with pytest.raises(FileNotFoundError, match=r"schedules\.csv is absent"):
        known["schedules"](tmp_path)
    path = registry.write_result("simulation", {"rows": []}, tmp_path)
    assert path.name.endswith("-simulation.json")
    assert '"cores"' in path.read_text(encoding="utf-8")


def test_the_simulation_benchmark_covers_every_schedule(monkeypatch):
    from benchmarks import simulation

    monkeypatch.setattr(simulation, "NUM_MICRO_BATCHES", 128)
    monkeypatch.setattr(simulation, "REPEATS", 1)
    found = simulation.simulation_speed()
    assert [row["schedule"] for row in found["rows"]] == [schedule.value for schedule in Schedule]
    assert {row["operations"] for row in found["rows"]} <= {64 * 128 * 2, 64 * 128 * 3} | set(range(64 * 256, 64 * 384))
