"""A delayed link between two network namespaces, in userspace: many kernels have no netem.

`python relay.py HOST_A ADDRESS_A HOST_B ADDRESS_B DELAY_S BITS_PER_S NAME`: makes a TUN interface NAME in both namespaces
and routes what one sends to the other's address through it. Packets wait their turn at the rate, then the delay. Says `up`
when it works; ends with its parent.
"""

import collections
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time

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


def open_tun(host: str, own: str, peer: str, name: str) -> int:
    """A TUN interface in the namespace `host` of address `own`, with a route to `peer` through it."""
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
        ["route", "add", f"{peer}/32", "dev", name, "src", own],
    ):
        subprocess.run(["ip", "-n", host, *words], check=True, timeout=20)
    return tun


class Direction:
    """Packets on their way to one end."""

    def __init__(self, out: int, delay_s: float, bytes_per_s: float) -> None:
        self._out, self._delay_s, self._bytes_per_s = out, delay_s, bytes_per_s
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
        return self._packets[0][0] if self._packets else float("inf")

    def deliver(self, now_s: float) -> None:
        """Hand over all that is due."""
        while self._packets and self._packets[0][0] <= now_s:
            _, packet = self._packets.popleft()
            self._queued_bytes -= len(packet)
            os.write(self._out, packet)


def relay(a: int, b: int, delay_s: float, bytes_per_s: float) -> None:
    """Forward between two TUN interfaces for ever."""
    ways = {a: Direction(b, delay_s, bytes_per_s), b: Direction(a, delay_s, bytes_per_s)}
    while True:
        wait_s = min(way.due_s for way in ways.values()) - time.monotonic()
        readable, _, _ = select.select([a, b], [], [], 0 if wait_s < SPIN_S else min(wait_s, 1.0))
        for end in readable:
            for _ in range(64):
                try:
                    packet = os.read(end, 65535)
                except BlockingIOError:
                    break
                ways[end].take(packet, time.monotonic())
        now_s = time.monotonic()
        for way in ways.values():
            way.deliver(now_s)


def main() -> None:
    parent = os.getppid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the testbed has ended")
    os.nice(PRIORITY)
    host_a, address_a, host_b, address_b, delay_s, bits_per_s, name = sys.argv[1:]
    a, b = open_tun(host_a, address_a, address_b, name), open_tun(host_b, address_b, address_a, name)
    print("up", flush=True)
    relay(a, b, float(delay_s), float(bits_per_s) / 8)


if __name__ == "__main__":
    main()
