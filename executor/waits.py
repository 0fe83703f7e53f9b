"""How long a rank stands still for each collective: seconds in waits, by axis and operation.

A wait is seen where Python waits: for a Work that was started through a process group (DDP's own reducer waits in C++, and
says by its logging how much of its communication nothing hid), and for the tensors of functional collectives, as DTensor
uses them. On gloo a wait blocks the process, so this is exactly what communication costs beside compute. On a GPU it blocks
the stream: there the trace says it (`run --trace`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "p2p",
    "recv": "p2p",
    "broadcast": "broadcast",
}
"""Method of torch's ProcessGroup -> the collective that it starts."""
FUNCTIONAL = {
    "all_reduce": ("all_reduce", 2),
    "all_gather_single": ("all_gather", 2),
    "all_gather_tensor": ("all_gather", 2),
    "all_gather_tensor_autograd": ("all_gather", 2),
    "reduce_scatter_single": ("reduce_scatter", 3),
    "reduce_scatter_tensor": ("reduce_scatter", 3),
    "reduce_scatter_tensor_autograd": ("reduce_scatter", 3),
    "all_to_all_single": ("all_to_all", 3),
    "all_to_all_single_autograd": ("all_to_all", 3),
}
"""Functional collective -> what it is, and which of its arguments is the group."""
NS_PER_S = 1e9


class Waits:
    """Sums of seconds by `axis/operation` of one Parallel; one at a time listens."""

    _listening: "Waits | None" = None
    _installed = False

    def __init__(
        self, axes: Iterable[tuple[dist.ProcessGroup, str]], replicas: Iterable[DistributedDataParallel]
    ) -> None:
        groups = tuple(axes)
        self._axis_of: Mapping[str, str] = {group.group_name: axis for group, axis in groups}
        self._group_of = {axis: group for group, axis in groups[::-1]}
        """The first group of each axis: its own."""
        self._replicas = tuple(replicas)
        self.seconds: dict[str, float] = defaultdict(float)
        self.sizes: dict[str, tuple[int, int]] = {}
        """`axis/operation` -> (times that it was started, bytes of the whole tensors) since the last take."""
        self.counting = True
        """Starts are counted: those inside the phases that compute."""
        self.num_events = 0
        self._started: dict[int, str] = {}
        self._functional = "?"

    def listen(self) -> None:
        """Hear every wait of this process from now on."""
        Waits._listening = self
        for replicas in self._replicas:
            replicas._set_ddp_runtime_logging_sample_rate(1)
        if not Waits._installed:
            Waits._installed = True
            _install()

    def note_start(self, group: dist.ProcessGroup, operation: str, arguments: tuple[Any, ...], work: object) -> None:
        """A Work was started."""
        self.num_events += 1
        key = f"{self._axis_of.get(group.group_name, 'all')}/{operation}"
        self._started[id(work)] = key
        self._note_size(key, _num_bytes(operation, arguments))

    def _note_size(self, key: str, num_bytes: int) -> None:
        if self.counting:
            calls, before = self.sizes.get(key, (0, 0))
            self.sizes[key] = (calls + 1, before + num_bytes)

    def note_functional(self, group: object, operation: str, tensor: Tensor) -> None:
        """A functional collective was started; its tensor is waited for before the next one's, but for a few."""
        axis: str | None = None
        if isinstance(group, tuple):
            mesh, dim = group
            axis = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else None
        elif isinstance(group, dist.DeviceMesh):
            axis = group.mesh_dim_names[0] if group.mesh_dim_names else None
        elif isinstance(group, (str, dist.ProcessGroup)):
            axis = self._axis_of.get(group if isinstance(group, str) else group.group_name)
        self.num_events += 1
        self._functional = f"{axis or 'all'}/{operation}"
        ranks = dist.get_world_size(self._group_of[axis]) if axis in self._group_of and operation == "all_gather" else 1
        self._note_size(self._functional, tensor.numel() * tensor.element_size() * ranks)

    def note_wait(self, work: object | None, seconds: float) -> None:
        """A wait for a Work, or for a functional collective's tensor, is over."""
        key = self._functional if work is None else self._started.pop(id(work), "all/?")
        self.num_events += 1
        self.seconds[key] += seconds

    def take(self) -> dict[str, float]:
        """The sums since the last take; with `ddp ` before the key what DDP's reducer exposed, in the step before."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        self._started.clear()
        self.sizes = {}
        exposed = sum(map(_exposed_s, self._replicas))
        if exposed > 0:
            seconds["ddp dp_replicate/all_reduce"] = exposed
        return seconds

    def sizes_of_replicas(self) -> tuple[int, int]:
        """(buckets, bytes) that DDP reduces in a step; (0, 0) where nothing is replicated by it."""
        buckets = [
            int(size)
            for one in self._replicas
            for size in str(one._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")).split(",")
            if size.strip()
        ]
        return len(buckets), sum(buckets)


def _exposed_s(replicas: DistributedDataParallel) -> float:
    """What DDP communicated after the backward pass was through."""
    said: Mapping[str, Any] = replicas._get_ddp_logging_data()
    hidden = float(said.get("backward_compute_comm_overlap_time", 0))
    return max(0.0, float(said.get("backward_comm_time", 0)) - hidden) / NS_PER_S


def _num_bytes(operation: str, arguments: tuple[Any, ...]) -> int:
    """Bytes of the whole tensor, as `cost_models.collectives` counts them: of a gather the output, of a scatter the input."""
    tensors = (
        arguments[1] if operation == "reduce_scatter" and len(arguments) > 1 else arguments[0] if arguments else ()
    )
    found = 0
    for one in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
        for tensor in one if isinstance(one, (list, tuple)) else (one,):
            found += tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
    return found


def _install() -> None:
    """Put listeners around what starts collectives and what waits for them. Costs a look when nobody listens."""
    for name, operation in OPERATIONS.items():
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _starting(getattr(dist.ProcessGroup, name), operation))
    for name, (operation, place) in FUNCTIONAL.items():
        if hasattr(functional, name):
            setattr(functional, name, _starting_functional(getattr(functional, name), operation, place))
    dist.Work.wait = _waiting(dist.Work.wait)
    functional.wait_tensor = _waiting_for_tensor(functional.wait_tensor)


def _starting(start: Callable[..., Any], operation: str) -> Callable[..., Any]:
    def started(self: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        work = start(self, *arguments, **named)
        listening = Waits._listening
        if listening is not None and work is not None:
            listening.note_start(self, operation, arguments, work)
        return work

    return started


def _starting_functional(start: Callable[..., Any], operation: str, place: int) -> Callable[..., Any]:
    def started(*arguments: Any, **named: Any) -> Any:
        listening = Waits._listening
        if listening is not None:
            group = arguments[place] if len(arguments) > place else named.get("group")
            listening.note_functional(group, operation, arguments[0] if arguments else named["self"])
        return start(*arguments, **named)

    return started


def _waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
    def waited(self: dist.Work, *arguments: Any, **named: Any) -> Any:
        listening = Waits._listening
        if listening is None:
            return wait(self, *arguments, **named)
        start_s = time.perf_counter()
        try:
            return wait(self, *arguments, **named)
        finally:
            listening.note_wait(self, time.perf_counter() - start_s)

    return waited


def _waiting_for_tensor(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def waited(tensor: Any) -> Any:
        listening = Waits._listening
        if listening is None:
            return wait(tensor)
        start_s = time.perf_counter()
        try:
            return wait(tensor)
        finally:
            listening.note_wait(None, time.perf_counter() - start_s)

    return waited
