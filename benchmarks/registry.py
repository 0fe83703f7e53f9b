"""The benchmarks by name: each file of this folder registers its own, and a result is a dated file with machine and versions."""

import importlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

Benchmark = Callable[[Path | None], Mapping[str, Any]]
"""Folder of published runs, or None -> what was found, as plain JSON data; under "text", if it has one, a table for people.

Raises FileNotFoundError where it needs the folder.
"""

_BENCHMARKS: dict[str, Benchmark] = {}
_FILES = (
    "simulation",
    "schedules",
    "pricing",
    "terms",
    "planning",
    "picks",
    "cases",
    "topology",
    "server",
    "executor.gradients",
    "executor.overhead",
    "executor.measuring",
)
"""Files of this folder that register one."""


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Registers a benchmark under a name."""

    def register(function: Benchmark) -> Benchmark:
        _BENCHMARKS[name] = function
        return function

    return register


def benchmarks() -> Mapping[str, Benchmark]:
    """All of them, by name."""
    for file in _FILES:
        importlib.import_module(f"benchmarks.{file}")
    return dict(sorted(_BENCHMARKS.items()))


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    packages = ("meshwright", "numpy", "pulp", "highspy")
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **versions,
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def without_text(found: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a result, its table in words left out."""
    return {key: value for key, value in found.items() if key != "text"}


def write_result(name: str, found: Mapping[str, Any], folder: Path) -> Path:
    """Writes `DATE-NAME.json` into `folder`, and `DATE-NAME.txt` beside it where the result has a `text`."""
    today = date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{name}.json"
    document = {"benchmark": name, "date": today, "machine": machine(), "found": without_text(found)}
    if "text" in found:
        path.with_suffix(".txt").write_text(found["text"] + "\n", encoding="utf-8")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
