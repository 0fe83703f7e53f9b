"""The candidates of every pipeline stage ("columns") of one cell, with their prices as numbers. Prices none itself.

A column is one virtual stage holding blocks first..last with given counts of layers under each kind of recompute. A plan
of a cell picks one column for each virtual stage, such that the blocks follow on one another; `picks` is the array of the
S chosen column numbers, in the order of the data.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from cost_models.records import Layout, Schedule
from cost_models.schedules import FloatArray, IntArray, Pipeline, StageTimes
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
    """(N,) gradient synchronisation left over, optimizer, the step's constant."""
    state_bytes: FloatArray
    """(N,) w: everything that does not grow with the micro-batches in flight."""
    activation_bytes: FloatArray
    """(N,) a: kept for each micro-batch in flight."""

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def half_hops_s(self) -> FloatArray:
        """(N,) half of each neighbouring hop: what a column pays for hops in one direction."""
        return (self.hop_in_s + self.hop_out_s) / 2

    @property
    def load_s(self) -> FloatArray:
        """(N,) t: forward and backward with half of each hop at either end."""
        return self.forward_s + self.backward_s + 2 * self.half_hops_s

    def take(self, chosen: IntArray | np.ndarray) -> "StageColumns":
        """The columns of these numbers, or of this mask."""
        return StageColumns(**{entry.name: getattr(self, entry.name)[chosen] for entry in fields(self)})


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
    memory_limit_bytes: float
    """What a device may use."""
    bound_s: float = 0.0
    """No plan of the cell has a smaller J, by the closed formula."""
    least_total_s: float = 0.0
    """T: no plan of the cell has a smaller Σ t."""

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

    def heaviest_s(self, below_s: float) -> float:
        """The largest load of a column of a plan with J ≤ `below_s`; infinite where one micro-batch makes the load count once."""
        return heaviest_s(below_s, self.least_total_s, self.num_micro_batches, self.layout.vpp)

    def narrowed(self, below_s: float) -> tuple["CellProblem", IntArray]:
        """The cell without the columns that no plan with J ≤ `below_s` can have, and the numbers of those kept."""
        kept = np.flatnonzero(self.columns.load_s <= self.heaviest_s(below_s))
        return replace(self, columns=self.columns.take(kept)), kept

    def times(self, picks: Sequence[int] | IntArray) -> StageTimes:
        """The pieces of a step under these picks, as J, R and S read them."""
        chosen = np.asarray(picks)
        columns = self.columns
        tails = columns.tail_s[chosen].reshape(self.layout.vpp, self.layout.pp).sum(axis=0)
        return StageTimes(
            forward_s=columns.forward_s[chosen],
            backward_s=columns.backward_s[chosen],
            hop_s=columns.hop_out_s[chosen[:-1]],
            tail_s=tails,
        )

    def objective_s(self, picks: Sequence[int] | IntArray) -> float:
        """J of these picks."""
        return objective_s(self.pipeline, self.times(picks))

    def lower_bound_s(self, picks: Sequence[int] | IntArray) -> float:
        """R of these picks."""
        return lower_bound_s(self.pipeline, self.times(picks))


def heaviest_s(below_s: float, least_total_s: float, num_micro_batches: int, vpp: int) -> float:
    """From J ≥ (m - 1/v) t + T/v, for the heaviest column t of a plan with J ≤ `below_s`."""
    repeats = num_micro_batches - 1 / vpp
    return (below_s - least_total_s / vpp) / repeats * (1 + 1e-9) if repeats > 0 else math.inf


def fits_alone(cell: CellProblem) -> np.ndarray:
    """(N,) whether each column fits on its device where it is the only virtual stage of it (v = 1)."""
    assert cell.layout.vpp == 1
    columns = cell.columns
    most = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight])
    used = columns.state_bytes + most[columns.stage] * columns.activation_bytes
    return np.asarray(used <= cell.memory_limit_bytes)


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
