"""A picture of a sweep: how fast each size is beside what would be ideal, and what a token costs there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.report.plots import MEASURED, PREDICTED, saved
from planner.report.words import three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN, _HEIGHT_IN = 11.0, 5.0
_LABELS = {"gpus": "GPUs", "batch": "sequences a step", "seq": "tokens in a sequence"}


def sweep_plot(document: Mapping[str, Any], path: str | Path, *, title: str) -> Path:
    """Draws the points that have a plan, and returns the file (PNG).

    Left: tokens/s with the 80% interval of each step, and over GPUs the line on which twice the GPUs are twice as fast. Right:
    GPU-seconds, or the price, of a million tokens. Sizes without a plan are crosses on the axis. ValueError without any point.
    """
    planned = [point for point in document["points"] if point["step_s"] is not None]
    if not planned:
        raise ValueError("no size has a plan: there is nothing to draw")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        FigureCanvasAgg(figure)
        speed, cost = figure.subplots(1, 2)
        _draw_speed(speed, document, planned)
        _draw_cost(cost, document, planned)
        values = [point["value"] for point in document["points"]]
        for axes in (speed, cost):
            _finish(axes, document["axis"], values)
            for value in (point["value"] for point in document["points"] if point["step_s"] is None):
                axes.annotate("x", (value, 0.02), xycoords=("data", "axes fraction"), ha="center", color="0.4")
        figure.suptitle(title, fontsize=14)
        if len(planned) < len(document["points"]):
            figure.text(0.99, 0.01, "x: no plan", ha="right", fontsize=10, color="0.4")
        return saved(figure, Path(path))


def _draw_speed(axes: "Axes", document: Mapping[str, Any], planned: Sequence[Mapping[str, Any]]) -> None:
    values = [point["value"] for point in planned]
    rates = [point["tokens_per_s"] for point in planned]
    tokens = [point["gbs"] * point["seq"] for point in planned]
    below = [rate - num / point["step_s_high"] for rate, num, point in zip(rates, tokens, planned, strict=True)]
    above = [num / point["step_s_low"] - rate for rate, num, point in zip(rates, tokens, planned, strict=True)]
    axes.errorbar(
        values, rates, yerr=[below, above], fmt="o-", color=PREDICTED, capsize=4, label="predicted, 80% interval"
    )
    if document["axis"] == "gpus":
        ideal = [rates[0] * value / values[0] for value in values]
        axes.plot(values, ideal, ":", color="0.45", label=f"as at {values[0]:,}, GPU by GPU")
    _mark(axes, document, planned, "tokens_per_s")
    axes.set_ylabel("tokens/s")
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="best")


def _draw_cost(axes: "Axes", document: Mapping[str, Any], planned: Sequence[Mapping[str, Any]]) -> None:
    priced = document["price_per_gpu_hour"] is not None
    key = "price_per_million_tokens" if priced else "gpu_s_per_million_tokens"
    costs = [point[key] for point in planned]
    axes.plot([point["value"] for point in planned], costs, "o-", color=MEASURED)
    for point, cost in zip(planned, costs, strict=True):
        axes.annotate(
            three_digits(cost),
            (point["value"], cost),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    axes.set_ylabel("price of a million tokens" if priced else "GPU-seconds for a million tokens")
    axes.set_ylim(0, 1.25 * max(costs))


def _mark(axes: "Axes", document: Mapping[str, Any], planned: Sequence[Mapping[str, Any]], key: str) -> None:
    """Names the sizes that are answers, those of one size together."""
    answers = document["answers"]
    names: dict[int, list[str]] = {}
    for name in ("fastest", "cheapest", "knee"):
        if answers[name] is not None:
            names.setdefault(answers[name]["value"], []).append(name)
    for point in planned:
        if point["value"] in names:
            text = ", ".join(names[point["value"]])
            axes.annotate(
                text, (point["value"], point[key]), xytext=(6, -16), textcoords="offset points", fontsize=10.5
            )


def _finish(axes: "Axes", axis: str, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = values if len(values) <= 10 else values[:: -(-len(values) // 10)]
    axes.set_xticks(shown, [f"{value:,}" for value in shown], rotation=45 if max(values) >= 10_000 else 0)
    axes.minorticks_off()
    axes.margins(x=0.07)
    axes.set_xlabel(_LABELS[axis])
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
