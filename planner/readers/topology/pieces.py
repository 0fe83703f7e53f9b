"""What several files hold, sorted by what they are of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models.records import Calibration, Cluster
from planner.readers.topology.seen import SeenCollective, SeenDevices, SeenFabric, SeenNode, SeenNvlinks, SeenP2p


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What all files hold, sorted."""

    node: SeenNode | None = None
    devices: SeenDevices | None = None
    nvlinks: SeenNvlinks | None = None
    p2p: SeenP2p | None = None
    fabric: SeenFabric | None = None
    collectives: tuple[SeenCollective, ...] = ()
    dates: Mapping[str, str] = field(default_factory=dict)
    """Source of a measured table -> day of its file (ISO)."""
    base: Cluster | None = None
    """A whole cluster of our own beside them."""
    measured: Calibration | None = None
    """What a document of a probe holds beside its cluster."""
