"""What a verb answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A document for programs, a text for people, and how it ended."""

    document: Any
    """Plain JSON data."""
    text: Callable[[], str]
    """Renders the text; called only where no --json was asked."""
    exit_code: int = 0
    """0 done, 1 the answer is no."""
