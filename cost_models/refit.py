"""Whole runs -> Calibration: what runs of one's own say of each operation, shrunk to what was known before.

One multiplier for each operation, collective and coefficient that the runs' predictions depend on, found together as the
most probable one (MAP). Log-multipliers have a prior about 0, so what the runs do not tell apart stays where it was; its
tails are long (Student's t), since where a source differs it is one kernel or link that is another, not all a little.
Residuals beyond ROBUST deviations count linearly (pseudo-Huber), so that one odd run does not move what the others say.

How far the prior may be left is for the runs to say: with LEAST_RUNS or more of them each is predicted from the others, under
priors of several widths; the best of these is taken, but only where it is SURE to predict runs that nobody has seen better
than the prior itself does: few runs that happen to agree say little of others. How sure is the weight of the refit against the
prior, by the likelihoods of left-out runs, averaged over Bayesian bootstraps of the runs (pseudo-BMA+ of Yao, Vehtari, Simpson
and Gelman 2018). Else nothing is learnt.

    minimise  Σ_rows ρ((log measured - log predicted(x)) / spread) + Σ_parameters (TAIL + 1)·log(1 + (x / prior)² / TAIL)
    ρ(r) = 2·ROBUST²·(sqrt(1 + (r / ROBUST)²) - 1)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cost_models.data import rows as rows_of
from cost_models.records import Calibration, Cluster, Coefficient, RecordError

FloatArray = NDArray[np.float64]

LEAST_SPREAD = 0.02
"""Least relative spread of a measured run: a perfect repetition says little of the next day (p90 of repeated published
configurations is 6 to 9%)."""
ROBUST = 1.0
"""Deviations beyond which a residual counts linearly."""
TAIL = 3.0
"""Degrees of freedom of the prior: the fewest with a finite variance, near what robust regressions take (Lange, Little and
Taylor 1989 fit 3 to 5)."""
PRIOR_SPREAD = {"operations": 0.3, "curves": 0.7}
"""How far off measured values may be before a run tells (one standard deviation of the logarithm): an operation was timed
alone, a collective alone on idle cores."""
COEFFICIENT_SPREAD = {
    "matmul.efficiency": 0.15,
    "matmul": 0.4,
    "attention": 0.35,
    "weights": 0.4,
    "link.efficiency": 0.6,
    "overlap": 0.15,
    "step.constant": 0.4,
    "": 0.5,
}
"""The same of coefficients of the table, by the start of their name: about the root mean square of what each of seven published
sources, left out, would move them by (matmul.efficiency 0.09 to 0.22, attention 0.08 to 0.58, link.efficiency 0.25 and 1.25,
overlap 0.08 to 0.16, weights 0.13 to 1.2, step.constant 0.1 to 0.5, others 0.1 to 1.1)."""
FITTED_PART = 0.5
"""A coefficient that was fitted on other runs may be off by this part of that."""
SHARES = ("matmul.efficiency", "attention.efficiency", "attention.unfused_efficiency", "link.efficiency", "overlap")
"""Coefficients that are a part of something: no run makes one more than 1."""
FACTS = ("device.", "attention.backward_ratio", "launch.operations_per_layer")
"""Coefficients that count something: no run corrects them."""
LEARNT = 0.8
"""A coefficient rests on the runs where they make its standard deviation smaller than this part of the prior's; else it
rests on what it rested on before."""
SENSITIVITY_STEP = 1e-3
"""Change of a log-parameter by which sensitivities are found (forward differences)."""
LEAST_SENSITIVITY = 1e-4
"""d log step / d log parameter below which the runs say nothing about a parameter."""
WIDTHS = (1.0, 0.5, 0.25)
"""Parts of the prior's widths that are tried."""
LEAST_RUNS = 5
"""Runs from which one that is left out says something of how to learn from the others. Below, the whole widths are taken, for
the model that was run: a run or two of a model anchor larger ones of it to 4% (6% under the narrowest widths, 7% under none),
while one row at random makes a source's other models worse as often as not."""
SURE = 0.9
"""Weight of a refit against the prior from which it is taken. Of seven published sources, 60 choices of five rows each, 1% then
predict the others worse, at 0.5 8%; what the sources gain is nearly the same."""
BOOTSTRAPS = 1000
"""Of the runs, seeded: the weight is known to 1%."""
MOST_ITERATIONS = 12
"""Of Gauss-Newton, each with its own slopes: seconds are nearly linear in the parameters, so three are the rule."""
MOST_REWEIGHTED = 200
"""Of the reweighted least squares on the linear model, which costs next to nothing."""
CONVERGED = 1e-6
"""Largest change of a log-parameter in the last iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity of a run."""

    label: str
    """For people: layout and phase."""
    measured_s: float
    """Median."""
    spread: float
    """Relative, of the measurement."""
    run: str = ""
    """The run that it is a part of; rows of one run are left out together. Empty = a run of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A calibration refitted on runs."""

    calibration: Calibration
    """With the new values."""
    multipliers: Mapping[str, float]
    """Parameter -> factor that it got: `operations/layer/forward`, `curves/all_reduce`, `coefficients/step.constant_s.cpu`."""
    learnt: frozenset[str]
    """Parameters that rest on the rows now: these tell most of what is known of them."""
    width: float
    """Part of the prior's widths that was taken; 0 = the prior stays, since no refit is SURE to predict left-out runs better."""
    sure: float | None
    """Weight of the best refit against the prior, by left-out runs; None where there are too few."""
    before: tuple[float, ...]
    """log(measured / predicted) of each row, with the prior."""
    after: tuple[float, ...]
    """The same, refitted."""


Predict = Callable[[Calibration], Sequence[float]]
"""Seconds of each row under a calibration."""


def refit(prior: Calibration, rows: Sequence[Row], predict: Predict, *, name: str, date: str) -> Refit:
    """The most probable multipliers of everything that the rows' predictions depend on; see the head of this module."""
    if not rows:
        raise RecordError("nothing to refit on: no measured row has a prediction of the same kind beside it")
    measured = np.log([row.measured_s for row in rows])
    spread = np.array([max(row.spread, LEAST_SPREAD) for row in rows])

    def logs(parameters: Sequence[str], x: FloatArray) -> FloatArray:
        seconds = predict(scaled(prior, dict(zip(parameters, np.exp(x), strict=True))))
        return np.asarray(np.log(np.asarray(seconds, dtype=float)))

    start = np.log(np.asarray(predict(prior), dtype=float))
    parameters = [one for one in parameters_of(prior) if _matters(prior, one, predict, start)]
    task = _Task(
        logs=lambda x: logs(parameters, x),
        measured=measured,
        spread=spread,
        widths=np.array([prior_spread(prior, one) for one in parameters]),
        most=np.array([_most(prior, one) for one in parameters]),
    )
    width, sure_of, found = _chosen(task, start, [row.run or str(place) for place, row in enumerate(rows)])
    multipliers = dict(zip(parameters, np.exp(found.x).tolist(), strict=True))
    after = measured - found.here
    calibration = replace(scaled(prior, multipliers), name=name, date=date)
    sure = frozenset(np.asarray(parameters, dtype=object)[found.deviations < LEARNT * width * task.widths].tolist())
    return Refit(
        calibration=_signed(calibration, multipliers, sure, rows, after, date),
        multipliers=multipliers,
        learnt=sure,
        width=width,
        sure=sure_of,
        before=tuple((measured - start).tolist()),
        after=tuple(after.tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """What is refitted, in logarithms; arrays over rows or over parameters."""

    logs: Callable[[FloatArray], FloatArray]
    """log seconds of the rows at log-parameters."""
    measured: FloatArray
    spread: FloatArray
    widths: FloatArray
    """Of the prior."""
    most: FloatArray
    """Upper bounds."""

    def losses(self, left: FloatArray) -> FloatArray:
        """ρ of each row's log(measured / predicted): minus twice its log-likelihood."""
        scaled_left = left / self.spread / ROBUST
        return np.asarray(2 * ROBUST**2 * (np.sqrt(1 + scaled_left**2) - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """Log-parameters, and the linear model about them."""

    x: FloatArray
    here: FloatArray
    """log seconds of the rows there."""
    slopes: FloatArray
    """[row, parameter], of the last step."""
    deviations: FloatArray
    """Posterior standard deviations."""


def _chosen(task: _Task, start: FloatArray, runs: Sequence[str]) -> tuple[float, float | None, _Found]:
    """(part of the prior's widths, weight against the prior, what it leads to): what predicts left-out runs best, where that is sure."""
    nothing = _Found(
        x=np.zeros(len(task.widths)),
        here=start,
        slopes=np.zeros((len(start), len(task.widths))),
        deviations=task.widths,
    )
    if not len(task.widths):
        return 1.0, None, nothing
    if len(set(runs)) < LEAST_RUNS:
        return 1.0, None, _gauss_newton(task, start, 1.0)
    tried = {width: _gauss_newton(task, start, width) for width in WIDTHS}
    losses = {width: task.losses(_left_out(task, found, width, runs)) for width, found in tried.items()}
    best = min(losses, key=lambda width: float(losses[width].sum()))
    sure = weight_of_refit(task.losses(task.measured - start), losses[best], runs)
    return (best, sure, tried[best]) if sure >= SURE else (0.0, sure, nothing)


def weight_of_refit(of_prior: FloatArray, of_refit: FloatArray, runs: Sequence[str]) -> float:
    """Weight of a refit against the prior, 0..1; of_prior and of_refit are the losses of left-out rows, in the order of `runs`.

    Runs are weighed anew as Dirichlet's distribution says, rows of one run together.
    """
    names = list(dict.fromkeys(runs))
    gains = np.array(
        [sum(p - r for p, r, run in zip(of_prior, of_refit, runs, strict=True) if run == one) for one in names]
    )
    weights = np.random.default_rng(0).dirichlet(np.ones(len(names)), BOOTSTRAPS)
    log_odds = np.clip(len(names) * (weights @ gains) / 2, -700, 700)
    return float(np.mean(1 / (1 + np.exp(-log_odds))))


def _gauss_newton(task: _Task, start: FloatArray, width: float) -> _Found:
    """The most probable log-parameters under priors `width` times as wide."""
    x, here, widths = np.zeros(len(task.widths)), start, width * task.widths
    for _ in range(MOST_ITERATIONS):
        slopes = np.stack(
            [(task.logs(x + SENSITIVITY_STEP * unit) - here) / SENSITIVITY_STEP for unit in np.eye(len(x))], axis=1
        )
        moved, deviations = most_probable(x, task.measured - here, slopes, task.spread, widths, task.most)
        change, x = moved - x, moved
        here = task.logs(x)
        if np.max(np.abs(change)) < CONVERGED:
            break
    return _Found(x=x, here=here, slopes=slopes, deviations=deviations)


def _left_out(task: _Task, found: _Found, width: float, runs: Sequence[str]) -> FloatArray:
    """log(measured / predicted) of each run's rows as the other runs predict them, on the linear model about the solution."""
    left = task.measured - found.here
    unseen = np.zeros(len(left))
    for run in dict.fromkeys(runs):
        out = np.array([one == run for one in runs])
        others = ~out
        x, _ = most_probable(
            found.x, left[others], found.slopes[others], task.spread[others], width * task.widths, task.most
        )
        unseen[out] = left[out] - found.slopes[out] @ (x - found.x)
    return unseen


def most_probable(
    x: FloatArray, left: FloatArray, slopes: FloatArray, spread: FloatArray, widths: FloatArray, most: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(the most probable log-parameters on the linear model about `x`, their posterior standard deviations).

    left: (rows,) log(measured / predicted) at x; slopes: (rows, parameters); spread: (rows,) of the measurements; widths and
    most: (parameters,) prior deviations and upper bounds. A parameter at its bound that would go beyond stays there.
    """
    at = x.copy()
    for _ in range(MOST_REWEIGHTED):
        residual = left - slopes @ (at - x)
        weights = 1.0 / (spread**2 * np.sqrt(1.0 + (residual / spread / ROBUST) ** 2))
        holds = (TAIL + 1.0) / (TAIL * widths**2 + at**2)
        hessian = slopes.T @ (weights[:, None] * slopes) + np.diag(holds)
        gradient = slopes.T @ (weights * residual) - at * holds
        free = ~((at >= most - 1e-12) & (gradient > 0))
        change = np.zeros_like(at)
        change[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        change = np.minimum(at + change, most) - at
        at = at + change
        if np.max(np.abs(change)) < CONVERGED:
            break
    return at, np.sqrt(np.diag(np.linalg.inv(hessian)))


def prior_spread(prior: Calibration, parameter: str) -> float:
    """How far off a parameter may be before a run tells: the scale of its logarithm's prior."""
    kind, _, key = parameter.partition("/")
    if kind != "coefficients":
        return PRIOR_SPREAD[kind]
    spread = next(width for start, width in COEFFICIENT_SPREAD.items() if key.startswith(start))
    return spread * (FITTED_PART if prior.coefficients[key].rows > 0 else 1.0)


def with_links(calibration: Calibration, clusters: Iterable[Cluster]) -> Calibration:
    """The calibration with the table's facts of these clusters' links as coefficients, so that runs can correct them."""
    found = dict(calibration.coefficients)
    table = rows_of("links")
    for cluster in clusters:
        for pool in cluster.pools:
            for name in (pool.kind.intra.name, pool.kind.nic.name):
                for column, what in LINK_COLUMNS.items():
                    if column in table.get(name, {}):
                        fact = Coefficient(
                            value=table[name][column],
                            unit="s" if what.endswith("_s") else "1",
                            source=str(table[name].get("source", "table of links")),
                            date=str(table[name].get("date", calibration.date)),
                        )
                        found.setdefault(f"link.{what}.{name}", fact)
    return replace(calibration, coefficients=found)


LINK_COLUMNS = {"efficiency": "efficiency", "latency_s": "latency_s", "small_message_latency_s": "small_latency_s"}
"""Column of the table of links -> the coefficient that stands above it (`cost_models.collectives`)."""


def _most(prior: Calibration, parameter: str) -> float:
    """Largest log-multiplier: a share stays a share."""
    kind, _, key = parameter.partition("/")
    is_share = kind == "coefficients" and key.startswith(SHARES) and prior.coefficients[key].value <= 1
    return -math.log(prior.coefficients[key].value) if is_share else math.inf


def parameters_of(calibration: Calibration) -> tuple[str, ...]:
    """What a run may correct: measured operations by kind and direction, curves by collective, and coefficients of time."""
    found: dict[str, None] = {}
    for key in calibration.operations_s:
        found[_operation_group(key)] = None
    for key in calibration.curves:
        found["curves/" + key.split("/")[0]] = None
    for key, coefficient in calibration.coefficients.items():
        if not key.startswith(("memory.", "interval.", *FACTS)) and coefficient.value > 0:
            found[f"coefficients/{key}"] = None
    return tuple(found)


def _operation_group(key: str) -> str:
    parts = key.split("/")
    direction = parts[-1] if parts[-1] in ("forward", "backward") else ""
    return "/".join(filter(None, ("operations", parts[0], direction)))


def scaled(calibration: Calibration, multipliers: Mapping[str, float]) -> Calibration:
    """The calibration with each parameter times its multiplier."""

    def factor(parameter: str) -> float:
        return multipliers.get(parameter, 1.0)

    return replace(
        calibration,
        operations_s={key: s * factor(_operation_group(key)) for key, s in calibration.operations_s.items()},
        curves={
            key: replace(curve, seconds=tuple(s * factor("curves/" + key.split("/")[0]) for s in curve.seconds))
            for key, curve in calibration.curves.items()
        },
        coefficients={
            key: replace(one, value=one.value * factor(f"coefficients/{key}"))
            if f"coefficients/{key}" in multipliers
            else one
            for key, one in calibration.coefficients.items()
        },
    )


def _matters(prior: Calibration, parameter: str, predict: Predict, start: FloatArray) -> bool:
    moved = np.log(np.asarray(predict(scaled(prior, {parameter: math.exp(SENSITIVITY_STEP)})), dtype=float))
    return bool(np.max(np.abs(moved - start)) / SENSITIVITY_STEP > LEAST_SENSITIVITY)


def _signed(
    calibration: Calibration,
    multipliers: Mapping[str, float],
    learnt: frozenset[str],
    rows: Sequence[Row],
    after: FloatArray,
    date: str,
) -> Calibration:
    """Refitted coefficients carry what they were fitted on; those that the runs say little of keep their rows."""
    residual = float(np.std(after)) if len(rows) > 1 else None
    coefficients = dict(calibration.coefficients)
    for parameter, factor in multipliers.items():
        kind, _, key = parameter.partition("/")
        if kind != "coefficients":
            continue
        old = coefficients[key]
        if parameter in learnt:
            source = f"{old.source}; times {factor:.3f}, refitted on {len(rows)} rows of runs"
            coefficients[key] = replace(old, source=source, date=date, residual=residual, rows=old.rows + len(rows))
        else:
            coefficients[key] = _moved_along(old, factor, len(rows))
    return replace(calibration, coefficients=coefficients)


def _moved_along(old: Coefficient, factor: float, rows: int) -> Coefficient:
    """A coefficient that the runs do not tell from others: it moves with them, and rests on what it rested on."""
    if abs(factor - 1) < 5e-4:
        return old
    return replace(
        old, source=f"{old.source}; times {factor:.3f}, which {rows} rows of runs make likelier but do not show"
    )
