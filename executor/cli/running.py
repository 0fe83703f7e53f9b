"""`run`: starts the ranks with torchrun, or joins those that somebody started, and shows promise beside measurement."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from cost_models.records import Measurements, Optimizer, Plan, load, load_plan, save, to_json
from cost_models.units import GIB
from executor.cli.outcome import Outcome
from executor.cli.ranks import RunFailedError, ranks_here
from executor.errors import RefusedError
from executor.settings import Settings, write_job

DEFAULT_STEPS = 5
DEFAULT_TIMEOUT_S = 600.0
"""A run that takes longer than this says so and stops, unless --timeout gives it more."""


def run_plan(arguments: argparse.Namespace, progress: Callable[[str], object]) -> Outcome:
    """Runs a plan's decision and measures it. Raises RunFailedError, which names the rank."""
    from planner.profiling.factory import has_form

    plan = load_plan(arguments.plan)
    settings = Settings(
        steps=arguments.steps if arguments.steps is not None else DEFAULT_STEPS,
        module=arguments.module,
        check=not arguments.no_selfcheck,
        trace=None if arguments.trace is None else str(Path(arguments.trace).absolute()),
    )
    timeout_s = arguments.timeout if arguments.timeout is not None else DEFAULT_TIMEOUT_S
    if settings.module is not None and not has_form(settings.module):
        raise RefusedError(
            f"--module {settings.module}: package.module:factory is needed, as in my_package.models:build"
        )
    if not timeout_s > 0:
        raise RefusedError(f"--timeout {timeout_s:g}: give a positive number of seconds")
    from executor.refusals import check

    check(plan)
    if "RANK" in os.environ:
        return _joined(plan, settings, arguments.out)
    world = plan.decision.layout.world
    progress(f"running {plan.decision.layout} on {world} rank{'s' if world > 1 else ''} of this machine")
    measured = started_here([plan], settings, timeout_s=timeout_s, progress=progress)
    return _outcome(plan, measured, arguments.out)


def started_here(
    plans: list[Plan], settings: Settings, *, timeout_s: float, progress: Callable[[str], object]
) -> Measurements:
    """Runs plans of one world size in one torchrun, their steps in turn."""
    world = plans[0].decision.layout.world
    _enough_devices(world)
    _enough_memory(plans)
    with tempfile.TemporaryDirectory(prefix="meshwright-run-") as folder:
        write_job(Path(folder), plans, settings)
        ranks_here(
            "executor.measure",
            Path(folder),
            num_ranks=world,
            timeout_s=timeout_s,
            progress=lambda line: progress(f"  {line}"),
            what="the run",
        )
        left = Path(folder, "measurements.json")
        if not left.is_file():
            raise RunFailedError(
                "the run failed: every rank ended well, but none left a result; does the module end the process?"
            )
        return load(Measurements, left)


def _enough_devices(world: int) -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        raise RefusedError(
            f"the plan has {world} ranks, and this machine {torch.cuda.device_count()} GPUs: start it on every node with "
            "`torchrun --nnodes NODES --nproc-per-node GPUS ... -m executor run PLAN.json -o MEASUREMENT.json`"
        )


def _enough_memory(plans: list[Plan]) -> None:
    """Refuses what cannot fit before a process is started: without GPUs all ranks share the memory of this machine."""
    import torch

    if torch.cuda.is_available():
        return
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for plan in plans:
        model, optimizer = plan.request.model, plan.decision.workload.optimizer
        # fp32 weights and gradients, and the two moments of Adam, once over all ranks: the least that any layout takes
        need = model.num_params * (8 if optimizer is Optimizer.SGD else 16)
        if need > have:
            raise RefusedError(
                f"{model.name} takes at least {need / GIB:,.1f} GiB of weights, gradients and optimizer states, and this "
                f"machine has no GPU and {have / GIB:,.1f} GiB of memory; run the plan on its cluster ({plan.request.cluster.name}): "
                "`torchrun --nnodes NODES --nproc-per-node GPUS ... -m executor run PLAN.json -o MEASUREMENT.json`"
            )


def _joined(plan: Plan, settings: Settings, out: str | None) -> Outcome:
    """One rank of a run that torchrun started; rank 0 has the answer."""
    from executor.measure import measure_run
    from executor.mesh import rank_and_world

    world, have = plan.decision.layout.world, rank_and_world()[1]
    if world != have:
        raise RefusedError(
            f"the plan has {world} ranks, and torchrun started {have}; start {world}, or plan for {have}"
        )
    measured = measure_run(plan, settings)
    if not measured.measurements:
        return Outcome(document=None, text=lambda: "")
    return _outcome(plan, measured, out)


def _outcome(plan: Plan, measured: Measurements, out: str | None) -> Outcome:
    from planner.compare import compare
    from planner.report.profile_text import measurements_text
    from planner.report.tables import comparison_table

    if out is not None:
        save(measured, out)
    document = {
        "measurements": to_json(measured),
        "comparison": None if plan.predicted is None else compare(plan, measured),
    }

    def text() -> str:
        if document["comparison"] is None:
            return measurements_text(measured)
        return comparison_table(document["comparison"])

    return Outcome(document=document, text=text)
