"""The most probable logarithms of coefficients on a linear model: pseudo-Huber loss, log-normal priors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

INNER = 30
"""Reweighted least squares on the linear model; converges in about ten."""


def _hessian(
    residual: FloatArray, slopes: FloatArray, spread: FloatArray, scale: float, weights: FloatArray | float
) -> tuple[FloatArray, FloatArray]:
    """Curvature of the loss and its priors, and the weight of each row."""
    robust = np.asarray(weights / (scale**2 * np.sqrt(1 + (residual / scale) ** 2)))
    return slopes.T @ (robust[:, None] * slopes) + np.diag(1 / spread**2), robust


def most_probable(
    point: FloatArray,
    residual: FloatArray,
    slopes: FloatArray,
    *,
    mean: FloatArray,
    spread: FloatArray,
    scale: float,
    longest: float,
    weights: FloatArray | float = 1.0,
    bound: ArrayLike = np.inf,
) -> FloatArray:
    """(n,) logarithms, from the residuals (rows,) and slopes (rows, n) at `point`; none above `bound`.

    mean, spread: (n,) of the priors; residuals beyond `scale` count linearly; no step is longer than `longest`.
    """
    logs = point.copy()
    for _ in range(INNER):
        left = residual + slopes @ (logs - point)
        hessian, robust = _hessian(left, slopes, spread, scale, weights)
        gradient = slopes.T @ (robust * left) + (logs - mean) / spread**2
        free = ~((logs >= np.asarray(bound) - 1e-12) & (gradient < 0))
        change = np.zeros(len(point))
        change[free] = np.linalg.solve(hessian[np.ix_(free, free)], -gradient[free])
        logs = np.minimum(logs + np.clip(change, -longest, longest), bound)
        if np.max(np.abs(change)) < 1e-6:
            break
    return np.asarray(logs)


def deviations(
    residual: FloatArray, slopes: FloatArray, spread: FloatArray, *, scale: float, weights: FloatArray | float = 1.0
) -> FloatArray:
    """(n,) posterior standard deviation of each logarithm."""
    hessian, _ = _hessian(residual, slopes, spread, scale, weights)
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(hessian))))
