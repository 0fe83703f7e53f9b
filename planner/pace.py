"""What long work is at, told now and then: nothing of what is quick, and no flood of what is slow."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

EVERY_S = 3.0
"""Seconds before the first line, and between lines."""

Tell = Callable[[str], None]
"""Takes one line."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Passes a line on where the last one is old enough; without `tell` it is silent."""

    tell: Tell | None = None
    last_s: float = field(default_factory=lambda: time.monotonic())

    def at(self, words: Callable[[], str]) -> None:
        """Tells what is being done, if it is time; `words` are made only then."""
        now = time.monotonic()
        if self.tell is not None and now - self.last_s >= EVERY_S:
            self.last_s = now
            self.tell(words())
