"""Fit the coefficients of memory on published runs: python -m benchmarks.accuracy.fit_memory PUBLISHED OUT.json

Maximum a posteriori, apart from step times: pseudo-Huber loss of log(predicted / measured), log-normal priors around the
physical values of priors.json. A configuration on a kind of device counts once, with the geometric mean of its figures.
Rows of which no column tells what differs (`memory.special`) are left out. For a row that the fit should not have seen, its
configuration, and every configuration of its test (Megatron's) or hidden size (bigscience), is left out, and one step of the
same fit is taken.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy import robust
from benchmarks.accuracy.pricing import STEP, with_values
from benchmarks.accuracy.published import Published, grouped, read_published, with_calibration
from benchmarks.accuracy.robust import most_probable
from cost_models.calibrations import shipped
from cost_models.peaks import memory_report
from cost_models.records import Calibration, Coefficient, Decision, load, save
from planner.readers.runs import Run, decision_of_run

FloatArray = NDArray[np.float64]

FITTED_MEMORY: Mapping[str, float] = {
    "memory.activation.residual_bytes": 0.1,
    "memory.activation.attention_bytes": 0.1,
    "memory.activation.mlp_bytes": 0.1,
    "memory.activation.score_bytes": 0.05,
    "memory.activation.latents_bytes": 0.3,
    "memory.activation.gated_mlp_bytes": 0.1,
    "memory.activation.routed_bytes": 0.15,
    "memory.activation.gated_routed_bytes": 0.15,
    "memory.activation.routed_hidden_bytes": 0.2,
    "memory.activation.router_bytes": 0.4,
    "memory.logits.saved_bytes": 0.05,
    "memory.logits.working_bytes": 0.05,
    "memory.context_bytes.allocated.ampere": 0.4,
    "memory.context_bytes.allocated.hopper": 0.4,
    "memory.context_bytes.allocated.blackwell": 0.4,
    "memory.grouped_workspace_bytes.hopper": 0.5,
    "memory.grouped_workspace_bytes.blackwell": 0.5,
    "memory.slack_bytes.megatron-deepspeed": 0.5,
}
"""Coefficient -> standard deviation of the logarithm of its prior."""
SAME_MEMORY: Mapping[str, str] = {"memory.grouped_workspace_bytes.blackwell": "memory.grouped_workspace_bytes.hopper"}
"""Coefficients that take another one's fitted value: the same workspaces."""
SCALE = 0.015
"""Residuals beyond this count linearly: most repeats of a test differ by less, in two containers by up to 7%."""
ROUNDS = 6
"""Steps with exact residuals and new slopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One configuration on one kind of device."""

    run: Run
    decision: Decision
    measured_bytes: float
    """Geometric mean."""
    tests: frozenset[str]
    """Tests, or hidden sizes, that ran it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Where the fit ended, and what a step from there without some rows needs."""

    names: tuple[str, ...]
    mean: FloatArray
    """Logarithms of the priors."""
    logs: FloatArray
    """Logarithms of the fitted values."""
    residual: FloatArray
    slopes: FloatArray
    """[figure, coefficient]."""


def held_out_with(row: Published) -> str:
    """What is left out with a row: its test, or its hidden size."""
    if row.source.startswith("bigscience"):
        return f"hidden {row.row['hidden']}"
    test = re.search(r"test (\S+?)(?:_1node)?;", row.row["note"])
    return test[1] if test else row.id


def own_bytes(run: Run, decision: Decision) -> float:
    """Predicted bytes of the row's kind and rank."""
    peaks = [device.peak_bytes for device in memory_report(run.problem, decision)]
    return peaks[-1] if run.last_rank else max(peaks)


def figures(rows: Sequence[Published], special: Callable[[Published], str | None]) -> list[Figure]:
    """What is fitted on."""
    ordinary = [row for row in rows if row.memory_gib and row.outcome == "ok" and not special(row)]
    groups = grouped(ordinary, lambda row: row.run.digest)
    return [
        Figure(
            run=same[0].run,
            decision=decision_of_run(same[0].run),
            measured_bytes=2.0**30 * math.exp(float(np.mean([math.log(row.memory_gib or 0.0) for row in same]))),
            tests=frozenset(held_out_with(row) for row in same),
        )
        for same in groups.values()
    ]


def priors(calibration: Calibration) -> Calibration:
    """The calibration with the fitted coefficients of memory at their physical values."""
    before = load(Calibration, Path(__file__).with_name("priors.json")).coefficients
    return replace(
        calibration, coefficients={**calibration.coefficients, **{name: before[name] for name in FITTED_MEMORY}}
    )


def at(calibration: Calibration, names: Sequence[str], logs: FloatArray) -> Calibration:
    """The calibration with exp(logs), and with what takes their values."""
    values = {name: math.exp(log) for name, log in zip(names, logs, strict=True)}
    return with_values(calibration, values | {one: values[origin] for one, origin in SAME_MEMORY.items()})


def _logs(found: Sequence[Figure], calibration: Calibration) -> FloatArray:
    return np.log([own_bytes(with_calibration(one.run, calibration), one.decision) for one in found])


def fit(found: Sequence[Figure], before: Calibration) -> MemoryFit:
    """The most probable coefficients."""
    names = tuple(name for name in FITTED_MEMORY if name not in SAME_MEMORY)
    mean = np.log([before.coefficients[name].value for name in names])
    measured = np.log([one.measured_bytes for one in found])
    logs = mean.copy()
    for _ in range(ROUNDS):
        residual, slopes = _slopes(found, before, names, logs, measured)
        moved = solved(mean, logs, residual, slopes)
        done = np.max(np.abs(moved - logs)) < 1e-3
        logs = moved
        if done:
            break
    residual, slopes = _slopes(found, before, names, logs, measured)
    return MemoryFit(names=names, mean=mean, logs=logs, residual=residual, slopes=slopes)


def _slopes(
    found: Sequence[Figure], before: Calibration, names: Sequence[str], logs: FloatArray, measured: FloatArray
) -> tuple[FloatArray, FloatArray]:
    here = _logs(found, at(before, names, logs))
    columns = []
    for column in range(len(names)):
        moved = logs.copy()
        moved[column] += STEP
        columns.append((_logs(found, at(before, names, moved)) - here) / STEP)
    return here - measured, np.stack(columns, axis=1)


def solved(mean: FloatArray, point: FloatArray, residual: FloatArray, slopes: FloatArray) -> FloatArray:
    """The most probable logarithms on the linear model about `point`."""
    spread = np.array([FITTED_MEMORY[name] for name in FITTED_MEMORY if name not in SAME_MEMORY])
    return most_probable(point, residual, slopes, mean=mean, spread=spread, scale=SCALE, longest=0.3)


def without(fitted: MemoryFit, left_out: NDArray[np.bool_]) -> FloatArray:
    """Change of log bytes of every figure where some are left out of the fit: one step from its end."""
    keep = ~left_out
    logs = solved(fitted.mean, fitted.logs, fitted.residual[keep], fitted.slopes[keep])
    return np.asarray(fitted.slopes @ (logs - fitted.logs))


def unseen_factors(rows: Sequence[Published], special: Callable[[Published], str | None]) -> Mapping[str, float]:
    """Row -> its prediction where its configuration and its test or size are left out, over its prediction."""
    found = figures(rows, special)
    if not found:
        return {}
    fitted = _fitted_as_shipped(found, found[0].run.problem.calibration)
    place = {one.run.digest: index for index, one in enumerate(found)}
    factors = {}
    for row in rows:
        if row.run.digest in place and not special(row):
            index, test = place[row.run.digest], held_out_with(row)
            left_out = np.array([test in one.tests or one.run.digest == row.run.digest for one in found])
            factors[row.id] = math.exp(float(without(fitted, left_out)[index]))
    return factors


def _fitted_as_shipped(found: Sequence[Figure], calibration: Calibration) -> MemoryFit:
    """As if the fit had ended where the calibration stands."""
    before = priors(calibration)
    names = tuple(name for name in FITTED_MEMORY if name not in SAME_MEMORY)
    logs = np.log([calibration.coefficients[name].value for name in names])
    measured = np.log([one.measured_bytes for one in found])
    residual, slopes = _slopes(found, before, names, logs, measured)
    return MemoryFit(
        names=names,
        mean=np.log([before.coefficients[name].value for name in names]),
        logs=logs,
        residual=residual,
        slopes=slopes,
    )


MARGINS: Mapping[str, tuple[str, str]] = {
    "megatron": ("megatron", "allocated"),
    "megatron-unfused": ("megatron", "allocated"),
    "nvidia-smi": ("megatron-deepspeed", "nvidia-smi"),
}
"""Qualifier of memory.margin -> whose rows it is learnt on: start of the runtime's name, kind of memory."""
TIGHT = 0.03
"""A person who has this much less than a run takes must not hear "ok" ..."""
WRONG = 0.005
"""... more often than this."""


def margins(rows: Sequence[Published], special: Callable[[Published], str | None]) -> Iterator[tuple[str, Coefficient]]:
    """One-sided margins of rows that the fit has not seen: above, the larger of the 80% interval's upper end and of what
    keeps wrong answers rare; below, the interval's lower end.
    """
    factors = unseen_factors(rows, special)
    for qualifier, (runtime, kind) in MARGINS.items():
        ratios = [
            (row.memory_gib or 0.0) * 2.0**30 / (own_bytes(row.run, decision_of_run(row.run)) * factors[row.id])
            for row in rows
            if row.id in factors
            and row.run.problem.runtime.name.startswith(runtime)
            and row.run.problem.memory_kind.value == kind
        ]
        if not ratios:
            continue
        spread = round(float(np.median(np.abs(np.log(ratios))) * 1.4826), 4)
        low, high, rare = np.quantile(ratios, [0.1, 0.9, 1 - WRONG])
        found = {
            "memory.margin": (
                max(high, rare * (1 - TIGHT)) - 1,
                f"measured over predicted on rows not seen: 90th percentile {high:.3f}, {1 - WRONG:.1%} percentile {rare:.3f}; "
                f"the larger of the first and of the second less {TIGHT:.0%}",
            ),
            "memory.margin_below": (1 - low, f"10th percentile of measured over predicted on rows not seen: {low:.3f}"),
        }
        for name, (size, source) in found.items():
            yield (
                f"{name}.{qualifier}",
                Coefficient(
                    value=round(max(size, 0.01), 3),
                    unit="1",
                    source=source,
                    date=date.today().isoformat(),
                    rows=len(ratios),
                    residual=spread,
                ),
            )


def stamped(fitted: MemoryFit, before: Calibration, start: Calibration) -> Calibration:
    """The calibration with each fitted coefficient and its birth certificate."""
    spread = np.array([FITTED_MEMORY[name] for name in fitted.names])
    found = robust.deviations(fitted.residual, fitted.slopes, spread, scale=SCALE)
    deviation = dict(zip(fitted.names, found.tolist(), strict=True))
    values = at(before, fitted.names, fitted.logs).coefficients
    residual = float(np.median(np.abs(fitted.residual)) * 1.4826)
    coefficients = dict(start.coefficients)
    for name in FITTED_MEMORY:
        origin, prior = SAME_MEMORY.get(name, name), before.coefficients[name]
        rows = int((np.abs(fitted.slopes[:, fitted.names.index(origin)]) > 1e-4).sum())
        coefficients[name] = replace(
            prior,
            value=float(f"{values[name].value:.4g}"),
            source=f"fitted on {rows} published configurations, spread of its logarithm {deviation[origin]:.2f}; "
            f"prior {prior.value:.4g} ± {FITTED_MEMORY[name]:.0%}: {prior.source}",
            residual=round(residual, 4),
            rows=rows,
            date=date.today().isoformat(),
        )
    return replace(start, coefficients=coefficients)


def main() -> None:
    """Prints each coefficient before and after, and writes the calibration."""
    from benchmarks.accuracy.memory import special

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    start = shipped()
    before = priors(start)
    table = read_published(arguments.published / "memory.csv", before, memory=True)
    found = figures(table.rows, special)
    fitted = fit(found, before)
    after = stamped(fitted, before, start)
    print(f"{len(found)} configurations of {len(frozenset().union(*(one.tests for one in found)))} tests and sizes")
    for name in FITTED_MEMORY:
        one = after.coefficients[name]
        print(f"{name:45} {before.coefficients[name].value:12.5g} -> {one.value:12.5g} ({one.rows} configurations)")
    table = read_published(arguments.published / "memory.csv", after, memory=True)
    learnt = dict(margins([row for row in table.rows if row.outcome == "ok"], special))
    for name, margin in learnt.items():
        print(f"{name:45} {margin.value:12.5g} ({margin.source}; {margin.rows} rows)")
    save(replace(after, coefficients={**after.coefficients, **learnt}), arguments.out)


if __name__ == "__main__":
    main()
