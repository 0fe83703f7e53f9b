"""Finds the plan, and proves how good it is: cells in the order of their bounds, an incumbent, the ILP, the certificate.

1. Closed bounds of all cells come in one array call. Cells are opened in the order of their bounds on J, until the bound
   reaches (1+δ)J*; an exact combinatorial search of each opened cell gives the incumbent. Of cells that differ in options only
   (a "family"), one is left closed where its bound is no better than a sibling's best J.
2. The ILP decides, on every run: once over the cells that may hold J*, then once for each family whose best J ≤ (1+δ)J*, 20 at
   most. Where ILP and search differ, one of them is wrong: InternalError. Every solution is checked in plain arithmetic.
3. Those plans are simulated, and the simplest of those within 2% of the least simulated time S is the choice (ties.py).
4. min R over all cells bounds every S: closed R, and the exact least R where the closed one stands below 0.92 S (v = 1).
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from cost_models.records import CertificateStatus, Layout
from cost_models.schedules import FloatArray, IntArray
from cost_models.simulation import simulate
from planner.errors import InfeasibleError, InternalError, TimeLimitError
from planner.formulation.choice import formulate
from planner.pace import Pace
from planner.search.exhaustive import flaw
from planner.search.incumbent import least_objective
from planner.search.known import Known
from planner.search.least_r import least_lower_bound_s
from planner.search.reduction import needed_columns
from planner.search.stages import CellOptimum, CellProblem
from planner.search.ties import simplest
from planner.solver import Infeasible, Optimal, SolverName, TimedOut, available_solvers, solve

DELTA = 0.08
"""Largest |S - J| / J that the tests see for plans that the search may choose."""
MOST_SIMULATED = 20
"""Families, one plan each, that are solved and simulated."""
AGREEMENT = 1e-6
"""Relative difference of J beyond which search and ILP disagree."""
_REFINE_BELOW = 0.92
"""Closed bounds on R below this share of S are worth their exact value."""
_REFINED_ENOUGH = 1.02
"""A bound that was refined below so many times today's limit is not refined again."""
_MOST_ROWS_TOLD = 8
"""Rows of a conflict that an error names; of many devices and stages there are hundreds."""

_FIRST_REFINED, _MOST_REFINED = 16, 2048
"""Cells whose bounds are refined in one array call: before the first plan is known, and then."""
SLACKS = (1.02, 1.15, 1.6, 3.0, np.inf)
"""Multiples of its bound below which a cell's best plan is looked for first: few columns, and usually enough."""


class PricedSpace(Protocol):
    """All cells with their closed bounds, and the columns of one of them."""

    @property
    def objective_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J."""
        ...

    @property
    def simulated_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R."""
        ...

    def bounds_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Tighter, of some cells: no plan with J ≤ `below_s` has a smaller J; infinite where there is none."""
        ...

    def simulated_bounds_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Tighter, of some cells: no plan with R ≤ `below_s` has a smaller R; infinite where there is none."""
        ...

    @property
    def families(self) -> IntArray:
        """(n,) cells with the same number differ in options only."""
        ...

    def fits(self, index: int) -> bool:
        """Whether the cell has any plan that fits."""
        ...

    def cell(self, index: int, below_s: float) -> CellProblem:
        """The cell with, at least, every column of a plan with J ≤ `below_s`."""
        ...

    def cell_for_bound(self, index: int, below_s: float) -> CellProblem:
        """The cell with, at least, every column of a plan with R ≤ `below_s`."""
        ...

    def layout(self, index: int) -> Layout:
        """Degrees and options of the cell."""
        ...

    def name(self, index: int) -> str:
        """The cell as text: what is known of it is known by this name."""
        ...

    @property
    def known(self) -> Known:
        """What earlier searches found out about cells of the same problem."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One plan."""

    cell: CellProblem
    picks: IntArray
    """(S,) the columns chosen."""
    objective_s: float
    """J."""
    simulated_s: float
    """S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellVerdict:
    """What became of one cell that was looked into."""

    index: int
    bound_s: float
    simulated_bound_s: float
    objective_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """The plan, the others that were close, and the proof."""

    chosen: Candidate
    """The simplest of those of about the least S."""
    near: tuple[Candidate, ...]
    """The plans simulated, by S."""
    status: CertificateStatus
    objective_s: float
    """J*."""
    bound_s: float
    """No plan of the space has a smaller J."""
    gap_objective: float
    """1 - bound / J*."""
    least_bound_s: float
    """min R: no plan of the space has a smaller S."""
    least_bound_cell: int
    """The cell that sets it."""
    gap_simulated: float
    """1 - min R / S."""
    limit_s: float
    """No cell that was left closed has a plan with a smaller J, unless another option of it has one as good."""
    cells: tuple[CellVerdict, ...]
    """The cells that were looked into."""
    seconds: float
    solver: str

    @property
    def simulated_s(self) -> float:
        """S of the plan chosen."""
        return self.chosen.simulated_s


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """What is known so far."""

    space: PricedSpace
    delta: float
    deadline: float
    solver: SolverName
    pace: Pace = field(default_factory=Pace)
    opened: dict[int, CellProblem] = field(default_factory=dict)
    optima: dict[int, CellOptimum] = field(default_factory=dict)
    looked_below: dict[int, float] = field(default_factory=dict)
    best_of_family: dict[int, float] = field(default_factory=dict)
    incumbent_s: float = np.inf
    bounds_s: FloatArray = field(default_factory=lambda: np.empty(0))
    """(n,) no plan of a cell with J ≤ the limit it was refined at has a smaller J."""
    unopened_bound_s: float = np.inf
    """Least bound of the cells that the time limit left closed."""

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def limit_s(self) -> float:
        """What J of a cell may be that is worth opening: within δ, and among the families that are simulated."""
        best = heapq.nsmallest(MOST_SIMULATED, self.best_of_family.values())
        last_s = best[-1] if len(best) == MOST_SIMULATED else np.inf
        return min((1 + self.delta) * self.incumbent_s, last_s)

    def open_cells(self) -> None:
        """Opens cells in the order of their bounds until none can be worth it; bounds are refined on the way, many at a time."""
        self.bounds_s = self.space.objective_bounds_s.copy()
        waiting = np.argsort(self.bounds_s, kind="stable")  # not refined yet, from `begin` on
        waiting = waiting[np.isfinite(self.bounds_s[waiting])]
        begin, heap = 0, list[tuple[float, int]]()
        refined_at_s = np.full(len(self.bounds_s), np.nan)
        while heap or begin < len(waiting):
            limit_s = self.limit_s()
            self.pace.at(self._so_far)
            next_s = float(self.bounds_s[waiting[begin]]) if begin < len(waiting) else np.inf
            bound_s = min(next_s, heap[0][0] if heap else np.inf)
            if bound_s > limit_s:
                return
            if self.left_s() <= 0:
                self.unopened_bound_s = bound_s
                return
            if next_s <= bound_s:
                # before any plan is known: few first, and more each time that none of them had one
                most = _MOST_REFINED if np.isfinite(limit_s) else min(max(_FIRST_REFINED, begin), _MOST_REFINED)
                batch = waiting[begin : begin + most]
                batch = batch[self.bounds_s[batch] <= limit_s]
                begin += len(batch)
                self._refine(heap, batch, refined_at_s, limit_s)
            elif refined_at_s[heap[0][1]] > limit_s * _REFINED_ENOUGH:
                worth = [index for bound, index in sorted(heap) if bound <= limit_s]
                stale = [index for index in worth if refined_at_s[index] > limit_s * _REFINED_ENOUGH][:_MOST_REFINED]
                again = set(stale)
                heap = [entry for entry in heap if entry[1] not in again]
                self._refine(heap, np.array(stale), refined_at_s, limit_s)
            else:
                self._open(heapq.heappop(heap), limit_s)

    def _so_far(self) -> str:
        looked = len(self.opened) + len(self.looked_below)
        best = f"best objective {self.incumbent_s:.3g} s" if self.opened else "none fits yet"
        return f"searching: {looked:,} of {len(self.bounds_s):,} cells looked into, {best}"

    def _open(self, entry: tuple[float, int], limit_s: float) -> None:
        """Looks into a cell whose bound is better than what is known of its siblings."""
        bound_s, index = entry
        known_s = self.best_of_family.get(int(self.space.families[index]), np.inf)
        if bound_s < known_s:
            self.look(index, min(limit_s, known_s))

    def _refine(self, heap: list[tuple[float, int]], among: IntArray, refined_at_s: FloatArray, limit_s: float) -> None:
        """Tighter bounds for some cells; those that have a plan below the limit go onto the heap."""
        self.bounds_s[among] = np.maximum(self.bounds_s[among], self.space.bounds_below(limit_s, among))
        refined_at_s[among] = limit_s
        heap.extend(e for e in zip(self.bounds_s[among].tolist(), among.tolist(), strict=True) if np.isfinite(e[0]))
        heapq.heapify(heap)

    def look(self, index: int, limit_s: float) -> CellOptimum | None:
        """The best plan of a cell if its J is at most `limit_s`; without a limit, with few columns first."""
        bound_s = float(self.bounds_s[index])
        if np.isinf(limit_s) and not self.space.fits(index):
            self.looked_below[index] = limit_s
            return None
        known, name = self.space.known, self.space.name(index)
        if name in known.best:
            cell, best = known.best[name]
            if best.objective_s <= limit_s * (1 + AGREEMENT / 10):
                self._keep(index, replace(cell, index=index, bound_s=bound_s), best)
                return best
            self.looked_below[index] = limit_s
            return None
        if known.nothing_below_s.get(name, -np.inf) >= limit_s:
            self.looked_below[index] = limit_s
            return None
        for slack in SLACKS if np.isinf(limit_s) else (np.inf,):
            below_s = min(limit_s, bound_s * slack)
            cell = replace(self.space.cell(index, below_s), bound_s=bound_s)
            found = least_objective(cell)
            if found is not None and found.objective_s <= below_s * (1 + AGREEMENT / 10):
                self._keep(index, cell, found)
                known.remember(name, cell, found)
                return found
        self.looked_below[index] = known.nothing_below_s[name] = limit_s
        return None

    def _keep(self, index: int, cell: CellProblem, found: CellOptimum) -> None:
        family, bound_s = int(self.space.families[index]), float(self.bounds_s[index])
        if found.objective_s < bound_s * (1 - AGREEMENT):
            raise InternalError(
                f"cell {index} ({cell.layout}) has a plan with J = {found.objective_s!r} s below its bound {bound_s!r} s"
            )
        self.opened[index], self.optima[index] = cell, found
        self.best_of_family[family] = min(self.best_of_family.get(family, np.inf), found.objective_s)
        self.incumbent_s = min(self.incumbent_s, found.objective_s)

    def decide(self, indices: Sequence[int], objective_s: float) -> tuple[Candidate, float | None]:
        """The ILP over some opened cells, whose best plan has J = `objective_s`: its plan, and the bound that it proves.

        A bound of None says that the time ended before the solver could give one.
        """
        below_s = objective_s * (1 + AGREEMENT)
        start = min(indices, key=lambda index: self.optima[index].objective_s)
        cells, picks = {}, np.empty(0, dtype=np.intp)
        for index in indices:
            if self.opened[index].bound_s <= below_s:
                cell, kept = self.opened[index], needed_columns(self.opened[index], below_s)
                if len(kept):
                    cells[index] = cell.with_columns(cell.columns.take(kept))
                if index == start:
                    picks = np.searchsorted(kept, self.optima[index].picks)
        problem = formulate(list(cells.values()), unit_s=objective_s)
        outcome = solve(
            problem.program,
            start=problem.point(cells[start], picks),
            time_limit_s=self.left_s() if np.isfinite(self.deadline) else None,
            solver=self.solver,
        )
        if isinstance(outcome, TimedOut):
            return candidate(cells[start], picks, objective_s), None
        if isinstance(outcome, Infeasible):
            most = outcome.conflict[:_MOST_ROWS_TOLD]
            rows = ", ".join(f"{name} by {amount:.3g}" for name, amount in most)
            rows += f", ... ({len(outcome.conflict)} rows)" if len(outcome.conflict) > len(most) else ""
            raise InternalError(
                f"the search has a plan with J = {objective_s!r} s where the ILP has none; in its way: {rows}"
            )
        cell, picks = problem.read(outcome.values)
        found_s = cell.objective_s(picks)
        if isinstance(outcome, Optimal) and abs(found_s - objective_s) > AGREEMENT * objective_s:
            raise InternalError(
                f"J of the ILP is {found_s!r} s and J of the search {objective_s!r} s: one of them is wrong"
            )
        bound_s = None if outcome.bound is None else outcome.bound * objective_s
        return candidate(cell, picks, found_s), found_s if isinstance(outcome, Optimal) else bound_s

    def decide_all(self) -> tuple[Candidate, float]:
        """The plan of least J over all opened cells, and what is proved of J*."""
        best, proved_s = self.decide(sorted(self.opened), self.incumbent_s)
        if proved_s is None:
            proved_s = min(cell.bound_s for cell in self.opened.values())
        return best, min(proved_s, self.unopened_bound_s, best.objective_s)

    def decide_one(self, index: int) -> Candidate:
        """The plan of one opened cell that the ILP decides on; asked once in a process."""
        decided, key = self.space.known.decided, f"{self.solver} {self.space.name(index)}"
        if key not in decided:
            found, proved_s = self.decide([index], self.optima[index].objective_s)
            if proved_s is None or proved_s < found.objective_s * (1 - AGREEMENT):
                return found
            decided[key] = found
        found = decided[key]
        return replace(found, cell=replace(found.cell, index=index))

    def near(self, objective_s: float) -> list[int]:
        """Of each family whose best J is within δ, the option that has it; the best family first."""
        by_objective = sorted(self.optima, key=lambda index: (self.optima[index].objective_s, index))
        near: dict[int, int] = {}
        for index in by_objective:
            # J* is the solver's, whose plan may be summed up in another order
            if self.optima[index].objective_s <= (1 + self.delta) * objective_s * (1 + AGREEMENT):
                near.setdefault(int(self.space.families[index]), index)
        return list(near.values())[:MOST_SIMULATED]

    def least_bound(self, simulated_s: float) -> tuple[float, int]:
        """min R over all cells, or a bound below it, and the cell that sets it; never above `simulated_s`.

        Bounds below 0.92 S are refined: first with memory, many at a time, then (v = 1) to the least R of the cell.
        """
        bounds, worth_s = self.space.simulated_bounds_s, _REFINE_BELOW * simulated_s
        waiting = np.argsort(bounds, kind="stable")
        # those below are refined with memory; the first of the others bounds them all
        below = waiting[bounds[waiting] < worth_s]
        rest = waiting[len(below) :]
        heap = [(float(bounds[index]), int(index), True) for index in rest[:1]]
        for some in np.array_split(below, max(1, -(-len(below) // _MOST_REFINED))):
            if self.left_s() <= 0:
                heap.extend((float(bounds[index]), int(index), True) for index in some[:1])
                continue
            tighter_s = np.minimum(self.space.simulated_bounds_below(simulated_s, some), simulated_s)
            refined_s = np.maximum(bounds[some], tighter_s).tolist()
            heap.extend((bound_s, index, False) for bound_s, index in zip(refined_s, some.tolist(), strict=True))
        heapq.heapify(heap)
        while True:
            bound_s, index, known = heap[0]
            if bound_s >= worth_s or known or self.left_s() <= 0 or self.space.layout(index).vpp > 1:
                return min(bound_s, simulated_s), index
            heapq.heapreplace(heap, (max(bound_s, self._least_of(index, simulated_s)), index, True))

    def _least_of(self, index: int, simulated_s: float) -> float:
        """v = 1: the least R of a cell, or `simulated_s` where every R is at least that."""
        found, name = self.space.known.least_simulated_s, self.space.name(index)
        least_s, below_s = found.get(name, (np.nan, -np.inf))
        if least_s < below_s or below_s >= simulated_s:
            return min(least_s, simulated_s)
        least_s = least_lower_bound_s(self.space.cell_for_bound(index, simulated_s), simulated_s)
        found[name] = least_s, simulated_s
        return least_s


def least_bound_of(space: PricedSpace, simulated_s: float) -> float:
    """min R over all cells of a space, as a search without a time limit has it; never above `simulated_s`."""
    return _Search(space=space, delta=DELTA, deadline=np.inf, solver=SolverName.HIGHS).least_bound(simulated_s)[0]


def candidate(cell: CellProblem, picks: IntArray, objective_s: float) -> Candidate:
    """A plan that passed the check in plain arithmetic, simulated."""
    wrong = flaw(cell, picks.tolist(), objective_s)
    if wrong:
        raise InternalError(f"a solution of cell {cell.index} ({cell.layout}) is not a plan: {wrong}")
    played_s, least_s = simulated_s(cell, picks), cell.lower_bound_s(picks)
    if played_s < least_s * (1 - AGREEMENT):
        raise InternalError(
            f"a plan of cell {cell.index} ({cell.layout}) has S = {played_s!r} s below its R = {least_s!r} s"
        )
    return Candidate(cell=cell, picks=picks, objective_s=objective_s, simulated_s=played_s)


def simulated_s(cell: CellProblem, picks: IntArray) -> float:
    """S of a plan."""
    if cell.played is not None:
        return cell.played.objective_s
    times = cell.times(picks)
    if cell.layout.pp == 1 and cell.layout.vpp == 1:
        # one device works through its micro-batches
        whole_s = cell.num_micro_batches * (times.forward_s[0] + times.backward_s[0])
        return float(whole_s + times.tail_s[0])
    return simulate(cell.pipeline, times).step_s


def search(
    space: PricedSpace,
    *,
    delta: float = DELTA,
    time_limit_s: float | None = None,
    solver: SolverName | None = None,
    always: Sequence[Candidate] = (),
    pace: Pace | None = None,
) -> Choice:
    """The plan of least S among those within δ of J*, and `always`, or a simpler one that ties with it, with its certificate.

    InfeasibleError where no plan of the space fits; TimeLimitError where `time_limit_s` ended before the first plan.
    """
    begun = time.monotonic()
    state = _Search(
        space=space,
        delta=delta,
        deadline=np.inf if time_limit_s is None else begun + time_limit_s,
        solver=solver or available_solvers()[0],
        pace=pace or Pace(),
    )
    state.open_cells()
    if not state.opened:
        if state.left_s() <= 0:
            raise TimeLimitError(f"the time limit of {time_limit_s:g} s ended before the first plan was known")
        raise InfeasibleError("no plan of the space fits into the devices' memory")
    best, bound_s = state.decide_all()
    near = [state.decide_one(index) for index in state.near(best.objective_s)]
    near.sort(key=lambda candidate: (candidate.simulated_s, candidate.objective_s, candidate.cell.index))
    known = [*near, *always]
    chosen = known[simplest([one.cell.layout for one in known], [one.simulated_s for one in known])]
    least_s, least_cell = state.least_bound(chosen.simulated_s)
    gap = max(0.0, 1 - bound_s / best.objective_s)
    proved, limit_s = gap <= AGREEMENT, min(state.limit_s(), state.unopened_bound_s)
    return Choice(
        chosen=chosen,
        near=tuple(near),
        status=CertificateStatus.OPTIMAL if proved else CertificateStatus.FEASIBLE,
        objective_s=best.objective_s,
        bound_s=bound_s,
        gap_objective=gap,
        least_bound_s=least_s,
        least_bound_cell=least_cell,
        gap_simulated=max(0.0, 1 - least_s / chosen.simulated_s),
        limit_s=limit_s,
        cells=_verdicts(state, chosen, best.objective_s, limit_s),
        seconds=time.monotonic() - begun,
        solver=state.solver.value,
    )


def _verdicts(state: _Search, chosen: Candidate, objective_s: float, limit_s: float) -> tuple[CellVerdict, ...]:
    """Of the cells that were looked into; their bounds are those that let them be."""
    bounds_s = np.maximum(state.space.objective_bounds_s, np.minimum(state.bounds_s, limit_s))
    return tuple(
        CellVerdict(
            index=index,
            bound_s=float(bounds_s[index]),
            simulated_bound_s=float(state.space.simulated_bounds_s[index]),
            objective_s=state.optima[index].objective_s if index in state.optima else None,
            reason=_reason(state, index, chosen, objective_s),
        )
        for index in sorted({*state.optima, *state.looked_below})
    )


def _reason(state: _Search, index: int, chosen: Candidate, objective_s: float) -> str:
    if index == chosen.cell.index:
        return "chosen"
    if index in state.optima:
        over = state.optima[index].objective_s / objective_s - 1
        simulated = f"simulated, or another option of its cell was, or {MOST_SIMULATED} better cells were"
        return f"best J is {over:.1%} above J*: {simulated if over <= state.delta else 'slower'}"
    below_s = state.looked_below[index]
    return NOTHING_FITS if np.isinf(below_s) else f"no plan that fits has J ≤ {below_s:.6g} s"


NOTHING_FITS = "no plan fits"
"""Reason of a cell that has no plan at all."""
