"""Rank orders: which axis has the nearest ranks, and where two orders are the same to every group.

An order is told from the inside out. It decides how many members of a group share a fast domain, or a switch; nothing else of
it is felt. So two orders are one where every group has as many members in each unit of the fabric, and its stages hop over as
much of it. The groups of ZeRO and of routed experts join several axes; orders that leave no even space between the members of
such a group are not priced.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.collectives import groups_of, members
from cost_models.links import Fabric
from cost_models.problem import RANK_ORDER, Cells, IntArray
from cost_models.records import Decision, Runtime
from cost_models.records.runtime import ANY_ORDER

Order = tuple[str, ...]
_DATA_AXES = ("tp", "cp", "dp_shard", "dp_replicate")


@lru_cache(maxsize=64)
def _listed(told: tuple[str, ...]) -> tuple[Order, ...]:
    if ANY_ORDER in told:
        every = itertools.permutations(RANK_ORDER)
        offered = {order for order in every if order.index("tp") < order.index("cp")}
    else:
        offered = {tuple(text.split()) for text in told}
    return (RANK_ORDER, *sorted(offered - {RANK_ORDER}))


def orders_of(runtime: Runtime) -> tuple[Order, ...]:
    """Rank orders that a runtime can be told, the usual one first; tp always lies inside cp, which hides better."""
    return _listed(tuple(runtime.rank_orders))


def order_text(cells: Cells, index: int) -> str:
    """The rank order of an entry, axes of one rank left out: `tp pp dp_shard`; empty where it is the usual one."""
    return told_order(cells.rank_order(index), {axis: int(getattr(cells, axis)[index]) for axis in RANK_ORDER})


def told_order(order: Order, degrees: Mapping[str, int]) -> str:
    """A rank order, axes of one rank left out; empty where it is the usual one."""
    kept, usual = (_used(one, degrees) for one in (order, RANK_ORDER))
    return "" if kept == usual else " ".join(kept)


def _used(order: Order, degrees: Mapping[str, int]) -> list[str]:
    return [axis for axis in order if degrees[axis] > 1]


def moved_axes(decision: Decision) -> tuple[str, str, str]:
    """(axes from the inside out, the same in the usual order, how the two differ: `pp lies inside dp_shard`), axes of one rank
    left out; all empty where the order is the usual one."""
    degrees = {axis: int(getattr(decision.layout, axis)) for axis in RANK_ORDER}
    here, usual = _used(decision.ranks.order, degrees), _used(RANK_ORDER, degrees)
    if here == usual:
        return "", "", ""
    pairs = [
        f"{inner} lies inside {outer}"
        for at, inner in enumerate(here)
        for outer in here[at + 1 :]
        if usual.index(outer) < usual.index(inner)
    ]
    return ", ".join(here), ", ".join(usual), ", ".join(pairs)


def evenly_spaced(cells: Cells, *, experts: bool) -> NDArray[np.bool_]:
    """(n,) whether the members of every group lie at one distance, so that a group is (size, stride).

    cp·dp_shard of ZeRO, and cp·dp_replicate where nothing is divided, must be neighbours. Routed experts divide the ranks of tp,
    cp and dp anew, etp and ep inside: those keep their usual order, and a pipeline among them lies right outside of ep.
    """
    even = np.where(
        cells.zero == 0, _neighbours(cells, "cp", "dp_replicate"), _neighbours(cells, "cp", "dp_shard")
    ).astype(bool)
    if not experts:
        return even
    inside = np.ones(len(cells), dtype=np.int64)
    for axis in _DATA_AXES:  # the ranks of a stage that lie inside the pipeline, in the usual order
        degree, stride = getattr(cells, axis), cells.stride(axis)
        even &= (degree == 1) | (stride == inside) | (stride == inside * cells.pp)
        inside = inside * degree
    whole = cells.etp * cells.ep == cells.stride("pp")
    outermost = cells.stride("pp") * cells.pp == cells.world
    return np.asarray(even & (whole | outermost | (cells.pp == 1)))


def _neighbours(cells: Cells, first: str, second: str) -> NDArray[np.bool_]:
    one, other = (getattr(cells, axis) for axis in (first, second))
    inner, outer = cells.stride(first), cells.stride(second)
    return np.asarray((one == 1) | (other == 1) | (outer == inner * one) | (inner == outer * other))


def places(fabric: Fabric, cells: Cells, *, experts: bool) -> IntArray:
    """(n, features) where the groups of each cell lie, as far as a price feels it: equal rows cost the same."""
    groups = [
        (cells.tp, cells.stride("tp")),
        (cells.cp, cells.stride("cp")),
        cells.shard_group,
        cells.replica_group,
    ]
    if experts:
        groups += [cells.expert_group, cells.expert_shard_group, cells.expert_replica_group]
        groups.append((cells.etp, cells.expert_strides[0]))
    stride = cells.stride("pp")
    groups.append((np.where(cells.pp > 1, 2, 1), np.maximum(stride * (cells.pp - 1), 1)))  # first and last stage
    felt = [feature for size, step in groups for feature in _felt(fabric, cells, size, step)]
    units = (fabric.island_size, fabric.domain_size, *(level.unit for level in fabric.levels))
    felt += [_hops_out(unit, cells) for unit in units if unit > 1]
    felt += [np.where(cells.pp > 1, members(level.unit, np.full_like(stride, 2), stride), 0) for level in fabric.levels]
    if fabric.slow_domains or fabric.slow_nics or any(level.slow for level in fabric.levels):
        felt.append(np.where(cells.pp > 1, stride, 0))  # which hop meets what is slow
    return np.stack([np.asarray(one, dtype=np.int64) for one in felt], axis=1)


def _felt(fabric: Fabric, cells: Cells, size: IntArray, step: IntArray) -> list[IntArray]:
    """What a group's seconds depend on, beside its size."""
    alone, at = size == 1, groups_of(fabric, size.astype(float), step.astype(float), cells.world)
    felt = [at.inside, at.outside, at.in_island, *at.beyond, *at.below, step >= fabric.devices_per_nic]
    return [np.where(alone, 1, np.asarray(one, dtype=np.int64)) for one in felt]


def _hops_out(unit: int, cells: Cells) -> IntArray:
    """(n,) how many hops of a pipeline leave a unit of the fabric; what does not divide stands for itself."""
    stride, pp = cells.stride("pp"), cells.pp
    each = np.maximum(unit // stride, 1)
    counted = np.where(stride >= unit, pp - 1, -(-pp // each) - 1)
    repeats = stride * pp
    aligned = (np.mod(unit, repeats) == 0) | (np.mod(repeats, unit) == 0) | (repeats == cells.world)
    even = ((np.mod(unit, stride) == 0) | (np.mod(stride, unit) == 0)) & aligned
    return np.asarray(np.where(pp == 1, 0, np.where(even, counted, -stride)))


def in_other_orders(
    fabric: Fabric, cells: Cells, orders: tuple[Order, ...], *, experts: bool
) -> tuple[Cells, IntArray]:
    """The same cells in every other of these orders that is not the same as the first, or as one before it, and can be priced;
    and the number of each one's cell.
    """
    even = [evenly_spaced(_within(cells, order), experts=experts) for order in orders[1:]]
    some = np.flatnonzero(np.logical_or.reduce(even)) if even else np.empty(0, dtype=np.int64)
    few = cells.take(some)
    seen = [places(fabric, _within(few, orders[0]), experts=experts)]
    found, numbers = [], []
    for number, order in enumerate(orders[1:], start=1):
        here = places(fabric, _within(few, order), experts=experts)
        new = even[number - 1][some]
        for other in seen:
            new &= (here != other).any(axis=1)
        # what cannot be priced hides no order behind it
        seen.append(np.where(new[:, None], here, -1))
        which = np.flatnonzero(new)
        found.append(some[which])
        numbers.append(np.full(len(which), number))
    row = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    nesting = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
    return replace(cells.take(row), nesting=nesting, orders=orders), row


def _within(cells: Cells, order: Order) -> Cells:
    return replace(cells, nesting=None, orders=(order,))
