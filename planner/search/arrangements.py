"""Which pool of a mixed cluster may serve which stage of a pipeline.

A stage lies in one pool and all stages take as many GPUs, world/pp. Where all GPUs are used, pool g serves N_g·pp/world stages,
which must be whole. Where some stay idle, whole pools are filled and at most one is used in part.

An arrangement is the pool of each position of the pipeline. All orders are taken where they are few. Where they are many the
stages of one pool are neighbours, so that data leaves a pool once: one arrangement for each order of the pools. Orders matter
where blocks are unlike or few: a slow pool at both ends takes embedding and head, and leaves the layers to the fast one.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.problem import Cells, IntArray
from cost_models.records import Cluster

Arrangement = tuple[int, ...]
"""(pp,) the number of the pool of each position of the pipeline."""

LAW = "GPUs of each pool · pp / world is whole: a stage lies in one pool"
MOST_ORDERS = 24
"""Orders of stages that are all tried; a pipeline with more has those in which the stages of a pool are neighbours."""
NEIGHBOURS = f"the stages of one pool are neighbours in the pipeline, where there are more than {MOST_ORDERS} orders"


def arrangements(gpus: Sequence[int], world: int, pp: int) -> tuple[Arrangement, ...]:
    """The arrangements of pp stages on pools of `gpus` GPUs each, the order of the pools first."""
    each = world // pp
    found: dict[Arrangement, None] = {}
    for counts in _counts(gpus, world, pp, each):
        used = [pool for pool, count in enumerate(counts) if count]
        for order in itertools.permutations(used):
            found[tuple(pool for pool in order for _ in range(counts[pool]))] = None
        if math.factorial(pp) // math.prod(map(math.factorial, counts)) <= MOST_ORDERS:
            found |= dict.fromkeys(_orders(counts))
    return tuple(found)


def _orders(counts: Sequence[int]) -> Iterator[Arrangement]:
    """Every distinct order of so many stages of each pool."""
    if not any(counts):
        yield ()
    for pool, count in enumerate(counts):
        if count:
            left = [n - (other == pool) for other, n in enumerate(counts)]
            yield from ((pool, *rest) for rest in _orders(left))


def _counts(gpus: Sequence[int], world: int, pp: int, each: int) -> Iterator[tuple[int, ...]]:
    """Stages of each pool."""
    room = [have // each for have in gpus]
    if world == sum(gpus):
        if all(have % each == 0 for have in gpus):
            yield tuple(room)
        return
    pools = range(len(gpus))
    subsets = (set(some) for size in range(len(gpus), -1, -1) for some in itertools.combinations(pools, size))
    for full in subsets:
        left = pp - sum(room[pool] for pool in full)
        if left < 0:
            continue
        for partly in [pool for pool in pools if pool not in full and left <= room[pool]] if left else [None]:
            counts = [room[pool] if pool in full else 0 for pool in pools]
            if partly is not None:
                counts[partly] = left
            yield tuple(counts)


def legal_pipelines(gpus: Sequence[int]) -> int:
    """pp must be a multiple of this where all GPUs are used."""
    return sum(gpus) // int(np.gcd.reduce(gpus))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Cells on the pools of a cluster."""

    row: IntArray
    """(n,) the cell that each entry is an arrangement of."""
    arrangement: IntArray
    """(n,) the number of its arrangement."""
    arrangements: tuple[Arrangement, ...]
    refused: IntArray
    """Cells that have none."""


def place(cells: Cells, cluster: Cluster) -> Placed:
    """Every arrangement of every cell; those of one cell are neighbours."""
    gpus = [pool.num_gpus for pool in cluster.pools]
    numbers: dict[Arrangement, int] = {}
    known: dict[tuple[int, int], list[int]] = {}
    of_cell: list[list[int]] = []
    for shape in zip(cells.world.tolist(), cells.pp.tolist(), strict=True):
        if shape not in known:
            known[shape] = [numbers.setdefault(one, len(numbers)) for one in arrangements(gpus, *shape)]
        of_cell.append(known[shape])
    counts = np.array([len(some) for some in of_cell], dtype=np.int64)
    return Placed(
        row=np.repeat(np.arange(len(cells)), counts),
        arrangement=np.array([number for some in of_cell for number in some], dtype=np.int64),
        arrangements=tuple(numbers),
        refused=np.flatnonzero(counts == 0),
    )
