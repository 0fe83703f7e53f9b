"""Ranks of one program, each in a host of the shaped network. The program imports what it needs once, then forks."""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

CLONE_NEWNET = 0x40000000
"""setns(2)."""
PRIORITY = -19
"""So that other work on the machine lengthens messages little."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h: a rank ends with the program that started it."""
POLL_S = 0.02


def start(work: Callable[[int], None], places: Sequence[str], timeout_s: float) -> None:
    """`work(rank)` in each of `places` (host:interface). Exits with an error that names the ranks that fail or are late."""
    pids = [_fork(work, rank, *place.split(":")) for rank, place in enumerate(places)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids) and not any(codes.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    failed = [f"rank {rank} ended with {code}" for rank, code in sorted(codes.items()) if code]
    late = [f"rank {rank} is late after {timeout_s:.0f} s" for rank in range(len(pids)) if rank not in codes]
    if failed or late:
        sys.exit("; ".join(failed or late))


def _fork(work: Callable[[int], None], rank: int, host: str, interface: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.nice(PRIORITY)
        work(rank)
        code = 0
    except BaseException:  # noqa: BLE001 -- a fork must end here, whatever happens
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def enter(host: str) -> None:
    """Move this process to the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{host}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {host}")
    finally:
        os.close(descriptor)
