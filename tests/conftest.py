"""What every test may ask for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Real files from other people's runs; absent on a user's machine, and tests that read them skip there."""

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}, which is not here")
    return SHARED


GOLDEN = Path(__file__).parent / "unit" / "golden"
"""Files that hold what the project writes, byte for byte."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Holds a text equal to the golden file of that name."""

    def hold(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is absent; run with --update-golden once, and read what it writes"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; --update-golden writes it anew"

    return hold
