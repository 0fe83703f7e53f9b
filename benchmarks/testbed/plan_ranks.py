"""One rank: real steps of several plans, one of each in turn, and steps of the same model that talk to nobody.

Arguments: a folder with `plans.json` (names of plan files in it, steps, and seconds that a layer sleeps forwards and backwards, or null),
then the places. Rank 0 leaves `steps.json`: name -> seconds of the slowest rank, step by step; "alone" is the model by itself.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.ranks import start
from cost_models.records import Plan, load_plan
from executor import decoder
from executor.measure import Run, steps_in_turn
from executor.mesh import start_process_group
from executor.settings import Settings
from executor.train import random_batch

PORT = "29556"
TIMEOUT_S = 60.0
RANKS_S = 400.0


class _Sleep(torch.autograd.Function):  # type: ignore[misc]  # torch is skipped by mypy, so its classes are Any
    """Its input, later; and its gradient, later still."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


def let_layers_sleep(forward_s: float, backward_s: float) -> None:
    """Layers of our decoder take these seconds and no core; what they hand on is as large as ever."""

    def forward(
        self: decoder.Layer, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        unused = sum(parameter.sum() * 0.0 for parameter in self.parameters())  # every weight has a gradient
        slept: torch.Tensor = _Sleep.apply(hidden_states, forward_s, backward_s)
        return slept + unused

    decoder.Layer.forward = forward  # type: ignore[method-assign]


def alone_of(plan: Plan) -> Callable[[], None]:
    """A step of one rank's part of the batch in this process alone."""
    workload, layout = plan.decision.workload, plan.decision.layout
    module = decoder.Decoder(plan.request.model)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    inputs, labels = random_batch(workload.gbs // layout.dp, workload.seq, plan.request.model.vocab, 0)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(module(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(rank: int, folder: Path, ranks: int) -> None:
    """What one rank does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="10.9.0.1", MASTER_PORT=PORT)
    asked = json.loads((folder / "plans.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    if asked["sleep"] is not None:
        let_layers_sleep(*asked["sleep"])
    start_process_group(TIMEOUT_S)
    plans = {name: load_plan(folder / f"{name}.json") for name in asked["plans"]}
    settings = Settings(check=False, timeout_s=TIMEOUT_S)
    runs: dict[str, Any] = {name: Run(plan, settings) for name, plan in plans.items()}
    if asked["sleep"] is None:
        runs["alone"] = _Alone(alone_of(next(iter(plans.values()))))
    steps_in_turn(runs, 1)
    taken = steps_in_turn(runs, asked["steps"])
    everyone: list[dict[str, tuple[float, ...]] | None] = [None] * ranks
    dist.gather_object(taken, everyone if rank == 0 else None)
    if rank == 0:
        phases = {name: one._last.phases_s for name, one in runs.items() if isinstance(one, Run)}
        (folder / "phases.json").write_text(json.dumps(phases), encoding="utf-8")
        shares = [one for one in everyone if one is not None]
        slowest = {name: [max(step) for step in zip(*(one[name] for one in shares), strict=True)] for name in taken}
        (folder / "steps.json").write_text(json.dumps(slowest), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class _Alone:
    """As `steps_in_turn` takes it."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step


def main() -> None:
    folder, *places = sys.argv[1:]
    start(lambda rank: run(rank, Path(folder), len(places)), places, RANKS_S)


if __name__ == "__main__":
    main()
