"""The companions of the matrix: `nvidia-smi -L`, `--query-gpu=... --format=csv` and `nvidia-smi nvlink -s`.

They have what the matrix lacks: names, memory, the PCIe link, and the rate of each NVLink.
"""

import csv
import re
from collections.abc import Mapping

from planner.errors import InputError
from planner.readers.topology.seen import SeenDevices, SeenGpu, SeenNvlinks
from planner.readers.topology.text import plain_lines, shown

_LISTED = re.compile(r"^\s*GPU (\d+):\s*(.+?)\s*(?:\(UUID:[^)]*\)?)?\s*$")
_LINK = re.compile(r"^\s*Link (\d+):\s*(?:(\d+(?:\.\d+)?)\s*GB/s|<?\s*(inactive|disabled|N/A)\s*>?)\s*$", re.IGNORECASE)
_QUERY = re.compile(
    r"^\s*(?:index|name|gpu_name|uuid|gpu_uuid|pci\.|memory\.|pcie\.|driver_version|count|timestamp)[^,\n]*(?:,|$)"
)

PCIE_BYTES_PER_S_OF_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One lane in one direction after line coding (PCI-SIG: 8b/10b to generation 2, 128b/130b to 5, FLITs of 6)."""

MOST_GPUS_OF_NODE = 256
"""GPUs of one node."""


# -L and nvlink -s --------------------------------------------------------------------------------------------------


def is_smi_list(text: str) -> bool:
    """`GPU 0: NVIDIA H100 80GB HBM3 (UUID: ...)`, with or without links below."""
    return "GPU " in text and any(_listed(line) for line in plain_lines(text))


def _listed(line: str) -> re.Match[str] | None:
    return _LISTED.match(line) if line.lstrip().startswith("GPU ") else None


def read_smi_list(text: str, source: str) -> list[SeenDevices | SeenNvlinks]:
    """The GPUs by name; with `nvlink -s` the state of their links."""
    names: dict[int, str] = {}
    links: dict[int, dict[int, float | None]] = {}
    current: int | None = None
    for line in plain_lines(text):
        if found := _listed(line):
            current = _number(found[1], MOST_GPUS_OF_NODE, "GPU", source)
            if current in names and names[current] != found[2]:
                raise InputError(
                    f"{source}: GPU {current} is {shown(names[current])} and {shown(found[2])}: two nodes in one file; "
                    "give one file a kind of node"
                )
            names[current] = found[2]
        elif current is not None and (link := _LINK.match(line)):
            number = _number(link[1], 64, "link", source)
            rate = float(link[2]) * 1e9 if link[2] else 0.0
            links.setdefault(current, {})[number] = rate or None
    _refuse_gaps(names, source)
    gpus = tuple(SeenGpu(name=names[index]) for index in range(len(names)))
    found_all: list[SeenDevices | SeenNvlinks] = [SeenDevices(source=f"{source} (nvidia-smi -L)", gpus=gpus)]
    if links:
        found_all.append(
            SeenNvlinks(
                source=f"{source} (nvidia-smi nvlink -s)",
                bytes_per_s=tuple(_in_order(links.get(index, {})) for index in range(len(names))),
                names=tuple(names[index] for index in range(len(names))),
            )
        )
    return found_all


def _in_order(links: Mapping[int, float | None]) -> tuple[float | None, ...]:
    return tuple(links.get(number) for number in range(max(links, default=-1) + 1))


def _number(text: str, most: int, what: str, source: str) -> int:
    number = int(text) if len(text) < 9 else most
    if number >= most:
        raise InputError(f"{source}: {what} {shown(text)}; a node has fewer than {most} of them")
    return number


def _refuse_gaps(names: Mapping[int, object], source: str) -> None:
    missing = next((index for index in range(max(names) + 1) if index not in names), None)
    if missing is not None:
        raise InputError(
            f"{source}: GPU {max(names)} is listed, and GPU {missing} is not: the list was cut off, or names one GPU"
        )


# The table of plain nvidia-smi --------------------------------------------------------------------------------------

_ROW = re.compile(r"^\|\s+(\d{1,3})\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|\s+[0-9A-Fa-f]{8}:", re.MULTILINE)
_MEMORY = re.compile(r"/\s*(\d{3,7})MiB\s*\|")


def is_smi_table(text: str) -> bool:
    """What `nvidia-smi` prints without arguments."""
    return "MiB" in text and bool(_ROW.search(text))


def read_smi_table(text: str, source: str) -> list[SeenDevices]:
    """The GPUs by name and memory."""
    found = list(_ROW.finditer(text))
    gpus = {}
    for row, following in zip(found, [*found[1:], None], strict=True):
        memory = _MEMORY.search(text, row.end(), following.start() if following else len(text))
        number = _number(row[1], MOST_GPUS_OF_NODE, "GPU", source)
        gpus[number] = SeenGpu(name=row[2], memory_bytes=int(memory[1]) * 2**20 if memory else None)
    _refuse_gaps(gpus, source)
    return [SeenDevices(source=f"{source} (nvidia-smi)", gpus=tuple(gpus[index] for index in range(len(gpus))))]


# --query-gpu -------------------------------------------------------------------------------------------------------


def is_smi_query(text: str) -> bool:
    """A CSV whose header names fields of `nvidia-smi --help-query-gpu`."""
    return "name" in text and any(_is_query_header(line) for line in plain_lines(text))


def _is_query_header(line: str) -> bool:
    if not _QUERY.match(line):
        return False
    return bool({"name", "gpu_name"} & {field.split("[")[0].strip() for field in line.split(",")})


def read_smi_query(text: str, source: str) -> list[SeenDevices]:
    """The GPUs of a query that has `name`; memory and PCIe link where they were asked for."""
    lines = plain_lines(text)
    start = next(index for index, line in enumerate(lines) if _is_query_header(line))
    header = [field.strip() for field in next(csv.reader([lines[start]], skipinitialspace=True))]
    gpus: list[SeenGpu] = []
    for line in lines[start + 1 :]:
        if not line.strip() or line.startswith(("#", "```")):
            break
        cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        if len(cells) != len(header):
            raise InputError(
                f"{source}: {shown(line)} has {len(cells)} fields, and the header {len(header)} ({', '.join(header)[:200]}): cut off?"
            )
        gpus.append(_queried(dict(zip(header, cells, strict=True)), source))
        if len(gpus) > MOST_GPUS_OF_NODE:
            raise InputError(f"{source}: more than {MOST_GPUS_OF_NODE} GPUs in one query; give the list of one node")
    if not gpus:
        raise InputError(f"{source}: a header of --query-gpu ({', '.join(header)[:200]}) without a row below")
    return [SeenDevices(source=f"{source} (nvidia-smi --query-gpu)", gpus=tuple(gpus))]


def _queried(row: Mapping[str, str], source: str) -> SeenGpu:
    said = {key.split("[")[0].strip(): (value, key) for key, value in row.items()}
    name = (said.get("name") or said["gpu_name"])[0]
    if not name:
        raise InputError(f"{source}: a GPU without a name")
    return SeenGpu(name=name, memory_bytes=_memory(*said.get("memory.total", ("", ""))), pcie_bytes_per_s=_pcie(said))


def _memory(text: str, key: str) -> int | None:
    """`81559 MiB`, or a number whose unit is in the header; None where the driver says N/A."""
    found = re.fullmatch(r"(\d{1,9})(?:\s*(MiB|MB|GiB|KiB))?", text)
    if found is None:
        return None
    unit = found[2] or (re.search(r"\[(\w+)\]", key) or ["", "MiB"])[1]
    return int(found[1]) * {"KiB": 2**10, "MiB": 2**20, "MB": 2**20, "GiB": 2**30}.get(unit, 2**20)


def _pcie(said: Mapping[str, tuple[str, str]]) -> float | None:
    """What the link can do (max): an idle GPU's current link is slow to save power."""
    best = [
        said.get(f"pcie.link.{what}.max", said.get(f"pcie.link.{what}.gpumax", ("", "")))[0]
        for what in ("gen", "width")
    ]
    if not all(text.isdigit() and len(text) < 4 for text in best):
        return None
    generation, lanes = map(int, best)
    rate = PCIE_BYTES_PER_S_OF_LANE.get(generation)
    return rate * lanes if rate and lanes in (1, 2, 4, 8, 12, 16, 32) else None
