"""Modules that are not what was planned for, or not as a constructor leaves them: refused by the name of the parameter."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from executor import apply
from executor.anatomy import anatomy_of, check_plain, dimensions_of
from executor.decoder import Decoder
from executor.errors import RefusedError
from tests.processes.layouts import MODEL, TIED, Case


def decoder(change: Callable[[Decoder], object]) -> Decoder:
    module = Decoder(MODEL, seed=0)
    change(module)
    return module


def judged(module: nn.Module) -> None:
    row = anatomy_of(module)
    check_plain(module, row)
    dimensions_of(module, row)


def wider(layer: nn.Module) -> None:
    layer.mlp.up, layer.mlp.gate = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
    layer.mlp.down = nn.Linear(64, 32, bias=False)


@pytest.mark.parametrize("model", [MODEL, TIED], ids=lambda model: model.name)
def test_a_model_as_it_was_built_is_plain(model: object) -> None:
    judged(Decoder(model, seed=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.to("meta"), "embedding.weight has no values"),
        (lambda m: m.bfloat16(), r"embedding.weight is bfloat16; legal: float32 \(`model.float\(\)`\)"),
        (lambda m: m.layers[2].mlp.half(), "layers.2.mlp.*is float16"),
        (
            lambda m: m.add_module("value_head", nn.Linear(32, 1)),
            "value_head.weight is in no part that is trained here",
        ),
        (lambda m: m.layers.__setitem__(1, m.layers[0]), "layers.0.* and layers.1.* are one parameter"),
        (
            lambda m: setattr(m.layers[3].mlp.up, "weight", m.layers[0].mlp.up.weight),
            "layers.0.mlp.up.weight and layers.3.mlp.up.weight are one parameter",
        ),
        (lambda m: wider(m.layers[2]), "ffn is 48 in layers.0 and 64 in layers.2"),
    ],
)
def test_what_would_be_trained_as_another_model_is_refused(change: Callable[[Decoder], object], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        judged(decoder(change))


def test_a_model_made_for_inference() -> None:
    with torch.inference_mode():
        module = Decoder(MODEL, seed=0)
    with pytest.raises(RefusedError, match=r"embedding.weight was made under torch.inference_mode"):
        judged(module)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrappers_are_told_to_come_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(RefusedError, match=r"wrapped already, in .*: give the Decoder inside it"):
        anatomy_of(wrap(Decoder(MODEL, seed=0)))


@pytest.mark.parametrize("model", [None, Decoder, 3])
def test_what_is_no_module(model: object) -> None:
    with pytest.raises(RefusedError, match=r"the model is a \w+; legal: a torch.nn.Module"):
        apply(Case(layout="dpr2").plan, model)


@pytest.mark.parametrize("plan", [None, {"decision": 1}, 3])
def test_what_is_no_plan(plan: object) -> None:
    with pytest.raises(RefusedError, match=r"the plan is a \w+; legal: a Plan, or the path"):
        apply(plan, Decoder(MODEL, seed=0))


def test_checkpointing_of_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )
    judged(module)
    module.model.gradient_checkpointing = True
    with pytest.raises(RefusedError, match=r"model.gradient_checkpointing = True: the plan says which layers"):
        anatomy_of(module)
