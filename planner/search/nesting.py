"""Rank orders as options of the cells: which of them may hold a better plan than the usual order does, and the search with those.

All cells are searched in the usual order first. J* and min R are then limits, and a cell in another order is worth its price
only where it may stay below them:

1. No order makes compute shorter: the bound of a cell in the usual order, times the least share of compute in its blocks, less
   its hops. That is arithmetic on what is there, and closes most cells.
2. Where a runtime takes many orders, the rest is priced once as if every group had the nearest ranks at the same time. No order
   gives more than that, as long as links inside a domain are no slower than those between domains.
3. What is left is priced in each order that is unlike the others (`cost_models.rank_orders`), and searched beside the cells of
   the usual order, whose bounds stand.

An order is an option of its cell, as ZeRO is; but the usual order and the best other one are both told, so each is a family.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.block_prices import price_blocks
from cost_models.links import Fabric
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.rank_orders import in_other_orders, orders_of
from cost_models.records import Cluster, Layout
from cost_models.schedules import FloatArray, IntArray
from planner.search.best_first import MOST_SIMULATED, CellVerdict, Choice, search
from planner.search.bounds import Bounds
from planner.search.known import Known
from planner.search.priced import Priced
from planner.search.stages import CellProblem

_FEW_ORDERS = 3
"""Up to so many orders each is priced at once; more are bounded all together first."""
_TOGETHER = 2048
"""Cells whose bounds are refined in one array call."""


class NearestCells(Cells):
    """Cells as if each group had the nearest ranks to itself: what no rank order can give to all of them."""

    @cached_property
    def _strides(self) -> dict[str, IntArray]:
        return dict.fromkeys(RANK_ORDER, np.ones(len(self), dtype=np.int64))

    @cached_property
    def expert_strides(self) -> tuple[IntArray, IntArray, IntArray]:
        """Next to one another, but for the experts' tensor parallelism, which stays inside."""
        one = np.ones(len(self), dtype=np.int64)
        return one, one, one


def orders_searched(problem: Problem) -> bool:
    """Whether other rank orders are looked at: the runtime takes some, one pool, and groups may leave their domain."""
    cluster = problem.cluster
    return len(orders_of(problem.runtime)) > 1 and len(cluster.pools) == 1 and cluster.num_gpus > _nearest_unit(cluster)


def _nearest_unit(cluster: Cluster) -> int:
    """Devices that are all as near to one another as devices can be."""
    island = cluster.pools[0].kind.island
    return cluster.domain_size if island is None else island.num_gpus


def other_orders(priced: Priced, *, objective_below_s: float, simulated_below_s: float) -> Priced | None:
    """The cells in other rank orders that may hold a plan with J up to one limit or R below the other, priced; None = none.

    Their families are those of the usual order, each moved behind all of these.
    """
    problem, cells = priced.problem, priced.space.cells
    orders = orders_of(problem.runtime)
    row = np.flatnonzero(_may_gain(priced, objective_below_s, simulated_below_s))
    if len(row) and len(orders) > _FEW_ORDERS and _inside_is_faster(priced.prices.fabric):
        row = row[_worth(_nearest(priced, row), objective_below_s, simulated_below_s)]
    if not len(row):
        return None
    found, of_row = in_other_orders(
        priced.prices.fabric, cells.take(row), orders, experts=problem.model.moe is not None
    )
    if not len(found):
        return None
    behind = int(priced.families.max()) + 1
    space = replace(
        priced.space,
        cells=found,
        families=behind + priced.families[row[of_row]],
    )
    more = replace(priced, space=space, prices=price_blocks(problem, found, space.recompute_kinds))
    kept = np.flatnonzero(_worth(more.bounds, objective_below_s, simulated_below_s))
    if not len(kept):
        return None
    space = replace(space, cells=found.take(kept), families=space.families[kept])
    prices = more.prices.spread(space.cells, kept, more.prices.recompute_kinds)
    return replace(priced, space=space, prices=prices)


def _may_gain(priced: Priced, objective_below_s: float, simulated_below_s: float) -> NDArray[np.bool_]:
    """(n,) step 1: cells of several axes whose compute alone leaves room below a limit."""
    cells, prices, bounds = priced.space.cells, priced.prices, priced.bounds
    several = sum((getattr(cells, axis) > 1).astype(np.int64) for axis in RANK_ORDER) > 1
    several &= cells.world > _nearest_unit(priced.problem.cluster)
    # many cells have the same prices
    _, first, row = np.unique(prices.rows, return_index=True, return_inverse=True)
    compute_s = (prices.forward_compute_s[first] + prices.backward_compute_s[first])[:, :, list(priced.kinds)]
    exposed_s = (prices.forward_exposed_s[first] + prices.backward_exposed_s[first])[:, :, list(priced.kinds)]
    share = (compute_s / np.maximum(compute_s + exposed_s, 1e-300)).min(axis=(1, 2))[row]
    stages, vpp = cells.num_virtual_stages, cells.vpp
    crossed = (priced.num_micro_batches - 1 / vpp) * np.maximum(2 * (stages - 1) / cells.pp, 2 * vpp - 1)
    hops_s = (crossed + 2 * (stages - 1) / vpp) * bounds.least_hop_s
    hops_s = np.where(bounds.played, 0.0, hops_s)
    near_s = share * (priced.objective_bounds_s - hops_s)
    return np.asarray(
        several & ((near_s <= objective_below_s) | (share * priced.simulated_bounds_s < simulated_below_s))
    )


def _inside_is_faster(fabric: Fabric) -> bool:
    """Whether even the fewest members of a domain reach each other faster than two domains do."""
    slowest = min((one.factor for one in fabric.slow_domains), default=1.0)
    nearest = fabric.intra.bytes_per_s * (fabric.domain_shares[1] if fabric.domain_shares else 1.0) * slowest
    return fabric.network.bytes_per_s <= nearest and fabric.network.step_s >= fabric.intra.step_s


def _nearest(priced: Priced, row: IntArray) -> Bounds:
    """Step 2: bounds of some cells as if each group had the nearest ranks."""
    few = priced.space.cells.take(row)
    cells = NearestCells(**{one.name: getattr(few, one.name) for one in fields(few)})
    return replace(priced.bounds, cells=cells, prices=price_blocks(priced.problem, cells, priced.space.recompute_kinds))


def _worth(bounds: Bounds, objective_below_s: float, simulated_below_s: float) -> NDArray[np.bool_]:
    """(n,) cells with a plan that fits and may have J up to the one limit, or R below the other."""
    every = np.arange(len(bounds.cells))
    worth = np.zeros(len(every), dtype=bool)
    for some in np.array_split(every, max(1, -(-len(every) // _TOGETHER))):
        worth[some] = bounds.objective_below(objective_below_s, some) <= objective_below_s
        rest = some[~worth[some] & (bounds.simulated_s[some] < simulated_below_s)]
        worth[rest] = bounds.simulated_below(simulated_below_s, rest) < simulated_below_s
    return worth


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """Cells in the usual order, and behind them those in other orders."""

    usual: Priced
    """The space in the usual order."""
    other: Priced
    """What `other_orders` found."""

    def __len__(self) -> int:
        return len(self.usual.space) + len(self.other.space)

    def _at(self, index: int) -> tuple[Priced, int]:
        count = len(self.usual.space)
        return (self.usual, index) if index < count else (self.other, index - count)

    @cached_property
    def objective_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J."""
        return np.concatenate([self.usual.objective_bounds_s, self.other.objective_bounds_s])

    @cached_property
    def simulated_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R."""
        return np.concatenate([self.usual.simulated_bounds_s, self.other.simulated_bounds_s])

    def bounds_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Tighter, of some cells: no plan with J ≤ `below_s` has a smaller J."""
        return self._each(lambda priced, some: priced.bounds_below(below_s, some), among)

    def simulated_bounds_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Tighter, of some cells: no plan with R ≤ `below_s` has a smaller R."""
        return self._each(lambda priced, some: priced.simulated_bounds_below(below_s, some), among)

    def _each(self, ask: Callable[[Priced, IntArray], FloatArray], among: IntArray) -> FloatArray:
        found, count = np.empty(len(among)), len(self.usual.space)
        usual = among < count
        if usual.any():
            found[usual] = ask(self.usual, among[usual])
        if not usual.all():
            found[~usual] = ask(self.other, among[~usual] - count)
        return found

    @cached_property
    def families(self) -> IntArray:
        """(n,) cells with the same number differ in options only."""
        return np.concatenate([self.usual.families, self.other.families])

    def fits(self, index: int) -> bool:
        """Whether the cell has any plan that fits."""
        priced, place = self._at(index)
        return priced.fits(place)

    def cell(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with J ≤ `below_s`."""
        priced, place = self._at(index)
        return replace(priced.cell(place, below_s), index=index)

    def cell_for_bound(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with R ≤ `below_s`."""
        priced, place = self._at(index)
        return replace(priced.cell_for_bound(place, below_s), index=index)

    def layout(self, index: int) -> Layout:
        """Degrees and options of the cell."""
        priced, place = self._at(index)
        return priced.layout(place)

    def name(self, index: int) -> str:
        """The cell as text."""
        priced, place = self._at(index)
        return priced.name(place)

    @property
    def known(self) -> Known:
        """What earlier searches found out about cells of the same problem."""
        return self.usual.known


@dataclass(frozen=True, kw_only=True, eq=False)
class _Continued(Joined):
    """The same behind a search in the usual order, which is not done again."""

    found: Choice
    """What that search found."""

    @cached_property
    def _opened(self) -> IntArray:
        return np.array([one.index for one in self.found.cells if one.objective_s is not None], dtype=np.int64)

    @cached_property
    def objective_bounds_s(self) -> FloatArray:
        """What was left closed has no plan below that search's limit, or another option of it has one as good."""
        bounds_s = self.usual.objective_bounds_s
        usual_s = np.maximum(bounds_s, np.nextafter(self.found.limit_s, np.inf))
        usual_s[self._opened] = bounds_s[self._opened]
        return np.concatenate([usual_s, self.other.objective_bounds_s])

    @cached_property
    def simulated_bounds_s(self) -> FloatArray:
        """Of the usual order the cell that sets min R stands for those that were left closed."""
        usual_s = np.full(len(self.usual.space), np.inf)
        usual_s[self._opened] = np.maximum(self.usual.simulated_bounds_s[self._opened], self.found.least_bound_s)
        usual_s[self.found.least_bound_cell] = self.found.least_bound_s
        return np.concatenate([usual_s, self.other.simulated_bounds_s])


def continued(usual: Priced, other: Priced, found: Choice, **how: Any) -> Choice:
    """The choice among both, where `found` is that of a proved search in the usual order; `how` as `best_first.search` has it."""
    again = search(_Continued(usual=usual, other=other, found=found), **how)
    told = {verdict.index for verdict in again.cells}
    before = [_before(one, again) for one in found.cells if one.index not in told]
    cells = sorted([*again.cells, *before], key=lambda one: one.index)
    return replace(again, cells=tuple(cells), seconds=found.seconds + again.seconds)


def _before(verdict: CellVerdict, again: Choice) -> CellVerdict:
    """What the earlier search said of a cell, with its distance from today's J*."""
    if verdict.objective_s is None:
        return verdict
    over = verdict.objective_s / again.objective_s - 1
    return replace(
        verdict, reason=f"best J is {over:.1%} above J*: slower, or {MOST_SIMULATED} better cells were simulated"
    )
