"""Random chains of unlike layers on few GPUs: the plan is the best of all plans, each priced one by one."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import DEVICE, MODEL, NODE, RUNTIME, cluster, problem

from cost_models.problem import Columns, Problem
from cost_models.records import LayerGroup, Model, Moe, Workload
from cost_models.schedules import Pipeline
from cost_models.stage import price_columns
from planner.choose import choose
from planner.errors import InfeasibleError
from planner.readers.pins import parse_pins
from planner.search.exhaustive import best_plan
from planner.search.floors import vectors_of
from planner.search.priced import Priced
from planner.search.stages import CellProblem, StageColumns

PINS = parse_pins("vpp=1, tp=1|2, pp=2|4, mbs=1|2, zero<=1", RUNTIME.recompute_kinds)


def random_chain(draw: random.Random) -> Model:
    """Four to six layers of two to four unlike kinds, now and then behind a tower on tokens of its own."""
    routed = draw.random() < 0.4
    base = replace(MODEL, moe=Moe(num_experts=4, top_k=1, moe_ffn=2048) if routed else None)
    kinds = [
        LayerGroup(
            ffn=1024 * draw.randint(2, 12),
            window=draw.choice([None, 0, 256]),
            heads=draw.choice([None, 16, 32]),
            experts=draw.random() < 0.5 if routed else None,
        )
        for _ in range(draw.randint(2, 3))
    ]
    layers = [draw.choice(kinds) for _ in range(draw.randint(4, 6))]
    if draw.random() < 0.5:
        tower = LayerGroup(
            hidden=1024, heads=8, kv_heads=8, ffn=4096, causal=False, tokens=1024, experts=False if routed else None
        )
        layers[:1] = [
            LayerGroup(projection=(588, 1024), tokens=1024, other_params=1024**2),
            tower,
            LayerGroup(projection=(1024, 2048), tokens=1024),
        ]
    return replace(base, num_layers=len(layers), layer_groups=tuple(layers))


def random_problem(seed: int) -> Problem:
    """A chain on four GPUs with so little memory that many plans must recompute."""
    draw = random.Random(seed)
    model = random_chain(draw)
    state = 16 * model.num_params / draw.choice([1, 2, 4])
    memory = int(state + 2**30 * draw.uniform(0.5, 8.0))
    device = replace(DEVICE, memory_bytes=memory)
    kind = replace(NODE, device=device, gpus_per_node=4, num_nics=4)
    return problem(
        model=model,
        cluster=cluster(1, kind),
        workload=Workload(seq=draw.choice([2048, 8192]), gbs=16),
        runtime=replace(RUNTIME, uneven_stages=True),
    )


def every_plan(priced: Priced, index: int) -> CellProblem:
    """A cell with all its columns: every span of blocks on every stage, under every mixture of two kinds of recompute."""
    layout, num_micro = priced.layout(index), int(priced.num_micro_batches[index])
    last_block = priced.problem.model.num_blocks - 1
    kinds = len(priced.prices.recompute_kinds)
    rows = []
    for stage, first in itertools.product(range(layout.pp), range(last_block + 1)):
        for last in range(first, last_block + 1):
            if (first == 0) != (stage == 0) or (last == last_block) != (stage == layout.pp - 1):
                continue
            layers = last - first + 1 - (first == 0) - (last == last_block)
            mixtures = itertools.product(range(layers + 1), repeat=kinds)
            rows += [
                (stage, first, last, mixture)
                for mixture in mixtures
                if sum(mixture) == layers and sum(count > 0 for count in mixture) <= 2
            ]
    stage, first, last, counts = (np.array(values) for values in zip(*rows, strict=True))
    columns = Columns(stage=stage, first=first, last=last, recompute_counts=counts)
    found = price_columns(priced.prices, index, columns)
    pipeline = Pipeline(
        schedule=layout.schedule, num_devices=layout.pp, num_virtual_per_device=1, num_micro_batches=num_micro
    )
    return CellProblem(
        index=index,
        layout=layout,
        num_micro_batches=num_micro,
        num_blocks=last_block + 1,
        columns=StageColumns(
            stage=stage,
            first=first,
            last=last,
            recompute_counts=counts,
            forward_s=found.forward_s,
            backward_s=found.backward_s,
            hop_in_s=found.hop_in_s,
            hop_out_s=found.hop_out_s,
            tail_s=found.tail_s,
            played_tail_s=found.tail_s,
            state_bytes=found.fixed_bytes,
            activation_bytes=found.activation_bytes,
        ),
        in_flight=vectors_of(pipeline),
        memory_limit_bytes=priced.memory_limit_bytes,
    )


def those_that_fit(cell: CellProblem) -> CellProblem:
    """The cell without columns that do not fit alone: what is left is few enough to try every chain of them."""
    columns = cell.columns
    alive = np.array([max(vector[0] for vector in vectors) for vectors in cell.in_flight])[columns.stage]
    return cell.with_columns(
        columns.take(columns.state_bytes + alive * columns.activation_bytes <= cell.memory_limit_bytes)
    )


@pytest.mark.parametrize("seed", range(16))
def test_the_plan_of_a_random_chain_is_the_best_of_all(seed):
    whole = random_problem(seed)
    try:
        answer = choose(whole, pins=PINS)
    except InfeasibleError:
        pytest.skip("nothing fits")
    priced = answer.priced
    cells = [those_that_fit(every_plan(priced, index)) for index in range(len(priced.space))]
    found = best_plan(cells)
    assert found is not None
    assert answer.choice.objective_s == pytest.approx(found.objective_s, rel=1e-9)
