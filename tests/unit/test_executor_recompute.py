"""What each kind of recompute keeps and computes again, measured on one layer."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from executor.anatomy import anatomy_of
from executor.decoder import Decoder
from executor.sharding.recompute import ATTENTIONS, KINDS, MATMULS, kind_of, wrap_layers
from executor.stage import StageModule
from tests.processes.layouts import MODEL, TIED

B, T = 2, 16


class Counts(TorchDispatchMode):
    """Matmuls and attentions that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = self.attentions = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.matmuls += operation in MATMULS
        self.attentions += operation in ATTENTIONS
        return operation(*args, **(kwargs or {}))


def stage_of(model, kind: str | None) -> StageModule:
    module = Decoder(model)
    stage = StageModule(module, anatomy_of(module), (1, model.num_layers), model.num_blocks)
    wrap_layers(stage, {} if kind is None else {kind: model.num_layers}, tp=1)
    return stage


def run(model, kind: str | None):
    """(bytes kept between the passes for one more layer, matmuls and attentions of the backward, gradients)."""
    stage = stage_of(model, kind)
    x = torch.randn(B, T, model.hidden, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = stage(x)
    with Counts() as counts:
        out.square().sum().backward()
    return counts, [p.grad.clone() for p in stage.parameters()]


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["gated", "plain"])
def test_gradients_do_not_change(model) -> None:
    plain = run(model, None)[1]
    for kind in KINDS:
        for ours, theirs in zip(run(model, kind)[1], plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("model", "forward"), [(MODEL, 7), (TIED, 6)], ids=["gated", "plain"])
def test_matmuls_and_attentions_that_run_again(model, forward: int) -> None:
    backward = run(model, "none")[0]
    assert backward.attentions == 0
    selective, full = run(model, "selective")[0], run(model, "full")[0]
    assert (selective.matmuls, selective.attentions) == (backward.matmuls, 0)
    again = (forward - 1) * model.num_layers  # all but the last matmul of a layer
    assert (full.matmuls, full.attentions) == (backward.matmuls + again, model.num_layers)


def test_the_kinds_follow_the_order_of_the_plan() -> None:
    module = Decoder(MODEL)
    stage = StageModule(module, anatomy_of(module), (0, 5), MODEL.num_blocks)
    wrap_layers(stage, {"selective": 1, "none": 1, "full": 1}, tp=1)
    assert [kind_of(layer) for _, layer in stage.named_layers()] == ["selective", "none", "full", "none"]


def test_names_of_parameters_do_not_change() -> None:
    from executor.stage import original_name

    names = [name for name, _ in stage_of(MODEL, None).named_parameters()]
    for kind in KINDS:
        assert [original_name(name) for name, _ in stage_of(MODEL, kind).named_parameters()] == names


def test_stages_together_hold_each_parameter_once() -> None:
    module = Decoder(MODEL)
    whole = [name for name, _ in module.named_parameters()]
    cuts = ((0, 0), (1, 3), (4, 4), (5, 5))
    stages = [StageModule(module, anatomy_of(module), cut, MODEL.num_blocks) for cut in cuts]
    held = list(itertools.chain.from_iterable([n for n, _ in stage.named_parameters()] for stage in stages))
    assert sorted(held) == sorted(whole)
