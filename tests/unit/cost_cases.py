"""Problems that the tests of costs price: small, synthetic, with round numbers."""

from dataclasses import replace

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import (
    Cluster,
    Device,
    Link,
    Model,
    NodeKind,
    Pool,
    Precision,
    Runtime,
    Schedule,
    StateBytes,
    Workload,
)

DEVICE = Device(
    name="h100",
    family="hopper",
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_s=3.35e12,
    peak_flops_per_s={"bf16": 989e12, "fp8": 1979e12},
    matmul_flops_per_s={"bf16": 794.5e12, "fp8": 1402.6e12},
)
CPU = Device(
    name="cpu",
    family="cpu",
    memory_bytes=8 * 2**30,
    memory_bandwidth_bytes_per_s=1e10,
    peak_flops_per_s={"fp32": 5e10},
    matmul_flops_per_s={"fp32": 5e10},
)
NODE = NodeKind(
    name="node-of-8",
    device=DEVICE,
    gpus_per_node=8,
    intra=Link(name="nvlink4", bandwidth_bytes_per_s=450e9),
    nic=Link(name="ib-ndr", bandwidth_bytes_per_s=50e9),
    num_nics=8,
)
MODEL = Model(
    name="small", num_layers=8, hidden=2048, ffn=5632, heads=16, kv_heads=8, head_dim=128, vocab=32000, gated_mlp=True
)
RUNTIME = Runtime(
    name="torch",
    version="2.13",
    schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    zero_levels=(0, 1, 2, 3),
    zero_levels_with_pp=(0, 1, 2, 3),
    recompute_kinds=("none", "selective", "full"),
    severities={},
    state_bytes={
        "fp32": StateBytes(weight=4, gradient=4, optimizer=8),
        "bf16": StateBytes(weight=2, gradient=4, optimizer=12),
        "fp8": StateBytes(weight=2, gradient=4, optimizer=12),
    },
    unsharded_gradients_with_pp=True,
    source="a test",
)


def cluster(num_nodes: int = 4, kind: NodeKind = NODE, **changes: object) -> Cluster:
    return Cluster(name="c", pools=(Pool(kind=kind, num_nodes=num_nodes),), **changes)  # type: ignore[arg-type]


def problem(**changes: object) -> Problem:
    whole = Problem(
        model=MODEL,
        cluster=cluster(),
        workload=Workload(seq=2048, gbs=64, precision=Precision.BF16),
        runtime=RUNTIME,
        calibration=shipped(),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]
