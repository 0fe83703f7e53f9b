"""From a plan's `collectives` to what averages the gradients: what is legal, the groups, and NCCL's environment."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_models.records import Binding, CollectiveChoice, Decision
from executor.collectives.algorithms import Flat, Hierarchical, Ring, Sum
from executor.collectives.hook import Synchronisation
from executor.collectives.nodes import build_hierarchy, by_node
from executor.errors import RefusedError
from executor.mesh import AXES, device_type, rank_tensor

AXIS = "dp_replicate"
"""The axis whose collective can be chosen here: the sum over replicas."""
GLOO_ALGORITHMS = ("default", "ring", "hierarchical")
"""default: gloo's own all-reduce over all replicas."""
NCCL_ALGORITHMS = ("default", "ring", "tree", "hierarchical")
"""ring and tree are NCCL's own, chosen by its environment."""
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
BYTES_PER_MIB = 2**20


def _decided(decision: Decision) -> CollectiveChoice | None:
    choice = decision.collectives.get(AXIS)
    return choice if choice is not None and choice.binding is Binding.DECIDED else None


def refused_choices(decision: Decision) -> str | None:
    """What is wrong with the algorithms that a decision insists on, in words; None = nothing."""
    for axis, other in decision.collectives.items():
        if other.binding is Binding.DECIDED and axis != AXIS and other != _plain(other):
            return (
                f"collectives.{axis} decides on {other.algorithm!r}: only the sum of gradients over replicas can be chosen "
                f"here; legal: binding predicted, or algorithm default, for every axis but {AXIS}"
            )
    choice, layout = _decided(decision), decision.layout
    if choice is None or choice == _plain(choice):
        return None
    if layout.zero or layout.tp > 1:
        return (
            f"collectives.{AXIS} decides on {choice.algorithm!r} with zero={layout.zero}, tp={layout.tp}: torch lets a hook of "
            "ours do that sum in DDP alone; legal: zero=0 with tp=1, or algorithm default"
        )
    on_cpu = device_type() == "cpu"
    legal = GLOO_ALGORITHMS if on_cpu else NCCL_ALGORITHMS
    if choice.algorithm not in legal:
        return f"collectives.{AXIS}: algorithm {choice.algorithm!r}; legal with {'gloo' if on_cpu else 'NCCL'}: {', '.join(legal)}"
    if choice.compression == "bf16" and on_cpu:
        return f"collectives.{AXIS}: compression bf16 needs NCCL, torch refuses it on gloo; legal: fp16, or none"
    return None


def _plain(choice: CollectiveChoice) -> CollectiveChoice:
    """What a runtime does when nobody says anything."""
    return CollectiveChoice(algorithm="default", binding=choice.binding)


def refused_hierarchy(decision: Decision, ranks_per_node: int) -> str | None:
    """Why a hierarchical sum finds no hierarchy among the plan's ranks; None where it does, or is not asked for."""
    choice = _decided(decision)
    if choice is None or choice.algorithm != "hierarchical":
        return None
    try:
        for ranks in _groups(rank_tensor(decision)):
            by_node(ranks, ranks_per_node)
    except RefusedError as error:
        return f"collectives.{AXIS}: {error}"
    return None


def _groups(ranks: torch.Tensor) -> list[list[int]]:
    """All groups of the axis, each with its ranks in order."""
    last = ranks.movedim(AXES.index(AXIS), -1)
    groups: list[list[int]] = last.reshape(-1, last.shape[-1]).tolist()
    return groups


def synchronisation_of(decision: Decision, mesh: DeviceMesh, ranks_per_node: int) -> Synchronisation | None:
    """What averages gradients over replicas; None where torch does it by itself. A collective of all ranks."""
    choice = _decided(decision)
    if choice is None or choice == _plain(choice) or decision.layout.dp_replicate == 1:
        return None
    group = mesh[AXIS].get_group()
    how: Sum
    if choice.algorithm == "hierarchical":
        how = Hierarchical(build_hierarchy(_groups(mesh.mesh), ranks_per_node))
    elif choice.algorithm == "ring" and mesh.device_type == "cpu":
        how = Ring(group)
    else:
        how = Flat(group)
    return Synchronisation(
        how=how,
        num_replicas=dist.get_world_size(group),
        compressed=COMPRESSED[choice.compression] if choice.compression else None,
        overlap=choice.overlap,
        bucket_mib=choice.bucket_bytes / BYTES_PER_MIB if choice.bucket_bytes else None,
    )


def nccl_environment(decision: Decision) -> dict[str, str]:
    """Variables that make NCCL use the plan's algorithm (NCCL_ALGO by collective: NCCL 2.24, environment variables)."""
    choice = _decided(decision)
    if choice is None or choice.algorithm not in ("ring", "tree"):
        return {}
    return {"NCCL_ALGO": f"allreduce:{choice.algorithm}"}


def set_nccl_environment(decision: Decision) -> None:
    """Set them for this process, where its backend is NCCL. RefusedError where NCCL has read others already."""
    if device_type() == "cpu":
        return
    for name, value in nccl_environment(decision).items():
        if os.environ.get(name, value) != value:
            raise RefusedError(
                f"{name}={os.environ[name]!r} in the environment, but the plan decides on {value!r}: unset it"
            )
        if dist.is_initialized() and name not in os.environ:
            raise RefusedError(
                f"the plan decides on {name}={value}, which NCCL reads as the process group starts, and the script has started "
                f"one: set {name}={value} before, or leave it to executor.apply to start the group"
            )
        os.environ[name] = value
