"""What each of 2 ranks holds in each phase of a run; rank 0 writes the bytes of both as JSON to the path given.

Bytes of tensors as torch makes them, counted storage by storage: nothing of an allocator, nothing of the model of memory.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import executor
from executor import checkpoint
from executor.decoder import Decoder
from executor.mesh import start_process_group
from executor.parallelize import Parallel
from executor.train import make_optimizer, optimizer_step, random_batch
from tests.processes.layouts import Case
from tests.processes.live_bytes import LiveBytes
from tests.processes.phase_cases import PHASE_CASES


def phases(case: Case, folder: Path) -> dict[str, int]:
    """Phase -> bytes: what is held when the model is placed, and the peak of each phase after it."""
    live = LiveBytes()
    found: dict[str, int] = {}

    def peak_of(phase: str, work: Callable[[], object]) -> None:
        gc.collect()
        live.reset()
        work()
        found[phase] = live.peak

    with live:
        module = Decoder(case.model, seed=1)
        parallel = executor.apply(case.plan, module, check=False)
        del module
        gc.collect()
        found["build"] = live.held
        optimizer = make_optimizer(parallel)
        for number in (1, 2):
            inputs, labels = random_batch(
                case.decision.workload.gbs, case.decision.workload.seq, case.model.vocab, number
            )
            peak_of(f"step {number}", lambda: optimizer_step(parallel, optimizer, inputs, labels))  # noqa: B023
        peak_of("save", lambda: checkpoint.save(folder, parallel, optimizer))
        # as where a run begins anew: parameters, an optimizer without states, and the folder
        optimizer.state.clear()
        peak_of("load", lambda: checkpoint.load(folder, parallel, optimizer))
        peak_of("evaluation", lambda: evaluate(parallel, case))
    return found


@torch.no_grad()
def evaluate(parallel: Parallel, case: Case) -> None:
    """One micro-batch through this rank's stages without a backward pass, and the loss where the head is."""
    mbs, layout, workload = case.decision.layout.mbs, case.decision.layout, case.decision.workload
    ids = torch.zeros(mbs, workload.seq, dtype=torch.long)
    for stage, module in zip(parallel.virtual, parallel.modules, strict=True):
        hidden = ids if stage == 0 else torch.zeros(mbs, workload.seq // layout.tp, case.model.hidden)
        out = module(hidden)
        if stage == layout.num_virtual_stages - 1:
            with loss_parallel() if layout.tp > 1 else nullcontext():
                functional.cross_entropy(out.flatten(0, -2).float(), ids.flatten())


def main(path: str) -> None:
    torch.set_num_threads(1)
    start_process_group(60)
    everything = {}
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        for number, case in enumerate(PHASE_CASES):
            found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(found, phases(case, Path(shared[0], str(number))))
            everything[str(number)] = found
        dist.barrier()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(everything))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
