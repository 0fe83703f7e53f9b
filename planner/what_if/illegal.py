"""What to change where nothing is legal: the nearest batches and numbers of GPUs with a plan, each solved again."""

from collections.abc import Iterator

from cost_models.law_terms import divisors
from planner.errors import InfeasibleError
from planner.pace import Tell
from planner.what_if.changes import Change, ChangeKind, Question
from planner.what_if.feasible import is_feasible, solved
from planner.what_if.infeasible import MOST_COUNTS, Deadline, counts_above, told, with_plan


def nothing_legal(
    question: Question, error: InfeasibleError, limit_s: float | None = None, tell: Tell | None = None
) -> InfeasibleError:
    """The error for a space without a legal layout: what closed it, and batches and numbers of GPUs that would open it."""
    found = told(str(error).split("\n")[0], question, (_other_batch, _other_gpus), limit_s, tell)
    return InfeasibleError(
        str(error).split("\n")[0],
        relaxations=(*error.relaxations, *found.relaxations),
        changes=found.document["changes"],
    )


def _other_batch(question: Question, deadline: Deadline) -> Iterator[Change]:
    """The nearest batches, below and above, that some data-parallel degree divides."""
    gbs = question.problem.workload.gbs
    degrees = {degree for world in question.worlds or (question.most_gpus,) for degree in divisors(world)}
    lower = sorted({gbs // degree * degree for degree in degrees} - {0, gbs}, reverse=True)
    upper = sorted({-(-gbs // degree) * degree for degree in degrees} - {gbs})
    for values in (lower, upper):
        for value in values:
            deadline.check(f"a batch of {value}")
            changed = question.with_workload(gbs=value)
            found = solved(changed, time_limit_s=deadline.left_s()) if is_feasible(changed) else None
            if found is not None:
                yield with_plan(
                    found, kind=ChangeKind.BATCH, value=value, instead_of=gbs,
                    words=f"{value} sequences a step instead of {gbs}, other training",
                )  # fmt: skip
                break


def _other_gpus(question: Question, deadline: Deadline) -> Iterator[Change]:
    """The nearest numbers of GPUs, below and above."""
    if len(question.problem.cluster.pools) > 1:
        return
    asked = question.most_gpus
    per_node = question.problem.cluster.pools[0].kind.gpus_per_node
    lower = [
        *range((asked - 1) // per_node * per_node, per_node - 1, -per_node),
        *range(min(asked, per_node) - 1, 0, -1),
    ]
    for counts in (lower[:MOST_COUNTS], counts_above(question)[:MOST_COUNTS]):
        for count in counts:
            deadline.check(f"{count} GPUs")
            changed = question.on(count)
            found = solved(changed, time_limit_s=deadline.left_s()) if is_feasible(changed) else None
            if found is not None:
                yield with_plan(
                    found, kind=ChangeKind.GPUS, value=count, instead_of=asked,
                    words=f"{count} GPUs instead of {asked}",
                )  # fmt: skip
                break
