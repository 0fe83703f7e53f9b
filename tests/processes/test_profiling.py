"""Measuring sessions: real processes, real gloo, small shapes. What comes back is whole; who fails or is late is named."""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cost_models.records import MeasurementKind, Model, Precision, RecordError, Workload
from planner.profiling.blocks import Shapes, keys_of, operation, time_operations
from planner.profiling.links import COLLECTIVES
from planner.profiling.local import measured_cluster
from planner.profiling.ranks import RankError, run_ranks
from planner.profiling.session import Request, measure

pytestmark = pytest.mark.timeout(300)

MODEL = Model(name="small", num_layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=131)
WORKLOAD = Workload(seq=16, gbs=4, precision=Precision.FP32)
LAYER = "executor.decoder:Layer"


def test_a_session_of_two_ranks_measures_what_it_was_asked() -> None:
    keys = keys_of(MODEL, WORKLOAD, Shapes(tp=(1, 2), mbs=(1,)))
    told: list[str] = []
    request = Request(operations=keys, group_sizes=(2,), ranks=2, layer=LAYER, budget_s=2.0, timeout_s=200)
    taken = measure(request, progress=told.append).measurements
    by_key = {one.key: one for one in taken}
    assert {key for key, one in by_key.items() if one.kind is MeasurementKind.OP} == set(keys)
    assert all(len(one.samples_s) >= 2 for one in taken), "each of two ranks gives one at least"
    families = {key.split("/")[0] for key, one in by_key.items() if one.kind is MeasurementKind.COLLECTIVE}
    assert families == {*COLLECTIVES, "overlap"}
    assert all(min(one.samples_s) > 0 for one in taken)
    assert any("operations" in line for line in told)
    assert any("collectives" in line for line in told)

    cluster = measured_cluster(2, taken)
    device = cluster.pools[0].kind.device
    assert cluster.num_gpus == 2
    assert device.matmul_flops_per_s["fp32"] > 0
    assert device.memory_bandwidth_bytes_per_s > 0


def test_links_between_one_rank_are_refused() -> None:
    with pytest.raises(RecordError, match=r"group_sizes=\[4\] of 2 ranks"):
        Request(group_sizes=(4,), ranks=2)


def test_a_machine_without_measurements_is_no_cluster() -> None:
    with pytest.raises(RecordError, match="matmul, memory_bound, p2p"):
        measured_cluster(2, ())


def test_more_work_takes_longer() -> None:
    small, large = (f"matmul/fp32/{side}x{side}x{side}" for side in (32, 512))
    seconds = {one.key: min(one.samples_s) for one in time_operations([small, large], budget_s=0.6)}
    assert seconds[large] > 10 * seconds[small]  # 4,096 times the FLOPs


def test_a_backward_gives_the_gradients_that_torch_gives() -> None:
    """What is timed is what is meant: the call of a backward key leaves gradients of the parameters."""
    import torch

    torch.manual_seed(0)
    call, _ = operation("head/fp32/1x4x8x16/backward")
    assert call() is None
    gradients = operation("attention/fp32/1x4x2x1x8/backward")[0]()
    assert [tuple(gradient.shape) for gradient in gradients] == [(1, 4, 2, 8), (1, 4, 1, 8), (1, 4, 1, 8)]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("convolution/fp32/3x3", "unknown family 'convolution'; known: matmul, attention"),
        ("matmul/fp32/12x12", "has not 3 sizes"),
        ("matmul/int3/1x1x1", "precision 'int3'; measurable: fp32, bf16, fp16"),
        ("attention/fp32/1x4x2x1x8/sideways", "legal: forward, backward"),
        ("optimizer/lion/10", "optimizer 'lion'; measurable: adamw"),
        ("layer/fp32/1x4x8/2x1x4/16g/forward", "needs a factory"),
    ],
)
def test_a_key_that_means_nothing_is_an_error_that_lists_the_known(key: str, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        operation(key)


FAILING = """
import os, sys, time
print("rank", os.environ["RANK"], "is here", flush=True)
if os.environ["RANK"] == "1":
    {what}
time.sleep({rest})
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(what: str, *, rest: float, timeout_s: float) -> None:
        (tmp_path / "failing_here.py").write_text(FAILING.format(what=what, rest=rest))
        run_ranks(
            "failing_here", [], ranks=2, threads=1, timeout_s=timeout_s, environment={"PYTHONPATH": str(tmp_path)}
        )

    return run


def test_a_rank_that_fails_is_named_with_its_last_words(failing) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 ended with 7[\s\S]*rank 1 is here") as caught:
        failing("sys.exit(7)", rest=60, timeout_s=50)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started < 45, "the other rank was not waited for"


def test_a_rank_that_is_late_is_named(failing) -> None:
    with pytest.raises(RankError, match=r"late after 8 s: rank 1 of 2.*rank 1 is here") as caught:
        failing("time.sleep(120)", rest=0, timeout_s=8)
    assert caught.value.ranks == (1,)
