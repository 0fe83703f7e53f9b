"""A picture of a cluster: switches above, one node of each kind below, links as wide as they carry, oddities in red."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.records import Cluster, NodeKind
from planner.fabric_findings import Finding, verdict
from planner.readers.topology.join import Joined
from planner.report.plots import MEASURED, PREDICTED, saved
from planner.report.words import bandwidth, counted
from planner.survey import nearest_interfaces

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CHILDREN = 4
"""Children of a switch that are drawn; the others are a number."""
_MOST_GPUS = 16
"""GPUs of a node that are drawn."""
_WIDTH_IN = 12.0
_ROW_IN = 1.15
_SWITCH, _GPU, _NIC = "#4D4D4D", PREDICTED, "#009E73"
"""Grey, blue and green of Okabe and Ito (2008)."""


@dataclass(slots=True)
class _Canvas:
    """Things at places, before they are drawn."""

    boxes: list[tuple[float, float, str, str]] = field(default_factory=list)
    """(x, y, text, colour)."""
    lines: list[tuple[float, float, float, float, float, str]] = field(default_factory=list)
    """(x, y, x, y, bytes/s, colour)."""
    words: list[tuple[float, float, str]] = field(default_factory=list)
    """(x, y, text)."""


def fabric_plot(seen: Joined, found: Sequence[Finding], path: str | Path) -> Path:
    """Draws the cluster and returns the file (PNG), which appears whole or not at all."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = _Canvas()
    height = _draw(canvas, seen)
    with matplotlib.rc_context({"font.size": 11}):
        figure = Figure(figsize=(_WIDTH_IN, 1.6 + _ROW_IN * height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        _paint(axes, canvas, height)
        figure.suptitle(
            f"{seen.cluster.name}: {seen.cluster.num_gpus:,} GPUs in {counted(seen.cluster.num_nodes, 'node')}",
            fontsize=15,
        )
        words = "; ".join(dict.fromkeys(one.code for one in found)) or "nothing odd"
        axes.set_title(f"{verdict(tuple(found))}: {words}", fontsize=11, color=MEASURED if found else "0.3", wrap=True)
        return saved(figure, Path(path))


def _draw(canvas: _Canvas, seen: Joined) -> float:
    """Everything at its place; the number of rows."""
    cluster = seen.cluster
    shown = cluster.pools[:3]
    ports: list[tuple[float, float]] = []
    for number, pool in enumerate(shown):
        left, right = number / len(shown), (number + 1) / len(shown)
        places = _node(canvas, seen, pool.kind, left, right, first=number == 0)
        ports += [(x, pool.kind.nic.bandwidth_bytes_per_s) for x in places]
        words = f"{pool.num_nodes:,} x {pool.kind.name}" if pool.num_nodes > 1 else pool.kind.name
        canvas.words.append(((left + right) / 2, -0.75, words))
    return 3.0 if cluster.num_nodes == 1 else _switches(canvas, cluster, ports, 3.0)


def _switches(canvas: _Canvas, cluster: Cluster, ports: Sequence[tuple[float, float]], y: float) -> float:
    """Levels above the nodes, each with a few switches and the number of the others; returns where they end."""
    below = cluster.num_nodes
    levels = [(level.name, level.radix, level.oversubscription) for level in cluster.fabric]
    hanging = list(ports)
    through = cluster.pools[0].kind.node_bandwidth_bytes_per_s
    for name, radix, narrow in [*levels, ("top", below, 1.0)]:
        count = math.ceil(below / max(radix, 1))
        drawn = min(count, _MOST_CHILDREN)
        spread = [(index + 0.5) / drawn for index in range(drawn)] if count > 1 else [0.5]
        for index, x in enumerate(spread):
            rest = f"\n+{count - drawn:,} more" if index == drawn - 1 and count > drawn else ""
            canvas.boxes.append((x, y, f"{name}{rest}", _SWITCH))
        # every port of the node that is drawn goes to one switch; switches go to the nearest above
        first = min(spread, key=lambda place: abs(place - 0.5))
        for x, rate in hanging:
            to = first if hanging is ports or y == 3.0 else min(spread, key=lambda place: abs(place - x))
            canvas.lines.append((x, y - 1, to, y, rate, _SWITCH))
        if narrow > 1:
            canvas.words.append((0.5, y + 0.5, f"{narrow:g}:1 oversubscribed"))
        through *= radix / narrow
        hanging, below = [(x, through) for x in spread], count
        y += 1
        if count == 1:
            break
    return y


def _node(canvas: _Canvas, seen: Joined, kind: NodeKind, left: float, right: float, *, first: bool) -> list[float]:
    """GPUs below, their domains in the middle, interfaces above; returns where the interfaces stand."""
    node = seen.pieces.node if first else None
    gpus, nics = min(kind.gpus_per_node, _MOST_GPUS), min(kind.num_nics, _MOST_GPUS)
    gpu_x = [left + (right - left) * (index + 0.5) / gpus for index in range(gpus)]
    nic_x = [left + (right - left) * (index + 0.5) / nics for index in range(nics)]
    _domains(canvas, seen if node is not None else None, kind, gpu_x)
    for index, x in enumerate(nic_x):
        canvas.boxes.append((x, 2.0, _nic_name(seen, index) if node is not None else f"nic {index}", _NIC))
    for gpu in range(gpus):
        near = nearest_interfaces(seen, gpu) if node is not None else ()
        indices = [seen.nics.index(nic) for nic in near] if near and len(near) <= 2 else [gpu * nics // gpus]
        for index in indices:
            if index < nics:
                canvas.lines.append((gpu_x[gpu], 0.0, nic_x[index], 2.0, kind.nic.bandwidth_bytes_per_s / 4, "0.75"))
    if gpus < kind.gpus_per_node:
        canvas.words.append((right, 0.0, f"+{kind.gpus_per_node - gpus} GPUs"))
    words = f"{kind.num_nics} x {kind.nic.name} {bandwidth(kind.nic.bandwidth_bytes_per_s)}"
    canvas.words.append((left + 0.12 * (right - left), 2.45, words))
    return nic_x


def _domains(canvas: _Canvas, seen: Joined | None, kind: NodeKind, gpu_x: Sequence[float]) -> None:
    """The fast domains: as they were seen, else one of all GPUs; a GPU that is in none, where others are, is red."""
    count = len(gpu_x)
    rate = kind.intra.bandwidth_bytes_per_s
    words = f"{kind.intra.name}\n{bandwidth(rate)}"
    groups: Sequence[Sequence[int]] = [range(count)]
    if seen is not None and seen.domains is not None and len(seen.domains.groups[0]) > 1:
        groups = seen.domains.groups
        if not seen.domains.whole and not seen.domains.off and seen.pieces.node is not None:
            way = next(path.way.value for path in seen.pieces.node.paths.values() if path.way.is_fast)
            words = f"{way}\n{bandwidth(kind.island.link.bandwidth_bytes_per_s)}" if kind.island else way
    for group in groups:
        members = [gpu for gpu in group if gpu < count]
        if len(members) > 1:
            x = sum(gpu_x[gpu] for gpu in members) / len(members)
            canvas.boxes.append((x, 1.0, words, _SWITCH))
            canvas.lines += [(gpu_x[gpu], 0.0, x, 1.0, rate, _GPU) for gpu in members]
        for gpu in members:
            canvas.boxes.append((gpu_x[gpu], 0.0, f"{gpu}", MEASURED if len(group) == 1 and count > 1 else _GPU))


def _nic_name(seen: Joined, index: int) -> str:
    node = seen.pieces.node
    if node is None or index >= len(seen.nics):
        return f"nic {index}"
    return node.nics[seen.nics[index]].name[:14]


def _paint(axes: "Axes", canvas: _Canvas, height: float) -> None:
    for x, y, to_x, to_y, rate, colour in canvas.lines:
        width = min(6.0, max(0.6, 1.2 * math.log10(max(rate, 1e9) / 1e9)))
        axes.plot([x, to_x], [y, to_y], color=colour, linewidth=width, alpha=0.7, solid_capstyle="round", zorder=1)
    for x, y, text, colour in canvas.boxes:
        style = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "white"}
        axes.text(x, y, text, ha="center", va="center", color="white", fontsize=9, bbox=style, zorder=2)
    for x, y, text in canvas.words:
        axes.text(
            x, y, text, ha="center", va="center", fontsize=10, color="0.25", zorder=3, backgroundcolor=(1, 1, 1, 0.8)
        )
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-1.1, height - 0.2)
    axes.axis("off")
