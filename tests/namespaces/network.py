"""Four hosts on one machine: network namespaces on a bridge, fast within the pairs (0, 1) and (2, 3), slow between them.

Each host is a namespace with one veth interface; the bridge has no address, so nothing of the machine's own network is
touched. An htb class for each destination shapes what leaves a host, so every pair of hosts has a link of its own.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NUM_HOSTS = 4
PAIR = 2
"""Hosts 2i and 2i+1 are near each other."""
SEGMENT_BYTES = 32 * 1024
"""Largest segment that leaves a host: of each pause's first one htb lets pass what it has no tokens for."""
BURST_BYTES = 32 * 1024
"""What passes unshaped after a pause: little against any message that is timed here, and no less than htb needs at 1 Gbit/s."""


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
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Network:
    """The hosts, by number."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

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

    def shape(self, near_bits_per_s: float, far_bits_per_s: float) -> None:
        """What leaves each host, by its destination."""
        for number in range(NUM_HOSTS):
            tc = ("ip", "netns", "exec", self.host(number), "tc")
            device = ("dev", self.interface(number))
            _do(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "99")
            for other in range(NUM_HOSTS):
                if other == number:
                    continue
                bits_per_s = near_bits_per_s if number // PAIR == other // PAIR else far_bits_per_s
                burst = ("burst", str(BURST_BYTES), "cburst", str(BURST_BYTES), "quantum", "60000")
                which, rate = f"1:{10 + other}", ("htb", "rate", f"{bits_per_s:.0f}bit")
                _do(*tc, "class", "add", *device, "parent", "1:", "classid", which, *rate, *burst)
                match = ("u32", "match", "ip", "dst", f"{self.address(other)}/32")
                _do(*tc, "filter", "add", *device, "protocol", "ip", "parent", "1:", *match, "flowid", which)

    def remove(self) -> None:
        """All of it, whatever there is."""
        for number in range(NUM_HOSTS):
            subprocess.run(["ip", "netns", "del", self.host(number)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", self._outside(number)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._prefix}br"], capture_output=True, check=False)

    def run(self, program: Path, arguments: Sequence[str], timeout_s: float) -> None:
        """`program` with `arguments` and the names of hosts and interfaces behind them; it starts a rank in each (`ranks.start`).

        NetworkError tells what it said, where it fails or is late.
        """
        places = [f"{self.host(number)}:{self.interface(number)}" for number in range(NUM_HOSTS)]
        command = [sys.executable, str(program), *arguments, *places]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise NetworkError(f"late after {timeout_s:.0f} s: {error.stderr!r:.800}") from None
        if done.returncode:
            raise NetworkError(done.stderr[-2000:])


@contextlib.contextmanager
def shaped_network(near_bits_per_s: float, far_bits_per_s: float) -> Iterator[Network]:
    """The hosts, and none of them afterwards."""
    network = Network(f"mw{os.getpid()}")
    try:
        network.make()
        network.shape(near_bits_per_s, far_bits_per_s)
        yield network
    finally:
        network.remove()
