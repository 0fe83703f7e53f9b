"""Fit the shipped calibration on published runs: python -m benchmarks.accuracy.fit_published PUBLISHED OUT.json

Maximum a posteriori: pseudo-Huber loss of log(predicted / measured) with scale 0.05, log-normal priors around the values
of priors.json. Equal configurations count once, with the geometric mean of their times, and each source weighs by the
square root of its number of configurations, so that no source rules. Gauss-Newton with numerical derivatives.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.accuracy.published import RUNTIMES, Run, read_runs, step_s, with_calibration
from cost_models.records import Calibration, load, save

SCALE = 0.05
"""Residuals beyond this count linearly: about one repeat-to-repeat deviation (3 to 5%)."""
ROUNDS = 4
STEP = 0.02
"""Relative step of the numerical derivatives."""

FITTED: Mapping[str, float] = {
    "matmul.efficiency.ampere.bf16": 0.05,
    "matmul.efficiency.hopper.bf16": 0.05,
    "matmul.efficiency.hopper.fp8": 0.1,
    "matmul.efficiency.blackwell.fp8": 0.1,
    "matmul.efficiency.blackwell.gb300.fp8": 0.15,
    "matmul.wave": 0.3,
    "attention.efficiency.ampere.llm-foundry": 0.3,
    "attention.efficiency.hopper.llm-foundry": 0.3,
    "attention.efficiency.hopper.megatron-bridge": 0.2,
    "attention.efficiency.blackwell.megatron-bridge": 0.2,
    "attention.score_bytes.megatron-deepspeed": 0.3,
    "attention.unfused_efficiency": 0.3,
    "attention.misaligned_factor": 0.4,
    "memory_ops.multiplier.megatron-bridge": 0.4,
    "memory_ops.multiplier.megatron-deepspeed": 0.4,
    "memory_ops.multiplier.llm-foundry": 0.4,
    "memory_ops.cast_bytes": 0.4,
    "weights.traffic_bytes": 0.2,
    "logits.bytes": 0.4,
    "link.efficiency.nvlink3-jean-zay": 0.3,
    "link.efficiency.nvlink3": 0.15,
    "overlap.tp": 0.05,
    "overlap.p2p.megatron-bridge": 0.1,
    "launch.layer_s": 0.5,
    "launch.layer_s.megatron-deepspeed": 0.4,
    "step.constant_s.megatron-bridge": 0.4,
    "step.constant_s.llm-foundry": 0.4,
    "step.constant_s.megatron-deepspeed": 0.4,
}
"""Coefficient -> standard deviation of the logarithm of its prior."""

SAME_AS: Mapping[str, str] = {
    "matmul.efficiency.ampere.fp16": "matmul.efficiency.ampere.bf16",
    "attention.efficiency.hopper.megatron": "attention.efficiency.hopper.megatron-bridge",
    "attention.efficiency.blackwell.megatron": "attention.efficiency.blackwell.megatron-bridge",
    "overlap.p2p.megatron": "overlap.p2p.megatron-bridge",
    "memory_ops.multiplier.megatron": "memory_ops.multiplier.megatron-bridge",
    "step.constant_s.megatron": "step.constant_s.megatron-bridge",
}
"""Coefficients that take another one's fitted value: the same kernels."""

UNBOUNDED = ("matmul.efficiency.blackwell.gb300.fp8",)
"""Its roof is another device's: there is no bound."""
BOUNDED = ("matmul.efficiency", "attention.efficiency", "attention.unfused_efficiency", "link.efficiency", "overlap")
"""Shares: never above 1."""

Configuration = tuple[Run, float]
"""One run and the geometric mean of what its configuration took."""


def configurations(runs: Sequence[Run]) -> list[Configuration]:
    """Each configuration of each source once."""
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        key = (run.source, repr(run.problem.model), repr(run.problem.cluster), run.problem.workload, run.layout)
        groups[(*key, run.problem.runtime.name, tuple(run.counts.items()))].append(run)
    return [(same[0], math.exp(np.mean([math.log(_measured(run)) for run in same]))) for same in groups.values()]


def _measured(run: Run) -> float:
    assert run.measured_s is not None
    return run.measured_s


def errors(configured: Sequence[Configuration], calibration: Calibration) -> np.ndarray:
    """log(predicted / measured) of each configuration."""
    priced = with_calibration([run for run, _ in configured], calibration)
    return np.array([math.log(step_s(run) / took) for run, (_, took) in zip(priced, configured, strict=True)])


def with_values(calibration: Calibration, names: Sequence[str], logs: np.ndarray) -> Calibration:
    """The calibration with exp(logs) for these coefficients, shares at most 1."""
    coefficients = dict(calibration.coefficients)
    for name, log in zip(names, logs, strict=True):
        bound = 1.0 if _is_share(name) else math.inf
        coefficients[name] = replace(coefficients[name], value=min(math.exp(log), bound))
    for name, other in SAME_AS.items():
        coefficients[name] = replace(coefficients[name], value=coefficients[other].value)
    return replace(calibration, coefficients=coefficients)


def _is_share(name: str) -> bool:
    return name.startswith(BOUNDED) and name not in UNBOUNDED


def fit(configured: Sequence[Configuration], priors: Calibration) -> tuple[Calibration, np.ndarray]:
    """The fitted calibration and the posterior standard deviations of the coefficients' logarithms."""
    names = list(FITTED)
    start = np.array([math.log(priors.coefficients[name].value) for name in names])
    precision = np.diag([1 / sd**2 for sd in FITTED.values()])
    weights = _source_weights(configured)
    logs, covariance = start.copy(), np.eye(len(names))
    for _ in range(ROUNDS):
        current = with_values(priors, names, logs)
        residual = errors(configured, current)
        jacobian = np.stack(
            [
                _slope(configured, with_values(priors, names, logs + STEP * unit), residual, name)
                for name, unit in zip(names, np.eye(len(names)), strict=True)
            ],
            axis=1,
        )
        robust = weights / (SCALE**2 * np.sqrt(1 + (residual / SCALE) ** 2))
        hessian = jacobian.T @ (robust[:, None] * jacobian) + precision
        gradient = jacobian.T @ (robust * residual) + precision @ (logs - start)
        covariance = np.linalg.inv(hessian)
        logs = logs - np.clip(covariance @ gradient, -0.5, 0.5)
        shares = np.array([_is_share(name) for name in names])
        logs = np.where(shares, np.minimum(logs, 0.0), logs)
    return with_values(priors, names, logs), np.sqrt(np.diag(covariance))


def _slope(configured: Sequence[Configuration], moved: Calibration, residual: np.ndarray, name: str) -> np.ndarray:
    """Derivative of the errors to the logarithm of one coefficient; 0 where its qualifiers name another machine."""
    concerned = np.array([_concerns(name, run) for run, _ in configured])
    slope = np.zeros(len(configured))
    chosen = [one for one, wanted in zip(configured, concerned, strict=True) if wanted]
    if chosen:
        slope[concerned] = (errors(chosen, moved) - residual[concerned]) / STEP
    return slope


def _concerns(name: str, run: Run) -> bool:
    device = run.problem.cluster.pools[0].kind.device
    kinds = (
        ({"ampere", "hopper", "blackwell"}, device.family),
        (set(RUNTIMES.values()), run.problem.runtime.name),
    )
    parts = set(name.split("."))
    return all(not parts & known or own in parts for known, own in kinds)


def _source_weights(configured: Sequence[Configuration]) -> np.ndarray:
    counts: dict[str, int] = defaultdict(int)
    for run, _ in configured:
        counts[run.source] += 1
    weights = np.array([1 / math.sqrt(counts[run.source]) for run, _ in configured])
    return np.asarray(weights / weights.mean())


def table(configured: Sequence[Configuration], calibration: Calibration) -> str:
    """Median and 90th percentile of the absolute error and the bias, by source."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for (run, _), error in zip(configured, errors(configured, calibration), strict=True):
        for key in (run.source, "all"):
            by_source[key].append(error)
    lines = [f"{'source':44} {'n':>4} {'median':>7} {'p90':>6} {'bias':>6}"]
    for source, logs in sorted(by_source.items()):
        sizes = np.abs(np.expm1(logs))
        lines.append(
            f"{source:44} {len(logs):4d} {np.median(sizes):7.1%} {np.quantile(sizes, 0.9):6.1%} {np.median(logs):+6.1%}"
        )
    return "\n".join(lines)


def stamped(
    fitted: Calibration, priors: Calibration, deviations: np.ndarray, residual: float, rows: int
) -> Calibration:
    """The fitted calibration with the birth certificate of each fitted coefficient."""
    coefficients = dict(fitted.coefficients)
    spread = dict(zip(FITTED, deviations, strict=True))
    for name in (*FITTED, *SAME_AS):
        origin = SAME_AS.get(name, name)
        before = priors.coefficients[origin]
        coefficients[name] = replace(
            fitted.coefficients[name],
            source=f"fitted on {rows} published configurations, spread of its logarithm {spread[origin]:.2f}; "
            f"prior {before.value:g} ± {FITTED[origin]:.0%}: {before.source.split(': ', 1)[-1]}",
            residual=round(residual, 4),
            rows=rows,
            value=float(f"{fitted.coefficients[name].value:.4g}"),
        )
    return replace(fitted, name="shipped-2026-11", coefficients=coefficients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    priors = load(Calibration, Path(__file__).with_name("priors.json"))
    runs, refused = read_runs(arguments.published / "throughput.csv", priors)
    configured = configurations(runs)
    print(f"{len(runs)} rows, {len(configured)} configurations; {len(refused)} rows left out")
    print(table(configured, priors))
    fitted, deviations = fit(configured, priors)
    residual = float(np.median(np.abs(errors(configured, fitted))) * 1.4826)
    print(table(configured, fitted))
    for (name, sd), deviation in zip(FITTED.items(), deviations, strict=True):
        print(
            f"{name:50} {priors.coefficients[name].value:10.4g} -> {fitted.coefficients[name].value:10.4g} ± {deviation:.0%} (prior ± {sd:.0%})"
        )
    save(stamped(fitted, priors, deviations, residual, len(configured)), arguments.out)


if __name__ == "__main__":
    main()
