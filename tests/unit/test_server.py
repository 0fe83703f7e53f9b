"""A parameter server on a star: closed forms, a simulation of its queues, and where a ring is faster."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.records import RecordError
from cost_models.server import Star, alike, crossover_bytes, server_s, star_ring_s

RATE, STEP_S, MB = 125e6, 1e-3, 1e6


@pytest.mark.parametrize("workers", [2, 3, 4, 9])
def test_closed_forms(workers):
    star = alike(workers, RATE, STEP_S, spare_hosts=workers)
    whole_s, every = MB / RATE, range(workers)
    assert server_s(star, MB, [workers]) == pytest.approx(2 * (STEP_S + workers * whole_s))
    assert server_s(star, MB, [0]) == pytest.approx(2 * (STEP_S + (workers - 1) * whole_s))
    assert server_s(star, MB, every) == pytest.approx(2 * (STEP_S + (workers - 1) / workers * whole_s))
    assert server_s(star, MB, range(workers, 2 * workers)) == pytest.approx(2 * (STEP_S + whole_s))
    assert star_ring_s(star, MB) == pytest.approx(2 * (workers - 1) * (STEP_S + whole_s / workers))


def test_chunks_hide_the_pull_behind_the_push():
    star = alike(4, RATE, 0.0, spare_hosts=4)
    whole = server_s(star, MB, range(4, 8))
    assert server_s(star, MB, range(4, 8), num_chunks=4) == pytest.approx(whole * 5 / 8)
    # spare hosts and chunks: half of a push and a pull, where a ring takes 2·3/4 of it
    assert server_s(star, MB, range(4, 8), num_chunks=1000) < 0.7 * star_ring_s(star, MB)


def test_a_slow_link_slows_a_ring_by_its_own_share_and_waits_behind_the_fast_at_a_server():
    slow = alike(4, RATE, 0.0, spare_hosts=1, slow_factor=0.25)
    assert star_ring_s(slow, MB) == pytest.approx(4 * star_ring_s(alike(4, RATE, 0.0), MB))
    # three fast ones are done after 3.25 times MB / RATE, in which a quarter of the slow one's came through, at RATE·0.25/3.25
    assert server_s(slow, MB, [4]) == pytest.approx((3.25 + 0.75 / 0.25 + 4) * MB / RATE)
    half = alike(4, RATE, 0.0, spare_hosts=1, slow_factor=0.125)
    assert server_s(half, MB, [4]) == pytest.approx((3.125 + 0.875 / 0.125 + 8) * MB / RATE)
    wide = Star(bytes_per_s=(RATE, RATE, RATE / 4, 9 * RATE), num_workers=3, step_s=0.0)
    assert server_s(wide, MB, [3]) == pytest.approx(2 * 4 * MB / RATE), "nobody waits where the server's link is wide"


def test_a_late_worker_finds_the_others_done():
    late_s = 1.0
    star = replace(alike(4, RATE, 0.0, spare_hosts=1), ready_s=(0.0, 0.0, 0.0, late_s))
    assert server_s(star, MB, [4]) == pytest.approx(late_s + MB / RATE + 4 * MB / RATE)
    assert star_ring_s(star, MB) == pytest.approx(late_s + 2 * 3 / 4 * MB / RATE)


STEPS_OF_TIME = 4000


def arrived_s(star, num_bytes, server):
    """Oracle: one server's way in played in small steps of time, shared in proportion to the links of those that send."""
    left = {host: num_bytes for host in range(star.num_workers) if host != server}
    links = dict(enumerate(star.bytes_per_s))
    longest = max(star.workers_ready_s) + sum(num_bytes / links[host] + num_bytes / links[server] for host in left)
    clock, step = 0.0, longest / STEPS_OF_TIME
    while any(value > 0 for value in left.values()):
        sending = [host for host in left if left[host] > 0 and star.workers_ready_s[host] <= clock]
        room = step * links[server]
        wished = {host: step * links[host] for host in sending}
        for host in sending:
            left[host] -= wished[host] * min(1.0, room / sum(wished.values()))
        clock += step
    return clock, step * 2 * (1 + len(left))


def played_s(star, num_bytes, servers):
    """Oracle: each server's way in as a queue, in the order of readiness, worker by worker; then the same way out. A single
    server's way in takes packets as they come."""
    share = num_bytes / len(servers)
    ends, coarse_s = [], 0.0
    if len(servers) == 1 and star.num_workers > (servers[0] < star.num_workers):
        single_s, coarse_s = arrived_s(star, share, servers[0])
    for ready, pull in ((star.workers_ready_s, False), ((0.0,) * star.num_workers, True)):
        done = 0.0
        for host in servers:
            clock = 0.0
            for worker in sorted(range(star.num_workers), key=lambda w: ready[w]):
                if worker != host:
                    clock = max(clock, ready[worker]) + share / star.bytes_per_s[host]
            done = max(done, clock)
        for worker in range(star.num_workers):
            away = sum(host != worker for host in servers)
            done = max(done, ready[worker] + away * share / star.bytes_per_s[worker])
        ends.append(max(done, single_s) if coarse_s and not pull else done)
    return star.launch_s + 2 * star.step_s + sum(ends), coarse_s


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.lists(st.floats(0.1, 10.0), min_size=9, max_size=9),
    st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6),
    st.sets(st.integers(0, 8), min_size=1),
)
def test_it_is_what_queues_take_and_more_bandwidth_is_never_slower(workers, spare, rates, ready, servers):
    star = Star(
        bytes_per_s=tuple(rates[: workers + spare]),
        num_workers=workers,
        step_s=0.1,
        launch_s=0.2,
        ready_s=tuple(ready[:workers]),
    )
    chosen = sorted({host % (workers + spare) for host in servers})
    found = server_s(star, 2.0, chosen)
    played, coarse_s = played_s(star, 2.0, chosen)
    assert found == pytest.approx(played, abs=coarse_s + 1e-9)
    assert server_s(replace(star, bytes_per_s=tuple(2 * r for r in star.bytes_per_s)), 2.0, chosen) <= found + 1e-12
    assert server_s(star, 3.0, chosen) >= found - 1e-12


@pytest.mark.parametrize("workers", [3, 4, 8, 16])
def test_below_the_crossover_one_server_wins_and_above_it_the_ring(workers):
    star = alike(workers, RATE, STEP_S)
    at = crossover_bytes(star, [0])
    # 2(w-2)α = 2((w-1) - (w-1)/w)B/r
    assert at == pytest.approx((workers - 2) * STEP_S * RATE * workers / (workers - 1) ** 2)
    assert server_s(star, at, [0]) == pytest.approx(star_ring_s(star, at))
    assert server_s(star, at / 2, [0]) < star_ring_s(star, at / 2)
    assert server_s(star, at * 2, [0]) > star_ring_s(star, at * 2)


def test_a_sharded_server_is_never_slower_than_a_ring_of_the_same_latency():
    assert math.isinf(crossover_bytes(alike(8, RATE, STEP_S), range(8)))
    assert server_s(alike(8, RATE, STEP_S), MB, range(8)) < star_ring_s(alike(8, RATE, STEP_S), MB)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Star(bytes_per_s=(1.0,), num_workers=2, step_s=0.0), "num_workers=2 of 1 hosts"),
        (lambda: Star(bytes_per_s=(0.0,), num_workers=1, step_s=0.0), "a positive number"),
        (lambda: Star(bytes_per_s=(1.0,), num_workers=1, step_s=-1.0), "seconds from 0"),
        (lambda: Star(bytes_per_s=(1.0,), num_workers=1, step_s=0.0, ready_s=(0.0, 1.0)), "2 entries"),
        (lambda: server_s(alike(2, 1.0, 0.0), 1.0, [2]), "legal: one or more of 0..1"),
        (lambda: server_s(alike(2, 1.0, 0.0), 1.0, []), "legal: one or more"),
        (lambda: server_s(alike(2, 1.0, 0.0), 1.0, [0], num_chunks=0), "num_chunks=0"),
    ],
)
def test_bad_input_is_told(call, told):
    with pytest.raises(RecordError, match=told):
        call()
