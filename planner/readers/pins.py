"""Pins: what a plan must be. `tp=8, cp<=2, schedule=1f1b|interleaved`; what is not named is free."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cost_models.records import Gather, Layout, Schedule, parse_tokens
from cost_models.records.layout_text import KEYS
from cost_models.records.near_names import did_you_mean
from planner.errors import InputError


class Op(StrEnum):
    """How a pin compares."""

    EQUAL = "="
    UNEQUAL = "!="
    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One condition on one field of a layout."""

    field: str
    """Field of Layout, or dp for dp_replicate·dp_shard."""
    op: Op
    """How."""
    values: tuple[int | str, ...]
    """Alternatives of `=`; all excluded by `!=`; one number otherwise."""

    def allows(self, value: int | str) -> bool:
        """`value` satisfies the pin."""
        match self.op:
            case Op.EQUAL:
                return value in self.values
            case Op.UNEQUAL:
                return value not in self.values
            case Op.AT_MOST:
                return int(value) <= int(self.values[0])
            case Op.AT_LEAST:
                return int(value) >= int(self.values[0])

    def __str__(self) -> str:
        return f"{self.field}{self.op}{'|'.join(str(value) for value in self.values)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Conditions that hold together."""

    pins: tuple[Pin, ...] = ()
    """In the order in which they were given."""

    def allows(self, layout: Layout) -> bool:
        """The layout satisfies every pin."""
        return not self.broken(layout)

    def broken(self, layout: Layout) -> tuple[Pin, ...]:
        """Pins that the layout does not satisfy."""
        return tuple(pin for pin in self.pins if not pin.allows(_plain(getattr(layout, pin.field))))

    def allows_value(self, field: str, value: Any) -> bool:
        """`value` of one field satisfies the pins on it; a field without pins is free."""
        return all(pin.allows(_plain(value)) for pin in self.pins if pin.field == field)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that are not free."""
        return frozenset(pin.field for pin in self.pins)

    def __str__(self) -> str:
        return ", ".join(str(pin) for pin in self.pins)


_TEXTS: Mapping[str, tuple[str, ...]] = {
    "gather": tuple(Gather),
    "schedule": tuple(Schedule),
    "recompute": (),
}
"""Fields whose values are words, and the words; recompute kinds are the runtime's."""

_FIELDS: Mapping[str, str] = {**KEYS, **{field: field for field in KEYS.values()}}
_GPUS = ("world", "gpus", "num_gpus", "world_size")
_PIN = re.compile(r"([a-z_]+)\s*(<=|>=|!=|==|=|≤|≥|≠|<|>)\s*([^\s<>=!≤≥≠]+(?:\s*\|\s*[^\s<>=!≤≥≠]+)*)")
_OPS = {"=": Op.EQUAL, "==": Op.EQUAL, "!=": Op.UNEQUAL, "≠": Op.UNEQUAL, "<=": Op.AT_MOST, "≤": Op.AT_MOST}
_OPS |= {">=": Op.AT_LEAST, "≥": Op.AT_LEAST}


def parse_pins(text: str, recompute_kinds: Collection[str] = ()) -> Pins:
    """The pins of a text `key op value, ...`; op is one of = != <= >=, alternatives as `tp=4|8`.

    Raises InputError, which lists the legal keys or values, and where two pins exclude one another. Kinds of recompute are
    the runtime's: its `recompute_kinds`, where they are given, are the legal ones.
    """
    pins = Pins(pins=tuple(_parse_pin(part.strip(), text) for part in text.lower().split(",") if part.strip()))
    for pin in pins.pins:
        unknown = [value for value in pin.values if value not in recompute_kinds]
        if pin.field == "recompute" and recompute_kinds and unknown:
            hint = did_you_mean(str(unknown[0]), recompute_kinds)
            raise InputError(
                f"pin {pin}: {unknown[0]!r} is no kind of recompute{hint} Legal kinds: {', '.join(recompute_kinds)}"
            )
    _refuse_contradiction(pins)
    _refuse_contradiction_between_fields(pins)
    return pins


def pins_of_layout(text: str) -> Pins:
    """A layout in part, as `--why-not "tp4 pp8"` says it: what it names is pinned, what is absent is free."""
    said = parse_tokens(text)
    if not said:
        raise InputError(f"layout {text!r} says nothing; name at least one key of: {', '.join(KEYS)}, as in `tp4 pp8`")
    for field, value in said.items():
        _check_values(field, (value,), text)
    return Pins(pins=tuple(Pin(field=field, op=Op.EQUAL, values=(value,)) for field, value in said.items()))


def _plain(value: Any) -> int | str:
    return value.value if isinstance(value, StrEnum) else value


def _parse_pin(part: str, text: str) -> Pin:
    match = _PIN.fullmatch(part)
    if match is None:
        raise InputError(
            f"pin {part!r} in {text!r} is not `key op value`; ops: =, !=, <=, >=; alternatives as tp=4|8; pins are separated by "
            "commas, as in `tp=8, cp<=2`"
        )
    key, op_text, value_text = match.groups()
    if op_text not in _OPS:
        raise InputError(
            f"pin {part!r}: there is no op {op_text!r}; legal ops: =, !=, <=, >= (a bound is part of its range)"
        )
    if key not in _FIELDS:
        hint = "; the number of GPUs is --gpus." if key in _GPUS else did_you_mean(key, _FIELDS)
        raise InputError(f"pin {part!r}: {key!r} is not a key of a layout{hint} Legal keys: {', '.join(KEYS)}")
    field, op = _FIELDS[key], _OPS[op_text]
    values = tuple(_parse_value(field, value.strip(), part) for value in value_text.split("|"))
    if op in (Op.AT_MOST, Op.AT_LEAST) and (field in _TEXTS or len(values) > 1):
        raise InputError(f"pin {part!r}: {op} takes one number; words and alternatives take = or !=")
    _check_values(field, values, part)
    return Pin(field=field, op=op, values=values)


def _parse_value(field: str, text: str, part: str) -> int | str:
    if field in _TEXTS:
        return text
    if not text.isdecimal():
        legal = "0, 1, 2, 3" if field == "zero" else "whole numbers from 1"
        raise InputError(f"pin {part!r}: {text!r} is not a whole number; legal values of {field}: {legal}")
    return int(text)


def _check_values(field: str, values: Iterable[int | str], part: str) -> None:
    for value in values:
        words = _TEXTS.get(field)
        if words and value not in words:
            raise InputError(f"pin {part!r}: {field}={value}; legal values: {', '.join(words)}")
        if field == "recompute" and value == "stages":
            raise InputError(f"pin {part!r}: recompute=stages is what a plan says whose stages differ; name a kind")
        if field == "zero" and value not in (0, 1, 2, 3):
            raise InputError(f"pin {part!r}: zero={value}; legal values: 0, 1, 2, 3")
        if field not in _TEXTS and field != "zero" and int(value) < 1:
            raise InputError(f"pin {part!r}: {field}={value}; a degree is a whole number from 1")


def _refuse_contradiction(pins: Pins) -> None:
    """Two pins on one field that no value satisfies are an error, told before any search."""
    for field in sorted(pins.fields):
        here = [pin for pin in pins.pins if pin.field == field]
        equal = next((pin for pin in here if pin.op is Op.EQUAL), None)
        if equal is not None:
            possible: Iterable[int | str] = equal.values
        elif field in _TEXTS:
            possible = _TEXTS[field] or ("any other kind",)
        else:
            least = max(
                (int(pin.values[0]) for pin in here if pin.op is Op.AT_LEAST), default=0 if field == "zero" else 1
            )
            most = min((int(pin.values[0]) for pin in here if pin.op is Op.AT_MOST), default=None)
            excluded = sum(len(pin.values) for pin in here if pin.op is Op.UNEQUAL)
            end = least + excluded if most is None else min(most, least + excluded)
            possible = range(least, min(end, 3) + 1 if field == "zero" else end + 1)
        if not any(pins.allows_value(field, value) for value in possible):
            raise InputError(f"no {field} satisfies {' and '.join(str(pin) for pin in here)}; drop one of these pins")


def _refuse_contradiction_between_fields(pins: Pins) -> None:
    """Pins on fields that a law of every layout binds together: dp = dp_replicate·dp_shard; with zero = 0, dp_shard = 1."""
    fixed = {
        pin.field: set(map(int, pin.values)) for pin in pins.pins if pin.op is Op.EQUAL and pin.field in _DP_FIELDS
    }
    for whole in sorted(fixed.get("dp", ())):
        if not pins.allows_value("dp", whole):
            continue
        for shard in (part for part in range(1, whole + 1) if whole % part == 0):
            if pins.allows_value("dp_shard", shard) and pins.allows_value("dp_replicate", whole // shard):
                break
        else:
            continue
        break
    else:
        if "dp" in fixed:
            raise InputError(
                f"the pins {_named(pins, _DP_FIELDS)} contradict one another: dp = dp_replicate·dp_shard; drop one of these pins, or "
                "pin parts whose product is dp"
            )
    if not any(pins.allows_value("zero", zero) for zero in (1, 2, 3)) and not pins.allows_value("dp_shard", 1):
        raise InputError(
            f"the pins {_named(pins, ('zero', 'dp_shard'))} contradict one another: with zero = 0 nothing is divided, dp_shard = 1 "
            "(copies are dp_replicate); drop one of these pins"
        )


_DP_FIELDS = ("dp", "dp_replicate", "dp_shard")


def _named(pins: Pins, fields: Collection[str]) -> str:
    return " and ".join(str(pin) for pin in pins.pins if pin.field in fields)
