"""JSON for the records: strict in, stable out, atomic on disk.

Every record is a frozen dataclass; its JSON is its fields by name. Reading is strict: an unknown field, a missing one,
a value of another type or a newer schema is one error that names the place (`decision.stages[2].device`).
"""

import ast
import codecs
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from cost_models.records.json_faults import fault_in_words
from cost_models.records.near_names import did_you_mean

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Version of every file that Meshwright writes; a reader accepts this one and older ones."""


MOST_WHOLE = 2**53 - 1
"""Largest whole number that every reader of JSON takes exactly (RFC 8259, section 6)."""


UNSAID = MappingProxyType({"unsaid": True})
"""Metadata of a field that is written only where it is not its default: files that do not need it stay as they were."""


LONGEST_NAME = 255
"""Bytes of a file's name that file systems take (NAME_MAX of Linux and macOS)."""


class RecordError(ValueError):
    """A record, or a file that should hold one, says something that it may not say."""

    exit_code = 2


def to_json(value: Any) -> Any:
    """Plain JSON data (dict, list, str, int, float, bool, None) of a record; a float that is not finite is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {e.name: to_json(said) for e, said in entries if not ("unsaid" in e.metadata and said == e.default)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def from_json(cls: type[T], data: Any, place: str = "") -> T:
    """The record of type `cls` that `data` (parsed JSON) describes.

    Raises RecordError with the place of the first fault.
    """
    return _read(cls, data, place or cls.__name__.lower())  # type: ignore[no-any-return]


def dumps(record: Any) -> str:
    """The text of a record's file: indented JSON with a final newline; equal records give equal text."""
    return json.dumps(to_json(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str, source: str = "") -> Any:
    """The JSON data in `text`; `source` (a file's name) leads every error.

    Raises RecordError for what is no JSON, and for what JSON's readers do not agree on (RFC 8259, sections 4, 6 and 9):
    a key twice in one object, NaN, a number beyond `MOST_WHOLE` or a double, nesting deeper than this reader goes.
    """
    lead = f"{source}: " if source else ""
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(
            text, object_pairs_hook=_once_each, parse_int=_whole, parse_float=_finite, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise RecordError(f"{lead}not JSON: {fault_in_words(text, error.pos, error.msg)}") from None
    except RecursionError:
        raise RecordError(
            f"{lead}objects or lists are nested too deep; the file is damaged or of another kind"
        ) from None
    except RecordError as error:
        raise RecordError(f"{lead}{error}") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecordError(f"the key {twice!r} stands twice in one object; keep one of them")
    return found


def _whole(digits: str) -> int:
    if len(digits) > len(str(-MOST_WHOLE)) or abs(int(digits)) > MOST_WHOLE:
        shown = digits if len(digits) <= 30 else f"{digits[:27]}..."
        raise RecordError(f"{shown}: whole numbers are legal from -{MOST_WHOLE} to {MOST_WHOLE}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RecordError(f"{digits}: beyond what a number of 64 bits holds; infinite is written null")
    return value


def _no_constant(word: str) -> float:
    raise RecordError(f"{word} is no JSON; infinite and unknown are written null")


def loads(cls: type[T], text: str, source: str = "") -> T:
    """The record in `text`; `source` (a file's name) leads every error."""
    lead = f"{source}: " if source else ""
    data = parse(text, source)
    refuse_version(data, lead)
    try:
        return from_json(cls, data)
    except RecordError as error:
        raise RecordError(f"{lead}{error}") from None


def refuse_version(data: Any, lead: str) -> None:
    """Raises RecordError where the document `data` names a version that this reader does not know; `lead` leads it."""
    version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else SCHEMA_VERSION
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise RecordError(f"{lead}schema_version is {_shown(version)}; legal values: 1 to {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{lead}schema_version {version} is newer than {SCHEMA_VERSION}, the newest that this Meshwright reads; "
            "update Meshwright"
        )


def load(cls: type[T], path: str | Path) -> T:
    """The record in the file `path`. Raises RecordError where the file is absent, damaged or newer."""
    return loads(cls, text_of(path), str(path))


def text_of(path: str | Path) -> str:
    """The text in the file `path`. Raises RecordError where it is absent, a folder, or no UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except IsADirectoryError:
        raise RecordError(f"{path}: this is a folder; name a file in it") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        kind = "it is UTF-16: save it as UTF-8" if wide else "the file is damaged or of another kind"
        raise RecordError(f"{path}: not UTF-8 text; {kind}") from None


def save(record: Any, path: str | Path) -> None:
    """Writes a record's file whole or not at all."""
    write_atomic(path, dumps(record))


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (text as UTF-8) beside `path`, flushes it to the disk and renames it: a reader sees the old file or the new one.

    A link stays one: what it points at is replaced. A pipe or a device is written to. RecordError where that is not possible.
    """
    target = _real(path)
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    name: str | None = None
    try:
        if _takes_a_stream(target):
            target.write_bytes(data)
            return
        handle, name = _part_beside(target, path)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(target)
        name = None
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if name is not None:
            Path(name).unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """RecordError where `write_atomic` would raise it for `path`: to be known before long work, not behind it."""
    target = _real(path)
    if not _takes_a_stream(target):
        handle, name = _part_beside(target, path)
        os.close(handle)
        Path(name).unlink()


def make_folder(path: str | Path) -> None:
    """Makes the folder `path` and those above it. RecordError where that is not possible, or something else has the name."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path)
    except FileExistsError:
        raise RecordError(f"{path}: this is no folder; name another place") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be made, or not be written to ({error.strerror})") from None
    os.close(handle)
    Path(name).unlink()


def _real(path: str | Path) -> Path:
    if not str(path):
        raise RecordError("the name of the file to write is empty; name one")
    target = Path(os.path.realpath(path))
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in target.parts):
        raise RecordError(f"{path}: a name is longer than {LONGEST_NAME} bytes; take a shorter one")
    return target


def _takes_a_stream(target: Path) -> bool:
    """A pipe, a terminal, /dev/null: a rename would put a plain file in its place."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _part_beside(target: Path, said: str | Path) -> tuple[int, str]:
    """An open new file in the folder of `target`, and its name."""
    if target.is_dir():
        raise RecordError(f"{said}: this is a folder; name a file in it")
    if not target.parent.is_dir():
        raise RecordError(f"{said}: the folder {target.parent} does not exist; make it, or name another place")
    try:
        return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part")
    except OSError as error:
        raise RecordError(f"{said}: cannot be written ({error.strerror})") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Reading ---------------------------------------------------------------------------------------------------------


def _read(kind: Any, data: Any, place: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if data is None and type(None) in options:
            return None
        rest = [option for option in options if option is not type(None)]
        if len(rest) == 1:
            return _read(rest[0], data, place)
        return _read_union(rest, data, place)
    if origin is tuple:
        item, ellipsis = typing.get_args(kind)
        assert ellipsis is ..., "records hold homogeneous tuples only"
        if not isinstance(data, list):
            raise RecordError(f"{place} is {_shown(data)}; expected a list")
        return tuple(_read(item, value, f"{place}[{index}]") for index, value in enumerate(data))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, dict):
            raise RecordError(f"{place} is {_shown(data)}; expected an object")
        return {key: _read(typing.get_args(kind)[1], value, f"{place}.{key}") for key, value in data.items()}
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, data, place)
    return _read_scalar(kind, data, place)


def _read_union(options: list[Any], data: Any, place: str) -> Any:
    for option in options:
        try:
            return _read(option, data, place)
        except RecordError:
            continue
    raise RecordError(f"{place} is {_shown(data)}; expected one of: {', '.join(_kind_name(o) for o in options)}")


def _read_record(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError(f"{place} is {_shown(data)}; expected an object with {', '.join(_field_types(kind))}")
    known = _field_types(kind)
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known)
            raise RecordError(f"{place} has an unknown field {key!r}{hint} Known fields: {', '.join(known)}")
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            values[field.name] = _read(known[field.name], data[field.name], f"{place}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            meaning = _field_notes(kind).get(field.name, "").rstrip(".")
            raise RecordError(
                f"{place} lacks the field {field.name!r} ({meaning}): the file was cut short, or written by hand; add it"
            )
    try:
        return kind(**values)
    except RecordError as error:
        raise RecordError(f"{place}: {error}") from None


def _read_scalar(kind: Any, data: Any, place: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(data)
        except ValueError:
            legal = ", ".join(member.value for member in kind)
            raise RecordError(f"{place} is {_shown(data)}; legal values: {legal}") from None
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if kind is float and data is None:
        return math.inf
    if kind is int and isinstance(data, int) and not isinstance(data, bool):
        return data
    if kind in (str, bool) and isinstance(data, kind):
        return data
    raise RecordError(f"{place} is {_shown(data)}; expected {_kind_name(kind)}")


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _kind_name(kind: Any) -> str:
    return _KIND_NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# JSON Schema -----------------------------------------------------------------------------------------------------


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a record, made from its dataclass; the text under a field is its description."""
    definitions: dict[str, Any] = {}
    root = _schema(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": cls.__name__,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(option, definitions) for option in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if kind is Any:
        return {}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _record_schema(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if kind is float:
        return {"type": ["number", "null"]}
    return {"type": {int: "integer", str: "string", bool: "boolean", type(None): "null"}[kind]}


def _record_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    notes = _field_notes(kind)
    properties = {}
    for name, field_type in _field_types(kind).items():
        properties[name] = _schema(field_type, definitions) | ({"description": notes[name]} if name in notes else {})
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _field_notes(kind: Any) -> dict[str, str]:
    """The text that stands under each field in the source of a record."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0]).body
    notes = {}
    for field, note in itertools.pairwise(body):
        is_text = (
            isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            notes[field.target.id] = " ".join(str(note.value.value).split())  # type: ignore[attr-defined]
    return notes
