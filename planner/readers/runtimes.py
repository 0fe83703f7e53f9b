"""A runtime by name: the record of a framework, of one that trains with it, or `generic`."""

import difflib
import functools
from typing import Any

from cost_models.data import rows
from cost_models.records import Runtime, from_json
from planner.errors import InputError

GENERIC = "generic"
"""The record of a framework that nobody has read."""


def runtime_names() -> tuple[str, ...]:
    """Names of all records, without their aliases."""
    return tuple(rows("runtimes"))


def read_runtime(name: str, *, typed: bool = False) -> Runtime:
    """The record of the framework `name`; case and the separators - _ and space do not matter.

    A framework without a record is `generic`. Where a person has typed the name as a choice (`typed`), a name without a
    record is an InputError that lists the near ones.
    """
    spelling = _spelling(name)
    found = _by_spelling().get(spelling)
    if found is not None:
        return _record(found)
    if typed:
        near = difflib.get_close_matches(spelling, _by_spelling(), n=3)
        hint = (
            f"; did you mean {' or '.join(map(repr, dict.fromkeys(_by_spelling()[one] for one in near)))}?"
            if near
            else ""
        )
        raise InputError(f"runtime {name!r} is not known{hint}; known runtimes: {', '.join(runtime_names())}")
    return _record(GENERIC)


def is_known(name: str) -> bool:
    """A record, or an alias of one, has this name."""
    return _spelling(name) in _by_spelling()


def _spelling(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@functools.cache
def _by_spelling() -> dict[str, str]:
    return {_spelling(alias): name for name, row in rows("runtimes").items() for alias in (name, *row["aliases"])}


@functools.cache
def _record(name: str) -> Runtime:
    row = rows("runtimes")[name]
    source = f"{row['source']} ({row['date']})"
    return from_json(Runtime, {**_fields(row), "name": name, "source": source}, f"runtimes.json: {name}")


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Fields of a row, over those of the row that it is like."""
    below = _fields(rows("runtimes")[row["like"]]) if "like" in row else {}
    return {**below, **row["fields"]}
