"""The plan of least J of a cell with v = 1: shortest paths under thresholds.

J = Σ t + Σ_d weight_d · max_c value_d,c over the columns of a path: for 1f1b the values are t and the tail, for gpipe
forward, backward and the tail. Given thresholds on all d, the least Σ t is a shortest path over (stage, blocks done); the
thresholds that can still beat the best plan known are tried in the order of the least J that each allows. Exact: a plan of
least J is the shortest path under its own maxima as thresholds.
"""

from dataclasses import dataclass

import numpy as np

from cost_models.schedules import FloatArray, IntArray
from planner.search.stages import EXACT, CellOptimum, CellProblem, distinct

_CHUNK = 64
"""Threshold tuples that share one pass of the dynamic programme."""
_MOST_THRESHOLDS = 1_000_000
"""Size of a product of thresholds beyond which it is walked in slices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """The columns of one stage, sorted by the node where they end."""

    numbers: IntArray
    first: IntArray
    starts: IntArray
    """Where the columns of each end node begin."""
    ends: IntArray
    """The end nodes."""

    @classmethod
    def of(cls, cell: CellProblem, stage: int) -> "_Level":
        where = cell.stage_slices[stage]
        last = cell.columns.last[where]
        order = np.argsort(last, kind="stable")
        ends = last[order] + 1
        starts = np.flatnonzero(np.append(True, ends[1:] != ends[:-1])) if len(ends) else np.empty(0, dtype=np.intp)
        numbers = order + where.start
        return cls(numbers=numbers, first=cell.columns.first[numbers], starts=starts, ends=ends[starts])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Minimise Σ cost + Σ_d weights_d · max values_d over paths of columns."""

    cell: CellProblem
    levels: tuple[_Level, ...]
    cost: FloatArray
    """(N,)"""
    values: tuple[FloatArray, ...]
    """(N,) each."""
    weights: tuple[float, ...]

    @classmethod
    def of(cls, cell: CellProblem) -> "Paths":
        """J of the cell's schedule."""
        columns, weight = cell.columns, cell.steady_micro_batches
        half = columns.half_hops_s
        if cell.two_loads:
            values = [(columns.forward_s + half, weight), (columns.backward_s + half, weight), (columns.tail_s, 1.0)]
        else:
            values = [(columns.load_s, weight), (columns.tail_s, 1.0)]
        used = [(seconds, w) for seconds, w in values if w > 0]
        return cls(
            cell=cell,
            levels=tuple(_Level.of(cell, stage) for stage in range(cell.num_stages)),
            cost=columns.load_s,
            values=tuple(seconds for seconds, _ in used),
            weights=tuple(w for _, w in used),
        )

    def least(self) -> CellOptimum | None:
        """Best first over tuples of thresholds, cut by the best plan known."""
        least_sum_s = self.distance(self.cost, np.add)
        if not np.isfinite(least_sum_s):
            return None
        floors = [self.distance(value, np.maximum) for value in self.values]
        best = self._under(tuple(np.inf for _ in floors))
        assert best is not None
        for thresholds in (tuple(floors), *((*floors[:d], np.inf, *floors[d + 1 :]) for d in range(len(floors)))):
            found = self._under(thresholds)
            if found is not None and found.objective_s < best.objective_s:
                best = found
        base_s = least_sum_s + sum(w * f for w, f in zip(self.weights, floors, strict=True))
        candidates = []
        for value, weight, floor_ in zip(self.values, self.weights, floors, strict=True):
            most = floor_ + (best.objective_s - base_s) / weight
            inside = value[(value >= floor_ * (1 - EXACT)) & (value <= most * (1 + EXACT))]
            candidates.append(distinct(inside))
        return self._walk(candidates, least_sum_s, best)

    def _walk(self, candidates: list[FloatArray], least_sum_s: float, best: CellOptimum) -> CellOptimum:
        """Tries the product of the candidates wherever it may still beat `best`."""
        # the shortest path under one tuple bounds that under each smaller one
        for head in candidates[0] if np.prod([len(c) for c in candidates]) > _MOST_THRESHOLDS else [None]:
            listed = candidates if head is None else [np.array([head]), *candidates[1:]]
            grid = np.stack([axis.ravel() for axis in np.meshgrid(*listed, indexing="ij")], axis=1)
            bounds = least_sum_s + grid @ np.array(self.weights)
            order = np.argsort(bounds, kind="stable")
            position = 0
            while position < len(order) and bounds[order[position]] < best.objective_s * (1 - EXACT):
                tuples = grid[order[position : position + _CHUNK]]
                sums = self._sums(tuples)
                totals = sums + tuples @ np.array(self.weights)
                winner = int(np.argmin(totals))
                if totals[winner] < best.objective_s * (1 - EXACT):
                    found = self._under(tuple(tuples[winner]))
                    if found is not None and found.objective_s < best.objective_s:
                        best = found
                finite = np.isfinite(sums)
                bounds = self._raise(bounds, grid, tuples[finite], sums[finite], tuples[~finite])
                rest = order[position + _CHUNK :]
                order, position = rest[np.argsort(bounds[rest], kind="stable")], 0
        return best

    def _raise(
        self, bounds: FloatArray, grid: FloatArray, tuples: FloatArray, sums: FloatArray, impossible: FloatArray
    ) -> FloatArray:
        """Better bounds from what was just solved: a smaller tuple allows no smaller sum."""
        raised = bounds.copy()
        reach = grid @ np.array(self.weights)
        if len(impossible):
            top = impossible[np.argmax(impossible.sum(axis=1))]
            raised[(grid <= top).all(axis=1)] = np.inf
        if len(tuples):
            top, least = tuples[np.argmax(sums)], sums.max()
            smaller = (grid <= top).all(axis=1)
            raised[smaller] = np.maximum(raised[smaller], least + reach[smaller])
        return raised

    def distance(self, amount: FloatArray, combine: np.ufunc) -> float:
        """The least sum, or the least maximum, of `amount` over all paths; infinite where there is none."""
        done = np.full(self.cell.num_blocks + 1, np.inf)
        done[0] = 0.0
        for level in self.levels:
            after = np.full_like(done, np.inf)
            if len(level.numbers):
                after[level.ends] = np.minimum.reduceat(combine(done[level.first], amount[level.numbers]), level.starts)
            done = after
        return float(done[self.cell.num_blocks])

    def _sums(self, tuples: FloatArray) -> FloatArray:
        """(B,) least Σ cost under each of B tuples of thresholds."""
        done = np.full((len(tuples), self.cell.num_blocks + 1), np.inf)
        done[:, 0] = 0.0
        for level in self.levels:
            after = np.full_like(done, np.inf)
            if len(level.numbers):
                reached = done[:, level.first] + self.cost[level.numbers]
                for value, threshold in zip(self.values, tuples.T, strict=True):
                    reached[value[level.numbers] > (threshold * (1 + EXACT))[:, None]] = np.inf
                after[:, level.ends] = np.minimum.reduceat(reached, level.starts, axis=1)
            done = after
        return np.asarray(done[:, self.cell.num_blocks])

    def _under(self, thresholds: tuple[float, ...]) -> CellOptimum | None:
        """The shortest path under one tuple of thresholds, with its true J."""
        cost = self.cost
        for value, threshold in zip(self.values, thresholds, strict=True):
            if np.isfinite(threshold):
                cost = np.where(value <= threshold * (1 + EXACT), cost, np.inf)
        done = [np.full(self.cell.num_blocks + 1, np.inf)]
        done[0][0] = 0.0
        for level in self.levels:
            after = np.full_like(done[0], np.inf)
            if len(level.numbers):
                after[level.ends] = np.minimum.reduceat(done[-1][level.first] + cost[level.numbers], level.starts)
            done.append(after)
        node = self.cell.num_blocks
        if not np.isfinite(done[-1][node]):
            return None
        picks = []
        for level, before in zip(reversed(self.levels), reversed(done[:-1]), strict=True):
            place = int(np.searchsorted(level.ends, node))
            until = level.starts[place + 1] if place + 1 < len(level.starts) else len(level.numbers)
            inside = slice(level.starts[place], until)
            nearest = int(np.argmin(before[level.first[inside]] + cost[level.numbers[inside]]))
            picks.append(int(level.numbers[inside][nearest]))
            node = int(level.first[inside][nearest])
        chosen = np.array(picks[::-1], dtype=np.intp)
        total = float(self.cost[chosen].sum())
        total += sum(w * float(value[chosen].max()) for w, value in zip(self.weights, self.values, strict=True))
        return CellOptimum(objective_s=total, picks=chosen)
