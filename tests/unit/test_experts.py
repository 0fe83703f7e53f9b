"""Routed experts, latent attention and layers that predict later tokens: counts against the model's own, limits, monotony."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models import compute, experts
from cost_models.blocks import layer_pass
from cost_models.collectives import fabric
from cost_models.problem import Cells, Columns, Problem
from cost_models.recompute import WORK, is_priced, repeated
from cost_models.records import BlockKind, Layout, Mla, Moe, RecordError, normalised
from cost_models.shares import share
from cost_models.stage import price_blocks, price_columns
from planner.readers.models import read_model
from tests.unit.cost_cases import MODEL, problem

MOE = replace(MODEL, moe=Moe(num_experts=16, top_k=2, moe_ffn=1408, shared_ffn=2816, num_dense_layers=2))
PRESETS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "llama3-8b")


def moe_problem(**changes: object) -> Problem:
    return problem(model=MOE, **changes)


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_hold_the_parameters_of_the_model(name: str) -> None:
    whole = problem(model=replace(read_model(name), num_mtp_layers=0))
    params = price_blocks(whole, Cells.of([Layout()])).params[0] @ whole.block_counts
    assert params == whole.model.num_params


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("tp", "ep", "etp"), [(2, 4, 1), (4, 2, 4), (1, 8, 1)])
def test_ranks_hold_every_expert_once(name: str, tp: int, ep: int, etp: int) -> None:
    model = read_model(name)
    if model.moe is None:
        ep, etp = 1, 1
    whole = problem(model=model)
    held = price_blocks(whole, Cells.of([normalised(dp=8, tp=tp, ep=ep, etp=etp)])).memory.params
    layers = model.num_layers - (model.moe.num_dense_layers if model.moe else 0)
    layers += model.num_mtp_layers
    routed = layers * model.moe.num_experts * model.expert_params if model.moe else 0
    assert (held.experts[0] @ whole.block_counts) * ep * etp == pytest.approx(routed, rel=1e-12)


def test_zero_divides_experts_over_what_expert_parallelism_leaves() -> None:
    whole = moe_problem()
    cells = Cells.of(
        [normalised(dp=16, ep=8, zero=1), normalised(dp=16, ep=2, zero=1), normalised(dp=16, ep=8, zero=0)]
    )
    held = price_blocks(whole, cells).memory
    assert cells.expert_shard_group[0].tolist()[:2] == [2, 8]
    assert cells.expert_replica_group[0].tolist() == [1, 1, 2]
    assert held.per_expert_param["optimizer"].tolist() == [6.0, 1.5, 12.0]
    assert held.per_param["optimizer"].tolist() == [0.75, 0.75, 12.0]


def test_expert_groups_lie_inside_the_data_and_tensor_parallel_ranks() -> None:
    cells = Cells.of([normalised(dp=16, tp=4, ep=8, etp=1, zero=1), normalised(dp=16, tp=4, ep=8, etp=4, zero=1)])
    assert [strides.tolist() for strides in cells.expert_strides] == [[1, 1], [1, 4], [8, 32]]
    assert cells.expert_shard_group[0].tolist() == [8, 2]


def test_one_expert_for_every_token_costs_the_products_of_a_dense_layer() -> None:
    alone = replace(MODEL, moe=Moe(num_experts=1, top_k=1, moe_ffn=MODEL.ffn))
    calibration = problem().calibration
    sure = {"experts.efficiency": 1.0, "experts.permute_bytes": 0.0, "launch.moe_layer_s": 0.0, "launch.layer_s": 0.0}
    coefficients = dict(calibration.coefficients)
    for name, number in sure.items():
        coefficients[name] = replace(coefficients[name], value=number)
    calibration = replace(calibration, coefficients=coefficients)
    dense, moe = (problem(model=model, calibration=calibration) for model in (MODEL, alone))
    cells = Cells.of([normalised(dp=32, mbs=2)])
    seconds = []
    for whole, kind in ((dense, BlockKind.DENSE), (moe, BlockKind.MOE)):
        device = whole.cluster.pools[0].kind.device
        rates = compute.rates(device, whole.workload, whole.runtime, whole.calibration)
        sides = layer_pass(whole, rates, share(whole, cells), kind)
        seconds.append([float(side.total.total[0]) for side in sides])
    # router, permutation, and half a tile of rows more
    for dense_s, moe_s in zip(*seconds, strict=True):
        assert dense_s < moe_s < 1.04 * dense_s


def test_more_expert_parallelism_exchanges_more_and_holds_less() -> None:
    whole = moe_problem()
    layouts = [normalised(dp=32, ep=ep, zero=1) for ep in (1, 2, 4, 8, 16)]
    cells = Cells.of(layouts)
    links = fabric(whole.cluster, whole.calibration)
    sent = experts.routed_traffic(whole, experts.exchanges(whole, cells, links, share(whole, cells)), "none")
    assert sent.forward.total[0] == 0
    assert (np.diff(sent.forward.total) > 0).all()
    prices = price_blocks(whole, cells)
    assert (np.diff(prices.params[:, 2]) < 0).all()
    assert (prices.params[:, 1] == prices.params[0, 1]).all()


def test_a_column_of_dense_and_routed_layers_recomputes_from_its_first_layer() -> None:
    whole = moe_problem()
    prices = price_blocks(whole, Cells.of([normalised(dp=16, pp=2)]))
    columns = Columns(
        stage=np.array([0, 1]),
        first=np.array([0, 5]),
        last=np.array([4, 9]),
        recompute_counts=np.array([[1, 0, 3], [0, 2, 2]]),
    )
    priced = price_columns(prices, 0, columns)
    block_s = prices.forward_s[0] + prices.backward_s[0]
    # blocks 0..4: embedding, one dense layer as it is, one dense and two routed layers under full recompute
    expected = block_s[0, 0] + block_s[1, 0] + block_s[1, 2] + 2 * block_s[2, 2]
    assert (priced.forward_s + priced.backward_s)[0] == pytest.approx(expected, rel=1e-12)
    expected = 2 * block_s[2, 1] + 2 * block_s[2, 2] + block_s[3, 0]
    assert (priced.forward_s + priced.backward_s)[1] == pytest.approx(expected, rel=1e-12)


def test_latent_attention_is_dearer_than_its_latents_are_wide() -> None:
    mla = Mla(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    narrow = replace(mla, kv_lora_rank=256, q_lora_rank=768)
    cells = Cells.of([normalised(dp=32), normalised(dp=16, tp=2)])
    wide, less = (price_blocks(problem(model=replace(MODEL, mla=one)), cells) for one in (mla, narrow))
    assert (wide.forward_s[:, 1] > less.forward_s[:, 1]).all()
    assert (wide.activation_bytes[:, 1, 0] > less.activation_bytes[:, 1, 0]).all()


def test_layers_that_look_ahead_are_priced_with_the_head() -> None:
    plain, ahead = (price_blocks(problem(model=replace(MOE, num_mtp_layers=n)), Cells.of([Layout()])) for n in (0, 1))
    more = ahead.forward_s[0, -1] - plain.forward_s[0, -1]
    assert (more > plain.forward_s[0, -1] + plain.forward_s[0, 2, 0]).all()
    assert ahead.params[0, -1] > plain.params[0, -1] + plain.params[0, 2]
    assert (ahead.forward_s[0, :-1] == plain.forward_s[0, :-1]).all()


def test_degrees_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(RecordError, match="ep=32 does not divide the 16 experts"):
        price_blocks(moe_problem(), Cells.of([normalised(dp=32, ep=32)]))
    with pytest.raises(RecordError, match="has no experts; legal ep: 1"):
        price_blocks(problem(), Cells.of([normalised(dp=32, ep=2)]))


@pytest.mark.parametrize("kind", ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "mla_up_proj+mlp"])
def test_recompute_by_module_costs_time_and_saves_memory(kind: str) -> None:
    mla = Mla(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    runtime = replace(problem().runtime, name="megatron", recompute_kinds=("none", kind, "full"))
    prices = price_blocks(problem(model=replace(MOE, mla=mla), runtime=runtime), Cells.of([normalised(dp=16, ep=4)]))
    for layer in (1, 2):
        none, some, full = prices.backward_s[0, layer]
        kept = prices.activation_bytes[0, layer]
        assert none <= some <= full
        assert kept[0] >= kept[1] >= kept[2]
    assert (prices.backward_s[0, 1:3, 1] > prices.backward_s[0, 1:3, 0]).any()


def test_what_is_repeated_is_work_that_there_is() -> None:
    for kind in ("none", "selective", "full", "moe", "mlp", "moe_act", "layernorm", "mla_up_proj", "core_attn"):
        assert set(repeated("megatron", kind).work) <= set(WORK)
    both = repeated("megatron", "mlp+mla_up_proj")
    assert both.work["mlp_up"] == both.work["up_projections"] == 1.0
    assert not is_priced("megatron", "memory-budget")
    with pytest.raises(RecordError, match="known: none, selective, full"):
        repeated("torch", "mlp")


def test_a_device_that_waits_for_launches_exchanges_meanwhile() -> None:
    """With launches: the longer of the launches and of work and exchange, never their sum."""
    whole = moe_problem()
    cells = Cells.of([normalised(dp=32, ep=16, mbs=mbs, zero=1) for mbs in (1, 2, 8)])
    coefficients = dict(whole.calibration.coefficients)
    seconds = {}
    for launch_s in (0.0, 0.05):
        coefficients["launch.moe_layer_s"] = replace(coefficients["launch.moe_layer_s"], value=launch_s)
        calibration = replace(whole.calibration, coefficients=dict(coefficients))
        prices = price_blocks(replace(whole, calibration=calibration), cells)
        seconds[launch_s] = prices.forward_s[:, 2, 0] / prices.slower
    assert (seconds[0.05] >= seconds[0.0]).all()
    assert (seconds[0.05] <= np.maximum(0.05 / 3, seconds[0.0]) * 2**0.25).all()


def test_exchanges_that_are_scheduled_are_seen_less() -> None:
    plain, calibration = replace(problem().runtime, name="megatron"), problem().calibration
    free = replace(calibration.coefficients["launch.moe_layer_s"], value=0.0)
    calibration = replace(calibration, coefficients={**calibration.coefficients, "launch.moe_layer_s": free})
    cells = Cells.of([normalised(dp=32, ep=16, mbs=4, zero=1)])
    seen = [
        price_blocks(moe_problem(runtime=runtime, calibration=calibration), cells).forward_exposed_s[0, 2, 0]
        for runtime in (plain, replace(plain, overlaps_ep=True))
    ]
    assert 0 < seen[1] < 0.5 * seen[0]
