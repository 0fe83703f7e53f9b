"""A line on stderr now and then while something long has no progress of its own to tell."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""Seconds of silence before a line, and between two."""


@contextmanager
def still_at(what: str, progress: Callable[[str], object], *, every_s: float = EVERY_S) -> Iterator[None]:
    """Tells `what` and how long it has taken, every `every_s` seconds until the block ends; what is quick says nothing."""
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            progress(f"{what}: {time.monotonic() - begun:.0f} s so far")

    thread = threading.Thread(target=tell, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
