"""Chains of unlike layers: parameters, FLOPs, prices, hops, laws; each beside what a plain model or a closed form says."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cost_cases import MODEL, RUNTIME, cluster, problem

import cost_models.problem as shapes
from cost_models import blocks, compute
from cost_models.facts import facts_of_model
from cost_models.problem import Cells, Columns, column_shape
from cost_models.records import (
    LayerGroup,
    Model,
    Moe,
    Norm,
    PlanRequest,
    RecordError,
    Stage,
    dumps,
    loads,
    normalised,
    to_json,
)
from cost_models.shares import layer_share, share
from cost_models.stage import BlockPrices, memory_report, operations_needed, price_blocks, price_columns
from planner.anchor import anchor
from planner.choose import choose
from planner.decisions import decision_of, decision_of_stages
from planner.errors import InputError
from planner.readers.models import model_from_facts
from planner.readers.pins import parse_pins

VISION = LayerGroup(
    name="vision",
    count=24,
    hidden=1024,
    ffn=4096,
    heads=16,
    kv_heads=16,
    head_dim=64,
    gated_mlp=False,
    causal=False,
    tokens=577,
    linear_bias=True,
    qkv_bias=True,
    norm=Norm.LAYERNORM,
)
PATCHES = LayerGroup(name="patches", projection=(588, 1024), tokens=577, other_params=577 * 1024 + 1024 + 4 * 1024)
PROJECTOR = LayerGroup(name="projector", projection=(1024, 4096, 4096), tokens=576, linear_bias=True)
LLAVA = Model(
    name="llava-1.5-7b",
    num_layers=58,
    hidden=4096,
    ffn=11008,
    heads=32,
    kv_heads=32,
    head_dim=128,
    vocab=32064,
    layer_groups=(PATCHES, VISION, PROJECTOR, LayerGroup(name="language", count=32)),
)
ROUTED = replace(MODEL, name="routed", moe=Moe(num_experts=8, top_k=2, moe_ffn=1408))
SPLIT = (LayerGroup(count=3), LayerGroup(count=1, hidden=2048, window=0), LayerGroup(count=4, heads=16))
"""The plain model's eight layers in three groups that say nothing new."""
PRICES = (
    "forward_compute_s",
    "backward_compute_s",
    "forward_exposed_s",
    "backward_exposed_s",
    "distinct_basis_s",
    "activation_bytes",
)
CELLS = Cells.of([normalised(dp=4, tp=4, pp=2, mbs=2), normalised(dp=8, zero=3, pp=4), normalised(tp=2, cp=2)])


def _chain_of(*sizes: int) -> Model:
    """Layers that differ in their MLP alone, one of each size."""
    groups = tuple(LayerGroup(ffn=size) for size in sizes)
    return replace(MODEL, name="chain", num_layers=len(sizes), layer_groups=groups)


def _columns(first: list[int], last: list[int], counts: list[list[int]]) -> Columns:
    return Columns(
        stage=np.arange(len(first)), first=np.array(first), last=np.array(last), recompute_counts=np.array(counts)
    )


# --- the record -----------------------------------------------------------------------------------------------------------


def test_parameters_of_a_published_multimodal_model():
    # llava-hf/llava-1.5-7b-hf: "total parameters" of its safetensors index's header
    assert LLAVA.num_params == 7_063_427_072
    patches, vision, projector, language = LLAVA.layer_kinds
    assert patches.params == 588 * 1024 + 577 * 1024 + 1024 + 4 * 1024
    assert vision.params == 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    assert projector.params == 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert language.params == 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096


def test_flops_of_a_token_count_a_tower_as_often_as_a_sample_has_its_tokens():
    seq, kinds = 2048, LLAVA.layer_kinds
    text = 6 * (32 * kinds[3].params + 4096 + 4096 * 32064) + 32 * 6 * seq * 2 * 4096
    tower = 577 * 24 * (6 * kinds[1].params + 6 * 577 * 2 * 1024) + 577 * 6 * 588 * 1024
    joined = 576 * 6 * kinds[2].params
    assert LLAVA.model_flops_per_token(seq) == pytest.approx(text + (tower + joined) / seq, rel=1e-12)


def test_alternating_layers_are_the_sum_of_both():
    pairs = tuple(LayerGroup(experts=bool(number % 2)) for number in range(8))
    mixed = replace(ROUTED, layer_groups=pairs)
    leading = replace(ROUTED, moe=replace(ROUTED.moe, num_dense_layers=4))
    assert mixed.num_params == leading.num_params
    assert mixed.active_params == leading.active_params
    assert mixed.model_flops_per_token(4096) == leading.model_flops_per_token(4096)
    assert [mixed.block_kind(block).value for block in range(1, 5)] == ["dense", "moe", "dense", "moe"]
    dense, routed = problem(model=MODEL), problem(model=ROUTED)
    prices = [price_blocks(one, CELLS) for one in (problem(model=mixed), dense, routed)]
    for name in PRICES:
        both, plain, experts = (getattr(one, name) for one in prices)
        np.testing.assert_allclose(both[:, 1], plain[:, 1], rtol=1e-12)
        np.testing.assert_allclose(both[:, 2], experts[:, 1], rtol=1e-12)


def test_a_model_without_groups_is_written_as_before_and_one_with_them_reads_back_equal():
    assert not {"layer_groups", "causal"} & set(to_json(MODEL))
    assert loads(Model, dumps(LLAVA)) == LLAVA
    assert to_json(LLAVA)["layer_groups"][3] == {"count": 32, "name": "language"}
    again = pickle.loads(pickle.dumps(LLAVA))
    assert again == LLAVA
    assert again.layer_runs == LLAVA.layer_runs == ((0, 1), (1, 24), (2, 1), (3, 32))


def test_a_request_need_not_count_the_layers():
    said = to_json(LLAVA)
    del said["num_layers"]
    assert model_from_facts(said) == LLAVA


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((LayerGroup(count=7),), "num_layers=8, but the groups of the chain have 7 layers in all"),
        ((LayerGroup(count=7), LayerGroup(hidden=1024)), r"hidden=1024, and 2048 comes in.*projection: \[2048, 1024\]"),
        ((LayerGroup(count=7), LayerGroup(projection=(2048, 1024))), "the chain ends 1024 wide on the text"),
        ((LayerGroup(count=8, tokens=64),), "the chain ends 2048 wide on tokens of its own"),
        ((LayerGroup(count=8, experts=True),), r"layer_groups\[0\].experts=true, but the model has no moe"),
        ((LayerGroup(count=8, latent=True),), "the model has no mla"),
        (
            (LayerGroup(count=8, heads=12, kv_heads=5, name="odd"),),
            "group 'odd' of the chain: heads=12 is not divisible",
        ),
    ],
)
def test_a_chain_that_breaks(groups, says):
    with pytest.raises(RecordError, match=says):
        replace(MODEL, layer_groups=groups)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"count": 0}, "count=0 of a group of layers: a whole number from 1"),
        ({"name": "v", "tokens": 0}, "tokens=0 of group 'v': a whole number from 1"),
        ({"projection": (8,)}, r"projection=\[8\] of a group of layers: two widths"),
        ({"projection": (8, 8), "count": 2}, "a projector is one block"),
        ({"projection": (8, 8), "heads": 2}, "heads of a group of layers: a projector has no attention"),
        ({"other_params": 4}, "only a projector has any"),
    ],
)
def test_a_group_that_says_too_much(fields, says):
    with pytest.raises(RecordError, match=says):
        LayerGroup(**fields)


def test_leading_dense_layers_and_a_chain_are_two_ways_to_say_one_thing():
    moe = replace(ROUTED.moe, num_dense_layers=2)
    with pytest.raises(RecordError, match=r"num_dense_layers=2 beside a chain.*leave it at 0"):
        replace(ROUTED, moe=moe, layer_groups=(LayerGroup(count=8),))


# --- prices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [MODEL, ROUTED])
def test_a_chain_that_says_nothing_new_costs_the_same(plain):
    one, other = (problem(model=model) for model in (plain, replace(plain, layer_groups=SPLIT)))
    assert other.model.num_params == plain.num_params
    assert other.model.model_flops_per_token(2048) == plain.model_flops_per_token(2048)
    columns = _columns([0, 5], [4, 9], [[2, 1, 1], [0, 3, 1]])
    both: list[BlockPrices] = [price_blocks(whole, CELLS) for whole in (one, other)]
    for name in PRICES:
        np.testing.assert_allclose(getattr(both[1], name), getattr(both[0], name), rtol=1e-12)
    priced = [price_columns(prices, 0, columns) for prices in both]
    for name in ("t_s", "tail_s", "hop_in_s", "hop_out_s", "fixed_bytes", "activation_bytes"):
        np.testing.assert_allclose(getattr(priced[1], name), getattr(priced[0], name), rtol=1e-12)
    assert operations_needed(one, [normalised(tp=2)]) == operations_needed(other, [normalised(tp=2)])


def test_each_layer_of_a_chain_costs_what_it_costs_alone():
    sizes = (4096, 8192, 5632, 8192)
    chain = price_blocks(problem(model=_chain_of(*sizes)), CELLS)
    for place, size in enumerate(dict.fromkeys(sizes)):
        alone = price_blocks(problem(model=replace(MODEL, ffn=size)), CELLS)
        for name in PRICES:
            np.testing.assert_allclose(getattr(chain, name)[:, 1 + place], getattr(alone, name)[:, 1], rtol=1e-12)
    columns = _columns([0, 2], [1, 5], [[1, 0, 0], [1, 1, 1]])
    priced = price_columns(chain, 0, columns)
    # the second column: blocks 2, 3, 4 of 8192, 5632, 8192 under none, selective, full, and the head
    forward = chain.forward_s[0]
    expected = forward[2, 0] + forward[3, 1] + forward[2, 2] + forward[-1, 0]
    assert priced.forward_s[1] == pytest.approx(expected, rel=1e-12)


def test_a_tower_sees_all_of_its_own_tokens():
    """Causal attention is half of what tokens that see both ways compute, a window a band on one side or on both."""
    seconds = {}
    for causal, window in ((True, 0), (False, 0), (True, 512), (False, 512)):
        groups = (LayerGroup(count=8, causal=causal, window=window),)
        whole = problem(model=replace(MODEL, layer_groups=groups))
        own, part = layer_share(whole, share(whole, CELLS), whole.layer_kinds[0])
        device = whole.cluster.pools[0].kind.device
        rates = compute.rates(device, whole.workload, whole.runtime, whole.calibration)
        seconds[causal, window] = blocks.layer_pass(own, rates, part)[0].attention.total
    np.testing.assert_allclose(seconds[False, 0], 2 * seconds[True, 0], rtol=1e-12)
    np.testing.assert_allclose(seconds[False, 512], 2 * seconds[True, 512], rtol=1e-12)
    np.testing.assert_allclose(
        seconds[True, 512] / seconds[True, 0], (2048 * 512 - 512**2 / 2) / (2048**2 / 2), rtol=1e-12
    )


def test_a_hop_carries_what_the_block_before_it_hands_on():
    whole = problem(model=LLAVA)
    seq = whole.workload.seq
    tower, joined = 577 * 1024 / (seq * 4096), 576 * 4096 / (seq * 4096)
    np.testing.assert_allclose(whole.hop_factors, [1, 1 + tower, 1 + tower, 1 + joined, 1, 1], rtol=1e-12)
    prices = price_blocks(whole, Cells.of([normalised(dp=2, pp=4, mbs=1)]))
    columns = _columns([0, 2, 27, 28], [1, 26, 27, 59], [[1, 0, 0], [25, 0, 0], [1, 0, 0], [31, 0, 0]])
    priced = price_columns(prices, 0, columns)
    np.testing.assert_allclose(priced.hop_in_s[1:], priced.hop_out_s[:-1], rtol=1e-12)
    assert priced.hop_in_s[0] == priced.hop_out_s[-1] == 0
    assert priced.hop_out_s[1] > priced.hop_out_s[0] > priced.hop_out_s[2] > 0


@pytest.mark.parametrize("few", [0, 100])
def test_sums_and_largest_values_of_runs_are_those_of_their_layers(monkeypatch, few):
    monkeypatch.setattr(shapes, "FEW_KINDS", few)
    draw = np.random.default_rng(4)
    model = _chain_of(*(1024 * int(size) for size in draw.integers(1, 9, 37)))
    places = shapes.layer_places(model)
    num_kinds = len(model.layer_kinds)
    first = draw.integers(0, 38, 200)
    last = np.minimum(first + draw.integers(0, 20, 200), 38)
    layers = last - first + 1 - (first == 0) - (last == 38)
    cuts = np.sort(draw.integers(0, layers[:, None] + 1, (200, 2)), axis=1)
    counts = np.diff(np.column_stack([np.zeros_like(layers), cuts, layers]), axis=1)
    shape = column_shape(model, Columns(stage=first * 0, first=first, last=last, recompute_counts=counts))
    values, units = draw.random((num_kinds, 3)), draw.random(num_kinds + 2)
    for row in range(200):
        under = np.repeat([0, 1, 2], counts[row])
        begin = max(int(first[row]), 1) - 1
        mine = places[begin : begin + len(under)]
        each = values[mine, under]
        ends = [units[0]] * int(first[row] == 0) + [units[-1]] * int(last[row] == 38)
        held = [*units[1 + mine], *ends]
        assert shape.sum_of_layers(values)[row] == pytest.approx(each.sum(), rel=1e-12, abs=1e-12)
        assert shape.largest_of_layers(values)[row] == max(each, default=0.0)
        assert shape.sum_of_blocks(units)[row] == pytest.approx(sum(held), rel=1e-12, abs=1e-12)
        assert shape.largest_of_blocks(units)[row] == max(held, default=0.0)
        assert shape.layers[row].sum() == len(mine)


# --- laws, plans ----------------------------------------------------------------------------------------------------------


def test_laws_hold_for_every_group():
    facts = facts_of_model(LLAVA)
    assert (facts["heads"], facts["kv_heads"], facts["kv_heads_of_groups"]) == (16, 16, (16, 32))
    assert facts["ffn"] == 256  # of 11008, 4096 and the projector's 1024 and 4096
    with pytest.raises(RecordError, match="tp=32 is more than the 16 heads"):
        price_blocks(problem(model=LLAVA), Cells.of([normalised(tp=32)]))


def test_a_plan_of_a_chain_gives_every_block_to_a_stage():
    model = replace(
        LLAVA, num_layers=14, layer_groups=(PATCHES, replace(VISION, count=4), PROJECTOR, LayerGroup(count=8))
    )
    whole = problem(model=model, cluster=cluster(1), runtime=replace(RUNTIME, uneven_stages=True))
    answer = choose(whole, pins=parse_pins("pp=4", whole.runtime.recompute_kinds), worlds=(8,))
    decision = decision_of(whole, answer.choice.chosen)
    assert [stage.blocks[0] for stage in decision.stages] == [
        0,
        *(stage.blocks[1] + 1 for stage in decision.stages[:-1]),
    ]
    assert decision.stages[-1].blocks[1] == 15
    counts = [stage.blocks[1] - stage.blocks[0] for stage in decision.stages]
    assert counts[0] > counts[-2]  # a layer of the tower is lighter than one of the language model
    held = memory_report(whole, decision)
    assert max(one.peak_bytes for one in held) <= 80 * 2**30


def test_a_chain_is_not_anchored_by_fewer_layers():
    whole = problem(model=replace(MODEL, layer_groups=SPLIT))
    layout = normalised(dp=32, mbs=2)
    stages = (Stage(virtual=0, device=0, blocks=(0, 9), recompute={"none": 8}),)
    request = PlanRequest(model=whole.model, cluster=whole.cluster, workload=whole.workload, runtime=whole.runtime)
    plan = SimpleNamespace(request=request, decision=decision_of_stages(whole, layout, stages))
    with pytest.raises(InputError, match=r"is a chain of unlike layers \(layer_groups\)"):
        anchor(plan, 8, whole.calibration)
