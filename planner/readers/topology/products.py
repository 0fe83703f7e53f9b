"""Which device of the table a driver's product is: `NVIDIA H100 80GB HBM3`, `NVIDIA-A100-SXM4-80GB-SHARED`, `AMD Instinct MI300X VF`."""

import re
from dataclasses import replace

from cost_models.data import rows
from cost_models.records import Device
from planner.errors import InputError
from planner.readers.cluster_facts import device_from_facts
from planner.readers.node_presets import device

_OTHER_NAMES = (
    (re.compile(r"\bgh200\b.*"), "gh200"),  # what follows is the memory of its processor
    (re.compile(r"\bh100[ -]nvl\b"), "h100-pcie"),
    (re.compile(r"\b(a100|v100s?)[ -]pcie\b"), r"\1"),
    (re.compile(r"\b(mi3\d\dx)\b.*"), r"\1"),  # OAM, VF, HF
    (re.compile(r"\b(h200)[ -]nvl\b"), r"\1"),
    (re.compile(r"\bh100-mega\b"), "h100"),  # GKE's a3-megagpu
    (re.compile(r"\bh20-3e\b"), "h20"),  # the same with 141 GB
    (re.compile(r"[-. ]*\.\.\.$"), ""),  # nvidia-smi cuts long names
    (re.compile(r"\btesla[ -]"), ""),
    (re.compile(r"[ -](?:shared|dgxs|pg5\d\d\S*)\b"), ""),
    (re.compile(r"\b(geforce|quadro)[ -]"), ""),
    (re.compile(r"[ -]sxm\d?\b"), ""),
)
"""Names of drivers, labels and clouds -> names of the table; the first of these words decides nothing else."""
_CLOSE = 0.1
"""How far shown memory may be from the table's: drivers keep some for themselves."""


def device_of(product: str, memory_bytes: int | None, source: str) -> Device:
    """The device that a product is, told apart by its memory where the name says too little.

    Raises InputError, led by `source`, where the table does not have it.
    """
    name = re.sub(r"[_\s]+", " ", product.strip().lower())
    for pattern, word in _OTHER_NAMES:
        name = pattern.sub(word, name)
    name = re.sub(r"^(?:nvidia|amd)[ -]", "", name).replace("instinct ", "")
    return _with_memory(_named(name, memory_bytes, source), memory_bytes)


def _named(name: str, memory_bytes: int | None, source: str) -> Device:
    """The device of the table that has this name."""
    try:
        return device_from_facts(name)
    except InputError as error:
        close = [
            key
            for key, row in rows("devices").items()
            if memory_bytes is not None
            and re.sub(r"[^a-z0-9]", "", row["model"]) == re.sub(r"[^a-z0-9]", "", name)
            and abs(row["memory_bytes"] / memory_bytes - 1) < _CLOSE
        ]
        if len(close) == 1:
            return device(close[0])
        raise InputError(f"{source}: {error}; or say gpu=NAME, one of those known") from None


def _with_memory(found: Device, memory_bytes: int | None) -> Device:
    """The device with the memory that its driver shows, where that is another variant's."""
    if memory_bytes is None or abs(found.memory_bytes / memory_bytes - 1) < _CLOSE:
        return found
    return replace(found, memory_bytes=memory_bytes)
