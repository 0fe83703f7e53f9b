"""The file that tells the ranks of the demo's measuring session what to time. Loads no torch."""

from dataclasses import dataclass

from cost_models.records import Model
from planner.profiling.session import Request

LAYER = "executor.decoder:Layer"
"""The layer that will run is the layer that is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The file bench.json of a folder."""

    session: Request
    """Operations and links."""
    model: Model
    """What will be planned."""
    seq: int
    """Tokens of its sequences."""
    mbs: int
    """Sequences in the micro-batches whose memory is looked at."""
