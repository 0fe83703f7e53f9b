"""The probe's reasoning, on made-up answers: who meets whom, domains, curves, the cluster that comes of it, and time-outs."""

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.records import Measurement, MeasurementKind, Probe, RecordError, Silence, from_json, to_json
from planner.profiling.domains import fast_domains, leaves
from planner.profiling.pairs import curve_of, robust_s
from planner.profiling.probe import ProbeRequest, answering, first_words, within
from planner.profiling.probed_cluster import Answers, probe_of
from planner.profiling.tournament import tournament
from planner.report.live_probe_text import live_probe_text

FAST, SLOW = 1e11, 1e10
SIZES = (8, 1_000, 100_000, 10_000_000)


@given(st.integers(2, 70))
def test_every_pair_meets_once_and_no_rank_is_in_two_places(ranks: int) -> None:
    games = tournament(ranks, all_pairs_ranks=70)
    assert sorted(pair for pairs in games.rounds for pair in pairs) == list(combinations(range(ranks), 2))
    assert len(games.rounds) == ranks - 1 + ranks % 2
    for pairs in games.rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


@settings(max_examples=20)
@given(st.integers(65, 1500))
def test_many_ranks_are_sampled_in_few_rounds(ranks: int) -> None:
    games = tournament(ranks)
    met = [pair for pairs in games.rounds for pair in pairs]
    assert len(met) == len(set(met)) == games.num_meetings < games.num_pairs
    assert len(games.rounds) <= 2 * np.ceil(np.log2(ranks)) + 16
    assert {(rank, rank + 1) for rank in range(ranks - 1)} <= set(met), "neighbours join domains"
    for pairs in games.rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def bandwidths(domains: list[list[int]], noise: float = 0.0, seed: int = 0) -> dict[tuple[int, int], float]:
    dice = np.random.default_rng(seed)
    number = {rank: place for place, domain in enumerate(domains) for rank in domain}
    return {
        (one, other): (FAST if number[one] == number[other] else SLOW) * float(1 + noise * dice.uniform(-1, 1))
        for one in number
        for other in number
        if one != other
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 1000), st.randoms())
def test_domains_are_found_whatever_the_numbering(sizes: list[int], seed: int, dice: object) -> None:
    ranks = list(range(sum(sizes)))
    dice.shuffle(ranks)  # type: ignore[attr-defined]
    cuts = np.cumsum([0, *sizes])
    domains = [ranks[a:b] for a, b in pairwise(cuts)]
    found = fast_domains(ranks, bandwidths(domains, noise=0.15, seed=seed))
    if max(sizes) == 1 or len(sizes) == 1:
        assert found == (tuple(sorted(ranks)),), "links of one class make one domain"
    else:
        assert found == tuple(sorted(tuple(sorted(domain)) for domain in domains))


def test_a_slow_pair_makes_no_domain_and_neither_does_noise() -> None:
    pairs = bandwidths([[0, 1, 2, 3], [4, 5, 6, 7]])
    pairs[0, 1] = pairs[1, 0] = SLOW
    assert fast_domains(range(8), pairs) == ((0, 1, 2, 3), (4, 5, 6, 7))
    noisy = {(0, 1): 4e9, (1, 0): 4e9, (0, 2): 1e9, (2, 0): 2e9, (1, 2): 1e9, (2, 1): 3e8}
    assert len(fast_domains(range(3), noisy)) == 2
    assert fast_domains(range(3), noisy, dict.fromkeys(noisy, 0.9)) == ((0, 1, 2),)


def test_sampled_pairs_are_enough_where_neighbours_are_near() -> None:
    domains = [list(range(first, first + 8)) for first in range(0, 128, 8)]
    every = bandwidths(domains, noise=0.1)
    met = {pair for pairs in tournament(128).rounds for pair in pairs}
    assert fast_domains(range(128), {pair: every[pair] for pair in met}) == tuple(map(tuple, domains))


def test_switches_above_the_domains_are_found() -> None:
    domains = ((0, 1), (2, 3), (4, 5), (6, 7))
    pairs = bandwidths([list(domain) for domain in domains])
    for one, other in pairs:
        if one // 4 != other // 4:
            pairs[one, other] = SLOW / 4
    assert leaves(domains, pairs) == ((0, 1), (2, 3))


def test_the_slower_half_of_the_samples_says_nothing() -> None:
    assert robust_s((1.0, 9.0, 1.2, 1.1, 30.0)) == pytest.approx(1.1)
    assert robust_s((2.0,)) == 2.0


def test_a_curve_has_its_latency_at_its_foot_and_its_bandwidth_at_its_end() -> None:
    found = curve_of({size: (1e-4 + size / 1e8,) * 3 for size in SIZES})
    assert found.latency_s == pytest.approx(1e-4, rel=0.01)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e8)
    late = curve_of({8: (3e-3,), 1000: (1e-4,), 100_000: (1.1e-3,)})
    assert late.seconds == (1e-4, 1e-4, 1.1e-3), "a smaller message is never slower"


def answers_of(domains: list[list[int]], together: float = 1.0) -> Answers:
    """As if all pairs had answered; `together`: share of a pair's bandwidth where all of a domain send at once."""
    said = Answers(backend="gloo", machine="a machine")
    said.samples = {
        way: {size: (1e-5 + size / rate,) * 3 for size in SIZES} for way, rate in bandwidths(domains).items()
    }
    said.hosts = {rank: f"host{number}" for number, domain in enumerate(domains) for rank in domain}
    a, b = domains[0], domains[1]
    said.alone = {(a[0], b[0]): {size: (1e-5 + size / SLOW,) for size in SIZES}}
    said.together = {
        pair: {size: (1e-5 + size / SLOW / together,) for size in SIZES} for pair in zip(a, b, strict=True)
    }
    for key in ("matmul/fp32/64x64x64", "memory_bound/fp32/1024"):
        said.measurements.append(
            Measurement(
                kind=MeasurementKind.OP, key=key, samples_s=(1e-4,), bytes=10**6, machine="a machine", versions={}
            )
        )
    return said


@pytest.mark.parametrize(("together", "num_nics"), [(1.0, 4), (0.5, 2), (0.25, 1)])
def test_what_members_get_at_once_counts_the_interfaces(together: float, num_nics: int) -> None:
    domains = [[0, 1, 2, 3], [4, 5, 6, 7]]
    probe = probe_of(answers_of(domains, together), tuple(map(tuple, domains)))
    kind = probe.cluster.pools[0].kind
    assert (probe.cluster.num_nodes, kind.gpus_per_node, kind.num_nics) == (2, 4, num_nics)
    assert kind.nic.bandwidth_bytes_per_s == pytest.approx(SLOW)
    assert kind.intra.bandwidth_bytes_per_s == pytest.approx(FAST)


def test_a_probe_reads_back_and_prints_who_is_silent_and_odd() -> None:
    domains = [[0, 2], [1, 3]]
    said = answers_of(domains)
    said.samples[0, 1] = {size: (1e-5 + size / SLOW * 2,) for size in SIZES}
    said.silent.append(Silence(ranks=(4,), reason="did not join within 60 s"))
    said.silent.append(Silence(ranks=(2, 3), reason="no connection within 10 s"))
    probe = probe_of(said, tuple(map(tuple, domains)))
    assert from_json(Probe, to_json(probe)) == probe
    text = live_probe_text(probe)
    assert "rank 4: did not join" in text
    assert "ranks 2 and 3: no connection" in text
    assert "rank 0 to rank 1: 50% of the bandwidth of probed-far links" in text
    assert "node 0 = ranks 0 2" in text
    assert "Gbit/s to" in text


def test_domains_of_unlike_sizes_become_pools_and_slow_nodes_exceptions() -> None:
    domains = [[0, 1, 2], [3, 4], [5, 6]]
    said = answers_of([[0, 1], [2, 3]])
    said.samples = answers_of_pairs(domains)
    said.hosts = dict.fromkeys(range(7), "host")
    probe = probe_of(said, tuple(map(tuple, domains)))
    assert [(pool.kind.gpus_per_node, pool.num_nodes) for pool in probe.cluster.pools] == [(3, 1), (2, 2)]
    slowed = [[0, 1], [2, 3], [4, 5], [6, 7]]
    said.samples = {
        way: {size: (1e-5 + size * (4 if 6 in way or 7 in way else 1) / rate,) for size in SIZES}
        for way, rate in bandwidths(slowed).items()
    }
    said.hosts = dict.fromkeys(range(8), "host")
    (exception,) = probe_of(said, tuple(map(tuple, slowed))).cluster.exceptions
    assert exception.node == 3
    assert exception.nic_factor < 0.5


def answers_of_pairs(domains: list[list[int]]) -> dict[tuple[int, int], dict[int, tuple[float, ...]]]:
    return {way: {size: (1e-5 + size / rate,) for size in SIZES} for way, rate in bandwidths(domains).items()}


def test_no_answer_at_all_is_an_error_that_says_why() -> None:
    said = Answers(backend="gloo", machine="m", hosts={0: "a", 1: "b"})
    said.silent.append(Silence(ranks=(0, 1), reason="no connection within 10 s"))
    with pytest.raises(RecordError, match=r"no two ranks answered.*\(0, 1\): no connection within 10 s"):
        probe_of(said, ((0, 1),))


def test_ranks_that_do_not_reach_one_another_are_not_asked_to_work_together() -> None:
    silent = [Silence(ranks=pair, reason="") for pair in ((0, 3), (1, 3))]
    assert answering([0, 1, 2, 3], silent) == [0, 1, 2]
    assert answering([0, 1], [Silence(ranks=(0, 1), reason="")]) == [0]
    assert answering([0, 1, 2], [Silence(ranks=(5,), reason="")]) == [0, 1, 2]


def test_what_takes_too_long_is_left() -> None:
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(RuntimeError, match="no connection within 0 s"):
        within(0.01, lambda: time.sleep(0.3))
    with pytest.raises(OSError, match="gone"):
        within(5.0, lambda: (_ for _ in ()).throw(OSError("gone")))
    assert first_words(RuntimeError("[/a/b.cc:3] Connection refused\nmore")) == "Connection refused"


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RecordError, match="at least 2 ranks"):
        ProbeRequest(ranks=1, backend="gloo")
    with pytest.raises(RecordError, match="legal values: gloo, nccl"):
        ProbeRequest(ranks=2, backend="mpi")
    with pytest.raises(RecordError, match="above 0 and below 3600"):
        ProbeRequest(ranks=2, backend="gloo", timeout_s=0)


def test_an_accelerator_that_the_table_knows_is_taken_from_it() -> None:
    said = answers_of([[0, 1], [2, 3]])
    said.backend, said.machine = "nccl", "NVIDIA H200"
    probe = probe_of(said, ((0, 1), (2, 3)))
    assert probe.cluster.pools[0].kind.device.name == "h200"
