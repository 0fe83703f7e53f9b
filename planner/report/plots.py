"""Pictures. The only place that knows matplotlib, and it loads it on the first picture."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.records import write_atomic
from planner.report.words import three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTED, MEASURED = "#0072B2", "#D55E00"
"""Blue and vermilion, told apart with every kind of colour blindness (Okabe and Ito 2008); shapes differ as well."""

_ROW_IN, _FRAME_IN, _WIDTH_IN = 0.72, 2.1, 11.0
"""Inches: of a layout, around them, and across."""
_OFFSET = 0.16
"""Of predicted and measured from the middle of a layout's row, in rows."""

_UNITS_S = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_UNITS_GIB = (("GiB", 1.0), ("MiB", 1.0 / 1024))


def comparison_plot(
    rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "Predicted and measured, layout by layout"
) -> Path:
    """Draws what was promised against what was measured, in the order of `rows`, and returns the file (PNG).

    A row is {layout, predicted_s, low_s, high_s, measured_s (list of seconds), predicted_gib, measured_gib}; low_s to high_s is
    the 80% interval; whatever is None or absent is not drawn. ValueError where there are no rows. The file appears whole or
    not at all.
    """
    if not rows:
        raise ValueError("no rows: a comparison shows at least one layout")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_WIDTH_IN, _FRAME_IN + _ROW_IN * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        with_memory = any(_number(row, key) is not None for row in rows for key in ("predicted_gib", "measured_gib"))
        axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if with_memory else [figure.subplots()]
        _draw_times(axes[0], rows)
        if with_memory:
            _draw_memory(axes[1], rows)
        axes[0].set_yticks(range(len(rows)), [_label(str(row["layout"])) for row in rows])
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        figure.suptitle(title, fontsize=15)
        _legend(figure)
        return saved(figure, Path(path))


def _draw_times(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """Predicted step times with their intervals above, each measured step and their median below."""
    known = [value for row in rows for value in [*_numbers(row, "predicted_s", "low_s", "high_s"), *_samples(row)]]
    unit, scale = _unit(_UNITS_S, known)
    for place, row in enumerate(rows):
        predicted, low, high = (_number(row, key) for key in ("predicted_s", "low_s", "high_s"))
        if predicted is not None:
            ends = (min(predicted, low or predicted) / scale, max(predicted, high or predicted) / scale)
            at, above = predicted / scale, place - _OFFSET
            axes.plot(ends, [above] * 2, "|-", color=PREDICTED, linewidth=2.5, markersize=12, markeredgewidth=2.5)
            axes.plot([at], [above], "o", color=PREDICTED, markersize=9)
            _name(axes, ends[1], above, three_digits(at))
        samples = [sample / scale for sample in _samples(row)]
        if samples:
            median, below = statistics.median(samples), place + _OFFSET
            axes.plot(
                samples, [below] * len(samples), "|", color=MEASURED, markersize=13, markeredgewidth=1.8, alpha=0.55
            )
            axes.plot([median], [below], "D", color=MEASURED, markersize=8)
            _name(axes, max(samples), below, three_digits(median))
    _finish(axes, f"step time, {unit}", known, scale)


def _draw_memory(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of the expected and the measured peak of the fullest rank, with their numbers."""
    known = [value for row in rows for value in _numbers(row, "predicted_gib", "measured_gib")]
    unit, scale = _unit(_UNITS_GIB, known)
    styles = (("predicted_gib", PREDICTED, -_OFFSET, ""), ("measured_gib", MEASURED, _OFFSET, "////"))
    for place, row in enumerate(rows):
        for key, colour, offset, hatch in styles:
            value = _number(row, key)
            if value is None:
                continue
            axes.barh(place + offset, value / scale, height=0.28, color=colour, hatch=hatch, edgecolor="white")
            _name(axes, value / scale, place + offset, three_digits(value / scale))
    _finish(axes, f"peak memory of the fullest rank, {unit}", known, scale)
    axes.tick_params(axis="y", length=0)


def _name(axes: "Axes", x: float, y: float, text: str) -> None:
    """A number to the right of what it is the value of."""
    axes.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=10.5)


def _finish(axes: "Axes", label: str, known: Sequence[float], scale: float) -> None:
    """From zero on, so that lengths compare; light lines to read off by."""
    axes.set_xlim(0, 1.18 * (max(known, default=0.0) or scale) / scale)
    axes.set_xlabel(label)
    axes.grid(axis="x", color="0.88")
    axes.set_axisbelow(True)


def _legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=PREDICTED, marker="o", markersize=9, linewidth=2.5, label="predicted, 80% interval"),
        Line2D([], [], color=MEASURED, marker="D", markersize=8, linestyle="none", label="measured, median"),
        Line2D(
            [], [], color=MEASURED, marker="|", markersize=13, linestyle="none", alpha=0.55, label="each measured step"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _label(layout: str, most: int = 30) -> str:
    """A layout's text on as many lines as it needs beside the axes."""
    lines = [""]
    for word in layout.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a row; None where it has none."""
    value = row.get(key)
    return float(value) if value is not None and math.isfinite(value) else None


def _numbers(row: Mapping[str, Any], *keys: str) -> list[float]:
    return [value for key in keys if (value := _number(row, key)) is not None]


def _samples(row: Mapping[str, Any]) -> list[float]:
    return [float(value) for value in row.get("measured_s") or () if math.isfinite(value)]


def _unit(units: Sequence[tuple[str, float]], values: Sequence[float]) -> tuple[str, float]:
    """The largest unit that the largest value reaches."""
    most = max(values, default=units[0][1])
    return next(((name, scale) for name, scale in units if most >= scale), units[-1])


def saved(figure: "Figure", path: Path) -> Path:
    """Draws the picture in memory, and writes the file in one go."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=144, metadata={"Software": "meshwright"})
    write_atomic(path, picture.getvalue())
    return path
