"""What happened: samples of an operation, a collective or a run, with the machine and the versions that they hold for."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cost_models.records.codec import SCHEMA_VERSION, RecordError


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
        if any(not sample >= 0 for sample in self.samples_s):
            raise RecordError(f"measurement {self.key!r} has a negative sample; seconds are from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A file of measurements."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    measurements: tuple[Measurement, ...]
    """In the order in which they were taken."""
