"""`meshwright run` from end to end: a plan made here runs, is checked, measured and compared; a killed rank is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.calibrations import shipped
from cost_models.records import Measurements, Precision, Workload, load, save
from executor.cli import main
from executor.decoder import Decoder
from planner.plan import make_plan
from planner.readers.models import read_model
from planner.readers.node_presets import local_cluster
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime

pytestmark = pytest.mark.timeout(300)

MODEL = "llama-tiny"
ROOT = Path(__file__).resolve().parents[2]


def factory() -> Decoder:
    """The plan's model; rank 1 dies while it is built, where the environment says so."""
    if os.environ.get("PLANTED_FAULT") == "kill" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("PLANTED_FAULT") == "hang":
        time.sleep(3600)
    return Decoder(read_model(MODEL), seed=0)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cluster = local_cluster(2, 4 << 30, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=5e9)
    request = CompleteRequest(
        model=read_model(MODEL),
        cluster=cluster,
        workload=Workload(seq=32, gbs=4, precision=Precision.FP32),
        runtime=read_runtime("torch"),
        layout=None,
        pin="",
        defaults={},
    )
    path = tmp_path_factory.mktemp("run") / "plan.json"
    save(make_plan(request, calibration=shipped(), version="test"), path)
    return path


def processes_of_this_fault(kind: str) -> list[int]:
    """Living processes that were started with the planted fault in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"PLANTED_FAULT={kind}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_plan_runs_and_is_compared(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "measurement.json"
    code = main(["run", str(plan_file), "--steps", "2", "--timeout", "100", "-o", str(out), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document = json.loads(captured.out)
    assert {row["phase"] for row in document["comparison"]["rows"]} >= {"step"}
    measured = load(Measurements, out)
    step = next(one for one in measured.measurements if one.key == "step")
    assert len(step.samples_s) == 2
    assert main(["compare", str(plan_file), str(out), "--fit", str(tmp_path / "fitted.json")]) == 0
    assert (tmp_path / "fitted.json").is_file()


def no_module() -> int:
    """A factory that makes none."""
    return 42


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("tests.processes.test_run:no_module", "the factory returned a int; a torch.nn.Module is needed"),
        ("tests.processes.test_run:other_model", "the module is not the model of the plan (llama-tiny): num_layers: 2"),
    ],
)
def test_input_that_only_a_rank_can_judge_is_refused_in_words(
    plan_file: Path, module: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(plan_file), "--module", module, "--timeout", "90", "--json"]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(captured.out)["error"]["exit_code"] == 2


def other_model() -> Decoder:
    """Half of the planned layers."""
    return Decoder(replace(read_model(MODEL), num_layers=2), seed=0)


def ends_early() -> Decoder:
    """A model that ends its process, and says that all is well."""
    decoder = Decoder(read_model(MODEL), seed=0)
    decoder.layers[0].register_forward_pre_hook(lambda *_: os._exit(0))
    return decoder


def test_ranks_that_end_without_a_result_are_no_success(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(plan_file), "--module", "tests.processes.test_run:ends_early", "--timeout", "90"]) == 1
    assert "none left a result" in capsys.readouterr().err


def test_a_killed_rank_is_named_and_nothing_is_left(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED_FAULT", "kill")
    code = main(["run", str(plan_file), "--module", "tests.processes.test_run:factory", "--timeout", "90"])
    captured = capsys.readouterr()
    assert code == 1
    assert "rank 1" in captured.err
    assert captured.out == ""
    assert processes_of_this_fault("kill") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_from_outside_leaves_no_ranks(plan_file: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "executor", "run", str(plan_file), "--module", "tests.processes.test_run:factory"]
    environment = {**os.environ, "PLANTED_FAULT": "hang", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a shell that starts jobs in the background has them ignore SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # the command itself, torchrun, and two ranks
        assert within(60.0, lambda: len(processes_of_this_fault("hang")) >= 4)
        process.send_signal(number)
        assert within(20.0, lambda: process.poll() is not None and not processes_of_this_fault("hang"))
    finally:
        process.kill()
        process.wait()


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return holds()
