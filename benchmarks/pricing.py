"""How many layouts are priced in a second: in a batch, and one by one."""

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.registry import benchmark
from cost_models.calibrations import shipped
from cost_models.problem import Cells, Problem
from cost_models.records import Layout, Workload, normalised
from cost_models.stage import price_blocks
from planner.decisions import decision_of_layout
from planner.predict import simulated
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.runtimes import read_runtime

MODEL, CLUSTER = "llama3-70b", "h100x512"
WORLD = 512
BATCH, LAYERS = 4096, 80
REPEATS = 5
ONE_BY_ONE = 60
"""Layouts that are priced alone, and played."""


def problem() -> Problem:
    """A dense 70B model on 512 H100 under Megatron."""
    return Problem(
        model=read_model(MODEL),
        cluster=read_cluster(CLUSTER),
        workload=Workload(seq=8192, gbs=BATCH),
        runtime=read_runtime("megatron"),
        calibration=shipped(),
    )


def layouts() -> list[Layout]:
    """Powers of two of tp, pp, cp and micro-batch, with and without virtual stages and ZeRO, that fill the ranks and divide the batch."""
    found = []
    for tp, pp, cp, zero, mbs in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 1), (1, 2, 4, 8)):
        dp = WORLD // (tp * pp * cp)
        for vpp in (1, 5) if pp > 1 else (1,):
            even = LAYERS % (pp * vpp) == 0 and BATCH % (dp * mbs) == 0 if dp else False
            if even and BATCH // (dp * mbs) % pp == 0:
                schedule = "interleaved" if vpp > 1 else "1f1b"
                found.append(normalised(dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, mbs=mbs, zero=zero, schedule=schedule))
    return found


def _rate(work: Callable[[], int]) -> tuple[float, float]:
    """(median, best) of things done per second of CPU, so that other work on the machine counts little."""
    rates = []
    for _ in range(REPEATS):
        started = time.process_time()
        done = work()
        rates.append(done / (time.process_time() - started))
    return round(median(rates), 1), round(max(rates), 1)


@benchmark("pricing")
def pricing_speed(published: Path | None = None) -> Mapping[str, Any]:
    """Layouts a second: their blocks in one array call; and each alone, block prices, stages and the played step."""
    asked, every = problem(), layouts()
    many = (every * (1 + 20_000 // len(every)))[:20_000]
    cells = Cells.of(many)
    chosen = every[:: max(1, len(every) // ONE_BY_ONE)][:ONE_BY_ONE]
    decisions = [decision_of_layout(asked, layout) for layout in chosen]

    def batch() -> int:
        return len(price_blocks(asked, cells))

    def alone() -> int:
        for layout in chosen:
            price_blocks(asked, Cells.of([layout]))
        return len(chosen)

    def played() -> int:
        for decision in decisions:
            simulated(asked, decision)
        return len(decisions)

    return {
        "model": MODEL,
        "cluster": CLUSTER,
        "distinct_layouts": len(every),
        **{
            f"{name}_per_s": {"median": rates[0], "best": rates[1]}
            for name, rates in (("batch", _rate(batch)), ("one_by_one", _rate(alone)), ("played", _rate(played)))
        },
    }
