"""What one pasted file says, before anybody makes a cluster of it: plain data, nothing added."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Way(StrEnum):
    """What lies between two devices of a node, nearest first (the words of nvidia-smi; NCCL's PHB, NODE and SYS alike)."""

    NVLINK = "NVLink"
    XGMI = "XGMI"
    PIX = "PIX"
    """One PCIe switch."""
    PXB = "PXB"
    """Several PCIe switches, no host bridge."""
    PHB = "PHB"
    """A host bridge: through the processor."""
    NODE = "NODE"
    """Several host bridges of one NUMA node."""
    SYS = "SYS"
    """The link between processors."""

    @property
    def is_fast(self) -> bool:
        """A link of the accelerators' own."""
        return self in (Way.NVLINK, Way.XGMI)

    @property
    def distance(self) -> int:
        """0 = nearest."""
        return list(Way).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How two GPUs of a node reach one another."""

    way: Way
    """The nearest way that they have."""
    links: int = 0
    """Bonded NVLinks or xGMI links; 0 where it goes over PCIe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """One accelerator of a node."""

    name: str | None = None
    """Product, as the driver writes it."""
    memory_bytes: int | None = None
    """As the driver shows it."""
    place: str | None = None
    """NUMA node or processors beside it: equal texts are one place."""
    pcie_bytes_per_s: float | None = None
    """Its link to the host, in one direction, after line coding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNic:
    """One network interface of a node."""

    name: str
    """Device, for example mlx5_0."""
    bytes_per_s: float | None = None
    """In one direction."""
    place: str | None = None
    """As that of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """One node from inside."""

    source: str
    """File and command."""
    command: str
    """What prints it: two of one kind are two nodes, of two kinds one node seen twice."""
    gpus: tuple[SeenGpu, ...]
    """In the order of the driver."""
    nics: tuple[SeenNic, ...] = ()
    """In the order of the file."""
    paths: Mapping[tuple[int, int], Path]
    """(i, j), i < j -> how these GPUs reach one another."""
    nic_ways: Mapping[tuple[int, int], Way] = field(default_factory=dict)
    """(GPU, interface) -> way."""
    twins: frozenset[tuple[int, int]] = frozenset()
    """(i, j), i < j: interfaces behind one PCIe bridge, mostly two ports of one card."""
    asymmetric: tuple[tuple[int, int], ...] = ()
    """Pairs that the file describes differently in either direction; `paths` has the worse one."""
    knows_nics: bool = True
    """The file would show interfaces if there were any."""
    knows_links: bool = True
    """The file would show NVLinks and xGMI links if there were any."""
    num_hosts: int = 1
    """Nodes like this one that the file describes together (NVLink across nodes)."""
    notes: tuple[str, ...] = ()
    """What the reader had to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevices:
    """The accelerators of a node by name, from a companion of the matrix."""

    source: str
    """File and command."""
    gpus: tuple[SeenGpu, ...]
    """In the order of the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNvlinks:
    """The state of every NVLink of every GPU."""

    source: str
    """File and command."""
    bytes_per_s: tuple[tuple[float | None, ...], ...]
    """Per GPU and link, signalling rate in one direction; None = down."""
    names: tuple[str | None, ...]
    """Product of each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenP2p:
    """Which pairs of GPUs may copy without the host's memory."""

    source: str
    """File and command."""
    num_gpus: int
    """GPUs of the matrix."""
    refused: Mapping[tuple[int, int], str]
    """(i, j), i < j -> the driver's word for why not; absent = they may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHost:
    """One node from outside."""

    name: str
    """As the file writes it."""
    gpu: str | None = None
    """Product of its accelerators."""
    num_gpus: int | None = None
    """Accelerators or slots."""
    memory_bytes: int | None = None
    """Of one accelerator."""
    domain: str | None = None
    """Fast domain that it belongs to, where it spans nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLevel:
    """One level of switches, nearest to the nodes first."""

    name: str
    """leaf, spine, block ..."""
    sizes: tuple[int, ...]
    """Children of each switch of the level, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFabric:
    """Nodes, in the order of the switches that they hang on."""

    source: str
    """File and command."""
    hosts: tuple[SeenHost, ...]
    """Neighbours below one switch stand side by side."""
    levels: tuple[SeenLevel, ...] = ()
    """Below the switch that joins everything, nearest first; empty = nothing is known, or one switch."""
    notes: tuple[str, ...] = ()
    """What the reader had to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPoint:
    """One size of a measured collective."""

    size_bytes: int
    """As Meshwright counts it (cost_models.collectives)."""
    seconds: float
    """The faster of out of place and in place."""
    is_outlier: bool = False
    """A larger message was faster, or it stands far above both neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCollective:
    """One measured collective over one group of ranks."""

    source: str
    """File and command."""
    collective: str
    """A word of cost_models.collectives.Collective."""
    num_ranks: int
    """Ranks of the group."""
    num_nodes: int | None = None
    """Nodes that they lie on; None = unknown."""
    gpu: str | None = None
    """Product that the ranks ran on."""
    points: tuple[SeenPoint, ...]
    """By rising size."""
    bus_bytes_per_s: float
    """Best bus bandwidth."""
    notes: tuple[str, ...] = ()
    """What the reader had to decide."""


Seen = SeenNode | SeenDevices | SeenNvlinks | SeenP2p | SeenFabric | SeenCollective
"""What a file may hold."""
