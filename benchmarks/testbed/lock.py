"""One testbed at a time on a machine: two at once would share its cores, and each would measure the other."""

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = Path(tempfile.gettempdir()) / "meshwright-testbed.lock"
WAIT_S = 90.0
"""How long to wait for another one to end: a test takes less than this, a benchmark says so in its error."""
POLL_S = 0.2


class TestbedBusyError(RuntimeError):
    """Another process has the testbed; the message names it."""

    __test__ = False


@contextlib.contextmanager
def alone(timeout_s: float = WAIT_S, path: Path = LOCK_FILE) -> Iterator[None]:
    """Holds the machine's testbed. The kernel lets go of it when this process ends, however it ends.

    Raises TestbedBusyError after `timeout_s`, naming the process that holds it.
    """
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + timeout_s
        while not _taken(file.fileno()):
            if time.monotonic() >= deadline:
                raise TestbedBusyError(
                    f"the testbed is held by {_holder(path)}, still after {timeout_s:.0f} s of waiting; wait for it, or end it"
                )
            time.sleep(POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} ({' '.join(sys.argv)[:120]}) since {time.strftime('%H:%M:%S')}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8") or "a process that has not said its name"
