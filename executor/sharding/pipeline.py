"""Pipeline parallelism: which blocks a rank holds, and torch's schedules over them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _PipelineSchedule,
)
from torch.distributed.tensor import DTensor

from cost_models.records import Decision, Schedule

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits of a micro-batch, its labels) -> its share of the loss."""

SINGLE = {Schedule.GPIPE: ScheduleGPipe, Schedule.ONE_F_ONE_B: Schedule1F1B}
"""Schedules of one stage a device; interleaved 1F1B has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages of this rank and how to run them."""

    decision: Decision
    """The plan."""
    modules: tuple[nn.Module, ...]
    """Virtual stages of this rank, in order, wrapped."""
    virtual: tuple[int, ...]
    """Their numbers."""
    mesh: DeviceMesh
    """Axis pp."""
    device: torch.device
    """Where they run."""
    hidden: int
    """Width of the residual stream."""
    boundary_dtype: torch.dtype
    """Of the hidden states that travel between stages."""
    seq_parts: int
    """Parts of a sequence that travel apart: tp with sequence parallelism."""

    def schedule(self, num_rows: int, seq: int, loss: LossFunction) -> _PipelineSchedule:
        """torch's schedule for micro-batches of (num_rows, seq) token ids.

        Shapes are told in advance, so the first step runs no extra pass to find them. The loss says its share of the
        whole batch, hence no scaling here.
        """
        stages = [self._stage(*pair, num_rows, seq) for pair in zip(self.modules, self.virtual, strict=True)]
        kind, count = self.decision.layout.schedule, self.decision.num_micro_batches
        if kind in SINGLE:
            return SINGLE[kind](stages[0], count, loss_fn=loss, scale_grads=False)
        assert kind == Schedule.INTERLEAVED, kind
        return ScheduleInterleaved1F1B(stages, count, loss_fn=loss, scale_grads=False)

    def _stage(self, module: nn.Module, virtual: int, num_rows: int, seq: int) -> PipelineStage:
        num_stages = len(self.decision.stages)
        hidden = torch.empty(
            num_rows, seq // self.seq_parts, self.hidden, dtype=self.boundary_dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(num_rows, seq, dtype=torch.long, device="meta")
        return PipelineStage(
            module,
            virtual,
            num_stages,
            self.device,
            input_args=tokens if virtual == 0 else hidden,
            output_args=hidden,  # of the last stage nobody receives any
            group=self.mesh.get_group(),
        )


@torch.no_grad()
def sum_tied_gradients(weight: nn.Parameter, mesh: DeviceMesh) -> None:
    """Add the gradients of a weight whose copies lie in the first and the last stage; called on the ranks of these two.

    Both add the same two numbers, so the copies stay equal bit by bit under any optimizer.
    """
    group = mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
    assert mine is not None
    mine = mine.contiguous()
    other = torch.empty_like(mine)
    peer = ranks[-1] if dist.get_rank() == ranks[0] else ranks[0]
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    ):
        work.wait()
    (weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad).add_(other)
