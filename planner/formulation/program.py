"""A mixed-integer linear programme as plain data: variables with bounds, rows with names, one objective to minimise."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Sense(StrEnum):
    """How the two sides of a row compare."""

    EQUAL = "="
    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Sum of coefficient x variable, compared with a constant."""

    name: str
    """`family[index]`."""
    variables: Sequence[int]
    """Numbers of the variables, each at most once."""
    coefficients: Sequence[float]
    """One per variable."""
    sense: Sense
    constant: float
    soft: bool = False
    """A requirement that could be given up (memory), not a law of logic: infeasibility is told in terms of these."""

    def violation(self, values: Sequence[float]) -> float:
        """How far the row is from being satisfied; 0 where it is."""
        excess = sum(c * values[v] for v, c in zip(self.variables, self.coefficients, strict=True)) - self.constant
        if self.sense is Sense.EQUAL:
            return abs(excess)
        return max(0.0, excess if self.sense is Sense.AT_MOST else -excess)


@dataclass(slots=True, kw_only=True)
class Program:
    """Minimise the objective over the rows."""

    names: list[str] = field(default_factory=list)
    """One per variable, unique."""
    highs: list[float | None] = field(default_factory=list)
    """Upper bounds, null = none; every lower bound is 0."""
    integer: list[bool] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    """Coefficient of each variable."""
    rows: list[Row] = field(default_factory=list)

    def add_variable(self, name: str, *, objective: float = 0.0, binary: bool = False) -> int:
        """A further variable, binary or from 0 up; its number."""
        self.names.append(name)
        self.highs.append(1.0 if binary else None)
        self.integer.append(binary)
        self.objective.append(objective)
        return len(self.names) - 1

    def value(self, values: Sequence[float]) -> float:
        """The objective at a point."""
        return sum(c * v for c, v in zip(self.objective, values, strict=True))
