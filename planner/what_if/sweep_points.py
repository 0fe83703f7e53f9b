"""The sizes of a sweep, as people write them: `gpus=64..1024`, `gpus=64,96,128`, `batch=256..4096:256`, `seq=4096,8192`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cost_models.records.near_names import did_you_mean
from planner.errors import InputError

MOST_POINTS = 64
"""Sizes of one sweep."""


class Axis(StrEnum):
    """What is swept."""

    GPUS = "gpus"
    BATCH = "batch"
    SEQ = "seq"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWords:
    """What an axis is called elsewhere."""

    field: str
    """Field of the workload; empty for GPUs."""
    words: str
    """In text, in the plural."""


AXES: Mapping[Axis, AxisWords] = {
    Axis.GPUS: AxisWords(field="", words="numbers of GPUs"),
    Axis.BATCH: AxisWords(field="gbs", words="batches"),
    Axis.SEQ: AxisWords(field="seq", words="sequences"),
}

_OTHER_NAMES = {"gbs": Axis.BATCH, "world": Axis.GPUS, "gpu": Axis.GPUS, "num_gpus": Axis.GPUS}
_PART = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")
_EXAMPLES = (
    "`gpus=64..1024` (doubling), `gpus=64,96,128`, `gpus=64..512:64` (in steps), `batch=256..4096`, `seq=4096,8192`"
)


def parse_sweep(text: str) -> tuple[Axis, tuple[int, ...]]:
    """The axis and its sizes, ascending, each once. A range doubles from its beginning and holds its end too.

    InputError for what is no sweep, with examples.
    """
    name, equals, sizes = text.replace(" ", "").lower().partition("=")
    axis = _OTHER_NAMES.get(name) or next((axis for axis in Axis if axis == name), None)
    if axis is None or not equals:
        hint = "" if not name else did_you_mean(name, list(Axis))
        raise InputError(f"--sweep {text!r}: what is swept is one of {', '.join(Axis)}{hint or ','} as in {_EXAMPLES}")
    found: set[int] = set()
    for part in sizes.split(","):
        match = _PART.fullmatch(part)
        if match is None or len(part) > 40:
            raise InputError(
                f"--sweep {text!r}: {part[:40]!r} is neither a whole number nor a range; write {_EXAMPLES}"
            )
        found |= _sizes(text, *(None if group is None else int(group) for group in match.groups()))
    if len(found) > MOST_POINTS:
        raise InputError(
            f"--sweep {text!r}: {len(found):,} sizes; at most {MOST_POINTS} in one sweep, so take larger steps"
        )
    return axis, tuple(sorted(found))


def _sizes(text: str, first: int | None, last: int | None, step: int | None) -> set[int]:
    assert first is not None
    if first < 1 or (last is not None and last < first) or step == 0:
        raise InputError(f"--sweep {text!r}: sizes are whole numbers from 1, ranges ascend, steps are from 1")
    if last is None:
        return {first}
    if step is not None:
        if (last - first) // step >= 10 * MOST_POINTS:
            raise InputError(f"--sweep {text!r}: at most {MOST_POINTS} sizes in one sweep, so take larger steps")
        return {*range(first, last + 1, step)}
    found = {last}
    while first < last:
        found.add(first)
        first *= 2
    return found
