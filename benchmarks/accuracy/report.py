"""The result of the accuracy benchmark as a table, its goals beside it, and what moved since another result."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.accuracy.anchoring import anchoring_text

MOVED = 0.01
"""Change of a prediction that is told."""


def report_text(result: Mapping[str, Any]) -> str:
    """The whole report."""
    step, memory = result["step_time"], result["memory"]
    lines = [
        f"accuracy on published runs, {result['date']}, {result['seconds']:.0f} s on {result['machine']}",
        f"calibration {result['calibration']['identity'][:60]}, {result['calibration']['fitted_coefficients']} fitted coefficients "
        f"on {step['configurations']} configurations",
        "",
        *_goals(result),
        "",
        "step time: median / p90 of the absolute error (bias), %",
        *_step_table(step),
        *_few_lines(step),
        "",
        anchoring_text(step["anchoring"]),
        "",
        *_order_table(step),
        "",
        "80% intervals: share of rows inside / median full width, %",
        *_interval_table(step),
        *(
            f"  {name.replace('_', ' ')} asks for half-widths of {one['calibrated']:.1%} (calibrated) and {one['table']:.1%} (table)"
            for name, one in step["asked_widths"].items()
        ),
        "",
        "memory: median / p90 of the absolute error (bias), %, each row unseen",
        *_memory_table(memory),
        "",
        "worst step times",
        *(
            f"  {','.join(one['ids'])[:24]:24} {one['error']:+7.1%}  {one['source'][:22]:22} {one['model'][:18]:18} {one['cause']}"
            for one in step["worst"]
        ),
        "worst memory",
        *(
            f"  {one['id']:24} {one['error']:+7.1%}  {one['group']}, {one['measured_gib']} GiB"
            for one in memory["worst"]
        ),
        "",
        *_left_out("step time", step["rows"]),
        *_left_out("memory", memory["rows"]),
        "memory rows printed apart: what no column says",
        *(f"  {one}: {why}" for one, why in memory["special"].items()),
    ]
    moves = result["calibration"]["refit_moves"]
    if moves:
        lines += [
            "",
            "a refit today would move: " + ", ".join(f"{name} {change:+.0%}" for name, change in moves.items()),
        ]
    return "\n".join(lines)


def _cell(scores: Mapping[str, Any] | None) -> str:
    if not scores:
        return f"{'-':>18}"
    return f"{100 * scores['median']:5.1f} /{100 * scores['p90']:5.1f} ({100 * scores['bias']:+4.0f})"


def _step_table(step: Mapping[str, Any]) -> Iterator[str]:
    few = step["after_few_rows"]
    columns = {
        "in-sample": step["in_sample"],
        "model left out": step["leave_one_model_out"],
        "source left out": step["leave_one_source_out"],
        **{f"then {count} rows": few[count] for count in few},
        "constant rate": step["baseline"],
    }
    yield f"  {'source':34} {'rows':>9}  " + "  ".join(f"{name:>18}" for name in columns)
    for source in step["in_sample"]:
        answered = step["rows"]["answered"].get(source, sum(step["rows"]["answered"].values()))
        of = step["rows"]["of"].get(source, sum(step["rows"]["of"].values()))
        cells = "  ".join(f"{_cell(column.get(source)):>18}" for column in columns.values())
        yield f"  {source[:34]:34} {answered:4d}/{of:4d}  {cells}"


def _few_lines(step: Mapping[str, Any]) -> Iterator[str]:
    for count, found in step["after_few_rows"].items():
        told = ", ".join(
            f"{source[:22]} {one['worse']:.0%} (at most {100 * one['most_rise']:.1f})"
            for source, one in found.items()
            if source != "macro"
        )
        mean = f"{found['macro']['worse']:.1%}" if found["macro"] else "-"
        yield f"  choices of {count} rows after which the others' median error is more than 0.1 points worse: {mean}; {told or 'none'}"


def _order_table(step: Mapping[str, Any]) -> Iterator[str]:
    yield f"order within sweeps{'':17} {'sweeps':>6} {'plans':>5}  {'tau':>5}  {'pairs >5% right':>15}  {'regret first':>12}  {'of least':>8}  {'of three':>8}"
    for name, scores in step["order"].items():
        for source, one in scores.items():
            right = "-" if one["pairs_right"] is None else f"{one['pairs_right']:.0%}"
            yield (
                f"  {source[:22]:22} {name[:11]:11} {one['sweeps']:6d} {one['plans']:5d}  {one['tau']:5.2f}  {right:>15}  "
                f"{one['regret_first']:12.1%}  {one['regret_least']:8.1%}  {one['regret_best_of_three']:8.1%}"
            )


def _interval_table(step: Mapping[str, Any]) -> Iterator[str]:
    intervals = step["intervals"]
    yield f"  {'source':34} " + "  ".join(f"{name.replace('_', ' '):>21}" for name in intervals)
    for source in intervals["in_sample"]:
        cells = (f"{100 * one[source]['covered']:.0f} / {100 * one[source]['width']:.0f}" for one in intervals.values())
        yield f"  {source[:34]:34} " + "  ".join(f"{cell:>21}" for cell in cells)


def _memory_table(memory: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {'':62} {'rows':>4} {'error':>19}   capacity -/+3%: false ok, false no, risky; -/+25%: the same"
    for group, scores in memory["errors"].items():
        yield f"  {group[:62]:62} {scores['n']:4d} {_cell(scores):>19}   {_capacity(memory['capacity'][group])}"
    yield f"  {'all but the special rows':62} {'':4} {'':19}   {_capacity(memory['capacity_all_but_special'])}"
    found = memory["out_of_memory"]
    verdicts = ", ".join(f"{one} {verdict}" for one, verdict in found["failed"].items())
    yield (
        f"  out of memory: {found['failed_and_refused_or_risky']} of {len(found['failed'])} refused or risky ({verdicts}); "
        f"of {found['ran']} that ran {len(found['ran_but_refused'])} refused {found['ran_but_refused'] or ''}, {found['ran_and_risky']} risky"
    )
    refused = {source: len(ids) for source, ids in memory["timed_but_refused"].items() if ids}
    told = ", ".join(f"{source} {count}" for source, count in refused.items()) or "none"
    yield f"  runs with a step time, all of which ran, but refused: {told}"


def _capacity(one: Mapping[str, Any]) -> str:
    return "; ".join(
        ", ".join(f"{100 * one[part][name]:.1f}" for name in ("false_ok", "false_no", "risky"))
        for part in ("3%", "25%")
    )


def _goals(result: Mapping[str, Any]) -> Iterator[str]:
    step, memory = result["step_time"], result["memory"]
    order, intervals = step["order"]["in_sample"], step["intervals"]["leave_one_source_out"]["macro"]

    def pair(scores: Mapping[str, Any] | None) -> str:
        return "-" if not scores else f"{100 * scores['median']:.1f} / {100 * scores['p90']:.1f}%"

    def of(prefix: str) -> Mapping[str, Any]:
        return next(
            (one for name, one in order.items() if name.startswith(prefix)), {"pairs_right": math.nan, "tau": math.nan}
        )

    ci, oom, all_rows = memory["errors"], memory["out_of_memory"], memory["capacity_all_but_special"]
    few = step["after_few_rows"]
    yield f"{'on (macro over sources)':58} {'goal':>32}   reached"
    for name, goal, reached in (
        ("step time, all rows but the named ones", "3.5 / 10%", pair(step["in_sample"]["macro"])),
        ("one model left out", "4.5 / 12%", pair(step["leave_one_model_out"]["macro"])),
        ("one source left out, nothing of it measured", "8 / 18%", pair(step["leave_one_source_out"]["macro"])),
        ("the same after 5, 10 of its rows", "5 / 14%", ", ".join(pair(few[count].get("macro")) for count in few)),
        (
            "few GPUs to many: the same model, others of the source",
            "4 / 10%",
            ", ".join(pair(step["anchoring"][way]["macro"]["anchored"]) for way in ("own", "others")),
        ),
        (
            "pairs > 5% apart in order, bigscience / vTrain",
            "80 / 88%",
            f"{100 * of('bigscience')['pairs_right']:.0f} / {100 * of('vTrain')['pairs_right']:.0f}%",
        ),
        (
            "Kendall tau, bigscience / vTrain",
            "0.53 / 0.68",
            f"{of('bigscience')['tau']:.2f} / {of('vTrain')['tau']:.2f}",
        ),
        (
            "regret of the first pick, of the best of three",
            "2 / 1%",
            f"{100 * order['all']['regret_first']:.1f} / {100 * order['all']['regret_best_of_three']:.1f}%",
        ),
        (
            "80% intervals on left-out sources: covered, full width",
            "75..90%, <= 38%",
            f"{100 * intervals['covered']:.0f}%, {100 * intervals['width']:.0f}%",
        ),
        (
            "memory, allocated, dense, unseen test",
            "1 / 6%",
            pair(ci.get("Megatron CI dense, allocated on the last rank")),
        ),
        ("memory, allocated, MoE, unseen test", "3 / 12%", pair(ci.get("Megatron CI MoE, allocated on the last rank"))),
        ("memory, nvidia-smi, unseen size", "4 / 14%", pair(ci.get("bigscience, nvidia-smi of the fullest node"))),
        (
            "out of memory refused or risky; ran but refused",
            "5 of 6; 0",
            f"{oom['failed_and_refused_or_risky']} of {len(oom['failed'])}; {len(oom['ran_but_refused'])}",
        ),
        ("capacity at -/+3%: false ok", "2%", f"{100 * all_rows['3%']['false_ok']:.1f}%"),
        (
            "capacity at -/+25%: false ok, false no, risky",
            "0.5%, 2%, 20%",
            f"{100 * all_rows['25%']['false_ok']:.1f}%, {100 * all_rows['25%']['false_no']:.1f}%, {100 * all_rows['25%']['risky']:.1f}%",
        ),
    ):
        yield f"{name:58} {goal:>32}   {reached}"


def _left_out(what: str, rows: Mapping[str, Any]) -> Iterator[str]:
    yield f"{what}: {sum(rows['answered'].values())} of {sum(rows['of'].values())} rows answered and counted"
    for title, found in (
        ("kept apart", rows["kept_apart"]),
        ("not priced", rows["not_priced"]),
        ("corrected", rows["corrected"]),
    ):
        by_reason: dict[str, list[str]] = {}
        for one, why in found.items():
            by_reason.setdefault(why, []).append(one)
        for why, ids in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            yield f"  {title} ({len(ids)}): {' '.join(ids)}: {why}"


def against_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Rows whose prediction moved by more than a percent, and the scores side by side."""
    lines = [f"against the result of {before['date']} ({before['calibration']['identity'][:40]})"]
    for name in ("in_sample", "leave_one_model_out", "leave_one_source_out"):
        was, now = before["step_time"][name]["macro"], after["step_time"][name]["macro"]
        lines.append(f"  {name.replace('_', ' '):24} {_cell(was)} -> {_cell(now)}")
    old, new = before["step_time"]["predictions"], after["step_time"]["predictions"]
    changes = [
        (math.log(new[one]["step_s"] / old[one]["step_s"]), one, old[one], new[one])
        for one in sorted(set(old) & set(new))
    ]
    moved = sorted(
        (change for change in changes if abs(change[0]) > MOVED), key=lambda change: (-abs(change[0]), change[1])
    )
    lines.append(f"  {len(moved)} of {len(changes)} step times moved by more than {MOVED:.0%}")
    for change, one, was, now in moved[:30]:
        errors = f"{was['step_s'] / was['measured_s'] - 1:+.1%} -> {now['step_s'] / now['measured_s'] - 1:+.1%}"
        lines.append(f"    {one} {math.expm1(change):+.1%}: error {errors}")
    gone, come = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    if gone:
        lines.append(f"  no longer answered: {' '.join(gone)}")
    if come:
        lines.append(f"  answered now: {' '.join(come)}")
    old_rows, new_rows = before["memory"]["rows_predicted"], after["memory"]["rows_predicted"]
    shifted = [
        one
        for one in sorted(set(old_rows) & set(new_rows))
        if abs(new_rows[one]["gib"] / old_rows[one]["gib"] - 1) > MOVED
    ]
    lines.append(f"  {len(shifted)} memory figures moved by more than {MOVED:.0%}: {' '.join(shifted[:40])}")
    return "\n".join(lines)
