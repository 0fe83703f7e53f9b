"""Small random cells with made-up prices: chains of unlike blocks, tight memory, pools, every kind of schedule."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models.records import Layout, Schedule
from cost_models.schedules import Pipeline, devices_of_stages, max_held, max_in_flight
from cost_models.simulation import StageTimes, simulate
from cost_models.step import lower_bound_s
from planner.search.exhaustive import overfull
from planner.search.known import Known
from planner.search.stages import CellProblem, Played, StageColumns, fits_alone, heaviest_below

PLAYED = (Schedule.LOOPED_BFS, Schedule.INTERLEAVED_ZB, Schedule.ZBV, Schedule.DUALPIPEV)
"""Schedules without a formula, two virtual stages a device."""


def any_cell(seed: int, index: int = 0) -> CellProblem:
    """A cell of any kind: as `random_cell` makes it, larger, on pools, both, or one that is played."""
    draw = random.Random(~seed)
    kind = draw.choice(("plain", "larger", "pools", "pools", "larger pools", "played"))
    if kind == "played":
        return random_played_cell(seed, index)
    cell = random_cell(seed, index, larger=kind.startswith("larger"))
    return on_pools(cell, draw) if kind.endswith("pools") else cell


def on_pools(cell: CellProblem, draw: random.Random) -> CellProblem:
    """The cell on two or three pools, as far as it has devices: each pool with its own speed and memory, neighbours in line."""
    pp, stage = cell.layout.pp, cell.columns.stage
    cuts = sorted(draw.sample(range(1, pp), min(pp - 1, draw.randint(1, 2))))
    pools = tuple(sum(cut <= device for cut in cuts) for device in range(pp))
    speed = np.array([draw.uniform(0.4, 3.0) for _ in range(3)])[list(pools)][stage % pp]
    room = np.array([draw.uniform(0.3, 2.0) for _ in range(3)])[list(pools)]
    slower = ("forward_s", "backward_s", "tail_s", "played_tail_s")
    columns = replace(cell.columns, **{name: getattr(cell.columns, name) * speed for name in slower})
    return replace(cell, columns=columns, pools=pools, memory_limit_bytes=cell.memory_limit_bytes * room)


def random_played_cell(seed: int, index: int = 0) -> CellProblem:
    """A cell of one plan, whose J is its time as played; it does not always fit."""
    draw = random.Random(seed)
    layout = Layout(pp=draw.randint(2, 3), vpp=2, schedule=draw.choice(PLAYED))
    num_stages = layout.num_virtual_stages
    pipeline = Pipeline(
        schedule=layout.schedule,
        num_devices=layout.pp,
        num_virtual_per_device=2,
        num_micro_batches=2 * layout.pp * draw.randint(1, 2),
    )
    every = _columns(draw, layout, num_stages)
    chosen = every.take(np.searchsorted(every.stage, np.arange(num_stages)))
    times = StageTimes(
        forward_s=chosen.forward_s,
        backward_s=chosen.backward_s,
        hop_s=np.full(num_stages - 1, 0.1),
        tail_s=np.array([draw.uniform(0, 2) for _ in range(layout.pp)]),
        input_grad_s=0.55 * chosen.backward_s,
        weight_grad_s=0.5 * chosen.backward_s,
    )
    held = max_held(pipeline)
    most = max(sum(vector) for vectors in held for vector in vectors)
    return CellProblem(
        index=index,
        layout=layout,
        num_micro_batches=pipeline.num_micro_batches,
        num_blocks=num_stages + 2,
        columns=chosen,
        in_flight=(),
        memory_limit_bytes=(2 * float(chosen.state_bytes.max()) + most * float(chosen.activation_bytes.max()))
        * draw.choice([0.2, 0.8, 1.0]),
        played=Played(
            objective_s=simulate(pipeline, times).step_s,
            lower_bound_s=lower_bound_s(pipeline, times),
            devices=devices_of_stages(layout.schedule, layout.pp, layout.vpp),
            waiting_bytes=0.4 * chosen.activation_bytes,
            held=held,
        ),
    )


def random_cell(seed: int, index: int = 0, *, larger: bool = False) -> CellProblem:
    """A cell of at most some thousand plans. Prices are additive over blocks, plus a cost of each stage and of each hop."""
    draw = random.Random(seed)
    schedule = draw.choice([Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED])
    pp = draw.randint(1, 4) if schedule is Schedule.ONE_F_ONE_B else draw.randint(2, 4)
    vpp = 2 if schedule is Schedule.INTERLEAVED else 1
    if schedule is Schedule.INTERLEAVED:
        pp, per_chunk = draw.choice([(2, 1), (2, 2), (3, 1)])
        if larger:
            pp, vpp, per_chunk = draw.choice([(2, 3, 1), (2, 2, 3), (2, 4, 1), (3, 3, 1), (4, 2, 1)])
        num_layers = pp * vpp * per_chunk
    elif larger:
        pp = draw.randint(3, 5)
        num_layers = draw.randint(max(1, pp - 2), 7 if pp < 5 else 6)
    else:
        num_layers = draw.randint(max(1, pp - 2), 6)
    num_micro = pp * draw.randint(1, 4) if vpp > 1 else draw.randint(pp, 12)
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule)
    pipeline = Pipeline(schedule=schedule, num_devices=pp, num_virtual_per_device=vpp, num_micro_batches=num_micro)
    in_flight = max_in_flight(pipeline)
    columns = _columns(draw, layout, num_layers)
    return CellProblem(
        index=index,
        layout=layout,
        num_micro_batches=num_micro,
        num_blocks=num_layers + 2,
        columns=columns,
        in_flight=in_flight,
        memory_limit_bytes=_limit(draw, columns, in_flight),
        bound_s=0.0,
    )


def _limit(draw: random.Random, columns: StageColumns, in_flight: tuple) -> float:
    most = max(sum(vector) for vectors in in_flight for vector in vectors)
    largest = float((columns.state_bytes + most * columns.activation_bytes).max())
    return largest * draw.choice([0.4, 0.7, 1.0, 1.5, 3.0])


def _columns(draw: random.Random, layout: Layout, num_layers: int) -> StageColumns:
    num_blocks, num_stages = num_layers + 2, layout.num_virtual_stages
    alike = draw.random() < 0.4
    forward = [draw.uniform(0.2, 2.0) for _ in range(num_blocks)]
    backward = [f * draw.uniform(0.8, 2.5) for f in forward]
    activation = [draw.uniform(1, 10) for _ in range(num_blocks)]
    state = [draw.uniform(5, 60) for _ in range(num_blocks)]
    if alike:
        for values in (forward, backward, activation, state):
            values[1:-1] = [values[1]] * num_layers
    again, saved = draw.uniform(0.2, 1.2), draw.uniform(0.3, 0.95)
    fixed_s, hop_s, constant_s = draw.choice([0.0, 0.3]), draw.choice([0.0, 0.2]), draw.choice([0.0, 2.0])
    rows = []
    for stage in range(num_stages):
        for first, last in _spans(layout, stage, num_layers):
            layers = [block for block in range(first, last + 1) if 1 <= block <= num_layers]
            for num_again in range(len(layers) + 1):
                blocks = range(first, last + 1)
                # layers under recompute are the first ones of the stage
                redone = layers[:num_again]
                rows.append(
                    (
                        stage,
                        first,
                        last,
                        (len(layers) - num_again, num_again),
                        sum(forward[b] for b in blocks) + fixed_s,
                        sum(backward[b] for b in blocks) + sum(again * forward[b] for b in redone),
                        hop_s if stage else 0.0,
                        hop_s if stage < num_stages - 1 else 0.0,
                        constant_s + 0.02 * sum(state[b] for b in blocks),
                        sum(state[b] for b in blocks),
                        sum(activation[b] for b in blocks) - sum(saved * activation[b] for b in redone),
                    )
                )
    names = ("stage", "first", "last", "recompute_counts", "forward_s", "backward_s", "hop_in_s", "hop_out_s", "tail_s")
    arrays = dict(zip((*names, "state_bytes", "activation_bytes"), map(np.array, zip(*rows, strict=True)), strict=True))
    return StageColumns(**arrays, played_tail_s=arrays["tail_s"])


def _spans(layout: Layout, stage: int, num_layers: int) -> list[tuple[int, int]]:
    """(first, last) of each span of blocks that the virtual stage may hold."""
    num_blocks, num_stages = num_layers + 2, layout.num_virtual_stages
    if layout.vpp > 1:
        per = num_layers // num_stages
        first = 0 if stage == 0 else 1 + stage * per
        last = num_blocks - 1 if stage == num_stages - 1 else (stage + 1) * per
        return [(first, last)]
    starts = [0] if stage == 0 else range(stage, num_blocks)
    return [
        (first, last)
        for first in starts
        for last in (
            [num_blocks - 1] if stage == num_stages - 1 else range(first, num_blocks - (num_stages - 1 - stage))
        )
        if last >= first
    ]


def without_misfits(cell: CellProblem) -> CellProblem:
    """With v = 1 columns that do not fit do not exist, nor does a plan that is played."""
    if cell.played is not None and overfull(cell, range(len(cell.columns))):
        return _without_columns(cell)
    return replace(cell, columns=cell.columns.take(fits_alone(cell))) if cell.layout.vpp == 1 else cell


def _without_columns(cell: CellProblem) -> CellProblem:
    return replace(cell, columns=cell.columns.take(np.empty(0, dtype=np.intp)), played=None)


@dataclass(frozen=True)
class MadeUpSpace:
    """A space of given cells. Its bounds are closed formulas on each cell's least sums, made looser at random."""

    cells: Sequence[CellProblem]
    families: np.ndarray
    looseness: Sequence[float]
    objective_bounds_s: np.ndarray = field(init=False)
    simulated_bounds_s: np.ndarray = field(init=False)
    least_totals_s: list[float] = field(init=False)
    known: Known = field(init=False, default_factory=Known)

    def __post_init__(self) -> None:
        totals = [_least_sum(cell, cell.columns.load_s) for cell in self.cells]
        bare = [_least_sum(cell, cell.columns.forward_s + cell.columns.backward_s) for cell in self.cells]
        bounds = [
            loose * ((c.num_micro_batches - 1 / c.layout.vpp) * t / c.layout.pp + t / c.layout.vpp)
            for c, t, loose in zip(self.cells, totals, self.looseness, strict=True)
        ]
        simulated = [c.num_micro_batches * t / c.layout.pp for c, t in zip(self.cells, bare, strict=True)]
        for number, cell in enumerate(self.cells):
            if cell.played is not None:
                bounds[number] = self.looseness[number] * cell.played.objective_s
                simulated[number] = cell.played.lower_bound_s
        object.__setattr__(self, "objective_bounds_s", np.array(bounds))
        object.__setattr__(self, "simulated_bounds_s", np.array(simulated))
        object.__setattr__(self, "least_totals_s", totals)

    def layout(self, index: int) -> Layout:
        return self.cells[index].layout

    def name(self, index: int) -> str:
        return str(index)

    def cell(self, index: int, below_s: float) -> CellProblem:
        cell = replace(
            without_misfits(self.cells[index]),
            bound_s=float(self.objective_bounds_s[index]),
            least_total_s=self.least_totals_s[index],
        )
        if cell.played is not None:
            return cell if cell.played.objective_s <= below_s else _without_columns(cell)
        most = heaviest_below(below_s, cell.least_total_s, cell.num_micro_batches, cell.layout.vpp)
        return replace(cell, columns=cell.columns.take(cell.columns.load_s <= most), heaviest_s=most)

    def bounds_below(self, below_s: float, among: np.ndarray) -> np.ndarray:
        return self.objective_bounds_s[among]

    def simulated_bounds_below(self, below_s: float, among: np.ndarray) -> np.ndarray:
        return self.simulated_bounds_s[among]

    def fits(self, index: int) -> bool:
        return True

    def cell_for_bound(self, index: int, below_s: float) -> CellProblem:
        return without_misfits(self.cells[index])


def random_space(seed: int, num_cells: int = 3) -> MadeUpSpace:
    """Some random cells, the last of which is an option of the one before it."""
    draw = random.Random(seed)
    cells = [random_cell(draw.randrange(10**9), index) for index in range(num_cells)]
    return MadeUpSpace(
        cells=cells,
        families=np.array([min(index, num_cells - 2) for index in range(num_cells)]),
        looseness=[draw.uniform(0.3, 1.0) for _ in cells],
    )


def varied_space(seed: int) -> MadeUpSpace:
    """One to five cells of any kind, options of one another or not."""
    draw = random.Random(seed)
    cells = [any_cell(draw.randrange(10**9), index) for index in range(draw.randint(1, 5))]
    return MadeUpSpace(
        cells=cells,
        families=np.array(sorted(draw.randrange(len(cells)) for _ in cells)),
        looseness=[draw.uniform(0.3, 1.0) for _ in cells],
    )


def _least_sum(cell: CellProblem, amount: np.ndarray) -> float:
    """The least sum over all chains of columns, memory aside."""
    reached = {0: 0.0}
    for stage in range(cell.num_stages):
        after: dict[int, float] = {}
        for number in range(cell.stage_slices[stage].start, cell.stage_slices[stage].stop):
            first, end = int(cell.columns.first[number]), int(cell.columns.last[number]) + 1
            if first in reached:
                after[end] = min(after.get(end, np.inf), reached[first] + float(amount[number]))
        reached = after
    return reached[cell.num_blocks]


def short_of_memory(cell: CellProblem, share: float) -> CellProblem:
    """The cell with so much memory that its fullest device may keep this share of what recompute can save."""
    counts = cell.columns.recompute_counts
    stages = [np.arange(where.start, where.stop) for where in cell.stage_slices]
    nothing = [int(stage[counts[stage, 1].argmin()]) for stage in stages]
    all_again = [int(stage[counts[stage, 1].argmax()]) for stage in stages]
    most, least = (
        max(
            sum(
                cell.columns.state_bytes[pick] + alive * cell.columns.activation_bytes[pick]
                for alive, pick in zip(vector, picks[device :: cell.layout.pp], strict=True)
            )
            for device, vectors in enumerate(cell.in_flight)
            for vector in vectors
        )
        for picks in (nothing, all_again)
    )
    return replace(cell, memory_limit_bytes=float(least + share * (most - least)))
