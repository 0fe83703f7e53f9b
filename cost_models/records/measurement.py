"""What happened: samples of an operation, a collective or a run, with the machine and the versions that they hold for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cost_models.records.codec import SCHEMA_VERSION, UNSAID, RecordError

SHORTEST_S = 1e-12
"""Below it a sample is no time but a slip: clocks tick in nanoseconds, and a sample is a mean of a thousand calls at most."""
LONGEST_S = 1e9
"""Thirty years."""


class MeasurementKind(StrEnum):
    """What was measured."""

    OP = "op"
    COLLECTIVE = "collective"
    RUN = "run"


class MemoryKind(StrEnum):
    """How bytes were counted: kinds are never compared with one another."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    NVIDIA_SMI = "nvidia-smi"
    RSS = "rss"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """A peak of memory."""

    kind: MemoryKind
    """How it was counted; rss is the peak above that after imports and process-group start."""
    peak_bytes: int
    """The peak on this rank."""

    def __post_init__(self) -> None:
        if self.peak_bytes < 0:
            raise RecordError(f"peak_bytes={self.peak_bytes}; legal: whole numbers from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Samples of one quantity on one machine."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    kind: MeasurementKind
    """Operation, collective or run."""
    key: str
    """`matmul/bf16/MxNxK`, `all_reduce/ranks/bytes/link class`, `step`, ..."""
    samples_s: tuple[float, ...]
    """Seconds of each repetition, warm-up left out."""
    bytes: int | None = None
    """Bytes moved or touched, where that has a meaning."""
    calls: int | None = field(default=None, metadata=UNSAID)
    """Times that a collective ran in each sample; `bytes` are those of all of them. null = once."""
    memory: MeasuredMemory | None = None
    """Peak memory, for runs."""
    machine: str
    """Processor or accelerator, cores, operating system."""
    versions: Mapping[str, str]
    """Packages and their versions."""
    plan_sha256: str | None = None
    """decision_sha256 of the plan that ran."""
    phase: str | None = None
    """forward, backward, optimizer, step ... for runs."""
    rank_class: str | None = None
    """Which ranks the samples stand for, for example `stage 0` or `all`."""
    note: str = ""
    """The layout's text, or whatever else a reader needs."""

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise RecordError(f"measurement {self.key!r} has no samples")
        for sample in self.samples_s:
            if sample != 0 and not SHORTEST_S <= sample <= LONGEST_S:
                raise RecordError(
                    f"measurement {self.key!r} has a sample of {sample:g} s; legal: 0, and {SHORTEST_S:g} to {LONGEST_S:g} seconds"
                )
        if self.bytes is not None and self.bytes < 0:
            raise RecordError(f"measurement {self.key!r} has bytes={self.bytes}; legal: whole numbers from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A file of measurements."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    measurements: tuple[Measurement, ...]
    """In the order in which they were taken."""
