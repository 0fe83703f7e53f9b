"""Which of our names somebody meant: what other frameworks and files call the same thing, then names spelled almost alike."""

import difflib
import re
from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # workload
    "seq": ("seq_len", "seq_length", "sequence", "sequence_length", "max_seq_len", "max_length", "context_length",
            "block_size", "max_sequence_length"),
    "gbs": ("batch", "batch_size", "global_batch_size", "global_batch", "train_batch_size", "global_train_batch_size"),
    "precision": ("dtype", "torch_dtype", "mixed_precision", "param_dtype", "data_type"),
    "optimizer": ("optim", "optimiser", "optimizer_name"),
    # layout
    "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size", "mp", "tp_size",
           "tp_degree", "num_tp"),
    "pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size",
           "pp_size", "pp_degree", "num_stages"),
    "dp": ("data_parallel", "data_parallel_size", "data_parallel_degree", "dp_size", "ddp"),
    "dp_replicate": ("data_parallel_replicate_degree", "dp_replicate_degree", "num_replicas"),
    "dp_shard": ("data_parallel_shard_degree", "dp_shard_degree", "fsdp", "fsdp_size", "shard"),
    "cp": ("context_parallel", "context_parallel_size", "context_parallel_degree", "cp_size"),
    "ep": ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree", "ep_size"),
    "etp": ("expert_tensor_parallel_size", "expert_tensor_parallel_degree"),
    "vpp": ("virtual_pipeline_model_parallel_size", "virtual_pipeline", "virtual_stages", "num_virtual_stages"),
    "mbs": ("micro_batch", "micro_batch_size", "microbatch_size", "local_batch_size", "train_micro_batch_size_per_gpu",
            "per_device_train_batch_size", "device_train_microbatch_size"),
    "microbatches": ("num_microbatches", "num_micro_batches", "gradient_accumulation_steps", "accumulation", "grad_accum", "ga"),
    "zero": ("zero_stage", "zero_optimization", "zero_level", "sharding_strategy"),
    "sp": ("sequence_parallel", "sequence_parallelism"),
    "ulysses": ("ulysses_size", "sequence_parallel_size", "ulysses_sequence_parallel_size"),
    "schedule": ("pipeline_schedule", "pp_schedule", "pipeline_parallel_schedule"),
    "gather": ("reshard_after_forward",),
    "recompute": ("recompute_granularity", "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing",
                  "checkpointing", "ac", "remat"),
    # cluster
    "nodes": ("num_nodes", "nnodes", "n_nodes", "node_count"),
    "num_nodes": ("nodes", "nnodes", "n_nodes", "node_count", "count"),
    "gpus_per_node": ("nproc_per_node", "devices_per_node", "gpus_in_node", "num_gpus_per_node", "ranks_per_node"),
    "world": ("gpus", "num_gpus", "n_gpus", "world_size", "devices", "num_devices", "total_gpus"),
    "gpu": ("gpu_type", "gpu_name", "device", "device_name", "accelerator", "gpu_model"),
    "gpu_mem_gb": ("gpu_memory", "gpu_memory_gb", "memory_gb", "gpu_mem", "hbm_gb", "vram_gb", "vram"),
    "host_mem_gb": ("host_memory", "host_memory_gb", "cpu_mem_gb", "ram_gb", "ram"),
    "intra": ("nvlink", "intra_node", "intranode", "intra_link"),
    "inter": ("interconnect", "network", "inter_node", "internode", "fabric_link", "nic"),
    "nic": ("inter", "network", "interface", "interconnect"),
    "num_nics": ("nics", "interfaces", "num_interfaces", "nics_per_node"),
    "memory_bytes": ("memory", "mem", "capacity", "hbm_bytes"),
    "bandwidth_bytes_per_s": ("bandwidth", "bandwidth_gb_s", "bandwidth_gbps", "gbps"),
    "peak_flops_per_s": ("peak_flops", "flops", "tflops", "peak_tflops"),
    # model
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "layers", "depth"),
    "hidden": ("hidden_size", "d_model", "n_embd", "n_embed", "dim", "width"),
    "ffn": ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_hidden", "mlp_dim"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_query_groups"),
    "head_dim": ("kv_channels", "head_size", "d_head"),
    "vocab": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "tie_embeddings": ("tie_word_embeddings", "tied_embeddings", "weight_tying"),
    "gated_mlp": ("swiglu", "gated", "glu"),
    "norm": ("normalization", "norm_type"),
    "positions": ("position_embedding_type", "position_embeddings", "rope"),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts", "n_routed_experts", "experts"),
    "top_k": ("num_experts_per_tok", "topk", "router_topk"),
    "moe_ffn": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    # sections
    "workload": ("training", "train", "data"),
    "runtime": ("framework", "backend", "engine"),
    "layout": ("parallel", "parallelism", "parallel_config", "strategy", "mesh"),
    "pin": ("pins", "constraints"),
    "cluster": ("hardware", "machine", "system"),
}  # fmt: skip
"""Our name -> what Megatron, DeepSpeed, FSDP, TorchTitan, Hugging Face and people write for it."""


def near_names(name: str, known: Iterable[str], *, most: int = 2, least_alike: float = 0.6) -> list[str]:
    """The known names that `name` may mean, the likeliest first: a synonym's alone, else those spelled almost alike.

    least_alike: 1 = the same letters (difflib's ratio).
    """
    wanted, by_plain = _plain(name), {_plain(one): one for one in known}
    meant = [one for plain, one in by_plain.items() if wanted == plain or wanted in map(_plain, SYNONYMS.get(one, ()))]
    return meant or [
        by_plain[plain] for plain in difflib.get_close_matches(wanted, by_plain, n=most, cutoff=least_alike)
    ]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'gbs'?`, or a full stop where nothing is near."""
    near = near_names(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
