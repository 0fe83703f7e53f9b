"""`executor.selfcheck`: is the realised layout the planned one, and are loss and gradients those of one process?

The layout is read from the live modules (`realised.py`). Gradients are compared with those of the whole module on the whole
batch; where they differ, `diagnosis.py` says how. `executor.apply` asks by default, with a shrunken model in the same groups.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from cost_models.records import Model, Plan, Precision
from executor.decoder import Decoder
from executor.diagnosis import in_words
from executor.errors import RefusedError, WrongResultError
from executor.parallelize import IGNORE, Parallel, divided
from executor.realised import Finding, layout_findings

TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 5e-2}
"""Largest relative error. fp32: the sums of all layouts are within 1e-6 of one process (measured); bf16 rounds to 2^-9, and
gradients of FSDP in bf16 were measured 1.9e-2 from fp32."""

SEQ_PER_PART = 8
"""Tokens of the check's sequences, for each part into which tp divides them."""

SMALL_HEAD, SMALL_VOCAB = 4, 128
"""Width of a head and number of tokens of a shrunken model."""
MOST_TOLD = 3
"""Answers to one question that are told apart."""
MAX_PARAMETERS = 50_000_000
"""Models up to this size are checked against one process: every rank then holds all of it twice, 0.4 GB in fp32."""


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
        if not self.ok:
            return f"self-check FAILED: {'; '.join(self._faults())}"
        asked = ", ".join(dict.fromkeys(finding.question for _, finding in self.findings))
        numbers = "not compared with one process"
        if self.gradient_error is not None:
            numbers = f"loss off by {self.loss_error:.1e}, gradients by {self.gradient_error:.1e} of one process's"
        return f"self-check passed ({asked}; {numbers})"

    def _faults(self) -> Iterator[str]:
        """Question by question what was found, ranks that found the same together, known causes first."""
        by_question: dict[str, dict[str, list[int]]] = {}
        for rank, fault in sorted(self.findings, key=lambda found: not found[1].cause):
            if not fault.ok:
                same = by_question.setdefault(fault.question, {})
                same.setdefault(fault.detail + fault.cause, []).append(rank)
        for question, groups in by_question.items():
            for text, ranks in list(groups.items())[:MOST_TOLD]:
                yield f"{question}: {_names(ranks)}: {text}"
            if len(groups) > MOST_TOLD:
                yield f"{question}: and {len(groups) - MOST_TOLD} more"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


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
    findings = list(layout_findings(parallel))
    errors = None
    if reference is not None:
        errors = _compare(parallel, reference, seed)
        findings += errors.findings("")
    return _of_all_ranks(findings, errors)


def check_at_start(plan: Plan, parallel: Parallel, module: nn.Module) -> SelfCheck:
    """What `apply` asks by default: the layout of the real module, loss and gradients of a shrunken one in the same groups.

    Raises WrongResultError on every rank where any rank finds a fault.
    """
    with torch.random.fork_rng():
        small = shrunken(module, plan.request.model)
    reference = copy.deepcopy(small)
    stand_in = divided(plan.decision, small, parallel.mesh, parallel.synchronisation)
    errors = _compare(stand_in, reference, seed=0)
    findings = [*layout_findings(parallel), *errors.findings(" of a shrunken model")]
    found = _of_all_ranks(findings, errors)
    if not found.ok:
        raise WrongResultError(str(found))
    return found


def shrunken(module: nn.Module, model: Model) -> nn.Module:
    """A module of the same type where its configuration can be shrunk, else our own decoder: as many layers and heads, all
    else as small as divides alike.

    The sizes that parallelism divides stay multiples of what they were multiples of: widths shrink to a multiple of heads.
    """
    torch.manual_seed(0)
    config = getattr(module, "config", None)
    sizes = {
        "hidden_size": model.heads * SMALL_HEAD,
        "intermediate_size": model.heads * SMALL_HEAD,
        "head_dim": SMALL_HEAD,
    }
    if config is not None and all(hasattr(config, name) for name in (*sizes, "vocab_size")):
        small = copy.deepcopy(config)
        for name, size in (sizes | {"vocab_size": min(config.vocab_size, SMALL_VOCAB)}).items():
            setattr(small, name, size)
        return type(module)(small)
    return Decoder(
        replace(
            model,
            hidden=model.heads * SMALL_HEAD,
            ffn=model.heads * SMALL_HEAD,
            head_dim=SMALL_HEAD,
            vocab=min(model.vocab, SMALL_VOCAB),
        ),
        seed=0,
    )


def _of_all_ranks(findings: list[Finding], errors: "Errors | None") -> SelfCheck:
    everywhere: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, findings)
    return SelfCheck(
        findings=tuple((rank, finding) for rank, found in enumerate(everywhere) for finding in found),
        loss_error=errors.loss if errors is not None else None,
        gradient_error=errors.gradient if errors is not None else None,
    )


# Loss and gradients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far a step is from one process's."""

    loss: float
    """Relative."""
    gradient: float
    """Largest over the parameters of all ranks."""
    tolerance: float
    """What is no fault."""
    loss_detail: str
    gradient_detail: str
    """In words, for this rank."""
    cause: str
    """Of a wrong gradient, where it is known."""

    def findings(self, of_what: str) -> list[Finding]:
        """As answers."""
        return [
            Finding(question=f"loss{of_what}", ok=self.loss <= self.tolerance, detail=self.loss_detail),
            Finding(
                question=f"gradients{of_what}",
                ok=self.gradient <= self.tolerance,
                detail=self.gradient_detail,
                cause=self.cause,
            ),
        ]


def _compare(parallel: Parallel, reference: nn.Module, seed: int) -> Errors:
    """One step on short random sequences, one a micro-batch, beside the whole module on all of them."""
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
    worst = _worst_gradient(parallel, reference)
    tolerance = TOLERANCE[parallel.decision.workload.precision]
    detail = f"{worst.name} off by {worst.error:.1e}"
    cause = ""
    if not worst.error <= tolerance:
        cause = in_words(parallel, reference, inputs, labels, worst.name, worst.gradient, worst.idle)
    for parameter in parallel.parameters():
        parameter.grad = None
    errors = torch.tensor([loss_error, worst.error], dtype=torch.float64, device=parallel.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return Errors(
        loss=float(errors[0]),
        gradient=float(errors[1]),
        tolerance=tolerance,
        loss_detail=f"off by {loss_error:.1e}, {float(loss):.6g} where one process has {float(expected):.6g}",
        gradient_detail=detail,
        cause=cause,
    )


def one_process(reference: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Loss of the whole module on the whole batch by its own forward pass; its gradients are left in place."""
    reference.zero_grad()
    output = reference(inputs)
    logits = getattr(output, "logits", output)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The gradient of this rank that is furthest from one process's."""

    name: str
    error: float
    """max|g - g_ref| / max|g_ref|; infinite where there is none."""
    gradient: Tensor | None
    """Undivided; None where there is none."""
    idle: tuple[str, ...]
    """Parameters whose gradient is missing or all zero where one process has another."""


def _worst_gradient(parallel: Parallel, reference: nn.Module) -> Worst:
    expected = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    worst = Worst(name="", error=0.0, gradient=None, idle=())
    idle = []
    # It warns of two all-gathers in a row for each tensor that FSDP and tp both shard; here nobody waits for them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in parallel.named_parameters():
        if not parameter.requires_grad:
            continue
        wanted = expected[name]
        assert wanted is not None, name
        whole, error = None, float("inf")
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            error = float((whole.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30))
        if whole is None or (not whole.any() and bool(wanted.any())):
            idle.append(name)
        if not error <= worst.error:  # NaN is the largest
            worst = Worst(name=name, error=error, gradient=whole, idle=())
    return replace(worst, idle=tuple(idle))
