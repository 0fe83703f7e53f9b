"""Is the realised layout the planned one? Read from the live modules and groups, not from what built them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from executor.mesh import AXES
from executor.parallelize import Parallel
from executor.sharding.recompute import kind_of
from executor.stage import StageModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One question and its answer on one rank."""

    question: str
    ok: bool
    detail: str = ""
    """What was found."""
    cause: str = ""
    """What it comes from, where that is known; led by a colon."""


def layout_findings(parallel: Parallel) -> Iterator[Finding]:
    """Ranks, transport, parameters, and for each virtual stage its blocks, recompute and sharding. On every rank."""
    wanted, found = planned_ranks(parallel), parallel.mesh.mesh.flatten().tolist()
    yield Finding(question="ranks", ok=wanted == found, detail=f"planned {wanted}, found {found}")
    faults = list(_transport_faults(parallel, wanted))
    yield Finding(question="transport", ok=not faults, detail="; ".join(faults))
    fault = _parameter_fault(parallel)
    yield Finding(question="parameters", ok=fault is None, detail=fault or "")
    for virtual, stage, module in zip(parallel.virtual, parallel.stages, parallel.modules, strict=True):
        planned = parallel.decision.stages[virtual]
        blocks = _held_blocks(stage, parallel.decision.num_blocks)
        expected = list(range(planned.blocks[0], planned.blocks[1] + 1))
        detail = f"stage {virtual}: planned {expected}, holds {blocks}"
        yield Finding(question="blocks", ok=blocks == expected, detail=detail)
        kinds = [kind_of(layer) for _, layer in stage.named_layers()]
        order = [kind for kind, count in planned.recompute.items() for _ in range(count)]
        order += ["none"] * (len(kinds) - len(order))
        detail = f"stage {virtual}: planned {order}, found {kinds}"
        yield Finding(question="recompute", ok=kinds == order, detail=detail)
        faults = list(_sharding_faults(parallel, stage, module))
        yield Finding(question="sharding", ok=not faults, detail=f"stage {virtual}: {'; '.join(faults[:3])}")


def planned_ranks(parallel: Parallel) -> list[int]:
    """Ranks in mesh order, each coordinate's position worked out digit by digit from the plan's order."""
    layout, ranks = parallel.decision.layout, parallel.decision.ranks
    degrees = [getattr(layout, axis) for axis in AXES]
    found = []
    for number in range(layout.world):
        coordinate, rest = {}, number
        for axis, degree in zip(reversed(AXES), reversed(degrees), strict=True):
            rest, coordinate[axis] = divmod(rest, degree)
        position, stride = 0, 1
        for axis in ranks.order:
            if axis in coordinate:
                position += coordinate[axis] * stride
                stride *= getattr(layout, axis)
        found.append(position if ranks.permutation is None else ranks.permutation[position])
    return found


# Transport -----------------------------------------------------------------------------------------------------------


def _transport_faults(parallel: Parallel, wanted: Sequence[int]) -> Iterator[str]:
    """Send this rank's number through the group of each axis: do the planned ranks answer, and no others?"""
    layout, rank = parallel.decision.layout, dist.get_rank()
    planned = torch.tensor(wanted).reshape([getattr(layout, axis) for axis in AXES])
    coordinate = (planned == rank).nonzero()[0].tolist()
    neighbours = {}
    for dim, axis in enumerate(AXES):
        place: list[int | slice] = list(coordinate)
        place[dim] = slice(None)
        neighbours[axis] = planned[tuple(place)].tolist()
    for axis in AXES:
        size = parallel.mesh[axis].size()
        if size == 1 and getattr(layout, axis) == 1:
            continue
        group = parallel.mesh[axis].get_group()
        answers = [torch.zeros(1, dtype=torch.long, device=parallel.device) for _ in range(size)]
        dist.all_gather(answers, torch.tensor([rank], device=parallel.device), group=group)
        found = [int(answer) for answer in answers]
        if found != sorted(neighbours[axis]):
            swapped = next((other for other in AXES if other != axis and found == neighbours[other]), None)
            where = f", which are those of {swapped}: the axes are swapped" if swapped else ""
            yield f"axis {axis}: planned ranks {neighbours[axis]}, ranks {found} answered{where}"
        backend, device = dist.get_backend(group), parallel.device.type
        if device == "cuda" and "nccl" not in str(backend):
            yield f"axis {axis}: tensors on a GPU travel by {backend}, not NCCL"


# Parameters ----------------------------------------------------------------------------------------------------------


def _parameter_fault(parallel: Parallel) -> str | None:
    """Count every parameter over all ranks, copies counted once; None where the sums are those of the undivided model."""
    own: dict[str, tuple[int, int]] = {}
    for name, parameter in parallel.named_weights():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own[name] = (0 if local.is_meta else local.numel(), parallel.num_copies(parameter))
    everywhere: list[dict[str, tuple[int, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    found: dict[str, Fraction] = {}
    for rank_has in everywhere:
        for name, (count, copies) in rank_has.items():
            found[name] = found.get(name, Fraction(0)) + Fraction(count, copies)
    wrong = [name for name, count in parallel.whole_sizes.items() if found.get(name, 0) != count]
    extra = sorted(set(found) - set(parallel.whole_sizes))
    if not wrong and not extra:
        return None
    held, planned = float(sum(found.values())), sum(parallel.whole_sizes.values())
    first = wrong[0] if wrong else extra[0]
    return (
        f"planned {planned:,}, all ranks together hold {held:,.0f}: {first} has {float(found.get(first, 0)):,.0f} of "
        f"{parallel.whole_sizes.get(first, 0):,}"
    )


# One stage -----------------------------------------------------------------------------------------------------------


def _held_blocks(stage: StageModule, num_blocks: int) -> list[int]:
    """Blocks of which this stage has parameters with values."""
    names = [name for name, parameter in stage.named_parameters(remove_duplicate=False) if not parameter.is_meta]
    layer = re.compile(re.escape(stage.anatomy.layers) + r"\.(\d+)\.")
    blocks = {int(match.group(1)) + 1 for name in names if (match := layer.match(name))}
    if any(name.startswith(stage.anatomy.embedding + ".") for name in names):
        blocks.add(0)
    if any(name.startswith(stage.anatomy.head + ".") for name in names):
        blocks.add(num_blocks - 1)
    return sorted(blocks)


def _sharding_faults(parallel: Parallel, stage: StageModule, module: nn.Module) -> Iterator[str]:
    layout = parallel.decision.layout
    sharded = layout.zero >= 2
    if layout.dp > 1 and not sharded and not isinstance(module, (DistributedDataParallel, ReplicateModule)):
        yield f"dp_replicate={layout.dp_replicate}, but nothing averages the gradients"
    if sharded:
        for name, part in stage.named_modules():
            if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group) is not None:
                frees = group.post_forward_mesh_info is not None
                if frees != (layout.zero == 3):
                    yield f"{name or 'the root'} {'frees' if frees else 'keeps'} its parameters after the forward pass under zero={layout.zero}"
    for name, parameter in stage.named_parameters():
        held = _placements(parameter)
        norm = parameter.dim() == 1 and "norm" in name.rsplit(".", 2)[-2]
        for axis, expected in (("dp_shard", sharded), ("tp", layout.tp > 1 and not norm)):
            is_sharded = axis in held and not held[axis].is_replicate()
            bias_of_row = axis == "tp" and name.endswith("bias") and not is_sharded  # added once, after the sum
            if is_sharded != expected and not bias_of_row:
                yield f"{name} is {'' if is_sharded else 'not '}sharded over {axis}"


def _placements(parameter: nn.Parameter) -> dict[str, Placement]:
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    return dict(zip(names, parameter.placements, strict=True))
