"""Sweeps: each point is the plan of that size, and what follows from the points is arithmetic that is checked here anew."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cost_models.calibrations import shipped
from executor.cli import main
from planner.errors import InfeasibleError, InputError, TimeLimitError
from planner.plan import make_plan
from planner.readers.requests import CompleteRequest, complete, read_request
from planner.report.sweep_plot import sweep_plot
from planner.report.sweep_text import sweep_text
from planner.report.words import WIDTH
from planner.what_if.sweep import answers, sweep
from planner.what_if.sweep_points import Axis, parse_sweep


def request(**changed: Any) -> CompleteRequest:
    base = {"model": "llama3-8b", "cluster": "h100x8", "workload": {"seq": 4096, "gbs": 24}}
    return complete(read_request(base | changed))


def run(text: str, **options: Any) -> dict[str, Any]:
    changed = options.pop("changed", {})
    return sweep(request(**changed), text, calibration=shipped(), **options)


@pytest.fixture(scope="module")
def by_gpus() -> dict[str, Any]:
    return run("gpus=1,2,8,12,16,64")


# Sizes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axis", "sizes"),
    [
        ("gpus=64..1024", Axis.GPUS, (64, 128, 256, 512, 1024)),
        ("gpus=64..600", Axis.GPUS, (64, 128, 256, 512, 600)),
        ("gpus=128, 64,64", Axis.GPUS, (64, 128)),
        ("gpus=8..32:8", Axis.GPUS, (8, 16, 24, 32)),
        ("GPUs = 8,16..64", Axis.GPUS, (8, 16, 32, 64)),
        ("batch=256..1024", Axis.BATCH, (256, 512, 1024)),
        ("gbs=7", Axis.BATCH, (7,)),
        ("seq=4096,8192", Axis.SEQ, (4096, 8192)),
    ],
)
def test_sizes(text: str, axis: Axis, sizes: tuple[int, ...]) -> None:
    assert parse_sweep(text) == (axis, sizes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one of gpus, batch, seq"),
        ("gpus", "one of gpus, batch, seq"),
        ("64..128", "one of gpus, batch, seq"),
        ("tp=1..8", "one of gpus, batch, seq"),
        ("gpu_count=8", "gpus=64..1024"),
        ("gpus=", "neither a whole number nor a range"),
        ("gpus=8..", "neither a whole number nor a range"),
        ("gpus=-8", "neither a whole number nor a range"),
        ("gpus=8.5", "neither a whole number nor a range"),
        ("gpus=0", "whole numbers from 1"),
        ("gpus=64..8", "ranges ascend"),
        ("gpus=8..64:0", "steps are from 1"),
        ("gpus=1..1000000000:1", "at most 64 sizes"),
        ("gpus=1..100:1", "100 sizes; at most 64"),
    ],
)
def test_what_is_no_sweep(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        parse_sweep(text)


# Points -----------------------------------------------------------------------------------------------------------------


def test_each_point_is_the_plan_of_that_size(by_gpus: dict[str, Any]) -> None:
    for point in by_gpus["points"]:
        if point["status"] == "infeasible":
            with pytest.raises(InfeasibleError):
                make_plan(request(), calibration=shipped(), gpus=str(point["gpus"]))
            continue
        size = -(-point["gpus"] // 8) * 8
        plan = make_plan(request(cluster=f"h100x{size}"), calibration=shipped(), gpus=str(point["gpus"]))
        assert plan.predicted is not None
        assert (point["layout"], point["step_s"]) == (str(plan.decision.layout), plan.predicted.step_s)
        assert point["gpu_s_per_million_tokens"] == pytest.approx(1e6 / plan.predicted.tokens_per_s_per_gpu)
        assert point["idle_gpus"] == size - point["gpus"]


def test_a_size_that_does_not_fit_stays_in_the_list(by_gpus: dict[str, Any]) -> None:
    first = by_gpus["points"][0]
    assert (first["status"], first["step_s"], first["why"]) == ("infeasible", None, "no layout fits into memory")
    assert by_gpus["answers"]["least"] == 2
    assert by_gpus["complete"]


def test_the_least_number_between_two_sizes_is_found() -> None:
    found = run("gpus=8..64", changed={"model": "llama3-70b"})
    least = found["answers"]["fewest_between"]
    assert [point["status"] for point in found["points"]][:2] == ["infeasible", "optimal"]
    assert least == 16  # 8 has none, and there is no whole node between
    found = run("gpus=8,64", changed={"model": "llama3-70b"})
    assert found["answers"]["fewest_between"] == 16
    assert "16 GPUs, the least beyond 8, which has no plan; of these sizes 64" in sweep_text(found)


def test_batches_and_sequences_too() -> None:
    batches = run("batch=8,64,96")
    assert [point["gbs"] for point in batches["points"]] == [8, 64, 96]
    assert batches["answers"]["fewer_is_faster"] == []
    sequences = run("seq=4096,524288", changed={"pin": "recompute=none, tp=1"})
    assert [point["status"] for point in sequences["points"]] == ["optimal", "infeasible"]
    assert sequences["answers"]["most"] == 4096
    assert "4,096 tokens in a sequence" in sweep_text(sequences)


def test_a_time_limit_leaves_points_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("planner.what_if.sweep.time", SimpleNamespace(monotonic=lambda: next(ticks) * 10.0))
    found = run("gpus=8,16,32", time_limit_s=65.0)
    statuses = [point["status"] for point in found["points"]]
    assert statuses[0] in ("optimal", "feasible")
    assert statuses[-1] == "not reached"
    assert not found["complete"]
    text = sweep_text(found)
    assert "not done" in text
    assert "the time limit ended before" in text


def test_no_time_at_all_and_no_size_that_fits() -> None:
    with pytest.raises(TimeLimitError, match="not reached: 2 of 2"):
        run("gpus=8,16", time_limit_s=0.0)
    with pytest.raises(InfeasibleError, match="no plan at any size of the sweep, gpus = 1, 2"):
        run("gpus=1,2", changed={"model": "llama3-70b"})


# What follows -----------------------------------------------------------------------------------------------------------


def points(*rates: tuple[int, float | None]) -> list[dict[str, Any]]:
    """Sizes with their tokens/s; None has no plan."""
    return [
        {
            "value": gpus,
            "gpus": gpus,
            "step_s": None if rate is None else 1e6 / rate,
            "tokens_per_s": rate,
            "gpu_s_per_million_tokens": None if rate is None else gpus / rate * 1e6,
        }
        for gpus, rate in rates
    ]


def test_the_answers_are_arithmetic_over_the_points(by_gpus: dict[str, Any]) -> None:
    planned = [point for point in by_gpus["points"] if point["step_s"] is not None]
    told, error = by_gpus["answers"], by_gpus["pairwise_error"]
    fastest = min(planned, key=lambda point: point["step_s"])
    cheapest = max(planned, key=lambda point: point["tokens_per_s_per_gpu"])
    assert told["fastest"]["value"] == fastest["value"]
    assert told["cheapest"]["value"] == cheapest["value"]
    for point in planned:
        near = point["step_s"] / fastest["step_s"] - 1 <= error and point is not fastest
        assert (point["value"] in told["fastest"]["ties"]) == near
        near = cheapest["tokens_per_s_per_gpu"] / point["tokens_per_s_per_gpu"] - 1 <= error and point is not cheapest
        assert (point["value"] in told["cheapest"]["ties"]) == near


def test_the_knee_is_where_an_added_gpu_brings_less_than_half() -> None:
    told = answers(points((8, 80.0), (16, 150.0), (32, 240.0), (64, 280.0)), Axis.GPUS, 0.05)
    # added GPUs bring 70/8, 90/16, 40/32 tokens/s each, against 10
    assert told["knee"] == {"value": 32, "next": 64, "share_of_added_gpu": pytest.approx(0.125)}
    assert answers(points((8, 80.0), (16, 150.0)), Axis.GPUS, 0.05)["knee"] is None
    assert answers(points((8, 80.0)), Axis.GPUS, 0.05)["knee"] is None


def test_a_size_that_fewer_gpus_beat_is_named_and_is_no_knee() -> None:
    told = answers(points((8, 80.0), (16, 160.0), (24, 150.0), (32, 320.0), (40, 319.0)), Axis.GPUS, 0.05)
    assert told["knee"] is None
    assert [(one["more"], one["fewer"], one["within_error"]) for one in told["fewer_is_faster"]] == [
        (24, 16, False),
        (40, 32, True),
    ]


def test_a_batch_saturates_where_it_is_as_good_as_the_fastest() -> None:
    told = answers(points((8, 80.0), (16, 97.0), (32, 100.0)), Axis.BATCH, 0.05)
    assert told["knee"]["value"] == 16


def test_nothing_follows_from_no_plan() -> None:
    assert answers(points((8, None)), Axis.GPUS, 0.05)["fastest"] is None


# The command line -------------------------------------------------------------------------------------------------------

SWEEP = ["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--batch", "64", "--seq", "4096", "--sweep"]


def test_the_text_fits_the_width_and_names_all(by_gpus: dict[str, Any]) -> None:
    text = sweep_text(by_gpus)
    for word in ("fewest", "fastest", "cheapest", "knee"):
        assert any(line.startswith(word) for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= WIDTH + 60  # the layouts stand last, and may be long
    assert "infeasible: no layout fits into memory" in " ".join(text.split())


def test_the_picture(by_gpus: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = sweep_plot(by_gpus, tmp_path / "sweep.png", title="a sweep")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.png"]
    with pytest.raises(ValueError, match="nothing to draw"):
        sweep_plot(by_gpus | {"points": by_gpus["points"][:1]}, path, title="nothing")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    assert main([*SWEEP, "gpus=8,16", "--price", "2", "--json", "-o", str(out)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert json.loads(out.read_text()) == document
    for point in document["points"]:
        assert point["price_per_million_tokens"] == pytest.approx(point["gpu_s_per_million_tokens"] * 2 / 3600)
    assert "gpus=8 (1 of 2)" in captured.err
    assert "gpus=16 (2 of 2, about" in captured.err


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["gpus=8", "--gpus", "8"], 2, "say the numbers of GPUs once"),
        (["gpus=8", "--current", "tp8"], 2, "a sweep has no layout of today"),
        (["gpus=8", "--price", "0"], 2, "--price 0"),
        (["gpus=8", "--price", "nan"], 2, "--price nan"),
        (["gpus=8", "--time-limit", "-1"], 2, "--time-limit -1"),
        (["gpus=8", "-o", "sweep.svg"], 2, "drawn as FILE.png, or written as FILE.json"),
        (["gpus=8", "--time-limit", "0"], 4, "before the first plan of the sweep"),
        (["gpus=tp"], 2, "neither a whole number nor a range"),
        (["batch=7", "--pin", "tp=1, pp=1"], 1, "no plan at any size"),
    ],
)
def test_bad_sweeps(more: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SWEEP, *more]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_a_price_without_a_sweep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SWEEP[:-1], "--price", "2"]) == 2
    assert "--price 2.0: goes with --sweep alone" in capsys.readouterr().err
