"""What the launcher reads from torchrun's report, without starting a rank."""

from pathlib import Path

import pytest

from executor.launch import JOINED, _failed, _late, launch, note_progress

REPORT = """
Failures:
[1]:
  time      : 2026-11-30_16:47:10
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {one} (pid: 7589)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_16:47:10
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {zero} (pid: 7588)
"""


def folder(tmp_path: Path, *, zero: int, one: int, stderr: tuple[str, str]) -> Path:
    (tmp_path / "torchrun.log").write_text(REPORT.format(zero=zero, one=one))
    for rank, text in enumerate(stderr):
        place = tmp_path / "run" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stderr.log").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("zero", "one", "stderr", "rank", "reason"),
    [
        (1, 1, ("ValueError: mine", "ValueError: other"), 0, "rank 0 ended with exit code 1: ValueError: mine"),
        (1, -9, ("RuntimeError: Connection reset by peer", ""), 1, "rank 1 was killed by SIGKILL"),
        (
            1,
            1,
            ("RuntimeError: Connection closed by peer", "KeyError: 3"),
            1,
            "rank 1 ended with exit code 1: KeyError: 3",
        ),
        (-15, 1, ("", "KeyError: 3"), 1, "rank 1 ended with exit code 1: KeyError: 3"),
        (1, -15, ("LateRankError: rank 0 waited 9 s; late: rank 1", ""), 1, "late: rank 1"),
    ],
)
def test_the_rank_to_blame(
    tmp_path: Path, zero: int, one: int, stderr: tuple[str, str], rank: int, reason: str
) -> None:
    ended = _failed(folder(tmp_path, zero=zero, one=one, stderr=stderr), 1.0, 1)
    assert not ended.ok
    assert ended.failed_rank == rank
    assert reason in ended.reason


def test_torchrun_itself_fails(tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text("No module named torch\n")
    ended = _failed(tmp_path, 1.0, 1)
    assert ended.failed_rank is None
    assert ended.error_lines == ("No module named torch",)


def test_who_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROGRESS", str(tmp_path))
    for rank, step in enumerate((4, 3, 4)):
        note_progress(rank, step)
    assert "late: rank 1, last seen in step 3; the furthest was in step 4" in _late(tmp_path, 3, 9.0, 9.0).reason
    assert "late: rank 3, last seen before its program ran" in _late(tmp_path, 4, 9.0, 9.0).reason
    note_progress(3, JOINED)
    assert "rank 3, last seen while its model was built and checked" in _late(tmp_path, 4, 9.0, 9.0).reason
    note_progress(1, 4)
    everyone = _late(tmp_path, 3, 9.0, 9.0)
    assert everyone.failed_rank is None
    assert "all ranks were last seen in step 4" in everyone.reason


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="at least one rank and a positive time-out"):
        launch(["x.py"], num_ranks=0, timeout_s=1)
