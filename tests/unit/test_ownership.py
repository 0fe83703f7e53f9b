"""Somebody else's package under one of our import names is found, and said how to mend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cost_models.ownership import ForeignPackageError, verify

ROOT = Path(__file__).resolve().parents[2]


def test_our_own_packages_pass() -> None:
    verify()


def test_a_foreign_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForeignPackageError, match=r"'planner' leads to .*planner.*Rename that folder or uninstall"):
        verify(("planner",), root=tmp_path)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ForeignPackageError, match="leads to nowhere"):
        verify(("no_such_package_of_ours",))


def test_the_command_line_refuses_a_foreign_planner(tmp_path: Path) -> None:
    foreign = tmp_path / "planner"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise SystemExit('somebody else')")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from executor.cli import main; sys.exit(main(['help', 'pins']))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "the import name 'planner' leads to" in done.stderr
