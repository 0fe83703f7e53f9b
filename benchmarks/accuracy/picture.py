"""Predicted over measured step times, by source."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def picture(pairs: Sequence[tuple[str, float, float]], path: Path) -> None:
    """(source, measured, predicted) seconds as a picture: the ratio, for a line of slope one hides 20%."""
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for source in sorted({source for source, _, _ in pairs}):
        mine = [(measured, predicted / measured) for one, measured, predicted in pairs if one == source]
        axes.scatter([x for x, _ in mine], [y for _, y in mine], s=12, alpha=0.7, label=f"{source} ({len(mine)})")
    for level, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
        axes.axhline(level, color="grey", linewidth=0.8, linestyle=style)
    axes.set_xscale("log")
    axes.set_xlabel("measured step time, s")
    axes.set_ylabel("predicted / measured")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": ""})
    pyplot.close(figure)
