"""Terms that several laws share: predicates, and the words of a breach with its numbers."""

import math
from collections.abc import Callable
from typing import Any

from cost_models.facts import Facts
from cost_models.recompute import PART_OF_MODULE
from cost_models.records import Gather, Runtime, Schedule
from cost_models.records.layout import LEGAL_GATHER, V_PLACED


def divisors(number: int) -> list[int]:
    """Divisors of a positive whole number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def micro_batches_needed(facts: Facts) -> int:
    """Least micro-batches of a step with which the schedule runs; 1f1b where none is said.

    torch 2.13's Schedule1F1B refuses fewer than its stages, ScheduleDualPipeV fewer than its virtual stages; GPipe, ZBV and
    the interleaved schedules take any number, and so do our lists of V-half and V-min.
    """
    if facts.pp is None or facts.pp == 1 or facts.schedule in ANY_MICRO_BATCHES:
        return 1
    if facts.schedule is None and (facts.vpp or 1) > 1:
        return 1
    return facts.pp * (2 if facts.schedule is Schedule.DUALPIPEV else 1)


ANY_MICRO_BATCHES = frozenset(Schedule) - {Schedule.ONE_F_ONE_B, Schedule.DUALPIPEV}
ONE_CHUNK = frozenset({Schedule.GPIPE, Schedule.ONE_F_ONE_B})
TWO_CHUNKS = V_PLACED
LOOPED = frozenset({Schedule.INTERLEAVED, Schedule.LOOPED_BFS, Schedule.INTERLEAVED_ZB})
MARGIN = 0.10
"""Share of a device's memory within which a prediction is called borderline: people report runs with 5 to 10% of predicted
head-room failing now and then, and context, workspaces and fragmentation take 8 to 14 GiB of an 80 GiB card (bigscience logs)."""


def num(value: int | None) -> int:
    """A number that a predicate may rely on."""
    assert value is not None
    return value


def product(facts: Facts, *names: str) -> int:
    """Product of operands that are known."""
    return math.prod(num(getattr(facts, name)) for name in names)


def gib(number: float | None) -> str:
    """Bytes in words."""
    assert number is not None
    return f"{number / 2**30:.1f} GiB"


def looped(facts: Facts) -> bool:
    """The layout runs several virtual stages on each device in turn, as far as it is said."""
    return facts.schedule in LOOPED or (facts.schedule is None and (facts.vpp or 1) > 1)


def schedule_fits_vpp(facts: Facts, runtime: Runtime | None) -> bool:
    """The virtual stages on a device are those that the schedule runs."""
    vpp = num(facts.vpp)
    if facts.schedule in ONE_CHUNK:
        return vpp == 1
    return vpp == 2 if facts.schedule in TWO_CHUNKS else vpp >= 2


def seq_multiple(facts: Facts) -> int:
    """Tokens of which a sequence must be a multiple: 2 chunks a rank with ring attention (load balance), tp with SP.

    Where it is not said whether there is SP, the strictest demand.
    """
    tp = 1 if facts.sp is False else facts.tp or 1
    cp = facts.cp or 1
    if cp == 1:
        return tp
    chunks = 1 if facts.ulysses and facts.ulysses > 1 else 2
    return cp * math.lcm(chunks, tp)


def vocab_step(facts: Facts, runtime: Runtime | None) -> int:
    """Padded vocabularies are multiples of this: as the runtime pads, else lcm(tp, 128), which keeps matrix tiles whole."""
    if runtime is not None and runtime.vocab_multiple > 1:
        return runtime.vocab_multiple * num(facts.tp)
    return math.lcm(num(facts.tp), 128)


def legal_gathers(facts: Facts, runtime: Runtime | None) -> list[Gather]:
    """When parameters may be gathered at this zero level; at level 2 it is the runtime's way."""
    if facts.zero == 2 and runtime is not None:
        return [Gather(runtime.zero2_gather)]
    return [Gather(way) for way in LEGAL_GATHER.get(num(facts.zero), ())]


def nearest_multiples(number: int, step: int) -> list[int]:
    """Multiples of `step` beside `number`, none of them 0."""
    below = number // step * step
    return [value for value in (below, below + step) if value > 0]


def edp(facts: Facts) -> tuple[int, int]:
    """(dp·cp·tp, ep·etp); an etp that is not known counts as 1."""
    return product(facts, "dp", "cp", "tp"), num(facts.ep) * (facts.etp or 1)


def not_divisible(name: str, by: str) -> Callable[[Facts, Runtime | None], str]:
    """The words of a division with a rest."""
    return lambda f, r: f"{name}={getattr(f, name)} is not divisible by {by}={getattr(f, by)}"


def divides(name: str, by: str) -> Callable[[Facts, Runtime | None], bool]:
    """The predicate of a division without a rest."""
    return lambda f, r: getattr(f, name) % getattr(f, by) == 0


def is_one(name: str) -> Callable[[Facts], bool]:
    """Nothing is divided by a degree of 1."""
    return lambda f: getattr(f, name) == 1


def offer(text: str) -> Callable[[Facts, Runtime | None], str]:
    """The same advice, whatever the numbers."""
    return lambda f, r: text


TP_LAWS = ("WORLD_MOD_MP", "HEADS_MOD_TP", "KV_HEADS_MOD_TP", "KV_REPLICAS_MOD_TP", "VOCAB_MOD_TP", "FFN_MOD_TP")
PP_LAWS = ("WORLD_MOD_MP", "LAYERS_MOD_PP", "LAYERS_MOD_PPVPP", "STAGES_GT_BLOCKS")


def tp_offer(facts: Facts, runtime: Runtime | None) -> str:
    """Another tp, or another axis where heads and GPUs have no divisor in common."""
    if facts.world and math.gcd(num(facts.heads), facts.kv_heads or 0, facts.world) == 1:
        return "divide over these GPUs by pp or by FSDP (dp_shard) instead"
    return "take a legal tp, or divide over the rest by pp or FSDP"


def uneven_offer(virtual: bool) -> Callable[[Facts, Runtime | None], str]:
    """The split that is nearest to even, where the runtime has a way to be told."""

    def offer(facts: Facts, runtime: Runtime | None) -> str:
        stages = num(facts.pp) * (num(facts.vpp) if virtual else 1)
        least, more = divmod(num(facts.num_layers), stages)
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


def memory_more(facts: Facts, runtime: Runtime | None) -> dict[str, list[Any]]:
    """Least devices over which all model states, evenly divided, fit."""
    if facts.states_bytes_all is None or facts.device_bytes is None:
        return {}
    return {"least_gpus": [max(1, -(-facts.states_bytes_all // facts.device_bytes))]}


def states_fit(facts: Facts, runtime: Runtime | None) -> bool:
    """The model states are no more than the device."""
    return num(facts.states_bytes) <= num(facts.device_bytes)


def where(facts: Facts) -> str:
    """Which device the bytes are counted on."""
    if facts.tp is None or (facts.world is not None and facts.world % product(facts, "tp", "pp", "cp")):
        return f"on a device, divided evenly over all {facts.world}"
    return "on the fullest device"


def memory_offer(facts: Facts, runtime: Runtime | None) -> str:
    """What divides the model states, and what they are in all."""
    whole = f"all model states are {gib(facts.states_bytes_all)}: " if facts.states_bytes_all else ""
    level = f"zero up to {max(runtime.zero_levels)}, " if runtime else ""
    return f"{whole}divide them over more GPUs (tp, pp, {level}no activations counted), or offload the optimizer to host memory"


def uneven_kv_heads(facts: Facts) -> list[int]:
    """Numbers of key and value heads that are neither a multiple nor a divisor of tp."""
    tp, of_groups = num(facts.tp), facts.kv_heads_of_groups or (num(facts.kv_heads),)
    return [heads for heads in of_groups if heads % tp and tp % heads]


def parts_without(f: Facts) -> list[str]:
    """Parts of a model that the kind of recompute names and that this model is known not to have."""
    absent = {"experts": f.num_experts == 0, "latent attention": f.latent_attention is False}
    named = [PART_OF_MODULE[module] for module in (f.recompute or "").split("+") if module in PART_OF_MODULE]
    return [part for part in dict.fromkeys(named) if absent[part]]
