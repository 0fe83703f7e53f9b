"""Operation lists against torch and golden orders; memory against closed forms; time against a naive simulation."""

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.operation_lists import V_HALF, V_MIN, stable_slots
from cost_models.records.layout import V_PLACED, Layout, Schedule
from cost_models.schedules import (
    Operation,
    OperationKind,
    Operations,
    Pipeline,
    ScheduleError,
    device_of_stage,
    held,
    in_flight,
    max_held,
    max_in_flight,
    operations,
    schedule_needs,
    splits_backward,
    stages_of_device,
)
from cost_models.simulation import Simulation, StageTimes, device_work_s, simulate, simulate_operations

KNOWN = tuple(Schedule)


def parsed(text: str) -> tuple[Operation, ...]:
    """`F0.1` is the forward of virtual stage 0, micro-batch 1."""
    pairs = [(token[0], token[1:].split(".")) for token in text.split()]
    return tuple(Operation(OperationKind(kind), int(stage), int(micro)) for kind, (stage, micro) in pairs)


def is_legal(schedule: Schedule, num_devices: int, num_virtual: int, num_micro: int) -> bool:
    return all(need.holds(num_devices, num_virtual, num_micro) for need in schedule_needs(schedule))


def legal_pipelines(
    max_devices: int, max_virtual: int, max_micro: int, schedules: tuple[Schedule, ...] = KNOWN
) -> list[Pipeline]:
    return [
        Pipeline(schedule=schedule, num_devices=p, num_virtual_per_device=v, num_micro_batches=m)
        for schedule in schedules
        for p in range(1, max_devices + 1)
        for v in range(1, max_virtual + 1)
        for m in range(1, max_micro + 1)
        if is_legal(schedule, p, v, m)
    ]


SMALL = legal_pipelines(4, 3, 9)


def each_small(check: Callable[[Pipeline], None]) -> Callable[[Schedule], None]:
    """A test of every small pipeline, one case for each schedule."""

    @pytest.mark.parametrize("schedule", list(Schedule))
    def run(schedule: Schedule) -> None:
        for pipeline in SMALL:
            if pipeline.schedule is schedule:
                try:
                    check(pipeline)
                except AssertionError as error:
                    error.add_note(str(pipeline))
                    raise

    run.__name__ = check.__name__
    return run


def lists_of(pipeline: Pipeline) -> Operations:
    return operations(
        pipeline.schedule, pipeline.num_devices, pipeline.num_virtual_per_device, pipeline.num_micro_batches
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


seconds = st.floats(0.0, 4.0) | st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def pipelines_with_times(draw, pipelines=tuple(SMALL)) -> tuple[Pipeline, StageTimes]:
    pipeline = draw(st.sampled_from(pipelines))

    def some(count: int) -> list[float]:
        return draw(st.lists(seconds, min_size=count, max_size=count))

    num_stages = pipeline.num_stages
    drawn = times(
        some(num_stages),
        some(num_stages),
        some(num_stages - 1),
        some(pipeline.num_devices),
        input_grad_s=some(num_stages),
        weight_grad_s=some(num_stages),
    )
    return pipeline, drawn


# --- orders -------------------------------------------------------------------------------------------------------------

GOLDEN = [
    (Schedule.GPIPE, 2, 1, 3, ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"]),
    (Schedule.GPIPE, 3, 1, 1, ["F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"]),
    (Schedule.ONE_F_ONE_B, 1, 1, 2, ["F0.0 B0.0 F0.1 B0.1"]),
    (
        Schedule.ONE_F_ONE_B,
        3,
        1,
        4,
        [
            "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
            "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
            "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
        ],
    ),
    (
        Schedule.INTERLEAVED,
        2,
        2,
        4,
        [
            "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
        ],
    ),
    # three micro-batches are one round of three, though two devices would make rounds of two
    (
        Schedule.INTERLEAVED,
        2,
        2,
        3,
        [
            "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2",
            "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2",
        ],
    ),
]


@pytest.mark.parametrize(("schedule", "num_devices", "num_virtual", "num_micro", "lists"), GOLDEN)
def test_golden_orders(schedule, num_devices, num_virtual, num_micro, lists):
    assert operations(schedule, num_devices, num_virtual, num_micro) == tuple(parsed(text) for text in lists)


class RecordingStage:
    """Stands where torch's schedules expect a stage, moves no tensor, and writes down what it is told to do."""

    def __init__(self, index: int):
        self.stage_index = index
        self.played: list[Operation] = []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.played.append(Operation(OperationKind.FORWARD, self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch, **_):
        self.played.append(Operation(OperationKind.BACKWARD, self.stage_index, micro_batch))

    def no_communication(self, *_):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_communication
    perform_reduce_grad = no_communication


def played_by_torch(schedule_class, pipeline: Pipeline, device: int) -> tuple[Operation, ...]:
    """What a schedule of one stage a device does in its step. Its printed order names wrong forwards on the last one."""

    class Played(schedule_class):
        def _check_inputs(self, args, kwargs, *_):
            return args, kwargs

        def nothing(self, *_):
            return None

        _initialize_stage = _maybe_compute_loss = _maybe_get_loss = _update_losses = nothing

    theirs = object.__new__(Played)  # the constructor wants process groups; the order depends on these numbers alone
    theirs._n_microbatches, theirs._num_stages, theirs.scale_grads = (
        pipeline.num_micro_batches,
        pipeline.num_devices,
        True,
    )
    theirs._stage = RecordingStage(device)
    nothing = [None] * pipeline.num_micro_batches
    theirs._step_microbatches(nothing, nothing)
    return tuple(theirs._stage.played)


def listed_by_torch(schedule_class, pipeline: Pipeline, device: int) -> tuple[Operation, ...]:
    """The list that a schedule of several stages a device is executed from; overlapped pairs one after the other, as torch runs them."""
    theirs = object.__new__(schedule_class)
    theirs._n_microbatches = pipeline.num_micro_batches
    theirs.pp_group_size, theirs.n_local_stages = pipeline.num_devices, pipeline.num_virtual_per_device
    theirs.number_of_rounds = max(1, pipeline.num_micro_batches // pipeline.num_devices)
    theirs.microbatches_per_round = pipeline.num_micro_batches // theirs.number_of_rounds
    theirs._stages, theirs.num_stages = [None] * pipeline.num_virtual_per_device, pipeline.num_stages
    return tuple(
        Operation(OperationKind(action.computation_type.value), action.stage_index, action.microbatch_index)
        for entry in theirs._calculate_single_rank_operations(device)
        if entry is not None
        for action in (entry.sub_actions or (entry,))
    )


def test_the_orders_are_those_of_torch():
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    oracles = {
        Schedule.GPIPE: (played_by_torch, torch_schedules.ScheduleGPipe),
        Schedule.ONE_F_ONE_B: (played_by_torch, torch_schedules.Schedule1F1B),
        Schedule.INTERLEAVED: (listed_by_torch, torch_schedules.ScheduleInterleaved1F1B),
        Schedule.LOOPED_BFS: (listed_by_torch, torch_schedules.ScheduleLoopedBFS),
        Schedule.INTERLEAVED_ZB: (listed_by_torch, torch_schedules.ScheduleInterleavedZeroBubble),
        Schedule.ZBV: (listed_by_torch, torch_schedules.ScheduleZBVZeroBubble),
        Schedule.DUALPIPEV: (listed_by_torch, torch_schedules.ScheduleDualPipeV),
    }
    pipelines = legal_pipelines(5, 3, 12, tuple(oracles))
    assert {pipeline.schedule for pipeline in pipelines} == set(oracles)
    assert len(pipelines) > 400
    for pipeline in pipelines:
        order_of, schedule_class = oracles[pipeline.schedule]
        theirs = tuple(order_of(schedule_class, pipeline, device) for device in range(pipeline.num_devices))
        assert lists_of(pipeline) == theirs, pipeline


@pytest.mark.parametrize("schedule", Schedule)
def test_torch_finds_every_list_valid_and_can_add_its_messages(schedule):
    """V-half and V-min too, which torch does not have: its runtime takes any lists that pass these two."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = {kind.value: kind for kind in (theirs.F, theirs.B, theirs.I, theirs.W)}
    for num_devices, num_micro in ((1, 2), (2, 4), (3, 7), (4, 12), (6, 12)):
        chunks = 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
        if not is_legal(schedule, num_devices, chunks, num_micro):
            continue
        listed = {
            device: [theirs._Action(stage, kinds[kind.value], micro) for kind, stage, micro in one]
            for device, one in enumerate(operations(schedule, num_devices, chunks, num_micro))
        }
        num_stages = num_devices * chunks
        placed = theirs._validate_schedule(listed, num_devices, num_stages, num_micro)
        assert placed == {s: device_of_stage(s, num_devices, schedule) for s in range(num_stages)}
        with_messages = theirs._add_send_recv(
            {device: list(one) for device, one in listed.items()}, placed.__getitem__, num_stages
        )
        crossings = sum(placed[s] != placed[s + 1] for s in range(num_stages - 1))
        messages = sum(len(one) for one in with_messages.values()) - sum(len(one) for one in listed.values())
        assert messages == 4 * crossings * num_micro  # a send and a receive, forward and backward


def test_the_legal_micro_batches_that_an_error_names_are_legal():
    wrong = [(p, m) for p in range(1, 9) for m in range(1, 40) if not is_legal(Schedule.INTERLEAVED, p, 2, m)]
    assert (4, 9) in wrong
    for num_devices, num_micro in wrong:
        with pytest.raises(ScheduleError, match="equal rounds; legal: ") as error:
            operations(Schedule.INTERLEAVED, num_devices, 2, num_micro)
        words = str(error.value).split("legal: ")[1].split(" micro")[0].split(" or ")
        below, above = map(int, words)
        legal = [m for m in range(below, above + 1) if is_legal(Schedule.INTERLEAVED, num_devices, 2, m)]
        assert below < num_micro < above
        assert legal == [below, above]


@pytest.mark.parametrize(
    ("schedule", "numbers", "words"),
    [
        (Schedule.ONE_F_ONE_B, (4, 1, 3), "num_micro_batches=3: 1f1b needs at least .*; legal: 4 or more"),
        (Schedule.ONE_F_ONE_B, (4, 2, 8), "one virtual stage on each device; legal: 1 virtual stage"),
        (Schedule.GPIPE, (4, 2, 8), "one virtual stage on each device"),
        (Schedule.INTERLEAVED, (4, 1, 8), "at least two virtual stages .*; legal: 2 or more"),
        (Schedule.INTERLEAVED, (4, 2, 9), "legal: 8 or 10 micro-batches"),
        (Schedule.GPIPE, (4, 1, 0), "num_micro_batches=0 is not a positive number"),
        (Schedule.GPIPE, (0, 1, 1), "num_devices=0 is not a positive number"),
        (Schedule.LOOPED_BFS, (4, 1, 8), "at least two virtual stages"),
        (Schedule.INTERLEAVED_ZB, (4, 2, 9), "legal: 8 or 10 micro-batches"),
        (Schedule.ZBV, (2, 1, 8), "exactly two virtual stages on each device; legal: 2 virtual stages"),
        (Schedule.V_MIN, (2, 3, 8), "exactly two virtual stages on each device"),
        (Schedule.DUALPIPEV, (4, 2, 7), "at least as many micro-batches as virtual stages; legal: 8 or more"),
    ],
)
def test_an_illegal_pipeline_is_one_clear_error(schedule, numbers, words):
    with pytest.raises(ScheduleError, match=words):
        operations(schedule, *numbers)


@each_small
def test_each_stage_runs_each_micro_batch_once_each_way_on_its_device(pipeline):
    lists = lists_of(pipeline)
    did = defaultdict(list)
    for device, listed in enumerate(lists):
        for kind, stage, micro in listed:
            did[stage, micro].append((kind.value, device))
    assert len(did) == pipeline.num_stages * pipeline.num_micro_batches
    for (stage, _), done in did.items():
        device = device_of_stage(stage, pipeline.num_devices, pipeline.schedule)
        assert {who for _, who in done} == {device}
        assert "".join(kind for kind, _ in done) in (("FB", "FIW") if splits_backward(pipeline.schedule) else ("FB",))
    for device, own in enumerate(pipeline.stages_of_devices):
        assert {operation.stage for operation in lists[device]} == set(own)


def test_placements():
    assert stages_of_device(1, 4, 3) == (1, 5, 9)
    assert [stages_of_device(p, 3, 2, Schedule.ZBV) for p in range(3)] == [(0, 5), (1, 4), (2, 3)]
    pipeline = Pipeline(schedule=Schedule.V_HALF, num_devices=3, num_virtual_per_device=2, num_micro_batches=1)
    assert pipeline.by_device(np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])).tolist() == [33.0, 18.0, 12.0]


def test_which_schedules_split_the_backward():
    split = {schedule for schedule in Schedule if splits_backward(schedule)}
    assert split == {Schedule.INTERLEAVED_ZB, Schedule.ZBV, Schedule.DUALPIPEV, Schedule.V_HALF, Schedule.V_MIN}
    for pipeline in SMALL:
        kinds = {operation.kind for listed in lists_of(pipeline) for operation in listed}
        assert (OperationKind.WEIGHT_GRAD in kinds) <= (pipeline.schedule in split)


def test_on_one_device_a_layout_of_any_schedule_is_plain_accumulation():
    for schedule in set(Schedule) - {Schedule.GPIPE}:
        assert Pipeline.of(Layout(schedule=schedule), 4).schedule is Schedule.ONE_F_ONE_B
    assert Pipeline.of(Layout(pp=2, vpp=2, schedule=Schedule.ZBV), 4).schedule is Schedule.ZBV


@pytest.mark.parametrize("slopes", [V_MIN, V_HALF])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8, 16])
def test_the_stable_pattern_repeats_without_two_operations_at_once_and_in_order(slopes, num_devices):
    pattern = stable_slots(slopes, num_devices)
    for own in pattern:
        assert len({slot % 6 for slot in own}) == 6
        f0, f1, i1, i0, w1, w0 = own
        assert f0 < f1 < i1 < i0
        assert (w1 > i1, w0 > i0) == (True, True)
    for one, following in itertools.pairwise(pattern):
        assert following[0] - one[0] == slopes.forward_down
        assert one[1] - following[1] == slopes.forward_up
        assert following[2] - one[2] == slopes.backward_down
        assert one[3] - following[3] == slopes.backward_up


# --- memory in flight ---------------------------------------------------------------------------------------------------


def most_in_flight(pipeline: Pipeline, device: int) -> int:
    """Closed form of the micro-batches alive at once on a device, over its chunks. V-shaped: where the step is long enough."""
    p, v, m = pipeline.num_devices, pipeline.num_virtual_per_device, pipeline.num_micro_batches
    per_round = m // max(1, m // p)
    match pipeline.schedule:
        case Schedule.GPIPE | Schedule.LOOPED_BFS:
            return v * m
        case Schedule.ONE_F_ONE_B:
            return min(m, p - device)
        case Schedule.INTERLEAVED:
            return min(v * m, (v - 1) * per_round + 2 * (p - 1 - device) + 1)
        case Schedule.INTERLEAVED_ZB:  # device p waits with W for as many turns as the warm-up is shorter there
            return min(v * m, (v - 1) * per_round + p)
        case Schedule.ZBV:
            return 2 * p
        case Schedule.DUALPIPEV:
            return 2 * p + 1
        case Schedule.V_HALF:
            return 2 * (p // 2) + 2
        case Schedule.V_MIN:
            return 2 * ((p + 4) // 3)


@each_small
def test_in_flight_has_its_closed_form(pipeline):
    long_enough = pipeline.num_devices * 2 + 1
    for device, vectors in enumerate(max_in_flight(pipeline)):
        alive, most = max(sum(vector) for vector in vectors), most_in_flight(pipeline, device)
        if pipeline.schedule not in V_PLACED:
            assert alive == most
        else:
            assert alive <= most
            if device == 0 and pipeline.num_micro_batches >= long_enough and pipeline.schedule is not Schedule.V_MIN:
                assert alive == most


@pytest.mark.parametrize("num_devices", [*range(1, 13), 16, 24, 64])
def test_in_flight_of_the_v_shaped_schedules_in_long_steps(num_devices):
    """V-half keeps p/2 + 1 and V-min (p + 4)/3 micro-batches of a device's layers, 1f1b p: Qi 2024, table 1."""
    for schedule in (Schedule.ZBV, Schedule.DUALPIPEV, Schedule.V_HALF, Schedule.V_MIN):
        pipeline = Pipeline(
            schedule=schedule, num_devices=num_devices, num_virtual_per_device=2, num_micro_batches=4 * num_devices + 2
        )
        most = [max(sum(vector) for vector in vectors) for vectors in max_in_flight(pipeline)]
        assert max(most) == most_in_flight(pipeline, 0), schedule


@each_small
def test_in_flight_vectors_cover_every_moment_and_none_is_idle(pipeline):
    for listed, vectors in zip(lists_of(pipeline), max_in_flight(pipeline), strict=True):
        stages = sorted({operation.stage for operation in listed})
        moments = set()
        alive: dict[int, int] = defaultdict(int)
        for operation in listed:
            alive[operation.stage] += {"F": 1, "I": 0}.get(operation.kind.value, -1)
            moments.add(tuple(alive[stage] for stage in stages))
        assert set(vectors) <= moments
        for moment in moments:
            assert any(all(a <= b for a, b in zip(moment, vector, strict=True)) for vector in vectors)
        for one, other in itertools.permutations(vectors, 2):
            assert not all(a <= b for a, b in zip(one, other, strict=True))


def test_a_device_with_two_chunks_can_have_several_maximal_vectors():
    pipeline = Pipeline(schedule=Schedule.INTERLEAVED, num_devices=2, num_virtual_per_device=2, num_micro_batches=4)
    assert max_in_flight(pipeline) == (((4, 1), (3, 2)), ((3, 0), (2, 1)))


def test_a_split_backward_keeps_its_activations_until_the_weights_gradient():
    assert in_flight(parsed("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")) == ((2,),)
    assert in_flight(parsed("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1")) == ((1,),)
    assert in_flight(parsed("F0.0 F2.0 B2.0 F2.1 B2.1 B0.0 F0.1 F0.2")) == ((2, 0), (1, 1))


def test_what_waits_for_i_and_what_waits_for_w_are_told_apart():
    assert held(parsed("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")) == ((1, 1),)
    assert held(parsed("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1")) == ((2, 0), (1, 1), (0, 2))
    assert held(parsed("F0.0 F2.0 I2.0 W2.0 I0.0 W0.0")) == ((1, 1, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0))
    for pipeline in SMALL:
        for vectors, pairs in zip(max_in_flight(pipeline), max_held(pipeline), strict=True):
            v = pipeline.num_virtual_per_device
            sums = {tuple(a + b for a, b in zip(pair[:v], pair[v:], strict=True)) for pair in pairs}
            assert set(vectors) <= sums
            if not splits_backward(pipeline.schedule):
                assert pairs == tuple(vector + (0,) * v for vector in vectors)


# --- time ---------------------------------------------------------------------------------------------------------------


def naive_ends_s(lists: Operations, spent: StageTimes) -> dict[Operation, float]:
    """End of each operation, straight from the rules: nothing shared with the code under test."""
    last_stage = max(operation.stage for listed in lists for operation in listed)
    forward, gradient = OperationKind.FORWARD, (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)
    seconds_of = {"F": spent.forward_s, "B": spent.backward_s, "I": spent.input_grad_s, "W": spent.weight_grad_s}
    ends: dict[Operation, float] = {}
    positions, clocks = [0] * len(lists), [0.0] * len(lists)
    while sum(positions) < sum(map(len, lists)):
        for device, listed in enumerate(lists):
            if positions[device] == len(listed):
                continue
            kind, stage, micro = operation = listed[positions[device]]
            awaited, hop = (), 0.0
            if kind is forward and stage > 0:
                awaited, hop = (Operation(forward, stage - 1, micro),), spent.hop_s[stage - 1]
            elif kind in gradient and stage < last_stage:
                awaited = tuple(Operation(g, stage + 1, micro) for g in gradient)
                hop = spent.hop_s[stage]
            arrived = [ends[a] + hop for a in awaited if a in ends]
            if awaited and not arrived:
                continue
            clocks[device] = max(clocks[device], *arrived, 0.0) + seconds_of[kind][stage]
            ends[operation] = clocks[device]
            positions[device] += 1
    return ends


def by_operation(simulation: Simulation) -> dict[Operation, tuple[float, float]]:
    columns = (simulation.kind, simulation.stage, simulation.micro_batch, simulation.start_s, simulation.end_s)
    return {
        Operation(simulation.kinds[kind], stage, micro): (start, end)
        for kind, stage, micro, start, end in zip(*(c.tolist() for c in columns), strict=True)
    }


@settings(max_examples=200)
@given(pipelines_with_times())
def test_simulation_is_the_naive_one(drawn):
    pipeline, spent = drawn
    simulation = simulate(pipeline, spent)
    lists = lists_of(pipeline)
    ends = naive_ends_s(lists, spent)
    assert {operation: end for operation, (_, end) in by_operation(simulation).items()} == pytest.approx(ends)
    device_ends = [ends[listed[-1]] for listed in lists]
    assert simulation.device_end_s == pytest.approx(device_ends)
    assert simulation.step_s == pytest.approx(max(np.add(device_ends, spent.tail_s)))
    finish = simulation.device_end_s + simulation.tail_s
    assert finish[simulation.critical_device] == simulation.step_s
    seconds_of = {"F": spent.forward_s, "B": spent.backward_s, "I": spent.input_grad_s, "W": spent.weight_grad_s}
    own = [[seconds_of[o.kind.value][o.stage] for o in one] for one in lists]
    assert simulation.device_busy_s == pytest.approx([sum(one) for one in own])
    assert device_work_s(pipeline, spent) == pytest.approx(simulation.device_busy_s)


@settings(max_examples=100)
@given(pipelines_with_times())
def test_a_device_runs_one_operation_at_a_time(drawn):
    pipeline, spent = drawn
    simulation = simulate(pipeline, spent)
    for device in range(pipeline.num_devices):
        mine = simulation.device == device
        assert (simulation.start_s[mine][1:] >= simulation.end_s[mine][:-1] - 1e-12).all()
        assert simulation.start_s[mine][0] >= -1e-12


@settings(max_examples=100)
@given(pipelines_with_times(), st.data())
def test_slower_pieces_never_make_a_faster_step(drawn, data):
    pipeline, spent = drawn
    names = ["forward_s", "backward_s", "input_grad_s", "weight_grad_s", "hop_s", "tail_s"]
    name = data.draw(st.sampled_from(names))
    values = {key: getattr(spent, key).copy() for key in names}
    if not len(values[name]):
        return
    values[name][data.draw(st.integers(0, len(values[name]) - 1))] += 1.5
    assert simulate(pipeline, StageTimes(**values)).step_s >= simulate(pipeline, spent).step_s - 1e-12


@settings(max_examples=60)
@given(pipelines_with_times(tuple(p for p in SMALL if p.schedule is Schedule.ONE_F_ONE_B)))
def test_1f1b_read_backwards_is_1f1b(drawn):
    pipeline, spent = drawn
    without_tail = times(spent.forward_s, spent.backward_s, spent.hop_s)
    mirrored = times(spent.backward_s, spent.forward_s, spent.hop_s)
    assert simulate(pipeline, without_tail).step_s == pytest.approx(simulate(pipeline, mirrored).step_s)


def equal_times(pipeline: Pipeline) -> StageTimes:
    """F = I = W = 1 on every virtual stage, and B = I + W."""
    one = np.ones(pipeline.num_stages)
    return times(one, 2 * one, num_devices=pipeline.num_devices, input_grad_s=one, weight_grad_s=one)


@each_small
def test_equal_stages_have_their_closed_form(pipeline):
    p, v, m = pipeline.num_devices, pipeline.num_virtual_per_device, pipeline.num_micro_batches
    step_s = simulate(pipeline, equal_times(pipeline)).step_s
    work_s = 3.0 * m * v
    match pipeline.schedule:
        case Schedule.GPIPE | Schedule.ONE_F_ONE_B:
            assert step_s == work_s + 3 * (p - 1)
        case Schedule.INTERLEAVED if m % p == 0:
            assert step_s == work_s + 3 * (p - 1)
        case Schedule.LOOPED_BFS if m >= p:
            assert step_s == work_s + 3 * (p - 1)
        case Schedule.INTERLEAVED_ZB if m % p == 0 and m > p:
            assert step_s == work_s + p - 1
        case Schedule.ZBV | Schedule.DUALPIPEV if m >= 2 * p:
            assert step_s == work_s + p - 1
        case _:  # short steps, and rounds that are not as long as the pipeline, leave bubbles or fill them later
            assert step_s >= work_s + p - 1


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 6, 8, 9, 16])
def test_bubbles_of_v_half_and_v_min_have_their_closed_form(num_devices):
    bubbles = {}
    for schedule in (Schedule.V_HALF, Schedule.V_MIN):
        pipeline = Pipeline(
            schedule=schedule, num_devices=num_devices, num_virtual_per_device=2, num_micro_batches=4 * num_devices
        )
        bubbles[schedule] = simulate(pipeline, equal_times(pipeline)).step_s - 24 * num_devices
    assert bubbles[Schedule.V_HALF] == 7 * num_devices // 2 - 3
    assert bubbles[Schedule.V_MIN] == 4 * num_devices - (3 if num_devices % 3 == 0 else 5)
    if num_devices > 2:
        assert max(bubbles.values()) < 6 * (num_devices - 1)  # that of 1f1b


def test_a_large_pipeline_is_simulated():
    pipeline = Pipeline(schedule=Schedule.ONE_F_ONE_B, num_devices=64, num_virtual_per_device=1, num_micro_batches=512)
    assert simulate(pipeline, times([1.0] * 64, [2.0] * 64)).step_s == pytest.approx(3.0 * (512 + 63))


def test_a_split_backward_lets_the_weights_gradient_wait():
    # zero bubble by hand: nobody waits for W, so it fills what would be idle
    lists = (parsed("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1"), parsed("F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"))
    one = np.ones(2)
    simulation = simulate_operations(lists, times(one, 2 * one, input_grad_s=one, weight_grad_s=one))
    assert simulation.step_s == 7.0
    assert by_operation(simulation)[Operation(OperationKind.INPUT_GRAD, 0, 0)] == (3.0, 4.0)


@settings(max_examples=60)
@given(pipelines_with_times(tuple(p for p in SMALL if not splits_backward(p.schedule))), st.floats(0.0, 1.0))
def test_split_backwards_are_simulated_as_the_naive_one_does(drawn, share):
    pipeline, spent = drawn
    lists = tuple(
        tuple(
            half
            for kind, stage, micro in listed
            for half in ([Operation(k, stage, micro) for k in ("IW" if kind == "B" else kind)])
        )
        for listed in lists_of(pipeline)
    )
    lists = tuple(tuple(Operation(OperationKind(o.kind), o.stage, o.micro_batch) for o in one) for one in lists)
    split = times(
        spent.forward_s,
        spent.backward_s,
        spent.hop_s,
        spent.tail_s,
        input_grad_s=spent.backward_s * share,
        weight_grad_s=spent.backward_s * (1 - share),
    )
    simulation = simulate_operations(lists, split)
    ends = naive_ends_s(lists, split)
    assert {operation: end for operation, (_, end) in by_operation(simulation).items()} == pytest.approx(ends)
    assert simulation.step_s <= simulate(pipeline, spent).step_s + 1e-9


def test_a_v_placement_is_simulated_from_its_lists():
    lists = (parsed("F0.0 F3.0 B3.0 B0.0"), parsed("F1.0 F2.0 B2.0 B1.0"))
    simulation = simulate_operations(lists, times([1.0] * 4, [2.0] * 4, [0.5, 0.0, 0.5], [0.0, 7.0]))
    assert simulation.device_end_s.tolist() == [14.0, 11.5]
    assert simulation.step_s == 18.5


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
            "deadlock: device 0 waits at B s0 m0, device 1 waits at F s1 m1",
        ),
        (["F0.0 B0.0", "B1.0 F1.0"], "must follow on one device"),
        (["F0.0 B1.0", "F1.0 B0.0"], "must follow on one device"),
        (["F0.0 F0.0 B0.0"], "kind F occurs twice"),
        (["F0.0 B0.0 I0.0 W0.0"], "kind B occurs twice"),
        (["F0.0 F0.1 B0.0"], "B or I of virtual stage 0, micro-batch 1 is missing"),
        (["F0.0 F1.1 B0.0 B1.1"], "F of virtual stage 0, micro-batch 1 is missing"),
        (["F0.0 I0.0"], "each I needs one W"),
        (["F0.0 B0.0 W0.0"], "each I needs one W"),
        (["F0.0 W0.0 I0.0"], "must follow on one device"),
        (["F0.0 B0.0", ""], "each device needs at least one operation"),
        ([], "each device needs at least one operation"),
    ],
)
def test_lists_that_cannot_run_are_refused(lists, words):
    with pytest.raises(ScheduleError, match=words):
        simulate_operations(tuple(parsed(text) for text in lists), times([1.0, 1.0], [1.0, 1.0]))


def test_times_of_another_shape_are_refused():
    pipeline = Pipeline(schedule=Schedule.GPIPE, num_devices=2, num_virtual_per_device=1, num_micro_batches=2)
    with pytest.raises(ValueError, match="times of 3 virtual stages for a pipeline of 2"):
        simulate(pipeline, times([1.0] * 3, [1.0] * 3))
    with pytest.raises(ValueError, match="tail_s has 1 entries for 2 devices"):
        simulate(pipeline, times([1.0] * 2, [1.0] * 2, tail_s=[0.0]))
    with pytest.raises(ValueError, match="times of 2 virtual stages for lists of 1"):
        simulate_operations((parsed("F0.0 B0.0"),), times([1.0] * 2, [1.0] * 2))
    with pytest.raises(ValueError, match=r"hop_s has shape \(2,\); 2 virtual stages need \(1,\)"):
        times([1.0] * 2, [1.0] * 2, hop_s=[0.0, 0.0])
    with pytest.raises(ValueError, match=r"backward_s=.*: seconds are finite and not negative"):
        times([1.0, 1.0], [1.0, -1.0])
    with pytest.raises(ValueError, match=r"forward_s=.*: seconds are finite and not negative"):
        times([1.0, float("nan")], [1.0, 1.0])
    with pytest.raises(ValueError, match="input_grad_s and weight_grad_s are needed"):
        simulate_operations((parsed("F0.0 I0.0 W0.0"),), times([1.0], [1.0]))
