"""The peak of memory of this process, counted as the machine allows.

Resident memory tells what a run needs only while the C library hands freed blocks back at once: glibc keeps those below a
threshold that it raises up to 32 MiB by itself, and a peak then holds a quarter more than was ever in use (measured: 362
against 291 MiB). `exact_heap` pins the threshold while memory is measured; no step is timed meanwhile, for it costs time.
"""

import ctypes
import gc
import os
import platform
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cost_models.records import MemoryKind

SAMPLING_S = 0.005
"""Between two looks at the memory where the system keeps no resettable peak."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
EXACT_THRESHOLD_BYTES = 64 * 1024
"""Blocks from this size are mapped, and unmapped when freed: every tensor of note."""
CACHING_THRESHOLD_BYTES = 32 << 20
"""Where glibc's own adaptation ends on 64-bit machines (mallopt(3), M_MMAP_THRESHOLD)."""


@contextmanager
def exact_heap() -> Iterator[None]:
    """Freed blocks go back to the system at once; afterwards the heap keeps them, as glibc does in a long run."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if set_option is None:
        yield
        return
    set_option(M_MMAP_THRESHOLD, EXACT_THRESHOLD_BYTES)
    try:
        yield
    finally:
        set_option(M_MMAP_THRESHOLD, CACHING_THRESHOLD_BYTES)
        set_option(M_TRIM_THRESHOLD, 2 * CACHING_THRESHOLD_BYTES)


class PeakMemory:
    """Peak bytes of this process: what torch's allocator held on a GPU; else resident memory above that at `reset`'s base.

    The base is taken when the object is made: after imports and the start of the process group.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = MemoryKind.ALLOCATED if device.type == "cuda" else MemoryKind.RSS
        self._sampler: _Sampler | None = None
        if device.type == "cpu":
            trim_heap()
            self._base_bytes = resident_bytes()

    def reset(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not _reset_high_water():
            self._sampler = _Sampler()

    def peak_bytes(self) -> int:
        """The peak since `reset`."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = self._sampler.peak_bytes if self._sampler is not None else _high_water_bytes()
        return max(0, peak - self._base_bytes)

    def reserved_bytes(self) -> int | None:
        """The peak since `reset` of what torch's allocator held, used or not; None where there is no allocator to ask."""
        return int(torch.cuda.max_memory_reserved(self.device)) if self.device.type == "cuda" else None


def resident_bytes() -> int:
    """Resident memory of this process now; where the system does not tell (macOS), the peak so far."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if platform.system() == "Darwin" else 1024  # getrusage(2): bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_high_water() -> bool:
    """Linux: writing 5 to clear_refs resets VmHWM (proc(5)); False where it may not be written."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


class _Sampler:
    """Looks at the resident memory again and again, from a thread that ends with the process."""

    def __init__(self) -> None:
        self.peak_bytes = resident_bytes()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            time.sleep(SAMPLING_S)


def trim_heap() -> None:
    """Give freed memory back to the system where the C library can: else a built and freed model would count."""
    gc.collect()
    if platform.system() == "Linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
