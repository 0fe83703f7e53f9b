"""Exact combinatorial search inside one cell: the plan of least J, which the ILP starts from, and the least that must be held."""

import numpy as np

from planner.search.chunks import least_of_chunks
from planner.search.paths import Paths
from planner.search.stages import CellOptimum, CellProblem


def least_objective(cell: CellProblem) -> CellOptimum | None:
    """The plan of least J in the cell; None where no plan of these columns fits."""
    if len(cell.columns) == 0:
        return None
    if cell.played is not None:
        return CellOptimum(objective_s=cell.played.objective_s, picks=np.arange(len(cell.columns)))
    return least_of_chunks(cell) if cell.layout.vpp > 1 else Paths.of(cell).least()


def least_memory_bytes(cell: CellProblem) -> float:
    """The least that the fullest device must hold under any plan of the cell (v = 1), whatever the limit; infinite: no plan."""
    assert cell.layout.vpp == 1
    columns = cell.columns
    most = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight], dtype=np.float64)
    used = columns.state_bytes + most[columns.stage] * columns.activation_bytes
    return Paths.of(cell).distance(used, np.maximum)
