"""What no plan of a cell on a mixed cluster beats: Bounds of each pool, put together.

Let pool g serve n_g of the pp devices, b_gk be the least time of a block of kind k there and c_k the blocks of that kind. A plan
with a fullest device of load τ solves a relaxation in the shares x_gk of the blocks that lie in pool g:

    minimise (m-1) τ + Σ x_gk c_k b_gk      Σ_g x_gk = 1 for each k,   Σ_k x_gk c_k b_gk ≤ n_g τ for each g

Every choice of y_g ≥ 0 with Σ n_g y_g ≤ m-1 bounds it from below: (m-1 - Σ n_g y_g) τ + Σ_k c_k min_g (1 + y_g) b_gk, where τ is
any load that some device has. With T_g the time of the whole chain in pool g, y_g = max(λ/T_g - 1, 0) makes (1 + y_g) T_g equal
wherever a pool is worth using; λ is tried where a pool begins to be, and where Σ n_g y_g = m-1. For alike blocks the latter is
(m + pp - 1) / Σ_p 1/T_g(p): the harmonic mean. In the same way some device has a load of Σ_k c_k min_g (b_gk/T_g) / Σ_p 1/T_g(p),
and R ≥ Σ_p y_p (A_p + m W_p) for weights y that sum to 1, chosen from the last device to the first such that a block counts the
same on each.

With memory: devices with at most a load τ hold at most so many layers of the commonest kind, each by its own pool's times and
memory (floors.py); the least τ that holds them all is a load that some device has.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.memory import context_bytes
from cost_models.problem import Cells
from cost_models.records import Schedule
from cost_models.schedules import FloatArray, IntArray
from cost_models.stage import EMBEDDING, HEAD, LAYERS
from planner.search.bounds import Bounds
from planner.search.floors import Devices, layers_of_chunks
from planner.search.space import Space

_HALVINGS = 16
"""Of the interval in which the logarithm of the least load lies: to 1/65,000 of it."""
_ROUNDING = 1e-9
"""Share by which a limit is raised before it is turned into a load, so that rounding closes nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolBounds:
    """Bounds of the cells of a space on several pools."""

    space: Space
    of_pools: tuple[Bounds, ...]
    """As if every stage lay in that pool."""

    @property
    def cells(self) -> Cells:
        """The cells, arrangement by arrangement."""
        return self.space.cells

    @cached_property
    def _counts(self) -> IntArray:
        """(n, G) devices of each pool."""
        pools = range(len(self.of_pools))
        each = np.array([[one.count(pool) for pool in pools] for one in self.space.arrangements])
        return each[self.space.arrangement]

    def _least(self, values: FloatArray) -> FloatArray:
        """(n,) the least of values (G, n) over the pools that a cell uses."""
        return np.asarray(np.where(self._counts.T > 0, values, np.inf).min(axis=0))

    # --- time alone -------------------------------------------------------------------------------------------------------

    @property
    def num_micro_batches(self) -> IntArray:
        """(n,) micro-batches of a step."""
        return self.of_pools[0].num_micro_batches

    @cached_property
    def played(self) -> NDArray[np.bool_]:
        """(n,) none: every cell has a formula here."""
        return np.zeros(len(self.cells), dtype=bool)

    @cached_property
    def _block_s(self) -> FloatArray:
        """(G, n, kinds) forward and backward under the fastest recompute, hops out."""
        return np.stack([one.least_block_s for one in self.of_pools])

    @cached_property
    def _block_counts(self) -> IntArray:
        return self.of_pools[0].problem.block_counts

    @cached_property
    def _chain_s(self) -> FloatArray:
        """(n, G) the whole chain in each pool; infinite where a cell does not use it."""
        return np.where(self._counts > 0, (self._block_s @ self._block_counts).T, np.inf)

    def _weighted_s(self, weights: FloatArray, among: IntArray) -> FloatArray:
        """(k,) Σ_k c_k min_g w_g b_gk over the pools used; weights (k, G), infinite for the others."""
        with np.errstate(invalid="ignore"):
            priced = np.where(np.isfinite(weights.T[..., None]), weights.T[..., None] * self._block_s[:, among], np.inf)
        return np.asarray(priced.min(axis=0) @ self._block_counts)

    @cached_property
    def _least_hop_s(self) -> FloatArray:
        return self._least(np.stack([one.least_hop_s for one in self.of_pools]))

    @cached_property
    def _constant_s(self) -> FloatArray:
        return self._least(np.stack([one.floors.tail_s for one in self.of_pools]))

    @cached_property
    def longest_tails_s(self) -> FloatArray:
        """(n,) κ at least: some device has the mean of the parameters or more."""
        return self._least(np.stack([one.longest_tails_s for one in self.of_pools]))

    @cached_property
    def _chunks_s(self) -> tuple[FloatArray, FloatArray]:
        """(n,) load of the fullest device of equal chunks, and of all, hops out; 0 for v = 1."""
        fullest, total = np.zeros(len(self.cells)), np.zeros(len(self.cells))
        places, cells = self.of_pools[0].problem.layer_places, self.cells
        assert self.space.arrangement is not None
        keys = np.stack([cells.pp, cells.vpp, self.space.arrangement], axis=1)
        shapes, group = np.unique(keys, axis=0, return_inverse=True)
        for number, (pp, vpp, arrangement) in enumerate(shapes.tolist()):
            if vpp == 1:
                continue
            members = np.flatnonzero(group.ravel() == number)
            layers = np.stack([layers_of_chunks(places, pp, vpp, device).sum(axis=0) for device in range(pp)])
            block_s = self._block_s[np.array(self.space.arrangements[arrangement])][:, members]
            loads = np.einsum("pmk,pk->mp", block_s[..., LAYERS], layers)
            loads[:, 0] += block_s[0, :, EMBEDDING]
            loads[:, -1] += block_s[-1, :, HEAD]
            fullest[members], total[members] = loads.max(axis=1), loads.sum(axis=1)
        return fullest, total

    @cached_property
    def _blocks_s(self) -> FloatArray:
        """(n,) Σ of the blocks of a plan at least, hops out."""
        return np.where(self.cells.vpp > 1, self._chunks_s[1], self._least_block_s @ self._block_counts)

    @cached_property
    def _least_block_s(self) -> FloatArray:
        """(n, kinds) the least of each block over the pools."""
        return np.asarray(np.where((self._counts.T > 0)[..., None], self._block_s, np.inf).min(axis=0))

    @cached_property
    def _hops_s(self) -> FloatArray:
        return np.asarray(2 * (self.cells.num_virtual_stages - 1) * self._least_hop_s)

    @cached_property
    def least_totals_s(self) -> FloatArray:
        """(n,) T: least Σ t of a plan."""
        return self._blocks_s + self._hops_s

    @cached_property
    def _pace_s(self) -> FloatArray:
        """(n,) some device has at least this load, hops out."""
        every = np.arange(len(self.cells))
        shares = 1 / np.where(np.isfinite(self._chain_s), self._chain_s, np.inf)
        weights = np.where(self._counts > 0, shares, np.inf)
        mean_s = self._weighted_s(weights, every) / (self._counts * shares).sum(axis=1)
        longest_s = np.where(self._block_counts > 0, self._least_block_s, 0.0).max(axis=1)
        return np.asarray(np.maximum.reduce([mean_s, longest_s, self._chunks_s[0]]))

    def _steady_s(self, among: IntArray, load_s: FloatArray) -> FloatArray:
        """v = 1: (k,) (m-1) τ + Σ of the blocks at least, where some device has `load_s`."""
        chain_s, counts = self._chain_s[among], self._counts[among]
        repeats = self.num_micro_batches[among] - 1.0
        order = np.argsort(chain_s, axis=1)
        sorted_s, sorted_counts = (np.take_along_axis(values, order, axis=1) for values in (chain_s, counts))
        rates = np.cumsum(np.where(np.isfinite(sorted_s), sorted_counts / sorted_s, 0.0), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            prefix = np.where(
                np.isfinite(sorted_s), (repeats[:, None] + np.cumsum(sorted_counts, axis=1)) / rates, np.inf
            )
        highest = prefix.min(axis=1)
        best: FloatArray = np.zeros(len(among))
        for candidate in (highest, *sorted_s.T):
            multiplier = np.minimum(candidate, highest)
            more = np.maximum(multiplier[:, None] / chain_s - 1, 0.0)  # 0 where a pool is not used
            spent = (counts * more).sum(axis=1)
            rest = np.maximum(repeats - spent, 0.0)
            with np.errstate(invalid="ignore"):  # 0 x infinity: one micro-batch that does not fit
                steady = np.where(np.isinf(load_s), np.inf, rest * load_s)
            best = np.maximum(best, steady + self._weighted_s(np.where(counts > 0, 1 + more, np.inf), among))
        return best

    @cached_property
    def objective_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller J."""
        every = np.arange(len(self.cells))
        return self._objective(every, np.zeros(len(every)), self.longest_tails_s)

    def _objective(self, among: IntArray, loads_s: FloatArray, tails_s: FloatArray) -> FloatArray:
        """The bound where some device has a load of `loads_s`, and one a tail of `tails_s`."""
        vpp, num_micro = self.cells.vpp[among], self.num_micro_batches[among]
        hop_s = np.where(vpp > 1, (2 * vpp - 1) * self._least_hop_s[among], 0.0)
        load_s = np.maximum(self._pace_s[among] + hop_s, loads_s)
        with np.errstate(invalid="ignore"):
            repeated_s = np.nan_to_num((num_micro - 1 / vpp) * load_s, nan=np.inf, posinf=np.inf)
        plain_s = repeated_s + self.least_totals_s[among] / vpp
        plain = np.flatnonzero(vpp == 1)
        joint_s = np.zeros(len(among))
        joint_s[plain] = self._steady_s(among[plain], load_s[plain]) + self._hops_s[among[plain]]
        return np.asarray(np.maximum(plain_s, joint_s) + tails_s)

    @cached_property
    def simulated_s(self) -> FloatArray:
        """(n,) no plan of the cell has a smaller R."""
        cells, num_micro = self.cells, self.num_micro_batches
        bound_s = num_micro * self._pace_s
        mean_s = num_micro * self._blocks_s / cells.pp + (cells.pp - 1) / 2 * self._least_block_s.min(axis=1)
        bound_s = np.maximum(bound_s, np.where(cells.vpp > 1, mean_s, 0.0))
        pools = [np.array(one) for one in self.space.arrangements]
        assert self.space.arrangement is not None
        for pp in np.unique(cells.pp[cells.vpp == 1]).tolist():
            members = np.flatnonzero((cells.pp == pp) & (cells.vpp == 1))
            of_device = np.stack([pools[number] for number in self.space.arrangement[members]])
            bound_s[members] = np.maximum(bound_s[members], self._weighted_steps(members, of_device))
        return bound_s + self._constant_s

    def _weighted_steps(self, members: IntArray, of_device: IntArray) -> FloatArray:
        """v = 1: (k,) R of cells with the pools (k, pp), tails out."""
        rows, chain_s = np.arange(len(members)), self._chain_s[members]
        num_micro = self.num_micro_batches[members]
        behind, least = np.zeros(len(members)), np.full((len(members), len(self.of_pools)), np.inf)
        for device in reversed(range(of_device.shape[1])):
            pool = of_device[:, device]
            weight = np.maximum(1 / chain_s[rows, pool] - behind, 0.0) / num_micro
            least[rows, pool] = np.minimum(least[rows, pool], num_micro * weight + behind)
            behind = behind + weight
        return np.asarray(self._weighted_s(least, members) / behind)

    # --- with memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def limits_bytes(self) -> FloatArray:
        """(G,) what a device of each pool may use."""
        return np.array([one.memory_limit_bytes for one in self.of_pools])

    @cached_property
    def memory_floors_bytes(self) -> FloatArray:
        """(n,) what all devices of a cell hold at least, as if spread over devices of the largest memory by their sizes."""
        pp, limits = self.cells.pp, self.limits_bytes
        contexts = np.array([context_bytes(one.problem) for one in self.of_pools])
        floors = [one.memory_floors_bytes - context for one, context in zip(self.of_pools, contexts, strict=True)]
        blocks = self._least(np.stack(floors)) * pp
        held = blocks + self._counts @ contexts
        if np.isinf(limits).any():
            return np.asarray(held / pp)
        with np.errstate(divide="ignore"):
            return np.asarray(held / (self._counts @ limits) * limits.max())

    def objective_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Of the cells `among`: no plan that fits and has J ≤ `below_s` has a smaller J; infinite where there is none."""
        bound_s = self.objective_s[among].copy()
        plain = np.flatnonzero((self.cells.vpp[among] == 1) & (bound_s <= below_s))
        some = among[plain]
        repeats = self.num_micro_batches[some] - 1.0

        def heaviest_s(tails_s: FloatArray) -> FloatArray:
            with np.errstate(divide="ignore", invalid="ignore"):
                over_s = below_s - tails_s - self.least_totals_s[some]
                return np.where(repeats > 0, over_s / repeats * (1 + _ROUNDING), np.inf)

        tails_s = self.longest_tails_s[some]
        found = np.full((len(self.of_pools), len(some)), np.inf)
        for pool, one in enumerate(self.of_pools):
            used = np.flatnonzero(self._counts[some, pool] > 0)
            found[pool, used] = one.tails_below(some[used], heaviest_s(tails_s)[used])
        tails_s = np.maximum(tails_s, found.min(axis=0, initial=np.inf))
        most_s = heaviest_s(tails_s)
        loads_s = self._least_loads(some, most_s)
        bound_s[plain] = np.maximum(bound_s[plain], self._objective(some, loads_s, tails_s))
        return np.where(self.memory_floors_bytes[among] > self.limits_bytes.max(), np.inf, bound_s)

    def simulated_below(self, below_s: float, among: IntArray) -> FloatArray:
        """Of the cells `among`: no plan that fits and has R ≤ `below_s` has a smaller R; infinite where there is none."""
        bound_s = self.simulated_s[among].copy()
        plain = np.flatnonzero((self.cells.vpp[among] == 1) & (bound_s <= below_s))
        some, num_micro = among[plain], self.num_micro_batches[among[plain]]
        constant_s = self._constant_s[some]
        loads_s = self._least_loads(some, (below_s - constant_s) / num_micro * (1 + _ROUNDING), with_hops=False)
        bound_s[plain] = np.maximum(bound_s[plain], num_micro * loads_s + constant_s)
        return bound_s

    def _least_loads(self, among: IntArray, below_s: FloatArray, *, with_hops: bool = True) -> FloatArray:
        """v = 1: (k,) some device of every plan that fits has at least this load; infinite where it is more than `below_s`."""
        cells, loads = self.cells, np.zeros(len(among))
        assert self.space.arrangement is not None
        gpipe = cells.schedule[among] == Schedule.GPIPE
        num_micro, pp = self.num_micro_batches[among], cells.pp[among]
        alive = np.where(gpipe, num_micro, np.minimum(num_micro, pp))
        keys = np.stack([self.space.arrangement[among], alive, gpipe], axis=1)
        shapes, group = np.unique(keys, axis=0, return_inverse=True)
        for number, (arrangement, most, keeps_all) in enumerate(shapes.tolist()):
            where = np.flatnonzero(group.ravel() == number)
            pools = np.array(self.space.arrangements[arrangement])
            in_flight = np.full(len(pools), most) if keeps_all else np.minimum(len(pools) - np.arange(len(pools)), most)
            devices = _PoolDevices.on_pools(self.of_pools, among[where], pools, in_flight.astype(np.float64), with_hops)
            loads[where] = devices.least_load(below_s[where])
        return loads


class _PoolDevices(Devices):
    """Cells with one arrangement: each device in its own pool."""

    @classmethod
    def on_pools(
        cls, bounds: tuple[Bounds, ...], where: IntArray, pools: IntArray, in_flight: FloatArray, with_hops: bool
    ) -> "_PoolDevices":
        """The devices of the cells `where`, each in its pool (pp,)."""
        memories = {pool: bounds[pool].memory.take(where) for pool in np.unique(pools).tolist()}
        first = next(iter(memories.values()))
        kind, pp = int(np.argmax(first.layer_counts)), len(pools)
        at_end = np.zeros((2, pp))
        at_end[0, 0], at_end[1, -1] = 1.0, 1.0
        hops = (np.arange(pp) > 0).astype(float) + (np.arange(pp) < pp - 1)
        num_kinds = first.layer_s.shape[-1]
        layer_s, layer_bytes = (np.empty((len(where), pp, num_kinds)) for _ in range(2))
        used_s, room = (np.empty((len(where), pp)) for _ in range(2))
        least_hop_s = np.min([memory.hop_s for memory in memories.values()], axis=0) if with_hops else 0.0 * first.hop_s
        for pool, one in memories.items():
            mine = np.flatnonzero(pools == pool)
            alive, ends = in_flight[mine], at_end[:, mine]
            kept = one.layer_activation_bytes[:, kind]
            layer_s[:, mine] = one.layer_s[:, kind][:, None]
            layer_bytes[:, mine] = one.layer_state_bytes[:, kind, None, None] + alive[:, None] * kept[:, None]
            used_s[:, mine] = one.end_s @ ends + least_hop_s[:, None] * hops[mine]
            held = one.end_state_bytes @ ends + one.end_activation_bytes @ (ends * alive)
            room[:, mine] = one.limit_bytes - one.device_bytes[:, None] - held
        return cls(
            num_layers=int(first.layer_counts[kind]),
            layer_s=layer_s,
            layer_bytes=layer_bytes,
            used_s=used_s,
            room_bytes=room,
        )

    def least_load(self, below_s: FloatArray) -> FloatArray:
        """(n,) the least load, rounded down; infinite where it is more than `below_s`.

        Where it is not, `below_s` does not change it: a bound that closed a cell can be derived again below another limit.
        """
        high = self.num_layers * self.layer_s.max(axis=(1, 2)) + self.used_s.max(axis=1)
        possible = self.holds(np.minimum(below_s, high))
        low = self.num_layers * self.layer_s.min(axis=(1, 2)) / self.layer_s.shape[1]
        never = self.holds(low)
        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            enough = self.holds(middle)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return np.where(possible, np.where(never, 0.0, low), np.inf)
