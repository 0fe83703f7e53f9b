"""`import executor` is quick and ours."""

import subprocess
import sys
from pathlib import Path

import pytest

import executor

ROOT = Path(__file__).resolve().parents[2]


def test_importing_loads_no_torch() -> None:
    code = "import sys, executor, executor.launch; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'aply'; it has Parallel, apply, load, save, selfcheck"):
        _ = executor.aply


def test_a_stranger_of_the_same_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "__init__.py").write_text((ROOT / "executor" / "__init__.py").read_text())
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import executor"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "the import name 'executor' leads to" in done.stderr
