"""Labels of Kubernetes nodes, topograph's models and hostfiles: fabrics that name their nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.readers.clusters import read_cluster, read_joined
from planner.readers.topology.hostfile import is_hostfile, read_hostfile
from planner.readers.topology.kubernetes import is_kubernetes, is_labelled_list, read_kubernetes, read_labelled_list
from planner.readers.topology.seen import SeenFabric
from planner.readers.topology.topograph import is_topograph, read_topograph
from planner.readers.topology.yaml_text import parse_yaml

Labels = dict[str, str]


def item(name: str, labels: Labels, *, gpus: int = 8, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"capacity": {"cpu": "96", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}, **status},
    }


def nodes(*items: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def h100(**more: str) -> Labels:
    return {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.memory": "81559",
        **more,
    }


def fabric(data: dict[str, Any]) -> SeenFabric:
    assert is_kubernetes(data)
    (found,) = read_kubernetes(data, "nodes.json")
    return found


def shape(found: SeenFabric) -> list[tuple[str, tuple[int, ...]]]:
    return [(level.name, level.sizes) for level in found.levels]


FAMILIES = [
    ("fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1", ["leaf", "spine"]),
    ("topology.k8s.aws/network-node-layer-3", "topology.k8s.aws/network-node-layer-2", ["leaf", "spine"]),
    ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block", ["sub-block", "block"]),
    ("oci.oraclecloud.com/host.rack_id", "oci.oraclecloud.com/host.network_block_id", ["rack", "network block"]),
    ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine", ["leaf", "spine"]),
]


@pytest.mark.parametrize(("near", "far", "names"), FAMILIES, ids=[names[0].split("/")[0] for names in FAMILIES])
def test_every_family_of_labels(near: str, far: str, names: list[str]) -> None:
    items = [item(f"n{n}", h100(**{near: f"l{n // 2}", far: f"s{n // 4}"})) for n in range(8)]
    found = fabric(nodes(*reversed(items)))
    assert shape(found) == [(names[0], (2,) * 4), (names[1], (2, 2))]
    assert {host.gpu for host in found.hosts} == {"NVIDIA-H100-80GB-HBM3"}
    stands = [host.name for host in found.hosts]
    assert [set(stands[at : at + 2]) for at in range(0, 8, 2)] == [{f"n{n}", f"n{n + 1}"} for n in range(0, 8, 2)]


def test_nodes_that_do_not_count(tmp_path: Path) -> None:
    data = nodes(
        item("cpu", {}, gpus=0),
        item("a", h100()),
        item("b", h100(), conditions=[{"type": "Ready", "status": "False"}]),
        {**item("c", h100()), "spec": {"unschedulable": True}},
        item("d", h100()),
    )
    found = fabric(data)
    assert [host.name for host in found.hosts] == ["a", "d"]
    assert "1 nodes without accelerators left out" in found.notes
    assert "2 nodes that are not ready, or closed to work, left out" in found.notes
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(data))
    cluster = read_cluster(str(path))
    assert (cluster.num_nodes, cluster.pools[0].kind.device.name, cluster.pools[0].kind.gpus_per_node) == (2, "h100", 8)


def test_cliques_are_fast_domains_across_nodes(tmp_path: Path) -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.count": "4"}
    items = [item(f"n{n:02}", {**labels, "nvidia.com/gpu.clique": f"uuid{n // 18}.1"}, gpus=4) for n in range(36)]
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(nodes(*items)))
    kind = read_cluster(str(path)).pools[0].kind
    assert (kind.device.name, kind.domain_nodes, kind.domain_size) == ("gb200", 18, 72)


def test_two_kinds_of_nodes_are_two_pools(tmp_path: Path) -> None:
    a100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8"}
    items = [item(f"n{n}", h100() if n % 2 else a100) for n in range(8)]
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(nodes(*items)))
    found = read_joined([str(path)])
    assert [(pool.kind.device.name, pool.num_nodes) for pool in found.cluster.pools] == [("a100-80", 4), ("h100", 4)]
    assert any("nodes of a kind stand together" in text for text in found.assumptions)


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA-A100-SXM4-40GB-SHARED", "a100-40"),
        ("Tesla-V100-SXM2-16GB", "v100-16"),
        ("NVIDIA-H200", "h200"),
        ("NVIDIA-GH200-480GB", "gh200"),
        ("NVIDIA-L40S", "l40s"),
        ("AMD_Instinct_MI300X_OAM", "mi300x"),
        ("nvidia-h100-mega-80gb", "h100"),
        ("NVIDIA-H100-PCIe", "h100-pcie"),
        ("NVIDIA-A100-PCIE-80GB", "a100-80"),
        ("NVIDIA-B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_products_of_labels_and_drivers(product: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(nodes(item("a", {"nvidia.com/gpu.product": product}))))
    assert read_cluster(str(path)).pools[0].kind.device.name == device


def test_memory_tells_variants_apart(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(
        json.dumps(nodes(item("a", {"nvidia.com/gpu.product": "NVIDIA-A100", "nvidia.com/gpu.memory": "40960"})))
    )
    assert read_cluster(str(path)).pools[0].kind.device.name == "a100-40"


def test_yaml_and_the_table_of_labels_say_the_same() -> None:
    labels = h100(**{"topology.kubernetes.io/zone": "a"})
    written = "\n".join(f"      {key}: '{value}'" for key, value in labels.items())
    text = f"apiVersion: v1\nkind: Node\nmetadata:\n    name: a\n    labels:\n{written}\nstatus:\n  capacity:\n    nvidia.com/gpu: '8'\n"
    printed = "NAME STATUS ROLES AGE VERSION LABELS\na Ready <none> 5d v1.31.1 " + ",".join(
        f"{k}={v}" for k, v in labels.items()
    )
    assert is_labelled_list(printed)
    assert read_labelled_list(printed, "x")[0].hosts == fabric(parse_yaml(text, "x")).hosts


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (nodes(item("a", {}, gpus=0)), "none of 1 nodes has an accelerator"),
        (nodes(), "none of 0 nodes"),
        (nodes(item("a", h100()), item("a", h100())), "node a is listed twice"),
        (nodes({**item("a", h100()), "kind": "Pod"}), "has a 'Pod'"),
        (nodes(item("a", h100(**{"nvidia.com/gpu.count": "many"}))), "'many' accelerators"),
        (nodes(item("a", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"})), "slices of a GPU"),
        (nodes({"kind": "Node"}), "without metadata.name"),
        ({**nodes(), "items": "x"}, "a list of objects"),
        (nodes({**item("a", {}), "metadata": ["x"]}), "metadata of a node is a list"),
    ],
)
def test_what_is_damaged_is_told(data: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        fabric(data)
    assert words in str(error.value)


# topograph ---------------------------------------------------------------------------------------------------------------


def model(text: str) -> SeenFabric:
    data = parse_yaml(text, "model.yaml")
    assert is_topograph(data)
    (found,) = read_topograph(data, "model.yaml")
    return found


TREE = """\
switches:
  core: {switches: [s1, s2]}
  s1: {switches: [l1, l2, empty]}
  s2: {switches: [l3]}
blocks:
- {switch: l1, nodes: ["n[1-2]"], annotations: {accelerator.topology.test/domain: d1}}
- {switch: l2, nodes: [n3, n4]}
- {switch: l3, nodes: ["n[5-6]"]}
"""


def test_a_model_whose_leaves_are_named_by_their_parents_alone() -> None:
    found = model(TREE)
    assert [host.name for host in found.hosts] == [f"n{n}" for n in range(1, 7)]
    assert shape(found) == [("leaf", (2, 2, 2)), ("spine", (2, 1))]
    assert found.hosts[0].domain == "d1"


def test_a_model_of_blocks_alone() -> None:
    assert shape(model('blocks:\n- nodes: ["a[1-2]"]\n- nodes: ["b[1-2]"]\n')) == [("block", (2, 2))]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("switch: l3", "switch: l9", "hangs on 'l9', which `switches` does not know"),
        ("nodes: [n3, n4]", "nodes: []", "a list of names is needed"),
        ("{switches: [l3]}", "{switches: l3}", "`switches` is a list of names"),
        ("[l3]", "[l3, l1]", "switch l1 hangs on s1 and on s2"),
    ],
)
def test_damaged_models(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        model(TREE.replace(old, new))
    assert words in str(error.value)


# Hostfiles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=8\nb slots=8  # comment\n", [("a", 8), ("b", 8)]),
        ("a\nb\n\n", [("a", None), ("b", None)]),
        ("a:8\nb:4\n", [("a", 8), ("b", 4)]),
        ("a\na\na\na\nb\nb\nb\nb\n", [("a", 4), ("b", 4)]),
        ("a slots=4\na slots=4\n", [("a", 8)]),
        ("node[01-03] slots=8\n", [("node01", 8), ("node02", 8), ("node03", 8)]),
        ("10.0.0.1 slots=8 max_slots=8\n", [("10.0.0.1", 8)]),
        ("a slots=0\nb slots=8\n", [("b", 8)]),
        ("node[1-2],gpu7\n", [("node1", None), ("node2", None), ("gpu7", None)]),
    ],
)
def test_hostfiles(text: str, hosts: list[tuple[str, int | None]]) -> None:
    assert is_hostfile(text)
    (found,) = read_hostfile(text, "hostfile")
    assert [(host.name, host.num_gpus) for host in found.hosts] == hosts


@pytest.mark.parametrize("text", ["a b c\n", "hello, world!\n", "x = 3\n", "# only a comment\n", "a/b\n"])
def test_texts_that_are_no_hostfile(text: str) -> None:
    assert not is_hostfile(text)


def test_a_hostfile_makes_a_cluster_and_must_agree_with_a_tree(tmp_path: Path) -> None:
    hosts, tree = tmp_path / "hostfile", tmp_path / "topology.conf"
    hosts.write_text("n1 slots=8\nn2 slots=8\n")
    tree.write_text("SwitchName=s Switches=a,b\nSwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n")
    assert read_cluster(f"{hosts},gpu=h100").num_gpus == 16
    both = read_cluster(f"{hosts},{tree},gpu=h100")
    assert (both.num_gpus, [level.radix for level in both.fabric]) == (16, [1])
    hosts.write_text("n1 slots=8\nn9 slots=8\n")
    with pytest.raises(InputError, match="names n9, which"):
        read_cluster(f"{hosts},{tree},gpu=h100")
