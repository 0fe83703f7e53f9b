"""Memory by phase against what tensors really take: 2 ranks build, train two steps, save, load and evaluate, one launch for all
layouts. The oracle counts storages (live_bytes.py) and knows nothing of the model of memory."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.calibrations import shipped
from cost_models.peaks import DeviceMemory, memory_report
from cost_models.problem import Problem
from cost_models.records import Decision, MemoryKind
from executor.launch import launch
from planner.readers.runtimes import read_runtime
from tests.processes.layouts import CLUSTER, Case
from tests.processes.phase_cases import MODEL, PHASE_CASES

pytestmark = pytest.mark.timeout(400)

TOLERANCE = {"build": 0.01, "load": 0.02, "step 1": 0.02, "step 2": 0.02, "save": 0.03, "evaluation": 0.04}
"""Relative, of what is predicted."""
WIDER = {
    ("pp", "step 1"): 0.12,
    ("pp", "step 2"): 0.12,
    ("zero3", "step 1"): 0.06,
    ("zero3", "step 2"): 0.06,
    ("zero3", "evaluation"): 0.14,
}
"""Where a term is known to be missing or too large: gradients inside a layer's backward pass, which show where no logits are (a
pipeline's stages; 7 to 11% too little here), and the second unit that FSDP has in advance, which is not there yet at its largest (the
head; 5% too much in a step, 13% in an evaluation)."""
LARGEST_TENSOR = 4 * MODEL.vocab * MODEL.hidden
"""Reading a checkpoint, each tensor is in host memory once more; on a CPU that is the same memory."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp("phases")
    ended = launch(
        ["-m", "tests.processes.phase_ranks", str(folder / "found.json")],
        num_ranks=2,
        timeout_s=360,
        log_dir=folder / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    found: dict[str, list[dict[str, int]]] = json.loads(Path(folder, "found.json").read_text())
    return found


def promised(case: Case) -> Sequence[DeviceMemory]:
    problem = Problem(
        model=case.model,
        cluster=CLUSTER,
        workload=case.decision.workload,
        runtime=read_runtime("torch"),
        calibration=shipped(),
        memory_kind=MemoryKind.RSS,
    )
    return memory_report(problem, _said(case.decision))


def _said(decision: Decision) -> Decision:
    """With the layers that keep everything counted too."""
    last = decision.num_blocks - 1
    stages = []
    for stage in decision.stages:
        layers = stage.blocks[1] - stage.blocks[0] + 1 - (stage.blocks[0] == 0) - (stage.blocks[1] == last)
        stages.append(replace(stage, recompute=stage.recompute or {"none": layers}))
    return replace(decision, stages=tuple(stages))


@pytest.mark.parametrize("number", range(len(PHASE_CASES)), ids=[f"{i}-{c.layout}" for i, c in enumerate(PHASE_CASES)])
def test_each_phase_holds_what_is_promised(counted: dict[str, list[dict[str, int]]], number: int) -> None:
    case = PHASE_CASES[number]
    devices = promised(case)
    for rank, found in enumerate(counted[str(number)]):
        one = next(device for device in devices if device.ranks[0] <= rank <= device.ranks[1])
        for phase, held in found.items():
            expected = one.phases[phase] - one.kinds["context"]
            if phase == "load":
                # into a run that has trained already: its pipeline's buffers are there
                expected += LARGEST_TENSOR + one.kinds.get("receives", 0.0)
            kind = next((name for name in ("pp", "zero3") if name in case.layout.split()[0] + case.layout[-5:]), "")
            within = WIDER.get((kind, phase), TOLERANCE[phase])
            assert held == pytest.approx(expected, rel=within), (case.layout, rank, phase)


def test_the_oracle_sees_what_is_missing(counted: dict[str, list[dict[str, int]]]) -> None:
    """Without the buckets of replicas, or the buffers of a pipeline, phases would be outside what is allowed."""
    (replicas,), (first, _) = promised(PHASE_CASES[0]), promised(PHASE_CASES[4])
    without = replicas.phases["build"] - replicas.kinds["context"] - replicas.kinds["buckets"]
    assert without < 0.6 * counted["0"][0]["build"]
    without = first.phases["save"] - first.kinds["context"] - first.kinds["receives"]
    assert without < 0.9 * counted["4"][0]["save"]
    assert counted["0"][0]["step 2"] - counted["0"][0]["step 1"] == pytest.approx(replicas.kinds["optimizer"], rel=0.02)
