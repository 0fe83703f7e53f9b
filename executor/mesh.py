"""Ranks: the process group, who is late, and a plan's rank order as a DeviceMesh."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_models.records import Decision
from executor.errors import LateRankError, RefusedError
from executor.launch import BUILT, die_with_parent, note_progress, when

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of every mesh, outermost first. The plan's rank order changes the ranks inside it, never the order of the axes."""

START_TIMEOUT_S = 300.0
"""How long a rank waits for the others to arrive; torchrun's own default for a rendezvous is 600 s."""


_COLLECTIVE_FAILED = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting", re.IGNORECASE
)
"""What the messages of collectives that lost a peer have in common (torch 2.13)."""


def device_type() -> str:
    """`cuda` where torch sees a GPU, else `cpu`; the environment's MESHWRIGHT_DEVICE overrides."""
    wanted = os.environ.get("MESHWRIGHT_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise RefusedError(f"MESHWRIGHT_DEVICE={wanted!r}; legal values: cpu, cuda, or unset")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def local_device() -> torch.device:
    """The device of this rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start_process_group(timeout_s: float = START_TIMEOUT_S) -> None:
    """Join the ranks that torchrun started; does nothing where the script has joined already.

    Raises LateRankError naming the ranks that did not arrive within `timeout_s`, which is also the time-out of every collective.
    """
    if dist.is_initialized():
        return
    die_with_parent()
    rank, world = rank_and_world()
    store = _open_store(rank, world, timeout_s)
    wait_for_all(store, "start", rank, world, timeout_s)
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("meshwright", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def rank_and_world() -> tuple[int, int]:
    """Number of this rank and of all, as torchrun says them in the environment; RefusedError where nobody says them well."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RefusedError(
            f"{', '.join(missing)} not in the environment: start the script with "
            "`torchrun --nproc-per-node N script.py`, N being the plan's number of ranks"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
        said = os.environ.get(name, "0")
        if not said.isdecimal():
            raise RefusedError(f"{name}={said!r} in the environment; legal: a whole number, as torchrun sets it")
        numbers[name] = int(said)
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if not rank < world:
        raise RefusedError(
            f"RANK={rank} and WORLD_SIZE={world} in the environment; legal: ranks 0 to WORLD_SIZE - 1, as torchrun sets them"
        )
    return rank, world


def _open_store(rank: int, world: int, timeout_s: float) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            host,
            port,
            world_size=world,
            is_master=rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise LateRankError(
            f"rank {rank} waited {timeout_s:.0f} s for the store at {host}:{port}; late: rank 0 ({_first_line(error)})",
            (0,),
        ) from error


def wait_for_all(store: dist.Store, event: str, rank: int, world: int, timeout_s: float) -> None:
    """Say that `rank` reached `event` and wait for the others; LateRankError names those that did not come."""
    store.set(f"meshwright/{event}/{rank}", b"1")
    deadline = time.monotonic() + timeout_s
    while late := [other for other in range(world) if not store.check([f"meshwright/{event}/{other}"])]:
        if time.monotonic() > deadline:
            raise LateRankError(f"rank {rank} waited {timeout_s:.0f} s at {event!r}; late: {_names(late)}", tuple(late))
        time.sleep(0.02)


def mark_progress(step: int) -> None:
    """Note in the store that this rank begins `step`, so that a time-out can name who stayed behind."""
    if dist.is_initialized():
        note_progress(dist.get_rank(), step)
        _store().set(f"meshwright/progress/{dist.get_rank()}", str(step).encode())


@contextmanager
def naming_the_late() -> Iterator[None]:
    """Turn a failed collective inside the context into a LateRankError that names the ranks which stayed behind."""
    try:
        yield
    except LateRankError:
        raise  # an inner context has named them
    except (RuntimeError, dist.DistError) as error:
        lost = _lost_connection(error)
        if lost is None:
            raise
        raise _late_ranks(lost) from error


def _lost_connection(error: BaseException) -> BaseException | None:
    """The error of a collective in a chain of causes; torch's pipelines wrap theirs, and gloo's are plain RuntimeErrors."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError) or _COLLECTIVE_FAILED.search(str(current)):
            return current
        current = current.__cause__
    return None


def _late_ranks(error: BaseException) -> LateRankError:
    """Who is late: the ranks whose progress is least, by the notes of `mark_progress`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        store = _store()
        keys = [f"meshwright/progress/{other}" for other in range(world)]
        steps = [int(store.get(key)) if store.check([key]) else BUILT for key in keys]
    except (RuntimeError, dist.DistError):
        return LateRankError(f"rank {rank} lost the others, the store too; late: rank 0 ({_first_line(error)})", (0,))
    late = [other for other, step in enumerate(steps) if step == min(steps)]
    lead = f"rank {rank} failed to communicate {when(steps[rank])}"
    if len(late) == world:
        who = "no rank is behind the others, so one failed or hangs inside it"
        return LateRankError(f"{lead}; {who} ({_first_line(error)})", ())
    return LateRankError(
        f"{lead}; late: {_names(late)}, last seen {when(min(steps))} ({_first_line(error)})", tuple(late)
    )


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _first_line(error: BaseException) -> str:
    """What a collective says, without gloo's place in its source and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[/\S+\] ", "", line).partition(". This is typically")[0]


def rank_tensor(decision: Decision) -> torch.Tensor:
    """Ranks by coordinate, shape (pp, dp_replicate, dp_shard, tp): the plan's axis order and permutation."""
    layout, ranks = decision.layout, decision.ranks
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    order = [axis for axis in ranks.order if axis in degrees]
    absent = [axis for axis, degree in degrees.items() if axis not in order]
    homeless = [axis for axis in absent if degrees[axis] > 1]
    if homeless:
        raise RefusedError(
            f"ranks.order = {list(ranks.order)} does not name {homeless}; every axis of degree above 1 has a place in it"
        )
    outermost_first = absent + order[::-1]
    flat = torch.tensor(ranks.permutation if ranks.permutation is not None else range(layout.world))
    shaped = flat.reshape([degrees[axis] for axis in outermost_first])
    tensor = shaped.permute([outermost_first.index(axis) for axis in AXES]).contiguous()
    for dim, axis in enumerate(AXES):
        if degrees[axis] > 1 and not bool((tensor.diff(dim=dim) > 0).all()):
            raise RefusedError(
                f"ranks.permutation puts the ranks of a {axis} group in descending order. torch sorts the ranks of a process "
                "group, so its members would not be where the plan says; legal: permutations in which ranks ascend along "
                "each axis (which ranks form a group is free)"
            )
    return tensor


def build_mesh(decision: Decision) -> DeviceMesh:
    """The mesh of all ranks, axes `AXES`; the process group must be up and have exactly the plan's ranks."""
    world = dist.get_world_size()
    if world != decision.layout.world:
        raise RefusedError(
            f"the plan is for {decision.layout.world} ranks ({decision.layout}), but {world} were started; "
            f"start {decision.layout.world} (torchrun --nproc-per-node {decision.layout.world}) or plan for {world}"
        )
    return DeviceMesh(device_type(), rank_tensor(decision), mesh_dim_names=AXES)


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> None:
    """Set how long a collective waits in each group; a DeviceMesh gives its own the default, 10 to 30 minutes."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
