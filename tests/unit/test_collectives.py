"""Seconds of collectives: closed forms, a member-by-member count of where groups lie, monotonicity."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.collectives import (
    TREE_SHARE,
    Algorithm,
    Collective,
    Fabric,
    collective_s,
    crosses,
    curve_s,
    fabric,
    hop_s,
    link_classes,
    members,
)
from cost_models.links import cube_links, domain_shares
from cost_models.records import (
    Curve,
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
from tests.unit.cost_cases import CPU, NODE, cluster

MIB = float(2**20)
BYTES = st.floats(min_value=1.0, max_value=2.0**36)
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])


def bare(**changes: object) -> Fabric:
    """32 devices in domains of 8, without latency: wire time alone."""
    found = fabric(cluster(4), shipped())
    still = {"step_s": 0.0, "small_step_s": 0.0, "tree_step_s": 0.0, "small_tree_step_s": 0.0, "small_bytes_per_s": inf}
    intra = replace(found.intra, bytes_per_s=400e9, **still)  # type: ignore[arg-type]
    network = replace(found.network, bytes_per_s=50e9, **still)  # type: ignore[arg-type]
    return replace(replace(found, intra=intra, network=network, launch_s=0.0), **changes)  # type: ignore[arg-type]


def seconds(links: Fabric, name: str, num_bytes: float, size: int, stride: int, how: str = "default") -> float:
    return float(collective_s(links, name, num_bytes, size, stride, how).total)


@pytest.mark.parametrize(("name", "passes"), [("all_reduce", 2.0), ("all_gather", 1.0), ("reduce_scatter", 1.0)])
@pytest.mark.parametrize(
    ("size", "stride", "bytes_per_s"),
    [
        (8, 1, 400e9),  # one domain
        (4, 8, 50e9),  # one member in each domain: one share of the network
        (8, 4, 2 * 50e9),  # two members in each domain share two ways out
        (32, 1, 8 * 50e9),  # all of a domain: eight ways out, no faster than the domain itself
    ],
)
def test_rings_in_closed_form(name: str, passes: float, size: int, stride: int, bytes_per_s: float) -> None:
    expected = passes * (size - 1) / size * MIB / bytes_per_s
    how = "ring" if name == "all_reduce" else "default"
    assert seconds(bare(), name, MIB, size, stride, how) == pytest.approx(expected, rel=1e-9)


def test_latency_in_closed_form() -> None:
    found = bare(launch_s=3.0)
    ones = {"step_s": 1.0, "small_step_s": 1.0, "tree_step_s": 0.5, "small_tree_step_s": 0.5, "bytes_per_s": 1e30}
    found = replace(found, intra=replace(found.intra, **ones))
    assert seconds(found, "all_reduce", 1.0, 8, 1, "ring") == pytest.approx(3 + 2 * 7)
    assert seconds(found, "all_reduce", 1.0, 8, 1, "tree") == pytest.approx(3 + 2 * 7 * 0.5)
    assert seconds(found, "all_reduce", 1.0, 8, 1) == pytest.approx(3 + 2 * 7 * 0.5)
    assert seconds(found, "all_gather", 1.0, 8, 1) == pytest.approx(3 + 7)


def test_a_tree_is_a_chain_in_each_domain_and_halves_the_domains() -> None:
    found = bare()
    intra = replace(found.intra, tree_step_s=1.0, small_tree_step_s=1.0)
    network = replace(found.network, tree_step_s=100.0, small_tree_step_s=100.0)
    found = replace(found, intra=intra, network=network)
    wire_s = 2 * MIB / 50e9 / 8 / TREE_SHARE  # all eight ways out, as fast as the domain itself
    assert seconds(found, "all_reduce", MIB, 32, 1, "tree") == pytest.approx(2 * (7 + 2 * 100) + wire_s)
    assert seconds(found, "all_reduce", MIB, 4, 8, "tree") == pytest.approx(2 * 2 * 100 + 8 * wire_s)


def test_rings_between_domains_have_a_longer_latency_in_large_all_reduces_alone() -> None:
    found = bare()
    found = replace(found, network=replace(found.network, step_s=1e-3, small_step_s=1.0), ring_plateau=1.4)
    assert seconds(found, "all_reduce", 1.0, 4, 8, "ring") == pytest.approx(1.4 * 2 * 3 * 1e-3)
    assert seconds(found, "all_gather", 1.0, 4, 8) == pytest.approx(3e-3)


def test_small_messages_take_the_protocol_of_low_latency() -> None:
    found = bare()
    intra = replace(found.intra, step_s=1e-5, small_step_s=1e-6, bytes_per_s=1e9)
    found = replace(found, intra=intra)
    assert seconds(found, "all_gather", 8.0, 2, 1) == pytest.approx(1e-6, rel=0.02)
    large = seconds(found, "all_gather", 2e9, 2, 1)
    assert large == pytest.approx(1.0 + 1e-5)


def test_small_messages_have_half_the_bandwidth_and_no_more_than_a_ceiling() -> None:
    found = bare()
    slow = {"step_s": 1.0}  # so that only the protocol for small messages counts
    found = replace(found, intra=replace(found.intra, **slow), network=replace(found.network, **slow))
    assert seconds(found, "all_gather", MIB, 8, 1) == pytest.approx(7 / 8 * MIB / 200e9)
    assert seconds(found, "all_gather", MIB, 32, 1) == pytest.approx(31 / 32 * MIB / 200e9)
    low = replace(
        found,
        intra=replace(found.intra, small_bytes_per_s=100e9),
        network=replace(found.network, small_bytes_per_s=20e9),
    )
    assert seconds(low, "all_gather", MIB, 8, 1) == pytest.approx(7 / 8 * MIB / 100e9)
    assert seconds(low, "all_gather", MIB, 32, 1) == pytest.approx(31 / 32 * MIB / 20e9)
    hopper = fabric(cluster(4), shipped())
    assert (hopper.intra.small_bytes_per_s, hopper.network.small_bytes_per_s) == (141e9, 35e9)


def test_gloo_has_the_ring_alone() -> None:
    found = replace(bare(), backend="gloo", intra=replace(bare().intra, step_s=1.0, small_step_s=1.0))
    assert seconds(found, "all_reduce", 8.0, 8, 1) == pytest.approx(14.0)
    assert seconds(found, "all_reduce", 8.0, 8, 1, "tree") < 1e-3


def test_hierarchical_beats_a_ring_where_the_network_is_slow() -> None:
    found = bare()
    inside, between = 2 * 7 / 8 * MIB / 400e9, 2 * 3 / 4 * MIB / 8 / 50e9
    assert seconds(found, "all_reduce", MIB, 32, 1, "hierarchical") == pytest.approx(inside + between)


def test_all_to_all_sends_alone() -> None:
    assert seconds(bare(), "all_to_all", MIB, 32, 1) == pytest.approx(24 / 32 * MIB / 50e9)
    assert seconds(bare(), "all_to_all", MIB, 8, 1) == pytest.approx(7 / 8 * MIB / 400e9)


def test_gloo_reduce_scatter_costs_its_all_reduce() -> None:
    kind = replace(NODE, device=CPU, gpus_per_node=4, intra=Link(name="loopback", bandwidth_bytes_per_s=1e9))
    found = fabric(cluster(1, kind), shipped())
    assert found.backend == "gloo"
    scatter = seconds(found, "reduce_scatter", 4 * MIB, 4, 1)
    assert scatter == pytest.approx(seconds(found, "all_reduce", 4 * MIB, 4, 1, "ring"))
    assert scatter > 1.5 * seconds(found, "all_gather", 4 * MIB, 4, 1)


def shaped() -> Fabric:
    """Four hosts of one process: 1 Gbit/s within the pairs (0, 1) and (2, 3), 100 Mbit/s between them."""
    kind = replace(
        NODE,
        device=CPU,
        gpus_per_node=2,
        intra=Link(name="veth-fast", bandwidth_bytes_per_s=125e6),
        nic=Link(name="veth-slow", bandwidth_bytes_per_s=12.5e6),
        num_nics=2,
    )
    found = fabric(cluster(2, kind), shipped())
    whole = {"intra": 125e6, "network": 12.5e6}
    links = {place: replace(getattr(found, place), bytes_per_s=rate, step_s=0.0) for place, rate in whole.items()}
    return replace(found, **links, flow_bytes_per_s=12.5e6)


@pytest.mark.parametrize(
    ("name", "size", "stride", "measured_s"),
    [
        ("p2p", 2, 1, 0.0343),
        ("p2p", 2, 2, 0.3474),
        ("all_reduce", 4, 1, 0.5219),
        ("all_gather", 4, 1, 0.259),
        ("reduce_scatter", 4, 1, 0.522),
    ],
)
def test_gloo_over_shaped_links(name: str, size: int, stride: int, measured_s: float) -> None:
    """4 MiB, torch 2.13, three repetitions within 1 to 3%; TCP takes some 3.5% that the closed forms leave out."""
    assert seconds(shaped(), name, 4 * MIB, size, stride) == pytest.approx(measured_s, rel=0.05)


@given(st.sampled_from(list(Collective)), BYTES, POWERS, POWERS, st.floats(min_value=1.0, max_value=10.0))
def test_a_bigger_message_is_never_faster_nor_more_bandwidth_slower(
    name: Collective, num_bytes: float, size: int, stride: int, factor: float
) -> None:
    found = fabric(cluster(4), shipped())
    before = seconds(found, name, num_bytes, size, stride)
    assert seconds(found, name, num_bytes * factor, size, stride) >= before * (1 - 1e-12)
    for link in ("intra", "network"):
        faster = replace(getattr(found, link), bytes_per_s=getattr(found, link).bytes_per_s * factor)
        assert seconds(replace(found, **{link: faster}), name, num_bytes, size, stride) <= before * (1 + 1e-12)


@given(st.sampled_from(list(Collective)), BYTES, POWERS)
def test_a_group_of_one_and_an_empty_message_cost_nothing(name: Collective, num_bytes: float, stride: int) -> None:
    found = fabric(cluster(4), shipped())
    assert seconds(found, name, num_bytes, 1, stride) == 0
    assert seconds(found, name, 0.0, 8, stride) == 0


@given(POWERS, POWERS, st.sampled_from([2, 4, 8, 16]))
def test_members_equal_a_count_rank_by_rank(size: int, stride: int, unit: int) -> None:
    world = max(size * stride, unit) * 2
    fewest = min(
        sum(1 for rank in group if rank // unit == group[0] // unit)
        for start in range(0, world, size * stride)
        for offset in range(stride)
        for group in [[start + offset + stride * member for member in range(size)]]
    )
    counted = members(unit, np.array(float(size)), np.array(float(stride)))
    assert counted == fewest
    leaves = bool(crosses(unit, world, np.array(float(size)), np.array(float(stride))))
    assert leaves == (fewest < size)


def test_a_group_that_straddles_domains_leaves_them() -> None:
    size, stride = np.array(3.0), np.array(1.0)
    assert crosses(8, 24, size, stride)
    assert link_classes(bare(), 3, 1) == "ib-ndr"
    assert not crosses(8, 8, size, stride)


def test_oversubscription_binds_above_the_leaf_alone() -> None:
    tapered = fabric(cluster(4, fabric=(FabricLevel(name="leaf", radix=2, oversubscription=4.0),)), shipped())
    flat = fabric(cluster(4), shipped())
    assert seconds(tapered, "all_gather", 1e9, 2, 8) == pytest.approx(seconds(flat, "all_gather", 1e9, 2, 8))
    # one member per node, two below a leaf: 2/4 of one share
    slow = seconds(tapered, "all_gather", 1e9, 4, 8)
    assert slow == pytest.approx(2 * seconds(flat, "all_gather", 1e9, 4, 8), rel=1e-2)


def test_a_node_with_half_its_interfaces_slows_the_groups_that_meet_it() -> None:
    whole = fabric(cluster(4), shipped())
    hurt = fabric(cluster(4, exceptions=(FabricException(node=2, nic_factor=0.5),)), shipped())
    for name in ("all_gather", "p2p", "all_to_all"):
        assert seconds(hurt, name, 1e9, 4, 8) == pytest.approx(2 * seconds(whole, name, 1e9, 4, 8), rel=1e-2)
        assert seconds(hurt, name, 1e9, 8, 1) == seconds(whole, name, 1e9, 8, 1)
    # a run of two nodes has no rank on the third
    two, three = (collective_s(hurt, "all_gather", 1e9, nodes, 8, world=8 * nodes).total for nodes in (2, 3))
    assert two == collective_s(whole, "all_gather", 1e9, 2, 8).total
    assert three == pytest.approx(2 * collective_s(whole, "all_gather", 1e9, 3, 8).total, rel=1e-2)


def test_hops_meet_a_slow_node_at_either_end_alone() -> None:
    hurt = fabric(cluster(4, exceptions=(FabricException(node=2, nic_factor=0.5),)), shipped())
    whole = hop_s(fabric(cluster(4), shipped()), 1e9, 8, 4)
    assert hop_s(hurt, 1e9, 8, 4)[:3] == pytest.approx(whole[:3] * [1, 2, 2], rel=1e-3)


def test_a_slow_uplink_is_met_by_what_leaves_its_switch() -> None:
    leaf = FabricLevel(name="leaf", radix=2)
    slow = SlowUplink(level="leaf", switch=1, factor=0.1)
    whole, hurt = (fabric(cluster(4, fabric=(leaf,), slow_uplinks=found), shipped()) for found in ((), (slow,)))
    assert seconds(hurt, "all_gather", 1e9, 2, 8) == seconds(whole, "all_gather", 1e9, 2, 8)
    # two members below a leaf: they have two shares of its way up, and one share each of their own node's
    assert seconds(hurt, "all_gather", 1e9, 4, 8) == pytest.approx(
        5 * seconds(whole, "all_gather", 1e9, 4, 8), rel=1e-2
    )
    hops = hop_s(hurt, 1e9, 8, 4) / hop_s(whole, 1e9, 8, 4)
    # the eight devices of one node have the ways up of sixteen
    assert hops[:3] == pytest.approx([1, 5, 1], rel=1e-2)


def test_a_run_on_a_part_of_a_node_stays_in_it() -> None:
    found = bare()
    assert seconds(found, "all_gather", MIB, 6, 1) == pytest.approx(2 * 5 / 6 * MIB / 400e9)
    assert float(collective_s(found, "all_gather", MIB, 6, 1, world=6).total) == pytest.approx(5 / 6 * MIB / 400e9)


def test_the_way_between_regions_has_a_latency() -> None:
    region = FabricLevel(name="region", radix=2, latency_s=0.01)
    far, near = (fabric(cluster(4, fabric=levels), shipped()) for levels in ((region,), ()))
    assert seconds(far, "all_gather", 1e6, 2, 8) == seconds(near, "all_gather", 1e6, 2, 8)
    assert seconds(far, "p2p", 1e6, 2, 16) == pytest.approx(0.01 + seconds(near, "p2p", 1e6, 2, 16))
    assert seconds(far, "all_gather", 1e6, 4, 8) == pytest.approx(0.01 + seconds(near, "all_gather", 1e6, 4, 8))


def test_pairs_with_links_of_their_own_are_faster_than_their_node() -> None:
    island = Island(num_gpus=2, link=Link(name="nvlink4", bandwidth_bytes_per_s=450e9))
    pcie = Link(name="pcie5", bandwidth_bytes_per_s=64e9)
    found = fabric(cluster(2, replace(NODE, intra=pcie, island=island)), shipped())
    plain = fabric(cluster(2, replace(NODE, intra=pcie)), shipped())
    assert 5 * seconds(found, "all_gather", 1e9, 2, 1) < seconds(plain, "all_gather", 1e9, 2, 1)
    for size, stride in ((4, 1), (2, 2), (2, 8), (16, 1)):
        assert seconds(found, "all_gather", 1e9, size, stride) == seconds(plain, "all_gather", 1e9, size, stride)
    assert link_classes(found, [2, 4, 16], [1, 1, 1]).tolist() == ["nvlink4", "pcie5", "ib-ndr"]


def test_a_cube_mesh_has_six_links_a_device() -> None:
    links = cube_links()
    assert (links == links.T).all()
    assert (links.sum(axis=1) == 6).all()
    shares = domain_shares(replace(NODE, shape=DomainShape.CUBE_MESH))
    assert [shares[count - 1] for count in (2, 4, 8)] == pytest.approx([1 / 6, 4 / 6, 1])


def test_a_measured_curve_beats_the_closed_form() -> None:
    curve = Curve(sizes_bytes=(1e3, 1e6), seconds=(1e-3, 1e-1), source="a test", date="2026-11-30")
    calibration = replace(shipped(), curves={"all_reduce/4/nvlink4": curve})
    found = fabric(cluster(4), calibration)
    priced = collective_s(found, "all_reduce", [1e3, 1e6, 1e6], [4, 4, 8], [1, 1, 1])
    assert priced.total[:2] == pytest.approx([1e-3, 1e-1])
    assert priced.measured.tolist() == pytest.approx([1e-3, 1e-1, 0.0])
    outside = collective_s(found, "all_reduce", 1e6, 4, 8)
    assert outside.measured == 0


@given(st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=1, max_size=6), BYTES, BYTES)
def test_a_curve_never_falls_with_size(samples: list[float], one: float, other: float) -> None:
    sizes = tuple(float(1024 * 4**place) for place in range(len(samples)))
    curve = Curve(sizes_bytes=sizes, seconds=tuple(samples), source="a test", date="2026-11-30")
    low, high = sorted((one, other))
    priced = curve_s(curve, np.array([low, high]))
    assert priced[0] <= priced[1] * (1 + 1e-9)


def test_hops_inside_and_between_domains() -> None:
    found = bare()
    # 4 devices of the pipeline, 4 ranks each, on domains of 8: the second hop leaves the domain, and the way back does
    times = hop_s(found, MIB, 4, 4)
    assert times == pytest.approx([MIB / 400e9, MIB / 50e9, MIB / 400e9, MIB / 50e9])


@pytest.mark.parametrize(
    ("size", "stride", "share"),
    [
        (32, 1, 8.0),  # neighbours are members: a ring leaves by the interface that it came in by
        (16, 2, 4 * 0.3),  # one of each pair that shares an interface
        (8, 4, 2 * 0.3),
        (4, 8, 1.0),  # one member in a node: one interface, both directions
    ],
)
def test_rings_whose_members_share_no_interface_find_less_of_the_way_out(size: int, stride: int, share: float) -> None:
    four = bare(devices_per_nic=2, detour_share=0.3)
    expected = (size - 1) / size * MIB / min(share * 50e9, 400e9)
    assert seconds(four, "all_gather", MIB, size, stride) == pytest.approx(expected, rel=1e-9)
    # an interface of one's own: no such loss was seen
    assert seconds(bare(detour_share=0.3), "all_gather", MIB, size, stride) <= expected * (1 + 1e-9)
    # messages go from a device to its like: by one interface in both directions
    assert seconds(four, "p2p", MIB, 2, 8) == pytest.approx(MIB / 50e9, rel=1e-9)


def test_the_shipped_share_of_such_rings_is_a_share_and_nccl_s_alone() -> None:
    node = replace(NODE, num_nics=NODE.gpus_per_node // 2)
    found = fabric(cluster(4, node), shipped())
    assert found.devices_per_nic == 2
    assert 0 < found.detour_share < 1
    assert fabric(cluster(4, replace(NODE, device=CPU)), shipped()).detour_share == 1.0


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(RecordError, match=r"collective 'gossip' is not known; known: all_reduce, all_gather"):
        collective_s(bare(), "gossip", MIB, 8, 1)
    with pytest.raises(RecordError, match=r"algorithm 'magic' is not known; known: default, ring"):
        collective_s(bare(), "all_reduce", MIB, 8, 1, "magic")


def test_several_kinds_of_nodes_are_refused_by_name() -> None:
    mixed = replace(cluster(2), pools=(Pool(kind=NODE, num_nodes=1), Pool(kind=replace(NODE, name="x"), num_nodes=1)))
    with pytest.raises(RecordError, match="mixes node-of-8, x: pricing several kinds of nodes is not built yet"):
        fabric(mixed, shipped())


def test_a_class_of_links_that_no_table_knows_has_the_defaults_of_its_place() -> None:
    kind = replace(NODE, nic=Link(name="home-made", bandwidth_bytes_per_s=1e9))
    found = fabric(cluster(4, kind), shipped())
    efficiency = shipped().coefficients["link.efficiency.network"].value
    assert found.network.bytes_per_s == pytest.approx(1e9 * efficiency)


def test_every_algorithm_has_a_price() -> None:
    times = {how.value: seconds(fabric(cluster(4), shipped()), "all_reduce", 1e9, 32, 1, how) for how in Algorithm}
    assert all(time > 0 for time in times.values())
    assert times["default"] == min(times["ring"], times["tree"])


def test_in_a_mesh_a_group_has_the_links_to_its_members_alone() -> None:
    """MI300X: 7 links of 64 GB/s, one to each peer, so a message to one of them finds a seventh of a device's bandwidth."""
    mesh = bare(domain_shares=domain_shares(replace(NODE, shape=DomainShape.MESH)))
    assert seconds(mesh, "p2p", MIB, 2, 1) == pytest.approx(7 * seconds(bare(), "p2p", MIB, 2, 1))
    assert seconds(mesh, "all_gather", MIB, 4, 1) == pytest.approx(7 / 3 * seconds(bare(), "all_gather", MIB, 4, 1))
    for name in set(Collective) - {Collective.P2P}:
        assert seconds(mesh, name, MIB, 8, 1) == pytest.approx(seconds(bare(), name, MIB, 8, 1))
    assert fabric(read_cluster("mi300xx8"), shipped()).domain_shares == mesh.domain_shares
    assert fabric(read_cluster("h100x8"), shipped()).domain_shares == ()
