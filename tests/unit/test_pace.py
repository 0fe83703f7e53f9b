"""Progress: nothing of what is quick, a line now and then of what is slow."""

import pytest

from planner import pace
from planner.pace import Pace


def test_lines_are_told_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, made = [0.0], [], []
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    one = Pace(tell=told.append)
    for second in range(10):
        now[0] = float(second)

        def words(second: int = second) -> str:
            made.append(second)
            return f"at {second}"

        one.at(words)
    assert told == ["at 3", "at 6", "at 9"]
    assert made == [3, 6, 9]


def test_without_anybody_to_tell_no_words_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    Pace().at(lambda: pytest.fail("nobody asked"))


def test_a_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from executor.cli.main import main

    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    asked = ["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--batch", "64", "--seq", "4096", "--json"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{")
    assert "cells looked into, best objective" in err
    assert main([*asked[:4], "h100x1", *asked[5:]]) == 1
    assert "nothing fits as asked; trying" in capsys.readouterr().err
