"""What measuring costs: seconds of one event times the events of a step, against the step.

An event is a phase, a pass of a stage, or a collective that starts or ends. The cost of each kind is that of many on an idle
process; a step says how many of each it has. The difference of two steps, with and without, would drown in their noise.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.registry import benchmark

EVENTS = 20_000
REPEATS = 5
STEPS = 20


@benchmark("measuring")
def measuring(published: Path | None = None) -> Mapping[str, Any]:
    """Seconds an event by kind, events of a step, and their product against the CPU time of the step."""
    import torch
    import torch.distributed as dist

    import executor
    from benchmarks.executor.gradient_ranks import MODEL, plan
    from benchmarks.executor.overhead import _alone
    from executor.decoder import Decoder
    from executor.train import make_optimizer, optimizer_step

    torch.set_num_threads(1)
    _alone()
    try:
        rows = []
        for layout in ("mbs2", "mbs1"):
            parallel = executor.apply(plan(MODEL, layout, gbs=4, seq=64), Decoder(MODEL, seed=1), check=False)
            optimizer = make_optimizer(parallel)
            inputs = torch.randint(MODEL.vocab, (4, 64), generator=torch.Generator().manual_seed(0))
            parallel.measure_phases()
            waits = parallel.phases.waits
            assert waits is not None
            seconds = []
            for _ in range(STEPS):
                before = parallel.phases.num_events, waits.num_events
                start_s = time.process_time()
                optimizer_step(parallel, optimizer, inputs, inputs)
                seconds.append(time.process_time() - start_s)
            phases = parallel.phases.num_events - before[0]
            heard = waits.num_events - before[1]
            phase_s, wait_s = _phase_s(parallel), _wait_s()
            cost_s = phases * phase_s + heard * wait_s
            rows.append(
                {
                    "layout": layout,
                    "phases": phases,
                    "waits": heard,
                    "phase_us": round(1e6 * phase_s, 2),
                    "wait_us": round(1e6 * wait_s, 2),
                    "step_ms": round(1e3 * median(seconds), 2),
                    "share": cost_s / median(seconds),
                }
            )
    finally:
        dist.destroy_process_group()
    lines = ["cost of measuring = cost per event x events per step"]
    lines += [
        f"{row['layout']:<12} {row['phases']} phases at {row['phase_us']} us, {row['waits']} starts and waits at {row['wait_us']} us, "
        f"step {row['step_ms']} ms: {row['share']:.3%}"
        for row in rows
    ]
    return {"rows": rows, "text": "\n".join(lines)}


def _phase_s(parallel: Any) -> float:
    """Seconds of one phase that holds nothing, with as many kinds of waits to look at as a step leaves."""

    def run() -> None:
        for _ in range(EVENTS):
            with parallel.phases("forward"):
                pass

    return _least(run) / EVENTS


def _wait_s() -> float:
    """Seconds that listening adds to one start or wait: a collective of one number, heard and unheard."""
    import torch
    import torch.distributed as dist

    from executor.waits import Waits

    number, count = torch.zeros(1), EVENTS // 20

    def run() -> None:
        for _ in range(count):
            dist.all_reduce(number)

    heard, listening = _least(run), Waits._listening
    Waits._listening = None
    unheard, Waits._listening = _least(run), listening
    return max(0.0, heard - unheard) / count / 2  # each is a start and a wait


def _least(run: Any) -> float:
    seconds = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        run()
        seconds.append(time.process_time() - start_s)
    return min(seconds)
