"""A sweep as people read it: what follows first, then one line a size."""

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.records import Verdict, parse_layout
from planner.report.plan_text import FITS
from planner.report.words import columns, duration, joined, memory_gib, row, short_layout, three_digits

_UNITS = {"gpus": "GPUs", "batch": "sequences a step", "seq": "tokens in a sequence"}
_HEADS = {"gpus": "GPUs", "batch": "batch", "seq": "seq"}


def sweep_text(document: Mapping[str, Any]) -> str:
    """Least, fastest, cheapest and knee in words, with their numbers; then the table of all sizes."""
    by_value = {point["value"]: point for point in document["points"]}
    lines = [*_answer_lines(document, by_value)]
    if not document["complete"]:
        late = [f"{point['value']:,}" for point in document["points"] if point["status"] == "not reached"]
        lines.append(
            row(
                "not done", f"the time limit ended before {joined(late)}; what is said above holds for the others alone"
            )
        )
    open_gaps = [f"{point['value']:,}" for point in document["points"] if point["status"] == "feasible"]
    if open_gaps:
        lines.append(row("not proved", f"{joined(open_gaps)}: the best plan found in time; a faster one may exist"))
    return "\n".join(
        [*lines, "", *columns(_table(document), right=range(6 if document["price_per_gpu_hour"] is None else 7))]
    )


def _answer_lines(document: Mapping[str, Any], by_value: Mapping[int, Mapping[str, Any]]) -> list[str]:
    axis, answers, error = document["axis"], document["answers"], document["pairwise_error"]
    unit = _UNITS[axis]
    lines = []
    if axis == "gpus":
        lines.append(row("fewest", _fewest(document, by_value)))
    else:
        lines.append(row("most", f"{answers['most']:,} {unit} is the most here that has a plan"))
    fastest, cheapest = answers["fastest"], answers["cheapest"]
    lines.append(
        row("fastest", f"{fastest['value']:,} {unit}: {_size(by_value[fastest['value']])}{_ties(fastest, error)}")
    )
    lines.append(
        row("cheapest", f"{cheapest['value']:,} {unit}: {_cost(by_value[cheapest['value']])}{_ties(cheapest, error)}")
    )
    lines.append(row("knee", _knee(document, by_value)))
    for one in answers["fewer_is_faster"]:
        within = f", within the model's error between two layouts ({error:.0%})" if one["within_error"] else ""
        lines.append(row("fewer", f"{one['fewer']:,} GPUs are {one['gain']:.1%} faster than {one['more']:,}{within}"))
    return lines


def _fewest(document: Mapping[str, Any], by_value: Mapping[int, Mapping[str, Any]]) -> str:
    least, between = document["answers"]["least"], document["answers"].get("fewest_between")
    size = _size(by_value[least])
    if between is None:
        return f"{least:,} GPUs, the least of these sizes with a plan: {size}"
    none = max(point["value"] for point in document["points"] if point["value"] < least)
    if between == least:
        return f"{least:,} GPUs: {size}; no number of whole nodes between that and {none:,} has a plan"
    return f"{between:,} GPUs, the least beyond {none:,}, which has no plan; of these sizes {least:,}: {size}"


def _size(point: Mapping[str, Any]) -> str:
    risky = " (fits on expectation only)" if point["verdict"] == Verdict.RISKY else ""
    return f"{duration(point['step_s'])} a step, {point['tokens_per_s']:,.0f} tokens/s{risky}"


def _cost(point: Mapping[str, Any]) -> str:
    money = point["price_per_million_tokens"]
    at_a_price = "" if money is None else f", {three_digits(money)} (in the currency of --price)"
    return f"{three_digits(point['gpu_s_per_million_tokens'])} GPU-seconds for a million tokens{at_a_price}"


def _ties(answer: Mapping[str, Any], error: float) -> str:
    if not answer["ties"]:
        return ""
    return f"; a tie within the model's error ({error:.0%}): {', '.join(f'{value:,}' for value in answer['ties'])}"


def _knee(document: Mapping[str, Any], by_value: Mapping[int, Mapping[str, Any]]) -> str:
    knee, axis = document["answers"]["knee"], document["axis"]
    if knee is None:
        return "none here: up to the last size an added GPU brings at least half of what one brings at the cheapest"
    if axis == "gpus":
        share = knee["share_of_added_gpu"]
        brings = f"{share:.0%} of what one brings" if share > 0 else "nothing compared with what one brings"
        return f"{knee['value']:,} GPUs: between that and {knee['next']:,}, an added GPU brings {brings} at the cheapest size"
    return f"{knee['value']:,} {_UNITS[axis]}: the least with the tokens/s of the fastest, within the model's error"


def _table(document: Mapping[str, Any]) -> list[list[str]]:
    priced = document["price_per_gpu_hour"] is not None
    header = [_HEADS[document["axis"]], "step", "80% interval", "tokens/s/GPU", "MFU", "GPU-s/Mtoken"]
    rows = [[*header, *(["price/Mtoken"] if priced else []), "memory", "fits", "layout"]]
    for point in document["points"]:
        rows.append([f"{point['value']:,}", *_cells(point, priced)])
    return rows


def _cells(point: Mapping[str, Any], priced: bool) -> Sequence[str]:
    if point["step_s"] is None:
        blank = ["-"] * (6 if priced else 5)
        return [*blank, "-", "no" if point["status"] == "infeasible" else "-", f"{point['status']}: {point['why']}"]
    fits = FITS[Verdict(point["verdict"])]
    idle = f" ({point['idle_gpus']:,} GPUs idle)" if point["idle_gpus"] else ""
    return [
        duration(point["step_s"]),
        f"{duration(point['step_s_low'])} to {duration(point['step_s_high'])}",
        f"{point['tokens_per_s_per_gpu']:,.0f}",
        f"{point['mfu']:.1%}",
        three_digits(point["gpu_s_per_million_tokens"]),
        *([three_digits(point["price_per_million_tokens"])] if priced else []),
        memory_gib(point["memory_gib_max"]),
        fits,
        short_layout(parse_layout(point["layout"])) + idle,
    ]
