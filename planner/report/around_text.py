"""What stands around a plan, as people read it: what binds it and what relaxing gives; its neighbours with their reasons."""

from collections.abc import Mapping
from typing import Any

from cost_models.records import parse_layout
from planner.report.words import columns, duration, joined, memory_gib, row, short_layout

_PART_WORDS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "constant",
}


def binds_text(document: Mapping[str, Any]) -> str:
    """Time and memory of the plan, which limits bind, and what each change would gain."""
    plan, memory, error = document["plan"], document["memory"], document["pairwise_error"]
    parts = [f"{_PART_WORDS[one['name']]} {one['share']:.0%}" for one in document["parts"] if one["share"] >= 0.005]
    left = memory["left_gib"]
    room = f"{memory_gib(left)} left at worst" if left >= 0 else f"{memory_gib(-left)} too many at worst"
    ranks = memory["ranks"]
    lines = [
        row("plan", f"{duration(plan['step_s'])}  {_short(plan['layout'])}"),
        row("time", ", ".join(parts)),
        row(
            "memory",
            f"{memory_gib(memory['expected_gib'])} (up to {memory_gib(memory['upper_gib'])}) of {memory_gib(memory['usable_gib'])}, "
            f"{room}: stage {memory['device']} (ranks {ranks[0]}..{ranks[1]}), {memory['phase']}, {memory['operation']}",
        ),
        row("binds", _binding(document["binds"], error)),
        "",
    ]
    table = [["if", "gain", "step", "layout then"]]
    for one in document["relaxed"]:
        if one["step_s"] is None:
            table.append([one["change"], "-", "-", one["why"]])
            continue
        gain = f"{one['gain']:+.1%}" + (" (tie)" if one["within_error"] else "")
        then = "the same" if one["layout"] == plan["layout"] else _short(one["layout"])
        table.append([one["change"], gain, duration(one["step_s"]), then])
    return "\n".join([*lines, *columns(table, right=(2,))])


def _binding(limits: list[str], error: float) -> str:
    if not limits:
        return f"no limit below gains more than the model's error between two layouts ({error:.0%})"
    return f"{joined(limits)}: relaxed as below, tokens/s rise by more than the model's error ({error:.0%})"


def neighbours_text(document: Mapping[str, Any]) -> str:
    """One line a neighbour, the best first; then what is not legal."""
    plan = document["plan"]
    lines = [row("plan", f"{duration(plan['step_s'])}  {_short(plan['layout'])}"), ""]
    table = [["one change", "answer", "step", "against", "memory", "reason"]]
    for one in document["neighbours"]:
        pins = f" (against the pin {', '.join(one['breaks_pins'])})" if one["breaks_pins"] else ""
        numbers = (duration(one["step_s"]), f"{one['against']:+.1%}", memory_gib(one["memory_gib_max"]))
        table.append([one["change"], one["answer"], *numbers, one["reason"] + pins])
    lines += columns(table, right=(2, 3, 4))
    lines.append(
        "as people run them: stages alike, one kind of recompute; --why-not LAYOUT searches the best plan of one"
    )
    if document["refused"]:
        lines += [
            "",
            *columns(
                [
                    ["not legal", "because"],
                    *([one["change"], f"{one['code']}: {one['reason']}"] for one in document["refused"]),
                ]
            ),
        ]
    return "\n".join(lines)


def _short(layout: str) -> str:
    return short_layout(parse_layout(layout))
