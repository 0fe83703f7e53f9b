"""`executor.selfcheck`: is the realised layout the planned one, and are loss and gradients those of one process?

The layout is read from the live modules (torch's own types, names and placements), not from what built them.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cost_models.records import Precision
from executor.errors import RefusedError
from executor.mesh import AXES
from executor.parallelize import IGNORE, Parallel
from executor.sharding.recompute import kind_of
from executor.stage import StageModule

TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 5e-2}
"""Largest relative error. fp32: the sums of all layouts are within 1e-6 of one process (measured); bf16 rounds to 2^-9, and
gradients of FSDP in bf16 were measured 1.9e-2 from fp32."""

SEQ_PER_PART = 8
"""Tokens of the check's sequences, for each part into which tp divides them."""

MAX_PARAMETERS = 50_000_000
"""Models up to this size are checked against one process: every rank then holds all of it twice, 0.4 GB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One question and its answer on one rank."""

    question: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The answers of all ranks."""

    findings: tuple[tuple[int, Finding], ...]
    """(rank, finding)."""
    loss_error: float | None
    """Relative; None where no reference was given."""
    gradient_error: float | None
    """Largest over parameters of max|g - g_ref| / max|g_ref|; None where no reference was given."""

    @property
    def ok(self) -> bool:
        """No rank found a fault."""
        return all(finding.ok for _, finding in self.findings)

    def __str__(self) -> str:
        faults = [f"rank {rank}: {f.question}: {f.detail}" for rank, f in self.findings if not f.ok]
        if faults:
            return (
                "self-check FAILED: "
                + "; ".join(faults[:8])
                + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            )
        asked = ", ".join(dict.fromkeys(finding.question for _, finding in self.findings))
        numbers = "not compared with one process"
        if self.gradient_error is not None:
            numbers = f"loss off by {self.loss_error:.1e}, gradients by {self.gradient_error:.1e} of one process's"
        return f"self-check passed ({asked}; {numbers})"


def selfcheck(parallel: Parallel, reference: nn.Module | None = None, *, seed: int = 0) -> SelfCheck:
    """Compare the realised layout with the plan, and with `reference` a step's loss and gradients; on every rank.

    `reference` is the whole module with the weights that `apply` was given (a deep copy made before); None compares the
    layout alone. The step runs on short random sequences, one a micro-batch; gradients are dropped afterwards, weights do
    not change. Raises RefusedError where gradients are pending.
    """
    if any(parameter.grad is not None for parameter in parallel.parameters()):
        raise RefusedError(
            "selfcheck needs a step of its own, and gradients are pending: call it before a step or after zero_grad"
        )
    findings = list(_layout_findings(parallel))
    loss_error = gradient_error = None
    if reference is not None:
        loss_error, gradient_error, worst = _compare(parallel, reference, seed)
        tolerance = TOLERANCE[parallel.decision.workload.precision]
        findings.append(Finding(question="loss", ok=loss_error <= tolerance, detail=f"off by {loss_error:.1e}"))
        findings.append(
            Finding(question="gradients", ok=gradient_error <= tolerance, detail=f"{worst} off by {gradient_error:.1e}")
        )
    everywhere: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, findings)
    return SelfCheck(
        findings=tuple((rank, finding) for rank, found in enumerate(everywhere) for finding in found),
        loss_error=loss_error,
        gradient_error=gradient_error,
    )


# Layout --------------------------------------------------------------------------------------------------------------


def _layout_findings(parallel: Parallel) -> Iterator[Finding]:
    wanted, found = _planned_ranks(parallel), parallel.mesh.mesh.flatten().tolist()
    yield Finding(question="ranks", ok=wanted == found, detail=f"planned {wanted}, found {found}")
    for virtual, stage, module in zip(parallel.virtual, parallel.stages, parallel.modules, strict=True):
        planned = parallel.decision.stages[virtual]
        blocks = _held_blocks(stage, parallel.decision.num_blocks)
        expected = list(range(planned.blocks[0], planned.blocks[1] + 1))
        yield Finding(
            question="blocks", ok=blocks == expected, detail=f"stage {virtual}: planned {expected}, holds {blocks}"
        )
        kinds = [kind_of(layer) for _, layer in stage.named_layers()]
        order = [kind for kind, count in planned.recompute.items() for _ in range(count)]
        order += ["none"] * (len(kinds) - len(order))
        yield Finding(
            question="recompute", ok=kinds == order, detail=f"stage {virtual}: planned {order}, found {kinds}"
        )
        faults = list(_sharding_faults(parallel, stage, module))
        yield Finding(question="sharding", ok=not faults, detail=f"stage {virtual}: {'; '.join(faults[:3])}")


def _planned_ranks(parallel: Parallel) -> list[int]:
    """Ranks in mesh order, each coordinate's position worked out digit by digit from the plan's order."""
    layout, ranks = parallel.decision.layout, parallel.decision.ranks
    degrees = [getattr(layout, axis) for axis in AXES]
    found = []
    for number in range(layout.world):
        coordinate, rest = {}, number
        for axis, degree in zip(reversed(AXES), reversed(degrees), strict=True):
            rest, coordinate[axis] = divmod(rest, degree)
        position, stride = 0, 1
        for axis in ranks.order:
            if axis in coordinate:
                position += coordinate[axis] * stride
                stride *= getattr(layout, axis)
        found.append(position if ranks.permutation is None else ranks.permutation[position])
    return found


def _held_blocks(stage: StageModule, num_blocks: int) -> list[int]:
    """Blocks of which this stage has parameters with values."""
    names = [name for name, parameter in stage.named_parameters(remove_duplicate=False) if not parameter.is_meta]
    layer = re.compile(re.escape(stage.anatomy.layers) + r"\.(\d+)\.")
    blocks = {int(match.group(1)) + 1 for name in names if (match := layer.match(name))}
    if any(name.startswith(stage.anatomy.embedding + ".") for name in names):
        blocks.add(0)
    if any(name.startswith(stage.anatomy.head + ".") for name in names):
        blocks.add(num_blocks - 1)
    return sorted(blocks)


def _sharding_faults(parallel: Parallel, stage: StageModule, module: nn.Module) -> Iterator[str]:
    layout = parallel.decision.layout
    sharded = layout.zero >= 2
    if layout.dp > 1 and not sharded and not isinstance(module, (DistributedDataParallel, ReplicateModule)):
        yield f"dp_replicate={layout.dp_replicate}, but nothing averages the gradients"
    if sharded:
        for name, part in stage.named_modules():
            if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group) is not None:
                frees = group.post_forward_mesh_info is not None
                if frees != (layout.zero == 3):
                    yield f"{name or 'the root'} {'frees' if frees else 'keeps'} its parameters after the forward pass under zero={layout.zero}"
    for name, parameter in stage.named_parameters():
        held = _placements(parameter)
        norm = parameter.dim() == 1 and "norm" in name.rsplit(".", 2)[-2]
        for axis, expected in (("dp_shard", sharded), ("tp", layout.tp > 1 and not norm)):
            is_sharded = axis in held and not held[axis].is_replicate()
            bias_of_row = axis == "tp" and name.endswith("bias") and not is_sharded  # added once, after the sum
            if is_sharded != expected and not bias_of_row:
                yield f"{name} is {'' if is_sharded else 'not '}sharded over {axis}"


def _placements(parameter: nn.Parameter) -> dict[str, Placement]:
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    return dict(zip(names, parameter.placements, strict=True))


# Loss and gradients --------------------------------------------------------------------------------------------------


def _compare(parallel: Parallel, reference: nn.Module, seed: int) -> tuple[float, float, str]:
    """Relative error of the loss, the largest of the gradients on any rank, and the parameter that has it here."""
    layout, count = parallel.decision.layout, parallel.decision.num_micro_batches
    reference = reference.to(parallel.device)
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.dp * count, SEQ_PER_PART * layout.tp)
    inputs = torch.randint(parallel.vocab, shape, generator=generator).to(parallel.device)
    labels = torch.randint(parallel.vocab, shape, generator=generator).to(parallel.device)
    labels[0, :2] = IGNORE  # ranks differ in their number of targets
    expected = one_process(reference, inputs, labels)
    rows = slice(parallel.dp_rank * count, (parallel.dp_rank + 1) * count)
    loss = parallel.step_slice(inputs[rows], labels[rows])
    loss_error = float((loss.double() - expected.double()).abs() / expected.double().abs())
    gradient_error, worst = _gradient_error(parallel, reference)
    for parameter in parallel.parameters():
        parameter.grad = None
    errors = torch.tensor([loss_error, gradient_error], dtype=torch.float64, device=parallel.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return float(errors[0]), float(errors[1]), worst


def one_process(reference: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Loss of the whole module on the whole batch by its own forward pass; its gradients are left in place."""
    reference.zero_grad()
    output = reference(inputs)
    logits = getattr(output, "logits", output)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.detach()


def _gradient_error(parallel: Parallel, reference: nn.Module) -> tuple[float, str]:
    expected = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    largest, worst = 0.0, ""
    # It warns of two all-gathers in a row for each tensor that FSDP and tp both shard; here nobody waits for them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in parallel.named_parameters():
        if not parameter.requires_grad:
            continue
        wanted = expected[name]
        assert wanted is not None, name
        if parameter.grad is None:
            return float("inf"), f"{name} (no gradient)"
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        error = float((whole.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30))
        if not error <= largest:  # NaN is the largest
            largest, worst = error, name
    return largest, worst
