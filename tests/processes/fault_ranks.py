"""Faults planted into the executor itself, on 8 ranks: what `apply` says of each. Rank 0 writes JSON to the path given."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import executor
from executor import mesh, parallelize, stage
from executor.decoder import Decoder
from executor.errors import WrongResultError
from executor.mesh import start_process_group
from executor.sharding import data
from tests.processes.layouts import Case


def unwrapped(module: nn.Module, *_: object) -> nn.Module:
    return module


class SilentReplicas(DistributedDataParallel):
    """DDP by its type, but each bucket stays what it was."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.register_comm_hook(None, kept)


def kept(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


_rank_tensor = mesh.rank_tensor


def swapped(decision: object) -> Tensor:
    return _rank_tensor(decision).transpose(2, 3).contiguous()  # axes dp_shard and tp of a mesh that has two of each


_named_layers = stage.StageModule.named_layers


def all_but_the_first(self: stage.StageModule) -> Iterator[tuple[str, nn.Module]]:
    layers = _named_layers(self)
    if self.has_head:
        next(layers)
    yield from layers


_init = stage.StageModule.__init__


def shorter(self: stage.StageModule, module: nn.Module, anatomy: object, blocks: tuple[int, int], num: int) -> None:
    _init(self, module, anatomy, (blocks[0], blocks[1] - (blocks[1] != num - 1)), num)


_share = parallelize.Parallel._share_of_loss


@contextmanager
def weighted(weight_of: Callable[[int], float]) -> Iterator[None]:
    """Micro-batch i counts weight_of(i) times."""
    seen = []

    def share(self: parallelize.Parallel, logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(1)
        return _share(self, logits, labels) * weight_of((len(seen) - 1) % self.decision.num_micro_batches)

    with patch.object(parallelize.Parallel, "_share_of_loss", share):
        yield


FAULTS = {
    "no fault": (Case(layout="pp2 dps2 tp2 zero3 sched=1f1b"), lambda: patch.object(mesh, "START_TIMEOUT_S", 60)),
    "no wrapper": (Case(layout="dpr8"), lambda: patch.object(parallelize, "shard_data", unwrapped)),
    "no all-reduce": (
        Case(layout="dpr4 pp2 sched=1f1b"),
        lambda: patch.object(data, "DistributedDataParallel", SilentReplicas),
    ),
    "swapped axes": (Case(layout="pp2 dps2 tp2 zero3 sched=1f1b"), lambda: patch.object(mesh, "rank_tensor", swapped)),
    "layer skipped": (
        Case(layout="pp2 dps4 zero2 sched=gpipe"),
        lambda: patch.object(stage.StageModule, "named_layers", all_but_the_first),
    ),
    "layer lost": (Case(layout="pp2 tp4 sched=1f1b"), lambda: patch.object(stage.StageModule, "__init__", shorter)),
    "one micro-batch": (Case(layout="dps8 zero3"), lambda: weighted(lambda index: 0.5 if index == 1 else 1.0)),
    "all micro-batches": (Case(layout="pp2 dpr4 sched=1f1b"), lambda: weighted(lambda index: 0.25)),
}
"""Name -> layout, and what plants the fault."""


def said(name: str) -> str:
    case, planted = FAULTS[name]
    with planted():
        try:
            executor.apply(case.plan, Decoder(case.model, seed=1))
        except WrongResultError as error:
            return str(error)
    return ""


def main(path: Path) -> None:
    start_process_group(60)
    found = {}
    for name in FAULTS:
        start_s = time.monotonic()
        found[name] = said(name)
        print(f"{name}: {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
