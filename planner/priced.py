"""A space with its prices: closed bounds of all cells in one array call, and the columns of any one of them.

The seam between what cells exist (space), what stages cost (cost_models.stage) and the search, which knows numbers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models import compute
from cost_models.calibrations import value
from cost_models.problem import Columns, Problem
from cost_models.records import Layout
from cost_models.schedules import FloatArray, IntArray, Pipeline, max_in_flight
from cost_models.stage import LAYER, BlockPrices, memory_upper, price_blocks, price_columns, usable_bytes
from cost_models.step import CellFloors, cell_floors, closed_lower_bound_s, closed_objective_bound_s
from planner.space import Space
from planner.stages import (
    CellProblem,
    Spans,
    StageColumns,
    chunk_spans,
    fits_alone,
    free_spans,
    heaviest_s,
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
            prices=price_blocks(problem, space.cells),
            memory_limit_bytes=usable if at_risk else usable / memory_upper(problem, 1.0),
        )

    # --- bounds -----------------------------------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Numbers of the recompute kinds that may be used, the cheapest first."""
        priced = self.prices.recompute_kinds  # a runtime's further modules have no price yet
        allowed = [priced.index(kind) for kind in self.space.recompute_kinds if kind in priced]
        return tuple(sorted(allowed, key=lambda kind: float(self._layer_s[:, kind].sum())))

    @cached_property
    def _layer_s(self) -> FloatArray:
        return np.asarray((self.prices.forward_s + self.prices.backward_s)[:, LAYER])

    @cached_property
    def num_micro_batches(self) -> IntArray:
        """(n,) micro-batches of a step."""
        return self.space.cells.num_micro_batches(self.problem.workload.gbs)

    @cached_property
    def floors(self) -> CellFloors:
        """What every plan of each cell costs at least."""
        cells, prices = self.space.cells, self.prices
        kinds = list(self.kinds)
        counts = np.array([1, self.problem.model.num_layers, 1])
        divided = np.where(cells.zero >= 1, cells.shard_group[0], 1)
        mean_params = prices.params @ counts / cells.pp
        # the optimizer's time is linear in the parameters, so some device has at least the mean
        update = compute.moved_s(prices.rates, prices.rates.optimizer_bytes, mean_params / divided).total
        family = self.problem.cluster.pools[0].kind.device.family
        constant = value(self.problem.calibration, "step.constant_s", family, self.problem.runtime.name)
        return cell_floors(
            num_devices=cells.pp,
            block_counts=counts,
            block_forward_s=prices.forward_s[:, :, kinds].min(axis=-1),
            block_backward_s=prices.backward_s[:, :, kinds].min(axis=-1),
            tail_s=constant + update,
        )

    @cached_property
    def objective_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J."""
        return closed_objective_bound_s(self.floors, self.space.cells.vpp, self.num_micro_batches)

    @cached_property
    def simulated_bounds_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R."""
        cells = self.space.cells
        return closed_lower_bound_s(self.floors, cells.pp, cells.vpp, self.num_micro_batches)

    @property
    def families(self) -> IntArray:
        """(n,) entries of the same number differ in options only."""
        return self.space.families

    def layout(self, index: int) -> Layout:
        """Degrees and options of a cell."""
        return self.space.cells.layout(index)

    # --- columns ----------------------------------------------------------------------------------------------------------

    def cell(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with J ≤ `below_s` that fits and that no other column makes needless."""
        cells = self.space.cells
        total_s, tail_s = float(self.floors.total_s[index]), float(self.floors.tail_s[index])
        most = heaviest_s(below_s - tail_s, total_s, int(self.num_micro_batches[index]), int(cells.vpp[index]))
        return self._cell(index, most)

    def cell_for_bound(self, index: int, below_s: float) -> CellProblem:
        """The cell with every column of a plan with R ≤ `below_s`: R is at least m times the load of each device."""
        return self._cell(index, below_s / int(self.num_micro_batches[index]))

    def _cell(self, index: int, heaviest: float) -> CellProblem:
        layout, num_micro = self.layout(index), int(self.num_micro_batches[index])
        pipeline = Pipeline(
            schedule=layout.schedule,
            num_devices=layout.pp,
            num_virtual_per_device=layout.vpp,
            num_micro_batches=num_micro,
        )
        empty = CellProblem(
            index=index,
            layout=layout,
            num_micro_batches=num_micro,
            num_blocks=self.problem.model.num_blocks,
            columns=self._columns(index, Spans(stage=_NONE, first=_NONE, last=_NONE), self.kinds[:1]),
            in_flight=max_in_flight(pipeline),
            memory_limit_bytes=self.memory_limit_bytes,
            bound_s=float(self.objective_bounds_s[index]),
            least_total_s=float(self.floors.total_s[index]),
        )
        spans = self._spans(index, heaviest)
        if not len(spans):
            return empty
        columns = self._fitting(empty, spans) if layout.vpp == 1 else self._worthwhile(empty, spans)
        light = columns.load_s <= heaviest * (1 + 1e-9)
        return empty.with_columns(columns.take(light))

    def _spans(self, index: int, heaviest: float) -> Spans:
        layout, num_layers = self.layout(index), self.problem.model.num_layers
        if layout.vpp > 1 or (self.space.even_stages and layout.pp > 1):
            return chunk_spans(num_layers, layout.num_virtual_stages)
        kinds = list(self.kinds)
        embedding, layer, head = (
            float((self.prices.forward_s + self.prices.backward_s)[index, kind, kinds].min()) for kind in range(3)
        )
        return free_spans(np.array([embedding, *[layer] * num_layers, head]), layout.pp, heaviest)

    def _fitting(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """v = 1: of each span, the cheapest recompute where it fits, else the ways of recompute that fit.

        A column is needless where another of its span has no more forward, no more backward, and no more load and tail
        together: putting the other in its place lowers Σt by at least what it may add to κ.
        """
        plain = self._columns(cell.index, spans, self.kinds[:1])
        fit = fits_alone(cell.with_columns(plain))
        tight = Spans(stage=spans.stage[~fit], first=spans.first[~fit], last=spans.last[~fit])
        if not len(tight) or len(self.kinds) == 1:
            return plain.take(fit)
        mixed = self._columns(cell.index, tight, self.kinds)
        mixed = mixed.take(fits_alone(cell.with_columns(mixed)))
        half = mixed.half_hops_s
        kept = undominated(
            [mixed.stage, mixed.first, mixed.last],
            [mixed.load_s + mixed.tail_s, mixed.forward_s + half, mixed.backward_s + half],
        )
        return StageColumns.joined(plain.take(fit), mixed.take(kept))

    def _worthwhile(self, cell: CellProblem, spans: Spans) -> StageColumns:
        """v > 1: the cheapest recompute on devices that fit with it, every undominated mixture on the others."""
        layout = cell.layout
        plain = self._columns(cell.index, spans, self.kinds[:1])
        state = plain.state_bytes.reshape(layout.vpp, layout.pp)
        activation = plain.activation_bytes.reshape(layout.vpp, layout.pp)
        fit = np.array(
            [
                all(
                    float(state[:, device].sum() + np.dot(vector, activation[:, device])) <= cell.memory_limit_bytes
                    for vector in vectors
                )
                for device, vectors in enumerate(cell.in_flight)
            ]
        )
        fit = np.tile(fit, layout.vpp)
        if fit.all() or len(self.kinds) == 1:
            return plain
        tight = Spans(stage=spans.stage[~fit], first=spans.first[~fit], last=spans.last[~fit])
        mixed = self._columns(cell.index, tight, self.kinds)
        kept = undominated(
            [mixed.stage],
            [mixed.load_s, mixed.tail_s + mixed.load_s / layout.vpp, mixed.state_bytes, mixed.activation_bytes],
        )
        return StageColumns.joined(plain.take(fit), mixed.take(kept))

    def _columns(self, index: int, spans: Spans, kinds: Sequence[int]) -> StageColumns:
        """Every column of these spans under every mixture of these kinds, priced."""
        model = self.problem.model
        layers = spans.last - spans.first + 1 - (spans.first == 0) - (spans.last == model.num_blocks - 1)
        rows, counts = recompute_choices(layers, kinds, len(self.prices.recompute_kinds))
        columns = Columns(
            stage=spans.stage[rows], first=spans.first[rows], last=spans.last[rows], recompute_counts=counts
        )
        priced = price_columns(self.prices, index, columns)
        return StageColumns(
            stage=columns.stage,
            first=columns.first,
            last=columns.last,
            recompute_counts=counts,
            forward_s=priced.forward_s,
            backward_s=priced.backward_s,
            hop_in_s=priced.hop_in_s,
            hop_out_s=priced.hop_out_s,
            tail_s=priced.tail_s,
            state_bytes=priced.fixed_bytes,
            activation_bytes=priced.activation_bytes,
        )


_NONE = np.empty(0, dtype=np.intp)
