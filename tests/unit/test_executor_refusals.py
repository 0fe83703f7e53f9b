"""Plans that are not made true here: refused in words, before any rank waits."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

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
