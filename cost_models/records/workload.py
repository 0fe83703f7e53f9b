"""What is trained on: the length of a sequence, the batch, the number format and the optimizer."""

from dataclasses import dataclass
from enum import StrEnum

from cost_models.records.codec import MOST_WHOLE, RecordError


class Precision(StrEnum):
    """The format of the matrix products. Weights, gradients and optimizer state follow the runtime's recipe."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    """Scales by tensor (delayed or current scaling)."""
    MXFP8 = "mxfp8"
    """Scales by blocks of 32 (OCP microscaling)."""
    NVFP4 = "nvfp4"
    """Four bits, scales by blocks of 16."""

    @property
    def is_narrow(self) -> bool:
        """Products of 8 or 4 bits, between activations of 16 bits that are cast for them."""
        return self in (Precision.FP8, Precision.MXFP8, Precision.NVFP4)


class Optimizer(StrEnum):
    """The update rule, which decides the bytes of state per parameter."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step's input. Nothing that Meshwright decides changes it."""

    seq: int
    """Tokens in a sequence."""
    gbs: int
    """Sequences in a step, over all ranks (global batch size)."""
    precision: Precision = Precision.BF16
    """Format of the matrix products."""
    optimizer: Optimizer = Optimizer.ADAMW
    """Update rule."""

    def __post_init__(self) -> None:
        for name in ("seq", "gbs"):
            if not 1 <= getattr(self, name) <= MOST_WHOLE:
                raise RecordError(
                    f"{name}={getattr(self, name)}: a workload has at least one {name}; give a whole number from 1 to {MOST_WHOLE}"
                )

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.seq * self.gbs
