"""The run on few GPUs as people read it: what it is, what it says of the plan, what stays, and what to do next."""

from collections.abc import Sequence

from cost_models.records import Plan
from planner.anchor import Anchor
from planner.report.plan_text import head_room, speed
from planner.report.predict_text import term_name
from planner.report.words import joined, row, short_layout
from planner.rests_on import Term

_MOST_TERMS = 8
"""Terms that are named."""


def anchor_text(plan: Plan, anchor: Anchor, out: str | None) -> str:
    """Twenty lines at most; `out` is the file that it was written to."""
    small = anchor.plan
    predicted = small.predicted
    assert predicted is not None
    reductions = [f"{one.name} {one.full:,} -> {one.small:,}" for one in anchor.reductions]
    request = small.request
    full_text, small_text = (
        short_layout(one.decision.layout, has_experts=one.request.model.moe is not None) for one in (plan, small)
    )
    lines = [
        row("plan", f"{full_text} on {plan.decision.layout.world:,} GPUs"),
        row(
            "reduced",
            f"{small_text} on {small.decision.layout.world:,} GPUs of {request.cluster.name}",
        ),
        row(
            "model",
            f"{request.model.num_layers} layers of {plan.request.model.name}, batch {small.decision.workload.gbs:,}",
        ),
        row("less", joined(reductions)),
        row("speed", speed(predicted)),
        row("memory", head_room(predicted)),
        "",
        row("measures", f"of the plan: {_terms(anchor.seen)}"),
        row("stays", f"analytic: {_terms(anchor.unseen)}; bubbles follow from the schedule"),
        row("", "each with the share of the plan's step that grows with it"),
        "",
    ]
    name = out or "small.json"
    if anchor.is_run_here:
        lines += [
            row("next", f"meshwright run {name} -o measurement.json"),
            row("", f"meshwright compare {name} measurement.json --fit calibration.json"),
            row("", "meshwright predict PLAN.json --calibration calibration.json"),
        ]
    else:
        lines.append(
            row(
                "next",
                f"a request for {small.decision.runtime}, which `meshwright run` does not start: configure it there, and "
                f"set what you measure beside `meshwright predict {name}`",
            )
        )
    return "\n".join(lines)


def _terms(terms: Sequence[Term]) -> str:
    named = [f"{term_name(term.name)} {term.share:.1%}" for term in terms[:_MOST_TERMS]]
    rest = len(terms) - len(named)
    return joined([*named, *([f"{rest} smaller"] if rest else [])]) or "nothing"
