r"""The choice of a plan as an integer linear programme.

Sets
    θ        open cells; each has S = v·pp virtual stages s, devices p, m micro-batches, K blocks
    Π(p)     virtual stages of device p: s mod pp = p
    c        columns (candidates) of θ, each of one virtual stage s, holding blocks i..j-1
    n        maximal in-flight vectors q of a device (v > 1; with v = 1 a column that does not fit does not exist)

Data, of one column: t load of a micro-batch, f and b its forward and backward, tail, w state bytes, a activation bytes;
of one cell: M_p bytes of device p (its pool's), J̲ its closed bound. Time is counted in units of the incumbent's J, memory in
units of M_p. A cell fixes the pool of each device, so prices of columns are those of their pool.

Variables
    x_θ ∈ {0,1}          the cell is chosen
    λ_{θ,c} ∈ {0,1}      its virtual stage s is column c
    σ_θ ≥ 0              (m - 1/v) τ_θ: what the fullest device costs between the first and the last micro-batch
    σF_θ, σB_θ ≥ 0       the same for forward and backward apart, with gpipe, in place of σ_θ
    κ_θ ≥ 0              the longest tail of a device
    A cell whose schedule has no formula has one plan, whose simulated time S_θ is its J: x_θ alone, with the coefficient S_θ.

minimise J = Σ_θ [ σ_θ + (1/v) Σ_c t_c λ_{θ,c} + κ_θ ]          gpipe: σF_θ + σB_θ in place of σ_θ

subject to      one function each below; a row is named family[index]
    choice      exactly one cell
    start       the first virtual stage begins at block 0, in the chosen cell
    flow        each virtual stage begins where the one before ends
    finish      the last virtual stage ends at block K, in the chosen cell
    load        no device has more load than τ                   (gpipe: load_forward, load_backward)
    tail        no device has a longer tail than κ
    memory      no device holds more than its M_p, at any moment       (v > 1)
    floor       J of a cell is at least its closed bound: implied by the others, and what lets the solver prove quickly

Σ_c of one virtual stage of λ is x_θ by start and flow, so every column of a cell that is not chosen is 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.schedules import FloatArray, IntArray, stages_of_device
from planner.formulation.program import Program, Row, Sense
from planner.search.stages import CellProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class CellVariables:
    """Numbers of the variables of one cell."""

    cell: CellProblem
    chosen: int
    """x"""
    columns: range
    """λ, one per column."""
    steady: tuple[int, ...]
    """σ, or σF and σB."""
    tail: int | None
    """κ; None where the cell was played"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulation:
    """The programme over some cells, and how to read it."""

    program: Program
    cells: tuple[CellVariables, ...]
    unit_s: float
    """Seconds that the objective counts as 1."""

    def read(self, values: Sequence[float]) -> tuple[CellProblem, IntArray]:
        """The chosen cell and its picks, of a point that satisfies every row."""
        (entry,) = (entry for entry in self.cells if values[entry.chosen] > 0.5)
        if entry.cell.played is not None:
            return entry.cell, np.arange(len(entry.cell.columns))
        taken = np.flatnonzero(np.asarray(values[entry.columns.start : entry.columns.stop]) > 0.5)
        return entry.cell, taken

    def point(self, cell: CellProblem, picks: Sequence[int] | IntArray) -> list[float]:
        """The point of a plan, with every threshold as low as the plan allows."""
        values = [0.0] * len(self.program.names)
        (entry,) = (entry for entry in self.cells if entry.cell is cell)
        values[entry.chosen] = 1.0
        if entry.tail is None:
            return values
        for pick in picks:
            values[entry.columns[int(pick)]] = 1.0
        for variable, seconds in zip(entry.steady, _loads(cell), strict=True):
            values[variable] = _fullest(cell, seconds, picks) * cell.steady_micro_batches / self.unit_s
        values[entry.tail] = _fullest(cell, cell.columns.tail_s, picks) / self.unit_s
        return values


def _loads(cell: CellProblem) -> tuple[FloatArray, ...]:
    """What each σ of the cell is the maximum of, per column."""
    columns = cell.columns
    if cell.two_loads:
        return columns.forward_s + columns.half_hops_s, columns.backward_s + columns.half_hops_s
    return (columns.load_s,)


def _fullest(cell: CellProblem, seconds: FloatArray, picks: Sequence[int] | IntArray) -> float:
    return float(seconds[np.asarray(picks)].reshape(cell.layout.vpp, cell.layout.pp).sum(axis=0).max())


def formulate(cells: Sequence[CellProblem], *, unit_s: float) -> Formulation:
    """The programme that chooses among `cells`; `unit_s` is about the J of a good plan."""
    program = Program()
    entries = tuple(_variables(program, cell, unit_s) for cell in cells)
    program.rows.append(choice(entries))
    for entry in entries:
        for family in (path, load, tail, memory, floor) if entry.cell.played is None else ():
            program.rows.extend(family(entry, unit_s))
    return Formulation(program=program, cells=entries, unit_s=unit_s)


def _variables(program: Program, cell: CellProblem, unit_s: float) -> CellVariables:
    """Adds x, λ, σ and κ of a cell, with their parts of the objective; of a cell that was played x alone, at its S."""
    theta = cell.index
    constant = 0.0 if cell.played is None else cell.played.objective_s / unit_s
    chosen = program.add_variable(f"x[{theta}]", objective=constant, binary=True)
    begin = len(program.names)
    if cell.played is not None:
        return CellVariables(cell=cell, chosen=chosen, columns=range(begin, begin), steady=(), tail=None)
    for number, seconds in enumerate((cell.columns.load_s / (cell.layout.vpp * unit_s)).tolist()):
        program.add_variable(f"lambda[{theta},{number}]", objective=seconds, binary=True)
    names = ("sigma_forward", "sigma_backward") if cell.two_loads else ("sigma",)
    return CellVariables(
        cell=cell,
        chosen=chosen,
        columns=range(begin, begin + len(cell.columns)),
        steady=tuple(program.add_variable(f"{name}[{theta}]", objective=1.0) for name in names),
        tail=program.add_variable(f"kappa[{theta}]", objective=1.0),
    )


# --- constraint families ------------------------------------------------------------------------------------------------


def choice(entries: Sequence[CellVariables]) -> Row:
    """Σ_θ x_θ = 1."""
    return Row(
        name="choice[]",
        variables=[entry.chosen for entry in entries],
        coefficients=[1.0] * len(entries),
        sense=Sense.EQUAL,
        constant=1.0,
    )


def path(entry: CellVariables, unit_s: float) -> Iterator[Row]:
    """start: Σ_{c: i=0} λ_{0,c} = x;   flow: Σ_{c: j=k} λ_{s,c} = Σ_{c: i=k} λ_{s+1,c} ∀ s, k;   finish: Σ_{c: j=K} λ_{S-1,c} = x."""
    cell, theta = entry.cell, entry.cell.index
    ends: dict[tuple[int, int], list[int]] = {}
    begins: dict[tuple[int, int], list[int]] = {}
    columns = cell.columns
    for variable, stage, first, last in zip(
        entry.columns, columns.stage.tolist(), columns.first.tolist(), columns.last.tolist(), strict=True
    ):
        begins.setdefault((stage, first), []).append(variable)
        ends.setdefault((stage + 1, last + 1), []).append(variable)
    source, sink = (0, 0), (cell.num_stages, cell.num_blocks)
    for node in sorted({source, sink, *ends, *begins}):
        arriving = [entry.chosen] if node == source else ends.get(node, [])
        leaving = [entry.chosen] if node == sink else begins.get(node, [])
        family = "start" if node == source else "finish" if node == sink else "flow"
        yield Row(
            name=f"{family}[{theta},{node[0]},{node[1]}]",
            variables=[*arriving, *leaving],
            coefficients=[1.0] * len(arriving) + [-1.0] * len(leaving),
            sense=Sense.EQUAL,
            constant=0.0,
        )


def load(entry: CellVariables, unit_s: float) -> Iterator[Row]:
    """(m - 1/v) Σ_{s∈Π(p)} Σ_c t_c λ_{s,c} ≤ σ  ∀ p;  gpipe: Σ f λ against σF and Σ b λ against σB."""
    cell = entry.cell
    names = ("load_forward", "load_backward") if cell.two_loads else ("load",)
    for name, variable, seconds in zip(names, entry.steady, _loads(cell), strict=True):
        yield from _below(entry, name, seconds * (cell.steady_micro_batches / unit_s), variable)


def tail(entry: CellVariables, unit_s: float) -> Iterator[Row]:
    """Σ_{s∈Π(p)} Σ_c tail_c λ_{s,c} ≤ κ  ∀ p."""
    assert entry.tail is not None
    yield from _below(entry, "tail", entry.cell.columns.tail_s / unit_s, entry.tail)


def _below(entry: CellVariables, family: str, amounts: FloatArray, threshold: int) -> Iterator[Row]:
    """Σ_{s∈Π(p)} Σ_c amount_c λ_{s,c} - threshold ≤ 0  ∀ p."""
    listed = amounts.tolist()
    for device in range(entry.cell.layout.pp):
        numbers = _columns_of(entry.cell, device)
        yield Row(
            name=f"{family}[{entry.cell.index},{device}]",
            variables=[*(entry.columns[number] for number in numbers), threshold],
            coefficients=[*(listed[number] for number in numbers), -1.0],
            sense=Sense.AT_MOST,
            constant=0.0,
        )


def _columns_of(cell: CellProblem, device: int) -> list[int]:
    stages = stages_of_device(device, cell.layout.pp, cell.layout.vpp)
    return [number for s in stages for number in range(cell.stage_slices[s].start, cell.stage_slices[s].stop)]


def memory(entry: CellVariables, unit_s: float) -> Iterator[Row]:
    """Σ_{s∈Π(p)} Σ_c (w_c + q_s a_c) λ_{s,c} ≤ M_p x  ∀ p and maximal in-flight vector q of p (v > 1)."""
    cell = entry.cell
    if cell.layout.vpp == 1:
        return
    columns = cell.columns
    for device, vectors in enumerate(cell.in_flight):
        numbers = _columns_of(cell, device)
        chunk = columns.stage[numbers] // cell.layout.pp
        for n, vector in enumerate(vectors):
            used = columns.state_bytes[numbers] + np.asarray(vector)[chunk] * columns.activation_bytes[numbers]
            yield Row(
                name=f"memory[{cell.index},{device},{n}]",
                variables=[*(entry.columns[number] for number in numbers), entry.chosen],
                coefficients=[*(used / cell.limits_bytes[device]).tolist(), -1.0],
                sense=Sense.AT_MOST,
                constant=0.0,
                soft=True,
            )


def floor(entry: CellVariables, unit_s: float) -> Iterator[Row]:
    """σ + (1/v) Σ_c t_c λ_c + κ ≥ J̲ x."""
    cell = entry.cell
    if cell.bound_s <= 0 or entry.tail is None:
        return
    yield Row(
        name=f"floor[{cell.index}]",
        variables=[*entry.columns, *entry.steady, entry.tail, entry.chosen],
        coefficients=[
            *(cell.columns.load_s / (cell.layout.vpp * unit_s)).tolist(),
            *([1.0] * (len(entry.steady) + 1)),
            -cell.bound_s / unit_s,
        ],
        sense=Sense.AT_LEAST,
        constant=0.0,
    )
