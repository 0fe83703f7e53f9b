"""Checkpoints: what was saved under one layout loads under any other, weights and optimizer, bit for bit.

torch's distributed checkpoint (DCP) writes each parameter under its name in the whole module, with the place of every shard;
reading, each rank takes what its own shards need. A checkpoint is a folder:

    __<rank>_<n>.distcp, .metadata   DCP's own files
    meshwright.json                  written last: parameters, sizes of files, and what the caller wants to find again

A save goes into a folder beside it, which takes the name when all ranks are done: a folder of that name is complete.
All nodes must see the folder, and load with torch that can read what was saved.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from cost_models.records import print_layout
from executor.errors import CheckpointError
from executor.mesh import naming_the_late
from executor.parallelize import Parallel

T = TypeVar("T")

FORM = 1
"""Version of the form of meshwright.json; a reader accepts this one."""
MARKER = "meshwright.json"
"""The file that is written last."""


def save(
    folder: str | Path,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, and the optimizer's state and options, into a new folder; called on every rank between two steps.

    `extra` is plain JSON data that `load` hands back: the step, a scheduler's state. Raises CheckpointError on every rank
    where the folder exists. A crash leaves at most `.<name>.partial`, which the next save of that name removes.
    """
    target = Path(folder).absolute()
    partial = target.with_name(f".{target.name}.partial")
    with naming_the_late():
        _on_first_rank(lambda: _make_room(target, partial))
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(_state(parallel, optimizer), checkpoint_id=partial, planner=planner)
        shapes = _gathered_shapes(parallel)
        marker = {
            "form": FORM,
            "layout": print_layout(parallel.decision.layout),
            "model": shapes,
            "optimizer": type(optimizer).__name__ if optimizer is not None else None,
            "extra": dict(extra or {}),
        }
        _on_first_rank(lambda: _complete(partial, target, marker))


def load(folder: str | Path, parallel: Parallel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read weights, and the optimizer's state and options, whatever layout wrote them; returns `extra`. On every rank.

    Without an optimizer the weights alone are read. Raises CheckpointError on every rank, before anything has changed, where
    the folder is missing, incomplete or truncated, or holds another model or another optimizer.
    """
    source = Path(folder).absolute()
    with naming_the_late():
        marker: dict[str, Any] = _on_first_rank(lambda: _read_marker(source))
        own = {name: list(parameter.shape) for name, parameter in parallel.named_weights()}
        _refuse_together(_other_model(source, marker["model"], own) or _other_optimizer(source, marker, optimizer))
        if optimizer is not None:
            _prepare_optimizer(source, parallel, optimizer)
        state = _state(parallel, optimizer)
        _read(source, state)
        if optimizer is not None:
            _take_plain_values(parallel, optimizer, state)
    extra: dict[str, Any] = marker["extra"]
    return extra


# What is saved -------------------------------------------------------------------------------------------------------


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Key -> tensor or plain value, as DCP takes it; tensors share their storage with the live ones."""
    state: dict[str, Any] = {}
    group_of = {} if optimizer is None else {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parallel.named_weights():
        state[f"model/{name}"] = parameter.detach()
        if optimizer is None or id(parameter) not in group_of:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"state/{key}/{name}"] = value.detach() if isinstance(value, Tensor) else value
        options = {key: value for key, value in group_of[id(parameter)].items() if key != "params"}
        state[f"options/{name}"] = options
    return state


def _gathered_shapes(parallel: Parallel) -> dict[str, list[int]]:
    """Name -> shape of every parameter of the whole model."""
    own = {name: list(parameter.shape) for name, parameter in parallel.named_weights()}
    everywhere: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    return {name: shape for shapes in everywhere for name, shape in shapes.items()}


# On disk -------------------------------------------------------------------------------------------------------------


def _make_room(target: Path, partial: Path) -> None:
    if target.exists():
        raise CheckpointError(
            f"{target} exists: each checkpoint has a folder of its own; name another, or remove it first"
        )
    if partial.exists():
        shutil.rmtree(partial)  # of a save that did not end
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from None


def _complete(partial: Path, target: Path, marker: dict[str, Any]) -> None:
    marker["files"] = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    with (partial / MARKER).open("w", encoding="utf-8") as stream:
        json.dump(marker, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(target)


def _read_marker(source: Path) -> dict[str, Any]:
    """What the marker says; CheckpointError where the folder is not a complete checkpoint."""
    if not source.is_dir():
        partial = source.with_name(f".{source.name}.partial")
        more = f"; {partial.name} beside it is of a save that did not end" if partial.exists() else ""
        raise CheckpointError(f"{source}: no such folder{more}")
    try:
        marker: dict[str, Any] = json.loads((source / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{source}: {MARKER} is missing, so this is no complete checkpoint of executor.save"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{source}: {MARKER} is damaged ({error})") from None
    if marker.get("form") != FORM:
        raise CheckpointError(f"{source}: {MARKER} has form {marker.get('form')!r}; legal here: {FORM}")
    for name, size in marker["files"].items():
        found = (source / name).stat().st_size if (source / name).exists() else None
        if found is None:
            raise CheckpointError(f"{source}: {name} is missing")
        if found != size:
            raise CheckpointError(f"{source}: {name} has {found} bytes, but {size} were written: truncated or changed")
    return marker


# Is it ours? ---------------------------------------------------------------------------------------------------------


def _other_model(source: Path, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> str | None:
    for name, shape in own.items():
        if name not in saved:
            near = ", ".join(list(saved)[:3])
            return f"{source}: holds another model: it has no {name}; it has {near} and {len(saved) - 3} more"
        if saved[name] != shape:
            return f"{source}: holds another model: {name} has shape {saved[name]} there, {shape} here"
    return None


def _other_optimizer(source: Path, marker: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> str | None:
    if optimizer is None:
        return None
    if marker["optimizer"] is None:
        return f"{source}: was saved without an optimizer; load the weights alone: load(folder, parallel)"
    if marker["optimizer"] != type(optimizer).__name__:
        return f"{source}: holds the state of {marker['optimizer']}, the optimizer here is {type(optimizer).__name__}"
    return None


def _prepare_optimizer(source: Path, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the options that were saved, and its states, still empty; CheckpointError before it has changed."""
    metadata = dcp.FileSystemReader(source).read_metadata()
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in parallel.named_weights() if id(parameter) in grouped}
    unknown = next((name for name in names.values() if f"options/{name}" not in metadata.state_dict_metadata), None)
    _refuse_together(unknown and f"{source}: its optimizer did not have {unknown}, the one here has it")
    options: dict[str, Any] = {f"options/{name}": None for name in names.values()}
    _read(source, options)
    _refuse_together(_mixed_groups(source, names, options, optimizer))
    saved: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("state/"):
            _, what, name = key.split("/", 2)
            saved.setdefault(name, {})[what] = entry
    of_name = {name: parameter for name, parameter in parallel.named_weights() if id(parameter) in names}
    _refuse_together(_unknown_division(source, saved, of_name))
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if own:
            group.update(options[f"options/{own[0]}"])
    for name, parameter in of_name.items():
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        states = saved.get(name, {}).items()
        optimizer.state[parameter] = {what: _empty(parameter, entry, group) for what, entry in states}


def _mixed_groups(
    source: Path, names: Mapping[int, str], options: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> str | None:
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for name in own[1:]:
            if options[f"options/{name}"] != options[f"options/{own[0]}"]:
                return f"{source}: {own[0]} and {name} had different options there, but are in one group here"
    return None


def _unknown_division(
    source: Path, saved: Mapping[str, Mapping[str, Any]], of_name: Mapping[str, nn.Parameter]
) -> str | None:
    """A state of another shape than its parameter, which is sharded: torch says nothing of how such a state is divided."""
    for name, parameter in of_name.items():
        for what, entry in saved.get(name, {}).items():
            divided = isinstance(entry, TensorStorageMetadata) and isinstance(parameter, DTensor)
            if divided and entry.size.numel() > 1 and entry.size != parameter.shape:
                return (
                    f"{source}: state {what!r} of {name} has shape {list(entry.size)}, its parameter "
                    f"{list(parameter.shape)}; states of sharded parameters have their shape, or are one number"
                )
    return None


def _empty(parameter: nn.Parameter, entry: Any, group: Mapping[str, Any]) -> Tensor | None:
    """Room for one state; None for what is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # torch's optimizers count steps on the CPU unless they are to run as one kernel
    on_device = entry.size.numel() > 1 or group.get("capturable") or group.get("fused")
    return torch.zeros(entry.size, dtype=dtype, device=parameter.device if on_device else "cpu")


def _take_plain_values(parallel: Parallel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """What a state holds beside tensors, which were filled in place."""
    for name, parameter in parallel.named_weights():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                optimizer.state[parameter][key] = state[f"state/{key}/{name}"]


def _read(source: Path, state: dict[str, Any]) -> None:
    dcp.load(
        state, checkpoint_id=source, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    )


# Together ------------------------------------------------------------------------------------------------------------


def _on_first_rank(work: Callable[[], T]) -> T:
    """Do something on rank 0; its result, or its CheckpointError, on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [work(), None]
        except CheckpointError as error:
            answer = [None, str(error)]
        except OSError as error:
            answer = [None, f"{error.filename}: {error.strerror}"]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    result: T = answer[0]
    return result


def _refuse_together(fault: str | None) -> None:
    """Raise the first fault that any rank has, on every rank."""
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    found = next(filter(None, faults), None)
    if found is not None:
        raise CheckpointError(found)
