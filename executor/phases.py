"""Where the time of a step goes on this rank. Off by default: on a GPU it costs a synchronisation per phase.

Phases follow one another: data; forward and backward, or pipeline; reduce, clip, optimizer. Inside them are parts:

    forward, backward   passes of a pipeline's stages, apart from waits for other stages
    wait AXIS/OP        standing still for a collective, inside the phases that compute
    wait pp/p2p         the same for other stages, or what they sent

compute = forward + backward - waits inside; bubble = pipeline - forward - backward, less what else it waited for.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining.schedules import _PipelineSchedule

from executor.waits import Waits

COMPUTING = ("forward", "backward", "pipeline")
"""Phases in which waits count."""
CHUNKS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
}
"""Method of a pipeline's stage -> the part that it is."""


class Phases:
    """Sums of seconds by phase, and by part inside them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = False
        self.named = False
        """Show phases in torch's profiler."""
        self.waits: Waits | None = None
        """What hears of waits, where somebody does."""
        self.on_end: Callable[[str], object] | None = None
        """Called with the name of each phase as it ends: who counts memory by phase."""
        self.num_events = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.parts: dict[str, float] = defaultdict(float)
        self.sizes: dict[str, tuple[int, int]] = {}
        """Of the last step taken: `wait AXIS/OPERATION` -> (calls, bytes of their whole tensors)."""
        self._chunk_wait_s = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds inside the context to a phase."""
        if not self.enabled:
            yield
            return
        self.num_events += 1
        before = self._waited() if name in COMPUTING else {}
        self._count(name in COMPUTING)
        start_s = self._now_s()
        if self.named:
            with torch.profiler.record_function(f"meshwright: {name}"):
                yield
        else:
            yield
        self.seconds[name] += self._now_s() - start_s
        self._count(False)
        for key, seconds in (self._waited() if name in COMPUTING else {}).items():
            if seconds > before.get(key, 0.0):
                self.parts[f"wait {key}"] += seconds - before.get(key, 0.0)
        if self.on_end is not None:
            self.on_end(name)

    def _count(self, on: bool) -> None:
        if self.waits is not None:
            self.waits.counting = on

    def _waited(self) -> dict[str, float]:
        return dict(self.waits.seconds) if self.waits is not None else {}

    def time_chunks(self, schedule: _PipelineSchedule) -> None:
        """Have the passes of a pipeline's stages timed as parts."""
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            for method, part in CHUNKS.items():
                if hasattr(stage, method):
                    setattr(stage, method, self._timed(getattr(stage, method), part))

    def _timed(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.enabled:
                return run(*arguments, **named)
            self.num_events += 1
            waited_s = sum(self._waited().values())
            start_s = self._now_s()
            try:
                return run(*arguments, **named)
            finally:
                self.parts[part] += self._now_s() - start_s
                self._chunk_wait_s += sum(self._waited().values()) - waited_s

        return timed

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds by phase, by part) since the last take; parts with `compute`, and `bubble` where there is a pipeline."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        parts, self.parts = dict(self.parts), defaultdict(float)
        chunk_wait_s, self._chunk_wait_s = self._chunk_wait_s, 0.0
        self.sizes = {}
        if self.waits is not None:
            self.sizes = {f"wait {key}": size for key, size in self.waits.sizes.items()}
            for key, exposed_s in self.waits.take().items():
                if key.startswith("ddp "):
                    name = f"wait {key.removeprefix('ddp ')}"
                    parts[name] = parts.get(name, 0.0) + exposed_s
                    self.sizes[name] = self.waits.sizes_of_replicas()
        if not seconds:
            return {}, {}
        waits = {key: value for key, value in parts.items() if key.startswith("wait ")}
        others_s = sum(value for key, value in waits.items() if key != "wait pp/p2p")
        if "pipeline" in seconds:
            passes_s = parts.get("forward", 0.0) + parts.get("backward", 0.0)
            outside_s = max(0.0, others_s - chunk_wait_s)
            parts["bubble"] = max(0.0, seconds["pipeline"] - passes_s - outside_s)
            parts["compute"] = max(0.0, passes_s - (others_s - outside_s))
        elif "forward" in seconds:
            parts["compute"] = max(0.0, seconds["forward"] + seconds.get("backward", 0.0) - others_s)
        return seconds, parts

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
