"""A user's loop that does everything wrong: each time one error in words, the same on all ranks, and nothing waits."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch import launch

pytestmark = pytest.mark.timeout(300)

TOLD = {
    "twice": "RefusedError: a plan was applied to this model already",
    "clip before": "0.0",
    "shape": "RefusedError: inputs: torch.int64 (16,); legal: whole numbers of shape (sequences, tokens)",
    "floats": "RefusedError: inputs: torch.float32 (",
    "list": "RefusedError: inputs: list; legal",
    "empty": "RefusedError: inputs: torch.int64 (",
    "token": "RefusedError: inputs hold 131; legal: 0 to 130",
    "label": "RefusedError: labels hold -1; legal: 0 to 130, and -100 for none",
    "clip": "RefusedError: max_norm=-1.0; legal: numbers from 0",
    "rows": "RefusedError: a batch of ",
    "no grad": "RefusedError: a step needs gradients, and they are switched off",
    "no targets": "0.0",
    "gradients": "0.0",
}


@pytest.mark.parametrize("layout", ["dpr2", "tp2", "pp2 sched=1f1b"])
def test_each_misuse_is_told(tmp_path: Path, layout: str) -> None:
    ended = launch(
        ["-m", "tests.processes.misused_ranks", layout, str(tmp_path / "told")],
        num_ranks=2,
        timeout_s=120,
        log_dir=tmp_path / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    for rank in range(2):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        for name, words in TOLD.items():
            assert told[name].startswith(words), (name, told[name])
        assert told["int32"] == told["int64"]
    # A loop that ends early on one rank leaves the others waiting for it, by name.
    assert (
        "LateRankError: rank 0 failed to communicate in step 3; late: rank 1, last seen in step 2"
        in json.loads((tmp_path / "told.0").read_text())["alone"]
    )
