"""The properties that tie J, R and S together, each against brute force or the simulation; and where J stops bounding S."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_models.records.layout import Schedule
from cost_models.schedules import Operation, OperationKind, Pipeline, splits_backward
from cost_models.simulation import StageTimes, simulate, simulate_operations
from cost_models.step import (
    StageParts,
    cell_floors,
    closed_lower_bound_s,
    closed_objective_bound_s,
    lower_bound_s,
    objective_is_upper_bound,
    objective_s,
    stage_load_s,
    step_parts,
)

ROUNDING = 1 + 1e-12


def pipeline_of(schedule: Schedule, num_devices: int, num_virtual: int, num_micro: int) -> Pipeline:
    return Pipeline(
        schedule=schedule,
        num_devices=num_devices,
        num_virtual_per_device=num_virtual,
        num_micro_batches=num_micro,
    )


def times(forward_s, backward_s, hop_s=None, tail_s=None, *, num_devices=None, **split) -> StageTimes:
    num_stages = len(forward_s)
    return StageTimes(
        forward_s=np.array(forward_s, dtype=float),
        backward_s=np.array(backward_s, dtype=float),
        hop_s=np.zeros(num_stages - 1) if hop_s is None else np.array(hop_s, dtype=float),
        tail_s=np.zeros(num_devices or num_stages) if tail_s is None else np.array(tail_s, dtype=float),
        **split,
    )


ONE_CHUNK = [pipeline_of(Schedule.ONE_F_ONE_B, p, 1, m) for p in range(1, 7) for m in range(p, p + 7)]
GPIPE = [pipeline_of(Schedule.GPIPE, p, 1, m) for p in range(1, 6) for m in range(1, 8)]
INTERLEAVED = [
    pipeline_of(Schedule.INTERLEAVED, p, v, p * rounds) for p in range(1, 5) for v in (2, 3) for rounds in (1, 2, 3)
] + [pipeline_of(Schedule.INTERLEAVED, 4, 2, 10), pipeline_of(Schedule.INTERLEAVED, 3, 2, 2)]
LOOPED_BFS = [pipeline_of(Schedule.LOOPED_BFS, p, v, m) for p in range(1, 5) for v in (2, 3) for m in (1, 2, 5)]
SPLIT = (
    [pipeline_of(Schedule.INTERLEAVED_ZB, p, v, p * rounds) for p in range(1, 5) for v in (2, 3) for rounds in (1, 3)]
    + [
        pipeline_of(s, p, 2, m)
        for s in (Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN)
        for p in (1, 2, 4)
        for m in (1, 3, 9)
    ]
    + [pipeline_of(Schedule.DUALPIPEV, p, 2, 2 * p + more) for p in (1, 2, 3, 4) for more in (0, 3)]
)
EVERY = ONE_CHUNK + GPIPE + INTERLEAVED + LOOPED_BFS + SPLIT

seconds = st.floats(0.0, 4.0) | st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def plans(draw, pipelines: list[Pipeline]) -> tuple[Pipeline, StageTimes]:
    pipeline = draw(st.sampled_from(pipelines))

    def some(count: int) -> list[float]:
        return draw(st.lists(seconds, min_size=count, max_size=count))

    num_stages = pipeline.num_stages
    return pipeline, times(
        some(num_stages),
        some(num_stages),
        some(num_stages - 1),
        some(pipeline.num_devices),
        input_grad_s=some(num_stages),
        weight_grad_s=some(num_stages),
    )


# --- J, R, S of one plan ------------------------------------------------------------------------------------------------


def test_every_schedule_is_tested():
    assert {pipeline.schedule for pipeline in EVERY} == set(Schedule)


@settings(max_examples=400)
@given(plans(EVERY))
def test_r_is_below_every_simulation(plan):
    pipeline, spent = plan
    assert lower_bound_s(pipeline, spent) <= simulate(pipeline, spent).step_s * ROUNDING


@settings(max_examples=60)
@given(plans(LOOPED_BFS + SPLIT))
def test_j_is_the_simulated_time_where_there_is_no_formula(plan):
    pipeline, spent = plan
    assert objective_s(pipeline, spent) == simulate(pipeline, spent).step_s
    assert objective_is_upper_bound(pipeline, spent)


def test_r_of_a_split_backward_is_reached():
    """ZBV of equal chunks: the last device starts behind all forwards before it and never waits again."""
    pipeline = pipeline_of(Schedule.ZBV, 4, 2, 16)
    one = np.ones(8)
    spent = times(one, 2 * one, num_devices=4, input_grad_s=one, weight_grad_s=one)
    assert lower_bound_s(pipeline, spent) == simulate(pipeline, spent).step_s == 6 * 16 + 3


def test_r_is_reached():
    # equal stages without tails: the first device's work, or what passes it to the last one
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, 3, 1, 5)
    spent = times([1.0] * 3, [2.0] * 3)
    assert lower_bound_s(pipeline, spent) == simulate(pipeline, spent).step_s == 3.0 * (5 + 2)
    tail = times([1.0] * 3, [2.0] * 3, tail_s=[0.0, 0.0, 50.0])
    assert lower_bound_s(pipeline, tail) == simulate(pipeline, tail).step_s == 2.0 + 3.0 * 5 + 50.0


@settings(max_examples=200)
@given(plans(GPIPE))
def test_j_of_gpipe_is_an_upper_bound_and_exact_without_hops_and_tails(plan):
    pipeline, spent = plan
    assert objective_is_upper_bound(pipeline, spent)
    assert objective_s(pipeline, spent) * ROUNDING >= simulate(pipeline, spent).step_s
    bare = times(spent.forward_s, spent.backward_s)
    assert objective_s(pipeline, bare) == pytest.approx(simulate(pipeline, bare).step_s)


@settings(max_examples=200)
@given(plans(ONE_CHUNK))
def test_j_of_1f1b_is_an_upper_bound_where_it_says_so(plan):
    pipeline, spent = plan
    assume(objective_is_upper_bound(pipeline, spent))
    assert objective_s(pipeline, spent) * ROUNDING >= simulate(pipeline, spent).step_s


@settings(max_examples=200)
@given(plans(ONE_CHUNK), st.data())
def test_j_of_1f1b_bounds_what_has_longer_backwards_and_no_light_stage(plan, data):
    pipeline, drawn = plan
    share = data.draw(st.lists(st.floats(0.0, 0.5), min_size=pipeline.num_stages, max_size=pipeline.num_stages))
    load_s = 1 + np.clip(drawn.forward_s, 0.0, 1.0)  # between half of the heaviest and the heaviest
    spent = times(load_s * share, load_s * (1 - np.array(share)), tail_s=drawn.tail_s)
    assert objective_is_upper_bound(pipeline, spent)
    assert objective_s(pipeline, spent) * ROUNDING >= simulate(pipeline, spent).step_s


@pytest.mark.parametrize(
    ("num_micro", "forward_s", "backward_s", "objective", "simulated"),
    [
        (6, [0.0, 0.5, 0.0], [1.0, 0.5, 0.0], 7.0, 7.5),
        (4, [0.5, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0], 5.0, 6.0),
        (4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], 5.0, 7.0),
    ],
)
def test_j_of_1f1b_is_no_upper_bound_behind_light_last_stages(num_micro, forward_s, backward_s, objective, simulated):
    """Backwards no shorter than forwards do not suffice (the first two): the warm-up runs forwards alone."""
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, len(forward_s), 1, num_micro)
    spent = times(forward_s, backward_s)
    assert objective_s(pipeline, spent) == objective
    assert simulate(pipeline, spent).step_s == simulated
    assert not objective_is_upper_bound(pipeline, spent)


@pytest.mark.parametrize(("last_s", "bounds"), [(0.5, True), (0.4375, False)])
def test_the_condition_of_1f1b_is_sharp(last_s, bounds):
    """J = S where the last stage is just heavy enough, and J < S below."""
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, 3, 1, 6)
    spent = times([0.0, 0.5, 0.0], [1.0, 0.5, last_s])
    assert simulate(pipeline, spent).step_s == 7.5
    assert objective_s(pipeline, spent) == 7.0 + last_s
    assert objective_is_upper_bound(pipeline, spent) is bounds


@pytest.mark.parametrize("pipeline", [p for p in INTERLEAVED if p.num_micro_batches % p.num_devices == 0], ids=str)
def test_j_of_interleaved_is_exact_for_equal_chunks(pipeline):
    spent = times([1.0] * pipeline.num_stages, [2.0] * pipeline.num_stages, num_devices=pipeline.num_devices)
    assert objective_s(pipeline, spent) == pytest.approx(simulate(pipeline, spent).step_s)
    assert not objective_is_upper_bound(pipeline, spent)


def test_each_hop_counts_once_in_either_direction():
    spent = times([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], hop_s=[0.25, 0.5])
    assert stage_load_s(spent).tolist() == [3.25, 3.75, 3.5]
    assert stage_load_s(spent).sum() == 9.0 + 2 * 0.75
    one_micro_batch = pipeline_of(Schedule.GPIPE, 3, 1, 1)
    assert objective_s(one_micro_batch, spent) == simulate(one_micro_batch, spent).step_s == 10.5
    assert lower_bound_s(one_micro_batch, spent) == 9.0


def test_j_takes_the_fullest_device_and_the_longest_tail():
    interleaved = pipeline_of(Schedule.INTERLEAVED, 2, 2, 4)
    spent = times([1.0, 2.0, 1.0, 1.0], [2.0, 2.0, 2.0, 3.0], tail_s=[0.5, 0.25])
    assert objective_s(interleaved, spent) == (4 - 0.5) * (4.0 + 4.0) + 14.0 / 2 + 0.5
    gpipe = pipeline_of(Schedule.GPIPE, 2, 1, 4)
    assert objective_s(gpipe, times([1.0, 2.0], [3.0, 1.0], tail_s=[1.0, 0.0])) == 3 * (2.0 + 3.0) + 7.0 + 1.0


def test_times_of_another_pipeline_are_refused():
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, 2, 1, 2)
    for function in (objective_s, objective_is_upper_bound, lower_bound_s):
        with pytest.raises(ValueError, match="times of 3 virtual stages and 3 devices for a pipeline of 2 and 2"):
            function(pipeline, times([1.0] * 3, [1.0] * 3))


# --- closed bounds of a cell --------------------------------------------------------------------------------------------


def splits(num_blocks: int, num_stages: int):
    """All ways to give each virtual stage one block or more, in order."""
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        edges = (0, *cuts, num_blocks)
        yield list(itertools.pairwise(edges))


block_seconds = st.floats(0.01, 3.0) | st.sampled_from([0.125, 1.0])


@st.composite
def cells(draw) -> tuple[Pipeline, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A pipeline, and forward and backward seconds of its model's blocks: first kind, layers, last kind; hops and tails."""
    pipeline = draw(
        st.sampled_from(
            [
                pipeline_of(Schedule.ONE_F_ONE_B, 1, 1, 3),
                pipeline_of(Schedule.ONE_F_ONE_B, 2, 1, 2),
                pipeline_of(Schedule.ONE_F_ONE_B, 3, 1, 7),
                pipeline_of(Schedule.GPIPE, 3, 1, 1),
                pipeline_of(Schedule.GPIPE, 4, 1, 3),
                pipeline_of(Schedule.INTERLEAVED, 2, 2, 4),
                pipeline_of(Schedule.INTERLEAVED, 2, 3, 2),
                pipeline_of(Schedule.INTERLEAVED, 3, 2, 3),
            ]
        )
    )
    layers = draw(st.integers(max(1, pipeline.num_stages - 2), 7))
    kinds = [draw(st.tuples(block_seconds, block_seconds)) for _ in range(3)]
    blocks = np.array([kinds[0], *[kinds[1]] * layers, kinds[2]])
    hops = draw(st.lists(seconds, min_size=pipeline.num_stages - 1, max_size=pipeline.num_stages - 1))
    tails = draw(st.lists(seconds, min_size=pipeline.num_devices, max_size=pipeline.num_devices))
    return pipeline, blocks, np.array(kinds), np.array(hops), np.array(tails)


@settings(max_examples=150)
@given(cells())
def test_closed_bounds_are_below_r_and_j_of_every_split(cell):
    pipeline, blocks, kinds, hops, tails = cell
    assume(len(blocks) >= pipeline.num_stages)
    floors = cell_floors(
        pipeline.num_devices, [1, len(blocks) - 2, 1], kinds[:, 0], kinds[:, 1], tail_s=float(tails.min())
    )
    v, m = pipeline.num_virtual_per_device, pipeline.num_micro_batches
    closed_j = float(closed_objective_bound_s(floors, v, m))
    closed_r = float(closed_lower_bound_s(floors, pipeline.num_devices, v, m))
    all_splits = [
        np.array([blocks[i:j].sum(axis=0) for i, j in split]) for split in splits(len(blocks), pipeline.num_stages)
    ]
    plans_of_cell = [times(stages[:, 0], stages[:, 1], hops, tails) for stages in all_splits]
    least_r = min(lower_bound_s(pipeline, spent) for spent in plans_of_cell)
    least_j = min(objective_s(pipeline, spent) for spent in plans_of_cell)
    assert closed_r <= least_r * ROUNDING
    assert closed_j <= least_j * ROUNDING
    for spent in plans_of_cell[:: 1 + len(plans_of_cell) // 5]:
        assert closed_r <= simulate(pipeline, spent).step_s * ROUNDING


@settings(max_examples=150)
@given(plans(LOOPED_BFS + SPLIT))
def test_closed_bounds_hold_for_every_schedule(plan):
    pipeline, spent = plan
    backward_s = np.minimum(spent.backward_s, spent.input_grad_s + spent.weight_grad_s)
    if not splits_backward(pipeline.schedule):
        backward_s = spent.backward_s
    floors = cell_floors(
        pipeline.num_devices,
        np.ones(pipeline.num_stages),
        spent.forward_s,
        backward_s,
        tail_s=float(spent.tail_s.min()),
    )
    v, m = pipeline.num_virtual_per_device, pipeline.num_micro_batches
    whole = not splits_backward(pipeline.schedule)
    closed = float(closed_lower_bound_s(floors, pipeline.num_devices, v, m, whole))
    assert closed <= simulate(pipeline, spent).step_s * ROUNDING


def test_a_planted_bound_that_is_too_high_would_be_caught():
    """The blocks divide evenly and a stage may hold one of them: both closed bounds are reached, so neither can be raised."""
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, 2, 1, 4)
    floors = cell_floors(2, [2], [1.0], [2.0])
    spent = times([1.0, 1.0], [2.0, 2.0])
    assert float(closed_objective_bound_s(floors, 1, 4)) == objective_s(pipeline, spent) == 15.0
    one = pipeline_of(Schedule.GPIPE, 1, 1, 4)
    assert float(closed_lower_bound_s(cell_floors(1, [2], [1.0], [2.0]), 1, 1, 4)) == pytest.approx(24.0)
    assert lower_bound_s(one, times([2.0], [4.0])) == 24.0


@pytest.mark.parametrize(("num_devices", "num_micro"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 16), (8, 64)])
def test_the_closed_r_is_the_r_of_the_best_division_of_a_fluid(num_devices, num_micro):
    """Stages that shrink by (1 - 1/m) make A_p + m W_p the same for all p."""
    shrink = (1 - 1 / num_micro) ** np.arange(num_devices)
    stages = shrink / shrink.sum()
    pipeline = pipeline_of(Schedule.GPIPE, num_devices, 1, num_micro)
    floors = cell_floors(num_devices, [1] * num_devices, stages / 3, stages * 2 / 3)
    closed = closed_lower_bound_s(floors, num_devices, 1, num_micro)
    r = lower_bound_s(pipeline, times(stages / 3, stages * 2 / 3))
    assert float(closed) == pytest.approx(max(r, num_micro * float(floors.device_load_s)))


def test_where_the_backward_is_split_only_forwards_precede():
    """With the least forward + backward in place of the least forward, the bound would exceed this very step."""
    num_micro = 2
    order = ("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1")
    lists = tuple(
        tuple(Operation(OperationKind(word[0]), int(word[1]), int(word[3])) for word in line.split()) for line in order
    )
    one = np.ones(2)
    spent = StageTimes(
        forward_s=one, backward_s=2 * one, hop_s=np.zeros(1), tail_s=np.zeros(2), input_grad_s=one, weight_grad_s=one
    )
    step_s = simulate_operations(lists, spent).step_s
    floors = cell_floors(2, [2], [1.0], [2.0])
    assert step_s == 7.0
    assert float(closed_lower_bound_s(floors, 2, 1, num_micro, whole_backward=False)) == 6.5
    assert num_micro * 6.0 / 2 + 0.5 * 3.0 > step_s


def test_closed_bounds_take_arrays_of_cells():
    num_devices = np.array([1, 2, 4, 4, 4])
    num_virtual = np.array([1, 1, 1, 2, 1])
    num_micro = np.array([16, 16, 8, 8, 8])
    whole = np.array([True, True, True, True, False])
    counts, forward_s, backward_s = [1, 30, 1], [0.1, 1.0, 0.5], [0.1, 2.0, 1.5]
    floors = cell_floors(num_devices, counts, forward_s, backward_s, tail_s=[0.0, 1.0, 2.0, 3.0, 4.0])
    objective = closed_objective_bound_s(floors, num_virtual, num_micro)
    bound = closed_lower_bound_s(floors, num_devices, num_virtual, num_micro, whole)
    for cell in range(5):
        alone = cell_floors(num_devices[cell], counts, forward_s, backward_s, tail_s=float(cell))
        assert objective[cell] == closed_objective_bound_s(alone, num_virtual[cell], num_micro[cell])
        assert bound[cell] == closed_lower_bound_s(
            alone, num_devices[cell], num_virtual[cell], num_micro[cell], whole[cell]
        )


def test_whole_blocks_do_not_divide_evenly():
    floors = cell_floors([4, 4], [[1, 5, 1], [0, 5, 0]], [[0.0, 1.0, 2.0]] * 2, [[0.5, 2.0, 2.0]] * 2)
    # some device has 2 of the 6 blocks that cost 3 or more; 19.5 / 4 is less
    assert floors.device_load_s.tolist() == [6.0, 6.0]
    assert floors.total_s.tolist() == [19.5, 15.0]
    assert floors.block_s.tolist() == [0.5, 3.0]
    assert floors.block_forward_s.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="fewer blocks than pipeline devices"):
        cell_floors(8, [1, 5, 1], [1.0] * 3, [1.0] * 3)


# --- parts --------------------------------------------------------------------------------------------------------------


@st.composite
def plans_in_parts(draw) -> tuple[Pipeline, StageParts]:
    pipeline = draw(st.sampled_from(EVERY))

    def some(count: int) -> np.ndarray:
        return np.array(draw(st.lists(seconds, min_size=count, max_size=count)), dtype=float)

    num_stages, num_devices = pipeline.num_stages, pipeline.num_devices
    return pipeline, StageParts(
        forward_compute_s=some(num_stages),
        forward_exposed_s=some(num_stages),
        backward_compute_s=some(num_stages),
        backward_exposed_s=some(num_stages),
        hop_s=some(num_stages - 1),
        sync_s=some(num_devices),
        optimizer_s=some(num_devices),
        constant_s=some(num_devices),
        input_grad_compute_s=some(num_stages),
        input_grad_exposed_s=some(num_stages),
        weight_grad_s=some(num_stages),
    )


@settings(max_examples=200)
@given(plans_in_parts())
def test_parts_add_up_to_the_simulated_step_and_none_is_negative(plan):
    pipeline, parts = plan
    split = step_parts(pipeline, parts)
    step_s = simulate(pipeline, parts.times()).step_s
    assert split.step_s == pytest.approx(step_s, rel=1e-12, abs=1e-12)
    values = (split.compute_s, split.exposed_communication_s, split.bubble_s, split.optimizer_s, split.other_s)
    assert min(values) >= 0
    assert math.fsum(values) == split.step_s


def zeros(count: int) -> np.ndarray:
    return np.zeros(count)


def test_parts_of_a_step_that_can_be_counted_by_hand():
    pipeline = pipeline_of(Schedule.ONE_F_ONE_B, 2, 1, 4)
    parts = StageParts(
        forward_compute_s=np.array([1.0, 1.0]),
        forward_exposed_s=np.array([0.25, 0.25]),
        backward_compute_s=np.array([2.0, 2.0]),
        backward_exposed_s=np.array([0.75, 0.75]),
        hop_s=np.array([0.5]),
        sync_s=np.array([1.0, 0.0]),
        optimizer_s=np.array([0.5, 0.5]),
        constant_s=np.array([0.125, 0.125]),
    )
    split = step_parts(pipeline, parts)
    free = simulate(pipeline, parts.times(hops=False)).step_s
    step_s = simulate(pipeline, parts.times()).step_s
    assert free == 5 * 4.0 + 1.625
    assert split.compute_s == 12.0
    assert split.exposed_communication_s == 4.0 + 1.0 + (step_s - free)
    assert split.bubble_s == 4.0
    assert (split.optimizer_s, split.other_s) == (0.5, 0.125)
    assert split.step_s == step_s


def test_one_device_has_no_bubble():
    parts = StageParts(
        forward_compute_s=np.array([0.1]),
        forward_exposed_s=np.array([0.3]),
        backward_compute_s=np.array([0.7]),
        backward_exposed_s=zeros(1),
        hop_s=zeros(0),
        sync_s=np.array([0.1]),
        optimizer_s=np.array([0.2]),
        constant_s=zeros(1),
    )
    split = step_parts(pipeline_of(Schedule.GPIPE, 1, 1, 7), parts)
    assert split.bubble_s == pytest.approx(0.0, abs=1e-14)
    assert split.step_s == pytest.approx(7 * 1.1 + 0.3)
