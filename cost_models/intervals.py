"""How far off a prediction may be: the 80% interval of a step, and the error of the ratio of two layouts.

Half-widths are of log(measured / predicted), from the residuals of published runs (coefficients `interval.*`):

  calibrated share   the residual of known runtimes, left out by model
  table share        the residual of runtimes and links of which nothing was measured
  measured share     the spread of repeated measurements of one configuration
  ranks              a term for each doubling above 8: the slowest of many sets the pace
"""

import math
from collections.abc import Mapping

from cost_models.calibrations import value
from cost_models.problem import Problem


def step_interval_s(problem: Problem, step_s: float, *, world: int, basis: Mapping[str, float]) -> tuple[float, float]:
    """(low, high) ends of the 80% interval of a step time.

    basis: shares of the step's seconds by what they rest on (measured, calibrated, table), summing to 1.
    """
    calibration, name = problem.calibration, problem.runtime.name
    family = problem.cluster.pools[0].kind.device.family
    half = sum(
        basis.get(rest, 0.0) * value(calibration, f"interval.{rest}", family, name)
        for rest in ("measured", "calibrated", "table")
    )
    per_doubling = value(calibration, "interval.per_doubling", name)
    half = math.hypot(half, per_doubling * math.log2(max(world / 8, 1.0)))
    return step_s * math.exp(-half), step_s * math.exp(half)


def pairwise_error(problem: Problem) -> float:
    """Relative error of the ratio of two predicted step times of one problem: closer ones are a tie."""
    family = problem.cluster.pools[0].kind.device.family
    return value(problem.calibration, "interval.pairwise", family, problem.runtime.name)
