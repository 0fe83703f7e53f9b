"""A plan that decides how replicas add up their gradients is priced so."""

from dataclasses import replace

import pytest

from cost_models.calibrations import shipped
from cost_models.collectives import collective_s
from cost_models.links import fabric
from cost_models.records import Binding, CollectiveChoice, Curve, Link, Precision, RecordError, normalised
from planner.decisions import decision_of_layout
from planner.predict import predict
from tests.unit.cost_cases import CPU, NODE, cluster, problem

PAIR = replace(
    NODE,
    device=CPU,
    gpus_per_node=2,
    num_nics=2,
    intra=Link(name="veth-fast", bandwidth_bytes_per_s=125e6),
    nic=Link(name="veth-slow", bandwidth_bytes_per_s=12.5e6),
)


def step_s(algorithm, binding=Binding.DECIDED):
    whole = problem(cluster=cluster(2, PAIR))
    whole = replace(whole, workload=replace(whole.workload, precision=Precision.FP32, seq=256))
    decision = decision_of_layout(whole, normalised(dp=4, zero=0))
    choice = CollectiveChoice(algorithm=algorithm, binding=binding)
    return predict(whole, replace(decision, collectives={"dp_replicate": choice})).step_s


def test_two_levels_are_priced_where_a_plan_decides_on_them():
    assert step_s("hierarchical") < step_s("default")
    # gloo has the ring alone; what is merely predicted is the runtime's own choice
    assert step_s("ring") == step_s("default") == step_s("hierarchical", Binding.PREDICTED)


def test_an_algorithm_that_nobody_knows_is_told():
    with pytest.raises(RecordError, match="algorithm 'star' is not known; known: default, ring, tree, hierarchical"):
        step_s("star")


def test_with_measured_curves_two_levels_are_the_sum_of_their_parts():
    def curve(seconds):
        return Curve(sizes_bytes=(1e6, 1e7), seconds=(seconds, 10 * seconds), source="a test", date="2026-12-01")

    curves = {
        "reduce_scatter/2/veth-fast": curve(1.0),
        "all_reduce/2/veth-slow": curve(10.0),
        "all_gather/2/veth-fast": curve(100.0),
    }
    found = fabric(cluster(2, PAIR), replace(shipped(), curves=curves))
    # half of the bytes go between the domains; the curves are straight
    assert float(collective_s(found, "all_reduce", 1e7, 4, 1, "hierarchical").total) == pytest.approx(10 + 50 + 1000)
