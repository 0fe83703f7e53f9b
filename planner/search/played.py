"""Cells whose schedule has no formula: their few plans are played, and enter the choice with their simulated time.

Looped BFS, every schedule that splits the backward pass, and virtual stages that do not hold equally many layers. Their plans
are the balanced split, and where layers do not divide evenly the one that leaves the stages of embedding and head a layer
lighter; all layers under one kind of recompute, the cheapest that fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cost_models.laws import LAWS
from cost_models.problem import Cells, Columns
from cost_models.records import SPLIT_BACKWARD, Runtime, Schedule, Severity
from cost_models.schedules import WITH_FORMULA, devices_of_stages, max_held
from cost_models.simulation import simulate
from cost_models.stage import ColumnPrices, price_columns
from cost_models.step import lower_bound_s
from planner.search.stages import CellProblem, Played, StageColumns

if TYPE_CHECKING:
    from planner.search.priced import Priced


def is_played(schedule: Schedule, num_layers: int, pp: int, vpp: int) -> bool:
    """Whether a layout's plans are known by their simulated time alone."""
    return bool(_is_played(np.bool_(schedule in WITH_FORMULA), num_layers, np.int64(pp), np.int64(vpp)))


def are_played(cells: Cells, num_layers: int) -> NDArray[np.bool_]:
    """(n,) the same of many cells."""
    formula = np.array([schedule in WITH_FORMULA for schedule in cells.schedule.tolist()], dtype=bool)
    return np.asarray(_is_played(formula, num_layers, cells.pp, cells.vpp))


def _is_played(formula: Any, num_layers: int, pp: Any, vpp: Any) -> Any:
    return (pp > 1) & (~formula | ((vpp > 1) & (num_layers % (pp * vpp) != 0)))


def split_counts(num_layers: int, num_stages: int) -> list[list[int]]:
    """Blocks of each virtual stage, embedding and head counted: as many layers on each where they divide; else the layers
    balanced, and the blocks balanced, which leaves the stages of embedding and head a layer lighter."""
    by_layers = even_counts(num_layers, num_stages)
    by_layers[0] += 1
    by_layers[-1] += 1
    counts = [by_layers]
    if num_layers % num_stages:
        counts.append(even_counts(num_layers + 2, num_stages))
    return [blocks for blocks in counts if min(blocks) > 0]


def even_counts(total: int, parts: int) -> list[int]:
    """`total` in whole parts that differ by 1 at most, the larger ones in the middle."""
    least, more = divmod(total, parts)
    from_ends = sorted(range(parts), key=lambda part: -min(part, parts - 1 - part))
    larger = set(from_ends[:more])
    return [least + (part in larger) for part in range(parts)]


def kinds_with(schedule: Schedule, runtime: Runtime, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of recompute that go with a schedule in a runtime."""
    law = next(law for law in LAWS if law.code == "RECOMPUTE_WITH_SPLIT_BACKWARD")
    if schedule in SPLIT_BACKWARD and law.severity_of(runtime) is Severity.ERROR:
        return tuple(kind for kind in kinds if kind == "none")
    return kinds


def best_played(priced: "Priced", empty: CellProblem, below_s: float) -> CellProblem:
    """The cell with its plan of least simulated time among those that fit and take at most `below_s`; `empty` where none does."""
    best = empty
    for cell, prices in _fitting(priced, empty):
        pipeline = cell.pipeline
        times = prices.parts(pipeline).times()
        bound_s = lower_bound_s(pipeline, times)
        limit_s = below_s if best.played is None else min(below_s, best.played.objective_s)
        if bound_s > limit_s:
            continue
        step_s = simulate(pipeline, times).step_s
        if step_s <= limit_s and cell.played is not None:
            best = replace(cell, played=replace(cell.played, objective_s=step_s, lower_bound_s=bound_s))
    return best


def fits_played(priced: "Priced", empty: CellProblem) -> bool:
    """Whether any plan of the cell fits."""
    return any(True for _ in _fitting(priced, empty))


def _fitting(priced: "Priced", empty: CellProblem) -> Iterator[tuple[CellProblem, ColumnPrices]]:
    """The plans of a cell that fit, not played yet."""
    problem, layout = priced.problem, empty.layout
    known = priced.prices.recompute_kinds
    legal = kinds_with(layout.schedule, problem.runtime, priced.space.recompute_kinds)
    kinds = [kind for kind in priced.kinds if known[kind] in legal]
    devices = devices_of_stages(layout.schedule, layout.pp, layout.vpp)
    held = max_held(empty.pipeline)
    for number, blocks in enumerate(split_counts(problem.model.num_layers, layout.num_virtual_stages)):
        for kind in kinds:
            if not priced.bounds.may_fit_played(empty.index, empty.pipeline, number, kind):
                continue
            columns = _columns(blocks, kind, len(known))
            prices = price_columns(priced.prices, empty.index, columns)
            waiting = np.sum(list(prices.footprints.per_waiting.values()), axis=0)
            played = Played(objective_s=np.inf, lower_bound_s=0.0, devices=devices, waiting_bytes=waiting, held=held)
            cell = replace(empty, columns=StageColumns.of(columns, prices), played=played)
            if most_held_bytes(cell) <= cell.memory_limit_bytes:
                yield cell, prices
                break  # recompute serves memory alone: the cheapest kind that fits


def most_held_bytes(cell: CellProblem) -> float:
    """Bytes of the fullest device of a plan that is played, at its fullest moment."""
    assert cell.played is not None
    columns, most = cell.columns, 0.0
    for device, vectors in enumerate(cell.played.held):
        mine = np.flatnonzero(cell.played.devices == device)
        kept = np.concatenate([columns.activation_bytes[mine], cell.played.waiting_bytes[mine]])
        most = max(most, float(columns.state_bytes[mine].sum() + (np.array(vectors) @ kept).max()))
    return most


def _columns(blocks: list[int], kind: int, num_kinds: int) -> Columns:
    """The columns of a split, all layers under one kind of recompute."""
    edges = np.concatenate([[0], np.cumsum(blocks)])
    layers = np.array(blocks)
    layers[0] -= 1
    layers[-1] -= 1
    counts = np.zeros((len(blocks), num_kinds), dtype=np.int64)
    counts[:, kind] = layers
    return Columns(stage=np.arange(len(blocks)), first=edges[:-1], last=edges[1:] - 1, recompute_counts=counts)
