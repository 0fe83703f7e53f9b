"""A probe's file beside the calibration that a prediction rests on: what was measured of its links beats what tables say."""

from dataclasses import replace
from pathlib import Path

from cost_models.calibrations import shipped
from cost_models.records import Calibration, Probe, from_json
from planner.readers.documents import There, named_path, read_document


def is_probe(text: str) -> bool:
    """Whether a text names the file of a probe."""
    path, there = named_path(text.strip())
    if there is not There.FILE or path.suffix.lower() != ".json":
        return False
    return {"pairs", "domains", "calibration"} <= set(read_document(path, "a cluster"))


def calibration_with(path: str | Path, base: Calibration | None = None) -> Calibration:
    """`base` (the shipped one by default) with the latencies and curves of the probe in a file."""
    base = base or shipped()
    probe = from_json(Probe, read_document(Path(path), "a probe"))
    found = probe.calibration
    return replace(
        base,
        name=f"{base.name} + {found.name}",
        machine=found.machine,
        date=max(base.date, found.date),
        coefficients={**base.coefficients, **found.coefficients},
        curves={**base.curves, **found.curves},
    )
