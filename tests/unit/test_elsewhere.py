"""The same model on the same GPUs of other networks: another plan each time, and why."""

from dataclasses import replace

import pytest

from cost_models.calibrations import shipped
from cost_models.records import FabricLevel, SlowUplink, Workload
from planner.explain import problem_of_plan
from planner.plan import make_plan
from planner.predict import predict
from planner.readers.clusters import read_cluster
from planner.readers.models import read_model
from planner.readers.requests import CompleteRequest
from planner.readers.runtimes import read_runtime
from planner.report.elsewhere_text import elsewhere_lines
from planner.what_if.elsewhere import elsewhere

LEVELS = (FabricLevel(name="leaf", radix=2), FabricLevel(name="spine", radix=2))


def network(name, *, nics=8, domain_nodes=1, slow=()):
    """32 H100 in four nodes, two below each leaf."""
    cluster = read_cluster("h100x32")
    kind = replace(cluster.pools[0].kind, num_nics=nics, domain_nodes=domain_nodes)
    pools = (replace(cluster.pools[0], kind=kind),)
    return replace(cluster, name=name, pools=pools, fabric=LEVELS, slow_uplinks=slow)


CLUSTERS = {
    "as sold": network("as sold"),
    "slow spine link": network("slow spine link", slow=(SlowUplink(level="leaf", switch=1, factor=0.05),)),
    "one interface": network("one interface", nics=1),
    "one domain": network("one domain", nics=1, domain_nodes=4),
}


@pytest.fixture(scope="module")
def plans():
    """Llama 2 13B on each of them."""
    found = {}
    for name, cluster in CLUSTERS.items():
        request = CompleteRequest(
            model=read_model("llama2-13b"),
            cluster=cluster,
            workload=Workload(seq=4096, gbs=32),
            runtime=read_runtime("torch"),
            layout=None,
            pin="",
            defaults={},
        )
        found[name] = make_plan(request, calibration=shipped())
    return found


@pytest.mark.parametrize(
    ("this", "other"),
    [("slow spine link", "as sold"), ("one interface", "as sold"), ("one domain", "one interface")],
)
def test_another_network_gets_another_plan_and_says_why(plans, this, other):
    document = elsewhere(plans[this], plans[other])
    assert document is not None
    degrees = {"tp", "pp", "dp_shard", "dp_replicate", "order"}
    assert degrees & set(document["moved"]), "an axis moved"
    for side, own, stranger in (("this", this, other), ("other", other, this)):
        told = document[side]
        problem = problem_of_plan(plans[own])
        assert told["own_s"] == predict(problem, plans[own].decision).step_s
        assert told["stranger_s"] == predict(problem, plans[stranger].decision).step_s
        # what was chosen for another network is slower on this one, or does not fit
        assert told["stranger_s"] > told["own_s"] or told["stranger_verdict"] == "no"
    text = " ".join(" ".join(elsewhere_lines(document)).split())
    for axis, (here, there) in document["moved"].items():
        assert f"{axis} {here} here, {there} there" in text
    assert f"on {this} the other's plan takes" in text
    assert "exposed communication" in text


def test_a_slow_spine_link_keeps_gradients_below_one_leaf_or_thin(plans):
    here = elsewhere(plans["slow spine link"], plans["as sold"])["this"]
    # the plan of the healthy cluster loses by communication that it sends over the spine
    more = here["stranger_parts"]["exposed_communication_s"] - here["own_parts"]["exposed_communication_s"]
    assert more > 0.5 * (here["stranger_s"] - here["own_s"])


def test_one_interface_keeps_copies_in_the_node_and_nvlink_over_nodes_frees_them(plans):
    one, domain = plans["one interface"].decision.layout, plans["one domain"].decision.layout
    assert one.dp * one.tp <= 8 < domain.dp * domain.tp
    links = elsewhere(plans["one domain"], plans["one interface"])
    assert links["this"]["own_links"]["dp_shard"]["link"] == "nvlink4"
    assert links["other"]["stranger_links"]["dp_shard"]["link"] != "nvlink4"


def test_plans_of_one_cluster_or_of_two_questions_are_not_compared(plans):
    one = plans["one interface"]
    assert elsewhere(one, one) is None
    wider = replace(plans["as sold"].request.model, ffn=16384)
    longer = replace(plans["as sold"], request=replace(plans["as sold"].request, model=wider))
    assert elsewhere(one, longer) is None
    assert elsewhere_lines(None) == []
