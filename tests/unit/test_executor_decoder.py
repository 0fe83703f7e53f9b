"""Our decoder: exact size, values that depend on names alone, causal; and where a module's parts are."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cost_models.records import LayerGroup, Mla, Moe, Positions
from executor.anatomy import anatomy_of, check_against, dimensions_of
from executor.decoder import Decoder
from executor.errors import RefusedError
from tests.processes.layouts import MODEL, TIED


@pytest.mark.parametrize("model", [MODEL, TIED, replace(MODEL, norm="layernorm")], ids=["gated", "tied", "layernorm"])
def test_it_has_the_parameters_of_the_record(model) -> None:
    model = replace(model, norm=type(MODEL.norm)(model.norm))
    assert sum(p.numel() for p in Decoder(model).parameters()) == model.num_params


def test_values_depend_on_seed_and_name_alone() -> None:
    deep, shallow = (dict(Decoder(replace(MODEL, num_layers=n), seed=3).named_parameters()) for n in (4, 2))
    assert all(torch.equal(deep[name], value) for name, value in shallow.items())
    other = dict(Decoder(MODEL, seed=4).named_parameters())
    assert not torch.equal(deep["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])
    assert not torch.equal(deep["layers.0.mlp.up.weight"], deep["layers.1.mlp.up.weight"])


def test_a_token_does_not_see_later_ones_but_its_place() -> None:
    decoder = Decoder(MODEL)
    tokens = torch.randint(MODEL.vocab, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % MODEL.vocab
    before, after = decoder(tokens), decoder(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-6)
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(decoder(swapped)[:, 11], before[:, 11], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe": Moe(num_experts=4, top_k=2, moe_ffn=8)}, "mixture of experts"),
        ({"positions": Positions.NONE}, "rope alone"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"sliding_window": 4}, "sliding-window"),
        ({"causal": False}, "attention that is not causal"),
        (
            {"layer_groups": (LayerGroup(count=MODEL.num_layers, window=4),)},
            r"a chain of unlike layers \(layer_groups\)",
        ),
        ({"head_dim": 7}, r"odd head_dim \(7\)"),
        (
            {"mla": Mla(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)},
            r"latent attention \(MLA\)",
        ),
    ],
)
def test_what_it_lacks_is_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(RefusedError, match=f"has not yet: .*{words}"):
        Decoder(replace(MODEL, **change))


def test_dimensions_are_read_from_the_weights() -> None:
    module = Decoder(TIED)
    dimensions = dimensions_of(module, anatomy_of(module))
    check_against(dimensions, TIED)
    assert (dimensions.kv_heads, dimensions.gated_mlp, dimensions.tie_embeddings) == (4, False, True)
    with pytest.raises(RefusedError, match=r"not the model of the plan .*ffn: 48, planned 64"):
        check_against(dimensions, replace(TIED, ffn=64))


def test_a_module_that_nobody_described() -> None:
    with pytest.raises(RefusedError, match="Linear is not described; known modules: Decoder, LlamaForCausalLM"):
        anatomy_of(torch.nn.Linear(2, 2))


def test_a_llama_with_eager_attention_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(RefusedError, match=r"_attn_implementation = 'eager': no mask is passed"):
        anatomy_of(model)
