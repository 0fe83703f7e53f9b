"""Files that people paste: read once, in bounded memory, without what terminals and launchers put around them."""

import codecs
import re
from pathlib import Path

from planner.errors import InputError

MOST_BYTES = 64 * 2**20
"""Bytes of a pasted file: `kubectl get nodes -o json` of two thousand nodes is a third of it."""

_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and underlines: `nvidia-smi topo -m` underlines its header on a terminal."""

MOST_LINES = 2**21
"""Lines of a pasted file."""

_LAUNCHER = re.compile(
    r"[ \t]*(?:\[\d+,\d+\]<std(?:out|err)>:"  # mpirun --tag-output
    r"|\[\d+\](?=[ \t])"  # mpiexec -prepend-rank
    r"|\d{1,6}:(?=[ \t]|$))"  # srun --label
)
"""What launchers put in front of a line: the label of the rank."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Marks of other encodings: what `>` writes on Windows is UTF-16."""


def read_text(path: Path) -> str:
    """The text of a file, with `\\n` between lines and without a terminal's marks.

    Raises InputError, led by the path: absent, empty, larger than MOST_BYTES, or no text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return decoded(content, str(path))


def decoded(content: bytes, source: str) -> str:
    """Bytes of a pasted file as text; raises as `read_text`."""
    if len(content) > MOST_BYTES:
        raise InputError(f"{source}: larger than {MOST_BYTES // 2**20} MiB; give what one command printed, not a log")
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: not a text (byte {error.start} is no {encoding}); paste what the command prints"
        ) from None
    if "\0" in text:
        raise InputError(f"{source}: a binary file (it has a NUL byte); paste what the command prints")
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    if text.count("\n") > MOST_LINES:
        raise InputError(f"{source}: more than {MOST_LINES:,} lines; give what one command printed, not a log")
    if not text.strip():
        raise InputError(f"{source}: empty; paste what the command prints")
    return text


def plain_lines(text: str) -> list[str]:
    """The lines, each without the rank that srun or mpirun put in front of it."""
    return [without_label(line) for line in text.split("\n")]


def without_label(line: str) -> str:
    """A line without the rank that srun or mpirun put in front of it."""
    found = _LAUNCHER.match(line)
    return line[found.end() :] if found else line


def shown(text: str, most: int = 40) -> str:
    """A piece of somebody's file for an error: quoted, on one line, cut."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")
