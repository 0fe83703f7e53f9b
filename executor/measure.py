"""What a plan does here: seconds of a step with their spread, by phase, and the peak of memory on each kind of rank.

`measure_run` runs one plan in this process; `measure_runs` several, each in a child of its own that is forked before any
process group exists: each has a heap that no other plan has touched, and steps are interleaved, round by round, so that a
drift of the machine hits all plans alike. Both are called on every rank (torchrun starts them), and rank 0 gets the result.

A step is forward, backward and update, from a barrier to the end of the slowest rank. Nothing counts before the warm-up
is over: the first update allocates the optimizer's state, the second is the first ordinary one.
"""

import copy
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from cost_models.records import (
    MeasuredMemory,
    Measurement,
    MeasurementKind,
    Measurements,
    MemoryKind,
    Plan,
    from_json,
    load,
    print_layout,
    save,
)
from executor.decoder import Decoder
from executor.errors import LateRankError, RefusedError, WrongResultError
from executor.launch import BUILT, JOINED, UP, die_with_parent, note_progress
from executor.mesh import local_device, naming_the_late, start_process_group
from executor.parallelize import apply
from executor.peak import PeakMemory, exact_heap, trim_heap
from executor.settings import LEAST_WARMUP, PROGRESS_MARK, REFERENCE_KEY, REFERENCE_SIDE, REFUSED, Job, Settings
from executor.train import make_optimizer, optimizer_step, random_batch
from executor.verify import MAX_PARAMETERS, selfcheck
from planner.profiling.clock import OVERSUBSCRIBED_SAMPLE_S, Rule, machine, sample, shares_cores, versions
from planner.profiling.factory import FactoryError, factory_of, made_by

REFERENCE_S = 0.03
"""Length of one of its samples: several time slices."""
END = "end"
"""Command to a child: nothing more will come."""


# One plan, ready to step ---------------------------------------------------------------------------------------------


class Run:
    """A plan made true on this rank: model, optimizer and random tokens."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self.settings = settings
        self.memory = PeakMemory(local_device())
        self.warm_peak_bytes = 0
        self.warm_reserved_bytes: int | None = None
        self.peaks: dict[str, tuple[float, int]] = {}
        note_progress(dist.get_rank(), JOINED)
        start_s = time.perf_counter()
        with exact_heap():
            self.memory.reset()
            self._build()
            if not settings.check:  # which holds the whole model beside this rank's part of it
                self.peaks["build"] = (time.perf_counter() - start_s, self.memory.peak_bytes())
        self.optimizer = make_optimizer(self.parallel)
        self.parallel.measure_phases()
        self.seconds: list[float] = []
        self.phases: dict[str, list[float]] = {}
        self.parts: dict[str, list[float]] = {}
        self._count = 0
        note_progress(dist.get_rank(), BUILT)

    def _build(self) -> None:
        module = build_module(self.plan, self.settings)
        compared = self.settings.check and sum(one.numel() for one in module.parameters()) <= MAX_PARAMETERS
        reference = copy.deepcopy(module) if compared else None
        shrunken = self.settings.check and not compared
        self.parallel = apply(self.plan, module, check=shrunken, timeout_s=self.settings.timeout_s)
        if self.settings.check:
            found = selfcheck(self.parallel, reference, seed=self.settings.seed)
            if not found.ok:
                raise WrongResultError(str(found))

    def checked(self) -> None:
        """Nothing more: what was built was compared, unless the settings say otherwise."""

    def step(self) -> None:
        """One step of the training loop, on tokens that are the same in every layout; the time to draw them counts."""
        workload = self.plan.decision.workload
        seed = self.settings.seed * 1_000_003 + self._count
        with self.parallel.phases("data"):
            inputs, labels = random_batch(workload.gbs, workload.seq, self.parallel.vocab, seed)
            inputs, labels = inputs.to(self.parallel.device), labels.to(self.parallel.device)
        self._count += 1
        self._last = optimizer_step(self.parallel, self.optimizer, inputs, labels)

    def warm_up(self) -> None:
        """The steps that do not count, with the peaks of memory: of the first two, of all, and of the phases of one more.

        Then one more still, so that the heap is as in a long run.
        """
        reserved = []
        with exact_heap():
            trim_heap()
            for number in range(self.settings.warmup):
                self.memory.reset()
                self.step()
                peak_bytes = self.memory.peak_bytes()
                reserved.append(self.memory.reserved_bytes())
                self.warm_peak_bytes = max(self.warm_peak_bytes, peak_bytes)
                if number < LEAST_WARMUP:
                    self.peaks[f"step {number + 1}"] = (self._last.seconds, peak_bytes)
            self.memory.reset()
            self.parallel.phases.on_end = self._note_peak
            self.step()
            self.parallel.phases.on_end = None
        if None not in reserved:
            self.warm_reserved_bytes = max(one for one in reserved if one is not None)
        self.step()

    def _note_peak(self, phase: str) -> None:
        """The peak of memory since the phase before, where it is the highest of this phase's."""
        seconds, peak_bytes = self.parallel.phases.seconds[phase], self.memory.peak_bytes()
        self.peaks[phase] = (seconds, max(peak_bytes, self.peaks.get(phase, (0.0, 0))[1]))
        self.memory.reset()

    def trace(self) -> None:
        """One further step under torch's profiler; each rank leaves `rank<k>.json`, which Perfetto and Chrome show."""
        assert self.settings.trace is not None
        folder = Path(self.settings.trace)
        folder.mkdir(parents=True, exist_ok=True)
        self.parallel.phases.named = True
        activities = [torch.profiler.ProfilerActivity.CPU]
        if local_device().type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        dist.barrier()
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
        self.parallel.phases.named = False
        profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))

    def count(self, steps: int = 1) -> None:
        """Measure further steps, each from a barrier."""
        for _ in range(steps):
            once = sample(
                {"step": self.step}, Rule(warmup=0, repetitions=1), before=dist.barrier, synchronise=_wait_for()
            )
            self.seconds += once["step"]
            for phase, seconds in self._last.phases_s.items():
                self.phases.setdefault(phase, []).append(seconds)
            for part, seconds in self._last.parts_s.items():
                before = [0.0] * (len(self.seconds) - 1)  # a wait that did not come up until now
                self.parts.setdefault(part, before).append(seconds)
            for values in self.parts.values():
                values += [0.0] * (len(self.seconds) - len(values))

    def result(self) -> tuple[Measurement, ...]:
        """On rank 0 the measurements of the run, all ranks together; elsewhere nothing. Every rank calls it."""
        own = Share(
            stage=self.parallel.mesh.get_local_rank("pp"),
            seconds=tuple(self.seconds),
            phases={name: tuple(values) for name, values in self.phases.items()},
            parts={name: tuple(values) for name, values in self.parts.items()},
            sizes=self.parallel.phases.sizes,
            peaks=self.peaks,
            peak_bytes=self.warm_peak_bytes,
            reserved_bytes=self.warm_reserved_bytes,
        )
        shares: list[Share | None] = [None] * dist.get_world_size()
        dist.gather_object(own, shares if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            return ()
        return summary(self.plan, [share for share in shares if share is not None], self.memory.kind)


def steps_in_turn(runs: Mapping[str, Run], rounds: int) -> dict[str, tuple[float, ...]]:
    """Seconds on this rank of `rounds` further steps of each run, a step of each in turn, each from a barrier."""
    steps = {name: run.step for name, run in runs.items()}
    return sample(steps, Rule(warmup=0, repetitions=rounds), before=dist.barrier, synchronise=_wait_for())


def stamp() -> dict[str, Any]:
    """The fields of a Measurement that say where it was taken."""
    return {"machine": _machine(), "versions": versions()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank saw."""

    stage: int
    """Its position in the pipeline."""
    seconds: tuple[float, ...]
    """Of each step."""
    phases: dict[str, tuple[float, ...]]
    """Phase -> seconds of each step."""
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """compute, bubble, `wait AXIS/OPERATION` -> seconds of each step."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """`wait AXIS/OPERATION` -> (calls, bytes of their whole tensors) in the last step."""
    peaks: dict[str, tuple[float, int]] = field(default_factory=dict)
    """build, step 1, step 2, and phases of a step -> (seconds, peak bytes of it)."""
    peak_bytes: int = 0
    """Peak of its memory."""
    reserved_bytes: int | None = None
    """Peak of what its allocator held, used or not."""


def summary(plan: Plan, shares: Sequence[Share], kind: MemoryKind) -> tuple[Measurement, ...]:
    """The step (the slowest rank of each), then per stage its phases (likewise) and the memory of its fullest rank."""

    def one(key: str, samples: tuple[float, ...], **fields: Any) -> Measurement:
        return Measurement(
            kind=MeasurementKind.RUN,
            key=key,
            samples_s=samples,
            **stamp(),
            plan_sha256=plan.decision.sha256,
            note=print_layout(plan.decision.layout),
            **fields,
        )

    fullest = MeasuredMemory(kind=kind, peak_bytes=max(share.peak_bytes for share in shares))
    step = _slowest([share.seconds for share in shares])
    results = [one("step", step, phase="step", rank_class="all", memory=fullest)]
    reserved = [share.reserved_bytes for share in shares if share.reserved_bytes is not None]
    if (
        reserved
    ):  # the same steps, with the other count: what the allocator keeps beside what it uses is a residual of its own
        held = MeasuredMemory(kind=MemoryKind.RESERVED, peak_bytes=max(reserved))
        results.append(one("step", step, phase="step", rank_class="all", memory=held))
    for stage in sorted({share.stage for share in shares}):
        own = [share for share in shares if share.stage == stage]
        peak = MeasuredMemory(kind=kind, peak_bytes=max(share.peak_bytes for share in own))
        for phase in own[0].phases:
            samples = _slowest([share.phases[phase] for share in own])
            results.append(one(phase, samples, phase=phase, rank_class=f"stage {stage}", memory=peak))
        # parts of one rank add up: of the one that computes longest, which the others wait for
        busiest = max(own, key=lambda share: sum(share.parts.get("compute", ())))
        for part, samples in sorted(busiest.parts.items()):
            name, (calls, num_bytes) = f"part/{part}", busiest.sizes.get(part, (0, 0))
            size = {"calls": calls, "bytes": num_bytes} if calls else {}
            results.append(one(name, samples, phase=name, rank_class=f"stage {stage}", **size))
        for phase in own[0].peaks:
            seconds, peak_bytes = max((share.peaks[phase] for share in own), key=lambda found: found[1])
            held = MeasuredMemory(kind=kind, peak_bytes=peak_bytes)
            name = f"memory/{phase}"
            results.append(one(name, (seconds,), phase=name, rank_class=f"stage {stage}", memory=held))
    return tuple(results)


def _slowest(of_ranks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(step) for step in zip(*of_ranks, strict=True))


def build_module(plan: Plan, settings: Settings) -> nn.Module:
    """The model that runs: the factory's, or our own decoder of the plan's dimensions."""
    if settings.module is None:
        return Decoder(plan.request.model, seed=settings.seed)
    torch.manual_seed(settings.seed)
    try:
        return made_by(factory_of(settings.module))
    except FactoryError as error:
        raise RefusedError(f"module {settings.module}: {error}") from None


def _machine() -> str:
    return torch.cuda.get_device_name() if local_device().type == "cuda" else machine()


def _wait_for() -> Callable[[], object] | None:
    return torch.cuda.synchronize if local_device().type == "cuda" else None


# One plan, or several ------------------------------------------------------------------------------------------------


def measure_run(plan: Plan, settings: Settings) -> Measurements:
    """Run one plan in this process; joins the process group if nobody has. Rank 0 gets the result, others an empty record."""
    die_with_parent()
    start_process_group(settings.timeout_s)
    with naming_the_late():
        run = Run(plan, settings)
        run.warm_up()
        for step in range(settings.steps):
            run.count()
            left_s = (settings.steps - step - 1) * sum(run.seconds) / len(run.seconds)
            _say(f"step {step + 1} of {settings.steps}: {run.seconds[-1]:.3g} s, {left_s:.0f} s left")
        if settings.trace is not None:
            run.trace()
            _say(f"traced one more step: {settings.trace}/rank*.json")
        return Measurements(measurements=run.result())


def measure_runs(plans: Sequence[Plan], settings: Settings) -> Measurements:
    """Run several plans of one world size, a step of each in turn; no process group may exist in this process yet."""
    if dist.is_initialized():
        raise RefusedError(
            "measure_runs forks a process for each plan, and this one has joined a process group already"
        )
    context = multiprocessing.get_context("fork" if platform.system() == "Linux" else "spawn")
    # a check leaves its buffers in the process: it has one of its own
    jobs = [(plan, settings) for plan in plans if settings.check]
    jobs += [(plan, replace(settings, check=False)) for plan in plans]
    with _children(context, jobs) as everyone:
        checkers, children = everyone[: -len(plans)], everyone[-len(plans) :]
        for index, child in enumerate(children):
            _say(f"layout {index + 1} of {len(plans)}: {child.name}")
            if checkers:
                checkers[index].do("checked")
            child.do("warm_up")
        for checker in checkers[1:]:  # the first holds the store that all meet in
            checker.end()
        reference: list[float] = []
        begun_s = time.perf_counter()
        for step in range(settings.steps):
            for child in children:
                child.do("count")
            reference += _reference()
            left_s = (time.perf_counter() - begun_s) / (step + 1) * (settings.steps - step - 1)
            _say(f"step {step + 1} of {settings.steps} of each layout, {left_s:.0f} s left")
        results = [m for child in children for m in child.do("result")]
    alike = Measurement(kind=MeasurementKind.OP, key=REFERENCE_KEY, samples_s=tuple(reference), **stamp())
    return Measurements(measurements=(*results, alike))


def _reference() -> tuple[float, ...]:
    """Samples of one product, which every profile holds too: did the machine run as fast as when it was profiled?"""
    device = local_device()
    a, b = (torch.ones(REFERENCE_SIDE, REFERENCE_SIDE, device=device) for _ in range(2))
    shared = shares_cores(int(os.environ["WORLD_SIZE"]), torch.get_num_threads())
    rule = Rule(warmup=1, repetitions=2, sample_s=OVERSUBSCRIBED_SAMPLE_S if shared else REFERENCE_S)
    return sample({"": lambda: functional.linear(a, b)}, rule, synchronise=_wait_for())[""]


class _Child:
    """The process of one plan, as its parent sees it."""

    def __init__(self, process: Any, pipe: Connection, name: str, timeout_s: float) -> None:
        self.process, self.pipe, self.name, self.timeout_s = process, pipe, name, timeout_s

    def do(self, command: str) -> Any:
        """Send a command and wait for its answer; raises what the child raised."""
        rank = os.environ.get("RANK", "0")
        self.pipe.send(command)
        if not self.pipe.poll(self.timeout_s):
            raise LateRankError(
                f"rank {rank} is late: no answer to {command!r} of {self.name} after {self.timeout_s:.0f} s",
                (int(rank),),
            )
        try:
            failed, answer = self.pipe.recv()
        except EOFError:
            self.process.join(1.0)
            raise LateRankError(
                f"rank {rank} of {self.name} ended with {self.process.exitcode} at {command!r}", (int(rank),)
            ) from None
        if failed:
            raise RuntimeError(f"rank {rank} of {self.name} failed at {command!r}:\n{answer}")
        return answer

    def end(self) -> None:
        """Let it go. A closed pipe would not tell it: the children forked later hold copies of our end."""
        with suppress(OSError):
            self.pipe.send(END)


@contextmanager
def _children(context: Any, jobs: Sequence[tuple[Plan, Settings]]) -> Iterator[list[_Child]]:
    children = []
    try:
        for index, (plan, settings) in enumerate(jobs):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, plan, settings, index), daemon=True)
            process.start()
            there.close()
            children.append(_Child(process, here, print_layout(plan.decision.layout), settings.timeout_s))
        yield children
    finally:
        for child in children:
            child.end()
        for child in children:
            child.process.join(5.0)
            if child.process.is_alive():
                child.process.kill()


def _serve(pipe: Connection, plan: Plan, settings: Settings, index: int) -> None:
    """The child: joins the group of its plan, then obeys until its parent lets it go, or is gone."""
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        command = pipe.recv()
        if command == END:
            return
        _join(index, settings.timeout_s)
        with naming_the_late():
            run = Run(plan, settings)
            while command != END:
                pipe.send((False, getattr(run, command)()))
                command = pipe.recv()
    except EOFError:
        return
    except Exception:  # noqa: BLE001 - whatever it was, the parent tells it
        pipe.send((True, traceback.format_exc()))


def _join(index: int, timeout_s: float) -> None:
    """The process group of plan `index`: all share one store, which the first child of rank 0 opens unless torchrun has one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and index == 0 and not agent_has_it,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    dist.init_process_group(
        "gloo" if local_device().type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"meshwright/plan {index}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _say(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{PROGRESS_MARK}{text}", file=sys.stderr, flush=True)


# What torchrun starts ------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """One rank of a job; rank 0 leaves measurements.json in the folder."""
    note_progress(int(os.environ["RANK"]), UP)
    try:
        job = from_json(Job, json.loads((folder / "job.json").read_text(encoding="utf-8")))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        plans = [load(Plan, folder / name) for name in job.plans]
        results = measure_run(plans[0], job.settings) if len(plans) == 1 else measure_runs(plans, job.settings)
        if os.environ["RANK"] == "0":
            save(results, folder / "measurements.json")
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise  # with its lines: nobody foresaw it
        if code == RefusedError.exit_code:
            (folder / REFUSED).write_text(str(error), encoding="utf-8")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
