"""Plans that are not made true here: refused in words, before any rank waits."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cost_models.records import Binding, CollectiveChoice, Plan
from executor.collectives.choice import nccl_environment, set_nccl_environment
from executor.errors import RefusedError
from executor.refusals import check, refusals
from tests.processes.layouts import CASES, MODEL, TRAINED, Case


@pytest.mark.parametrize("case", [*CASES, *TRAINED], ids=lambda case: case.layout)
def test_every_layout_of_the_equivalence_test_is_legal(case: Case) -> None:
    assert list(refusals(case.plan)) == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(layout="cp2 dpr4"), "cp=2: context parallelism is not yet in the executor"),
        (Case(layout="ep2 dpr8"), "ep=2, etp=1: expert parallelism is not yet"),
        (Case(layout="dps8 zero1"), r"zero=1 .*FSDP realises 2 \(gather=micro\) and 3 \(gather=use\), DDP 0"),
        (Case(layout="dps8 zero2 gather=step"), "zero=2 with gather=step: FSDP gathers once a micro-batch"),
        (Case(layout="pp2 vpp2 dps4 zero3 sched=zbv"), "zbv splits the backward pass.*silently gives wrong gradients"),
        (Case(layout="pp2 vpp2 tp4 sched=interleavedzb"), "interleavedzb splits the backward pass"),
        (Case(layout="pp4 dpr2 sched=1f1b", num_micro_batches=3), "MICROBATCHES_LT_PP"),
        (Case(layout="pp2 vpp2 dpr4 sched=interleaved", num_micro_batches=5), "MICROBATCHES_MOD_ROUNDS"),
        (Case(layout="pp2 vpp2 dpr4 sched=1f1b"), "SCHEDULE_VPP"),
        (Case(layout="vpp2 dpr8"), "VPP_NEEDS_PP"),
        (Case(layout="tp8"), "kv_heads"),
        (Case(layout="tp4 dpr2", model=replace(MODEL, ffn=50)), "ffn"),
        (
            Case(layout="dpr8", recompute={"block": 1}),
            "recompute 'block' of stage 0; legal kinds: none, selective, full",
        ),
        (Case(layout="dpr8", recompute={"full": 5}), "legal: at most its 4 layers"),
    ],
)
def test_refused_with_the_law(case: Case, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        check(case.plan)


def test_all_reasons_at_once() -> None:
    with pytest.raises(RefusedError, match=r"zero=1.*recompute 'block'"):
        check(Case(layout="dps8 zero1", recompute={"block": 1}).plan)


def test_a_plan_for_another_runtime() -> None:
    plan = Case(layout="dpr8").plan
    with pytest.raises(RefusedError, match="runtime=megatron: a plan for megatron is run by megatron"):
        check(replace(plan, decision=replace(plan.decision, runtime="megatron")))


def test_a_stage_on_another_device() -> None:
    plan = Case(layout="pp2 dpr4 sched=1f1b").plan
    stages = tuple(replace(stage, device=1 - stage.device) for stage in plan.decision.stages)
    with pytest.raises(RefusedError, match=r"stage 0 on device 1: .*legal: 0"):
        check(replace(plan, decision=replace(plan.decision, stages=stages)))


def test_fp16_is_not_yet() -> None:
    plan = Case(layout="dpr8").plan
    workload = replace(plan.decision.workload, precision=type(plan.decision.workload.precision)("fp16"))
    with pytest.raises(RefusedError, match="precision=fp16: not yet in the executor; legal: fp32, bf16"):
        check(replace(plan, decision=replace(plan.decision, workload=workload)))


def decided(layout: str, *, axis: str = "dp_replicate", ranks_per_node: int = 8, **choice: object) -> Plan:
    """A plan with a decided collective, on nodes of so many ranks."""
    plan = Case(layout=layout).plan
    pool = plan.request.cluster.pools[0]
    nodes = replace(pool, num_nodes=8 // ranks_per_node, kind=replace(pool.kind, gpus_per_node=ranks_per_node))
    chosen = CollectiveChoice(binding=Binding.DECIDED, **choice)  # type: ignore[arg-type]
    request = replace(plan.request, cluster=replace(plan.request.cluster, pools=(nodes,)))
    return replace(plan, request=request, decision=replace(plan.decision, collectives={axis: chosen}))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            decided("dps8 zero3", axis="dp_shard", algorithm="ring"),
            "collectives.dp_shard decides on 'ring': only the sum",
        ),
        (
            decided("dpr2 dps4 zero2", algorithm="ring"),
            "with zero=2, tp=1: torch lets a hook of ours do that sum in DDP",
        ),
        (decided("dpr2 tp4", algorithm="ring"), "legal: zero=0 with tp=1, or algorithm default"),
        (decided("dpr8", algorithm="tree"), "algorithm 'tree'; legal with gloo: default, ring, hierarchical"),
        (
            decided("dpr8", algorithm="default", compression="bf16"),
            "bf16 needs NCCL, torch refuses it on gloo; legal: fp16",
        ),
        (decided("dpr8", algorithm="hierarchical"), r"1 nodes hold 8 of them; legal: at least 2 nodes"),
        (decided("dpr8", ranks_per_node=1, algorithm="hierarchical"), "8 nodes hold 1 of them"),
        (decided("pp4 dpr2 sched=gpipe", ranks_per_node=2, algorithm="hierarchical"), r"over ranks \[0, 1\]"),
    ],
)
def test_collectives_that_cannot_be_chosen(plan: Plan, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DEVICE", "cpu")
    with pytest.raises(RefusedError, match=words):
        check(plan)


def test_collectives_that_can_be_chosen() -> None:
    for layout, axis in (("dps8 zero3", "dp_shard"), ("dpr2 dps4 zero2", "dp_replicate"), ("dpr2 tp4", "tp")):
        check(decided(layout, axis=axis, algorithm="default"))
    check(
        decided("dpr8", ranks_per_node=2, algorithm="hierarchical", compression="fp16", bucket_bytes=1, overlap=False)
    )


def test_nccl_is_told_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = decided("dpr8", algorithm="ring").decision
    assert nccl_environment(ring) == {"NCCL_ALGO": "allreduce:ring"}
    assert nccl_environment(decided("dpr8", algorithm="hierarchical").decision) == {}
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    monkeypatch.setenv("MESHWRIGHT_DEVICE", "cuda")
    with pytest.raises(RefusedError, match="NCCL_ALGO='allreduce:tree' in the environment, but the plan decides on"):
        set_nccl_environment(ring)
    monkeypatch.delenv("NCCL_ALGO")
    set_nccl_environment(ring)
    assert os.environ.pop("NCCL_ALGO") == "allreduce:ring"
