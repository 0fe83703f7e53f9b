"""What is refused before anything is built or any rank waits: the laws of `cost_models.laws`, and what is not here yet."""

from collections.abc import Callable, Iterator

from cost_models import laws
from cost_models.records import SPLIT_BACKWARD, Decision, Gather, Plan, Precision, Severity
from executor.collectives.choice import refused_choices, refused_hierarchy
from executor.errors import RefusedError
from executor.mesh import rank_tensor
from executor.sharding.recompute import KINDS

RUNTIME = "torch"
"""The runtime whose plans are made true here."""


def _foreign(decision: Decision) -> str | None:
    if decision.runtime != RUNTIME:
        return (
            f"runtime={decision.runtime}: a plan for {decision.runtime} is run by {decision.runtime} "
            f"itself; legal here: {RUNTIME} (`meshwright plan --runtime {RUNTIME}`)"
        )
    return None


def _parallelism(decision: Decision) -> str | None:
    layout = decision.layout
    if layout.cp > 1:
        return f"cp={layout.cp}: context parallelism is not yet in the executor; legal: cp=1"
    if layout.ep > 1 or layout.etp > 1:
        return f"ep={layout.ep}, etp={layout.etp}: expert parallelism is not yet in the executor; legal: ep=1, etp=1"
    return None


def _precision(decision: Decision) -> str | None:
    if decision.workload.precision not in (Precision.FP32, Precision.BF16):
        return f"precision={decision.workload.precision}: not yet in the executor; legal: fp32, bf16"
    return None


def _gather(decision: Decision) -> str | None:
    layout = decision.layout
    if layout.zero == 1:
        return "zero=1 divides the optimizer state alone; FSDP realises 2 (gather=micro) and 3 (gather=use), DDP 0"
    if layout.zero == 2 and layout.gather is not Gather.MICRO:
        return f"zero=2 with gather={layout.gather}: FSDP gathers once a micro-batch; legal: gather=micro"
    return None


def _split_backward(decision: Decision) -> str | None:
    layout = decision.layout
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        return (
            f"schedule={layout.schedule} splits the backward pass, and in torch this silently gives wrong gradients with "
            "FSDP that reshards (measured: off by 1.2 relative, the loss correct) and with DDP (1.3 to 1.5); legal: gpipe, "
            "1f1b, interleaved"
        )
    return None


def _placement(decision: Decision) -> str | None:
    for stage in decision.stages:
        if stage.device != stage.virtual % decision.layout.pp:
            return (
                f"stage {stage.virtual} on device {stage.device}: the schedules here run stage s on device s mod pp; legal: "
                f"{stage.virtual % decision.layout.pp}"
            )
    return None


def _recompute(decision: Decision) -> str | None:
    last_layer = decision.num_blocks - 2
    for stage in decision.stages:
        num_layers = max(0, min(stage.blocks[1], last_layer) - max(stage.blocks[0], 1) + 1)
        unknown = sorted(set(stage.recompute) - set(KINDS))
        if unknown:
            return f"recompute {unknown[0]!r} of stage {stage.virtual}; legal kinds: {', '.join(KINDS)}"
        if any(count < 0 for count in stage.recompute.values()) or sum(stage.recompute.values()) > num_layers:
            return f"recompute {dict(stage.recompute)} of stage {stage.virtual}; legal: at most its {num_layers} layers"
    return None


def _ranks(decision: Decision) -> str | None:
    if decision.layout.cp > 1:
        return None  # refused already, and no axis of the mesh
    try:
        rank_tensor(decision)
    except RefusedError as error:
        return str(error)
    return None


OWN_LAWS: tuple[Callable[[Decision], str | None], ...] = (
    _foreign,
    _parallelism,
    _precision,
    _gather,
    _split_backward,
    _placement,
    _recompute,
    _ranks,
    refused_choices,
)
"""What is wrong with a decision here, in words; None = nothing. In the order in which it is told."""


def refusals(plan: Plan) -> Iterator[str]:
    """Each reason why a plan is not made true here."""
    decision = plan.decision
    for law in OWN_LAWS:
        reason = law(decision)
        if reason is not None:
            yield reason
    request = plan.request
    broken = refused_hierarchy(decision, request.cluster.domain_size)
    if broken is not None:
        yield broken
    facts = laws.facts_of_run(
        model=request.model, workload=decision.workload, runtime=request.runtime, layout=decision.layout
    )
    for found in laws.breaches(facts, request.runtime)[0]:
        if found.severity is Severity.ERROR:
            yield f"{found.message} [{found.code}]"


def check(plan: Plan) -> None:
    """Raise RefusedError with every reason, or return."""
    reasons = list(refusals(plan))
    if reasons:
        raise RefusedError("; ".join(reasons))


def sequence_law(seq: int, tp: int) -> str | None:
    """The law SEQ_MOD_TPCP for the batch at hand: gloo aborts the process where it is broken, NCCL hangs."""
    if seq % tp:
        return f"seq={seq} is not divisible by tp={tp}; sequence parallelism needs equal parts: pad or cut to a multiple of {tp}"
    return None
