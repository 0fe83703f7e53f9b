"""The JSON Schemas of the records, as files: `python -m cost_models.records.schema_files` writes them anew."""

import json
import sys
from pathlib import Path

from cost_models.records.calibration import Calibration
from cost_models.records.cluster import Cluster
from cost_models.records.codec import json_schema, write_atomic
from cost_models.records.layout import Layout
from cost_models.records.measurement import Measurement, Measurements
from cost_models.records.model import Model
from cost_models.records.plan import Plan
from cost_models.records.probe import Probe
from cost_models.records.runtime import Runtime
from cost_models.records.workload import Workload

RECORDS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (Calibration, Cluster, Layout, Measurement, Measurements, Model, Plan, Probe, Runtime, Workload)
}
"""Name of the schema's file, without its ending -> record."""

FOLDER = Path(__file__).parent / "schemas"
"""Where the files lie."""


def schema_text(name: str) -> str:
    """The text of the schema of the record `name`, as committed."""
    return json.dumps(json_schema(RECORDS[name]), indent=1, ensure_ascii=False) + "\n"


def write_schemas(folder: Path = FOLDER) -> list[Path]:
    """Writes all schemas and returns their paths."""
    folder.mkdir(exist_ok=True)
    written = []
    for name in RECORDS:
        path = folder / f"{name}.schema.json"
        write_atomic(path, schema_text(name))
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write_schemas():
        print(path, file=sys.stderr)
