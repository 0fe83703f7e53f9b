"""What is to be priced: a problem, and cells (layouts without stages) as arrays."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cost_models.recompute import is_priced
from cost_models.records import (
    BlockKind,
    Calibration,
    Cluster,
    Gather,
    LayerKind,
    Layout,
    MemoryKind,
    Model,
    RecordError,
    Runtime,
    Schedule,
    Workload,
)
from cost_models.records.plan import RANK_AXES

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

RANK_ORDER = RANK_AXES
"""Axes, innermost first: the heaviest traffic between the nearest ranks."""


def memory_kind_of(cluster: Cluster) -> MemoryKind:
    """How a run there counts its bytes: torch's allocator, but on CPUs, where it keeps no statistics, resident memory."""
    return MemoryKind.RSS if cluster.pools[0].kind.device.family == "cpu" else MemoryKind.ALLOCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question: this model, on this cluster, with this runtime, by this calibration."""

    model: Model
    """What is trained."""
    cluster: Cluster
    """What it runs on."""
    workload: Workload
    """Sequence, batch, precision, optimizer."""
    runtime: Runtime
    """What it runs with."""
    calibration: Calibration
    """What its prices rest on."""
    memory_kind: MemoryKind = MemoryKind.ALLOCATED
    """How bytes are counted."""
    offload: tuple[str, ...] = ()
    """What lies in host memory: optimizer, param. What each moves is the runtime's matter (runtime.offload_moves)."""

    def __post_init__(self) -> None:
        unknown = [what for what in self.offload if what not in self.runtime.offload_moves]
        if unknown:
            known = ", ".join(self.runtime.offload_moves) or "nothing"
            raise RecordError(
                f"runtime {self.runtime.name!r} offloads no {unknown[0]!r} that is priced; known there: {known}"
            )

    def on_pool(self, number: int) -> "Problem":
        """The problem with one pool of the cluster alone; itself where there is no other."""
        return self if len(self.cluster.pools) == 1 else replace(self, cluster=self.cluster.pool(number))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Unlike kinds of layers, in the order in which the model first has them."""
        return self.model.layer_kinds

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """What the kinds of blocks are, in the order of the arrays: embedding, each of `layer_kinds`, head."""
        return (BlockKind.EMBEDDING, *(one.kind for one in self.layer_kinds), BlockKind.HEAD)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each kind."""
        return tuple(count for _, count in self.model.layers_of_kinds)

    @property
    def block_counts(self) -> IntArray:
        """(kinds,) blocks of each kind."""
        return np.array([1, *self.layer_counts, 1])

    @property
    def layer_places(self) -> IntArray:
        """(L,) the place of each layer's kind in `layer_kinds`."""
        return layer_places(self.model)

    @property
    def block_places(self) -> IntArray:
        """(K,) the place of each block's kind in `kinds`."""
        return np.concatenate([[0], 1 + self.layer_places, [len(self.layer_kinds) + 1]])

    def of_layer(self, kind: LayerKind) -> "Problem":
        """The problem of a model that has nothing but this kind of layer, on its own tokens."""
        if kind.model is self.model and kind.tokens is None:
            return self
        seq = self.workload.seq if kind.tokens is None else kind.tokens
        return replace(self, model=kind.model, workload=replace(self.workload, seq=seq))

    @property
    def hop_factors(self) -> FloatArray:
        """(kinds,) hidden state behind a block of each kind, as a multiple of the text's at the model's width.

        Behind a layer on tokens of its own what was looked up of the text goes along: the layers behind need both.
        """
        model, seq = self.model, self.workload.seq
        layers = [
            kind.model.hidden / model.hidden
            if kind.tokens is None
            else 1.0 + kind.tokens * kind.model.hidden / (seq * model.hidden)
            for kind in self.layer_kinds
        ]
        return np.array([1.0, *layers, 1.0])

    @property
    def recompute_kinds(self) -> tuple[str, ...]:
        """Those of the runtime's kinds of recompute that are priced, in its order; the first keeps everything."""
        return tuple(kind for kind in self.runtime.recompute_kinds if is_priced(self.runtime.name, kind))

    def with_recompute(self, kinds: Collection[str]) -> "Problem":
        """The same with fewer kinds of recompute to price: these, and the one that keeps everything."""
        known = self.recompute_kinds
        kept = tuple(kind for kind in known if kind in kinds or kind == known[0])
        return self if kept == known else replace(self, runtime=replace(self.runtime, recompute_kinds=kept))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Layouts as parallel arrays, one entry each, fields as in Layout; recompute and stages are chosen later."""

    dp_replicate: IntArray
    dp_shard: IntArray
    cp: IntArray
    tp: IntArray
    ep: IntArray
    etp: IntArray
    pp: IntArray
    vpp: IntArray
    mbs: IntArray
    zero: IntArray
    gather: NDArray[np.object_]
    """Gather of each."""
    schedule: NDArray[np.object_]
    """Schedule of each."""
    nesting: IntArray | None = None
    """Number of each one's rank order in `orders`; None = the first, of all."""
    orders: tuple[tuple[str, ...], ...] = (RANK_ORDER,)
    """Rank orders: axes, innermost first."""
    sync: str = "default"
    """How replicas of all of them add up their gradients, a `collectives.Algorithm`."""

    @classmethod
    def of(cls, layouts: Sequence[Layout], order: tuple[str, ...] = RANK_ORDER) -> Self:
        """The cells of these layouts. RecordError where `order` is no permutation of the axes."""
        if sorted(order) != sorted(RANK_ORDER):
            raise RecordError(f"rank order {', '.join(order)}: each of {', '.join(RANK_ORDER)} once is needed")
        degrees: Mapping[str, IntArray] = {
            name: np.array([getattr(layout, name) for layout in layouts], dtype=np.int64) for name in _INTEGERS
        }
        gather, schedule = np.empty(len(layouts), dtype=object), np.empty(len(layouts), dtype=object)
        gather[:] = [layout.gather for layout in layouts]
        schedule[:] = [layout.schedule for layout in layouts]
        return cls(**degrees, gather=gather, schedule=schedule, orders=(tuple(order),))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, chosen: IntArray) -> Self:
        """The cells of these numbers."""
        arrays = {name: getattr(self, name)[chosen] for name in (*_INTEGERS, "gather", "schedule")}
        return replace(self, **arrays, nesting=None if self.nesting is None else self.nesting[chosen])

    def rank_order(self, index: int) -> tuple[str, ...]:
        """The rank order of entry `index`: axes, innermost first."""
        return self.orders[0 if self.nesting is None else int(self.nesting[index])]

    def layout(self, index: int, recompute: str = "none") -> Layout:
        """Entry `index` as a Layout."""
        degrees = {name: int(getattr(self, name)[index]) for name in _INTEGERS}
        return Layout(
            **degrees,
            gather=Gather(self.gather[index]),
            schedule=Schedule(self.schedule[index]),
            recompute=recompute,
        )

    @cached_property
    def dp(self) -> IntArray:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def world(self) -> IntArray:
        """Ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @cached_property
    def num_virtual_stages(self) -> IntArray:
        """S = vpp·pp."""
        return self.pp * self.vpp

    def num_micro_batches(self, gbs: int) -> IntArray:
        """Micro-batches of a step; RecordError names the first cell where gbs does not divide."""
        batch = self.dp * self.mbs
        wrong = np.flatnonzero((gbs % batch != 0) | (batch > gbs))
        if len(wrong):
            first = int(wrong[0])
            raise RecordError(
                f"gbs={gbs} is not divisible by dp·mbs={int(self.dp[first])}·{int(self.mbs[first])} "
                f"(cell {self.layout(first)})"
            )
        return gbs // batch

    def stride(self, axis: str) -> IntArray:
        """Distance in ranks between neighbours along `axis`: the product of the degrees inside it."""
        return self._strides[axis]

    @cached_property
    def _strides(self) -> Mapping[str, IntArray]:
        found = [self._strides_in(order) for order in self.orders]
        if self.nesting is None:
            return found[0]
        return {axis: np.choose(self.nesting, [strides[axis] for strides in found]) for axis in RANK_ORDER}

    def _strides_in(self, order: Sequence[str]) -> Mapping[str, IntArray]:
        strides, stride = {}, np.ones(len(self), dtype=np.int64)
        for axis in order:
            strides[axis] = stride
            stride = stride * getattr(self, axis)
        return strides

    @cached_property
    def expert_strides(self) -> tuple[IntArray, IntArray, IntArray]:
        """Strides of etp, ep and edp: the ranks of tp, cp and dp, divided anew, etp innermost.

        Megatron-Core's order etp-ep-edp. A pipeline that lies right outside of ep lies inside edp (`evenly_spaced` says
        which other rank orders would need strides that are no single number).
        """
        degrees = (self.tp, self.cp, self.dp_shard, self.dp_replicate)
        strides = [self.stride(axis) for axis in ("tp", "cp", "dp_shard", "dp_replicate")]
        far = np.iinfo(np.int64).max
        inner = np.minimum.reduce([np.where(d > 1, s, far) for d, s in zip(degrees, strides, strict=True)])
        inner = np.where(inner == far, 1, inner)
        outer = inner * self.etp * self.ep
        around = (self.stride("pp") == outer) & (self.etp * self.ep < self.dp * self.cp * self.tp)
        return inner, inner * self.etp, np.where(around, outer * self.pp, outer)

    @cached_property
    def expert_group(self) -> tuple[IntArray, IntArray]:
        """(size, stride) of the group that exchanges tokens."""
        return self.ep, self.expert_strides[1]

    @cached_property
    def expert_shard_group(self) -> tuple[IntArray, IntArray]:
        """(size, stride) of the group that ZeRO divides experts over: what ep and etp leave of dp_shard·cp·tp."""
        return np.maximum(self.dp_shard * self.cp * self.tp // (self.ep * self.etp), 1), self.expert_strides[2]

    @cached_property
    def expert_replica_group(self) -> tuple[IntArray, IntArray]:
        """(size, stride) of the group of equal shards of experts; all of edp where nothing is divided."""
        whole = np.maximum(self.dp * self.cp * self.tp // (self.ep * self.etp), 1)
        shard = np.where(self.zero == 0, 1, self.expert_shard_group[0])
        return whole // shard, self.expert_strides[2] * shard

    @cached_property
    def shard_group(self) -> tuple[IntArray, IntArray]:
        """(size, stride) of the group that ZeRO divides over: dp_shard·cp. Its stride is that of its inner axis."""
        return self.dp_shard * self.cp, self._joint_stride("cp", "dp_shard")

    @cached_property
    def replica_group(self) -> tuple[IntArray, IntArray]:
        """(size, stride) of the group of equal shards: dp_replicate, with cp where nothing is divided."""
        alone = self.zero == 0
        size = self.dp_replicate * np.where(alone, self.cp * self.dp_shard, 1)
        joint, apart = self._joint_stride("cp", "dp_replicate"), self.stride("dp_replicate")
        return size, np.where(alone, joint, apart)

    def _joint_stride(self, first: str, second: str) -> IntArray:
        one, other = self.stride(first), self.stride(second)
        degree_one, degree_other = getattr(self, first), getattr(self, second)
        both = np.minimum(one, other)
        return np.where(degree_one == 1, other, np.where(degree_other == 1, one, both))


_INTEGERS = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp", "vpp", "mbs", "zero")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Candidates of one cell's stages: which blocks a virtual stage holds, and how its layers recompute."""

    stage: IntArray
    """(n,) virtual stage."""
    first: IntArray
    """(n,) first block."""
    last: IntArray
    """(n,) last block, inclusive."""
    recompute_counts: IntArray
    """(n, R) layers of the column under each kind of recompute; they sum to its layers."""

    def __len__(self) -> int:
        return len(self.stage)


FEW_KINDS = 2
"""Kinds of layers that are counted one by one; of more, sums run along the chain of layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnShape:
    """Columns as runs of layers, and as counts of blocks."""

    embedding: IntArray
    """(n,) 1 where the column holds the embedding."""
    head: IntArray
    """(n,) 1 where it holds the head."""
    begin: IntArray
    """(n, R) number, from 0, of the first of its layers under each kind of recompute."""
    end: IntArray
    """(n, R) number of the layer behind the last of these."""
    places: IntArray
    """(L,) the place of each layer's kind in `Problem.layer_kinds`."""
    num_kinds: int
    """Kinds of layers."""

    @cached_property
    def layers(self) -> IntArray:
        """(n, layer kinds, R) layers by kind and recompute."""
        if self.num_kinds == 1:
            return (self.end - self.begin)[:, None, :]
        done = np.zeros((len(self.places) + 1, self.num_kinds), dtype=np.int64)
        np.cumsum(self.places[:, None] == np.arange(self.num_kinds), axis=0, out=done[1:])
        return np.ascontiguousarray(np.moveaxis(done[self.end] - done[self.begin], 2, 1))

    @property
    def block_counts(self) -> IntArray:
        """(n, kinds) blocks by kind, in the order of `Problem.kinds`."""
        return np.column_stack([self.embedding, self.layers.sum(axis=2), self.head])

    @property
    def num_layers(self) -> IntArray:
        """(n,) layers."""
        return np.asarray((self.end - self.begin).sum(axis=1))

    def sum_of_layers(self, values: FloatArray) -> FloatArray:
        """(n,) sum over a column's layers of values (layer kinds, R)."""
        if self.num_kinds <= FEW_KINDS:
            return np.asarray(np.einsum("nkr,kr->n", self.layers, values))
        done = np.zeros((len(self.places) + 1, values.shape[1]))
        np.cumsum(values[self.places], axis=0, out=done[1:])
        return np.asarray((take_each(done, self.end) - take_each(done, self.begin)).sum(axis=1))

    def sum_of_blocks(self, values: FloatArray) -> FloatArray:
        """(n,) sum over a column's blocks of values (kinds,)."""
        if self.num_kinds <= FEW_KINDS:
            return np.asarray(self.block_counts @ values)
        layers = self.sum_of_layers(np.repeat(values[1:-1, None], self.begin.shape[1], axis=1))
        return np.asarray(self.embedding * values[0] + layers + self.head * values[-1])

    def largest_of_layers(self, values: FloatArray) -> FloatArray:
        """(n,) largest of the values (layer kinds, R), none negative, of a column's layers; 0 where it has none."""
        if self.num_kinds <= FEW_KINDS:
            return np.asarray(np.max(np.where(self.layers > 0, values, 0.0), axis=(1, 2)))
        # the largest of each 1, 2, 4, ... layers from each one on; any run is the union of two of these
        steps, count = [values[self.places]], self.end - self.begin
        while len(steps) < int(count.max(initial=1)).bit_length():
            half = 2 ** (len(steps) - 1)
            ahead = np.concatenate([steps[-1][half:], np.zeros_like(steps[-1][:half])])
            steps.append(np.maximum(steps[-1], ahead))
        longest = np.stack(steps)
        which = np.floor(np.log2(np.maximum(count, 1))).astype(np.int64)
        at, last = np.minimum(self.begin, len(self.places) - 1), np.maximum(self.end - 2**which, 0)
        columns = np.arange(values.shape[1])
        found = np.maximum(longest[which, at, columns], longest[which, last, columns])
        return np.asarray(np.where(count > 0, found, 0.0).max(axis=1))

    def largest_of_blocks(self, values: FloatArray) -> FloatArray:
        """(n,) largest of the values (kinds,), none negative, of a column's blocks."""
        if self.num_kinds <= FEW_KINDS:
            return np.asarray(np.max(np.where(self.block_counts > 0, values, 0.0), axis=1))
        layers = self.largest_of_layers(np.repeat(values[1:-1, None], self.begin.shape[1], axis=1))
        return np.asarray(np.maximum.reduce([self.embedding * values[0], layers, self.head * values[-1]]))


def take_each(values: FloatArray, rows: IntArray) -> FloatArray:
    """(n, R): of column r of `values` the rows that column r of `rows` names."""
    return np.asarray(values[rows, np.arange(values.shape[1])])


def layer_places(model: Model) -> IntArray:
    """(L,) the place of each layer's kind in `model.layer_kinds`."""
    places, counts = zip(*model.layer_runs, strict=True)
    return np.repeat(places, counts)


def column_shape(model: Model, columns: Columns) -> ColumnShape:
    """Blocks of each column: its counts of recompute hold from its first layer on.

    RecordError where the recompute counts do not sum to its layers.
    """
    head_block = model.num_blocks - 1
    embedding = (columns.first == 0).astype(np.int64)
    head = (columns.last == head_block).astype(np.int64)
    layers = columns.last - columns.first + 1 - embedding - head
    wrong = np.flatnonzero(columns.recompute_counts.sum(axis=1) != layers)
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(
            f"recompute counts {columns.recompute_counts[at].tolist()} of blocks {int(columns.first[at])}.."
            f"{int(columns.last[at])} do not sum to the {int(layers[at])} layers there"
        )
    end = np.maximum(columns.first, 1)[:, None] - 1 + np.cumsum(columns.recompute_counts, axis=1)
    return ColumnShape(
        embedding=embedding,
        head=head,
        begin=end - columns.recompute_counts,
        end=end,
        places=layer_places(model),
        num_kinds=len(model.layer_kinds),
    )
