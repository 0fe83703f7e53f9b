"""Anchoring from end to end: a plan for four ranks, reduced to two, run, fitted, and the plan predicted again."""

import json
from pathlib import Path
from typing import Any

import pytest

from cost_models.calibrations import shipped
from cost_models.records import Calibration, Plan, Precision, Workload, load, load_plan, save
from executor.cli import main
from planner.compare import promise_with
from planner.plan import make_plan
from planner.readers.models import read_model
from planner.readers.node_presets import local_cluster
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime

pytestmark = pytest.mark.timeout(300)


def plan_for(ranks: int, pin: str) -> Plan:
    request = CompleteRequest(
        model=read_model("llama-tiny"),
        cluster=local_cluster(ranks, 4 << 30, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=5e9),
        workload=Workload(seq=32, gbs=16, precision=Precision.FP32),
        runtime=read_runtime("torch"),
        layout=None,
        pin=pin,
        defaults={},
    )
    return make_plan(request, calibration=shipped(), version="test")


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The document of a verb that ends well."""
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document


def test_a_plan_is_anchored_on_half_of_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, small, measured, fitted = (tmp_path / name for name in ("plan.json", "small.json", "run.json", "fitted.json"))
    save(plan_for(4, "pp=2, zero=2, mbs=1, recompute=none"), plan)
    full = load_plan(plan)
    assert (full.decision.layout.pp, full.decision.layout.dp_shard) == (2, 2)

    told = answered(["explain", str(plan), "--anchor", "2", "-o", str(small)], capsys)
    reduced = load_plan(small)
    layout = reduced.decision.layout
    assert (layout.world, layout.pp, layout.zero, layout.mbs) == (2, 1, full.decision.layout.zero, 1)
    assert told["plan"]["decision"]["layout"]["pp"] == 1
    assert {one["name"] for one in told["reduced"]} >= {"pp", "layers", "sequences of a step"}
    assert told["measured"]

    answered(["run", str(small), "--steps", "3", "--timeout", "120", "-o", str(measured)], capsys)
    answered(["compare", str(small), str(measured), "--fit", str(fitted)], capsys)
    before = answered(["predict", str(plan)], capsys)
    after = answered(["predict", str(plan), "--calibration", str(fitted)], capsys)

    # what rests on published runs or tables rests on the measurement now, and pipelines' hops as they did
    shares = {
        name: sum(term["share"] for term in document["rests_on"] if term["basis"] == "anchored")
        for name, document in (("before", before), ("after", after))
    }
    assert shares["before"] == 0
    assert shares["after"] > 0.1
    assert sum(after["predicted"]["basis"].values()) == pytest.approx(1)
    assert after["predicted"]["basis"]["table"] < before["predicted"]["basis"]["table"]
    calibration = load(Calibration, fitted)
    assert [name for name in calibration.coefficients if name.startswith("memory.residual_bytes.rss.cpu")]
    assert calibration.coefficients["overlap.p2p"] == shipped().coefficients["overlap.p2p"]
    assert main(["predict", str(plan), "--calibration", str(fitted)]) == 0
    text = capsys.readouterr().out
    assert "anchored" in text
    assert "analytic" in text

    # the run itself is explained better, and what it says nothing of is what it was
    runs = load_runs(measured)
    error = {name: abs(promise_with(reduced, one).step_s / runs - 1) for name, one in _both(calibration)}
    assert error["after"] < error["before"]
    gpus = plan_on_gpus()
    assert promise_with(gpus, calibration).step_s == pytest.approx(promise_with(gpus, shipped()).step_s, rel=0.005)
    assert promise_with(gpus, calibration).memory_gib_max == promise_with(gpus, shipped()).memory_gib_max


def _both(calibration: Calibration) -> tuple[tuple[str, Calibration], tuple[str, Calibration]]:
    return (("before", shipped()), ("after", calibration))


def load_runs(path: Path) -> float:
    """Median seconds of a step."""
    from statistics import median

    from planner.compare import read_measurements

    step = next(one for one in read_measurements([path]).measurements if one.key == "step")
    return median(step.samples_s)


def plan_on_gpus() -> Plan:
    """A plan that the run on a CPU says next to nothing of."""
    from planner.readers.clusters import read_cluster

    request = CompleteRequest(
        model=read_model("llama3-8b"),
        cluster=read_cluster("h100x8"),
        workload=Workload(seq=4096, gbs=64, precision=Precision.BF16),
        runtime=read_runtime("megatron"),
        layout=None,
        pin="tp=2, zero=1, pp=1, mbs=1",
        defaults={},
    )
    return make_plan(request, calibration=shipped(), version="test")
