"""What no plan of a cell beats: bounds on J and on R for many cells in one array call.

The closed formulas know time alone. Below a limit they get tighter: what fits into memory must recompute, and some device
must carry a load (floors.py). Those take longer, so the search asks for them where a cell is about to be opened.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models import compute
from cost_models.calibrations import value, value_or
from cost_models.collectives import Collective, collective_s
from cost_models.memory import context_bytes
from cost_models.problem import Cells, Problem
from cost_models.schedules import FloatArray, IntArray, Pipeline, splits_backward
from cost_models.stage import EMBEDDING, HEAD, LAYERS, BlockPrices, hidden_share, late_s
from cost_models.step import CellFloors, cell_floors, closed_lower_bound_s, closed_objective_bound_s
from planner.search.floors import CellMemory, extra_seconds, layers_of_chunks, least_loads, least_steps
from planner.search.played import are_played
from planner.search.played_bounds import may_fit, played_bounds

_ROUNDING = 1e-9
"""Share by which a limit is raised before it is turned into a load, so that rounding closes nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounds:
    """Bounds of the cells of a space."""

    problem: Problem
    cells: Cells
    prices: BlockPrices
    kinds: tuple[int, ...]
    """Numbers of the recompute kinds that may be used."""
    memory_limit_bytes: float
    """What the expected bytes of a device may be."""

    # --- time alone -------------------------------------------------------------------------------------------------------

    @cached_property
    def least_block_s(self) -> FloatArray:
        """[cell, kind] forward and backward under the fastest recompute, hops out."""
        return np.asarray(self._block_s.min(axis=-1))

    @cached_property
    def _block_s(self) -> FloatArray:
        """[cell, kind, recompute that may be used] forward and backward, hops out."""
        return np.asarray((self.prices.forward_s + self.backward_s)[..., list(self.kinds)])

    @cached_property
    def played(self) -> NDArray[np.bool_]:
        """(n,) cells whose plans are known by their simulated time alone."""
        return are_played(self.cells, self.problem.model.num_layers)

    @cached_property
    def _chunked(self) -> NDArray[np.bool_]:
        """(n,) cells with v > 1 and equal chunks, of which J is the formula's."""
        return (self.cells.vpp > 1) & ~self.played

    @cached_property
    def _whole_backward(self) -> NDArray[np.bool_]:
        return np.array([not splits_backward(schedule) for schedule in self.cells.schedule.tolist()], dtype=bool)

    @cached_property
    def backward_s(self) -> FloatArray:
        """[cell, kind, recompute] the backward pass, in one piece or in two, whichever is shorter where it is split."""
        split = self.prices.split
        whole_s = self.prices.backward_s
        if split is None:
            return whole_s
        pieces_s = split.input_grad_compute_s + split.input_grad_exposed_s + split.weight_grad_s
        return np.where(self._whole_backward[:, None, None], whole_s, np.minimum(whole_s, pieces_s))

    @property
    def _layer_counts(self) -> IntArray:
        return np.array(self.problem.layer_counts)

    @cached_property
    def num_micro_batches(self) -> IntArray:
        """(n,) micro-batches of a step."""
        return self.cells.num_micro_batches(self.problem.workload.gbs)

    @cached_property
    def floors(self) -> CellFloors:
        """What every plan of each cell costs at least: worked out once for cells whose blocks and pp are alike."""
        cells, kinds = self.cells, list(self.kinds)
        deepest = int(cells.pp.max()) + 1
        first, row = np.unique(self.prices.rows * deepest + cells.pp, return_index=True, return_inverse=True)[1:]
        unlike = cell_floors(
            num_devices=cells.pp[first],
            block_counts=self.problem.block_counts,
            block_forward_s=self.prices.forward_s[first][:, :, kinds].min(axis=-1),
            block_backward_s=self.backward_s[first][:, :, kinds].min(axis=-1),
            tail_s=np.full(len(first), self.constant_s),
        )
        return _of(unlike, row.ravel())

    @property
    def constant_s(self) -> float:
        """What each step costs besides."""
        family = self.problem.cluster.pools[0].kind.device.family
        return value(self.problem.calibration, "step.constant_s", family, self.problem.runtime.name)

    @cached_property
    def longest_tails_s(self) -> FloatArray:
        """(n,) κ at least: the optimizer's time is linear in the parameters, so some device has the mean of it or more."""
        common, routed, parts = self._mean_params
        return np.asarray(self.constant_s + self.update_s(common / parts[0] + routed / parts[1]))

    @cached_property
    def least_totals_s(self) -> FloatArray:
        """(n,) T: least Σ t of a plan: its blocks, and each hop at the speed of the faster link, forward and backward."""
        return np.asarray(self.floors.total_s + 2 * (self.cells.num_virtual_stages - 1) * self.least_hop_s)

    @cached_property
    def least_hop_s(self) -> FloatArray:
        """(n,) the least that any hop takes; a stage that fills whole fast domains always hops between two."""
        fabric, stride = self.prices.fabric.unhindered, self.cells.stride("pp")
        least_bytes = self.prices.hop_bytes * self.problem.hop_factors[:-1].min()
        far = np.maximum(fabric.domain_size, stride)
        near_s, far_s = (
            collective_s(fabric, Collective.P2P, least_bytes, 2, reach, world=self.cells.world).total
            for reach in (1, far)
        )
        leaves = (stride >= fabric.domain_size) & (self.cells.world > fabric.domain_size)
        least_s = np.where(leaves, far_s, np.minimum(near_s, far_s))
        family = self.problem.cluster.pools[0].kind.device.family
        hidden = value_or(0.0, self.problem.calibration, "overlap.p2p", family, self.problem.runtime.name)
        return np.where(self.cells.pp > 1, (1 - hidden) * least_s, 0.0)

    @cached_property
    def _end_layers(self) -> tuple[IntArray, IntArray]:
        """(n, layer kinds) layers on the first and on the last device of equal chunks; 0 for v = 1."""
        cells, places = self.cells, self.problem.layer_places
        first, last = (np.zeros((len(cells), int(places.max()) + 1), dtype=np.int64) for _ in range(2))
        shapes, group = np.unique(np.stack([cells.pp, cells.vpp], axis=1), axis=0, return_inverse=True)
        for number, (pp, vpp) in enumerate(shapes.tolist()):
            members = (group.ravel() == number) & self._chunked
            if members.any():
                first[members] = layers_of_chunks(places, pp, vpp, 0).sum(axis=0)
                last[members] = layers_of_chunks(places, pp, vpp, pp - 1).sum(axis=0)
        return first, last

    @cached_property
    def _first_layers_s(self) -> FloatArray:
        """(n,) the layers of the first device of equal chunks; 0 for v = 1."""
        return np.asarray((self._end_layers[0] * self.least_block_s[:, LAYERS]).sum(axis=1))

    @cached_property
    def _chunk_loads_s(self) -> FloatArray:
        """(n,) the fuller of the first and last device of equal chunks, hops out: layers, embedding or head; 0 for v = 1."""
        last_s = (self._end_layers[1] * self.least_block_s[:, LAYERS]).sum(axis=1) + self.least_block_s[:, HEAD]
        fuller_s = np.maximum(self._first_layers_s + self.least_block_s[:, EMBEDDING], last_s)
        return np.where(self._chunked, fuller_s, 0.0)

    @cached_property
    def objective_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J: the closed formula, with hops, and with the known ends of equal chunks."""
        every = np.arange(len(self.cells))
        return self._objective(every, *(np.zeros(len(every)) for _ in range(3)))

    def _objective(
        self,
        among: IntArray,
        extra_s: FloatArray,
        extra_first_s: FloatArray,
        loads_s: FloatArray,
        tails_s: FloatArray | None = None,
    ) -> FloatArray:
        """The bound where every plan recomputes for `extra_s` a micro-batch, `extra_first_s` of it on the first device, has a
        device with a load of `loads_s` and one with a tail of `tails_s`."""
        vpp, num_micro = self.cells.vpp[among], self.num_micro_batches[among]
        tails_s = self.longest_tails_s[among] if tails_s is None else tails_s
        total_s = self.least_totals_s[among] + extra_s
        chunked = self._chunked[among]
        hops_s = np.where(chunked, (2 * vpp - 1) * self.least_hop_s[among], 0.0)
        load_s = np.maximum.reduce(
            [
                self.floors.device_load_s[among],
                total_s / self.cells.pp[among],
                self._chunk_loads_s[among] + hops_s,
                np.where(chunked, self._first_layers_s[among] + extra_first_s, 0.0),
                loads_s,
            ]
        )
        with np.errstate(invalid="ignore"):  # 0 x infinity: one micro-batch that does not fit
            bound_s = np.nan_to_num((num_micro - 1 / vpp) * load_s, nan=np.inf) + total_s / vpp + tails_s
        formula_s = np.maximum(bound_s, closed_objective_bound_s(_of(self.floors, among), vpp, num_micro))
        return np.where(self.played[among], self.simulated_s[among], formula_s)

    @cached_property
    def simulated_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R: the closed formula."""
        every = np.arange(len(self.cells))
        return self._simulated(every, *(np.zeros(len(every)) for _ in range(3)))

    def _simulated(
        self, among: IntArray, extra_s: FloatArray, extra_first_s: FloatArray, loads_s: FloatArray
    ) -> FloatArray:
        """As `_objective`, on R: hops out."""
        floors, vpp = _of(self.floors, among), self.cells.vpp[among]
        first_s = np.where(self._chunked[among], self._first_layers_s[among] + extra_first_s, 0.0)
        load_s = np.maximum.reduce([floors.device_load_s, self._chunk_loads_s[among], first_s, loads_s])
        raised = replace(floors, total_s=floors.total_s + extra_s, device_load_s=load_s)
        whole = self._whole_backward[among]
        return closed_lower_bound_s(raised, self.cells.pp[among], vpp, self.num_micro_batches[among], whole)

    # --- with memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> CellMemory:
        """What memory asks of each cell."""
        cells, prices, kinds = self.cells, self.prices, list(self.kinds)
        held = prices.memory
        params, per_param, per_routed = (
            held.params,
            *(sum(values.values()) for values in (held.per_param, held.per_expert_param)),
        )
        state = params.common * np.asarray(per_param)[:, None] + params.experts * np.asarray(per_routed)[:, None]
        ends = state[:, EMBEDDING] + state[:, HEAD] + held.logits_working
        return CellMemory(
            pp=cells.pp,
            vpp=cells.vpp,
            num_micro_batches=self.num_micro_batches,
            schedule=cells.schedule,
            layer_counts=self._layer_counts,
            layer_places=self.problem.layer_places,
            layer_s=self._block_s[:, LAYERS],
            layer_activation_bytes=prices.activation_bytes[:, LAYERS][..., kinds],
            layer_state_bytes=state[:, LAYERS],
            first_state_bytes=state[:, EMBEDDING],
            other_bytes=ends + held.embedding_activations + held.logits_saved,
            device_bytes=np.full(len(cells), context_bytes(self.problem)),
            limit_bytes=self.memory_limit_bytes,
            end_s=self.least_block_s[:, [EMBEDDING, HEAD]],
            end_state_bytes=np.stack([state[:, EMBEDDING], state[:, HEAD] + held.logits_working], axis=1),
            end_activation_bytes=np.stack([held.embedding_activations, held.logits_saved], axis=1),
            hop_s=self.least_hop_s,
        )

    @cached_property
    def memory_floors_bytes(self) -> FloatArray:
        """(n,) what the mean device of each cell holds at least, with the thriftiest recompute."""
        memory = self.memory
        layers = (memory.layer_state_bytes + memory.layer_activation_bytes.min(axis=2)) @ memory.layer_counts
        return np.asarray((layers + memory.other_bytes) / memory.pp + memory.device_bytes)

    def objective_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Of the cells `among`: no plan that fits and has J ≤ `below_s` has a smaller J; infinite where there is none."""
        vpp = self.cells.vpp[among]
        repeats = self.num_micro_batches[among] - 1 / vpp

        def heaviest_s(tails_s: FloatArray) -> FloatArray:
            with np.errstate(divide="ignore", invalid="ignore"):
                over_s = below_s - tails_s - self.least_totals_s[among] / vpp
                return np.where(repeats > 0, over_s / repeats * (1 + _ROUNDING), np.inf)

        memory = self.memory.take(among)
        tails_s = self.tails_below(among, heaviest_s(self.longest_tails_s[among]))
        most_s, nothing = heaviest_s(tails_s), np.zeros(len(among))
        bound_s = np.maximum(self.objective_s[among], self._objective(among, nothing, nothing, nothing, tails_s))
        wanted = (bound_s <= below_s) & ~self.played[among]
        extra = extra_seconds(memory, self._most_layers(memory, most_s), wanted)
        bound_s = np.maximum(bound_s, self._objective(among, *extra, nothing, tails_s))
        loads_s = least_loads(memory, most_s, bound_s <= below_s)
        bound_s = np.maximum(bound_s, self._objective(among, *extra, loads_s, tails_s))
        return self._with_played(among, bound_s, below_s)

    def _with_played(self, among: IntArray, bound_s: FloatArray, below_s: float) -> FloatArray:
        """The same, where those that are played and may be below are bounded by each of their plans."""
        worth = np.flatnonzero(self.played[among] & (bound_s <= below_s))
        if len(worth):
            bound_s[worth] = np.maximum(bound_s[worth], played_bounds(self, among[worth], below_s))
        return bound_s

    def may_fit_played(self, index: int, pipeline: Pipeline, number: int, kind: int) -> bool:
        """Whether a plan that is played (its split's number, its kind of recompute) is not known to be too large."""
        return may_fit(self, index, pipeline, number, kind)

    def tails_below(self, among: IntArray, heaviest_s: FloatArray) -> FloatArray:
        """κ at least, with what is left of the exchanges at the end of the step.

        v = 1, no device with more load than `heaviest_s`: some device has the mean of the parameters or more; they hide
        behind no more than that load, and a block's part never hides. Of experts and of the others each mean counts alone.
        v > 1: the blocks of the first and the last device are known, and J counts their tails without recompute.
        """
        common, routed, parts = self._mean_params
        slower, hides = self.prices.slower[among], hidden_share(self.problem)
        most_blocks = self._most_layers(self.memory.take(among), heaviest_s) + 2
        found = [self.longest_tails_s[among]]
        # and some device has this many layers of the commonest kind, with all their parameters
        kind = int(np.argmax(self._layer_counts))
        layers, held = -(-self._layer_counts[kind] // self.cells.pp[among]), self.prices.memory.params
        alike = (layers * held.common[among, 1 + kind], layers * held.experts[among, 1 + kind])
        nothing = np.zeros(len(among))
        for params, experts in ((common[among], nothing), (nothing, routed[among]), alike):
            updated = params / parts[0][among] + experts / parts[1][among]
            exchanged_s = sum(late_s(self.prices, among, params, experts))
            with np.errstate(invalid="ignore"):
                left_s = np.maximum(
                    np.nan_to_num(exchanged_s - slower * hides * heaviest_s, neginf=0.0),
                    exchanged_s / np.maximum(most_blocks, 1),
                )
            found.append(self.constant_s + self.update_s(updated) + left_s)
        plain: FloatArray = np.maximum.reduce(found)
        chunked = np.flatnonzero(self._chunked[among])
        if len(chunked):
            plain[chunked] = np.maximum(self.longest_tails_s[among[chunked]], self._end_tails(among[chunked]))
        return plain

    @cached_property
    def _mean_params(self) -> tuple[FloatArray, FloatArray, tuple[IntArray, IntArray]]:
        """(n,) parameters of the mean device: all but the routed experts, and these; and the parts of their updates."""
        params, counts = self.prices.memory.params, self.problem.block_counts
        pp = self.cells.pp
        return params.common @ counts / pp, params.experts @ counts / pp, self.prices.optimizer_parts

    def update_s(self, params: FloatArray) -> FloatArray:
        """Seconds of the optimizer on so many parameters."""
        return np.asarray(compute.moved_s(self.prices.rates, self.prices.rates.optimizer_bytes, params).total)

    def chunk_tails_s(self, cell: IntArray, blocks: IntArray, kind: IntArray) -> FloatArray:
        """(n,) update and exchanges left over of virtual stages with these blocks (n, kinds), all under one kind of recompute."""
        prices, params = self.prices, self.prices.memory.params
        apart = blocks[:, HEAD] * (1 - blocks[:, EMBEDDING])
        common = (blocks * params.common[cell]).sum(axis=1) + apart * params.tied_copy[cell]
        routed = (blocks * params.experts[cell]).sum(axis=1)
        left_s, hides = np.zeros(len(cell)), prices.slower[cell] * hidden_share(self.problem)
        for exchanged_s, seconds in zip(
            late_s(prices, cell, common, routed), (prices.backward_s, prices.forward_s), strict=True
        ):
            room_s = (blocks * seconds[cell, :, kind]).sum(axis=1)
            left_s += np.maximum(exchanged_s - hides * room_s, exchanged_s / np.maximum(blocks.sum(axis=1), 1))
        parts = prices.optimizer_parts
        return np.asarray(left_s + self.update_s(common / parts[0][cell] + routed / parts[1][cell]))

    def _end_tails(self, among: IntArray) -> FloatArray:
        """v > 1: the longer tail of the first and the last device, as J counts them."""
        shapes = [
            self._end_chunks(pp, vpp)
            for pp, vpp in zip(self.cells.pp[among].tolist(), self.cells.vpp[among].tolist(), strict=True)
        ]
        place = np.repeat(np.arange(len(among)), [len(rows) for rows in shapes])
        rows = np.concatenate(shapes)
        device, times, blocks = rows[:, 0], rows[:, 1], rows[:, 2:]
        spent_s = self.chunk_tails_s(among[place], blocks, np.full(len(rows), self.kinds[0]))
        tails_s = np.zeros((len(among), 2))
        np.add.at(tails_s, (place, device), times * spent_s)
        return np.asarray(self.constant_s + tails_s.max(axis=1))

    def _end_chunks(self, pp: int, vpp: int) -> IntArray:
        """(rows, 2 + kinds): unlike chunks of the first device (0) and the last (1): which of the two, how many there are of them,
        and their blocks of each kind."""
        if (pp, vpp) not in self._known_chunks:
            rows = []
            for which, device in enumerate((0, pp - 1)):
                layers = layers_of_chunks(self.problem.layer_places, pp, vpp, device)
                ends = np.zeros((vpp, 2), dtype=np.int64)
                ends[0, 0], ends[-1, 1] = device == 0, device == pp - 1
                blocks = np.column_stack([ends[:, 0], layers, ends[:, 1]])
                unlike, times = np.unique(blocks, axis=0, return_counts=True)
                rows.append(np.column_stack([np.full(len(times), which), times, unlike]))
            self._known_chunks[pp, vpp] = np.concatenate(rows)
        return self._known_chunks[pp, vpp]

    @cached_property
    def _known_chunks(self) -> dict[tuple[int, int], IntArray]:
        return {}

    def simulated_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Of the cells `among`: no plan that fits and has R ≤ `below_s` has a smaller R; infinite where there is none."""
        closed_s = self.simulated_s[among]
        memory = replace(self.memory.take(among), hop_s=np.zeros(len(among)))
        # R is at least m times the load of each device, and its tail
        heaviest_s = (below_s - self.constant_s) / self.num_micro_batches[among] * (1 + _ROUNDING)
        wanted = (closed_s <= below_s) & ~self.played[among]
        extra = extra_seconds(memory, self._most_layers(memory, heaviest_s), wanted)
        once_s = np.maximum(closed_s, self._simulated(among, *extra, np.zeros(len(among))))
        steps_s = least_steps(memory, once_s, np.full(len(among), below_s), self.constant_s, once_s <= below_s)
        return self._with_played(among, steps_s, below_s)

    def _most_layers(self, memory: CellMemory, heaviest_s: FloatArray) -> FloatArray:
        """(n,) layers that a device may hold under this load."""
        most = np.nan_to_num(heaviest_s / memory.layer_s.min(axis=(1, 2)), nan=np.inf, posinf=np.inf)
        return np.asarray(np.minimum(most, self.problem.model.num_layers))


def _of(floors: CellFloors, among: IntArray) -> CellFloors:
    """The floors of some cells."""
    return CellFloors(
        total_s=floors.total_s[among],
        device_load_s=floors.device_load_s[among],
        block_s=floors.block_s[among],
        block_forward_s=floors.block_forward_s[among],
        tail_s=floors.tail_s[among],
    )
