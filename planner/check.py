"""A layout that somebody runs today: which laws it breaks, whether its model states fit, what would be legal.

`check` judges what a request states. What is not stated is not guessed: laws that need it are listed in `unchecked`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cost_models.facts import Facts, Finding
from cost_models.laws import LAW, breaches
from cost_models.records import BlockKind, Model, Runtime, Severity, StateBytes, Verdict
from planner.readers.request_facts import Stated, facts_of
from planner.readers.requests import Request, read_request

Predictor = Callable[[Request], Mapping[str, Any] | None]
"""Something about a request that is whole, as a document; None where nothing can be said."""

_WORDS = {
    "states_bytes": "what model states take (parameters, precision, bytes, degrees)",
    "device_bytes": "the GPU's memory",
    "host_states_bytes": "what is offloaded to a node",
    "host_bytes": "the host's memory",
}
_MEMORY_LAWS = ("MEM_STATES_GT_HBM", "MEM_BORDERLINE", "HOST_MEM")


def check(
    source: Request | str | Path | Mapping[str, Any],
    *,
    predict: Predictor | None = None,
    improve: Predictor | None = None,
) -> dict[str, Any]:
    """{"verdict", "findings", "unchecked", "predicted", "better"} of a request, plain JSON data.

    verdict: no where a finding is an error, risky where one is a warning, else ok. `predicted` holds the model states in
    memory, and what `predict` answers beside them; `better` is what `improve` answers. Raises InputError for a document
    that is not a request.
    """
    request = source if isinstance(source, Request) else read_request(source)
    stated = facts_of(request)
    memory = model_states(stated) if request.trains_all else None
    facts = stated.facts if memory is None else memory.judged(stated.facts)
    laws = [law for code, law in LAW.items() if request.trains_all or code not in _MEMORY_LAWS]
    findings, unchecked = breaches(facts, stated.runtime, laws)
    skipped = [
        f"{one.code}: not stated: {', '.join(_WORDS.get(name, name) for name in one.missing)}" for one in unchecked
    ]
    skipped += [f"{what} is not priced" for what in request.scope]
    if not request.trains_all:
        skipped.append(f"{', '.join(_MEMORY_LAWS)}: the states of such a run are not those of full training")
    if memory is not None and memory.undecided:
        skipped = [text for text in skipped if not text.startswith(("MEM_STATES_GT_HBM", "MEM_BORDERLINE"))]
        skipped.append(f"MEM_STATES_GT_HBM, MEM_BORDERLINE: {memory.undecided}")
    return {
        "verdict": _verdict(findings).value,
        "findings": [_document(found) for found in findings],
        "unchecked": [*skipped, *stated.notes],
        "predicted": _predicted(memory, request, predict),
        "better": improve(request) if improve is not None and not request.scope else None,
    }


def _verdict(findings: list[Finding]) -> Verdict:
    severities = {found.severity for found in findings}
    if Severity.ERROR in severities:
        return Verdict.NO
    return Verdict.RISKY if Severity.WARNING in severities else Verdict.OK


def _document(found: Finding) -> dict[str, Any]:
    return {
        "code": found.code,
        "severity": found.severity.value,
        "message": found.message,
        "values": {name: getattr(value, "value", value) for name, value in found.values.items()},
        "legal": {name: [getattr(value, "value", value) for value in values] for name, values in found.legal.items()},
    }


def _predicted(memory: "ModelStates | None", request: Request, predict: Predictor | None) -> dict[str, Any] | None:
    document: dict[str, Any] = {}
    if memory is not None:
        document["model_states"] = memory.document()
    if predict is not None and not request.scope:
        document |= predict(request) or {}
    return document or None


# Model states -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state; activations and everything transient left out."""

    least_bytes: int
    """On the fullest device, with what is not stated (zero, its split) at its best."""
    most_bytes: int
    """The same, at its worst."""
    all_bytes: int
    """Of the whole model, each byte once."""
    host_bytes: int | None
    """Offloaded to the host of one node, by all its ranks; None where nothing is, or where it is not known."""
    bytes_per_param: StateBytes
    """Before any division."""
    device_bytes: int | None
    """Memory of the device, where it is known."""

    @property
    def undecided(self) -> str:
        """Why it is not known whether the states fit, in words; empty where it is known."""
        if self.device_bytes is None or not self.least_bytes <= self.device_bytes < self.most_bytes:
            return ""
        low, high, room = (
            f"{number / 2**30:.1f} GiB" for number in (self.least_bytes, self.most_bytes, self.device_bytes)
        )
        return f"the states take {low} to {high} of {room}, by how zero divides them, which is not stated"

    def judged(self, facts: Facts) -> Facts:
        """The facts with the bytes that the laws of memory judge."""
        known = None if self.undecided else self.least_bytes if not self._all_fit else self.most_bytes
        return replace(facts, states_bytes=known, states_bytes_all=self.all_bytes, host_states_bytes=self.host_bytes)

    @property
    def _all_fit(self) -> bool:
        return self.device_bytes is not None and self.most_bytes <= self.device_bytes

    def document(self) -> dict[str, Any]:
        """Plain JSON data, in GiB."""
        per_param = self.bytes_per_param
        return {
            "fullest_device_gib": self.least_bytes / 2**30,
            "fullest_device_gib_at_most": self.most_bytes / 2**30,
            "whole_model_gib": self.all_bytes / 2**30,
            "host_gib_per_node": None if self.host_bytes is None else self.host_bytes / 2**30,
            "device_gib": None if self.device_bytes is None else self.device_bytes / 2**30,
            "bytes_per_param": {
                "weight": per_param.weight,
                "gradient": per_param.gradient,
                "optimizer": per_param.optimizer,
            },
        }


def model_states(stated: Stated) -> ModelStates | None:
    """Model states of a stated layout; None where parameters or bytes per parameter are not known.

    Where the layout is not stated, or asks for other ranks than there are, the least is an even share of everything over
    the world's devices: no layout does better.
    """
    facts, runtime = stated.facts, stated.runtime
    per_param = runtime.state_bytes.get(facts.precision or "")
    if per_param is None or facts.num_params is None:
        return None
    all_bytes = round(facts.num_params * per_param.total)
    moved = _moved(facts, runtime)
    device_total = _only(per_param, set(_KINDS) - moved)
    resident = facts.num_params * device_total.total
    realised = None not in (facts.tp, facts.pp, facts.dp) and LAW["WORLD_MOD_MP"].holds(facts) is not False
    host = None
    if realised:
        dense, expert = _fullest_stage(stated.model, facts)
        least = min(_on_rank(dense, expert, device_total, facts, *way) for way in _ways(facts, runtime))
        most = max(_on_rank(dense, expert, device_total, facts, *way) for way in _ways(facts, runtime))
        host = _on_host(facts, runtime, per_param)
    elif facts.world is not None:
        least, most = resident / facts.world, resident
    else:
        return None
    return ModelStates(
        least_bytes=math.ceil(least),
        most_bytes=math.ceil(most),
        all_bytes=all_bytes,
        host_bytes=host,
        bytes_per_param=per_param,
        device_bytes=facts.device_bytes,
    )


def _moved(facts: Facts, runtime: Runtime) -> set[str]:
    """Kinds of state that lie in host memory."""
    offloaded = [what for what in ("optimizer", "param") if getattr(facts, f"offload_{what}")]
    return {kind for what in offloaded for kind in runtime.offload_moves.get(what, ())}


def _only(per_param: StateBytes, kinds: set[str]) -> StateBytes:
    return StateBytes(**{name: getattr(per_param, name) if name in kinds else 0 for name in _KINDS})


_KINDS = ("weight", "gradient", "optimizer")


def _ways(facts: Facts, runtime: Runtime) -> list[tuple[int, int]]:
    """(zero, dp_shard) that the request may mean: what it states, else all that the runtime realises."""
    assert facts.dp is not None
    levels = [facts.zero] if facts.zero is not None else list(runtime.zero_levels)
    if facts.zero is None and (facts.pp or 1) > 1:
        levels = list(runtime.zero_levels_with_pp)
    shards = [facts.dp_shard] if facts.dp_shard is not None else [1, facts.dp]
    return [(level, shard) for level in levels for shard in shards]


def _on_rank(dense: float, expert: float, per_param: StateBytes, facts: Facts, zero: int, dp_shard: int) -> float:
    """Bytes on a rank that holds `dense` and `expert` parameters after tp, pp, ep and etp.

    zero 1 divides optimizer state, 2 gradients too, 3 parameters too; over dp_shard·cp ranks, and the experts over the edp of
    dp·cp·tp = edp·ep·etp, as far as that is not replicas.
    """
    dp, cp, tp = _degrees(facts, "dp", "cp", "tp")
    ways = dp_shard * cp
    replicas = max(1, dp // dp_shard)
    edp = dp * cp * tp // ((facts.ep or 1) * (facts.etp or 1))
    expert_ways = max(1, edp // replicas)
    held = 0.0
    for number, level in ((per_param.optimizer, 1), (per_param.gradient, 2), (per_param.weight, 3)):
        divided = zero >= level
        held += number * (dense / (ways if divided else 1) + expert / (expert_ways if divided else 1))
    return held


def _on_host(facts: Facts, runtime: Runtime, per_param: StateBytes) -> int | None:
    """Offloaded bytes of all ranks of a node: each byte of the model once, over the nodes, where zero divides it.

    Without a division each data-parallel replica offloads its own: then every node of dp ranks holds as many copies.
    """
    if not (facts.offload_optimizer or facts.offload_param) or not (facts.world and facts.gpus_per_node):
        return None
    moved = _only(per_param, _moved(facts, runtime))
    num_params, tp, pp = _degrees(facts, "num_params", "tp", "pp")
    on_rank = num_params / (tp * pp)
    ranks = min(facts.gpus_per_node, facts.world)
    # Experts and dense layers are averaged over the ranks: with ep inside dp·cp·tp each expert byte lies on edp ranks only.
    share = _expert_share(facts)
    dense, expert = on_rank * (1 - share), on_rank * share * tp / ((facts.ep or 1) * (facts.etp or 1))
    return math.ceil(ranks * min(_on_rank(dense, expert, moved, facts, *way) for way in _ways(facts, runtime)))


def _degrees(facts: Facts, *names: str) -> list[int]:
    """Operands that are known here."""
    values = [getattr(facts, name) for name in names]
    assert None not in values
    return values


def _expert_share(facts: Facts) -> float:
    """Share of the parameters that routed experts hold (three matrices each: gated, as all MoE models in the table are)."""
    names = ("num_experts", "num_layers", "hidden", "moe_ffn", "num_params")
    if not facts.num_experts or any(getattr(facts, name) is None for name in names):
        return 0.0
    experts, layers, hidden, width, num_params = _degrees(facts, *names)
    return min(1.0, 3 * hidden * width * experts * layers / num_params)


def _fullest_stage(model: Model | None, facts: Facts) -> tuple[float, float]:
    """(dense, expert) parameters on a rank of the fullest stage; at least, where the split or the model is not known.

    The first stage holds the embedding, the last the head; tied embeddings lie on both. Where the layers do not divide, the
    split that makes the fullest stage least full.
    """
    num_params, tp, pp = _degrees(facts, "num_params", "tp", "pp")
    over_experts = (facts.ep or 1) * (facts.etp or 1)
    if model is None:
        share = _expert_share(facts)
        even = num_params / pp
        return even * (1 - share) / tp, even * share / over_experts
    blocks = [_block(model, block, pp) for block in range(model.num_blocks)]
    weights = [dense / tp + expert / over_experts for dense, expert in blocks]
    ends = _ends(model, facts, weights)
    fullest = max(ends, key=lambda end: sum(weights[end[0] : end[1]]))
    part = blocks[fullest[0] : fullest[1]]
    return sum(dense for dense, _ in part) / tp, sum(expert for _, expert in part) / over_experts


def _block(model: Model, block: int, pp: int) -> tuple[float, float]:
    """(dense, expert) parameters of a block; a tied head is a copy of the embedding where the two lie apart."""
    params = float(model.block_params(block))
    kind = model.block_kind(block)
    if kind is BlockKind.HEAD and model.tie_embeddings and pp > 1:
        return params + model.hidden * model.vocab, 0.0
    expert = 0.0
    if kind is BlockKind.MOE and model.moe:
        expert = float(model.moe.num_experts * model.layer_kind(block).model.expert_params)
    return params - expert, expert


def _ends(model: Model, facts: Facts, weights: list[float]) -> list[tuple[int, int]]:
    """Blocks [first, last) of each stage."""
    assert facts.pp
    if model.num_layers % facts.pp == 0:
        each = model.num_layers // facts.pp
        cuts = [0, *(1 + stage * each for stage in range(1, facts.pp)), model.num_blocks]
        return list(pairwise(cuts))
    return _least_full(weights, facts.pp)


def _least_full(weights: list[float], parts: int) -> list[tuple[int, int]]:
    """The contiguous split into at most `parts` of which the heaviest part is lightest, by bisection of that weight."""
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_greedy(weights, middle)) <= parts else (middle, high)
    return _greedy(weights, high)


def _greedy(weights: list[float], most: float) -> list[tuple[int, int]]:
    ends, first, held = [], 0, 0.0
    for index, weight in enumerate(weights):
        if index > first and held + weight > most:
            ends.append((first, index))
            first, held = index, 0.0
        held += weight
    return [*ends, (first, len(weights))]
