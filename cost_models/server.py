"""Seconds of a parameter server on a star: every host has one link to a switch that never binds, full duplex.

Workers push their gradients, servers add them up, workers pull the sums. Server k keeps the share s_k of the bytes; what a
worker exchanges with a server on its own host crosses no link. With B bytes, w workers, links of r bytes/s and steps of α:

  one server of its own      α + wB/r to push and as much to pull: its link binds
  one server on a worker     α + (w-1)B/r, twice
  sharded over the workers   α + (w-1)/w·B/r, twice: the bytes of a ring in 2 steps where the ring takes 2(w-1)
  sharded over w spare hosts α + B/r, twice

At a server of its own a slow worker's pushes are held up by the fast ones', and end alone.
In c chunks the pull of one runs beside the push of the next, since links are full duplex: (c+1)/(2c) of these bytes' time.

The ring of w workers is 2(w-1)(α + B/(w·r)), and begins when its last member is ready; a server's link works on what is
there, so a late worker finds the others' pushes done. Which bytes a slow link carries is what decides: a ring sends 2(w-1)/w·B
through each of its links, a worker that is no server 2B.

Li et al. 2014 (parameter server); Jiang et al. 2020 (BytePS: spare hosts and chunks); Patarasuk, Yuan 2009 (ring).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_models.records import RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Hosts around one switch, the workers first, then hosts that only serve."""

    bytes_per_s: tuple[float, ...]
    """Each host's link, in one direction; both work at once."""
    num_workers: int
    """Hosts, from the first, that hold gradients."""
    step_s: float
    """Latency of one message from host to host."""
    launch_s: float = 0.0
    """Constant of one exchange."""
    ready_s: tuple[float, ...] = ()
    """When each worker has its gradients; empty = all at once."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= len(self.bytes_per_s):
            raise RecordError(f"num_workers={self.num_workers} of {len(self.bytes_per_s)} hosts; legal: 1 to the hosts")
        if any(not 0 < rate < math.inf for rate in self.bytes_per_s):
            raise RecordError(f"links of {list(self.bytes_per_s)} bytes/s: a positive number for each host is needed")
        if any(not 0 <= late < math.inf for late in (self.step_s, self.launch_s, *self.ready_s)):
            raise RecordError("latencies and times of readiness are seconds from 0")
        if self.ready_s and len(self.ready_s) != self.num_workers:
            raise RecordError(
                f"ready_s has {len(self.ready_s)} entries, but there are {self.num_workers} workers; none, or one for each"
            )

    @property
    def workers_ready_s(self) -> tuple[float, ...]:
        """When each worker has its gradients."""
        return self.ready_s or (0.0,) * self.num_workers


def alike(
    num_workers: int, bytes_per_s: float, step_s: float, *, spare_hosts: int = 0, slow_factor: float = 1.0
) -> Star:
    """A star of alike links, but for the last worker's, of which `slow_factor` works."""
    rates = [bytes_per_s] * (num_workers - 1) + [bytes_per_s * slow_factor] + [bytes_per_s] * spare_hosts
    return Star(bytes_per_s=tuple(rates), num_workers=num_workers, step_s=step_s)


def server_s(star: Star, num_bytes: float, servers: Sequence[int], *, num_chunks: int = 1) -> float:
    """Seconds until every worker has the sum of `num_bytes` of gradients, by servers on these hosts with equal shares.

    One host is one server, all workers are a sharded one. RecordError for hosts that the star has not.
    """
    hosts, share = sorted(set(servers)), num_bytes / max(len(set(servers)), 1)
    if not hosts or not 0 <= hosts[0] <= hosts[-1] < len(star.bytes_per_s):
        raise RecordError(f"servers on hosts {list(servers)}; legal: one or more of 0..{len(star.bytes_per_s) - 1}")
    if num_chunks < 1:
        raise RecordError(f"num_chunks={num_chunks}; a whole number from 1 is needed")
    if num_bytes <= 0:
        return 0.0
    pushed_s = max(_pushes_s(star, hosts, share / num_chunks, star.workers_ready_s))
    phase_s = max(_pushes_s(star, hosts, share / num_chunks, (0.0,) * star.num_workers))
    # the chunks behind the first one follow at the pace of a phase, the last one's pull comes at the end
    whole_s = pushed_s + num_chunks * phase_s
    if len(hosts) == 1:
        whole_s = max(whole_s, _in_turn_s(star, hosts[0], share) + phase_s)
    return star.launch_s + 2 * star.step_s + whole_s


def _in_turn_s(star: Star, server: int, num_bytes: float) -> float:
    """When all workers' pushes of so many bytes are through one server's link, as TCP shares it.

    A sender waits for acknowledgements, so it has the share of a full link that its own link has of all that send: a slow one
    is held up by the fast, and when they are done has the rest to send, over a link that is then far from full.
    """
    left = {worker: num_bytes for worker in range(star.num_workers) if worker != server}
    now_s = 0.0
    while left:
        active = [worker for worker in left if star.workers_ready_s[worker] <= now_s]
        offered = sum(star.bytes_per_s[worker] for worker in active)
        taken = min(1.0, star.bytes_per_s[server] / offered) if active else 0.0
        ends = [now_s + left[worker] / (taken * star.bytes_per_s[worker]) for worker in active]
        begins = [star.workers_ready_s[worker] for worker in left if star.workers_ready_s[worker] > now_s]
        until_s = min([*ends, *begins])
        for worker, end_s in zip(active, ends, strict=True):
            left[worker] -= taken * star.bytes_per_s[worker] * (until_s - now_s)
            if end_s <= until_s:
                del left[worker]
        now_s = until_s
    return now_s


def _pushes_s(star: Star, hosts: list[int], share_bytes: float, ready_s: Sequence[float]) -> list[float]:
    """When each link is done with the pushes: the worker's way out, and the server's way in, which rests for nobody."""
    workers = range(star.num_workers)
    done = [
        ready_s[worker] + share_bytes * sum(host != worker for host in hosts) / star.bytes_per_s[worker]
        for worker in workers
    ]
    for host in hosts:
        senders = sorted((worker for worker in workers if worker != host), key=lambda worker: ready_s[worker])
        each_s = share_bytes / star.bytes_per_s[host]
        # busy from the arrival of the n-th sender on at least with it and all that come behind it
        done.extend(ready_s[worker] + (len(senders) - n) * each_s for n, worker in enumerate(senders))
    return done or [0.0]


def star_ring_s(star: Star, num_bytes: float) -> float:
    """Seconds of a ring's all-reduce among the workers, from the moment at which the first of them is ready."""
    count = star.num_workers
    if count == 1 or num_bytes <= 0:
        return 0.0
    slowest = min(star.bytes_per_s[:count])
    return star.launch_s + max(star.workers_ready_s) + 2 * (count - 1) * (star.step_s + num_bytes / count / slowest)


def crossover_bytes(star: Star, servers: Sequence[int], *, num_chunks: int = 1) -> float:
    """Bytes at which ring and server take as long, all workers ready at once; inf where neither line crosses the other.

    Both are straight lines in the bytes, so this is a closed form: difference of latencies over that of seconds a byte.
    """
    even = Star(bytes_per_s=star.bytes_per_s, num_workers=star.num_workers, step_s=star.step_s, launch_s=star.launch_s)
    ring_slope, ring_start = _line(lambda num_bytes: star_ring_s(even, num_bytes))
    slope, start = _line(lambda num_bytes: server_s(even, num_bytes, servers, num_chunks=num_chunks))
    if math.isclose(slope, ring_slope, rel_tol=1e-9):
        return math.inf
    crossing = (ring_start - start) / (slope - ring_slope)
    return crossing if crossing > 0 else math.inf


def _line(seconds: Callable[[float], float]) -> tuple[float, float]:
    """(seconds a byte, seconds of no byte) of a straight line; two points far apart, since latencies swallow a byte."""
    near_s, far_s = seconds(1e9), seconds(2e9)
    return (far_s - near_s) / 1e9, 2 * near_s - far_s
