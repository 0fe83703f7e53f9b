"""The testbed's parts that need no network: its lock, its links, its relay's queue, and what it says where it cannot be made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import network
from benchmarks.testbed.links import Delay, Links, star, two_pairs
from benchmarks.testbed.lock import TestbedBusyError, alone
from benchmarks.testbed.relay import Direction

HOLDER = (
    "import sys, pathlib\n"
    "from benchmarks.testbed.lock import alone\n"
    "with alone(path=pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_a_held_testbed_names_its_holder_and_is_free_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TestbedBusyError, match=rf"held by process {holder.pid} .*after 0 s"), alone(0.0, path):
            pass
        holder.kill()
    with alone(5.0, path):
        assert f"process {os.getpid()}" in path.read_text()
    assert path.read_text() == ""


def test_links_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1e\+10 bit/s: between 1e\+06 and 1e\+09"):
        two_pairs(1e10, 1e8)
    with pytest.raises(ValueError, match=r"host 4: hosts are 0\.\.3"):
        Links(out_bits_per_s={4: 1e8})
    with pytest.raises(ValueError, match="two hosts and a positive time"):
        Links(delays=(Delay(hosts=(1, 1), one_way_s=0.1, bits_per_s=1e8),))
    with pytest.raises(ValueError, match="needs the rates of every host"):
        Links(out_bits_per_s={0: 1e8}, switch_delay_s=0.1)


def test_shapes() -> None:
    pairs = two_pairs(1e9, 1e8).pairs_bits_per_s
    assert len(pairs) == 12
    assert pairs[2, 3] == pairs[1, 0] == 1e9
    assert pairs[1, 2] == 1e8
    assert star(1e8, {3: 1e7}).in_bits_per_s == {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e7}


def test_packets_wait_for_the_rate_and_then_the_delay() -> None:
    arrived: list[bytes] = []
    way = Direction(arrived.append, 0.5, 100.0)
    way.take(b"x" * 50, 10.0)
    way.take(b"y" * 100, 10.0)
    assert way.due_s == pytest.approx(10.0 + 0.5 + 0.5)
    way.deliver(11.1)
    assert arrived == [b"x" * 50]
    assert way.due_s == pytest.approx(11.5 + 0.5)
    way.deliver(12.1)
    assert arrived == [b"x" * 50, b"y" * 100]
    assert way.due_s == float("inf")


def test_where_it_cannot_be_made_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.sys, "platform", "darwin")
    assert "this is darwin" in (network.unavailable() or "")
    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    assert network.unavailable() == "needs iproute2: no tc here"
    monkeypatch.setattr(network.shutil, "which", lambda tool: "/sbin/" + tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert "needs root" in (network.unavailable() or "")
