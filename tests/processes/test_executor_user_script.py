"""A user's own script under torchrun: the same losses on every rank, layout and number of stages, and they fall."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import save
from executor.launch import Launched, launch
from tests.processes.layouts import MODEL, Case

pytestmark = pytest.mark.timeout(300)


def losses(folder: Path, kind: str, case: Case) -> list[list[float]]:
    save(case.plan, folder / "plan.json")
    script = str(Path(__file__).with_name("user_script.py"))
    ended = launch(
        [script, str(folder / "plan.json"), kind, str(folder / "losses")],
        num_ranks=2,
        timeout_s=120,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    return [json.loads((folder / f"losses.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_the_example_of_the_readme(tmp_path: Path, kind: str) -> None:
    if kind == "llama":
        pytest.importorskip("transformers")
    piped, split = tmp_path / "pp", tmp_path / "dp"
    piped.mkdir()
    split.mkdir()
    first = losses(piped, kind, Case(layout="pp2 sched=1f1b", num_micro_batches=4))
    second = losses(split, kind, Case(layout="dps2 zero3"))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] == pytest.approx(second[0], rel=1e-4)
    assert first[0][-1] < first[0][0] - 0.5


def trained(folder: Path, kind: str, case: Case, num_ranks: int) -> Launched:
    folder.mkdir(exist_ok=True)
    save(case.plan, folder / "plan.json")
    script = str(Path(__file__).with_name("user_training.py"))
    arguments = [script, str(folder / "plan.json"), kind, str(folder / "found")]
    return launch(arguments, num_ranks=num_ranks, timeout_s=120, log_dir=folder / "logs")


LLAMA = replace(MODEL, tie_embeddings=True)


def test_ones_own_optimizer_scheduler_loader_and_accumulation(tmp_path: Path) -> None:
    """The plan's lines change no loss, norm or rate of a training of one's own, whatever the layout."""
    pytest.importorskip("transformers")
    plain = tmp_path / "plain"
    ended = trained(plain, "plain", Case(layout="dpr1", model=LLAMA, num_micro_batches=4), 1)
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    expected = json.loads((plain / "found.0").read_text())
    for name, case in {
        "pipeline": Case(layout="pp2 sched=1f1b", model=LLAMA, num_micro_batches=4),
        "tensor": Case(layout="tp2 mbs2", model=LLAMA, num_micro_batches=2),
        "sharded": Case(layout="dps2 zero3", model=LLAMA, num_micro_batches=2),
        "replicas": Case(layout="dpr2 mbs2", model=LLAMA, num_micro_batches=1),
    }.items():
        ended = trained(tmp_path / name, "applied", case, 2)
        assert ended.ok, "\n".join((name, ended.reason, *ended.error_lines))
        for rank in range(2):
            found = json.loads((tmp_path / name / f"found.{rank}").read_text())
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3), name
            assert found["rates"] == expected["rates"], name


def test_a_loader_that_disagrees_with_the_plan_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = trained(tmp_path, "loader", Case(layout="dps2 zero3", model=LLAMA, num_micro_batches=2), 2)
    assert not ended.ok
    assert "a batch of 3 sequences; legal: 4 (the global batch) or 2 (this rank's slice" in ended.reason
