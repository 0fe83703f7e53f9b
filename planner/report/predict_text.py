"""A prediction as people read it: what was asked, how fast, where the time and the memory go, and what it all rests on."""

from collections.abc import Mapping, Sequence

from cost_models.problem import Problem
from cost_models.records import Decision, Prediction, StagePrediction, Verdict
from cost_models.units import GIB, MIB
from planner.report.plan_text import FITS, PARTS, asked, basis_text, chain_lines, head_room, speed, stage_lines
from planner.report.words import columns, duration, joined, memory_gib, row
from planner.rests_on import Term

VERDICTS = {
    Verdict.OK: "even the upper end of its 80% interval fits",
    Verdict.RISKY: "expected to fit, but the upper end of its 80% interval does not",
    Verdict.NO: "more is expected than there is",
}
"""What a verdict means."""

_LEAST_SHOWN = 1e-3
"""Kinds of memory that are nowhere this share of the fullest stage are left out of the table."""


def predict_text(
    problem: Problem,
    decision: Decision,
    predicted: Prediction,
    defaults: Mapping[str, str],
    terms: Sequence[Term] = (),
) -> str:
    """The prediction of one layout, at most some forty lines; `defaults` is what was not said -> how it was taken, `terms`
    what its time rests on."""
    lines = [
        asked(problem.model, problem.cluster, decision),
        "",
        row(
            "layout",
            f"{decision.layout}, {decision.num_micro_batches:,} micro-batch{'' if decision.num_micro_batches == 1 else 'es'}",
        ),
        row("speed", speed(predicted)),
        row("parts", _parts(predicted)),
        row("memory", head_room(predicted)),
        *counted_lines(predicted),
        row("verdict", _verdict(predicted)),
        row(
            "rests on",
            f"{basis_text(predicted)}; layouts within {predicted.pairwise_error:.0%} of each other are a tie",
        ),
    ]
    lines += term_lines(terms)
    if predicted.worth_measuring:
        lines.append(row("measure", f"would narrow it most: {joined(predicted.worth_measuring)}"))
    lines += ["", *stage_lines(decision, predicted, problem.cluster), *chain_lines(problem.model)]
    lines += ["", *memory_lines(predicted.stages, "device" if decision.layout.vpp > 1 else "stage")]
    if defaults:
        lines += ["", row("not said", ", ".join(f"{key} = {value}" for key, value in defaults.items()))]
    return "\n".join(lines)


_TERMS = {
    "anchored": ("anchored", "by runs or measurements of your own"),
    "calibrated": ("published", "fitted on published runs"),
    "table": ("analytic", "as tables and formulas have it"),
}
"""Basis of a term -> the word in front of its row, and what that means."""
_MOST_TERMS = 5
"""Terms of one basis that are named."""


def term_lines(terms: Sequence[Term]) -> list[str]:
    """Where something was anchored: what rests on it, on published runs and on tables; else nothing, for then all is as shipped."""
    if not any(term.basis == "anchored" for term in terms):
        return []
    lines = []
    for basis, (word, meaning) in _TERMS.items():
        mine = [term for term in terms if term.basis == basis]
        if mine:
            named = [f"{term_name(term.name)} {term.share:.0%}" for term in mine[:_MOST_TERMS] if term.share >= 0.005]
            rest = len(mine) - len(named)
            more = [f"{rest} more below {mine[len(named)].share:.0%}"] if rest and named else []
            told = joined([*named, *more]) or "nothing that moves the step by half a percent"
            lines.append(row(word, f"{meaning}: {told}"))
    return [*lines, row("", "each with the share of the step that grows with it; bubbles follow from the schedule")]


def term_name(name: str) -> str:
    """A coefficient's own name; measured operations and curves keep their kind in front."""
    return name.removeprefix("coefficients/")


def _verdict(predicted: Prediction) -> str:
    low, high = memory_gib(predicted.memory_gib_low), memory_gib(predicted.memory_gib_high)
    words = f"{FITS[predicted.verdict]}: {VERDICTS[predicted.verdict]}"
    if _host_overflows(predicted):
        words = (
            f"{FITS[predicted.verdict]}: what is offloaded is more than the host has; offload less, or take more nodes"
        )
    return f"{words} (80%: {low} to {high}, counted as {predicted.memory_kind})"


def counted_lines(predicted: Prediction) -> list[str]:
    """The same peak by each way of counting, and what the host holds; nothing where there is nothing beside."""
    lines = []
    if len(predicted.memory_gib_by_kind) > 1:
        counted = [f"{kind} {memory_gib(size)}" for kind, size in predicted.memory_gib_by_kind.items()]
        lines.append(row("counted", ", ".join(counted)))
    if predicted.host_gib_per_node:
        held, usable = predicted.host_gib_per_node, predicted.host_gib_usable
        always = held.get("step 2", 0.0)
        told = [f"{phase} {memory_gib(size)}" for phase, size in held.items() if size > always]
        told = ([f"{memory_gib(always)} in every phase"] if always else []) + told
        over = ": it does not fit" if _host_overflows(predicted) else ""
        of = "; its size is not known" if usable is None else f", of {memory_gib(usable)}{over}"
        lines.append(row("host", f"on the fullest node: {', '.join(told)}{of}"))
    return lines


def _host_overflows(predicted: Prediction) -> bool:
    """The states that a run offloads are more than the host has."""
    usable = predicted.host_gib_usable
    return usable is not None and predicted.host_gib_per_node.get("step 2", 0.0) > usable


def _parts(predicted: Prediction) -> str:
    """Each part in time and as a share of the step; absent ones are not named."""
    parts = {name: getattr(predicted.parts, field) for name, field in PARTS.items()}
    shown = [f"{name} {duration(s)} ({s / predicted.step_s:.1%})" for name, s in parts.items() if s > 0]
    return ", ".join(shown)


def memory_lines(stages: Sequence[StagePrediction], word: str) -> list[str]:
    """Two tables, a line a stage (a device, where it has several: `word`) or a run of alike ones: kinds at the peak, then the
    peak of each phase.
    """
    unit, scale = _unit(stages)
    kinds = _names([stage.memory_bytes for stage in stages])
    phases = _names([stage.phase_memory_bytes for stage in stages], least=0.0)

    def numbers(of: Mapping[str, float], names: Sequence[str]) -> list[str]:
        return [f"{of[name] / scale:,.{1 if scale == GIB else 0}f}" if name in of else "-" for name in names]

    at_peak = [[word, "sum", *kinds]]
    by_phase = [[word, *phases, "peak at"]]
    for first, last in _runs(stages):
        stage = stages[first]
        name = str(first) if first == last else f"{first}..{last}"
        total = {"sum": sum(stage.memory_bytes.values())}
        at_peak.append([name, *numbers(total, ["sum"]), *numbers(stage.memory_bytes, kinds)])
        by_phase.append([name, *numbers(stage.phase_memory_bytes, phases), stage.peak_operation])
    return [
        f"memory of each {word}'s fullest rank at its peak, {unit}",
        *columns(at_peak, right=range(1, len(kinds) + 2)),
        "",
        f"the same by phase, {unit}",
        *columns(by_phase, right=range(1, len(phases) + 1)),
    ]


def _unit(stages: Sequence[StagePrediction]) -> tuple[str, float]:
    """One unit for a table: GiB, or MiB where nothing reaches one GiB."""
    most = max(sum(stage.memory_bytes.values()) for stage in stages)
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB)


def _names(parts: Sequence[Mapping[str, float]], least: float = _LEAST_SHOWN) -> list[str]:
    """Names in the order of their first appearance, without those that are next to nothing everywhere."""
    threshold = least * max(sum(part.values()) for part in parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return [name for name in names if any(part.get(name, 0.0) > threshold for part in parts) or least == 0.0]


def _runs(stages: Sequence[StagePrediction]) -> list[tuple[int, int]]:
    """First and last of neighbouring stages whose bytes are within a percent, kind by kind, and whose peaks are alike."""
    runs: list[tuple[int, int]] = []
    for index, stage in enumerate(stages):
        if runs and _alike(stages[runs[-1][0]], stage):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _alike(a: StagePrediction, b: StagePrediction) -> bool:
    near = 0.01 * sum(a.memory_bytes.values())
    pairs = ((a.memory_bytes, b.memory_bytes), (a.phase_memory_bytes, b.phase_memory_bytes))
    close = all(
        left.keys() == right.keys() and all(abs(left[k] - right[k]) <= near for k in left) for left, right in pairs
    )
    return close and (a.peak_phase, a.peak_operation) == (b.peak_phase, b.peak_operation)
