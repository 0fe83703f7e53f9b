"""One measuring session: a group of processes that times operations and links, and the file that it leaves."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cost_models.records import (
    Measurement,
    Measurements,
    Model,
    Precision,
    RecordError,
    Workload,
    from_json,
    load,
    save,
    to_json,
)
from planner.profiling.blocks import Shapes, keys_of
from planner.profiling.clock import threads_per_rank
from planner.profiling.ranks import joined, run_ranks, say

DEFAULT_SEQ = 4096
"""Tokens of a sequence where nobody says: most published pre-training runs of the last years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to time."""

    operations: tuple[str, ...] = ()
    """Keys, as in planner.profiling.blocks."""
    group_sizes: tuple[int, ...] = ()
    """Groups of ranks whose collectives are timed; none = no links."""
    ranks: int = 1
    """Busy processes."""
    threads: int = 0
    """Threads of torch in each; 0 = the cores of this machine, divided."""
    layer: str = ""
    """package.module:factory of the whole layers that are timed; needed for keys of layers."""
    device: str = "cpu"
    """cpu or cuda: every rank takes the device of its local rank."""
    link_class: str = "loopback"
    """Name of the links that are measured."""
    budget_s: float | None = None
    """Seconds for the operations; null = planner.profiling.blocks decides by key."""
    timeout_s: float = 300.0
    """After this the ranks that are not done are ended and named."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise RecordError(f"ranks={self.ranks}: a measurement takes at least one process")
        if self.device not in ("cpu", "cuda"):
            raise RecordError(f"device={self.device!r}; legal values: cpu, cuda")
        too_large = [size for size in self.group_sizes if not 2 <= size <= self.ranks]
        if too_large:
            raise RecordError(
                f"group_sizes={list(self.group_sizes)} of {self.ranks} ranks: each lies between 2 and {self.ranks}"
            )


def measure(request: Request, *, progress: Callable[[str], object] | None = None) -> Measurements:
    """Time everything in `request`: in processes started here, or, where RANK is set (torchrun), as one of them.

    Samples of all ranks are joined by key. Under torchrun rank 0 gets the whole, the others an empty record.
    Raises planner.profiling.ranks.RankError where a rank fails or is late.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        if "RANK" in os.environ:
            return Measurements(measurements=take_part(request))
        place = Path(folder)
        (place / "request.json").write_text(json.dumps(to_json(request)), encoding="utf-8")
        run_ranks(
            "planner.profiling",
            [str(place)],
            ranks=request.ranks,
            threads=request.threads or threads_per_rank(request.ranks),
            timeout_s=request.timeout_s,
            progress=progress,
        )
        return load(Measurements, place / "measurements.json")


def profile_model(
    model: Model,
    *,
    seq: int | None = None,
    mbs: int = 1,
    tp: int = 1,
    precision: str | None = None,
    ranks: int = 1,
    layer: str = "",
    device: str = "cpu",
    progress: Callable[[str], object] | None = None,
) -> Measurements:
    """Time the operations of a model's blocks on one of tp ranks, `ranks` processes at once.

    Whole layers are among them where `layer` is a factory (see planner.profiling.blocks). The sequence is DEFAULT_SEQ long
    and the format bf16 where nothing is said.
    """
    if precision is not None and precision not in set(Precision):
        raise RecordError(f"precision={precision!r}; legal values: {', '.join(Precision)}")
    if mbs < 1:
        raise RecordError(f"mbs={mbs}: a micro-batch has at least one sequence")
    workload = Workload(
        seq=DEFAULT_SEQ if seq is None else seq, gbs=mbs, precision=Precision(precision or Precision.BF16)
    )
    keys = keys_of(model, workload, Shapes(tp=(tp,), mbs=(mbs,)))
    keys = tuple(key for key in keys if layer or not key.startswith("layer/"))
    return measure(Request(operations=keys, ranks=ranks, layer=layer, device=device), progress=progress)


def take_part(request: Request) -> tuple[Measurement, ...]:
    """This rank's share of a session; rank 0 returns the samples of all."""
    backend = "nccl" if request.device == "cuda" else "gloo"
    with joined(backend=backend, timeout_s=request.timeout_s) as (rank, ranks):
        return gathered(measured_here(request, rank, ranks), rank, ranks)


def measured_here(request: Request, rank: int, ranks: int) -> list[Measurement]:
    """What this rank measured of a request; every rank of the process group calls it."""
    import torch
    import torch.distributed as dist

    from planner.profiling.blocks import machine_of, time_operations
    from planner.profiling.links import time_links

    device = request.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    own: list[Measurement] = []
    if request.operations:
        say(rank, f"timing {len(request.operations)} operations with {ranks} busy processes")
        own += time_operations(
            request.operations,
            ranks=ranks,
            threads=torch.get_num_threads(),
            device=device,
            budget_s=request.budget_s,
            barrier=dist.barrier,
            layer=request.layer,
        )
    if request.group_sizes:
        say(rank, f"timing collectives between {ranks} ranks")
        own += time_links(
            rank,
            ranks,
            group_sizes=request.group_sizes,
            link_class=request.link_class,
            device=device,
            where=machine_of(device),
        )
    return own


def gathered(own: list[Measurement], rank: int, ranks: int) -> tuple[Measurement, ...]:
    """On rank 0 the measurements of all ranks, the samples of a key joined; elsewhere nothing."""
    import torch.distributed as dist

    everyone: list[list[Measurement] | None] = [None] * ranks
    dist.gather_object(own, everyone if rank == 0 else None)
    return joined_by_key([m for part in everyone for m in part or []]) if rank == 0 else ()


def joined_by_key(measurements: list[Measurement]) -> tuple[Measurement, ...]:
    """One measurement a key, with the samples of all, in the order in which the keys appear."""
    from dataclasses import replace

    found: dict[str, Measurement] = {}
    for one in measurements:
        known = found.get(one.key)
        found[one.key] = one if known is None else replace(known, samples_s=known.samples_s + one.samples_s)
    return tuple(found.values())


def main(folder: str) -> None:
    """What each process of `measure` runs: reads request.json, rank 0 leaves measurements.json."""
    place = Path(folder)
    request = from_json(Request, json.loads((place / "request.json").read_text(encoding="utf-8")))
    results = take_part(request)
    if os.environ["RANK"] == "0":
        save(Measurements(measurements=results), place / "measurements.json")
