"""`meshwright help support`: runtime x device x feature, made from the records."""

from collections import Counter
from typing import Any

from cost_models.calibrations import shipped
from cost_models.records import Runtime, to_json
from planner.readers.runtimes import read_runtime, runtime_names
from planner.report.words import columns, paragraph, row
from planner.support import ABSENT, BASES, UNTESTED, Support, clusters, support

SHORT = {"measured": "meas", "calibrated": "calib", "table": "table", UNTESTED: "untest", ABSENT: "-"}
"""What a cell rests on -> as the table writes it."""
_MEANINGS = {
    "measured": "this very operation was timed",
    "calibrated": "most of its seconds rest on coefficients that were fitted on runs",
    UNTESTED: "neither, and the runtime's record says that nobody has checked it there",
    "table": "neither, but the record was checked: data sheets, publications, priors",
    ABSENT: "the runtime or the device does not have it, or nothing prices it",
}


def support_lines(name: str | None) -> list[str]:
    """One runtime in full; without one, how many features of each rest on what. InputError for an unknown runtime."""
    legend = [row(SHORT[one], meaning) for one, meaning in _MEANINGS.items()]
    if name is not None:
        return [*_table(read_runtime(name, typed=True)), "", *legend]
    lines = [["runtime", *(f"{one}" for one in (*BASES, UNTESTED)), "products known on"]]
    for known in runtime_names():
        cells = support(read_runtime(known), shipped())
        counts = Counter(cell.rests_on for cell in cells)
        devices = [family for family in clusters() if any(_is_known_dense(cell, family) for cell in cells)]
        numbers = [str(counts[one]) for one in (*BASES, UNTESTED)]
        lines.append([known, *numbers, ", ".join(devices) or "nothing"])
    return [
        paragraph(
            "Features x families of devices, counted by what their price rests on; `meshwright help support RUNTIME` has them one by one."
        ),
        "",
        *columns(lines, right=range(1, 5)),
        "",
        *(row(one, meaning) for one, meaning in _MEANINGS.items() if one != ABSENT),
    ]


def _is_known_dense(cell: Support, family: str) -> bool:
    """Products in some precision: a coefficient that all families share says nothing of one."""
    return cell.device == family and cell.feature.startswith("dense") and cell.rests_on in ("measured", "calibrated")


def _table(runtime: Runtime) -> list[str]:
    families = list(clusters())
    found: dict[str, dict[str, str]] = {}
    for cell in support(runtime, shipped()):
        found.setdefault(cell.feature, {})[cell.device] = SHORT[cell.rests_on]
    had = {feature: cells for feature, cells in found.items() if set(cells.values()) != {SHORT[ABSENT]}}
    lines = [
        [runtime.name, *families],
        *([feature, *(cells[one] for one in families)] for feature, cells in had.items()),
    ]
    without = [feature for feature in found if feature not in had]
    told = columns(lines)
    if without:
        told += ["", row("has not", ", ".join(without))]
    if runtime.untested:
        told.append(row("untested", "; ".join(runtime.untested)))
    return told


def support_document(name: str | None) -> list[dict[str, Any]]:
    """Every cell, of one runtime or of all."""
    names = [read_runtime(name, typed=True).name] if name is not None else list(runtime_names())
    cells: list[dict[str, Any]] = []
    for known in names:
        cells += [to_json(cell) for cell in support(read_runtime(known), shipped())]
    return cells
