"""What a parallelism costs a layer beside its communication: Python, hooks and DTensor's dispatch, on small layers.

A layer whose tensors are next to nothing takes what the host takes for it. Two depths give the time of a layer as a slope;
what does not grow with the depth is left out.

Keys: `dispatch/<axis>/<ranks>/layer`, seconds of a layer and micro-batch, forward and backward; axis plain (gradients
synchronised once a step), fsdp (gathered at each use), tp (sequence parallel).
"""

from dataclasses import replace
from statistics import median

import torch.distributed as dist

from cost_models.records import (
    Cluster,
    Decision,
    Device,
    Layout,
    Link,
    MeasuredMemory,
    Measurement,
    MeasurementKind,
    Model,
    NodeKind,
    Plan,
    PlanRequest,
    Pool,
    Precision,
    Provenance,
    Ranks,
    Runtime,
    Stage,
    Workload,
    normalised,
)
from executor.measure import Run, stamp, steps_in_turn
from executor.settings import Settings

DEPTHS = (1, 4)
"""Layers of the two models: far enough apart for the slope, small enough for seconds."""
NUM_MICRO_BATCHES = 3
"""Each micro-batch pays the same; several, so that the step's own cost weighs less."""
STEPS = 3
"""Steps that count."""
SMALL_HEAD = 8
"""Width of a head, and tokens for each rank: the least that all degrees divide."""


def time_dispatch(runtime: Runtime, settings: Settings) -> tuple[Measurement, ...]:
    """Seconds of a small layer under each axis that takes all ranks; called on every rank, the group exists."""
    ranks = dist.get_world_size()
    layouts = {
        "plain": normalised(dp=ranks),
        "fsdp": normalised(dp=ranks, zero=3),
        "tp": normalised(tp=ranks),
    }
    results: list[Measurement] = []
    for axis, layout in layouts.items():
        runs = [Run(small_plan(layout, depth, runtime), settings) for depth in DEPTHS]
        for run in runs:
            run.warm_up()
        taken = steps_in_turn({str(depth): run for depth, run in zip(DEPTHS, runs, strict=True)}, STEPS)
        shallow, deep = (taken[str(depth)] for depth in DEPTHS)
        layers = (DEPTHS[1] - DEPTHS[0]) * NUM_MICRO_BATCHES
        slope_s = max(0.0, (median(deep) - median(shallow)) / layers)
        results.append(
            Measurement(
                kind=MeasurementKind.OP,
                key=f"dispatch/{axis}/{ranks}/layer",
                samples_s=(slope_s,),
                **stamp(),
                note=f"slope of the medians of {STEPS} steps of {DEPTHS[0]} and {DEPTHS[1]} layers, {NUM_MICRO_BATCHES} micro-batches",
            )
        )
    return tuple(results)


def measure_context(model: Model, seq: int, mbs: int, runtime: Runtime, settings: Settings) -> Measurement:
    """Peak memory of training one layer of the model's widths, data parallel: `context/<ranks>/<mbs>`.

    What it holds beside the tensors that a prediction counts (libraries' buffers, threads, code that is paged in at first
    use, a backward pass's intermediate results) is for the fit to find. Called on every rank; the process should not have
    trained anything before.
    """
    ranks = dist.get_world_size()
    plan = plan_of(
        replace(model, num_layers=1, layer_groups=()), normalised(dp=ranks, mbs=mbs), seq, ranks * mbs, runtime
    )
    run = Run(plan, settings)
    run.warm_up()
    return Measurement(
        kind=MeasurementKind.RUN,
        key=f"context/{ranks}/{mbs}",
        samples_s=(0.0,),
        memory=MeasuredMemory(kind=run.memory.kind, peak_bytes=run.warm_peak_bytes),
        **stamp(),
        phase="context",
        note="peak memory of one layer in training; its seconds say nothing",
    )


def small_plan(layout: Layout, depth: int, runtime: Runtime) -> Plan:
    """A model of next to nothing, `depth` layers of it, split by `layout` over as many ranks."""
    ranks = layout.world
    width = SMALL_HEAD * ranks
    model = Model(
        name="small layers",
        num_layers=depth,
        hidden=width,
        ffn=width,
        heads=ranks,
        kv_heads=ranks,
        head_dim=SMALL_HEAD,
        vocab=width,
    )
    return plan_of(model, layout, SMALL_HEAD * ranks, layout.dp * NUM_MICRO_BATCHES, runtime)


def plan_of(model: Model, layout: Layout, seq: int, gbs: int, runtime: Runtime) -> Plan:
    """A plan of one stage that promises nothing: what a measurement runs before anybody can plan."""
    ranks = layout.world
    workload = Workload(seq=seq, gbs=gbs, precision=Precision.FP32)
    device = Device(
        name="cpu",
        family="cpu",
        memory_bytes=1 << 30,
        memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"fp32": 1e11},
        matmul_flops_per_s={"fp32": 1e11},
    )
    link = Link(name="loopback", bandwidth_bytes_per_s=1e9)
    kind = NodeKind(name="this machine", device=device, gpus_per_node=ranks, intra=link, nic=link, num_nics=1)
    decision = Decision(
        runtime=runtime.name,
        layout=layout,
        workload=workload,
        num_micro_batches=layout.num_micro_batches(gbs),
        stages=(Stage(virtual=0, device=0, blocks=(0, model.num_layers + 1), recompute={"none": model.num_layers}),),
        ranks=Ranks(order=("tp", "cp", "dp_shard", "dp_replicate", "pp")),
        collectives={},
    )
    return Plan(
        request=PlanRequest(
            model=model,
            cluster=Cluster(name="this machine", pools=(Pool(kind=kind, num_nodes=1),)),
            workload=workload,
            runtime=runtime,
        ),
        decision=decision,
        predicted=None,
        certificate=None,
        provenance=Provenance(decision_sha256=decision.sha256, meshwright_version="", calibration="none", versions={}),
    )
