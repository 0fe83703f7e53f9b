"""Hosts as network namespaces on a bridge; htb classes shape what leaves and what reaches them, a relay delays.

Each host has one veth interface; the bridge has no address, so nothing of the machine's own network is touched. Names carry
the process's number: what a process left that was killed is found and removed by the next one.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.testbed import relay
from benchmarks.testbed.links import NUM_HOSTS, Links, two_pairs
from benchmarks.testbed.lock import WAIT_S, alone

SEGMENT_BYTES = 32 * 1024
"""Largest segment that leaves a host: of each pause's first one htb lets pass what it has no tokens for."""
BURST_BYTES = 32 * 1024
"""What passes unshaped after a pause: little against any message that is timed here, and no less than htb needs at 1 Gbit/s."""
TCP = "cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && echo 0 > tcp_slow_start_after_idle"
"""Senders that keep a queue at the link filled: with BBR, which looks for its rate anew after each pause, that would be measured.
(CUBIC, which clusters use, is not offered to namespaces by every kernel; without losses both only ever open their window.)"""
COMMAND_S = 20
"""Time-out of one command of iproute2."""
RELAY_S = 10.0
"""Time-out of a relay's start."""


class NetworkError(RuntimeError):
    """A host could not be made, or a rank failed or is late."""


def unavailable() -> str | None:
    """Why no such network can be made here; None where it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs iproute2: no {' and no '.join(missing)} here"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    name = f"mw{os.getpid()}t"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
    except NetworkError as error:
        return f"network namespaces or htb are not permitted here: {error}"
    finally:
        _try("ip", "netns", "del", name)
    return None


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _try(*command: str) -> None:
    """For what may be gone already."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)


class Network:
    """The hosts, by number."""

    def __init__(self, process: int) -> None:
        self._prefix = f"mw{process}"
        self._relays: list[subprocess.Popen[str]] = []

    def host(self, number: int) -> str:
        """Name of its namespace."""
        return f"{self._prefix}-{number}"

    def interface(self, number: int) -> str:
        """Its interface, inside."""
        return f"{self._prefix}v{number}"

    def _outside(self, number: int) -> str:
        return f"{self._prefix}b{number}"

    def address(self, number: int) -> str:
        """Its address."""
        return f"10.9.0.{number + 1}"

    @property
    def places(self) -> list[str]:
        """`host:interface` of each, as `ranks.start` takes them."""
        return [f"{self.host(number)}:{self.interface(number)}" for number in range(NUM_HOSTS)]

    def make(self) -> None:
        """Hosts, interfaces and the bridge."""
        bridge = f"{self._prefix}br"
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        for number in range(NUM_HOSTS):
            host, inside, outside = self.host(number), self.interface(number), self._outside(number)
            _do("ip", "netns", "add", host)
            _do("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            _do("ip", "link", "set", inside, "netns", host)
            _do("ip", "link", "set", outside, "master", bridge)
            _do("ip", "link", "set", outside, "up")
            _do("ip", "-n", host, "link", "set", inside, "gso_max_size", str(SEGMENT_BYTES))
            _do("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", inside)
            _do("ip", "-n", host, "link", "set", inside, "up")
            _do("ip", "-n", host, "link", "set", "lo", "up")
            _do("ip", "netns", "exec", host, "sh", "-c", TCP)

    def shape(self, links: Links) -> None:
        """Give the links their bandwidths and delays, in place of those that they have."""
        self._end_relays()
        for number in range(NUM_HOSTS):
            self._shape_out(number, links)
            self._shape_in(number, links)
        for delay in links.delays:
            self._delay(delay.hosts, delay.one_way_s, (delay.bits_per_s,) * 2, (None,) * 2)
        if links.switch_delay_s:
            out, into = (
                [rates[host] for host in range(NUM_HOSTS)] for rates in (links.out_bits_per_s, links.in_bits_per_s)
            )
            self._delay(range(NUM_HOSTS), links.switch_delay_s, out, into)

    def _shape_out(self, number: int, links: Links) -> None:
        """One class for all that leaves the host, and below it one for each destination."""
        tc = ("ip", "netns", "exec", self.host(number), "tc")
        device = ("dev", self.interface(number))
        _try(*tc, "qdisc", "del", *device, "root")
        whole = links.out_bits_per_s.get(number)
        rates = {to: rate for (sender, to), rate in links.pairs_bits_per_s.items() if sender == number}
        if whole is not None:
            _interface(tc, device, whole)
        elif rates:
            _do(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb")
        for other, bits_per_s in rates.items():
            which = f"1:{10 + other}"
            parent = "1:" if whole is None else "1:1"
            _do(*tc, "class", "add", *device, "parent", parent, "classid", which, *_class(bits_per_s))
            match = ("u32", "match", "ip", "dst", f"{self.address(other)}/32")
            _do(*tc, "filter", "add", *device, "protocol", "ip", "parent", "1:", "prio", "2", *match, "flowid", which)

    def _shape_in(self, number: int, links: Links) -> None:
        """One class for all that the bridge hands to the host."""
        device = ("dev", self._outside(number))
        _try("tc", "qdisc", "del", *device, "root")
        bits_per_s = links.in_bits_per_s.get(number)
        if bits_per_s is not None:
            _interface(("tc",), device, bits_per_s)

    def _delay(
        self, hosts: Sequence[int], one_way_s: float, out: Sequence[float], into: Sequence[float | None]
    ) -> None:
        asked = {
            "hosts": [(self.host(host), self.address(host)) for host in hosts],
            "out_bits_per_s": list(out),
            "in_bits_per_s": list(into),
            "delay_s": one_way_s,
            "name": f"mwtun{''.join(map(str, hosts))}",
        }
        process = subprocess.Popen(
            [sys.executable, relay.__file__, json.dumps(asked)], stdout=subprocess.PIPE, text=True
        )
        self._relays.append(process)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "up":
            raise NetworkError(f"the relay between hosts {hosts} did not start: exit code {process.wait(RELAY_S)}")

    def cut(self, a: int, b: int) -> None:
        """Hosts `a` and `b` no longer reach each other; all other pairs do."""
        for here, there in ((a, b), (b, a)):
            _do("ip", "-n", self.host(here), "route", "add", "blackhole", f"{self.address(there)}/32")

    def _end_relays(self) -> None:
        for process in self._relays:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._relays.clear()

    def remove(self) -> None:
        """All of it, whatever there is."""
        self._end_relays()
        for number in range(NUM_HOSTS):
            _try("ip", "netns", "del", self.host(number))
            _try("ip", "link", "del", self._outside(number))
        _try("ip", "link", "del", f"{self._prefix}br")

    def run(
        self,
        program: Path,
        arguments: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """`program` with `arguments` and the hosts' places behind them; it starts a rank in each (`ranks.start`). Its stderr.

        NetworkError tells what it said, where it fails or is late.
        """
        command = [sys.executable, str(program), *arguments, *self.places]
        surroundings = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        root = str(Path(__file__).parents[2])
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, (root, surroundings.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, env=surroundings
            )
        except subprocess.TimeoutExpired as error:
            raise NetworkError(f"late after {timeout_s:.0f} s: {error.stderr!r:.800}") from None
        if done.returncode:
            raise NetworkError(done.stderr[-2000:])
        return done.stderr


def _interface(tc: tuple[str, ...], device: tuple[str, str], bits_per_s: float) -> None:
    """All that passes a device at this rate, small packets first: acknowledgements that wait behind data throttle the other way."""
    _do(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "3")
    _do(*tc, "class", "add", *device, "parent", "1:", "classid", "1:1", *_class(bits_per_s))
    for which, prio in (("1:2", "0"), ("1:3", "1")):
        _do(*tc, "class", "add", *device, "parent", "1:1", "classid", which, *_class(bits_per_s), "prio", prio)
    match = ("u32", "match", "u16", "0x0000", "0xff00", "at", "2")
    _do(*tc, "filter", "add", *device, "protocol", "ip", "parent", "1:", "prio", "1", *match, "flowid", "1:2")


def _class(bits_per_s: float) -> tuple[str, ...]:
    rate = f"{bits_per_s:.0f}bit"
    sizes = ("burst", str(BURST_BYTES), "cburst", str(BURST_BYTES), "quantum", "60000")
    return ("htb", "rate", rate, "ceil", rate, *sizes)


def remove_leftovers() -> list[int]:
    """Remove the networks of processes that are no more; their numbers."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    found = re.findall(r"^mw(\d+)[-t]", listed.stdout, re.MULTILINE)
    found += re.findall(r"^\d+: mw(\d+)b", links.stdout, re.MULTILINE)
    dead = sorted({int(number) for number in found if not Path(f"/proc/{number}").exists()})
    for number in dead:
        Network(number).remove()
        _try("ip", "netns", "del", f"mw{number}t")
    return dead


@contextlib.contextmanager
def network(links: Links, *, wait_s: float = WAIT_S) -> Iterator[Network]:
    """The hosts with these links, and none of them afterwards. One at a time on a machine: lock.TestbedBusyError names who has it."""
    with alone(wait_s):
        remove_leftovers()
        made = Network(os.getpid())
        atexit.register(made.remove)
        try:
            made.make()
            made.shape(links)
            yield made
        finally:
            made.remove()
            atexit.unregister(made.remove)


@contextlib.contextmanager
def shaped_network(near_bits_per_s: float, far_bits_per_s: float) -> Iterator[Network]:
    """Two fast pairs with slow links between them."""
    with network(two_pairs(near_bits_per_s, far_bits_per_s)) as made:
        yield made
