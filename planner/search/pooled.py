"""A mixed cluster's space with its prices: each stage's columns on the pool that its arrangement gives it.

Blocks are priced once per pool, on the cluster with that pool alone; an arrangement says which of these prices a device has.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cost_models.memory import memory_upper, usable_bytes
from cost_models.placement import Placement, placed_hops_s, price_pools
from cost_models.problem import Columns, Problem
from cost_models.schedules import FloatArray
from planner.search.known import Known, known_of
from planner.search.pool_bounds import PoolBounds
from planner.search.priced import Priced
from planner.search.space import Space
from planner.search.stages import CellProblem, Spans, StageColumns, chunk_spans, free_spans


@dataclass(frozen=True, kw_only=True, eq=False)
class Pooled(Priced):
    """One problem's space on several pools; `prices` are those of the first, and the limit is that of the largest device."""

    of_pools: tuple[Priced, ...]
    """The same space as if every stage lay in that pool."""

    @classmethod
    def of(cls, problem: Problem, space: Space, *, at_risk: bool = False) -> "Pooled":
        """Prices every block of every cell on every pool."""
        numbers = range(len(problem.cluster.pools))
        prices = price_pools(problem, space.cells, numbers, space.recompute_kinds)
        of_pools = []
        for number in numbers:
            own = problem.on_pool(number)
            limit = usable_bytes(own) / (1.0 if at_risk else memory_upper(own, 1.0))
            of_pools.append(Priced(problem=own, space=space, prices=prices[number], memory_limit_bytes=limit))
        most = max(one.memory_limit_bytes for one in of_pools)
        return cls(problem=problem, space=space, prices=prices[0], memory_limit_bytes=most, of_pools=tuple(of_pools))

    @cached_property
    def bounds(self) -> PoolBounds:  # type: ignore[override]
        """What no plan of a cell beats."""
        return PoolBounds(space=self.space, of_pools=tuple(one.bounds for one in self.of_pools))

    @cached_property
    def _thrifty(self) -> "Pooled":
        space = replace(self.space, recompute_kinds=(self.thriftiest_kind,))
        return replace(self, space=space, of_pools=tuple(replace(one, space=space) for one in self.of_pools))

    def _thriftily(self, index: int) -> CellProblem:
        return self._thrifty.cell(index, np.inf)

    def without_limit(self) -> "Pooled":
        """The same space where memory has no end."""
        pools = tuple(replace(one, memory_limit_bytes=np.inf) for one in self.of_pools)
        return replace(self, memory_limit_bytes=np.inf, of_pools=pools)

    @cached_property
    def known(self) -> Known:
        """What earlier searches found out about cells of the same problem."""
        limits = [one.memory_limit_bytes for one in self.of_pools]
        return known_of(self.problem, limits, self.space.recompute_kinds)

    def _limits(self, index: int) -> FloatArray:
        return np.array([self.of_pools[pool].memory_limit_bytes for pool in self.space.pools(index)])

    def _spans(self, index: int, heaviest: float) -> Spans:
        layout, num_layers = self.layout(index), self.problem.model.num_layers
        if layout.vpp > 1 or (self.space.even_stages and layout.pp > 1):
            return chunk_spans(num_layers, layout.num_virtual_stages)
        rows = np.stack([one.least_blocks_s(index) for one in self.of_pools])
        return free_spans(rows, layout.pp, heaviest, self.space.pools(index))

    def columns(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """The columns of these spans, each stage's as its pool prices them, with the hops between pools."""
        pools = np.array(cell.pools)[spans.stage % cell.layout.pp]
        used = np.unique(pools).tolist()
        parts = [self.of_pools[pool].columns(cell, spans.take(pools == pool)) for pool in used]
        joined = StageColumns.joined(*parts)
        if not len(joined):
            return joined
        as_columns = Columns(
            stage=joined.stage, first=joined.first, last=joined.last, recompute_counts=joined.recompute_counts
        )
        prices = {pool: self.of_pools[pool].prices for pool in used}
        into, out = placed_hops_s(prices, cell.index, Placement(cell.pools), as_columns)
        return replace(joined, hop_in_s=into, hop_out_s=out)


def price(problem: Problem, space: Space, *, at_risk: bool = False) -> Priced:
    """A space with its prices, on a cluster of one pool or of several. With `at_risk`, plans may fill a device to the brim."""
    several = len(problem.cluster.pools) > 1
    return (Pooled if several else Priced).of(problem, space, at_risk=at_risk)
