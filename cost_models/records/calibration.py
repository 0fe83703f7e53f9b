"""Fitted coefficients, each with its birth certificate, and measured values, which beat them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models.records.codec import SCHEMA_VERSION, RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One fitted number."""

    value: float
    """In the unit below."""
    unit: str
    """For example s, bytes/param, 1."""
    source: str
    """What it was fitted on, or the publication it was read from."""
    date: str
    """Day of the fit or of the reading (ISO)."""
    residual: float | None = None
    """Relative spread of the data about the fit (one standard deviation); null = not fitted."""
    rows: int = 0
    """Data that it was fitted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of a collective or a link by size, piecewise linear in log-log; straight on beyond the ends."""

    sizes_bytes: tuple[float, ...]
    """Increasing."""
    seconds: tuple[float, ...]
    """One per size."""
    source: str
    """What it was measured on."""
    date: str
    """Day (ISO)."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes_bytes, self.sizes_bytes[1:], strict=False))
        if len(self.sizes_bytes) != len(self.seconds) or not self.seconds or not rising:
            raise RecordError("a curve has as many seconds as sizes, at least one, and its sizes increase")
        if any(not second > 0 for second in self.seconds):
            raise RecordError("seconds of a curve are positive")
        if not 0 < self.sizes_bytes[0] <= self.sizes_bytes[-1] < math.inf:
            raise RecordError("sizes of a curve are positive numbers")


_SIDES = r"[1-9]\d*"
_FORMS = {
    "matmul/<precision>/MxNxK": rf"matmul/\w+/{_SIDES}(x{_SIDES}){{2}}",
    "attention/<precision>/BxSxHxKVxD/{forward,backward}": rf"attention/\w+/{_SIDES}(x{_SIDES}){{4}}/(forward|backward)",
    "layer/<precision>/BxSxHIDDEN/HxKVxD/FFN[g]/{forward,backward}": (
        rf"layer/\w+/{_SIDES}(x{_SIDES}){{2}}/{_SIDES}(x{_SIDES}){{2}}/{_SIDES}g?/(forward|backward)"
    ),
    "head/<precision>/BxSxHIDDENxVOCAB/{forward,backward}": rf"head/\w+/{_SIDES}(x{_SIDES}){{3}}/(forward|backward)",
    "embedding/<precision>/BxSxHIDDENxVOCAB/{forward,backward}": (
        rf"embedding/\w+/{_SIDES}(x{_SIDES}){{3}}/(forward|backward)"
    ),
    "memory_bound/<precision>/BYTES": rf"memory_bound/\w+/{_SIDES}",
    "optimizer/<name>/PARAMS": rf"optimizer/\w+/{_SIDES}",
    "launch/<precision>": r"launch/\w+",
}
"""Form of a key of `Calibration.operations_s` -> its pattern."""


def _refuse_key(key: str) -> None:
    """RecordError where nothing would ever read an operation of this key."""
    if not any(re.fullmatch(pattern, key) for pattern in _FORMS.values()):
        head = key.split("/")[0]
        forms = [form for form in _FORMS if form.startswith(f"{head}/")] or list(_FORMS)
        raise RecordError(f"operations_s has the key {key!r}, which no operation reads; legal: {', '.join(forms)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything fitted or measured that a prediction rests on; always an explicit argument."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file's form."""
    name: str
    """For example shipped-2026-11."""
    machine: str
    """Where it holds: a device name, or any."""
    date: str
    """Day of the youngest entry (ISO)."""
    coefficients: Mapping[str, Coefficient]
    """By dotted name: `matmul.efficiency.hopper.bf16`, `memory.margin.torch` ..."""
    operations_s: Mapping[str, float] = field(default_factory=dict)
    """Measured operations: Measurement.key -> median seconds."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Measured collectives: `all_reduce/ranks/link class` -> curve."""
    fitted_on: tuple[str, ...] = ()
    """Digests of the published configurations that its coefficients were fitted on: a prediction of one of these is no test."""

    def __post_init__(self) -> None:
        for name, coefficient in self.coefficients.items():
            value = coefficient.value
            if not math.isfinite(value) or ("efficiency" in name and value <= 0):
                kind = "a positive number" if "efficiency" in name else "a number"
                raise RecordError(f"coefficient {name} is {value:g}; {kind} is needed")
        for key, seconds in self.operations_s.items():
            _refuse_key(key)
            free = key.startswith("launch/")  # a launch that hides altogether measures as nothing
            if not 0 <= seconds < math.inf or (not seconds and not free):
                raise RecordError(f"operations_s of {key!r} is {seconds:g} s; a positive number is needed")
