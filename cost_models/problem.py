"""What is to be priced: a problem, and cells (layouts without stages) as arrays."""

from collections.abc import Mapping, Sequence
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

    @property
    def layer_kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of layers, in the order in which the model has them."""
        moe = self.model.moe
        if moe is None or moe.num_dense_layers == self.model.num_layers:
            return (BlockKind.DENSE,)
        return (BlockKind.DENSE, BlockKind.MOE) if moe.num_dense_layers else (BlockKind.MOE,)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks, in the order of the arrays."""
        return (BlockKind.EMBEDDING, *self.layer_kinds, BlockKind.HEAD)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each kind."""
        num_layers, moe = self.model.num_layers, self.model.moe
        if len(self.layer_kinds) == 1 or moe is None:
            return (num_layers,)
        return (moe.num_dense_layers, num_layers - moe.num_dense_layers)

    @property
    def block_counts(self) -> IntArray:
        """(kinds,) blocks of each kind."""
        return np.array([1, *self.layer_counts, 1])

    @property
    def recompute_kinds(self) -> tuple[str, ...]:
        """Those of the runtime's kinds of recompute that are priced, in its order; the first keeps everything."""
        return tuple(kind for kind in self.runtime.recompute_kinds if is_priced(self.runtime.name, kind))


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
    order: tuple[str, ...] = RANK_ORDER
    """Axes of the rank order, innermost first."""

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
        return cls(**degrees, gather=gather, schedule=schedule, order=tuple(order))

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, chosen: IntArray) -> Self:
        """The cells of these numbers."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in (*_INTEGERS, "gather", "schedule")})

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
        strides, stride = {}, np.ones(len(self), dtype=np.int64)
        for axis in self.order:
            strides[axis] = stride
            stride = stride * getattr(self, axis)
        return strides

    @cached_property
    def expert_strides(self) -> tuple[IntArray, IntArray, IntArray]:
        """Strides of etp, ep and edp: the ranks of tp, cp and dp, divided anew, etp innermost.

        Megatron-Core's order etp-ep-edp. A rank order that puts pp between tp, cp and dp would need strides that are no
        single number; the least stride of the three is taken.
        """
        degrees = (self.tp, self.cp, self.dp_shard, self.dp_replicate)
        strides = [self.stride(axis) for axis in ("tp", "cp", "dp_shard", "dp_replicate")]
        far = np.iinfo(np.int64).max
        inner = np.minimum.reduce([np.where(d > 1, s, far) for d, s in zip(degrees, strides, strict=True)])
        inner = np.where(inner == far, 1, inner)
        return inner, inner * self.etp, inner * self.etp * self.ep

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnShape:
    """Columns as counts of blocks."""

    layers: IntArray
    """(n, layer kinds, R) layers by kind and recompute."""
    embedding: IntArray
    """(n,) 1 where the column holds the embedding."""
    head: IntArray
    """(n,) 1 where it holds the head."""

    @property
    def block_counts(self) -> IntArray:
        """(n, kinds) blocks by kind, in the order of `Problem.kinds`."""
        return np.column_stack([self.embedding, self.layers.sum(axis=2), self.head])

    @property
    def num_layers(self) -> IntArray:
        """(n,) layers."""
        return np.asarray(self.layers.sum(axis=(1, 2)))


def column_shape(model: Model, columns: Columns) -> ColumnShape:
    """Counts of blocks of each column. RecordError where the recompute counts do not sum to its layers."""
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
    return ColumnShape(layers=_by_kind(model, columns), embedding=embedding, head=head)


def _by_kind(model: Model, columns: Columns) -> IntArray:
    """(n, layer kinds, R): the counts of recompute hold from a column's first layer on, and dense layers come first."""
    counts = columns.recompute_counts
    num_dense = model.num_layers if model.moe is None else model.moe.num_dense_layers
    if num_dense in (0, model.num_layers):
        return counts[:, None, :]
    until = np.cumsum(counts, axis=1)
    dense = np.clip(num_dense + 1 - np.maximum(columns.first, 1), 0, until[:, -1])[:, None]
    first_dense = np.minimum(until, dense) - np.minimum(until - counts, dense)
    return np.stack([first_dense, counts - first_dense], axis=1)
