"""The candidates of every pipeline stage ("columns") of one cell, with their prices as numbers. Prices none itself.

A column is one virtual stage holding blocks first..last with given counts of layers under each kind of recompute. A plan
of a cell picks one column for each virtual stage, such that the blocks follow on one another; `picks` is the array of the
S chosen column numbers, in the order of the data.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np

from cost_models.problem import Columns
from cost_models.records import Layout, Schedule
from cost_models.records.plan import RANK_AXES
from cost_models.schedules import FloatArray, IntArray, Pipeline
from cost_models.simulation import StageTimes
from cost_models.stage import ColumnPrices
from cost_models.step import lower_bound_s, objective_s

EXACT = 1e-12
"""Relative difference below which two sums of the same seconds are the same number, summed in another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageColumns:
    """N columns of one cell as parallel arrays; seconds are those of one micro-batch, except the tail's."""

    stage: IntArray
    """(N,) virtual stage."""
    first: IntArray
    """(N,) first block."""
    last: IntArray
    """(N,) last block, inclusive."""
    recompute_counts: IntArray
    """(N, R) layers under each kind of recompute, counted from the first layer of the stage."""
    forward_s: FloatArray
    """(N,) forward, exposed communication in, hops out: as the simulation plays it."""
    backward_s: FloatArray
    """(N,) whole backward with recompute, likewise."""
    hop_in_s: FloatArray
    """(N,) one hop from the stage before; 0 for stage 0."""
    hop_out_s: FloatArray
    """(N,) one hop to the stage after; 0 for the last."""
    tail_s: FloatArray
    """(N,) gradient synchronisation left over, optimizer, the step's constant: as J counts it."""
    played_tail_s: FloatArray
    """(N,) the same as the simulation plays it: no longer. With v > 1, J gives recompute no credit for hiding the synchronisation."""
    state_bytes: FloatArray
    """(N,) w: everything that does not grow with the micro-batches in flight."""
    activation_bytes: FloatArray
    """(N,) a: kept for each micro-batch in flight."""

    def __len__(self) -> int:
        return len(self.stage)

    @classmethod
    def of(cls, columns: Columns, prices: ColumnPrices) -> "StageColumns":
        """Columns with what `cost_models.stage` says of them."""
        return cls(
            stage=columns.stage,
            first=columns.first,
            last=columns.last,
            recompute_counts=columns.recompute_counts,
            forward_s=prices.forward_s,
            backward_s=prices.backward_s,
            hop_in_s=prices.hop_in_s,
            hop_out_s=prices.hop_out_s,
            tail_s=prices.tail_s,
            played_tail_s=prices.tail_s,
            state_bytes=prices.fixed_bytes,
            activation_bytes=prices.activation_bytes,
        )

    @property
    def half_hops_s(self) -> FloatArray:
        """(N,) half of each neighbouring hop: what a column pays for hops in one direction."""
        return (self.hop_in_s + self.hop_out_s) / 2

    @property
    def load_s(self) -> FloatArray:
        """(N,) t: forward and backward with half of each hop at either end."""
        return self.forward_s + self.backward_s + 2 * self.half_hops_s

    @classmethod
    def joined(cls, *parts: "StageColumns") -> "StageColumns":
        """All of them, sorted by stage, first and last block."""
        filled = [part for part in parts if len(part)]
        if len(filled) < 2:
            return filled[0] if filled else parts[0]
        arrays = {e.name: np.concatenate([getattr(part, e.name) for part in filled]) for e in fields(cls)}
        order = np.lexsort((arrays["last"], arrays["first"], arrays["stage"]))
        return cls(**{name: values[order] for name, values in arrays.items()})

    def take(self, chosen: IntArray | np.ndarray) -> "StageColumns":
        """The columns of these numbers, or of this mask."""
        return StageColumns(**{entry.name: getattr(self, entry.name)[chosen] for entry in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """The one plan of a cell whose schedule has no formula: its simulated time is its J."""

    objective_s: float
    """S."""
    lower_bound_s: float
    """R."""
    devices: IntArray
    """(S,) the device of each virtual stage."""
    waiting_bytes: FloatArray
    """(S,) kept of each micro-batch between the two pieces of its backward pass."""
    held: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each device, its maximal vectors of micro-batches before their backward pass, and between its pieces."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CellProblem:
    """One cell θ with its columns: all that the choice needs to know of it. Numbers only."""

    index: int
    """Number of the cell in the space."""
    layout: Layout
    """Degrees and options; its recompute says nothing here."""
    num_micro_batches: int
    num_blocks: int
    columns: StageColumns
    """Sorted by stage, then first, then last block."""
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each device, its maximal in-flight vectors over its virtual stages in ascending order."""
    memory_limit_bytes: float | FloatArray
    """What a device may use; (pp,) where devices differ."""
    bound_s: float = 0.0
    """No plan of the cell has a smaller J, by the closed formula."""
    least_total_s: float = 0.0
    """T: no plan of the cell has a smaller Σ t."""
    heaviest_s: float = math.inf
    """Plans with a device of more load than this are not asked for, and their columns may be missing."""
    recompute_kinds: tuple[str, ...] = ()
    """Kinds of recompute that the columns count."""
    played: "Played | None" = None
    """The cell has one plan, all its columns, whose time is known by playing it."""
    pools: tuple[int, ...] = ()
    """Of each device, the number of its pool; empty where the cluster has one."""
    order: tuple[str, ...] = RANK_AXES
    """Rank order: axes, innermost first."""

    @cached_property
    def limits_bytes(self) -> FloatArray:
        """(pp,) what each device may use."""
        return np.broadcast_to(np.asarray(self.memory_limit_bytes, dtype=np.float64), (self.layout.pp,))

    @cached_property
    def pipeline(self) -> Pipeline:
        """The schedule with its numbers."""
        return Pipeline(
            schedule=self.layout.schedule,
            num_devices=self.layout.pp,
            num_virtual_per_device=self.layout.vpp,
            num_micro_batches=self.num_micro_batches,
        )

    @property
    def num_stages(self) -> int:
        """Virtual stages S."""
        return self.layout.num_virtual_stages

    @property
    def two_loads(self) -> bool:
        """GPipe pays for the fullest forward and the fullest backward apart."""
        return self.layout.schedule is Schedule.GPIPE

    @property
    def steady_micro_batches(self) -> float:
        """m - 1/v: how often the fullest device's load counts in J."""
        return self.num_micro_batches - 1 / self.layout.vpp

    @cached_property
    def stage_slices(self) -> tuple[slice, ...]:
        """Where the columns of each virtual stage lie."""
        edges = np.searchsorted(self.columns.stage, np.arange(self.num_stages + 1))
        return tuple(slice(int(a), int(b)) for a, b in itertools.pairwise(edges))

    def with_columns(self, columns: StageColumns) -> "CellProblem":
        """The same cell with other columns."""
        return replace(self, columns=columns)

    def times(self, picks: Sequence[int] | IntArray, *, played: bool = True) -> StageTimes:
        """The pieces of a step under these picks, as the simulation plays them and R reads them, or as J counts them."""
        chosen = np.asarray(picks)
        columns = self.columns
        tail_s = columns.played_tail_s if played else columns.tail_s
        return StageTimes(
            forward_s=columns.forward_s[chosen],
            backward_s=columns.backward_s[chosen],
            hop_s=columns.hop_out_s[chosen[:-1]],
            tail_s=tail_s[chosen].reshape(self.layout.vpp, self.layout.pp).sum(axis=0),
        )

    def objective_s(self, picks: Sequence[int] | IntArray) -> float:
        """J of these picks."""
        if self.played is not None:
            return self.played.objective_s
        return objective_s(self.pipeline, self.times(picks, played=False))

    def lower_bound_s(self, picks: Sequence[int] | IntArray) -> float:
        """R of these picks."""
        if self.played is not None:
            return self.played.lower_bound_s
        return lower_bound_s(self.pipeline, self.times(picks))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellOptimum:
    """The best plan of a cell."""

    objective_s: float
    """Its J."""
    picks: IntArray
    """(S,) its columns."""


def heaviest_below(below_s: float, least_total_s: float, num_micro_batches: int, vpp: int) -> float:
    """The load of the fullest device of a plan with J ≤ `below_s`, at most: from J ≥ (m - 1/v) τ + T/v."""
    repeats = num_micro_batches - 1 / vpp
    return (below_s - least_total_s / vpp) / repeats * (1 + 1e-9) if repeats > 0 else math.inf


def fits_alone(cell: CellProblem) -> np.ndarray:
    """(N,) whether each column fits on its device where it is the only virtual stage of it (v = 1)."""
    assert cell.layout.vpp == 1
    columns = cell.columns
    most = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight])
    used = columns.state_bytes + most[columns.stage] * columns.activation_bytes
    return np.asarray(used <= cell.limits_bytes[columns.stage])


def distinct(values: FloatArray) -> FloatArray:
    """The distinct values, ascending; of those within rounding of one another the largest."""
    ordered = np.unique(values)
    if len(ordered) < 2:
        return ordered
    return np.asarray(ordered[np.append(ordered[1:] > ordered[:-1] * (1 + EXACT), True)])


def undominated(keys: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> IntArray:
    """Numbers of the rows that no other row of the same keys beats or equals in every value, ascending.

    Of rows that are equal in everything the first stays. Values within rounding of one another count as equal.
    """
    num = len(values[0])
    if num < 2:
        return np.arange(num)
    ids = np.zeros(num, dtype=np.int64)
    for key in keys:
        ids = ids * (int(key.max()) + 1) + key
    order = np.lexsort((*reversed(values), ids))
    starts = np.flatnonzero(np.append(True, np.diff(ids[order]) != 0))
    if len(values) == 1:
        return np.sort(order[starts])
    table = np.stack(values, axis=1)[order]
    slack = 1 + EXACT
    alive = np.ones(num, dtype=bool)
    ends = np.append(starts[1:], num)
    # the first row of each group often beats all others: settle that for all groups at once
    head = np.repeat(starts, ends - starts)
    alive[(table[head] <= table * slack).all(axis=1)] = False
    alive[starts] = True
    open_rows = np.add.reduceat(alive, starts)
    for start, end in zip(starts[open_rows > 2], ends[open_rows > 2], strict=True):
        _filter_group(table, alive, int(start), int(end))
    return np.sort(order[alive])


def _filter_group(table: np.ndarray, alive: np.ndarray, start: int, end: int) -> None:
    """Marks the dominated rows of one group, which is sorted by its first value."""
    rows = start + np.flatnonzero(alive[start:end])
    position = 1
    while position < len(rows) - 1:
        row = rows[position]
        rest = rows[position + 1 :]
        beaten = (table[row] <= table[rest] * (1 + EXACT)).all(axis=1)
        alive[rest[beaten]] = False
        rows = np.concatenate((rows[: position + 1], rest[~beaten]))
        position += 1


# --- which columns there are ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """The blocks that virtual stages may hold; arrays (n,), sorted by stage, first, last."""

    stage: IntArray
    first: IntArray
    last: IntArray

    def __len__(self) -> int:
        return len(self.stage)

    def take(self, chosen: IntArray | np.ndarray) -> "Spans":
        """The spans of these numbers, or of this mask."""
        return Spans(stage=self.stage[chosen], first=self.first[chosen], last=self.last[chosen])


def chunk_spans(num_layers: int, num_stages: int) -> Spans:
    """As many layers in every virtual stage, embedding in the first, head in the last."""
    each, rest = divmod(num_layers, num_stages)
    if rest or not each:
        nothing = np.empty(0, dtype=np.intp)
        return Spans(stage=nothing, first=nothing, last=nothing)
    stage = np.arange(num_stages)
    first, last = 1 + stage * each, (stage + 1) * each
    first[0], last[-1] = 0, num_layers + 1
    return Spans(stage=stage, first=first, last=last)


def free_spans(block_s: FloatArray, num_stages: int, heaviest_s: float, of_stage: Sequence[int] | None = None) -> Spans:
    """Every span that takes at most `heaviest_s` and lies on a chain of such spans from the first block to the last.

    block_s: (K,) a lower bound on the load of each block, or (rows, K) with the row of each stage in `of_stage`. Spans that no
    chain can use are left out: stage s begins no later than s spans can reach, and ends where the spans after it still reach
    the end.
    """
    rows = np.atleast_2d(block_s)
    num_blocks = rows.shape[1]
    reach = [_reach(row, heaviest_s * (1 + EXACT)) for row in rows]
    of_stage = [0] * num_stages if of_stage is None else of_stage
    most, least = np.empty(num_stages + 1, dtype=np.intp), np.empty(num_stages + 1, dtype=np.intp)
    most[0], least[num_stages] = 0, num_blocks
    for stage in range(num_stages):
        furthest, nearest = reach[of_stage[stage]][0], reach[of_stage[num_stages - 1 - stage]][1]
        most[stage + 1] = min(furthest[most[stage]], num_blocks - (num_stages - 1 - stage))
        least[num_stages - 1 - stage] = max(nearest[least[num_stages - stage]], num_stages - 1 - stage)
    least[0], most[num_stages] = max(least[0], 0), most[num_stages]
    if least[0] > 0 or most[num_stages] < num_blocks or (least > most).any():
        nothing = np.empty(0, dtype=np.intp)
        return Spans(stage=nothing, first=nothing, last=nothing)
    stages, firsts, lasts = [], [], []
    for stage in range(num_stages):
        begin = np.arange(least[stage], most[stage] + 1)
        low = np.maximum(begin + 1, least[stage + 1])
        high = np.minimum(reach[of_stage[stage]][0][begin], most[stage + 1])
        counts = np.maximum(high - low + 1, 0)
        first = np.repeat(begin, counts)
        offset = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        stages.append(np.full(len(first), stage))
        firsts.append(first)
        lasts.append(np.repeat(low, counts) + offset - 1)
    return Spans(stage=np.concatenate(stages), first=np.concatenate(firsts), last=np.concatenate(lasts))


def _reach(block_s: FloatArray, limit_s: float) -> tuple[IntArray, IntArray]:
    """(K+1,) the furthest node from each node in one span, and the nearest node from which one span reaches each node."""
    done = np.append(0.0, np.cumsum(block_s))
    furthest = np.minimum(np.searchsorted(done, done + limit_s, side="right") - 1, len(block_s))
    return furthest, np.searchsorted(done, done - limit_s, side="left")


@lru_cache(maxsize=1024)
def _mixtures(total: int, parts: int) -> IntArray:
    """(C, parts) every way to write `total` as a sum of `parts` counts of which two at most are not 0."""
    if not total:
        return np.zeros((1, parts), dtype=np.int64)
    blocks, share = [np.eye(parts, dtype=np.int64) * total], np.arange(1, total)
    for one, two in itertools.combinations(range(parts), 2):
        mixed = np.zeros((len(share), parts), dtype=np.int64)
        mixed[:, one], mixed[:, two] = total - share, share
        blocks.append(mixed)
    return np.concatenate(blocks)


def recompute_choices(num_layers: IntArray, kinds: Sequence[int], num_kinds: int) -> tuple[IntArray, IntArray]:
    """Every way to recompute each of n columns in two kinds at most: (row of the column, counts (N, num_kinds)).

    num_layers: (n,) layers of each column; kinds: numbers of the kinds that may be used.
    """
    tables = {int(layers): _mixtures(int(layers), len(kinds)) for layers in np.unique(num_layers)}
    rows = np.repeat(np.arange(len(num_layers)), [len(tables[int(layers)]) for layers in num_layers])
    counts = np.zeros((len(rows), num_kinds), dtype=np.int64)
    if len(rows):
        counts[:, list(kinds)] = np.concatenate([tables[int(layers)] for layers in num_layers])
    return rows, counts
