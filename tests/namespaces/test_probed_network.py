"""The live probe on four hosts with known links: it finds the pairs, what each link carries, a delay, and who does not answer."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import benchmarks.testbed
from benchmarks.testbed.links import NUM_HOSTS, Delay, two_pairs
from benchmarks.testbed.network import Network, network, unavailable
from cost_models.collectives import collective_s, fabric
from cost_models.records import Probe, load
from planner.readers.clusters import read_cluster
from planner.readers.probes import calibration_with

WHY_NOT = unavailable()
pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

NEAR, FAR = 1e9, 1e8
DELAY_S = 0.01
DELAYED = (0, 2)
PROGRAM = Path(benchmarks.testbed.__file__).with_name("probe_ranks.py")


def probed(net: Network, folder: Path, timeout_s: float = 5.0) -> tuple[Probe, Path, str]:
    out = folder / "probe.json"
    told = net.run(PROGRAM, [str(out), str(timeout_s)], timeout_s=110)
    return load(Probe, out), out, told


def test_it_finds_the_pairs_and_what_links_carry_and_plans_read_it(tmp_path: Path) -> None:
    with network(two_pairs(NEAR, FAR)) as net:
        probe, path, told = probed(net, tmp_path)
    assert probe.domains == ((0, 1), (2, 3))
    assert {link.ranks for link in probe.pairs} == {(i, j) for i in range(4) for j in range(4) if i != j}
    holds_what_links_carry(probe)
    assert not probe.silent
    assert "round 3 of 3" in told
    assert "s left" in told

    cluster = read_cluster(str(path))
    assert cluster == probe.cluster
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.domain_size) == (2, 2, 2)
    kind = cluster.pools[0].kind
    assert kind.num_nics == 2, "both ranks of a pair get their whole bandwidth to the others at once"
    assert 8 * kind.nic.bandwidth_bytes_per_s == pytest.approx(FAR, rel=0.1)
    assert 8 * kind.intra.bandwidth_bytes_per_s == pytest.approx(NEAR, rel=0.1)
    links = fabric(cluster, calibration_with(path))
    for name, passes in (("all_reduce", 2), ("reduce_scatter", 2), ("all_gather", 1)):
        seconds = collective_s(links, name, 4e6, 4, 1)
        assert seconds.measured == seconds.total, "from the curve"
        assert seconds.total == pytest.approx(passes * 3 / 4 * 4e6 / (FAR / 8), rel=0.2), name


def holds_what_links_carry(probe: Probe) -> None:
    for link in probe.pairs:
        nominal = NEAR if link.ranks[0] // 2 == link.ranks[1] // 2 else FAR
        assert 8 * link.bandwidth_bytes_per_s == pytest.approx(nominal, rel=0.1), link


def test_a_delayed_link_is_as_late_as_it_is(tmp_path: Path) -> None:
    delay = Delay(hosts=DELAYED, one_way_s=DELAY_S, bits_per_s=FAR)
    with network(two_pairs(NEAR, FAR, (delay,))) as net:
        probe, _, _ = probed(net, tmp_path)
    assert probe.domains == ((0, 1), (2, 3))
    holds_what_links_carry(probe)
    for link in probe.pairs:
        if set(link.ranks) == set(DELAYED):
            assert link.latency_s == pytest.approx(DELAY_S, rel=0.2)
        else:
            assert link.latency_s < DELAY_S / 3


def test_a_pair_that_is_cut_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    with network(two_pairs(NEAR, FAR)) as net:
        net.cut(1, 3)
        probe, _, _ = probed(net, tmp_path, timeout_s=3.0)
    assert [one.ranks for one in probe.silent] == [(1, 3)]
    assert {tuple(sorted(link.ranks)) for link in probe.pairs} == {(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)}
    assert probe.cluster.num_gpus == NUM_HOSTS - 1
    assert any("left out of the cluster: rank" in note for note in probe.notes)
