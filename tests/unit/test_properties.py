"""What must hold of every price, whatever the model, runtime, layout and machine."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.collectives import Collective, collective_s, fabric
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.records import (
    FabricException,
    FabricLevel,
    Layout,
    RecordError,
    Schedule,
    Verdict,
    Workload,
    normalised,
    parse_layout,
)
from cost_models.stage import price_blocks, price_columns, usable_bytes
from cost_models.step import lower_bound_s, objective_s
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.predict import predict, simulated
from tests.unit.cost_cases import DEVICE, NODE, cluster
from tests.unit.term_cases import MODELS, RUNTIMES, case, even_columns, step_s, with_values

ROUNDING = 1 + 1e-9
FACTORS = st.floats(min_value=1.0, max_value=10.0)
WORSE_FIRST = (Verdict.NO, Verdict.RISKY, Verdict.OK)


Asked = tuple[str, str, str]
"""Model, runtime, layout by name: what a failure prints."""


def built(asked: Asked) -> tuple[Problem, Layout]:
    model, runtime, text = asked
    return case(model, runtime), parse_layout(text)


@st.composite
def cases(draw: st.DrawFn) -> Asked:
    """A model, a runtime and a layout of 32 devices."""
    name, runtime = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(sorted(RUNTIMES)))
    tp, cp, pp = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    assume(tp * cp * pp <= 32)
    dp = 32 // (tp * cp * pp)
    zero = draw(st.sampled_from([0, 1, 2, 3] if runtime == "torch" else [0, 1]))
    ep = draw(st.sampled_from([1, 2, 8])) if MODELS[name].moe else 1
    assume((dp * cp * tp) % ep == 0)
    replicas = draw(st.sampled_from([1, 2])) if zero and dp % 2 == 0 and dp > 2 else 1
    layout = normalised(
        dp_replicate=replicas if zero else dp,
        dp_shard=dp // replicas if zero else 1,
        zero=zero,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=1,
        mbs=draw(st.sampled_from([1, 2])),
    )
    return name, runtime, str(layout)


def machine(part: str, factor: float) -> Problem:
    """What differs of the cluster, `factor` times as good."""
    kind = NODE
    if part in ("intra", "nic"):
        link = getattr(NODE, part)
        kind = replace(NODE, **{part: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)})
    elif part == "interfaces":
        kind = replace(NODE, num_nics=round(NODE.num_nics * factor))
    elif part == "memory":
        faster = DEVICE.memory_bandwidth_bytes_per_s * factor
        kind = replace(NODE, device=replace(DEVICE, memory_bandwidth_bytes_per_s=faster))
    else:
        roofs = {name: rate * factor for name, rate in DEVICE.matmul_flops_per_s.items()}
        kind = replace(NODE, device=replace(DEVICE, matmul_flops_per_s=roofs))
    return cluster(4, kind)


@settings(max_examples=60)
@given(cases(), st.sampled_from(["intra", "nic", "interfaces", "memory", "matmul"]), FACTORS)
def test_a_better_machine_is_never_slower(asked: Asked, part: str, factor: float) -> None:
    whole, layout = built(asked)
    better = replace(whole, cluster=machine(part, factor))
    assert step_s(better, layout) <= step_s(whole, layout) * ROUNDING


@settings(max_examples=40)
@given(cases(), st.sampled_from(["latency", "launch", "oversubscription", "half a node's interfaces"]), FACTORS)
def test_a_worse_network_is_never_faster(asked: Asked, what: str, factor: float) -> None:
    whole, layout = built(asked)
    if what == "latency":
        worse = with_values(
            whole, {"link.latency_s.ib-ndr": 14e-6 * factor, "link.small_latency_s.ib-ndr": 2.7e-6 * factor}
        )
    elif what == "launch":
        worse = with_values(whole, {"collective.launch_s": 14e-6 * factor})
    elif what == "oversubscription":
        level = FabricLevel(name="leaf", radix=2, oversubscription=factor)
        worse = replace(whole, cluster=cluster(4, fabric=(level,)))
    else:
        worse = replace(whole, cluster=cluster(4, exceptions=(FabricException(node=1, nic_factor=1 / factor),)))
    assert step_s(worse, layout) >= step_s(whole, layout) / ROUNDING


@settings(max_examples=40)
@given(
    cases(), st.sampled_from(["overlap.tp", "overlap.cp", "overlap.ep", "overlap.fsdp", "overlap.dp", "overlap.p2p"])
)
def test_hiding_more_is_never_slower(asked: Asked, what: str) -> None:
    whole, layout = built(asked)
    times = [step_s(with_values(whole, {what: share}), layout) for share in (0.0, 0.3, 0.7, 1.0)]
    assert all(later <= earlier * ROUNDING for earlier, later in pairwise(times))


@settings(max_examples=40)
@given(cases(), st.integers(min_value=1, max_value=8), st.sampled_from(["seq", "mbs"]))
def test_more_tokens_are_never_faster(asked: Asked, more: int, what: str) -> None:
    """A longer sequence, or more sequences in a micro-batch, is more work and more traffic in every block."""
    whole, layout = built(asked)
    larger, wider = whole, layout
    if what == "seq":
        larger = replace(whole, workload=replace(whole.workload, seq=whole.workload.seq + 256 * more))
    else:
        wider = replace(layout, mbs=layout.mbs + more)
    before, after = price_blocks(whole, Cells.of([layout])), price_blocks(larger, Cells.of([wider]))
    assert (after.forward_compute_s * ROUNDING >= before.forward_compute_s).all()
    assert (after.backward_compute_s * ROUNDING >= before.backward_compute_s).all()
    assert (after.activation_bytes * ROUNDING >= before.activation_bytes).all()
    nothing = with_values(whole, dict.fromkeys(("overlap.tp", "overlap.cp", "overlap.ep", "overlap.fsdp"), 0.0))
    open_before = price_blocks(nothing, Cells.of([layout]))
    open_after = price_blocks(replace(nothing, workload=larger.workload), Cells.of([wider]))
    assert (open_after.forward_exposed_s * ROUNDING >= open_before.forward_exposed_s).all()
    assert (open_after.hop_bytes > open_before.hop_bytes).all()


@settings(max_examples=40)
@given(cases(), st.sampled_from(["num_layers", "hidden", "ffn", "vocab"]))
def test_a_larger_model_is_never_faster(asked: Asked, what: str) -> None:
    whole, layout = built(asked)
    larger = replace(whole.model, **{what: 2 * getattr(whole.model, what)})
    assert step_s(replace(whole, model=larger), layout) >= step_s(whole, layout) / ROUNDING


@given(
    st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL]),
    st.floats(min_value=1e3, max_value=1e10),
    st.sampled_from([(1, 8), (8, 32)]),
    st.sampled_from(["ring", "tree"]),
)
def test_a_larger_group_of_the_same_links_is_never_cheaper(
    name: Collective, num_bytes: float, where: tuple[int, int], how: str
) -> None:
    """Inside a domain, and of one member in each of several."""
    stride, most = where
    sizes = np.array([size for size in (2.0, 4.0, 8.0) if size * stride <= most])
    if how == "tree" and name is not Collective.ALL_REDUCE:
        how = "default"
    found = collective_s(fabric(cluster(4), shipped()), name, num_bytes, sizes, stride, how)
    assert (np.diff(found.total) >= -1e-12 * found.total[1:]).all()


@settings(max_examples=30)
@given(cases(), st.integers(min_value=0, max_value=3), st.integers(min_value=0, max_value=3))
def test_relabelled_ranks_cost_the_same(asked: Asked, node: int, other: int) -> None:
    """Which node is the slow one is a label where no pipeline has an end there, and so is the place of an axis of one rank in
    the order of ranks."""
    whole, layout = built(asked)
    slow = [
        replace(whole, cluster=cluster(4, exceptions=(FabricException(node=one, nic_factor=0.5),)))
        for one in (node, other)
    ]
    if layout.pp == 1 or node == other:
        assert step_s(slow[0], layout) == step_s(slow[1], layout)
    else:
        assert step_s(slow[0], layout) == pytest.approx(step_s(slow[1], layout), rel=0.2)
    alone = [axis for axis in RANK_ORDER if getattr(layout, axis) == 1]
    moved = (*alone, *(axis for axis in RANK_ORDER if axis not in alone))
    assert step_s(whole, layout, moved) == pytest.approx(step_s(whole, layout), rel=1e-12)


@settings(max_examples=30)
@given(cases())
def test_the_bound_is_below_the_objective_s_and_the_simulated_time(asked: Asked) -> None:
    """R ≤ S on prices of every model, and J ≥ S where the backward pass is no shorter than the forward one."""
    whole, layout = built(asked)
    prices = price_columns(price_blocks(whole, Cells.of([layout])), 0, even_columns(whole, layout))
    try:
        step = simulated(whole, decision_of_layout(whole, layout))
    except (InputError, RecordError):
        assume(False)
        raise
    times = step.parts.times()
    bound, simulated_s = lower_bound_s(step.pipeline, times), step.simulation.step_s
    assert bound <= simulated_s * ROUNDING
    if (prices.backward_s >= prices.forward_s).all() and layout.vpp == 1:
        assert objective_s(step.pipeline, times) >= simulated_s / ROUNDING


@settings(max_examples=25)
@given(cases(), st.lists(st.floats(min_value=0.02, max_value=8.0), min_size=2, max_size=4))
def test_more_memory_never_turns_yes_into_no(asked: Asked, factors: list[float]) -> None:
    whole, layout = built(asked)
    found = []
    for factor in sorted(factors):
        device = replace(DEVICE, memory_bytes=round(DEVICE.memory_bytes * factor))
        larger = replace(whole, cluster=cluster(4, replace(NODE, device=device)))
        try:
            decision = decision_of_layout(larger, layout)
        except (InputError, RecordError):
            assume(False)
        answer = predict(larger, decision)
        found.append((usable_bytes(larger), WORSE_FIRST.index(answer.verdict), answer.memory_gib_max))
    assert [usable for usable, _, _ in found] == sorted(usable for usable, _, _ in found)
    assert [verdict for _, verdict, _ in found] == sorted(verdict for _, verdict, _ in found)
    assert len({needed for _, _, needed in found}) == 1


@settings(max_examples=40)
@given(cases())
def test_degrees_divide_what_they_divide(asked: Asked) -> None:
    """tp·pp ranks hold the model once, ep·etp ranks its experts once; and a rank's share never grows with tp or ep."""
    whole, layout = built(asked)
    held = price_blocks(whole, Cells.of([layout])).memory.params
    routed = float(held.experts[0] @ whole.block_counts) * layout.ep * layout.etp
    model = whole.model
    layers = model.num_layers - model.moe.num_dense_layers if model.moe else 0
    assert routed == pytest.approx(layers * model.moe.num_experts * model.expert_params if model.moe else 0, rel=1e-12)
    common = float(held.common[0] @ whole.block_counts)
    assert common * layout.tp >= (model.num_params - routed) * (1 - 1e-12)
    alone = price_blocks(whole, Cells.of([normalised(dp=32, mbs=layout.mbs)]))
    one = price_blocks(whole, Cells.of([layout]))
    assert (one.memory.params.common <= alone.memory.params.common).all()
    assert (one.forward_compute_s <= alone.forward_compute_s * ROUNDING).all()


@pytest.mark.parametrize("model", ["dense", "latent"])
def test_planted_units_move_every_term_that_has_them(model: str) -> None:
    """GB read as GiB, Gbit as GB, ms as s: the term that it belongs to moves by the factor, so a test that pins it fails."""
    whole = with_values(
        case(model), {**dict.fromkeys(("overlap.fsdp", "overlap.dp", "overlap.tp"), 0.0), "straggler.per_doubling": 0.0}
    )
    layout, gib = normalised(dp=32, zero=3), 2**30 / 1e9
    kind = replace(NODE, nic=replace(NODE.nic, bandwidth_bytes_per_s=50e9 * gib))
    right, wrong = (price_blocks(one, Cells.of([layout])) for one in (whole, replace(whole, cluster=cluster(4, kind))))
    assert right.fabric.network.bytes_per_s * gib == pytest.approx(wrong.fabric.network.bytes_per_s, rel=1e-12)
    away = normalised(dp_replicate=4, dp_shard=8, zero=3, mbs=1)
    order = ("dp_replicate", "tp", "cp", "dp_shard", "pp")
    far = [
        price_blocks(one, Cells.of([away], order)).forward_exposed_s[0, 1, 0]
        for one in (whole, replace(whole, cluster=cluster(4, kind)))
    ]
    assert 1.05 < far[0] / far[1] <= gib * ROUNDING
    bits = replace(NODE, nic=replace(NODE.nic, bandwidth_bytes_per_s=50e9 / 8))
    slow = price_blocks(replace(whole, cluster=cluster(4, bits)), Cells.of([away], order)).forward_exposed_s[0, 1, 0]
    assert slow > 6 * far[0]


def test_an_empty_step_and_numbers_that_are_none_are_refused() -> None:
    for wrong in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(RecordError):
            replace(NODE.nic, bandwidth_bytes_per_s=wrong)
    for wrong in (0, -1):
        with pytest.raises(RecordError):
            Workload(seq=wrong, gbs=1)
    assert Schedule("1f1b") is Schedule.ONE_F_ONE_B
