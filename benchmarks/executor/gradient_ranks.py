"""One rank in a host of the shaped network: steps of one model under each way to sum gradients, in turn, and what they took.

Arguments: a rendezvous file, an output file, rounds, then the places.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import executor
from benchmarks.testbed.ranks import start
from cost_models.records import (
    Binding,
    CollectiveChoice,
    Decision,
    Model,
    Plan,
    PlanRequest,
    Precision,
    Provenance,
    Ranks,
    Stage,
    Workload,
    parse_layout,
)
from executor.decoder import Decoder
from planner.readers.node_presets import local_cluster
from planner.readers.runtimes import read_runtime

MODEL = Model(name="ten MiB", num_layers=6, hidden=192, ffn=512, heads=8, kv_heads=4, head_dim=24, vocab=1024)
"""10.8 MiB of gradients in fp32, 11 ms of compute on a core of today."""
SEQ, NUM_RANKS, RANKS_PER_NODE = 64, 4, 2
BUCKET_BYTES = 2 << 20
"""A fifth of the gradients: the first bucket travels while the others are computed."""
WAYS: Mapping[str, Mapping[str, object]] = {
    "flat": {},
    "ring": {"algorithm": "ring", "bucket_bytes": BUCKET_BYTES},
    "hierarchical": {"algorithm": "hierarchical", "bucket_bytes": BUCKET_BYTES},
    "hierarchical, waiting": {"algorithm": "hierarchical", "bucket_bytes": BUCKET_BYTES, "overlap": False},
    "hierarchical, fp16": {"algorithm": "hierarchical", "bucket_bytes": BUCKET_BYTES, "compression": "fp16"},
}
"""Name -> the decided collective; flat is DDP as torch has it."""
RANK_TIMEOUT_S = 240.0


def plan(model: Model, layout: str, *, gbs: int, seq: int, **choice: object) -> Plan:
    """A plan of one stage for ranks in nodes of two."""
    degrees = parse_layout(layout)
    workload = Workload(seq=seq, gbs=gbs, precision=Precision.FP32)
    cluster = local_cluster(2, 4 << 30, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=1e10)
    pool = cluster.pools[0]
    kind = replace(pool.kind, gpus_per_node=RANKS_PER_NODE)
    cluster = replace(cluster, pools=(replace(pool, num_nodes=max(1, degrees.world // RANKS_PER_NODE), kind=kind),))
    chosen = CollectiveChoice(binding=Binding.DECIDED, **choice) if choice else None  # type: ignore[arg-type]
    decision = Decision(
        runtime="torch",
        layout=degrees,
        workload=workload,
        num_micro_batches=degrees.num_micro_batches(gbs),
        stages=(Stage(virtual=0, device=0, blocks=(0, model.num_blocks - 1), recompute={}),),
        ranks=Ranks(order=("tp", "cp", "dp_shard", "dp_replicate", "pp")),
        collectives={"dp_replicate": chosen} if chosen is not None else {},
    )
    return Plan(
        request=PlanRequest(model=model, cluster=cluster, workload=workload, runtime=read_runtime("torch")),
        decision=decision,
        predicted=None,
        certificate=None,
        provenance=Provenance(decision_sha256=decision.sha256, meshwright_version="", calibration="none", versions={}),
    )


def work(rank: int, rendezvous: str, out: str, rounds: int) -> None:
    """One rank: a round is a step of each way."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=RANK_TIMEOUT_S),
    )
    ways = {
        name: executor.apply(
            plan(MODEL, f"dpr{NUM_RANKS}", gbs=NUM_RANKS, seq=SEQ, **choice), Decoder(MODEL, seed=1), check=False
        )
        for name, choice in WAYS.items()
    }
    inputs = torch.randint(MODEL.vocab, (NUM_RANKS, SEQ), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for name, parallel in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            parallel.step(inputs)
            dist.barrier()
            if number:  # the first one makes connections and buckets
                seconds[name].append(time.perf_counter() - start_s)
            gradients[name] = torch.cat([p.grad.flatten() for p in parallel.parameters() if p.grad is not None])
            for parameter in parallel.parameters():
                parameter.grad = None
    if rank == 0:
        exact = gradients["flat"]
        errors = {name: float((one - exact).abs().max() / exact.abs().max()) for name, one in gradients.items()}
        found = {"seconds": seconds, "errors": errors, "gradient_bytes": exact.numel() * exact.element_size()}
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rendezvous, out, rounds, *places = sys.argv[1:]
    start(lambda rank: work(rank, rendezvous, out, int(rounds)), places, RANK_TIMEOUT_S)
