"""Ranks that fail: the job ends in time, the rank is named, no process stays behind."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor import launch as launching
from executor.launch import Launched, launch, processes_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launch 2 ranks of which one fails; afterwards none of their processes is alive."""
    marks: list[str] = []
    real = launching.uuid.uuid4

    class Recorded:
        @staticmethod
        def uuid4():
            mark = real()
            marks.append(mark.hex)
            return mark

    monkeypatch.setattr(launching, "uuid", Recorded)

    def run(
        kind: str, *, rank: int = 1, step: int = 2, group_timeout_s: float = 60, timeout_s: float = 150
    ) -> Launched:
        ended = launch(
            ["-m", "tests.processes.failing_ranks", kind, str(rank), str(step), str(group_timeout_s)],
            num_ranks=2,
            timeout_s=timeout_s,
            log_dir=tmp_path,
        )
        assert len(marks) == 1
        assert list(processes_of(marks[0])) == []
        return ended

    return run


def test_a_killed_rank_is_named(run) -> None:
    ended = run("kill")
    assert not ended.ok
    assert (ended.failed_rank, ended.exit_code) == (1, -9)
    assert ended.reason == "rank 1 was killed by SIGKILL"


def test_a_rank_that_raises_is_named_with_its_error(run) -> None:
    ended = run("raise")
    assert (ended.failed_rank, ended.exit_code) == (1, 1)
    assert "ArithmeticError: planted fault" in ended.reason


def test_ranks_that_wait_name_the_one_that_hangs(run) -> None:
    ended = run("hang", group_timeout_s=15)
    assert ended.failed_rank == 1
    assert "LateRankError" in ended.reason
    assert "late: rank 1, last seen in step 1" in ended.reason
    assert "; rank 1 was in <lambda> (failing_ranks.py:" in ended.reason  # what it was doing: planted there


def test_the_launcher_names_the_rank_that_hangs(run) -> None:
    ended = run("idle", timeout_s=30)
    assert ended.failed_rank == 1
    assert "not done after 30 s; late: rank 1, last seen in step 1; the furthest was in step 2" in ended.reason
    assert "; rank 1 was in main (failing_ranks.py:" in ended.reason
    assert any("failing_ranks.py" in line and "in main" in line for line in ended.error_lines)  # where it sleeps


def test_a_rank_that_never_arrives_is_named(run) -> None:
    ended = run("absent", group_timeout_s=15)
    assert ended.failed_rank == 1
    assert "waited 15 s at 'start'; late: rank 1" in ended.reason
