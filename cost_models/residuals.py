"""What a measured run took beside what is counted, in two residuals; never one factor.

    allocated - analytic                 what tensors the analytic count misses, or counts twice: a matter of model and runtime
    reserved - allocated - buffers       what the allocator holds and does not use: a matter of sizes, order and allocator
                                         buffers: what the calibration already says that reserved memory has beside allocated

Both are bytes of a rank and are added, since a run on few GPUs holds as many layers on each as the full one: a factor would
carry the mistakes of one kind of tensor over to all others. Where there is no allocator (resident memory of CPU processes)
there is one residual, that of resident memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cost_models.calibrations import value_or
from cost_models.problem import Problem
from cost_models.records import Calibration, Coefficient, MemoryKind

NAME = "memory.residual_bytes"
"""`memory.residual_bytes.<allocated|reserved|rss>.<device family>.<runtime>`."""
WITH_RESERVE = (MemoryKind.RESERVED, MemoryKind.NVIDIA_SMI)
"""Kinds that count what the allocator holds, used or not."""


def residual_bytes(problem: Problem) -> float:
    """Bytes to add to the analytic count of this memory kind, signed; 0 where nothing was measured."""
    kind = problem.memory_kind
    first = MemoryKind.ALLOCATED if kind in WITH_RESERVE else kind
    kinds = (first, MemoryKind.RESERVED) if kind in WITH_RESERVE else (first,)
    family = problem.cluster.pools[0].kind.device.family
    return sum(value_or(0.0, problem.calibration, f"{NAME}.{one.value}", family, problem.runtime.name) for one in kinds)


def without_residuals(calibration: Calibration) -> Calibration:
    """The calibration without them: what the analytic count rests on."""
    kept = {name: one for name, one in calibration.coefficients.items() if not name.startswith(NAME)}
    return replace(calibration, coefficients=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The fullest rank of a run."""

    analytic_bytes: float
    """Counted, of the problem's memory kind, without any residual."""
    buffers_bytes: float
    """What the calibration says that reserved memory has beside allocated."""
    measured: Mapping[MemoryKind, float]
    """Bytes by kind."""


def residuals(
    problem: Problem, runs: Sequence[RankMemory], *, machine: str, date: str
) -> Iterator[tuple[str, Coefficient]]:
    """The residuals that runs of one problem show: the median of each."""
    family = problem.cluster.pools[0].kind.device.family
    first = problem.memory_kind
    found: dict[MemoryKind, list[float]] = {}
    for run in runs:
        if first in run.measured:
            found.setdefault(first, []).append(run.measured[first] - run.analytic_bytes)
        if MemoryKind.RESERVED in run.measured and MemoryKind.ALLOCATED in run.measured:
            held = run.measured[MemoryKind.RESERVED] - run.measured[MemoryKind.ALLOCATED]
            found.setdefault(MemoryKind.RESERVED, []).append(held - run.buffers_bytes)
    what = {MemoryKind.RESERVED: "reserved - allocated - buffers"}
    for kind, values in found.items():
        yield (
            f"{NAME}.{kind.value}.{family}.{problem.runtime.name}",
            Coefficient(
                value=median(values),
                unit="bytes",
                source=f"{what.get(kind, f'{kind.value} - analytic')} of the fullest rank of {len(values)} runs, on {machine}",
                date=date,
                rows=len(values),
            ),
        )
