"""What a rank holds from the building of its model to the saving of a checkpoint: bytes on the device and in the host.

  build       what the runtime makes with the model (runtime.built_states), and the context
  load        as after the first step: the states of the optimizer are there to be filled, tensor by tensor
  step 1      as step 2, without those states of the optimizer that its first update makes; or that update
  step 2      everything: the peak of training
  evaluation  what stays from step to step, and one micro-batch that keeps nothing but the layer, or the logits, at work
  save        what stays, and a unit of gathered weights where the runtime gathers them (runtime.gathers_to_save)

What stays from step to step: weights, the optimizer's states, gathered copies that are never given back, buckets of gradients,
what a pipeline receives into (from the first step on), and gradients
where the runtime keeps them in a buffer of its own (runtime.built_states has them); elsewhere they are freed behind the
update (torch: zero_grad sets them to None). In the host: what is offloaded, always; what each rank copies there
while it loads or saves (runtime.host_copies); the whole model's weights on the first rank where the runtime gathers them.

Sources: torch.distributed.checkpoint loads into tensors that exist, and stages a copy of the local state when it saves
asynchronously (both, and the torch runtime's phases, are held to what its tensors take by tests/processes/test_phases.py);
Megatron-LM's DistributedDataParallel makes one buffer of gradients, its optimizer fp32 copies of the
weights, when they are built; DeepSpeed's ZeRO optimizers make their states when they are built and read each rank's
partition through the host. Known from use, neither measured here nor checked against their sources: of Megatron's figures
only step 2 is published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.records import Runtime, StateBytes

PHASES = ("build", "load", "step 1", "step 2", "evaluation", "save")
"""In the order in which a run has them."""
MOMENTS = 8.0
"""Bytes of an fp32 Adam's two moments, which most optimizers make in their first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One micro-batch without a backward pass."""

    layer_bytes: float
    """What the largest layer of the device holds while it runs."""
    logits_bytes: float
    """Logits and loss, where the device has the head."""

    @property
    def bytes(self) -> float:
        """The larger of both."""
        return max(self.layer_bytes, self.logits_bytes)

    @property
    def operation(self) -> str:
        """Which of both."""
        return "head and loss" if self.logits_bytes >= self.layer_bytes else "forward pass of its largest layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase on one rank."""

    device_bytes: float
    """Expected peak."""
    operation: str
    """What runs then."""


def device_phases(
    runtime: Runtime, per_param: StateBytes, kinds: Mapping[str, float], evaluated: Evaluated, training: str
) -> Mapping[str, Phase]:
    """Phase -> what a rank holds then; `kinds` are its bytes at the peak of training, `training` the operation there."""
    context = kinds["context"]
    built = _share(runtime, per_param)
    states = {"weight": kinds["weights"], "gradient": kinds["gradients"], "optimizer": kinds["optimizer"]}
    buckets, receives = kinds.get("buckets", 0.0), kinds.get("receives", 0.0)
    made = sum(built[name] * size for name, size in states.items()) + buckets
    total = sum(kinds.values())
    late = (1.0 - built["optimizer"]) * states["optimizer"]
    rests = states["weight"] + states["optimizer"] + built["gradient"] * states["gradient"] + buckets
    update = sum(states.values()) + buckets + receives + context
    gathered = kinds.get("gathered", 0.0)
    unit = gathered if runtime.gathers_to_save else 0.0
    first = Phase(device_bytes=total - late, operation=training)
    if update > first.device_bytes:
        first = Phase(device_bytes=update, operation="first update of the optimizer, which makes its states")
    return {
        "build": Phase(device_bytes=made + context, operation="placing the model"),
        "load": Phase(device_bytes=rests + context, operation="reading the last tensor into its place"),
        "step 1": first,
        "step 2": Phase(device_bytes=total, operation=training),
        "evaluation": Phase(
            device_bytes=min(rests + receives + gathered + evaluated.bytes + context, total),
            operation=evaluated.operation,
        ),
        "save": Phase(
            device_bytes=rests + receives + unit + context,
            operation="gathering the largest unit of weights" if unit else "copying states to the host",
        ),
    }


def _share(runtime: Runtime, per_param: StateBytes) -> Mapping[str, float]:
    """Kind of state -> share of it that the runtime makes with the model; of the optimizer all, its fp32 weights, or none."""
    names = runtime.built_states
    master = max(per_param.optimizer - MOMENTS, 0.0) / per_param.optimizer if per_param.optimizer else 0.0
    return {
        "weight": 1.0,
        "gradient": float("gradient" in names),
        "optimizer": 1.0 if "optimizer" in names else master if "master" in names else 0.0,
    }


def host_phases(runtime: Runtime, held: Mapping[str, float], offloaded: Mapping[str, float]) -> Mapping[str, float]:
    """Phase -> bytes that each rank has in its host, 0 left out; `held` are its states on the device."""
    always = sum(offloaded.values())
    names = {"weight": "weights", "gradient": "gradients", "optimizer": "optimizer"}
    found = dict.fromkeys(PHASES, always)
    for phase, copied in runtime.host_copies.items():
        found[phase] += sum(held[names[kind]] for kind in copied)
    return {phase: size for phase, size in found.items() if size > 0}


def fullest_node(
    per_rank: Sequence[tuple[tuple[int, int], Mapping[str, float], Mapping[str, float]]], gpus_per_node: int
) -> Mapping[str, float]:
    """Phase -> bytes in the host of the fullest node.

    per_rank: ((first, last) rank, bytes of each of these ranks, bytes of the first of them beside) in the order of ranks;
    nodes hold neighbouring ranks.
    """
    world = per_rank[-1][0][1] + 1
    fullest: dict[str, float] = {}
    # the nodes where a range begins, those it fills alone (all alike: the first of them), and where it ends
    places = {
        place // gpus_per_node for (first, last), _, _ in per_rank for place in (first, first + gpus_per_node, last)
    }
    for start in sorted(node * gpus_per_node for node in places):
        end = min(start + gpus_per_node, world)
        here: dict[str, float] = {}
        for (first, last), each, alone in per_rank:
            count = max(0, min(last + 1, end) - max(first, start))
            for phase, size in each.items():
                here[phase] = here.get(phase, 0.0) + count * size
            if start <= first < end:
                for phase, size in alone.items():
                    here[phase] = here.get(phase, 0.0) + size
        for phase, size in here.items():
            fullest[phase] = max(fullest.get(phase, 0.0), size)
    return {phase: fullest[phase] for phase in PHASES if fullest.get(phase, 0.0) > 0}
