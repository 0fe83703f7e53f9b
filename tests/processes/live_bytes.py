"""How many bytes of tensors live in this process: every storage that an operation makes, until it is freed."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active: `held` is what lives now, `peak` the most since `reset`. Sizes of storages are asked anew at each
    operation, since FSDP frees and fills one in place."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its local operations come here one by one
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor):
                self.add(one)
        self.peak = max(self.peak, self.held)
        return found

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor that was made while this was not active."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        self._storages[id(storage)] = weakref.ref(storage)

    @property
    def held(self) -> int:
        """Bytes now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
                continue
            total += storage.nbytes()
        return total

    def reset(self) -> None:
        """Begin a new peak."""
        self.peak = self.held
