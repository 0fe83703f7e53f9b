"""Rank order: coordinates of the mesh from the plan's order and permutation."""

import pytest

torch = pytest.importorskip("torch")

from executor.errors import RefusedError
from executor.mesh import device_type, rank_tensor, start_process_group
from tests.processes.layouts import Case


def test_tensor_parallel_ranks_are_neighbours_by_default() -> None:
    ranks = rank_tensor(Case(layout="pp2 dps2 tp2 zero3 sched=1f1b").decision)
    assert ranks.shape == (2, 1, 2, 2)
    assert ranks[0, 0, 0].tolist() == [0, 1]
    assert ranks[0, 0, :, 0].tolist() == [0, 2]
    assert ranks[:, 0, 0, 0].tolist() == [0, 4]


def test_the_order_of_the_plan_decides_who_is_near() -> None:
    ranks = rank_tensor(Case(layout="pp2 dps2 tp2 zero3 sched=1f1b", order=("pp", "dp_shard", "tp")).decision)
    assert ranks[:, 0, 0, 0].tolist() == [0, 1]
    assert ranks[0, 0, :, 0].tolist() == [0, 2]
    assert ranks[0, 0, 0].tolist() == [0, 4]


def test_a_permutation_maps_positions_to_ranks() -> None:
    case = Case(layout="dpr2 dps2 tp2 zero3", permutation=(0, 2, 1, 3, 4, 6, 5, 7))
    ranks = rank_tensor(case.decision)
    assert ranks[0, 0, 0].tolist() == [0, 2]
    assert ranks[0, 0, :, 0].tolist() == [0, 1]
    assert sorted(ranks.flatten().tolist()) == list(range(8))


def test_descending_ranks_are_refused() -> None:
    with pytest.raises(RefusedError, match="puts the ranks of a tp group in descending order"):
        rank_tensor(Case(layout="tp2 dpr4", permutation=(1, 0, 2, 3, 4, 5, 6, 7)).decision)


def test_an_axis_without_a_place_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"does not name \['tp'\]"):
        rank_tensor(Case(layout="tp2 dpr4", order=("dp_replicate",)).decision)


def test_outside_torchrun_the_way_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RefusedError, match=r"RANK.* not in the environment: start the script with `torchrun"):
        start_process_group(1)


def test_the_device_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DEVICE", "cpu")
    assert device_type() == "cpu"
    monkeypatch.setenv("MESHWRIGHT_DEVICE", "tpu")
    with pytest.raises(RefusedError, match="legal values: cpu, cuda"):
        device_type()
