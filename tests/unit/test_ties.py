"""Of plans that the model cannot tell apart the simplest is taken, and none that is known to be slower."""

import pytest

from cost_models.records import Layout, normalised
from planner.search.ties import TIE, complexity, simplest

PLAIN, PIPED, CHUNKED = normalised(dp=64, mbs=2), normalised(dp=16, tp=2, pp=2), normalised(dp=16, pp=4, vpp=2)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 1.0), 0),
        ((1.0 + 0.99 * TIE, 1.0, 1.0), 0),
        ((1.0 + 1.01 * TIE, 1.0, 1.0), 1),
        ((1.1, 1.01, 1.0), 1),
        ((1.1, 1.1, 1.0), 2),
    ],
)
def test_the_simplest_within_a_tie(seconds: tuple[float, ...], expected: int) -> None:
    assert simplest([PLAIN, PIPED, CHUNKED], seconds) == expected


def test_of_equally_simple_plans_the_fastest() -> None:
    layouts = [normalised(dp=8, zero=zero) for zero in (0, 1, 3)]
    assert simplest(layouts, (1.01, 1.0, 1.005)) == 1


def test_fewer_cuts_before_smaller_batches() -> None:
    order = [Layout(mbs=8), Layout(tp=2), Layout(tp=2, mbs=4), Layout(pp=2, vpp=2), Layout(pp=4)]
    assert sorted(order, key=complexity) == order
