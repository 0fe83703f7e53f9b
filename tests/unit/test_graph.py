"""The graph of a cluster says what the closed forms say."""

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
import records_for_tests as samples

from cost_models.calibrations import shipped
from cost_models.collectives import fabric
from cost_models.graph import BANDWIDTH, cut_bytes_per_s, gpus_of, graph, path_to_top, widest_path_bytes_per_s
from cost_models.records import (
    Cluster,
    DomainShape,
    FabricException,
    FabricLevel,
    Island,
    Link,
    Pool,
    RecordError,
    SlowUplink,
)
from planner.readers.clusters import read_cluster

LEAF = FabricLevel(name="leaf", radix=2, oversubscription=2.0)
SPINE = FabricLevel(name="spine", radix=2, oversubscription=4.0)


def test_inside_a_domain_every_pair_has_the_domains_bandwidth():
    view = graph(samples.cluster(1), "all")
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/3") == 100e9
    assert cut_bytes_per_s(view, ["gpu/0"], ["gpu/1", "gpu/2", "gpu/3"]) == 100e9
    assert cut_bytes_per_s(view, ["gpu/0", "gpu/1"], ["gpu/2", "gpu/3"]) == 200e9


@pytest.mark.parametrize("rails", [True, False])
def test_between_nodes_the_interfaces_bind(rails):
    cluster = samples.cluster(3, rails=rails)
    view = graph(cluster, "all")
    kind = cluster.pools[0].kind
    assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [1])) == kind.node_bandwidth_bytes_per_s == 20e9
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/4") == kind.nic.bandwidth_bytes_per_s
    # one device reaches the interfaces of its neighbours through the domain
    assert cut_bytes_per_s(view, ["gpu/0"], ["gpu/4"]) == kind.node_bandwidth_bytes_per_s


@pytest.mark.parametrize("rails", [True, False])
def test_above_a_switch_oversubscription_binds(rails):
    cluster = samples.cluster(8, rails=rails, fabric=(LEAF, SPINE))
    view = graph(cluster, "all")
    node = cluster.pools[0].kind.node_bandwidth_bytes_per_s
    half = [gpus_of(view, range(4)), gpus_of(view, range(4, 8))]
    assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [1])) == node
    assert cut_bytes_per_s(view, gpus_of(view, [0, 1]), gpus_of(view, [2, 3])) == 2 * node / 2
    assert cut_bytes_per_s(view, *half) == pytest.approx(4 * node / (2 * 4))


@pytest.mark.parametrize("rails", [True, False])
@pytest.mark.parametrize("levels", [(), (LEAF,), (LEAF, SPINE)])
def test_the_graph_and_the_collectives_read_the_same_fabric(rails, levels):
    """Cuts of the graph = the closed forms that price collectives, with each link's efficiency taken out."""
    cluster = samples.cluster(8, rails=rails, fabric=levels)
    kind = read_cluster("a100-80x64").pools[0].kind
    cluster = replace(cluster, pools=(replace(cluster.pools[0], kind=kind),))
    view = graph(cluster, "all")
    closed = fabric(cluster, shipped())
    network = closed.network.rest.value
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/1") == pytest.approx(
        closed.intra.bytes_per_s / closed.intra.rest.value
    )
    per_node = cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [1]))
    assert per_node / kind.gpus_per_node == pytest.approx(closed.network.bytes_per_s / network)
    for unit, through in ((level.unit, level.bytes_per_s) for level in closed.levels):
        nodes = unit // kind.gpus_per_node
        if 2 * nodes <= cluster.num_nodes:
            cut = cut_bytes_per_s(view, gpus_of(view, range(nodes)), gpus_of(view, range(nodes, 2 * nodes)))
            assert cut / unit == pytest.approx(through / network)


def test_a_slow_node_is_slow_and_its_neighbours_are_not():
    slow = FabricException(node=1, nic_factor=0.5, intra_factor=0.25)
    view = graph(samples.cluster(3, exceptions=(slow,)), "all")
    assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [1])) == 10e9
    assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [2])) == 20e9
    # domain 25 GB/s a device; the detour over the fabric is narrower
    assert widest_path_bytes_per_s(view, "gpu/4", "gpu/5") == 25e9


def test_more_interfaces_than_devices_and_the_reverse():
    for gpus, nics in [(4, 1), (4, 4), (2, 4), (3, 2)]:
        base = samples.cluster(2)
        kind = replace(base.pools[0].kind, gpus_per_node=gpus, num_nics=nics)
        view = graph(replace(base, pools=(replace(base.pools[0], kind=kind),)), "all")
        assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [1])) == nics * 10e9
        assert nx.is_connected(view)


def test_a_domain_may_be_more_than_a_node():
    view = graph(read_cluster("gb200x144"), "all")
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/71") == 900e9
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/72") == 50e9


def test_the_short_view_is_small_whatever_the_cluster():
    levels = (FabricLevel(name="leaf", radix=32), FabricLevel(name="spine", radix=32, oversubscription=2.0))
    big = replace(read_cluster("h100x32768"), fabric=levels)
    view = graph(big)
    assert view.number_of_nodes() == 1 + 8 + 1 + 8 + 8 * 3
    path = path_to_top(view, "gpu/0")
    assert path == ["gpu/0", "numa/0/0", "nic/0/0", "switch/0/0/0", "switch/0/1/0", "switch/0/2/0"]
    assert [view.edges[edge][BANDWIDTH] for edge in pairwise(path)] == [
        big.pools[0].kind.host_link.bandwidth_bytes_per_s,
        50e9,
        50e9,
        32 * 50e9,
        32 * 32 * 50e9 / 2,
    ]


def test_the_short_view_is_a_part_of_the_whole():
    cluster = samples.cluster(8, fabric=(LEAF, SPINE))
    short, whole = graph(cluster), graph(cluster, "all")
    assert set(short.nodes) < set(whole.nodes)
    for a, b, data in short.edges(data=True):
        assert whole.edges[a, b] == data


def test_several_pools_share_the_fabric():
    two = read_cluster("a100-80x16"), read_cluster("h100x16")
    cluster = Cluster(name="mixed", pools=(*two[0].pools, *two[1].pools))
    view = graph(cluster, "all")
    assert len(gpus_of(view, range(4))) == 32
    assert cut_bytes_per_s(view, gpus_of(view, [0]), gpus_of(view, [2])) == 8 * 25e9
    assert {data["device"] for _, data in graph(cluster).nodes(data=True) if data["kind"] == "gpu"} == {
        "a100-80",
        "h100",
    }


def test_a_mesh_and_a_cube_mesh_have_links_of_pairs():
    mesh, cube = (
        replace(read_cluster("h100x8").pools[0].kind, shape=shape)
        for shape in (DomainShape.MESH, DomainShape.CUBE_MESH)
    )
    views = [graph(Cluster(name="one", pools=(Pool(kind=kind, num_nodes=1),)), "all") for kind in (mesh, cube)]
    for view in views:
        view.remove_node("numa/0/0")
        assert "domain/0" not in view
        assert cut_bytes_per_s(view, ["gpu/0"], [f"gpu/{rank}" for rank in range(1, 8)]) == pytest.approx(450e9)
    assert views[0].edges["gpu/0", "gpu/5"][BANDWIDTH] == pytest.approx(450e9 / 7)
    assert not views[1].has_edge("gpu/0", "gpu/5")
    # between the quads of a cube mesh: six links, of 48
    quads = [f"gpu/{rank}" for rank in range(4)], [f"gpu/{rank}" for rank in range(4, 8)]
    assert cut_bytes_per_s(views[1], *quads) == pytest.approx(450e9)


def test_islands_and_sockets():
    kind = replace(
        samples.cluster().pools[0].kind, numa_nodes=2, host_link=Link(name="pcie5", bandwidth_bytes_per_s=64e9)
    )
    kind = replace(kind, island=Island(num_gpus=2, link=Link(name="nvlink4", bandwidth_bytes_per_s=450e9)))
    view = graph(Cluster(name="two", pools=(Pool(kind=kind, num_nodes=2),)), "all")
    assert nx.is_connected(view)
    assert widest_path_bytes_per_s(view, "gpu/0", "gpu/1") == 450e9
    assert widest_path_bytes_per_s(view, "gpu/1", "gpu/2") == kind.intra.bandwidth_bytes_per_s
    assert view.edges["numa/0/0", "numa/0/1"][BANDWIDTH] == 2 * 64e9


def test_a_slow_uplink_and_the_way_between_regions():
    region = replace(SPINE, name="region", latency_s=0.01)
    slow = SlowUplink(level="leaf", switch=1, factor=0.5)
    view = graph(samples.cluster(8, fabric=(LEAF, region), slow_uplinks=(slow,)), "all")
    ups = [view.edges[f"switch/0/0/{leaf}", f"switch/0/1/{leaf // 2}"] for leaf in (0, 1)]
    assert ups[1][BANDWIDTH] == ups[0][BANDWIDTH] / 2
    assert "latency_s" not in ups[0]
    assert view.edges["switch/0/1/0", "switch/0/2/0"]["latency_s"] == 0.01


def test_an_unknown_expansion_is_refused():
    with pytest.raises(RecordError, match=r"expand='some'; legal values: domain, all"):
        graph(samples.cluster(), "some")
