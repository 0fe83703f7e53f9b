"""Plain-text tables of what was measured and of how it compares with what was promised."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def shown(line: Sequence[str]) -> str:
        cells = [
            entry.ljust(width) if column == 0 else entry.rjust(width)
            for column, (entry, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([shown(lines[0]), "  ".join("-" * width for width in widths), *map(shown, lines[1:])])


def seconds(value: float) -> str:
    """Three figures, in the unit that suits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1 or unit == "ms":
            return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:.0f} {unit}"
    raise AssertionError("unreachable: the last unit takes every value")


def percent(value: float | None) -> str:
    """A signed share; a dash where there is none."""
    return "-" if value is None else f"{value:+.0%}"


def comparison_table(document: Mapping[str, Any]) -> str:
    """What `planner.compare.compare` found, for people."""
    lines = [f"{document['layout']}", f"on {document['machine']}", ""]
    rows = []
    for row in document["rows"]:
        interval = ""
        if "predicted_low_s" in row:
            interval = f"{seconds(row['predicted_low_s'])} .. {seconds(row['predicted_high_s'])}"
        spread = f"{seconds(row['measured_low_s'])} .. {seconds(row['measured_high_s'])}"
        inside = {True: "yes", False: "no"}.get(row.get("inside"), "")
        rows.append(
            (
                row["phase"],
                seconds(row["predicted_s"]),
                interval,
                seconds(row["measured_s"]),
                spread,
                percent(row["error"]),
                inside,
            )
        )
    lines.append(table(("phase", "predicted", "80% interval", "measured", "middle 80%", "error", "inside"), rows))
    lines += _where(document)
    if document["memory"]:
        memory = [
            (
                f"memory of {row['ranks']} ({row['kind']})",
                f"{row['predicted_gib']:.3f} GiB",
                f"{row['measured_gib']:.3f} GiB",
                percent(row["error"]),
                {True: "yes", False: "no"}.get(row.get("inside"), ""),
            )
            for row in document["memory"]
        ]
        lines += ["", table(("", "predicted", "measured", "error", "inside"), memory)]
    by_phase = document.get("memory_by_phase", ())
    if by_phase:
        peaks = [
            (f"{row['ranks']}, {row['phase']} ({row['kind']})", _mib(row["predicted_gib"]), _mib(row["measured_gib"]))
            for row in by_phase
        ]
        lines += ["", table(("memory by phase", "predicted", "measured"), peaks)]
    if document["not_compared"]:
        lines += ["", "not compared:", *(f"  {reason}" for reason in document["not_compared"])]
    return "\n".join(lines)


def _where(document: Mapping[str, Any]) -> list[str]:
    """Throughput, and which part of the promise is off, where the run said its parts."""
    lines = []
    if "tokens_per_s_per_gpu" in document:
        tokens, mfu = document["tokens_per_s_per_gpu"], document["mfu"]
        lines = [
            "",
            f"throughput: {tokens['measured']:,.0f} tokens/s a rank, promised {tokens['predicted']:,.0f}; "
            f"MFU {mfu['measured']:.1%}, promised {mfu['predicted']:.1%}",
        ]
    where = document.get("where")
    if where is None:
        return lines
    parts = [
        (row["part"], seconds(row["predicted_s"]), seconds(row["measured_s"]), _signed(row["difference_s"]))
        for row in where["parts"]
    ]
    lines += ["", table((f"part of a step, {where['stage']}", "predicted", "measured", "difference"), parts)]
    if where["collectives"]:
        waits = [
            (
                f"{row['operation']} over {row['axis']}",
                "-" if row["calls"] is None else str(row["calls"]),
                "-" if row["alone_s"] is None else seconds(row["alone_s"]),
                seconds(row["measured_s"]),
            )
            for row in where["collectives"]
        ]
        lines += ["", table(("collective", "calls", "promised alone", "stood still"), waits)]
    return [*lines, f"largest difference: {where['largest']}"]


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def layouts_table(document: Mapping[str, Any]) -> str:
    """One row a layout, the fastest promised first, then whether the order held; of `executor.cli.demo`'s worlds."""
    rows = []
    for row in document["layouts"]:
        rows.append(
            (
                ("* " if row["chosen"] else "  ") + row["layout"],
                seconds(row["predicted_s"]),
                f"{seconds(row['predicted_low_s'])} .. {seconds(row['predicted_high_s'])}",
                seconds(row["measured_s"]),
                f"{seconds(row['measured_low_s'])} .. {seconds(row['measured_high_s'])}",
                percent(row["error"]),
                _mib(row["predicted_memory_gib"]),
                _mib(row["measured_memory_gib"]),
            )
        )
    header = (
        "layout (* = chosen)",
        "predicted",
        "80% interval",
        "measured",
        "middle 80%",
        "error",
        "memory",
        "measured",
    )
    return "\n".join([table(header, rows), order_text(document["order"])])


def _mib(gib: float | None) -> str:
    return "-" if gib is None else f"{gib * 1024:.0f} MiB"


def order_text(order: Mapping[str, Any]) -> str:
    """Whether the promised order is the measured one, ties called so."""
    num_pairs = len(order["agrees"]) + len(order["disagrees"])
    if not num_pairs:
        lines = ["order: no order was promised, all pairs are ties within the model's pairwise error"]
    elif not order["disagrees"]:
        lines = [f"order: the promised order is the measured one in all {num_pairs} pairs that are no ties"]
    else:
        lines = [f"order: {len(order['agrees'])} of {num_pairs} pairs came as promised; not so:"]
        lines += [f"  {faster}  was promised to be faster than  {slower}" for faster, slower in order["disagrees"]]
    if order["ties"]:
        lines.append("ties, within the model's pairwise error:")
        lines += [f"  {a}  and  {b}" for a, b in order["ties"]]
    return "\n".join(lines)


def measurements_table(measurements: Sequence[Mapping[str, Any]]) -> str:
    """Key, median, middle 80% and number of samples of each measurement (as JSON data)."""
    from planner.compare import spread_of

    rows = []
    for one in measurements:
        low, middle, high = spread_of(one["samples_s"])
        rows.append((one["key"], seconds(middle), f"{seconds(low)} .. {seconds(high)}", str(len(one["samples_s"]))))
    return table(("key", "median", "middle 80%", "samples"), rows)
