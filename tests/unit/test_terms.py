"""The terms that decide in bad layouts, one at a time: closed forms to 1e-9, and both ends of each limit.

Published runs are tuned: nearly all of their communication is hidden and every shape is large, so nothing of this is tested
by them. What a formula here repeats is written from the sizes of the model, not from the code that it holds.
"""

from dataclasses import replace

import numpy as np
import pytest

from cost_models import compute, experts, traffic
from cost_models.collectives import collective_s
from cost_models.problem import Cells, Problem
from cost_models.records import BlockKind, ContextExchange, Gather, Layout, Schedule, Workload, normalised
from cost_models.shares import share
from cost_models.stage import BlockPrices, ColumnPrices, price_blocks, price_columns, reduce_bytes
from tests.unit.cost_cases import NODE, cluster
from tests.unit.term_cases import MODELS, RUNTIMES, case, even_columns, with_values

EXACT = 1e-9
HIDDEN = ("overlap.tp", "overlap.cp", "overlap.ep", "overlap.fsdp", "overlap.dp", "overlap.p2p")
BARE = {"straggler.per_doubling": 0.0, "launch.layer_s": 0.0, "launch.moe_layer_s": 0.0}
"""No rank is slower, and no device waits for its host: what is exchanged meanwhile would be hidden too."""
NOTHING_HIDES = {**dict.fromkeys(HIDDEN, 0.0), **BARE}
ALL_MAY_HIDE = {**dict.fromkeys(HIDDEN, 1.0), **BARE}
ELEMENT = 2.0
"""Bytes of bf16."""


def open_case(model: str = "dense", runtime: str = "torch", **changes: object) -> Problem:
    """Nothing hides and no rank is slower: what is exposed is all of it."""
    return with_values(case(model, runtime, **changes), NOTHING_HIDES)


def blocks_of(whole: Problem, layout: Layout) -> BlockPrices:
    return price_blocks(whole, Cells.of([layout]))


def columns_of(whole: Problem, layout: Layout) -> ColumnPrices:
    return price_columns(blocks_of(whole, layout), 0, even_columns(whole, layout))


def seconds(prices: BlockPrices, name: str, num_bytes: float, size: int, stride: int) -> float:
    return float(collective_s(prices.fabric, name, num_bytes, size, stride).total)


def infinitely_fast(whole: Problem) -> Problem:
    """All links a million times as fast: latencies remain."""
    faster = {
        place: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 1e6)
        for place, link in (("intra", NODE.intra), ("nic", NODE.nic))
    }
    return replace(whole, cluster=cluster(4, replace(NODE, **faster)))


# --- hops -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (2, 4), (8, 1)])
def test_a_hop_is_one_message_of_the_hidden_state(model: str, tp: int, dp: int) -> None:
    whole, layout = open_case(model), normalised(pp=4, tp=tp, dp=dp, mbs=2)
    prices, columns = blocks_of(whole, layout), columns_of(whole, layout)
    # sequence parallelism: each rank sends its part; 8 ranks a stage, so every hop leaves the node
    num_bytes = 2 * 2048 * 2048 * ELEMENT / tp
    links = prices.fabric
    large = links.launch_s + links.network.step_s + num_bytes / links.network.bytes_per_s
    assert columns.hop_out_s[:-1] == pytest.approx([large] * 3, rel=EXACT)
    assert columns.hop_in_s[1:] == pytest.approx([large] * 3, rel=EXACT)
    assert columns.hop_out_s[-1] == columns.hop_in_s[0] == 0.0


def test_hops_inside_a_node_take_its_links_and_hide_as_far_as_the_runtime_posts_them_early() -> None:
    whole, layout = open_case(), normalised(pp=4, dp=2, mbs=1)
    inside = replace(whole, cluster=cluster(1))
    prices = blocks_of(inside, layout)
    expected = prices.fabric.launch_s + prices.fabric.intra.step_s + 2048 * 2048 * ELEMENT / (450e9 * 0.824)
    assert columns_of(inside, layout).hop_out_s[:-1] == pytest.approx([expected] * 3, rel=EXACT)
    half = with_values(inside, {"overlap.p2p": 0.5})
    assert columns_of(half, layout).hop_out_s[:-1] == pytest.approx([expected / 2] * 3, rel=EXACT)


@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (2, 4), (8, 1)])
def test_without_sequence_parallelism_parts_of_a_hop_are_gathered_where_they_arrive(tp: int, dp: int) -> None:
    runtime = replace(RUNTIMES["torch"], sequence_parallel=False, scatters_hops=True)
    whole, layout = replace(open_case(), runtime=runtime), normalised(pp=4, tp=tp, dp=dp, mbs=2)
    prices, columns = blocks_of(whole, layout), columns_of(whole, layout)
    state = 2 * 2048 * 2048 * ELEMENT
    links = prices.fabric
    sent = links.launch_s + links.network.step_s + state / tp / links.network.bytes_per_s
    gathered = seconds(prices, "all_gather", state, tp, 1)
    assert columns.hop_out_s[:-1] == pytest.approx([sent + gathered] * 3, rel=EXACT)
    undivided = replace(whole, runtime=replace(runtime, scatters_hops=False))
    whole_s = links.launch_s + links.network.step_s + state / links.network.bytes_per_s
    assert columns_of(undivided, layout).hop_out_s[:-1] == pytest.approx([whole_s] * 3, rel=EXACT)


def test_without_bandwidth_limits_a_hop_is_its_latency() -> None:
    whole, layout = infinitely_fast(open_case()), normalised(pp=4, dp=8, mbs=1)
    links = blocks_of(whole, layout).fabric
    # of the protocol for large messages: that for small ones has a ceiling whatever the links carry
    expected = links.launch_s + links.network.step_s
    assert columns_of(whole, layout).hop_out_s[:-1] == pytest.approx([expected] * 3, rel=1e-4)


# --- tensor parallelism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 8, 16])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_reduces_twice_in_each_direction(tp: int, sequence_parallel: bool) -> None:
    runtime = replace(RUNTIMES["torch"], sequence_parallel=sequence_parallel)
    whole = replace(open_case(), runtime=runtime)
    prices = blocks_of(whole, normalised(tp=tp, dp=32 // tp, mbs=2))
    num_bytes = 2 * 2048 * 2048 * ELEMENT
    once = (
        seconds(prices, "all_gather", num_bytes, tp, 1) + seconds(prices, "reduce_scatter", num_bytes, tp, 1)
        if sequence_parallel
        else seconds(prices, "all_reduce", num_bytes, tp, 1)
    )
    assert prices.forward_exposed_s[0, 1, 0] == pytest.approx(2 * once, rel=EXACT)
    assert prices.backward_exposed_s[0, 1, 0] == pytest.approx(2 * once, rel=EXACT)
    again = prices.recompute_kinds.index("full")
    assert 2 * once < prices.backward_exposed_s[0, 1, again] <= 4 * once * (1 + EXACT)


def test_tensor_parallelism_through_the_network_is_far_dearer_than_in_a_node() -> None:
    """Twice as many ranks halve the compute of a layer, and what they exchange takes far longer where they leave the node."""
    prices = price_blocks(open_case(), Cells.of([normalised(tp=tp, dp=32 // tp) for tp in (4, 8, 16)]))
    exposed = prices.forward_exposed_s[:, 1, 0]
    assert exposed[1] < 1.5 * exposed[0]
    assert exposed[2] > 1.6 * exposed[1]
    away = price_blocks(open_case(), Cells.of([normalised(tp=8, dp=4)], ("dp_replicate", "tp", "cp", "dp_shard", "pp")))
    # two members of a group in each node: two shares of its interfaces
    assert away.forward_exposed_s[0, 1, 0] > 2 * exposed[1]


def test_one_rank_exchanges_nothing() -> None:
    for model in MODELS:
        prices = blocks_of(open_case(model), normalised(dp=32))
        assert not prices.forward_exposed_s.any()
        assert not prices.backward_exposed_s.any()


# --- experts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["routed", "routed latent"])
@pytest.mark.parametrize(("ep", "tp", "etp"), [(2, 1, 1), (8, 1, 1), (16, 1, 1), (8, 2, 1), (4, 2, 2)])
def test_experts_exchange_their_rows_there_and_back(model: str, ep: int, tp: int, etp: int) -> None:
    whole = open_case(model, "megatron")
    cells = Cells.of([normalised(dp=32 // tp, tp=tp, ep=ep, etp=etp, mbs=2)])
    links = price_blocks(whole, cells).fabric
    sent = experts.routed_traffic(whole, experts.exchanges(whole, cells, links, share(whole, cells)), "none")
    tokens, top_k, hidden = 2 * 2048, 2, 2048
    exchanged = collective_s(links, "all_to_all", tokens / tp * top_k * hidden * ELEMENT, ep, etp).total
    rows = tokens / tp * top_k * etp * hidden * ELEMENT
    around = (
        collective_s(links, "all_gather", rows, etp, 1).total
        + collective_s(links, "reduce_scatter", rows, etp, 1).total
    )
    assert sent.forward.total[0] == pytest.approx(float(2 * exchanged + around), rel=EXACT)
    assert sent.backward.total[0] == pytest.approx(float(2 * exchanged + around), rel=EXACT)


def test_experts_across_nodes_wait_for_one_share_of_the_interfaces() -> None:
    """8 of 16 ranks of a group are elsewhere: half of the rows of each through its own share, whatever the node's other ranks do."""
    whole = open_case("routed", "megatron")
    cells = Cells.of([normalised(dp=32, ep=16, mbs=8)])
    links = price_blocks(whole, cells).fabric
    sent = experts.routed_traffic(
        whole, experts.exchanges(whole, cells, links, share(whole, cells)), "none"
    ).forward.total[0]
    rows = 8 * 2048 * 2 * 2048 * ELEMENT
    latency = 2 * (links.launch_s + 4 * links.network.step_s)
    assert sent == pytest.approx(2 * rows / 2 / (50e9 * 0.96) + latency, rel=EXACT)


def test_exchanges_of_experts_hide_by_their_share_and_no_more_than_there_is_work() -> None:
    layout = normalised(dp=32, ep=16, mbs=4)
    whole = open_case("routed", "megatron")
    all_ = blocks_of(whole, layout).forward_exposed_s[0, 2, 0]
    some = blocks_of(with_values(whole, {"overlap.ep": 0.25}), layout).forward_exposed_s[0, 2, 0]
    assert some == pytest.approx(0.75 * all_, rel=EXACT)
    slow = replace(NODE, nic=replace(NODE.nic, bandwidth_bytes_per_s=1e8))
    little_work = with_values(replace(whole, cluster=cluster(4, slow)), ALL_MAY_HIDE)
    prices = blocks_of(little_work, layout)
    exposed = blocks_of(replace(whole, cluster=cluster(4, slow)), layout).forward_exposed_s[0, 2, 0]
    assert prices.forward_exposed_s[0, 2, 0] == pytest.approx(exposed - prices.forward_compute_s[0, 2, 0], rel=EXACT)


def test_grouped_products_in_closed_form_and_at_their_limits() -> None:
    whole = case("routed")
    rates = compute.rates(NODE.device, whole.workload, whole.runtime, whole.calibration)
    rates = replace(rates, wave=0.0, inner=0.0)
    roof = rates.matmul_flops_per_s * rates.matmul_efficiency.value * rates.grouped_efficiency.value
    rows, n, k, groups = 2.0**18, 2816.0, 2048.0, 8.0
    found = compute.grouped_matmul_s(rates, rows, n, k, groups).total
    assert found == pytest.approx(2 * (rows + groups * 64) * n * k / roof, rel=EXACT)
    # many groups of few rows: their weights are read, however few rows there are
    few = compute.grouped_matmul_s(rates, 8.0, n, k, 256.0).total
    assert few >= 256 * n * k * ELEMENT / rates.bytes_per_s
    # one group is a product, but for half a tile of rows and its own efficiency
    one = compute.grouped_matmul_s(
        replace(rates, grouped_efficiency=compute.Rate(value=1.0, fitted=False)), rows, n, k, 1.0
    )
    assert one.total == pytest.approx(float(compute.matmul_s(rates, rows + 64, n, k).total), rel=EXACT)
    more = [float(compute.grouped_matmul_s(rates, rows, n, k, g).total) for g in (1.0, 8.0, 64.0, 256.0)]
    assert more == sorted(more)
    over = [
        float(compute.grouped_matmul_s(rates, n, k, rows, g, over_rows=True).total) for g in (1.0, 8.0, 64.0, 256.0)
    ]
    assert over == sorted(over)


# --- small shapes ---------------------------------------------------------------------------------------------------------


def test_small_products_pay_for_a_part_filled_wave_and_for_a_short_inner_dimension() -> None:
    whole = case()
    rates = compute.rates(NODE.device, whole.workload, whole.runtime, whole.calibration)
    m, n, k = 512.0, 256.0, 64.0
    roof = rates.matmul_flops_per_s * rates.matmul_efficiency.value
    factor = 1 + rates.wave * rates.multiprocessors * 128 * 256 / (m * n) + rates.inner / k
    moved = ELEMENT * (m * k + k * n + m * n) / rates.bytes_per_s
    found = float(compute.matmul_s(rates, m, n, k).total)
    assert found == pytest.approx(max(2 * m * n * k / roof * factor, moved), rel=EXACT)
    # tp 8 against 1: an eighth of the products, but not an eighth of the time
    for sides in ((512.0, 3072.0, 2048.0), (2048.0, 2048.0, 256.0)):
        whole_s, part_s = (
            float(compute.matmul_s(rates, sides[0], sides[1] / parts, sides[2]).total) for parts in (1, 8)
        )
        assert part_s > 1.3 * whole_s / 8


def test_a_layer_of_nothing_takes_its_launches_and_a_large_one_hides_them() -> None:
    whole = case()
    launch = compute.rates(NODE.device, whole.workload, whole.runtime, whole.calibration).launch_s.value
    short = replace(whole, workload=Workload(seq=1, gbs=32, precision=whole.workload.precision))
    tiny = replace(short, model=replace(MODELS["dense"], hidden=128, ffn=128, heads=1, kv_heads=1))
    prices = blocks_of(with_values(tiny, {"straggler.per_doubling": 0.0}), normalised(dp=32))
    assert prices.forward_compute_s[0, 1, 0] == pytest.approx(launch / 3, rel=1e-2)
    assert prices.backward_compute_s[0, 1, 0] == pytest.approx(launch * 2 / 3, rel=1e-2)
    without = with_values(whole, {"launch.layer_s": 0.0})
    large = replace(whole, workload=replace(whole.workload, seq=65536))
    free = replace(without, workload=large.workload)
    ratio = blocks_of(large, normalised(dp=32)).forward_compute_s / blocks_of(free, normalised(dp=32)).forward_compute_s
    assert ratio.max() < 1 + 1e-6


# --- gathers of shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("gather", "forward_gathers", "backward_gathers"), [(Gather.USE, 1, 1), (Gather.MICRO, 1, 0)])
def test_shards_are_gathered_for_each_use_and_their_gradients_scattered(
    model: str, gather: Gather, forward_gathers: int, backward_gathers: int
) -> None:
    whole = open_case(model)
    layout = normalised(dp=32, zero=3 if gather is Gather.USE else 2, gather=gather)
    prices = blocks_of(whole, layout)
    # with ep = 1 the experts' shards are divided as all others are
    for kind in range(len(prices.kinds)):
        common, routed = (float(held[0, kind]) for held in (prices.memory.params.common, prices.memory.params.experts))
        parts = [params for params in (common, routed) if params]
        gathered = sum(seconds(prices, "all_gather", params * ELEMENT, 32, 1) for params in parts)
        scattered = sum(seconds(prices, "reduce_scatter", params * reduce_bytes(whole), 32, 1) for params in parts)
        forward, backward = prices.forward_exposed_s[0, kind, 0], prices.backward_exposed_s[0, kind, 0]
        if kind in (0, len(prices.kinds) - 1) and whole.model.tie_embeddings:
            continue
        assert forward == pytest.approx(forward_gathers * gathered, rel=EXACT)
        assert backward == pytest.approx(backward_gathers * gathered + scattered, rel=EXACT)


def test_gathers_hide_behind_their_own_block_and_no_further() -> None:
    layout = normalised(dp=32, zero=3, mbs=1)
    slow = replace(NODE, nic=replace(NODE.nic, bandwidth_bytes_per_s=1e9))
    whole = open_case(cluster=cluster(4, slow))
    everything = blocks_of(whole, layout)
    hidden = blocks_of(with_values(whole, {"overlap.fsdp": 0.5}), layout)
    left = np.maximum(everything.forward_exposed_s - 0.5 * everything.forward_compute_s, 0.0)
    assert hidden.forward_exposed_s == pytest.approx(left, rel=EXACT)
    assert left[0, 1, 0] > 0
    fast = infinitely_fast(with_values(whole, {"overlap.fsdp": 1.0}))
    large = replace(fast, workload=replace(fast.workload, seq=16384))
    assert not blocks_of(large, layout).forward_exposed_s[0, 1].any()


# --- end of the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_nothing_hides_are_one_exchange_of_all_of_them(runtime: str, zero: int) -> None:
    whole, layout = open_case(runtime=runtime), normalised(dp=32, zero=zero)
    prices = blocks_of(whole, layout)
    params = float(prices.params[0] @ whole.block_counts)
    if zero:
        expected = seconds(prices, "reduce_scatter", params * reduce_bytes(whole), 32, 1)
        expected += seconds(prices, "all_gather", params * ELEMENT, 32, 1)
    else:
        expected = seconds(prices, "all_reduce", params * reduce_bytes(whole), 32, 1)
    assert columns_of(whole, layout).sync_s[0] == pytest.approx(expected, rel=EXACT)


def test_the_last_block_s_gradients_are_always_seen() -> None:
    """However much work there is to hide behind: no block's gradients can leave before its backward pass is over."""
    layout = normalised(dp=32, zero=0)
    whole = with_values(case(), ALL_MAY_HIDE)
    long = replace(whole, workload=replace(whole.workload, seq=65536))
    prices = blocks_of(long, layout)
    params = float(prices.params[0] @ long.block_counts)
    exchanged = seconds(prices, "all_reduce", params * reduce_bytes(long), 32, 1)
    assert columns_of(long, layout).sync_s[0] == pytest.approx(exchanged / long.block_counts.sum(), rel=EXACT)
    # and where there is hardly any work, nearly all of them are
    short = replace(whole, workload=replace(whole.workload, seq=1))
    left = columns_of(short, layout)
    assert left.sync_s[0] == pytest.approx(exchanged - float(left.backward_s[0]), rel=EXACT)


def test_copies_and_shards_of_a_hybrid_each_take_their_own_links() -> None:
    whole, layout = open_case(), normalised(dp_replicate=4, dp_shard=8, zero=1)
    prices = blocks_of(whole, layout)
    gradient = float(prices.params[0] @ whole.block_counts) * reduce_bytes(whole)
    expected = (
        seconds(prices, "reduce_scatter", gradient, 8, 1)
        + seconds(prices, "all_reduce", gradient / 8, 4, 8)
        + seconds(prices, "all_gather", float(prices.params[0] @ whole.block_counts) * ELEMENT, 8, 1)
    )
    assert columns_of(whole, layout).sync_s[0] == pytest.approx(expected, rel=EXACT)


# --- context parallelism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 8, 16])
@pytest.mark.parametrize("way", [ContextExchange.GATHER, ContextExchange.RING])
def test_keys_and_values_of_the_whole_sequence_come_around(cp: int, way: ContextExchange) -> None:
    whole = open_case()
    whole = replace(whole, runtime=replace(whole.runtime, context_exchange=way))
    prices = blocks_of(whole, normalised(cp=cp, dp=32 // cp, zero=0))
    num_bytes = 2048 * 2 * 8 * 128 * ELEMENT
    gathered = seconds(prices, "all_gather", num_bytes, cp, 1)
    assert prices.forward_exposed_s[0, 1, 0] == pytest.approx(gathered, rel=EXACT)
    expected = gathered + seconds(prices, "reduce_scatter", num_bytes, cp, 1)
    assert prices.backward_exposed_s[0, 1, 0] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("cp", [2, 8])
def test_an_all_to_all_changes_parts_of_the_sequence_for_heads(cp: int) -> None:
    whole = open_case()
    whole = replace(whole, runtime=replace(whole.runtime, context_exchange=ContextExchange.ALL_TO_ALL))
    prices = blocks_of(whole, normalised(cp=cp, dp=32 // cp, zero=0))
    sent = 2048 / cp * (16 + 8 + 8 + 16) * 128 * ELEMENT
    expected = seconds(prices, "all_to_all", sent, cp, 1)
    assert prices.forward_exposed_s[0, 1, 0] == pytest.approx(expected, rel=EXACT)
    assert prices.backward_exposed_s[0, 1, 0] == pytest.approx(expected, rel=EXACT)
    # each rank sends less, the more there are; keys and values of a gather stay as many
    gathered = blocks_of(open_case(), normalised(cp=8, dp=4, zero=0)).forward_exposed_s[0, 1, 0]
    eight = blocks_of(whole, normalised(cp=8, dp=4, zero=0)).forward_exposed_s[0, 1, 0]
    assert eight < gathered


def test_a_ring_hides_behind_attention_alone() -> None:
    layout = normalised(cp=4, dp=8, zero=0)
    whole = open_case()
    ring = replace(whole, runtime=replace(whole.runtime, context_exchange=ContextExchange.RING))
    hidden = with_values(ring, {"overlap.cp": 1.0})
    long = replace(hidden, workload=replace(hidden.workload, seq=65536))
    assert blocks_of(long, layout).forward_exposed_s[0, 1, 0] == 0.0
    short = blocks_of(hidden, layout).forward_exposed_s[0, 1, 0]
    assert 0.0 < short < blocks_of(ring, layout).forward_exposed_s[0, 1, 0]
    # other ways wait
    gather = with_values(long, {"overlap.cp": 1.0})
    gather = replace(gather, runtime=whole.runtime)
    assert blocks_of(gather, layout).forward_exposed_s[0, 1, 0] > 0.0


def test_every_part_of_traffic_scales_with_its_bytes_once_latency_is_gone() -> None:
    """Twice the micro-batch is twice the traffic of tensor, context and expert parallelism; that of weights stays."""
    whole = open_case("routed", "megatron")
    still = {
        f"{what}.{place}": 0.0 for what in ("link.latency_s", "link.small_latency_s") for place in ("nvlink4", "ib-ndr")
    }
    whole = with_values(whole, {**still, "collective.launch_s": 0.0})
    for degrees in ({"tp": 8, "dp": 4}, {"cp": 4, "dp": 8}, {"ep": 8, "dp": 32}):
        one, two = (
            blocks_of(whole, normalised(mbs=mbs, zero=0, **degrees)).forward_exposed_s[0, 2, 0] for mbs in (1, 2)
        )
        assert two == pytest.approx(2 * one, rel=EXACT), degrees
    one, two = (blocks_of(whole, normalised(mbs=mbs, zero=3, dp=32)) for mbs in (1, 2))
    assert one.forward_exposed_s == pytest.approx(two.forward_exposed_s, rel=EXACT)


def test_a_schedule_that_hides_its_own_hops_is_played_with_whole_ones() -> None:
    layout = normalised(pp=4, vpp=2, dp=8, schedule=Schedule.ZBV)
    hidden = with_values(case(), ALL_MAY_HIDE)
    assert (columns_of(hidden, layout).hop_out_s > 0).any()
    assert not columns_of(hidden, normalised(pp=4, dp=8)).hop_out_s.any()


def test_traffic_of_a_block_has_no_collective_that_is_not_named_here() -> None:
    """Only these modules call collectives for a block; a further one would escape the forms above."""
    whole, cells = open_case(), Cells.of([normalised(tp=8, dp=4)])
    prices = price_blocks(whole, cells)
    part = share(whole, cells)
    calls = traffic.tensor_calls(whole, cells, prices.fabric, part)
    parts = traffic.tensor_traffic(whole, part, calls, BlockKind.DENSE, "none")
    assert prices.forward_exposed_s[0, 1, 0] == pytest.approx(float(parts.forward.total[0]), rel=EXACT)
