"""Bounds of cells that know about memory: what recompute a cell needs at the very least, whatever its split.

Without them a cell that fits only with heavy recompute looks as fast as one that fits with none, and is opened for nothing.

Of each kind of layer, let one take t0 seconds and keep a0 bytes of a micro-batch under its fastest kind of recompute. The other kinds save bytes
for seconds; of mixtures the best lie on the upper hull of (seconds, bytes), whose segments have falling rates ρ. With q
micro-batches in flight a segment saves q ρ bytes a second.

    v = 1    All devices together: they must save W + Q a0 - Σ M, where W is what they hold whatever is in flight, and Q the
             least Σ over layers of micro-batches in flight: as many layers as the load allows on the last stages, where q is
             least. A second of extra time saves at most q ρ for the largest q and ρ. With several kinds of layers each
             counts its own bytes once, and those of further micro-batches as the least of all kinds.
             And device by device: under a load τ, device p holds at most as many layers as fit into its time and its
             memory with q = pp - p micro-batches in flight, a linear programme of two rows; all devices together must hold
             the layers of the commonest kind. The least such τ is a load that some device has.
    v > 1    The first device alone, which has the most in flight: chunks are equal, so its layers are known. For each of its
             in-flight vectors the segments of its chunks are taken by falling q ρ until enough is saved: the fractional
             knapsack, a lower bound on any mixture of whole layers.
Where even the thriftiest kind saves too little, nothing fits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from cost_models.problem import IntArray
from cost_models.records import Schedule
from cost_models.schedules import FloatArray, Pipeline, max_in_flight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellMemory:
    """What memory asks of each cell; arrays over cells."""

    pp: IntArray
    vpp: IntArray
    num_micro_batches: IntArray
    schedule: np.ndarray
    layer_counts: IntArray
    """(L,) layers of each kind."""
    layer_places: IntArray
    """(layers,) the number of each layer's kind, in the order of the model."""
    layer_s: FloatArray
    """(n, L, R) forward and backward of a layer, by kind of layer and of recompute."""
    layer_activation_bytes: FloatArray
    """(n, L, R) kept per micro-batch in flight."""
    layer_state_bytes: FloatArray
    """(n, L) of a layer, whatever is in flight."""
    first_state_bytes: FloatArray
    """(n,) of the embedding, likewise."""
    other_bytes: FloatArray
    """(n,) of the whole pipeline besides layers and their activations, at least."""
    device_bytes: FloatArray
    """(n,) of each device, whatever it holds (context)."""
    limit_bytes: float
    """M of one device."""
    end_s: FloatArray
    """(n, 2) forward and backward of embedding and head, at least."""
    end_state_bytes: FloatArray
    """(n, 2) of embedding and head, whatever is in flight."""
    end_activation_bytes: FloatArray
    """(n, 2) of embedding and head, kept per micro-batch in flight."""
    hop_s: FloatArray
    """(n,) least seconds of a hop, one way."""

    def take(self, chosen: IntArray) -> "CellMemory":
        """What memory asks of some of the cells."""
        whole = ("layer_counts", "layer_places", "limit_bytes")
        arrays = {e.name: getattr(self, e.name)[chosen] for e in fields(self) if e.name not in whole}
        return replace(self, **arrays)


@lru_cache(maxsize=4096)
def vectors_of(pipeline: Pipeline) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`max_in_flight`, from fewer micro-batches where more change nothing.

    Interleaved with rounds of pp micro-batches: the warm-up takes less than v + 1 rounds of forwards, then one forward and one
    backward in turn repeat with the period of one round through all chunks; four rounds hold the warm-up and a period. 1f1b is
    the same with one chunk. GPipe keeps every micro-batch.
    """
    pp, num_micro = pipeline.num_devices, pipeline.num_micro_batches
    if pipeline.schedule is Schedule.GPIPE:
        return (((num_micro,),),) * pp
    if pipeline.schedule is Schedule.ONE_F_ONE_B or (pipeline.schedule is Schedule.INTERLEAVED and num_micro % pp == 0):
        pipeline = replace(pipeline, num_micro_batches=min(num_micro, 4 * pp))
    return max_in_flight(pipeline)


def extra_seconds(cells: CellMemory, most_layers: FloatArray, wanted: np.ndarray) -> tuple[FloatArray, FloatArray]:
    """(n,) seconds per micro-batch of recompute that every plan pays: over all devices, and on the first device alone.

    most_layers: (n,) layers that one device may hold; wanted: (n,) the cells to look at, 0 for the others. Infinite where
    nothing fits.
    """
    seconds, saved = _hull(cells)
    total, first = np.zeros(len(cells.pp)), np.zeros(len(cells.pp))
    plain = np.flatnonzero(wanted & (cells.vpp == 1))
    total[plain] = _together(cells, most_layers, seconds, saved, plain)
    alone = plain[cells.pp[plain] == 1]
    first[alone] = total[alone]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index in np.flatnonzero(wanted & (cells.vpp > 1)).tolist():
        pp, num_micro = int(cells.pp[index]), int(cells.num_micro_batches[index])
        rounds = min(num_micro, 4 * pp) if num_micro % pp == 0 else num_micro
        groups.setdefault((pp, int(cells.vpp[index]), rounds), []).append(index)
    for (pp, vpp, num_micro), members in groups.items():
        pipeline = Pipeline(
            schedule=Schedule.INTERLEAVED, num_devices=pp, num_virtual_per_device=vpp, num_micro_batches=num_micro
        )
        here = np.array(members)
        vectors = np.array(vectors_of(pipeline)[0], dtype=np.float64)
        first[here] = total[here] = _first_device(cells, vectors, seconds[here], saved[here], here)
    return total, first


def least_loads(cells: CellMemory, below_s: FloatArray, wanted: np.ndarray) -> FloatArray:
    """(n,) v = 1: some device of every plan that fits has at least this load; infinite where it is more than `below_s`.

    0 for the cells that are not wanted, and where v > 1.
    """
    loads = np.zeros(len(cells.pp))
    for where, devices in _alike(cells, wanted):
        loads[where] = devices.least_load(below_s[where])
    return loads


def least_steps(
    cells: CellMemory, above_s: FloatArray, below_s: FloatArray, tail_s: float, wanted: np.ndarray
) -> FloatArray:
    """(n,) v = 1: R of every plan that fits is at least this, where it is known to be at least `above_s`; infinite where it is
    more than `below_s`. `above_s` for the cells that are not wanted, and where v > 1.

    R ≥ A_p + m W_p + tail_0 for each device p, A_p the work of the stages before it. The more layers the first devices take the
    sooner all are placed: a layer more before device p leaves room for 1/m of a layer less on it. So, for an R, each device in
    turn takes as many as its time and memory allow; where layers are left over, that R is too small.
    """
    steps = above_s.copy()
    for where, devices in _alike(cells, wanted):
        num_micro = cells.num_micro_batches[where]
        steps[where] = devices.least_step(above_s[where], below_s[where], num_micro, tail_s)
    return steps


def _alike(cells: CellMemory, wanted: np.ndarray) -> Iterator[tuple[IntArray, "Devices"]]:
    """Cells with v = 1 that have the same numbers in flight, together."""
    gpipe = cells.schedule == Schedule.GPIPE
    most_alive = np.where(gpipe, cells.num_micro_batches, np.minimum(cells.num_micro_batches, cells.pp))
    keys = np.stack([cells.pp, most_alive, gpipe], axis=1)
    members = np.flatnonzero(wanted & (cells.vpp == 1))
    shapes, group = np.unique(keys[members], axis=0, return_inverse=True)
    for number, (pp, alive, keeps_all) in enumerate(shapes.tolist()):
        in_flight = np.full(pp, alive) if keeps_all else np.minimum(pp - np.arange(pp), alive)
        for where in _slices(members[group.ravel() == number], pp):
            yield where, Devices.of(cells, where, in_flight.astype(np.float64))


_MOST_NUMBERS = 2_000_000
"""Cells times devices that are looked at together."""
_HALVINGS = 12
"""Of the interval in which the least load lies: to 1/4,000 of it."""


def _slices(members: IntArray, pp: int) -> list[IntArray]:
    return np.array_split(members, max(1, -(-len(members) * pp // _MOST_NUMBERS)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Devices:
    """Cells with the same numbers in flight: what each device has left for layers of the commonest kind."""

    num_layers: int
    layer_s: FloatArray
    """(n, 1 or pp, R) of one layer: on all devices, or on each."""
    layer_bytes: FloatArray
    """(n, pp, R) of one layer, with the micro-batches in flight."""
    used_s: FloatArray
    """(n, pp) embedding, head and hops."""
    room_bytes: FloatArray
    """(n, pp) without embedding, head and what every device holds."""

    @classmethod
    def of(cls, cells: CellMemory, where: IntArray, in_flight: FloatArray) -> "Devices":
        """The devices of the cells `where`, with so many micro-batches in flight (pp,)."""
        kind, pp = int(np.argmax(cells.layer_counts)), len(in_flight)
        at_end = np.zeros((2, pp))
        at_end[0, 0], at_end[1, -1] = 1.0, 1.0
        hops = (np.arange(pp) > 0).astype(float) + (np.arange(pp) < pp - 1)
        held = cells.end_state_bytes[where] @ at_end + cells.end_activation_bytes[where] @ (at_end * in_flight)
        return cls(
            num_layers=int(cells.layer_counts[kind]),
            layer_s=cells.layer_s[where, kind, None],
            layer_bytes=cells.layer_state_bytes[where, kind, None, None]
            + in_flight[:, None] * cells.layer_activation_bytes[where, kind][:, None],
            used_s=cells.end_s[where] @ at_end + cells.hop_s[where, None] * hops,
            room_bytes=cells.limit_bytes - cells.device_bytes[where, None] - held,
        )

    def holds(self, load_s: FloatArray) -> np.ndarray:
        """(n,) whether devices with at most this load can hold the layers."""
        left_s, left = load_s[:, None] - self.used_s, self.room_bytes
        whole = most_whole(left_s, left, self.layer_s, self.layer_bytes).sum(axis=1)
        ends = (left[:, [0, -1]] >= 0).all(axis=1) & (left_s[:, [0, -1]] >= -1e-9 * load_s[:, None]).all(axis=1)
        return np.asarray((whole >= self.num_layers) & ends)

    def least_load(self, below_s: FloatArray) -> FloatArray:
        """(n,) the least load, rounded down; infinite where it is more than `below_s`."""
        longest = self.num_layers * self.layer_s.max(axis=(1, 2)) + self.used_s.max(axis=1)
        high = np.minimum(below_s, longest)
        possible = self.holds(high)
        low = np.zeros_like(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = self.holds(middle)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return np.where(possible, low, np.inf)

    def ends_by(self, step_s: FloatArray, num_micro: IntArray) -> np.ndarray:
        """(n,) whether all layers can be placed such that A_p + m W_p ≤ `step_s` for each device p, all of one kind."""
        layer_s = self.layer_s[:, 0]
        placed, fastest_s = np.zeros(len(step_s)), layer_s.min(axis=1)
        possible = (self.room_bytes[:, [0, -1]] >= 0).all(axis=1)
        for device in range(self.used_s.shape[1]):
            before_s = fastest_s * placed + (self.used_s[:, 0] if device else 0.0)
            left_s = (step_s - before_s) / num_micro - self.used_s[:, device]
            possible &= left_s >= -1e-9 * step_s
            most = most_whole(left_s, self.room_bytes[:, device], layer_s, self.layer_bytes[:, device])
            placed = np.minimum(placed + most, self.num_layers)
        return np.asarray(possible & (placed >= self.num_layers))

    def least_step(self, above_s: FloatArray, below_s: FloatArray, num_micro: IntArray, tail_s: float) -> FloatArray:
        """(n,) the least R, rounded down; infinite where it is more than `below_s`."""
        low, high = above_s.copy(), np.maximum(below_s, above_s)
        possible = self.ends_by(high - tail_s, num_micro)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = self.ends_by(middle - tail_s, num_micro)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return np.where(possible, low, np.inf)


def most_whole(left_s: FloatArray, left_bytes: FloatArray, seconds: FloatArray, size: FloatArray) -> FloatArray:
    """(...,) whole layers that fit into this time and memory, at most: a linear programme of two rows.

    seconds and size: (..., R) of one layer under each kind of recompute.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.minimum(left_s[..., None] / seconds, left_bytes[..., None] / size).max(axis=-1)
        for one, two in itertools.combinations(range(size.shape[-1]), 2):
            # a vertex of both rows: time and memory used up by two kinds of recompute
            t1, t2, b1, b2 = seconds[..., one], seconds[..., two], size[..., one], size[..., two]
            x1, x2 = left_s * b2 - t2 * left_bytes, t1 * left_bytes - left_s * b1
            both = (x1 + x2) / (t1 * b2 - t2 * b1)
            inside = (x1 * (t1 * b2 - t2 * b1) >= 0) & (x2 * (t1 * b2 - t2 * b1) >= 0) & np.isfinite(both)
            most = np.where(inside, np.maximum(most, both), most)
    return np.asarray(np.floor(np.maximum(most, 0.0) * (1 + 1e-9) + 1e-9))


def _fastest(cells: CellMemory) -> tuple[FloatArray, FloatArray]:
    """(n, L) seconds and bytes of a layer under its fastest kind; of equally fast kinds the thriftiest."""
    place = np.lexsort((cells.layer_activation_bytes, cells.layer_s), axis=-1)[..., :1]
    return (
        np.take_along_axis(cells.layer_s, place, axis=-1)[..., 0],
        np.take_along_axis(cells.layer_activation_bytes, place, axis=-1)[..., 0],
    )


def _hull(cells: CellMemory) -> tuple[FloatArray, FloatArray]:
    """(n, L, R-1) seconds and bytes saved of the hull's segments of one layer, by falling rate; zeros where there are fewer."""
    at_s, at_bytes = _fastest(cells)
    slower_s, saved = cells.layer_s - at_s[..., None], at_bytes[..., None] - cells.layer_activation_bytes
    here_s, here_bytes = np.zeros_like(at_s), np.zeros_like(at_s)
    segments_s, segments_bytes = [], []
    for _ in range(cells.layer_s.shape[-1] - 1):
        more_s, more_bytes = slower_s - here_s[..., None], saved - here_bytes[..., None]
        useful = (more_s > 0) & (more_bytes > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(useful, more_bytes / more_s, -1.0)
        best = rate.argmax(axis=-1)[..., None]
        any_left = np.take_along_axis(useful, best, axis=-1)[..., 0]
        step_s = np.where(any_left, np.take_along_axis(more_s, best, axis=-1)[..., 0], 0.0)
        step_bytes = np.where(any_left, np.take_along_axis(more_bytes, best, axis=-1)[..., 0], 0.0)
        here_s, here_bytes = here_s + step_s, here_bytes + step_bytes
        segments_s.append(step_s)
        segments_bytes.append(step_bytes)
    if not segments_s:
        return np.zeros((*at_s.shape, 1)), np.zeros((*at_s.shape, 1))
    return np.stack(segments_s, axis=-1), np.stack(segments_bytes, axis=-1)


def _together(
    cells: CellMemory, most_layers: FloatArray, seconds: FloatArray, saved: FloatArray, where: IntArray
) -> FloatArray:
    """v = 1: extra seconds over all devices of the cells `where`."""
    pp, num_micro = cells.pp[where], cells.num_micro_batches[where]
    more_flights = _least_flights(cells, np.maximum(np.floor(most_layers), 0.0))[where] - cells.layer_counts.sum()
    held = cells.layer_state_bytes[where] @ cells.layer_counts + cells.other_bytes[where]
    held = held + pp * (cells.device_bytes[where] - cells.limit_bytes)

    def kept_at_least(bytes_of_a_layer: FloatArray) -> FloatArray:
        return np.asarray(bytes_of_a_layer @ cells.layer_counts + more_flights * bytes_of_a_layer.min(axis=1))

    needed = held + kept_at_least(_fastest(cells)[1][where])
    too_much = held + kept_at_least(cells.layer_activation_bytes[where].min(axis=2)) > 0
    alive = np.where(cells.schedule[where] == Schedule.GPIPE, num_micro, np.minimum(pp, num_micro))
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.nan_to_num(saved[where, :, 0] / seconds[where, :, 0], nan=0.0, posinf=0.0)
        extra = np.where(needed > 0, needed / (alive * rates.max(axis=1)), 0.0)
    return np.where(too_much, np.inf, extra)


def layers_of_chunks(layer_places: IntArray, pp: int, vpp: int, device: int) -> IntArray:
    """(vpp, L) layers of each kind in the virtual stages of a device, where all hold as many."""
    each = len(layer_places) // (pp * vpp)
    begin = (np.arange(vpp) * pp + device) * each
    done = np.zeros((len(layer_places) + 1, int(layer_places.max()) + 1), dtype=np.int64)
    np.cumsum(layer_places[:, None] == np.arange(done.shape[1]), axis=0, out=done[1:])
    return np.asarray(done[begin + each] - done[begin])


def _first_device(
    cells: CellMemory, vectors: FloatArray, seconds: FloatArray, saved: FloatArray, where: IntArray
) -> FloatArray:
    """v > 1: extra seconds of the first device of the cells `where`, which share its in-flight vectors (V, v)."""
    vpp = vectors.shape[1]
    layers = layers_of_chunks(cells.layer_places, int(cells.pp[where[0]]), vpp, 0)
    held = cells.layer_state_bytes[where] @ layers.sum(axis=0) + cells.first_state_bytes[where]
    held = held + cells.device_bytes[where] - cells.limit_bytes
    alive = vectors @ layers  # (V, L) layers times micro-batches in flight
    needed = held[:, None] + _fastest(cells)[1][where] @ alive.T
    # items (cells, vectors, kinds of layers in chunks x segments)
    chunk, kind = np.nonzero(layers)
    count = layers[chunk, kind]
    shape = (len(where), len(vectors), len(kind) * seconds.shape[-1])
    item_bytes = ((vectors[:, chunk] * count)[None, ..., None] * saved[:, None, kind]).reshape(shape)
    times = (count[:, None] * seconds[:, kind])[:, None]
    item_s = np.broadcast_to(times, (*shape[:2], *times.shape[2:])).reshape(shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.nan_to_num(item_bytes / item_s, nan=0.0)
    order = np.argsort(-rate, axis=-1, kind="stable")
    item_bytes, item_s = np.take_along_axis(item_bytes, order, axis=-1), np.take_along_axis(item_s, order, axis=-1)
    before = np.cumsum(item_bytes, axis=-1) - item_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip(np.nan_to_num((needed[..., None] - before) / item_bytes, nan=0.0, posinf=0.0), 0.0, 1.0)
    extra = (share * item_s).sum(axis=-1)
    extra = np.where(needed > item_bytes.sum(axis=-1) * (1 + 1e-12), np.where(needed > 0, np.inf, 0.0), extra)
    return np.asarray(extra.max(axis=1))


def _least_flights(cells: CellMemory, most_layers: FloatArray) -> FloatArray:
    """(n,) least Σ over layers of the micro-batches in flight on their device (v = 1)."""
    num_layers, pp = int(cells.layer_counts.sum()), cells.pp
    with np.errstate(divide="ignore", invalid="ignore"):
        full = np.where(most_layers > 0, np.minimum(num_layers // np.maximum(most_layers, 1), pp), 0)
    rest = num_layers - full * most_layers
    # the j-th stage from the end has j in flight
    filled = most_layers * full * (full + 1) / 2 + rest * np.minimum(full + 1, pp)
    return np.asarray(np.where(cells.schedule == Schedule.GPIPE, cells.num_micro_batches * num_layers, filled))
