"""`nvidia-smi topo -m` and `topo -p2p r`: a matrix of ways between GPUs and interfaces.

The text is not safe by columns: drivers glue cells and headers together, old ones name interface columns by device, and the
tail (affinities) is glued as well. A row is read cell by cell from a closed set of words, as many as the header has columns,
and only then its tail.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.readers.topology.seen import Path, SeenGpu, SeenNic, SeenNode, SeenP2p, Way
from planner.readers.topology.text import plain_lines, shown

_WAYS = {"SYS": Way.SYS, "SOC": Way.SYS, "NODE": Way.NODE, "PHB": Way.PHB, "PXB": Way.PXB, "PIX": Way.PIX}
"""Words of the legend; SOC is what drivers before 2017 called SYS."""
_REFUSALS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
"""Words of the legend of -p2p, beside OK."""

_CELL = re.compile(r"[ \t]*(?:(NV\d{1,3})|(X|SYS|SOC|NODE|PHB|PXB|PIX|OK|CNS|GNS|TNS|NS|DR|U)(?![a-z]))")
_GLUED_COLUMNS = re.compile(r"(?:GPU|NIC)\d+")
_LEGEND_OF_NICS = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$", re.MULTILINE)
_HEADER = re.compile(r"^[ \t]*GPU0(?:[ \t]+(?!\d|XGMI|PCIE|True|False|N/A)\S|[ \t]*$|GPU1)")
MOST_COLUMNS = 512
"""GPUs and interfaces of one node: ten times the largest."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix as text."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    tails: dict[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Labels of GPUs."""
        return tuple(name for name in self.columns if re.fullmatch(r"GPU\d+", name))

    def cell(self, row: str, column: str) -> str:
        """The word in a row and a column."""
        return self.rows[row][self.columns.index(column)]


def is_smi_topo(text: str) -> bool:
    """Does the text hold such a matrix? Its header begins with GPU0, and a row of GPU0 has a cell for itself."""
    if "GPU0" not in text:
        return False
    lines = plain_lines(text)
    return any(_is_header(lines, index) for index in range(len(lines)))


def _is_header(lines: Sequence[str], index: int) -> bool:
    """A header, and the next line with text in it is row GPU0 of words: rocm-smi has such headers over numbers."""
    if not _HEADER.match(lines[index]) or _first_cell(lines[index].strip(), "GPU0") is not None:
        return False
    after = next((line.strip() for line in lines[index + 1 : index + 4] if line.strip()), "")
    return after == "" or not re.match(r"GPU0[ \t]+(?:\d|XGMI|PCIE|True|False)", after)


def _first_cell(line: str, label: str) -> str | None:
    rest = line[len(label) :] if line.startswith(label) else ""
    found = _CELL.match(rest)
    return None if found is None else found[1] or found[2]


def read_smi_topo(text: str, source: str) -> list[SeenNode | SeenP2p]:
    """Every matrix in the text. Raises InputError for one that is cut off, or has a word that no legend has."""
    lines = plain_lines(text)
    starts = [index for index in range(len(lines)) if _is_header(lines, index)]
    nics = dict(_LEGEND_OF_NICS.findall(text))
    found: list[SeenNode | SeenP2p] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        matrix = _matrix(lines[start:end], source)
        words = {word for row in matrix.rows.values() for word in row} - {"X"}
        if words & ({"OK"} | set(_REFUSALS)):
            found.append(_p2p(matrix, f"{source} (nvidia-smi topo -p2p)"))
        else:
            found.append(_node(matrix, nics, f"{source} (nvidia-smi topo -m)"))
    return found


# Text -> matrix ----------------------------------------------------------------------------------------------------


def _matrix(lines: Sequence[str], source: str) -> _Matrix:
    columns = tuple(_columns(lines[0]))
    if len(columns) > MOST_COLUMNS:
        raise InputError(f"{source}: a matrix of {len(columns):,} columns; a node has {MOST_COLUMNS} at most")
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise InputError(f"{source}: the header names {twice} twice")
    rows: dict[str, tuple[str, ...]] = {}
    tails: dict[str, str] = {}
    for line in lines[1:]:
        label = next((name for name in (line.split() or [""])[:1] if name in columns), None)
        if label is None or label in rows:
            if rows and not line.strip():
                break
            continue
        start = line.index(label) + len(label)
        rows[label], tails[label] = _row(line[start:], columns, label, source)
    matrix = _Matrix(columns=columns, rows=rows, tails=tails)
    missing = [name for name in matrix.gpus if name not in rows]
    if missing:
        raise InputError(
            f"{source}: the matrix has columns {matrix.gpus[0]} to {matrix.gpus[-1]}, and no row {missing[0]}: it was cut off; "
            "paste all that `nvidia-smi topo -m` prints"
        )
    return matrix


def _columns(header: str) -> Iterator[str]:
    """Labels of the matrix's columns: what stands in front of `CPU Affinity`."""
    for word in re.split(r"CPU\b|CPU Affinity", header)[0].split():
        glued = _GLUED_COLUMNS.findall(word)
        if len(glued) > 1 and "".join(glued) == word:
            yield from glued
        else:
            yield word


def _row(text: str, columns: Sequence[str], label: str, source: str) -> tuple[tuple[str, ...], str]:
    """The cells of a row, and its tail."""
    cells, at = [], 0
    for column in columns:
        found = _CELL.match(text, at)
        if found is None:
            word = (text[at:].split() or ["nothing"])[0]
            raise InputError(
                f"{source}: row {label}, column {column} reads {shown(word)}; legal: X, NV#, {', '.join(_WAYS)} (topo -m), "
                f"OK, {', '.join(_REFUSALS)} (topo -p2p). A row that was cut off has too few of them"
            )
        cells.append(found[1] or found[2])
        at = found.end()
    own = cells[columns.index(label)]
    if own != "X":
        raise InputError(f"{source}: row {label} has {own} for itself in place of X: a column is missing or was added")
    return tuple(cells), text[at:]


# Matrix -> what was seen -------------------------------------------------------------------------------------------


def _node(matrix: _Matrix, legend: dict[str, str], source: str) -> SeenNode:
    gpus = matrix.gpus
    nics = tuple(name for name in matrix.columns if name not in gpus)
    paths: dict[tuple[int, int], Path] = {}
    asymmetric = []
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[i + 1 :], i + 1):
            there, back = _path(matrix.cell(one, other), source), _path(matrix.cell(other, one), source)
            paths[i, j] = max(there, back, key=lambda path: (path.way.distance, -path.links))
            if there != back:
                asymmetric.append((i, j))
    return SeenNode(
        source=source,
        command="nvidia-smi topo -m",
        gpus=tuple(SeenGpu(place=_place(matrix.tails[name])) for name in gpus),
        nics=tuple(SeenNic(name=legend.get(name, name)) for name in nics),
        paths=paths,
        nic_ways={
            (i, j): _path(matrix.cell(gpu, nic), source).way for i, gpu in enumerate(gpus) for j, nic in enumerate(nics)
        },
        twins=frozenset(
            (i, j)
            for i, one in enumerate(nics)
            for j, other in enumerate(nics)
            if i < j and one in matrix.rows and matrix.cell(one, other) == "PIX"
        ),
        asymmetric=tuple(asymmetric),
    )


def _path(word: str, source: str) -> Path:
    if word.startswith("NV"):
        links = int(word[2:])
        if not links:
            raise InputError(f"{source}: a cell reads {word}: a bond of NVLinks has one at least")
        return Path(way=Way.NVLINK, links=links)
    if word not in _WAYS:
        raise InputError(f"{source}: {word} between two devices; legal: NV#, {', '.join(_WAYS)}")
    return Path(way=_WAYS[word])


def _place(tail: str) -> str | None:
    """Where a GPU lies: the processors beside it. Their list may be glued to the number of the NUMA node, which then is
    the same for all of the same place."""
    words = tail.split()
    return words[0] if words and words[0][0].isdigit() else None


def _p2p(matrix: _Matrix, source: str) -> SeenP2p:
    gpus = matrix.gpus
    refused = {}
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[i + 1 :], i + 1):
            words = [word for word in (matrix.cell(one, other), matrix.cell(other, one)) if word != "OK"]
            if words:
                refused[i, j] = f"{words[0]}, {_REFUSALS.get(words[0], 'no word of the legend')}"
    return SeenP2p(source=source, num_gpus=len(gpus), refused=refused)
