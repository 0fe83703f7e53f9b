"""The plan of least J of a cell with v > 1 and equal chunks: the recompute of each device.

The blocks of each virtual stage are fixed, its recompute is not. Devices meet only in the two maxima, so for each device the
combinations of its columns that fit and that no other beats in (load, tail) are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_models.schedules import FloatArray, IntArray
from planner.search.stages import EXACT, CellOptimum, CellProblem, distinct, undominated

_ROUNDING = 1e-9
_SHARES_OF_GAP = (1 / 64, 1 / 16, 1 / 4)
"""Of the way from the relaxation to a greedy combination: limits that are tried before the greedy one's own."""


def least_of_chunks(cell: CellProblem) -> CellOptimum | None:
    """Equal chunks: for each device the combinations worth having, then the best threshold on the tail."""
    choices = []
    for device in range(cell.layout.pp):
        found = _Chunks.of(cell, device).combinations()
        if not len(found[0]):
            return None
        choices.append(found)
    tails = distinct(np.concatenate([tail for _, tail, _ in choices]))
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
