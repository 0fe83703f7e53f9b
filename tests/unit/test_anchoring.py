"""The anchoring benchmark: which runs are measured and which are predicted, and that a planted source is found."""

from dataclasses import replace

import pytest

from benchmarks.accuracy.anchoring import anchored, anchoring_text, other_halves, own_halves
from benchmarks.accuracy.fit_published import Configuration
from benchmarks.accuracy.pricing import Pricer, with_values
from cost_models.calibrations import shipped
from planner.readers.runs import read_run
from tests.unit.test_runs import OLD


def on(gpus: int, layers: int = 8, **changes: str) -> Configuration:
    """A run of a data-parallel model on so many GPUs, two sequences each."""
    row = {**OLD, "n_gpus": str(gpus), "dp": "", "tp": "1", "pp": "1", "gbs": str(2 * gpus), "ga": "", "mbs": "2"}
    run = read_run({**row, "layers": str(layers), **changes}, shipped())
    return Configuration(run=run, source="s", model=f"m-{row['hidden']}", ids=(f"{gpus}-{layers}",), measured_s=1.0)


def names(configured: tuple[Configuration, ...]) -> list[str]:
    return [one.ids[0] for one in configured]


def test_a_models_own_runs_with_fewer_layers_are_its_own() -> None:
    parts = own_halves([on(8, 2), on(16, 8), on(64, 8), on(128, 8)])
    assert [(names(part.small), names(part.large)) for part in parts] == [(["8-2"], ["128-8"])]
    assert own_halves([on(8), on(16)]) == []
    assert own_halves([on(8), replace(on(128, hidden="4096"), model="other")]) == []


def test_other_runs_are_the_fewest_gpus_that_give_three() -> None:
    (parts,) = other_halves([on(8), on(16), on(16, 4), on(32), on(128), on(256)])
    assert names(parts.small) == ["8-8", "16-8", "16-4"]
    assert names(parts.large) == ["256-8"]
    assert other_halves([on(8), on(8, 4), on(8, 2), on(16)]) == []


def test_a_slow_source_is_found_from_its_small_runs() -> None:
    """Products at 0.8 of what is known: without a measurement the large runs are promised too short, with some they are not."""
    pricer, known = Pricer(), shipped()
    small = [on(8, layers) for layers in (4, 8, 12, 16)]
    large = [on(256, 24)]
    name = next(one for one in pricer.reads(large[0].run, known) if one.startswith("matmul.efficiency"))
    truth = with_values(known, {name: 0.8 * known.coefficients[name].value})
    configured = [replace(one, measured_s=pricer.step_s(one.run, truth)) for one in (*small, *large)]
    found = anchored(pricer, configured, {"s": known}, lambda text: None)
    for way in ("own", "others"):
        row = found[way]["sources"]["s"]
        assert row["anchored"]["median"] < 0.5 * row["unseen"]["median"]
        assert (row["small_gpus"], row["large_gpus"]) == ([8, 8], [256, 256])
    text = anchoring_text(found)
    assert "8 -> 256" in text
    assert "goal: 4 / 10%" in text


@pytest.mark.parametrize("way", ["own", "others"])
def test_a_source_without_larger_runs_has_no_row(way: str) -> None:
    found = anchored(Pricer(), [on(8), on(8, 4), on(8, 2)], {"s": shipped()}, lambda text: None)
    assert found[way]["sources"] == {}
    assert found[way]["macro"] == {"unseen": {}, "anchored": {}}
