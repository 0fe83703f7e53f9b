"""What earlier searches of this process found out about cells of the same problem: a second plan asks nothing twice.

A cell's best plan, and what the ILP said of the cell alone, depend on the problem, on the limit of memory and on the kinds of
recompute that may be used; not on the pins, which only say which cells there are.
"""

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cost_models.calibrations import identity
from cost_models.problem import Problem
from cost_models.records import to_json
from planner.search.stages import CellProblem

if TYPE_CHECKING:
    from planner.search.best_first import Candidate
    from planner.search.stages import CellOptimum

_MOST_PROBLEMS = 8
"""Problems that are remembered; the one asked longest ago is forgotten first."""
_MOST_CELLS = 512
"""Cells of one problem that are remembered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """What is known of the cells of one problem, by the text of their layout and where their stages lie."""

    best: dict[str, tuple[CellProblem, "CellOptimum"]] = field(default_factory=dict)
    """The best plan of a cell, and the columns among which it was found."""
    nothing_below_s: dict[str, float] = field(default_factory=dict)
    """No plan of the cell that fits has a J of at most this."""
    decided: dict[str, "Candidate"] = field(default_factory=dict)
    """The plan of the cell that the ILP chose, proved."""
    least_simulated_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The least R of a cell, looked for below a limit: (R or the limit, the limit)."""

    def remember(self, key: str, cell: CellProblem, found: "CellOptimum") -> None:
        """Keeps the best plan of a cell, unless there are too many: its columns take memory."""
        if len(self.best) < _MOST_CELLS or key in self.best:
            self.best[key] = cell, found


_problems: OrderedDict[str, Known] = OrderedDict()


def known_of(problem: Problem, memory_limits: object, recompute_kinds: tuple[str, ...]) -> Known:
    """What is known of the cells of a problem under these limits."""
    parts = [
        *(to_json(one) for one in (problem.model, problem.cluster, problem.workload, problem.runtime)),
        [identity(problem.calibration), problem.memory_kind.value, list(problem.offload)],
        [repr(memory_limits), list(recompute_kinds)],
    ]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    known = _problems.pop(key, None) or Known()
    _problems[key] = known
    while len(_problems) > _MOST_PROBLEMS:
        _problems.popitem(last=False)
    return known
