"""The rows of nccl-tests as they are written: the table that it prints, in any log, and the JSON of `-J`.

A row has size, count, type, redop, root, then time, algbw, busbw and #wrong out of place and in place (four more each with
-I; old releases have no root, and an error in place of #wrong). Every number keeps how far rounding may have moved it.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InputError
from planner.readers.topology.text import plain_lines, shown

PROGRAMS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "broadcast", "sendrecv")
"""Programs whose names files carry."""

TYPE_BYTES = {
    "int8": 1, "uint8": 1, "char": 1, "int32": 4, "uint32": 4, "int": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4,
    "double": 8, "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Types of nccl-tests (src/common.cu) and rccl-tests."""

_RANK = re.compile(
    r"^#\s*Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*?)\s*$"
)
_PROGRAM = re.compile(r"(?:^|[\s/])(\w+?)_perf\b")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+(?:" + "|".join(TYPE_BYTES) + r")\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One placement of one row, with how far rounding may have moved each number (`_off`)."""

    seconds: float
    seconds_off: float
    algorithm: float
    """algbw, GB/s."""
    algorithm_off: float
    bus: float
    """busbw, GB/s."""
    bus_off: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size, as its columns say it."""

    size: int
    """Bytes."""
    count: int
    """Elements, in many programs those of one rank."""
    type: str
    redop: str
    root: int
    """-1 = none."""
    halves: tuple[Half, ...]
    """Out of place, in place; whichever was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one program."""

    program: str | None
    """all_reduce, alltoall ...; None where nothing names it."""
    rows: tuple[Row, ...]
    listed: int = 0
    """Ranks that the header lists."""
    is_whole: bool = True
    """The header lists every rank."""
    hosts: frozenset[str] = frozenset()
    """Nodes that it names."""
    gpus: frozenset[str] = frozenset()
    """Products that it names."""


# Text --------------------------------------------------------------------------------------------------------------


def is_nccl_tests(text: str) -> bool:
    """A row of a table."""
    return "busbw" in text or any(_ROW.match(line) for line in plain_lines(text))


def runs(text: str, source: str) -> Iterator[Run]:
    """Every run that a log holds. Raises InputError where a row is damaged, or there is none."""
    program: str | None = None
    rows: list[Row] = []
    devices: dict[int, tuple[str, str]] = {}
    found_one = False
    for line in [*plain_lines(text), "# Collective test concluded"]:
        bare = line.strip()
        if _ROW.match(line):
            rows.append(_row(line, source))
        elif found := _RANK.match(bare):
            if rows:
                devices = {}
            devices[int(found[1][:7])] = (found[2], found[3])
        elif name := _named(bare):
            program = name
        if rows and bare.startswith("#") and ("Avg bus" in bare or "concluded" in bare or "Using devices" in bare):
            found_one = True
            yield Run(
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
    names = [name for name in (*PROGRAMS, "all_to_all") if re.search(rf"(?:^|[/_\-. ]){name}(?:[_\-. ]|$)", text)]
    is_file = "/" in text or "." in text.split(" ")[0]
    return (
        {"all_to_all": "alltoall"}.get(names[0], names[0]) if names and is_file and not text.startswith("#") else None
    )


def _row(line: str, source: str) -> Row:
    words = line.split()
    size, count, kind = words[:3]
    rest = words[3:]
    redop = rest.pop(0) if rest and not _number(rest[0]) else "none"
    # a time stamp, or another rank's words, may stand behind the numbers
    numbers = list(itertools.takewhile(lambda word: _number(word) or word == "N/A", rest))
    root = numbers.pop(0) if len(numbers) % 4 == 1 and re.fullmatch(r"-?\d{1,7}", numbers[0]) else "-1"
    half = {16: 8, 8: 4, 4: 4}.get(len(numbers))
    if half is None or len(size) > 18 or len(count) > 18:
        raise InputError(
            f"{source}: {shown(line.strip(), 100)}: {len(numbers)} numbers behind type, redop and root; a row has 4 or 8: cut off?"
        )
    return Row(
        size=int(size),
        count=int(count),
        type=kind,
        redop=redop,
        root=int(root),
        halves=tuple(_half(numbers[at : at + 3], source, size) for at in range(0, len(numbers), half)),
    )


def _number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", word, re.IGNORECASE) is not None


def _half(words: Sequence[str], source: str, size: str) -> Half:
    if "N/A" in words:
        raise InputError(f"{source}: row {size}: N/A in place of a time or a bandwidth")
    (time, time_off), (algorithm, algorithm_off), (bus, bus_off) = map(_rounded, words)
    return Half(
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


def json_run(data: Mapping[str, Any], source: str) -> Run:
    """The one run of a file of `-J`. Raises InputError."""
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
    return Run(
        program=_named(command) or _named(source),
        rows=rows,
        listed=len(devices) * each,  # it lists the first device of each process
        is_whole=bool(devices),
        hosts=frozenset(str(device.get("hostname", "")) for device in devices) - {""},
        gpus=frozenset(str(device.get("device_info", "")) for device in devices) - {""},
    )


def _whole(value: Any, key: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10_000:
        raise InputError(f"{source}: {key}={value!r}; a whole number from 1 is needed")
    return value


def _json_row(item: Any, source: str) -> Row | None:
    if not isinstance(item, Mapping):
        raise InputError(f"{source}: a result is a {type(item).__name__}; an object is needed")
    try:
        halves = tuple(
            _json_half(item[key]) for key in ("out_of_place", "in_place") if isinstance(item.get(key), Mapping)
        )
        return Row(
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


def _json_half(data: Mapping[str, Any]) -> Half:
    time = float(data["time"] if "time" in data else data["cpu_time"])
    off = 0.5e-6  # printed with six decimals
    return Half(
        seconds=time * 1e-6,
        seconds_off=off * 1e-6,
        algorithm=float(data["alg_bw"]),
        algorithm_off=off,
        bus=float(data["bus_bw"]),
        bus_off=off,
    )
