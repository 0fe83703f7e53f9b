"""Where the time of a step goes on this rank, by phase. Off by default: on a GPU it costs a synchronisation per phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Sums of seconds by phase name: forward, backward (data-parallel communication included), pipeline, reduce, optimizer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = False
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds inside the context to a phase."""
        if not self.enabled:
            yield
            return
        start_s = self._now_s()
        yield
        self.seconds[name] += self._now_s() - start_s

    def take(self) -> dict[str, float]:
        """The sums since the last take."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
