"""`executor.apply` finds faults planted into the executor, each by its name; 8 gloo ranks, one launch."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch import launch

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("faults")
    ended = launch(
        ["-m", "tests.processes.fault_ranks", str(folder / "found.json")],
        num_ranks=8,
        timeout_s=200,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no fault", "^$"),
        (
            "no wrapper",
            "sharding: ranks 0, 1, 2, 3, 4, 5, 6, 7: stage 0: dp_replicate=8, but nothing averages the gradients",
        ),
        ("no wrapper", "data-parallel rank 0 alone, the sum over the data-parallel ranks is missing"),
        (
            "no all-reduce",
            "FAILED: gradients of a shrunken model: .*rank 0 alone, the sum over the data-parallel ranks is missing",
        ),
        (
            "swapped axes",
            r"transport: [^;]*axis dp_shard: planned ranks \[0, 2\], ranks \[0, 1\] answered, which are those of tp: the axes are swapped",
        ),
        ("layer skipped", r"layers\.2\.\S+ and \d+ more took no part in the step, the layer was left out"),
        (
            "layer lost",
            r"parameters: ranks 0, [^;]*: planned [\d,]+, all ranks together hold [\d,]+: layers\.1\.\S+ has 0 of",
        ),
        ("layer lost", r"blocks: ranks 0, 1, 2, 3: stage 0: planned \[0, 1, 2\], holds \[0, 1\]"),
        ("one micro-batch", r": micro-batch 1 of data-parallel rank 0 counts 0\.5 times"),
        ("all micro-batches", r": every micro-batch counts 0\.25 times, the sum is divided by a wrong number"),
    ],
)
def test_each_fault_by_its_name(found: dict[str, str], name: str, words: str) -> None:
    assert re.search(words, found[name]), found[name]
