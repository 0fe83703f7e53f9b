"""The arrows of the house: who may import whom, and that this test would see a breach."""

import ast
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("cost_models", "planner", "executor", "benchmarks", "tests")

BELOW = {
    "cost_models": {"cost_models"},
    "planner": {"cost_models", "planner"},
    "executor": {"cost_models", "planner", "executor"},
}
"""Package -> our packages that it may import."""

THIRD_PARTY = {"cost_models": {"numpy", "networkx"}, "planner": {"numpy", "networkx"}, "executor": {"numpy", "torch"}}
"""Package -> what it may import from outside, beside the standard library."""

ROOMS = {
    "planner/solver.py": {"pulp", "highspy"},
    "planner/report/": {"matplotlib"},
    "planner/profiling/": {"torch"},
    "planner/readers/topology/yaml_text.py": {"yaml"},
}
"""Part of a package -> what it may import on top of that."""

STDLIB_ONLY = ("cost_models/records/", "cost_models/ownership.py")

EXECUTOR_SEES = ("cost_models.records", "cost_models.laws", "cost_models.schedules", "cost_models.ownership")
"""What the executor sees of the other packages outside its command line."""


def imported(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands, and of modules started through a subprocess string."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                (node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
        elif isinstance(node, (ast.List, ast.Tuple)):
            for flag, name in itertools.pairwise(node.elts):
                if isinstance(flag, ast.Constant) and flag.value == "-m" and isinstance(name, ast.Constant):
                    yield node.lineno, str(name.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield from ((node.lineno, name) for name in _imports_in_text(node.value))


def _imports_in_text(text: str) -> list[str]:
    """Modules that a text would import if it were run as Python, or through `python -m`."""
    found = [word for flag, word in itertools.pairwise(text.split()) if flag == "-m"]
    if "import " in text:
        try:
            inner = ast.parse(text)
        except SyntaxError:
            return found
        for node in ast.walk(inner):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(node.module or "")
    return found


def breaches(path: str, source: str) -> list[str]:
    """What `source`, standing at `path`, imports and must not."""
    package = path.split("/")[0]
    if package not in BELOW:
        return []
    allowed = set(THIRD_PARTY[package])
    for room, extra in ROOMS.items():
        if path.startswith(room):
            allowed |= extra
    if path.startswith(STDLIB_ONLY):
        allowed = set()
    found = []
    for line, module in imported(source):
        top = module.split(".")[0]
        if top in OURS:
            legal = top in BELOW[package] and not (
                path.startswith(STDLIB_ONLY) and not module.startswith(("cost_models.records", "cost_models"))
            )
            if package == "executor" and top != "executor" and not path.startswith("executor/cli/"):
                legal = module.startswith(EXECUTOR_SEES) or module == "cost_models"
                legal |= path == "executor/measure.py" and module.startswith(
                    ("planner.profiling.clock", "planner.profiling.factory")
                )
                legal |= path == "executor/measure.py" and module in ("planner.profiling", "planner")
            if path == "planner/__init__.py":
                legal = False
        else:
            legal = top in allowed or top in sys.stdlib_module_names or top == ""
        if not legal:
            found.append(f"{path}:{line} imports {module}")
    return found


def sources() -> list[Path]:
    return [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_house(path: Path) -> None:
    assert breaches(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "planted"),
    [
        ("cost_models/step.py", "import planner"),
        ("cost_models/step.py", "def f():\n    from planner.search.best_first import choose"),
        ("cost_models/step.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import executor.mesh"),
        ("cost_models/step.py", "import torch"),
        ("cost_models/records/plan.py", "import numpy"),
        ("planner/search/best_first.py", "import pulp"),
        ("planner/search/best_first.py", "import matplotlib.pyplot as plt"),
        ("planner/search/best_first.py", "from executor import apply"),
        ("planner/search/best_first.py", "import subprocess\nsubprocess.run(['python', '-m', 'executor.train'])"),
        ("planner/search/best_first.py", "import subprocess\nsubprocess.run(['python', '-c', 'import torch'])"),
        ("planner/search/best_first.py", "import importlib\nimportlib.import_module('torch')"),
        ("planner/readers/topology/slurm.py", "import yaml"),
        ("planner/__init__.py", "import planner.errors"),
        ("executor/mesh.py", "from planner.search.best_first import choose"),
        ("executor/mesh.py", "from cost_models import stage"),
        ("executor/train.py", "import tests.conftest"),
    ],
)
def test_a_planted_breach_is_seen(path: str, planted: str) -> None:
    assert breaches(path, planted)


def test_the_house_has_the_folders_of_the_design_and_no_others() -> None:
    tracked = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    transient = {"build", "demo-results", "meshwright.egg-info", "__pycache__", "dist"}
    assert tracked - transient <= {"cost_models", "planner", "executor", "benchmarks", "tests", "notebooks"}


def test_the_wheel_names_every_package() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in BELOW
        for path in (ROOT / package).rglob("*.py")
    }
    assert sorted(listed) == sorted(found)
