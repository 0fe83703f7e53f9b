"""What is predicted of rows that the calibration has not seen: left out by model, by source, and after a few rows of a source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from benchmarks.accuracy.fit_published import Configuration, Linear, fit, own_names
from benchmarks.accuracy.pricing import FloatArray, Pricer, with_values, without
from benchmarks.accuracy.published import with_calibration
from cost_models.intervals import step_interval_s
from cost_models.records import Calibration
from cost_models.refit import Row, parameters_of, refit, with_links
from planner.predict import basis_of, simulated

FEW = (5, 10)
"""Measured rows of a source that a user has."""
DRAWS = 4
"""Random choices of these rows."""
SEED = 3
FEW_SPREAD = 0.05
"""Relative spread of a published step time: repeats differ by 3 to 5%."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One configuration, predicted by a calibration."""

    step_s: float
    low_s: float
    high_s: float
    basis: Mapping[str, float]
    """Shares of measured, calibrated and table."""


def predicted(pricer: Pricer, one: Configuration, calibration: Calibration) -> Predicted:
    """As `predict` does it."""
    run = with_calibration(one.run, calibration)
    decision = pricer.decision(run)
    step = simulated(run.problem, decision)
    basis, seconds = basis_of(step, decision.num_micro_batches), step.simulation.step_s
    low_s, high_s = step_interval_s(run.problem, seconds, world=run.layout.world, basis=basis)
    return Predicted(step_s=seconds, low_s=low_s, high_s=high_s, basis=basis)


def in_sample(pricer: Pricer, configured: Sequence[Configuration], calibration: Calibration) -> list[Predicted]:
    """By one calibration that has seen them all."""
    return [predicted(pricer, one, calibration) for one in configured]


def left_out(
    pricer: Pricer,
    linear: Linear,
    before: Calibration,
    key: Callable[[Configuration], str],
    progress: Progress,
    *,
    exact: bool = True,
) -> tuple[list[Predicted], dict[str, Calibration], dict[str, tuple[str, ...]]]:
    """Each configuration by the calibration refitted without its group, the calibrations, and what each group alone knew.

    A group's own coefficients, which nobody else's runs read, are dropped where a stranger would not have them. `exact`: one
    step of the refit prices every run anew; small groups move coefficients little, and the linear model is enough.
    """
    configured = linear.configured
    groups = sorted({key(one) for one in configured})
    found: dict[int, Predicted] = {}
    calibrations, dropped = {}, {}
    for number, group in enumerate(groups):
        keep = np.array([key(one) != group for one in configured])
        fitted = fit(pricer, linear, before, keep, rounds=1 if exact else 0)
        dropped[group] = own_names(pricer, configured, before, group, key)
        calibrations[group] = without(fitted, dropped[group])
        for index in np.flatnonzero(~keep).tolist():
            found[index] = predicted(pricer, configured[index], calibrations[group])
        progress(f"left out {number + 1} of {len(groups)}: {group}")
    return [found[index] for index in range(len(configured))], calibrations, dropped


def after_few_rows(
    pricer: Pricer, configured: Sequence[Configuration], calibrations: Mapping[str, Calibration], progress: Progress
) -> dict[int, dict[str, list[list[float]]]]:
    """Rows -> source -> draw -> log(predicted / measured) of the source's other configurations, after `refit` on the drawn ones."""
    generator = np.random.default_rng(SEED)
    found: dict[int, dict[str, list[list[float]]]] = {count: {} for count in FEW}
    for source, calibration in calibrations.items():
        mine = [one for one in configured if one.source == source]
        for count in FEW:
            if len(mine) < count + 2:
                continue
            draws = []
            for _ in range(DRAWS):
                chosen = set(generator.choice(len(mine), count, replace=False).tolist())
                seen = [one for index, one in enumerate(mine) if index in chosen]
                unseen = [one for index, one in enumerate(mine) if index not in chosen]
                learnt = refitted(pricer, seen, calibration)
                runs = [one.run for one in unseen]
                draws.append((pricer.logs(runs, learnt) - np.log([one.measured_s for one in unseen])).tolist())
            found[count][source] = draws
        progress(f"refitted on a few rows: {source}")
    return found


def refitted(pricer: Pricer, seen: Sequence[Configuration], prior: Calibration) -> Calibration:
    """`compare --fit`'s refit on these runs; their step times are linear in logarithms about the prior, to spare time."""
    rows = [Row(label=one.ids[0], measured_s=one.measured_s, spread=FEW_SPREAD) for one in seen]
    runs = [one.run for one in seen]
    prior = with_links(prior, (run.problem.cluster for run in runs))
    read = sorted({name for run in runs for name in pricer.reads(run, prior)})
    time_like = {one.removeprefix("coefficients/") for one in parameters_of(prior)}
    names = [name for name in read if name in time_like]
    start, slopes = pricer.logs(runs, prior), pricer.slopes(runs, prior, names)
    values = np.log([prior.coefficients[name].value for name in names])

    def seconds(calibration: Calibration) -> list[float]:
        moved: FloatArray = np.log([calibration.coefficients[name].value for name in names]) - values
        return [float(one) for one in np.exp(start + slopes @ moved)]

    learnt = refit(prior, rows, seconds, name="a user's", date=date.today().isoformat()).calibration
    return with_values(prior, {name: learnt.coefficients[name].value for name in names})
