"""Tables of runs (CSV, one run a row) as problems: what `predict --runs` reads.

A row's inputs are the columns of `INPUTS` and nothing else: all others (what was measured, names, notes) are dropped at the
door. What a row leaves empty is taken as its framework takes it.
"""

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from cost_models.problem import RANK_ORDER, Problem
from cost_models.records import (
    Calibration,
    Cluster,
    Decision,
    Layout,
    MemoryKind,
    Mla,
    Model,
    Moe,
    Norm,
    Optimizer,
    Positions,
    Precision,
    Ranks,
    Runtime,
    Schedule,
    Stage,
    Workload,
    normalised,
)
from cost_models.records.near_names import near_names
from planner.errors import InputError
from planner.readers.cluster_facts import cluster_from_facts
from planner.readers.plausible import refuse_implausible_workload
from planner.readers.runtimes import is_known, read_runtime

T = TypeVar("T")

MODEL_COLUMNS = (
    *("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "glu", "vocab", "tied_emb", "attn_type"),
    *("experts", "topk", "moe_ffn", "shared_ffn", "dense_layers"),
)
INPUTS = (
    *("framework", "gpu", "gpu_mem_gb", "gpus_per_node", "n_gpus", "interconnect", *MODEL_COLUMNS),
    *("seq", "tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero_stage", "fsdp", "sp", "mbs", "gbs", "ga", "precision"),
    *("recompute", "recompute_detail", "flash_attn", "overlap", "optimizer", "memory_kind"),
)
"""Columns that a prediction may depend on."""
NEEDED = ("framework", "gpu", "n_gpus", "hidden", "layers", "heads", "ffn_hidden", "vocab", "seq", "gbs")
"""Columns without which no row can be predicted."""

COLUMN_OF_KEY: Mapping[str, str] = {
    **{name: name for name in INPUTS},
    **{
        "num_layers": "layers",
        "ffn": "ffn_hidden",
        "gated_mlp": "glu",
        "tie_embeddings": "tied_emb",
        "num_experts": "experts",
    },
    **{"top_k": "topk", "zero": "zero_stage", "microbatches": "ga", "world": "n_gpus", "runtime": "framework"},
    "inter": "interconnect",
}
"""Our name of a thing, as requests say it or as a table does -> its column."""
ALIKE = 0.85
"""Names of columns that are as much alike mean one thing (difflib's ratio): tables hold many columns that no prediction reads."""

FRAMEWORKS: Mapping[str, str] = {
    "Composer FSDP1": "llm-foundry",
    "NeMo 2 / Megatron-Core": "megatron-bridge",
    "Megatron-Bridge (Megatron-Core)": "megatron-bridge",
    "Megatron-DeepSpeed": "megatron-deepspeed",
    "Megatron-Core": "megatron",
    "Megatron-LM": "megatron",
}
"""Framework as tables of runs write it -> runtime; other names are read as everywhere else."""

PRECISIONS: Mapping[str, Precision] = {
    **{precision.value: precision for precision in Precision},
    "bf16-pure": Precision.BF16,
    "bf16-amp": Precision.BF16,
    "bf16/fp16": Precision.FP16,
    "fp8-hybrid": Precision.FP8,
    "fp8-cs": Precision.FP8,
    "fp8-amp": Precision.FP8,
    "fp8-tensorwise": Precision.FP8,
    "fp8-blockwise": Precision.FP8,
}
"""Precision as written -> record: fp8-hybrid is E4M3 forward and E5M2 backward with delayed scaling, fp8-cs and
fp8-tensorwise scale currently, by tensor, fp8-blockwise by blocks of 128. bf16/fp16: either, and both run at one rate."""

MEMORY_KINDS: Mapping[str, MemoryKind] = {
    "": MemoryKind.ALLOCATED,
    "torch max_memory_allocated": MemoryKind.ALLOCATED,
    "torch max_memory_reserved": MemoryKind.RESERVED,
    **{kind.value: kind for kind in MemoryKind},
}
"""Start of the column memory_kind -> how bytes are counted."""
LAST_RANK = "last rank"
"""In the column memory_kind: the figure is of the last rank (Megatron logs its last pipeline stage), not of the fullest."""

FUSED = {"": True, "yes": True, "flash": True, "auto": True, "no": False, "unfused": False}
OPTIMIZERS = {"": Optimizer.ADAMW, **{one.value: one for one in Optimizer}}

DEEPSEEK_V3 = Mla(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""DeepSeek-V3 report (arXiv 2412.19437), section 4.2; it trains one multi-token-prediction layer beside its 61."""
MEGATRON_MLA = Mla(kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""Defaults of Megatron-LM's arguments: no compressed queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row."""

    id: str
    """As written, or the row's number."""
    digest: str
    """Of its inputs, but for how memory is counted: equal where the configuration is."""
    problem: Problem
    """Model, cluster, workload, runtime, calibration."""
    layout: Layout
    """Its degrees."""
    counts: Mapping[str, int]
    """Layers of each virtual stage under each kind of recompute, at most; the rest keep everything."""
    last_rank: bool
    """Memory is asked of the last rank, not of the fullest."""


# The table -------------------------------------------------------------------------------------------------------------


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file: `id` and the columns of `INPUTS`, absent ones empty. InputError where it is no such table."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream, strict=True)
            header = next(lines, None)
            if header is None:
                raise InputError(f"{path}: the file is empty; a header with the columns {', '.join(NEEDED)} is needed")
            _refuse_header(path, header)
            rows = list(_rows(path, header, lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as a CSV table: {error}") from None
    if not rows:
        raise InputError(f"{path}: there is a header, but no row below it")
    return rows


def _refuse_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in NEEDED if name not in header]
    if missing:
        meant = {name: meaning for meaning, name in mistyped(header).items()}
        told = [name + (f" (is it {meant[name]!r}?)" if name in meant else "") for name in missing]
        raise InputError(
            f"{path}: no column {', '.join(told)}; a table of runs has at least {', '.join(NEEDED)}, "
            f"and may have {', '.join(name for name in INPUTS if name not in NEEDED)}"
        )
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise InputError(f"{path}: two columns are called {twice[0]}")


def mistyped(header: Sequence[str]) -> dict[str, str]:
    """Column that is not read -> the input that it seems to mean, which the table does not have."""
    absent = {key: column for key, column in COLUMN_OF_KEY.items() if column not in header}
    found = {}
    for name in header:
        near = near_names(name, absent, most=1, least_alike=ALIKE) if name not in (*INPUTS, "id") else []
        if near:
            found[name] = absent[near[0]]
    return found


def _rows(path: Path, header: Sequence[str], lines: Iterator[list[str]]) -> Iterator[dict[str, str]]:
    for number, fields in enumerate(lines, start=1):
        if not any(fields):
            continue
        if len(fields) != len(header):
            raise InputError(
                f"{path}: row {number} has {len(fields)} fields, the header has {len(header)}; is the file damaged?"
            )
        found = dict(zip(header, fields, strict=True))
        yield {"id": found.get("id", "") or str(number)} | {name: found.get(name, "").strip() for name in INPUTS}


def warnings_of(path: str | Path, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What a table of runs says and no prediction follows, one line each: columns with almost the name of an input, and rows whose
    dp or ga contradicts what decides them."""
    with Path(path).open(newline="", encoding="utf-8-sig") as stream:
        header = next(csv.reader(stream))
    found = [
        f"column {name!r} is not read; {column!r} is, which the table does not have: rename it if it means that"
        for name, column in mistyped(header).items()
    ]
    said: dict[str, list[tuple[str, str]]] = {"dp": [], "ga": []}
    for row in rows:
        for name, told in contradictions(row).items():
            said[name].append((row["id"], told))
    rules = {
        "dp": "dp is not read, it is n_gpus / (tp·pp·cp)",
        "ga": "ga is read only where mbs is empty, else it is gbs / (dp·mbs)",
    }
    for name, rule in rules.items():
        if said[name]:
            named = "; ".join(f"{one}: {told}" for one, told in said[name][:MOST_NAMED])
            more = "; ..." if len(said[name]) > MOST_NAMED else ""
            found.append(f"{rule}; {len(said[name])} of {len(rows)} rows say otherwise ({named}{more})")
    return found


def contradictions(row: Mapping[str, str]) -> dict[str, str]:
    """dp and ga, where a row's own contradict what its other columns make them; nothing where those cannot be read."""
    try:
        tp, pp, cp = (_whole(row, name, 1) for name in ("tp", "pp", "cp"))
        dp, rest = divmod(_whole(row, "n_gpus"), tp * pp * cp)
        gbs, said_dp, mbs, ga = (_whole(row, name, 0, least=0) for name in ("gbs", "dp", "mbs", "ga"))
    except InputError:
        return {}
    found = {}
    if said_dp and not rest and said_dp != dp:
        found["dp"] = f"dp={said_dp}, but n_gpus={row['n_gpus']} over tp{tp} pp{pp} cp{cp} makes {dp}"
    if ga and mbs and not rest and dp and ga * mbs * dp != gbs:
        found["ga"] = f"ga={ga}, but gbs={gbs} over dp{dp} mbs{mbs} makes {gbs / (dp * mbs):g}"
    return found


MOST_NAMED = 3
"""Rows that a warning names."""


def digest_of(row: Mapping[str, str]) -> str:
    """16 hexadecimal digits that are equal where two rows ask for the same configuration."""
    values = [_plain(row.get(name, "")) for name in INPUTS if name != "memory_kind"]
    return hashlib.sha256("\x1f".join(values).encode()).hexdigest()[:16]


def _plain(text: str) -> str:
    """A number in one spelling; a text as it is."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:g}" if math.isfinite(number) and abs(number) < 1e6 else text


# One row ---------------------------------------------------------------------------------------------------------------


def read_run(row: Mapping[str, str], calibration: Calibration) -> Run:
    """One row of `read_rows`. A ValueError says why it cannot be predicted: the value, and the known or legal ones."""
    row = {name: row.get(name, "") for name in ("id", *INPUTS)}
    counts = _recompute(row)
    runtime = _runtime(row)
    for kind in counts:
        runtime = _with_kind(runtime, kind)
    memory_kind, last_rank = _memory_kind(row)
    problem = Problem(
        model=_model(row, runtime),
        cluster=_cluster(row),
        workload=Workload(
            seq=_whole(row, "seq"),
            gbs=_whole(row, "gbs"),
            precision=_one_of(row, "precision", {"": Precision.BF16, **PRECISIONS}),
            optimizer=_one_of({**row, "optimizer": row["optimizer"].split("(")[0]}, "optimizer", OPTIMIZERS),
        ),
        runtime=runtime,
        calibration=calibration,
        memory_kind=memory_kind,
    )
    refuse_implausible_workload(problem.workload)
    for kind in counts:
        if kind not in problem.recompute_kinds:
            raise InputError(
                f"recompute {kind!r} has no price for runtime {runtime.name}; known: {', '.join(problem.recompute_kinds)}"
            )
    return Run(
        id=row["id"],
        digest=digest_of(row),
        problem=problem,
        layout=_layout(row, runtime),
        counts=counts,
        last_rank=last_rank,
    )


def _whole(row: Mapping[str, str], name: str, default: int | None = None, least: int = 1) -> int:
    text = row[name]
    if not text:
        if default is None:
            raise InputError(f"{name} is empty; a whole number from {least} is needed")
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number != int(number) or number < least or number > 2**53:
        raise InputError(f"{name}={text!r}: a whole number from {least} is needed")
    return int(number)


def _one_of(row: Mapping[str, str], name: str, known: Mapping[str, T]) -> T:
    text = row[name].strip().lower()
    if text not in known:
        raise InputError(f"{name}={row[name]!r} is not known; known: {', '.join(filter(None, known))}")
    return known[text]


_EXPERT_OVERLAP = ("ep_a2a_overlap", "overlap-moe-expert-parallel-comm")
"""Words of the overlap column: Megatron-Core's --overlap-moe-expert-parallel-comm, and the recipes' name of it."""
_YES: Mapping[str, bool] = {"": False, "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _model(row: Mapping[str, str], runtime: Runtime) -> Model:
    hidden, layers, heads = (_whole(row, name) for name in ("hidden", "layers", "heads"))
    learned = runtime.name in ("llm-foundry", "megatron-deepspeed")
    if not row["head_dim"] and hidden % heads:
        raise InputError(f"head_dim is empty, and hidden={hidden} is not divisible by heads={heads}")
    moe, mla = _moe(row), None
    is_v3 = (hidden, layers, heads) == (7168, 61, 128)
    if row["attn_type"] == "mla":
        mla = DEEPSEEK_V3 if is_v3 else MEGATRON_MLA
    elif row["attn_type"] not in ("", "mha", "gqa", "mqa"):
        raise InputError(f"attn_type={row['attn_type']!r} is not known; known: mha, gqa, mqa, mla")
    return Model(
        name=f"h{hidden}-l{layers}" + (f"-e{moe.num_experts}" if moe else ""),
        num_layers=layers,
        hidden=hidden,
        ffn=_whole(row, "ffn_hidden"),
        heads=heads,
        kv_heads=heads if mla else _whole(row, "kv_heads", heads),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _whole(row, "head_dim", hidden // heads),
        vocab=_whole(row, "vocab"),
        tie_embeddings=_one_of(row, "tied_emb", _YES),
        gated_mlp=_one_of(row, "glu", _YES),
        norm=Norm.LAYERNORM if learned else Norm.RMSNORM,
        positions=Positions.LEARNED if learned else Positions.ROPE,
        max_positions=_whole(row, "seq") if learned else 0,
        moe=moe,
        mla=mla,
        num_mtp_layers=1 if mla and is_v3 else 0,
    )


def _moe(row: Mapping[str, str]) -> Moe | None:
    if not row["experts"]:
        return None
    return Moe(
        num_experts=_whole(row, "experts"),
        top_k=_whole(row, "topk"),
        moe_ffn=_whole(row, "moe_ffn"),
        shared_ffn=_whole(row, "shared_ffn", 0, least=0),
        num_dense_layers=_whole(row, "dense_layers", 0, least=0),
        router_bias=row["attn_type"] == "mla",
    )


def _cluster(row: Mapping[str, str]) -> Cluster:
    world = _whole(row, "n_gpus")
    per_node = min(_whole(row, "gpus_per_node", min(8, world)), world)
    if world % per_node:
        raise InputError(f"n_gpus={world} does not fill whole nodes of gpus_per_node={per_node}")
    cluster = cluster_from_facts(
        {
            "gpu": row["gpu"],
            "gpu_mem_gb": _size_gb(row),
            "gpus_per_node": per_node,
            "world": world,
            "inter": row["interconnect"],
        }
    )
    cluster = _evenly_placed(cluster)
    if "Omni-Path" not in row["interconnect"] or cluster.pools[0].kind.device.family != "ampere":
        return cluster
    # the one cluster of this kind of which anything is published (Jean Zay): its all-reduces reach a quarter of NVLink
    pool = cluster.pools[0]
    return replace(
        cluster,
        pools=(replace(pool, kind=replace(pool.kind, intra=replace(pool.kind.intra, name="nvlink3-jean-zay"))),),
    )


def _evenly_placed(cluster: Cluster) -> Cluster:
    """A run's nodes spread evenly over as few fast domains as hold them, where they divide: 256 GPUs on racks of 72 are four times
    64, as schedulers place blocks (Slurm's topology/block, --segment) and as NVIDIA's recipes for NVL72 count on (ep 64)."""
    (pool,) = cluster.pools
    num_domains = -(-pool.num_nodes // pool.kind.domain_nodes)
    each, rest = divmod(pool.num_nodes, num_domains)
    if rest or num_domains == 1:
        return cluster
    return replace(cluster, pools=(replace(pool, kind=replace(pool.kind, domain_nodes=each)),))


def _size_gb(row: Mapping[str, str]) -> float | None:
    """The memory's nominal size, only where the device's name does not say it."""
    text = row["gpu_mem_gb"]
    if not text:
        return None
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not math.isfinite(size) or size <= 0:
        raise InputError(f"gpu_mem_gb={text!r}: a positive number is needed")
    return size


def _runtime(row: Mapping[str, str]) -> Runtime:
    name = row["framework"]
    if not name:
        raise InputError(
            f"framework is empty; known: {', '.join(FRAMEWORKS)}, and the names of `meshwright help runtimes`"
        )
    if name not in FRAMEWORKS and not is_known(name):
        raise InputError(
            f"framework {name!r} is not known; known: {', '.join(FRAMEWORKS)}, and the names of `meshwright help runtimes`"
        )
    runtime = read_runtime(FRAMEWORKS.get(name, name))
    fused = _one_of({**row, "flash_attn": row["flash_attn"].split("(")[0]}, "flash_attn", FUSED)
    if not fused and name == "Megatron-LM":
        runtime = read_runtime("megatron-deepspeed")  # of 2021: no fused attention, no overlap
    elif not fused and runtime.name != "megatron-deepspeed":
        if runtime.name != "megatron":
            raise InputError(f"flash_attn={row['flash_attn']!r} has no price with framework {name!r}; known there: yes")
        runtime = replace(runtime, name="megatron-unfused")
    if row["sp"] and not _one_of(row, "sp", _YES):
        runtime = replace(runtime, sequence_parallel=False, overlaps_tp=False)
    if any(word in row["overlap"] for word in _EXPERT_OVERLAP):
        runtime = replace(runtime, overlaps_ep=True)
    if _one_of(row, "fsdp", _YES) or _whole(row, "zero_stage", 0, least=0) >= 2:
        runtime = replace(runtime, zero_levels=(0, 1, 2, 3))
    return runtime


def _with_kind(runtime: Runtime, kind: str) -> Runtime:
    """The runtime, with a combination of its own modules as one more kind of recompute."""
    parts = kind.split("+")
    if kind in runtime.recompute_kinds or not set(parts) <= set(runtime.recompute_kinds):
        return runtime
    return replace(runtime, recompute_kinds=(*runtime.recompute_kinds, kind))


def _layout(row: Mapping[str, str], runtime: Runtime) -> Layout:
    """n_gpus decides dp: tables disagree on what they call dp where experts are parallel."""
    tp, pp, cp, ep = (_whole(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    dp, rest = divmod(_whole(row, "n_gpus"), tp * pp * cp)
    if rest or not dp:
        raise InputError(f"n_gpus={row['n_gpus']} is not divisible by tp·pp·cp={tp}·{pp}·{cp}")
    gbs = _whole(row, "gbs")
    mbs = _whole(row, "mbs", max(1, gbs // (dp * _whole(row, "ga", 1))))
    vpp = _whole(row, "vpp", 1)
    layout = normalised(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=_whole(row, "etp", tp if row["experts"] and runtime.etp_default == "tp" else 1),
        vpp=vpp,
        mbs=mbs,
        zero=_whole(row, "zero_stage", 3 if _one_of(row, "fsdp", _YES) else 0, least=0),
        schedule=Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B,
    )
    layout.num_micro_batches(gbs)
    return layout


def _recompute(row: Mapping[str, str]) -> Mapping[str, int]:
    """Kind -> layers of each virtual stage."""
    kind, detail = row["recompute"].lower(), row["recompute_detail"]
    every = 10**6
    if kind in ("", "none"):
        return {}
    if kind == "full":
        return {"full": every}
    if kind == "full-block":
        number = re.match(r"\d+", detail)
        if not number:
            raise InputError(
                f"recompute=full-block with recompute_detail={detail!r}: it says how many, as in `5 layers`"
            )
        return {"full": int(number[0])}
    if kind == "selective":
        modules = re.fullmatch(r"modules=(.+)|\[(.+)\]", detail)
        if not modules:
            return {"selective": every}
        return {"+".join(re.split(r"[+ ]", modules[1] or modules[2])): every}
    raise InputError(f"recompute={row['recompute']!r} is not known; known: none, selective, full, full-block")


def _memory_kind(row: Mapping[str, str]) -> tuple[MemoryKind, bool]:
    text = row["memory_kind"].lower()
    known = [name for name in MEMORY_KINDS if (text.startswith(name) if name else not text)]
    if not known:
        raise InputError(
            f"memory_kind={row['memory_kind']!r} is not known; known: {', '.join(filter(None, MEMORY_KINDS))}"
        )
    return MEMORY_KINDS[max(known, key=len)], LAST_RANK in text


# The row as a decision -------------------------------------------------------------------------------------------------


def decision_of_run(run: Run) -> Decision:
    """The row's stages: as many layers each where they divide, else embedding and head count as a layer each."""
    layout, num_blocks = run.layout, run.problem.model.num_blocks
    edges = stage_edges(num_blocks, layout.num_virtual_stages)
    stages = tuple(
        Stage(
            virtual=virtual,
            device=virtual % layout.pp,
            blocks=(int(edges[virtual]), int(edges[virtual + 1]) - 1),
            recompute=_split(run, int(edges[virtual]), int(edges[virtual + 1])),
        )
        for virtual in range(layout.num_virtual_stages)
    )
    return Decision(
        runtime=run.problem.runtime.name,
        layout=layout,
        workload=run.problem.workload,
        num_micro_batches=layout.num_micro_batches(run.problem.workload.gbs),
        stages=stages,
        ranks=Ranks(order=RANK_ORDER),
        collectives={},
    )


def stage_edges(num_blocks: int, num_stages: int) -> np.ndarray:
    """(num_stages + 1,) first block of each virtual stage, and the end. InputError where there are more stages than blocks."""
    if num_stages > num_blocks:
        raise InputError(
            f"pp·vpp={num_stages} is more than the {num_blocks} blocks of the model, head and embedding included"
        )
    layers = num_blocks - 2
    if layers % num_stages == 0:
        edges = np.arange(num_stages + 1) * (layers // num_stages) + 1
        edges[0], edges[-1] = 0, num_blocks
        return np.asarray(edges)
    each, rest = divmod(num_blocks, num_stages)
    return np.concatenate([[0], np.cumsum([each + (place < rest) for place in range(num_stages)])])


def _split(run: Run, first: int, end: int) -> dict[str, int]:
    """Kind of recompute -> layers of the blocks first..end-1."""
    left = end - first - (first == 0) - (end == run.problem.model.num_blocks)
    kinds = dict.fromkeys(run.problem.recompute_kinds, 0)
    for kind, most in run.counts.items():
        kinds[kind] = min(left, most)
        left -= kinds[kind]
    kinds[run.problem.recompute_kinds[0]] += left
    return kinds
