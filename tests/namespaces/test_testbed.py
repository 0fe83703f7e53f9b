"""The testbed itself: what its links carry and delay, that nothing of it stays, and that only one runs at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.links import NUM_HOSTS, Delay, Links, star, two_pairs
from benchmarks.testbed.network import Network, NetworkError, network, remove_leftovers, unavailable

WHY_NOT = unavailable()
pytestmark = [pytest.mark.timeout(150), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

MEGABIT = 1e6
BYTES = 2_500_000
TCP = 0.04
"""What headers add: 90 of 1538 bytes on the wire, less in large segments."""


SLOWER = 1.4
"""Times that a busy machine may lengthen a transfer; nothing shortens one."""


def carries(seconds: float, bits_per_s: float) -> bool:
    """Whether BYTES took as long as they should."""
    least_s = BYTES * 8 / bits_per_s
    return 0.97 * least_s < seconds < SLOWER * (1 + TCP) * least_s


def talked(net: Network, tmp_path: Path, *transfers: str) -> dict[str, float]:
    """Seconds of transfers `from-to:bytes`, joined by + where they run at once, through plain TCP sockets."""
    out = tmp_path / "seconds.json"
    net.run(Path(__file__).with_name("talking_ranks.py"), [str(out), ",".join(transfers)], timeout_s=60)
    found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_pairs_and_a_delayed_link_carry_what_they_say(tmp_path: Path) -> None:
    links = two_pairs(200 * MEGABIT, 50 * MEGABIT, (Delay(hosts=(0, 2), one_way_s=0.02, bits_per_s=50 * MEGABIT),))
    with network(links) as net:
        seconds = talked(net, tmp_path, f"0-1:{BYTES}", f"1-2:{BYTES}", "1-2:8", "0-2:8", "2-0:8", f"0-2:{BYTES}")
    assert carries(seconds[f"0-1:{BYTES}"], 200e6)
    assert carries(seconds[f"1-2:{BYTES}"], 50e6)
    assert seconds["1-2:8"] < 0.01
    for way in ("0-2:8", "2-0:8"):
        assert seconds[way] == pytest.approx(0.04, rel=0.2), way
    assert seconds[f"0-2:{BYTES}"] > BYTES * 8 / 50e6 + 0.03


def test_hosts_of_a_star_share_their_interfaces(tmp_path: Path) -> None:
    with network(star(100 * MEGABIT, {3: 50 * MEGABIT})) as net:
        both = f"1-0:{BYTES}+2-0:{BYTES}"
        seconds = talked(
            net, tmp_path, f"0-1:{BYTES}", both, f"0-1:{BYTES}+1-0:{BYTES}", f"3-1:{BYTES}", f"1-3:{BYTES}"
        )
    assert carries(seconds[f"0-1:{BYTES}"], 100e6)
    # the two do not begin in the same moment, so neither takes as long as both together
    assert seconds[both] > 1.6 * seconds[f"0-1:{BYTES}"], "what reaches a host shares its way in"
    assert carries(seconds[both], 50e6 / 0.8)
    assert carries(seconds[f"0-1:{BYTES}+1-0:{BYTES}"], 100e6), "both directions at once"
    assert carries(seconds[f"3-1:{BYTES}"], 50e6)
    assert carries(seconds[f"1-3:{BYTES}"], 50e6)


def test_a_cut_pair_alone_is_cut(tmp_path: Path) -> None:
    with network(star(100 * MEGABIT)) as net:
        net.cut(1, 3)
        assert talked(net, tmp_path, "0-3:8", "1-2:8")
        with pytest.raises(NetworkError, match=r"rank [13] "):
            talked(net, tmp_path, "1-3:8")


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys, time\n"
        "from benchmarks.testbed.ranks import start\n"
        "start(lambda rank: 1 / 0 if rank == 2 else time.sleep(30), sys.argv[1:], 20.0)\n"
    )
    with network(two_pairs(1e9, 1e8)) as net:
        assert net.address(NUM_HOSTS - 1) == "10.9.0.4"
        with pytest.raises(NetworkError, match=r"(?s)ZeroDivisionError.*rank 2 ended with 1"):
            net.run(program, [], timeout_s=20)


def names_of(process: int) -> list[str]:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True, timeout=20).stdout
    return [line for line in (spaces + links).splitlines() if f"mw{process}" in line]


def test_nothing_stays_even_after_a_kill() -> None:
    with network(Links()) as net:
        assert Path("/run/netns", net.host(0)).exists()
        assert names_of(os.getpid())
    assert not names_of(os.getpid())
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal\n"
            "from benchmarks.testbed.network import Network\n"
            "Network(os.getpid()).make()\n"
            "print(os.getpid(), flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    process = int(killed.stdout)
    assert len(names_of(process)) > NUM_HOSTS
    assert process in remove_leftovers()
    assert not names_of(process)


def test_what_a_living_process_has_is_left_alone() -> None:
    parent = Network(os.getppid())
    try:
        parent.make()
        assert os.getppid() not in remove_leftovers()
        assert names_of(os.getppid())
    finally:
        parent.remove()


def test_a_far_switch_delays_and_shares_interfaces(tmp_path: Path) -> None:
    size = 500_000
    with network(star(40 * MEGABIT, {3: 20 * MEGABIT}, delay_s=0.02)) as net:
        both = f"1-0:{size}+2-0:{size}"
        seconds = talked(net, tmp_path, "0-1:8", f"0-1:{size}", both, f"3-1:{size}")
    alone_s = size * 8 / 40e6
    assert seconds["0-1:8"] == pytest.approx(0.04, rel=0.2)
    # TCP needs some round trips until it sends at the full rate
    assert alone_s + 0.03 < seconds[f"0-1:{size}"] < alone_s + 0.15
    assert 2 * alone_s + 0.03 < seconds[both] < 2 * alone_s + 0.15
    assert 2 * alone_s + 0.03 < seconds[f"3-1:{size}"] < 2 * alone_s + 0.15
