"""A table of runs with its predictions, for people."""

from collections import Counter
from typing import Any

from planner.readers.runs import FRAMEWORKS, INPUTS, NEEDED, OPTIMIZERS, PRECISIONS
from planner.report.words import columns


def runs_text(document: dict[str, list[dict[str, Any]]]) -> str:
    """One line a row, then how many were answered and why the others were not."""
    rows = document["rows"]
    width = max(len("id"), *(len(row["id"]) for row in rows))
    lines = [f"{'id':{width}}  {'step s':>9}  {'80% interval':>19}  {'GiB':>6}  {'80% interval':>13}  fits   seen"]
    lines += [_line(row, width) for row in rows]
    answered = sum(row["error"] is None for row in rows)
    lines += ["", f"{answered} of {len(rows)} rows answered; seen = the calibration was fitted on this configuration"]
    reasons = Counter(row["error"] for row in rows if row["error"])
    lines += [f"  {count:4d} not: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _line(row: dict[str, Any], width: int) -> str:
    time, memory = ("", ""), ("", "")
    if row["step_s"] is not None:
        time = f"{row['step_s']:.4g}", f"{row['step_s_low']:.4g} .. {row['step_s_high']:.4g}"
    if row["memory_gib"] is not None:
        memory = f"{row['memory_gib']:.1f}", f"{row['memory_gib_low']:.1f} .. {row['memory_gib_high']:.1f}"
    seen = "yes" if row["in_sample"] else "no"
    told = f"  {row['error']}" if row["error"] else ""
    return (
        f"{row['id']:{width}}  {time[0]:>9}  {time[1]:>19}  {memory[0]:>6}  {memory[1]:>13}  {row['fits'] or '-':5}  "
        f"{seen}{told}"
    )


def columns_of_runs() -> list[str]:
    """What a table of runs holds: the topic `tables` of `help`."""
    told = {
        "framework": f"{', '.join(FRAMEWORKS)}, or a name of `help runtimes`",
        "gpu": "as people write it: H100, A100-80; gpu_mem_gb tells sizes apart",
        "interconnect": "as people write it: 400Gb/GPU, 4 Omni-Path links; empty = as the node is sold",
        "attn_type": "mha, gqa, mqa, mla",
        "precision": ", ".join(PRECISIONS),
        "optimizer": ", ".join(filter(None, OPTIMIZERS)),
        "recompute": "none, selective, full, full-block",
        "recompute_detail": "`5 layers` of each virtual stage (full-block), `modules=mlp+layernorm` (selective)",
        "flash_attn": "yes, no, flash, unfused, auto",
        "memory_kind": "allocated, reserved, nvidia-smi; `... LAST rank` asks for that of the last rank, not of the fullest",
        "dp": "not read: it is n_gpus / (tp·pp·cp); another one is warned of",
        "ga": "micro-batches of a step, where mbs is empty; else it is gbs / (dp·mbs), and another one is warned of",
        "mbs": "sequences of a micro-batch; empty = gbs / (dp·ga)",
        "etp": "empty = as the framework takes it (Megatron: tp)",
    }
    return [
        "A CSV file with a header and one run a row. `predict --runs` reads these columns and nothing else; an empty field is",
        "taken as the framework takes it.",
        "",
        *columns([[f"  {name}", "needed" if name in NEEDED else "", told.get(name, "")] for name in ("id", *INPUTS)]),
    ]
