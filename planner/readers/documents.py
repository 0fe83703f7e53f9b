"""JSON documents that people name by path: one wording for what is absent, damaged, newer or of another kind."""

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


def part_of(data: dict[str, Any], key: str) -> Any:
    """The part `key` of a request, a profile or a plan (which holds its request); else the document itself."""
    inner = data.get("request", data)
    inner = inner.get(key, inner) if isinstance(inner, dict) else inner
    if isinstance(inner, dict):
        return {name: value for name, value in inner.items() if name != "schema_version"}
    return inner
