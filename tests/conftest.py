"""What every test may ask for."""

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
