"""Bad input of `plan`, through the command line: one clear error each (value, law, legal values, what to do), the right exit code.

What a solver may do to us is played by a process of its own, in which it is missing, killed, or no solver at all.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest

from cost_models.graph import graph
from cost_models.records import Cluster, from_json, to_json
from executor.cli import main
from planner.readers.clusters import read_cluster
from planner.readers.node_presets import cluster_names
from planner.solver import TimedOut

PLAN = ["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--batch", "64", "--seq", "4096"]


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one error; nothing stands on stdout, and no traceback anywhere."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("meshwright: ")
    assert captured.err.count("meshwright: ") == 1
    return code, captured.err


# Pins -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ("tp=8, tp=4", "no tp satisfies tp=8 and tp=4; drop one of these pins"),
        ("tp>=4, tp<=2", "no tp satisfies tp>=4 and tp<=2"),
        ("zero=0, zero!=0", "no zero satisfies zero=0 and zero!=0"),
        ("dp=4, dps=8", "the pins dp=4 and dp_shard=8 contradict one another: dp = dp_replicate·dp_shard"),
        ("dp=8, dps=2, dpr=2", "the pins dp=8 and dp_shard=2 and dp_replicate=2 contradict"),
        ("dp=4|8, dps=3", "contradict one another: dp = dp_replicate·dp_shard"),
        ("zero=0, dps=8", "with zero = 0 nothing is divided, dp_shard = 1"),
        ("zero<=0, dps>=2", "with zero = 0 nothing is divided"),
    ],
)
def test_contradictory_pins(pins: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told([*PLAN, "--pin", pins], capsys)
    assert code == 2
    assert words in error


@pytest.mark.parametrize(
    "pins", ["dp=4|8, dps=4", "dp=8, dps=2, dpr=4", "zero=0|2, dps=8", "dp=8, dps!=8", "dps=8, dpr=1"]
)
def test_pins_that_can_be_had_together_are_not_refused(pins: str) -> None:
    assert main([*PLAN, "--pin", pins, "--json"]) == 0


def test_pins_whose_product_is_no_number_of_gpus_name_what_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told([*PLAN, "--pin", "tp=8, pp=2"], capsys)
    assert code == 1
    assert "no layout is legal here with the pins tp=8, pp=2" in error
    assert "in place of the pin tp=8, with all else as it is: tp = 1, 2, 4" in error
    assert "16 GPUs instead of 8" in error


# Workload, model, cluster -----------------------------------------------------------------------------------------------


def test_a_batch_that_no_layout_divides(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told([*PLAN[:6], "7", *PLAN[7:], "--pin", "tp=1, pp=1"], capsys)
    assert code == 1
    assert "GBS_MOD_MBSDP: gbs % (mbs·dp) = 0" in error
    assert "8 sequences a step instead of 7" in error
    assert "7 GPUs instead of 8" in error


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_layers": 0}, "num_layers=0; a whole number from 1 is needed"),
        ({"num_layers": -3}, "num_layers=-3; a whole number from 1 is needed"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"heads": 0}, "heads=0; a whole number from 1 is needed"),
        ({"vocab": 0}, "vocab=0; a whole number from 1 is needed"),
    ],
)
def test_a_model_of_nothing(
    model: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dimensions = {"num_layers": 4, "hidden": 256, "ffn": 512, "heads": 8, "vocab": 1000} | model
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": dimensions, "cluster": "h100x8", "workload": {"seq": 128, "gbs": 8}}))
    code, error = told(["plan", str(request)], capsys)
    assert code == 2
    assert words in error


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("pools", 0, "kind", "nic", "bandwidth_bytes_per_s", to=-5e9), "bandwidth_bytes_per_s=-5000000000.0; a positive number"),
        (_set("pools", 0, "kind", "intra", "bandwidth_bytes_per_s", to=0.0), "bandwidth_bytes_per_s=0.0; a positive number"),
        (_set("pools", 0, "kind", "device", "memory_bandwidth_bytes_per_s", to=-1.0), "positive numbers"),
        # what would leave the graph in two parts
        (_set("pools", 0, "kind", "num_nics", to=0), "num_nics=0; a whole number from 1 is needed"),
        (_set("exceptions", to=[{"node": 1, "nic_factor": 0.0}]), "leave a node out of the cluster where nothing works"),
        (_set("exceptions", to=[{"node": 1, "intra_factor": -0.5}]), "above 0 up to 1"),
        (_set("exceptions", to=[{"node": 9, "nic_factor": 0.5}]), "has nodes 0..3"),
        (_set("fabric", to=[{"name": "leaf", "radix": 0}]), "radix is a whole number from 1"),
        (_set("pools", 0, "num_nodes", to=0), "at least one node"),
        (_set("pools", to=[]), "has no pool of nodes"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be(
    change: Callable[[Any], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(to_json(read_cluster("h100x32")))
    change(document)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    code, error = told([*PLAN[:4], str(path), *PLAN[5:]], capsys)
    assert code == 2
    assert words in " ".join(error.split())


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize(
    "fabric", [[], [{"name": "leaf", "radix": 2}], [{"name": "leaf", "radix": 3}, {"name": "spine", "radix": 1}]]
)
def test_no_cluster_that_can_be_written_is_in_two_parts(name: str, fabric: list[dict[str, Any]]) -> None:
    """A top above the last level joins what its switches leave apart, so every pair of GPUs has a path."""
    document = to_json(read_cluster(f"{name}x{4 * read_cluster(f'{name}x1').pools[0].kind.gpus_per_node}")) | {
        "fabric": fabric
    }
    view = graph(from_json(Cluster, document), "all")
    assert networkx.is_connected(view)


# Solvers ----------------------------------------------------------------------------------------------------------------

SOLVER_SCRIPT = """\
import pathlib, sys
case, folder = {case!r}, pathlib.Path({folder!r})
if case != "highs":
    sys.modules["highspy"] = None
import pulp
if case == "none":
    pulp.PULP_CBC_CMD.pulp_cbc_path = str(folder / "absent")
elif case in ("killed", "silent"):
    fake = folder / "cbc"
    fake.write_text("#!/bin/sh\\n" + {{"killed": "kill -9 $$", "silent": "exit 0"}}[case] + "\\n")
    fake.chmod(0o755)
    pulp.PULP_CBC_CMD.pulp_cbc_path = str(fake)
from executor.cli import main
sys.exit(main({arguments!r}))
"""


def with_solver(case: str, folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    script = SOLVER_SCRIPT.format(case=case, folder=str(folder), arguments=arguments)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )


def test_cbc_where_highs_is_absent_gives_the_same_plan(tmp_path: Path) -> None:
    documents = []
    for case in ("highs", "cbc"):
        done = with_solver(case, tmp_path, [*PLAN, "--json"])
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
        assert documents[-1]["certificate"]["solver"] == case
        assert documents[-1]["certificate"]["status"] == "optimal"
    assert documents[0]["decision"] == documents[1]["decision"]
    assert documents[0]["certificate"]["objective_s"] == pytest.approx(
        documents[1]["certificate"]["objective_s"], rel=1e-9
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", "no solver can be started: neither HiGHS (package highspy) nor CBC (PuLP brings it) is here"),
        ("killed", "was started and did not come back with an answer: killed, out of memory"),
        ("silent", "was started and did not come back with an answer"),
    ],
)
def test_a_solver_that_is_missing_or_killed(case: str, words: str, tmp_path: Path) -> None:
    done = with_solver(case, tmp_path, PLAN)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr
    assert "highspy" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_solver_that_is_missing_is_told_by_explain_and_sweep_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path), "--json"]) == 0
    for arguments in (
        ["explain", str(path), "--why-not", "tp8"],
        ["explain", str(path), "--binds"],
        [*PLAN, "--sweep", "gpus=8"],
    ):
        done = with_solver("none", tmp_path, arguments)
        assert done.returncode == 2, done.stderr
        assert "no solver can be started" in done.stderr
    done = with_solver("none", tmp_path, ["predict", str(path)])
    assert done.returncode == 0, done.stderr


def test_a_solver_out_of_time_never_says_optimal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search has a plan, the solver no answer: the plan is told with the gap of the closed bounds."""
    monkeypatch.setattr("planner.search.best_first.solve", lambda *_, **__: TimedOut())
    assert main([*PLAN, "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)["certificate"]
    assert certificate["bound_s"] <= certificate["objective_s"]
    assert (certificate["status"] == "optimal") == (certificate["gap_objective"] <= 1e-6)


def test_no_time_for_any_plan_ends_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told([*PLAN, "--time-limit", "0"], capsys)
    assert code == 4
    assert "the time limit of 0 s ended before the first plan was known" in error
