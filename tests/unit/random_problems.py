"""Small random problems with real prices: tiny models, odd clusters, pools, pins, little memory; and all their plans."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cost_models.calibrations import shipped
from cost_models.placement import Placement, placed_hops_s
from cost_models.problem import Columns, Problem
from cost_models.records import Cluster, LayerGroup, Model, Moe, Pool, Workload
from cost_models.stage import price_columns
from planner.readers.models import read_model
from planner.readers.node_presets import node_kind
from planner.readers.pins import Pins, parse_pins
from planner.readers.runtimes import read_runtime
from planner.search.pooled import Pooled
from planner.search.priced import Priced
from planner.search.stages import CellProblem, StageColumns

GPUS = (3, 5, 6, 7, 12)
"""Counts that powers of two do not make."""
PINS = ("recompute=none|full", "tp<=2", "mbs=1", "zero<=1", "pp!=1", "pp<=3", "cp=1", "schedule!=gpipe", "mbs<=2")
_WIDTH = {"hidden": 1024, "ffn": 4096, "heads": 12, "kv_heads": 12, "head_dim": 64, "vocab": 32000}


def random_problem(seed: int) -> tuple[Problem, Pins]:
    """A question of some dozen cells. Memory is drawn beside what the model's states need, so that it is often short."""
    draw = random.Random(seed)
    model = _model(draw)
    problem = Problem(
        model=model,
        cluster=_cluster(draw),
        workload=Workload(seq=draw.choice([2048, 4096]), gbs=draw.choice([12, 20, 24, 30, 42, 60])),
        runtime=read_runtime(draw.choice(["megatron", "megatron", "torch", "deepspeed", "torchtitan"])),
        calibration=shipped(),
    )
    pins = {pin.split("=")[0].rstrip("<>!"): pin for pin in draw.sample(PINS, draw.randint(2, 4))}
    pins.setdefault("recompute", PINS[0])
    if problem.runtime.name == "torchtitan":
        # the others of its schedules are played: test_played.py
        pins["schedule"] = "schedule=1f1b|gpipe|interleaved"
    needed = model.num_params * 18 / problem.cluster.num_gpus
    memory = {
        pool.kind.name: int(draw.choice([2.5, 3, 4, 6]) * 2**30 + needed * draw.uniform(0.5, 3.0))
        for pool in problem.cluster.pools
    }
    pools = tuple(
        replace(pool, kind=replace(pool.kind, device=replace(pool.kind.device, memory_bytes=memory[pool.kind.name])))
        for pool in problem.cluster.pools
    )
    return replace(problem, cluster=replace(problem.cluster, pools=pools)), parse_pins(", ".join(pins.values()))


def _model(draw: random.Random) -> Model:
    """One to five layers: alike, with experts, or a chain of unlike ones."""
    num_layers = draw.randint(1, 5)
    plain = replace(
        read_model("llama3-8b"), name="tiny", num_layers=num_layers, tie_embeddings=draw.random() < 0.3, **_WIDTH
    )
    kind = draw.choice(("alike", "experts", "chain", "chain with experts"))
    moe = Moe(num_experts=draw.choice([4, 6]), top_k=2, moe_ffn=1024, shared_ffn=draw.choice([0, 1024]))
    if kind == "experts":
        return replace(plain, moe=replace(moe, num_dense_layers=draw.randint(0, num_layers - 1)))
    if kind == "alike":
        return plain
    groups = tuple(
        LayerGroup(
            ffn=draw.choice([2048, 4096, 12288]),
            window=draw.choice([0, 512]),
            experts=draw.random() < 0.5 if kind == "chain with experts" else None,
        )
        for _ in range(num_layers)
    )
    return replace(plain, layer_groups=groups, moe=moe if kind == "chain with experts" else None)


def _cluster(draw: random.Random) -> Cluster:
    """Nodes of an odd number of GPUs, sometimes of two kinds."""
    gpus = draw.choice(GPUS)
    per_node = draw.choice([each for each in (gpus, 3, 6) if gpus % each == 0])
    kinds = [replace(node_kind("h100"), gpus_per_node=per_node, name="first")]
    nodes = [gpus // per_node]
    if draw.random() < 0.3:
        kinds.append(replace(node_kind("a100-80"), gpus_per_node=per_node, name="second"))
        nodes.append(draw.choice([1, 2]))
    pools = tuple(Pool(kind=kind, num_nodes=count) for kind, count in zip(kinds, nodes, strict=True))
    return Cluster(name="odd", pools=pools)


def every_column(priced: Priced, index: int) -> CellProblem:
    """A cell with every span under every mixture of recompute, nothing left out; each stage as its pool prices it."""
    layout, model = priced.layout(index), priced.problem.model
    rows = [
        (stage, first, last, counts)
        for stage in range(layout.num_virtual_stages)
        for first, last in _spans(priced, index, stage)
        for counts in _mixtures(priced, last - first + 1 - (first == 0) - (last == model.num_blocks - 1))
    ]
    stage, first, last, counts = (np.array(values) for values in zip(*rows, strict=True))
    columns = Columns(stage=stage, first=first, last=last, recompute_counts=counts)
    pools = np.array(priced.space.pools(index) or (0,) * layout.pp)[stage % layout.pp]
    of_pools = priced.of_pools if isinstance(priced, Pooled) else (priced,)
    found = [price_columns(one.prices, index, columns) for one in of_pools]

    def taken(name: str) -> np.ndarray:
        return np.choose(pools, [getattr(one, name) for one in found])

    into, out = taken("hop_in_s"), taken("hop_out_s")
    if isinstance(priced, Pooled):
        prices = {number: one.prices for number, one in enumerate(of_pools)}
        into, out = placed_hops_s(prices, index, Placement(priced.space.pools(index)), columns)
    tail_s = taken("tail_s")
    if layout.vpp > 1:  # J counts the tail as if nothing were recomputed
        plain = {int(s): t for s, count, t in zip(stage, counts, tail_s, strict=True) if not count[1:].any()}
        tail_s = np.array([plain[int(s)] for s in stage])
    return replace(
        priced.cell(index, np.inf),
        columns=StageColumns(
            stage=stage,
            first=first,
            last=last,
            recompute_counts=counts,
            forward_s=taken("forward_s"),
            backward_s=taken("backward_s"),
            hop_in_s=into,
            hop_out_s=out,
            tail_s=tail_s,
            played_tail_s=taken("tail_s"),
            state_bytes=taken("fixed_bytes"),
            activation_bytes=taken("activation_bytes"),
        ),
    )


def _mixtures(priced: Priced, layers: int) -> Iterator[tuple[int, ...]]:
    """Layers under each kind of recompute that may be used, two at most."""
    num_kinds, kinds = len(priced.prices.recompute_kinds), priced.kinds
    for shares in itertools.product(range(layers + 1), repeat=len(kinds)):
        if sum(shares) == layers and sum(share > 0 for share in shares) <= 2:
            of_kind = dict(zip(kinds, shares, strict=True))
            yield tuple(of_kind.get(kind, 0) for kind in range(num_kinds))


def _spans(priced: Priced, index: int, stage: int) -> list[tuple[int, int]]:
    """(first, last) block of each span that a virtual stage may hold."""
    layout, num_layers = priced.layout(index), priced.problem.model.num_layers
    num_stages, end = layout.num_virtual_stages, num_layers + 1
    if layout.vpp > 1 or (priced.space.even_stages and layout.pp > 1):
        each = num_layers // num_stages
        return [(1 + stage * each if stage else 0, (stage + 1) * each if stage < num_stages - 1 else end)]
    return [
        (first, last)
        for first in range(end + 1)
        for last in range(first, end + 1)
        if (first == 0) == (stage == 0) and (last == end) == (stage == num_stages - 1)
    ]
