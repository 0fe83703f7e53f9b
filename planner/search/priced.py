"""A space with its prices: bounds of all cells in array calls (bounds.py), and the columns of any one of them.

The seam between what cells exist (space), what stages cost (cost_models.stage) and the search, which knows numbers only.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cost_models.problem import Columns, ColumnShape, Problem, column_shape
from cost_models.records import Layout
from cost_models.schedules import FloatArray, IntArray, Pipeline
from cost_models.stage import (
    EMBEDDING,
    HEAD,
    LAYERS,
    BlockPrices,
    memory_upper,
    price_blocks,
    price_columns,
    usable_bytes,
)
from planner.search.bounds import Bounds
from planner.search.floors import vectors_of
from planner.search.incumbent import least_objective
from planner.search.known import Known, known_of
from planner.search.played import best_played, fits_played
from planner.search.space import Space
from planner.search.stages import (
    CellProblem,
    Spans,
    StageColumns,
    chunk_spans,
    fits_alone,
    free_spans,
    heaviest_below,
    recompute_choices,
    undominated,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """One problem's space with its prices."""

    problem: Problem
    space: Space
    prices: BlockPrices
    memory_limit_bytes: float
    """What the expected bytes of a device may be."""

    @classmethod
    def of(cls, problem: Problem, space: Space, *, at_risk: bool = False) -> "Priced":
        """Prices every block of every cell. With `at_risk`, plans may fill a device to the brim: "risky" instead of "ok"."""
        usable = usable_bytes(problem)
        return cls(
            problem=problem,
            space=space,
            prices=price_blocks(problem, space.cells, space.recompute_kinds),
            memory_limit_bytes=usable if at_risk else usable / memory_upper(problem, 1.0),
        )

    # --- bounds -----------------------------------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Numbers of the recompute kinds that may be used, the cheapest first."""
        priced = self.prices.recompute_kinds  # a runtime's further modules have no price yet
        allowed = [priced.index(kind) for kind in self.space.recompute_kinds if kind in priced]
        return tuple(sorted(allowed, key=lambda kind: float(self._block_s[:, LAYERS, kind].sum())))

    @cached_property
    def _block_s(self) -> FloatArray:
        """[cell, kind, recompute] forward and backward, hops out."""
        return np.asarray(self.prices.forward_s + self.prices.backward_s)

    @cached_property
    def bounds(self) -> Bounds:
        """What no plan of a cell beats."""
        return Bounds(
            problem=self.problem,
            cells=self.space.cells,
            prices=self.prices,
            kinds=self.kinds,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    @property
    def num_micro_batches(self) -> IntArray:
        """(n,) micro-batches of a step."""
        return self.bounds.num_micro_batches

    @property
    def objective_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J: the closed formula."""
        return self.bounds.objective_s

    @property
    def simulated_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R: the closed formula."""
        return self.bounds.simulated_s

    def bounds_below(self, below_s: float, among: IntArray | None = None) -> FloatArray:
        """Of the cells `among` (all), no plan that fits and has J ≤ `below_s` has a smaller J; infinite where there is none."""
        return self.bounds.objective_below(below_s, np.arange(len(self.space)) if among is None else among)

    def simulated_bounds_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Of the cells `among`, no plan that fits and has R ≤ `below_s` has a smaller R; infinite where there is none."""
        return self.bounds.simulated_below(below_s, among)

    @property
    def memory_floors_bytes(self) -> FloatArray:
        """(n,) what the mean device of each cell holds at least, with the thriftiest recompute."""
        return self.bounds.memory_floors_bytes

    @property
    def thriftiest_kind(self) -> str:
        """The kind of recompute that keeps least."""
        kept = np.array(self.problem.layer_counts) @ self.prices.activation_bytes[:, LAYERS].sum(axis=0)
        return min(self.space.recompute_kinds, key=lambda kind: float(kept[self.prices.recompute_kinds.index(kind)]))

    @property
    def families(self) -> IntArray:
        """(n,) entries of the same number differ in options only."""
        return self.space.families

    def name(self, index: int) -> str:
        """An entry as text."""
        return self.space.name(index)

    @cached_property
    def known(self) -> Known:
        """What earlier searches found out about cells of the same problem."""
        return known_of(self.problem, self.memory_limit_bytes, self.space.recompute_kinds)

    def layout(self, index: int) -> Layout:
        """Degrees and options of a cell."""
        return self.space.cells.layout(index)

    # --- columns ----------------------------------------------------------------------------------------------------------

    def cell(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with J ≤ `below_s` that fits and that no other column makes needless."""
        cells = self.space.cells
        total_s, tail_s = float(self.bounds.least_totals_s[index]), float(self.bounds.longest_tails_s[index])
        most = heaviest_below(below_s - tail_s, total_s, int(self.num_micro_batches[index]), int(cells.vpp[index]))
        if self.bounds.played[index]:
            return best_played(self, self._empty(index, most), below_s)
        return self._cell(index, most)

    def fits(self, index: int) -> bool:
        """Whether the cell has any plan that fits; the thriftiest recompute everywhere holds least."""
        family = int(self.families[index])
        if family not in self._family_fits:
            members = np.flatnonzero(self.families == family)
            thriftiest = members[int(np.argmin(self.memory_floors_bytes[members]))]
            self._family_fits[family] = self._fits_thriftily(int(thriftiest))
        return self._family_fits[family] and self._fits_thriftily(index)

    @cached_property
    def _family_fits(self) -> dict[int, bool]:
        return {}

    def _thriftily(self, index: int) -> CellProblem:
        """The cell with the thriftiest recompute on all layers, and no limit on its time; priced alone."""
        which, kinds = np.array([index]), (self.thriftiest_kind,)
        cells = self.space.cells.take(which)
        known = tuple(k for k in self.prices.recompute_kinds if k in (self.prices.recompute_kinds[0], *kinds))
        alone = Priced(
            problem=self.problem,
            space=replace(self.space, cells=cells, families=self.families[which], recompute_kinds=kinds),
            prices=self.prices.spread(cells, which, known),
            memory_limit_bytes=self.memory_limit_bytes,
        )
        return alone.cell(0, np.inf)

    def _fits_thriftily(self, index: int) -> bool:
        if self.memory_floors_bytes[index] > self.memory_limit_bytes:
            return False
        if self.bounds.played[index]:
            return fits_played(self, self._empty(index, np.inf))
        return least_objective(self._thriftily(index)) is not None

    def cell_for_bound(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with R ≤ `below_s`: R is at least m times the load of each device."""
        return self._cell(index, below_s / int(self.num_micro_batches[index]))

    def _empty(self, index: int, heaviest: float) -> CellProblem:
        """The cell without columns."""
        layout, num_micro = self.layout(index), int(self.num_micro_batches[index])
        pipeline = Pipeline(
            schedule=layout.schedule,
            num_devices=layout.pp,
            num_virtual_per_device=layout.vpp,
            num_micro_batches=num_micro,
        )
        return CellProblem(
            index=index,
            layout=layout,
            num_micro_batches=num_micro,
            num_blocks=self.problem.model.num_blocks,
            columns=_NO_COLUMNS,
            in_flight=() if self.bounds.played[index] else vectors_of(pipeline),
            memory_limit_bytes=self._limits(index),
            pools=self.space.pools(index),
            order=self.space.cells.rank_order(index),
            bound_s=float(self.objective_bounds_s[index]),
            least_total_s=float(self.bounds.least_totals_s[index]),
            heaviest_s=heaviest,
            recompute_kinds=self.prices.recompute_kinds,
        )

    def _cell(self, index: int, heaviest: float) -> CellProblem:
        empty, spans = self._empty(index, heaviest), self._spans(index, heaviest)
        if not len(spans):
            return empty
        columns = self.columns(empty, spans)
        light = columns.load_s <= heaviest * (1 + 1e-9)
        return empty.with_columns(columns if light.all() else columns.take(light))

    def _limits(self, index: int) -> float | FloatArray:
        """What each device of a cell may use."""
        return self.memory_limit_bytes

    def without_limit(self) -> "Priced":
        """The same space where memory has no end."""
        return replace(self, memory_limit_bytes=np.inf)

    def columns(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """The columns of these spans that a plan of the cell may use."""
        return self._fitting(cell, spans) if cell.layout.vpp == 1 else self._worthwhile(cell, spans)

    def _spans(self, index: int, heaviest: float) -> Spans:
        layout, num_layers = self.layout(index), self.problem.model.num_layers
        if layout.vpp > 1 or (self.space.even_stages and layout.pp > 1):
            return chunk_spans(num_layers, layout.num_virtual_stages)
        return free_spans(self.least_blocks_s(index), layout.pp, heaviest)

    def least_blocks_s(self, index: int) -> FloatArray:
        """(K,) the least time of each block of a cell, in the order of the model."""
        by_kind_s = self._block_s[index][:, list(self.kinds)].min(axis=1)
        return np.asarray(by_kind_s[self.problem.block_places])

    def _fitting(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """v = 1: of each span, the cheapest recompute where it fits, else the ways of recompute that fit.

        A column is needless where another of its span has no more forward, no more backward, and no more load and tail
        together: putting the other in its place lowers Σt by at least what it may add to κ.
        """
        plain = self._plain(cell.index, spans)
        most = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight])[plain.stage]
        missing = plain.state_bytes + most * plain.activation_bytes - cell.limits_bytes[plain.stage]
        fit = missing <= 0
        # the thriftiest kind on every layer
        kept = self.prices.activation_bytes[cell.index, LAYERS][:, list(self.kinds)]
        may_fit = ~fit & (missing <= most * (self._layers_by_kind(spans) @ (kept[:, 0] - kept.min(axis=1))))
        if not may_fit.any():
            return plain.take(fit)
        tight = spans.take(may_fit)
        mixed = self._saving(cell, tight, missing[may_fit])
        mixed = mixed.take(fits_alone(cell.with_columns(mixed)))
        half = mixed.half_hops_s
        worth = undominated(
            [mixed.stage, mixed.first, mixed.last],
            [mixed.load_s + mixed.tail_s, mixed.forward_s + half, mixed.backward_s + half],
        )
        return StageColumns.joined(plain.take(fit), mixed.take(worth))

    def _worthwhile(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """v > 1: the cheapest recompute on devices that fit with it, every undominated mixture on the others."""
        layout = cell.layout
        plain = self._plain(cell.index, spans)
        state, activation = (values.reshape(layout.vpp, -1) for values in (plain.state_bytes, plain.activation_bytes))
        devices = plain.stage[: state.shape[1]]
        fit = np.array(
            [
                all(
                    float(state[:, n].sum() + np.dot(vector, activation[:, n])) <= cell.limits_bytes[device]
                    for vector in cell.in_flight[device]
                )
                for n, device in enumerate(devices.tolist())
            ]
        )
        fit = np.tile(fit, layout.vpp)
        if fit.all() or len(self.kinds) == 1:
            return plain
        tight = spans.take(~fit)
        mixed = self._mixed(cell, tight)
        # recompute serves memory: that a longer backward hides more of the synchronisation is not counted in J
        mixed = replace(mixed, tail_s=plain.tail_s[np.searchsorted(plain.stage, mixed.stage)])
        kept = undominated([mixed.stage], [mixed.load_s, mixed.state_bytes, mixed.activation_bytes])
        return StageColumns.joined(plain.take(fit), mixed.take(kept))

    def _layers(self, spans: Spans) -> IntArray:
        """(n,) layers of each span."""
        ends = (spans.first == 0).astype(np.intp) + (spans.last == self.problem.model.num_blocks - 1)
        return np.asarray(spans.last - spans.first + 1 - ends)

    def _plain(self, index: int, spans: Spans) -> StageColumns:
        """One column for each span, all layers under the fastest kind of recompute."""
        counts = np.zeros((len(spans), len(self.prices.recompute_kinds)), dtype=np.int64)
        counts[:, self.kinds[0]] = self._layers(spans)
        return self._priced(index, spans, counts)

    def _shape(self, spans: Spans, counts: IntArray) -> ColumnShape:
        columns = Columns(stage=spans.stage, first=spans.first, last=spans.last, recompute_counts=counts)
        return column_shape(self.problem.model, columns)

    def _layers_by_kind(self, spans: Spans) -> IntArray:
        """(n, layer kinds) layers of each span."""
        return np.asarray(self._shape(spans, self._layers(spans)[:, None]).layers[:, :, 0])

    def _saving(self, cell: CellProblem, tight: Spans, missing_bytes: FloatArray) -> StageColumns:
        """v = 1: ways of recompute that save `missing_bytes` on each span.

        Spans of one kind of layer apart from those of several, of which every way is tried.
        """
        by_kind = self._layers_by_kind(tight)
        parts = []
        for kind in range(by_kind.shape[1]):
            alone = by_kind[:, kind] == by_kind.sum(axis=1)
            if kind > 0:
                alone &= by_kind[:, kind] > 0  # spans without layers are of the first kind
            if alone.any():
                parts.append(self._saving_alike(cell, tight.take(alone), missing_bytes[alone], kind))
        several = (by_kind > 0).sum(axis=1) > 1
        if several.any():
            spans = tight.take(several)
            rows, counts = recompute_choices(self._layers(spans), self.kinds, len(self.prices.recompute_kinds))
            parts.append(self._light(cell, spans.take(rows), counts))
        return StageColumns.joined(*parts)

    def _saving_alike(self, cell: CellProblem, tight: Spans, missing_bytes: FloatArray, kind: int) -> StageColumns:
        """Spans of one kind of layer: of the ways that save enough none that saves much more than it must.

        Of each two kinds the least count of the thriftier one that is enough is tried, and a few more: what a layer holds while
        it recomputes is not in the plain column, but is less than a whole layer keeps.
        """
        kept = self.prices.activation_bytes[cell.index, LAYERS][kind]
        pairs = [(one, two) for one, two in itertools.permutations(self.kinds, 2) if kept[two] < kept[one]]
        if not pairs:
            return _NO_COLUMNS
        alive = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight])[tight.stage]
        layers, found = self._layers(tight), []
        for one, two in pairs:
            saves = kept[self.kinds[0]] - kept[one], kept[one] - kept[two]
            least = np.ceil((missing_bytes / alive - layers * saves[0]) / saves[1] * (1 - 1e-12))
            more = min(int(np.ceil(kept[self.kinds[0]] / saves[1])) + 1, int(layers.max()))
            thrifty = np.maximum(least, 0).astype(np.int64)[:, None] + np.arange(more + 1)
            row, extra = np.nonzero(thrifty <= layers[:, None])
            choices = np.zeros((len(row), 1 + len(self.prices.recompute_kinds)), dtype=np.int64)
            choices[:, 0], choices[:, 1 + two] = row, thrifty[row, extra]
            choices[:, 1 + one] = layers[row] - thrifty[row, extra]
            found.append(choices)
        choices = np.unique(np.concatenate(found), axis=0)
        return self._light(cell, tight.take(choices[:, 0]), choices[:, 1:])

    def _light(self, cell: CellProblem, spans: Spans, counts: IntArray) -> StageColumns:
        """The columns that are not too heavy, priced."""
        worth = self._blocks_s(cell, spans, counts) <= cell.heaviest_s * (1 + 1e-9)
        return self._priced(cell.index, spans.take(worth), counts[worth])

    def _blocks_s(self, cell: CellProblem, spans: Spans, counts: IntArray) -> FloatArray:
        """(n,) seconds of the blocks of columns, hops out."""
        block_s = self._block_s[cell.index]
        shape = self._shape(spans, counts)
        ends_s = shape.embedding * block_s[EMBEDDING].min() + shape.head * block_s[HEAD].min()
        return np.asarray(shape.sum_of_layers(block_s[LAYERS]) + ends_s)

    def _mixed(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """v > 1: every mixture of kinds of recompute, without those that leave no time for the device's other chunks."""
        rows, counts = recompute_choices(self._layers(spans), self.kinds, len(self.prices.recompute_kinds))
        chosen = spans.take(rows)
        load_s = self._blocks_s(cell, chosen, counts)
        least_s = np.full(len(spans), np.inf)
        np.minimum.at(least_s, rows, load_s)
        device = spans.stage % cell.layout.pp
        others_s = np.bincount(device, least_s, cell.layout.pp)[device] - least_s
        worth = load_s + others_s[rows] <= cell.heaviest_s * (1 + 1e-9)
        return self._priced(cell.index, chosen.take(worth), counts[worth])

    def _priced(self, index: int, spans: Spans, counts: IntArray) -> StageColumns:
        """Columns with their prices."""
        columns = Columns(stage=spans.stage, first=spans.first, last=spans.last, recompute_counts=counts)
        return StageColumns.of(columns, price_columns(self.prices, index, columns))


_NO_BLOCKS, _NO_PRICES = np.empty(0, dtype=np.intp), np.empty(0)
_NO_COLUMNS = StageColumns(
    stage=_NO_BLOCKS,
    first=_NO_BLOCKS,
    last=_NO_BLOCKS,
    recompute_counts=np.empty((0, 0), dtype=np.intp),
    forward_s=_NO_PRICES,
    backward_s=_NO_PRICES,
    hop_in_s=_NO_PRICES,
    hop_out_s=_NO_PRICES,
    tail_s=_NO_PRICES,
    played_tail_s=_NO_PRICES,
    state_bytes=_NO_PRICES,
    activation_bytes=_NO_PRICES,
)
