"""A layout: all degrees and choices of one way to split a run, and its text form.

world = dp·cp·tp·pp with dp = dp_replicate·dp_shard; ep is never a factor of the world: dp·cp·tp = edp·ep·etp.
"""

from dataclasses import dataclass
from enum import StrEnum

from cost_models.records.codec import RecordError


class Schedule(StrEnum):
    """Order in which a pipeline runs its micro-batches. With pp = 1 every one of them is plain accumulation."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    LOOPED_BFS = "loopedbfs"
    INTERLEAVED_ZB = "interleavedzb"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"
    V_HALF = "vhalf"
    V_MIN = "vmin"


SPLIT_BACKWARD = frozenset({Schedule.INTERLEAVED_ZB, Schedule.ZBV, Schedule.DUALPIPEV, Schedule.V_HALF, Schedule.V_MIN})
"""Schedules that compute the gradients of weights apart from those of inputs, or overlap both directions."""

V_PLACED = frozenset({Schedule.ZBV, Schedule.DUALPIPEV, Schedule.V_HALF, Schedule.V_MIN})
"""Schedules whose device p of pp holds virtual stages p and 2·pp-1-p; the others hold those that are p modulo pp."""


class Gather(StrEnum):
    """When sharded parameters are gathered: at each use, once a micro-batch, or once a step."""

    USE = "use"
    MICRO = "micro"
    STEP = "step"


LEGAL_GATHER = {0: ("step",), 1: ("step",), 2: ("micro", "step"), 3: ("use",)}
"""FSDP with reshard_after_forward=True is 3/use; with False 2/micro; DeepSpeed's stage 2 is 2/step."""

STAGES = "stages"
"""The recompute of a layout whose stages differ: each stage of the plan says its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All degrees and choices, normalised (see `normalised`)."""

    dp_replicate: int = 1
    """Copies of the sharded data-parallel groups."""
    dp_shard: int = 1
    """Ranks over which ZeRO divides; 1 with zero = 0."""
    cp: int = 1
    """Context parallel degree: parts of a sequence."""
    tp: int = 1
    """Tensor parallel degree."""
    ep: int = 1
    """Expert parallel degree, inside dp·cp·tp."""
    etp: int = 1
    """Tensor parallel degree of the experts."""
    pp: int = 1
    """Pipeline stages (devices of a pipeline)."""
    vpp: int = 1
    """Virtual stages on each device of a pipeline."""
    mbs: int = 1
    """Sequences in a micro-batch, on one data-parallel rank."""
    zero: int = 0
    """What is divided over dp_shard·cp: 1 optimizer state, 2 and gradients, 3 and parameters; 0 nothing."""
    gather: Gather = Gather.STEP
    """When sharded parameters are gathered."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Order of the micro-batches."""
    recompute: str = "none"
    """Kind of recompute, named as the runtime names it; 'stages' where the stages of the plan differ."""

    def __post_init__(self) -> None:
        for name in DEGREES:
            if getattr(self, name) < 1:
                raise RecordError(f"{name}={getattr(self, name)}: a degree is a whole number from 1")
        if self.zero not in LEGAL_GATHER:
            raise RecordError(f"zero={self.zero}; legal values: 0, 1, 2, 3")
        if self.gather.value not in LEGAL_GATHER[self.zero]:
            legal = ", ".join(LEGAL_GATHER[self.zero])
            raise RecordError(f"gather={self.gather} with zero={self.zero}; legal gather there: {legal}")
        if self.zero == 0 and self.dp_shard != 1:
            raise RecordError(
                f"dp_shard={self.dp_shard} with zero=0, which divides nothing; write dp_replicate={self.dp_shard}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def num_virtual_stages(self) -> int:
        """S = vpp·pp."""
        return self.pp * self.vpp

    def num_micro_batches(self, gbs: int) -> int:
        """Micro-batches of a step on each rank; gbs = dp·mbs·num_micro_batches exactly."""
        count, rest = divmod(gbs, self.dp * self.mbs)
        if rest or not count:
            raise RecordError(f"gbs={gbs} is not divisible by dp·mbs={self.dp}·{self.mbs}")
        return count

    def __str__(self) -> str:
        return print_layout(self)


DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp", "vpp", "mbs")


def normalised(
    *,
    dp: int | None = None,
    zero: int = 0,
    gather: Gather | str | None = None,
    micro_gather: str = "micro",
    **fields: object,
) -> Layout:
    """A layout from what people write.

    A bare `dp` with zero ≥ 1 is dp_shard, else dp_replicate; zero ≥ 1 with dp_shard·cp = 1 is read as 0; an absent gather
    is step (0, 1), use (3), or `micro_gather` (2): the runtime's way.
    """
    values: dict[str, object] = dict(fields)
    if dp is not None:
        if "dp_replicate" in values or "dp_shard" in values:
            raise RecordError(f"dp={dp} beside dp_replicate or dp_shard: say dp alone, or both of its parts")
        values["dp_shard" if zero >= 1 else "dp_replicate"] = dp
    if zero not in LEGAL_GATHER:
        raise RecordError(f"zero={zero}; legal values: 0, 1, 2, 3")
    shard, cp = values.get("dp_shard", 1), values.get("cp", 1)
    if zero >= 1 and shard == 1 and cp == 1:
        zero, gather = 0, None
    if gather is None:
        gather = {0: "step", 1: "step", 2: micro_gather}.get(zero, "use")
    return Layout(zero=zero, gather=Gather(gather), **values)  # type: ignore[arg-type]


def print_layout(layout: Layout) -> str:
    """The canonical text, all degrees always; `parse_layout` is its inverse."""
    return (
        f"pp{layout.pp} vpp{layout.vpp} dpr{layout.dp_replicate} dps{layout.dp_shard} cp{layout.cp} tp{layout.tp} "
        f"ep{layout.ep} etp{layout.etp} mbs{layout.mbs} zero{layout.zero} gather={layout.gather} "
        f"sched={layout.schedule} rc={layout.recompute}"
    )
