"""From what the search picked, or from a layout's text, to the decision that an executor reads."""

import numpy as np

from cost_models.facts import facts_of_run
from cost_models.laws import breaches
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.records import Binding, CollectiveChoice, Decision, Layout, Ranks, Severity, Stage
from cost_models.records.layout import STAGES
from planner.errors import InputError
from planner.incumbent import least_objective
from planner.priced import Priced
from planner.search import Candidate, simulated_s
from planner.space import Space
from planner.stages import CellProblem


def decision_of_picks(problem: Problem, cell: CellProblem, picks: np.ndarray) -> Decision:
    """The decision that the columns `picks` of a cell stand for."""
    columns, kinds = cell.columns, problem.recompute_kinds
    stages = tuple(
        Stage(
            virtual=virtual,
            device=virtual % cell.layout.pp,
            blocks=(int(columns.first[pick]), int(columns.last[pick])),
            recompute={
                kind: int(count) for kind, count in zip(kinds, columns.recompute_counts[pick], strict=True) if count
            },
        )
        for virtual, pick in enumerate(picks)
    )
    return decision_of_stages(problem, cell.layout, stages)


def decision_of_stages(problem: Problem, layout: Layout, stages: tuple[Stage, ...]) -> Decision:
    """The decision with these stages; the layout's recompute becomes that of its stages."""
    used = {kind for stage in stages for kind in stage.recompute} or {"none"}
    recompute = next(iter(used)) if len(used) == 1 else STAGES
    degrees = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
    return Decision(
        runtime=problem.runtime.name,
        layout=Layout(**degrees | {"recompute": recompute}),
        workload=problem.workload,
        num_micro_batches=layout.num_micro_batches(problem.workload.gbs),
        stages=stages,
        ranks=Ranks(order=RANK_ORDER),
        collectives={
            axis: CollectiveChoice(
                algorithm="default",
                binding=Binding.DECIDED if axis in problem.runtime.choosable_collectives else Binding.PREDICTED,
            )
            for axis in RANK_ORDER
            if getattr(layout, axis) > 1
        },
    )


def decision_of_layout(problem: Problem, layout: Layout, *, world: int | None = None) -> Decision:
    """The decision of a layout as people run it; see `candidate_of_layout`."""
    candidate = candidate_of_layout(problem, layout, world=world)
    return decision_of_picks(problem, candidate.cell, candidate.picks)


def candidate_of_layout(problem: Problem, layout: Layout, *, world: int | None = None) -> Candidate:
    """A layout as people run it: as many layers on every virtual stage, or the split of least J where they do not divide; one
    kind of recompute everywhere; whether it fits or not. `world` is the number of ranks that it must have, where that is known.

    Raises InputError, with the laws and the legal values, where the layout is illegal for the problem's runtime.
    """
    facts = facts_of_run(
        model=problem.model,
        workload=problem.workload,
        runtime=problem.runtime,
        layout=layout,
        world=world,
        domain_size=problem.cluster.pools[0].kind.domain_size,
    )
    broken = [found for found in breaches(facts, problem.runtime)[0] if found.severity is Severity.ERROR]
    if broken:
        told = "\n".join(f"  {found.code}: {found.message}" for found in broken)
        raise InputError(f"the layout is not legal with runtime {problem.runtime.name}:\n{told}")
    space = Space(
        cells=Cells.of([layout]),
        families=np.zeros(1, dtype=np.int64),
        recompute_kinds=(layout.recompute,),
        even_stages=problem.model.num_layers % layout.num_virtual_stages == 0,
        refusals=(),
        restrictions=(),
    )
    priced = Priced(problem=problem, space=space, prices=Priced.of(problem, space).prices, memory_limit_bytes=np.inf)
    cell = priced.cell(0, np.inf)
    best = least_objective(cell)
    if best is None:
        raise InputError(
            f"layout {layout}: {problem.model.num_blocks} blocks cannot fill {layout.num_virtual_stages} virtual stages"
        )
    return Candidate(
        cell=cell, picks=best.picks, objective_s=best.objective_s, simulated_s=simulated_s(cell, best.picks)
    )
