"""Models and runtimes of the tests of single terms, and calibrations in which a term stands alone."""

from dataclasses import replace

import numpy as np

from cost_models.problem import Cells, Columns, Problem, column_shape
from cost_models.records import Calibration, Layout, Mla, Model, Moe, Runtime
from cost_models.stage import price_blocks, price_columns
from planner.readers.runtimes import read_runtime
from tests.unit.cost_cases import MODEL, problem

MLA = Mla(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MODELS: dict[str, Model] = {
    "dense": MODEL,
    "routed": replace(MODEL, moe=Moe(num_experts=16, top_k=2, moe_ffn=1408, shared_ffn=2816, num_dense_layers=2)),
    "latent": replace(MODEL, mla=MLA),
    "routed latent": replace(MODEL, mla=MLA, moe=Moe(num_experts=16, top_k=2, moe_ffn=1408)),
}
RUNTIMES: dict[str, Runtime] = {name: read_runtime(name) for name in ("torch", "megatron")}


def case(model: str = "dense", runtime: str = "torch", **changes: object) -> Problem:
    return problem(model=MODELS[model], runtime=RUNTIMES[runtime], **changes)


def with_values(whole: Problem, values: dict[str, float]) -> Problem:
    """The problem with these coefficients in place of all that are more particular."""
    calibration: Calibration = whole.calibration
    kept = {
        name: one
        for name, one in calibration.coefficients.items()
        if not any(name == wanted or name.startswith(wanted + ".") for wanted in values)
    }
    like = calibration.coefficients["matmul.wave"]
    added = {name: replace(like, value=value) for name, value in values.items()}
    return replace(whole, calibration=replace(calibration, coefficients={**kept, **added}))


def even_columns(whole: Problem, layout: Layout) -> Columns:
    """As many layers in each virtual stage, nothing computed again."""
    stages, layers = layout.num_virtual_stages, whole.model.num_layers
    edges = np.arange(stages + 1) * (layers // stages) + 1
    edges[0], edges[-1] = 0, layers + 2
    counts = np.zeros((stages, len(whole.recompute_kinds)), dtype=np.int64)
    counts[:, 0] = layers // stages
    columns = Columns(stage=np.arange(stages), first=edges[:-1], last=edges[1:] - 1, recompute_counts=counts)
    column_shape(whole.model, columns)
    return columns


def step_s(whole: Problem, layout: Layout, order: tuple[str, ...] | None = None) -> float:
    """J with its hops and tails: (m-1)·max + Σ + the longest tail."""
    cells = Cells.of([layout], order) if order else Cells.of([layout])
    prices = price_columns(price_blocks(whole, cells), 0, even_columns(whole, layout))
    micro = layout.num_micro_batches(whole.workload.gbs)
    return float((micro - 1) * prices.t_s.max() + prices.t_s.sum() + prices.tail_s.max())
