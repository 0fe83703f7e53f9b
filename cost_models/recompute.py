"""What a kind of recompute computes again in the backward pass of a layer, and what it then need not keep.

A kind is none, full, or modules by the runtime's own names, several joined with + (mla_up_proj+mlp).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cost_models.records import RecordError

WORK = (
    "projections",
    "up_projections",
    "core",
    "output",
    "norms",
    "rotation",
    "mlp_up",
    "mlp_down",
    "activation",
    "router",
    "permutation",
    "experts",
    "expert_activation",
    "casts",
    "weights",
)
"""Parts of a layer's compute:
projections        q, k, v (latent attention: down to the latents), and up_projections (from the latents up to the heads)
core               scores, softmax and the product with the values; output: the projection behind it
norms              norms and residuals; rotation: positions and element-wise work on queries, keys, values
mlp_up, mlp_down   of a dense layer, or of the shared experts; activation: the function between them
router, permutation, experts, expert_activation   of the routed experts: scores, moving tokens, grouped products, function
casts, weights     casts to narrow formats; reading weights and adding up their gradients"""

KEPT = ("residual", "attention", "latents", "mlp", "scores", "routed", "routed_hidden")
"""Terms of a layer's activations (see the head of memory.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One kind of recompute."""

    work: Mapping[str, float] = field(default_factory=dict)
    """Part of `WORK` -> share of its forward pass that is computed again."""
    output_with_tp: bool = False
    """The output projection too, where tp > 1."""
    gathers: float = 0.0
    """Share of the all-gathers of tensor parallelism."""
    reductions: float = 0.0
    """Share of its reduce-scatters or all-reduces."""
    exchanges: float = 0.0
    """Share of the all-to-alls of expert parallelism."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Term of `KEPT` -> share of its bytes that is not kept."""
    keeps_input_only: bool = False
    """Nothing but the layer's input is kept."""
    keeps_outputs_only: bool = False
    """The layer's input and what its products and the attention put out are kept, nothing else."""
    outputs_kept: Mapping[str, float] = field(default_factory=dict)
    """Where outputs only are kept: term of `KEPT` -> share of its outputs that is; all of the others."""

    def __add__(self, other: "Repeated") -> "Repeated":
        """Both kinds together; a part that both repeat is repeated once."""

        def joined(one: Mapping[str, float], two: Mapping[str, float]) -> Mapping[str, float]:
            return {name: min(1.0, one.get(name, 0.0) + two.get(name, 0.0)) for name in {**one, **two}}

        return replace(
            self,
            work=joined(self.work, other.work),
            output_with_tp=self.output_with_tp or other.output_with_tp,
            gathers=max(self.gathers, other.gathers),
            reductions=max(self.reductions, other.reductions),
            exchanges=max(self.exchanges, other.exchanges),
            dropped=joined(self.dropped, other.dropped),
            keeps_input_only=self.keeps_input_only or other.keeps_input_only,
            keeps_outputs_only=self.keeps_outputs_only or other.keeps_outputs_only,
            outputs_kept={**self.outputs_kept, **other.outputs_kept},
        )


_EVERYTHING = dict.fromkeys(WORK, 1.0)
_BOUND_BY_MEMORY = dict.fromkeys(("norms", "rotation", "activation", "expert_activation", "casts", "weights"), 1.0)
_FULL = Repeated(work=_EVERYTHING, gathers=1.0, reductions=1.0, exchanges=1.0, keeps_input_only=True)
_CORE = Repeated(work={"core": 1.0}, dropped={"scores": 1.0})
_KINDS: Mapping[str, Repeated] = {
    "none": Repeated(),
    # core attention (Korthikanti 2022, section 5): scores, softmax, dropout and the product with the values
    "selective": _CORE,
    "full": _FULL,
    # Megatron-Core's recompute_modules (arguments.py, --recompute-modules); what each drops is its module's output
    "core_attn": _CORE,
    "moe_act": Repeated(work={"expert_activation": 1.0}, dropped={"routed": 1 / 3}),
    "layernorm": Repeated(work={"norms": 0.5}, dropped={"residual": 0.4}),
    "mla_up_proj": Repeated(work={"up_projections": 1.0, "rotation": 1.0}, dropped={"attention": 0.75}),
    "mlp": Repeated(work=dict.fromkeys(("mlp_up", "mlp_down", "activation"), 1.0), gathers=0.5, dropped={"mlp": 1.0}),
    "moe": Repeated(
        work=dict.fromkeys(
            (
                "router",
                "permutation",
                "experts",
                "expert_activation",
                "mlp_up",
                "mlp_down",
                "activation",
                "casts",
                "weights",
            ),
            1.0,
        ),
        exchanges=1.0,
        dropped={"routed": 1.0, "routed_hidden": 1.0, "mlp": 1.0},
    ),
}
_TORCH: Mapping[str, Repeated] = {
    "none": Repeated(),
    # executor/sharding/recompute.py keeps the products and the attention, and computes again what is bound by memory;
    # with tp > 1 the output projection and both gathers too. Neither kind repeats a layer's last product: nothing behind it
    # needs its output, so torch stops before it.
    "selective": Repeated(work=_BOUND_BY_MEMORY, output_with_tp=True, gathers=1.0, keeps_outputs_only=True),
    "full": replace(_FULL, work={**_EVERYTHING, "mlp_down": 0.0}, reductions=0.5),
}
_TORCHTITAN: Mapping[str, Repeated] = {
    "none": Repeated(),
    # its selective_ac_option "op": attention, reduce-scatters, all-to-alls and every second product are kept. In a layer's
    # order of products (q, k, v, output; gate, up, down) keys, output and up are computed again: with four query heads a key
    # head a sixth of the projections, and a tenth of what attention keeps. Grouped products of experts are not in its list.
    "selective": Repeated(
        work=_BOUND_BY_MEMORY
        | {"projections": 1 / 6, "up_projections": 0.5, "output": 1.0, "mlp_up": 0.5, "router": 1.0, "experts": 1.0},
        gathers=1.0,
        keeps_outputs_only=True,
        outputs_kept={"attention": 0.9, "mlp": 0.5, "latents": 0.5, "routed": 0.0},
    ),
    "full": _FULL,
}
_OF_RUNTIME: Mapping[str, Mapping[str, Repeated]] = {"torch": _TORCH, "fsdp": _TORCH, "torchtitan": _TORCHTITAN}


PART_OF_MODULE: Mapping[str, str] = {"mla_up_proj": "latent attention", "moe_act": "experts", "moe": "experts"}
"""Module -> the part of a model without which there is nothing to compute again (transformer_config.py refuses it then)."""


def repeated(runtime_name: str, kind: str) -> Repeated:
    """What a kind of recompute repeats in a runtime. RecordError lists the known kinds."""
    kinds = _OF_RUNTIME.get(runtime_name, _KINDS)
    found = None
    for module in kind.split("+"):
        if module not in kinds:
            raise RecordError(
                f"recompute {kind!r} is not known for runtime {runtime_name!r}; known: {', '.join(kinds)}, "
                "and modules joined with +"
            )
        found = kinds[module] if found is None else found + kinds[module]
    assert found is not None
    return found


def is_priced(runtime_name: str, kind: str) -> bool:
    """Whether a kind of recompute has a price in a runtime."""
    kinds = _OF_RUNTIME.get(runtime_name, _KINDS)
    return all(module in kinds for module in kind.split("+"))
