"""Which pool of a mixed cluster runs which position of the pipeline, and what stages cost there.

The pipeline is the outermost axis, so a tensor, context or data parallel group lies inside one stage; a stage lies in one
pool. All collectives are then inside a pool and priced there as if the cluster were that pool alone. What crosses pools:

  hops                from a stage of one pool to the next one of another: at the slower side's network, all switches crossed
  tied embeddings     first and last stage add up their gradients: at the slowest network of the cluster's pools

The GPUs of a cluster are numbered pool after pool; ranks are those that are used, in that order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from cost_models.block_prices import BlockPrices, price_blocks
from cost_models.calibrations import value
from cost_models.collectives import Collective, Fabric, collective_s, hops_s
from cost_models.problem import Cells, Columns, FloatArray, IntArray, Problem
from cost_models.records import Cluster, Decision, RecordError
from cost_models.schedules import WITH_FORMULA, devices_of_stages
from cost_models.stage import ColumnPrices, gathered_hop_s, price_columns


@dataclass(frozen=True, slots=True)
class Placement:
    """The pool of each position of the pipeline."""

    pools: tuple[int, ...]
    """(pp,) number of the pool, in the order of the cluster."""

    @classmethod
    def of(cls, decision: Decision) -> "Placement":
        """Where a decision puts its stages. RecordError where it does not say so."""
        found = {stage.device: stage.pool for stage in decision.stages}
        pools = tuple(pool for _, pool in sorted(found.items()) if pool is not None)
        if len(pools) < decision.layout.pp:
            raise RecordError("the decision does not say in which pool of the cluster each stage lies (stages[].pool)")
        return cls(pools)

    @property
    def used(self) -> tuple[int, ...]:
        """Pools that run a stage, by number."""
        return tuple(sorted(set(self.pools)))

    @property
    def places(self) -> IntArray:
        """(pp,) position of each device among those of its pool, from 0."""
        seen: dict[int, int] = {}
        found = []
        for pool in self.pools:
            found.append(seen.get(pool, 0))
            seen[pool] = found[-1] + 1
        return np.array(found)

    def permutation(self, world: int) -> tuple[int, ...] | None:
        """The rank at each position of the mesh, pp outermost; None where it is the identity."""
        each = world // len(self.pools)
        order = np.argsort(np.argsort(np.array(self.pools), kind="stable"), kind="stable")
        ranks = (order[:, None] * each + np.arange(each)).ravel()
        return None if (np.diff(order) == 1).all() else tuple(ranks.tolist())

    def words(self, cluster: Cluster) -> str:
        """`2 stages h100, 4 a100`: pools in the order of the pipeline."""
        runs: list[tuple[int, int]] = []
        for pool in self.pools:
            runs = [*runs[:-1], (pool, runs[-1][1] + 1)] if runs and runs[-1][0] == pool else [*runs, (pool, 1)]
        return ", ".join(f"{count} on {pool_name(cluster, pool)}" for pool, count in runs)


def pool_name(cluster: Cluster, number: int) -> str:
    """The device of a pool; with its number where two pools have the same."""
    names = [pool.kind.device.name for pool in cluster.pools]
    return names[number] if names.count(names[number]) == 1 else f"{names[number]}#{number}"


# --- prices ---------------------------------------------------------------------------------------------------------------


def price_pools(
    problem: Problem, cells: Cells, pools: Sequence[int], recompute_kinds: Sequence[str] | None = None
) -> dict[int, BlockPrices]:
    """The blocks of every cell, priced on each of these pools under some kinds of recompute (all); all ends meet at the
    slowest network."""
    prices = {pool: price_blocks(problem.on_pool(pool), cells, recompute_kinds) for pool in pools}
    slowest = min((one.fabric for one in prices.values()), key=lambda fabric: fabric.network.bytes_per_s)
    between = _across(slowest, problem.cluster.num_gpus)
    return {pool: replace(one, between=between) for pool, one in prices.items()}


def _across(fabric: Fabric, num_gpus: int) -> Fabric:
    """A pool's links for what leaves the pool: nothing of it stays inside."""
    return replace(fabric, num_gpus=num_gpus)


def hop_table_s(prices: Mapping[int, BlockPrices], cell: int, placement: Placement) -> FloatArray:
    """(S-1, kinds) seconds of one crossing from each virtual stage to the next, by the kind of the block in front of it."""
    one = next(iter(prices.values()))
    cells, pools, places = one.cells, np.array(placement.pools), placement.places
    pp, num_stages = len(pools), int(cells.num_virtual_stages[cell])
    devices = devices_of_stages(cells.schedule[cell], pp, num_stages // pp)
    here, there = devices[:-1], devices[1:]
    factors, row = np.unique(one.problem.hop_factors, return_inverse=True)
    table = np.zeros((num_stages - 1, len(factors)))
    for number, factor in enumerate(factors.tolist()):
        for pool, priced in prices.items():
            priced = replace(priced, hop_bytes=priced.hop_bytes * factor)
            inside = np.flatnonzero((pools[here] == pool) & (pools[there] == pool))
            leaving = (pools[here] == pool) != (pools[there] == pool)
            table[inside, number] = _hops_inside(priced, cell, places[here[inside]], places[there[inside]])
            if leaving.any():
                across_s = _hop_across(priced, cell)
                table[leaving, number] = np.maximum(table[leaving, number], across_s)
    return np.asarray(np.where(here == there, 0.0, table.T).T[:, row.ravel()])


def _hops_inside(prices: BlockPrices, cell: int, here: IntArray, there: IntArray) -> FloatArray:
    stride = int(prices.cells.stride("pp")[cell])
    seconds = hops_s(prices.fabric, prices.hop_bytes[cell], stride, here, there)
    return _seen(prices, cell) * (seconds + gathered_hop_s(prices, cell))


def _hop_across(prices: BlockPrices, cell: int) -> float:
    """One side of a hop between pools."""
    assert prices.between is not None
    links = _across(prices.fabric, prices.between.num_gpus)
    seconds = collective_s(links, Collective.P2P, prices.hop_bytes[cell], 2, links.num_gpus).total
    return float(_seen(prices, cell) * (seconds + gathered_hop_s(prices, cell)))


def _seen(prices: BlockPrices, cell: int) -> float:
    family = prices.problem.cluster.pools[0].kind.device.family
    hidden = value(prices.problem.calibration, "overlap.p2p", family, prices.problem.runtime.name)
    return 1.0 - hidden if prices.cells.schedule[cell] in WITH_FORMULA else 1.0


def placed_hops_s(
    prices: Mapping[int, BlockPrices], cell: int, placement: Placement, columns: Columns
) -> tuple[FloatArray, FloatArray]:
    """(n,) seconds of one crossing of the hop into and out of each column; 0 at the ends of the pipeline."""
    problem = next(iter(prices.values())).problem
    kind_of_block = problem.block_places
    table = hop_table_s(prices, cell, placement)
    table = np.vstack([np.zeros((1, table.shape[1])), table, np.zeros((1, table.shape[1]))])
    into = table[columns.stage, kind_of_block[np.maximum(columns.first - 1, 0)]]
    return into, table[columns.stage + 1, kind_of_block[columns.last]]


def price_placed(problem: Problem, cells: Cells, placement: Placement, columns: Columns) -> ColumnPrices:
    """The columns of the first cell, each on the pool of its device."""
    prices = price_pools(problem, cells, placement.used)
    devices = devices_of_stages(cells.schedule[0], int(cells.pp[0]), int(cells.vpp[0]))
    pool_of_column = np.array(placement.pools)[devices[columns.stage]]
    which = np.searchsorted(np.array(placement.used), pool_of_column)
    picked: ColumnPrices = _picked([price_columns(one, 0, columns) for one in prices.values()], which)
    into, out = placed_hops_s(prices, 0, placement, columns)
    return replace(picked, hop_in_s=into, hop_out_s=out)


def _picked(parts: Sequence[Any], which: IntArray) -> Any:
    """Records of arrays (n, ...), of which entry i is taken from part which[i]."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.stack(parts)[which, np.arange(len(which))]
    if isinstance(first, Mapping):
        nothing = np.zeros(len(which))
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _picked([part.get(name, nothing) for part in parts], which) for name in names}
    if is_dataclass(first) and not isinstance(first, type):
        named = {e.name: _picked([getattr(part, e.name) for part in parts], which) for e in fields(first)}
        return replace(first, **named)
    assert all(part is None for part in parts)
    return None
