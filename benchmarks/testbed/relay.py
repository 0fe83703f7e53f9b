"""A switch in userspace that delays: many kernels have no netem.

`python relay.py JSON`, JSON = {"hosts": [[namespace, address], ...], "out_bits_per_s": [...], "in_bits_per_s": [...], "delay_s",
"name"}: makes a TUN interface in each namespace and routes what goes to the other hosts through it. A packet waits its turn
at its sender's rate, then the delay, then at its receiver's rate (null = no limit). Says `up` when it works; ends with its
parent.
"""

import collections
import ctypes
import fcntl
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""
MTU = 9000
"""Large packets: Python forwards some 20,000 a second."""
QUEUE_BYTES = 8 << 20
"""What waits in one direction at most; beyond it packets are dropped, as in a router."""
SPIN_S = 2e-4
"""Closer deadlines are waited for without sleeping: select is that late on a busy machine."""
PRIORITY = -19
"""A packet that waits for a core is a packet that is late."""
LIBC = ctypes.CDLL(None, use_errno=True)


def open_tun(host: str, own: str, peers: Sequence[str], name: str) -> int:
    """A TUN interface in the namespace `host` of address `own`, with routes to `peers` through it."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{host}", os.O_RDONLY)
    try:
        if LIBC.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {host}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        if LIBC.setns(here, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns back")
    finally:
        os.close(here)
        os.close(there)
    for words in (
        ["link", "set", name, "mtu", str(MTU), "up"],
        *(["route", "add", f"{peer}/32", "dev", name, "src", own] for peer in peers),
    ):
        subprocess.run(["ip", "-n", host, *words], check=True, timeout=20)
    return tun


class Direction:
    """Packets that wait for a rate, then for a delay, before they are handed on."""

    def __init__(self, hand_on: Callable[[bytes], object], delay_s: float, bytes_per_s: float) -> None:
        self._hand_on, self._delay_s, self._bytes_per_s = hand_on, delay_s, bytes_per_s
        self._packets: collections.deque[tuple[float, bytes]] = collections.deque()
        self._queued_bytes = 0
        self._free_s = 0.0

    def take(self, packet: bytes, now_s: float) -> None:
        """Queue a packet, or drop it where the queue is full."""
        if self._queued_bytes + len(packet) > QUEUE_BYTES:
            return
        self._free_s = max(self._free_s, now_s) + len(packet) / self._bytes_per_s
        self._packets.append((self._free_s + self._delay_s, packet))
        self._queued_bytes += len(packet)

    @property
    def due_s(self) -> float:
        """When the next packet is due."""
        return self._packets[0][0] if self._packets else math.inf

    def deliver(self, now_s: float) -> None:
        """Hand over all that is due."""
        while self._packets and self._packets[0][0] <= now_s:
            _, packet = self._packets.popleft()
            self._queued_bytes -= len(packet)
            self._hand_on(packet)


def relay(tuns: Mapping[str, int], delay_s: float, out: Mapping[str, float], into: Mapping[str, float]) -> None:
    """Forward between TUN interfaces for ever; rates in bytes/s by address."""
    arrivals = {
        socket.inet_aton(address): Direction(lambda packet, tun=tun: os.write(tun, packet), 0.0, into[address])  # type: ignore[misc]
        for address, tun in tuns.items()
    }

    def arrive(packet: bytes) -> None:
        to = arrivals.get(packet[16:20])  # destination of an IPv4 header
        if to is not None:
            to.take(packet, time.monotonic())

    departures = {tun: Direction(arrive, delay_s, out[address]) for address, tun in tuns.items()}
    ways = [*departures.values(), *arrivals.values()]
    while True:
        wait_s = min(way.due_s for way in ways) - time.monotonic()
        readable, _, _ = select.select(list(departures), [], [], 0 if wait_s < SPIN_S else min(wait_s, 1.0))
        for tun in readable:
            for _ in range(64):
                try:
                    packet = os.read(tun, 65535)
                except BlockingIOError:
                    break
                departures[tun].take(packet, time.monotonic())
        for way in ways:
            way.deliver(time.monotonic())


def main() -> None:
    parent = os.getppid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the testbed has ended")
    os.nice(PRIORITY)
    asked = json.loads(sys.argv[1])
    addresses = [address for _, address in asked["hosts"]]
    tuns = {
        address: open_tun(host, address, [other for other in addresses if other != address], asked["name"])
        for host, address in asked["hosts"]
    }
    out, into = (
        {address: rate / 8 if rate else math.inf for address, rate in zip(addresses, asked[key], strict=True)}
        for key in ("out_bits_per_s", "in_bits_per_s")
    )
    print("up", flush=True)
    relay(tuns, asked["delay_s"], out, into)


if __name__ == "__main__":
    main()
