"""How plans are measured, and the files that tell the ranks. Loads no torch: who starts the ranks need not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cost_models.records import Plan, save
from executor.errors import RefusedError

REFERENCE_SIDE = 512
"""Of the matrices of the reference product: two milliseconds on a core of today."""
REFERENCE_KEY = f"matmul/fp32/{REFERENCE_SIDE}x{REFERENCE_SIDE}x{REFERENCE_SIDE}"
"""Its key in a profile."""
PROGRESS_MARK = "progress: "
"""Rank 0 begins the lines with it that are meant for people."""
REFUSED = "refused.txt"
"""A file that a rank leaves in the folder of its job where the input is wrong: why, in words."""
LEAST_WARMUP = 2
"""Optimizer steps before anything counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a plan is measured."""

    steps: int = 5
    """Steps that count."""
    warmup: int = LEAST_WARMUP
    """Steps before them."""
    module: str | None = None
    """package.module:factory of the model, without arguments; null = Meshwright's own decoder."""
    seed: int = 0
    """Of weights and tokens."""
    check: bool = True
    """Compare layout, loss and gradients with one process's before anything is measured."""
    trace: str | None = None
    """Folder for a trace of one further step on each rank, made by torch's profiler; null = none."""
    timeout_s: float = 300.0
    """Longest wait for another rank."""

    def __post_init__(self) -> None:
        if self.warmup < LEAST_WARMUP or self.steps < 1:
            raise RefusedError(
                f"warmup={self.warmup}, steps={self.steps}: at least {LEAST_WARMUP} optimizer steps go before those that "
                "count (the first allocates the optimizer's state), and at least one counts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The file job.json of a folder: which plans lie there, and how to measure them."""

    plans: tuple[str, ...]
    """Names of the plans' files in the folder."""
    settings: Settings = field(default_factory=Settings)
    """How."""


def write_job(folder: Path, plans: Sequence[Plan], settings: Settings) -> None:
    """Leave in `folder` what `python -m executor.measure folder` on each rank will read."""
    names = tuple(f"plan{index}.json" for index in range(len(plans)))
    for name, plan in zip(names, plans, strict=True):
        save(plan, folder / name)
    save(Job(plans=names, settings=settings), folder / "job.json")
