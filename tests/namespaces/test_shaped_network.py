"""gloo over links of known bandwidth: predicted against measured, from curves of other sizes and from tables alone.

Four hosts of one process: 1 Gbit/s within the pairs (0, 1) and (2, 3), 100 Mbit/s between them, each pair of hosts on a
link of its own. Compared is what the links decide; the machine's own speed and what else runs on it count little.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.testbed.network import shaped_network, unavailable
from cost_models.calibrations import shipped
from cost_models.collectives import Fabric, collective_s, fabric
from cost_models.records import Calibration, Curve, Link
from tests.namespaces.collective_ranks import TIMES
from tests.unit.cost_cases import CPU, NODE, cluster

WHY_NOT = unavailable()
pytestmark = [pytest.mark.timeout(150), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

KIB = 1 << 10
PROBED = (384 * KIB, 1536 * KIB)
ASKED = (512 * KIB, 1024 * KIB)
NEAR_BYTES_PER_S, FAR_BYTES_PER_S = 125e6, 12.5e6
WHERE = {"near": (2, 1), "far": (2, 2), "all": (4, 1)}
"""Groups as (size, stride)."""
COLLECTIVES = [
    (name, where)
    for where in WHERE
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
    if (name, where) != ("p2p", "all")
]
BANDS = {"near": 0.35, "far": 0.2, "all": 0.2}
"""At 1 Gbit/s the cores of a busy machine decide too."""
BOTH_WAYS = 0.5
"""gloo's all-to-all through four hosts: as often as not a pair sends one direction after the other."""
Measured = dict[str, float]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Seconds by `collective/where/size`."""
    folder = tmp_path_factory.mktemp("network")
    root = Path(__file__).parents[2]
    sizes = ",".join(str(size) for size in (*PROBED, *ASKED))
    with pytest.MonkeyPatch.context() as patch, shaped_network(8 * NEAR_BYTES_PER_S, 8 * FAR_BYTES_PER_S) as network:
        patch.setenv("PYTHONPATH", str(root))
        program = Path(__file__).with_name("collective_ranks.py")
        network.run(program, [str(folder / "rendezvous"), str(folder / "out.json"), sizes], timeout_s=120)
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def hosts(calibration: Calibration, num_far_links: int = 1) -> Fabric:
    """The network as collectives see it: a pair is a node. A host has a link to each of the two far ones: a ring uses one of
    them at a time, an all-to-all both."""
    kind = replace(
        NODE,
        device=CPU,
        gpus_per_node=2,
        intra=Link(name="ethernet-1", bandwidth_bytes_per_s=NEAR_BYTES_PER_S),
        nic=Link(name="ethernet-0.1", bandwidth_bytes_per_s=num_far_links * FAR_BYTES_PER_S),
        num_nics=2,
    )
    # no table has 0.1 Gbit/s: Ethernet with TCP, as 1 Gbit/s is
    ethernet = {"link.efficiency.ethernet-0.1": 0.94, "link.latency_s.ethernet-0.1": 3e-5}
    like = calibration.coefficients["link.efficiency.network"]
    known = {**calibration.coefficients, **{name: replace(like, value=value) for name, value in ethernet.items()}}
    return fabric(cluster(2, kind), replace(calibration, coefficients=known))


def seconds(links: Fabric, name: str, where: str, num_bytes: float, algorithm: str = "default") -> float:
    return float(collective_s(links, name, num_bytes * TIMES[where], *WHERE[where], algorithm).total)


def probed(measured: Measured) -> Calibration:
    """Curves of the probed sizes alone."""
    curves = {}
    for name, where in COLLECTIVES:
        size, _ = WHERE[where]
        curves[f"{name}/{size}/{'ethernet-1' if where == 'near' else 'ethernet-0.1'}"] = Curve(
            sizes_bytes=tuple(float(num_bytes * TIMES[where]) for num_bytes in PROBED),
            seconds=tuple(measured[f"{name}/{where}/{num_bytes}"] for num_bytes in PROBED),
            source="this test",
            date="2026-11-30",
        )
    return replace(shipped(), curves=curves)


def band(name: str, where: str) -> float:
    return BOTH_WAYS if (name, where) == ("all_to_all", "all") else BANDS[where]


@pytest.mark.parametrize(("name", "where"), COLLECTIVES)
def test_curves_of_a_probe_predict_other_sizes(measured: Measured, name: str, where: str) -> None:
    links = hosts(probed(measured))
    for num_bytes in ASKED:
        found = collective_s(links, name, num_bytes * TIMES[where], *WHERE[where])
        assert found.measured == found.total
        expected = measured[f"{name}/{where}/{num_bytes}"]
        assert found.total == pytest.approx(expected, rel=band(name, where)), num_bytes


@pytest.mark.parametrize(("name", "where"), COLLECTIVES)
def test_tables_alone_predict_what_the_links_decide(measured: Measured, name: str, where: str) -> None:
    links = hosts(shipped(), num_far_links=2 if (name, where) == ("all_to_all", "all") else 1)
    for num_bytes in ASKED:
        expected = measured[f"{name}/{where}/{num_bytes}"]
        assert seconds(links, name, where, num_bytes) == pytest.approx(expected, rel=band(name, where)), num_bytes


def test_two_levels_against_one_ring_come_in_the_measured_order(measured: Measured) -> None:
    """Shares reduced within the fast pairs first; one ring through all; shares reduced across the slow links first."""
    links = hosts(shipped())
    for num_bytes in ASKED:
        plans = {
            "matched": seconds(links, "all_reduce", "all", num_bytes, "hierarchical"),
            "all_reduce": seconds(links, "all_reduce", "all", num_bytes),
            "mismatched": seconds(links, "reduce_scatter", "far", num_bytes)
            + seconds(links, "all_reduce", "near", num_bytes / 2 / TIMES["near"])
            + seconds(links, "all_gather", "far", num_bytes),
        }
        times = {plan: measured[f"{plan}/all/{num_bytes}"] for plan in plans}
        assert sorted(plans, key=plans.__getitem__) == sorted(times, key=times.__getitem__)
        for plan, predicted in plans.items():
            assert predicted == pytest.approx(times[plan], rel=0.25), plan


def test_slow_links_are_slow(measured: Measured) -> None:
    """The network is what it claims to be: ten times between near and far."""
    for num_bytes in ASKED:
        ratio = TIMES["near"] * measured[f"p2p/far/{num_bytes}"] / measured[f"p2p/near/{num_bytes}"]
        assert ratio == pytest.approx(NEAR_BYTES_PER_S / FAR_BYTES_PER_S, rel=0.25)
        assert measured[f"p2p/far/{num_bytes}"] == pytest.approx(num_bytes / FAR_BYTES_PER_S, rel=0.15)
