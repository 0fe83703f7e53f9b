"""Benchmarks on the shaped network: their arithmetic and their tables on made-up times, and that they say why they are skipped."""

import pytest

from benchmarks import server, topology
from benchmarks.registry import benchmarks


def test_without_a_network_they_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((topology, "topology"), (topology, "pipelines"), (server, "server")):
        monkeypatch.setattr(module, "unavailable", lambda: "needs root")
        found = benchmarks()[name](None)
        assert found["skipped"] == "needs root"
        assert found["text"] == f"{name}: skipped: needs root"


def test_a_crossing_lies_between_the_points_where_the_faster_one_changes() -> None:
    ring = [{"ring": 1.0, "server": 1.0 * ratio} for ratio in (0.5, 2.0)]
    assert server.crossing([10.0, 1000.0], ring) == pytest.approx(100.0)
    assert server.crossing([10.0, 1000.0], [{"ring": 1.0, "server": 0.5}] * 2) is None


def test_each_sweep_is_predicted_to_cross_inside() -> None:
    for _, make in server.SWEEPS.values():
        cases = make()
        at = server.crossing([case.x for case in cases], [case.predicted for case in cases])
        assert at is not None
        assert cases[0].x < at < cases[-1].x
    asked = server.workers_sweep()[0].asked(1)
    assert asked["workers"] == [0, 1]
    assert asked["servers"] == [3], "the star numbers two workers and then the server, which is host 3"


def rows(**seconds: tuple[float, float]) -> list[dict[str, float | str]]:
    return [{"configuration": name, "predicted_s": p, "measured_s": m} for name, (p, m) in seconds.items()]


def test_an_order_holds_where_no_pair_is_turned_round_but_ties() -> None:
    assert topology.same_order(rows(a=(1.0, 1.1), b=(2.0, 1.9)))
    assert not topology.same_order(rows(a=(1.0, 2.0), b=(2.0, 1.9)))
    assert topology.same_order(rows(a=(1.00, 2.0), b=(1.01, 1.9))), "predicted as a tie"
