"""A backward pass in two pieces: I, the gradients of the inputs, which the stage before waits for, and W, those of the weights.

Each product of the forward pass has one in either piece; attention, what is bound by memory and recompute are all in I, adding
up the weights' gradients is in W. Two pieces cost more than one:

  schedule.split.weight_grad   factor on W: its operands have left the caches and are read again, nothing else runs beside it
  schedule.split.input_grad    factor on I
  schedule.split.launch        floor of either piece of a layer, as a share of the layer's whole floor: the host walks the graph twice
  schedule.split.held          bytes of a micro-batch between I and W, over what a layer keeps without recompute: the operands
                               of the products and the gradients of their results. What was recomputed for I stays for W.

These belong to the runtime. What hides communication in a whole backward pass has only I to hide behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.blocks import Pass
from cost_models.calibrations import Rate, value
from cost_models.problem import Problem

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPrices:
    """Seconds of a backward pass that is split, one micro-batch; arrays [cell, kind, recompute], or (n,) of columns."""

    input_grad_compute_s: FloatArray
    """Kernels of I, recompute included."""
    input_grad_exposed_s: FloatArray
    """Communication of the backward pass that nothing hides: all of it is in I."""
    weight_grad_s: FloatArray
    """Kernels of W."""

    def spread(self, row: NDArray[np.int64], kinds: Sequence[int]) -> "SplitPrices":
        """These cells, under these kinds of recompute."""
        return SplitPrices(
            input_grad_compute_s=self.input_grad_compute_s[:, :, kinds][row],
            input_grad_exposed_s=self.input_grad_exposed_s[:, :, kinds][row],
            weight_grad_s=self.weight_grad_s[:, :, kinds][row],
        )


def split_seconds(problem: Problem, passed: Pass, launch: Rate | None) -> tuple[FloatArray, FloatArray]:
    """(I, W) kernel seconds of one block; `launch` is the floor of a layer, None for what is no layer."""
    which = (problem.cluster.pools[0].kind.device.family, problem.runtime.name)
    whole_s = passed.backward.total
    late_s = np.zeros_like(whole_s) if passed.weight_grad_s is None else passed.weight_grad_s
    pieces = [
        value(problem.calibration, f"schedule.split.{name}", *which) * seconds
        for name, seconds in (("input_grad", whole_s - late_s), ("weight_grad", late_s))
    ]
    if launch is not None:
        floor_s = launch.value * value(problem.calibration, "schedule.split.launch", *which)
        pieces = [(seconds**4 + floor_s**4) ** 0.25 for seconds in pieces]
    return np.asarray(pieces[0]), np.asarray(pieces[1])


def held_share(problem: Problem) -> float:
    """Bytes between I and W over those that are kept without recompute."""
    family = problem.cluster.pools[0].kind.device.family
    return value(problem.calibration, "schedule.split.held", family, problem.runtime.name)
