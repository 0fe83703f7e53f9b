"""From a plan for many GPUs to the run on few: what is kept, what is given up, and what it says of the plan."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.law_terms import divisors
from cost_models.records import Layout, Plan, PlanRequest, Provenance, Schedule, Verdict, normalised
from planner.advice import problem_of
from planner.anchor import anchor, in_proportion, reduced_layout, reduced_model, request_of
from planner.decisions import decision_of_layout
from planner.errors import InfeasibleError, InputError
from planner.predict import predict
from planner.readers.models import read_model
from planner.readers.requests import complete, read_request
from planner.rests_on import rests_on


def plan_of(**fields: Any) -> Plan:
    """A plan as `predict` would judge it, from a request."""
    values = {"workload": {"seq": 4096, "gbs": 512}, "runtime": "torch", **fields}
    request = complete(read_request(values))
    problem = problem_of(request)
    assert request.layout is not None
    decision = decision_of_layout(problem, request.layout)
    asked = PlanRequest(
        model=request.model, cluster=request.cluster, workload=request.workload, runtime=request.runtime
    )
    stamp = Provenance(decision_sha256=decision.sha256, meshwright_version="0", calibration="test", versions={})
    return Plan(
        request=asked, decision=decision, predicted=predict(problem, decision), certificate=None, provenance=stamp
    )


DENSE = {"model": "llama3-70b", "cluster": "h100x256", "layout": "tp4 pp4 dps16 zero2 mbs1"}
EXPERTS = {
    "model": "deepseek-v3",
    "cluster": "h100x1024",
    "runtime": "megatron",
    "layout": "pp16 dps64 ep32 zero1 mbs1 rc=full",
    "workload": {"seq": 4096, "gbs": 1024},
}


@pytest.mark.parametrize(
    ("full", "gpus", "small"),
    [
        # copies go first, then the pipeline
        (normalised(tp=4, pp=4, dp=16, zero=2), 8, {"tp": 4, "pp": 1, "dp_shard": 2}),
        (normalised(tp=2, pp=2, dp=2), 4, {"tp": 2, "pp": 1, "dp_replicate": 2}),
        (normalised(pp=8, dp=1), 4, {"pp": 4, "dp_replicate": 1}),
        # what zero divides over is kept, at the price of tp
        (normalised(tp=8, pp=4, dp=16, zero=1), 8, {"tp": 4, "pp": 1, "dp_shard": 2, "zero": 1}),
        (normalised(tp=8, dp=16), 8, {"tp": 8, "dp_replicate": 1}),
        # each kind of parallelism is there before another has more
        (normalised(tp=8, cp=2, dp=8, zero=3), 8, {"tp": 4, "cp": 2, "dp_shard": 1, "zero": 3}),
        (normalised(dp=64, ep=32, pp=16, zero=1), 8, {"ep": 8, "dp_shard": 8, "pp": 1}),
        (normalised(dp=8, zero=3), 1, {"dp_shard": 1, "zero": 0}),
    ],
)
def test_what_is_kept(full: Layout, gpus: int, small: dict[str, int]) -> None:
    found = reduced_layout(full, gpus)
    assert {name: getattr(found, name) for name in small} == small
    assert found.world <= gpus


degrees = st.sampled_from((1, 2, 4, 8, 3, 6))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(tp=degrees, cp=degrees, pp=degrees, dp=degrees, zero=st.sampled_from((0, 1, 2, 3)), gpus=st.integers(1, 16))
def test_degrees_divide_the_plans_and_nothing_larger_fits(
    tp: int, cp: int, pp: int, dp: int, zero: int, gpus: int
) -> None:
    full = normalised(tp=tp, cp=cp, pp=pp, dp=dp, zero=zero, mbs=2, recompute="full")
    small = reduced_layout(full, gpus)
    assert all(getattr(full, name) % getattr(small, name) == 0 for name in ("tp", "cp", "pp", "dp", "ep"))
    assert small.world <= gpus
    assert (small.mbs, small.recompute) == (2, "full")
    assert small.zero == full.zero or small.dp_shard * small.cp == 1
    if small.pp < full.pp:  # the next larger pipeline is one too many
        larger = min(one for one in divisors(full.pp) if one > small.pp)
        assert small.world // small.pp * larger > gpus


def test_a_dense_plan_keeps_what_decides_and_run_takes_it() -> None:
    plan = plan_of(**DENSE)
    found = anchor(plan, 8, shipped())
    small, full = found.plan.decision, plan.decision
    assert found.is_run_here
    refusals = pytest.importorskip("executor.refusals", exc_type=ImportError).refusals
    assert list(refusals(found.plan)) == []
    assert (small.workload.seq, small.layout.mbs, small.layout.zero) == (4096, 1, 2)
    assert found.plan.request.cluster.num_gpus == 8
    assert found.plan.request.model.num_layers == 20  # of 80 over four stages
    assert small.num_micro_batches < full.num_micro_batches
    assert {one.name: (one.full, one.small) for one in found.reductions}["layers"] == (80, 20)
    assert found.plan.predicted is not None
    assert found.plan.predicted.verdict is Verdict.OK


def test_experts_of_a_rank_stay_and_the_request_says_the_same() -> None:
    plan = plan_of(**EXPERTS)
    found = anchor(plan, 8, shipped())
    model, layout = found.plan.request.model, found.plan.decision.layout
    assert plan.request.model.moe is not None
    assert model.moe is not None
    assert model.moe.num_experts // layout.ep == plan.request.model.moe.num_experts // 32
    assert 0 < model.moe.num_dense_layers < model.num_layers
    assert not found.is_run_here
    again = complete(read_request(found.document["request"]))
    assert (again.model, again.layout, again.workload) == (model, layout, found.plan.decision.workload)
    assert again.cluster.num_gpus == 8


def test_what_it_measures_and_what_stays_are_all_that_the_plan_rests_on() -> None:
    plan = plan_of(**DENSE)
    found = anchor(plan, 8, shipped())
    terms = rests_on(problem_of(plan.request, shipped()), plan.decision)
    assert {*found.seen, *found.unseen} == set(terms)
    assert "coefficients/matmul.efficiency.hopper.bf16" in {term.name for term in found.seen}
    assert "coefficients/straggler.per_doubling" in {term.name for term in found.unseen}


def test_fewer_layers_where_the_stage_does_not_fit() -> None:
    """Whole experts of a stage and their optimizer on an eighth of the ranks: fewer layers than a stage has."""
    found = anchor(plan_of(**EXPERTS), 8, shipped())
    assert (
        found.plan.request.model.num_layers
        < max(sum(stage.recompute.values()) for stage in plan_of(**EXPERTS).decision.stages) + 1
    )
    assert found.plan.predicted is not None
    assert found.plan.predicted.verdict is not Verdict.NO


@pytest.mark.parametrize("gpus", [0, -1, 256, 1000])
def test_a_wrong_number_of_gpus_is_told(gpus: int) -> None:
    with pytest.raises(InputError, match="from 1 to 255"):
        anchor(plan_of(**DENSE), gpus, shipped())


def test_too_little_memory_is_told() -> None:
    plan = plan_of(model="llama3-405b", cluster="h100x512", layout="tp8 pp8 dps8 zero2 mbs8 rc=full")
    with pytest.raises(InfeasibleError, match="one layer a stage"):
        anchor(plan, 1, shipped())


def test_a_pipeline_that_is_left_keeps_its_schedule() -> None:
    plan = plan_of(
        model="llama3-8b",
        cluster="h100x16",
        layout="pp8 vpp2 dp2 mbs1 sched=interleaved",
        workload={"seq": 4096, "gbs": 64},
    )
    small = anchor(plan, 8, shipped()).plan.decision
    assert (small.layout.pp, small.layout.vpp, small.layout.schedule) == (4, 2, Schedule.INTERLEAVED)
    assert small.num_micro_batches % small.layout.pp == 0


def test_recompute_in_proportion() -> None:
    assert in_proportion({"full": 6, "none": 3}, 6) == {"full": 4, "none": 2}
    assert in_proportion({"full": 1, "none": 9}, 1) == {"none": 1}
    assert sum(in_proportion({"a": 1, "b": 1, "c": 1}, 2).values()) == 2


def test_a_reduced_model_never_has_more_than_the_model() -> None:
    model = read_model("llama3-8b")
    assert reduced_model(model, 100, 1, 1).num_layers == model.num_layers
    assert replace(reduced_model(model, 4, 1, 1), name="", num_layers=0 + model.num_layers) == replace(model, name="")


def test_a_request_names_the_commonest_recompute_of_unlike_stages() -> None:
    plan = plan_of(**DENSE)
    stages = tuple(replace(stage, recompute={"full": 15, "none": 5}) for stage in plan.decision.stages)
    decision = replace(plan.decision, stages=stages, layout=replace(plan.decision.layout, recompute="stages"))
    assert "rc=full" in request_of(replace(plan, decision=decision))["layout"]
