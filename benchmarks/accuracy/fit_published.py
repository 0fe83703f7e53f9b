"""Fit the shipped calibration on published runs: python -m benchmarks.accuracy.fit_published PUBLISHED OUT.json

Maximum a posteriori: pseudo-Huber loss of log(predicted / measured) with scale 0.05, log-normal priors around the values
of priors.json. Equal configurations count once, with the geometric mean of their times, and each source weighs by the
square root of its number of configurations, so that no source rules. Slopes are taken once, where the shipped calibration
stands; the steps that follow price every run exactly.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.accuracy import robust
from benchmarks.accuracy.coefficients import FITTED, IS_PRIOR, SAME_AS, is_share
from benchmarks.accuracy.pricing import FloatArray, Pricer
from benchmarks.accuracy.published import Published, grouped, read_published
from benchmarks.accuracy.robust import most_probable
from cost_models.calibrations import shipped
from cost_models.records import Calibration, load, save
from planner.readers.runs import Run

SCALE = 0.05
"""Residuals beyond this count linearly: about one repeat-to-repeat deviation (3 to 5%)."""
ROUNDS = 4
"""Steps with exact residuals; the last ones move nothing by more than a percent."""
LINEARISED = 5
"""Times that slopes are taken, at the point that the last ones led to."""
CONVERGED = 0.02
"""Largest relative change of a coefficient that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One configuration of one source."""

    run: Run
    source: str
    model: str
    ids: tuple[str, ...]
    """Rows that ran it."""
    measured_s: float
    """Geometric mean."""


def configurations(rows: Sequence[Published]) -> list[Configuration]:
    """Each configuration of each source once."""
    groups = grouped((row for row in rows if row.measured_s), lambda row: (row.source, row.run.digest)).values()
    return [
        Configuration(
            run=same[0].run,
            source=same[0].source,
            model=same[0].model,
            ids=tuple(row.id for row in same),
            measured_s=math.exp(float(np.mean([math.log(row.measured_s or 0.0) for row in same]))),
        )
        for same in groups
    ]


def priors(calibration: Calibration) -> Calibration:
    """The calibration as it was before any published run: fitted coefficients at their priors, with no rows behind them."""
    before = load(Calibration, Path(__file__).with_name("priors.json"))
    names = [name for name in (*FITTED, *SAME_AS) if name in before.coefficients]
    return replace(
        calibration,
        name="priors",
        coefficients={**calibration.coefficients, **{name: before.coefficients[name] for name in names}},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """log(predicted / measured) about a point, by the logarithms of the fitted coefficients."""

    configured: Sequence[Configuration]
    names: tuple[str, ...]
    point: FloatArray
    """Logarithms of the coefficients."""
    residual: FloatArray
    """There."""
    slopes: FloatArray
    """[configuration, coefficient]."""


def tied(name: str) -> tuple[str, ...]:
    """A coefficient, and those that take its value."""
    return (name, *(other for other, origin in SAME_AS.items() if origin == name))


def at(calibration: Calibration, names: Sequence[str], logs: FloatArray, rows: Mapping[str, int]) -> Calibration:
    """The calibration with exp(logs), each with the number of configurations behind it (0 = it rests on its prior)."""
    coefficients = dict(calibration.coefficients)
    for name, log in zip(names, logs, strict=True):
        for one in tied(name):
            if one in coefficients:
                coefficients[one] = replace(
                    coefficients[one], value=float(f"{math.exp(log):.4g}"), rows=rows.get(name, 0), residual=None
                )
    return replace(calibration, coefficients=coefficients)


def linearised(pricer: Pricer, configured: Sequence[Configuration], calibration: Calibration) -> Linear:
    """Residuals and slopes where the calibration stands."""
    names = tuple(name for name in FITTED if name in calibration.coefficients)
    runs = [one.run for one in configured]
    measured = np.log([one.measured_s for one in configured])
    slopes = np.stack(
        [
            pricer.slopes(runs, calibration, [one for one in tied(name) if one in calibration.coefficients]).sum(axis=1)
            for name in names
        ],
        axis=1,
    )
    return Linear(
        configured=configured,
        names=names,
        point=np.log([calibration.coefficients[name].value for name in names]),
        residual=pricer.logs(runs, calibration) - measured,
        slopes=slopes,
    )


def source_weights(configured: Sequence[Configuration]) -> FloatArray:
    """1 / sqrt(configurations of the source), 1 on average."""
    sources = [one.source for one in configured]
    weights = np.array([1 / math.sqrt(sources.count(source)) for source in sources])
    return np.asarray(weights / weights.mean())


def solved(linear: Linear, mean: FloatArray, residual: FloatArray, point: FloatArray, keep: FloatArray) -> FloatArray:
    """The most probable logarithms on the linear model about `point`, on the configurations of `keep`; shares stay below 1."""
    spread = np.array([FITTED[name] for name in linear.names])
    bound = np.array([0.0 if is_share(name) else np.inf for name in linear.names])
    weights = source_weights([linear.configured[index] for index in np.flatnonzero(keep).tolist()])
    return most_probable(
        point,
        residual[keep],
        linear.slopes[keep],
        mean=mean,
        spread=spread,
        scale=SCALE,
        longest=0.5,
        weights=weights,
        bound=bound,
    )


def rows_behind(linear: Linear, keep: FloatArray) -> dict[str, int]:
    """Coefficient -> configurations whose time depends on it."""
    return {name: int((np.abs(linear.slopes[keep, column]) > 1e-4).sum()) for column, name in enumerate(linear.names)}


def fit(
    pricer: Pricer, linear: Linear, before: Calibration, keep: FloatArray | None = None, rounds: int = ROUNDS
) -> Calibration:
    """The fitted calibration, on all configurations or on those of `keep`."""
    keep = np.ones(len(linear.configured), dtype=bool) if keep is None else keep
    mean = np.log([before.coefficients[name].value for name in linear.names])
    rows = rows_behind(linear, keep)
    runs = [one.run for one in linear.configured]
    measured = np.log([one.measured_s for one in linear.configured])
    residual, point = linear.residual.copy(), linear.point
    logs = solved(linear, mean, residual, point, keep)
    for _ in range(rounds):
        current = at(before, linear.names, logs, rows)
        exact = residual.copy()
        chosen = [run for run, wanted in zip(runs, keep, strict=True) if wanted]
        exact[keep] = pricer.logs(chosen, current) - measured[keep]
        moved = solved(linear, mean, exact, logs, keep)
        if np.max(np.abs(moved - logs)) < 2e-3:
            break
        logs = moved
    return at(before, linear.names, logs, rows)


def own_names(
    pricer: Pricer,
    configured: Sequence[Configuration],
    calibration: Calibration,
    group: str,
    key: Callable[[Configuration], str],
) -> tuple[str, ...]:
    """Coefficients that only this group's runs read, whose prior was taken from published runs, and which have a less
    specific one: who has not seen the group does not have them.
    """
    mine: set[str] = set()
    others: set[str] = set()
    for one in configured:
        (mine if key(one) == group else others).update(pricer.reads(one.run, calibration))
    return tuple(
        sorted(
            name for name in mine - others if _is_from_runs(name, calibration) and _has_less_specific(name, calibration)
        )
    )


def _is_from_runs(name: str, calibration: Calibration) -> bool:
    return calibration.coefficients[name].source.startswith(IS_PRIOR)


def _has_less_specific(name: str, calibration: Calibration) -> bool:
    if name.startswith("link."):
        return True  # the table's, or that of any link of the place
    parts = name.split(".")
    return any(".".join(parts[:count]) in calibration.coefficients for count in range(2, len(parts)))


def deviations(linear: Linear) -> dict[str, float]:
    """Posterior standard deviation of each coefficient's logarithm."""
    spread = np.array([FITTED[name] for name in linear.names])
    weights = source_weights(linear.configured)
    found = robust.deviations(linear.residual, linear.slopes, spread, scale=SCALE, weights=weights)
    return dict(zip(linear.names, found.tolist(), strict=True))


def stamped(fitted: Calibration, before: Calibration, linear: Linear, residual: float) -> Calibration:
    """The fitted calibration with the birth certificate of each fitted coefficient."""
    coefficients, spread, today = dict(fitted.coefficients), deviations(linear), date.today().isoformat()
    for name in linear.names:
        for one in tied(name):
            if one not in coefficients:
                continue
            prior, rows = before.coefficients[name], coefficients[one].rows
            if not rows:
                coefficients[one] = before.coefficients.get(one, prior)
                continue
            coefficients[one] = replace(
                coefficients[one],
                source=f"fitted on {rows} published configurations, spread of its logarithm {spread[name]:.2f}; "
                f"prior {prior.value:g} ± {FITTED[name]:.0%}: {prior.source.removeprefix(IS_PRIOR).lstrip(': ')}",
                residual=round(residual, 4),
                date=today,
            )
    return replace(
        fitted,
        name=f"shipped-{today[:7]}",
        date=today,
        coefficients=coefficients,
        fitted_on=tuple(sorted({one.run.digest for one in linear.configured})),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    start = shipped()
    before, pricer = priors(start), Pricer()
    table = read_published(arguments.published / "throughput.csv", before)
    configured = configurations(table.rows)
    print(
        f"{len(table.rows)} rows, {len(configured)} configurations; {len(table.apart)} kept apart, {len(table.refused)} not priced"
    )
    fitted = start
    for _ in range(LINEARISED):
        linear = linearised(pricer, configured, fitted)
        moved, fitted = fitted, fit(pricer, linear, before)
        change = max(
            abs(math.log(fitted.coefficients[name].value / moved.coefficients[name].value)) for name in linear.names
        )
        print(f"slopes taken; the coefficient that moved most moved by {change:.1%}", file=sys.stderr)
        if change < CONVERGED:
            break
    residual = linear_residual(pricer, configured, fitted)
    spread = float(np.median(np.abs(residual)) * 1.4826)
    print(f"robust spread of log(predicted / measured): {spread:.4f}; a run was priced {pricer.priced} times")
    deviation = deviations(linear)
    for name in linear.names:
        was, now = before.coefficients[name].value, fitted.coefficients[name]
        print(
            f"{name:50} {was:10.4g} -> {now.value:10.4g} ± {deviation[name]:.0%} (prior ± {FITTED[name]:.0%}, {now.rows} configurations)"
        )
    save(stamped(fitted, before, linear, spread), arguments.out)


def linear_residual(pricer: Pricer, configured: Sequence[Configuration], calibration: Calibration) -> FloatArray:
    """log(predicted / measured) of each configuration."""
    return pricer.logs([one.run for one in configured], calibration) - np.log([one.measured_s for one in configured])


if __name__ == "__main__":
    main()
