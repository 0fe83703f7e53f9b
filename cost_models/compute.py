"""Seconds of an operation on a device.

A matrix product costs its FLOPs at the best rate that people measured times an efficiency, lengthened where the grid of
tiles does not fill the device or the inner dimension is short, and never less than moving its operands. Everything else
costs its bytes. A measured operation beats all of this. All functions take arrays and broadcast.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.calibrations import Rate, find, rate, value
from cost_models.records import Calibration, Device, Precision, RecordError, Runtime, Workload

FloatArray = NDArray[np.float64]

TILE_ELEMENTS = 128 * 256
"""Outputs of one thread block in a large matrix product (cuBLAS' and CUTLASS' usual tile of 128 x 256)."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds by what they rest on. One array, so that a sum or a factor is one operation however few cells there are."""

    parts: FloatArray
    """(..., 3): on a measurement of this very operation, on a coefficient fitted to measured runs, on a data sheet or a
    publication."""

    @property
    def measured(self) -> FloatArray:
        """On a measurement of this very operation."""
        return np.asarray(self.parts[..., 0])

    @property
    def calibrated(self) -> FloatArray:
        """On a coefficient fitted to measured runs."""
        return np.asarray(self.parts[..., 1])

    @property
    def table(self) -> FloatArray:
        """On a data sheet or a publication."""
        return np.asarray(self.parts[..., 2])

    @property
    def total(self) -> FloatArray:
        """The sum."""
        parts = self.parts
        return np.asarray(parts[..., 0] + parts[..., 1] + parts[..., 2])

    @classmethod
    def resting_on(cls, rate: Rate, seconds: ArrayLike) -> Self:
        """Seconds that one coefficient decides."""
        array = np.asarray(seconds, dtype=float)
        parts = np.zeros((*array.shape, 3))
        parts[..., 1 if rate.fitted else 2] = array
        return cls(parts)

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Self:
        """No time."""
        return cls(np.zeros((*shape, 3)))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.parts + other.parts)

    def scaled(self, factor: ArrayLike) -> "Seconds":
        """Each part times `factor`."""
        return Seconds(self.parts * np.asarray(factor, dtype=float)[..., None])

    def rescaled_to(self, total: ArrayLike) -> "Seconds":
        """The same shares, another total (0 stays 0)."""
        old, wanted = self.total, np.asarray(total, dtype=float)
        none = old == 0
        if none.any():
            return self.scaled(np.where(none, 0.0, wanted / np.where(none, 1.0, old)))
        return self.scaled(wanted / old)

    def where(self, use: NDArray[np.bool_], seconds: ArrayLike) -> "Seconds":
        """This, but measured `seconds` where `use` holds."""
        found = self.parts * ~use[..., None]
        found[..., 0] = np.where(use, seconds, self.parts[..., 0])
        return Seconds(found)

    def stacked(self) -> FloatArray:
        """One array with a last axis (measured, calibrated, table)."""
        return self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All that times an operation on one device under one runtime, looked up once."""

    precision: str
    """Format of the matrix products."""
    element_bytes: float
    """Bytes of an activation."""
    matmul_flops_per_s: float
    """Best measured rate in that format."""
    matmul_efficiency: Rate
    """Share of it that training reaches."""
    wide_precision: str
    """Format of attention and head."""
    wide_flops_per_s: float
    """The rate of attention and head: bf16 where the format is narrower, else the format's own."""
    wide_efficiency: Rate
    """Share of it, for the head's product."""
    wave: float
    """Weight of the part-filled last wave of tiles."""
    inner: float
    """Length of the inner dimension at which starting a tile costs as much as its products."""
    multiprocessors: float
    """Tiles that run at once."""
    bytes_per_s: float
    """Memory bandwidth that kernels reach."""
    memory: Rate
    """Multiplier on the bytes of norms, activations and residuals: how well the runtime fuses them."""
    cast_bytes: Rate
    """Bytes per activation element that casts to a narrower format move."""
    attention_efficiency: Rate
    """Of the fused kernel, the causal half counted."""
    backward_ratio: float
    """Backward over forward FLOPs of fused attention."""
    score_bytes: Rate | None
    """Bytes per score and direction of unfused attention; None = fused."""
    unfused_efficiency: float
    """Of the batched products of unfused attention."""
    misaligned_factor: float
    """How much slower these are where head_dim is no multiple of 8."""
    launch_s: Rate
    """Floor of a layer and micro-batch, forward and backward together."""
    moe_launch_s: Rate
    """The same of a layer with routed experts: many small kernels, and counts that the host waits for."""
    grouped_efficiency: Rate
    """Of grouped products of routed experts, as a share of an ordinary product's."""
    permute_bytes: Rate
    """Bytes per element (in 16 bits) of routed rows that moving tokens to their experts and back moves, in each pass."""
    traffic_bytes: Rate
    """Bytes per local weight and micro-batch: reading weights, adding up gradients."""
    logit_bytes: Rate
    """Bytes per logit and direction of the loss."""
    optimizer_bytes: Rate
    """Bytes that the update moves per parameter."""


def element_bytes(precision: Precision) -> float:
    """Bytes of an activation: 4 in fp32, else 2 (fp8 products keep bf16 activations)."""
    return 4.0 if precision is Precision.FP32 else 2.0


WIDENED = {"bf16": ("fp32", ("volta", "turing"))}
"""Format -> (what its products are widened to, families without it that do so): PyTorch runs bf16 there by emulation
(`torch.cuda.is_bf16_supported(including_emulation=True)`), off the tensor cores, so at the rate of fp32 at best."""


def multiplied_as(device: Device, precision: str) -> str:
    """The format in which the device multiplies a workload's numbers: the precision, but where it is widened."""
    wide, families = WIDENED.get(precision, (precision, ()))
    has_none = precision not in {*device.matmul_flops_per_s, *device.peak_flops_per_s}
    return wide if has_none and device.family in families else precision


def roof_flops_per_s(device: Device, precision: str) -> float:
    """Best measured matrix-product rate of the device, else its data-sheet peak. RecordError lists known formats."""
    precision = multiplied_as(device, precision)
    for table in (device.matmul_flops_per_s, device.peak_flops_per_s):
        if precision in table:
            return table[precision]
    known = ", ".join(sorted({*device.matmul_flops_per_s, *device.peak_flops_per_s}))
    raise RecordError(f"precision {precision!r} is not known for device {device.name!r}; known there: {known}")


def rates(device: Device, workload: Workload, runtime: Runtime, calibration: Calibration) -> Rates:
    """Look up every coefficient that times operations. RecordError where one is not known."""
    family, name, precision = device.family, runtime.name, workload.precision
    bytes_per_s = _bytes_per_s(device, precision.value, calibration)
    narrow = precision.is_narrow
    wide = Precision.BF16.value if narrow else precision.value
    fused = find(calibration, "attention.score_bytes", name) is None
    return Rates(
        precision=precision.value,
        element_bytes=element_bytes(precision),
        matmul_flops_per_s=roof_flops_per_s(device, precision.value),
        matmul_efficiency=rate(calibration, f"matmul.efficiency.{family}", device.name, precision.value),
        wide_precision=wide,
        wide_flops_per_s=roof_flops_per_s(device, wide),
        wide_efficiency=rate(calibration, f"matmul.efficiency.{family}", device.name, wide),
        wave=value(calibration, "matmul.wave", family),
        inner=value(calibration, "matmul.inner", family),
        multiprocessors=value(calibration, "device.multiprocessors", device.name, family),
        bytes_per_s=bytes_per_s,
        memory=rate(calibration, "memory_ops.multiplier", family, name),
        cast_bytes=rate(calibration, "memory_ops.cast_bytes", name, precision.value)
        if narrow
        else Rate(value=0.0, fitted=False),
        attention_efficiency=rate(calibration, f"attention.efficiency.{family}", name),
        backward_ratio=value(calibration, "attention.backward_ratio"),
        score_bytes=None if fused else rate(calibration, "attention.score_bytes", name),
        unfused_efficiency=value(calibration, "attention.unfused_efficiency", family),
        misaligned_factor=value(calibration, "attention.misaligned_factor"),
        launch_s=_launch_s(calibration, precision.value, family, name),
        moe_launch_s=rate(calibration, "launch.moe_layer_s", family, name),
        grouped_efficiency=rate(calibration, "experts.efficiency", family, name),
        permute_bytes=rate(calibration, "experts.permute_bytes", name),
        traffic_bytes=rate(calibration, "weights.traffic_bytes", family),
        logit_bytes=rate(calibration, "logits.bytes", family),
        optimizer_bytes=_optimizer_bytes(calibration, family, workload.optimizer.value, bytes_per_s),
    )


def _measured(calibration: Calibration, prefix: str) -> list[tuple[float, float]]:
    """(size, seconds) of the measured operations `prefix/SIZE`, by size."""
    found = [(key, seconds) for key, seconds in calibration.operations_s.items() if key.startswith(prefix + "/")]
    return sorted((float(key.rsplit("/", 1)[1]), seconds) for key, seconds in found)


def _bytes_per_s(device: Device, precision: str, calibration: Calibration) -> float:
    """Memory bandwidth that kernels reach: measured on an element-wise sum, else a share of the data sheet's."""
    samples = _measured(calibration, f"memory_bound/{precision}")
    if samples:
        return float(np.median([size / seconds for size, seconds in samples]))
    share = value(calibration, "memory_ops.bandwidth_share", device.family)
    return device.memory_bandwidth_bytes_per_s * share


def _launch_s(calibration: Calibration, precision: str, family: str, runtime_name: str) -> Rate:
    """Floor of a layer: measured time of one launch times the operations of a layer, else a coefficient."""
    launch = calibration.operations_s.get(f"launch/{precision}")
    if launch is None:
        return rate(calibration, "launch.layer_s", family, runtime_name)
    return Rate(value=launch * value(calibration, "launch.operations_per_layer"), fitted=True)


def _optimizer_bytes(calibration: Calibration, family: str, optimizer: str, bytes_per_s: float) -> Rate:
    """Bytes of the update per parameter; a measured update counts as the bytes that its seconds would move."""
    samples = _measured(calibration, f"optimizer/{optimizer}")
    if samples:
        return Rate(value=bytes_per_s * float(np.median([s / size for size, s in samples])), fitted=True)
    return rate(calibration, "optimizer.bytes", family, optimizer)


def matmul_s(rates: Rates, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, wide: bool = False) -> Seconds:
    """Seconds of an (m, k) x (k, n) product: 2mnk/(roof·e)·(1 + wave·SMs·tile/(mn) + inner/k), or its bytes.

    `wide` = in the format of the head. Source of the form: COST_FACTS of the published runs, section 1.
    """
    m, n, k = (np.asarray(side, dtype=float) for side in (m, n, k))
    roof = rates.wide_flops_per_s if wide else rates.matmul_flops_per_s
    efficiency = rates.wide_efficiency if wide else rates.matmul_efficiency
    waves = 1.0 + rates.wave * rates.multiprocessors * TILE_ELEMENTS / (m * n) + rates.inner / k
    flops_s = 2.0 * m * n * k / (roof * efficiency.value) * waves
    moved_s = rates.element_bytes * (m * k + k * n + m * n) / rates.bytes_per_s
    return Seconds.resting_on(efficiency, np.maximum(flops_s, moved_s))


TILE_ROWS = 128
"""Rows of one tile of a grouped product (CUTLASS' and Transformer Engine's grouped kernels)."""


def grouped_matmul_s(
    rates: Rates, m: ArrayLike, n: ArrayLike, k: ArrayLike, groups: ArrayLike, *, over_rows: bool = False
) -> Seconds:
    """Seconds of `groups` products in one kernel, the rows of all of them together.

    (m, k) x (k, n) where each group has m/groups rows and its own (k, n); the last tile of each group is half filled. With
    `over_rows` each group makes a whole (m, n) from k/groups rows: its gradient of weights.
    """
    m, n, k, groups = (np.asarray(side, dtype=float) for side in (m, n, k, groups))
    efficiency = rates.matmul_efficiency.value * rates.grouped_efficiency.value
    if over_rows:
        inner, outputs, flops = k / groups, m * n * groups, 2.0 * m * n * k
        moved = k * (m + n) + outputs
    else:
        inner, outputs, flops = k, m * n, 2.0 * (m + groups * TILE_ROWS / 2) * n * k
        moved = m * k + groups * k * n + outputs
    waves = 1.0 + rates.wave * rates.multiprocessors * TILE_ELEMENTS / outputs + rates.inner / inner
    flops_s = flops / (rates.matmul_flops_per_s * efficiency) * waves
    return Seconds.resting_on(
        rates.grouped_efficiency, np.maximum(flops_s, rates.element_bytes * moved / rates.bytes_per_s)
    )


def attention_s(
    rates: Rates,
    batch: ArrayLike,
    seq: ArrayLike,
    heads: ArrayLike,
    head_dim: float,
    *,
    backward: bool = False,
    window: int | None = None,
    parts: ArrayLike = 1,
    causal: bool = True,
) -> Seconds:
    """Seconds of attention over `heads` local heads, on one of `parts` equal parts of the sequence.

    Fused: 2·2·pairs·head_dim FLOPs per head, pairs = the causal half (a band where there is a window); all of them, or
    the band of tokens on either side, where tokens also see those behind them.
    Unfused: both products over all pairs, and `score_bytes` per score.
    """
    batch, seq, heads = (np.asarray(side, dtype=float) for side in (batch, seq, heads))
    share = batch * heads / np.asarray(parts, dtype=float)
    if rates.score_bytes is not None:
        return _unfused_s(rates, share * seq * seq, head_dim, backward)
    reach = seq if window is None else np.minimum(seq, window)
    pairs = seq * reach - reach * reach / 2
    if not causal:
        pairs = np.minimum(2 * pairs, seq * seq)
    flops = 4.0 * share * pairs * head_dim * (rates.backward_ratio if backward else 1.0)
    return Seconds.resting_on(
        rates.attention_efficiency, flops / (rates.wide_flops_per_s * rates.attention_efficiency.value)
    )


def _unfused_s(rates: Rates, scores: FloatArray, head_dim: float, backward: bool) -> Seconds:
    assert rates.score_bytes is not None
    passes = 2.0 if backward else 1.0
    slower = rates.misaligned_factor if head_dim % 8 else 1.0
    flops_s = 4.0 * scores * head_dim * passes * slower / (rates.wide_flops_per_s * rates.unfused_efficiency)
    return Seconds.resting_on(
        rates.score_bytes, flops_s + scores * rates.score_bytes.value * passes / rates.bytes_per_s
    )


def moved_s(rates: Rates, per_element: Rate, elements: ArrayLike) -> Seconds:
    """Seconds to move `per_element` bytes for each of `elements`: the price of what is bound by memory."""
    return Seconds.resting_on(per_element, per_element.value * np.asarray(elements, dtype=float) / rates.bytes_per_s)


def with_floor(seconds: Seconds, floor: Rate, floor_s: ArrayLike) -> Seconds:
    """(seconds⁴ + floor⁴)^¼: the host's launches and the device's work overlap, the longer one decides."""
    total, low = seconds.total, np.asarray(floor_s, dtype=float)
    longer = (total**4 + low**4) ** 0.25
    return seconds + Seconds.resting_on(floor, longer - total)


def measured_or(
    calibration: Calibration, seconds: Seconds, prefix: str, key: str, columns: tuple[ArrayLike, ...]
) -> Seconds:
    """`seconds`, but the measured value where calibration.operations_s has the key of an entry.

    key: a format over the columns, for example `matmul/bf16/{}x{}x{}`; prefix: its constant start.
    """
    known = [name for name in calibration.operations_s if name.startswith(prefix)]
    if not known:
        return seconds
    arrays = np.broadcast_arrays(*(np.asarray(column) for column in columns), seconds.total)[:-1]
    shape = seconds.total.shape
    rows = np.stack([array.ravel() for array in arrays], axis=-1)
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    found = [calibration.operations_s.get(key.format(*(int(side) for side in row)), np.nan) for row in unique]
    values = np.asarray(found, dtype=float)[inverse.ravel()].reshape(shape)
    return seconds.where(~np.isnan(values), np.nan_to_num(values))
