"""Where nothing fits, each change that is told does what it says: applied, a plan exists; a little less of it, none does."""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from changed_questions import applied, has_plan, hold, with_memory

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from cost_models.records import RecordError, Workload
from planner.choose import choose
from planner.errors import InfeasibleError, TimeLimitError
from planner.readers.clusters import read_cluster
from planner.readers.models import model_and_defaults, read_model
from planner.readers.pins import Pins, parse_pins
from planner.readers.runtimes import read_runtime
from planner.what_if.infeasible import MOST_COUNTS, Deadline, _least_of


def told(problem: Problem, pins: Pins, worlds: tuple[int, ...] | None = None) -> InfeasibleError | None:
    try:
        choose(problem, pins=pins, worlds=worlds, delta=0.0)
    except InfeasibleError as error:
        return error
    return None


def random_problems(seed: int) -> Iterator[tuple[Problem, Pins, tuple[int, ...] | None]]:
    """Questions that are hard for memory: big layers on few, small GPUs."""
    draw = random.Random(seed)
    while True:
        heads = draw.choice((16, 32))
        model, _ = model_and_defaults(
            {"num_layers": draw.choice((6, 12, 24, 36)), "hidden": 128 * heads, "heads": heads, "ffn": 512 * heads, "vocab": 32000}
        )  # fmt: skip
        cluster = read_cluster(draw.choice(("a100-40x2", "a100-40x4", "a100-40x8", "h100x2")))
        cluster = with_memory(cluster, draw.choice((12, 16, 24)))
        problem = Problem(
            model=model,
            cluster=cluster,
            workload=Workload(seq=draw.choice((1024, 4096, 16384)), gbs=draw.choice((8, 12, 32))),
            runtime=read_runtime(draw.choice(("torch", "megatron", "deepspeed"))),
            calibration=shipped(),
        )
        pins = parse_pins(draw.choice(("", "", "pp=1", "zero<=1, tp<=2", "recompute=none", "tp=1, pp=1, mbs=2")))
        fewer = (cluster.num_gpus // 2,) if draw.random() < 0.2 else None
        yield problem, pins, fewer


def infeasible_problems(seed: int, count: int) -> list[tuple[Problem, Pins, tuple[int, ...] | None]]:
    found: list[tuple[Problem, Pins, tuple[int, ...] | None]] = []
    for question in random_problems(seed):
        if len(found) == count:
            return found
        if not has_plan(*question):
            found.append(question)
    raise AssertionError("unreachable")


@functools.cache
def errors_of(seed: int) -> tuple[tuple[tuple[Problem, Pins, tuple[int, ...] | None], InfeasibleError], ...]:
    found = [(question, told(*question)) for question in infeasible_problems(seed, 3)]
    return tuple((question, error) for question, error in found if error is not None)


@pytest.mark.parametrize("seed", range(6))
def test_every_change_told_does_what_it_says(seed: int) -> None:
    assert len(errors_of(seed)) == 3
    for question, error in errors_of(seed):
        changes = error.document["changes"]
        assert all(
            change["words"] in text for change, text in zip(changes, error.relaxations[-len(changes) :], strict=True)
        )
        for change in changes:
            hold(question, change)
        if "no layout is legal" not in str(error):  # more memory always helps in the end
            assert "device_memory_gib" in [change["kind"] for change in changes]


def test_the_seeds_reach_every_kind_of_change() -> None:
    kinds = {
        change["kind"] for seed in range(6) for _, error in errors_of(seed) for change in error.document["changes"]
    }
    assert kinds == {"gpus", "device_memory_gib", "without_pin", "seq", "gbs", "offload"}


def test_the_least_number_of_gpus_leaves_none_out() -> None:
    """Where "the least" is said, no smaller number of whole nodes has a plan."""
    problem = Problem(
        model=read_model("llama3-70b"), cluster=read_cluster("a100-40x8"), workload=Workload(seq=4096, gbs=64),
        runtime=read_runtime("torch"), calibration=shipped(),
    )  # fmt: skip
    error = told(problem, Pins())
    assert error is not None
    change = next(change for change in error.document["changes"] if change["kind"] == "gpus")
    assert change["least"]
    for gpus in range(8, change["value"], 8):
        assert not has_plan(*applied(problem, Pins(), None, "gpus", gpus))


def test_of_several_pools_more_nodes_of_each_are_tried_alone() -> None:
    problem = Problem(
        model=read_model("llama3-70b"), cluster=read_cluster("h100x8+a100-40x8"), workload=Workload(seq=8192, gbs=64),
        runtime=read_runtime("torch"), calibration=shipped(),
    )  # fmt: skip
    question = (problem, Pins(), None)
    error = told(*question)
    assert error is not None
    assert "fits on 16 GPUs of h100x8+a100-40x8 under no layout" in str(error)
    changes = error.document["changes"]
    assert {"gpus", "device_memory_times"} <= {change["kind"] for change in changes}
    for change in changes:
        if change["kind"] != "gpus":
            hold(question, change)
            continue
        pools = list(problem.cluster.pools)
        added = (change["value"] - problem.cluster.num_gpus) // 8
        for nodes, expected in ((added, True), *((fewer, False) for fewer in range(1, added))):
            pools[change["pool"]] = replace(
                problem.cluster.pools[change["pool"]], num_nodes=problem.cluster.pools[change["pool"]].num_nodes + nodes
            )
            bigger = replace(problem, cluster=replace(problem.cluster, pools=tuple(pools)))
            assert has_plan(bigger, Pins()) == expected


def test_a_batch_that_no_layout_divides_names_the_nearest_that_one_does() -> None:
    problem = Problem(
        model=read_model("llama3-8b"), cluster=read_cluster("h100x8"), workload=Workload(seq=4096, gbs=7),
        runtime=read_runtime("torch"), calibration=shipped(),
    )  # fmt: skip
    question = (problem, parse_pins("pp=1, tp=1"), None)
    error = told(*question)
    assert error is not None
    assert "GBS_MOD_MBSDP" in str(error)
    changes = error.document["changes"]
    assert [(change["kind"], change["value"]) for change in changes] == [("gpus", 7), ("gbs", 8)]
    for change in changes:
        hold(question, change)
    for batch in range(1, 8):
        assert not has_plan(*applied(*question, "gbs", batch))


@pytest.mark.parametrize("first", [0, 1, 7, MOST_COUNTS, MOST_COUNTS + 1, 100, 777])
def test_the_first_count_that_is_enough_is_found(first: int) -> None:
    counts = [8 * count for count in range(1, 1000)]
    found, below = _least_of(counts, lambda count: count >= counts[first], Deadline(None))
    assert found == counts[first]
    assert below == (counts[first - 1] if first else None)


def test_none_that_is_enough() -> None:
    assert _least_of([1, 2, 3], lambda count: False, Deadline(None)) == (None, None)


def test_a_time_limit_is_kept_and_said() -> None:
    problem = Problem(
        model=read_model("llama3-70b"), cluster=read_cluster("h100x8"), workload=Workload(seq=4096, gbs=64),
        runtime=read_runtime("torch"), calibration=shipped(),
    )  # fmt: skip
    with pytest.raises((InfeasibleError, TimeLimitError), match="time limit"):
        choose(problem, time_limit_s=1e-9)


def test_a_state_that_cannot_be_offloaded_is_an_error() -> None:
    with pytest.raises(RecordError, match="offloads no"):
        Problem(
            model=read_model("llama3-8b"), cluster=read_cluster("h100x8"), workload=Workload(seq=4096, gbs=64),
            runtime=read_runtime("torch"), calibration=shipped(), offload=("gradient",),
        )  # fmt: skip
