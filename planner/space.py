"""The cells of a search: every layout of the degrees that the laws allow here, and the refusals with their reasons.

A cell fixes dp, cp, tp, ep, etp, pp, virtual stages, micro-batch size and schedule; its options (split of dp, ZeRO, gather)
are further entries of the same family. What the runtime's severities call an error restricts the space, and so do the pins.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.facts import facts_of_model
from cost_models.laws import LAWS, Facts, Law, divisors, first_breach
from cost_models.problem import Cells, IntArray
from cost_models.recompute import is_priced
from cost_models.records import V_PLACED, Cluster, Gather, Layout, Model, Runtime, Schedule, Severity, Workload
from cost_models.records.layout import LEGAL_GATHER
from cost_models.schedules import MOST_OPERATIONS, schedule_needs
from planner.arrangements import LAW as POOL_LAW
from planner.arrangements import NEIGHBOURS, Arrangement, legal_pipelines, place
from planner.errors import InfeasibleError, InputError, NotYetError
from planner.played import are_played
from planner.readers.pins import Pins

SCHEDULES = (
    Schedule.ONE_F_ONE_B,
    Schedule.INTERLEAVED,
    Schedule.GPIPE,
    Schedule.LOOPED_BFS,
    Schedule.INTERLEAVED_ZB,
    Schedule.ZBV,
    Schedule.DUALPIPEV,
    Schedule.V_HALF,
    Schedule.V_MIN,
)
"""Schedules, the first that a runtime has for a layout without a pipeline."""
SEARCHED_RECOMPUTE = ("none", "selective", "full")
"""Kinds of recompute that stages are searched with; further ones are priced where a pin names them."""
LEAST_CONTEXT = 2048
"""Tokens of a sequence that context parallelism leaves to a rank at least: shorter parts hide no exchange."""
MOST_SEARCHED_LAYERS = 512
"""Four times the deepest model that people plan for; there a search takes a minute and 300 MB, and at 1,000 layers far more."""
MOST_MICRO_BATCH, MOST_MICRO_BATCH_TOKENS = 16, 32_768
"""Largest micro-batch, in sequences and, of short ones, in tokens: beyond both kernels are no faster and the pipeline only has
fewer micro-batches."""
_MANY_OPERATIONS = (
    f"a step is played one by one: at most {MOST_OPERATIONS} forward and backward passes of micro-batches"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason why layouts are not in the space."""

    code: str
    """Law, pin, or need of the schedule."""
    reason: str
    """In words."""
    count: int
    """Branches of the enumeration that it closed."""
    example: str
    """The degrees of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """All cells, each option an entry of its own."""

    cells: Cells
    families: IntArray
    """(n,) entries of the same number differ in options only."""
    recompute_kinds: tuple[str, ...]
    """Kinds of recompute that stages may use."""
    even_stages: bool
    """The runtime cannot split layers unevenly: as many layers on every stage."""
    refusals: tuple[Refusal, ...]
    """What the laws and pins left out."""
    restrictions: tuple[str, ...]
    """What the space never holds, in words."""
    arrangement: IntArray | None = None
    """(n,) number of each entry's arrangement on the pools of a mixed cluster; None where the cluster has one pool."""
    arrangements: tuple[Arrangement, ...] = ()
    """The pool of each position of the pipeline, by that number."""

    def __len__(self) -> int:
        return len(self.cells)

    def pools(self, index: int) -> Arrangement:
        """The pool of each position of an entry's pipeline; empty where the cluster has one pool."""
        return () if self.arrangement is None else self.arrangements[int(self.arrangement[index])]

    def name(self, index: int) -> str:
        """An entry as text: its layout, and on several pools where its stages lie: `... on pools 1x2 0x4`, two on pool 1 first."""
        layout = str(self.cells.layout(index))
        runs = [f"{pool}x{len(list(run))}" for pool, run in itertools.groupby(self.pools(index))]
        return f"{layout} on pools {' '.join(runs)}" if runs else layout

    def find(self, layout: Layout) -> int | None:
        """Number of the entry with these degrees and options, whatever its recompute; None where it is not in the space."""
        same = np.ones(len(self), dtype=bool)
        for entry in fields(Layout):
            if entry.name != "recompute":
                same &= getattr(self.cells, entry.name) == getattr(layout, entry.name)
        found = np.flatnonzero(same)
        return int(found[0]) if len(found) else None


@dataclass(slots=True, kw_only=True)
class _Log:
    """Refusals while they are counted."""

    reasons: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, code: str, reason: str, **degrees: object) -> None:
        if code not in self.reasons:
            self.reasons[code] = reason
            self.examples[code] = " ".join(f"{name}={value}" for name, value in degrees.items())
        self.counts[code] += 1

    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(
            Refusal(code=code, reason=self.reasons[code], count=count, example=self.examples[code])
            for code, count in self.counts.most_common()
        )


def enumerate_cells(
    *,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    runtime: Runtime,
    pins: Pins | None = None,
    worlds: Collection[int] | None = None,
    extra: Sequence[Layout] = (),
) -> Space:
    """The legal cells on `worlds` ranks (all GPUs of the cluster by default), and `extra` layouts whatever the pins say.

    InputError for a world that the cluster has not; InfeasibleError, with the commonest reasons, where nothing is legal;
    NotYetError for a model that is too deep to be searched.
    """
    if model.num_layers > MOST_SEARCHED_LAYERS:
        raise NotYetError(
            f"model {model.name!r} has num_layers={model.num_layers:,}: plans are searched for up to {MOST_SEARCHED_LAYERS} layers; "
            "`predict` prices a layout of a deeper one"
        )
    chosen = sorted({cluster.num_gpus} if worlds is None else set(worlds))
    _check_worlds(chosen, cluster)
    pins = pins or Pins()
    builder = _Builder(
        facts=base_facts(model, cluster, workload, runtime), runtime=runtime, pins=pins, log=_Log(), families={}
    )
    for world in chosen:
        builder.add_world(world)
        builder.worlds.append(world)
    for layout in extra:
        builder.add_extra(layout)
    named = "recompute" in pins.fields
    offered = [k for k in runtime.recompute_kinds if is_priced(runtime.name, k) and (named or k in SEARCHED_RECOMPUTE)]
    kinds = tuple(kind for kind in offered if pins.allows_value("recompute", kind))
    if not builder.rows or not kinds:
        raise _nothing_legal(builder, kinds)
    cells, families = builder.cells()
    space = Space(
        cells=cells,
        families=families,
        recompute_kinds=kinds,
        even_stages=not runtime.uneven_stages,
        refusals=builder.log.refusals(),
        restrictions=_restrictions(runtime, pins, chosen, cluster, workload.seq)
        + ((_MANY_OPERATIONS,) if _MANY_OPERATIONS in builder.log.reasons.values() else ()),
    )
    return space if len(cluster.pools) == 1 else on_pools(space, model, cluster)


def on_pools(space: Space, model: Model, cluster: Cluster) -> Space:
    """The space of a mixed cluster: every arrangement of every cell, each with a family of its own.

    InfeasibleError where no cell has any.
    """
    played = are_played(space.cells, model.num_layers)
    formula = np.flatnonzero(~played)
    cells = space.cells.take(formula)
    placed = place(cells, cluster)
    refusals = space.refusals
    if len(placed.refused):
        first = int(placed.refused[0])
        refused = Refusal(
            code="pool stages",
            reason=POOL_LAW,
            count=len(placed.refused),
            example=f"world={int(cells.world[first])} pp={int(cells.pp[first])}",
        )
        refusals = (refused, *refusals)
    if not len(placed.row):
        gpus = [pool.num_gpus for pool in cluster.pools]
        legal = f"with all GPUs of {cluster.name!r} ({' + '.join(map(str, gpus))}) legal pp: multiples of {legal_pipelines(gpus)}"
        raise InfeasibleError(f"no layout is legal here: {POOL_LAW}", relaxations=(legal,))
    pairs = np.stack([space.families[formula][placed.row], placed.arrangement], axis=1)
    families = np.unique(pairs, axis=0, return_inverse=True)[1].ravel()
    told = [NEIGHBOURS, "all stages take as many GPUs, so pools serve stages in the ratio of their GPUs"]
    if played.any():
        told.append("on several kinds of GPUs: schedules whose time is played, not given by a formula")
    if any(int(world) != cluster.num_gpus for world in np.unique(cells.world)):
        told.append("of GPUs that stay idle: at most one pool is used in part")
    return replace(
        space,
        cells=cells.take(placed.row),
        families=families,
        refusals=refusals,
        restrictions=(*space.restrictions, *told),
        arrangement=placed.arrangement,
        arrangements=placed.arrangements,
    )


_DEGREES = ("cp", "tp", "ep", "etp", "pp", "vpp", "mbs")
_OPTIONS = ("dp_replicate", "dp_shard", "zero", "gather")
_Option = tuple[int, int, int, Gather]
"""`_OPTIONS` of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Cells that differ in their options alone."""

    degrees: tuple[int, ...]
    """`_DEGREES`"""
    schedule: Schedule
    options: Sequence[_Option]
    number: int


def _check_worlds(worlds: Sequence[int], cluster: Cluster) -> None:
    for world in worlds:
        if not 1 <= world <= cluster.num_gpus:
            raise InputError(
                f"--gpus {world}: cluster {cluster.name!r} has {cluster.num_gpus} GPUs; legal: 1..{cluster.num_gpus}, "
                f"or a larger cluster"
            )


def base_facts(model: Model, cluster: Cluster, workload: Workload, runtime: Runtime) -> Facts:
    """What is known before any degree is chosen."""
    return Facts(
        **(facts_of_model(model) | ({} if model.layer_groups else {"ffn": model.ffn})),
        gpus_per_node=cluster.gpus_per_node,
        domain_size=cluster.domain_size,
        seq=workload.seq,
        gbs=workload.gbs,
        precision=workload.precision.value,
        sp=runtime.sequence_parallel,
    )


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Walks the degrees from the outside in, and asks at each step the laws that have just become decidable."""

    facts: Facts
    runtime: Runtime
    pins: Pins
    log: _Log
    families: dict[tuple[object, ...], int]
    rows: list[_Family] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    options: dict[tuple[int, bool, bool, Schedule], list[_Option]] = field(default_factory=dict)
    batches: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """What `legal_batch` has been asked."""
    read_by: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    """What the laws of micro-batches read besides."""
    laws: dict[tuple[str, ...], tuple[Law, ...]] = field(default_factory=dict)

    def add_world(self, world: int) -> None:
        """All cells on exactly `world` ranks."""
        base = replace(self.facts, world=world)
        for tp in divisors(world):
            by_tp = replace(base, tp=tp)
            if not self.pinned("tp", tp) or not self.legal(by_tp, ("tp", "world")):
                continue
            for cp in self.context_degrees(world // tp):
                by_cp = replace(by_tp, cp=cp)
                if self.pinned("cp", cp) and self.legal(by_cp, ("cp",)):
                    self.add_pipelines(by_cp)

    def context_degrees(self, ranks: int) -> list[int]:
        """Parts of a sequence on `ranks` ranks; a pin may ask for more than the search offers."""
        if not self.runtime.context_parallel:
            return [1]
        most = ranks if "cp" in self.pins.fields else (self.facts.seq or 1) // LEAST_CONTEXT
        return [cp for cp in divisors(ranks) if cp <= max(most, 1)]

    def add_pipelines(self, by_cp: Facts) -> None:
        """All cells of a tensor- and context-parallel degree."""
        world, each, gbs = by_cp.world or 1, (by_cp.tp or 1) * (by_cp.cp or 1), by_cp.gbs or 1
        for pp in divisors(world // each):
            dp = world // (each * pp)
            if not (self.pinned("pp", pp) and self.pinned("dp", dp)):
                continue
            if gbs % dp:
                self.log.add("GBS_MOD_MBSDP", "gbs % (mbs·dp) = 0", gbs=gbs, dp=dp)
                continue
            by_pp = replace(by_cp, pp=pp, dp=dp)
            if not self.legal(by_pp, ("pp", "dp")):
                continue
            for ep, etp in self.expert_degrees(by_pp):
                by_experts = replace(by_pp, ep=ep, etp=etp)
                if not self.legal(by_experts, ("ep", "etp")):
                    continue
                for schedule, vpp in self.pipelines(by_experts, pp):
                    self.add_batches(by_experts, schedule, vpp)

    def expert_degrees(self, facts: Facts) -> Iterator[tuple[int, int]]:
        """(ep, etp): experts whole or split as the dense layers, over a part of dp·cp·tp."""
        tp, ranks = facts.tp or 1, (facts.dp or 1) * (facts.cp or 1) * (facts.tp or 1)
        # a pin may ask for another degree than the search offers
        asked = divisors(tp) if "etp" in self.pins.fields else sorted({1, tp})
        for etp in asked if facts.num_experts else [1]:
            if not self.pinned("etp", etp):
                continue
            spread = self.runtime.expert_parallel and facts.num_experts
            for ep in divisors(facts.num_experts or 1) if spread else [1]:
                if ranks % (ep * etp) == 0 and self.pinned("ep", ep):
                    yield ep, etp

    def pinned(self, name: str, value: object) -> bool:
        """Whether the pins let a field have this value; counted where not."""
        allowed = self.pins.allows_value(name, value)
        if not allowed:
            pin = next(pin for pin in self.pins.pins if pin.field == name)
            self.log.add(f"pin {name}", f"the pin {pin}", **{name: value})
        return allowed

    def legal(self, facts: Facts, fresh: tuple[str, ...]) -> bool:
        """Whether every law that the `fresh` operands make decidable holds; counted where not."""
        if fresh not in self.laws:
            known = {entry.name for entry in fields(facts) if getattr(facts, entry.name) is not None}
            self.laws[fresh] = tuple(
                law
                for law in LAWS
                if law.severity_of(self.runtime) is Severity.ERROR
                and known.issuperset(law.operands)
                and set(fresh) & {*law.operands, *law.optional}
            )
        broken = first_breach(self.laws[fresh], facts, self.runtime)
        if broken is not None:
            degrees = {name: getattr(facts, name) for name in (*broken.operands, *broken.optional)}
            self.log.add(broken.code, broken.statement, **{k: v for k, v in degrees.items() if v is not None})
        return broken is None

    def pipelines(self, facts: Facts, pp: int) -> Iterator[tuple[Schedule, int]]:
        """(schedule, vpp) that the runtime has and whose stages can be filled."""
        layers = facts.num_layers or 0
        available = [schedule for schedule in SCHEDULES if schedule in self.runtime.schedules]
        if pp == 1:
            plain = next((s for s in available if s in (Schedule.ONE_F_ONE_B, Schedule.GPIPE)), Schedule.ONE_F_ONE_B)
            named = self.schedule_without_pipeline(plain)
            if self.pinned("vpp", 1) and named is not None:
                yield named, 1
            return
        for schedule in available:
            if not self.pinned("schedule", schedule):
                continue
            counts = chunk_counts(schedule, layers, pp)
            if not counts:
                self.log.add(
                    "virtual stages", f"{schedule}: more than one layer on each device", num_layers=layers, pp=pp
                )
            for vpp in counts:
                if not self.fills(schedule, layers, pp, vpp):
                    continue
                by_schedule = replace(facts, schedule=schedule, vpp=vpp)
                if self.pinned("vpp", vpp) and self.legal(by_schedule, ("schedule", "vpp")):
                    yield schedule, vpp

    def fills(self, schedule: Schedule, layers: int, pp: int, vpp: int) -> bool:
        """Whether there are blocks for all virtual stages, evenly where the runtime cannot do otherwise; counted where not."""
        if layers + 2 < pp * vpp:
            self.log.add("blocks", "each virtual stage holds a block", num_layers=layers, pp=pp, vpp=vpp)
            return False
        if layers % (pp * vpp) and not self.runtime.uneven_stages:
            self.log.add("equal stages", "the runtime cannot split layers unevenly", num_layers=layers, pp=pp, vpp=vpp)
            return False
        return True

    def schedule_without_pipeline(self, plain: Schedule) -> Schedule | None:
        """With pp = 1 1f1b and gpipe are plain accumulation, and a pin says which is written down; other schedules ask for a
        pipeline: None, and counted."""
        for schedule in (plain, Schedule.ONE_F_ONE_B, Schedule.GPIPE):
            if self.pins.allows_value("schedule", schedule):
                return schedule
        self.log.add("no pipeline", "the pinned schedule asks for pp > 1", pp=1)
        return None

    def add_batches(self, facts: Facts, schedule: Schedule, vpp: int) -> None:
        """All micro-batch sizes and options of one pipeline."""
        dp, pp, gbs = facts.dp or 1, facts.pp or 1, facts.gbs or 1
        each = gbs // dp
        # a pin may ask for more than the search offers
        pinned = "mbs" in self.pins.fields
        most = each if pinned else most_micro_batch(facts.seq or 1)
        for mbs in (size for size in divisors(each) if size <= most):
            num_micro = each // mbs
            if not self.pinned("mbs", mbs) or not self.legal_batch(facts, schedule, vpp, mbs, num_micro):
                continue
            if 2 * pp * vpp * num_micro > MOST_OPERATIONS:
                self.log.add("too many operations", _MANY_OPERATIONS, pp=pp, vpp=vpp, num_micro_batches=num_micro)
                continue
            if schedule is Schedule.INTERLEAVED and num_micro < pp:
                # the objective supposes a full pipeline: with m = 1 nothing overlaps, and J is a small part of S
                self.log.add(
                    "unfilled interleaved", "interleaved: at least pp micro-batches", pp=pp, num_micro_batches=num_micro
                )
                continue
            need = next((n for n in schedule_needs(schedule) if pp > 1 and not n.holds(pp, vpp, num_micro)), None)
            if need is not None:
                self.log.add(f"schedule {schedule}", need.law, pp=pp, vpp=vpp, num_micro_batches=num_micro)
                continue
            degrees = (facts.cp or 1, facts.tp or 1, facts.ep or 1, facts.etp or 1, pp, vpp, mbs)
            family = self.families.setdefault((dp, *degrees, schedule), len(self.families))
            options = [o for o in self.options_of(facts, schedule) if o[2] == 0 or self.divides_experts(facts, o[1])]
            if options:
                self.rows.append(_Family(degrees=degrees, schedule=schedule, options=options, number=family))

    def legal_batch(self, facts: Facts, schedule: Schedule, vpp: int, mbs: int, num_micro: int) -> bool:
        """Whether the laws of micro-batches hold; each question that they can tell apart is asked once."""
        fresh = ("mbs", "num_micro_batches")
        asked = tuple(getattr(facts, name) for name in self.read_by.get(fresh, ()))
        key = (schedule, vpp, mbs, num_micro, *asked)
        if fresh not in self.read_by or key not in self.batches:
            by_batch = replace(facts, schedule=schedule, vpp=vpp, mbs=mbs, num_micro_batches=num_micro)
            legal = self.legal(by_batch, fresh)
            read = {name for law in self.laws[fresh] for name in (*law.operands, *law.optional)}
            self.read_by[fresh] = tuple(sorted(read - {"schedule", "vpp", *fresh}))
            key = (schedule, vpp, mbs, num_micro, *(getattr(facts, name) for name in self.read_by[fresh]))
            self.batches[key] = legal
        return self.batches[key]

    def divides_experts(self, facts: Facts, dp_shard: int) -> bool:
        """Whether the ranks that ZeRO divides over hold whole expert groups; counted where not."""
        ranks, group = dp_shard * (facts.cp or 1) * (facts.tp or 1), (facts.ep or 1) * (facts.etp or 1)
        if ranks % group:
            law = "dp_shard·cp·tp % (ep·etp) = 0: ZeRO divides whole expert-parallel groups"
            self.log.add("shard of experts", law, dp_shard=dp_shard, cp=facts.cp, tp=facts.tp, ep=facts.ep)
        return ranks % group == 0

    def options_of(self, facts: Facts, schedule: Schedule) -> list[_Option]:
        """(dp_replicate, dp_shard, zero, gather) of a data-parallel degree."""
        dp, pipeline, context = facts.dp or 1, (facts.pp or 1) > 1, (facts.cp or 1) > 1
        key = (dp, pipeline, context, schedule)
        if key not in self.options:
            found = []
            for zero in self.runtime.zero_levels_with_pp if pipeline else self.runtime.zero_levels:
                shards = [1] if zero == 0 else [shard for shard in divisors(dp) if shard > 1 or context]
                gather = Gather(self.runtime.zero2_gather) if zero == 2 else Gather(LEGAL_GATHER[zero][0])
                for shard in shards:
                    by_option = replace(
                        facts, schedule=schedule, zero=zero, gather=gather, dp_shard=shard, dp_replicate=dp // shard
                    )
                    names = {"zero": zero, "gather": gather, "dp_shard": shard, "dp_replicate": dp // shard}
                    if all(self.pinned(name, value) for name, value in names.items()) and self.legal(
                        by_option, ("zero", "gather", "dp_shard", "dp_replicate")
                    ):
                        found.append((dp // shard, shard, zero, gather))
            self.options[key] = found
        return self.options[key]

    def add_extra(self, layout: Layout) -> None:
        """One layout that must be in the space."""
        degrees = tuple(getattr(layout, name) for name in _DEGREES)
        option = (layout.dp_replicate, layout.dp_shard, layout.zero, layout.gather)
        number = self.families.setdefault((layout.dp, *degrees, layout.schedule), len(self.families))
        if not any(number == row.number and option in row.options for row in self.rows):
            self.rows.append(_Family(degrees=degrees, schedule=layout.schedule, options=[option], number=number))

    def cells(self) -> tuple[Cells, IntArray]:
        """All cells, and the number of each one's family."""
        times = np.array([len(row.options) for row in self.rows])
        degrees = np.repeat(np.array([row.degrees for row in self.rows], dtype=np.int64), times, axis=0)
        options = [option for row in self.rows for option in row.options]
        arrays: dict[str, Any] = dict(zip(_DEGREES, degrees.T, strict=True))
        for name, values in zip(_OPTIONS, zip(*options, strict=True), strict=True):
            arrays[name] = _objects(values) if name == "gather" else np.array(values, dtype=np.int64)
        schedules = np.repeat(_objects([row.schedule for row in self.rows]), times)
        numbers = np.repeat(np.array([row.number for row in self.rows]), times)
        return Cells(**arrays, schedule=schedules), numbers


def _objects(values: Sequence[object]) -> NDArray[np.object_]:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def chunk_counts(schedule: Schedule, num_layers: int, pp: int) -> list[int]:
    """Virtual stages on each device that a schedule can have: 2 in a V, what divides a device's layers in a loop, else 1."""
    if schedule in V_PLACED:
        return [2]
    if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        return [1]
    return [chunks for chunks in divisors(max(1, num_layers // pp)) if chunks > 1]


def _nothing_legal(builder: _Builder, kinds: Sequence[str]) -> InfeasibleError | InputError:
    """What closed the space, and for each pin the values that would leave something in it."""
    runtime, pins = builder.runtime, builder.pins
    if not kinds:
        return InputError(
            f"the pins allow no kind of recompute of runtime {runtime.name!r}; legal: {', '.join(runtime.recompute_kinds)}"
        )
    laws = [refusal for refusal in builder.log.refusals() if not refusal.code.startswith("pin ")]
    told = [*_missing_schedules(runtime, pins)]
    told += [f"{one.code}: {one.reason} (closed {one.count} branches, the first at {one.example})" for one in laws[:4]]
    for pin in pins.pins:
        others = Pins(pins=tuple(other for other in pins.pins if other is not pin))
        free = _Builder(facts=builder.facts, runtime=runtime, pins=others, log=_Log(), families={})
        for world in builder.worlds:
            free.add_world(world)
        if free.rows and pin.field in (*_DEGREES, *_OPTIONS, "schedule", "dp"):
            legal = sorted(set(getattr(free.cells()[0], pin.field).tolist()))
            told.append(
                f"in place of the pin {pin}, with all else as it is: {pin.field} = {', '.join(map(str, legal))}"
            )
    pinned = f" with the pins {pins}" if pins.pins else ""
    return InfeasibleError(f"no layout is legal here{pinned}", relaxations=tuple(told))


def most_micro_batch(seq: int) -> int:
    """Sequences of `seq` tokens in the largest micro-batch that is searched."""
    return max(MOST_MICRO_BATCH, MOST_MICRO_BATCH_TOKENS // seq)


def _missing_schedules(runtime: Runtime, pins: Pins) -> Iterator[str]:
    """Pins that ask for nothing but schedules that the runtime has not."""
    has = [schedule.value for schedule in runtime.schedules]
    for pin in pins.pins:
        if pin.field == "schedule" and not any(pin.allows(schedule) for schedule in has):
            yield f"runtime {runtime.name} has no schedule that the pin {pin} allows; it has {', '.join(has)}"


def _restrictions(runtime: Runtime, pins: Pins, worlds: Sequence[int], cluster: Cluster, seq: int) -> tuple[str, ...]:
    """What is not in the space, and why."""
    told = [
        "a stage's replicas on two GPU types, unequal micro-batch shares, and tp per stage are never in the space",
        "rank order: tp, cp, dp_shard, dp_replicate, pp from the inside out",
        "interleaved: at least pp micro-batches; with as many layers in every virtual stage J is its formula, embedding in the first, head in the last",
        "further schedules, and virtual stages of unequal layers: the balanced split and the one with embedding's and head's stage a layer lighter, one kind of recompute everywhere; J is their simulated time",
        "recompute serves memory alone: a device that fits without it has none, to hide synchronisation behind it is no reason",
    ]
    if not runtime.context_parallel:
        told.append(f"runtime {runtime.name} has no context parallelism: cp = 1")
    if not runtime.expert_parallel:
        told.append(f"runtime {runtime.name} has no expert parallelism: ep = 1")
    if runtime.context_parallel and "cp" not in pins.fields:
        told.append(f"context parallelism leaves at least {LEAST_CONTEXT} tokens of a sequence to a rank")
    if "recompute" not in pins.fields and any(kind not in SEARCHED_RECOMPUTE for kind in runtime.recompute_kinds):
        told.append(
            f"recompute of single modules is priced, but searched only where a pin names it; searched: {', '.join(SEARCHED_RECOMPUTE)}"
        )
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
