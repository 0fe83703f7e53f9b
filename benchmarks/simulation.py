"""How long a step takes to simulate: 64 virtual stages x 512 micro-batches, the first time and again, every schedule."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.registry import benchmark
from cost_models import simulation
from cost_models.records import V_PLACED, Schedule
from cost_models.schedules import Pipeline
from cost_models.simulation import StageTimes, simulate

NUM_STAGES = 64
NUM_MICRO_BATCHES = 512
REPEATS = 7


@benchmark("simulation")
def simulation_speed(published: Path | None = None) -> Mapping[str, Any]:
    """Milliseconds of CPU by schedule, so that other work on the machine counts little: `first_ms` with its operation lists and their wiring, `again_ms` without; medians and minima."""
    return {
        "stages": NUM_STAGES,
        "micro_batches": NUM_MICRO_BATCHES,
        "repeats": REPEATS,
        "rows": [_row(schedule) for schedule in Schedule],
    }


def _row(schedule: Schedule) -> dict[str, Any]:
    chunks = 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
    pipeline = Pipeline(
        schedule=schedule,
        num_devices=NUM_STAGES // chunks,
        num_virtual_per_device=chunks,
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    one = np.ones(NUM_STAGES)
    times = StageTimes(
        forward_s=one,
        backward_s=2 * one,
        hop_s=np.full(NUM_STAGES - 1, 0.01),
        tail_s=np.zeros(pipeline.num_devices),
        input_grad_s=one,
        weight_grad_s=one,
    )
    first, again = [], []
    for _ in range(REPEATS):
        simulation.forget()
        first.append(_seconds(pipeline, times))
        again.append(_seconds(pipeline, times))
    return {
        "schedule": schedule.value,
        "placement": "v" if schedule in V_PLACED else "looped",
        "devices": pipeline.num_devices,
        "operations": len(simulate(pipeline, times).kind),
        "first_ms": round(1e3 * median(first), 1),
        "first_ms_least": round(1e3 * min(first), 1),
        "again_ms": round(1e3 * median(again), 1),
        "again_ms_least": round(1e3 * min(again), 1),
    }


def _seconds(pipeline: Pipeline, times: StageTimes) -> float:
    start_s = time.process_time()
    simulate(pipeline, times)
    return time.process_time() - start_s
