"""What a space never holds, and what closed it where nothing is left: in words."""

from collections.abc import Iterator, Sequence

from cost_models.rank_orders import orders_of
from cost_models.records import Cluster, Runtime
from cost_models.records.runtime import ANY_ORDER
from planner.errors import InfeasibleError, InputError
from planner.readers.pins import Pins
from planner.search.walk import (
    DEGREES,
    LEAST_CONTEXT,
    OPTIONS,
    SCHEDULES,
    Log,
    Walk,
    most_micro_batch,
)


def nothing_legal(walk: Walk, kinds: Sequence[str]) -> InfeasibleError | InputError:
    """What closed the space, and for each pin the values that would leave something in it."""
    runtime, pins = walk.runtime, walk.pins
    if not kinds:
        return InputError(
            f"the pins allow no kind of recompute of runtime {runtime.name!r}; legal: {', '.join(runtime.recompute_kinds)}"
        )
    laws = [refusal for refusal in walk.log.refusals() if not refusal.code.startswith("pin ")]
    told = [*_missing_schedules(runtime, pins)]
    told += [f"{one.code}: {one.reason} (closed {one.count} branches, the first at {one.example})" for one in laws[:4]]
    for pin in pins.pins:
        others = Pins(pins=tuple(other for other in pins.pins if other is not pin))
        free = Walk(facts=walk.facts, runtime=runtime, pins=others, log=Log(), families={})
        for world in walk.worlds:
            free.add_world(world)
        if free.rows and pin.field in (*DEGREES, *OPTIONS, "schedule", "dp"):
            legal = sorted(set(getattr(free.cells()[0], pin.field).tolist()))
            told.append(
                f"in place of the pin {pin}, with all else as it is: {pin.field} = {', '.join(map(str, legal))}"
            )
    pinned = f" with the pins {pins}" if pins.pins else ""
    return InfeasibleError(f"no layout is legal here{pinned}", relaxations=tuple(told))


def _missing_schedules(runtime: Runtime, pins: Pins) -> Iterator[str]:
    """Pins that ask for nothing but schedules that the runtime has not."""
    has = [schedule.value for schedule in runtime.schedules]
    for pin in pins.pins:
        if pin.field == "schedule" and not any(pin.allows(schedule) for schedule in has):
            yield f"runtime {runtime.name} has no schedule that the pin {pin} allows; it has {', '.join(has)}"


def _orders(runtime: Runtime, cluster: Cluster) -> str:
    """Which rank orders are in the space."""
    usual = "tp, cp, dp_shard, dp_replicate, pp from the inside out"
    others = orders_of(runtime)[1:]
    if not others or len(cluster.pools) > 1:
        return f"rank order: {usual}"
    which = (
        "any in which tp lies inside cp" if ANY_ORDER in runtime.rank_orders else f"or {', '.join(runtime.rank_orders)}"
    )
    return f"rank order: {usual}, {which}, where the members of each group are evenly spaced; experts keep etp and ep inside"


def restrictions(runtime: Runtime, pins: Pins, worlds: Sequence[int], cluster: Cluster, seq: int) -> tuple[str, ...]:
    """What is not in the space, and why."""
    told = [
        "a stage's replicas on two GPU types, unequal micro-batch shares, and tp per stage are never in the space",
        _orders(runtime, cluster),
        "interleaved: at least pp micro-batches; with as many layers in every virtual stage J is its formula, embedding in the first, head in the last",
        "further schedules, and virtual stages of unequal layers: the balanced split and the one with embedding's and head's stage a layer lighter, one kind of recompute everywhere; J is their simulated time",
        "the layers of a virtual stage are recomputed in two ways at most",
        "recompute serves memory alone: a device that fits without it has none, to hide synchronisation behind it is no reason",
    ]
    if not runtime.context_parallel:
        told.append(f"runtime {runtime.name} has no context parallelism: cp = 1")
    if not runtime.expert_parallel:
        told.append(f"runtime {runtime.name} has no expert parallelism: ep = 1")
    if runtime.context_parallel and "cp" not in pins.fields:
        told.append(f"context parallelism leaves at least {LEAST_CONTEXT} tokens of a sequence to a rank")
    if "recompute" not in pins.fields:
        told.append("kinds of recompute that save less than 0.1% of a layer's time against mixing two others")
    if "mbs" not in pins.fields:
        told.append(f"micro-batches of more than {most_micro_batch(seq):,} sequences")
    missing = [schedule.value for schedule in SCHEDULES if schedule not in runtime.schedules]
    if missing:
        told.append(f"runtime {runtime.name} has no schedule {', '.join(missing)}")
    if not runtime.uneven_stages:
        told.append(f"runtime {runtime.name}: as many layers on every stage (no way is known to split them unevenly)")
    levels = [zero for zero in (1, 2, 3) if zero not in runtime.zero_levels]
    if levels:
        told.append(f"runtime {runtime.name} does not realise ZeRO {', '.join(map(str, levels))}")
    with_pp = [zero for zero in runtime.zero_levels if zero not in runtime.zero_levels_with_pp]
    if with_pp:
        told.append(f"runtime {runtime.name} does not realise ZeRO {', '.join(map(str, with_pp))} where pp > 1")
    if worlds != [cluster.num_gpus]:
        told.append(
            f"worlds of {', '.join(map(str, worlds)) if len(worlds) < 6 else f'{worlds[0]}..{worlds[-1]}'} GPUs"
        )
    if pins.pins:
        told.append(f"pinned: {pins}")
    return tuple(told)
