"""The walk over all degrees from the outside in, which asks at each step the laws that have just become decidable."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.laws import LAWS, Facts, Law, divisors, first_breach
from cost_models.problem import Cells, IntArray
from cost_models.records import V_PLACED, Gather, Layout, Runtime, Schedule, Severity
from cost_models.records.layout import LEGAL_GATHER
from cost_models.schedules import MOST_OPERATIONS, schedule_needs
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
LEAST_CONTEXT = 2048
"""Tokens of a sequence that context parallelism leaves to a rank at least: shorter parts hide no exchange."""
MOST_SEARCHED_LAYERS = 512
"""Four times the deepest model that people plan for; there a search takes a minute and 300 MB, and at 1,000 layers far more."""
MOST_MICRO_BATCH, MOST_MICRO_BATCH_TOKENS = 16, 32_768
"""Largest micro-batch, in sequences and, of short ones, in tokens: beyond both kernels are no faster and the pipeline only has
fewer micro-batches."""
MANY_OPERATIONS = f"a step is played one by one: at most {MOST_OPERATIONS} forward and backward passes of micro-batches"


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


@dataclass(slots=True, kw_only=True)
class Log:
    """Refusals while they are counted."""

    reasons: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, code: str, reason: str, **degrees: object) -> None:
        """Count one branch that was closed; the first of a code is its example."""
        if code not in self.reasons:
            self.reasons[code] = reason
            self.examples[code] = " ".join(f"{name}={value}" for name, value in degrees.items())
        self.counts[code] += 1

    def refusals(self) -> tuple[Refusal, ...]:
        """The commonest first."""
        return tuple(
            Refusal(code=code, reason=self.reasons[code], count=count, example=self.examples[code])
            for code, count in self.counts.most_common()
        )


DEGREES = ("cp", "tp", "ep", "etp", "pp", "vpp", "mbs")
OPTIONS = ("dp_replicate", "dp_shard", "zero", "gather")
_Option = tuple[int, int, int, Gather]
"""`OPTIONS` of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Cells that differ in their options alone."""

    degrees: tuple[int, ...]
    """`DEGREES`"""
    schedule: Schedule
    options: Sequence[_Option]
    number: int


@dataclass(slots=True, kw_only=True)
class Walk:
    """The cells found so far, and what was refused on the way."""

    facts: Facts
    runtime: Runtime
    pins: Pins
    log: Log
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
                self.log.add("too many operations", MANY_OPERATIONS, pp=pp, vpp=vpp, num_micro_batches=num_micro)
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
        degrees = tuple(getattr(layout, name) for name in DEGREES)
        option = (layout.dp_replicate, layout.dp_shard, layout.zero, layout.gather)
        number = self.families.setdefault((layout.dp, *degrees, layout.schedule), len(self.families))
        if not any(number == row.number and option in row.options for row in self.rows):
            self.rows.append(_Family(degrees=degrees, schedule=layout.schedule, options=[option], number=number))

    def cells(self) -> tuple[Cells, IntArray]:
        """All cells, and the number of each one's family."""
        times = np.array([len(row.options) for row in self.rows])
        degrees = np.repeat(np.array([row.degrees for row in self.rows], dtype=np.int64), times, axis=0)
        options = [option for row in self.rows for option in row.options]
        arrays: dict[str, Any] = dict(zip(DEGREES, degrees.T, strict=True))
        for name, values in zip(OPTIONS, zip(*options, strict=True), strict=True):
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


def most_micro_batch(seq: int) -> int:
    """Sequences of `seq` tokens in the largest micro-batch that is searched."""
    return max(MOST_MICRO_BATCH, MOST_MICRO_BATCH_TOKENS // seq)
