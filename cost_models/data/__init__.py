"""Tables of devices, links, nodes, models and runtimes: value, unit, source and date in every row."""

import functools
import json
from importlib import resources
from typing import Any

from cost_models.records import RecordError


@functools.cache
def table(name: str) -> dict[str, Any]:
    """The parsed table `name` (models, devices, links, nodes, ...). Shared by all callers: read it, never change it."""
    file = resources.files(__name__).joinpath(f"{name}.json")
    if not file.is_file():
        known = sorted(entry.name[:-5] for entry in resources.files(__name__).iterdir() if entry.name.endswith(".json"))
        raise RecordError(f"there is no table {name!r}; known tables: {', '.join(known)}")
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def rows(name: str) -> dict[str, dict[str, Any]]:
    """The rows of the table `name`, by the key that the table is about (its rows stand under its own name)."""
    found: dict[str, dict[str, Any]] = table(name)[name]
    return found
