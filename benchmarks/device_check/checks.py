"""The checks: curves of products and attention, a block under each kind of recompute, three counts of memory, a true out-of-memory."""

import gc
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from benchmarks.device_check.place import Place
from cost_models.calibrations import shipped
from cost_models.compute import attention_s, matmul_s, rates
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import Decision, Layout, Plan, PlanRequest, Prediction, Provenance, Verdict, Workload
from cost_models.units import GIB
from planner.decisions import decision_of_layout
from planner.predict import predict
from planner.profiling.clock import Rule, sample
from planner.readers.runtimes import read_runtime

Row = dict[str, Any]
REPETITIONS = 5
SAMPLE_S = 0.02
"""Of products and attention: long against a launch."""
STEPS, WARMUP = 5, 2
MOST_DOUBLINGS = 12
"""From the first micro-batch to one that cannot fit."""
SMI_S = 10


def problem_of(place: Place, mbs: int) -> Problem:
    """One step of the block with micro-batches of `mbs` sequences."""
    return Problem(
        model=place.model,
        cluster=place.cluster,
        workload=Workload(seq=place.seq, gbs=mbs, precision=place.precision),
        runtime=read_runtime("torch"),
        calibration=shipped(),
        memory_kind=memory_kind_of(place.cluster),
    )


def _timed(place: Place, call: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if place.is_gpu else None
    rule = Rule(warmup=1, repetitions=REPETITIONS, sample_s=SAMPLE_S if place.is_gpu else 0.0)
    return median(sample({"": call}, rule, synchronise=wait)[""])


def _dtype(place: Place) -> torch.dtype:
    return torch.bfloat16 if place.precision == "bf16" else torch.float32


def _row(name: str, predicted_s: float, measured_s: float, **more: object) -> Row:
    return {
        "what": name,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        **more,
    }


# Curves --------------------------------------------------------------------------------------------------------------


def products(place: Place) -> Iterator[Row]:
    """(m, k) x (k, n) at each size."""
    problem = problem_of(place, 1)
    known = rates(place.cluster.pools[0].kind.device, problem.workload, problem.runtime, problem.calibration)
    for m, n, k in place.products:
        x = torch.randn(m, k, device=place.device, dtype=_dtype(place))
        weight = torch.randn(n, k, device=place.device, dtype=_dtype(place))
        measured_s = _timed(place, lambda x=x, weight=weight: functional.linear(x, weight))  # type: ignore[misc]
        flops_per_s = 2.0 * m * n * k / measured_s
        yield _row(f"product {m}x{n}x{k}", float(matmul_s(known, m, n, k).total), measured_s, flops_per_s=flops_per_s)


def attentions(place: Place) -> Iterator[Row]:
    """Causal attention, forward, and forward with backward, at each size."""
    problem = problem_of(place, 1)
    known = rates(place.cluster.pools[0].kind.device, problem.workload, problem.runtime, problem.calibration)
    for batch, seq, heads, width in place.attentions:
        shape = (batch, heads, seq, width)
        q, k, v = (torch.randn(shape, device=place.device, dtype=_dtype(place), requires_grad=True) for _ in range(3))

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(forward: Any = forward, q: Any = q, k: Any = k, v: Any = v) -> object:
            return torch.autograd.grad(forward().sum(), (q, k, v))

        name = f"attention {batch}x{seq}, {heads} heads of {width}"
        ahead_s = float(attention_s(known, batch, seq, heads, width).total)
        back_s = float(attention_s(known, batch, seq, heads, width, backward=True).total)
        yield _row(f"{name}, forward", ahead_s, _timed(place, forward))
        yield _row(f"{name}, both", ahead_s + back_s, _timed(place, both))


# A block ---------------------------------------------------------------------------------------------------------------


def plan_of(place: Place, recompute: str, mbs: int) -> tuple[Plan, Prediction]:
    """The block on the one device, all its layers under one kind of recompute, and what is promised of it."""
    problem = problem_of(place, mbs)
    decision: Decision = decision_of_layout(problem, replace(Layout(), mbs=mbs, recompute=recompute))
    predicted = predict(problem, decision)
    plan = Plan(
        request=PlanRequest(
            model=problem.model, cluster=problem.cluster, workload=problem.workload, runtime=problem.runtime
        ),
        decision=decision,
        predicted=predicted,
        certificate=None,
        provenance=Provenance(
            decision_sha256=decision.sha256, meshwright_version="", calibration=problem.calibration.name, versions={}
        ),
    )
    return plan, predicted


def blocks(place: Place) -> Iterator[Row]:
    """A step of the block under each kind of recompute: seconds, and the peak by each way of counting."""
    for kind in read_runtime("torch").recompute_kinds:
        plan, predicted = plan_of(place, kind, 1)
        measured = run_block(place, plan, STEPS)
        yield _row(
            f"step of {place.model.name}, recompute {kind}",
            predicted.step_s,
            measured["step_s"],
            inside=predicted.step_s_low <= measured["step_s"] <= predicted.step_s_high,
            memory_gib={
                way: {"predicted": predicted.memory_gib_by_kind.get(way), "measured": held / GIB}
                for way, held in measured["memory_bytes"].items()
            },
        )


def run_block(place: Place, plan: Plan, steps: int) -> Row:
    """Train the plan for some steps: median seconds, and peak bytes by each way of counting."""
    import executor
    from executor.decoder import Decoder
    from executor.peak import PeakMemory, exact_heap
    from executor.train import make_optimizer, optimizer_step, random_batch

    memory = PeakMemory(place.device)
    with exact_heap():
        memory.reset()
        parallel = executor.apply(plan, Decoder(plan.request.model, seed=0), check=False)
        optimizer = make_optimizer(parallel)
        seconds = []
        workload = plan.decision.workload
        for number in range(WARMUP + steps):
            inputs, labels = random_batch(workload.gbs, workload.seq, parallel.vocab, number)
            _wait(place)
            start_s = time.perf_counter()
            optimizer_step(parallel, optimizer, inputs.to(place.device), labels.to(place.device))
            _wait(place)
            seconds.append(time.perf_counter() - start_s)
        held: dict[str, int] = {memory.kind.value: memory.peak_bytes()}
        reserved, shown = memory.reserved_bytes(), smi_bytes(place)
        held |= {"reserved": reserved} if reserved is not None else {}
        held |= {"nvidia-smi": shown} if shown is not None else {}
    del parallel, optimizer
    free(place)
    return {"step_s": median(seconds[WARMUP:]), "memory_bytes": held}


def _wait(place: Place) -> None:
    if place.is_gpu:
        torch.cuda.synchronize()


def free(place: Place) -> None:
    """Hand everything back."""
    gc.collect()
    if place.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def smi_bytes(place: Place) -> int | None:
    """What nvidia-smi shows of the device, all processes together; None where there is none."""
    if not place.is_gpu:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(done.stdout.strip()) << 20


# Out of memory -----------------------------------------------------------------------------------------------------------


def out_of_memory(place: Place) -> Row:
    """The smallest doubling of the micro-batch of which the promise is `no`: does it run out, and does its half fit?"""
    mbs = place.most_mbs
    for _ in range(MOST_DOUBLINGS):
        plan, predicted = plan_of(place, "none", mbs)
        if predicted.verdict is Verdict.NO:
            break
        mbs *= 2
    else:
        return {"what": "out of memory", "skipped": f"micro-batches of {mbs} sequences are still promised to fit"}
    if not place.is_gpu:
        return {
            "what": "out of memory",
            "skipped": f"mbs {mbs} is promised not to fit in {predicted.memory_gib_usable:.1f} GiB; a CPU's processes have no "
            "allocator of their own that says so",
        }
    row: Row = {"what": "out of memory", "mbs": mbs, "predicted_gib": predicted.memory_gib_max}
    row["runs_out"] = _runs_out(place, plan)
    half, promised = plan_of(place, "none", mbs // 2)
    row |= {"half_predicted": promised.verdict.value, "half_gib": promised.memory_gib_max}
    row["half_runs_out"] = _runs_out(place, half)
    return row


def _runs_out(place: Place, plan: Plan) -> bool:
    try:
        run_block(place, plan, 1)
    except torch.cuda.OutOfMemoryError:
        return True
    finally:
        free(place)
    return False
