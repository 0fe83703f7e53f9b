"""Every kind of layout that a planner may emit for 8 ranks, as decisions: the table of the equivalence test."""

import itertools
from dataclasses import dataclass, field

from cost_models.records import (
    Cluster,
    Decision,
    Device,
    Link,
    Model,
    NodeKind,
    Plan,
    PlanRequest,
    Pool,
    Precision,
    Provenance,
    Ranks,
    Stage,
    Workload,
    parse_layout,
)
from planner.readers.runtimes import read_runtime

MODEL = Model(name="small", num_layers=4, hidden=32, ffn=48, heads=8, kv_heads=4, head_dim=8, vocab=131)
"""An odd vocabulary, so that its shards are uneven; grouped queries; hidden ≠ heads · head_dim."""
TIED = Model(
    name="tied",
    num_layers=4,
    hidden=32,
    ffn=48,
    heads=8,
    kv_heads=4,
    head_dim=8,
    vocab=131,
    tie_embeddings=True,
    gated_mlp=False,
    qkv_bias=True,
    linear_bias=True,
)
"""One weight at both ends, a plain MLP, and biases."""
CLUSTER = Cluster(
    name="this-machine",
    pools=(
        Pool(
            num_nodes=1,
            kind=NodeKind(
                name="host",
                device=Device(
                    name="cpu",
                    family="cpu",
                    memory_bytes=2**30,
                    memory_bandwidth_bytes_per_s=1e10,
                    peak_flops_per_s={"fp32": 1e11},
                    matmul_flops_per_s={"fp32": 1e11},
                ),
                gpus_per_node=8,
                intra=Link(name="loopback", bandwidth_bytes_per_s=1e9),
                nic=Link(name="loopback", bandwidth_bytes_per_s=1e9),
                num_nics=1,
            ),
        ),
    ),
)
SEQ = 16
ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str
    num_micro_batches: int = 2
    model: Model = MODEL
    blocks: tuple[tuple[int, int], ...] | None = None
    recompute: dict[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ORDER
    permutation: tuple[int, ...] | None = None
    precision: Precision = Precision.FP32

    @property
    def decision(self) -> Decision:
        layout = parse_layout(self.layout)
        blocks = self.blocks or even_blocks(self.model.num_blocks, layout.num_virtual_stages)
        return Decision(
            runtime="torch",
            layout=layout,
            workload=Workload(seq=SEQ, gbs=layout.dp * layout.mbs * self.num_micro_batches, precision=self.precision),
            num_micro_batches=self.num_micro_batches,
            stages=tuple(
                Stage(virtual=i, device=i % layout.pp, blocks=b, recompute=self.recompute) for i, b in enumerate(blocks)
            ),
            ranks=Ranks(order=self.order, permutation=self.permutation),
            collectives={},
        )

    @property
    def plan(self) -> Plan:
        decision = self.decision
        return Plan(
            request=PlanRequest(
                model=self.model, cluster=CLUSTER, workload=decision.workload, runtime=read_runtime("torch")
            ),
            decision=decision,
            predicted=None,
            certificate=None,
            provenance=Provenance(
                decision_sha256=decision.sha256, meshwright_version="0", calibration="none", versions={}
            ),
        )


def even_blocks(num_blocks: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    cuts = [round(stage * num_blocks / num_stages) for stage in range(num_stages + 1)]
    return tuple((first, last - 1) for first, last in itertools.pairwise(cuts))


UNEVEN4 = ((0, 0), (1, 1), (2, 4), (5, 5))
CASES = (
    # one axis
    Case(layout="dpr8"),
    Case(layout="dpr8 mbs2", num_micro_batches=1, model=TIED),
    Case(layout="dps8 zero2"),
    Case(layout="dps8 zero3", model=TIED),
    Case(layout="dpr2 dps4 zero2", recompute={"full": 2, "selective": 2}),
    Case(layout="dpr4 dps2 zero3", recompute={"selective": 1, "none": 2, "full": 1}),
    # two
    Case(layout="dpr2 tp4", recompute={"selective": 4}),
    Case(layout="dpr4 tp2", model=TIED, recompute={"full": 2, "selective": 1}),
    Case(layout="dps2 tp4 zero2", num_micro_batches=1),
    Case(layout="dps4 tp2 zero3", model=TIED, num_micro_batches=1, recompute={"full": 4}),
    Case(layout="dpr2 dps2 tp2 zero3", recompute={"selective": 4}),
    Case(layout="pp2 tp4 sched=gpipe", num_micro_batches=1),
    Case(layout="pp2 tp4 sched=1f1b", model=TIED, recompute={"selective": 1}),
    Case(layout="pp4 vpp1 tp2 sched=1f1b", num_micro_batches=5, blocks=UNEVEN4),
    Case(layout="pp4 dpr2 sched=1f1b", num_micro_batches=4, blocks=UNEVEN4, model=TIED),
    Case(layout="pp2 vpp3 dpr4 sched=interleaved", num_micro_batches=4),
    Case(layout="pp2 vpp2 dps4 zero3 sched=interleaved", blocks=((0, 0), (1, 3), (4, 4), (5, 5)), model=TIED),
    Case(layout="pp2 dps4 zero3 sched=gpipe", num_micro_batches=3, recompute={"full": 1, "selective": 1}),
    Case(layout="pp2 dps4 zero2 sched=1f1b", num_micro_batches=3, model=TIED),
    # three
    Case(layout="pp2 dpr2 tp2 sched=gpipe"),
    Case(layout="pp2 dpr2 tp2 mbs2 sched=1f1b", model=TIED, num_micro_batches=3, recompute={"selective": 1}),
    Case(layout="pp2 vpp2 dpr2 tp2 sched=interleaved"),
    Case(layout="pp2 dps2 tp2 zero2 sched=gpipe"),
    Case(layout="pp2 dps2 tp2 zero2 sched=1f1b", order=("pp", "dp_shard", "dp_replicate", "cp", "tp")),
    Case(layout="pp2 vpp2 dps2 tp2 zero2 sched=interleaved"),
    Case(layout="pp2 dps2 tp2 zero3 sched=gpipe", permutation=(0, 2, 1, 3, 4, 6, 5, 7)),
    Case(layout="pp2 dps2 tp2 zero3 sched=1f1b", model=TIED, order=("dp_shard", "pp", "tp")),
    Case(layout="pp2 vpp2 dps2 tp2 zero3 sched=interleaved", recompute={"full": 1}),
    Case(layout="pp2 dpr2 dps2 zero3 sched=1f1b"),
    # rounded
    Case(layout="dpr8", precision=Precision.BF16),
    Case(layout="pp2 dps2 tp2 zero3 sched=1f1b", precision=Precision.BF16, recompute={"selective": 1}),
)
"""Two micro-batches where nothing asks for more: what a schedule can do wrong, it does wrong with two."""

TRAINED = (
    Case(layout="dpr8"),
    Case(layout="dpr2 dps2 tp2 zero3", model=TIED),
    Case(layout="pp4 dpr2 sched=1f1b", num_micro_batches=4, model=TIED),
    Case(layout="pp2 vpp2 dpr2 tp2 sched=interleaved", model=TIED),
)
"""Layouts that train for a few steps: loss, norm of the gradients and weights against one process."""
