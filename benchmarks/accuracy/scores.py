"""Scores of predictions: errors by source, order within sweeps, coverage of intervals, a trivial baseline."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.fit_published import Configuration
from benchmarks.accuracy.splits import Predicted
from cost_models.records import Layout
from planner.search.ties import simplest

LEAST_SWEEP = 4
"""Distinct plans from which a sweep says something of order."""
APART = 0.05
"""Measured times of a pair that differ by less are a tie: repeats differ by as much."""


def errors(logs: Iterable[float]) -> dict[str, float | int]:
    """Median and 90th percentile of the absolute relative error, and the median signed one, of log(predicted / measured)."""
    logs = np.asarray(list(logs))
    sizes = np.abs(np.expm1(logs))
    return {
        "n": len(logs),
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "bias": round(float(np.expm1(np.median(logs))), 4),
    }


def macro(by_source: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each source counts once."""
    if not by_source:
        return {}
    names = [name for name in next(iter(by_source.values())) if name != "n"]
    return {"n": sum(one["n"] for one in by_source.values())} | {
        name: round(float(np.mean([one[name] for one in by_source.values()])), 4) for name in names
    }


def by_source(configured: Sequence[Configuration], logs: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Errors of rows (a configuration counts as often as it was measured), by source, with the macro mean."""
    groups: dict[str, list[float]] = {}
    for one, log in zip(configured, logs, strict=True):
        groups.setdefault(one.source, []).extend([log] * len(one.ids))
    found = {source: errors(values) for source, values in sorted(groups.items())}
    return {**found, "macro": macro(found)}


def baseline_logs(configured: Sequence[Configuration]) -> list[float]:
    """log(predicted / measured) of a constant FLOP/s for each source, GPU and precision: the median of its own rows."""

    def key(one: Configuration) -> tuple[str, str, str]:
        problem = one.run.problem
        return one.source, problem.cluster.pools[0].kind.device.name, problem.workload.precision.value

    def flops(one: Configuration) -> float:
        workload = one.run.problem.workload
        return one.run.problem.model.model_flops_per_token(workload.seq) * workload.tokens / one.run.layout.world

    rates: dict[tuple[str, str, str], list[float]] = {}
    for one in configured:
        rates.setdefault(key(one), []).extend([flops(one) / one.measured_s] * len(one.ids))
    return [math.log(flops(one) / float(np.median(rates[key(one)])) / one.measured_s) for one in configured]


# Order -----------------------------------------------------------------------------------------------------------------


def sweeps(configured: Sequence[Configuration]) -> list[list[int]]:
    """Places of configurations of one source, model, cluster, batch and precision, at least four plans each."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(configured):
        problem = one.run.problem
        device = problem.cluster.pools[0].kind.device.name
        key = (one.source, one.model, repr(problem.model), device, one.run.layout.world, problem.workload)
        groups.setdefault(key, []).append(index)
    return [group for group in groups.values() if len(group) >= LEAST_SWEEP]


def order(measured: Sequence[float], predicted: Sequence[float], layouts: Sequence[Layout]) -> dict[str, float]:
    """Kendall's tau, share of pairs more than 5% apart in the right order, regret of the first and of the best of three.

    The first pick is the planner's: the simplest of those that tie. The three are those of the least predictions.
    """
    signs, right, apart = [], 0, 0
    for a, b in itertools.combinations(range(len(measured)), 2):
        sign = np.sign(measured[a] - measured[b]) * np.sign(predicted[a] - predicted[b])
        signs.append(sign)
        if abs(math.log(measured[a] / measured[b])) > math.log(1 + APART):
            apart += 1
            right += sign > 0
    ranked = np.argsort(predicted, kind="stable")
    best = min(measured)
    return {
        "plans": len(measured),
        "tau": float(np.mean(signs)),
        "pairs_apart": apart,
        "pairs_right": int(right),
        "regret_first": measured[simplest(layouts, predicted)] / best - 1,
        "regret_least": measured[ranked[0]] / best - 1,
        "regret_best_of_three": min(measured[index] for index in ranked[:3]) / best - 1,
    }


def orders(configured: Sequence[Configuration], seconds: Sequence[float]) -> dict[str, Any]:
    """Scores of order by source, the mean over its sweeps; pairs over all of them."""
    found: dict[str, list[dict[str, float]]] = {}
    for group in sweeps(configured):
        scored = order(
            [configured[index].measured_s for index in group],
            [seconds[index] for index in group],
            [configured[index].run.layout for index in group],
        )
        found.setdefault(configured[group[0]].source, []).append(scored)

    def mean(scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        apart = sum(one["pairs_apart"] for one in scores)
        return {
            "sweeps": len(scores),
            "plans": sum(one["plans"] for one in scores),
            "tau": round(float(np.mean([one["tau"] for one in scores])), 3),
            "pairs_right": round(sum(one["pairs_right"] for one in scores) / apart, 3) if apart else None,
            "regret_first": round(float(np.mean([one["regret_first"] for one in scores])), 4),
            "regret_least": round(float(np.mean([one["regret_least"] for one in scores])), 4),
            "regret_best_of_three": round(float(np.mean([one["regret_best_of_three"] for one in scores])), 4),
        }

    every = [one for scores in found.values() for one in scores]
    return {source: mean(scores) for source, scores in sorted(found.items())} | ({"all": mean(every)} if every else {})


# Intervals -------------------------------------------------------------------------------------------------------------


def coverage(configured: Sequence[Configuration], found: Sequence[Predicted]) -> dict[str, Any]:
    """Share of rows inside their 80% interval, and the median full width over the value, by source."""
    groups: dict[str, list[tuple[bool, float]]] = {}
    for one, answer in zip(configured, found, strict=True):
        inside = answer.low_s <= one.measured_s <= answer.high_s
        groups.setdefault(one.source, []).extend(
            [(inside, (answer.high_s - answer.low_s) / answer.step_s)] * len(one.ids)
        )
    scored = {
        source: {
            "n": len(rows),
            "covered": round(float(np.mean([inside for inside, _ in rows])), 3),
            "width": round(float(np.median([width for _, width in rows])), 3),
        }
        for source, rows in sorted(groups.items())
    }
    return {**scored, "macro": macro(scored)}


def asked_widths(
    configured: Sequence[Configuration], found: Sequence[Predicted], level: float = 0.8
) -> dict[str, float]:
    """Half-widths of a wholly calibrated and a wholly table prediction that these residuals ask for.

    Least pinball loss of |log(predicted / measured)| at `level` over calibrated·a + table·b, each source counting once, on a
    grid of 0.5%; an unmeasured value is never surer than a calibrated one.
    """
    sizes = np.abs([math.log(answer.step_s / one.measured_s) for one, answer in zip(configured, found, strict=True)])
    shares = np.array([[answer.basis["calibrated"], answer.basis["table"]] for answer in found])
    sources = [one.source for one in configured]
    weights = np.array([1 / sources.count(source) for source in sources])
    best = (math.inf, 0.0, 0.0)
    for calibrated in np.arange(0.03, 0.251, 0.005):
        for table in np.arange(calibrated, 1.001, 0.02):
            left = sizes - shares @ (calibrated, table)
            loss = float(np.sum(weights * np.maximum(level * left, (level - 1) * left)))
            best = min(best, (loss, float(calibrated), float(table)))
    return {"calibrated": round(best[1], 3), "table": round(best[2], 3)}


def worst(
    configured: Sequence[Configuration],
    logs: Sequence[float],
    cause: Callable[[Configuration], str],
    count: int = 10,
) -> list[dict[str, Any]]:
    """The configurations that are furthest off."""
    ranked = sorted(range(len(logs)), key=lambda index: -abs(logs[index]))[:count]
    return [
        {
            "ids": list(configured[index].ids),
            "source": configured[index].source,
            "model": configured[index].model,
            "layout": str(configured[index].run.layout),
            "measured_s": configured[index].measured_s,
            "error": round(math.expm1(logs[index]), 3),
            "cause": cause(configured[index]),
        }
        for index in ranked
    ]
