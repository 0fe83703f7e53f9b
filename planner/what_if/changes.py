"""A question with one thing changed: what people may give up or add where nothing fits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cost_models.problem import Problem
from cost_models.records import Cluster, NodeKind
from planner.readers.pins import Pins


class ChangeKind(StrEnum):
    """What is changed."""

    GPUS = "gpus"
    MEMORY = "device_memory_gib"
    MEMORY_TIMES = "device_memory_times"
    PIN = "without_pin"
    SEQ = "seq"
    BATCH = "gbs"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `choose` answers: a problem under pins, on some numbers of ranks."""

    problem: Problem
    pins: Pins
    worlds: tuple[int, ...] | None = None
    """Numbers of ranks; None is all GPUs of the cluster."""

    @classmethod
    def of(cls, problem: Problem, pins: Pins, worlds: Collection[int] | None) -> "Question":
        """The question as it was asked."""
        return cls(problem=problem, pins=pins, worlds=None if worlds is None else tuple(worlds))

    @property
    def most_gpus(self) -> int:
        """The largest number of ranks that was asked for."""
        return max(self.worlds) if self.worlds else self.problem.cluster.num_gpus

    def on(self, gpus: int) -> "Question":
        """On exactly so many GPUs: of the cluster where it has them, else of more nodes of its kind."""
        cluster = self.problem.cluster
        if gpus > cluster.num_gpus:
            cluster = with_gpus(cluster, gpus)
        worlds = None if gpus == cluster.num_gpus else (gpus,)
        return replace(self, problem=replace(self.problem, cluster=cluster), worlds=worlds)

    def with_nodes(self, pool: int, num_nodes: int) -> "Question":
        """With another number of nodes in one pool of several, on all GPUs."""
        cluster = self.problem.cluster
        pools = list(cluster.pools)
        pools[pool] = replace(pools[pool], num_nodes=num_nodes)
        name = f"{cluster.name}, {num_nodes} nodes of {pools[pool].kind.name}"
        changed = replace(cluster, name=name, pools=tuple(pools), exceptions=())
        return replace(self, problem=replace(self.problem, cluster=changed), worlds=None)

    def with_device_memory(self, num_bytes: int) -> "Question":
        """The same GPUs with another memory each."""
        return self.with_kinds(lambda kind: replace(kind, device=replace(kind.device, memory_bytes=num_bytes)))

    def with_kinds(self, change: Callable[[NodeKind], NodeKind]) -> "Question":
        """As many nodes, each kind changed."""
        pools = tuple(replace(pool, kind=change(pool.kind)) for pool in self.problem.cluster.pools)
        cluster = replace(self.problem.cluster, pools=pools)
        return replace(self, problem=replace(self.problem, cluster=cluster))

    def with_workload(self, **changed: int) -> "Question":
        """Another batch or sequence."""
        workload = replace(self.problem.workload, **changed)  # type: ignore[arg-type]
        return replace(self, problem=replace(self.problem, workload=workload))

    def without_pins(self, dropped: Collection[object]) -> "Question":
        """With fewer pins."""
        return replace(self, pins=Pins(pins=tuple(pin for pin in self.pins.pins if pin not in dropped)))

    def offloading(self, what: tuple[str, ...]) -> "Question":
        """With states in host memory."""
        return replace(self, problem=replace(self.problem, offload=what))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A single change with which a plan exists: the question was solved again with it."""

    kind: ChangeKind
    value: int | float | str | tuple[str, ...]
    """What it is changed to: GPUs, GiB of each device, the pin that is dropped, tokens, sequences, states in host memory."""
    instead_of: int | float | str | tuple[str, ...] | None
    """What was asked."""
    too_little: int | float | None = None
    """The next smaller change that was tried: nothing fits with it. None where there is none between."""
    least: bool = False
    """Every smaller change of this kind was tried, or follows from `too_little`: no smaller one is enough."""
    words: str
    """The change in words, with its numbers."""
    layout: str
    """The layout of a plan with it."""
    step_s: float
    """What that plan takes."""
    memory_gib_max: float
    """And holds on its fullest device."""
    verdict: str
    """ok, or risky: it fits on expectation only."""
    pool: int | None = None
    """Number of the pool that is changed, where there are several."""

    @property
    def document(self) -> Mapping[str, Any]:
        """As JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found["kind"] = self.kind.value
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The first nodes of a cluster, or more nodes of its kind: the least number of whole nodes with so many GPUs."""
    pool = cluster.pools[0]
    num_nodes = -(-gpus // pool.kind.gpus_per_node)
    have, found = cluster.num_gpus, num_nodes * pool.kind.gpus_per_node
    if found == have:
        return cluster
    stem = cluster.name.removesuffix(f"x{have}")
    name = f"{stem}x{found}" if stem != cluster.name else f"{cluster.name}, {found} GPUs"
    kept = tuple(exception for exception in cluster.exceptions if exception.node < num_nodes)
    return replace(cluster, name=name, pools=(replace(pool, num_nodes=num_nodes),), exceptions=kept)
