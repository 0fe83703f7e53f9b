"""Sums over replicas by each algorithm, on 8 gloo ranks: the same gradients as one process's, whoever is late."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch import launch
from tests.processes.collective_ranks import PLANS

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("collectives")
    ended = launch(
        ["-m", "tests.processes.collective_ranks", str(folder / "found.json")],
        num_ranks=8,
        timeout_s=200,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("algorithm", ["flat", "ring", "hierarchical"])
def test_thirty_sums_at_once(found: dict[str, dict], algorithm: str) -> None:
    assert found["sums"][algorithm] < 1e-12


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_one_process(found: dict[str, dict], name: str) -> None:
    compressed = PLANS[name].decision.collectives["dp_replicate"].compression
    assert found[name]["how"].lower() == name.split(",")[0].split()[0].replace("fp16", "flat").replace(
        "default", "flat"
    )
    assert found[name]["loss"] <= 1e-5
    assert found[name]["gradient"] <= (5e-3 if compressed else 1e-5)
    if compressed:
        assert found[name]["gradient"] > 1e-5, "nothing was compressed"
