"""The one timing loop, and the machine that it ran on. Everything that Meshwright measures passes through `sample`.

What decides how good a number is here: nothing counts before the warm-up is over; a sample is a stretch of calls that is
long against the scheduler's time slice where processes outnumber cores; what is compared is interleaved, round by round,
so that a drift of the machine hits all alike; an accelerator is waited for at both ends of a sample.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OVERSUBSCRIBED_SAMPLE_S = 0.12
"""Length of a sample where processes share a core: forty time slices of Linux (3 ms each), so that each has had its share."""
SAMPLE_S = 0.004
"""Least length of a sample else: a thousand times the resolution of the clock and of its call."""
SPREAD_QUANTILES = (0.1, 0.9)
"""The spread that is printed holds 80% of the samples, as the predicted interval does of the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How often to call, and when to stop."""

    warmup: int = 1
    """Rounds that do not count."""
    repetitions: int = 5
    """Rounds that count; with a budget, the most of them."""
    calls: int = 1
    """Calls of one sample: its seconds are divided by them."""
    sample_s: float = 0.0
    """A sample repeats its calls until it is this long."""
    budget_s: float | None = None
    """Stop after the round in which the counted time passes this, one round at least; null = all repetitions.

    Ranks that wait for each other must not have one: they would stop at different rounds."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.repetitions < 1 or self.calls < 1:
            raise ValueError(
                f"warmup={self.warmup}, repetitions={self.repetitions}, calls={self.calls}: warm-up is from 0, the others from 1"
            )


def sample(
    calls: Mapping[str, Callable[[], object]],
    rule: Rule,
    *,
    before: Callable[[], object] | None = None,
    synchronise: Callable[[], object] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Seconds per call of each of `calls`, one sample a round; round by round, each in turn.

    `before` runs ahead of each sample, outside the clock (a barrier, say); `synchronise` waits for the device, inside.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for turn in range(rule.warmup + rule.repetitions):
        if turn == rule.warmup:
            started = time.perf_counter()
        for name, call in calls.items():
            if before is not None:
                before()
            seconds = _sample(call, rule, synchronise)
            if turn >= rule.warmup:
                samples[name].append(seconds)
        if rule.budget_s is not None and turn >= rule.warmup and time.perf_counter() - started >= rule.budget_s:
            break
    return {name: tuple(values) for name, values in samples.items()}


def _sample(call: Callable[[], object], rule: Rule, synchronise: Callable[[], object] | None) -> float:
    if synchronise is not None:
        synchronise()
    count = 0
    started = time.perf_counter()
    while True:
        for _ in range(rule.calls):
            call()
        count += rule.calls
        if synchronise is not None:
            synchronise()
        elapsed = time.perf_counter() - started
        if elapsed >= rule.sample_s:
            return elapsed / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is printed of samples."""

    median: float
    """The middle."""
    low: float
    """Lower end of the middle 80%."""
    high: float
    """Upper end of the middle 80%."""
    count: int
    """Samples."""

    @property
    def relative_spread(self) -> float:
        """Half the width of the middle 80% over the median; 0 where the median is 0."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def summarise(samples: Sequence[float]) -> Summary:
    """Median and the middle 80% of the samples, linear between order statistics."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples to summarise")
    low, high = (_quantile(ordered, share) for share in SPREAD_QUANTILES)
    return Summary(median=statistics.median(ordered), low=low, high=high, count=len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


# The machine -----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may use (affinity, not the machine's count, where the system tells)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Threads of torch in each of `ranks` processes on this machine, for profiles and runs alike."""
    return max(1, usable_cores() // ranks)


def shares_cores(ranks: int, threads: int) -> bool:
    """Whether that many busy processes of that many threads have less than a core for each thread."""
    return ranks * threads > usable_cores()


def machine() -> str:
    """Processor, usable cores and system in one line."""
    return f"{_processor()}, {usable_cores()} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide how fast a run is."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "numpy", "meshwright"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
