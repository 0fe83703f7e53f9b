"""Plans, predictions and explanations: what is promised adds up, agrees with itself, and can be checked by a stranger."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Layout, Plan, Verdict, Workload, dumps, loads, parse_layout
from planner.decisions import decision_of_layout
from planner.errors import InfeasibleError, InputError
from planner.explain import against, why_not
from planner.plan import make_plan, worlds_of
from planner.predict import predict, simulated
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.requests import complete, read_request
from planner.readers.runtimes import read_runtime
from planner.report.plan_text import plan_text
from planner.what_if.neighbours import best_change, neighbours


def problem(
    model: str = "llama3-8b", cluster: str = "h100x16", gbs: int = 64, seq: int = 4096, runtime: str = "torch"
) -> Problem:
    return Problem(
        model=read_model(model),
        cluster=read_cluster(cluster),
        workload=Workload(seq=seq, gbs=gbs),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )


def plan_for(**document: object) -> Plan:
    base = {"model": "llama3-8b", "cluster": "h100x16", "workload": {"seq": 4096, "gbs": 64}}
    gpus = document.pop("gpus", None)
    request = complete(read_request(base | document))
    return make_plan(request, calibration=shipped(), gpus=gpus, version="test")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for()


LAYOUTS = (
    "dpr16",
    "dps16 zero3",
    "dps16 zero2",
    "dpr2 dps8 zero3 mbs2",
    "tp8 dpr2",
    "tp4 dps4 zero3 rc=full",
    "pp2 tp2 dpr4 mbs1",
    "pp4 vpp2 dpr4 sched=interleaved",
    "pp4 dps4 zero2 sched=gpipe rc=selective",
    "pp3 dpr4 mbs2",
)


# Plans ------------------------------------------------------------------------------------------------------------------


def test_a_plan_reads_back_equal(plan: Plan) -> None:
    assert loads(Plan, dumps(plan)) == plan
    assert not plan.edited


def test_the_choice_is_no_slower_than_the_alternatives_that_fit(plan: Plan) -> None:
    assert plan.predicted is not None
    for other in plan.alternatives:
        if other.verdict is Verdict.OK:
            assert plan.predicted.step_s <= other.step_s * (1 + 1e-9), other.note


def test_the_prediction_of_the_choice_is_its_simulated_time(plan: Plan) -> None:
    assert plan.predicted is not None
    assert plan.certificate is not None
    assert plan.predicted.step_s == pytest.approx(plan.certificate.simulated_s, rel=1e-9)


def test_the_certificate_bounds_every_cell(plan: Plan) -> None:
    proof = plan.certificate
    assert proof is not None
    assert proof.bound_s <= proof.objective_s * (1 + 1e-9)
    assert proof.gap_objective == pytest.approx(max(0.0, 1 - proof.bound_s / proof.objective_s), abs=1e-9)
    assert sum(cell.reason == "chosen" for cell in proof.cells) == 1
    for cell in proof.cells:
        assert cell.objective_s is None or cell.bound_s <= cell.objective_s * (1 + 1e-9)
    assert proof.gap_simulated == pytest.approx(1 - proof.least_bound_s / proof.simulated_s, abs=1e-9)
    assert len(proof.cells) < proof.num_cells


def test_pins_hold() -> None:
    pinned = plan_for(pin="tp=4, pp>=2, zero=0")
    layout = pinned.decision.layout
    assert (layout.tp, layout.zero) == (4, 0)
    assert layout.pp >= 2


def test_todays_layout_is_a_candidate_and_kept_in_the_plan() -> None:
    today = plan_for(layout="tp8 dp2 mbs1")
    assert today.request.current is not None
    found = next(other for other in today.alternatives if other.note == "current")
    assert found.decision.layout == parse_layout("tp8 dpr2")
    assert today.predicted is not None
    assert today.predicted.step_s <= found.step_s


@pytest.mark.parametrize("gpus", [1, 3, 5, 6, 7, 12])
def test_any_number_of_gpus(gpus: int) -> None:
    found = plan_for(model="llama-tiny", workload={"seq": 512, "gbs": 420}, gpus=str(gpus))
    assert found.decision.layout.world == gpus


def test_at_most_n_gpus_leaves_none_idle_without_need() -> None:
    assert worlds_of("..12", 16, 8) == (1, 2, 3, 4, 5, 6, 7, 8, 12)
    found = plan_for(gpus="..16")
    assert found.decision.layout.world == 16
    odd = plan_for(model="llama-tiny", workload={"seq": 512, "gbs": 7}, gpus="..16")
    assert odd.decision.layout.world <= 16
    assert 7 % odd.decision.layout.dp == 0


def test_nothing_fits_says_how_many_gpus_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"\d+ GPUs of this kind .*the least number of whole nodes") as error:
        plan_for(model="llama3-405b")
    count = int(str(error.value).split("- ")[1].split()[0])
    enough = plan_for(model="llama3-405b", cluster=f"h100x{count}", workload={"seq": 4096, "gbs": count * 8})
    assert enough.predicted is not None
    assert enough.predicted.verdict is not Verdict.NO


def test_a_mixture_of_experts_is_planned_with_its_experts_spread() -> None:
    made = plan_for(model="mixtral-8x7b", cluster="h100x16", runtime="megatron")
    assert made.decision.layout.world == 16
    assert made.certificate is not None
    assert made.certificate.gap_objective == 0
    assert made.predicted is not None
    assert made.predicted.step_s > 0


# Predictions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_prediction_adds_up(text: str) -> None:
    layout = parse_layout(text)
    given = problem()
    decision = decision_of_layout(given, layout)
    found = predict(given, decision)
    assert found.parts.total_s == pytest.approx(found.step_s, rel=1e-9)
    assert found.step_s_low < found.step_s < found.step_s_high
    assert sum(found.basis.values()) == pytest.approx(1.0)
    assert found.memory_gib_low <= found.memory_gib_max <= found.memory_gib_high
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / found.step_s / layout.world)
    assert 0 < found.mfu < 1
    assert len(found.stages) == layout.pp
    fullest = max(max(stage.phase_memory_bytes.values()) for stage in found.stages)
    assert fullest / 2**30 == pytest.approx(found.memory_gib_max)
    for stage in found.stages:
        assert stage.phase_memory_bytes[stage.peak_phase] == pytest.approx(sum(stage.memory_bytes.values()))
    assert simulated(given, decision).simulation.step_s == pytest.approx(found.step_s)


@given(st.sampled_from(LAYOUTS[:-1]), st.floats(1.0, 4.0))
def test_more_bandwidth_is_never_slower(text: str, factor: float) -> None:
    slow = problem()
    pool = slow.cluster.pools[0]
    kind = replace(
        pool.kind,
        intra=replace(pool.kind.intra, bandwidth_bytes_per_s=pool.kind.intra.bandwidth_bytes_per_s * factor),
        nic=replace(pool.kind.nic, bandwidth_bytes_per_s=pool.kind.nic.bandwidth_bytes_per_s * factor),
    )
    fast = replace(slow, cluster=replace(slow.cluster, pools=(replace(pool, kind=kind),)))
    layout = parse_layout(text)
    before, after = (predict(one, decision_of_layout(one, layout)).step_s for one in (slow, fast))
    assert after <= before * (1 + 1e-9)


def test_more_memory_is_never_worse() -> None:
    small = problem(model="llama2-13b", cluster="a100-40x16")
    large = problem(model="llama2-13b", cluster="a100-80x16")
    order = [Verdict.OK, Verdict.RISKY, Verdict.NO]
    for text in LAYOUTS[:-1]:
        layout = parse_layout(text)
        verdicts = [predict(one, decision_of_layout(one, layout)).verdict for one in (small, large)]
        assert order.index(verdicts[1]) <= order.index(verdicts[0])


def test_layers_that_do_not_divide_are_split_by_cost() -> None:
    decision = decision_of_layout(problem(), parse_layout("pp3 dpr4 mbs2"))
    counts = [stage.blocks[1] - stage.blocks[0] + 1 for stage in decision.stages]
    assert sum(counts) == 34
    assert max(counts) - min(counts) <= 2


def test_an_illegal_layout_names_every_law() -> None:
    with pytest.raises(InputError, match=r"(?s)HEADS_MOD_TP.*KV_HEADS_MOD_TP"):
        decision_of_layout(problem(), parse_layout("tp3 dpr5"))


# Explanations -----------------------------------------------------------------------------------------------------------


def test_why_not_an_illegal_layout(plan: Plan) -> None:
    found = why_not(plan, "tp16")
    assert found["answer"] == "illegal"
    law = next(reason for reason in found["reasons"] if reason["code"] == "KV_HEADS_MOD_TP")
    assert law["values"]["tp"] == 16
    assert 16 not in law["legal"]["tp"]


def test_why_not_what_does_not_fit(plan: Plan) -> None:
    found = why_not(plan, "tp1 pp1 zero0")
    assert found["answer"] == "does not fit"
    assert found["memory"]["over_gib"] > 0
    assert found["memory"]["expected_gib"] - found["memory"]["usable_gib"] == pytest.approx(found["memory"]["over_gib"])
    assert "->" in found["smallest_change"]


def test_why_not_what_fits_on_expectation_only() -> None:
    """A layout without its margin of memory is no plan, however fast it is."""
    given = problem(model="llama2-13b", cluster="a100-80x16", gbs=256)
    today = plan_for(model="llama2-13b", cluster="a100-80x16", workload={"seq": 4096, "gbs": 256})
    layout = parse_layout("dps16 zero3 mbs2")
    assert predict(given, decision_of_layout(given, layout)).verdict is Verdict.RISKY
    found = why_not(today, str(layout))
    assert found["answer"] == "does not fit"
    assert found["memory"]["expected_gib"] < found["memory"]["usable_gib"] < found["memory"]["upper_gib"]
    assert found["memory"]["over_gib"] == pytest.approx(found["memory"]["upper_gib"] - found["memory"]["usable_gib"])


def test_why_not_what_is_slower(plan: Plan) -> None:
    found = why_not(plan, "tp8 pp2")
    assert found["answer"] == "slower"
    assert found["best"]["step_s"] > found["chosen"]["step_s"]
    other = math.fsum(part["other_s"] for part in found["parts"])
    assert other == pytest.approx(found["best"]["step_s"])


def test_why_not_the_choice_itself(plan: Plan) -> None:
    words = [word for word in str(plan.decision.layout).split() if not word.startswith("rc=")]
    assert why_not(plan, " ".join(words))["answer"] == "chosen"


def test_why_not_with_another_calibration_is_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="--calibration"):
        why_not(plan, "tp8", replace(shipped(), name="another"))


def test_two_plans_side_by_side(plan: Plan) -> None:
    other = plan_for(pin="tp=8")
    rows = {row["name"]: row for row in against(plan, other)["rows"]}
    assert rows["layout"]["this"] != rows["layout"]["other"]
    assert rows["model"]["this"] == rows["model"]["other"]


# Neighbours -------------------------------------------------------------------------------------------------------------


def test_neighbours_differ_by_one_choice() -> None:
    given = problem()
    layout = parse_layout("tp8 dpr2")
    found = neighbours(given, layout)
    assert found
    assert all(one.layout.world == 16 and one.layout != layout for one in found)
    assert len({str(one.layout) for one in found}) == len(found)


def test_the_best_change_of_a_layout_that_does_not_fit_makes_it_fit() -> None:
    given = problem()
    layout = Layout(dp_replicate=16)
    now = predict(given, decision_of_layout(given, layout))
    assert now.verdict is Verdict.NO
    change = best_change(given, layout, now)
    assert change is not None
    assert change.predicted.verdict is Verdict.OK


def test_virtual_stages_of_unequal_layers_are_priced_where_the_runtime_can_split_them() -> None:
    given = problem(runtime="megatron", cluster="h100x64")
    given = replace(given, model=replace(given.model, num_layers=30))
    layout = parse_layout("pp8 vpp4 dps8 mbs1 zero1 sched=interleaved")
    decision = decision_of_layout(given, layout)
    # 32 blocks on 32 virtual stages: embedding and head take the place of a layer each
    assert [stage.blocks for stage in decision.stages] == [(block, block) for block in range(32)]
    assert predict(given, decision).step_s > 0
    even = replace(given, runtime=replace(given.runtime, uneven_stages=""))
    with pytest.raises(
        InputError, match=r"30 layers do not divide over pp·vpp = 32 virtual stages.*legal pp·vpp: 1, 2, 3"
    ):
        decision_of_layout(even, layout)


def test_todays_layout_is_no_candidate_on_another_number_of_gpus_or_under_a_pin_against_it() -> None:
    today = "tp2 dps8 zero2 mbs1"
    for asked, words in (({"gpus": "8"}, "16 GPUs"), ({"pin": "tp=4"}, "the pin tp=4 excludes it")):
        found = plan_for(layout=today, **asked)
        assert found.certificate is not None
        assert any(words in one for one in found.certificate.restrictions)
        assert found.decision.layout.world == int(str(asked.get("gpus", 16)))
        assert words in plan_text(found)


@pytest.mark.parametrize("model, gbs, pin", [("llama3-8b", 37, "mbs=1"), ("llama3-8b", 64, "pp=4")])
def test_why_not_tells_the_plan_that_a_pin_gives(model: str, gbs: int, pin: str) -> None:
    asked = {"model": model, "cluster": "h100x16", "workload": {"seq": 1024, "gbs": gbs}, "runtime": "torchtitan"}
    pinned = plan_for(**asked, pin=pin)
    told = why_not(plan_for(**asked), pin.replace("=", ""))["best"]
    assert pinned.predicted is not None
    assert (told["layout"], told["step_s"]) == (str(pinned.decision.layout), pinned.predicted.step_s)
