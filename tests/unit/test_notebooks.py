"""Every notebook runs from top to bottom on small data."""

from dataclasses import replace
from pathlib import Path

import pytest
from records_for_tests import MEASUREMENT
from test_compare import real_plan, real_problem

from cost_models.records import MeasuredMemory, Measurements, MemoryKind, save
from planner.compare import predicted_phases

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a run leaves: a plan, and its measurements, a tenth slower than promised."""
    plan = real_plan(real_problem(), tp=2, dp=4, mbs=1)
    assert plan.predicted is not None
    phases = predicted_phases(plan.predicted, plan.decision.num_micro_batches)
    peak = MeasuredMemory(kind=MemoryKind.ALLOCATED, peak_bytes=int(plan.predicted.memory_gib_max * 2**30))
    runs = tuple(
        replace(
            MEASUREMENT,
            key=phase,
            phase=phase,
            samples_s=(1.08 * s, 1.1 * s, 1.13 * s),
            plan_sha256=plan.decision.sha256,
            memory=peak,
            rank_class="all" if phase == "step" else "stage 0",
        )
        for phase, s in phases.items()
    )
    save(plan, tmp_path / "plan-8.json")
    save(Measurements(measurements=runs), tmp_path / "measurements-8.json")
    return tmp_path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs(path: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_RESULTS", str(results))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}}
    ).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "1 plans, 5 measurements" in printed
    assert "refitted" in printed
