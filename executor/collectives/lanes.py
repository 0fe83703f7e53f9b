"""Collectives of several stages behind the backward pass: each starts when the one before it is done, and nobody blocks.

gloo matches the collectives of a group by the order in which each rank starts them. A stage that starts when another one
ends would start in the order of endings, which differs between ranks; so a lane starts what was queued first, first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOfCollective:
    """One collective of an algorithm."""

    lane: "Lane"
    """Where it queues."""
    launch: Callable[[], dist.Work]
    """Starts it, without waiting."""
    finish: Callable[[], None] | None = None
    """What is done with its result before the next stage; None = nothing."""


class Lane:
    """A process group whose collectives start in one order on every rank: that of queueing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._started: Future[Any] = _done()

    def queue(self, ready: Future[Any], stage: StageOfCollective) -> Future[Any]:
        """Start a stage once `ready` is done and all that queued before have started; the future of its end."""
        started: Future[Any] = Future()
        ended: Future[Any] = Future()
        before, self._started = self._started, started

        def settle(work: Future[Any]) -> None:
            try:
                work.value()
                if stage.finish is not None:
                    stage.finish()
            except Exception as error:  # noqa: BLE001  (on a thread of gloo nobody would see it; the future carries it)
                ended.set_exception(error)
            else:
                ended.set_result(None)

        def start(_: Future[Any]) -> None:
            try:
                ready.value()
                work = stage.launch()
            except Exception as error:  # noqa: BLE001  (as above)
                ended.set_exception(error)
                started.set_result(None)
                return
            started.set_result(None)
            work.get_future().add_done_callback(settle)

        collect_all([ready, before]).add_done_callback(start)
        return ended


def _done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def run_stages(stages: Sequence[StageOfCollective], result: Tensor) -> Future[Tensor]:
    """Start an algorithm's stages, one after the other; the future of `result`, which they fill in place.

    On a GPU a wait is the stream's, not the process's, so all are launched at once on a stream of their own.
    """
    if result.device.type == "cuda":
        return _run_on_stream(stages, result)
    ended = _done()
    for stage in stages:
        ended = stage.lane.queue(ended, stage)

    def value(future: Future[Any]) -> Tensor:
        future.value()  # raises what a stage raised
        return result

    return ended.then(value)


def _run_on_stream(stages: Sequence[StageOfCollective], result: Tensor) -> Future[Tensor]:
    stream = torch.cuda.Stream(result.device)
    stream.wait_stream(torch.cuda.current_stream(result.device))
    future: Future[Tensor] = Future(devices=[result.device])
    with torch.cuda.stream(stream):
        for stage in stages:
            stage.launch().wait()
            if stage.finish is not None:
                stage.finish()
        result.record_stream(stream)
        future.set_result(result)  # notes the current stream, on which whoever waits for the future will wait
    return future
