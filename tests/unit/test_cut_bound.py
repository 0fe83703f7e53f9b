"""No collective is faster than the cuts of the cluster's graph let it be, with all groups of an axis at once."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibrations import shipped
from cost_models.collectives import Algorithm, Collective, collective_s
from cost_models.graph import cut_bytes_per_s, graph
from cost_models.links import fabric
from cost_models.records import (
    Cluster,
    DomainShape,
    FabricException,
    FabricLevel,
    Island,
    Link,
    NodeKind,
    Pool,
    SlowUplink,
)
from tests.unit.cost_cases import DEVICE

MB = 1e6


@st.composite
def clusters(draw):
    """At most 16 devices, with everything that a graph may have."""
    per_node, nodes = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4))
    intra = Link(name="nvlink4", bandwidth_bytes_per_s=draw(st.sampled_from([10e9, 100e9])))
    kind = NodeKind(
        name="n",
        device=DEVICE,
        gpus_per_node=per_node,
        intra=intra,
        domain_nodes=draw(st.sampled_from([1, 1, 2])),
        nic=Link(name="ib-ndr", bandwidth_bytes_per_s=draw(st.sampled_from([1e9, 50e9]))),
        num_nics=draw(st.integers(1, per_node)),
        host_link=Link(name="pcie5", bandwidth_bytes_per_s=64e9),
        shape=draw(st.sampled_from([DomainShape.SWITCHED, DomainShape.MESH])),
        island=Island(num_gpus=2, link=replace(intra, bandwidth_bytes_per_s=400e9))
        if draw(st.booleans()) and per_node == 4
        else None,
    )
    levels = tuple(
        FabricLevel(name=name, radix=draw(st.integers(1, 2)), oversubscription=draw(st.sampled_from([1.0, 3.0])))
        for name in ("leaf", "spine")[: draw(st.integers(0, 2))]
    )
    plain = Cluster(name="c", pools=(Pool(kind=kind, num_nodes=nodes),), fabric=levels, rails=draw(st.booleans()))
    factor = st.sampled_from([0.2, 0.7, 1.0])
    odd = FabricException(node=draw(st.integers(0, nodes - 1)), nic_factor=draw(factor), intra_factor=draw(factor))
    slow = ()
    if levels:
        first_only = SlowUplink(level="leaf", switch=0, factor=draw(factor))
        slow = (first_only,)
    return replace(plain, exceptions=(odd,), slow_uplinks=slow)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def needed_bytes(kind, size, inside):
    """Bytes that must leave a set of ranks that holds `inside` of a group's `size` members, for one byte of the collective."""
    if not 0 < inside < size:
        return 0.0
    return {
        # the sum of what is outside must come in, and the sum of what is inside must go out
        Collective.ALL_REDUCE: 1.0,
        Collective.REDUCE_SCATTER: (size - inside) / size,
        Collective.ALL_GATHER: inside / size,
        Collective.ALL_TO_ALL: inside * (size - inside) / size,
        Collective.BROADCAST: 0.0,  # one direction alone
    }[kind]


def sides(cluster, world):
    """Sets of ranks to cut off: nodes, fast domains, what is below each switch, and every first part of the ranks."""
    kind = cluster.pools[0].kind
    units = {1, kind.gpus_per_node, kind.domain_size}
    unit = kind.gpus_per_node
    for level in cluster.fabric:
        unit *= level.radix
        units.add(unit)
    found = {tuple(range(first, min(first + unit, world))) for unit in units for first in range(0, world, unit)}
    found |= {tuple(range(count)) for count in range(1, world)}
    return [side for side in found if len(side) < world]


@settings(max_examples=120, deadline=None)
@given(clusters(), st.data())
def test_no_collective_beats_the_cuts_of_the_graph(cluster, data):
    per_node = cluster.pools[0].kind.gpus_per_node
    world = data.draw(st.integers(1, cluster.num_nodes)) * per_node
    size = data.draw(st.sampled_from(divisors(world)))
    stride = data.draw(st.sampled_from(divisors(world // size)))
    kind = data.draw(st.sampled_from([c for c in Collective if c is not Collective.P2P]))
    how = data.draw(st.sampled_from(list(Algorithm) if kind is Collective.ALL_REDUCE else [Algorithm.DEFAULT]))
    links = fabric(cluster, shipped())
    seconds = float(collective_s(links, kind, MB, size, stride, how, world=world).total)
    view = graph(cluster, "all")
    groups = [
        [block + offset + stride * member for member in range(size)]
        for block in range(0, world, size * stride)
        for offset in range(stride)
    ]
    for side in sides(cluster, world):
        leaving = sum(needed_bytes(kind, size, len(set(group) & set(side))) for group in groups) * MB
        if leaving:
            others = [f"gpu/{rank}" for rank in range(world) if rank not in side]
            cut = cut_bytes_per_s(view, [f"gpu/{rank}" for rank in side], others)
            assert seconds >= leaving / cut * (1 - 1e-9), (side, leaving / cut, seconds)
