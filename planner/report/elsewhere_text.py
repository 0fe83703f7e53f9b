"""In words: what either of two plans would take on the other's cluster, and which links its groups meet there."""

from collections.abc import Mapping
from typing import Any

from planner.report.words import duration, row

_PARTS = {
    "exposed_communication_s": "exposed communication",
    "bubble_s": "bubble",
    "compute_s": "compute",
    "optimizer_s": "optimizer",
}


def elsewhere_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Nothing where the plans are not about one question on two clusters."""
    if document is None:
        return []
    if not document["moved"]:
        return ["", row("moved", "nothing: both clusters get the same layout")]
    moved = ", ".join(f"{name} {this} here, {other} there" for name, (this, other) in document["moved"].items())
    lines = ["", row("moved", moved)]
    for name, which, whose in (("here", "this", "the other's"), ("there", "other", "this")):
        lines.append(row(name, _on(document[which], whose)))
    return lines


def _on(one: Mapping[str, Any], whose: str) -> str:
    more = one["stranger_s"] / one["own_s"] - 1
    unlike = {
        words: one["stranger_parts"][part] - one["own_parts"][part]
        for part, words in _PARTS.items()
        if abs(one["stranger_parts"][part] - one["own_parts"][part]) >= 0.01 * one["own_s"]
    }
    where = ", ".join(
        f"{'+' if change > 0 else '-'}{duration(abs(change))} {words}" for words, change in unlike.items()
    )
    fits = {"no": ", and does not fit", "risky": ", and is risky"}.get(one["stranger_verdict"], "")
    return (
        f"on {one['cluster']} {whose} plan takes {duration(one['stranger_s'])} ({more:+.1%}"
        f"{': ' + where if where else ''}){fits}: {_links(one['stranger_links'])}; its own {duration(one['own_s'])}: "
        f"{_links(one['own_links'])}"
    )


def _links(axes: Mapping[str, Mapping[str, Any]]) -> str:
    told = []
    for axis, at in axes.items():
        inside = f", {at['inside']} in a domain" if 1 < at["inside"] < at["degree"] else ""
        told.append(f"{axis} {at['degree']} over {at['link']}{inside}")
    return ", ".join(told) or "no groups"
