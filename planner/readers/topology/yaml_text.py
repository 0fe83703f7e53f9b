"""YAML that people paste, as plain lists, objects and texts.

Read event by event with a stack of our own: no anchors and aliases (a page of them grows to a terabyte), no tags, no deep
nesting, no key twice. Every scalar stays the text that is written: node `010` is no eight, and `no` no false.
"""

import itertools
from typing import Any

from planner.errors import InputError

MOST_BYTES = 24 * 2**20
"""Characters of a YAML file: its reader takes some 3 MB a second."""
MOST_DEPTH = 48
"""Nesting; objects of Kubernetes have a dozen levels."""


def parse_yaml(text: str, source: str) -> Any:
    """The one document in `text`; several are a list of documents, as `kubectl` and `---` write them.

    Raises InputError: no YAML, an alias, an anchor or a tag, too deep, too large, a key twice.
    """
    import yaml

    if len(text) > MOST_BYTES:
        raise InputError(
            f"{source}: {len(text) / 2**20:,.0f} MiB of YAML; {MOST_BYTES // 2**20} at most (JSON may be larger: `kubectl get nodes -o json`)"
        )
    documents: list[Any] = []
    stack: list[_Open] = []
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for event in yaml.parse(text, Loader=loader):
            _take(event, stack, documents, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{source}{where}: not YAML ({getattr(error, 'problem', None) or 'damaged'})") from None
    documents = [document for document in documents if document not in (None, "")]
    if not documents:
        raise InputError(f"{source}: an empty YAML document")
    return documents[0] if len(documents) == 1 else documents


class _Open:
    """A list or an object that is being read."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key: str | None = None

    def add(self, item: Any, place: str) -> None:
        """The next item, key or value."""
        if isinstance(self.value, list):
            self.value.append(item)
        elif self.key is None:
            if not isinstance(item, str):
                raise InputError(f"{place}: a key that is a list or an object; keys are texts")
            if item in self.value:
                raise InputError(f"{place}: the key {item[:60]!r} stands twice in one object")
            self.key = item
        else:
            self.value[self.key] = item
            self.key = None


def _take(event: Any, stack: list[_Open], documents: list[Any], source: str) -> None:
    import yaml

    place = f"{source}, line {event.start_mark.line + 1}"
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise InputError(f"{place}: anchors and aliases (& and *) are not read; write what they stand for")
    if str(getattr(event, "tag", None) or "").startswith(("!", "tag:yaml.org,2002:python")):
        raise InputError(f"{place}: tags ({str(event.tag)[:40]}) are not read; plain lists, objects and texts are")
    if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
        if len(stack) >= MOST_DEPTH:
            raise InputError(f"{place}: nested deeper than {MOST_DEPTH} levels")
        stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else []))
    elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
        _put(stack.pop().value, stack, documents, place)
    elif isinstance(event, yaml.ScalarEvent):
        _put(event.value, stack, documents, place)


def _put(item: Any, stack: list[_Open], documents: list[Any], place: str) -> None:
    if stack:
        stack[-1].add(item, place)
    else:
        documents.append(item)


def first_lines(text: str, count: int = 40) -> str:
    """The first lines that are no comments, for telling formats apart."""
    lines = (line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#"))
    return "\n".join(itertools.islice(lines, count))
