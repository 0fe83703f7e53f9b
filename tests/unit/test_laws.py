"""Laws against plain arithmetic; legal values are legal and complete; every law can be broken, and says so in numbers."""

import math
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.data import rows
from cost_models.laws import (
    LAW,
    LAWS,
    Facts,
    breaches,
    divisors,
    facts_of_run,
    finding,
    first_breach,
    laws_over,
    legal_values,
)
from cost_models.records import Gather, Model, Schedule, Severity, Workload, parse_layout
from planner.errors import InputError
from planner.readers.runtimes import read_runtime, runtime_names

GENERIC, TORCH, MEGATRON, DEEPSPEED = (read_runtime(name) for name in ("generic", "torch", "megatron", "deepspeed"))

SMALL = st.integers(1, 12)
POWER = st.sampled_from([1, 2, 3, 4, 6, 8])

FACTS = st.builds(
    Facts,
    num_layers=st.integers(1, 40),
    ffn=st.integers(1, 64),
    heads=st.integers(1, 32),
    kv_heads=st.integers(1, 16),
    vocab=st.integers(1, 400),
    tie_embeddings=st.booleans(),
    num_experts=st.sampled_from([0, 4, 6, 8, 16]),
    moe_ffn=st.integers(1, 32),
    world=st.integers(1, 64),
    domain_size=st.sampled_from([1, 4, 8]),
    device_bytes=st.integers(50, 150),
    host_bytes=st.integers(50, 150),
    dp=POWER,
    dp_replicate=POWER,
    dp_shard=POWER,
    cp=st.sampled_from([1, 2, 3]),
    tp=POWER,
    ep=POWER,
    etp=st.sampled_from([1, 2]),
    pp=POWER,
    vpp=st.sampled_from([1, 2, 3]),
    mbs=st.sampled_from([1, 2, 3]),
    microbatches=SMALL,
    num_micro_batches=SMALL,
    zero=st.integers(0, 3),
    gather=st.sampled_from(Gather),
    schedule=st.sampled_from([None, *Schedule]),
    recompute=st.sampled_from(["none", "full", "unheard-of"]),
    sp=st.booleans(),
    ulysses=st.sampled_from([1, 2, 4]),
    offload_optimizer=st.booleans(),
    seq=st.integers(1, 96),
    gbs=st.integers(1, 96),
    states_bytes=st.integers(20, 200),
    states_bytes_all=st.integers(20, 2000),
    host_states_bytes=st.integers(20, 200),
)

ORACLES = {
    "WORLD_MOD_MP": lambda f: f.world / (f.tp * f.pp * f.cp) == f.world // (f.tp * f.pp * f.cp),
    "WORLD_SIZE_MISMATCH": lambda f: f.world % (f.tp * f.pp * f.cp) or f.world // (f.tp * f.pp * f.cp) == f.dp,
    "WORLD_MOD_EP": lambda f: any(f.ep * f.etp * n == f.dp * f.cp * f.tp for n in range(1, 1000)),
    "EXPERTS_MOD_EP": lambda f: f.ep == 1 or any(f.ep * n == f.num_experts for n in range(1, 17)),
    "HEADS_MOD_TP": lambda f: math.gcd(f.heads, f.tp) == f.tp,
    "KV_HEADS_MOD_TP": lambda f: math.gcd(f.kv_heads, f.tp) == f.tp,
    "KV_HEADS_MOD_ULYSSES": lambda f: math.gcd(f.kv_heads, f.ulysses) == f.ulysses,
    "VOCAB_MOD_TP": lambda f: math.gcd(f.vocab, f.tp) == f.tp,
    "LAYERS_MOD_PP": lambda f: math.gcd(f.num_layers, f.pp) == f.pp,
    "LAYERS_MOD_PPVPP": lambda f: f.vpp == 1 or math.gcd(f.num_layers, f.pp * f.vpp) == f.pp * f.vpp,
    "TIED_EMB_PP_SYNC": lambda f: f.pp == 1 or not f.tie_embeddings,
    "GBS_MOD_MBSDP": lambda f: f.gbs in range(0, 1000, f.mbs * f.dp),
    "TP_SPANS_NODES": lambda f: f.tp == 1 or f.tp <= f.domain_size,
    "ZERO23_WITH_PP": lambda f: f.zero < 2 or f.pp == 1,
    "MEM_STATES_GT_HBM": lambda f: f.states_bytes <= f.device_bytes,
    "HOST_MEM": lambda f: not f.offload_optimizer or f.host_states_bytes <= f.host_bytes,
}


@pytest.mark.parametrize("code", ORACLES)
@given(facts=FACTS)
def test_a_law_is_its_arithmetic(code, facts):
    assert LAW[code].holds(facts) == bool(ORACLES[code](facts))


@given(FACTS, st.sampled_from([GENERIC, TORCH, MEGATRON, DEEPSPEED]))
def test_legal_values_are_legal_and_complete(facts, runtime):
    for law in LAWS:
        legal = legal_values(law, facts, runtime) if law.holds(facts, runtime) is False else {}
        beside = [other for other in LAWS if other.code in law.legal_with]
        beside = [other for other in beside if other.severity_of(runtime) is Severity.ERROR]
        for key in law.legal_keys:
            if not legal:
                continue
            tried = {
                "zero": list(runtime.zero_levels),
                "schedule": list(runtime.schedules),
                "vpp": range(1, max(1, facts.num_layers // facts.pp) + 1),
            }.get(key, range(1, facts.world + 1 if key in ("tp", "pp", "cp", "dp") else 200))
            good = []
            for value in tried:
                trial = replace(facts, **{key: value})
                if law.holds(trial, runtime) and all(o.holds(trial, runtime) is not False for o in beside):
                    good.append(value)
            if key in ("tp", "pp", "cp"):
                # degrees are listed within the world that they must divide
                good = [value for value in good if facts.world % value == 0]
            elif key in ("mbs", "microbatches"):
                good = [value for value in good if facts.gbs % value == 0]
            elif key in ("ulysses", "etp"):
                whole = facts.heads if key == "ulysses" else facts.moe_ffn
                good = [value for value in good if whole % value == 0]
            elif key == "ep":
                good = [value for value in good if (facts.num_experts or facts.world) % value == 0]
            assert legal[key] == good, (law.code, key)


@given(FACTS)
def test_messages_hold_the_law_and_the_numbers(facts):
    for law in LAWS:
        if law.holds(facts, MEGATRON) is not False:
            continue
        found = finding(law, facts, MEGATRON)
        assert law.statement in found.message
        numbers = set(re.findall(r"\d+", found.message))
        for name, value in found.values.items():
            if isinstance(value, int) and not isinstance(value, bool) and not name.endswith(("bytes", "bytes_all")):
                told = str(value) in numbers or name in (
                    "ulysses",
                    "vpp",
                    "num_layers",
                    "cp",
                    "num_experts",
                    "dp",
                    "pp",
                    "mbs",
                )
                assert told, (law.code, name)


RARELY_BROKEN = (
    Facts(world=16, tp=4, pp=2, cp=1, dp=4),
    Facts(states_bytes=95, device_bytes=100),
    Facts(num_micro_batches=9, pp=4, vpp=2),
    Facts(num_experts=8, etp=2, moe_ffn=3),
    Facts(gbs=7, dp=2, microbatches=2),
    Facts(schedule=Schedule.ZBV, pp=2, zero=3, dp=2, vpp=2, recompute="full", cp=2),
    Facts(vpp=2, pp=1),
    Facts(num_micro_batches=3, pp=4, vpp=1, schedule=Schedule.ONE_F_ONE_B),
    Facts(ep=2),
    Facts(recompute="mla_up_proj", latent_attention=False),
    Facts(precision="fp8", device_precisions=("bf16",)),
)


def test_every_law_can_be_broken():
    broken = {
        law.code
        for law in LAWS
        for facts in RARELY_BROKEN
        for runtime in (MEGATRON, TORCH)
        if law.holds(facts, runtime) is False
    }

    @given(FACTS)
    def collect(facts):
        broken.update(law.code for law in LAWS if law.holds(facts, MEGATRON) is False)

    collect()
    assert {law.code for law in LAWS} == broken


def test_unknown_operands_are_not_judged():
    for law in LAWS:
        assert law.holds(Facts()) in (None, True), law.code
        assert set(law.missing(Facts())) == set(law.operands)
    _, unchecked = breaches(Facts(heads=8), GENERIC)
    assert next(one for one in unchecked if one.code == "HEADS_MOD_TP").missing == ("tp",)


@given(FACTS, st.sampled_from([field.name for field in fields(Facts)]))
def test_a_law_judges_only_its_operands(facts, name):
    for law in LAWS:
        if name not in (*law.operands, *law.optional):
            bare = replace(facts, **{name: None})
            assert law.holds(bare, TORCH) == law.holds(facts, TORCH), (law.code, name)


def test_both_kinds_of_heads_fire():
    found, _ = breaches(Facts(heads=28, kv_heads=4, tp=8, world=8, pp=1, cp=1), GENERIC)
    assert [one.code for one in found] == ["HEADS_MOD_TP", "KV_HEADS_MOD_TP"]
    assert "kv_heads=4 is not divisible by tp=8" in found[1].message
    assert "legal tp on 8 GPUs: 1, 2, 4" in found[0].message
    assert found[0].legal == {"tp": [1, 2, 4]}


def test_world_size_mismatch_only_where_the_degrees_divide():
    whole = Facts(world=16, tp=4, pp=2, cp=1, dp=4)
    assert [one.code for one in breaches(whole, GENERIC)[0] if "WORLD" in one.code] == ["WORLD_SIZE_MISMATCH"]
    broken = replace(whole, world=12)
    assert [one.code for one in breaches(broken, GENERIC)[0] if "WORLD" in one.code] == ["WORLD_MOD_MP"]
    assert legal_values(LAW["WORLD_SIZE_MISMATCH"], whole, GENERIC) == {"dp": [2]}


@pytest.mark.parametrize(
    "facts, holds",
    [
        (Facts(seq=2050, tp=4, cp=1, sp=True), False),
        (Facts(seq=2050, tp=4, cp=1, sp=False), True),
        (Facts(seq=2050, tp=4, cp=1), None),
        (Facts(seq=2052, tp=4, cp=1), True),
        (Facts(seq=4096, tp=1, cp=8, sp=False), True),
        (Facts(seq=4104, tp=1, cp=8, sp=False), False),
        (Facts(seq=4104, tp=1, cp=8, sp=False, ulysses=8), True),
        (Facts(seq=48, tp=3, cp=2, sp=True), True),
        (Facts(seq=32, tp=3, cp=2, sp=True), False),
        (Facts(seq=2051, tp=1, cp=1), True),
    ],
)
def test_sequences(facts, holds):
    assert LAW["SEQ_MOD_TPCP"].holds(facts) is holds


@pytest.mark.parametrize(
    "schedule, vpp, least",
    [
        (None, 1, 8),
        ("1f1b", 1, 8),
        ("gpipe", 1, 1),
        ("interleaved", 2, 1),
        (None, 2, 1),
        ("zbv", 2, 1),
        ("vmin", 2, 1),
        ("dualpipev", 2, 16),
    ],
)
def test_least_micro_batches_by_schedule(schedule, vpp, least):
    law = LAW["MICROBATCHES_LT_PP"]
    facts = Facts(pp=8, vpp=vpp, schedule=schedule and Schedule(schedule), num_micro_batches=least)
    assert law.holds(facts)
    if least > 1:
        assert law.holds(replace(facts, num_micro_batches=least - 1)) is False


def test_schedules_agree_with_their_own_laws():
    """What the operation lists of a schedule need, the laws of the runtime torch refuse, and the other way round."""
    from cost_models.schedules import schedule_needs

    codes = ("MICROBATCHES_LT_PP", "MICROBATCHES_MOD_PP", "MICROBATCHES_MOD_ROUNDS", "SCHEDULE_VPP")
    laws = [LAW[code] for code in codes]
    for schedule in Schedule:
        for pp in (2, 3, 4):
            for vpp in (1, 2, 3):
                for count in range(1, 14):
                    facts = Facts(schedule=schedule, pp=pp, vpp=vpp, num_micro_batches=count)
                    needed = all(need.holds(pp, vpp, count) for need in schedule_needs(schedule))
                    assert (first_breach(laws, facts, TORCH) is None) == needed, facts


def test_schedules_that_split_the_backward():
    zbv = Facts(schedule=Schedule.ZBV, pp=2, vpp=2, zero=3, dp=2, dp_replicate=1, recompute="full")
    titan = read_runtime("torchtitan")
    assert LAW["ZB_WITH_SHARDING"].severity_of(titan) is Severity.ERROR
    for facts, holds in (
        (zbv, False),
        (replace(zbv, zero=2), True),
        (replace(zbv, zero=0, dp_replicate=2), False),
        (replace(zbv, zero=0, dp=1), True),
        (replace(zbv, schedule=Schedule.ONE_F_ONE_B), True),
        (replace(zbv, pp=1), True),
    ):
        assert LAW["ZB_WITH_SHARDING"].holds(facts, titan) is holds, facts
    assert LAW["RECOMPUTE_WITH_SPLIT_BACKWARD"].holds(zbv, titan) is False
    assert "silently wrong gradients" in finding(LAW["ZB_WITH_SHARDING"], zbv, titan).message


def test_gather_goes_with_zero():
    law = LAW["GATHER_WITH_ZERO"]
    for zero, gather, deepspeed, torch in (
        (0, "step", True, True),
        (0, "use", False, False),
        (2, "step", True, False),
        (2, "micro", False, True),
        (3, "use", True, True),
        (3, "micro", False, False),
    ):
        facts = Facts(zero=zero, gather=Gather(gather))
        assert law.holds(facts, DEEPSPEED) is deepspeed, facts
        assert law.holds(facts, TORCH) is torch, facts


def test_a_margin_is_between_fitting_and_not():
    def codes(states):
        found = breaches(Facts(states_bytes=states, device_bytes=1000, states_bytes_all=7 * states), GENERIC)[0]
        return [one.code for one in found]

    assert codes(900) == []
    assert codes(901) == ["MEM_BORDERLINE"]
    assert codes(1000) == ["MEM_BORDERLINE"]
    assert codes(1001) == ["MEM_STATES_GT_HBM"]
    law = LAW["MEM_STATES_GT_HBM"]
    assert legal_values(law, Facts(states_bytes=1001, device_bytes=1000, states_bytes_all=7001), GENERIC) == {
        "least_gpus": [8]
    }


def test_laws_by_what_is_known():
    names = {law.code for law in laws_over({"heads", "kv_heads", "tp", "ffn"})}
    assert names == {"HEADS_MOD_TP", "KV_HEADS_MOD_TP", "KV_REPLICAS_MOD_TP", "FFN_MOD_TP"}


def test_a_whole_layout_as_facts():
    model = Model(name="m", num_layers=8, hidden=64, ffn=128, heads=8, kv_heads=4, head_dim=8, vocab=100)
    facts = facts_of_run(
        model=model,
        workload=Workload(seq=64, gbs=32),
        runtime=TORCH,
        layout=parse_layout("tp4 pp2 dps2 zero3 mbs2"),
        domain_size=8,
    )
    assert (facts.world, facts.dp, facts.num_micro_batches, facts.sp) == (16, 2, 8, True)
    assert breaches(facts, TORCH)[0] == []


# Records of runtimes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", runtime_names())
def test_a_record_of_a_runtime_is_whole(name):
    runtime = read_runtime(name)
    assert runtime.name == name
    assert set(runtime.severities) <= set(LAW), "a severity of a law that does not exist"
    assert runtime.recompute_kinds[0] == "none"
    assert set(runtime.zero_levels_with_pp) <= set(runtime.zero_levels)
    assert runtime.untested
    assert re.search(r"\(20\d\d-\d\d-\d\d\)$", runtime.source)
    assert all(row.total in (16, 18, 20) for row in runtime.state_bytes.values())


def test_every_spelling_leads_to_one_record():
    spellings = [alias for name, row in rows("runtimes").items() for alias in (name, *row["aliases"])]
    assert len(spellings) == len(set(spellings))
    assert read_runtime("Megatron_LM") is read_runtime("megatron")
    assert read_runtime("NeMo").name == "megatron-bridge"


def test_an_unknown_framework_is_generic_unless_it_was_typed():
    assert read_runtime("mlx").name == "generic"
    with pytest.raises(InputError, match=r"'megatrn' is not known; did you mean 'megatron'.*known runtimes: torch"):
        read_runtime("megatrn", typed=True)
    assert read_runtime("megatron", typed=True).name == "megatron"


def test_severity_is_the_runtimes():
    facts = Facts(zero=2, pp=2, num_layers=7, kv_heads=2, tp=4, vocab=50257)
    expected = {
        "torch": {"ZERO23_WITH_PP": None, "LAYERS_MOD_PP": "info", "KV_HEADS_MOD_TP": "error", "VOCAB_MOD_TP": None},
        "megatron": {
            "ZERO23_WITH_PP": None,
            "LAYERS_MOD_PP": "warning",
            "KV_HEADS_MOD_TP": "warning",
            "VOCAB_MOD_TP": "warning",
        },
        "deepspeed": {"ZERO23_WITH_PP": "error", "LAYERS_MOD_PP": "info", "KV_HEADS_MOD_TP": "error"},
        "generic": {
            "ZERO23_WITH_PP": "warning",
            "LAYERS_MOD_PP": "warning",
            "KV_HEADS_MOD_TP": "error",
            "VOCAB_MOD_TP": "error",
        },
    }
    for name, severities in expected.items():
        found = {one.code: one.severity.value for one in breaches(facts, read_runtime(name))[0]}
        assert {code: found.get(code) for code in severities} == severities, name


def test_a_runtime_refuses_what_it_does_not_have():
    facts = Facts(zero=1, schedule=Schedule.GPIPE, pp=2, recompute="attention")
    codes = {one.code for one in breaches(facts, TORCH)[0]}
    assert codes == {"ZERO_UNSUPPORTED", "RECOMPUTE_UNKNOWN"}
    codes = {one.code for one in breaches(replace(facts, zero=3), MEGATRON)[0]}
    assert codes == {"ZERO_UNSUPPORTED", "SCHEDULE_UNSUPPORTED", "RECOMPUTE_UNKNOWN"}


@given(st.integers(1, 2000))
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_modules_are_recomputed_where_the_model_has_them():
    law = LAW["RECOMPUTE_WITHOUT_PART"]
    dense, routed = Facts(num_experts=0, latent_attention=False), Facts(num_experts=8, latent_attention=True)
    for kind, words in (
        ("mla_up_proj", "has no latent attention"),
        ("moe_act", "has no experts"),
        ("mlp+moe", "has no experts"),
        ("mla_up_proj+moe", "has no latent attention and no experts"),
    ):
        assert words in finding(law, replace(dense, recompute=kind), MEGATRON).message
        assert law.holds(replace(routed, recompute=kind), MEGATRON)
        assert law.holds(Facts(recompute=kind), MEGATRON), "what is not known breaks nothing"
    for kind in ("none", "full", "mlp", "core_attn"):
        assert law.holds(replace(dense, recompute=kind), MEGATRON)


def test_experts_are_divided_where_there_are_any_and_the_runtime_can():
    assert "the model has no experts" in finding(LAW["EXPERTS_MOD_EP"], Facts(num_experts=0, ep=8), MEGATRON).message
    assert legal_values(LAW["EXPERTS_MOD_EP"], Facts(num_experts=0, ep=8, world=8), MEGATRON) == {"ep": [1]}
    assert LAW["EP_UNSUPPORTED"].holds(Facts(ep=8), TORCH) is False
    titan = read_runtime("torchtitan")
    for code, facts in (("EP_UNSUPPORTED", Facts(ep=8)), ("CP_UNSUPPORTED", Facts(cp=8))):
        assert LAW[code].holds(facts, titan), "torchtitan trains with stock torch, and has what our executor has not"
