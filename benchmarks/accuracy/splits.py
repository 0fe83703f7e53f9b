"""What is predicted of rows that the calibration has not seen: left out by model, by source, and after a few rows of a source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
DRAWS = 20
"""Random choices of these rows; of one choice the first five are the five, so that more rows are told from luckier ones."""
SEED = 3
WORSE = 0.001
"""Rise of the median error that counts, a tenth of a point: below, no user could tell."""
FEW_SPREAD = 0.05
"""Relative spread of a published step time: repeats differ by 3 to 5%."""

LINEARISED = 3
"""Times that slopes are taken at most, each where the last refit ended; a source whose links are others moves far."""
STILL = 0.03
"""Largest change of a log-coefficient after which they are not taken again."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A source's other configurations after some of its rows; log(predicted / measured)."""

    before: FloatArray
    """By the calibration that has seen none."""
    after: FloatArray
    """Refitted on the rows."""

    @property
    def rise(self) -> float:
        """By how much the median of the others' absolute relative errors rises; below 0 where it falls."""
        return float(np.median(np.abs(np.expm1(self.after))) - np.median(np.abs(np.expm1(self.before))))

    @property
    def worse(self) -> bool:
        """The others are predicted worse than before, by more than WORSE."""
        return self.rise > WORSE


def after_few_rows(
    pricer: Pricer, configured: Sequence[Configuration], calibrations: Mapping[str, Calibration], progress: Progress
) -> dict[int, dict[str, list[Draw]]]:
    """Rows -> source -> what `refit` on a few of the source's rows makes of its other configurations."""
    found: dict[int, dict[str, list[Draw]]] = {count: {} for count in FEW}
    for place, (source, calibration) in enumerate(calibrations.items()):
        mine = [one for one in configured if one.source == source]
        measured = np.log([one.measured_s for one in mine])
        before = pricer.logs([one.run for one in mine], calibration) - measured
        orders = [np.random.default_rng([SEED, place, draw]).permutation(len(mine)) for draw in range(DRAWS)]
        for count in FEW:
            if len(mine) < count + 2:
                continue
            found[count][source] = []
            for order in orders:
                unseen = order[count:]
                learnt = refitted(pricer, [mine[index] for index in order[:count]], calibration)
                logs = pricer.logs([mine[index].run for index in unseen], learnt)
                found[count][source].append(Draw(before=before[unseen], after=logs - measured[unseen]))
        progress(f"refitted on a few rows: {source}")
    return found


def refitted(pricer: Pricer, seen: Sequence[Configuration], prior: Calibration) -> Calibration:
    """`compare --fit`'s refit on these runs; step times are linear in logarithms about where the last one ended."""
    rows = [Row(label=one.ids[0], measured_s=one.measured_s, spread=FEW_SPREAD) for one in seen]
    runs = [one.run for one in seen]
    prior = with_links(prior, (run.problem.cluster for run in runs))
    read = sorted({name for run in runs for name in pricer.reads(run, prior)})
    time_like = {one.removeprefix("coefficients/") for one in parameters_of(prior)}
    names = [name for name in read if name in time_like]
    mine = replace(prior, coefficients={name: prior.coefficients[name] for name in names})
    here = prior
    for _ in range(LINEARISED):
        values = np.log([here.coefficients[name].value for name in names])
        start, slopes = pricer.logs(runs, here), pricer.slopes(runs, here, names)

        def seconds(
            calibration: Calibration,
            values: FloatArray = values,
            start: FloatArray = start,
            slopes: FloatArray = slopes,
        ) -> list[float]:
            moved: FloatArray = np.log([calibration.coefficients[name].value for name in names]) - values
            return [float(one) for one in np.exp(start + slopes @ moved)]

        learnt = refit(mine, rows, seconds, name="a user's", date=date.today().isoformat()).calibration
        here = with_values(prior, {name: learnt.coefficients[name].value for name in names})
        if np.max(np.abs(np.log([here.coefficients[name].value for name in names]) - values)) < STILL:
            break
    return here
