"""Clusters: presets x GPUs, the tables behind them, files, the short form, and what is refused."""

import json

import pytest

from cost_models.data import rows, table
from cost_models.records import Cluster, Precision, RecordError, loads, save, to_json
from planner.errors import InputError
from planner.readers.cluster_facts import cluster_and_defaults, cluster_from_facts, device_from_facts, read_interconnect
from planner.readers.clusters import cluster_of_document, read_cluster
from planner.readers.node_presets import cluster_names, device, link, local_cluster, node_kind, preset_cluster
from planner.readers.plausible import refuse_implausible

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize("name", cluster_names())
def test_every_preset_makes_a_cluster_that_reads_back(name):
    kind = node_kind(name)
    cluster = read_cluster(f"{name}x{4 * kind.gpus_per_node}")
    assert cluster.num_nodes == 4
    assert loads(Cluster, json.dumps(to_json(cluster))) == cluster


@pytest.mark.parametrize("name", ["devices", "links", "nodes"])
def test_every_row_has_its_birth_certificate(name):
    assert table(name)["about"]
    for key, row in rows(name).items():
        assert row["source"], key
        assert row["date"], key
        # a guess names a field that the row has
        for guess in row["guess"]:
            field, _, part = guess.partition(".")
            assert field in row, (key, guess)
            assert not part or part in row[field], (key, guess)


def test_rates_are_sane():
    for name in rows("devices"):
        found = device(name)
        assert set(found.matmul_flops_per_s) == set(found.peak_flops_per_s) <= {p.value for p in Precision}
        for precision, roof in found.matmul_flops_per_s.items():
            assert 0.4 * found.peak_flops_per_s[precision] < roof < found.peak_flops_per_s[precision], (name, precision)
        # drivers show a little less than the nominal GiB, never more
        share = found.memory_bytes / (rows("devices")[name]["nominal_gb"][0] * GIB)
        assert 0.92 < share < 1.03, name
    for name, row in rows("links").items():
        assert 0 < row["efficiency"] <= 1, name
        assert 0 < row["small_message_latency_s"] <= row["latency_s"] < 1e-3, name


def test_known_figures():
    h100 = read_cluster("h100x64").pools[0].kind
    assert h100.device.memory_bytes == 81559 * MIB  # 79.6 GiB
    assert h100.device.peak_flops_per_s["bf16"] == 989e12
    assert h100.intra.bandwidth_bytes_per_s == 450e9
    assert h100.node_bandwidth_bytes_per_s == 8 * 50e9
    assert h100.domain_size == 8
    assert node_kind("a100-80").node_bandwidth_bytes_per_s == 8 * 25e9
    assert "bf16" not in device("v100-32").peak_flops_per_s


def test_preset_times_gpus():
    cluster = read_cluster("a100-80x1024")
    assert (cluster.name, cluster.num_nodes, cluster.num_gpus) == ("a100-80x1024", 128, 1024)
    assert read_cluster(" H100 x 64 ") == read_cluster("dgx-h100x64") == read_cluster("h100×64")
    assert read_cluster("mi300xx16") == read_cluster("mi300x16")


def test_fewer_gpus_than_a_node_are_one_smaller_node():
    cluster = read_cluster("h100x4")
    kind = cluster.pools[0].kind
    assert (cluster.num_nodes, cluster.num_gpus, kind.domain_size, kind.num_nics) == (1, 4, 4, 4)
    assert kind.name == "dgx-h100 (4 of 8)"
    assert kind.host_memory_bytes == node_kind("h100").host_memory_bytes


def test_a_rack_is_one_fast_domain():
    assert read_cluster("gb200x72").pools[0].kind.domain_size == 72
    assert read_cluster("gb200x144").pools[0].kind.domain_size == 72
    assert read_cluster("gb200x8").pools[0].kind.domain_size == 8
    assert read_cluster("gb200x2").pools[0].kind.domain_size == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100x0", r"h100x0 has zero GPUs; write at least one, as in h100x8"),
        ("h100x-8", r"zero GPUs"),
        ("h100x12", r"12 do not fill whole nodes; legal near counts: 8, 16"),
        ("h100", r"does not say how many GPUs; write preset x GPUs, as in h100x8"),
        ("a100x8", r"'a100' is not a preset.*near names: a100-40x8, a100-80x8\. Presets, each with x"),
        ("h1000x8", r"near names: h100x8"),
        ("zork", r"no name is near\. Presets, each with x and a number of GPUs: v100-16, "),
        ("nowhere.json", r"there is no such file"),
        ("cpux4", r"measured, not looked up; `meshwright probe --ranks N"),
    ],
)
def test_what_a_cluster_may_not_be_called(name, words):
    with pytest.raises(InputError, match=words):
        read_cluster(name)


def test_thirty_two_thousand_gpus_stay_a_page_of_text():
    assert len(json.dumps(to_json(read_cluster("h100x32768")))) < 2000


# Files and the short form ------------------------------------------------------------------------------------------


def test_files(tmp_path):
    path = tmp_path / "cluster.json"
    wanted = read_cluster("h100x16")
    save(wanted, path)
    assert read_cluster(str(path)) == wanted
    for document in (
        {"cluster": "h100x16"},
        {"cluster": to_json(wanted), "model": "llama3-8b"},
        {"request": {"cluster": to_json(wanted)}, "schema_version": 1},
    ):
        path.write_text(json.dumps(document))
        assert read_cluster(str(path)) == wanted
    path.write_text(json.dumps({"gpu": "H100-80G", "gpu_mem_gb": 80, "nodes": 2, "gpus_per_node": 8, "inter": None}))
    assert read_cluster(str(path)) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"cluster\.json: not JSON: .*truncated or damaged"),
        ("[]", r"expected an object that describes a cluster"),
        ("{}", r"neither a saved cluster .* nor its short form \(keys: name, nodes"),
        ('{"schema_version": 2, "pools": []}', r"schema_version 2 is newer than 1"),
        ('{"name": "x", "pools": []}', r"cluster\.json: .*has zero GPUs"),
        ('{"name": "x", "pools": [], "rail": true}', r"unknown field 'rail'; did you mean 'rails'\?"),
        ('{"gpu": "h100", "nodes": 0}', r"nodes=0: a whole number from 1"),
    ],
)
def test_what_a_cluster_file_may_not_say(tmp_path, text, words):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_cluster(str(path))


def edited(change):
    """h100x16 as a document, changed by hand."""
    data = to_json(read_cluster("h100x16"))
    change(data)
    return data


def kind_of(data):
    return data["pools"][0]["kind"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: kind_of(d)["intra"].update(bandwidth_bytes_per_s=450),
            r"intra.bandwidth_bytes_per_s=450: .*bytes a second",
        ),
        (
            lambda d: kind_of(d)["nic"].update(bandwidth_bytes_per_s=4e20),
            r"nic.bandwidth_bytes_per_s=4e\+20: .*plausible",
        ),
        (
            lambda d: kind_of(d)["nic"].update(bandwidth_bytes_per_s=None),
            r"bandwidth_bytes_per_s=inf; a positive number",
        ),
        (lambda d: kind_of(d)["device"].update(memory_bytes=80), r"memory_bytes=80: between"),
        (lambda d: kind_of(d)["device"].update(memory_bytes=81559 * 10**9), r"memory_bytes=8.1559e\+13"),
        (
            lambda d: kind_of(d)["device"].update(memory_bandwidth_bytes_per_s=3350),
            r"memory_bandwidth_bytes_per_s=3350",
        ),
        (lambda d: kind_of(d)["device"].update(memory_bandwidth_bytes_per_s=None), r"bandwidth are positive numbers"),
        (lambda d: kind_of(d)["device"]["peak_flops_per_s"].update(bf16=989), r"peak_flops_per_s.bf16=989: .*FLOP"),
        (lambda d: kind_of(d)["device"]["matmul_flops_per_s"].update(bf16=-1), r"bf16 at -1.0 FLOP/s"),
        (lambda d: kind_of(d)["device"]["matmul_flops_per_s"].update(bf16=5e15), r"is above peak_flops_per_s.bf16"),
        (lambda d: kind_of(d)["device"].update(matmul_flops_per_s={}), r"the matmul rate of at least one precision"),
        (lambda d: kind_of(d)["device"].update(family="hoper"), r"did you mean 'hopper'\? Known families: ada"),
        (lambda d: kind_of(d).update(host_memory_bytes=0), r"host_memory_bytes=0; a whole number from 1, or null"),
        (lambda d: kind_of(d).pop("nic"), r"lacks the field 'nic' \(One network interface\)"),
        (lambda d: d["pools"][0].update(num_nodes=10**9), r"8,000,000,000 GPUs: up to 1,048,576"),
        (lambda d: d.update(exceptions=[{"node": 0, "nic_factor": 0}]), r"nic_factor=0.0; it is the share that works"),
        (lambda d: d.update(exceptions=[{"node": 0, "intra_factor": 2}]), r"intra_factor=2.0; it is the share"),
        (lambda d: d.update(exceptions=[{"node": 1}, {"node": 1}]), r"node 1 has two exceptions"),
        (lambda d: d.update(fabric=[{"name": "leaf", "radix": 2, "oversubscription": None}]), r"oversubscription=inf"),
        (lambda d: d.update(name=""), r"cluster name '': one line of printable text"),
        (lambda d: d.update(name="a\nb"), r"one line of printable text"),
    ],
)
def test_what_no_cluster_has(tmp_path, change, words):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(edited(change)))
    with pytest.raises(InputError, match=words):
        read_cluster(str(path))


@pytest.mark.parametrize("name", cluster_names())
def test_every_preset_is_plausible(name):
    for gpus in (1, 4 * node_kind(name).gpus_per_node):
        refuse_implausible(read_cluster(f"{name}x{gpus}"))


def test_a_changed_preset_is_told_apart():
    assert cluster_of_document(edited(lambda d: None))[0] == read_cluster("h100x16")
    slower = cluster_of_document(edited(lambda d: kind_of(d)["nic"].update(bandwidth_bytes_per_s=4e10)))[0]
    more = cluster_of_document(edited(lambda d: d["pools"][0].update(num_nodes=3)))[0]
    assert slower.name == more.name == "h100x16 (changed)"
    assert cluster_of_document(to_json(slower))[0] == slower
    own = edited(lambda d: (d.update(name="ours"), d["pools"][0].update(num_nodes=3)))
    assert cluster_of_document(own)[0].name == "ours"


def test_pools_of_one_kind_are_one_pool():
    twice = edited(lambda d: d["pools"].append(d["pools"][0]))
    (pool,) = cluster_of_document(twice)[0].pools
    assert pool.num_nodes == 4


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"gpu": "h100", "num_gpus": 16}, r"unknown key 'num_gpus'; did you mean 'world'"),
        ({"gpu": "h100", "nodes": 2, "gpus_per_nod": 8}, r"did you mean 'gpus_per_node'"),
        ({"gpu": ["h100"], "nodes": 2}, r"gpu=\['h100'\]: a text"),
        ({"gpu": "h100", "nodes": 2, "gpu_mem_gb": "80"}, r"gpu_mem_gb='80': a positive number"),
        ({"gpu": "h100", "nodes": 2, "gpu_mem_gb": 80e9}, r"gpu_mem_gb=8e\+10: h100 is sold with 80; the unit is GB"),
        ({"gpu": "h100", "nodes": 2, "inter": "fast"}, r"inter='fast' is not understood; say a rate as in"),
        ({"gpu": "h100", "nodes": 2, "inter": 400}, r"inter=400: a text"),
        ({"gpu": "h100", "nodes": 2, "intra": "glue"}, r"intra='glue' is not understood; say nvlink, pcie"),
        ({"gpu": "h100", "nodes": 1, "gpus_per_node": 8, "world": 4}, r"world=4 is not nodes·gpus_per_node = 8"),
        ({"gpu": "h100", "nodes": 10**12}, r"8,000,000,000,000 GPUs: up to"),
    ],
)
def test_a_file_of_the_short_form_is_read_strictly(tmp_path, facts, words):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(facts))
    with pytest.raises(InputError, match=words):
        read_cluster(str(path))


@pytest.mark.parametrize(
    ("gpu", "size", "name"),
    [
        ("H100-80G", 80, "h100"),
        ("H100", None, "h100"),
        ("NVIDIA H100 80GB HBM3", None, "h100"),
        ("H100-PCIe", 80, "h100-pcie"),
        ("A100-80", None, "a100-80"),
        ("A100", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("V100-SXM2-32GB", None, "v100-32"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("RTX3090", 24, "rtx3090"),
        ("A6000", 48, "a6000"),
        ("H800-80G", 80, "h800"),
        ("GH200 (guess, incl. 4 per node)", 96, "gh200"),
        ("B200", 180, "b200"),
        ("B200", 192, "b200"),
        ("AMD Instinct MI300X", 192, "mi300x"),
    ],
)
def test_what_people_call_a_device(gpu, size, name):
    assert device_from_facts(gpu, size) == device(name)


def test_a_known_device_with_another_size():
    found = device_from_facts("H100", 96)
    assert found.name == "h100"
    assert 0.98 * 96 * GIB < found.memory_bytes < 96 * GIB


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("A100", r"sold with several sizes of memory; give gpu_mem_gb, one of: 40, 80"),
        ("A100 + V100", r"gpu 'A100 \+ V100' is not known; did you mean"),
        ("any", r"gpu 'any' is not known\. Known: v100-16"),
    ],
)
def test_what_a_device_may_not_be_called(gpu, words):
    with pytest.raises(InputError, match=words):
        device_from_facts(gpu)


def test_what_the_short_form_does_not_say_is_listed():
    cluster, defaults = cluster_and_defaults({"gpu": "H100", "world": 16})
    assert cluster == read_cluster("h100x16")
    assert defaults == {
        "cluster.gpus_per_node": "8 (dgx-h100)",
        "cluster.nodes": "2 (world / gpus_per_node)",
        "cluster.host_mem_gb": "2048 (dgx-h100)",
        "cluster.intra": "nvlink4 (dgx-h100)",
        "cluster.inter": "8 x ib-ndr (dgx-h100)",
    }
    said = {"gpu": "H100", "nodes": 2, "gpus_per_node": 8, "host_mem_gb": 512, "intra": "pcie", "inter": "ethernet-100"}
    cluster, defaults = cluster_and_defaults(said)
    kind = cluster.pools[0].kind
    assert defaults == {}
    assert (kind.host_memory_bytes, kind.intra, kind.nic) == (512 * GIB, link("pcie5"), link("ethernet-100"))


def test_a_node_of_another_size_than_sold():
    assert cluster_from_facts({"gpu": "V100", "gpu_mem_gb": 32, "nodes": 2, "gpus_per_node": 16}).pools[0].kind == (
        preset_cluster("dgx-2", 32).pools[0].kind
    )
    kind = cluster_from_facts({"gpu": "A6000", "nodes": 1, "gpus_per_node": 10}).pools[0].kind
    assert (kind.name, kind.domain_size) == ("node-of-10-a6000", 10)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"nodes": 2}, r"does not say which gpu"),
        ({"gpu": "h100"}, r"does not say how many GPUs; give nodes or world"),
        ({"gpu": "h100", "world": 12}, r"world=12 does not fill whole nodes of gpus_per_node=8"),
        (
            {"gpu": "h100", "nodes": 1, "gpus_per_node": 8, "world": 16},
            r"world=16 is more than nodes·gpus_per_node = 1·8 = 8",
        ),
        ({"gpu": "h100", "nodes": "2"}, r"nodes='2': a whole number"),
        ({"gpu": "h100", "nodes": 1, "host_mem_gb": -1}, r"host_mem_gb=-1: a positive number"),
    ],
)
def test_what_the_short_form_may_not_say(facts, words):
    with pytest.raises(InputError, match=words):
        cluster_from_facts(facts)


@pytest.mark.parametrize(
    ("text", "name", "gbit", "count"),
    [
        ("NVLink4 8-GPU + 400Gb/GPU (DGX Cloud; guess)", "ib-ndr", 400, 8),
        ("NVLink3 + 4 Omni-Path links per 8-GPU node (tr11 README)", "omni-path", 100, 4),
        ("NVLink3 (150GB/s in config) + 800Gb/s inter-node (config)", "ib-hdr", 200, 4),
        ("NVSwitch + 1600Gbps RoCE/node", "ib-hdr", 200, 8),
        ("NVLink3 + 8x HDR200 (Selene)", "ib-hdr", 200, 8),
        ("8 x 200 Gbps (GCP a3-mega)", "ib-hdr", 200, 8),
        ("400 Gbps per GPU", "ib-ndr", 400, 8),
        ("340 Gbps per node", "ib-hdr", 42.5, 8),
        ("10GbE + 1GbE", "ethernet-10", 10, 1),
        ("200 Gbps", "ib-hdr", 200, 1),
        ("roce-400", "roce-400", 400, 8),
    ],
)
def test_what_people_write_of_an_interconnect(text, name, gbit, count):
    found, number = read_interconnect(text, node_kind("a100-80"))
    assert (found.name, found.bandwidth_bytes_per_s, number) == (name, gbit * 125e6, count)


def test_an_interconnect_without_a_number_is_not_guessed():
    for text in ("", "NVLink5", "slow", "NVL72 NVLink5 + IB/RoCE (system default, guess)", "2 x ethernet"):
        assert read_interconnect(text, node_kind("a100-80")) is None


def test_every_case_with_a_known_device_gives_a_cluster(shared):
    read = 0
    for path in sorted((shared / "cases").glob("*.json")):
        facts = json.loads(path.read_text())["cluster"]
        try:
            cluster = cluster_from_facts(facts)
        except InputError:
            continue
        read += 1
        assert cluster.num_gpus == facts["world"], path.name
    assert read >= 30


def test_this_machine():
    cluster = local_cluster(
        4, 2 * GIB, matmul_flops_per_s={"fp32": 5e10}, memory_bandwidth_bytes_per_s=1e10, bandwidth_bytes_per_s=2e9
    )
    kind = cluster.pools[0].kind
    assert (cluster.name, cluster.num_gpus, kind.device.family, kind.intra.name) == ("cpux4", 4, "cpu", "loopback")
    assert kind.device.peak_flops_per_s == {"fp32": 5e10}
    with pytest.raises(InputError, match="at least one rank"):
        local_cluster(0, GIB, matmul_flops_per_s={"fp32": 1.0}, memory_bandwidth_bytes_per_s=1.0)


def test_an_unknown_table_lists_the_known():
    with pytest.raises(RecordError, match=r"no table 'colours'; known tables: .*devices, links"):
        table("colours")
