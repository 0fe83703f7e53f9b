"""Measured sizes -> a curve: outliers marked by what physics forbids, the rest made to rise, and two numbers for people."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from cost_models.records import Curve
from planner.readers.topology.seen import SeenPoint

FASTER_LARGER = 1.15
"""Times that a message may be slower than a larger one before it is an outlier: tables repeat within a tenth."""
ABOVE_NEIGHBOURS = 2.5
"""Times that a message may stand above the line between its neighbours (log-log): a change of protocol is half of that."""
SMALL_BYTES = 2**17
"""Messages up to it take as long as an empty one, or nearly so."""
_LARGEST = 4
"""Sizes from which the bandwidth is taken."""


def marked(seconds_of_size: Mapping[int, float]) -> tuple[SeenPoint, ...]:
    """Points by rising size; outliers are those that a larger message beat, or that stand far above both neighbours."""
    sizes = sorted(seconds_of_size)
    seconds = [seconds_of_size[size] for size in sizes]
    is_odd = [False] * len(sizes)
    least = math.inf
    for index in range(len(sizes) - 1, -1, -1):
        is_odd[index] = seconds[index] > FASTER_LARGER * least
        least = min(least, seconds[index])
    kept = [index for index in range(len(sizes)) if not is_odd[index]]
    for before, here, after in zip(kept, kept[1:], kept[2:], strict=False):
        share = math.log(sizes[here] / sizes[before]) / math.log(sizes[after] / sizes[before])
        line = math.log(seconds[before]) * (1 - share) + math.log(seconds[after]) * share
        is_odd[here] = math.log(seconds[here]) > line + math.log(ABOVE_NEIGHBOURS)
    return tuple(
        SeenPoint(size_bytes=size, seconds=second, is_outlier=odd)
        for size, second, odd in zip(sizes, seconds, is_odd, strict=True)
    )


def curve_of(points: Sequence[SeenPoint], source: str, date: str) -> Curve:
    """The curve without outliers, never falling with size: what is left of a dip is spread over its neighbours (the mean of
    logarithms over each run that falls: isotonic regression)."""
    kept = [point for point in points if not point.is_outlier] or list(points)
    pools: list[tuple[float, int]] = []  # (mean logarithm, members)
    for point in kept:
        pools.append((math.log(point.seconds), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, n), (two, m) = pools[-2:]
            pools[-2:] = [((one * n + two * m) / (n + m), n + m)]
    return Curve(
        sizes_bytes=tuple(float(point.size_bytes) for point in kept),
        seconds=tuple(math.exp(mean) for mean, members in pools for _ in range(members)),
        source=source,
        date=date,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regimes:
    """A curve in two numbers."""

    latency_s: float | None
    """Of the smallest messages: the median of those that take no longer than 1.5 times the least; None where none is small."""
    bytes_per_s: float | None
    """Of the largest: the median slope between any two of them (Theil and Sen); None where time does not grow there."""


def regimes(points: Sequence[SeenPoint]) -> Regimes:
    """Latency and bandwidth of measured points, both robust against a bad one."""
    kept = [point for point in points if not point.is_outlier] or list(points)
    least = min(point.seconds for point in kept)
    small = [point.seconds for point in kept if point.seconds <= 1.5 * least]
    large = kept[-_LARGEST:]
    slopes = [
        (b.seconds - a.seconds) / (b.size_bytes - a.size_bytes) for i, a in enumerate(large) for b in large[i + 1 :]
    ]
    slope = median(slopes) if slopes else 0.0
    latency_s = median(small) if kept[0].size_bytes <= SMALL_BYTES else None
    return Regimes(latency_s=latency_s, bytes_per_s=1 / slope if slope > 0 else None)
