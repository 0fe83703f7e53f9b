"""How long `plan` takes, as whole processes: CPU and wall seconds, peak memory, and both gaps, each beside a fixed reference.

The reference is a process that holds nothing of ours and does what planning is made of: the interpreter starts, imports numpy,
walks dictionaries, sorts and adds arrays. On another machine, or under another load, the seconds change and the ratio hardly does.
It runs before every case, on the same cores. CPU seconds are those of the process and of all that it started.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.registry import benchmark
from cost_models.records import LayerGroup, Model, to_json

REPEATS = 3
"""Processes of each case, and of the reference before it."""
TIMEOUT_S = 600
"""After which a process is ended and told as too slow."""
GOAL_MEMORY_MIB = 1024
GOAL_GAP_SIMULATED = 0.08
"""Where there are at least four micro-batches for each stage."""

REFERENCE = """
import numpy
random = numpy.random.default_rng(0)
for _ in range(6):
    values = random.random((600, 900))
    order = numpy.sort(values, axis=1)
    total = numpy.maximum(order[:, 1:] - order[:, :-1], values[:, 1:] * 0.5).sum()
seen = {}
for number in range(600_000):
    key = number * 7919 % 10_007
    seen[key] = max(seen.get(key, 0), number)
print(total, len(seen))
"""
"""Of a process that holds nothing of ours; about a third of a CPU second where this was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question, as `plan` is asked it."""

    name: str
    model: str | Model
    cluster: str
    batch: int
    seq: int
    goal_s: float | None
    """CPU seconds of the whole process; None = no goal of its own."""
    goal_gap: float = 0.0
    """Of gap_objective."""
    precision: str = "bf16"
    no_slower_than: tuple[str, float] | None = None
    """(another case, how many times its CPU seconds are the goal)."""

    def request(self, **more: Any) -> dict[str, Any]:
        """The document that `plan` reads."""
        model = self.model if isinstance(self.model, str) else to_json(self.model)
        workload = {"seq": self.seq, "gbs": self.batch, "precision": self.precision}
        return {"model": model, "cluster": self.cluster, "workload": workload, "runtime": "megatron", **more}


def chain(num_kinds: int) -> Model:
    """130 blocks: embedding, patches, 45 layers of a vision tower, projector, 81 language layers of `num_kinds` widths, head.

    The tower is as large as InternViT-6B; the language layers differ in width as those of pruned networks do (no two
    neighbours are alike), and one in four sees all tokens, the others a window.
    """
    tower = LayerGroup(
        name="vision",
        count=45,
        hidden=3072,
        ffn=12288,
        heads=24,
        kv_heads=24,
        head_dim=128,
        gated_mlp=False,
        causal=False,
        tokens=8192,
    )
    language = tuple(
        LayerGroup(name="language", ffn=16384 + 512 * (7 * number % num_kinds), window=4096 if number % 4 else 0)
        for number in range(81)
    )
    return Model(
        name=f"chain of {num_kinds} widths",
        num_layers=128,
        hidden=6144,
        ffn=16384,
        heads=48,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        layer_groups=(
            LayerGroup(name="patches", projection=(588, 3072), tokens=8192),
            tower,
            LayerGroup(name="projector", projection=(12288, 6144, 6144), tokens=2048),
            *language,
        ),
    )


CASES = (
    Case(name="8B on 64", model="llama3-8b", cluster="h100x64", batch=512, seq=8192, goal_s=1.5),
    Case(name="175B on 1,024", model="gpt3-175b", cluster="a100-80x1024", batch=1536, seq=2048, goal_s=2.0),
    Case(name="405B on 16,384", model="llama3-405b", cluster="h100x16384", batch=2048, seq=8192, goal_s=2.0),
    Case(name="DeepSeek-V3 on 2,048", model="deepseek-v3", cluster="h100x2048", batch=15360, seq=4096, goal_s=4.0),
    Case(name="130 blocks, 11 kinds", model=chain(8), cluster="h100x512", batch=2048, seq=8192, goal_s=4.0),
    Case(name="130 blocks, 84 kinds", model=chain(81), cluster="h100x512", batch=2048, seq=8192, goal_s=4.0),
    Case(
        name="70B on three pools",
        model="llama3-70b",
        cluster="h100x64+a100-80x128+v100-32x64",
        batch=1024,
        seq=4096,
        goal_s=10.0,
        goal_gap=0.02,
        precision="fp16",  # V100 has no bf16
    ),
    Case(
        name="405B on 32,768",
        model="llama3-405b",
        cluster="h100x32768",
        batch=4096,
        seq=8192,
        goal_s=None,
        no_slower_than=("405B on 16,384", 1.3),
    ),
)
"""The questions whose speed is promised."""

AGAIN = ("8B on 64", "175B on 1,024", "405B on 16,384", "DeepSeek-V3 on 2,048")
"""Cases that are planned once more in the same process, with one change."""
GOAL_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a process took."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    code: int
    """Exit code; negative = ended by a signal."""
    out: str
    """What it wrote to stdout."""


def used_by(command: Sequence[str]) -> Used:
    """Runs a process and says what it and its children took."""
    with tempfile.TemporaryFile() as out:
        began = time.monotonic()
        limit = ["timeout", str(TIMEOUT_S)]
        process = subprocess.Popen([*limit, *command], stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Used(
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=wall_s,
            peak_mib=usage.ru_maxrss / 1024,
            code=process.returncode,
            out=out.read().decode("utf-8"),
        )


def _repeated(command: Sequence[str]) -> tuple[Used, dict[str, Any]]:
    """The last of some runs, and the medians of all."""
    runs = [used_by(command) for _ in range(REPEATS)]
    return runs[-1], {
        "cpu_s": round(median(run.cpu_s for run in runs), 2),
        "cpu_s_least": round(min(run.cpu_s for run in runs), 2),
        "wall_s": round(median(run.wall_s for run in runs), 2),
        "peak_rss_mib": round(max(run.peak_mib for run in runs)),
    }


@benchmark("planning")
def planning_speed(published: Path | None = None) -> Mapping[str, Any]:
    """The cases of the speed table, and a second plan in one process."""
    rows: dict[str, dict[str, Any]] = {}
    references = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = Path(folder) / "request.json"
            path.write_text(json.dumps(case.request()), encoding="utf-8")
            _, reference = _repeated([sys.executable, "-c", REFERENCE])
            references.append(reference["cpu_s"])
            rows[case.name] = _row(case, path, reference["cpu_s"], rows)
        again = {case.name: _again(case, Path(folder)) for case in CASES if case.name in AGAIN}
        _, start = _repeated([sys.executable, "-m", "executor", "--version"])
    found = {
        "repeats": REPEATS,
        "reference": {
            "what": "interpreter, numpy, dictionaries, sorted and added arrays; nothing of ours",
            "cpu_s": round(median(references), 3),
            "cpu_s_from": min(references),
            "cpu_s_to": max(references),
        },
        "process_that_only_tells_its_version_cpu_s": start["cpu_s"],
        "goal_peak_rss_mib": GOAL_MEMORY_MIB,
        "cases": rows,
        "second_plan_in_one_process": {"goal_cpu_s": GOAL_AGAIN_S, "cases": again},
    }
    return {**found, "text": _text(found)}


def _row(case: Case, path: Path, reference_s: float, others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    asked = {
        "model": case.model if isinstance(case.model, str) else case.model.name,
        "cluster": case.cluster,
        "batch": case.batch,
        "seq": case.seq,
    }
    last, measured = _repeated([sys.executable, "-m", "executor", "plan", str(path), "--json"])
    document = json.loads(last.out) if last.out else {}
    if last.code or "certificate" not in document:
        why = document.get("error", {}).get("message") or f"exit code {last.code}"
        return {**asked, "skipped": why}
    goal_s = case.goal_s
    if case.no_slower_than is not None:
        goal_s = round(case.no_slower_than[1] * others[case.no_slower_than[0]]["cpu_s"], 2)
        measured["times_the_other"] = round(measured["cpu_s"] / others[case.no_slower_than[0]]["cpu_s"], 2)
    return {
        **asked,
        **measured,
        "goal_cpu_s": goal_s,
        "reached": goal_s is not None and measured["cpu_s"] <= goal_s,
        "times_reference": round(measured["cpu_s"] / reference_s, 1),
        **_proof(document, case),
    }


def _proof(document: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """What the plan proves, and what sets the bound on simulated time."""
    proof, layout = document["certificate"], document["decision"]["layout"]
    dp = layout["dp_replicate"] * layout["dp_shard"]
    num_micro, pp = case.batch // (dp * layout["mbs"]), layout["pp"]
    return {
        "cells": proof["num_cells"],
        "opened": len(proof["cells"]),
        "status": proof["status"],
        "gap_objective": round(proof["gap_objective"], 6),
        "gap_objective_reached": proof["gap_objective"] <= case.goal_gap + 1e-6,
        "gap_simulated": round(proof["gap_simulated"], 4),
        "num_micro_batches": num_micro,
        "gap_simulated_reached": proof["gap_simulated"] <= GOAL_GAP_SIMULATED if num_micro >= 4 * pp else None,
        "min_r_set_by": proof["least_bound_cell"],
        "min_r_s": proof["least_bound_s"],
        "simulated_s": proof["simulated_s"],
        "layout": " ".join(f"{key}={value}" for key, value in layout.items() if value not in (1, "step")),
        "solver": proof["solver"],
    }


def _again(case: Case, folder: Path) -> dict[str, Any]:
    """Four plans in one process: the question, two pins, one node less."""
    path = folder / "again.json"
    path.write_text(json.dumps(case.request()), encoding="utf-8")
    run = used_by([sys.executable, "-m", "benchmarks.planning_again", str(path)])
    return json.loads(run.out) if run.code == 0 else {"skipped": f"exit code {run.code}"}


def _text(found: Mapping[str, Any]) -> str:
    """The result as tables."""
    reference = found["reference"]
    lines = [
        f"plan as a whole process, median of {found['repeats']}; CPU seconds of it and its children. Reference: {reference['cpu_s']} s "
        f"({reference['cpu_s_from']} to {reference['cpu_s_to']}) of a process that holds {reference['what']}",
        "",
        f"{'case':22} {'cpu s':>6} {'goal':>5} {'':4} {'wall s':>6} {'x ref':>6} {'MiB':>5} {'cells':>7} {'opened':>6} "
        f"{'gap J':>7} {'gap S':>6}  {'m / pp':9} min R is set by",
    ]
    for name, row in found["cases"].items():
        if "skipped" in row:
            lines.append(f"{name:22} skipped: {row['skipped']}")
            continue
        pp = row["layout"].partition("pp=")[2].split()[0] if " pp=" in f" {row['layout']}" else "1"
        micro = f"{row['num_micro_batches']} / {pp}"
        lines.append(
            f"{name:22} {row['cpu_s']:6.2f} {row['goal_cpu_s']:5.2f} {'ok' if row['reached'] else 'MISS':4} {row['wall_s']:6.2f} "
            f"{row['times_reference']:6.1f} {row['peak_rss_mib']:5} {row['cells']:7,} {row['opened']:6,} "
            f"{row['gap_objective']:7.2%} {row['gap_simulated']:6.1%}  {micro:9} {row['min_r_set_by']}"
        )
    again = found["second_plan_in_one_process"]
    lines += ["", f"A second plan in one process, CPU seconds (goal {again['goal_cpu_s']})", ""]
    for name, row in again["cases"].items():
        if "skipped" in row:
            lines.append(f"{name:22} skipped: {row['skipped']}")
            continue
        lines.append(f"{name:22} first {row['first']['cpu_s']:6.2f}")
        for change, taken in row["then"].items():
            lines.append(f"{'':22} {change:18} {taken['cpu_s']:6.2f}  {taken.get('no_plan', '')}".rstrip())
    return "\n".join(lines)
