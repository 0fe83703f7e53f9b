"""A cluster: node kinds x counts, fabric levels and exceptions, so that 32,768 GPUs stay a page of text.

Nominal facts only: bandwidths and capacities, never seconds. Latencies belong to the tables and the calibration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cost_models.records.codec import UNSAID, RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process."""

    name: str
    """As in the device table, for example h100."""
    family: str
    """Architecture that kernels are made for: volta, ampere, hopper, blackwell, cdna3, cpu."""
    memory_bytes: int
    """Bytes that the driver shows, not the nominal ones."""
    memory_bandwidth_bytes_per_s: float
    """Of the device's main memory."""
    peak_flops_per_s: Mapping[str, float]
    """Dense data-sheet peak by precision."""
    matmul_flops_per_s: Mapping[str, float]
    """Best matrix-multiply rate that people measured, by precision: the roof of the model."""

    def __post_init__(self) -> None:
        if self.memory_bytes < 1 or not 0 < self.memory_bandwidth_bytes_per_s < math.inf:
            raise RecordError(f"device {self.name!r}: memory and its bandwidth are positive numbers")
        if not self.peak_flops_per_s or not self.matmul_flops_per_s:
            raise RecordError(f"device {self.name!r}: give the peak and the matmul rate of at least one precision")
        for rates in (self.peak_flops_per_s, self.matmul_flops_per_s):
            for precision, rate in rates.items():
                if not 0 < rate < math.inf:
                    raise RecordError(
                        f"device {self.name!r}: {precision} at {rate} FLOP/s; a rate is a positive number"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A class of links; its latency and its curve are found under its name."""

    name: str
    """Class, for example nvlink4, pcie4, ib-ndr, loopback."""
    bandwidth_bytes_per_s: float
    """Nominal, in one direction."""

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise RecordError(
                f"link {self.name!r}: bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}; a positive number is needed"
            )


class DomainShape(StrEnum):
    """How the devices of a fast domain are joined."""

    SWITCHED = "switched"
    """Through switches: all of a device's bandwidth to any other (NVSwitch)."""
    MESH = "mesh"
    """Each pair has a link of its own, an equal part of a device's bandwidth (xGMI of MI300X)."""
    CUBE_MESH = "cube_mesh"
    """Eight devices in two quads, six links each, one or two to four of the others (DGX-1 with V100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Devices of a node that links of their own join, where only slower ones join these islands: NVLink bridges of H100-NVL."""

    num_gpus: int
    """Devices of an island, neighbours in number."""
    link: Link
    """Bandwidth of one device into its island."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """One kind of node."""

    name: str
    """As sold, for example dgx-h100."""
    device: Device
    """What each rank runs on."""
    gpus_per_node: int
    """Devices in a node."""
    intra: Link
    """Between two devices of a fast domain; bandwidth of one device into the domain."""
    domain_nodes: int = 1
    """Nodes that share one fast domain (18 in an NVL72 rack)."""
    nic: Link
    """One network interface."""
    num_nics: int
    """Network interfaces of a node."""
    host_memory_bytes: int | None = None
    """Memory of the host; null = unknown."""
    host_link: Link | None = None
    """From a device to its host; null = unknown, and nothing that is offloaded can be priced."""
    shape: DomainShape = field(default=DomainShape.SWITCHED, metadata=UNSAID)
    """How `intra` joins the devices of a fast domain."""
    island: Island | None = field(default=None, metadata=UNSAID)
    """Devices with faster links among themselves than `intra`; null = none."""
    numa_nodes: int = field(default=1, metadata=UNSAID)
    """NUMA nodes (sockets) of the host; its devices and interfaces are divided over them in order."""

    def __post_init__(self) -> None:
        self._check_shape()
        for name in ("gpus_per_node", "domain_nodes", "num_nics"):
            if getattr(self, name) < 1:
                raise RecordError(
                    f"node kind {self.name!r}: {name}={getattr(self, name)}; a whole number from 1 is needed"
                )
        if self.host_memory_bytes is not None and self.host_memory_bytes < 1:
            raise RecordError(
                f"node kind {self.name!r}: host_memory_bytes={self.host_memory_bytes}; a whole number from 1, or null for unknown"
            )

    def _check_shape(self) -> None:
        if self.shape is DomainShape.CUBE_MESH and self.domain_size != 8:
            raise RecordError(
                f"node kind {self.name!r}: a cube mesh joins 8 devices, but its domain has {self.domain_size}"
            )
        island = self.island
        if island is not None and not (1 < island.num_gpus < self.gpus_per_node > 1):
            raise RecordError(
                f"node kind {self.name!r}: an island of {island.num_gpus} devices in a node of {self.gpus_per_node}; legal: "
                f"2..{self.gpus_per_node - 1}, or no island"
            )
        if self.numa_nodes < 1:
            raise RecordError(f"node kind {self.name!r}: numa_nodes={self.numa_nodes}; a whole number from 1 is needed")

    @property
    def domain_size(self) -> int:
        """Devices of one fast domain."""
        return self.gpus_per_node * self.domain_nodes

    @property
    def node_bandwidth_bytes_per_s(self) -> float:
        """All network interfaces of a node together, in one direction."""
        return self.num_nics * self.nic.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes of one kind."""

    kind: NodeKind
    """What each node is."""
    num_nodes: int
    """How many."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise RecordError(
                f"num_nodes={self.num_nodes} of node kind {self.kind.name!r}; a cluster has at least one node"
            )

    @property
    def num_gpus(self) -> int:
        """Devices of the pool."""
        return self.num_nodes * self.kind.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLevel:
    """One level of switches, nearest to the nodes first."""

    name: str
    """For example leaf, spine."""
    radix: int
    """Children below one switch: nodes at the first level, switches of the level below after that."""
    oversubscription: float = 1.0
    """Bandwidth from below over bandwidth to above; 1 = full bisection."""
    latency_s: float = field(default=0.0, metadata=UNSAID)
    """Added one-way latency of the links above its switches: light takes 5 µs a km, so of regions it is a fact of the place."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise RecordError(f"fabric level {self.name!r}: latency_s={self.latency_s}; seconds from 0 are needed")
        if self.radix < 1 or not 1 <= self.oversubscription < math.inf:
            raise RecordError(
                f"fabric level {self.name!r}: radix={self.radix}, oversubscription={self.oversubscription}; radix is a whole "
                "number from 1, oversubscription a number from 1.0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricException:
    """One node that is not as its kind: a slow or missing interface, a GPU off the fast domain."""

    node: int
    """Number of the node, from 0, over all pools in order."""
    nic_factor: float = 1.0
    """Share of its network bandwidth that works."""
    intra_factor: float = 1.0
    """Share of its fast domain's bandwidth that works."""
    note: str = ""
    """What was seen."""

    def __post_init__(self) -> None:
        for name in ("nic_factor", "intra_factor"):
            if not 0 < getattr(self, name) <= 1:
                raise RecordError(
                    f"exception of node {self.node}: {name}={getattr(self, name)}; it is the share that works, above 0 up to 1 "
                    "(leave a node out of the cluster where nothing works)"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowUplink:
    """One switch whose links to the level above are not as they should be: a slow spine link."""

    level: str
    """Name of the switch's fabric level, for example leaf: its uplink leads to the spine."""
    switch: int
    """Number of the switch in its level, from 0, in the order of the nodes below."""
    factor: float
    """Share of its uplinks' bandwidth that works."""
    note: str = ""
    """What was seen."""

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise RecordError(
                f"uplink of {self.level} {self.switch}: factor={self.factor}; it is the share that works, above 0 up to 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Pools of nodes, the fabric between them, and what is not as it should be."""

    name: str
    """How people call it, for example h100x64."""
    pools: tuple[Pool, ...]
    """Kinds of nodes and their counts; ranks are numbered through them in order."""
    fabric: tuple[FabricLevel, ...] = ()
    """Levels of switches; empty = one full-bisection switch."""
    rails: bool = True
    """Each interface of a node has its own switch plane, reached by the GPU beside it."""
    exceptions: tuple[FabricException, ...] = ()
    """Nodes that differ."""
    slow_uplinks: tuple[SlowUplink, ...] = field(default=(), metadata=UNSAID)
    """Switches whose way up differs."""

    def __post_init__(self) -> None:
        self._check_uplinks()
        if not self.name.strip() or not self.name.isprintable():
            raise RecordError(f"cluster name {self.name!r}: one line of printable text is needed")
        if not self.pools:
            raise RecordError(
                f"cluster {self.name!r} has no pool of nodes: it has zero GPUs; name at least one node kind and a count"
            )
        for exception in self.exceptions:
            if not 0 <= exception.node < self.num_nodes:
                raise RecordError(
                    f"exception of node {exception.node}: cluster {self.name!r} has nodes 0..{self.num_nodes - 1}"
                )
        nodes = [exception.node for exception in self.exceptions]
        twice = next((node for node in nodes if nodes.count(node) > 1), None)
        if twice is not None:
            raise RecordError(f"node {twice} has two exceptions in cluster {self.name!r}; say both factors in one")

    def _check_uplinks(self) -> None:
        names = [level.name for level in self.fabric]
        if self.slow_uplinks and len(set(names)) < len(names):
            raise RecordError(f"cluster {self.name!r}: levels of one name ({', '.join(names)}) cannot be told apart")
        for slow in self.slow_uplinks:
            if slow.level not in names:
                raise RecordError(
                    f"slow uplink of {slow.level!r} {slow.switch}: fabric levels of cluster {self.name!r} are "
                    f"{', '.join(names) or 'none'}"
                )
            count = -(-self.num_nodes // self.nodes_below(slow.level))
            if not 0 <= slow.switch < count:
                raise RecordError(f"slow uplink of {slow.level} {slow.switch}: there are {slow.level} 0..{count - 1}")

    def nodes_below(self, level: str) -> int:
        """Nodes below one full switch of a fabric level."""
        names = [one.name for one in self.fabric]
        return math.prod(one.radix for one in self.fabric[: names.index(level) + 1])

    def pool(self, number: int) -> "Cluster":
        """One pool as a cluster of its own, with its exceptions; the cluster itself where it has no other."""
        if len(self.pools) == 1:
            return self
        before = sum(pool.num_nodes for pool in self.pools[:number])
        pool = self.pools[number]
        return replace(
            self,
            name=f"{self.name} (pool {number}: {pool.kind.name})",
            pools=(pool,),
            exceptions=tuple(
                replace(item, node=item.node - before)
                for item in self.exceptions
                if before <= item.node < before + pool.num_nodes
            ),
            slow_uplinks=tuple(
                replace(slow, switch=slow.switch - first)
                for slow in self.slow_uplinks
                for first in [before // self.nodes_below(slow.level)]
                if 0 <= slow.switch - first < -(-pool.num_nodes // self.nodes_below(slow.level))
            ),
        )

    @property
    def domain_size(self) -> int:
        """Devices of the least fast domain: what holds in it holds in every pool."""
        return min(pool.kind.domain_size for pool in self.pools)

    @property
    def gpus_per_node(self) -> int:
        """Devices of the least node."""
        return min(pool.kind.gpus_per_node for pool in self.pools)

    @property
    def num_nodes(self) -> int:
        """Nodes of all pools."""
        return sum(pool.num_nodes for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        """Devices of all pools: the largest world."""
        return sum(pool.num_gpus for pool in self.pools)
