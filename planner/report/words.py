"""How numbers, tables and lists are written for people. Text only; it knows no record but the layout."""

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from cost_models.records import Layout
from cost_models.units import GIB, MIB

WIDTH = 120
"""Columns that a line of text fits into."""

_NUMBER_AND_UNIT = re.compile(r"(\d) (?=(?:s|ms|µs|[GM]iB|[GMk]B/s|[PTGM]FLOP(?:/s)?|[TBM])\b)")
"""A number and its unit stay on one line."""
_LEAST_WORDS = 30
"""Columns below which words are not wrapped: a tower of them reads worse than a long line."""
_LABEL = 10
"""Columns of the word in front of a row."""


def row(name: str, text: str) -> str:
    """A word, then its text in a column of its own; text beyond the width goes on below itself."""
    blank = " " * (_LABEL + 1)
    first = f"{name:<{_LABEL}} "
    return _wrapped(text, first, blank if len(first) == len(blank) else " " * len(first))


def paragraph(text: str, indent: int = 0) -> str:
    """Text within the width, each line after `indent` blanks; words are never broken."""
    return _wrapped(text, " " * indent, " " * indent)


def _wrapped(text: str, first: str, rest: str) -> str:
    if len(first) + len(text) <= WIDTH:
        return (first + text).rstrip()
    lines = textwrap.wrap(
        _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows of cells as columns, two blanks apart; those in `right` are aligned there, the others to the left.

    A last column of words that runs over the width goes on below itself.
    """
    if not rows:
        return []
    last = max(map(len, rows)) - 1
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(last + 1)]
    start = sum(widths[:last]) + 2 * last
    room = WIDTH - start if last not in right and WIDTH - start >= _LEAST_WORDS else None
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        if room is not None and len(row) == last + 1 and len(row[last]) > room:
            lines += _wrapped(row[last], "".join(f"{cell}  " for cell in cells[:last]), " " * start).splitlines()
        else:
            lines.append("  ".join(cells).rstrip())
    return lines


def joined(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`; nothing for no words."""
    listed = list(words)
    return "".join(listed) if len(listed) < 2 else f"{', '.join(listed[:-1])} {last} {listed[-1]}"


def counted(count: int, word: str) -> str:
    """`1 error`, `2 errors`; words whose plural is no s are not for this."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def short_layout(layout: Layout, *, has_experts: bool = False) -> str:
    """The layout's text without the degrees that are 1; with experts beside tp also etp, which some runtimes set to tp."""
    words = str(layout).split()
    silent = {"vpp1", "dpr1", "dps1", "cp1", "tp1", "ep1", "etp1", "pp1", "gather=step", "rc=none"}
    if layout.tp > 1 and (has_experts or layout.ep > 1):
        silent.remove("etp1")
    if layout.pp == 1:
        silent.add(f"sched={layout.schedule}")
    return " ".join(word for word in words if word not in silent)


# Numbers -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Seconds as people read them: three significant digits in s, ms or µs."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def billions(count: float) -> str:
    """A number of parameters or tokens, with its unit."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,.0f}"


def memory(num_bytes: float) -> str:
    """Bytes of memory: GiB with one decimal, MiB below one of them."""
    if abs(num_bytes) >= 0.9995 * GIB:
        return f"{num_bytes / GIB:,.{0 if abs(num_bytes) >= 999.5 * GIB else 1}f} GiB"
    return f"{num_bytes / MIB:,.0f} MiB" if abs(num_bytes) >= 9.5 * MIB else f"{num_bytes / MIB:.2g} MiB"


def memory_gib(value_gib: float) -> str:
    """GiB of memory, written as `memory` writes bytes."""
    return memory(value_gib * GIB)


def bandwidth(bytes_per_s: float) -> str:
    """Bytes per second: three significant digits in GB/s, or MB/s below one."""
    return _scaled(bytes_per_s, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)))


def flop_rate(flops_per_s: float) -> str:
    """FLOP/s: TFLOP/s, GFLOP/s below one."""
    return _scaled(flops_per_s, (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)))


def flop_count(flops: float) -> str:
    """FLOPs, with their unit."""
    return _scaled(flops, (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)))


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, scale in units:
        if value >= 0.9995 * scale or unit == units[-1][0]:
            return f"{three_digits(value / scale)} {unit}"
    raise AssertionError("unreachable")


def three_digits(value: float) -> str:
    """Three significant digits; whole numbers from a thousand on."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"
