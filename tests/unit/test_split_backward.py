"""A backward pass in two pieces: what is in which, what the split costs, what it keeps; and predictions with every schedule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import compute
from cost_models.calibrations import shipped
from cost_models.peaks import memory_report
from cost_models.problem import Cells, Problem
from cost_models.records import (
    SPLIT_BACKWARD,
    V_PLACED,
    Calibration,
    Layout,
    Link,
    Precision,
    RecordError,
    Schedule,
    Workload,
    normalised,
)
from cost_models.schedules import max_held
from cost_models.simulation import simulate
from cost_models.stage import EMBEDDING, HEAD, price_blocks
from cost_models.step import lower_bound_s, objective_s
from planner.decisions import decision_of_layout
from planner.errors import InputError
from planner.predict import predict, simulated
from tests.unit.cost_cases import MODEL, NODE, RUNTIME, cluster, problem

EVERY = replace(
    RUNTIME, name="any", schedules=tuple(Schedule), uneven_stages="as asked", unsharded_gradients_with_pp=False
)
TWO_CHUNKS = [schedule for schedule in Schedule if schedule not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)]


def with_split(calibration: Calibration | None = None, **values: float) -> Calibration:
    """The shipped calibration, but the split's coefficients as said, and no floor of launches."""
    base = calibration or shipped()
    coefficients = dict(base.coefficients)
    for name, value in {"launch": 0.0, **values}.items():
        coefficients[f"schedule.split.{name}"] = replace(coefficients["schedule.split.held"], value=value)
    coefficients["launch.layer_s"] = replace(coefficients["launch.layer_s"], value=1e-9)
    return replace(base, coefficients=coefficients)


def asked(gbs: int = 16, calibration: Calibration | None = None, **changes: object) -> Problem:
    return problem(
        runtime=EVERY,
        cluster=cluster(1),
        workload=Workload(seq=2048, gbs=gbs, precision=Precision.BF16),
        calibration=calibration or shipped(),
        **changes,
    )


def layout_of(schedule: Schedule, pp: int = 4, **changes: object) -> Layout:
    vpp = 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
    return normalised(pp=pp, vpp=vpp, schedule=schedule, **{"tp": 8 // pp, **changes})  # type: ignore[arg-type]


# --- what is in which piece ---------------------------------------------------------------------------------------------


def test_the_pieces_are_the_whole_where_the_split_costs_nothing():
    free = asked(calibration=with_split(weight_grad=1.0, input_grad=1.0))
    prices = price_blocks(free, Cells.of([layout_of(Schedule.ZBV), layout_of(Schedule.ZBV, tp=1, dp=2)]))
    assert prices.split is not None
    both = prices.split.input_grad_compute_s + prices.split.weight_grad_s
    assert both == pytest.approx(prices.backward_compute_s)


def test_weight_gradients_are_the_products_of_that_shape_and_the_adding_up():
    """(n, m) x (m, k) of qkv, output, up with gate, down; and two thirds of the traffic of weights."""
    free = asked(calibration=with_split(weight_grad=1.0, input_grad=1.0))
    prices = price_blocks(free, Cells.of([layout_of(Schedule.ZBV, tp=1, dp=2)]))
    rates, tokens, hidden = prices.rates, 2048, MODEL.hidden
    qkv = (MODEL.heads + 2 * MODEL.kv_heads) * MODEL.head_dim
    shapes = ((qkv, hidden), (hidden, MODEL.heads * MODEL.head_dim), (2 * MODEL.ffn, hidden), (hidden, MODEL.ffn))
    products = sum(float(compute.matmul_s(rates, n, k, tokens).total) for n, k in shapes)
    params = prices.params[0, 1]
    adding = float(compute.moved_s(rates, rates.traffic_bytes, params).total) * 2 / 3
    assert prices.split is not None
    assert prices.split.weight_grad_s[0, 1, 0] == pytest.approx(products + adding)


def test_attention_and_recompute_are_in_the_first_piece():
    free = asked(calibration=with_split(weight_grad=1.0, input_grad=1.0))
    cells = Cells.of([layout_of(Schedule.ZBV)])
    none, full = (price_blocks(free, cells).recompute_kinds.index(kind) for kind in ("none", "full"))
    prices = price_blocks(free, cells)
    assert prices.split is not None
    early, late = prices.split.input_grad_compute_s[0, 1], prices.split.weight_grad_s[0, 1]
    assert late[full] == late[none]
    assert early[full] - early[none] == pytest.approx(
        prices.backward_compute_s[0, 1, full] - prices.backward_compute_s[0, 1, none]
    )
    longer = asked(calibration=with_split(weight_grad=1.0, input_grad=1.0))
    longer = replace(longer, workload=Workload(seq=8192, gbs=4, precision=Precision.BF16))
    more = price_blocks(longer, cells).split
    assert more is not None
    # four times the tokens; attention grows by sixteen and is in the first piece alone
    assert more.weight_grad_s[0, 1, none] < 4.2 * late[none]
    assert more.input_grad_compute_s[0, 1, none] > 4.2 * early[none]


def test_nothing_is_before_the_embedding_and_the_head_has_one_product_in_either_piece():
    prices = price_blocks(
        asked(calibration=with_split(weight_grad=1.0, input_grad=1.0)), Cells.of([layout_of(Schedule.ZBV)])
    )
    split = prices.split
    assert split is not None
    assert split.input_grad_compute_s[0, EMBEDDING, 0] == 0
    assert split.weight_grad_s[0, EMBEDDING, 0] == pytest.approx(prices.backward_compute_s[0, EMBEDDING, 0])
    assert 0.3 < split.weight_grad_s[0, HEAD, 0] / prices.backward_compute_s[0, HEAD, 0] < 0.5


@pytest.mark.parametrize("schedule", Schedule)
def test_only_schedules_that_split_are_priced_in_pieces(schedule):
    step = simulated(asked(), decision_of_layout(asked(), layout_of(schedule)))
    assert (step.prices.split is not None) == (schedule in SPLIT_BACKWARD)


def test_communication_has_the_first_piece_alone_to_hide_behind():
    overlapping = replace(EVERY, overlaps_tp=True)
    cells = Cells.of([layout_of(Schedule.ZBV, pp=2, tp=4)])
    slow = replace(NODE, intra=Link(name="nvlink4", bandwidth_bytes_per_s=2e9))
    prices = price_blocks(replace(asked(), runtime=overlapping, cluster=cluster(1, slow)), cells)
    assert prices.split is not None
    assert (prices.split.input_grad_exposed_s >= prices.backward_exposed_s * (1 - 1e-12)).all()
    assert prices.split.input_grad_exposed_s[0, 1, 0] > prices.backward_exposed_s[0, 1, 0] * 1.01


# --- what the split costs -----------------------------------------------------------------------------------------------


def test_the_shipped_split_costs_something_and_a_small_model_pays_for_launches():
    prices = price_blocks(asked(), Cells.of([layout_of(Schedule.ZBV)]))
    assert prices.split is not None
    over = (prices.split.input_grad_compute_s + prices.split.weight_grad_s)[0] / prices.backward_compute_s[0]
    assert (over > 1.0).all()
    tiny = replace(MODEL, hidden=64, ffn=128, heads=2, kv_heads=2, head_dim=32)
    cells = Cells.of([layout_of(Schedule.ZBV, tp=1, dp=2)])
    costs = {}
    for name in ("any", "torch"):
        one = price_blocks(replace(asked(model=tiny), runtime=replace(EVERY, name=name)), cells)
        assert one.split is not None
        costs[name] = float(
            (one.split.input_grad_compute_s + one.split.weight_grad_s)[0, 1, 0] / one.backward_compute_s[0, 1, 0]
        )
    assert 1.4 < costs["any"] < 1.9
    # measured with torch on tiny layers: a step takes 1.8 to 3 times as long; its backward pass was two thirds
    assert 1.7 < 1 / 3 + 2 / 3 * costs["torch"] < 3.0


def test_a_calibration_without_the_split_is_an_error_that_names_the_coefficient():
    bare = {k: v for k, v in shipped().coefficients.items() if not k.startswith("schedule.split.")}
    old = asked(calibration=replace(shipped(), coefficients=bare))
    assert predict(old, decision_of_layout(old, layout_of(Schedule.INTERLEAVED))).step_s > 0
    with pytest.raises(RecordError, match=r"no coefficient schedule\.split"):
        decision_of_layout(old, layout_of(Schedule.ZBV))


# --- placement ----------------------------------------------------------------------------------------------------------


def test_hops_down_and_up_a_v_are_those_between_the_same_devices_and_the_turn_is_free():
    step = simulated(asked(), decision_of_layout(asked(), layout_of(Schedule.ZBV)))
    hops = step.parts.hop_s
    assert len(hops) == 7
    assert hops[3] == 0
    assert hops.tolist() == hops[::-1].tolist()
    assert (np.delete(hops, 3) > 0).all()


def test_a_v_has_embedding_and_head_on_one_device_which_exchanges_no_tied_weight():
    tied = replace(MODEL, tie_embeddings=True)
    looped, v = (
        simulated(asked(model=tied), decision_of_layout(asked(model=tied), layout_of(schedule)))
        for schedule in (Schedule.INTERLEAVED, Schedule.ZBV)
    )
    assert looped.parts.sync_s[0] > 0
    assert v.parts.sync_s.tolist() == [0.0] * 4


@pytest.mark.parametrize("schedule", TWO_CHUNKS)
def test_stages_lie_on_their_devices(schedule):
    decision = decision_of_layout(asked(), layout_of(schedule))
    devices = [stage.device for stage in decision.stages]
    assert devices == ([0, 1, 2, 3, 3, 2, 1, 0] if schedule in V_PLACED else [0, 1, 2, 3, 0, 1, 2, 3])


@pytest.mark.parametrize(("num_layers", "counts"), [(8, [2, 1, 1, 1, 1, 1, 1, 2]), (6, [1] * 8), (11, None), (5, None)])
def test_layers_that_do_not_divide_are_balanced(num_layers, counts):
    uneven = asked(model=replace(MODEL, num_layers=num_layers))
    if num_layers == 5:
        with pytest.raises(InputError, match=r"STAGES_GT_BLOCKS: .* only 7 blocks"):
            decision_of_layout(uneven, layout_of(Schedule.ZBV))
        return
    decision = decision_of_layout(uneven, layout_of(Schedule.ZBV))
    found = [last - first + 1 for first, last in (stage.blocks for stage in decision.stages)]
    assert sum(found) == num_layers + 2
    assert counts is None or found == counts
    assert max(found) - min(found) <= 2


# --- memory -------------------------------------------------------------------------------------------------------------


def activations(schedule: Schedule, pp: int, recompute: str = "none", **values: float) -> float:
    """Bytes of activations on the second device, which holds neither embedding nor head."""
    one = asked(gbs=32, calibration=with_split(**values) if values else None)
    report = memory_report(one, decision_of_layout(one, layout_of(schedule, pp=pp, recompute=recompute)))
    return report[1].kinds["activations"]


def test_activations_follow_the_vectors_in_flight():
    """V-min keeps a third of ZBV's, V-half a half, each and a constant."""
    kept = {schedule: activations(schedule, 4) for schedule in (Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN)}
    assert kept[Schedule.V_HALF] == pytest.approx(6 / 8 * kept[Schedule.ZBV])
    assert kept[Schedule.V_MIN] == pytest.approx(4 / 8 * kept[Schedule.ZBV])


def test_what_is_kept_after_the_first_piece_is_the_runtimes_share():
    all_, half = (activations(Schedule.INTERLEAVED_ZB, 4, held=share) for share in (1.0, 0.5))
    assert half < all_


def test_recompute_keeps_its_inputs_alive_for_the_second_piece():
    whole = activations(Schedule.INTERLEAVED, 4, "full") / activations(Schedule.INTERLEAVED, 4, "none")
    split = activations(Schedule.INTERLEAVED_ZB, 4, "full") / activations(Schedule.INTERLEAVED_ZB, 4, "none")
    assert whole < 0.2
    assert split > whole


def test_the_peak_says_what_waits_for_what():
    one = asked(gbs=32)
    decision = decision_of_layout(one, layout_of(Schedule.INTERLEAVED_ZB, recompute="full"))
    told = [device.peak_operation for device in memory_report(one, decision)]
    assert any("before their weight gradients" in text for text in told)
    pipeline = simulated(one, decision).pipeline
    assert all(len(vector) == 4 for vectors in max_held(pipeline) for vector in vectors)


# --- predictions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_schedule_is_predicted(schedule, recompute):
    decision = decision_of_layout(asked(), layout_of(schedule, recompute=recompute))
    predicted = predict(asked(), decision)
    parts = predicted.parts
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s + parts.other_s
    assert total == pytest.approx(predicted.step_s)
    assert min(parts.compute_s, parts.exposed_communication_s, parts.bubble_s) >= 0
    step = simulated(asked(), decision)
    times = step.parts.times()
    assert lower_bound_s(step.pipeline, times) <= predicted.step_s * (1 + 1e-12)
    if schedule in SPLIT_BACKWARD or schedule is Schedule.LOOPED_BFS:
        assert objective_s(step.pipeline, times) == predicted.step_s
    assert simulate(step.pipeline, times).step_s == predicted.step_s


@settings(max_examples=25)
@given(st.sampled_from(list(Schedule)), st.floats(1e9, 1e12), st.floats(1.01, 10.0))
def test_more_bandwidth_is_never_slower(schedule, bandwidth, more):
    def step_s(bytes_per_s: float) -> float:
        kind = replace(NODE, intra=Link(name="nvlink4", bandwidth_bytes_per_s=bytes_per_s))
        one = replace(asked(), cluster=cluster(1, kind))
        return simulated(one, decision_of_layout(one, layout_of(schedule))).simulation.step_s

    assert step_s(bandwidth * more) <= step_s(bandwidth) * (1 + 1e-9)
