"""What to change where nothing fits: single changes, each told only after solving again with it.

"The least" is said where every smaller change was tried, or where memory decides, which is monotone: less of it is never
better. Otherwise the next smaller change that was tried stands beside it.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from cost_models.records import NodeKind, Verdict
from cost_models.stage import usable_bytes
from cost_models.units import GIB
from planner.errors import InfeasibleError, TimeLimitError
from planner.pace import Pace, Tell
from planner.search.incumbent import least_memory_bytes
from planner.search.pooled import price
from planner.search.priced import Priced
from planner.what_if.changes import Change, ChangeKind, Question
from planner.what_if.feasible import Found, anything_fits, is_feasible, solved, space_of

MOST_COUNTS = 32
"""Counts of GPUs that are tried one by one for the least that would do; beyond, by doubling and halving the step."""
_MOST_TIMES = 64
"""Multiple of the GPUs and of the memory asked for beyond which none is looked for."""
_LEAST_GPUS_LOOKED_FOR = 4096
"""GPUs up to which is looked in any case."""
_MEMORY_STEPS_GIB = (0.1, 0.01)
"""Grain of the least memory: of devices from 4 GiB, and of smaller ones."""
_TOLD_FIRST = (
    ChangeKind.PIN,
    ChangeKind.GPUS,
    ChangeKind.MEMORY,
    ChangeKind.MEMORY_TIMES,
    ChangeKind.OFFLOAD,
    ChangeKind.SEQ,
    ChangeKind.BATCH,
)


class Deadline:
    """When to stop trying, and what is being tried."""

    def __init__(self, limit_s: float | None, tell: Tell | None = None) -> None:
        self.end = math.inf if limit_s is None else time.monotonic() + limit_s
        self.pace = Pace(tell=tell)

    def left_s(self) -> float | None:
        """Seconds left; None where there is no limit."""
        return None if math.isinf(self.end) else self.end - time.monotonic()

    def check(self, trying: str) -> None:
        """TimeLimitError where nothing is left; else, now and then, a line that says what is tried."""
        self.pace.at(lambda: f"nothing fits as asked; trying {trying}")
        if self.end <= time.monotonic():
            raise TimeLimitError("the time limit ended before every change was tried")


def nothing_fits(
    question: Question, priced: Priced, limit_s: float | None = None, tell: Tell | None = None
) -> InfeasibleError:
    """The error for a space without a plan that fits, with every single change found within `limit_s`."""
    problem, pins = question.problem, question.pins
    device = problem.cluster.pools[0].kind.device
    pinned = f" with the pins {pins}" if pins.pins else ""
    where, room = (
        f"{question.most_gpus} x {device.name}",
        f"{usable_bytes(problem) / GIB:.1f} GiB of each device are usable, and ",
    )
    if len(problem.cluster.pools) > 1:
        where, room = f"{question.most_gpus} GPUs of {problem.cluster.name}", ""
    return told(
        f"{problem.model.name} fits on {where} under no layout{pinned}: {room}{len(priced.space):,} layouts were tried",
        question,
        (_fewer_pins, _more_memory, _more_gpus, _offloaded, _shorter, _smaller_batch),
        limit_s,
        tell,
    )


def told(
    message: str,
    question: Question,
    families: tuple[Callable[[Question, Deadline], Iterator[Change]], ...],
    limit_s: float | None,
    tell: Tell | None = None,
) -> InfeasibleError:
    """The error with every change that `families` find within `limit_s`; what came before the time ended is kept."""
    deadline, note = Deadline(limit_s, tell), ""
    changes: list[Change] = []
    try:
        for family in families:
            changes.extend(family(question, deadline))  # what came before the time ended is kept
    except TimeLimitError:
        note = " (the time limit ended before every change was tried)"
    changes.sort(key=lambda change: _TOLD_FIRST.index(change.kind))  # stable
    if changes:
        message += f"; with any one of these it fits{note}:"
    return InfeasibleError(
        message + ("" if changes else note),
        relaxations=tuple(_in_full(change) for change in changes),
        changes=tuple(change.document for change in changes),
    )


def _in_full(change: Change) -> str:
    risky = ", on expectation only" if change.verdict == Verdict.RISKY else ""
    seconds = f"{change.step_s:,.0f}" if change.step_s >= 1000 else f"{change.step_s:.3g}"
    return f"{change.words}: {seconds} s a step, {change.memory_gib_max:.1f} GiB{risky} ({change.layout})"


def _change(question: Question, deadline: Deadline, **said: object) -> Change | None:
    """The change, where its question has a plan."""
    found = solved(question, time_limit_s=deadline.left_s())
    return None if found is None else with_plan(found, **said)


def with_plan(found: Found, **said: object) -> Change:
    """A change with the plan that was found with it; `said` are its other fields."""
    return Change(
        layout=str(found.decision.layout),
        step_s=found.predicted.step_s,
        memory_gib_max=found.predicted.memory_gib_max,
        verdict=found.predicted.verdict.value,
        **said,  # type: ignore[arg-type]
    )


# --- each family of changes ---------------------------------------------------------------------------------------------


def _fewer_pins(question: Question, deadline: Deadline) -> Iterator[Change]:
    """Each pin that is enough to drop; all of them where no single one is."""
    pins = question.pins.pins
    alone = [(pin,) for pin in pins]
    dropped_alone = False
    for dropped in [*alone, *([pins] if len(pins) > 1 else [])]:
        deadline.check("fewer pins")
        if len(dropped) > 1 and dropped_alone:
            return
        freed = question.without_pins(dropped)
        found = solved(freed, time_limit_s=deadline.left_s()) if is_feasible(freed) else None
        if found is None:
            continue
        dropped_alone = True
        now = ", ".join(
            f"{pin.field}={getattr(value, 'value', value)}"
            for pin in dropped
            for value in (getattr(found.decision.layout, pin.field),)
        )
        names = ", ".join(map(str, dropped))
        yield with_plan(
            found,
            kind=ChangeKind.PIN,
            value=names,
            instead_of=None,
            words=f"without the pin{'s' if len(dropped) > 1 else ''} {names} (then {now})",
        )


def _more_gpus(question: Question, deadline: Deadline) -> Iterator[Change]:
    """The least number of GPUs: of this cluster, then of more nodes of its kind; of several pools, more nodes of each alone."""
    if len(question.problem.cluster.pools) > 1:
        for number in range(len(question.problem.cluster.pools)):
            yield from _more_nodes(question, number, deadline)
        return
    counts = counts_above(question)
    found, below = _least_of(counts, lambda gpus: is_feasible(question.on(gpus)), deadline)
    if found is None:
        return
    least = counts.index(found) <= MOST_COUNTS
    per_node = question.problem.cluster.pools[0].kind.gpus_per_node
    nodes = f" ({found // per_node} nodes of {per_node})" if found % per_node == 0 and found > per_node else ""
    how = f"({below} would not do)"
    if least:
        how = "the least number of whole nodes" if found > per_node else "the least number"
    change = _change(
        question.on(found),
        deadline,
        kind=ChangeKind.GPUS,
        value=found,
        instead_of=question.most_gpus,
        too_little=below,
        least=least,
        words=f"{found} GPUs of this kind{nodes}{', ' if least else ' '}{how}",
    )
    if change is not None:
        yield change


def _more_nodes(question: Question, number: int, deadline: Deadline) -> Iterator[Change]:
    """The least number of nodes of one pool beside the others as they are, tried one by one."""
    cluster = question.problem.cluster
    pool = cluster.pools[number]
    counts = list(range(pool.num_nodes + 1, pool.num_nodes + 1 + MOST_COUNTS))
    found, below = _least_of(counts, lambda nodes: is_feasible(question.with_nodes(number, nodes)), deadline)
    if found is None:
        return
    others = " and ".join(f"{other.num_gpus} {other.kind.device.name}" for other in cluster.pools if other is not pool)
    per_node = pool.kind.gpus_per_node
    change = _change(
        question.with_nodes(number, found),
        deadline,
        kind=ChangeKind.GPUS,
        value=cluster.num_gpus + (found - pool.num_nodes) * per_node,
        instead_of=question.most_gpus,
        too_little=None if below is None else cluster.num_gpus + (below - pool.num_nodes) * per_node,
        least=True,
        pool=number,
        words=f"{found * per_node} {pool.kind.device.name} ({found} nodes of {per_node}) beside {others}, the least number of whole nodes",
    )
    if change is not None:
        yield change


def counts_above(question: Question) -> list[int]:
    """Numbers of GPUs above those asked for: one by one within a node, then whole nodes."""
    per_node, asked = question.problem.cluster.pools[0].kind.gpus_per_node, question.most_gpus
    most = max(_LEAST_GPUS_LOOKED_FOR, _MOST_TIMES * asked)
    first = (asked // per_node + 1) * per_node
    return [*range(asked + 1, min(first, per_node)), *range(first, most + 1, per_node)]


def _least_of(counts: list[int], enough: Callable[[int], bool], deadline: Deadline) -> tuple[int | None, int | None]:
    """The first of `counts` that is enough, and the last one tried before it that is not.

    One by one up to MOST_COUNTS; then by doubling, and by halving what is between.
    """
    below, place, last = None, 0, len(counts) - 1
    while True:
        deadline.check("more GPUs")
        if enough(counts[place]):
            break
        if place == last:
            return None, None
        below, place = place, place + 1 if place < MOST_COUNTS else min(2 * place, last)
    while below is not None and place - below > 1 and place > MOST_COUNTS:
        deadline.check("more GPUs")
        middle = (place + below) // 2
        if enough(counts[middle]):
            place = middle
        else:
            below = middle
    return counts[place], None if below is None else counts[below]


def _more_memory(question: Question, deadline: Deadline) -> Iterator[Change]:
    """The least memory of each device, by halving the interval: whether anything fits is monotone in it."""
    problem = question.problem
    if len(problem.cluster.pools) > 1:
        yield from _times_the_memory(question, deadline)
        return
    have = problem.cluster.pools[0].kind.device.memory_bytes
    outside = have - usable_bytes(problem)
    grain = _MEMORY_STEPS_GIB[0 if have >= 4 * GIB else 1]
    priced = price(problem, space_of(problem, question.pins, question.worlds), at_risk=True)

    def enough(grains: int) -> bool:
        deadline.check("more memory")
        limit = max(round(grains * grain * GIB) - outside, 0.0)
        return anything_fits(replace(priced, memory_limit_bytes=limit))

    below = math.floor(have / GIB / grain)
    guess_bytes = _least_memory_bytes(priced)
    above = max(2 * below, 1)
    if math.isfinite(guess_bytes):
        above = max(math.ceil((guess_bytes + outside) / GIB / grain), below + 1)
    while not enough(above):
        below, above = above, 2 * above
        if above * grain * GIB > _MOST_TIMES * have:
            return
    if above - 1 > below and not enough(above - 1):  # as good as always: the guess is exact where v = 1
        below = above - 1
    while above - below > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if enough(middle) else (above, middle)
    least, short = round(above * grain, 2), round(below * grain, 2)
    change = _change(
        question.with_device_memory(round(least * GIB)),
        deadline,
        kind=ChangeKind.MEMORY,
        value=least,
        instead_of=have / GIB,
        too_little=short,
        least=True,
        words=(
            f"{least:g} GiB of memory in each GPU ({least - outside / GIB:.1f} GiB usable) instead of {have / GIB:.1f}, the least"
        ),
    )
    if change is not None:
        yield change


def _times_the_memory(question: Question, deadline: Deadline) -> Iterator[Change]:
    """Several pools: the least multiple of each device's memory, to a percent."""

    def times(percent: int) -> Question:
        return question.with_kinds(partial(_with_share, percent=percent))

    def enough(percent: int) -> bool:
        deadline.check("more memory")
        return is_feasible(times(percent))

    below, above = 100, 200
    while not enough(above):
        below, above = above, 2 * above
        if above > 100 * _MOST_TIMES:
            return
    while above - below > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if enough(middle) else (above, middle)
    change = _change(
        times(above),
        deadline,
        kind=ChangeKind.MEMORY_TIMES,
        value=above / 100,
        instead_of=1.0,
        too_little=below / 100,
        least=True,
        words=f"{above / 100:g} times the memory in each GPU, the least",
    )
    if change is not None:
        yield change


def _with_share(kind: NodeKind, percent: int) -> NodeKind:
    return replace(kind, device=replace(kind.device, memory_bytes=kind.device.memory_bytes * percent // 100))


def _least_memory_bytes(priced: Priced) -> float:
    """The least usable bytes of a device with which a plan without virtual stages exists; infinite where there is none."""
    floors = priced.memory_floors_bytes
    single = np.flatnonzero(priced.space.cells.vpp == 1)
    kinds = (priced.thriftiest_kind,)
    thrifty = replace(priced, memory_limit_bytes=np.inf, space=replace(priced.space, recompute_kinds=kinds))
    least = np.inf
    for index in single[np.argsort(floors[single], kind="stable")].tolist():
        if floors[index] >= least:
            break
        least = min(least, least_memory_bytes(thrifty.cell(index, np.inf)))
    return float(least)


def _offloaded(question: Question, deadline: Deadline) -> Iterator[Change]:
    """States in host memory: what `predict` then says of the plan, for `plan` does not choose it."""
    runtime = question.problem.runtime
    kinds = [kind for kind in ("optimizer", "param") if kind in runtime.offload_moves]
    options = [(kind,) for kind in kinds] + ([tuple(kinds)] if len(kinds) > 1 else [])
    for what in options:
        deadline.check("offloading")
        moved = question.offloading(what)
        try:
            found = solved(moved, time_limit_s=deadline.left_s())
        except ValueError:  # the way to the host has no price
            return
        if found is not None and found.predicted.verdict is not Verdict.NO:
            yield with_plan(
                found,
                kind=ChangeKind.OFFLOAD,
                value=what,
                instead_of=question.problem.offload,
                words=f"{' and '.join(f'offload_{one}' for one in what)} to the host, which `predict` prices",
            )
            return


def _shorter(question: Question, deadline: Deadline) -> Iterator[Change]:
    """Sequences half as long, and half of that."""
    seq = question.problem.workload.seq
    yield from _halved(
        question, deadline, ChangeKind.SEQ, seq, "sequences of {} tokens instead of {}", (seq // 2, seq // 4, seq // 8)
    )


def _smaller_batch(question: Question, deadline: Deadline) -> Iterator[Change]:
    """Half the batch, and half of that: fewer micro-batches in flight."""
    gbs = question.problem.workload.gbs
    halves = [gbs >> shift for shift in range(1, 5) if gbs % (1 << shift) == 0]
    yield from _halved(
        question, deadline, ChangeKind.BATCH, gbs, "{} sequences a step instead of {}, other training", halves
    )


def _halved(
    question: Question,
    deadline: Deadline,
    kind: ChangeKind,
    asked: int,
    words: str,
    values: "list[int] | tuple[int, ...]",
) -> Iterator[Change]:
    before = asked
    for value in values:
        deadline.check("another size")
        changed = question.with_workload(**{kind.value: value}) if value >= 1 else None
        if changed is None:
            return
        if is_feasible(changed):
            between = "" if before == asked else f" ({before} would not do)"
            change = _change(
                changed, deadline, kind=kind, value=value, instead_of=asked,
                too_little=None if before == asked else before, words=words.format(value, asked) + between,
            )  # fmt: skip
            if change is not None:
                yield change
            return
        before = value
