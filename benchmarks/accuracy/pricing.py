"""Step times of many runs under many calibrations, fast: a run is priced again only where a coefficient that it reads changed.

Which coefficients a run reads is recorded while it is priced, so nobody has to keep a list of what concerns whom.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.published import with_calibration
from cost_models.calibrations import NotedCoefficients
from cost_models.peaks import decision_columns
from cost_models.problem import Cells
from cost_models.records import Calibration, Coefficient, Decision
from cost_models.stage import price_blocks, price_columns
from planner.predict import simulated
from planner.readers.runs import Run, decision_of_run

FloatArray = NDArray[np.float64]

STEP = 0.02
"""Change of a log-coefficient by which slopes are found (forward differences)."""


def objective_s(run: Run, decision: Decision, calibration: Calibration) -> float:
    """J of a run: (m - 1/v)·max load + Σ t / v + the longest tail. Seconds."""
    problem = replace(run.problem, calibration=calibration)
    layout = run.layout
    columns = decision_columns(decision, problem.recompute_kinds)
    prices = price_columns(price_blocks(problem, Cells.of([layout])), 0, columns)
    loads = prices.t_s.reshape(layout.vpp, layout.pp).sum(axis=0)
    tails = prices.tail_s.reshape(layout.vpp, layout.pp).sum(axis=0)
    micro, v = decision.num_micro_batches, layout.vpp
    return float((micro - 1 / v) * loads.max() + prices.t_s.sum() / v + tails.max())


class Pricer:
    """Prices runs, and remembers."""

    def __init__(self) -> None:
        self._decisions: dict[str, Decision] = {}
        self._reads: dict[tuple[str, frozenset[str]], tuple[str, ...]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._ratio: dict[str, float] = {}
        self._names: dict[int, tuple[Mapping[str, Coefficient], frozenset[str]]] = {}
        self.priced = 0
        """Times that a run was priced."""

    def decision(self, run: Run) -> Decision:
        """The run's stages, worked out once."""
        found = self._decisions.get(run.digest)
        if found is None:
            found = self._decisions[run.digest] = decision_of_run(run)
        return found

    def reads(self, run: Run, calibration: Calibration) -> tuple[str, ...]:
        """Names of the coefficients that the run's step time is made of."""
        key = (run.digest, self._names_of(calibration))
        if key not in self._reads:
            recording = NotedCoefficients(calibration.coefficients)
            seconds = objective_s(run, self.decision(run), replace(calibration, coefficients=recording))
            self.priced += 1
            names = tuple(sorted(recording.read))
            self._reads[key] = names
            self._seconds[self._key(run, calibration, names)] = seconds
        return self._reads[key]

    def _names_of(self, calibration: Calibration) -> frozenset[str]:
        held = self._names.get(id(calibration.coefficients))
        if held is None:
            held = self._names[id(calibration.coefficients)] = (
                calibration.coefficients,  # held, so that its identity is not used again
                frozenset(calibration.coefficients),
            )
        return held[1]

    @staticmethod
    def _key(run: Run, calibration: Calibration, names: Sequence[str]) -> tuple[object, ...]:
        return (run.digest, *(calibration.coefficients[name].value for name in names), *names)

    def step_s(self, run: Run, calibration: Calibration) -> float:
        """J of a run, times its simulated step over J as it was when the run was first simulated (1.00 to 1.04)."""
        key = self._key(run, calibration, self.reads(run, calibration))
        if key not in self._seconds:
            self.priced += 1
            self._seconds[key] = objective_s(run, self.decision(run), calibration)
        return self._seconds[key] * self._ratio_of(run, calibration)

    def _ratio_of(self, run: Run, calibration: Calibration) -> float:
        if run.layout.pp == 1:
            return 1.0
        if run.digest not in self._ratio:
            played = simulated(with_calibration(run, calibration).problem, self.decision(run)).simulation.step_s
            self._ratio[run.digest] = played / objective_s(run, self.decision(run), calibration)
        return self._ratio[run.digest]

    def logs(self, runs: Sequence[Run], calibration: Calibration) -> FloatArray:
        """Logarithms of the step times."""
        return np.array([math.log(self.step_s(run, calibration)) for run in runs])

    def slopes(self, runs: Sequence[Run], calibration: Calibration, names: Sequence[str]) -> FloatArray:
        """[run, name] change of log seconds by log coefficient; 0 where a run does not read it."""
        found = np.zeros((len(runs), len(names)))
        here = self.logs(runs, calibration)
        read = [set(self.reads(run, calibration)) for run in runs]
        for column, name in enumerate(names):
            moved = with_values(calibration, {name: calibration.coefficients[name].value * math.exp(STEP)})
            for index, run in enumerate(runs):
                if name in read[index]:
                    found[index, column] = (math.log(self.step_s(run, moved)) - here[index]) / STEP
        return found


def with_values(calibration: Calibration, values: Mapping[str, float]) -> Calibration:
    """The calibration with these values."""
    changed = {name: replace(calibration.coefficients[name], value=value) for name, value in values.items()}
    return replace(calibration, coefficients={**calibration.coefficients, **changed})


def without(calibration: Calibration, names: Iterator[str] | Sequence[str]) -> Calibration:
    """The calibration without these coefficients: less specific ones take their place."""
    gone = set(names)
    kept = {name: one for name, one in calibration.coefficients.items() if name not in gone}
    return replace(calibration, coefficients=kept)
