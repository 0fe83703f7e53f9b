"""Cells from the laws, and their columns and bounds with real prices against a full enumeration."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from random_problems import every_column

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import Model, Moe, Schedule, Workload, normalised
from cost_models.schedules import Pipeline, ScheduleError, max_in_flight
from planner.errors import InfeasibleError, InputError
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.pins import parse_pins
from planner.readers.runtimes import read_runtime
from planner.search.best_first import search
from planner.search.exhaustive import best_plan, lower_bound_of, plans
from planner.search.floors import vectors_of
from planner.search.incumbent import least_objective
from planner.search.least_r import least_lower_bound_s
from planner.search.priced import Priced
from planner.search.space import Space, enumerate_cells
from planner.search.stages import CellProblem, free_spans
from planner.search.walk import MOST_MICRO_BATCH

LLAMA = read_model("llama3-8b")


def space_on(
    cluster: str, *, gbs: int = 512, seq: int = 8192, pin: str = "", runtime: str = "torch", model: Model = LLAMA
) -> Space:
    return enumerate_cells(
        model=model,
        cluster=read_cluster(cluster),
        workload=Workload(gbs=gbs, seq=seq),
        runtime=read_runtime(runtime),
        pins=parse_pins(pin),
    )


@pytest.mark.parametrize("seq, most", [(8192, 16), (2048, 16), (1024, 32), (128, 256)])
def test_micro_batches_of_short_sequences_may_have_as_many_tokens_as_those_of_long_ones(seq: int, most: int) -> None:
    space = space_on("h100x2", gbs=1024, seq=seq)
    assert space.cells.mbs.max() == most
    assert f"micro-batches of more than {most} sequences" in space.restrictions


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 5, 6, 7, 8, 16, 64, 1000])
def test_no_gpu_is_idle_and_the_batch_is_whole(num_gpus: int) -> None:
    space = space_on(f"h100x{num_gpus}", gbs=num_gpus * 4)
    cells = space.cells
    assert (cells.world == num_gpus).all()
    assert (cells.dp * cells.mbs * cells.num_micro_batches(num_gpus * 4) == num_gpus * 4).all()
    assert (LLAMA.kv_heads % cells.tp == 0).all()
    assert (cells.mbs <= MOST_MICRO_BATCH).all()
    assert (cells.dp_shard[cells.zero == 0] == 1).all()
    assert (cells.dp_shard[cells.zero > 0] > 1).all()
    chunked = cells.schedule == Schedule.INTERLEAVED
    assert (cells.vpp[chunked] > 1).all()
    assert (cells.vpp[~chunked] == 1).all()
    assert (LLAMA.num_layers + 2 >= (cells.vpp * cells.pp)[chunked]).all()
    layouts = {str(cells.layout(index)) for index in range(len(space))}
    assert len(layouts) == len(space)
    for index in range(0, len(space), max(1, len(space) // 50)):
        layout = cells.layout(index)
        Pipeline(
            schedule=layout.schedule,
            num_devices=layout.pp,
            num_virtual_per_device=layout.vpp,
            num_micro_batches=layout.num_micro_batches(num_gpus * 4),
        )
        assert space.find(layout) == index


def test_refusals_are_counted_with_an_example() -> None:
    refusals = {refusal.code: refusal for refusal in space_on("h100x64").refusals}
    assert refusals["KV_HEADS_MOD_TP"].count == 2
    assert refusals["KV_HEADS_MOD_TP"].example == "kv_heads=8 tp=16"
    assert "MICROBATCHES_LT_PP" in refusals


def test_pins_restrict_and_are_told() -> None:
    space = space_on("h100x64", pin="tp=4|8, zero!=3, recompute=none|full, pp<=2")
    assert set(space.cells.tp.tolist()) == {4, 8}
    assert 3 not in space.cells.zero
    assert space.cells.pp.max() == 2
    assert space.recompute_kinds == ("none", "full")
    assert any("tp=4|8" in restriction for restriction in space.restrictions)


def test_a_pinned_micro_batch_may_be_larger_than_the_search_offers() -> None:
    assert set(space_on("h100x8", pin="mbs=32").cells.mbs.tolist()) == {32}


def test_a_layout_may_be_added() -> None:
    layout = normalised(tp=16, dp=4, mbs=1)
    space = enumerate_cells(
        model=LLAMA,
        cluster=read_cluster("h100x64"),
        workload=Workload(gbs=512, seq=8192),
        runtime=read_runtime("torch"),
        extra=(layout,),
    )
    assert space.find(layout) == len(space) - 1


def test_nothing_legal_names_the_reasons() -> None:
    with pytest.raises(InfeasibleError, match="no layout is legal here with the pins tp=3"):
        space_on("h100x64", pin="tp=3")
    with pytest.raises(InfeasibleError, match="GBS_MOD_MBSDP"):
        space_on("h100x7", gbs=5, pin="dp=7")


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(InputError, match=r"has 64 GPUs; legal: 1\.\.64"):
        enumerate_cells(
            model=LLAMA,
            cluster=read_cluster("h100x64"),
            workload=Workload(gbs=512, seq=8192),
            runtime=read_runtime("torch"),
            worlds=(65,),
        )


# --- columns ------------------------------------------------------------------------------------------------------------


def test_spans_are_those_of_some_chain() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        block_s = generator.integers(1, 5, size=generator.integers(3, 9)).astype(float)
        num_stages = int(generator.integers(1, len(block_s) + 1))
        limit = float(generator.integers(3, 14))
        expected = set()
        for cuts in itertools.combinations(range(1, len(block_s)), num_stages - 1):
            edges = [0, *cuts, len(block_s)]
            if all(block_s[a:b].sum() <= limit for a, b in itertools.pairwise(edges)):
                expected |= {(s, a, b - 1) for s, (a, b) in enumerate(itertools.pairwise(edges))}
        spans = free_spans(block_s, num_stages, limit)
        found = set(zip(spans.stage.tolist(), spans.first.tolist(), spans.last.tolist(), strict=True))
        # each span of a chain is there; one that is there fits, though perhaps in no whole chain
        assert expected <= found
        assert all(block_s[a : b + 1].sum() <= limit for _, a, b in found)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4), (5, 3), (8, 2)])
def test_in_flight_vectors_need_no_more_than_four_rounds(pp: int, vpp: int) -> None:
    for rounds in range(1, 9):
        pipeline = Pipeline(
            schedule=Schedule.INTERLEAVED, num_devices=pp, num_virtual_per_device=vpp, num_micro_batches=pp * rounds
        )
        assert vectors_of(pipeline) == max_in_flight(pipeline)


TINY = replace(LLAMA, name="tiny", num_layers=4, hidden=2048, ffn=8192, heads=16, kv_heads=8, head_dim=128, vocab=32000)


EXPERTS = Moe(num_experts=4, top_k=2, moe_ffn=4096, num_dense_layers=2)


def tiny(num_gpus: int, runtime: str = "torch", num_layers: int = 4, moe: Moe | None = None) -> Priced:
    problem = Problem(
        model=replace(TINY, num_layers=num_layers, moe=moe),
        cluster=read_cluster(f"h100x{num_gpus}"),
        workload=Workload(gbs=24, seq=8192),
        runtime=read_runtime(runtime),
        calibration=shipped(),
    )
    space = enumerate_cells(
        model=problem.model, cluster=problem.cluster, workload=problem.workload, runtime=problem.runtime
    )
    return Priced.of(problem, space)


@pytest.mark.parametrize(("num_gpus", "num_layers", "moe"), [(2, 4, None), (4, 4, None), (3, 5, None), (4, 4, EXPERTS)])
@pytest.mark.parametrize("share", [-0.01, 0.01, 0.4, 0.8])
def test_pruned_columns_and_closed_bounds_against_everything(
    num_gpus: int, num_layers: int, moe: Moe | None, share: float
) -> None:
    roomy = tiny(num_gpus, num_layers=num_layers, moe=moe)
    compared = tight = 0
    for index in range(0, len(roomy.space), 5 if moe is None else 31):
        if roomy.bounds.played[index]:
            continue  # test_played.py
        whole = every_column(replace(roomy, memory_limit_bytes=np.inf), index)
        peaks = {picks: _peak(whole, picks) for picks in plans(whole)}
        plain = min(peak for picks, peak in peaks.items() if not _recomputed(whole, picks))
        least = min(peaks.values())
        if plain == least and share < 0:
            continue
        priced = replace(roomy, memory_limit_bytes=least + share * (plain - least))
        cell = replace(whole, memory_limit_bytes=priced.memory_limit_bytes)
        best, bound_s = best_plan([cell]), priced.bounds_below(np.inf)[index]
        assert priced.fits(index) == (best is not None)
        found = least_objective(priced.cell(index, np.inf))
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        assert priced.objective_bounds_s[index] <= bound_s <= best.objective_s * (1 + 1e-9)
        below_s = best.objective_s * (1 + 1e-9)
        assert priced.bounds_below(below_s)[index] <= below_s
        narrow = least_objective(priced.cell(index, below_s))
        assert narrow is not None
        assert narrow.objective_s == pytest.approx(best.objective_s, rel=1e-9)
        least_r = min(lower_bound_of(cell, picks) for picks in plans(cell))
        assert priced.simulated_bounds_s[index] <= least_r * (1 + 1e-9)
        least_below_s = least_r * (1 + 1e-9)
        assert priced.simulated_bounds_below(least_below_s, np.array([index]))[0] <= least_below_s
        if cell.layout.vpp == 1:
            exact = least_lower_bound_s(priced.cell_for_bound(index, 2 * least_r), 2 * least_r)
            assert exact == pytest.approx(least_r, rel=1e-9)
        compared += 1
        tight += _recomputed(cell, best.picks) > 0
    assert compared > 3 if share > 0 else not compared
    assert tight > 0 or share < 0


def _recomputed(cell: CellProblem, picks: tuple[int, ...]) -> int:
    return int(cell.columns.recompute_counts[list(picks), 1:].sum())


def _peak(cell: CellProblem, picks: tuple[int, ...]) -> float:
    columns, pp = cell.columns, cell.layout.pp
    return max(
        sum(
            columns.state_bytes[pick] + alive * columns.activation_bytes[pick]
            for alive, pick in zip(vector, picks[device::pp], strict=True)
        )
        for device, vectors in enumerate(cell.in_flight)
        for vector in vectors
    )


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("pp", "num_micro"), [(1, 1), (1, 9), (2, 2), (3, 13), (4, 40)])
def test_in_flight_vectors_from_few_micro_batches_are_those_of_the_whole_step(
    schedule: Schedule, pp: int, num_micro: int
) -> None:
    whole = Pipeline(schedule=schedule, num_devices=pp, num_virtual_per_device=1, num_micro_batches=num_micro)
    assert vectors_of(whole) == max_in_flight(whole)


def test_a_step_of_too_many_operations_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match=r"2097152 operations; at most 1048576"):
        Pipeline(schedule=Schedule.GPIPE, num_devices=4, num_virtual_per_device=1, num_micro_batches=2**18)


@pytest.mark.parametrize(("num_gpus", "num_layers", "share"), [(4, 4, 2.0), (4, 4, 0.6), (6, 5, 0.4)])
def test_cells_that_the_search_leaves_closed_hold_no_better_plan(num_gpus: int, num_layers: int, share: float) -> None:
    """The certificate against brute force: every plan of every third cell that was left closed is written down."""
    roomy = tiny(num_gpus, num_layers=num_layers, moe=None)
    floors = roomy.memory_floors_bytes
    priced = replace(roomy, memory_limit_bytes=float(floors.min() + share * (floors.max() - floors.min())))
    choice = search(priced, delta=0.0)
    told = {verdict.index: verdict.objective_s for verdict in choice.cells}
    best_of_family: dict[int, float] = {}
    for index, objective_s in told.items():
        if objective_s is not None:
            family = int(priced.families[index])
            best_of_family[family] = min(best_of_family.get(family, np.inf), objective_s)
    closed = [index for index in range(len(priced.space)) if index not in told][::3]
    assert len(closed) > 10
    for index in closed:
        limit_s = min(choice.limit_s, best_of_family.get(int(priced.families[index]), np.inf))
        cell = priced.cell(index, np.inf)
        if cell.played is None:
            cell = replace(every_column(priced, index), memory_limit_bytes=priced.memory_limit_bytes)
        best = best_plan([cell])
        assert best is None or best.objective_s >= limit_s * (1 - 1e-9)


def test_a_pinned_schedule_asks_for_a_pipeline_and_for_a_runtime_that_has_it() -> None:
    assert (space_on("h100x8", runtime="torchtitan", pin="schedule=loopedbfs").cells.pp > 1).all()
    assert set(space_on("h100x8", pin="pp=1, schedule=gpipe").cells.schedule.tolist()) == {Schedule.GPIPE}
    with pytest.raises(
        InfeasibleError, match="runtime torch has no schedule that the pin schedule=zbv allows; it has 1f1b"
    ):
        space_on("h100x8", pin="schedule=zbv")
    with pytest.raises(InfeasibleError, match="asks for pp > 1"):
        space_on("h100x8", runtime="torchtitan", pin="schedule=zbv, pp=1")
