"""The live probe with real processes on one machine: the verb, torchrun, and ranks that never come or go away."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import Probe, load

pytestmark = pytest.mark.timeout(200)
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

ONE_RANK = (
    "import os, sys\n"
    "from cost_models.records import save\n"
    "from planner.profiling import probe\n"
    "probe.JOIN_S = 30.0 if sys.argv[1] != 'absent' else 12.0\n"
    "meet = probe._Part._meet\n"
    "def leave(self, name, pair):\n"
    "    if sys.argv[1] == 'leaves' and self.meeting.rank == 2:\n"
    "        os.kill(os.getpid(), 9)\n"
    "    return meet(self, name, pair)\n"
    "probe._Part._meet = leave\n"
    "found = probe.take_part(probe.ProbeRequest(ranks=3, backend='gloo', timeout_s=3.0), print)\n"
    "if found is not None:\n"
    "    save(found, sys.argv[2])\n"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=ENVIRONMENT, cwd=ROOT)


def test_the_verb_measures_and_plan_reads_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    done = run("executor", "probe", "--ranks", "2", "--backend", "gloo", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1" in done.stderr
    assert "2 ranks over gloo" in done.stdout
    probe = load(Probe, out)
    assert {link.ranks for link in probe.pairs} == {(0, 1), (1, 0)}
    assert probe.cluster.num_gpus == 2
    model = tmp_path / "model.json"
    model.write_text(
        json.dumps({"num_layers": 4, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 4, "vocab": 2048}), "utf-8"
    )
    planned = run(
        *("executor", "plan", "--json", "--model", str(model), "--cluster", str(out), "--batch", "8", "--seq", "256")
    )
    assert planned.returncode == 0, planned.stderr + planned.stdout
    plan = json.loads(planned.stdout)
    assert plan["request"]["cluster"]["name"] == "probed 2 ranks"
    assert "probe-" in plan["provenance"]["calibration"], "the curves of the probe were used"


def test_under_torchrun_rank_0_alone_answers(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    launcher = (
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    )
    done = run(*launcher, "-m", "executor", "probe", "--backend", "gloo", "--json", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert load(Probe, out).cluster.num_gpus == 2


def three_ranks(tmp_path: Path, mode: str, started: range) -> Probe:
    """Rank 0 decides when the probe is over; the others are ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    out = tmp_path / "probe.json"
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, mode, str(out)], env={**environment, "RANK": str(rank)}, cwd=ROOT
        )
        for rank in started
    ]
    try:
        assert processes[0].wait(120) == 0
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return load(Probe, out)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    begun = time.monotonic()
    probe = three_ranks(tmp_path, "absent", range(2))
    assert time.monotonic() - begun < 120
    assert (2,) in [one.ranks for one in probe.silent]
    assert {link.ranks for link in probe.pairs} == {(0, 1), (1, 0)}
    assert probe.cluster.num_gpus == 2


def test_a_rank_that_goes_away_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    probe = three_ranks(tmp_path, "leaves", range(3))
    silent = {one.ranks: one.reason for one in probe.silent}
    assert set(silent) == {(0, 2), (1, 2)}
    assert "rank 2 said nothing in time" in " ".join(silent.values())
    assert {link.ranks for link in probe.pairs} == {(0, 1), (1, 0)}
    assert probe.cluster.num_gpus == 2
