"""Bytes by phase, in the host, near full memory, and by each way of counting: recounts and properties."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.memory import memory_upper, state_bytes, usable_bytes
from cost_models.memory_phases import PHASES, Evaluated, device_phases, fullest_node
from cost_models.peaks import host_bytes_per_node, memory_report
from cost_models.pressure import slowdown_share
from cost_models.problem import Problem
from cost_models.records import Layout, Link, MemoryKind, RecordError, Verdict, normalised
from planner.predict import predict, verdict_of
from planner.readers.runtimes import read_runtime
from planner.report.predict_text import predict_text
from tests.unit.cost_cases import MODEL, NODE, cluster, problem
from tests.unit.test_memory import decision

GIB = 2**30
ORDER = [Verdict.NO, Verdict.RISKY, Verdict.OK]
LINK = Link(name="pcie4", bandwidth_bytes_per_s=31.5e9)


def offloading(*what: str, runtime: str = "deepspeed", host_bytes: int | None = None, gpus: int = 8) -> Problem:
    kind = replace(NODE, host_link=LINK, host_memory_bytes=host_bytes)
    return problem(cluster=cluster(gpus // kind.gpus_per_node, kind), runtime=read_runtime(runtime), offload=what)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    gib=st.floats(1.0, 200.0),
    more=st.floats(1.0, 3.0),
    kind=st.sampled_from([MemoryKind.ALLOCATED, MemoryKind.RESERVED, MemoryKind.NVIDIA_SMI]),
    zero=st.sampled_from([0, 1, 2, 3]),
)
def test_more_memory_never_turns_yes_into_no(gib: float, more: float, kind: MemoryKind, zero: int) -> None:
    def verdict(size: float) -> tuple[int, float]:
        device = replace(NODE.device, memory_bytes=int(size * GIB))
        whole = problem(cluster=cluster(1, replace(NODE, device=device)), memory_kind=kind)
        (held,) = memory_report(whole, decision(whole, normalised(dp=8, zero=zero)))
        answer = verdict_of(held.peak_bytes, memory_upper(whole, held.peak_bytes), usable_bytes(whole))
        return ORDER.index(answer), slowdown_share(whole, held.peak_bytes)

    (small, slow), (large, fast) = verdict(gib), verdict(gib * more)
    assert large >= small
    assert fast <= slow + 1e-12


@pytest.mark.parametrize("name", ["torch", "fsdp", "megatron", "deepspeed"])
@pytest.mark.parametrize("layout", [normalised(dp=8), normalised(dp=4, pp=2, mbs=1), normalised(dp=2, tp=4)])
def test_states_fall_with_the_zero_level_and_phases_hold_them(name: str, layout: Layout) -> None:
    whole = problem(runtime=read_runtime(name))
    before: list[float] | None = None
    for zero in range(4):
        shards = layout.dp if zero else 1
        level = normalised(
            dp_shard=shards, dp_replicate=layout.dp // shards, tp=layout.tp, pp=layout.pp, mbs=layout.mbs, zero=zero
        )
        held = memory_report(whole, decision(whole, level))
        states = [sum(one.kinds[kind] for kind in ("weights", "gradients", "optimizer")) for one in held]
        if before is not None:
            assert all(now <= was * (1 + 1e-12) for now, was in zip(states, before, strict=True))
        before = states
        for one, state in zip(held, states, strict=True):
            assert tuple(one.phases) == PHASES == tuple(one.operations)
            assert one.peak_phase == "step 2"
            assert one.phases["step 2"] == pytest.approx(one.peak_bytes)
            assert one.phases["step 2"] >= one.phases["step 1"] >= one.phases["evaluation"] - state
            assert one.phases["step 2"] >= max(one.phases.values())
            assert one.phases["step 2"] >= state + one.kinds["context"]
            assert one.phases["load"] >= one.phases["build"] - one.kinds["gradients"]
            assert min(one.phases.values()) >= one.kinds["weights"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_states_of_all_ranks_are_the_models(zero: int, pp: int) -> None:
    """tp = 1 copies nothing: each byte lies on one rank of a sharded group, or once on every replica."""
    whole = problem(model=replace(MODEL, tie_embeddings=False), runtime=read_runtime("deepspeed"))
    dp, per = 8 // pp, state_bytes(whole)
    layout = normalised(dp=dp, pp=pp, mbs=1, zero=zero, micro_gather="step")
    for kind, size, level in (
        ("weights", per.weight, 3),
        ("gradients", per.gradient, 2),
        ("optimizer", per.optimizer, 1),
    ):
        on_all = sum(dp * one.kinds[kind] for one in memory_report(whole, decision(whole, layout)))
        copies = 1 if zero >= level and dp > 1 else dp
        assert on_all == pytest.approx(size * whole.model.num_params * copies)


def test_what_a_runtime_builds_first_is_there_at_build() -> None:
    layout = normalised(dp=8, zero=1)
    for name, built in {
        "torch": lambda one: one.kinds["weights"] + one.kinds["buckets"],
        "megatron": lambda one: one.kinds["weights"] + one.kinds["gradients"] + one.kinds["optimizer"] / 3,
        "deepspeed": lambda one: one.kinds["weights"] + one.kinds["gradients"] + one.kinds["optimizer"],
    }.items():
        whole = problem(runtime=read_runtime(name))
        (one,) = memory_report(whole, decision(whole, layout if name != "torch" else normalised(dp=8)))
        assert one.phases["build"] == pytest.approx(built(one) + one.kinds["context"]), name
    # DeepSpeed's states are all there from the start: its first step holds as much as its second
    assert one.phases["step 1"] == pytest.approx(one.phases["step 2"])


def test_the_update_is_the_peak_of_the_first_step_where_activations_are_small() -> None:
    kinds = {"weights": 4e9, "gradients": 4e9, "optimizer": 8e9, "context": 1e8, "activations": 1e6}
    small = Evaluated(layer_bytes=1e5, logits_bytes=2e5)
    whole = problem()
    phases = device_phases(whole.runtime, state_bytes(whole), kinds, small, "training")
    assert phases["step 1"].operation.startswith("first update")
    assert phases["evaluation"].operation == "head and loss"
    assert phases["evaluation"].device_bytes == pytest.approx(12e9 + 1e8 + 2e5)


def test_offloading_moves_bytes_from_the_device_to_the_host() -> None:
    plain = offloading()
    layout = normalised(dp=8, zero=3)
    (before,) = memory_report(plain, decision(plain, layout))
    moving = offloading("optimizer")
    (after,) = memory_report(moving, decision(moving, layout))
    assert after.kinds["optimizer"] == after.kinds["gradients"] == 0.0  # DeepSpeed moves both
    moved = before.kinds["optimizer"] + before.kinds["gradients"]
    assert after.host["step 2"] == pytest.approx(moved)
    assert host_bytes_per_node(moving, [after])["step 2"] == pytest.approx(8 * moved)
    assert after.peak_bytes == pytest.approx(before.peak_bytes - moved)
    both = offloading("optimizer", "param")
    (least,) = memory_report(both, decision(both, layout))
    assert least.kinds["weights"] == 0.0
    assert least.kinds["gathered"] == after.kinds["gathered"]


def test_offloading_takes_time_and_the_host_is_a_budget() -> None:
    layout = normalised(dp=8, zero=3)
    seconds = []
    for what in ((), ("optimizer",), ("optimizer", "param")):
        whole = offloading(*what)
        found = predict(whole, decision(whole, layout))
        seconds.append(found.step_s)
        assert found.parts.total_s == pytest.approx(found.step_s)
    assert seconds[0] < seconds[1] < seconds[2]
    poor = offloading("optimizer", host_bytes=GIB)
    answer = predict(poor, decision(poor, layout))
    assert answer.verdict is Verdict.NO
    text = predict_text(poor, decision(poor, layout), answer, {})
    assert "fits on the device, not in the host" in text
    assert "what is offloaded is more than the host has" in text
    rich = offloading("optimizer", host_bytes=1000 * GIB)
    assert predict(rich, decision(rich, layout)).verdict is Verdict.OK


def test_offloading_that_has_no_price_is_an_error() -> None:
    with pytest.raises(RecordError, match="offloads no 'param' that is priced; known there: optimizer"):
        offloading("param", runtime="megatron")
    nowhere = replace(offloading("optimizer"), cluster=cluster(1, replace(NODE, host_link=None)))
    with pytest.raises(RecordError, match="host_link"):
        predict(nowhere, decision(nowhere, normalised(dp=8, zero=3)))


def test_the_fullest_node_counts_the_ranks_that_lie_on_it() -> None:
    per_rank = [((0, 5), {"save": 1.0}, {"save": 100.0}), ((6, 11), {"save": 10.0}, {})]
    assert fullest_node(per_rank, 4) == {"save": 104.0}  # ranks 0 to 3, and what the first holds beside
    assert fullest_node(per_rank[1:], 4) == {"save": 40.0}


def test_three_ways_of_counting_and_slack_that_gives_way() -> None:
    whole = problem()
    found = predict(whole, decision(whole, normalised(dp=8)))
    kinds = found.memory_gib_by_kind
    assert kinds["allocated"] < kinds["reserved"] < kinds["nvidia-smi"]
    assert kinds["allocated"] == pytest.approx(found.memory_gib_max)
    # slack alone refuses nothing: the allocator gives it back first
    needed = int(kinds["nvidia-smi"] * GIB) - GIB
    tight = replace(NODE, device=replace(NODE.device, memory_bytes=needed))
    seen = problem(cluster=cluster(1, tight), memory_kind=MemoryKind.NVIDIA_SMI)
    (held,) = memory_report(seen, decision(seen, normalised(dp=8)))
    assert held.peak_bytes == pytest.approx(needed)


def test_near_full_memory_only_the_upper_end_rises() -> None:
    whole = problem()
    usable = usable_bytes(whole)
    shares = [slowdown_share(whole, part * usable) for part in (0.0, 0.9, 0.93, 0.97, 1.0, 2.0)]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0]
    assert shares[4] == shares[5] > shares[3] > shares[2] > 0
