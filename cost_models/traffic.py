"""Communication inside a block and one micro-batch, before anything hides it: tensor and context parallelism. Arrays over
cells; that of routed experts is in experts.py.
"""

from dataclasses import dataclass

from cost_models import compute
from cost_models.collectives import Collective, Fabric, collective_s
from cost_models.compute import Seconds
from cost_models.problem import Cells, Problem
from cost_models.recompute import repeated
from cost_models.records import BlockKind, ContextExchange, LayerGroup
from cost_models.shares import Share, shared_width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Communication inside a block and one micro-batch, before anything hides it."""

    forward: Seconds
    backward: Seconds

    def scaled(self, factor: float) -> "Traffic":
        """Both ways times `factor`."""
        return Traffic(forward=self.forward.scaled(factor), backward=self.backward.scaled(factor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorCalls:
    """The collectives around one product that is split over tp, for the hidden state of a micro-batch."""

    gather: Seconds
    """With sequence parallelism: the all-gather before it. Without, nothing."""
    reduction: Seconds
    """The reduce-scatter behind it; without sequence parallelism the all-reduce."""


def tensor_calls(problem: Problem, cells: Cells, fabric: Fabric, part: Share) -> TensorCalls:
    """Seconds of T·h through each collective of tensor parallelism."""
    return _calls_of_width(problem, cells, fabric, part, problem.model.hidden)


def _calls_of_width(problem: Problem, cells: Cells, fabric: Fabric, part: Share, width: int) -> TensorCalls:
    num_bytes = part.tokens * width * compute.element_bytes(problem.workload.precision)
    stride = cells.stride("tp")
    if problem.runtime.sequence_parallel:
        return TensorCalls(
            gather=collective_s(fabric, Collective.ALL_GATHER, num_bytes, cells.tp, stride, world=cells.world),
            reduction=collective_s(fabric, Collective.REDUCE_SCATTER, num_bytes, cells.tp, stride, world=cells.world),
        )
    whole = collective_s(fabric, Collective.ALL_REDUCE, num_bytes, cells.tp, stride, world=cells.world)
    return TensorCalls(gather=Seconds.zeros(num_bytes.shape), reduction=whole)


def tensor_traffic(problem: Problem, part: Share, calls: TensorCalls, kind: BlockKind, recompute_kind: str) -> Traffic:
    """Tensor parallelism in a layer: with sequence parallelism two all-gathers and two reduce-scatters each way, else two
    all-reduces; and those of the forward pass that the kind of recompute repeats.

    Around routed experts there are none but for the shared experts beside them: each rank sends its own tokens.
    """
    again = repeated(problem.runtime.name, recompute_kind)
    products = 1.0 + shared_width(problem.model, part, kind).any()
    forward = calls.gather.scaled(products) + calls.reduction.scaled(products)
    repeats = calls.gather.scaled(products * again.gathers) + calls.reduction.scaled(products * again.reductions)
    return Traffic(forward=forward, backward=forward + repeats)


def projector_traffic(
    problem: Problem, cells: Cells, fabric: Fabric, part: Share, projector: LayerGroup, recompute_kind: str
) -> Traffic:
    """Tensor parallelism in a projector: what a layer has around a product and the one behind it, for each pair of matrices."""
    again = repeated(problem.runtime.name, recompute_kind)
    widths = projector.projection
    pairs = [(widths[at], widths[min(at + 2, len(widths) - 1)]) for at in range(0, len(widths) - 1, 2)]
    gathered, reduced = (_calls_of_width(problem, cells, fabric, part, sum(side)) for side in zip(*pairs, strict=True))
    forward = gathered.gather + reduced.reduction
    # the backward pass gathers what the forward pass scattered, and the other way round
    backward = reduced.gather + gathered.reduction
    repeats = gathered.gather.scaled(again.gathers) + reduced.reduction.scaled(again.reductions)
    return Traffic(forward=forward, backward=backward + repeats)


def end_traffic(cells: Cells, fabric: Fabric, part: Share, calls: TensorCalls) -> tuple[Traffic, Traffic]:
    """(embedding, head) of a vocabulary that is divided over tp: a reduction behind the look-up, a gather before the head,
    and three all-reduces of one number a token in the loss (largest logit, sum, the label's logit).
    """
    loss = collective_s(
        fabric, Collective.ALL_REDUCE, part.tokens * 4.0, cells.tp, cells.stride("tp"), world=cells.world
    )
    embedding = Traffic(forward=calls.reduction, backward=calls.gather)
    return embedding, Traffic(forward=calls.gather + loss.scaled(3.0), backward=calls.reduction)


def context_traffic(problem: Problem, cells: Cells, fabric: Fabric, part: Share) -> Traffic:
    """Context parallelism in a layer, by the runtime's way.

    gather, ring: keys and values of the whole sequence come around, and go around once more with their gradients.
    all_to_all: queries, keys, values change from parts of the sequence to parts of the heads, outputs go back
    (DeepSpeed-Ulysses, Jacobs 2023, section 3); the backward pass does the same.
    """
    element = compute.element_bytes(problem.workload.precision)
    group = (cells.cp, cells.stride("cp"))
    if problem.runtime.context_exchange is ContextExchange.ALL_TO_ALL:
        sent = part.tokens * (part.queries + part.keys + part.values + part.outputs) * element
        both = collective_s(fabric, Collective.ALL_TO_ALL, sent, *group, world=cells.world)
        return Traffic(forward=both, backward=both)
    num_bytes = part.tokens * part.cp * (part.keys + part.values) * element
    gather = collective_s(fabric, Collective.ALL_GATHER, num_bytes, *group, world=cells.world)
    scatter = collective_s(fabric, Collective.REDUCE_SCATTER, num_bytes, *group, world=cells.world)
    return Traffic(forward=gather, backward=gather + scatter)
