"""A model block by block, and measurements with what they amount to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.records import Measurement, MeasurementKind, Measurements
from planner.profiling.clock import summarise
from planner.report.words import bandwidth, billions, columns, counted, duration, flop_count, flop_rate, memory, row


def profile_text(document: Mapping[str, Any]) -> str:
    """A document of `planner.readers.models.model_document`: parameters, FLOPs and bytes of each kind of block."""
    model, blocks = document["model"], document["blocks"]
    num_params, active = document["num_params"], document["active_params"]
    of_which = "" if active == num_params else f", {billions(active)} active for a token ({active:,})"
    return "\n".join(
        [
            row("model", f"{model['name']}: {billions(num_params)} parameters ({num_params:,}){of_which}"),
            row("shape", _shape(model)),
            row("step", f"{flop_count(document['flops_per_token'])} a token at {document['seq']:,} tokens a sequence"),
            row("", f"counted as {document['flops_formula']}"),
            row("weights", f"{memory(document['weight_bytes'])} in bf16"),
            "",
            *_block_lines(blocks),
        ]
    )


def _shape(model: Mapping[str, Any]) -> str:
    parts = [
        counted(model["num_layers"], "layer"),
        f"hidden {model['hidden']:,}",
        f"ffn {model['ffn']:,}{' gated' if model.get('gated_mlp', True) else ''}",
        f"{model['heads']} heads of {model['head_dim']}, {model['kv_heads']} for keys and values",
        f"vocabulary {model['vocab']:,}{' (tied)' if model.get('tie_embeddings') else ''}",
    ]
    moe = model.get("moe")
    if moe:
        parts.append(f"{moe['num_experts']} experts of {moe['moe_ffn']:,}, {moe['top_k']} for a token")
    if model.get("mla"):
        parts.append("latent attention")
    return ", ".join(parts)


def _block_lines(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["block", "count", "params each", "params", "active", "FLOP/token", "attention", "weights", "out/token"]]
    for block in blocks:
        flops, attention = block["flops_per_token"], block["attention_flops_per_token"]
        rows.append(
            [
                " ".join(dict.fromkeys(filter(None, (block["kind"], block.get("name"))))),
                f"{block['count']:,}",
                f"{block['params']:,}",
                billions(block["total_params"]),
                billions(block["count"] * block["active_params"]),
                flop_count(flops) if flops else "-",
                f"{attention / flops:.0%}" if attention else "-",
                memory(block["weight_bytes"]),
                f"{block['output_bytes_per_token'] / 1024:.3g} KiB" if block["output_bytes_per_token"] else "-",
            ]
        )
    return [
        "each block: parameters, model FLOPs of a token forward and backward, and the share of attention in them",
        *columns(rows, right=range(1, len(rows[0]))),
    ]


# Measurements ------------------------------------------------------------------------------------------------------


def measurements_text(measurements: Measurements) -> str:
    """Every measurement: key, median, the middle 80% of its samples, and the rate where the key tells one."""
    taken = measurements.measurements
    if not taken:
        return "nothing was measured"
    lines = [row("machine", machine) for machine in dict.fromkeys(one.machine for one in taken)]
    versions = dict.fromkeys(pair for one in taken for pair in one.versions.items())
    lines.append(row("versions", ", ".join(f"{name} {version}" for name, version in versions)))
    titles = {
        MeasurementKind.OP: "operations",
        MeasurementKind.COLLECTIVE: "collectives",
        MeasurementKind.RUN: "runs",
    }
    for kind, title in titles.items():
        of_kind = [one for one in taken if one.kind is kind]
        if of_kind:
            lines += ["", *_kind_lines(title, of_kind)]
    return "\n".join(lines)


def _kind_lines(title: str, taken: Sequence[Measurement]) -> list[str]:
    """A table of one kind; columns in which nothing stands are left out."""
    header = [title, "median", "middle 80%", "samples", "rate", "memory", "of", "note"]
    rows = [header]
    for one in taken:
        summary = summarise(one.samples_s)
        rows.append(
            [
                one.key,
                duration(summary.median),
                f"{duration(summary.low)} to {duration(summary.high)}",
                str(summary.count),
                rate_text(one, summary.median),
                f"{memory(one.memory.peak_bytes)} {one.memory.kind}" if one.memory else "",
                ", ".join(filter(None, (one.phase if one.phase != one.key else None, one.rank_class))),
                one.note if one.kind is MeasurementKind.RUN else "",
            ]
        )
    kept = [i for i in range(len(header)) if any(line[i] for line in rows[1:])]
    right = [position for position, i in enumerate(kept) if i in (1, 3, 4)]
    return columns([[line[i] for i in kept] for line in rows], right=right)


def rate_text(one: Measurement, median_s: float) -> str:
    """FLOP/s or bytes/s of a measurement, empty where its key does not tell.

    FLOPs are those of the products: 2·M·N·K; of causal attention the lower triangle, and 2.5 times that backwards (five
    products for two, recomputed scores included); of layers and heads twice the forward's backwards.
    """
    if not median_s > 0:
        return ""
    flops = flops_of(one.key)
    if flops:
        return flop_rate(flops / median_s)
    num_bytes = moved_bytes(one)
    return bandwidth(num_bytes / median_s) if num_bytes else ""


def moved_bytes(one: Measurement) -> int | None:
    """Bytes that the seconds of a collective or of a memory-bound operation moved; None where that has no meaning."""
    family = one.key.split("/")[0]
    if family == "memory_bound" or (one.kind is MeasurementKind.COLLECTIVE and family != "overlap"):
        return one.bytes
    return None


def flops_of(key: str) -> float | None:
    """FLOPs of the operation that a measurement's key names; None where it names no products.

    Forms: `matmul/P/MxNxK`, `attention/P/BxSxHxKVxD/forward|backward`, `layer/P/BxSxHIDDEN/HxKVxD/FFN[g]/forward|backward`,
    `head/P/BxSxHIDDENxVOCAB/forward|backward`.
    """
    family, *parts = key.split("/")
    if family not in ("matmul", "attention", "layer", "head") or len(parts) < 2:
        return None
    sizes = [[int(side) for side in part.removesuffix("g").split("x") if side.isdecimal()] for part in parts[1:]]
    backward = parts[-1] == "backward"
    if family == "matmul" and len(sizes[0]) == 3:
        return 2.0 * math.prod(sizes[0])
    if family == "attention" and len(sizes[0]) == 5:
        batch, seq, heads, _, head_dim = sizes[0]
        return 2.0 * batch * seq * seq * heads * head_dim * (2.5 if backward else 1.0)
    if family == "head" and len(sizes[0]) == 4:
        return 2.0 * math.prod(sizes[0]) * (2.0 if backward else 1.0)
    if family == "layer" and [len(part) for part in sizes[:3]] == [3, 3, 1]:
        (batch, seq, hidden), (heads, kv_heads, head_dim), (ffn,) = sizes[:3]
        mlp = (3 if parts[3].endswith("g") else 2) * hidden * ffn
        weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + mlp
        products = 2.0 * batch * seq * weights * (2.0 if backward else 1.0)
        return products + 2.0 * batch * seq * seq * heads * head_dim * (2.5 if backward else 1.0)
    return None
