"""The shortest honest loop: random tokens, every step a real one, times and losses handed back."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cost_models.records import Optimizer, Plan
from executor.decoder import Decoder
from executor.errors import WrongResultError
from executor.mesh import START_TIMEOUT_S, naming_the_late, start_process_group
from executor.parallelize import Parallel, apply
from executor.verify import MAX_PARAMETERS, SelfCheck, selfcheck

LEARNING_RATE = {Optimizer.ADAMW: 1e-4, Optimizer.ADAM: 1e-4, Optimizer.SGD: 1e-2}
"""Small enough for random tokens; the speed of a step does not depend on it."""
MAX_NORM = 1.0
"""Gradient clipping of most published recipes (Llama 2, section 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step as this rank saw it."""

    seconds: float
    """From the batch on the device to the updated weights."""
    loss: float
    """Mean over the tokens of the global batch; equal on all ranks."""
    gradient_norm: float
    """Before clipping."""
    phases_s: dict[str, float]
    """data; forward and backward, or pipeline; reduce; clip; optimizer. Empty where they were not timed."""
    parts_s: dict[str, float]
    """compute, bubble, `wait AXIS/OPERATION` and others inside these (executor.phases). Likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A run as this rank saw it."""

    steps: tuple[Step, ...]
    """In order, warm-up included."""
    build_s: float
    """Module, process group and sharding."""
    check: SelfCheck | None
    """The self-check; None where it was switched off."""
    not_compared: str
    """Why loss and gradients were not compared with one process's; empty where they were."""


def train(
    plan: Plan,
    *,
    num_steps: int,
    build: Callable[[], nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
    time_phases: bool = True,
    on_step: Callable[[int], None] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> TrainResult:
    """Train for `num_steps` on random tokens; called on every rank.

    `build` gives the module (our own decoder of the plan's model by default). `check` compares the layout with the plan and
    a step with one process's first, and raises WrongResultError if they differ; models above MAX_PARAMETERS are compared in
    layout alone. `time_phases` costs a synchronisation per phase on a GPU. `on_step` is called with the number of each step before it begins. Raises LateRankError where a rank is lost.
    """
    start_s = time.perf_counter()
    start_process_group(timeout_s)
    with naming_the_late():
        torch.manual_seed(seed)
        module = build() if build is not None else Decoder(plan.request.model, seed=seed)
        skipped = _why_not_compared(module, check)
        reference = None if skipped else copy.deepcopy(module)
        parallel = apply(plan, module, check=check and reference is None, timeout_s=timeout_s)
        del module
        build_s = time.perf_counter() - start_s
        found = selfcheck(parallel, reference, seed=seed) if check else None
        del reference
        if found is not None and not found.ok:
            raise WrongResultError(str(found))
        if time_phases:
            parallel.measure_phases()
        steps = _steps(parallel, num_steps, seed, on_step)
    return TrainResult(steps=steps, build_s=build_s, check=found, not_compared=skipped)


def _why_not_compared(module: nn.Module, check: bool) -> str:
    """Why the self-check leaves out the comparison with one process; empty where it is made."""
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if not check:
        return "the self-check was switched off"
    if num_parameters > MAX_PARAMETERS:
        return f"gradients were not compared with one process's: {num_parameters:,} parameters, the limit is {MAX_PARAMETERS:,}"
    return ""


def _steps(parallel: Parallel, num_steps: int, seed: int, on_step: Callable[[int], None] | None) -> tuple[Step, ...]:
    workload = parallel.decision.workload
    optimizer = make_optimizer(parallel)
    steps = []
    for number in range(num_steps):
        if on_step is not None:
            on_step(number)
        with parallel.phases("data"):
            inputs, labels = random_batch(workload.gbs, workload.seq, parallel.vocab, seed * 1_000_003 + number)
            inputs, labels = inputs.to(parallel.device), labels.to(parallel.device)
        steps.append(optimizer_step(parallel, optimizer, inputs, labels))
    return tuple(steps)


def optimizer_step(parallel: Parallel, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Step:
    """One step with the clipping of `MAX_NORM`, timed by phase since the step before; gradients are cleared behind it."""
    start_s = time.perf_counter()
    loss = parallel.step(inputs, labels)
    with parallel.phases("clip"):
        norm = parallel.clip_grad_norm_(MAX_NORM)
    with parallel.phases("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start_s
    phases_s, parts_s = parallel.phases.take()
    return Step(
        seconds=seconds,
        loss=float(loss),
        gradient_norm=float(norm),
        phases_s=phases_s,
        parts_s=parts_s,
    )


def make_optimizer(parallel: Parallel) -> torch.optim.Optimizer:
    """The optimizer that the plan's workload names, over this rank's parameters."""
    kind = parallel.decision.workload.optimizer
    parameters = list(parallel.parameters())
    if kind is Optimizer.SGD:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE[kind])
    maker = torch.optim.AdamW if kind is Optimizer.ADAMW else torch.optim.Adam
    return maker(parameters, lr=LEARNING_RATE[kind])


def random_batch(gbs: int, seq: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a global batch, (gbs, seq) each: the same on every rank and in every layout."""
    tokens = torch.randint(vocab, (gbs, seq + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
