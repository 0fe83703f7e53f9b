"""Bounds of cells that know about memory: what recompute a cell needs at the very least, whatever its split.

Without them a cell that fits only with heavy recompute looks as fast as one that fits with none, and is opened for nothing.

Let a layer take t0 seconds and keep a0 bytes of a micro-batch under its fastest kind of recompute, and let ρ be the most bytes
that any kind saves for a second of its extra time. Over some devices with M bytes each, holding W bytes whatever is in flight
and Q·a0 of activations (Q: layers x micro-batches in flight, at least), the plan must save W + Q a0 - ΣM; a second of extra
time saves at most q ρ, q being the most micro-batches in flight. So the extra time is at least (W + Q a0 - ΣM) / (q ρ), and
nothing fits where even the thriftiest kind leaves W + Q a_min > ΣM.

    v = 1    all devices together: Q from putting as many layers as the load allows on the last stages, where q is least
    v > 1    the first device alone, which has the most in flight: chunks are equal, so its layers are known
"""

from dataclasses import dataclass

import numpy as np

from cost_models.problem import IntArray
from cost_models.records import Schedule
from cost_models.schedules import FloatArray, micro_batches_per_round


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellMemory:
    """What memory asks of each cell; arrays over cells."""

    pp: IntArray
    vpp: IntArray
    num_micro_batches: IntArray
    schedule: np.ndarray
    num_layers: int
    layer_s: FloatArray
    """(n, R) forward and backward of a layer, by kind of recompute."""
    layer_activation_bytes: FloatArray
    """(n, R) kept per micro-batch in flight."""
    layer_state_bytes: FloatArray
    """(n,) of a layer, whatever is in flight."""
    first_state_bytes: FloatArray
    """(n,) of the embedding, likewise."""
    other_bytes: FloatArray
    """(n,) of the whole pipeline besides layers and their activations, at least."""
    device_bytes: FloatArray
    """(n,) of each device, whatever it holds (context)."""
    limit_bytes: float
    """M of one device."""


def in_flight_of_first(pp: IntArray, vpp: IntArray, num_micro_batches: IntArray, schedule: np.ndarray) -> IntArray:
    """(n,) micro-batches in flight on the first device at its peak, summed over its virtual stages: forwards ahead, and one."""
    per_round = np.array(
        [micro_batches_per_round(p, m) for p, m in zip(pp.tolist(), num_micro_batches.tolist(), strict=True)]
    )
    ahead = np.where(schedule == Schedule.INTERLEAVED, (vpp - 1) * per_round + 2 * (pp - 1), pp - 1)
    everything = vpp * num_micro_batches
    return np.asarray(np.where(schedule == Schedule.GPIPE, everything, np.minimum(ahead + 1, everything)))


def extra_seconds(cells: CellMemory, most_layers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(n,) seconds per micro-batch of recompute that every plan pays: over all devices, and on the first device alone.

    most_layers: (n,) layers that one device may hold. Infinite where nothing fits.
    """
    fastest = np.lexsort((cells.layer_activation_bytes, cells.layer_s), axis=-1)[:, :1]
    t0 = np.take_along_axis(cells.layer_s, fastest, axis=1)
    a0 = np.take_along_axis(cells.layer_activation_bytes, fastest, axis=1)
    slower_s, saved = cells.layer_s - t0, a0 - cells.layer_activation_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where((saved > 0) & (slower_s > 0), saved / slower_s, 0.0).max(axis=1)
    rate = np.where(((saved > 0) & (slower_s <= 0)).any(axis=1), np.inf, rate)
    kept, least = a0[:, 0], cells.layer_activation_bytes.min(axis=1)
    first = in_flight_of_first(cells.pp, cells.vpp, cells.num_micro_batches, cells.schedule)
    chunked = cells.vpp > 1
    layers_first = cells.num_layers / cells.pp
    held = np.where(
        chunked,
        cells.layer_state_bytes * layers_first + cells.first_state_bytes + cells.device_bytes - cells.limit_bytes,
        cells.layer_state_bytes * cells.num_layers
        + cells.other_bytes
        + cells.pp * (cells.device_bytes - cells.limit_bytes),
    )
    flights = np.where(
        chunked, first * (layers_first / cells.vpp), _least_flights(cells, np.maximum(np.floor(most_layers), 0.0))
    )
    most_alive = _most_alive(cells, first)
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.maximum(held + flights * kept, 0.0)
        extra = np.where(needed > 0, needed / (most_alive * rate), 0.0)
    extra = np.where(held + flights * least > 0, np.inf, np.nan_to_num(extra, nan=np.inf, posinf=np.inf))
    return extra, np.where(chunked | (cells.pp == 1), extra, 0.0)


def _most_alive(cells: CellMemory, first: IntArray) -> FloatArray:
    """(n,) at least the most micro-batches in flight of one virtual stage.

    Interleaved, rounds of r through v chunks: of i forwards, chunk c has had at most i/v + r (1 - (c+1)/v), and of j backwards
    at least j/v - r (1 - (c+1)/v), so that at most (i-j)/v + 2 r (1 - 1/v) are alive; i - j is at most `first`.
    """
    pairs = zip(cells.pp.tolist(), cells.num_micro_batches.tolist(), strict=True)
    per_round = np.array([micro_batches_per_round(pp, num_micro) for pp, num_micro in pairs])
    looped = first / cells.vpp + 2 * per_round * (1 - 1 / cells.vpp)
    alive = np.where(cells.schedule == Schedule.INTERLEAVED, looped, first)
    return np.asarray(np.minimum(alive, cells.num_micro_batches))


def _least_flights(cells: CellMemory, most_layers: FloatArray) -> FloatArray:
    """(n,) least Σ over layers of the micro-batches in flight on their device (v = 1)."""
    num_layers, pp = cells.num_layers, cells.pp
    with np.errstate(divide="ignore", invalid="ignore"):
        full = np.where(most_layers > 0, np.minimum(num_layers // np.maximum(most_layers, 1), pp), 0)
    rest = num_layers - full * most_layers
    # the j-th stage from the end has j in flight
    filled = most_layers * full * (full + 1) / 2 + rest * np.minimum(full + 1, pp)
    return np.asarray(np.where(cells.schedule == Schedule.GPIPE, cells.num_micro_batches * num_layers, filled))
