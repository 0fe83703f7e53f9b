"""A factory's module as a Model: known dimensions come back from what was built of them, and what cannot be is told."""

import shutil
import sys
from pathlib import Path
from textwrap import dedent

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from cost_models.records import Measurements, Model, Norm, Positions, load
from executor.cli.main import main
from executor.decoder import Decoder
from planner.errors import InputError
from planner.profiling.contents import contents_of
from planner.profiling.structure import model_from_structure
from planner.profiling.trace import model_of, trace_module
from planner.readers.models import read_model

pytestmark = pytest.mark.timeout(300)

FACTORIES = """
    import sys, threading, time
    from torch import nn
    from cost_models.records import Model
    from executor.decoder import Decoder

    def decoder():
        print("a user's module may print")
        return Decoder(Model(name="x", num_layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=131))

    def only_on_cpu():
        made = decoder()
        made.norm.weight.sum().item()
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return made

    def raises():
        raise KeyError("the dimensions")

    def leaves():
        sys.exit(3)

    def hangs():
        threading.Event().wait()

    def number():
        return 7

    def not_a_decoder():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    constant = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with a module of factories; the folder beside it must not be taken for our package."""
    (tmp_path / "mine.py").write_text(dedent(FACTORIES), encoding="utf-8")
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text("raise RuntimeError('a user's own')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("factory", ["decoder", "only_on_cpu"])
def test_a_factory_is_traced_in_a_process_of_its_own(factory: str) -> None:
    model = trace_module(f"mine:{factory}", timeout_s=200)
    assert model == Model(
        name=f"mine:{factory}", num_layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=131
    )
    assert "mine" not in sys.modules


def test_the_verb_shows_it_saves_it_and_plan_reads_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "mine:decoder", "-o", "model.json"]) == 0
    assert "3 layers, hidden 32, ffn 48 gated, 4 heads of 16, 2 for keys and values" in capsys.readouterr().out
    assert read_model("model.json") == trace_module("mine:decoder")
    asked = ["plan", "--model", "model.json", "--cluster", "h100x2", "--batch", "4", "--seq", "128", "--json"]
    assert main(asked) == 0


def test_its_operations_are_measured_like_those_of_any_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "planner")  # processes that measure find our packages as python itself does
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    assert main(["profile", "mine:decoder", "--measure", "--seq", "16", "--precision", "fp32", "-o", "taken.json"]) == 0
    keys = {one.key for one in load(Measurements, "taken.json").measurements}
    assert {"matmul/fp32/16x131x32", "attention/fp32/1x16x4x2x16/forward"} <= keys


@pytest.mark.parametrize(
    "factory, said",
    [
        ("absent.models:build", r"absent.models:build: there is no module 'absent' in .*install it"),
        ("mine:decodr", r"mine has no 'decodr'; it has: decoder"),
        ("mine:constant", "constant of mine is a int; a function without arguments"),
        ("mine:number", "returned a int; a torch.nn.Module is needed"),
        ("mine:raises", r"(?s)the factory raised KeyError.*last lines.*mine.py.*in raises.*the dimensions"),
        ("mine:leaves", r"(?s)the factory raised SystemExit.*sys.exit\(3\)"),
        ("broken:build", r"(?s)importing broken raised ModuleNotFoundError.*not_installed_anywhere"),
        ("mine:not_a_decoder", "no nn.ModuleList, .* of alike modules.*Give a model file"),
        ("mine:", "package.module:factory is needed"),
    ],
)
def test_what_is_wrong_is_told_once(factory: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        trace_module(factory, timeout_s=200)


def test_a_factory_that_hangs_is_ended_and_its_line_told() -> None:
    with pytest.raises(
        InputError, match=r"not done after 15 s; it hung while calling mine:hangs\(\) .* at: .*mine.py.*hangs"
    ):
        trace_module("mine:hangs", timeout_s=15)


def test_a_process_that_cannot_even_start_in_time_is_ended() -> None:
    with pytest.raises(InputError, match=r"not done after 0.01 s; it hung while starting python"):
        trace_module("mine:decoder", timeout_s=0.01)


# Modules, described in this process --------------------------------------------------------------------------------


def described(module: nn.Module) -> Model:
    return model_of(contents_of(module, "meta"), "x")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_embeddings": True},
        {"kv_heads": 4, "ffn": 32, "gated_mlp": False},  # all matrices square
        {"kv_heads": 1, "ffn": 128, "gated_mlp": False, "qkv_bias": True},
        {"norm": Norm.LAYERNORM, "linear_bias": True, "qkv_bias": True},
        {"head_dim": 16, "num_layers": 1},
    ],
)
def test_our_decoder_comes_back_as_the_record_that_it_was_built_from(fields: dict[str, object]) -> None:
    base = {"num_layers": 3, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 131}
    model = Model(name="x", **{**base, **fields})  # type: ignore[arg-type]
    with torch.device("meta"):
        assert described(Decoder(model)) == model


def _hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    plain = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
    }
    more = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 131},
        "Mixtral": {**plain, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    config = getattr(transformers, f"{kind}Config")(**more.get(kind, plain))
    with torch.device("meta"):
        return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "GPT2", "Mixtral"])
def test_hugging_face_modules_are_read_by_their_configuration(kind: str) -> None:
    module = _hugging_face(kind)
    model = described(module)
    assert model.num_params == sum(one.numel() for one in module.parameters())
    assert (model.num_layers, model.hidden, model.heads, model.vocab) == (2, 32, 4, 131)
    assert (model.positions is Positions.LEARNED) == model.tie_embeddings == (kind == "GPT2")
    assert (model.moe is not None) == (kind == "Mixtral")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
def test_structure_and_configuration_say_the_same(kind: str) -> None:
    """Two independent readings of one module; biases of q, k and v are Qwen2's."""
    contents = contents_of(_hugging_face(kind), "meta")
    by_structure, by_config = model_from_structure(contents, "x"), model_of(contents, "x")
    assert by_structure == by_config


def test_a_module_that_is_not_what_its_configuration_says_is_refused_with_both_numbers() -> None:
    module = _hugging_face("Llama")
    right = described(module).num_params
    module.extra = nn.Linear(3, 5, bias=False, device="meta")
    module.config.num_hidden_layers = 2
    with pytest.raises(InputError, match=f"has {right + 15:,} parameters, .*configuration describes has {right:,}"):
        described(module)


def test_a_base_model_without_its_head_is_refused() -> None:
    with pytest.raises(InputError, match=r"no head: no nn.Linear of shape \(131, 32\)"):
        described(_hugging_face("GPT2").transformer)


class Fused(nn.Module):
    """A layer in the manner of GPT-2, projections of queries, keys and values in one, learned positions outside."""

    def __init__(self, hidden: int = 32, heads: int | None = 4) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.mixer = nn.ModuleDict({"into": nn.Linear(hidden, 3 * hidden), "out": nn.Linear(hidden, hidden)})
        self.wide = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        if heads is not None:
            self.n_head = heads


class Network(nn.Module):
    def __init__(self, layers: list[nn.Module], *, head: bool = True, hidden: int = 32) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "tokens": nn.Embedding(131, hidden),
                "places": nn.Embedding(64, hidden),
                "blocks": nn.ModuleList(layers),
                "last": nn.LayerNorm(hidden),
            }
        )
        if head:
            self.out = nn.Linear(hidden, 131, bias=False)


def test_fused_projections_and_learned_positions_are_seen_under_any_name() -> None:
    assert described(Network([Fused(), Fused()])) == Model(
        name="x",
        num_layers=2,
        hidden=32,
        ffn=128,
        heads=4,
        kv_heads=4,
        head_dim=8,
        vocab=131,
        gated_mlp=False,
        norm=Norm.LAYERNORM,
        positions=Positions.LEARNED,
        max_positions=64,
        qkv_bias=True,
        linear_bias=True,
    )


def test_torchs_own_layer_is_described() -> None:
    layers = [nn.TransformerEncoderLayer(32, 4, 48, device="meta") for _ in range(2)]
    model = described(Network(layers))
    assert (model.heads, model.head_dim, model.ffn, model.gated_mlp, model.qkv_bias) == (4, 8, 48, False, True)


def _with_bias_in_one() -> Network:
    layer = Fused()
    layer.wide[2] = nn.Linear(128, 32, bias=False)
    return Network([layer])


def _shared_layer() -> Network:
    layer = Fused()
    return Network([layer, layer])


def _with_more(name: str) -> Network:
    network = Network([Fused()])
    setattr(network, name, nn.Parameter(torch.zeros(7)))
    return network


@pytest.mark.parametrize(
    "network, said",
    [
        (Network([Fused()], head=False), r"no head was found: .*tokens.weight \(131, 32\)"),
        (Network([Fused(heads=None)]), "states the heads or their width; num_attention_heads, .*head_dim"),
        (Network([Fused(heads=5)]), "heads that parts.blocks.0 states do not divide"),
        (Network([nn.Bilinear(32, 32, 32), nn.Linear(32, 32)]), "no nn.ModuleList, .* each with several matrices"),
        (Network([nn.GRUCell(32, 32)]), r"the matrices of a layer are weight_ih \(96, 32\), weight_hh"),
        (Network([Fused(), nn.Linear(32, 32)]), "no nn.ModuleList"),
        (Network([Fused(), Fused(hidden=16)]), "its layers differ: parts.blocks.1 and parts.blocks.0"),
        (_with_bias_in_one(), r"have a bias, wide.2.weight have none"),
        (_shared_layer(), r"has 23,200 parameters, and the model that its structure describes has 35,904"),
        (_with_more("steps"), r"the parameters steps \(7,\) have no place"),
    ],
)
def test_what_cannot_be_described_is_refused_with_what_was_looked_for(network: Network, said: str) -> None:
    with pytest.raises(InputError, match=said):
        described(network)
