"""Ranks of this machine, started by torchrun for one job in a folder."""

from collections.abc import Callable
from pathlib import Path

from executor.errors import RefusedError
from executor.launch import launch
from executor.settings import PROGRESS_MARK, REFUSED


class RunFailedError(RuntimeError):
    """A rank failed or was late: the answer is no, and says who."""

    exit_code = 1


def ranks_here(
    module: str, folder: Path, *, num_ranks: int, timeout_s: float, progress: Callable[[str], object], what: str
) -> None:
    """Runs `module` on the job in `folder`, one process a rank, and passes their progress on.

    RunFailedError, beginning with `what` failed, names the rank and shows its last lines; RefusedError where a rank refused.
    """
    from planner.profiling.clock import threads_per_rank

    def tell(text: str) -> None:
        for line in text.splitlines():
            if line.startswith(PROGRESS_MARK):
                progress(line.removeprefix(PROGRESS_MARK))

    result = launch(
        ["-m", module, str(folder)],
        num_ranks=num_ranks,
        timeout_s=timeout_s,
        environment={"OMP_NUM_THREADS": str(threads_per_rank(num_ranks))},
        log_dir=folder / "logs",
        on_stderr=tell,
    )
    refused = folder / REFUSED
    if refused.is_file():
        raise RefusedError(refused.read_text(encoding="utf-8"))
    if not result.ok:
        raise RunFailedError("\n    ".join([f"{what} failed: {result.reason}", *result.error_lines]))
