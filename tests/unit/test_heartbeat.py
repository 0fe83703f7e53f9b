"""A long silence is broken, a short one is not, and nothing is said once the work has ended."""

import threading

import pytest

from executor.cli.heartbeat import still_at


def test_long_work_says_what_it_is_at() -> None:
    lines: list[str] = []
    told = threading.Event()

    def progress(line: str) -> None:
        lines.append(line)
        told.set()

    with still_at("the search", progress, every_s=0.01):
        assert told.wait(30)
    assert lines[0].startswith("the search: 0 s so far")
    said = len(lines)
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    assert len(lines) == said


def test_quick_work_is_silent_and_errors_pass() -> None:
    lines: list[str] = []
    with pytest.raises(KeyError), still_at("the search", lines.append):
        raise KeyError("x")
    assert lines == []
