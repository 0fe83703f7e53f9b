"""One small record of each kind, for tests."""

from typing import Any

from cost_models.records import (
    Alternative,
    Binding,
    Calibration,
    Cell,
    Certificate,
    CertificateStatus,
    Cluster,
    Coefficient,
    CollectiveChoice,
    Curve,
    Decision,
    Device,
    FabricException,
    FabricLevel,
    Layout,
    Link,
    MeasuredMemory,
    Measurement,
    MeasurementKind,
    Measurements,
    MemoryKind,
    Model,
    NodeKind,
    PairLink,
    Parts,
    Plan,
    PlanRequest,
    Pool,
    Prediction,
    Probe,
    Provenance,
    Ranks,
    Runtime,
    Schedule,
    Severity,
    Silence,
    Stage,
    StagePrediction,
    StateBytes,
    Verdict,
    Workload,
    parse_layout,
)

MODEL = Model(name="tiny", num_layers=4, hidden=64, ffn=176, heads=4, kv_heads=2, head_dim=16, vocab=512)
WORKLOAD = Workload(seq=128, gbs=8)
LAYOUT = parse_layout("pp2 dps2 tp1 mbs1 zero1 rc=stages")


def cluster(num_nodes: int = 2, **fields: Any) -> Cluster:
    """Nodes of 4 devices and 2 interfaces."""
    device = Device(
        name="toy",
        family="toy",
        memory_bytes=2**30,
        memory_bandwidth_bytes_per_s=1e11,
        peak_flops_per_s={"bf16": 2e12, "fp32": 1e12},
        matmul_flops_per_s={"bf16": 1.5e12, "fp32": 0.9e12},
    )
    kind = NodeKind(
        name="toy-node",
        device=device,
        gpus_per_node=4,
        intra=Link(name="toy-link", bandwidth_bytes_per_s=100e9),
        nic=Link(name="toy-nic", bandwidth_bytes_per_s=10e9),
        num_nics=2,
        host_memory_bytes=2**34,
    )
    return Cluster(name="toy", pools=(Pool(kind=kind, num_nodes=num_nodes),), **fields)


RUNTIME = Runtime(
    name="toy-runtime",
    version="1.0",
    schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B),
    zero_levels=(0, 1, 2, 3),
    zero_levels_with_pp=(0, 1),
    recompute_kinds=("none", "full"),
    severities={"LAYERS_MOD_PP": Severity.WARNING},
    state_bytes={"bf16": StateBytes(weight=2.0, gradient=4.0, optimizer=12.0)},
    source="made up for tests",
)

DECISION = Decision(
    runtime="toy-runtime",
    layout=LAYOUT,
    workload=WORKLOAD,
    num_micro_batches=4,
    stages=(
        Stage(virtual=0, device=0, blocks=(0, 2), recompute={"full": 1, "none": 1}),
        Stage(virtual=1, device=1, blocks=(3, 5), recompute={"none": 2}),
    ),
    ranks=Ranks(order=("tp", "cp", "dp_shard", "dp_replicate", "pp"), permutation=(0, 1, 2, 3)),
    collectives={"dp_shard": CollectiveChoice(algorithm="ring", binding=Binding.PREDICTED)},
)

_STAGE = StagePrediction(
    device=0,
    forward_s=0.25,
    backward_s=0.5,
    tail_s=0.125,
    memory_bytes={"weights": 1024.0, "activations": 512.0},
    phase_memory_bytes={"step 1": 1400.0, "step 2": 1536.0},
    peak_phase="step 2",
    peak_operation="backward of micro-batch 3",
)

PREDICTION = Prediction(
    step_s=4.0,
    step_s_low=3.5,
    step_s_high=4.5,
    tokens_per_s_per_gpu=64.0,
    tflops_per_gpu=0.5,
    mfu=0.25,
    mfu_peak_flops_per_s=2e12,
    flops_formula="6 x active parameters + attention",
    memory_gib_max=0.5,
    memory_gib_low=0.4,
    memory_gib_high=0.6,
    memory_gib_usable=1.0,
    memory_kind="allocated",
    verdict=Verdict.OK,
    parts=Parts(compute_s=2.0, exposed_communication_s=0.5, bubble_s=1.0, optimizer_s=0.25, other_s=0.25),
    stages=(_STAGE,),
    basis={"table": 1.0},
    pairwise_error=0.05,
    worth_measuring=("matmul/bf16/128x64x176",),
)

CERTIFICATE = Certificate(
    status=CertificateStatus.OPTIMAL,
    objective_s=4.0,
    bound_s=4.0,
    gap_objective=0.0,
    objective_of_choice_s=4.0,
    simulated_s=3.9,
    gap_simulated=0.05,
    least_bound_s=3.7,
    least_bound_cell="pp2 dps2",
    num_cells=12,
    limit_s=4.3,
    cells=(Cell(cell="pp2 dps2", bound_s=3.8, simulated_bound_s=3.7, objective_s=4.0, reason="chosen"),),
    worlds=(4,),
    seconds=0.1,
    solver="HiGHS",
    restrictions=("tp per stage",),
)


def plan(**fields: Any) -> Plan:
    """A whole plan; `fields` replace parts of it."""
    request = PlanRequest(model=MODEL, cluster=cluster(), workload=WORKLOAD, runtime=RUNTIME, pin="tp=1")
    values: dict[str, Any] = {
        "request": request,
        "decision": DECISION,
        "predicted": PREDICTION,
        "certificate": CERTIFICATE,
        "alternatives": (
            Alternative(decision=DECISION, step_s=4.0, memory_gib_max=0.5, verdict=Verdict.OK, note="tie"),
        ),
        "defaults": {"workload.precision": "bf16"},
        "provenance": Provenance(
            decision_sha256=DECISION.sha256, meshwright_version="0.1.0", calibration="none", versions={"numpy": "2.0"}
        ),
    }
    return Plan(**(values | fields))


MEASUREMENT = Measurement(
    kind=MeasurementKind.RUN,
    key="step",
    samples_s=(0.5, 0.51),
    memory=MeasuredMemory(kind=MemoryKind.RSS, peak_bytes=1000),
    machine="toy",
    versions={"torch": "2.13.0"},
    plan_sha256=DECISION.sha256,
    phase="step",
    rank_class="all",
)

CALIBRATION = Calibration(
    name="toy",
    machine="any",
    date="2026-11-30",
    coefficients={
        "matmul.efficiency": Coefficient(value=0.8, unit="1", source="made up", date="2026-11-30", residual=0.1, rows=3)
    },
    operations_s={"matmul/bf16/128x64x176": 0.001},
    curves={
        "all_reduce/2/toy-link": Curve(
            sizes_bytes=(1.0, 1e6), seconds=(1e-5, 1e-3), source="made up", date="2026-11-30"
        )
    },
)

RECORDS: dict[str, Any] = {
    "calibration": CALIBRATION,
    "cluster": cluster(
        fabric=(FabricLevel(name="leaf", radix=2, oversubscription=2.0),),
        exceptions=(FabricException(node=1, nic_factor=0.5, note="one interface is missing"),),
    ),
    "layout": LAYOUT,
    "measurement": MEASUREMENT,
    "measurements": Measurements(measurements=(MEASUREMENT,)),
    "model": MODEL,
    "plan": plan(),
    "probe": Probe(
        cluster=cluster(),
        calibration=CALIBRATION,
        pairs=(
            PairLink(
                ranks=(0, 1),
                latency_s=1e-5,
                bandwidth_bytes_per_s=1e9,
                spread=0.02,
                sizes_bytes=(8, 1_000_000),
                seconds=(1e-5, 1.01e-3),
            ),
        ),
        domains=((0, 1), (2, 3)),
        silent=(Silence(ranks=(2, 3), reason="no connection within 10 s"),),
        notes=("sampled: 1 of 6 pairs met",),
        backend="gloo",
        measurements=(MEASUREMENT,),
    ),
    "runtime": RUNTIME,
    "workload": WORKLOAD,
}
"""Name of the kind, as in cost_models.records.schema_files -> a record of it."""

assert isinstance(LAYOUT, Layout)
