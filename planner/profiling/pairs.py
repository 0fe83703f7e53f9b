"""One pair of ranks: seconds of messages of every decade, each direction, over a process group of the two alone.

The sender sends a message, the receiver answers with the smallest one: what that takes back is half a round trip of smallest
messages, and is taken off. So each direction is measured for itself, and a slow way back does not hide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.profiling.clock import Rule, sample, summarise

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SMALLEST_BYTES = 8
DECADES_BYTES = {
    "gloo": (SMALLEST_BYTES, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000),
    "nccl": (SMALLEST_BYTES, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
}
"""Until bandwidth alone decides: 10 MB take 80 ms at 1 Gbit/s, 100 MB a quarter of a millisecond over NVLink."""
LONGEST_MESSAGE_S = 0.3
"""The next decade is left out where it would take longer: ten times 8 ms says what ten times 80 ms would."""
REPETITIONS = 7
SAMPLE_S = 0.003
"""Least length of a sample: smaller messages are repeated within it."""
MOST_CALLS = 50
END = 0
"""Header of a sender that is done."""

Samples = dict[int, tuple[float, ...]]
"""Size -> one-way seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """This rank's end."""

    group: "dist.ProcessGroup"
    """Of the two."""
    peer: int
    """The other one's number in it, 0 or 1."""
    device: str
    """Where messages lie."""
    wait: Callable[[Any], None]
    """Waits for a piece of work, with a time-out."""

    def send(self, tensor: "torch.Tensor") -> None:
        """One message to the other."""
        self.wait(self.group.send([tensor], self.peer, 0))

    def receive(self, tensor: "torch.Tensor") -> None:
        """One message from the other."""
        self.wait(self.group.recv([tensor], self.peer, 0))


def join_pair(store: "dist.Store", place: int, backend: str, device: str, timeout_s: float) -> Pair:
    """Meet the other one: `place` is 0 or 1. RuntimeError where it does not come in time."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        group = dist.ProcessGroupGloo(store, place, 2, timeout)
        return Pair(group=group, peer=1 - place, device=device, wait=lambda work: work.wait())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, place, 2, options)
    return Pair(group=group, peer=1 - place, device=device, wait=lambda work: _wait_nccl(group, work, timeout_s))


def _wait_nccl(group: Any, work: Any, timeout_s: float) -> None:
    """NCCL's own wait is for a stream, not for a person: poll, and give the communicator up in the end."""
    import time

    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            group.abort()
            raise RuntimeError(f"no answer within {timeout_s:.0f} s")
    work.wait()


def measure_pair(pair: Pair, place: int, backend: str) -> Samples:
    """One-way seconds from this rank to the other; both call it, place 0 sends first."""
    decades = DECADES_BYTES[backend]
    if place == 0:
        own = _sends(pair, decades)
        _answers(pair)
        return own
    _answers(pair)
    return _sends(pair, decades)


def _sends(pair: Pair, decades: tuple[int, ...]) -> Samples:
    import torch

    header = torch.zeros(2, dtype=torch.int64, device=pair.device)
    answer = torch.zeros(SMALLEST_BYTES, dtype=torch.uint8, device=pair.device)

    def announce(size: int, exchanges: int) -> None:
        header.copy_(torch.tensor([size, exchanges]))
        pair.send(header)

    found: Samples = {}
    expected_s, back_s = 0.0, 0.0
    for size in decades:
        if expected_s > LONGEST_MESSAGE_S:
            break
        message = torch.zeros(size, dtype=torch.uint8, device=pair.device)

        def exchange(message: "torch.Tensor" = message) -> None:
            pair.send(message)
            pair.receive(answer)

        announce(size, 2)
        trial_s = min(sample({"": exchange}, Rule(warmup=1, repetitions=1))[""])
        calls = max(1, min(MOST_CALLS, round(SAMPLE_S / max(trial_s, 1e-7))))
        announce(size, calls * REPETITIONS)
        taken = sample({"": exchange}, Rule(warmup=0, repetitions=REPETITIONS, calls=calls))[""]
        if size == SMALLEST_BYTES:
            back_s = robust_s(taken) / 2
        found[size] = tuple(one / 2 if size == SMALLEST_BYTES else max(one - back_s, one / 2) for one in taken)
        # ten times what is no latency: one late trial must not end the curve
        expected_s = 10 * robust_s(found[size]) - 9 * robust_s(found[SMALLEST_BYTES])
    announce(END, END)
    return found


def _answers(pair: Pair) -> None:
    import torch

    header = torch.zeros(2, dtype=torch.int64, device=pair.device)
    answer = torch.zeros(SMALLEST_BYTES, dtype=torch.uint8, device=pair.device)
    while True:
        pair.receive(header)
        size, exchanges = header.tolist()
        if size == END:
            return
        message = torch.zeros(size, dtype=torch.uint8, device=pair.device)
        for _ in range(exchanges):
            pair.receive(message)
            pair.send(answer)


def robust_s(samples: tuple[float, ...]) -> float:
    """The median of the faster half: other work on a machine only ever lengthens a message, and the very fastest may have
    found a link's tokens saved up."""
    ordered = sorted(samples)
    return float(np.median(ordered[: (len(ordered) + 1) // 2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A curve and what it says."""

    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    spread: float


def curve_of(samples: Samples) -> Found:
    """Piecewise curve of one direction: robust seconds by size, made to rise; latency at its foot, bandwidth along its last piece."""
    sizes = sorted(samples)
    raw = [robust_s(samples[size]) for size in sizes]
    seconds = np.minimum.accumulate(raw[::-1])[::-1]  # a smaller message is never slower
    bandwidth = sizes[-1] / max(seconds[-1], 1e-12)
    if len(sizes) > 1 and seconds[-1] > seconds[-2]:
        bandwidth = (sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2])
    return Found(
        sizes_bytes=tuple(sizes),
        seconds=tuple(float(one) for one in seconds),
        latency_s=float(seconds[0]),
        bandwidth_bytes_per_s=float(bandwidth),
        spread=summarise(samples[sizes[-1]]).relative_spread,
    )
