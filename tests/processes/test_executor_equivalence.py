"""Loss and every gradient of every kind of layout equal one process's: 8 gloo ranks, one launch for all layouts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import Precision
from executor.launch import launch
from tests.processes.layouts import CASES, TRAINED

TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 5e-2}
"""Relative; the promise of the executor, and what rounding to bf16 leaves."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("equivalence")
    ended = launch(
        ["-m", "tests.processes.equivalence_ranks", str(folder / "found.json")],
        num_ranks=8,
        timeout_s=360,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{i}-{c.layout}" for i, c in enumerate(CASES)])
def test_loss_and_gradients_are_those_of_one_process(found: dict[str, dict], number: int) -> None:
    result = found[f"check/{number}"]
    assert result["ok"], result["text"]
    assert result["freed"], "weights of other stages are still held"
    tolerance = TOLERANCE[CASES[number].precision]
    assert result["loss"] <= tolerance
    assert result["gradient"] <= tolerance


@pytest.mark.parametrize("number", range(len(TRAINED)), ids=[c.layout for c in TRAINED])
def test_steps_with_clipping_follow_one_process(found: dict[str, dict], number: int) -> None:
    assert found[f"train/{number}"]["error"] <= TOLERANCE[Precision.FP32]


def test_the_training_loop(found: dict[str, dict]) -> None:
    plain, piped = found["training"]
    for result, phases in ((plain, {"forward", "backward"}), (piped, {"pipeline"})):
        assert result["check"].startswith(
            "self-check passed (ranks, transport, parameters, blocks, recompute, sharding, loss, gradients"
        )
        assert result["not_compared"] == ""
        for seconds, phases_s in zip(result["seconds"], result["phases_s"], strict=True):
            assert set(phases_s) == phases | {"data", "reduce", "clip", "optimizer"}
            assert 0 < sum(phases_s.values()) - phases_s["data"] <= seconds
        for phases_s, parts_s in zip(result["phases_s"], result["parts_s"], strict=True):
            inside_s = sum(phases_s.get(name, 0.0) for name in ("forward", "backward", "pipeline"))
            assert (
                0
                < parts_s["compute"]
                + sum(value for key, value in parts_s.items() if key.startswith("wait ") and key != "wait pp/p2p")
                + parts_s.get("bubble", 0.0)
                <= inside_s * 1.001
            )
            assert ("bubble" in parts_s) == ("pipeline" in phases_s)
    assert {"wait tp/reduce_scatter", "wait dp_shard/all_gather", "wait pp/p2p"} <= {*piped["parts_s"][0]}
    assert "wait dp_replicate/all_reduce" in plain["parts_s"][1]  # DDP says it a step later
    assert plain["losses"] == pytest.approx(piped["losses"], rel=1e-5)
    assert plain["norms"] == pytest.approx(piped["norms"], rel=1e-5)


def test_selfcheck_finds_planted_faults(found: dict[str, dict]) -> None:
    assert all(found["planted_faults"].values()), found["planted_faults"]


def test_an_unmodified_transformers_llama(found: dict[str, dict]) -> None:
    if not found["transformers_llama"]:
        pytest.skip("transformers is not installed")
    assert len(found["transformers_llama"]) == 3
    for result in found["transformers_llama"].values():
        assert result["ok"], result["text"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("different weights", "differ between ranks: seed before the model is built"),
        ("other number of ranks", "the plan is for 4 ranks .* but 8 were started; start 4"),
        ("batch", r"a batch of 5 sequences; legal: 16 \(the global batch\) or 2"),
        ("sequence", "seq=15 is not divisible by tp=4"),
    ],
)
def test_errors_that_need_ranks(found: dict[str, dict], name: str, words: str) -> None:
    import re

    assert re.search(words, found["refusals"][name])
