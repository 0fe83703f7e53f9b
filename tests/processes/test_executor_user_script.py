"""A user's own script under torchrun: the same losses on every rank, layout and number of stages, and they fall."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import save
from executor.launch import launch
from tests.processes.layouts import Case

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
