"""Memory of published runs: errors by kind, runs that did not fit, and the questions that a person asks of a device's capacity."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.accuracy.fit_memory import unseen_factors
from benchmarks.accuracy.published import Published, Table
from benchmarks.accuracy.scores import errors
from cost_models.memory import memory_upper, usable_bytes
from cost_models.peaks import memory_report
from cost_models.records import Verdict
from cost_models.units import GIB
from planner.predict import verdict_of
from planner.readers.runs import decision_of_run

SPECIAL = {
    r"fine_grained_offloading": "activations are offloaded to the host",
    r"cudagraph": "memory of captured graphs",
    r"cross_entropy_loss_fusion": "the fused loss holds 4 more bytes per logit",
    r"defer_embedding_wgrad": "the head's input is held until its weight gradient",
    r"tunable_overlap": "one more micro-batch in flight",
    r"multi_dist_optimizer_instances": "several instances of the distributed optimizer",
    r"fsdp|z3": "Megatron-FSDP",
    r"muon": "another optimizer",
    r"op_fuser": "fused operations",
    r"uninstall_te": "a container without the fused kernels",
    r"uneven_pipeline": "an uneven split of the layers that no column tells",
}
"""Pattern in a test's name -> what no column of the row says."""
FELL_BACK = ("r2811", "r2823", "r3121")
"""flash_attn=auto chose another kernel in the LTS container: the same tests take 18 to 30% less in the newer one."""

TIGHT, WIDE = 0.03, 0.25
"""Capacity is asked at the measured value less and more this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A row with its predicted bytes."""

    row: Published
    own_gib: float
    """Of the row's kind and rank."""
    own_high_gib: float
    """Upper end of its 80% interval."""
    verdict: Verdict
    """Of the fullest rank."""

    @property
    def log(self) -> float:
        """log(predicted / measured)."""
        return math.log(self.own_gib / (self.row.memory_gib or math.nan))


def held(row: Published) -> Held:
    """As `predict --runs` does it."""
    problem = row.run.problem
    peaks = [device.peak_bytes for device in memory_report(problem, decision_of_run(row.run))]
    own, fullest = peaks[-1] if row.run.last_rank else max(peaks), max(peaks)
    return Held(
        row=row,
        own_gib=own / GIB,
        own_high_gib=memory_upper(problem, own) / GIB,
        verdict=verdict_of(fullest, memory_upper(problem, fullest), usable_bytes(problem)),
    )


def special(row: Published) -> str | None:
    """What a column does not tell of a row of Megatron's tests; None for an ordinary one."""
    test = re.search(r"test (\S+?);", row.row["note"])
    name = f"{test[1] if test else ''} {row.row['source_ref']}".lower()
    if row.row["fsdp"] == "yes":
        return SPECIAL[r"fsdp|z3"]
    if row.id in FELL_BACK:
        return "flash_attn=auto fell back to another kernel"
    return next((why for pattern, why in SPECIAL.items() if re.search(rf"(?<![a-z])(?:{pattern})", name)), None)


def group_of(row: Published) -> str:
    """Which line of the table a row counts in."""
    if row.source.startswith("bigscience"):
        return "bigscience, nvidia-smi of the fullest node"
    kind = "MoE" if row.row["experts"] else "dense"
    told = special(row)
    return f"Megatron CI {kind}, allocated on the last rank" + (" (special rows)" if told else "")


def memory_scores(table: Table) -> dict[str, Any]:
    """Everything about memory."""
    found = [held(row) for row in table.rows]
    measured = unseen([one for one in found if one.row.memory_gib and one.row.outcome == "ok"])
    groups: dict[str, list[Held]] = {}
    for one in measured:
        groups.setdefault(group_of(one.row), []).append(one)
    return {
        "errors": {name: errors(one.log for one in rows) for name, rows in sorted(groups.items())},
        "capacity": {name: capacity(rows) for name, rows in sorted(groups.items())},
        "capacity_all_but_special": capacity([one for one in measured if "special" not in group_of(one.row)]),
        "out_of_memory": out_of_memory(found),
        "special": {
            one.row.id: f"{special(one.row)} ({math.expm1(one.log):+.0%})" for one in measured if special(one.row)
        },
        "worst": [
            {
                "id": one.row.id,
                "group": group_of(one.row),
                "measured_gib": one.row.memory_gib,
                "error": round(math.expm1(one.log), 3),
            }
            for one in sorted(measured, key=lambda one: -abs(one.log))
            if "special" not in group_of(one.row)
        ][:10],
        "rows_predicted": {
            one.row.id: {"gib": round(one.own_gib, 4), "error": round(math.expm1(one.log), 4)} for one in measured
        },
    }


def refused_though_ran(table: Table) -> dict[str, list[str]]:
    """Source -> rows of step times, all of which ran, that the prediction says do not fit."""
    found: dict[str, list[str]] = {source: [] for source in sorted(table.sources)}
    for row in table.rows:
        if held(row).verdict is Verdict.NO:
            found[row.source].append(row.id)
    return found


def unseen(rows: Sequence[Held]) -> list[Held]:
    """The same predictions, with what was fitted on these rows fitted without the row's own test or size."""
    factors = unseen_factors([one.row for one in rows], special)
    return [
        replace(
            one,
            own_gib=one.own_gib * factors.get(one.row.id, 1.0),
            own_high_gib=one.own_high_gib * factors.get(one.row.id, 1.0),
        )
        for one in rows
    ]


def capacity(rows: Sequence[Held]) -> dict[str, Any]:
    """Would it fit in the measured value less and more 3 and 25%? Shares of false answers, and of answers that stay open."""
    scored: dict[str, Any] = {"n": len(rows)}
    for name, part in (("3%", TIGHT), ("25%", WIDE)):
        false_ok = false_no = risky = 0
        for one in rows:
            for sign in (-1, 1):
                limit = (one.row.memory_gib or 0.0) * (1 + sign * part)
                verdict = verdict_of(one.own_gib, one.own_high_gib, limit)
                false_ok += verdict is Verdict.OK and sign < 0
                false_no += verdict is Verdict.NO and sign > 0
                risky += verdict is Verdict.RISKY
        asked = len(rows)
        scored[name] = {
            "false_ok": round(false_ok / asked, 4) if asked else None,
            "false_no": round(false_no / asked, 4) if asked else None,
            "risky": round(risky / (2 * asked), 4) if asked else None,
        }
    return scored


def out_of_memory(found: Sequence[Held]) -> dict[str, Any]:
    """Runs that ended out of memory, and those that ran, by verdict."""
    failed = {one.row.id: one.verdict.value for one in found if one.row.outcome == "oom"}
    ran = [one for one in found if one.row.outcome == "ok"]
    return {
        "failed": failed,
        "failed_and_refused_or_risky": sum(verdict != "ok" for verdict in failed.values()),
        "ran": len(ran),
        "ran_but_refused": [one.row.id for one in ran if one.verdict is Verdict.NO],
        "ran_and_risky": sum(one.verdict is Verdict.RISKY for one in ran),
    }
