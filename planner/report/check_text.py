"""What `check` found, as people read it: the verdict first, then findings by severity, what would be better, what was not judged."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.records import Severity, Verdict
from planner.report.plan_text import FITS
from planner.report.predict_text import VERDICTS
from planner.report.words import counted, duration, joined, memory_gib, row

_WORDS = {
    Verdict.OK: "nothing that is stated breaks a law",
    Verdict.RISKY: "it may run, but read the warnings",
    Verdict.NO: "it cannot run as it is",
}
"""What the verdict of a check means."""

_NAMES = re.compile(r", (?![^(]*\))")
"""Between names, but not inside brackets."""

_MOST_LEGAL = 16
"""Legal values listed; the document holds them all."""


def check_text(document: Mapping[str, Any]) -> str:
    """The text of a document of `planner.check` (`verdict findings unchecked predicted better`)."""
    order = [severity.value for severity in Severity]
    findings = sorted(document["findings"], key=lambda found: order.index(found["severity"]))
    verdict = Verdict(document["verdict"])
    blocks = [row("verdict", f"{verdict}: {_WORDS[verdict]} ({_counts(findings)})")]
    blocks += [_finding(found) for found in findings]
    predicted = document.get("predicted")
    if predicted:
        blocks.append(_predicted(predicted))
    blocks.append(_better(document.get("better")))
    unchecked = _unchecked(document.get("unchecked") or [])
    if unchecked:
        blocks.append("\n".join(row("unchecked" if i == 0 else "", text) for i, text in enumerate(unchecked)))
    return "\n\n".join(block for block in blocks if block)


_MOST_UNCHECKED = 8
"""Laws without an operand that have a line each; more of them share one."""


def _unchecked(texts: Sequence[str]) -> list[str]:
    unstated = [text for text in texts if ": not stated: " in text and text.split(":")[0].isupper()]
    if len(unstated) <= _MOST_UNCHECKED:
        return list(texts)
    wanted = dict.fromkeys(name for text in unstated for name in _NAMES.split(text.split(": not stated: ")[1]))
    first = f"{len(unstated)} laws, which `--json` names, for want of {', '.join(wanted)}"
    return [first, *(text for text in texts if text not in unstated)]


def _counts(findings: Sequence[Mapping[str, Any]]) -> str:
    """`2 errors and 1 warning`."""
    severities = [found["severity"] for found in findings]
    words = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "remark"}
    parts = [counted(severities.count(kind), word) for kind, word in words.items() if kind in severities]
    return joined(parts) or "no findings"


def _finding(found: Mapping[str, Any]) -> str:
    """Severity and code, the message, then the values and the legal ones that the message does not say itself."""
    message = found["message"]
    lines = [row(found["severity"], found["code"]), row("", message)]
    return "\n".join(lines + value_lines(found.get("values"), found.get("legal"), message))


def value_lines(values: Mapping[str, Any] | None, legal: Mapping[str, Sequence[Any]] | None, said: str) -> list[str]:
    """Lines with the values and the legal values of a broken law that the text `said` does not name already."""
    lines = []
    beside = [f"{name}={shown(value)}" for name, value in (values or {}).items() if not _says(said, name, value)]
    if beside:
        lines.append(row("", f"with {', '.join(beside)}"))
    for name, options in (legal or {}).items():
        if options and f"legal {name}" not in said and name != "least_gpus":
            rest = len(options) - _MOST_LEGAL
            more = f" and {rest} more" if rest > 0 else ""
            lines.append(row("", f"legal {name}: {', '.join(map(shown, options[:_MOST_LEGAL]))}{more}"))
    return lines


def _says(text: str, name: str, value: Any) -> bool:
    # the bytes of memory are said in GiB, and lengths in their own words
    return f"{name}={shown(value)}" in text or name.endswith("_bytes") or name.endswith("_bytes_all")


def shown(value: Any) -> str:
    """A value of a document as people write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    return str(value)


def _predicted(predicted: Mapping[str, Any]) -> str:
    """Model states, then whatever a prediction adds."""
    lines = [row("states", text) for text in [_states(predicted.get("model_states"))] if text]
    lines += outcome_lines(predicted)
    return "\n".join(lines)


def _states(states: Mapping[str, Any] | None) -> str:
    if not states:
        return ""
    least, most = states.get("fullest_device_gib"), states.get("fullest_device_gib_at_most")
    parts = []
    if least is not None:
        upper = f" to {memory_gib(most)}, by what is not stated," if most is not None and most > least * 1.001 else ""
        device = states.get("device_gib")
        room = f" of {memory_gib(device)}" if device is not None else ""
        parts.append(f"{memory_gib(least)}{upper}{room} on the fullest device")
    if states.get("whole_model_gib") is not None:
        parts.append(f"{memory_gib(states['whole_model_gib'])} in all")
    if states.get("host_gib_per_node") is not None:
        parts.append(f"{memory_gib(states['host_gib_per_node'])} on the host of each node")
    per_param = states.get("bytes_per_param")
    if per_param:
        parts.append(f"bytes per parameter: {', '.join(f'{n:g} {kind}' for kind, n in per_param.items())}")
    return f"weights, gradients and optimizer: {'; '.join(parts)}"


def outcome_lines(document: Mapping[str, Any]) -> list[str]:
    """Speed and memory of a layout, from as many fields of a Prediction as the document has."""
    lines = []
    step_s, low, high = (document.get(key) for key in ("step_s", "step_s_low", "step_s_high"))
    if step_s is not None:
        interval = f" (80%: {duration(low)} to {duration(high)})" if low is not None and high is not None else ""
        extra = [
            text.format(document[key])
            for key, text in (
                ("tokens_per_s_per_gpu", "{:,.0f} tokens/s/GPU"),
                ("tflops_per_gpu", "{:.4g} TFLOP/s/GPU"),
                ("mfu", "MFU {:.1%}"),
            )
            if document.get(key) is not None
        ]
        lines.append(row("speed", ", ".join([f"{duration(step_s)} a step{interval}", *extra])))
    peak, upper, usable = (document.get(f"memory_gib_{key}") for key in ("max", "high", "usable"))
    if peak is not None:
        fits = document.get("verdict")
        words = f"{FITS[Verdict(fits)]}: {VERDICTS[Verdict(fits)]}; " if fits else ""
        most = f" (up to {memory_gib(upper)})" if upper is not None else ""
        room = f" of {memory_gib(usable)}" if usable is not None else ""
        lines.append(row("memory", f"{words}{memory_gib(peak)}{most}{room}"))
    return lines


def _better(better: Mapping[str, Any] | str | None) -> str:
    """The single change that helps most."""
    if not better:
        return ""
    if isinstance(better, str):
        return row("better", better)
    change = better.get("change") or better.get("layout")
    lines = [row("better", shown(change))] if change else []
    if better.get("change") and better.get("layout"):
        lines.append(row("", shown(better["layout"])))
    if better.get("gain") is not None:
        lines.append(row("", f"{better['gain']:+.1%} tokens/s"))
    lines += outcome_lines(better)
    known = {"change", "layout", "gain", *_OUTCOME}
    rest = [f"{key} {shown(value)}" for key, value in better.items() if key not in known and value is not None]
    if rest:
        lines.append(row("" if lines else "better", "; ".join(rest)))
    return "\n".join(lines)


_OUTCOME = frozenset(
    ("step_s", "step_s_low", "step_s_high", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "verdict")
) | {f"memory_gib_{key}" for key in ("max", "low", "high", "usable")}
"""Fields that `outcome_lines` tells."""
