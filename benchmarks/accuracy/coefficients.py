"""Which coefficients are fitted on published runs, how far their priors may be off, and which take another one's value."""

from collections.abc import Mapping

IS_PRIOR = "prior before the fit on published runs"
"""Start of the source of a prior that was itself taken from published runs: who has not seen them does not have it."""

FITTED: Mapping[str, float] = {
    "matmul.efficiency.ampere.bf16": 0.05,
    "matmul.efficiency.hopper.bf16": 0.05,
    "matmul.efficiency.hopper.fp8": 0.1,
    "matmul.efficiency.blackwell.bf16": 0.1,
    "matmul.efficiency.blackwell.fp8": 0.1,
    "matmul.efficiency.blackwell.gb300.fp8": 0.15,
    "matmul.efficiency.blackwell.mxfp8": 0.1,
    "matmul.efficiency.blackwell.gb300.mxfp8": 0.15,
    "matmul.efficiency.blackwell.nvfp4": 0.15,
    "matmul.efficiency.blackwell.gb300.nvfp4": 0.15,
    "matmul.wave": 0.3,
    "attention.efficiency.ampere.llm-foundry": 0.3,
    "attention.efficiency.hopper.llm-foundry": 0.3,
    "attention.efficiency.hopper.megatron-bridge": 0.2,
    "attention.efficiency.blackwell.megatron-bridge": 0.2,
    "attention.score_bytes.megatron-deepspeed": 0.3,
    "attention.unfused_efficiency": 0.3,
    "attention.misaligned_factor": 0.4,
    "memory_ops.multiplier.megatron-bridge": 0.4,
    "memory_ops.multiplier.megatron-deepspeed": 0.4,
    "memory_ops.multiplier.llm-foundry": 0.4,
    "memory_ops.cast_bytes": 0.4,
    "weights.traffic_bytes": 0.2,
    "logits.bytes": 0.4,
    "link.efficiency.nvlink3-jean-zay": 0.3,
    "link.latency_s.nvlink3-jean-zay": 1.0,
    "link.efficiency.nvlink3": 0.15,
    "link.efficiency_apart.nccl": 0.5,
    "overlap.tp": 0.05,
    "overlap.p2p.megatron-bridge": 0.1,
    "overlap.ep": 0.15,
    "experts.permute_bytes": 0.45,
    "launch.moe_layer_s": 0.3,
    "launch.layer_s": 0.5,
    "launch.layer_s.megatron-deepspeed": 0.4,
    "step.constant_s.megatron-bridge": 0.4,
    "step.constant_s.llm-foundry": 0.4,
    "step.constant_s.megatron-deepspeed": 0.4,
}
"""Coefficient -> standard deviation of the logarithm of its prior. Those that a calibration does not have are left out."""

SAME_AS: Mapping[str, str] = {
    "link.small_latency_s.nvlink3-jean-zay": "link.latency_s.nvlink3-jean-zay",
    "matmul.efficiency.ampere.fp16": "matmul.efficiency.ampere.bf16",
    "attention.efficiency.hopper.megatron": "attention.efficiency.hopper.megatron-bridge",
    "attention.efficiency.blackwell.megatron": "attention.efficiency.blackwell.megatron-bridge",
    "overlap.p2p.megatron": "overlap.p2p.megatron-bridge",
    "memory_ops.multiplier.megatron": "memory_ops.multiplier.megatron-bridge",
    "step.constant_s.megatron": "step.constant_s.megatron-bridge",
}
"""Coefficients that take another one's fitted value: the same kernels."""

UNBOUNDED = ("matmul.efficiency.blackwell.gb300",)
"""Its roof is another device's: there is no bound."""
BOUNDED = ("matmul.efficiency", "attention.efficiency", "attention.unfused_efficiency", "link.efficiency", "overlap")
"""Shares: never above 1."""


def is_share(name: str) -> bool:
    """A coefficient that cannot be above 1."""
    return name.startswith(BOUNDED) and not name.startswith(UNBOUNDED)
