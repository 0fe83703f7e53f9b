"""Near full memory an allocator may free and ask again (cudaMalloc retries), and steps take longer: by 10 to 50% on a few
published runs, by nothing on most.

Which runs it hits is not identifiable: of the published ones, those that slowed down are predicted to hold 52 to 87% of what
is usable, and more than a hundred that did not, 95% and more. So no expected time carries it. Only the upper end of the 80%
interval does: by a share that is 0 up to `memory.pressure.start` of what is usable, and rises to `memory.pressure.most` where
nothing is left. More memory on a device therefore never widens it.
"""

from cost_models.calibrations import value
from cost_models.memory import usable_bytes
from cost_models.problem import Problem


def slowdown_share(problem: Problem, expected_bytes: float) -> float:
    """Share of a step by which the upper end of its interval rises."""
    start = value(problem.calibration, "memory.pressure.start")
    most = value(problem.calibration, "memory.pressure.most")
    usable = usable_bytes(problem)
    if usable <= 0:
        return most
    return most * min(max((expected_bytes / usable - start) / (1.0 - start), 0.0), 1.0)
