"""Prices of stages: additive in blocks, consistent between one cell and many, monotone in the machine."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import stage
from cost_models.intervals import pairwise_error, step_interval_s
from cost_models.problem import RANK_ORDER, Cells, Columns, Problem
from cost_models.records import (
    Cluster,
    Curve,
    Layout,
    Link,
    Pool,
    Precision,
    RecordError,
    Schedule,
    Workload,
    normalised,
)
from cost_models.stage import links_needed, operations_needed, price_blocks, price_columns
from tests.unit.cost_cases import CPU, DEVICE, MODEL, NODE, RUNTIME, cluster, problem

SECONDS = ("forward_compute_s", "backward_compute_s", "forward_exposed_s", "backward_exposed_s")
TAILS = ("sync_s", "optimizer_s", "constant_s")


def layouts() -> list[Layout]:
    """A spread of legal layouts on 32 devices."""
    found = []
    for tp in (1, 2, 8):
        for pp in (1, 2, 4):
            for zero in (0, 1, 2, 3):
                for mbs in (1, 2):
                    for replicas in (1, 2):
                        dp = 32 // tp // pp
                        shard = dp if zero else 1
                        if replicas > 1 and (not zero or shard < 2):
                            continue
                        dps = shard // replicas
                        found.append(
                            normalised(
                                dp_replicate=dp // dps if zero else dp, dp_shard=dps, zero=zero, tp=tp, pp=pp, mbs=mbs
                            )
                        )
    return found


def columns_of(layout: Layout, num_layers: int = 8, kind: int = 0) -> Columns:
    stages = layout.num_virtual_stages
    each = num_layers // stages
    edges = np.arange(stages + 1) * each + 1
    edges[0], edges[-1] = 0, num_layers + 2
    counts = np.zeros((stages, 3), dtype=np.int64)
    counts[:, kind] = each
    return Columns(stage=np.arange(stages), first=edges[:-1], last=edges[1:] - 1, recompute_counts=counts)


def step_s(whole: Problem, layout: Layout) -> float:
    prices = price_columns(price_blocks(whole, Cells.of([layout])), 0, columns_of(layout))
    micro = layout.num_micro_batches(whole.workload.gbs)
    return float((micro - 1) * prices.t_s.max() + prices.t_s.sum() + prices.tail_s.max())


def test_many_cells_cost_what_each_costs_alone() -> None:
    whole, every = problem(), layouts()
    together = price_blocks(whole, Cells.of(every))
    for index in range(0, len(every), 5):
        alone = price_blocks(whole, Cells.of([every[index]]))
        for name in (*SECONDS, "activation_bytes", "params", "hop_bytes"):
            assert getattr(together, name)[index] == pytest.approx(getattr(alone, name)[0], rel=1e-12), name
        priced = [price_columns(prices, at, columns_of(every[index])) for prices, at in ((together, index), (alone, 0))]
        assert priced[0].t_s == pytest.approx(priced[1].t_s, rel=1e-12)
        assert priced[0].tail_s == pytest.approx(priced[1].tail_s, rel=1e-12)
        assert priced[0].fixed_bytes == pytest.approx(priced[1].fixed_bytes, rel=1e-12)


def test_everything_costs_something_and_is_finite() -> None:
    whole, every = problem(), layouts()
    prices = price_blocks(whole, Cells.of(every))
    for name in ("forward_compute_s", "backward_compute_s", "activation_bytes", "params"):
        values = getattr(prices, name)
        assert ((values > 0) & np.isfinite(values)).all(), name
    for name in ("forward_exposed_s", "backward_exposed_s"):
        assert (getattr(prices, name) >= 0).all(), name
    for index, layout in enumerate(every):
        priced = price_columns(prices, index, columns_of(layout))
        assert (priced.optimizer_s > 0).all()
        assert (priced.constant_s > 0).all()
        assert (priced.sync_s >= 0).all()
        if layout.dp > 1 and layout.zero < 2:
            assert (priced.sync_s > 0).all()


def test_a_column_is_the_sum_of_its_blocks() -> None:
    layout = normalised(dp=8, tp=2, pp=2)
    prices = price_blocks(problem(), Cells.of([layout]))
    counts = np.array([[1, 2, 1], [0, 0, 4]])
    columns = Columns(stage=np.array([0, 1]), first=np.array([0, 5]), last=np.array([4, 9]), recompute_counts=counts)
    priced = price_columns(prices, 0, columns)
    for name in SECONDS:
        block = getattr(prices, name)[0]
        expected = [
            block[stage.EMBEDDING, 0] + counts[0] @ block[stage.LAYERS][0],
            block[stage.HEAD, 0] + counts[1] @ block[stage.LAYERS][0],
        ]
        assert getattr(priced, name) == pytest.approx(expected)
    assert priced.t_s == pytest.approx(priced.forward_s + priced.backward_s + priced.hop_in_s + priced.hop_out_s)
    assert priced.tail_s == pytest.approx(sum(getattr(priced, name) for name in TAILS))


def test_seconds_by_what_they_rest_on_sum_to_the_seconds() -> None:
    for layout in layouts()[::7]:
        prices = price_blocks(problem(), Cells.of([layout]))
        total = sum(getattr(prices, name) for name in SECONDS)
        assert prices.basis_s(0).sum(axis=-1) == pytest.approx(total[0])
        priced = price_columns(prices, 0, columns_of(layout))
        assert priced.basis_s.sum(axis=1) == pytest.approx(priced.forward_s + priced.backward_s)
        assert priced.tail_basis_s.sum(axis=1) == pytest.approx(priced.tail_s)


@settings(max_examples=40)
@given(
    st.sampled_from(layouts()),
    st.sampled_from(["intra", "nic", "memory", "matmul"]),
    st.floats(min_value=1.0, max_value=10.0),
)
def test_a_better_machine_is_never_slower(layout: Layout, part: str, factor: float) -> None:
    kind = NODE
    if part in ("intra", "nic"):
        link = getattr(kind, part)
        kind = replace(kind, **{part: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)})
    elif part == "memory":
        device = replace(DEVICE, memory_bandwidth_bytes_per_s=DEVICE.memory_bandwidth_bytes_per_s * factor)
        kind = replace(kind, device=device)
    else:
        roofs = {name: rate * factor for name, rate in DEVICE.matmul_flops_per_s.items()}
        kind = replace(kind, device=replace(DEVICE, matmul_flops_per_s=roofs))
    better = step_s(problem(cluster=cluster(4, kind)), layout)
    assert better <= step_s(problem(), layout) * (1 + 1e-9)


def test_more_memory_is_never_worse() -> None:
    whole = problem()
    larger = replace(NODE, device=replace(DEVICE, memory_bytes=2 * DEVICE.memory_bytes))
    assert stage.usable_bytes(problem(cluster=cluster(4, larger))) > stage.usable_bytes(whole)
    for layout in layouts()[::11]:
        assert step_s(problem(cluster=cluster(4, larger)), layout) == step_s(whole, layout)


def test_relabelled_nodes_cost_the_same() -> None:
    halves = Cluster(name="c", pools=(Pool(kind=replace(NODE, name="other name"), num_nodes=4),))
    for layout in layouts()[::11]:
        assert step_s(problem(cluster=halves), layout) == step_s(problem(), layout)


def test_rank_order_decides_who_uses_the_network() -> None:
    layout = normalised(dp=4, tp=8)
    inner = price_blocks(problem(), Cells.of([layout]))
    outer = price_blocks(problem(), Cells.of([layout], ("dp_replicate", "cp", "dp_shard", "tp", "pp")))
    assert outer.forward_exposed_s[0, 1, 0] > 2 * inner.forward_exposed_s[0, 1, 0]
    with pytest.raises(RecordError, match="each of tp, cp, dp_shard, dp_replicate, pp once"):
        Cells.of([layout], ("tp", "pp"))


def test_recompute_costs_time() -> None:
    prices = price_blocks(problem(), Cells.of([normalised(dp=4, tp=8)]))
    backward, forward = prices.backward_s[0, 1], prices.forward_compute_s[0, 1]
    assert backward[0] < backward[1] < backward[2]
    compute_s = prices.backward_compute_s[0, 1]
    # torch stops before the last product, a quarter of this layer's
    assert 0.6 * forward[0] < compute_s[2] - compute_s[0] < 0.95 * forward[0]
    other = price_blocks(problem(runtime=replace(RUNTIME, name="other")), Cells.of([normalised(dp=4, tp=8)]))
    compute_s, forward = other.backward_compute_s[0, 1], other.forward_compute_s[0, 1]
    assert compute_s[2] == pytest.approx(compute_s[0] + forward[0])
    assert (forward == forward[0]).all()


def test_gathering_at_each_use_costs_more_traffic_than_once_a_micro_batch() -> None:
    slow = replace(NODE, nic=replace(NODE.nic, bandwidth_bytes_per_s=1e9))
    whole = problem(cluster=cluster(4, slow), runtime=replace(RUNTIME, unsharded_gradients_with_pp=False))
    cells = Cells.of([normalised(dp=32, zero=0), normalised(dp=32, zero=2), normalised(dp=32, zero=3)])
    exposed = price_blocks(whole, cells).backward_exposed_s[:, 1, 0]
    assert exposed[0] == 0
    assert exposed[0] < exposed[1] < exposed[2]
    forward = price_blocks(whole, cells).forward_exposed_s[:, 1, 0]
    assert forward[1] == pytest.approx(forward[2])


def test_torch_pipelines_exchange_shards_once_a_step() -> None:
    layout = normalised(dp=8, tp=2, pp=2, zero=3)
    late = price_columns(price_blocks(problem(), Cells.of([layout])), 0, columns_of(layout))
    other = problem(runtime=replace(RUNTIME, unsharded_gradients_with_pp=False))
    prices = price_blocks(other, Cells.of([layout]))
    each = price_columns(prices, 0, columns_of(layout))
    assert (late.sync_s > each.sync_s).all()


def test_hops_only_between_devices() -> None:
    layout = normalised(dp=8, pp=4, vpp=2, schedule=Schedule.INTERLEAVED)
    priced = price_columns(price_blocks(problem(), Cells.of([layout])), 0, columns_of(layout))
    assert priced.hop_in_s[0] == 0
    assert priced.hop_out_s[-1] == 0
    assert (priced.hop_in_s[1:] == priced.hop_out_s[:-1]).all()
    assert (priced.hop_in_s[1:] > 0).all()
    alone = normalised(dp=32)
    flat = price_columns(price_blocks(problem(), Cells.of([alone])), 0, columns_of(alone))
    assert flat.hop_in_s.tolist() == flat.hop_out_s.tolist() == [0.0]


def test_what_a_device_has_once_is_spread_over_its_columns() -> None:
    one, two = normalised(dp=8, pp=4), normalised(dp=8, pp=4, vpp=2, schedule=Schedule.INTERLEAVED)
    sums = []
    for layout in (one, two):
        priced = price_columns(price_blocks(problem(), Cells.of([layout])), 0, columns_of(layout))
        sums.append(priced.constant_s.reshape(layout.vpp, layout.pp).sum(axis=0))
    assert sums[0] == pytest.approx(sums[1])


def test_measured_blocks_beat_the_model_and_raise_the_measured_share() -> None:
    kind = replace(NODE, device=CPU, gpus_per_node=4)
    workload = Workload(seq=128, gbs=16, precision=Precision.FP32)
    whole = problem(cluster=cluster(1, kind), workload=workload)
    wanted = operations_needed(whole, [normalised(dp=2, tp=2)])
    assert wanted[0].startswith("layer/fp32/1x128x2048/8x4x128/2816g/")
    assert {key.split("/")[0] for key in wanted} == {"layer", "head", "embedding"}
    measured = replace(whole, calibration=replace(whole.calibration, operations_s=dict.fromkeys(wanted, 0.25)))
    prices = price_blocks(measured, Cells.of([normalised(dp=2, tp=2)]))
    assert prices.forward_compute_s[0, :, 0] == pytest.approx([0.25] * 3)
    assert prices.backward_compute_s[0, :, 0] == pytest.approx([0.25] * 3)
    assert 0.25 < prices.backward_compute_s[0, 1, 2] < 0.5
    assert (prices.basis_s(0)[:, 0, 0] >= 0.5 * 0.999).all()
    assert operations_needed(measured, [normalised(dp=2, tp=2)]) == ()


def test_products_and_attention_are_worth_measuring_on_an_accelerator() -> None:
    wanted = operations_needed(problem(), [normalised(dp=32), normalised(dp=4, tp=8)])
    assert {key.split("/")[0] for key in wanted} == {"matmul", "attention"}
    assert "matmul/bf16/2048x11264x2048" in wanted
    assert "attention/bf16/1x2048x16x8x128/forward" in wanted
    first = wanted[0]
    measured = problem(calibration=replace(problem().calibration, operations_s={first: 1.0}))
    layer = price_blocks(measured, Cells.of([normalised(dp=32)])).basis_s(0)[:, 0, 0]
    assert layer.max() >= 1.0


def test_links_worth_measuring_vanish_once_measured() -> None:
    layout = normalised(dp=4, tp=8)
    wanted = links_needed(problem(), [layout])
    assert any(key.startswith("all_reduce/4/") and key.endswith("/ib-ndr") for key in wanted)
    curves = {}
    for key in wanted:
        kind, ranks, _, name = key.split("/")
        curves[f"{kind}/{ranks}/{name}"] = Curve(
            sizes_bytes=(1.0, 1e9), seconds=(1e-5, 1e-2), source="a test", date="2026-11-30"
        )
    calibration = replace(problem().calibration, curves=curves)
    assert links_needed(problem(calibration=calibration), [layout]) == ()


def test_more_ranks_and_table_values_widen_the_interval() -> None:
    whole = problem()

    def width(world: int, **basis: float) -> float:
        low, high = step_interval_s(whole, 1.0, world=world, basis=basis)
        assert low < 1.0 < high
        assert low * high == pytest.approx(1.0)
        return math.log(high / low)

    assert width(8, calibrated=1.0) < width(1024, calibrated=1.0)
    assert width(8, calibrated=1.0) < width(8, calibrated=0.5, table=0.5) < width(8, table=1.0)
    assert width(8, measured=1.0) <= width(8, calibrated=1.0)
    assert 0 < pairwise_error(whole) < 0.5


def test_counts_of_recompute_must_sum_to_the_layers() -> None:
    prices = price_blocks(problem(), Cells.of([normalised(dp=32)]))
    wrong = Columns(
        stage=np.array([0]), first=np.array([0]), last=np.array([9]), recompute_counts=np.array([[3, 0, 0]])
    )
    with pytest.raises(RecordError, match=r"recompute counts \[3, 0, 0\] of blocks 0\.\.9 do not sum to the 8 layers"):
        price_columns(prices, 0, wrong)


def test_cells_are_layouts_and_back() -> None:
    every = layouts()
    cells = Cells.of(every)
    assert [cells.layout(index) for index in range(len(cells))] == every
    assert cells.world.tolist() == [layout.world for layout in every]
    assert cells.num_micro_batches(64).tolist() == [layout.num_micro_batches(64) for layout in every]
    with pytest.raises(RecordError, match=r"gbs=65 is not divisible by dp·mbs="):
        cells.num_micro_batches(65)


SHAPED_STEPS_S = {  # measured: torch 2.13, gloo, 11.0 MiB of parameters, four processes, forward and backward
    "DDP": (normalised(dp=4), RANK_ORDER, 1.486),
    "ZeRO 2": (normalised(dp=4, zero=2), RANK_ORDER, 2.182),
    "ZeRO 3": (normalised(dp=4, zero=3), RANK_ORDER, 2.756),
    "HSDP, shards in the fast pair": (normalised(dp_replicate=2, dp_shard=2, zero=3), RANK_ORDER, 0.895),
    "HSDP, shards across the slow link": (
        normalised(dp_replicate=2, dp_shard=2, zero=3),
        ("tp", "cp", "dp_replicate", "dp_shard", "pp"),
        2.374,
    ),
}


def test_data_parallel_steps_over_shaped_links_come_in_the_measured_order() -> None:
    """Pairs (0, 1) and (2, 3) at 1 Gbit/s, 100 Mbit/s between them. Plans more than 10% apart keep their order; those
    that move everything in one ring are right to 12% (TCP, the rest of the step)."""
    kind = replace(
        NODE,
        device=CPU,
        gpus_per_node=2,
        intra=Link(name="veth-fast", bandwidth_bytes_per_s=125e6),
        nic=Link(name="veth-slow", bandwidth_bytes_per_s=12.5e6),
        num_nics=2,
    )
    model = replace(MODEL, num_layers=2, hidden=256, ffn=688, heads=4, kv_heads=4, head_dim=64, vocab=2048)
    model = replace(model, vocab=round((11.0 * 2**20 / 4 - 2 * model.block_params(1)) / 2 / 256))
    calibration = problem().calibration
    ideal = {name: replace(calibration.coefficients["link.efficiency.network"], value=1.0) for name in _EFFICIENCIES}
    whole = problem(
        model=model,
        cluster=cluster(2, kind),
        workload=Workload(seq=16, gbs=4, precision=Precision.FP32),
        calibration=replace(calibration, coefficients={**calibration.coefficients, **ideal}),
    )
    predicted = {}
    for name, (layout, order, measured_s) in SHAPED_STEPS_S.items():
        priced = price_columns(price_blocks(whole, Cells.of([layout], order)), 0, columns_of(layout, 2))
        predicted[name] = float(priced.forward_exposed_s[0] + priced.backward_exposed_s[0] + priced.sync_s[0])
        if "HSDP" not in name:
            assert predicted[name] == pytest.approx(measured_s, rel=0.12), name
    for one, (_, _, first_s) in SHAPED_STEPS_S.items():
        for other, (_, _, second_s) in SHAPED_STEPS_S.items():
            if first_s * 1.1 < second_s:
                assert predicted[one] < predicted[other], (one, other)


_EFFICIENCIES = ("link.efficiency.veth-fast", "link.efficiency.veth-slow")


def test_tensor_parallelism_hides_behind_products_only_inside_a_fast_domain() -> None:
    """What overlaps it writes straight into the memory of the other ranks: over a network nothing hides."""
    overlapping, plain = problem(runtime=replace(RUNTIME, overlaps_tp=True)), problem()
    cells = Cells.of([normalised(tp=tp, dp=32 // tp) for tp in (8, 16)])
    hidden, open_ = (price_blocks(one, cells).forward_exposed_s[:, 1, 0] for one in (overlapping, plain))
    assert 0.0 <= hidden[0] < open_[0]
    assert hidden[1] == open_[1] > 0.0
