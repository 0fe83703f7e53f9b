"""What is checked where: the device as the planner knows it, and sizes that suit it."""

from dataclasses import dataclass, replace

import torch

from cost_models.records import Cluster, Model, Precision
from planner.readers.models import read_model
from planner.readers.node_presets import cluster_names, local_cluster, preset_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device and what to run on it."""

    name: str
    """As the driver says it."""
    device: torch.device
    """Where tensors lie."""
    cluster: Cluster
    """The device alone, as the planner knows it."""
    precision: Precision
    """Of products, attention and the block."""
    products: tuple[tuple[int, int, int], ...]
    """(m, n, k) of the curve of products."""
    attentions: tuple[tuple[int, int, int, int], ...]
    """(batch, sequence, heads, head_dim) of the curve of causal attention."""
    model: Model
    """The block, a few times."""
    seq: int
    """Tokens of a sequence of the block."""
    most_mbs: int
    """Sequences with which the true out-of-memory is tried at first; doubled until the promise is no."""

    @property
    def is_gpu(self) -> bool:
        """It has an allocator of its own, which may run out."""
        return bool(self.device.type == "cuda")


def gpu() -> Place | None:
    """The first GPU that torch sees; None where there is none, or the planner does not know it."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    known = preset_of(name, torch.cuda.get_device_properties(0).total_memory)
    if known is None:
        return None
    model = replace(read_model("llama3-8b"), name="two layers of llama3-8b", num_layers=2)
    tokens = (128, 512, 2048, 8192, 32768)
    widths = ((4096, 4096), (14336, 4096), (4096, 14336))
    return Place(
        name=name,
        device=torch.device("cuda", 0),
        cluster=preset_cluster(known, 1),
        precision=Precision.BF16,
        products=tuple((m, n, k) for n, k in widths for m in tokens),
        attentions=tuple((batch, seq, 32, 128) for batch, seq in ((16, 512), (8, 2048), (2, 8192), (1, 16384))),
        model=model,
        seq=4096,
        most_mbs=8,
    )


def preset_of(name: str, memory_bytes: int) -> str | None:
    """The preset of a device by the driver's name for it: the longest whose words are all in it, the nearest memory first."""
    said = name.lower().replace("-", " ").split()
    found = []
    for preset in cluster_names():
        device = preset_cluster(preset, 1).pools[0].kind.device
        words = [word for word in preset.split("-") if not word.isdecimal()]
        if words and all(any(word == part for part in said) for word in words):
            found.append((-len(words), abs(device.memory_bytes - memory_bytes), preset))
    return min(found)[2] if found else None


def dry() -> Place:
    """A CPU and sizes of a few milliseconds: every line of the check but those that need a GPU's allocator."""
    return Place(
        name="cpu",
        device=torch.device("cpu"),
        cluster=local_cluster(1, 2 << 30, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=1e10),
        precision=Precision.FP32,
        products=((64, 64, 64), (256, 256, 64)),
        attentions=((1, 64, 4, 16),),
        model=Model(name="small", num_layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=256),
        seq=32,
        most_mbs=1024,
    )
