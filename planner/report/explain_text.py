"""Explanations as people read them: why not another layout, two plans side by side, the certificate cell by cell."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cost_models.records import Verdict, parse_layout
from planner.report.check_text import value_lines
from planner.report.elsewhere_text import elsewhere_lines
from planner.report.plan_text import FITS, PARTS, gap_words
from planner.report.words import columns, duration, memory_gib, row, short_layout
from planner.search.best_first import DELTA
from planner.search.ties import TIE

_ANSWERS = {
    "illegal": "it breaks a law",
    "does not fit": "no plan of it fits into memory",
    "slower": "its best plan is slower than the choice",
    "faster": "its best plan is faster than the choice, whose search was not to find it",
    "tie": "its best plan and the choice are closer than the model's error between two layouts: take either",
    "chosen": "the choice is of this kind",
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
    for change in document.get("changes") or ():
        if change["words"] not in (document.get("smallest_change") or ""):
            lines.append(row("or", f"{change['words']}: {duration(change['step_s'])} a step, {change['layout']}"))
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
    ranks = memory.get("ranks")
    of_ranks = f" (ranks {ranks[0]}..{ranks[-1]})" if ranks else ""
    place = [f"stage {memory['device']}{of_ranks}"] if memory.get("device") is not None else []
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
    if abs(change) <= 1e-9 * max(abs(before), abs(after)):  # the same sum, in another order
        return "="
    return f"{'+' if change >= 0 else '-'}{duration(abs(change))}"


def against_text(document: Mapping[str, Any]) -> str:
    """Two plans side by side: their layouts, what differs with its unit and by how much, then what is the same."""
    rows = {line["name"]: (line.get("this"), line.get("other")) for line in document["rows"]}
    lines = []
    if "layout" in rows:
        lines = [
            row(name, _short(layout)) for name, layout in zip(("this plan", "the other"), rows["layout"], strict=True)
        ]
    if all(this == other for this, other in rows.values()):
        return "\n".join([*lines, "the plans do not differ"])
    table, same = [["", "this plan", "the other", "difference"]], []
    for name, (words, shape) in _AGAINST.items():
        this, other = rows.get(name, (None, None))
        if this == other and not isinstance(this, float):
            same += [f"{words} {shape(this)}"] if this is not None else []
        else:
            sides = ["-" if value is None else shape(value) for value in (this, other)]
            table.append([words, *sides, "=" if sides[0] == sides[1] else _change(shape, this, other)])
    lines += ["", *columns(table, right=(1, 2, 3)), "", row("the same", ", ".join(same) or "nothing")]
    return "\n".join([*lines, *elsewhere_lines(document.get("elsewhere"))])


def _short(cell: str) -> str:
    """A cell's layout in short, its rank order where that is not the usual one, and the pools of its stages where there are several."""
    layout, on, pools = cell.partition(" on ")
    layout, ordered, axes = layout.partition(" order ")
    return f"{short_layout(parse_layout(layout))}{ordered}{axes}{on}{pools}"


def _change(shape: Callable[[Any], str], this: Any, other: Any) -> str:
    """How much larger the other is: a share of what is a rate or a total, seconds of a part."""
    if None in (this, other) or not isinstance(this, float) or shape is _share:
        return ""
    return difference(this, other) if shape is _part else f"{other / this - 1:+.1%}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _part(value: float) -> str:
    return duration(value)


def _blocks(stages: Sequence[Sequence[int]]) -> str:
    """`35 blocks`, or for a pipeline the blocks of its stages in order, equal neighbours counted."""
    return _runs([str(last - first + 1) for first, last in stages]) + " blocks"


def _recompute(stages: Sequence[Mapping[str, int]]) -> str:
    counts: dict[str, int] = {}
    for stage in stages:
        for kind, count in stage.items():
            counts[kind] = counts.get(kind, 0) + count
    return " + ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


def _runs(words: Sequence[str]) -> str:
    runs = [(word, len(list(group))) for word, group in itertools.groupby(words)]
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in runs)


def _named(identity: str) -> str:
    """A calibration by its name and the start of its hash."""
    name, _, digest = identity.partition(" sha256:")
    return f"{name} {digest[:8]}".strip()


_AGAINST: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "step_s": ("step", duration),
    "step_s_low": ("step, lower end (80%)", duration),
    "step_s_high": ("step, upper end (80%)", duration),
    **{field: (words, _part) for words, field in PARTS.items()},
    "tokens_per_s_per_gpu": ("tokens/s/GPU", _whole),
    "mfu": ("MFU", _share),
    "memory_gib_max": ("memory", memory_gib),
    "memory_gib_high": ("memory, upper end (80%)", memory_gib),
    "micro-batches": ("micro-batches", _whole),
    "stages": ("stages", _blocks),
    "recompute": ("layers recomputed", _recompute),
    "model": ("model", str),
    "cluster": ("cluster", str),
    "batch": ("batch", _whole),
    "seq": ("sequence", _whole),
    "precision": ("precision", str),
    "optimizer": ("optimizer", str),
    "runtime": ("runtime", str),
    "calibration": ("calibration", _named),
}
"""Row of the document -> its words, and how its values are written."""


_WORDS_OF_THE_PROOF = (
    "J is the objective: the closed formula for the seconds of a step, by which plans are ranked and which is proved",
    "J* is the least J of any plan of the space",
    f"δ is {DELTA:.0%}: the best plans of the cells with J up to J*·(1+δ) are simulated, and the choice is the simplest of those within {TIE:.0%} of the fastest",
    "R bounds a simulated time from below: a device's work and what passes before it and behind it, without hops and without waits in between; the fewer micro-batches a stage has, the more of the gap is waits",
    "a cell is a layout whose stages and recompute are open; ≥ is a bound below all its plans",
)


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
            f"{len(cells):,}, {sum(bool(one.get('opened')) for one in cells):,} of them looked into; the others are closed by their bounds",
        ),
        row(
            "min R",
            f"{seconds(document.get('least_bound_s'))}, set by {_short(document.get('least_bound_cell') or '')}",
        ),
    ]
    faults = document.get("faults")
    if faults is not None:
        lines.append(
            row(
                "again",
                "all of it was derived once more from the request, and holds" if not faults else "it does not hold:",
            )
        )
        lines += [row("", fault) for fault in faults]
    if cells:
        lines += [row("words" if i == 0 else "", text) for i, text in enumerate(_WORDS_OF_THE_PROOF)]
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
        rows.append([*map(seconds, numbers), _short(cell["cell"]), cell.get("reason") or ""])
    return columns(rows, right=(0, 1, 2))
