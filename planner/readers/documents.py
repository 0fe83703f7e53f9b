"""JSON documents that people name by path: one wording for what is absent, damaged, newer or of another kind."""

from enum import StrEnum
from pathlib import Path
from typing import Any

from cost_models.records import RecordError
from cost_models.records.codec import parse, refuse_version, text_of
from planner.errors import InputError


def read_document(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` (for example "a model") is named where it is something else.

    Raises InputError, led by the path, where the file cannot be read, is no JSON, is no object, or is newer.
    """
    try:
        data = parse(text_of(path), str(path))
        refuse_version(data, f"{path}: ")
    except RecordError as error:
        raise InputError(str(error)) from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected an object that describes {what}, found a {type(data).__name__}")
    return data


class There(StrEnum):
    """What a text names."""

    FILE = "file"
    """Something that can be read: a file, a pipe, /dev/stdin."""
    FOLDER = "folder"
    """A folder."""
    NOTHING = "nothing"
    """No path that exists."""


def named_path(text: str) -> tuple[Path, There]:
    """The path that a text names, and what is there; a text that can be no path names nothing."""
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return path, There.FOLDER
        return path, There.FILE if path.exists() else There.NOTHING
    except (OSError, RuntimeError, ValueError):
        return Path(text), There.NOTHING


def part_of(data: dict[str, Any], key: str) -> Any:
    """The part `key` of a request, a profile or a plan (which holds its request); else the document itself."""
    inner = data.get("request", data)
    inner = inner.get(key, inner) if isinstance(inner, dict) else inner
    if isinstance(inner, dict):
        return {name: value for name, value in inner.items() if name != "schema_version"}
    return inner
