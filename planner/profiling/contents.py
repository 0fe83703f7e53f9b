"""What is in a user's module, as plain data. Runs as a process of its own, started by planner.profiling.trace.

The module is made on the meta device, where parameters have shapes and no values, so that a model of any size fits; a
factory that cannot do that is called again on the CPU. Nothing is judged here: planner.profiling.structure does that.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cost_models.records import save
from planner.profiling.factory import FactoryError, factory_of, made_by

if TYPE_CHECKING:
    from torch import nn

STAGE_FILE, CONTENTS_FILE, ERROR_FILE = "stage.txt", "contents.json", "error.txt"
"""What this process leaves in its folder: what it is at, and one of the other two."""
HEAD_DIM_NAMES = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_k", "kv_channels")
HEADS_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_q_heads", "nhead", "heads")
WINDOW_NAMES = ("sliding_window", "window_size")
"""Attributes under which modules and their configurations hold what no shape tells."""
CONFIG_NAMES = ("config", "args", "params", "model_args", "hparams", "cfg")
"""Attributes under which modules hold their configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter or a buffer."""

    name: str
    """Dotted, from the module."""
    shape: tuple[int, ...]
    """Sizes of its dimensions."""
    same_as: str | None = None
    """The earlier name of the very same tensor; null = this is its first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A ModuleList, ModuleDict or Sequential."""

    children: tuple[str, ...]
    """Dotted names of its children."""
    kinds: tuple[str, ...]
    """Their types, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A module as plain data."""

    kind: str
    """Its type."""
    device: str
    """Where it was made: meta or cpu."""
    parameters: tuple[Tensor, ...]
    """All parameters, those with two names twice."""
    buffers: tuple[Tensor, ...]
    """All buffers that a checkpoint holds."""
    embeddings: tuple[str, ...]
    """Names of the nn.Embedding in it."""
    sequences: tuple[Sequence, ...]
    """Containers of modules, outer ones first."""
    numbers: Mapping[str, Mapping[str, int]]
    """Module's name -> the heads, widths of heads and windows that it or its configuration states."""
    config: Mapping[str, Any] | None = None
    """Configuration of the Hugging Face module that holds all parameters; null = there is none."""


def main(factory: str, folder: str) -> NoReturn:
    """Leave in `folder` what is in the module that `factory` makes, or what went wrong in words."""
    place = Path(folder)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks with it where this process hangs
    try:
        save(_contents(factory, place), place / CONTENTS_FILE)
    except FactoryError as error:
        (place / ERROR_FILE).write_text(str(error), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads that a user's module left behind keep nobody waiting


def _contents(factory: str, place: Path) -> Contents:
    def at(stage: str) -> None:
        (place / STAGE_FILE).write_text(stage, encoding="utf-8")

    at("importing torch")
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path.cwd()))
    name = factory.partition(":")[0]
    at(f"importing {name}")
    build = factory_of(factory)
    at(f"calling {factory}() on the meta device")
    device = "meta"
    try:
        with torch.device(device):
            made = made_by(build)
    except BaseException:  # noqa: BLE001 (whatever a user's code raises on meta, the CPU's answer is the one that counts)
        device = "cpu"
        at(f"calling {factory}() on the CPU, since it cannot be made on the meta device")
        made = made_by(build)
    at(f"reading what is in {type(made).__name__}")
    return contents_of(made, device)


# A module as data --------------------------------------------------------------------------------------------------


def contents_of(module: "nn.Module", device: str) -> Contents:
    """What is in a module: names, shapes, containers, and the numbers that it states."""
    from torch import nn

    modules = dict(module.named_modules(remove_duplicate=False))
    containers = [
        (
            name,
            [(key, child) for key, child in part._modules.items() if child is not None],
        )  # a child twice counts twice
        for name, part in modules.items()
        if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    ]
    kept = set(module.state_dict())
    parameters = _tensors(module.named_parameters(remove_duplicate=False))
    numbers = {name: _numbers(part) for name, part in modules.items()}
    return Contents(
        kind=f"{type(module).__module__}.{type(module).__qualname__}",
        device=device,
        parameters=parameters,
        buffers=_tensors((name, one) for name, one in module.named_buffers() if name in kept),
        embeddings=tuple(name for name, part in modules.items() if isinstance(part, nn.Embedding)),
        sequences=tuple(
            Sequence(
                children=tuple(f"{name}.{key}" if name else key for key, _ in children),
                kinds=tuple(f"{type(child).__module__}.{type(child).__qualname__}" for _, child in children),
            )
            for name, children in containers
            if children
        ),
        numbers={name: found for name, found in numbers.items() if found},
        config=_config(modules, {id(one) for one in module.parameters()}),
    )


def _tensors(named: Any) -> tuple[Tensor, ...]:
    first: dict[int, str] = {}
    found = []
    for name, one in named:
        earlier = first.setdefault(id(one), name)
        found.append(Tensor(name=name, shape=tuple(one.shape), same_as=None if earlier == name else earlier))
    return tuple(found)


def _numbers(module: "nn.Module") -> dict[str, int]:
    """Whole numbers of known names; the module's own before its configuration's."""
    sources: list[Any] = [module, *(getattr(module, name, None) for name in CONFIG_NAMES)]
    found: dict[str, int] = {}
    for source in sources:
        for name in (*HEAD_DIM_NAMES, *HEADS_NAMES, *WINDOW_NAMES):
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                found.setdefault(name, value)
    return found


def _config(modules: "Mapping[str, nn.Module]", parameters: set[int]) -> dict[str, Any] | None:
    """The configuration of the first module that has one in Hugging Face's form and all of the parameters."""
    for part in modules.values():
        to_dict = getattr(getattr(part, "config", None), "to_dict", None)
        if callable(to_dict) and {id(one) for one in part.parameters()} == parameters:
            config = json.loads(json.dumps(to_dict(), default=str))
            return config if isinstance(config, dict) and config.get("model_type") else None
    return None
