"""Layouts on 2 ranks whose memory is counted by phase."""

from dataclasses import replace

from cost_models.records import Decision, Model, Workload
from tests.processes.layouts import Case

MODEL = Model(name="counted", num_layers=4, hidden=128, ffn=352, heads=8, kv_heads=4, head_dim=16, vocab=1024)
SEQ = 256


class LongCase(Case):
    """With sequences so long that activations are of the size of the states."""

    @property
    def decision(self) -> Decision:
        short = super().decision
        return replace(short, workload=Workload(seq=SEQ, gbs=short.workload.gbs, precision=short.workload.precision))


PHASE_CASES = (
    LongCase(layout="dpr2 mbs2", model=MODEL),
    LongCase(layout="dps2 mbs2 zero2", model=MODEL),
    LongCase(layout="dps2 mbs2 zero3", model=MODEL),
    LongCase(layout="tp2 mbs2", model=MODEL),
    LongCase(layout="pp2 mbs2 sched=1f1b", model=MODEL, num_micro_batches=4),
    LongCase(layout="dpr2 mbs2", model=MODEL, recompute={"full": 4}),
    LongCase(layout="dpr2 mbs2", model=MODEL, recompute={"selective": 4}),
)
