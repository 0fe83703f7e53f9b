"""The blocks of one virtual stage as a module of its own, under the names that they have in the whole module."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from executor.anatomy import Anatomy, part_of

WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "module.")
"""What torch's wrappers put into the names of parameters."""


class StageModule(nn.Module):
    """Blocks first..last (inclusive) of a decoder: token ids or hidden states in, hidden states or logits out.

    Nothing is copied: the parts are the given module's own. With sequence parallelism hidden states are (B, T/tp, hidden).
    """

    def __init__(self, module: nn.Module, anatomy: Anatomy, blocks: tuple[int, int], num_blocks: int) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.block_span = blocks
        self.sequence_parts = 1
        self.compute_dtype: torch.dtype | None = None
        self.has_embedding = blocks[0] == 0
        self.has_head = blocks[1] == num_blocks - 1
        layers = range(max(blocks[0], 1), min(blocks[1], num_blocks - 2) + 1)
        self.layer_names = tuple(f"{anatomy.layers}.{block - 1}" for block in layers)
        names = [anatomy.embedding] if self.has_embedding else []
        names += self.layer_names
        names += [anatomy.norm, anatomy.head] if self.has_head else []
        for name in (*names, anatomy.rotary):
            part = part_of(module, name)
            assert part is not None, name
            self.place(name, part)
        self.unit_names = tuple(names)

    def place(self, name: str, part: nn.Module) -> None:
        """Place a part under its dotted name."""
        *folders, leaf = name.split(".")
        place: nn.Module = self
        for folder in folders:
            if folder not in place._modules:
                place.add_module(folder, nn.Module())
            place = place.get_submodule(folder)
        place.add_module(leaf, part)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules of the layers, in their order."""
        folder = self.get_submodule(self.anatomy.layers) if self.layer_names else self
        for name in self.layer_names:
            yield name, getattr(folder, name.rpartition(".")[2])

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, T) or hidden states (B, T/tp, hidden) -> hidden states, or logits (B, T, vocab)."""
        seq = x.shape[1] * (1 if self.has_embedding else self.sequence_parts)
        if self.has_embedding:
            x = self.get_submodule(self.anatomy.embedding)(x)
            if self.compute_dtype is not None:
                x = x.to(self.compute_dtype)
        if self.layer_names:
            positions = torch.arange(seq, device=x.device)[None]
            rope = self.get_submodule(self.anatomy.rotary)(x, positions)
            for _, layer in self.named_layers():
                x = layer(x, position_embeddings=rope)
        if self.has_head:
            x = self.get_submodule(self.anatomy.head)(self.get_submodule(self.anatomy.norm)(x))
        return x


def original_name(name: str) -> str:
    """The name of a parameter in the whole module, without what wrappers added."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
