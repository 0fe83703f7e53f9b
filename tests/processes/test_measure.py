"""Measuring runs: two plans side by side in real processes, and what the numbers must be whatever the machine does."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import (
    Cluster,
    Decision,
    Measurements,
    MemoryKind,
    Model,
    Plan,
    PlanRequest,
    Precision,
    Provenance,
    Ranks,
    Stage,
    Workload,
    load,
    normalised,
)
from executor.errors import RefusedError
from executor.launch import launch
from executor.measure import Share, summary
from executor.peak import PeakMemory, exact_heap
from executor.settings import Settings, write_job
from planner.compare import measured_phases, runs_of
from planner.readers.node_presets import local_cluster
from planner.readers.runtimes import read_runtime

pytestmark = pytest.mark.timeout(300)

MODEL = Model(name="small", num_layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=256)
WORKLOAD = Workload(seq=16, gbs=8, precision=Precision.FP32)
STEPS = 3


def cluster() -> Cluster:
    return local_cluster(2, 2**30, matmul_flops_per_s={"fp32": 1e11}, memory_bandwidth_bytes_per_s=1e10)


def plan_of(**layout: int) -> Plan:
    degrees = normalised(**layout, mbs=2)  # type: ignore[arg-type]
    cuts = [(0, 5)] if degrees.pp == 1 else [(0, 2), (3, 5)]
    decision = Decision(
        runtime="torch",
        layout=degrees,
        workload=WORKLOAD,
        num_micro_batches=degrees.num_micro_batches(WORKLOAD.gbs),
        stages=tuple(
            Stage(virtual=index, device=index, blocks=blocks, recompute={"none": 4 // len(cuts)})
            for index, blocks in enumerate(cuts)
        ),
        ranks=Ranks(order=("tp", "cp", "dp_shard", "dp_replicate", "pp")),
        collectives={},
    )
    return Plan(
        request=PlanRequest(model=MODEL, cluster=cluster(), workload=WORKLOAD, runtime=read_runtime("torch")),
        decision=decision,
        predicted=None,
        certificate=None,
        provenance=Provenance(decision_sha256=decision.sha256, meshwright_version="", calibration="none", versions={}),
    )


def test_two_plans_side_by_side(tmp_path: Path) -> None:
    plans = (plan_of(dp=2), plan_of(pp=2))
    write_job(tmp_path, plans, Settings(steps=STEPS, timeout_s=120))
    told: list[str] = []
    done = launch(
        ["-m", "executor.measure", str(tmp_path)],
        num_ranks=2,
        timeout_s=250,
        log_dir=tmp_path / "logs",
        on_stderr=told.append,
    )
    assert done.ok, (done.reason, done.error_lines)
    measured = load(Measurements, tmp_path / "measurements.json")
    phases = [measured_phases(runs_of(plan, measured)) for plan in plans]
    assert set(phases[0]) == {"step", "forward", "backward", "other", "optimizer"}
    assert set(phases[1]) == {"step", "pipeline", "other", "optimizer"}
    for found in phases:
        assert all(len(samples) == STEPS for samples in found.values())
        # each phase is the slowest rank's; on one rank they cannot take longer than its step
        assert all(max(samples) <= max(found["step"]) for samples in found.values())
    assert {one.rank_class for one in runs_of(plans[1], measured)} == {"all", "stage 0", "stage 1"}
    step = runs_of(plans[0], measured)[0]
    assert step.memory is not None
    assert step.memory.kind is MemoryKind.RSS
    held = 4 * MODEL.num_params * 4  # weights, gradients, two moments in fp32
    assert held < step.memory.peak_bytes < held + 256 * 2**20
    assert any("step 3 of 3" in text for text in told)


def test_a_step_is_as_long_as_on_its_slowest_rank() -> None:
    shares = [
        Share(stage=0, seconds=(1.0, 4.0), phases={"pipeline": (0.5, 3.0)}, peak_bytes=10),
        Share(stage=1, seconds=(2.0, 3.0), phases={"pipeline": (1.5, 2.0)}, peak_bytes=20),
    ]
    step, first, second = summary(plan_of(pp=2), shares, MemoryKind.RSS)
    assert step.samples_s == (2.0, 4.0)
    assert step.memory is not None
    assert step.memory.peak_bytes == 20
    assert (first.samples_s, first.rank_class) == ((0.5, 3.0), "stage 0")
    assert (second.samples_s, second.rank_class) == ((1.5, 2.0), "stage 1")


def test_what_the_allocator_held_is_a_second_count_of_the_same_steps() -> None:
    shares = [
        Share(stage=0, seconds=(1.0, 4.0), phases={}, peak_bytes=10, reserved_bytes=15),
        Share(stage=0, seconds=(2.0, 3.0), phases={}, peak_bytes=12, reserved_bytes=14),
    ]
    used, held = summary(plan_of(), shares, MemoryKind.ALLOCATED)
    assert used.memory is not None
    assert held.memory is not None
    assert (used.memory.kind, used.memory.peak_bytes) == (MemoryKind.ALLOCATED, 12)
    assert (held.memory.kind, held.memory.peak_bytes) == (MemoryKind.RESERVED, 15)
    assert used.samples_s == held.samples_s
    assert measured_phases([used, held]) == {"step": (2.0, 4.0)}


def test_the_peak_of_memory_sees_what_was_freed_again() -> None:
    import torch

    memory = PeakMemory(torch.device("cpu"))
    with exact_heap():
        memory.reset()
        torch.ones(64 << 18).sum()  # 64 MiB
    peak = memory.peak_bytes()
    after = PeakMemory(torch.device("cpu"))
    assert 60 << 20 <= peak < 160 << 20
    after.reset()
    assert after.peak_bytes() < 16 << 20, "the peak before does not count after a reset"


def test_two_steps_at_least_go_before_any_that_counts() -> None:
    with pytest.raises(RefusedError, match="at least 2 optimizer steps"):
        Settings(warmup=1)
