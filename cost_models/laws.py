"""What is legal: one law object each, read by the search space, by `check` and by the executor.

A law has a code, its operands (fields of `Facts`), a predicate on them, the legal values beside the wrong one, and its own
severity; a runtime's record may say another severity. An operand that is None is unknown: the law is then not judged.

Codes of the public table of faults: WORLD_MOD_MP WORLD_SIZE_MISMATCH WORLD_MOD_EP EXPERTS_MOD_EP HEADS_MOD_TP KV_HEADS_MOD_TP
KV_HEADS_MOD_ULYSSES VOCAB_MOD_TP LAYERS_MOD_PP LAYERS_MOD_PPVPP TIED_EMB_PP_SYNC SEQ_MOD_TPCP GBS_MOD_MBSDP
BATCH_MOD_MICROBATCHES MICROBATCHES_LT_PP MICROBATCHES_MOD_PP ZERO23_WITH_PP RECOMPUTE_WITH_SPLIT_BACKWARD TP_SPANS_NODES
MEM_STATES_GT_HBM MEM_BORDERLINE HOST_MEM.

Further laws, which hold for every framework: DP_MOD_SHARD (dp = dp_replicate·dp_shard), BATCH_MISMATCH (gbs =
dp·mbs·microbatches), STAGES_GT_BLOCKS (each virtual stage holds a block). Further laws of particular runtimes, silent where
nobody has read the framework: KV_REPLICAS_MOD_TP (copied heads come out whole), FFN_MOD_TP, MOE_FFN_MOD_ETP,
HEADS_MOD_ULYSSES, MICROBATCHES_MOD_ROUNDS (torch's interleaved schedule), SCHEDULE_VPP (virtual stages that the schedule
needs), VPP_NEEDS_PP, ZB_WITH_SHARDING (silently wrong gradients), ZERO_UNSUPPORTED, SCHEDULE_UNSUPPORTED, RECOMPUTE_UNKNOWN.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from cost_models.facts import Facts, Finding, Law, Unchecked, facts_of_run
from cost_models.records import SPLIT_BACKWARD, Runtime, Schedule, Severity

__all__ = [
    "LAW",
    "LAWS",
    "MARGIN",
    "Facts",
    "Finding",
    "Law",
    "Unchecked",
    "breaches",
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
        values={name: value for name, value in known.items() if value is not None},
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


def divisors(number: int) -> list[int]:
    """Divisors of a positive whole number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def micro_batches_needed(facts: Facts) -> int:
    """Least micro-batches of a step with which the schedule runs; 1f1b where none is said.

    torch 2.13's Schedule1F1B and ScheduleZBVZeroBubble refuse fewer than their stages, ScheduleDualPipeV fewer than its
    virtual stages; GPipe and the interleaved schedules take any number.
    """
    if facts.pp is None or facts.pp == 1 or facts.schedule in _ANY_MICRO_BATCHES:
        return 1
    if facts.schedule is None and (facts.vpp or 1) > 1:
        return 1
    return facts.pp * (2 if facts.schedule is Schedule.DUALPIPEV else 1)


_ANY_MICRO_BATCHES = frozenset({Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.LOOPED_BFS, Schedule.INTERLEAVED_ZB})
_ONE_CHUNK = frozenset({Schedule.GPIPE, Schedule.ONE_F_ONE_B})
_TWO_CHUNKS = frozenset({Schedule.ZBV, Schedule.DUALPIPEV})
_LOOPED = frozenset({Schedule.INTERLEAVED, Schedule.LOOPED_BFS, Schedule.INTERLEAVED_ZB})
MARGIN = 0.10
"""Share of a device's memory within which a prediction is called borderline: people report runs with 5 to 10% of predicted
head-room failing now and then, and context, workspaces and fragmentation take 8 to 14 GiB of an 80 GiB card (bigscience logs)."""


def _num(value: int | None) -> int:
    """A number that a predicate may rely on."""
    assert value is not None
    return value


def _product(facts: Facts, *names: str) -> int:
    return math.prod(_num(getattr(facts, name)) for name in names)


def _gib(number: float | None) -> str:
    assert number is not None
    return f"{number / 2**30:.1f} GiB"


def _looped(facts: Facts) -> bool:
    return facts.schedule in _LOOPED or (facts.schedule is None and (facts.vpp or 1) > 1)


def _schedule_fits_vpp(facts: Facts, runtime: Runtime | None) -> bool:
    vpp = _num(facts.vpp)
    if facts.schedule in _ONE_CHUNK:
        return vpp == 1
    return vpp == 2 if facts.schedule in _TWO_CHUNKS else vpp >= 2


def _seq_multiple(facts: Facts) -> int:
    """Tokens of which a sequence must be a multiple: 2 chunks a rank with ring attention (load balance), tp with SP.

    Where it is not said whether there is SP, the strictest demand.
    """
    tp = 1 if facts.sp is False else facts.tp or 1
    cp = facts.cp or 1
    if cp == 1:
        return tp
    chunks = 1 if facts.ulysses and facts.ulysses > 1 else 2
    return cp * math.lcm(chunks, tp)


def _vocab_step(facts: Facts, runtime: Runtime | None) -> int:
    """Padded vocabularies are multiples of this: as the runtime pads, else lcm(tp, 128), which keeps matrix tiles whole."""
    if runtime is not None and runtime.vocab_multiple > 1:
        return runtime.vocab_multiple * _num(facts.tp)
    return math.lcm(_num(facts.tp), 128)


def _nearest_multiples(number: int, step: int) -> list[int]:
    below = number // step * step
    return [value for value in (below, below + step) if value > 0]


def _edp(facts: Facts) -> tuple[int, int]:
    return _product(facts, "dp", "cp", "tp"), _num(facts.ep) * (facts.etp or 1)


def _not_divisible(name: str, by: str) -> Callable[[Facts, Runtime | None], str]:
    return lambda f, r: f"{name}={getattr(f, name)} is not divisible by {by}={getattr(f, by)}"


def _divides(name: str, by: str) -> Callable[[Facts, Runtime | None], bool]:
    return lambda f, r: getattr(f, name) % getattr(f, by) == 0


def _is_one(name: str) -> Callable[[Facts], bool]:
    return lambda f: getattr(f, name) == 1


def _offer(text: str) -> Callable[[Facts, Runtime | None], str]:
    return lambda f, r: text


_TP_LAWS = ("WORLD_MOD_MP", "HEADS_MOD_TP", "KV_HEADS_MOD_TP", "KV_REPLICAS_MOD_TP", "VOCAB_MOD_TP", "FFN_MOD_TP")
_PP_LAWS = ("WORLD_MOD_MP", "LAYERS_MOD_PP", "LAYERS_MOD_PPVPP", "STAGES_GT_BLOCKS")


def _tp_offer(facts: Facts, runtime: Runtime | None) -> str:
    if runtime and legal_values(LAW["HEADS_MOD_TP"], facts, runtime)["tp"] in ([], [1]):
        return "divide over these GPUs by pp or by FSDP (dp_shard) instead"
    return "take a legal tp, or divide over the rest by pp or FSDP"


def _uneven_offer(virtual: bool) -> Callable[[Facts, Runtime | None], str]:
    """The split that is nearest to even, where the runtime has a way to be told."""

    def offer(facts: Facts, runtime: Runtime | None) -> str:
        stages = _num(facts.pp) * (_num(facts.vpp) if virtual else 1)
        least, more = divmod(_num(facts.num_layers), stages)
        kind = "virtual stages" if virtual else "stages"
        split = (
            f"split unevenly ({more} {kind} of {least + 1} and {stages - more} of {least}; the first and the last, which hold "
            "embedding and head, are best among the lighter ones)"
        )
        way = f"take a legal {'vpp' if virtual else 'pp'}"
        if runtime is None or runtime.uneven_stages:
            return f"{split}{f' by {runtime.uneven_stages}' if runtime else ''}, or {way}"
        return f"{way}, or, if the framework can be told to, {split}" if runtime.name == "generic" else way

    return offer


def _memory_more(facts: Facts, runtime: Runtime | None) -> dict[str, list[Any]]:
    if facts.states_bytes_all is None or facts.device_bytes is None:
        return {}
    return {"least_gpus": [max(1, -(-facts.states_bytes_all // facts.device_bytes))]}


def _states_fit(facts: Facts, runtime: Runtime | None) -> bool:
    return _num(facts.states_bytes) <= _num(facts.device_bytes)


def _where(facts: Facts) -> str:
    if facts.tp is None or LAW["WORLD_MOD_MP"].holds(facts) is False:
        return f"on a device, divided evenly over all {facts.world}"
    return "on the fullest device"


def _memory_offer(facts: Facts, runtime: Runtime | None) -> str:
    whole = f"all model states are {_gib(facts.states_bytes_all)}: " if facts.states_bytes_all else ""
    level = f"zero up to {max(runtime.zero_levels)}, " if runtime else ""
    return f"{whole}divide them over more GPUs (tp, pp, {level}no activations counted), or offload the optimizer to host memory"


LAWS: tuple[Law, ...] = (
    Law(
        code="WORLD_MOD_MP",
        statement="world % (tp·pp·cp) = 0",
        operands=("world", "tp", "pp", "cp"),
        predicate=lambda f, r: _num(f.world) % _product(f, "tp", "pp", "cp") == 0,
        says=lambda f, r: (
            f"world={f.world} is not divisible by tp·pp·cp = {f.tp}·{f.pp}·{f.cp} = {_product(f, 'tp', 'pp', 'cp')}"
        ),
        legal_keys=("tp", "pp", "cp"),
        legal_more=lambda f, r: {"tp·pp·cp": divisors(_num(f.world))},
        offer=_offer("take degrees whose product divides the number of GPUs, or another number of GPUs"),
    ),
    Law(
        code="WORLD_SIZE_MISMATCH",
        statement="tp·pp·cp·dp = world",
        operands=("world", "tp", "pp", "cp", "dp"),
        predicate=lambda f, r: _num(f.world) % (mp := _product(f, "tp", "pp", "cp")) != 0 or mp * _num(f.dp) == f.world,
        says=lambda f, r: (
            f"tp·pp·cp·dp = {f.tp}·{f.pp}·{f.cp}·{f.dp} = {_product(f, 'tp', 'pp', 'cp', 'dp')}, but world={f.world}"
        ),
        legal_keys=("dp",),
        offer=_offer("take the dp that fits (ep is never a factor of the world)"),
    ),
    Law(
        code="DP_MOD_SHARD",
        statement="dp % dp_shard = 0",
        operands=("dp", "dp_shard"),
        predicate=_divides("dp", "dp_shard"),
        void=lambda f: f.dp_shard in (None, 1),
        says=_not_divisible("dp", "dp_shard"),
        legal_keys=("dp_shard",),
        offer=_offer("dp is dp_replicate·dp_shard: take a dp_shard that divides it"),
    ),
    Law(
        code="WORLD_MOD_EP",
        statement="(dp·cp·tp) % (ep·etp) = 0",
        operands=("dp", "cp", "tp", "ep"),
        optional=("etp",),
        predicate=lambda f, r: (pair := _edp(f))[0] % pair[1] == 0,
        void=lambda f: f.ep == 1 and f.etp in (None, 1),
        says=lambda f, r: (
            f"dp·cp·tp = {f.dp}·{f.cp}·{f.tp} = {_edp(f)[0]} is not divisible by ep·etp = {f.ep}·{f.etp or 1} = {_edp(f)[1]}"
        ),
        legal_keys=("ep",),
        legal_with=("EXPERTS_MOD_EP",),
        offer=_offer("experts live on the ranks of dp, cp and tp: take an ep that divides these"),
    ),
    Law(
        code="EXPERTS_MOD_EP",
        statement="num_experts % ep = 0",
        operands=("num_experts", "ep"),
        predicate=_divides("num_experts", "ep"),
        void=_is_one("ep"),
        says=_not_divisible("num_experts", "ep"),
        legal_keys=("ep",),
        legal_with=("WORLD_MOD_EP",),
        offer=_offer("take an ep that divides the experts and the ranks"),
    ),
    Law(
        code="HEADS_MOD_TP",
        statement="heads % tp = 0",
        operands=("heads", "tp"),
        predicate=_divides("heads", "tp"),
        void=_is_one("tp"),
        says=_not_divisible("heads", "tp"),
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        offer=lambda f, r: _tp_offer(f, r),
    ),
    Law(
        code="KV_HEADS_MOD_TP",
        statement="kv_heads % tp = 0, unless the runtime copies heads",
        operands=("kv_heads", "tp"),
        predicate=_divides("kv_heads", "tp"),
        void=_is_one("tp"),
        says=_not_divisible("kv_heads", "tp"),
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        offer=_offer("take a legal tp; copied key and value heads cost their weights, gradients and memory again"),
    ),
    Law(
        code="KV_REPLICAS_MOD_TP",
        statement="kv_heads % tp = 0 or tp % kv_heads = 0",
        operands=("kv_heads", "tp"),
        predicate=lambda f, r: _num(f.kv_heads) % _num(f.tp) == 0 or _num(f.tp) % _num(f.kv_heads) == 0,
        void=_is_one("tp"),
        severity=Severity.NONE,
        says=lambda f, r: f"kv_heads={f.kv_heads} is neither a multiple nor a divisor of tp={f.tp}",
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        offer=_offer("heads are copied whole: take a legal tp"),
    ),
    Law(
        code="KV_HEADS_MOD_ULYSSES",
        statement="kv_heads % ulysses = 0, unless the runtime copies heads",
        operands=("kv_heads", "ulysses"),
        predicate=_divides("kv_heads", "ulysses"),
        void=lambda f: f.ulysses in (None, 1),
        says=_not_divisible("kv_heads", "ulysses"),
        legal_keys=("ulysses",),
        legal_with=("HEADS_MOD_ULYSSES",),
        offer=_offer("take ring attention (cp) instead, which does not divide heads"),
    ),
    Law(
        code="HEADS_MOD_ULYSSES",
        statement="heads % (tp·ulysses) = 0",
        operands=("heads", "tp", "ulysses"),
        predicate=lambda f, r: _num(f.heads) % _product(f, "tp", "ulysses") == 0,
        void=lambda f: f.ulysses in (None, 1),
        says=lambda f, r: f"heads={f.heads} is not divisible by tp·ulysses = {f.tp}·{f.ulysses}",
        legal_keys=("ulysses",),
        legal_with=("KV_HEADS_MOD_ULYSSES",),
        offer=_offer("take ring attention (cp) instead, which does not divide heads"),
    ),
    Law(
        code="VOCAB_MOD_TP",
        statement="vocab % tp = 0",
        operands=("vocab", "tp"),
        predicate=_divides("vocab", "tp"),
        void=_is_one("tp"),
        says=_not_divisible("vocab", "tp"),
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        legal_more=lambda f, r: {"vocab": [-(-_num(f.vocab) // (step := _vocab_step(f, r))) * step]},
        offer=lambda f, r: (
            f"or pad the vocabulary to a multiple of {_vocab_step(f, r)}, mask the added rows, and record the padded size"
        ),
    ),
    Law(
        code="FFN_MOD_TP",
        statement="ffn % tp = 0",
        operands=("ffn", "tp"),
        predicate=_divides("ffn", "tp"),
        void=_is_one("tp"),
        says=_not_divisible("ffn", "tp"),
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        offer=_offer("take a legal tp"),
    ),
    Law(
        code="MOE_FFN_MOD_ETP",
        statement="moe_ffn % etp = 0",
        operands=("moe_ffn", "etp"),
        optional=("num_experts",),
        predicate=_divides("moe_ffn", "etp"),
        void=lambda f: f.etp in (None, 1) or f.num_experts == 0,
        says=_not_divisible("moe_ffn", "etp"),
        legal_keys=("etp",),
        offer=_offer("take etp=1, or one that divides the experts' width"),
    ),
    Law(
        code="LAYERS_MOD_PP",
        statement="num_layers % pp = 0",
        operands=("num_layers", "pp"),
        predicate=_divides("num_layers", "pp"),
        void=_is_one("pp"),
        severity=Severity.WARNING,
        says=_not_divisible("num_layers", "pp"),
        legal_keys=("pp",),
        legal_with=_PP_LAWS,
        offer=_uneven_offer(virtual=False),
    ),
    Law(
        code="LAYERS_MOD_PPVPP",
        statement="num_layers % (pp·vpp) = 0",
        operands=("num_layers", "pp", "vpp"),
        predicate=lambda f, r: _num(f.num_layers) % _product(f, "pp", "vpp") == 0,
        void=lambda f: f.vpp in (None, 1),
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"num_layers={f.num_layers} is not divisible by pp·vpp = {f.pp}·{f.vpp} = {_product(f, 'pp', 'vpp')}"
        ),
        legal_keys=("vpp",),
        offer=_uneven_offer(virtual=True),
    ),
    Law(
        code="STAGES_GT_BLOCKS",
        statement="pp·vpp ≤ num_layers + 2",
        operands=("num_layers", "pp", "vpp"),
        predicate=lambda f, r: _product(f, "pp", "vpp") <= _num(f.num_layers) + 2,
        void=lambda f: f.pp == 1 and f.vpp == 1,
        says=lambda f, r: (
            f"{f.pp}·{f.vpp} virtual stages, but only {_num(f.num_layers) + 2} blocks (embedding, {f.num_layers} layers, head)"
        ),
        legal_keys=("pp", "vpp"),
        offer=_offer("each virtual stage holds at least one block: take fewer stages"),
    ),
    Law(
        code="TIED_EMB_PP_SYNC",
        statement="with tied embeddings the first and the last stage share weights",
        operands=("tie_embeddings", "pp"),
        predicate=lambda f, r: not (f.tie_embeddings and _num(f.pp) > 1),
        void=_is_one("pp"),
        severity=Severity.INFO,
        says=lambda f, r: f"tied embeddings with pp={f.pp}: embedding and head lie on different stages",
        legal_more=lambda f, r: {"pp": [1]},
        offer=_offer(
            "put both on one stage, or hold a copy on each and all-reduce its gradient every step (vocab·hidden numbers); "
            "after loading weights, copy them to the last stage"
        ),
    ),
    Law(
        code="SEQ_MOD_TPCP",
        statement="seq % (cp·lcm(2, tp)) = 0 with context parallelism; seq % tp = 0 with sequence parallelism",
        operands=("seq", "tp", "cp", "sp"),
        optional=("ulysses",),
        predicate=lambda f, r: _num(f.seq) % _seq_multiple(f) == 0,
        void=lambda f: (
            (f.cp == 1 and (f.tp == 1 or f.sp is False))
            or (f.sp is None and None not in (f.seq, f.tp, f.cp) and _num(f.seq) % _seq_multiple(f) == 0)
        ),
        says=lambda f, r: (
            f"seq={f.seq} is not a multiple of {_seq_multiple(f)} (tp={f.tp}, cp={f.cp}"
            f"{', sequence parallel' if f.sp else ''})"
        ),
        legal_more=lambda f, r: {"seq": _nearest_multiples(_num(f.seq), _seq_multiple(f))},
        offer=_offer("pad or cut every batch, the last one too, to such a length"),
    ),
    Law(
        code="GBS_MOD_MBSDP",
        statement="gbs % (mbs·dp) = 0",
        operands=("gbs", "mbs", "dp"),
        predicate=lambda f, r: _num(f.gbs) % _product(f, "mbs", "dp") == 0,
        says=lambda f, r: f"gbs={f.gbs} is not divisible by mbs·dp = {f.mbs}·{f.dp} = {_product(f, 'mbs', 'dp')}",
        legal_keys=("mbs",),
        legal_more=lambda f, r: {"gbs": _nearest_multiples(_num(f.gbs), _product(f, "mbs", "dp"))},
        offer=_offer("take the nearest gbs, or a legal mbs"),
    ),
    Law(
        code="BATCH_MOD_MICROBATCHES",
        statement="gbs % (dp·microbatches) = 0",
        operands=("gbs", "dp", "microbatches"),
        optional=("mbs",),
        predicate=lambda f, r: _num(f.gbs) % _product(f, "dp", "microbatches") == 0,
        void=lambda f: f.microbatches is None or f.mbs is not None,
        says=lambda f, r: f"gbs={f.gbs} is not divisible by dp·microbatches = {f.dp}·{f.microbatches}",
        legal_keys=("microbatches",),
        offer=_offer("take a legal number of micro-batches"),
    ),
    Law(
        code="BATCH_MISMATCH",
        statement="gbs = dp·mbs·microbatches",
        operands=("gbs", "dp", "mbs", "microbatches"),
        predicate=lambda f, r: (
            _num(f.gbs) % _product(f, "mbs", "dp") != 0 or f.gbs == _product(f, "dp", "mbs", "microbatches")
        ),
        void=lambda f: f.microbatches is None or f.mbs is None,
        says=lambda f, r: f"gbs={f.gbs}, but dp·mbs·microbatches = {f.dp}·{f.mbs}·{f.microbatches}",
        legal_keys=("microbatches",),
        offer=_offer("gbs stays as it is: take that number of micro-batches, or another mbs"),
    ),
    Law(
        code="MICROBATCHES_LT_PP",
        statement="num_micro_batches ≥ pp, where the schedule needs it",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: _num(f.num_micro_batches) >= micro_batches_needed(f),
        void=lambda f: micro_batches_needed(f) == 1 and f.pp is not None,
        says=lambda f, r: (
            f"{f.num_micro_batches} micro-batches of a step are fewer than the {micro_batches_needed(f)} that "
            f"{f.schedule or 'the schedule (1f1b where none is said)'} needs with pp={f.pp}"
        ),
        legal_keys=("pp",),
        legal_with=_PP_LAWS,
        legal_more=lambda f, r: {"num_micro_batches": [f"≥ {micro_batches_needed(f)}"]},
        offer=_offer("take a smaller mbs or pp, or a larger batch; 4·pp micro-batches keep the bubble below 20%"),
    ),
    Law(
        code="MICROBATCHES_MOD_PP",
        statement="num_micro_batches % pp = 0 with virtual stages",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: _num(f.num_micro_batches) % _num(f.pp) == 0,
        void=lambda f: not _looped(f) or f.pp == 1,
        says=lambda f, r: f"{f.num_micro_batches} micro-batches are not a multiple of pp={f.pp}, with vpp={f.vpp}",
        legal_more=lambda f, r: {"num_micro_batches": _nearest_multiples(_num(f.num_micro_batches), _num(f.pp))},
        offer=_offer("take such a number of micro-batches, or vpp=1"),
    ),
    Law(
        code="MICROBATCHES_MOD_ROUNDS",
        statement="num_micro_batches % max(1, num_micro_batches // pp) = 0 with virtual stages",
        operands=("num_micro_batches", "pp"),
        optional=("schedule", "vpp"),
        predicate=lambda f, r: _num(f.num_micro_batches) % max(1, _num(f.num_micro_batches) // _num(f.pp)) == 0,
        void=lambda f: not _looped(f) or f.pp == 1 or f.schedule is Schedule.LOOPED_BFS,
        severity=Severity.NONE,
        says=lambda f, r: (
            f"{f.num_micro_batches} micro-batches do not make {max(1, _num(f.num_micro_batches) // _num(f.pp))} equal "
            f"rounds over pp={f.pp}"
        ),
        legal_more=lambda f, r: {"num_micro_batches": _nearest_multiples(_num(f.num_micro_batches), _num(f.pp))},
        offer=_offer("take such a number of micro-batches, or vpp=1"),
    ),
    Law(
        code="SCHEDULE_VPP",
        statement="vpp = 1 for gpipe and 1f1b, 2 for zbv and dualpipev, at least 2 for the looped schedules",
        operands=("schedule", "vpp", "pp"),
        predicate=_schedule_fits_vpp,
        void=lambda f: f.pp == 1 or f.schedule is None,
        says=lambda f, r: f"schedule={f.schedule} with vpp={f.vpp}",
        legal_keys=("vpp",),
        offer=_offer("take that vpp, or another schedule"),
    ),
    Law(
        code="VPP_NEEDS_PP",
        statement="vpp = 1 where pp = 1",
        operands=("vpp", "pp"),
        predicate=lambda f, r: f.vpp == 1 or f.pp != 1,
        void=_is_one("vpp"),
        says=lambda f, r: f"vpp={f.vpp} with pp={f.pp}: there is no pipeline to interleave",
        legal_more=lambda f, r: {"vpp": [1]},
        offer=_offer("take vpp=1"),
    ),
    Law(
        code="ZERO_UNSUPPORTED",
        statement="zero is a level that the runtime realises",
        operands=("zero",),
        predicate=lambda f, r: r is None or f.zero in r.zero_levels,
        void=lambda f: f.zero == 0,
        says=lambda f, r: f"zero={f.zero} is not what {r.name if r else ''} realises",
        legal_keys=("zero",),
        offer=_offer("take one of these levels, or another runtime"),
    ),
    Law(
        code="ZERO23_WITH_PP",
        statement="zero ≤ 1 where pp > 1",
        operands=("zero", "pp"),
        predicate=lambda f, r: not (_num(f.zero) >= 2 and _num(f.pp) > 1),
        void=lambda f: f.pp == 1 or f.zero in (0, 1),
        severity=Severity.WARNING,
        says=lambda f, r: f"zero={f.zero} with pp={f.pp}",
        legal_keys=("zero",),
        offer=_offer("take zero=1 (gradients reduced for each micro-batch would multiply the traffic), or pp=1"),
    ),
    Law(
        code="ZB_WITH_SHARDING",
        statement="a schedule that splits the backward takes neither DDP nor FSDP that reshards",
        operands=("schedule", "pp", "zero", "dp"),
        predicate=lambda f, r: f.zero == 2 or (f.zero != 3 and f.dp == 1),
        void=lambda f: f.pp == 1 or f.schedule not in SPLIT_BACKWARD,
        severity=Severity.NONE,
        says=lambda f, r: (
            f"schedule={f.schedule} with zero={f.zero} and dp={f.dp}: correct loss, silently wrong gradients"
        ),
        legal_keys=("schedule",),
        legal_more=lambda f, r: {"zero": [2]},
        offer=_offer("take zero=2 (reshard_after_forward=False), dp=1, or a schedule with whole backwards"),
    ),
    Law(
        code="RECOMPUTE_WITH_SPLIT_BACKWARD",
        statement="no recompute where the schedule splits the backward",
        operands=("recompute", "schedule", "pp"),
        predicate=lambda f, r: f.recompute == "none",
        void=lambda f: f.pp == 1 or f.recompute == "none" or f.schedule not in SPLIT_BACKWARD,
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"recompute={f.recompute} with schedule={f.schedule}: the weight gradients keep recomputed inputs alive"
        ),
        legal_keys=("schedule",),
        legal_more=lambda f, r: {"recompute": ["none"]},
        offer=_offer("take another schedule, or no recompute"),
    ),
    Law(
        code="SCHEDULE_UNSUPPORTED",
        statement="the runtime has the schedule",
        operands=("schedule", "pp"),
        predicate=lambda f, r: r is None or f.schedule in r.schedules,
        void=lambda f: f.pp == 1 or f.schedule is None,
        says=lambda f, r: f"schedule={f.schedule} is not one of {r.name if r else ''}",
        legal_more=lambda f, r: {"schedule": [schedule.value for schedule in r.schedules] if r else []},
        offer=_offer("take one of these, or another runtime"),
    ),
    Law(
        code="RECOMPUTE_UNKNOWN",
        statement="the runtime has the kind of recompute",
        operands=("recompute",),
        predicate=lambda f, r: r is None or f.recompute in r.recompute_kinds or f.recompute == "stages",
        void=lambda f: f.recompute is None,
        says=lambda f, r: f"recompute={f.recompute} is not a kind of {r.name if r else ''}",
        legal_more=lambda f, r: {"recompute": list(r.recompute_kinds) if r else []},
        offer=_offer("take one of these"),
    ),
    Law(
        code="TP_SPANS_NODES",
        statement="tp ≤ the fast domain",
        operands=("tp", "domain_size"),
        predicate=lambda f, r: _num(f.tp) <= _num(f.domain_size),
        void=_is_one("tp"),
        severity=Severity.WARNING,
        says=lambda f, r: f"tp={f.tp} is larger than the fast domain of {f.domain_size} GPUs",
        legal_keys=("tp",),
        legal_with=_TP_LAWS,
        offer=_offer("tensor parallelism talks in every layer: keep it inside the domain and use pp or dp across"),
    ),
    Law(
        code="MEM_STATES_GT_HBM",
        statement="the model states fit into a device",
        operands=("states_bytes", "device_bytes"),
        optional=("states_bytes_all",),
        predicate=_states_fit,
        says=lambda f, r: (
            f"weights, gradients and optimizer state take at least {_gib(f.states_bytes)} {_where(f)}, which has "
            f"{_gib(f.device_bytes)}"
        ),
        legal_more=_memory_more,
        offer=_memory_offer,
    ),
    Law(
        code="MEM_BORDERLINE",
        statement=f"the model states leave {MARGIN:.0%} of a device free",
        operands=("states_bytes", "device_bytes"),
        optional=("states_bytes_all",),
        predicate=lambda f, r: not _states_fit(f, r) or _num(f.states_bytes) <= (1 - MARGIN) * _num(f.device_bytes),
        severity=Severity.WARNING,
        says=lambda f, r: (
            f"weights, gradients and optimizer state alone take {_gib(f.states_bytes)} of the {_gib(f.device_bytes)} of the "
            f"fullest device, before any activation"
        ),
        legal_more=_memory_more,
        offer=_offer(
            "more tp or pp, a higher zero level or offload frees states; recompute frees activations, for a forward pass"
        ),
    ),
    Law(
        code="HOST_MEM",
        statement="what is offloaded by the ranks of a node fits into its host",
        operands=("host_states_bytes", "host_bytes"),
        optional=("offload_optimizer", "offload_param"),
        predicate=lambda f, r: _num(f.host_states_bytes) <= _num(f.host_bytes),
        void=lambda f: not (f.offload_optimizer or f.offload_param),
        says=lambda f, r: (
            f"offloaded states take at least {_gib(f.host_states_bytes)} of each node's host, which has {_gib(f.host_bytes)}"
        ),
        legal_more=lambda f, r: {"host_gib": [f"≥ {math.ceil(_num(f.host_states_bytes) / 2**30)}"]},
        offer=_offer("take hosts with more memory, more nodes, or offload less; loading needs a further copy per rank"),
    ),
)
"""All laws, in the order in which they are told."""

LAW: dict[str, Law] = {law.code: law for law in LAWS}
"""Code -> law."""
