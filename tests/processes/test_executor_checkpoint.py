"""What was saved under one layout loads under another, weights and optimizer, bit for bit; 8 gloo ranks, one launch."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch import launch
from tests.processes.checkpoint_ranks import pairs

pytestmark = pytest.mark.timeout(400)
PAIRS = pairs()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("checkpoints")
    ended = launch(
        ["-m", "tests.processes.checkpoint_ranks", str(folder)],
        num_ranks=8,
        timeout_s=360,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[f"{a.layout} to {b.layout}" for a, b in PAIRS])
def test_bit_for_bit_under_another_layout(found: dict[str, dict], number: int) -> None:
    result = found[str(number)]
    assert result["tensors"] >= 4
    assert (result["different"], result["rates"]) == (0, 0)
    assert result["extra"] == {"step": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exists", "exists: each checkpoint has a folder of its own"),
        ("missing", "nowhere: no such folder$"),
        ("crashed", r"no such folder; \.crashed\.partial beside it is of a save that did not end"),
        ("truncated", r"__3\S+ has \d+ bytes, but \d+ were written: truncated or changed"),
        ("lost", r"__3\S+ is missing"),
        ("no marker", "meshwright.json is missing, so this is no complete checkpoint"),
        ("another model", "holds another model"),
        ("another optimizer", "holds the state of AdamW, the optimizer here is SGD"),
        ("weights alone", "was saved without an optimizer; load the weights alone"),
        ("one group", "had different options there, but are in one group here"),
        ("changed", "^$"),
    ],
)
def test_faults_by_name_on_every_rank(found: dict[str, dict], name: str, words: str) -> None:
    assert re.search(words, found["faults"][name]), found["faults"][name]
