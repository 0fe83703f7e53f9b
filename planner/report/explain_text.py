"""Explanations as people read them: why not another layout, two plans side by side, the certificate cell by cell."""

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.records import Verdict
from planner.report.check_text import shown, value_lines
from planner.report.plan_text import FITS, PARTS, gap_words
from planner.report.words import columns, duration, memory_gib, row

_ANSWERS = {
    "illegal": "it breaks a law",
    "does not fit": "no plan of it fits into memory",
    "slower": "its best plan is slower than the choice",
    "tie": "its best plan and the choice are closer than the model's error between two layouts: take either",
    "chosen": "the choice is of this kind",
    "not in the space": "the search does not look there",
}
"""Answer of `why_not` -> what it means."""
_PART_WORDS = {field.removesuffix("_s"): words for words, field in PARTS.items()}
"""A part's name in the document -> as a plan's text calls it."""


def why_not_text(document: Mapping[str, Any]) -> str:
    """The answer first, then the reasons with their numbers, the best plan of that kind, and the smallest change."""
    answer, best, chosen = document["answer"], document.get("best"), document.get("chosen")
    lines = [
        row("asked", document["layout"]),
        row("answer", f"{answer}: {_ANSWERS.get(answer, answer)}{_gain(best, chosen)}"),
    ]
    for reason in document.get("reasons") or ():
        lines.append(row("because", ": ".join(filter(None, (reason.get("code"), reason["message"])))))
        lines += value_lines(reason.get("values"), reason.get("legal"), reason["message"])
    for name, candidate in (("best", best), ("chosen", chosen)):
        if candidate:
            lines.append(row(name, _candidate(candidate)))
    if document.get("memory"):
        lines.append(row("memory", _memory(document["memory"])))
    if document.get("smallest_change"):
        lines.append(row("change", document["smallest_change"]))
    parts = _part_lines(document.get("parts") or ())
    return "\n".join([*lines, *(["", *parts] if parts else [])])


def _gain(best: Mapping[str, Any] | None, chosen: Mapping[str, Any] | None) -> str:
    if not best or not chosen or best.get("step_s") is None or not chosen.get("step_s"):
        return ""
    if best["step_s"] == chosen["step_s"]:
        return ""
    return f" ({best['step_s'] / chosen['step_s'] - 1:+.1%} step time)"


def _candidate(candidate: Mapping[str, Any]) -> str:
    parts = []
    if candidate.get("step_s") is not None:
        parts.append(duration(candidate["step_s"]))
    if candidate.get("memory_gib_max") is not None:
        parts.append(memory_gib(candidate["memory_gib_max"]))
    if candidate.get("verdict") is not None:
        parts.append(FITS[Verdict(candidate["verdict"])])
    return "  ".join([*parts, candidate["layout"]])


def _memory(memory: Mapping[str, Any]) -> str:
    """Where, when and by how much it does not fit."""
    place = [f"stage {memory['device']}"] if memory.get("device") is not None else []
    place += [memory[key] for key in ("phase", "operation") if memory.get(key)]
    expected, usable, over = (memory.get(f"{key}_gib") for key in ("expected", "usable", "over"))
    numbers = []
    if expected is not None:
        room = f" of {memory_gib(usable)}" if usable is not None else ""
        numbers.append(f"{memory_gib(expected)} expected{room}")
    if over is not None:
        numbers.append(f"{memory_gib(over)} too many" if over > 0 else f"{memory_gib(-over)} left")
    return ": ".join(filter(None, (", ".join(place), ", ".join(numbers))))


def _part_lines(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parts of a step of both plans, and their sums."""
    if not parts:
        return []
    rows = [["where", "chosen", "other", "difference"]]
    pairs = [(part.get("chosen_s"), part.get("other_s")) for part in parts]
    for part, pair in zip(parts, pairs, strict=True):
        rows.append([_PART_WORDS.get(part["name"], part["name"]), *map(seconds, pair), difference(*pair)])
    sums = [None if None in side else sum(side) for side in zip(*pairs, strict=True)]
    rows.append(["sum", *map(seconds, sums), difference(*sums)])
    return columns(rows, right=(1, 2, 3))


def seconds(value: float | None) -> str:
    """Seconds, or a dash where there are none."""
    return "-" if value is None else duration(value)


def difference(before: float | None, after: float | None) -> str:
    """after - before in seconds, with its sign; `=` for none, a dash where one is absent."""
    if before is None or after is None:
        return "-"
    change = after - before
    if not change:
        return "="
    return f"{'+' if change >= 0 else '-'}{duration(abs(change))}"


def against_text(document: Mapping[str, Any]) -> str:
    """Two plans side by side; rows that differ are marked."""
    rows = [["", "", "this plan", "the other"]]
    for line in document["rows"]:
        this, other = shown(line.get("this")), shown(line.get("other"))
        rows.append(["" if this == other else "*", line["name"], this, other])
    different = sum(1 for line in rows[1:] if line[0])
    last = f"{different} of {len(rows) - 1} rows differ (*)" if different else "the plans do not differ"
    return "\n".join([*columns(rows), "", last])


def certificate_text(document: Mapping[str, Any]) -> str:
    """What is proved and what is not, all cells with their bounds, and what was never looked at."""
    cells = document.get("cells") or []
    status = document["status"]
    objective_s, bound_s = document.get("objective_s"), document.get("bound_s")
    simulated = document.get("gap_simulated")
    lines = [
        row(
            "status",
            f"{status}: {gap_words(document.get('gap_objective'))}, by {document.get('solver') or 'no solver'}",
        ),
        row("objective", f"{seconds(objective_s)}; no plan of the space is below {seconds(bound_s)}"),
        row("simulated", _simulated(document.get("simulated_s"), simulated)),
        row(
            "cells",
            f"{len(cells):,}, {document.get('cells_opened') or 0:,} of them opened; the others are closed by their bounds",
        ),
    ]
    restrictions = document.get("restrictions") or []
    if restrictions:
        lines += [row("outside" if i == 0 else "", text) for i, text in enumerate(restrictions)]
    return "\n".join([*lines, *(["", *_cell_lines(cells)] if cells else [])])


def _simulated(simulated_s: float | None, gap: float | None) -> str:
    within = "" if gap is None else f", within {gap:.1%} of any plan of this space as simulated"
    return f"{seconds(simulated_s)}{within}"


def _cell_lines(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """All cells, the least bound first; reasons stand last, for they are long."""
    rows = [["objective ≥", "simulated ≥", "objective", "cell", "reason"]]
    for cell in sorted(cells, key=lambda one: (one.get("bound_s") is None, one.get("bound_s") or 0.0, one["cell"])):
        numbers = (cell.get("bound_s"), cell.get("simulated_bound_s"), cell.get("objective_s"))
        rows.append([*map(seconds, numbers), cell["cell"], cell.get("reason") or ""])
    return columns(rows, right=(0, 1, 2))
