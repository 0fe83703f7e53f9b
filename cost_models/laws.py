"""What is legal: the laws of law_table.py, judged and told. The search space, `check` and the executor read them here.

A law has a code, its operands (fields of `Facts`), a predicate on them, the legal values beside the wrong one, and its own
severity; a runtime's record may say another severity. An operand that is None is unknown: the law is then not judged.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from cost_models.facts import Facts, Finding, Law, Unchecked, facts_of_run
from cost_models.law_table import LAW, LAWS
from cost_models.law_terms import MARGIN, divisors
from cost_models.records import Runtime, Severity

__all__ = [
    "LAW",
    "LAWS",
    "MARGIN",
    "MOST_LISTED",
    "Facts",
    "Finding",
    "Law",
    "Unchecked",
    "breaches",
    "divisors",
    "facts_of_run",
    "finding",
    "first_breach",
    "laws_over",
    "legal_values",
]


def laws_over(names: Collection[str]) -> tuple[Law, ...]:
    """Laws all of whose operands, optional ones included, are among `names`."""
    known = set(names)
    return tuple(law for law in LAWS if known.issuperset(law.operands) and known.issuperset(law.optional))


def first_breach(laws: Iterable[Law], facts: Facts, runtime: Runtime) -> Law | None:
    """The first of `laws` that is broken and an error for `runtime`; None where there is none."""
    for law in laws:
        if law.holds(facts, runtime) is False and law.severity_of(runtime) is Severity.ERROR:
            return law
    return None


def breaches(
    facts: Facts, runtime: Runtime, laws: Iterable[Law] | None = None
) -> tuple[list[Finding], list[Unchecked]]:
    """Findings, errors first, and the laws that could not be judged. Laws that the runtime is silent about are left out."""
    findings, unchecked = [], []
    for law in LAWS if laws is None else laws:
        if law.severity_of(runtime) is Severity.NONE:
            continue
        held = law.holds(facts, runtime)
        if held is None:
            unchecked.append(Unchecked(code=law.code, missing=law.missing(facts)))
        elif not held:
            findings.append(finding(law, facts, runtime))
    order = list(Severity)
    return sorted(findings, key=lambda found: order.index(found.severity)), unchecked


def finding(law: Law, facts: Facts, runtime: Runtime) -> Finding:
    """A broken law in words."""
    legal = legal_values(law, facts, runtime)
    listed = "; ".join(f"{_named(key, facts)}: {_listed(values)}" for key, values in legal.items() if values)
    if legal and not listed:
        listed = f"no {' or '.join(legal)} is legal with the rest as it is"
    parts = (f"{law.says(facts, runtime)} (law: {law.statement})", listed, law.offer(facts, runtime))
    known = {name: getattr(facts, name) for name in (*law.operands, *law.optional)}
    return Finding(
        code=law.code,
        severity=law.severity_of(runtime),
        message="; ".join(part for part in parts if part),
        values={
            name: list(value) if isinstance(value, tuple) else value
            for name, value in known.items()
            if value is not None
        },
        legal=legal,
    )


def legal_values(law: Law, facts: Facts, runtime: Runtime) -> dict[str, list[Any]]:
    """Operand -> values with which `law`, and the errors among `law.legal_with`, hold; the other operands as they are."""
    beside = [other for other in LAWS if other.code in law.legal_with and other.severity_of(runtime) is Severity.ERROR]
    legal: dict[str, list[Any]] = {}
    for key in law.legal_keys:
        trials = [(value, replace(facts, **{key: value})) for value in _candidates(key, facts, runtime)]
        alone = [(value, trial) for value, trial in trials if law.holds(trial, runtime)]
        legal[key] = [v for v, trial in alone if all(other.holds(trial, runtime) is not False for other in beside)]
    legal.update({key: list(values) for key, values in law.legal_more(facts, runtime).items()})
    return legal


def _candidates(key: str, facts: Facts, runtime: Runtime) -> Iterable[Any]:
    """Values that a key may take at all: divisors of the world, or of what else the key divides."""
    if key == "zero":
        return runtime.zero_levels
    if key == "schedule":
        return runtime.schedules
    whole = {
        "tp": facts.world or facts.heads or facts.kv_heads or facts.vocab,
        "pp": facts.world or facts.num_layers,
        "cp": facts.world or facts.seq,
        "dp": facts.world or facts.gbs,
        "dp_shard": facts.dp,
        "ep": facts.num_experts or facts.world,
        "etp": facts.moe_ffn,
        "ulysses": facts.heads or facts.kv_heads,
        "mbs": facts.gbs,
        "microbatches": facts.gbs,
    }.get(key)
    if whole:
        return divisors(whole)
    return range(1, (max(1, facts.num_layers // (facts.pp or 1)) if facts.num_layers else MOST_LISTED) + 1)


MOST_LISTED = 24
"""Values listed in a message; the finding's `legal` holds them all."""


def _named(key: str, facts: Facts) -> str:
    if key == "least_gpus":
        return "least number of GPUs"
    return f"legal {key} on {facts.world} GPUs" if key in _DEGREES and facts.world else f"legal {key}"


_DEGREES = ("tp", "pp", "cp", "dp", "ep")


def _listed(values: list[Any]) -> str:
    if not values:
        return "none"
    shown = ", ".join(str(value) for value in values[:MOST_LISTED])
    return shown + (f", … ({len(values)} in all)" if len(values) > MOST_LISTED else "")
