"""nccl-tests and rccl-tests: the table that they print, and the JSON of `-J` (-> what was measured, with outliers marked).

A row has size, count, type, redop, root, then time, algbw, busbw and #wrong out of place and in place (four more each with
-I). The number of ranks is in no row, and a log may lack the header; it is recovered from what the program itself computes:

  busbw / algbw = 2(n-1)/n  all_reduce      (n-1)/n  all_gather, reduce_scatter, alltoall      1  broadcast, sendrecv
  size = count · bytes of the type · n      where count is that of one rank: all but all_reduce, broadcast and sendrecv

(NVIDIA/nccl-tests doc/PERFORMANCE.md and src/*.cu.) Both sides of the ratio are rounded, so every row says an interval; all
rows together must agree on one whole number. A table whose bandwidths are not its sizes over its times is no such table.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InputError, NotYetError
from planner.readers.topology.curves import marked
from planner.readers.topology.seen import SeenCollective
from planner.readers.topology.text import plain_lines, shown

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

TYPE_BYTES = {
    "int8": 1, "uint8": 1, "char": 1, "int32": 4, "uint32": 4, "int": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4,
    "double": 8, "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Types of nccl-tests (src/common.cu) and rccl-tests."""

MOST_RANKS = 2**20
"""As many as the GPUs that are planned for."""
_BOUNDED_GB_PER_S = 0.2
"""Bandwidths below it have a digit or two: their ratio says nothing."""
_TOLERANCE = 0.02
"""How far a bandwidth may be from size over time, beside rounding: times are means over iterations and ranks."""
_ODD_ROWS = 0.1
"""Share of the rows that may be further: a row may be cut by the output of another rank."""

_RANK = re.compile(
    r"^#\s*Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*?)\s*$"
)
_PROGRAM = re.compile(r"(?:^|[\s/])(\w+?)_perf\b")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+(?:" + "|".join(TYPE_BYTES) + r")\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """One placement of one row, with how far rounding may have moved each number."""

    seconds: float
    seconds_off: float
    algorithm: float
    algorithm_off: float
    bus: float
    bus_off: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One size."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    halves: tuple[_Half, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of one program."""

    program: str | None
    rows: tuple[_Row, ...]
    listed: int = 0
    """Ranks that the header lists."""
    is_whole: bool = True
    """The header lists every rank."""
    hosts: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()


# Text --------------------------------------------------------------------------------------------------------------


def is_nccl_tests(text: str) -> bool:
    """A row of a table."""
    return "busbw" in text or any(_ROW.match(line) for line in plain_lines(text))


def read_nccl_tests(text: str, source: str, *, ranks: int | None = None) -> list[SeenCollective]:
    """Every table of a log. Raises InputError for what is implausible, NotYetError for collectives without a cost."""
    return [_collective(run, source, ranks) for run in _runs(plain_lines(text), source)]


def _runs(lines: Sequence[str], source: str) -> Iterator[_Run]:
    program: str | None = None
    rows: list[_Row] = []
    devices: dict[int, tuple[str, str]] = {}
    found_one = False
    for line in [*lines, "# Collective test concluded"]:
        bare = line.strip()
        if _ROW.match(line):
            rows.append(_row(line, source))
        elif found := _RANK.match(bare):
            if rows:
                devices = {}
            devices[int(found[1][:7])] = (found[2], found[3])
        elif named := _named(bare):
            program = named
        if rows and bare.startswith("#") and ("Avg bus" in bare or "concluded" in bare or "Using devices" in bare):
            found_one = True
            yield _Run(
                program=program or _named(source),
                rows=tuple(rows),
                listed=len(devices),
                is_whole=not devices or max(devices) + 1 == len(devices),
                hosts=frozenset(host for host, _ in devices.values()),
                gpus=frozenset(gpu for _, gpu in devices.values() if gpu),
            )
            rows, program = [], None
    if not found_one:
        raise InputError(f"{source}: a table of nccl-tests without a row: the run failed, or the file was cut off")


def _named(text: str) -> str | None:
    """The program that a line, a command or a file's name names."""
    if found := _PROGRAM.search(text):
        return found[1].lower()
    names = [
        name
        for name in (*COLLECTIVES, "all_to_all", "alltoallv")
        if re.search(rf"(?:^|[/_\-. ]){name}(?:[_\-. ]|$)", text)
    ]
    is_file = "/" in text or "." in text.split(" ")[0]
    return (
        {"all_to_all": "alltoall"}.get(names[0], names[0]) if names and is_file and not text.startswith("#") else None
    )


def _row(line: str, source: str) -> _Row:
    words = line.split()
    size, count, kind = words[0], words[1], words[2]
    rest = words[3:]
    redop = rest.pop(0) if rest and not _number(rest[0]) else "none"
    root = rest.pop(0) if rest and re.fullmatch(r"-?\d{1,7}", rest[0]) and len(rest) % 4 == 1 else "-1"
    numbers = []
    for word in rest:
        if not _number(word) and word != "N/A":
            break  # a time stamp, or another rank's words
        numbers.append(word)
    half = {16: 8, 8: 4, 6: 3, 4: 4, 3: 3}.get(len(numbers))
    if half is None or len(size) > 18 or len(count) > 18:
        raise InputError(
            f"{source}: {shown(line.strip(), 100)}: {len(numbers)} numbers behind type, redop and root; a row has 4 or 8: cut off?"
        )
    return _Row(
        size=int(size),
        count=int(count),
        type=kind,
        redop=redop,
        root=int(root),
        halves=tuple(_half(numbers[at : at + 3], source, size) for at in range(0, len(numbers), half)),
    )


def _number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", word, re.IGNORECASE) is not None


def _half(words: Sequence[str], source: str, size: str) -> _Half:
    if "N/A" in words:
        raise InputError(f"{source}: row {size}: N/A in place of a time or a bandwidth")
    (time, time_off), (algorithm, algorithm_off), (bus, bus_off) = map(_rounded, words)
    return _Half(
        seconds=time * 1e-6,
        seconds_off=time_off * 1e-6,
        algorithm=algorithm,
        algorithm_off=algorithm_off,
        bus=bus,
        bus_off=bus_off,
    )


def _rounded(word: str) -> tuple[float, float]:
    """A printed number, and half of its last digit."""
    mantissa, _, exponent = word.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return float(word), 0.5 * 10.0 ** (int(exponent or 0) - digits)


# JSON --------------------------------------------------------------------------------------------------------------


def is_nccl_json(data: Any) -> bool:
    """What `-J` writes."""
    return (
        isinstance(data, Mapping)
        and isinstance(data.get("results"), list)
        and bool({"nccl_version", "config", "args"} & set(data))
    )


def read_nccl_json(data: Mapping[str, Any], source: str, *, ranks: int | None = None) -> list[SeenCollective]:
    """The one run of a file of `-J`. Raises as `read_nccl_tests`."""
    version = data.get("version", 1)
    if not isinstance(version, int) or not 1 <= version <= 3:
        raise InputError(f"{source}: version {version!r} of nccl-tests' JSON; 1 to 3 are read")
    arguments = data.get("args")
    command = str(arguments[0]) if isinstance(arguments, list) and arguments else ""
    config = data.get("config")
    config = config if isinstance(config, Mapping) else {}
    devices = config.get("devices", data.get("devices"))
    devices = [device for device in devices if isinstance(device, Mapping)] if isinstance(devices, list) else []
    each = _whole(config.get("nthreads", 1), "nthreads", source) * _whole(config.get("ngpus", 1), "ngpus", source)
    rows = tuple(row for item in data["results"] if (row := _json_row(item, source)) is not None)
    if not rows:
        raise InputError(f"{source}: no result: the run failed, or was cut off")
    run = _Run(
        program=_named(command) or _named(source),
        rows=rows,
        listed=len(devices) * each,  # it lists the first device of each process
        is_whole=bool(devices),
        hosts=frozenset(str(device.get("hostname", "")) for device in devices) - {""},
        gpus=frozenset(str(device.get("device_info", "")) for device in devices) - {""},
    )
    return [_collective(run, source, ranks)]


def _whole(value: Any, key: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10_000:
        raise InputError(f"{source}: {key}={value!r}; a whole number from 1 is needed")
    return value


def _json_row(item: Any, source: str) -> _Row | None:
    if not isinstance(item, Mapping):
        raise InputError(f"{source}: a result is a {type(item).__name__}; an object is needed")
    try:
        halves = tuple(
            _json_half(item[key]) for key in ("out_of_place", "in_place") if isinstance(item.get(key), Mapping)
        )
        return _Row(
            size=int(item["size"]),
            count=int(item["count"]),
            type=str(item["type"]),
            redop=str(item["redop"]),
            root=int(str(item["root"])),
            halves=halves,
        )
    except KeyError as error:
        raise InputError(f"{source}: a result without {error}: cut off?") from None
    except (TypeError, ValueError):
        raise InputError(
            f"{source}: a result of size {shown(str(item.get('size')))} has a text where a number is needed"
        ) from None


def _json_half(data: Mapping[str, Any]) -> _Half:
    time = float(data["time"] if "time" in data else data["cpu_time"])
    off = 0.5e-6  # printed with six decimals
    return _Half(
        seconds=time * 1e-6,
        seconds_off=off * 1e-6,
        algorithm=float(data["alg_bw"]),
        algorithm_off=off,
        bus=float(data["bus_bw"]),
        bus_off=off,
    )


# What it says ------------------------------------------------------------------------------------------------------


def _collective(run: _Run, source: str, ranks: int | None) -> SeenCollective:
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


def _refuse_inconsistent(rows: Sequence[_Row], source: str) -> None:
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


def _ratio(rows: Sequence[_Row], source: str) -> tuple[float, float]:
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


def _word(run: _Run, rows: Sequence[_Row], ratio: tuple[float, float], notes: list[str], source: str) -> str:
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
    run: _Run,
    rows: Sequence[_Row],
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


def _counted(rows: Sequence[_Row]) -> int | None:
    """Ranks from size = count · bytes of the type · n; None where the rows do not all say it exactly, and alike."""
    found = set()
    for row in rows:
        unit = row.count * TYPE_BYTES.get(row.type, 0)
        if not unit:
            continue
        found.add(row.size // unit if row.size % unit == 0 else 0)
    return found.pop() if len(found) == 1 and min(found) > 1 else None
