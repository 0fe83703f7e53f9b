"""What collectives between the ranks of this machine take, by operation, group size and bytes.

Keys: `<collective>/<ranks>/<bytes>/<link class>`. Bytes are those of the whole tensor: what each rank holds (all_reduce,
broadcast, p2p), has in the end (all_gather), gives in (reduce_scatter) or sends, its own part included (all_to_all). A p2p sample is one direction of a ping-pong.

    overlap/<collective>/<ranks>/<bytes>/<link class>|alone     a collective while this rank multiplies matrices, and those products alone

All groups of a size work at the same time, as they do in a run: a group's collective competes with the others' for cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.records import Measurement, MeasurementKind
from planner.profiling.clock import Rule, sample, versions

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB)
"""From where latency decides to where bandwidth does (loopback curves bend twice in between)."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p")
"""What layouts use; p2p, the last, between pairs alone."""
OVERLAP_BYTES = 4 * MIB
"""Size at which hiding is measured: a bucket of gradients."""
OVERLAP_MATRIX = 512
"""Side of the matrices that are multiplied meanwhile."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """This rank's group of one size."""

    ranks: tuple[int, ...]
    """Global ranks of it."""
    handle: "dist.ProcessGroup"
    """Torch's."""
    rank: int
    """This process, as a global rank."""


def groups_of(size: int, rank: int, ranks: int) -> Group | None:
    """This rank's group where the world is cut into neighbours of `size`; None = left over. Every rank must call it."""
    import torch.distributed as dist

    own = None
    for first in range(0, ranks - ranks % size, size):
        members = tuple(range(first, first + size))
        handle = dist.new_group(list(members))
        if rank in members:
            own = Group(ranks=members, handle=handle, rank=rank)
    return own


def time_links(
    rank: int,
    ranks: int,
    *,
    group_sizes: Sequence[int] = (2, 4),
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    link_class: str = "loopback",
    device: str = "cpu",
    where: str = "",
) -> tuple[Measurement, ...]:
    """Seconds of each collective on this rank; called on every rank of the default process group."""
    import torch
    import torch.distributed as dist

    synchronise = torch.cuda.synchronize if device.startswith("cuda") else None
    results: list[Measurement] = []

    def keep(key: str, samples: tuple[float, ...], size: int) -> None:
        results.append(
            Measurement(
                kind=MeasurementKind.COLLECTIVE,
                key=key,
                samples_s=samples,
                bytes=size,
                machine=where,
                versions=versions(),
                note=f"{ranks} busy processes",
            )
        )

    for group_size in group_sizes:
        if not 2 <= group_size <= ranks:
            continue
        group = groups_of(group_size, rank, ranks)
        for name in COLLECTIVES if group_size == 2 else COLLECTIVES[:-1]:
            for size in sizes_bytes:
                call = collective(name, size, group, device) if group is not None else _nothing
                rule = _rule(size)
                samples = sample({name: call}, rule, before=dist.barrier, synchronise=synchronise)[name]
                if group is not None:
                    share = 0.5 if name == "p2p" else 1.0
                    keep(f"{name}/{group_size}/{size}/{link_class}", tuple(s * share for s in samples), size)
        if group is not None:
            together, alone = _overlap(group, device, dist.barrier, synchronise)
            key = f"overlap/all_reduce/{group_size}/{OVERLAP_BYTES}"
            keep(f"{key}/{link_class}", together, OVERLAP_BYTES)
            keep(f"{key}/alone", alone, OVERLAP_BYTES)
    return tuple(results)


def _rule(size_bytes: int) -> Rule:
    """Ranks wait for each other, so the counts depend on the size alone: no clock decides."""
    if size_bytes <= 128 * KIB:
        return Rule(warmup=2, repetitions=8, calls=5)
    return Rule(warmup=1, repetitions=6 if size_bytes <= 4 * MIB else 4)


def _nothing() -> None:
    """A rank outside all groups only meets the barriers."""


def collective(name: str, size_bytes: int, group: Group, device: str) -> Call:
    """A call of one collective on this rank. ValueError names those that can be measured."""
    import torch
    import torch.distributed as dist

    count = max(1, size_bytes // 4)
    parts = len(group.ranks)
    if name == "p2p":
        return _ping_pong(torch.ones(count, device=device), group)
    whole = torch.ones(count + -count % parts, device=device)
    part = torch.ones(len(whole) // parts, device=device)
    received = torch.empty_like(whole) if name == "all_to_all" else whole
    handle = group.handle
    # torch 2.13 renamed both, and warns at the old names
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    known: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=handle),
        "all_gather": lambda: gather(whole, part, group=handle),
        "reduce_scatter": lambda: scatter(part, whole, group=handle),
        "broadcast": lambda: dist.broadcast(whole, group.ranks[0], group=handle),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=handle),
    }
    if name not in known:
        raise ValueError(f"collective {name!r}; measurable: {', '.join((*known, 'p2p'))}")
    # A sum over and over grows: values that overflow to infinity, or to denormals, would be slower on some CPUs.
    return known[name] if name != "all_reduce" else lambda: (whole.zero_(), known["all_reduce"]())


def _ping_pong(tensor: "torch.Tensor", group: Group) -> Call:
    """To the neighbour in the pair and back; with an odd group the last rank has none."""
    import torch.distributed as dist

    place = group.ranks.index(group.rank)
    if place == len(group.ranks) - 1 and len(group.ranks) % 2:
        return _nothing
    first = place % 2 == 0
    peer = group.ranks[place + 1 if first else place - 1]

    def call() -> None:
        for sends in (first, not first):
            if sends:
                dist.send(tensor, peer, group=group.handle)
            else:
                dist.recv(tensor, peer, group=group.handle)

    return call


def _overlap(
    group: Group, device: str, barrier: Call, synchronise: Call | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of matrix products with a collective under way, and of the products alone, interleaved.

    As many products as take about twice the collective: what can hide has the room to hide.
    """
    import time

    import torch
    import torch.distributed as dist

    tensor = torch.zeros(OVERLAP_BYTES // 4, device=device)
    a, b = (torch.randn(OVERLAP_MATRIX, OVERLAP_MATRIX, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    def once(call: Call) -> float:
        barrier()
        started = time.perf_counter()
        call()
        if synchronise is not None:
            synchronise()
        return time.perf_counter() - started

    once(lambda: dist.all_reduce(tensor, group=group.handle))
    communication_s = once(lambda: dist.all_reduce(tensor, group=group.handle))
    once(lambda: products(1))
    product_s = once(lambda: products(4)) / 4
    wanted = torch.tensor([2 * communication_s / max(product_s, 1e-9)])
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group.handle)
    count = max(4, min(2000, round(wanted.item())))

    def together() -> None:
        work = dist.all_reduce(tensor, group=group.handle, async_op=True)
        products(count)
        work.wait()

    samples = sample(
        {"together": together, "alone": lambda: products(count)},
        Rule(warmup=1, repetitions=5),
        before=barrier,
        synchronise=synchronise,
    )
    return samples["together"], samples["alone"]
