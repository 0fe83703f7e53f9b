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
"""Folder of published runs, or None -> what was found, as plain JSON data. Raises FileNotFoundError where it needs the folder."""

_BENCHMARKS: dict[str, Benchmark] = {}
_FILES = ("simulation", "schedules", "pricing", "terms")
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
    packages = ("meshwright", "numpy")
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


def write_result(name: str, found: Mapping[str, Any], folder: Path) -> Path:
    """Writes `DATE-NAME.json` into `folder`."""
    today = date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{name}.json"
    document = {"benchmark": name, "date": today, "machine": machine(), "found": found}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
