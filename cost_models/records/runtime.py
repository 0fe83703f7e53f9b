"""What a framework can do, and how: legality's severity, memory and "cannot express" read this, nothing else does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cost_models.records.layout import Schedule


class Severity(StrEnum):
    """How a runtime takes a broken law."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    NONE = "none"


class ContextExchange(StrEnum):
    """How context parallelism brings keys and values to the queries."""

    RING = "ring"
    """From neighbour to neighbour, behind the attention of the part before."""
    GATHER = "gather"
    """All at once, before the attention."""
    ALL_TO_ALL = "all_to_all"
    """Parts of the sequence against parts of the heads (Ulysses)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter in mixed precision, before any division."""

    weight: float
    """Weights as used by the matrix products."""
    gradient: float
    """Gradients as held between micro-batches."""
    optimizer: float
    """Master weights and moments."""

    @property
    def total(self) -> float:
        """All three."""
        return self.weight + self.gradient + self.optimizer


ANY_ORDER = "any"
"""The runtime places ranks as a list says: every rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One framework at one version."""

    name: str
    """As on the command line: torch, megatron, torchtitan, generic."""
    version: str
    """Version that was read or run."""
    schedules: tuple[Schedule, ...]
    """Pipeline schedules it has."""
    zero_levels: tuple[int, ...]
    """ZeRO levels it realises."""
    zero_levels_with_pp: tuple[int, ...]
    """ZeRO levels it realises where pp > 1."""
    zero2_gather: str = "micro"
    """When parameters are gathered under ZeRO 2."""
    recompute_kinds: tuple[str, ...]
    """Kinds of recompute, by the runtime's own names; the first is none."""
    severities: Mapping[str, Severity]
    """Code of a law -> how a breach is taken, where this differs from the law's own severity."""
    state_bytes: Mapping[str, StateBytes]
    """Precision of the workload -> bytes per parameter with Adam."""
    etp_default: str = "one"
    """Tensor parallel degree of experts where none is given: one, or tp."""
    vocab_multiple: int = 1
    """The vocabulary is padded to this times tp; 1 = shards may be uneven."""
    uneven_stages: str = ""
    """How it is told to split layers unevenly over stages, in its own words; empty = nobody found a way."""
    context_parallel: bool = True
    """It divides sequences over cp ranks."""
    expert_parallel: bool = True
    """It divides routed experts over ep ranks."""
    groups_experts: bool = True
    """Products of a rank's routed experts run as groups on several streams, each with its workspace; else one after the other."""
    context_exchange: ContextExchange = ContextExchange.RING
    """How it brings keys and values to the queries where cp > 1."""
    sequence_parallel: bool = True
    """Norms and residuals are divided over tp along the sequence."""
    scatters_hops: bool = False
    """Between two stages each tensor-parallel rank sends its part of the hidden state, which is gathered where it arrives."""
    unsharded_gradients_with_pp: bool = False
    """In a pipeline, gradients stay whole and parameters gathered until the last micro-batch, whatever ZeRO says."""
    offload_moves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is offloaded (optimizer, param) -> kinds of state that then lie in host memory (weight, gradient, optimizer)."""
    built_states: tuple[str, ...] = ("weight",)
    """States that are there when the model is built: weight, gradient (a buffer that stays), master (fp32 weights), optimizer."""
    host_copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """load, save -> kinds of its own state (weight, gradient, optimizer) that each rank copies to host memory then."""
    gathers_to_save: bool = False
    """Sharded weights are gathered unit by unit to be saved, and the first rank holds all of them in host memory."""
    overlaps_dp: bool = True
    """Gradient synchronisation hides behind the backward pass."""
    overlaps_tp: bool = False
    """Tensor-parallel collectives hide behind matrix products."""
    overlaps_ep: bool = False
    """It plays the exchanges of one micro-batch's experts against the compute of another's."""
    choosable_collectives: tuple[str, ...] = ()
    """Axes whose collective algorithm the runtime lets us choose."""
    rank_orders: Mapping[str, str] = field(default_factory=dict)
    """Rank orders that it can be told beside tp, cp, dp_shard, dp_replicate, pp from the inside out -> how; `any` = every order."""
    executes_gpus: bool = True
    """It runs on accelerators."""
    untested: tuple[str, ...] = ()
    """What of this record nobody has checked against the framework itself."""
    source: str
    """Where these facts come from, with a date."""
