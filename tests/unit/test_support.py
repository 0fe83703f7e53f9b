"""`help support`: expectations are derived from the records, and change with them."""

import json
import re
from dataclasses import replace

import pytest

from cost_models.calibrations import shipped
from cost_models.records import Calibration, Precision, Runtime, Schedule
from executor.cli import main
from planner.errors import InputError
from planner.readers.runtimes import read_runtime
from planner.report.help_text import topic_text
from planner.report.support_text import SHORT
from planner.report.words import WIDTH
from planner.support import clusters, features, is_untested, support


def cells(runtime: Runtime, calibration: Calibration | None = None) -> dict[tuple[str, str], str]:
    found = support(runtime, calibration or shipped())
    return {(cell.feature, cell.device): cell.rests_on for cell in found}


@pytest.fixture(scope="module")
def megatron() -> Runtime:
    return read_runtime("megatron")


@pytest.fixture(scope="module")
def shipped_cells(megatron: Runtime) -> dict[tuple[str, str], str]:
    return cells(megatron)


def with_rows(count: int) -> Calibration:
    """Every coefficient fitted on so many rows, those of links of their own too where there are any."""
    coefficients = {name: replace(one, rows=count) for name, one in shipped().coefficients.items()}
    for cluster in clusters().values() if count else ():
        for link in (cluster.pools[0].kind.intra, cluster.pools[0].kind.nic):
            for what in ("efficiency", "latency_s", "small_latency_s"):
                coefficients[f"link.{what}.{link.name}"] = coefficients[f"link.{what}.intra"]
    return replace(shipped(), coefficients=coefficients)


def test_what_nobody_fitted_is_table_and_what_all_fitted_is_calibrated(
    megatron: Runtime, shipped_cells: dict[tuple[str, str], str]
) -> None:
    """The rows of a coefficient alone decide; what a runtime or a device does not have stays absent."""
    tested = replace(megatron, untested=())
    bare, full = cells(tested, with_rows(0)), cells(tested, with_rows(9))
    offload = {key for key in bare if key[0].startswith("offload")}
    assert {bare[key] for key in bare.keys() - offload} == {"table", "-"}
    assert {full[key] for key in full.keys() - offload} == {"calibrated", "-"}
    for found in (bare, full):
        assert {key for key, rests_on in found.items() if rests_on == "-"} == {
            key for key, rests_on in shipped_cells.items() if rests_on == "-"
        }


def test_precisions_are_those_of_device_and_runtime(
    megatron: Runtime, shipped_cells: dict[tuple[str, str], str]
) -> None:
    for precision in Precision:
        for family, cluster in clusters().items():
            device = cluster.pools[0].kind.device
            had = precision.value in megatron.state_bytes and precision.value in device.peak_flops_per_s
            assert (shipped_cells[f"dense, {precision}", family] != "-") <= had


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_schedules_zero_levels_and_degrees_are_the_runtimes(name: str) -> None:
    runtime = read_runtime(name)
    found = cells(runtime)
    had = {feature for (feature, _), rests_on in found.items() if rests_on != "-"}
    assert {one for one in Schedule if f"pp {one}" in had} == set(runtime.schedules)
    assert {level for level in (1, 2, 3) if f"zero {level}" in had} == set(runtime.zero_levels) - {0}
    assert ("cp" in had, "ep" in had) == (runtime.context_parallel, runtime.expert_parallel)


def test_untested_follows_the_record(megatron: Runtime) -> None:
    """A word in `untested` marks what it names and nothing else; without it the cell is what its coefficients are."""
    bare = with_rows(0)
    tested = cells(replace(megatron, untested=()), bare)
    marked = cells(replace(megatron, untested=("tensor parallelism of anything", "ZeRO 1 (somewhere)")), bare)
    changed = {feature for (feature, device), cell in marked.items() if cell != tested[feature, device]}
    assert changed == {"tp", "zero 1"}
    everything = cells(replace(megatron, untested=("all of it",)), bare)
    assert "table" not in everything.values()
    fitted = cells(replace(megatron, untested=("all of it",)), with_rows(5))
    assert "untested" not in {cell for (feature, _), cell in fitted.items() if not feature.startswith("offload")}


def test_gpus_alone_are_untested_where_the_record_says_so() -> None:
    runtime = replace(
        read_runtime("torch"), untested=("NCCL and GPUs", "bf16 on GPUs", "schedules that split the backward")
    )
    by_name = {feature.name: feature for feature in features(runtime)}
    assert is_untested(runtime, by_name["tp"], "hopper")
    assert not is_untested(runtime, by_name["tp"], "cpu")
    assert is_untested(runtime, by_name["pp zbv"], "cpu")
    assert not is_untested(replace(runtime, untested=("bf16 on GPUs",)), by_name["dense, fp32"], "hopper")


def test_a_timed_operation_is_measured() -> None:
    """Whole layers of the very sizes that are priced, timed on this processor."""
    from cost_models import blocks
    from cost_models.problem import Cells, Problem
    from cost_models.shares import share
    from planner.support import DENSE, PLAIN, WORKLOAD

    runtime = read_runtime("torch")
    workload = replace(WORKLOAD, precision=Precision.FP32)
    problem = Problem(model=DENSE, cluster=clusters()["cpu"], workload=workload, runtime=runtime, calibration=shipped())
    sides = [int(side[0]) for side in blocks.layer_sides(problem, share(problem, Cells.of([PLAIN])))]
    keys = [blocks.layer_key("fp32", DENSE.gated_mlp, way).format(*sides) for way in ("forward", "backward")]
    timed = replace(shipped(), operations_s=dict.fromkeys(keys, 1000.0))
    assert cells(runtime)["dense, fp32", "cpu"] == "table"
    assert cells(runtime, timed)["dense, fp32", "cpu"] == "measured"


def test_the_text_has_every_cell_within_the_width(megatron: Runtime, shipped_cells: dict[tuple[str, str], str]) -> None:
    text = topic_text("support", {}, "megatron")
    assert max(map(len, text.splitlines())) <= WIDTH
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    families = list(clusters())
    assert lines["megatron"].split()[1:] == families
    for feature in features(megatron):
        row = [shipped_cells[feature.name, family] for family in families]
        if set(row) == {"-"}:
            assert feature.name in " ".join(text.partition("has not")[2].split())
        else:
            assert re.split(r"\s{2,}", lines[feature.name])[1:] == [SHORT[one] for one in row]


def test_json_has_the_cells(capsys: pytest.CaptureFixture[str], shipped_cells: dict[tuple[str, str], str]) -> None:
    assert main(["help", "support", "megatron", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {(one["feature"], one["device"]): one["rests_on"] for one in document["support"]} == shipped_cells


def test_without_a_runtime_each_has_its_counts(shipped_cells: dict[tuple[str, str], str]) -> None:
    text = topic_text("support", {})
    line = next(line for line in text.splitlines() if line.startswith("megatron "))
    found = list(shipped_cells.values())
    assert [int(word) for word in line.split()[1:5]] == [
        found.count(one) for one in ("measured", "calibrated", "table", "untested")
    ]
    known = [
        family
        for family in clusters()
        if any(shipped_cells[f"dense, {one}", family] in ("measured", "calibrated") for one in Precision)
    ]
    assert line.endswith(", ".join(known))
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_second_word_is_for_support_alone() -> None:
    with pytest.raises(InputError, match="stands alone"):
        topic_text("pins", {}, "megatron")
    with pytest.raises(InputError, match="megatronn"):
        topic_text("support", {}, "megatronn")
