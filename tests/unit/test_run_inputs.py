"""`run` on plans, flags and environments that cannot work: one error with exit code 2 before any rank is started."""

import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import Binding, CollectiveChoice, Ranks, RecordError, save
from cost_models.records.codec import check_writable, write_atomic
from executor.cli import main, ranks
from executor.errors import RefusedError
from executor.mesh import rank_and_world
from tests.processes.layouts import ORDER, Case


@pytest.fixture(autouse=True)
def _no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(ranks, "launch", started)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(layout="dpr2", recompute={"full": 9}), "legal: at most its 4 layers"),
        (Case(layout="pp2 sched=1f1b", permutation=(1, 0)), "ranks of a pp group in descending order"),
        (Case(layout="tp2", order=("pp",)), "does not name"),
        (Case(layout="dps2 zero1"), "zero=1"),
    ],
)
def test_what_is_refused_starts_nothing(
    case: Case, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(case.plan, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_an_algorithm_that_the_backend_has_not_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Case(layout="dpr2").plan
    tree = {"dp_replicate": CollectiveChoice(algorithm="tree", binding=Binding.DECIDED)}
    save(replace(plan, decision=replace(plan.decision, collectives=tree)), tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json")]) == 2
    told = capsys.readouterr().err
    assert "tree" in told
    assert "default, ring, hierarchical" in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--timeout", "nan"], "--timeout nan: give a positive number of seconds"),
        (["--timeout", "0"], "--timeout 0: give a positive number of seconds"),
        (["--steps", "0"], "steps=0"),
        (["--module", ":build"], "package.module:factory is needed"),
        (["--module", "json"], "package.module:factory is needed"),
        (["-o", "nowhere/measured.json"], "the folder .*nowhere does not exist"),
        (["-o", "."], "this is a folder"),
        (["-o", ""], "the name of the file to write is empty"),
    ],
)
def test_flags_that_cannot_work(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Case(layout="dpr2").plan, "plan.json")
    assert main(["run", "plan.json", *flags]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not in the environment"),
        (
            {"RANK": "", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK not in the environment",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "torchrun started 3"),
    ],
)
def test_a_rank_whose_environment_is_no_torchruns(
    environment: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    save(Case(layout="dpr2").plan, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json")]) == 2
    assert words in capsys.readouterr().err


def test_the_numbers_of_a_good_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world() == (1, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RefusedError, match="legal: ranks 0 to WORLD_SIZE - 1"):
        rank_and_world()


# Records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("tp", "tp", "pp"), ("tp", "foo"), ("tp", "ep")])
def test_an_order_names_each_axis_once_and_no_other(order: tuple[str, ...]) -> None:
    with pytest.raises(RecordError, match="has one place at most"):
        Ranks(order=order)
    Ranks(order=ORDER)
    Ranks(order=("pp", "tp"))


def test_collectives_are_of_known_axes() -> None:
    plan = Case(layout="dpr2").plan
    with pytest.raises(RecordError, match="collectives names 'dp'; legal axes: tp, cp, dp_shard, dp_replicate, pp"):
        replace(plan.decision, collectives={"dp": CollectiveChoice(algorithm="ring", binding=Binding.PREDICTED)})


# Files to write -------------------------------------------------------------------------------------------------------


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomic(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_a_check_leaves_nothing_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "old"
    with pytest.raises(RecordError, match="this is a folder"):
        write_atomic(tmp_path, "text")


# Other verbs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "llama-tiny", "--measure", "--seq", "0"], "seq=0"),
        (["profile", "llama-tiny", "--seq", "0"], "seq=0"),
        (["profile", "llama-tiny", "--measure", "--mbs", "0"], "mbs=0: a micro-batch has at least one sequence"),
        (["profile", "llama-tiny", "--measure", "--ranks", "0"], "ranks=0: a measurement takes at least one process"),
        (
            ["profile", "llama-tiny", "--measure", "--precision", "banana"],
            "precision='banana'; legal values: fp32, bf16",
        ),
        (["profile", "llama-tiny", "--ranks", "2"], "--ranks 2: says how to measure; give --measure too"),
        (["probe", "--ranks", "0"], "ranks=0: links are between at least 2 ranks"),
        (["probe", "h100x8", "--ranks", "2"], "--ranks 2: is for links measured here"),
        (["run", "plan.json", "-o", "plan.json"], "-o plan.json: this file is read, and would be lost"),
        (["run", "plan.json", "-o", "link.json"], "-o link.json: this file is read, and would be lost"),
        (["compare", "plan.json", "m.json", "--fit", "m.json"], "--fit m.json: this file is read, and would be lost"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Case(layout="dpr2").plan, "plan.json")
    Path("link.json").symlink_to("plan.json")
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
