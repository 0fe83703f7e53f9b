"""The timing loop: what counts, in which order, and what is made of it."""

import pytest

from planner.profiling.clock import Rule, Summary, sample, summarise, threads_per_rank, usable_cores


def test_warm_up_does_not_count_and_rounds_are_interleaved() -> None:
    order: list[str] = []
    samples = sample(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        Rule(warmup=1, repetitions=2),
        before=lambda: order.append("|"),
    )
    assert "".join(order) == "|a|b" * 3
    assert {name: len(values) for name, values in samples.items()} == {"a": 2, "b": 2}


def test_a_sample_divides_by_its_calls_and_waits_for_the_device_at_both_ends() -> None:
    events: list[str] = []
    samples = sample(
        {"op": lambda: events.append("op")},
        Rule(warmup=0, repetitions=1, calls=3),
        synchronise=lambda: events.append("wait"),
    )
    assert events == ["wait", "op", "op", "op", "wait"]
    assert len(samples["op"]) == 1


def test_a_sample_is_repeated_until_it_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("planner.profiling.clock.time.perf_counter", lambda: float(next(now)))
    calls: list[int] = []
    # the clock moves by a second at each look: the start, and one look after each call
    samples = sample({"op": lambda: calls.append(1)}, Rule(warmup=0, repetitions=1, sample_s=3.0))
    assert len(calls) == 3
    assert samples["op"] == (1.0,)


def test_a_budget_ends_after_a_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("planner.profiling.clock.time.perf_counter", lambda: float(next(now)))
    samples = sample({"a": lambda: None, "b": lambda: None}, Rule(warmup=0, repetitions=50, budget_s=12.0))
    assert len(samples["a"]) == len(samples["b"])
    assert 1 <= len(samples["a"]) < 50


def test_a_summary_is_the_median_and_the_middle_of_the_samples() -> None:
    assert summarise(range(11)) == Summary(median=5, low=1.0, high=9.0, count=11)
    assert summarise([2.0]).relative_spread == 0.0
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_a_rule_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="repetitions=0"):
        Rule(repetitions=0)


def test_processes_that_share_a_core_get_one_thread() -> None:
    cores = usable_cores()
    assert threads_per_rank(1) == cores
    assert threads_per_rank(8 * cores) == 1
