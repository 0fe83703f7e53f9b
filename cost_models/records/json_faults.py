"""Text that is no JSON, in words: where it goes wrong, what stands there, and what to do about it."""

import re

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words -> JSON's."""
_CUT = "truncated or damaged: write it again"
_PART_OF_A_WORD = re.compile(r"|-|tr?u?|fa?l?s?|nu?l?")
"""What is left of a value where the file ends: nothing, a sign, part of true, false or null."""


def fault_in_words(text: str, position: int, reason: str) -> str:
    """What is wrong at `position`, where the standard library's parser gave up for `reason`; line and column count from 1.

    The parser stops behind a comma that ought not to be there, and at the start of a text that does not end: both are told by
    what people see there.
    """
    rest = text[position:]
    before = text[:position].rstrip()
    if not text.strip():
        return f"there is nothing in it, so it is {_CUT}"
    if reason.startswith("Illegal trailing comma"):  # Python 3.13 and later point at the comma itself
        before, rest = text[: position + 1], "}"
    if before.endswith(",") and rest.lstrip()[:1] in ("}", "]"):
        return f"{_place(text, len(before) - 1)}: a comma behind the last entry; remove it"
    if _PART_OF_A_WORD.fullmatch(rest.strip()) or reason.startswith("Unterminated string"):
        return f"it ends in the middle ({_place(text, len(text.rstrip()))}), so it is {_CUT}"
    return f"{_place(text, position)}: {_kind(rest.lstrip(), reason)}"


def _place(text: str, position: int) -> str:
    line, start = text.count("\n", 0, position) + 1, text.rfind("\n", 0, position) + 1
    return f"line {line}, column {position - start + 1}"


def _kind(rest: str, reason: str) -> str:
    word = re.match(r"[A-Za-z_][\w.]*", rest)
    if rest.startswith("'"):
        return f"single quotes ({_excerpt(rest)}); JSON takes double quotes"
    if rest.startswith(("//", "#", "/*")):
        return f"a comment ({_excerpt(rest)}); JSON has none: remove it"
    if word and word[0] in _WORDS:
        return f"{word[0]}; JSON writes {_WORDS[word[0]]}"
    if reason.startswith("Expecting ',' delimiter"):
        return f"a comma is absent before {_excerpt(rest)}"
    if reason.startswith("Expecting ':' delimiter"):
        return f"a colon is absent before {_excerpt(rest)}"
    if reason.startswith("Extra data"):
        return f"{_excerpt(rest)} stands behind the end of the document; a file holds one"
    if reason.startswith("Invalid control character"):
        return "a line break or another control character inside a text; write it as \\n"
    if reason.startswith("Invalid \\"):
        return f"{_excerpt(rest)} is no escape of JSON; a backslash itself is written \\\\"
    if reason.startswith("Expecting property name"):
        return f"{_excerpt(rest)} where a key in double quotes belongs"
    return f"{_excerpt(rest)} is no value; texts stand in double quotes, and numbers as in 8192 or 1.5"


def _excerpt(rest: str) -> str:
    line = rest.splitlines()[0].strip()
    return line if len(line) <= 30 else f"{line[:27]}..."
