"""The oracle itself: small cases that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.records import Layout, Schedule
from planner.search.exhaustive import best_plan, flaw, lower_bound_of, objective_of, plans
from planner.search.stages import CellProblem, StageColumns


def two_stages(schedule: Schedule = Schedule.ONE_F_ONE_B) -> CellProblem:
    """Three blocks of forward 1, 2, 3 and backward 2, 4, 6 on two devices, two micro-batches; splits 1+2 and 2+1."""
    rows = [(0, 0, 0, 1.0), (0, 0, 1, 3.0), (1, 1, 2, 5.0), (1, 2, 2, 3.0)]
    stage, first, last, forward = (np.array(values) for values in zip(*rows, strict=True))
    return CellProblem(
        index=0,
        layout=Layout(pp=2, schedule=schedule),
        num_micro_batches=2,
        num_blocks=3,
        columns=StageColumns(
            stage=stage,
            first=first,
            last=last,
            recompute_counts=np.zeros((4, 1), dtype=np.int64),
            forward_s=forward,
            backward_s=2 * forward,
            hop_in_s=0.5 * (stage == 1),
            hop_out_s=0.5 * (stage == 0),
            tail_s=np.array([1.0, 2.0, 3.0, 1.0]),
            played_tail_s=np.array([1.0, 2.0, 3.0, 1.0]),
            state_bytes=np.array([10.0, 20.0, 20.0, 10.0]),
            activation_bytes=np.array([1.0, 2.0, 2.0, 1.0]),
        ),
        in_flight=(((2,),), ((1,),)),
        memory_limit_bytes=100.0,
    )


def test_every_plan_is_listed() -> None:
    assert list(plans(two_stages())) == [(0, 2), (1, 3)]
    assert list(plans(replace(two_stages(), memory_limit_bytes=23.9))) == [(0, 2)]
    assert list(plans(replace(two_stages(), memory_limit_bytes=21.9))) == []


def test_j_by_hand() -> None:
    # 1 x 3 + 0.5 and 3 x 3 + 0.5 a device; hops count half at either end, forward and backward
    assert objective_of(two_stages(), (1, 3)) == pytest.approx(1 * 9.5 + 19.0 + 2.0)
    assert objective_of(two_stages(), (0, 2)) == pytest.approx(1 * 15.5 + 19.0 + 3.0)
    assert objective_of(two_stages(Schedule.GPIPE), (1, 3)) == pytest.approx((3.25 + 6.25) + 19.0 + 2.0)


def test_r_by_hand() -> None:
    # device 0: 2 x 9 + tail 2; device 1: 9 + 2 x 9 + tail 2 of device 0, or 3 + 18 + tail 1
    assert lower_bound_of(two_stages(), (1, 3)) == pytest.approx(29.0)


def test_the_best_of_all() -> None:
    best = best_plan([two_stages()])
    assert best is not None
    assert best.picks == (1, 3)
    assert best_plan([replace(two_stages(), memory_limit_bytes=1.0)]) is None


@pytest.mark.parametrize(
    ("picks", "objective_s", "words"),
    [
        ((1, 3), 30.5, None),
        ((1, 3), 30.6, "J is 30.5"),
        ((0, 3), 30.5, "begins at block 2, but block 1 is next"),
        ((1,), 30.5, "not one column for each of 2"),
        ((3, 1), 30.5, "not one column for each of 2"),
    ],
)
def test_flaws_are_named(picks: tuple[int, ...], objective_s: float, words: str | None) -> None:
    found = flaw(two_stages(), picks, objective_s)
    assert found is None if words is None else words in str(found)


def test_a_plan_that_does_not_fit_is_a_flaw() -> None:
    found = flaw(replace(two_stages(), memory_limit_bytes=23.0), (1, 3), 30.5)
    assert found == "device 0 holds 24 of 23 bytes with (2,) in flight"
