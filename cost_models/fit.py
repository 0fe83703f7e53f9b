"""A profile and a probe -> Calibration: what was measured, as it is, and coefficients for what was not.

Medians of operations and collectives are taken over as they are; the efficiencies of products and of attention and the
multiplier of memory-bound work are fitted for the shapes that nobody measured. Whole runs are the matter of `refit`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from cost_models import blocks, compute
from cost_models.calibrations import value
from cost_models.collectives import Collective, curve_s
from cost_models.peaks import memory_report
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.records import (
    Calibration,
    Coefficient,
    Curve,
    Decision,
    Layout,
    Measurement,
    MeasurementKind,
    Ranks,
    RecordError,
    Stage,
)
from cost_models.shares import share

FloatArray = NDArray[np.float64]

LEAST_SAMPLES = 5
"""Samples from which the spread of an operation says something."""


# From a profile and a probe --------------------------------------------------------------------------------------------


def fit(problem: Problem, measurements: Iterable[Measurement], *, name: str, date: str) -> Calibration:
    """The problem's calibration with what was measured on its cluster's machine.

    `date` is the day of the measurements (ISO). Runs are left aside: they are `refit`'s; but for `context`, whose memory
    is what a run takes whose model is next to nothing.
    """
    measurements = tuple(measurements)
    taken = [one for one in measurements if one.kind is not MeasurementKind.RUN]
    if not taken:
        raise RecordError("nothing to fit: the file holds neither an operation nor a collective")
    operations = {
        one.key: median(one.samples_s)
        for one in taken
        if one.kind is MeasurementKind.OP and not one.key.startswith("dispatch/")
    }
    machine = taken[0].machine
    found = replace(
        problem.calibration,
        name=name,
        machine=machine,
        date=date,
        operations_s={**problem.calibration.operations_s, **operations},
        curves={**problem.calibration.curves, **dict(_curves(taken, date))},
    )
    problem = replace(problem, calibration=found)
    coefficients = dict(found.coefficients)
    for full, ratios, old in _efficiencies(problem, operations):
        mean, residual = _log_mean(ratios)
        coefficients[full] = Coefficient(
            value=mean if old is None else old * mean,
            unit="1",
            source=f"fitted on operations timed on {machine}",
            date=date,
            residual=residual,
            rows=len(ratios),
        )
    further = (
        *_overheads(problem, taken, date),
        *_contexts(problem, measurements, date),
        *_interval(problem, taken, date),
    )
    for full, coefficient in further:
        coefficients[full] = coefficient
    return replace(found, coefficients=coefficients)


def _curves(measurements: Sequence[Measurement], date: str) -> Iterator[tuple[str, Curve]]:
    """`all_reduce/ranks/link class` -> medians by size, made to rise: a smaller message is never slower."""
    known = {kind.value for kind in Collective}
    points: dict[str, dict[float, float]] = defaultdict(dict)
    machine = ""
    for one in measurements:
        parts = one.key.split("/")
        if one.kind is MeasurementKind.COLLECTIVE and len(parts) == 4 and parts[0] in known:
            points[f"{parts[0]}/{parts[1]}/{parts[3]}"][float(parts[2])] = median(one.samples_s)
            machine = one.machine
    for key, by_size in points.items():
        sizes = sorted(by_size)
        seconds = np.minimum.accumulate([max(by_size[size], 1e-9) for size in reversed(sizes)])[::-1]
        yield (
            key,
            Curve(
                sizes_bytes=tuple(sizes),
                seconds=tuple(float(second) for second in seconds),
                source=f"measured on {machine}",
                date=date,
            ),
        )


Fitted = tuple[str, list[float], float | None]
"""Name of a coefficient, what each row says of it, and the value that these multiply (None = they are the value)."""


def _efficiencies(problem: Problem, operations: Mapping[str, float]) -> Iterator[Fitted]:
    """Efficiency of products and of attention, and the multiplier of memory-bound work, each from its own rows."""
    device = problem.cluster.pools[0].kind.device
    precision, family = problem.workload.precision.value, device.family
    unmeasured = replace(problem, calibration=replace(problem.calibration, operations_s={}))
    rates = compute.rates(device, problem.workload, problem.runtime, unmeasured.calibration)
    products, attentions = [], []
    for key, seconds in operations.items():
        what, *parts = key.split("/")
        if what == "matmul" and parts[0] == precision:
            m, n, k = (float(side) for side in parts[1].split("x"))
            products.append(float(compute.matmul_s(rates, m, n, k).total) / seconds)
        elif what == "attention" and parts[0] == precision:
            batch, seq, heads, _, dim = (float(side) for side in parts[1].split("x"))
            expected = compute.attention_s(rates, batch, seq, heads, dim, backward=parts[2] == "backward")
            attentions.append(float(expected.total) / seconds)
    if products:
        yield f"matmul.efficiency.{family}.{precision}", products, rates.matmul_efficiency.value
    if attentions and rates.score_bytes is None:
        name = f"attention.efficiency.{family}.{problem.runtime.name}"
        yield name, attentions, rates.attention_efficiency.value
    rest = list(_memory_multipliers(problem, operations))
    if rest:
        yield f"memory_ops.multiplier.{family}.{problem.runtime.name}", rest, None


def _memory_multipliers(problem: Problem, operations: Mapping[str, float]) -> Iterator[float]:
    """From each whole layer: what its products and attention (measured ones first) leave, over its bytes."""
    device = problem.cluster.pools[0].kind.device
    without = {key: seconds for key, seconds in operations.items() if not key.startswith("layer/")}
    inner = replace(problem, calibration=replace(problem.calibration, operations_s=without))
    rates = compute.rates(device, problem.workload, problem.runtime, inner.calibration)
    gated = problem.model.gated_mlp
    for key, seconds in operations.items():
        parts = key.split("/")
        if parts[0] != "layer" or parts[1] != problem.workload.precision.value:
            continue
        layout = _layout_of(problem, parts)
        if layout is None:
            continue
        part = share(problem, Cells.of([layout]))
        sides = [int(side[0]) for side in blocks.layer_sides(problem, part)]
        direction = parts[-1]
        if blocks.layer_key(rates.precision, gated, direction).format(*sides) != key:
            continue
        layer = blocks.layer_pass(inner, rates, part)[direction == "backward"]
        left = seconds - float((layer.matmuls.total + layer.attention.total)[0])
        moved = float(layer.memory_ops.total[0]) / rates.memory.value
        if left > 0 and moved > 0:
            yield left / moved


def _layout_of(problem: Problem, parts: Sequence[str]) -> Layout | None:
    """The tensor-parallel layout of a `layer/...` key, where it is one of this problem's model."""
    mbs = int(parts[2].split("x")[0])
    tp, rest = divmod(problem.model.heads, int(parts[3].split("x")[0]))
    return None if rest else Layout(tp=tp, mbs=mbs)


def _overheads(problem: Problem, measurements: Sequence[Measurement], date: str) -> Iterator[tuple[str, Coefficient]]:
    """What a parallelism costs a layer beside its communication, from `dispatch/<axis>/<ranks>/layer` (fastest of worlds).

    The layer of the same size without it is taken off, and its collectives as their curves price them.
    """
    seconds = {one.key: median(one.samples_s) for one in measurements if one.key.startswith("dispatch/")}
    family, runtime = problem.cluster.pools[0].kind.device.family, problem.runtime.name
    link = problem.cluster.pools[0].kind.intra.name
    for key, whole_s in seconds.items():
        _, axis, ranks, what = key.split("/")
        calls = DISPATCH_CALLS.get(axis, {})
        if what != "layer" or not calls:
            continue
        plain_s = seconds.get(f"dispatch/plain/{ranks}/layer", 0.0)
        traffic_s = sum(
            count * _smallest_s(problem.calibration.curves.get(f"{call}/{ranks}/{link}"))
            for call, count in calls.items()
        )
        yield (
            f"dispatch.layer_s.{axis}.{family}.{runtime}",
            Coefficient(
                value=max(0.0, whole_s - plain_s - traffic_s),
                unit="s",
                source=f"small layers with and without it on {ranks} ranks, their collectives taken off",
                date=date,
                rows=1,
            ),
        )


DISPATCH_CALLS: Mapping[str, Mapping[str, int]] = {
    "tp": {"all_gather": 4, "reduce_scatter": 4},
    "fsdp": {"all_gather": 2, "reduce_scatter": 1},
}
"""Collectives of a layer and micro-batch, forward and backward: sequence parallelism (Korthikanti 2022, section 4.2.2), and
FSDP that gathers at each use."""


def _smallest_s(curve: Curve | None) -> float:
    return 0.0 if curve is None else float(curve_s(curve, np.asarray([1024.0]))[0])


def _contexts(problem: Problem, measurements: Sequence[Measurement], date: str) -> Iterator[tuple[str, Coefficient]]:
    """Bytes that no tensor of a prediction accounts for: `context/<ranks>/<mbs>` less what one layer's tensors should take."""
    family = problem.cluster.pools[0].kind.device.family
    for one in measurements:
        if one.key.startswith("context/") and one.memory is not None:
            ranks, mbs = (int(part) for part in one.key.split("/")[1:])
            counted = _one_layer_bytes(replace(problem, memory_kind=one.memory.kind), ranks, mbs)
            yield (
                f"memory.context_bytes.{one.memory.kind}.{family}",
                Coefficient(
                    value=max(0.0, one.memory.peak_bytes - counted),
                    unit="bytes",
                    source=f"one layer in training, less the tensors that are counted; on {one.machine}",
                    date=date,
                    rows=1,
                ),
            )


def _one_layer_bytes(problem: Problem, ranks: int, mbs: int) -> float:
    """Predicted peak, without context, of one layer of the model on data-parallel ranks, one micro-batch each."""
    workload = replace(problem.workload, gbs=ranks * mbs)
    problem = replace(problem, model=replace(problem.model, num_layers=1, layer_groups=()), workload=workload)
    decision = Decision(
        runtime=problem.runtime.name,
        layout=Layout(dp_replicate=ranks, mbs=mbs),
        workload=workload,
        num_micro_batches=1,
        stages=(Stage(virtual=0, device=0, blocks=(0, 2), recompute={"none": 1}),),
        ranks=Ranks(order=RANK_ORDER),
        collectives={},
    )
    kinds = memory_report(problem, decision)[0].kinds
    return sum(size for kind, size in kinds.items() if kind != "context")


def _interval(problem: Problem, measurements: Sequence[Measurement], date: str) -> Iterator[tuple[str, Coefficient]]:
    """Half-width of the 80% interval of what rests on measurements: their own spread, where that is wider than the prior."""
    widths = []
    for one in measurements:
        if one.kind is MeasurementKind.OP and len(one.samples_s) >= LEAST_SAMPLES and min(one.samples_s) > 0:
            low, high = np.quantile(one.samples_s, [0.1, 0.9])
            widths.append(math.log(high / low) / 2)
    family = problem.cluster.pools[0].kind.device.family
    name = f"interval.measured.{family}.{problem.runtime.name}"
    prior = value(problem.calibration, "interval.measured", family, problem.runtime.name)
    if widths and median(widths) > prior:
        yield (
            name,
            Coefficient(
                value=median(widths),
                unit="1",
                source=f"median over {len(widths)} operations of half their middle 80%, on {measurements[0].machine}",
                date=date,
                rows=len(widths),
            ),
        )


def _log_mean(ratios: Sequence[float]) -> tuple[float, float]:
    """Geometric mean, and the standard deviation of the logarithms (0 for one row)."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    return math.exp(mean), math.sqrt(sum((log - mean) ** 2 for log in logs) / max(1, len(logs) - 1))
