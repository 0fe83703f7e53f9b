"""Slurm's hostlists: `node[01-16,20],login[1-2]`, several brackets too (`rack[0-3]n[00-17]`). Counted before expanded."""

import itertools
import re
from collections.abc import Iterator

from planner.errors import InputError
from planner.readers.topology.text import shown

MOST_HOSTS = 2**20
"""Names of one list: as many as the GPUs that are planned for."""
_MOST_CHARACTERS = 2**20
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")


def count(text: str, source: str = "hostlist") -> int:
    """How many names a list has; none is made. Raises InputError where it is no hostlist."""
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"{source}: a hostlist of {len(text):,} characters; {_MOST_CHARACTERS:,} at most")
    return sum(_count(_item(part, source)) for part in _parts(text, source))


def expand(text: str, source: str = "hostlist", most: int = MOST_HOSTS) -> list[str]:
    """The names of a list, in its order.

    Raises InputError where it is no hostlist, or names more than `most`; those are counted first, none is made.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"{source}: a hostlist of {len(text):,} characters; {_MOST_CHARACTERS:,} at most")
    items = [_item(part, source) for part in _parts(text, source)]
    total = sum(_count(item) for item in items)
    if total > most:
        raise InputError(f"{source}: {shown(text)} names {total:,} hosts; up to {most:,} are planned for")
    return [name for item in items for name in _names(item)]


Item = list[str | list[tuple[int, int, int]]]
"""Texts and brackets in turn; a bracket is ranges (first, last, digits)."""


def _parts(text: str, source: str) -> Iterator[str]:
    """What stands between commas outside brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        if depth not in (0, 1):
            raise InputError(
                f"{source}: hostlist {shown(text)}: brackets stand side by side, never in one another, and in pairs"
            )
        if letter == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    if depth:
        raise InputError(f"{source}: hostlist {shown(text)}: a bracket is not closed: the line was cut off?")
    yield text[start:].strip()


def _item(text: str, source: str) -> Item:
    if not text or any(letter.isspace() for letter in text):
        raise InputError(f"{source}: {shown(text)} is no name of a host (nothing, or a blank in it)")
    item: Item = []
    for piece in re.split(r"(\[[^\]]*\])", text):
        if piece.startswith("["):
            item.append([_range(part, text, source) for part in piece[1:-1].split(",")])
        elif piece:
            item.append(piece)
    return item


def _range(text: str, whole: str, source: str) -> tuple[int, int, int]:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise InputError(
            f"{source}: {shown(text)} in hostlist {shown(whole)}; in brackets stand numbers and ranges, as in [01-16,20]"
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise InputError(f"{source}: the range {text.strip()} in hostlist {shown(whole)} runs backwards")
    return first, last, len(found[1])


def _count(item: Item) -> int:
    total = 1
    for piece in item:
        if not isinstance(piece, str):
            total *= sum(last - first + 1 for first, last, _ in piece)
    return total


def _names(item: Item) -> Iterator[str]:
    choices = [
        [piece] if isinstance(piece, str) else [f"{n:0{digits}d}" for a, b, digits in piece for n in range(a, b + 1)]
        for piece in item
    ]
    yield from map("".join, itertools.product(*choices))
