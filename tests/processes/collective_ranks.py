"""What each of 8 ranks does in the test of chosen collectives; rank 0 writes what it found as JSON to the path given."""

import copy
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import executor
from cost_models.records import Binding, CollectiveChoice, Plan
from executor.collectives.algorithms import Flat, Hierarchical, Ring, Sum
from executor.collectives.lanes import run_stages
from executor.collectives.nodes import build_hierarchy
from executor.decoder import Decoder
from executor.mesh import start_process_group
from executor.verify import selfcheck
from tests.processes.layouts import Case

NODE_OF_FOUR = 4


def decided(case: Case, per_node: int = NODE_OF_FOUR, **choice: object) -> Plan:
    """The plan of a case on nodes of `per_node` ranks, with a decided collective of the replicas."""
    plan = case.plan
    pool = plan.request.cluster.pools[0]
    nodes = replace(pool, num_nodes=8 // per_node, kind=replace(pool.kind, gpus_per_node=per_node))
    cluster = replace(plan.request.cluster, pools=(nodes,))
    chosen = CollectiveChoice(binding=Binding.DECIDED, **choice)  # type: ignore[arg-type]
    decision = replace(plan.decision, collectives={"dp_replicate": chosen})
    return replace(plan, request=replace(plan.request, cluster=cluster), decision=decision)


PLANS: dict[str, Plan] = {
    "ring": decided(Case(layout="dpr8"), algorithm="ring", bucket_bytes=20_000),
    "hierarchical": decided(Case(layout="dpr8"), algorithm="hierarchical", bucket_bytes=20_000),
    "hierarchical, waiting": decided(Case(layout="dpr8"), algorithm="hierarchical", overlap=False),
    "hierarchical, nodes of two": decided(Case(layout="dpr8"), per_node=2, algorithm="hierarchical"),
    "hierarchical in a pipeline": decided(
        Case(layout="pp2 vpp2 dpr4 sched=interleaved"), per_node=2, algorithm="hierarchical"
    ),
    "default in buckets": decided(Case(layout="dpr8"), algorithm="default", bucket_bytes=10_000),
    "fp16": decided(Case(layout="dpr8"), algorithm="default", compression="fp16"),
    "hierarchical fp16": decided(Case(layout="dpr8"), algorithm="hierarchical", compression="fp16"),
}
"""Name -> plan of which gradients are compared with one process's."""


def sums() -> dict[str, float]:
    """Many sums at once, started by ranks in the same order but at other moments: largest error by algorithm."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    hierarchy = build_hierarchy([list(range(world))], NODE_OF_FOUR)
    algorithms: dict[str, Sum] = {
        "flat": Flat(dist.group.WORLD),
        "ring": Ring(dist.group.WORLD),
        "hierarchical": Hierarchical(hierarchy),
    }
    late = random.Random(rank)
    for name, how in algorithms.items():
        error, running = 0.0, []
        for number in range(30):
            size = (1, 7, 8, 1000, 4099)[number % 5]
            values = torch.arange(size, dtype=torch.float64) + number
            buffer = values * (rank + 1)
            running.append((run_stages(how.stages(buffer), buffer), values * (world * (world + 1) / 2)))
            time.sleep(late.random() * 0.004)
        for future, expected in running:
            error = max(error, float((future.wait() - expected).abs().max() / expected.abs().max().clamp(min=1)))
        found[name] = error
    return found


def check(plan: Plan) -> dict[str, object]:
    module = Decoder(plan.request.model, seed=1)
    reference = copy.deepcopy(module)
    parallel = executor.apply(plan, module, check=False)
    found = selfcheck(parallel, reference)
    return {
        "how": type(parallel.synchronisation.how).__name__,
        "loss": found.loss_error,
        "gradient": found.gradient_error,
    }


def main(path: Path) -> None:
    start_process_group(60)
    found: dict[str, object] = {"sums": sums()}
    for name, plan in PLANS.items():
        found[name] = check(plan)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
