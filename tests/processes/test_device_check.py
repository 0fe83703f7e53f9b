"""The check of a GPU, gone through on a CPU: every part says something, and what needs a GPU says that it does."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.device_check.__main__ import LAST_START_S, LIMIT_S, line_of, run
from benchmarks.device_check.place import dry, gpu, preset_of
from executor.launch import launch

pytestmark = pytest.mark.timeout(200)


def test_the_dry_way_goes_through_every_part(tmp_path: Path) -> None:
    ended = launch(
        ["-m", "benchmarks.device_check", "--dry", "--out", str(tmp_path)],
        num_ranks=1,
        timeout_s=150,
        log_dir=tmp_path / "logs",
    )
    assert ended.ok, "\n".join((ended.reason, *ended.error_lines))
    (result,) = tmp_path.glob("*-device-check.json")
    found = json.loads(result.read_text(encoding="utf-8"))["found"]
    assert found["left_out"] == []
    assert {name: len(rows) for name, rows in found["parts"].items()} == {
        "products": 2,
        "attention": 2,
        "block": 3,
        "out of memory": 1,
    }
    for name in ("products", "attention", "block"):
        for row in found["parts"][name]:
            assert row["predicted_s"] > 0
            assert row["measured_s"] > 0
    memory = [row["memory_gib"]["rss"] for row in found["parts"]["block"]]
    assert all(one["measured"] > 0 and one["predicted"] > 0 for one in memory)
    assert "no allocator of their own" in found["parts"]["out of memory"][0]["skipped"]


def test_no_part_starts_too_late() -> None:
    moments = iter([0.0, 0.0, LAST_START_S + 1, LAST_START_S + 2, LAST_START_S + 3, LAST_START_S + 4])
    told: list[str] = []
    found = run(dry(), told.append, clock=lambda: next(moments))
    assert found["left_out"] == ["attention", "block", "out of memory"]
    assert len(told) == len(found["parts"]["products"]) == 2
    assert LAST_START_S < LIMIT_S


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("NVIDIA L40S", 48, "l40s"),
        ("Some Accelerator", 80, None),
    ],
)
def test_devices_by_the_drivers_name(name: str, gib: int, preset: str | None) -> None:
    assert preset_of(name, gib << 30) == preset


def test_without_a_gpu_nothing_is_checked() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu() is None


def test_a_row_of_a_true_out_of_memory() -> None:
    row = {
        "mbs": 64,
        "predicted_gib": 150.0,
        "runs_out": True,
        "half_gib": 80.0,
        "half_predicted": "ok",
        "half_runs_out": False,
    }
    assert line_of({"what": "out of memory", **row}) == (
        "out of memory: mbs 64 was promised 150.0 GiB (no) and ran out of memory; half of it 80.0 GiB (ok) and fitted"
    )
