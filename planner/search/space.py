"""The cells of a search: every layout of the degrees that the laws allow here, and the refusals with their reasons.

A cell fixes dp, cp, tp, ep, etp, pp, virtual stages, micro-batch size and schedule; its options (split of dp, ZeRO, gather)
are further entries of the same family. What the runtime's severities call an error restricts the space, and so do the pins.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from cost_models.facts import facts_of_model
from cost_models.law_terms import parts_without
from cost_models.laws import Facts
from cost_models.problem import Cells, IntArray
from cost_models.rank_orders import order_text
from cost_models.recompute import is_priced
from cost_models.records import Cluster, Layout, Model, Runtime, Workload
from planner.errors import InfeasibleError, InputError, NotYetError
from planner.readers.pins import Pins
from planner.search.arrangements import LAW as POOL_LAW
from planner.search.arrangements import NEIGHBOURS, Arrangement, legal_pipelines, place
from planner.search.left_out import nothing_legal, restrictions
from planner.search.played import are_played
from planner.search.walk import MANY_OPERATIONS, MOST_SEARCHED_LAYERS, Log, Refusal, Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """All cells, each option an entry of its own."""

    cells: Cells
    families: IntArray
    """(n,) entries of the same number differ in options only."""
    recompute_kinds: tuple[str, ...]
    """Kinds of recompute that stages may use."""
    even_stages: bool
    """The runtime cannot split layers unevenly: as many layers on every stage."""
    refusals: tuple[Refusal, ...]
    """What the laws and pins left out."""
    restrictions: tuple[str, ...]
    """What the space never holds, in words."""
    arrangement: IntArray | None = None
    """(n,) number of each entry's arrangement on the pools of a mixed cluster; None where the cluster has one pool."""
    arrangements: tuple[Arrangement, ...] = ()
    """The pool of each position of the pipeline, by that number."""

    def __len__(self) -> int:
        return len(self.cells)

    def pools(self, index: int) -> Arrangement:
        """The pool of each position of an entry's pipeline; empty where the cluster has one pool."""
        return () if self.arrangement is None else self.arrangements[int(self.arrangement[index])]

    def name(self, index: int) -> str:
        """An entry as text: its layout, its rank order where it is not the usual one, and on several pools where its stages lie:
        `... on pools 1x2 0x4`, two on pool 1 first."""
        order = order_text(self.cells, index)
        layout = f"{self.cells.layout(index)} order {order}" if order else str(self.cells.layout(index))
        runs = [f"{pool}x{len(list(run))}" for pool, run in itertools.groupby(self.pools(index))]
        return f"{layout} on pools {' '.join(runs)}" if runs else layout

    def find(self, layout: Layout) -> int | None:
        """Number of the entry with these degrees and options, whatever its recompute; None where it is not in the space."""
        same = np.ones(len(self), dtype=bool)
        for entry in fields(Layout):
            if entry.name != "recompute":
                same &= getattr(self.cells, entry.name) == getattr(layout, entry.name)
        found = np.flatnonzero(same)
        return int(found[0]) if len(found) else None


def enumerate_cells(
    *,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    runtime: Runtime,
    pins: Pins | None = None,
    worlds: Collection[int] | None = None,
    extra: Sequence[Layout] = (),
) -> Space:
    """The legal cells on `worlds` ranks (all GPUs of the cluster by default), and `extra` layouts whatever the pins say.

    InputError for a world that the cluster has not; InfeasibleError, with the commonest reasons, where nothing is legal;
    NotYetError for a model that is too deep to be searched.
    """
    if model.num_layers > MOST_SEARCHED_LAYERS:
        raise NotYetError(
            f"model {model.name!r} has num_layers={model.num_layers:,}: plans are searched for up to {MOST_SEARCHED_LAYERS} layers; "
            "`predict` prices a layout of a deeper one"
        )
    chosen = sorted({cluster.num_gpus} if worlds is None else set(worlds))
    _check_worlds(chosen, cluster)
    pins = pins or Pins()
    walk = Walk(facts=base_facts(model, cluster, workload, runtime), runtime=runtime, pins=pins, log=Log(), families={})
    for world in chosen:
        walk.add_world(world)
        walk.worlds.append(world)
    for layout in extra:
        walk.add_extra(layout)
    kinds = tuple(
        kind
        for kind in runtime.recompute_kinds
        if is_priced(runtime.name, kind)
        and pins.allows_value("recompute", kind)
        and not parts_without(replace(walk.facts, recompute=kind))
    )
    if not walk.rows or not kinds:
        raise nothing_legal(walk, kinds)
    cells, families = walk.cells()
    space = Space(
        cells=cells,
        families=families,
        recompute_kinds=kinds,
        even_stages=not runtime.uneven_stages,
        refusals=walk.log.refusals(),
        restrictions=restrictions(runtime, pins, chosen, cluster, workload.seq)
        + ((MANY_OPERATIONS,) if MANY_OPERATIONS in walk.log.reasons.values() else ()),
    )
    return space if len(cluster.pools) == 1 else on_pools(space, model, cluster)


def on_pools(space: Space, model: Model, cluster: Cluster) -> Space:
    """The space of a mixed cluster: every arrangement of every cell, each with a family of its own.

    InfeasibleError where no cell has any.
    """
    played = are_played(space.cells, model.num_layers)
    formula = np.flatnonzero(~played)
    cells = space.cells.take(formula)
    placed = place(cells, cluster)
    refusals = space.refusals
    if len(placed.refused):
        first = int(placed.refused[0])
        refused = Refusal(
            code="pool stages",
            reason=POOL_LAW,
            count=len(placed.refused),
            example=f"world={int(cells.world[first])} pp={int(cells.pp[first])}",
        )
        refusals = (refused, *refusals)
    if not len(placed.row):
        gpus = [pool.num_gpus for pool in cluster.pools]
        legal = f"with all GPUs of {cluster.name!r} ({' + '.join(map(str, gpus))}) legal pp: multiples of {legal_pipelines(gpus)}"
        raise InfeasibleError(f"no layout is legal here: {POOL_LAW}", relaxations=(legal,))
    pairs = np.stack([space.families[formula][placed.row], placed.arrangement], axis=1)
    families = np.unique(pairs, axis=0, return_inverse=True)[1].ravel()
    told = [NEIGHBOURS, "all stages take as many GPUs, so pools serve stages in the ratio of their GPUs"]
    if played.any():
        told.append("on several kinds of GPUs: schedules whose time is played, not given by a formula")
    if any(int(world) != cluster.num_gpus for world in np.unique(cells.world)):
        told.append("of GPUs that stay idle: at most one pool is used in part")
    return replace(
        space,
        cells=cells.take(placed.row),
        families=families,
        refusals=refusals,
        restrictions=(*space.restrictions, *told),
        arrangement=placed.arrangement,
        arrangements=placed.arrangements,
    )


def _check_worlds(worlds: Sequence[int], cluster: Cluster) -> None:
    for world in worlds:
        if not 1 <= world <= cluster.num_gpus:
            raise InputError(
                f"--gpus {world}: cluster {cluster.name!r} has {cluster.num_gpus} GPUs; legal: 1..{cluster.num_gpus}, "
                f"or a larger cluster"
            )


def base_facts(model: Model, cluster: Cluster, workload: Workload, runtime: Runtime) -> Facts:
    """What is known before any degree is chosen."""
    return Facts(
        **(facts_of_model(model) | ({} if model.layer_groups else {"ffn": model.ffn})),
        gpus_per_node=cluster.gpus_per_node,
        domain_size=cluster.domain_size,
        seq=workload.seq,
        gbs=workload.gbs,
        precision=workload.precision.value,
        sp=runtime.sequence_parallel,
    )
