"""Start the ranks of this machine with torchrun, and end all of them: on success, failure, time-out or interrupt.

Workers of torchrun live in sessions of their own, so killing its process group leaves them behind. Each process therefore
carries a mark in its environment, by which all of them are found; and each dies with its parent. Loads no torch.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "MESHWRIGHT_LAUNCH"
"""Environment variable that names the launch a process belongs to."""
PROGRESS = "MESHWRIGHT_PROGRESS"
"""Environment variable: folder in which each rank notes the step that it begins."""
GRACE_S = 5.0
"""How long torchrun may take to end its workers before everything is killed."""
NUM_ERROR_LINES = 12
"""Last lines of a failed rank that are handed back."""
POLL_S = 0.05
ASK_WHERE = signal.SIGUSR1
"""Has a rank write to its stderr where it is (executor.rank registers it)."""
ANSWER_S = 1.0
"""How long ranks may take to do so."""

_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)")
"""An entry of torchrun's report."""
_VICTIM = re.compile(
    r"LateRankError|Connection (closed|reset) by peer|connectFullMesh failed|Timed out waiting|NCCL (timeout|error)"
)
"""Errors of a rank that lost another one."""
_LATE = re.compile(r"late: rank (\d+)\b")
"""How LateRankError names a single rank."""


_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of faulthandler's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How a launch ended."""

    ok: bool
    """Every rank ended with exit code 0."""
    seconds: float
    """From start to the end of the last process."""
    failed_rank: int | None
    """The rank that failed first, or stayed behind; None where all is well or no single rank is to blame."""
    exit_code: int | None
    """Of that rank; negative = killed by that signal."""
    reason: str
    """One sentence."""
    error_lines: tuple[str, ...]
    """Last lines that the rank wrote to stderr."""
    log_dir: Path
    """Files `<rank>/stderr.log` and `stdout.log` below it, and torchrun's own `torchrun.log`."""


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    on_stderr: Callable[[str], None] | None = None,
) -> Launched:
    """Run `arguments` (a script, or -m and a module, then its arguments) on `num_ranks` ranks of this machine.

    Ends within `timeout_s` plus a few seconds, whatever the ranks do, and leaves no process behind. `on_stderr` gets what
    rank 0 writes to stderr, as it comes. Restarts nothing.
    """
    if num_ranks < 1 or timeout_s <= 0:
        raise ValueError(
            f"num_ranks={num_ranks}, timeout_s={timeout_s}: at least one rank and a positive time-out are needed"
        )
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="meshwright-run-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "executor.launch", "--nnodes", "1", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", mark, "--max-restarts", "0"]
    command += ["--log-dir", str(log_dir), "--redirects", "3"]
    command += ["-m", "executor.rank", *arguments]
    start_s = time.monotonic()
    with (log_dir / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(environment, mark, log_dir),
            start_new_session=True,
        )
    try:
        timed_out = not _wait(process, start_s + timeout_s, log_dir, on_stderr)
        if timed_out:
            _ask_where(mark, process.pid)
    finally:
        _end(process, mark)
    seconds = time.monotonic() - start_s
    if timed_out:
        return _late(log_dir, num_ranks, seconds, timeout_s)
    if process.returncode == 0:
        reason = f"{num_ranks} ranks ended well in {seconds:.1f} s"
        return Launched(
            ok=True, seconds=seconds, failed_rank=None, exit_code=0, reason=reason, error_lines=(), log_dir=log_dir
        )
    return _failed(log_dir, seconds, process.returncode)


def _environment(given: Mapping[str, str] | None, mark: str, log_dir: Path) -> dict[str, str]:
    environment = {**os.environ, **(given or {})}
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    # torch 2.13 gives the workers the agent's store, in which a former group's addresses survive (pytorch issue 135712).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment[MARK] = mark
    environment[PROGRESS] = str(log_dir)
    return environment


def _wait(
    process: subprocess.Popen[bytes], deadline_s: float, log_dir: Path, on_stderr: Callable[[str], None] | None
) -> bool:
    """True when the process has ended, False at the deadline; passes on what rank 0 writes meanwhile."""
    read_bytes = 0
    while True:
        ended = process.poll() is not None
        if on_stderr is not None and (path := _log_of(log_dir, 0)) is not None:
            with path.open("rb") as stream:
                stream.seek(read_bytes)
                text = stream.read()
            read_bytes += len(text)
            if text:
                on_stderr(text.decode(errors="replace"))
        if ended or time.monotonic() > deadline_s:
            return ended
        time.sleep(POLL_S)


def _ask_where(mark: str, torchrun: int) -> None:
    """Have the ranks of this launch leave in their logs the lines at which they are: they are about to be ended."""
    for pid in processes_of(mark):
        with contextlib.suppress(OSError):
            # torchrun has executor.rank among its arguments, and would take the signal for its end, and the ranks with it
            if pid != torchrun and b"executor.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, ASK_WHERE)
    time.sleep(ANSWER_S)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End torchrun, which ends its workers, then whatever is left of this launch."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


def processes_of(mark: str) -> Iterator[int]:
    """Ids of the living processes that carry a launch's mark (Linux; elsewhere torchrun alone ends its workers)."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _log_of(log_dir: Path, rank: int, stream: str = "stderr") -> Path | None:
    return next(iter(sorted(log_dir.glob(f"*/attempt_0/{rank}/{stream}.log"))), None)


def _last_lines(log_dir: Path, rank: int) -> tuple[str, ...]:
    path = _log_of(log_dir, rank)
    if path is None:
        return ()
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return tuple(lines[-NUM_ERROR_LINES:])


def _doing(log_dir: Path, rank: int) -> str:
    """Where a rank was when it was asked or ended, from the last list of lines that faulthandler left in its log.

    The innermost line, and the innermost of those that are not Python's or an installed package's, where this is another.
    """
    path = _log_of(log_dir, rank)
    dumps = path.read_text(errors="replace").split("(most recent call first):")[1:] if path is not None else []
    frames = _FRAME.findall(dumps[-1]) if dumps else []
    if not frames:
        return ""
    installed = ("site-packages", f"{os.sep}lib{os.sep}python", "<frozen")
    own = next((frame for frame in frames if not any(part in frame[0] for part in installed)), frames[0])
    shown = [f"{name} ({Path(file).name}:{line})" for file, line, name in dict.fromkeys((frames[0], own))]
    return f"; rank {rank} was in {', called by '.join(shown)}"


def _failed(log_dir: Path, seconds: float, exit_code: int) -> Launched:
    """Which rank failed first: one killed from outside, else one whose error is not the loss of another, else the first."""
    report = (log_dir / "torchrun.log").read_text(errors="replace")
    failures = [(int(rank), int(code)) for rank, code in _FAILURE.findall(report)][::-1]  # its root cause stands last
    if not failures:
        lines = tuple(line for line in report.splitlines() if line.strip())[-NUM_ERROR_LINES:]
        reason = f"torchrun ended with exit code {exit_code} before any rank did"
        return Launched(
            ok=False,
            seconds=seconds,
            failed_rank=None,
            exit_code=exit_code,
            reason=reason,
            error_lines=lines,
            log_dir=log_dir,
        )

    def guilt(failure: tuple[int, int]) -> int:
        rank, code = failure
        if code < 0 and code != -signal.SIGTERM:
            return 0
        if code == -signal.SIGTERM:
            return 3
        return 2 if any(_VICTIM.search(line) for line in _last_lines(log_dir, rank)) else 1

    rank, code = min(failures, key=guilt)
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    lines = _last_lines(log_dir, rank)
    said = f": {lines[-1]}" if lines and code >= 0 else ""
    late = _LATE.search(said)
    said += _doing(log_dir, int(late[1])) if late else ""
    return Launched(
        ok=False,
        seconds=seconds,
        failed_rank=int(late[1]) if late else rank,
        exit_code=code,
        reason=f"rank {rank} {how}{said}",
        error_lines=lines,
        log_dir=log_dir,
    )


def _late(log_dir: Path, num_ranks: int, seconds: float, timeout_s: float) -> Launched:
    """Nobody failed, but the time is over: who is furthest behind, by the ranks' own notes."""
    steps = [_progress(log_dir, rank) for rank in range(num_ranks)]
    late = [rank for rank, step in enumerate(steps) if step == min(steps)]
    where, furthest = when(min(steps)), when(max(steps))
    if max(steps) == ABSENT:
        others = "no rank said how far it came"
    elif len(late) < num_ranks:
        shown = ", ".join(map(str, late))
        doing = _doing(log_dir, late[0]).removeprefix("; ")
        others = f"late: rank{'s' if len(late) > 1 else ''} {shown}, last seen {where}; the furthest was {furthest}"
        others += f"; {doing}" if doing else ""
    else:
        others = f"all ranks were last seen {where}"
    return Launched(
        ok=False,
        seconds=seconds,
        failed_rank=late[0] if len(late) < num_ranks else None,
        exit_code=None,
        reason=f"not done after {timeout_s:g} s; {others}",
        error_lines=_last_lines(log_dir, late[0]),
        log_dir=log_dir,
    )


ABSENT, UP, JOINED, BUILT = -4, -3, -2, -1
"""Moments of a rank before step 0: nothing heard of it, its program runs, it is in the process group, its model is built."""
_BEFORE = {
    ABSENT: "before its program ran",
    UP: "before the process group stood",
    JOINED: "while its model was built and checked",
    BUILT: "before the first step",
}


def when(step: int) -> str:
    """A step, or a moment before the first one, in words."""
    return _BEFORE.get(step, f"in step {step}")


def note_progress(rank: int, step: int) -> None:
    """Note, for the process that launched this rank, that it begins a step or reached a moment before the first one."""
    folder = os.environ.get(PROGRESS)
    if folder:
        Path(folder, f"progress-{rank}").write_text(str(step))


def _progress(log_dir: Path, rank: int) -> int:
    try:
        return int((log_dir / f"progress-{rank}").read_text())
    except (OSError, ValueError):
        return ABSENT


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """Have the kernel end a launched process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG = 1)."""
    if MARK in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main(sys.argv[1:])
