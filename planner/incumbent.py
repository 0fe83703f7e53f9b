"""Exact combinatorial search inside one cell: the plan of least J, which the ILP starts from, and the least R.

v = 1. J = Σ t + Σ_d weight_d · max_c value_d,c over the columns of a path: for 1f1b the values are t and the tail, for gpipe
forward, backward and the tail. Given thresholds on all d, the least Σ t is a shortest path over (stage, blocks done); the
thresholds that can still beat the best plan known are tried in the order of the least J that each allows. Exact: a plan of
least J is the shortest path under its own maxima as thresholds.

v > 1 (equal chunks). The blocks of each virtual stage are fixed, its recompute is not. Devices meet only in the two maxima, so
for each device the combinations of its columns that fit and that no other beats in (load, tail) are enough.

R, v = 1. From the last stage backwards, with A and F counted from the stage in hand:
    V1(p) = max(m W_p, t_p + V1(p+1)),   V2(p) = max(m W_p + tail_p, f_p + V2(p+1)),   R = max(V1(0) + tail_0, V2(0)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_models.schedules import FloatArray, IntArray
from planner.stages import EXACT, CellProblem, undominated

_CHUNK = 64
"""Threshold tuples that share one pass of the dynamic programme."""
_MOST_THRESHOLDS = 1_000_000
"""Size of a product of thresholds beyond which it is walked in slices."""
_ROUNDING = 1e-9
_SHARES_OF_GAP = (1 / 64, 1 / 16, 1 / 4)
"""Of the way from the relaxation to a greedy combination: limits that are tried before the greedy one's own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellOptimum:
    """The best plan of a cell."""

    objective_s: float
    """Its J."""
    picks: IntArray
    """(S,) its columns."""


def least_objective(cell: CellProblem) -> CellOptimum | None:
    """The plan of least J in the cell; None where no plan of these columns fits."""
    if len(cell.columns) == 0:
        return None
    if cell.played is not None:
        return CellOptimum(objective_s=cell.played.objective_s, picks=np.arange(len(cell.columns)))
    return _chunks(cell) if cell.layout.vpp > 1 else _Path.of(cell).least()


# --- v = 1: shortest paths under thresholds -----------------------------------------------------------------------------


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
class _Path:
    """Minimise Σ cost + Σ_d weights_d · max values_d over paths of columns."""

    cell: CellProblem
    levels: tuple[_Level, ...]
    cost: FloatArray
    """(N,)"""
    values: tuple[FloatArray, ...]
    """(N,) each."""
    weights: tuple[float, ...]

    @classmethod
    def of(cls, cell: CellProblem) -> "_Path":
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
            candidates.append(_distinct(inside))
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


def _distinct(values: FloatArray) -> FloatArray:
    """The distinct values, ascending; of those within rounding of one another the largest."""
    ordered = np.unique(values)
    if len(ordered) < 2:
        return ordered
    return np.asarray(ordered[np.append(ordered[1:] > ordered[:-1] * (1 + EXACT), True)])


# --- v > 1: the recompute of each device --------------------------------------------------------------------------------


def _chunks(cell: CellProblem) -> CellOptimum | None:
    """Equal chunks: for each device the combinations worth having, then the best threshold on the tail."""
    choices = []
    for device in range(cell.layout.pp):
        found = _Chunks.of(cell, device).combinations()
        if not len(found[0]):
            return None
        choices.append(found)
    tails = _distinct(np.concatenate([tail for _, tail, _ in choices]))
    share, best, chosen = 1 / cell.layout.vpp, np.inf, None
    for threshold in tails:
        rows = []
        for _, tail, _ in choices:
            # sorted by load, and undominated, so the first that is allowed has the least load
            allowed = np.flatnonzero(tail <= threshold * (1 + EXACT))
            if not len(allowed):
                break
            rows.append(int(allowed[0]))
        if len(rows) < len(choices):
            continue
        loads = np.array([load[row] for (load, _, _), row in zip(choices, rows, strict=True)])
        longest = max(tail[row] for (_, tail, _), row in zip(choices, rows, strict=True))
        objective = float(cell.steady_micro_batches * loads.max() + share * loads.sum() + longest)
        if objective < best:
            best = objective
            chosen = np.stack([picks[row] for (_, _, picks), row in zip(choices, rows, strict=True)])
    if chosen is None:
        return None
    return CellOptimum(objective_s=best, picks=chosen.T.ravel())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunks:
    """The columns of one device, chunk after chunk; C columns in all, V in-flight vectors."""

    cell: CellProblem
    numbers: IntArray
    """(C,) in the cell."""
    chunk: IntArray
    """(C,) which chunk of the device."""
    load: FloatArray
    """(C,)"""
    tail: FloatArray
    """(C,)"""
    activation: FloatArray
    """(C,)"""
    vectors: FloatArray
    """(V, v)"""
    used: FloatArray
    """(V, C) bytes at each vector."""
    limit_bytes: float
    """What the device may use."""

    @classmethod
    def of(cls, cell: CellProblem, device: int) -> "_Chunks":
        columns, pp = cell.columns, cell.layout.pp
        parts = [cell.stage_slices[chunk * pp + device] for chunk in range(cell.layout.vpp)]
        numbers = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        chunk = columns.stage[numbers] // pp
        vectors = np.array(cell.in_flight[device], dtype=np.float64)
        return cls(
            cell=cell,
            numbers=numbers,
            chunk=chunk,
            load=columns.load_s[numbers],
            tail=columns.tail_s[numbers],
            activation=columns.activation_bytes[numbers],
            vectors=vectors,
            used=columns.state_bytes[numbers] + vectors[:, chunk] * columns.activation_bytes[numbers],
            limit_bytes=float(cell.limits_bytes[device]),
        )

    def combinations(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """(load (n,), tail (n,), picks (n, v)) of the combinations that fit and that may be in a best plan, by load.

        Chunk after chunk, without those that another beats in load, in tail + load/v (what a longer tail costs in J a smaller
        load gives back) and in memory, and without those that cannot end below what is known to be enough. Of chunks with the
        same columns the one with more in flight keeps no more of a micro-batch: swapping two columns that do otherwise only
        frees memory.
        """
        lightest, vpp = self._lightest(), self.cell.layout.vpp
        if len(lightest) < vpp:
            return np.empty(0), np.empty(0), np.empty((0, vpp), dtype=np.intp)
        savings = self._savings(lightest)
        missing = self.used[:, lightest].sum(axis=1)[:, None] - self.limit_bytes
        least_s = float(self.load[lightest].sum() + savings.least_s(0, missing, self.limit_bytes)[0])
        most = min(self.cell.heaviest_s, self._most_load(lightest)) * (1 + _ROUNDING)
        if len(self.numbers) > vpp and least_s < most < np.inf:
            # the best one lies close above the relaxation, and with a lower limit far fewer are looked at on the way
            for share in _SHARES_OF_GAP:
                limit_s = least_s + share * (most - least_s)
                found = self._up_to(limit_s, lightest, savings)
                if len(found[0]):
                    enough_s = self._enough_s(float(found[0][0]), float(found[1][0])) * (1 + _ROUNDING)
                    return found if enough_s <= limit_s else self._up_to(min(enough_s, most), lightest, savings)
        return self._up_to(most, lightest, savings)

    def _enough_s(self, load_s: float, tail_s: float) -> float:
        """Combinations with more load than this are in no best plan, where one of this load and tail fits.

        In J, Σt/v falls by at least what the longer tail of that one may add, and it is better for every other device.
        """
        vpp = self.cell.layout.vpp
        least_tail_s = sum(float(self.tail[self.chunk == chunk].min()) for chunk in range(vpp))
        return load_s + vpp * max(0.0, tail_s - least_tail_s)

    def _up_to(self, most: float, lightest: IntArray, savings: "_Savings") -> tuple[FloatArray, FloatArray, IntArray]:
        """Of `combinations`, those of a load up to `most`."""
        vpp, follows = self.cell.layout.vpp, self._follows()
        load, tail, used, kept_before = np.zeros(1), np.zeros(1), np.zeros((len(self.used), 1)), np.zeros(1)
        picks = np.empty((1, 0), dtype=np.intp)
        for chunk in range(vpp):
            here = np.flatnonzero(self.chunk == chunk)
            rows, added = np.repeat(np.arange(len(load)), len(here)), np.tile(here, len(load))
            if follows[chunk]:
                ordered = kept_before[rows] <= self.activation[added] * (1 + EXACT)
                rows, added = rows[ordered], added[ordered]
            kept_before = self.activation[added]
            load, tail = load[rows] + self.load[added], tail[rows] + self.tail[added]
            used, picks = used[:, rows] + self.used[:, added], np.column_stack((picks[rows], self.numbers[added]))
            later = lightest[chunk + 1 :]
            missing = used + self.used[:, later].sum(axis=1)[:, None] - self.limit_bytes
            extra = savings.least_s(chunk + 1, missing, self.limit_bytes)
            kept = np.isfinite(extra) & (load + self.load[later].sum() + extra <= most)
            load, tail, used, picks, kept_before = load[kept], tail[kept], used[:, kept], picks[kept], kept_before[kept]
            values = [load, tail + load / vpp, *(used if len(later) else ())]
            if follows[chunk + 1]:
                values.append(kept_before)
            kept = undominated([], values)
            load, tail, used, picks, kept_before = load[kept], tail[kept], used[:, kept], picks[kept], kept_before[kept]
        order = np.argsort(load, kind="stable")
        return load[order], tail[order], picks[order]

    def _follows(self) -> list[bool]:
        """(v + 1,) whether each chunk has the columns of the one before it, and never more in flight; False beyond both ends."""
        state = self.cell.columns.state_bytes[self.numbers]
        values = np.stack([self.load, self.tail, self.activation, state])
        parts = [values[:, self.chunk == chunk] for chunk in range(self.cell.layout.vpp)]
        follows = [
            before.shape == here.shape
            and bool((self.vectors[:, chunk] >= self.vectors[:, chunk + 1]).all())
            and bool((np.abs(before - here) <= EXACT * np.abs(here)).all())
            for chunk, (before, here) in enumerate(pairwise(parts))
        ]
        return [False, *follows, False]

    def _lightest(self) -> IntArray:
        """(v,) the lightest column of each chunk that has any."""
        order = np.lexsort((self.load, self.chunk))
        return order[np.unique(self.chunk[order], return_index=True)[1]]

    def _savings(self, lightest: IntArray) -> "_Savings":
        """What memory costs, chunk by chunk: the steps along the concave hull of (slower than the lightest, bytes saved)."""
        edges = np.searchsorted(self.chunk, np.arange(len(lightest)))
        at = np.broadcast_to(lightest, (len(self.used), len(lightest)))
        vector = np.arange(len(self.used))[:, None]
        steps_s, steps_bytes = [], []
        for _ in range(len(self.load)):
            slower = self.load - self.load[at][:, self.chunk]
            saved = self.used[vector, at][:, self.chunk] - self.used
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(saved > 0, saved / np.maximum(slower, 0.0), 0.0)
            steepest = np.maximum.reduceat(rate, edges, axis=1)
            if not (steepest > 0).any():
                break
            # of columns on one line the furthest
            on_line = (rate >= steepest[:, self.chunk] * (1 - EXACT)) & (rate > 0)
            far = np.where(on_line, saved, 0.0)
            furthest = np.maximum.reduceat(far, edges, axis=1)
            place = np.where(on_line & (far == furthest[:, self.chunk]), np.arange(len(self.load)), -1)
            next_at = np.where(steepest > 0, np.maximum.reduceat(place, edges, axis=1), at)
            steps_s.append(np.maximum(self.load[next_at] - self.load[at], 0.0))
            steps_bytes.append(self.used[vector, at] - self.used[vector, next_at])
            at = next_at
        return _Savings.of(steps_s, steps_bytes, len(self.used), len(lightest))

    def _most_load(self, lightest: IntArray) -> float:
        """`_enough_s` of a combination that is found greedily; infinite where that one does not fit."""
        current, limit = lightest.copy(), self.limit_bytes
        for _ in range(len(self.load)):
            missing = self.used[:, current].sum(axis=1) - limit
            if (missing <= 0).all():
                return self._enough_s(float(self.load[current].sum()), float(self.tail[current].sum()))
            worst, base = int(missing.argmax()), current[self.chunk]
            saved, slower = self.used[worst, base] - self.used[worst], self.load - self.load[base]
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where((saved > 0) & (slower > 0), np.minimum(saved, missing[worst]) / slower, 0.0)
            best = int(rate.argmax())
            if rate[best] <= 0:
                return np.inf
            current[self.chunk[best]] = best
        return np.inf


# --- the bound R --------------------------------------------------------------------------------------------------------


def least_lower_bound_s(cell: CellProblem, cutoff_s: float) -> float:
    """The least R over the plans of the cell (v = 1), or `cutoff_s` where every R is at least that."""
    assert cell.layout.vpp == 1
    columns, num_micro = cell.columns, cell.num_micro_batches
    stage_s = columns.forward_s + columns.backward_s
    # node (blocks done before the stage) -> pairs (V1, V2) that none beats; behind the last block nothing is left
    after: dict[int, list[tuple[float, float]]] = {cell.num_blocks: [(0.0, 0.0)]}
    best = cutoff_s
    for stage in reversed(range(cell.num_stages)):
        where = cell.stage_slices[stage]
        here: dict[int, list[tuple[float, float]]] = {}
        for first, last, t, f, tail in zip(
            columns.first[where].tolist(),
            columns.last[where].tolist(),
            stage_s[where].tolist(),
            columns.forward_s[where].tolist(),
            columns.tail_s[where].tolist(),
            strict=True,
        ):
            work = num_micro * t
            if work >= best:
                continue
            for one, two in after.get(last + 1, ()):
                pair = max(work, t + one), max(work + tail, f + two)
                if stage == 0:
                    best = min(best, max(pair[0] + tail, pair[1]))
                elif max(pair) < best:
                    here.setdefault(first, []).append(pair)
        after = {node: _frontier(pairs) for node, pairs in here.items()}
    return best


def _frontier(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs that no other beats in both."""
    kept: list[tuple[float, float]] = []
    for pair in sorted(pairs):
        if not kept or pair[1] < kept[-1][1]:
            kept.append(pair)
    return kept


def least_memory_bytes(cell: CellProblem) -> float:
    """The least that the fullest device must hold under any plan of the cell (v = 1), whatever the limit; infinite: no plan."""
    assert cell.layout.vpp == 1
    columns = cell.columns
    most = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight], dtype=np.float64)
    used = columns.state_bytes + most[columns.stage] * columns.activation_bytes
    return _Path.of(cell).distance(used, np.maximum)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Savings:
    """The steps by which the chunks of a device save bytes, the cheapest byte first; V in-flight vectors, N steps in all."""

    chunk: IntArray
    """(V, N) whose step."""
    seconds: FloatArray
    """(V, N)"""
    saved_bytes: FloatArray
    """(V, N)"""

    @classmethod
    def of(
        cls, seconds: Sequence[FloatArray], saved_bytes: Sequence[FloatArray], num_vectors: int, num_chunks: int
    ) -> "_Savings":
        """From rounds of (V, v) steps."""
        if not seconds:
            nothing = np.empty((num_vectors, 0))
            return cls(chunk=nothing.astype(np.intp), seconds=nothing, saved_bytes=nothing)
        all_s, all_bytes = np.concatenate(seconds, axis=1), np.concatenate(saved_bytes, axis=1)
        chunk = np.broadcast_to(np.tile(np.arange(num_chunks), len(seconds)), all_s.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(all_bytes > 0, all_s / all_bytes, np.inf)
        order = np.argsort(price, axis=1, kind="stable")
        return cls(
            chunk=np.take_along_axis(chunk, order, axis=1),
            seconds=np.take_along_axis(all_s, order, axis=1),
            saved_bytes=np.take_along_axis(all_bytes, order, axis=1),
        )

    def least_s(self, first: int, missing_bytes: FloatArray, limit_bytes: float) -> FloatArray:
        """(n,) least seconds for which the chunks from `first` on save what is `missing` (V, n); infinite where they cannot.

        Steps are taken in part: the linear relaxation of the choice of a column in each chunk.
        """
        theirs = self.chunk >= first
        if not theirs.any():
            return np.where((missing_bytes > 0).any(axis=0), np.inf, 0.0)
        found = np.zeros(missing_bytes.shape[1])
        for row, missing in enumerate(missing_bytes - EXACT * limit_bytes):
            if missing.max(initial=0.0) > 0:
                saved = np.append(0.0, np.cumsum(np.where(theirs[row], self.saved_bytes[row], 0.0)))
                spent_s = np.append(0.0, np.cumsum(np.where(theirs[row], self.seconds[row], 0.0)))
                found = np.maximum(found, np.interp(missing, saved, spent_s, right=np.inf))
        return found
