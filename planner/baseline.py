"""The layout that the handbook gives: the smallest tp·pp that fits, tp inside the fast domain, the rest data parallel."""

from collections.abc import Iterator

from cost_models.law_terms import divisors
from cost_models.memory import memory_report, memory_upper, usable_bytes
from cost_models.problem import Problem
from cost_models.records import Decision, RecordError, normalised
from planner.decisions import decision_of_layout
from planner.errors import InputError


def handbook(problem: Problem, world: int) -> Decision | None:
    """The first decision, in the handbook's order, that surely fits on `world` ranks; None where none does.

    Order: tp·pp from 1 up, of equal products the larger tp; then less sharding before more, less recompute before more;
    one sequence a micro-batch.
    """
    for tp, pp in _model_parallel(problem, world):
        for decision in _variants(problem, world, tp, pp):
            if surely_fits(problem, decision):
                return decision
    return None


def surely_fits(problem: Problem, decision: Decision) -> bool:
    """Even the upper end of the memory's interval fits."""
    peak = max(device.peak_bytes for device in memory_report(problem, decision))
    return memory_upper(problem, peak) <= usable_bytes(problem)


def _model_parallel(problem: Problem, world: int) -> list[tuple[int, int]]:
    domain = problem.cluster.pools[0].kind.domain_size
    pairs = [(tp, pp) for tp in divisors(world) if tp <= domain for pp in divisors(world // tp)]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


def _variants(problem: Problem, world: int, tp: int, pp: int) -> Iterator[Decision]:
    """Decisions of these degrees that are legal, less sharding and recompute first."""
    runtime, dp = problem.runtime, world // (tp * pp)
    for zero in runtime.zero_levels if pp == 1 else runtime.zero_levels_with_pp:
        if zero and dp == 1:
            continue
        for recompute in problem.recompute_kinds:
            layout = normalised(dp=dp, tp=tp, pp=pp, zero=zero, recompute=recompute, micro_gather=runtime.zero2_gather)
            try:
                yield decision_of_layout(problem, layout)
            except (InputError, RecordError):
                break  # the degrees are illegal, whatever the recompute
