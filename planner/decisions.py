"""From what the search picked, or from a layout's text, to the decision that an executor reads."""

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from cost_models.facts import facts_of_run
from cost_models.law_terms import divisors
from cost_models.laws import breaches
from cost_models.placement import Placement
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.records import Binding, CollectiveChoice, Decision, Layout, Ranks, Severity, Stage
from cost_models.records.layout import STAGES
from cost_models.schedules import devices_of_stages
from planner.errors import InputError
from planner.predict import simulated
from planner.search.arrangements import LAW, Arrangement, arrangements
from planner.search.best_first import Candidate, simulated_s
from planner.search.incumbent import least_objective
from planner.search.played import is_played, split_counts
from planner.search.pooled import price
from planner.search.space import Space


def stages_of(plan: Candidate) -> tuple[Stage, ...]:
    """The virtual stages of a plan as records; kinds that no layer has are left out."""
    columns, layout = plan.cell.columns, plan.cell.layout
    devices = devices_of_stages(layout.schedule, layout.pp, layout.vpp).tolist()
    stages = []
    for virtual, pick in enumerate(plan.picks.tolist()):
        counts = zip(plan.cell.recompute_kinds, columns.recompute_counts[pick].tolist(), strict=True)
        stages.append(
            Stage(
                virtual=virtual,
                device=devices[virtual],
                blocks=(int(columns.first[pick]), int(columns.last[pick])),
                recompute={kind: count for kind, count in counts if count},
                pool=plan.cell.pools[devices[virtual]] if plan.cell.pools else None,
            )
        )
    return tuple(stages)


def layout_of(plan: Candidate) -> Layout:
    """The layout of a plan: its recompute where all layers agree, else `stages`."""
    used = plan.cell.columns.recompute_counts[plan.picks].sum(axis=0)
    kinds = [kind for kind, count in zip(plan.cell.recompute_kinds, used.tolist(), strict=True) if count]
    return replace(plan.cell.layout, recompute=kinds[0] if len(kinds) == 1 else STAGES)


def decision_of(problem: Problem, plan: Candidate) -> Decision:
    """The decision that a plan of the search stands for."""
    return decision_of_stages(problem, layout_of(plan), stages_of(plan), plan.cell.order)


def decision_of_stages(
    problem: Problem, layout: Layout, stages: tuple[Stage, ...], order: tuple[str, ...] = RANK_ORDER
) -> Decision:
    """The decision of a layout with these stages; on a mixed cluster, stages without a pool lie in the order of the pools."""
    ranks = Ranks(order=order)
    if len(problem.cluster.pools) > 1:
        if stages[0].pool is None:
            pools = arrangement_of(problem, layout)
            stages = tuple(replace(stage, pool=pools[stage.device]) for stage in stages)
        found = {stage.device: stage.pool for stage in stages}
        where = Placement(tuple(pool for _, pool in sorted(found.items()) if pool is not None))
        ranks = Ranks(order=RANK_ORDER, permutation=where.permutation(layout.world))
    return Decision(
        runtime=problem.runtime.name,
        layout=layout,
        workload=problem.workload,
        num_micro_batches=layout.num_micro_batches(problem.workload.gbs),
        stages=stages,
        ranks=ranks,
        collectives={
            axis: CollectiveChoice(
                algorithm="default",
                binding=Binding.DECIDED if axis in problem.runtime.choosable_collectives else Binding.PREDICTED,
            )
            for axis in RANK_ORDER
            if getattr(layout, axis) > 1
        },
    )


def arrangement_of(problem: Problem, layout: Layout) -> Arrangement:
    """The pool of each position of a layout's pipeline where nobody says it: in the order of the pools.

    InputError, with the legal pp, where a stage cannot lie in one pool.
    """
    gpus = [pool.num_gpus for pool in problem.cluster.pools]
    found = arrangements(gpus, layout.world, layout.pp)
    if not found:
        every = [pp for pp in divisors(layout.world) if arrangements(gpus, layout.world, pp)]
        raise InputError(
            f"layout {layout}: cluster {problem.cluster.name!r} has pools of {' + '.join(map(str, gpus))} GPUs, and each stage of "
            f"{layout.world // layout.pp} GPUs lies in one of them ({LAW}); legal pp on {layout.world} GPUs: "
            f"{', '.join(map(str, every)) or 'none'}"
        )
    return found[0]


def decision_of_layout(
    problem: Problem, layout: Layout, *, world: int | None = None, pools: Arrangement = ()
) -> Decision:
    """The decision of a layout as people run it: as many layers on every virtual stage, or the split of least J where they do
    not divide; one kind of recompute everywhere; whether it fits or not. A schedule without a formula, and unequal virtual
    stages, take the balanced split of least simulated time.

    `world` is the number of ranks that it must have, where that is known; `pools` where its stages lie on a mixed cluster, in the
    order of the pools where nobody says it. Raises InputError where the layout is illegal.
    """
    refuse_illegal(problem, layout, world)
    uneven = problem.model.num_layers % layout.num_virtual_stages != 0
    if not is_played(layout.schedule, problem.model.num_layers, layout.pp, layout.vpp):
        return decision_of(problem, _as_people_run_it(problem, layout, pools))
    if uneven and not problem.runtime.uneven_stages:
        raise InputError(
            f"layout {layout}: {problem.model.num_layers} layers do not divide over pp·vpp = {layout.num_virtual_stages} "
            f"virtual stages, and runtime {problem.runtime.name} cannot split them unevenly; legal pp·vpp: "
            f"{', '.join(map(str, divisors(problem.model.num_layers)))}"
        )
    options = [decision_of_stages(problem, layout, stages) for stages in _balanced(problem, layout, pools)]
    return min(options, key=lambda decision: simulated(problem, decision).simulation.step_s)


def _balanced(problem: Problem, layout: Layout, pools: Arrangement) -> list[tuple[Stage, ...]]:
    """The splits of a layout whose plans are played."""
    num_layers, num_stages = problem.model.num_layers, layout.num_virtual_stages
    if num_layers + 2 < num_stages:
        raise InputError(f"layout {layout}: {num_layers + 2} blocks cannot fill {num_stages} virtual stages")
    devices = devices_of_stages(layout.schedule, layout.pp, layout.vpp).tolist()
    splits = [_stages_of_counts(layout, blocks, devices) for blocks in split_counts(num_layers, num_stages)]
    if not pools:
        return splits
    return [tuple(replace(stage, pool=pools[stage.device]) for stage in stages) for stages in splits]


def _stages_of_counts(layout: Layout, blocks: list[int], devices: list[int]) -> tuple[Stage, ...]:
    """Virtual stages that hold so many blocks each."""
    edges = [0, *accumulate(blocks)]
    last = len(blocks) - 1
    stages = []
    for virtual, (first, end) in enumerate(pairwise(edges)):
        layers = end - first - (virtual == 0) - (virtual == last)
        recompute = {layout.recompute: layers} if layers else {}
        stages.append(Stage(virtual=virtual, device=devices[virtual], blocks=(first, end - 1), recompute=recompute))
    return tuple(stages)


def refuse_illegal(
    problem: Problem, layout: Layout, world: int | None = None, *, excused: Collection[str] = ()
) -> None:
    """Raises InputError, with the laws and the legal values, where the layout is illegal for the problem's runtime.

    `excused` are codes of laws that something else may lift, of which nothing is known.
    """
    facts = facts_of_run(
        model=problem.model,
        workload=problem.workload,
        runtime=problem.runtime,
        layout=layout,
        world=world,
        domain_size=problem.cluster.domain_size,
    )
    found = breaches(facts, problem.runtime)[0]
    broken = [one for one in found if one.severity is Severity.ERROR and one.code not in excused]
    if broken:
        told = "\n".join(f"  {one.code}: {one.message}" for one in broken)
        raise InputError(f"the layout is not legal with runtime {problem.runtime.name}:\n{told}")


def _as_people_run_it(problem: Problem, layout: Layout, pools: Arrangement) -> Candidate:
    """The split of least J among those with as many layers on every virtual stage, or where that cannot be, among all."""
    space = Space(
        cells=Cells.of([layout]),
        families=np.zeros(1, dtype=np.int64),
        recompute_kinds=(layout.recompute,),
        even_stages=problem.model.num_layers % layout.num_virtual_stages == 0,
        refusals=(),
        restrictions=(),
    )
    if len(problem.cluster.pools) > 1:
        only = (pools or arrangement_of(problem, layout),)
        space = replace(space, arrangement=np.zeros(1, dtype=np.int64), arrangements=only)
    cell = price(problem, space).without_limit().cell(0, np.inf)
    best = least_objective(cell)
    if best is None:
        raise InputError(
            f"layout {layout}: {problem.model.num_blocks} blocks cannot fill {layout.num_virtual_stages} virtual stages"
        )
    return Candidate(
        cell=cell, picks=best.picks, objective_s=best.objective_s, simulated_s=simulated_s(cell, best.picks)
    )
