"""Schedules that the search does not open: the best layout with one, for who asks for it by name."""

from dataclasses import replace

import numpy as np

from cost_models.law_terms import divisors
from cost_models.problem import Problem
from cost_models.records import V_PLACED, Decision, Layout, Schedule, Verdict
from planner.decisions import decision_of_layout
from planner.errors import InfeasibleError, InputError
from planner.predict import predict
from planner.priced import Priced
from planner.readers.pins import Op, Pin, Pins
from planner.space import SCHEDULES, enumerate_cells

_MOST_PRICED = 24
"""Layouts that are priced, those of the least bound under 1f1b first."""


def best_unsearched(problem: Problem, pins: Pins, world: int) -> Decision | None:
    """The fastest layout that fits among those that `pins` allow with a schedule outside the search; where none fits, the
    one of least memory. None where the pins allow no such schedule, or nothing legal.
    """
    schedules = [s for s in problem.runtime.schedules if s not in SCHEDULES and pins.allows_value("schedule", s)]
    if not schedules or "schedule" not in pins.fields:
        return None
    found = []
    for layout in _layouts(problem, pins, world, schedules)[:_MOST_PRICED]:
        try:
            decision = decision_of_layout(problem, layout, world=world)
        except InputError:
            continue  # illegal with this schedule, or more stages than blocks
        predicted = predict(problem, decision)
        fits = predicted.verdict is Verdict.OK
        found.append((not fits, predicted.step_s if fits else predicted.memory_gib_max, str(layout), decision))
    return min(found, key=lambda entry: entry[:3])[3] if found else None


def _layouts(problem: Problem, pins: Pins, world: int, schedules: list[Schedule]) -> list[Layout]:
    """The layouts to price, by the bound of the same degrees under 1f1b."""
    kept = tuple(pin for pin in pins.pins if pin.field not in ("schedule", "vpp"))
    plain = Pin(field="schedule", op=Op.EQUAL, values=(Schedule.ONE_F_ONE_B.value,))
    try:
        space = enumerate_cells(
            model=problem.model,
            cluster=problem.cluster,
            workload=problem.workload,
            runtime=problem.runtime,
            pins=Pins(pins=(*kept, plain)),
            worlds=(world,),
        )
    except InfeasibleError:
        return []
    order = np.argsort(Priced.of(problem, space).bounds_below(np.inf), kind="stable")
    return [
        replace(layout, schedule=schedule, vpp=vpp)
        for index in order.tolist()
        for kind in space.recompute_kinds
        if (layout := space.cells.layout(index, kind)).pp > 1
        for schedule in schedules
        for vpp in chunk_counts(schedule, problem.model.num_layers, layout.pp)
        if pins.allows_value("vpp", vpp)
    ]


def chunk_counts(schedule: Schedule, num_layers: int, pp: int) -> list[int]:
    """Virtual stages on each device that a schedule can have: 2 in a V, what divides a device's layers in a loop, else 1."""
    if schedule in V_PLACED:
        return [2]
    if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        return [1]
    return [chunks for chunks in divisors(max(1, num_layers // pp)) if chunks > 1]
