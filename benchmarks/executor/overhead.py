"""CPU time of a step through the executor against the same layout written by hand in torch: one rank, in turn, in one process.

By hand means the loop that a torch user writes: micro-batches, loss over all targets, clipping by torch's own, the optimizer.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.registry import benchmark

PAIRS = 200
SEQ, MICRO_BATCHES, MBS = 32, 2, 1
BOOTSTRAPS = 2000
WARMUP = 5


@benchmark("overhead")
def overhead(published: Path | None = None) -> Mapping[str, Any]:
    """Median ratio of CPU times with its 95% interval, from 200 pairs whose order alternates."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _alone()
    try:
        row = _row("one rank", *_both())
    finally:
        dist.destroy_process_group()
    text = (
        f"CPU time through the executor / by hand, {row['layout']}: {row['ratio']:.4f} "
        f"(95%: {row['low']:.4f} .. {row['high']:.4f}; {PAIRS} pairs, a step by hand {row['step_ms']} ms)"
    )
    return {"pairs": PAIRS, **row, "text": text}


def _alone() -> None:
    """A process group of this process."""
    from executor.mesh import start_process_group

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_RANK="0")
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start_process_group()


def _both() -> tuple[Callable[[], object], Callable[[], object]]:
    """(a step through the executor, the same by hand), each on a model of its own."""
    import torch
    from torch.nn import functional

    import executor
    from benchmarks.executor.gradient_ranks import MODEL, plan
    from executor.decoder import Decoder
    from executor.train import make_optimizer

    gbs = MICRO_BATCHES * MBS
    inputs = torch.randint(MODEL.vocab, (gbs, SEQ), generator=torch.Generator().manual_seed(0))
    labels = inputs.roll(-1, dims=1)
    planned = plan(MODEL, f"mbs{MBS}", gbs=gbs, seq=SEQ)
    parallel = executor.apply(planned, Decoder(MODEL, seed=1), check=False)
    own = make_optimizer(parallel)

    def through() -> object:
        loss = parallel.step(inputs, labels)
        parallel.clip_grad_norm_(1.0)
        own.step()
        own.zero_grad()
        return loss

    module = Decoder(MODEL, seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def by_hand() -> object:
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            logits = module(x)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return through, by_hand


def _row(name: str, through: Callable[[], object], by_hand: Callable[[], object]) -> dict[str, Any]:
    for _ in range(WARMUP):
        through()
        by_hand()
    pairs = []
    gc.disable()
    for number in range(PAIRS):
        seconds = {}
        order = (through, by_hand) if number % 2 else (by_hand, through)
        for step in order:
            start_s = time.process_time()
            step()
            seconds[step] = time.process_time() - start_s
        pairs.append((seconds[through], seconds[by_hand]))
    gc.enable()
    ratios = [a / b for a, b in pairs]
    low, high = interval(ratios)
    return {
        "layout": name,
        "ratio": round(median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "step_ms": round(1e3 * median(b for _, b in pairs), 2),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """95% of the medians of resampled values."""
    drawn = random.Random(0)
    medians = sorted(median(drawn.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS)]
