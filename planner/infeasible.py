"""What to change where nothing fits: single changes, each tried out by solving again with it."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from cost_models.problem import Problem
from planner.errors import InfeasibleError
from planner.feasible import is_feasible
from planner.incumbent import least_memory_bytes
from planner.priced import Priced
from planner.readers.pins import Pins

_MOST_COUNTS = 64
_MOST_PROBED = 24
_GIB = 2**30


def nothing_fits(problem: Problem, pins: Pins, worlds: Collection[int] | None, priced: Priced) -> InfeasibleError:
    device = problem.cluster.pools[0].kind.device
    world = int(priced.space.cells.world.max())
    told = [change for change in _changes(problem, pins, priced) if change]
    pinned = f" with the pins {pins}" if pins.pins else ""
    return InfeasibleError(
        f"{problem.model.name} fits on {world} x {device.name} under no layout{pinned}: "
        f"{priced.memory_limit_bytes / _GIB:.1f} GiB of each device are usable, and {len(priced.space):,} layouts were tried"
        + ("; with any one of these it fits:" if told else ""),
        relaxations=tuple(told),
    )


def _changes(problem: Problem, pins: Pins, priced: Priced) -> Iterator[str]:
    """Single changes with which a plan exists, each tried out."""
    yield _more_gpus(problem, pins)
    least = _least_memory(priced)
    if np.isfinite(least):
        yield f"the same GPUs with {least / _GIB:.1f} GiB usable each instead of {priced.memory_limit_bytes / _GIB:.1f}"
    for dropped in pins.pins:
        others = Pins(pins=tuple(pin for pin in pins.pins if pin is not dropped))
        if is_feasible(problem, others):
            yield f"without the pin {dropped}"
    seq = problem.workload.seq
    for shorter in (seq // 2, seq // 4, seq // 8):
        if shorter >= 1 and is_feasible(replace(problem, workload=replace(problem.workload, seq=shorter)), pins):
            yield f"sequences of {shorter} tokens instead of {seq}"
            break


def _more_gpus(problem: Problem, pins: Pins) -> str:
    """The least number of nodes of the same kind, found by doubling and then one by one."""
    pool = problem.cluster.pools[0]
    if len(problem.cluster.pools) > 1:
        return ""

    def on(num_nodes: int) -> bool:
        cluster = replace(problem.cluster, pools=(replace(pool, num_nodes=num_nodes),), exceptions=())
        return is_feasible(replace(problem, cluster=cluster), pins)

    most = 2 * pool.num_nodes
    while not on(most):
        most *= 2
        if most * pool.kind.gpus_per_node > max(4096, 64 * problem.cluster.num_gpus):
            return ""
    between = range(max(pool.num_nodes, most // 2) + 1, most)
    each = pool.kind.gpus_per_node
    if len(between) > _MOST_COUNTS:
        return f"{most * each} GPUs of this kind would do, {most // 2 * each} would not"
    least = next((num_nodes for num_nodes in between if on(num_nodes)), most)
    return f"{least * each} GPUs of this kind: the least number of whole nodes with which a plan was found"


def _least_memory(priced: Priced) -> float:
    """The least bytes of a device with which a plan exists, over the cells that need least by their floors (v = 1)."""
    single = np.flatnonzero(priced.space.cells.vpp == 1)
    order = single[np.argsort(priced.memory_floors_bytes[single], kind="stable")][:_MOST_PROBED]
    roomy = replace(priced, memory_limit_bytes=np.inf)
    thrifty = replace(roomy, space=replace(priced.space, recompute_kinds=(priced.thriftiest_kind,)))
    return min((least_memory_bytes(thrifty.cell(index, np.inf)) for index in order.tolist()), default=np.inf)
