"""nccl-tests and rccl-tests: the table that they print, and the JSON of `-J` (-> what was measured, with outliers marked).

A row has size, count, type, redop, root, then time, algbw, busbw and #wrong out of place and in place (four more each with
-I). The number of ranks is in no row, and a log may lack the header; it is recovered from what the program itself computes:

  busbw / algbw = 2(n-1)/n  all_reduce      (n-1)/n  all_gather, reduce_scatter, alltoall      1  broadcast, sendrecv
  size = count · bytes of the type · n      where count is that of one rank: all but all_reduce, broadcast and sendrecv

(NVIDIA/nccl-tests doc/PERFORMANCE.md and src/*.cu.) Both sides of the ratio are rounded, so every row says an interval; all
rows together must agree on one whole number. A table whose bandwidths are not its sizes over its times is no such table.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import InputError, NotYetError
from planner.readers.topology.curves import marked
from planner.readers.topology.nccl_rows import TYPE_BYTES, Row, Run, json_run, runs
from planner.readers.topology.seen import SeenCollective

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "p2p",
}
"""Program -> our word."""
_UNPRICED = ("reduce", "gather", "scatter", "hypercube", "alltoallv")
"""Programs of nccl-tests whose collective no cost model has."""
_SHARED = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose ratio is (n-1)/n, and whose count is that of one rank."""

MOST_RANKS = 2**20
"""As many as the GPUs that are planned for."""
_BOUNDED_GB_PER_S = 0.2
"""Bandwidths below it have a digit or two: their ratio says nothing."""
_TOLERANCE = 0.02
"""How far a bandwidth may be from size over time, beside rounding: times are means over iterations and ranks."""
_ODD_ROWS = 0.1
"""Share of the rows that may be further: a row may be cut by the output of another rank."""


def read_nccl_tests(text: str, source: str, *, ranks: int | None = None) -> list[SeenCollective]:
    """Every table of a log. Raises InputError for what is implausible, NotYetError for collectives without a cost."""
    return [_collective(run, source, ranks) for run in runs(text, source)]


def read_nccl_json(data: Mapping[str, Any], source: str, *, ranks: int | None = None) -> list[SeenCollective]:
    """The one run of a file of `-J`. Raises as `read_nccl_tests`."""
    return [_collective(json_run(data, source), source, ranks)]


def _collective(run: Run, source: str, ranks: int | None) -> SeenCollective:
    rows = sorted((row for row in run.rows if row.size > 0), key=lambda row: row.size)
    rows = [row for row in rows if any(half.seconds > 0 for half in row.halves)]
    if not rows:
        raise InputError(f"{source}: no row of more than 0 bytes with a time")
    _refuse_inconsistent(rows, source)
    ratio = _ratio(rows, source)
    notes: list[str] = []
    word = _word(run, rows, ratio, notes, source)
    count = _ranks(run, rows, word, ratio, ranks, notes, source)
    best: dict[int, float] = {}
    for row in rows:
        seconds = min(half.seconds for half in row.halves if half.seconds > 0)
        best[row.size] = min(seconds, best.get(row.size, math.inf))
    return SeenCollective(
        source=f"{source} (nccl-tests {word})",
        collective=word,
        num_ranks=count,
        num_nodes=len(run.hosts) or None,
        gpu=next(iter(run.gpus)) if len(run.gpus) == 1 else None,
        points=marked(best),
        bus_bytes_per_s=max(half.bus for row in rows for half in row.halves) * 1e9,
        notes=tuple(notes),
    )


def _refuse_inconsistent(rows: Sequence[Row], source: str) -> None:
    """Bandwidths must be sizes over times."""
    odd = []
    told = 0
    for row in rows:
        for half in row.halves:
            if half.seconds <= 0 or half.algorithm < _BOUNDED_GB_PER_S:
                continue
            told += 1
            expected = row.size / 1e9 / half.seconds
            slack = half.algorithm_off + expected * (half.seconds_off / half.seconds + _TOLERANCE)
            if not math.isfinite(expected) or abs(expected - half.algorithm) > slack:
                odd.append((row.size, half.algorithm, expected))
    if len(odd) > _ODD_ROWS * told:
        size, printed, expected = odd[0]
        raise InputError(
            f"{source}: the row of {size:,} bytes prints algbw {printed:g} GB/s, and its size over its time is {expected:.4g} GB/s "
            f"(so in {len(odd)} of {told}): no program printed this table; measure again"
        )


def _ratio(rows: Sequence[Row], source: str) -> tuple[float, float]:
    """The interval of busbw / algbw that all rows leave."""
    low, high = 0.0, math.inf
    for row in rows:
        for half in row.halves:
            if half.algorithm < _BOUNDED_GB_PER_S:
                continue
            least = (half.bus - half.bus_off) / (half.algorithm + half.algorithm_off)
            most = (half.bus + half.bus_off) / (half.algorithm - half.algorithm_off)
            if least > high * (1 + 1e-9) or most < low * (1 - 1e-9):
                raise InputError(
                    f"{source}: the row of {row.size:,} bytes has busbw/algbw = {half.bus / half.algorithm:.4f}, and the others "
                    f"{low:.4f} to {high:.4f}: it is one number for one group of ranks; these are rows of several runs, or invented"
                )
            low, high = max(low, least), min(high, most)
    return low, high


def _word(run: Run, rows: Sequence[Row], ratio: tuple[float, float], notes: list[str], source: str) -> str:
    """Our word for the collective: from the program where it is named, else from the columns."""
    if run.program in COLLECTIVES:
        return COLLECTIVES[run.program]
    if run.program in _UNPRICED:
        raise NotYetError(f"{source}: {run.program} has no cost model yet; these have: {', '.join(COLLECTIVES)}")
    reduces, rooted = rows[0].redop != "none", rows[0].root >= 0
    low, high = ratio
    if rooted:
        if reduces:
            raise NotYetError(
                f"{source}: a reduce to one rank has no cost model yet; these have: {', '.join(COLLECTIVES)}"
            )
        return "broadcast"
    if reduces:
        return "reduce_scatter" if high < 1 - 1e-9 else "all_reduce"
    if low <= 1 <= high and high < math.inf:
        return "p2p"
    notes.append(
        "the program is not named: taken as all_gather (alltoall prints the same columns); say so in the file's name"
    )
    return "all_gather"


def _ranks(
    run: Run,
    rows: Sequence[Row],
    word: str,
    ratio: tuple[float, float],
    said: int | None,
    notes: list[str],
    source: str,
) -> int:
    """The number of ranks, from the ratio, the counts, the header and what is said (`ranks=`), which must agree."""
    least, most = _range_of_ranks(word, ratio, source)
    counted = _counted(rows) if word in _SHARED else None
    if counted is not None and not least <= counted <= most:
        raise InputError(
            f"{source}: size over count says {counted} ranks, and busbw/algbw {_span(least, most)}: invented, or edited"
        )
    if said is not None:
        if not least <= said <= most or (counted is not None and said != counted):
            raise InputError(f"{source}: ranks={said}, and its bandwidths say {_span(least, most)}")
        return said
    if run.listed and run.is_whole and run.listed > most:
        raise InputError(
            f"{source}: the header lists {run.listed} ranks, and busbw/algbw says {_span(least, most)}: two runs in one file?"
        )
    if counted is not None or least == most:
        found = counted if counted is not None else least
        if run.listed and run.listed != found:
            notes.append(f"the header lists {run.listed} of {found} ranks: it was cut")
        return found
    if least <= run.listed <= most:
        return run.listed
    if word == "p2p":
        return 2
    whole = [count for count in range(least, min(most, 4096) + 1) if count % 8 == 0] if most < math.inf else []
    if len(whole) == 1:
        notes.append(
            f"{whole[0]} ranks: the one multiple of 8 in {_span(least, most)} that its rounded bandwidths leave"
        )
        return whole[0]
    raise InputError(f"{source}: its bandwidths say {_span(least, most)} ranks, and no header lists them; say ranks=N")


def _span(least: float, most: float) -> str:
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _range_of_ranks(word: str, ratio: tuple[float, float], source: str) -> tuple[int, int]:
    """Whole numbers of ranks that a ratio allows."""
    low, high = ratio
    if high == math.inf:
        return 2, MOST_RANKS  # all messages are too small to say
    if word in ("p2p", "broadcast"):
        if not low - 1e-9 <= 1 <= high + 1e-9:
            raise InputError(
                f"{source}: busbw/algbw is {low:.4f} to {high:.4f}, and 1 for {word}: another collective, or invented"
            )
        return 2, MOST_RANKS
    scale = 2.0 if word == "all_reduce" else 1.0
    edge = [MOST_RANKS if value >= scale * (1 - 1 / MOST_RANKS) else scale / (scale - value) for value in (low, high)]
    least, most = max(2, math.ceil(edge[0] - 1e-6)), math.floor(edge[1] + 1e-6)
    if least > most or low > scale * (1 + 1e-9):
        raise InputError(
            f"{source}: busbw/algbw is {low:.4f} to {high:.4f}, and no whole number n gives that for {word} "
            f"({'2(n-1)/n' if scale == 2 else '(n-1)/n'}): another collective, or invented"
        )
    return least, most


def _counted(rows: Sequence[Row]) -> int | None:
    """Ranks from size = count · bytes of the type · n; None where the rows do not all say it exactly, and alike."""
    found = set()
    for row in rows:
        unit = row.count * TYPE_BYTES.get(row.type, 0)
        if not unit:
            continue
        found.add(row.size // unit if row.size % unit == 0 else 0)
    return found.pop() if len(found) == 1 and min(found) > 1 else None
