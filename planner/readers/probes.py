"""What was measured beside the calibration that a prediction rests on: curves and latencies of a probe, live or pasted, beat tables."""

from pathlib import Path

from cost_models.calibrations import shipped
from cost_models.records import Calibration
from planner.readers.clusters import read_joined
from planner.readers.documents import There, named_path, read_document
from planner.readers.topology.measured import with_measured


def is_probe(text: str) -> bool:
    """Whether a text names the file of a probe: a cluster with what was measured of it."""
    path, there = named_path(text.strip())
    if there is not There.FILE or path.suffix.lower() != ".json":
        return False
    return {"cluster", "calibration"} <= set(read_document(path, "a cluster"))


def calibration_with(cluster: str | Path, base: Calibration | None = None) -> Calibration:
    """`base` (the shipped one by default) with what was measured of a cluster: a probe's file, or measured tables among files."""
    return with_measured(base or shipped(), read_joined([str(cluster)]).measured)


def can_be_read_again(cluster: str) -> bool:
    """No part of it is a pipe, whose content is gone once it is read."""
    paths = (named_path(part.strip())[0] for part in cluster.split(","))
    return all(path.is_file() or not path.exists() for path in paths)
