"""What this executor does not make true, each with its reason. Read before anything is built or any rank waits."""

from collections.abc import Callable, Iterator

from cost_models.records import SPLIT_BACKWARD, Decision, Gather, Precision, Schedule
from executor.anatomy import Dimensions
from executor.errors import RefusedError
from executor.sharding.recompute import KINDS

Law = Callable[[Decision, Dimensions], str | None]
"""What is wrong with a decision for a module of these dimensions, in words; None = nothing."""


def _not_yet(decision: Decision, _: Dimensions) -> str | None:
    layout = decision.layout
    if layout.cp > 1:
        return f"cp={layout.cp}: context parallelism is not yet in the executor; legal: cp=1"
    if layout.ep > 1 or layout.etp > 1:
        return f"ep={layout.ep}, etp={layout.etp}: expert parallelism is not yet in the executor; legal: ep=1, etp=1"
    if decision.workload.precision not in (Precision.FP32, Precision.BF16):
        return f"precision={decision.workload.precision}: not yet in the executor; legal: fp32, bf16"
    return None


def _zero(decision: Decision, _: Dimensions) -> str | None:
    layout = decision.layout
    if layout.zero == 1:
        return (
            "zero=1 (optimizer state alone is divided) is not what torch's data parallelism does; it realises 0 (DDP), "
            "2/gather=micro (FSDP that keeps parameters through a micro-batch) and 3/gather=use (FSDP that frees them)"
        )
    if layout.zero == 2 and layout.gather is not Gather.MICRO:
        return f"zero=2 with gather={layout.gather}: FSDP gathers once a micro-batch; legal: gather=micro"
    return None


def _schedule(decision: Decision, _: Dimensions) -> str | None:
    layout, count = decision.layout, decision.num_micro_batches
    if layout.pp == 1:
        return f"vpp={layout.vpp} with pp=1: virtual stages need a pipeline; legal: vpp=1" if layout.vpp > 1 else None
    if layout.schedule in SPLIT_BACKWARD:
        return (
            f"schedule={layout.schedule} splits the backward pass, and in torch this silently gives wrong gradients with "
            "FSDP that reshards (measured: off by 1.2 relative, the loss correct) and with DDP (1.3 to 1.5); legal: gpipe, "
            "1f1b, interleaved, loopedbfs"
        )
    looped = layout.schedule in (Schedule.INTERLEAVED, Schedule.LOOPED_BFS)
    if layout.vpp > 1 and not looped:
        return f"vpp={layout.vpp} with schedule={layout.schedule}, which runs one stage a device; legal: interleaved, loopedbfs, or vpp=1"
    if layout.vpp == 1 and looped:
        return f"schedule={layout.schedule} with vpp=1: it interleaves several stages a device; legal: vpp ≥ 2, or gpipe, 1f1b"
    if layout.schedule is Schedule.ONE_F_ONE_B and count < layout.pp:
        return f"num_micro_batches={count} with 1f1b on pp={layout.pp} stages: torch needs at least {layout.pp}; or take gpipe"
    if layout.schedule is Schedule.INTERLEAVED:
        rounds = max(1, count // layout.pp)
        if count % rounds:
            return f"num_micro_batches={count} with interleaved on pp={layout.pp}: torch needs a multiple of its {rounds} rounds"
    return None


def _stages(decision: Decision, dimensions: Dimensions) -> str | None:
    last_block = dimensions.num_layers + 1
    if decision.num_blocks != last_block + 1:
        return f"the stages cover {decision.num_blocks} blocks, the module has {last_block + 1} (0 embedding, 1..{last_block - 1} layers, then the head)"
    for stage in decision.stages:
        if stage.device != stage.virtual % decision.layout.pp:
            return (
                f"stage {stage.virtual} on device {stage.device}: the schedules here run stage s on device s mod pp = "
                f"{stage.virtual % decision.layout.pp}"
            )
        first, last = stage.blocks
        num_layers = min(last, last_block - 1) - max(first, 1) + 1
        unknown = sorted(set(stage.recompute) - set(KINDS))
        if unknown:
            return f"recompute kind {unknown[0]!r} of stage {stage.virtual}; torch's kinds here: {', '.join(KINDS)}"
        if any(count < 0 for count in stage.recompute.values()) or sum(stage.recompute.values()) > num_layers:
            return f"recompute {dict(stage.recompute)} of stage {stage.virtual}, which has {num_layers} layers"
    return None


def _tensor(decision: Decision, dimensions: Dimensions) -> str | None:
    tp = decision.layout.tp
    if tp == 1:
        return None
    for name, value in (("heads", dimensions.heads), ("kv_heads", dimensions.kv_heads), ("ffn", dimensions.ffn)):
        if value % tp:
            legal = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0 and decision.layout.world % n == 0)
            return (
                f"{name}={value} is not divisible by tp={tp}; legal tp for it on {decision.layout.world} ranks: {legal}"
            )
    return sequence_law(decision.workload.seq, tp)


def sequence_law(seq: int, tp: int) -> str | None:
    """Sequence parallelism divides a sequence evenly: gloo aborts the process otherwise, NCCL hangs."""
    if seq % tp:
        return f"seq={seq} is not divisible by tp={tp}; sequence parallelism needs equal parts: pad or cut to a multiple of {tp}"
    return None


LAWS: tuple[Law, ...] = (_not_yet, _zero, _schedule, _stages, _tensor)
"""All of them, in the order in which they are told."""


def refusals(decision: Decision, dimensions: Dimensions) -> Iterator[str]:
    """Each reason why this decision cannot be made true for a module of these dimensions."""
    for law in LAWS:
        reason = law(decision, dimensions)
        if reason is not None:
            yield reason


def check(decision: Decision, dimensions: Dimensions) -> None:
    """Raise RefusedError with every reason, or return."""
    reasons = list(refusals(decision, dimensions))
    if reasons:
        raise RefusedError("; ".join(reasons))
