"""The text of a layout: `tp8 pp4 dps16 zero1 sched=interleaved`, read without regard to case, order and separators.

token = key[=]value, or value key as in `1mbs`; separators are space , ; . and, after a digit, _ and -.
"""

import re

from cost_models.records.codec import RecordError
from cost_models.records.layout import Gather, Layout, Schedule, normalised
from cost_models.records.near_names import near_names

KEYS = {
    "dpr": "dp_replicate",
    "dps": "dp_shard",
    "dp": "dp",
    "cp": "cp",
    "etp": "etp",
    "ep": "ep",
    "tp": "tp",
    "pp": "pp",
    "vpp": "vpp",
    "vp": "vpp",
    "mbs": "mbs",
    "zero": "zero",
    "gather": "gather",
    "sched": "schedule",
    "rc": "recompute",
}
"""Key of the text -> field of the layout."""

_SEPARATOR = re.compile(r"[\s,;.]+|(?<=\d)[_-]+")
_KEY = "|".join(sorted(KEYS, key=len, reverse=True))
_KEY_FIRST = re.compile(rf"({_KEY})(?:=?(\d+)|=([a-z0-9_]+))")
_VALUE_FIRST = re.compile(rf"(\d+)({_KEY})")
_NUMBERS = frozenset(KEYS.values()) - {"gather", "schedule", "recompute"}


def parse_tokens(text: str) -> dict[str, int | str]:
    """What a layout's text says, by field name (`dp` for a bare dp); what it does not say is absent.

    Raises RecordError for an unknown or repeated key, dp beside dpr or dps, and values of the wrong kind.
    """
    said: dict[str, int | str] = {}
    for token in filter(None, _SEPARATOR.split(text.strip().lower())):
        field, value = _parse_token(token, text)
        if field in said:
            raise RecordError(f"layout {text!r} says {field} twice ({token!r}); say it once")
        said[field] = value
    if "dp" in said and ("dp_replicate" in said or "dp_shard" in said):
        raise RecordError(f"layout {text!r} says dp beside dpr or dps; say dp alone, or both of its parts")
    return said


def _parse_token(token: str, text: str) -> tuple[str, int | str]:
    if match := _KEY_FIRST.fullmatch(token):
        key, value = match[1], match[2] or match[3]
    elif match := _VALUE_FIRST.fullmatch(token):
        key, value = match[2], match[1]
    else:
        raise RecordError(
            f"layout {text!r}: {token!r} is not a key with a value; keys: {', '.join(KEYS)} "
            f"(as in `tp8 pp4 zero1 rc=full`){_meant(token)}"
        )
    field = KEYS[key]
    if field in _NUMBERS:
        if not value.isdecimal():
            raise RecordError(f"layout {text!r}: {key}={value} needs a whole number")
        return field, int(value)
    legal = {"schedule": [s.value for s in Schedule], "gather": [g.value for g in Gather]}.get(field)
    if legal and value not in legal:
        raise RecordError(f"layout {text!r}: {key}={value}; legal values: {', '.join(legal)}")
    return field, value


def _meant(token: str) -> str:
    """What an unknown token may mean, as words that go on behind the error; may be empty."""
    if set(token) & set("|<>!"):
        return "; alternatives and bounds belong into pins (`--pin` of plan)"
    word = re.match(r"\d*([a-z_]*)", token)
    near = near_names(word[1], {*KEYS, *KEYS.values()}) if word and word[1] not in KEYS else []
    short = {field: key for key, field in reversed(KEYS.items())}
    return f"; did you mean {' or '.join(repr(short.get(one, one)) for one in near)}?" if near else ""


def parse_layout(text: str) -> Layout:
    """The layout of a text in which an absent degree is 1: the inverse of `print_layout`."""
    return normalised(**parse_tokens(text))  # type: ignore[arg-type]
