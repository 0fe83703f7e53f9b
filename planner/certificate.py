"""The certificate: what a plan's file keeps of the proof, and the proof derived once more from the request.

The file keeps the cells that were looked into. The bounds of all others follow from the request in the same file, in array
calls, so anybody can derive them again; so can the best J of each cell that was looked into. A number that does not come out
again, or a closed cell whose bound does not close it, is a fault of the certificate.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models.calibrations import identity, shipped
from cost_models.records import Calibration, Cell, Certificate, Plan, to_json
from cost_models.records.plan import NO_CANDIDATE
from cost_models.schedules import FloatArray
from planner.advice import problem_of
from planner.choice_again import faults_of_choice
from planner.choose import Answer
from planner.errors import InputError
from planner.readers.pins import parse_pins
from planner.search.best_first import AGREEMENT, NOTHING_FITS
from planner.search.incumbent import least_objective
from planner.search.nesting import Joined, other_orders
from planner.search.pooled import price
from planner.search.priced import Priced
from planner.what_if.feasible import space_of

_TOGETHER = 512
"""Cells whose bounds are derived in one array call."""


def certificate_of(answer: Answer) -> Certificate:
    """What a plan's file keeps of the proof."""
    choice, cells, every = answer.choice, answer.priced.space.cells, answer.every
    restrictions = list(answer.priced.space.restrictions)
    if answer.at_risk:
        restrictions.append("no plan keeps the margin of memory: this one fits on expectation only")
    if answer.current_note:
        restrictions.append(f"{NO_CANDIDATE}{answer.current_note}")
    return Certificate(
        status=choice.status,
        objective_s=choice.objective_s,
        bound_s=choice.bound_s,
        gap_objective=choice.gap_objective,
        objective_of_choice_s=choice.chosen.objective_s,
        simulated_s=choice.simulated_s,
        gap_simulated=choice.gap_simulated,
        least_bound_s=choice.least_bound_s,
        least_bound_cell=every.name(choice.least_bound_cell),
        num_cells=len(every.families),
        limit_s=choice.limit_s,
        cells=tuple(
            Cell(
                cell=every.name(verdict.index),
                bound_s=verdict.bound_s,
                simulated_bound_s=verdict.simulated_bound_s,
                objective_s=verdict.objective_s,
                reason=verdict.reason,
            )
            for verdict in choice.cells
        ),
        worlds=tuple(sorted({int(world) for world in np.unique(cells.world)})),
        at_risk=answer.at_risk,
        orders_below_s=answer.orders_below_s,
        seconds=choice.seconds,
        solver=choice.solver,
        restrictions=tuple(restrictions),
    )


def derived_again(plan: Plan, calibration: Calibration | None = None) -> Mapping[str, Any]:
    """The certificate of a plan with every cell of its space, and `faults`: what does not come out again.

    InputError where the plan has none (it was edited by hand), or another calibration than the plan's is given.
    """
    proof = plan.certificate
    if proof is None:
        raise InputError(
            "this plan proves nothing: its decision was edited by hand; make a new one with `meshwright plan`"
        )
    calibration = calibration or shipped()
    if identity(calibration) != plan.provenance.calibration:
        raise InputError(
            f"this plan was made with calibration {plan.provenance.calibration}, here is {identity(calibration)}: "
            "the proof is about the former; give it with --calibration"
        )
    problem = problem_of(plan.request, calibration)
    pins = parse_pins(plan.request.pin, plan.request.runtime.recompute_kinds)
    space = space_of(problem, pins, proof.worlds)
    usual = price(problem, space, at_risk=proof.at_risk)
    other = None
    if proof.orders_below_s is not None:
        objective_s, simulated_s = proof.orders_below_s
        other = other_orders(usual, objective_below_s=objective_s, simulated_below_s=simulated_s)
    priced = usual if other is None else Joined(usual=usual, other=other)
    again = _Again(proof=proof, priced=priced, bounds_s=np.empty(len(priced.families)), known={})
    again.derive()
    document: dict[str, Any] = to_json(proof)
    document["cells"] = list(again.rows())
    document["faults"] = [*again.faults(), *faults_of_choice(plan, proof, problem, space, priced)]
    return document


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Again:
    """A proof, and the space that it is about, priced anew."""

    proof: Certificate
    priced: Priced | Joined
    bounds_s: FloatArray
    """(n,) no plan of a cell with J up to the limit has a smaller J."""
    known: dict[int, Cell]
    """Cell of the space -> what the proof says of it."""

    def derive(self) -> None:
        """All bounds below the proof's limit."""
        every = np.arange(len(self.bounds_s))
        for some in np.array_split(every, max(1, len(every) // _TOGETHER)):
            self.bounds_s[some] = self.priced.bounds_below(self.proof.limit_s, some)
        told = {cell.cell: cell for cell in self.proof.cells}
        for index in every.tolist() if told else ():
            cell = told.get(self.priced.name(index))
            if cell is not None:
                self.known[index] = cell

    def best_of_families(self) -> FloatArray:
        """(n,) the best J that the proof knows of any option of a cell; infinite where it knows none."""
        families = self.priced.families
        best = np.full(int(families.max()) + 1, np.inf)
        for index, cell in self.known.items():
            if cell.objective_s is not None:
                best[families[index]] = min(best[families[index]], cell.objective_s)
        return np.asarray(best[families])

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Every cell: those looked into as the proof has them, the others with what closes them."""
        best_s, limit_s = self.best_of_families(), self.proof.limit_s
        simulated_s = self.priced.simulated_bounds_s
        for index, bound_s in enumerate(self.bounds_s.tolist()):
            cell = self.known.get(index)
            if cell is not None:
                yield {**to_json(cell), "opened": True}
                continue
            yield {
                "cell": self.priced.name(index),
                "bound_s": min(bound_s, max(limit_s, float(self.priced.objective_bounds_s[index]))),
                "simulated_bound_s": float(simulated_s[index]),
                "objective_s": None,
                "reason": self._why_closed(bound_s, float(best_s[index])),
                "opened": False,
            }

    def _why_closed(self, bound_s: float, best_s: float) -> str:
        if np.isinf(bound_s):
            return f"no plan that fits has J ≤ {self.proof.limit_s:.6g} s"
        if bound_s >= best_s * (1 - AGREEMENT):
            return "bound is no better than the best J of another option of the cell"
        if bound_s <= self.proof.objective_s:
            return "not opened: the time ended" if bound_s >= self.proof.limit_s else "nothing closes it"
        return f"bound is {bound_s / self.proof.objective_s - 1:.1%} above J*"

    def faults(self) -> Iterator[str]:
        """What does not come out again, in words."""
        proof = self.proof
        if proof.num_cells != len(self.bounds_s):
            yield f"the space has {len(self.bounds_s):,} cells, the certificate counts {proof.num_cells:,}"
        missing = len(proof.cells) - len(self.known)
        if missing:
            yield f"{missing} of the cells looked into are not in the space"
        closed_s = np.minimum(self.best_of_families(), proof.limit_s)
        closed_s[list(self.known)] = -np.inf
        for index in np.flatnonzero(self.bounds_s < closed_s * (1 - AGREEMENT)).tolist():
            yield f"{self.priced.name(index)} was left closed, but its bound is {self.bounds_s[index]:.6g} s"
        found = [objective for index, cell in self.known.items() for objective in self._solved(index, cell)]
        yield from (words for words in found if isinstance(words, str))
        least_s = min((one for one in found if isinstance(one, float)), default=np.inf)
        if abs(least_s - proof.objective_s) > AGREEMENT * proof.objective_s:
            yield f"the least J of the cells looked into is {least_s:.6g} s, the certificate's J* is {proof.objective_s:.6g} s"
        if proof.bound_s > min(least_s, proof.limit_s) * (1 + AGREEMENT):
            yield f"the proved bound {proof.bound_s:.6g} s is above what is found"
        simulated_s = float(self.priced.simulated_bounds_s.min())
        if proof.least_bound_s < simulated_s * (1 - AGREEMENT) or proof.least_bound_s > proof.simulated_s * (
            1 + AGREEMENT
        ):
            yield f"min R is {proof.least_bound_s:.6g} s: it must lie between {simulated_s:.6g} and {proof.simulated_s:.6g} s"

    def _solved(self, index: int, cell: Cell) -> Iterator[float | str]:
        """The best J of a cell that was looked into, found again; in words, what is wrong with what the proof says of it."""
        limit_s = cell.objective_s if cell.objective_s is not None else self.proof.limit_s
        found = least_objective(self.priced.cell(index, limit_s * (1 + AGREEMENT)))
        objective_s = None if found is None or found.objective_s > limit_s * (1 + AGREEMENT) else found.objective_s
        if cell.objective_s is not None:
            if objective_s is None or abs(objective_s - cell.objective_s) > AGREEMENT * cell.objective_s:
                again = "none" if objective_s is None else f"{objective_s:.6g} s"
                yield f"{cell.cell}: its best J is said to be {cell.objective_s:.6g} s; found again: {again}"
        elif objective_s is not None and cell.reason == NOTHING_FITS:
            yield f"{cell.cell}: {cell.reason} is said, but a plan has J = {objective_s:.6g} s"
        if objective_s is not None:
            if cell.bound_s > objective_s * (1 + AGREEMENT):
                yield f"{cell.cell}: its bound is said to be {cell.bound_s:.6g} s, but a plan has J = {objective_s:.6g} s"
            yield objective_s
