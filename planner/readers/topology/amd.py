"""`rocm-smi --showtopo` and its successor `amd-smi topology`, with the names that their companions print.

Distances are weights: 15 for each xGMI hop, and 20 for each PCIe segment, so 40 is one processor and more is several. "Hops"
is 1 for everything that xGMI reaches, near or far (ROCm/rocm-systems issue 5763), and is not used.
"""

import re
from collections.abc import Mapping, Sequence

from planner.errors import InputError
from planner.readers.topology.seen import Path, SeenDevices, SeenGpu, SeenNode, Way
from planner.readers.topology.text import plain_lines, shown

XGMI_HOP_WEIGHT = 15
"""Weight of one xGMI hop (amd-smi documentation of `--weight`; ROCm/rocm-systems pull request 7372)."""
ONE_PROCESSOR_WEIGHT = 40
"""Two PCIe segments: both GPUs hang on the same processor (the same place)."""

_SECTION = re.compile(
    r"^[=\s]*(Weight|Hops|Link Type|Link accessibility|Min/Max Bandwidth)[\w /]* between two GPUs[=\s]*$"
    r"|^\s*([A-Z][A-Z0-9 -]+) TABLE:\s*$"
)
_ADDRESS = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]"
_LABEL = re.compile(rf"GPU\d+|{_ADDRESS}")
_NUMA = re.compile(r"^\s*GPU\s*\[?(\d{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*(-?\d+)", re.MULTILINE)
_SERIES = re.compile(r"^\s*GPU\s*\[?(\d{1,3})\]?\s*:\s*Card [Ss]eries:\s*(\S.*?)\s*$", re.MULTILINE)
_VRAM = re.compile(r"^\s*GPU\s*\[?(\d{1,3})\]?\s*:\s*VRAM Total Memory \(B\):\s*(\d{6,15})\s*$", re.MULTILINE)
_MARKET = re.compile(r"^\s*MARKET_NAME:\s*(\S.*?)\s*$", re.MULTILINE)
MOST_GPUS = 256
"""GPUs of one node."""


def is_amd(text: str) -> bool:
    """A section of either tool, or the names that their companions print."""
    if not any(word in text for word in ("between two GPUs", "TABLE:", "Card ", "MARKET_NAME")):
        return False
    titles = {_title(line) for line in plain_lines(text)}
    return bool(titles & {"weight", "link type"}) or bool(_SERIES.search(text)) or bool(_MARKET.search(text))


def _title(line: str) -> str | None:
    found = _SECTION.match(line)
    return None if found is None else (found[1] or found[2]).lower()


def read_amd(text: str, source: str) -> list[SeenNode | SeenDevices]:
    """The node, and its GPUs by name where they are listed."""
    lines = plain_lines(text)
    clean = "\n".join(lines)
    found: list[SeenNode | SeenDevices] = []
    tables = _tables(lines, source)
    if "weight" in tables or "link type" in tables:
        amd_smi = any(line.strip().endswith("TABLE:") for line in lines)
        command = "amd-smi topology" if amd_smi else "rocm-smi --showtopo"
        found.append(_node(tables, {int(gpu): numa for gpu, numa in _NUMA.findall(clean)}, source, command))
    names = _names(clean, source)
    if names:
        found.append(SeenDevices(source=f"{source} (product names)", gpus=names))
    return found


def _names(text: str, source: str) -> tuple[SeenGpu, ...]:
    series = {int(gpu): name for gpu, name in _SERIES.findall(text)}
    memory = {int(gpu): int(size) for gpu, size in _VRAM.findall(text)}
    if series:
        if sorted(series) != list(range(len(series))):
            raise InputError(
                f"{source}: the list of GPUs has gaps ({sorted(series)[:8]}): it was cut off, or names one GPU"
            )
        return tuple(SeenGpu(name=series[index], memory_bytes=memory.get(index)) for index in range(len(series)))
    return tuple(SeenGpu(name=name) for name in _MARKET.findall(text)[:MOST_GPUS])


Table = Mapping[tuple[int, int], str]
"""(row, column) -> word."""


def _tables(lines: Sequence[str], source: str) -> dict[str, Table]:
    """Every section with a matrix, by its title."""
    tables: dict[str, Table] = {}
    for start, line in enumerate(lines):
        title = _title(line)
        if title in ("weight", "link type") and title not in tables:
            tables[title] = _table(lines[start + 1 : start + 4 + MOST_GPUS], title, source)
    return tables


def _table(lines: Sequence[str], title: str, source: str) -> Table:
    rest = iter(line.split() for line in lines if line.strip())
    columns = next(rest, [])
    if not columns or not all(_LABEL.fullmatch(word) for word in columns):
        raise InputError(
            f"{source}: {title}: a header of GPUs is needed below the title, and {shown(' '.join(columns))} is there"
        )
    if len(columns) > MOST_GPUS:
        raise InputError(f"{source}: {title}: {len(columns)} GPUs in one node; {MOST_GPUS} at most")
    table: dict[tuple[int, int], str] = {}
    for row, label in enumerate(columns):
        words = next(rest, [])
        if len(words) != len(columns) + 1 or words[0] != label:
            raise InputError(
                f"{source}: {title}: row {label} of {len(columns)} words is needed, and {shown(' '.join(words))} is there: cut off?"
            )
        table.update({(row, column): word for column, word in enumerate(words[1:])})
    return table


def _node(tables: Mapping[str, Table], numa: Mapping[int, str], source: str, command: str) -> SeenNode:
    some = next(iter(tables.values()))
    count = max(row for row, _ in some) + 1
    if any(len(table) != len(some) for table in tables.values()):
        raise InputError(f"{source}: the sections are of different numbers of GPUs")
    paths: dict[tuple[int, int], Path] = {}
    asymmetric = []
    for i in range(count):
        for j in range(i + 1, count):
            there, back = _path(tables, i, j, numa, source), _path(tables, j, i, numa, source)
            paths[i, j] = max(there, back, key=lambda path: (path.way.distance, -path.links))
            if there != back:
                asymmetric.append((i, j))
    return SeenNode(
        source=f"{source} ({command})",
        command=command,
        gpus=tuple(SeenGpu(place=numa.get(index)) for index in range(count)),
        paths=paths,
        asymmetric=tuple(asymmetric),
        knows_nics=False,
    )


def _path(tables: Mapping[str, Table], i: int, j: int, numa: Mapping[int, str], source: str) -> Path:
    kind = tables["link type"][i, j] if "link type" in tables else None
    text = tables["weight"][i, j] if "weight" in tables else ""
    if text and not (text.isdigit() and len(text) < 7) and text != "N/A":
        raise InputError(f"{source}: the weight between GPU {i} and {j} reads {shown(text)}; a whole number is needed")
    weight = int(text) if text.isdigit() else None
    if kind is None:  # without the types weights tell: fewer than two PCIe segments weigh
        kind = (
            "XGMI" if weight is not None and weight % XGMI_HOP_WEIGHT == 0 and weight < ONE_PROCESSOR_WEIGHT else "PCIE"
        )
    if kind == "XGMI":
        return Path(way=Way.XGMI, links=0 if weight is not None and weight > XGMI_HOP_WEIGHT else 1)
    if kind not in ("PCIE", "PCIe"):
        raise InputError(f"{source}: the link between GPU {i} and {j} reads {shown(kind)}; legal: XGMI, PCIE")
    same = weight <= ONE_PROCESSOR_WEIGHT if weight is not None else numa.get(i) == numa.get(j) is not None
    return Path(way=Way.NODE if same else Way.SYS)
