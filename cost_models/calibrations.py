"""Coefficients by dotted name: the shipped ones, and how the most specific one is found.

A name may carry qualifiers: `overlap.dp` + (`hopper`, `megatron`) finds, in this order, `overlap.dp.hopper.megatron`,
`overlap.dp.hopper`, `overlap.dp.megatron`, `overlap.dp`. A name without any match is an error that lists what there is.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from cost_models.records import Calibration, Coefficient, RecordError, dumps, loads


@lru_cache(maxsize=1)
def shipped() -> Calibration:
    """The calibration that comes with Meshwright (cost_models/data/calibration.json)."""
    path = resources.files("cost_models.data").joinpath("calibration.json")
    return loads(Calibration, path.read_text(encoding="utf-8"), "calibration.json")


def identity(calibration: Calibration) -> str:
    """Name and hash of a calibration: two predictions are comparable where these are equal."""
    return f"{calibration.name} sha256:{hashlib.sha256(dumps(calibration).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One coefficient as a number, and what it rests on."""

    value: float
    """In the coefficient's unit."""
    fitted: bool
    """Fitted on measured rows (calibrated); otherwise read from a table or a publication."""


def _names(name: str, qualifiers: tuple[str, ...]) -> Iterator[str]:
    if len(qualifiers) > 1:
        yield ".".join((name, *qualifiers))
    for qualifier in qualifiers:
        yield f"{name}.{qualifier}"
    yield name


def find(calibration: Calibration, name: str, *qualifiers: str) -> Coefficient | None:
    """The most specific coefficient of that name, or None."""
    for full in _names(name, qualifiers):
        found = calibration.coefficients.get(full)
        if found is not None:
            return found
    return None


def rate(calibration: Calibration, name: str, *qualifiers: str) -> Rate:
    """The most specific coefficient of that name.

    Raises RecordError with the known qualifiers where there is none: an unknown device never costs zero.
    """
    found = find(calibration, name, *qualifiers)
    if found is None:
        known = sorted(full[len(name) + 1 :] for full in calibration.coefficients if full.startswith(name + "."))
        wanted = ".".join((name, *qualifiers))
        listed = ", ".join(known) if known else "none"
        raise RecordError(
            f"calibration {calibration.name!r} has no coefficient {wanted}; known under {name}: {listed}; "
            "give a calibration that has it"
        )
    return Rate(value=found.value, fitted=found.rows > 0)


def value(calibration: Calibration, name: str, *qualifiers: str) -> float:
    """The number alone; see `rate`."""
    return rate(calibration, name, *qualifiers).value


def value_or(default: float, calibration: Calibration, name: str, *qualifiers: str) -> float:
    """The number, or `default` where a term that most runtimes do not have is absent."""
    found = find(calibration, name, *qualifiers)
    return default if found is None else found.value


class NotedCoefficients(dict[str, Coefficient]):
    """Coefficients that note which of them are read."""

    def __init__(self, coefficients: Mapping[str, Coefficient]) -> None:
        super().__init__(coefficients)
        self.read: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        """As a dictionary's; a coefficient that is not there is not noted."""
        found = super().get(key)
        if found is not None:
            self.read.add(key)
        return default if found is None else found

    def __getitem__(self, key: str) -> Coefficient:
        self.read.add(key)
        return super().__getitem__(key)
