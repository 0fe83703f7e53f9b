"""Processes that measure at the same time: started here with a time-out that says who is late, or joined under torchrun."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05
"""Between two looks at the processes."""
GRACE_S = 5.0
"""From asking a process to end until it is killed; and, once one has failed, for the others to fail by themselves."""
TAIL_LINES = 12
"""Lines of a failed rank's output that its error repeats."""
PROGRESS_MARK = "progress: "
"""Rank 0 begins the lines with it that are meant for people."""


class RankError(RuntimeError):
    """A process ended with an error, or did not end in time."""

    exit_code = 1

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int,
    timeout_s: float,
    progress: Callable[[str], object] | None = None,
    environment: Mapping[str, str] | None = None,
    leader_decides: bool = False,
) -> None:
    """Run `python -m module arguments` as `ranks` processes of one group and wait for all of them.

    Each finds RANK, WORLD_SIZE, LOCAL_RANK, MESHWRIGHT_RENDEZVOUS (a file) and OMP_NUM_THREADS in its environment. Raises
    RankError, after the end of all processes, where one fails or `timeout_s` passes; it names the ranks. With `leader_decides`
    only rank 0 is waited for, and whoever still runs then is ended: it may be one that never answered.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                surroundings = {
                    **os.environ,
                    **(environment or {}),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "OMP_NUM_THREADS": str(threads),
                    "MESHWRIGHT_RENDEZVOUS": str(Path(folder) / "rendezvous"),
                }
                with logs[rank].open("wb") as log:
                    command = [sys.executable, "-m", module, *arguments]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=surroundings))
            _wait(processes[:1] if leader_decides else processes, logs, timeout_s, progress)
        finally:
            _end(processes)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Sequence[Path],
    timeout_s: float,
    progress: Callable[[str], object] | None,
) -> None:
    deadline = time.monotonic() + timeout_s
    told = 0
    while True:
        codes = [process.poll() for process in processes]
        told = _tell(logs[0], told, progress)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise _failure(failed, codes, logs)
        late = [rank for rank, code in enumerate(codes) if code is None]
        if not late:
            return
        if time.monotonic() > deadline:
            names = ", ".join(map(str, late))
            last = "; ".join(f"rank {rank}: {_last_line(logs[rank])}" for rank in late)
            raise RankError(
                f"late after {timeout_s:.0f} s: rank {names} of {len(processes)}, which were ended. Last words: {last}. "
                "Give more time, or fewer ranks",
                tuple(late),
            )
        time.sleep(POLL_S)


def _tell(log: Path, told: int, progress: Callable[[str], object] | None) -> int:
    if progress is None:
        return told
    lines = [line for line in _lines(log) if line.startswith(PROGRESS_MARK)]
    for line in lines[told:]:
        progress(line.removeprefix(PROGRESS_MARK))
    return len(lines)


def _failure(failed: list[int], codes: Sequence[int | None], logs: Sequence[Path]) -> RankError:
    first = failed[0]
    tail = "\n  ".join(_lines(logs[first])[-TAIL_LINES:])
    ends = ", ".join(f"rank {rank} ended with {codes[rank]}" for rank in failed)
    return RankError(f"{ends}; the others were ended. Last lines of rank {first}:\n  {tail}", tuple(failed))


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []


def _last_line(log: Path) -> str:
    lines = [line for line in _lines(log) if line.strip()]
    return lines[-1] if lines else "none"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no orphan: ask, then kill."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def joined(*, backend: str, timeout_s: float) -> Iterator[tuple[int, int]]:
    """(rank, ranks) inside the group that the environment describes: `run_ranks`'s, or torchrun's."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rendezvous = os.environ.get("MESHWRIGHT_RENDEZVOUS")
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}" if rendezvous else "env://",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield rank, ranks
    finally:
        dist.destroy_process_group()


def say(rank: int, text: str) -> None:
    """Progress for people, from rank 0 alone."""
    if rank == 0:
        print(f"{PROGRESS_MARK}{text}", file=sys.stderr, flush=True)
