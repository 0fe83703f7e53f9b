"""What a live probe found: every pair of ranks, the groups that are fast, the cluster that they make, and what was measured."""

import math
from dataclasses import dataclass

from cost_models.records.calibration import Calibration
from cost_models.records.cluster import Cluster
from cost_models.records.codec import SCHEMA_VERSION, RecordError
from cost_models.records.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """One direction between two ranks."""

    ranks: tuple[int, ...]
    """(from, to)."""
    latency_s: float
    """One way, of the smallest message."""
    bandwidth_bytes_per_s: float
    """Of the largest messages, their latency left out."""
    spread: float
    """Half the width of the middle 80% of the largest message's samples over their median."""
    sizes_bytes: tuple[int, ...]
    """Increasing."""
    seconds: tuple[float, ...]
    """One way, of each size."""

    def __post_init__(self) -> None:
        if len(self.ranks) != 2 or self.ranks[0] == self.ranks[1]:
            raise RecordError(f"pair {self.ranks}: a rank and another one")
        if not 0 < self.bandwidth_bytes_per_s < math.inf or not self.latency_s > 0:
            raise RecordError(f"pair {self.ranks}: latency and bandwidth are positive numbers")
        if len(self.sizes_bytes) != len(self.seconds) or not self.seconds:
            raise RecordError(f"pair {self.ranks}: as many seconds as sizes, at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Ranks that did not answer: two that do not reach each other, or one that nobody heard of."""

    ranks: tuple[int, ...]
    """One or two."""
    reason: str
    """What happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A probe's file: `--cluster` reads the cluster and its calibration from it."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    cluster: Cluster
    """Nominal facts as they were found: the ranks that answered, in domains."""
    calibration: Calibration
    """What was measured of the cluster's classes of links, and nothing else: latencies, efficiencies, curves."""
    pairs: tuple[PairLink, ...]
    """Every pair that was measured, each direction."""
    domains: tuple[tuple[int, ...], ...]
    """Ranks that are close to one another; the cluster's nodes in this order."""
    silent: tuple[Silence, ...] = ()
    """Who did not answer; all others are measured."""
    notes: tuple[str, ...] = ()
    """What a reader must know: sampled pairs, odd links, what could not be measured."""
    backend: str
    """gloo or nccl."""
    measurements: tuple[Measurement, ...] = ()
    """Operations and collectives that were timed, with their samples."""
