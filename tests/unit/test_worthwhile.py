"""Which kinds of recompute a search offers: none that a mixture of two others makes needless."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.problem import Problem
from planner.advice import problem_of
from planner.readers.pins import Pins, parse_pins
from planner.readers.requests import complete, read_request
from planner.search.worthwhile import LEAST_GAIN, on_hull
from planner.what_if.feasible import space_of


def question(model: str, cluster: str) -> Problem:
    asked = {"model": model, "cluster": cluster, "workload": {"gbs": 512, "seq": 4096}, "runtime": "megatron"}
    return problem_of(complete(read_request(asked)), shipped())


def test_the_hull_of_a_table_by_hand() -> None:
    # time 1.00 1.10 1.05 1.20 1.00, bytes 10 8 5 1 10: the second lies above the line from the first to the third
    seconds, kept = np.array([[1.0, 1.10, 1.05, 1.20, 1.0]]), np.array([[10.0, 8.0, 5.0, 1.0, 10.0]])
    assert on_hull(seconds, kept) == [0, 2, 3]
    # in another row it lies below: one row is enough
    below = np.array([[1.0, 1.01, 1.05, 1.20, 1.0]])
    assert on_hull(np.concatenate([seconds, below]), np.concatenate([kept, kept])) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.floats(1.0, 2.0), st.floats(0.1, 10.0)), min_size=1, max_size=6), st.floats(0.1, 10.0))
def test_what_is_left_out_is_never_missed_by_more_than_it_may_gain(
    kinds: list[tuple[float, float]], room: float
) -> None:
    """The least time of a stage whose layers may be divided freely between two kinds, with all kinds and with those left."""

    def least(chosen: list[int]) -> float:
        times = []
        for one in chosen:
            for two in chosen:
                (t1, b1), (t2, b2) = kinds[one], kinds[two]
                if b1 <= room:
                    times.append(t1)
                elif b2 < room:
                    times.append(t1 + (b1 - room) / (b1 - b2) * (t2 - t1))
        return min(times, default=np.inf)

    seconds, kept = (np.array([values]) for values in zip(*kinds, strict=True))
    left = on_hull(seconds, kept)
    missed = LEAST_GAIN * seconds.min() * (len(kinds) - len(left))
    assert least(left) <= least(list(range(len(kinds)))) + missed + 1e-9


def test_a_space_offers_modules_that_the_model_has() -> None:
    dense = space_of(question("llama3-8b", "h100x64"), Pins()).recompute_kinds
    latent = space_of(question("deepseek-v3", "h100x2048"), Pins()).recompute_kinds
    assert "none" in dense
    assert not {"mla_up_proj", "moe_act", "moe"} & set(dense)
    assert {"none", "mla_up_proj"} < set(latent)
    assert "core_attn" not in (*dense, *latent)  # another name of selective


def test_pinned_kinds_are_all_offered() -> None:
    asked = question("llama3-8b", "h100x64")
    pins = parse_pins("recompute=none|selective", asked.runtime.recompute_kinds)
    assert space_of(asked, pins).recompute_kinds == ("none", "selective")


def test_one_kind_is_offered_as_it_is() -> None:
    asked = question("llama3-8b", "h100x64")
    alone = replace(asked, runtime=replace(asked.runtime, recompute_kinds=("none",)))
    assert space_of(alone, Pins()).recompute_kinds == ("none",)
