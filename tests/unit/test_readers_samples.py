"""Every sample of other people's machines becomes a cluster, or is refused with a reason; what holds of any cluster's graph."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.graph import BANDWIDTH, graph
from cost_models.records import Cluster, DomainShape
from planner.errors import InputError
from planner.fabric_findings import findings
from planner.readers.clusters import read_cluster, read_joined
from tests.unit.test_fabric_findings import matrix

SMI, XML, ROCM = "nvidia_smi_topo", "nccl_topo_xml", "rocm"

READ: dict[str, tuple[Sequence[str], tuple[int, int, str, float, int, float]]] = {
    f"{SMI}/a100_8gpu_edited_spacing_stas.txt": (["gpu=a100-80"], (1, 8, "nvlink3", 300, 8, 25)),
    f"{SMI}/h100_8gpu_2numa_stas.txt": (["gpu=h100", "nodes=4"], (4, 8, "nvlink4", 450, 8, 50)),
    f"{SMI}/hgx_8gpu_10nic_glued_affinity.txt": (["gpu=h200"], (1, 8, "nvlink4", 450, 8, 50)),
    f"{SMI}/gb200_4gpu_8nic.txt": (["gpu=gb200"], (1, 4, "nvlink5", 900, 4, 50)),
    f"{SMI}/v100_8gpu_4nic_old_driver_mlx_names_tabs.txt": (["gpu=v100-32"], (1, 8, "nvlink2", 150, 2, 12.5)),
    f"{SMI}/pcie_only_8gpu_pix_node_sys.txt": (["gpu=l40s"], (1, 8, "pcie4", 31.5, 2, 25)),
    f"{SMI}/workstation_2x5090_phb_tabs.txt": (["gpu=rtx5090"], (1, 2, "pcie5", 63, 1, 1.25)),
    f"{SMI}/workstation_mixed_5090_4090_5gpu.txt": (["gpu=rtx4090"], (1, 5, "pcie4", 31.5, 1, 1.25)),
    f"{SMI}/topo_p2p_r_2xL4_cns.txt": (["gpu=l4"], (1, 2, "pcie4", 31.5, 1, 12.5)),
    f"{SMI}/topo_p2p_r_8gpu_ok.txt": (["gpu=h100"], (1, 8, "nvlink4", 450, 8, 50)),
    f"{ROCM}/showtopo_8gpu_two_xgmi_hives.txt": (["gpu=mi300x"], (1, 8, "pcie5", 63, 8, 50)),
    f"{XML}/azure_ncv4.xml": ([], (1, 4, "pcie4", 31.5, 1, 12.5)),
    f"{XML}/azure_ndv2.xml": (["gpu=v100-32"], (1, 8, "nvlink2", 150, 1, 12.5)),
    f"{XML}/azure_ndv5.xml": (["gpu=h100"], (1, 8, "nvlink4", 450, 8, 50)),
    f"{XML}/rccl_topo_8p_940.xml": ([], (1, 8, "xgmi3", 448, 8, 50)),
    f"{XML}/rccl_topo_8p_940vm.xml": ([], (1, 8, "xgmi3", 448, 8, 50)),
    f"{XML}/rccl_topo_8p_pcie.xml": (["gpu=l4"], (1, 8, "pcie3", 15.75, 1, 12.5)),
    "nccl_tests/all_reduce_2node_4xH100_each.txt": ([], (2, 4, "nvlink4", 450, 4, 50)),
    "nccl_tests/all_reduce_aws_mpirun_prefix_excerpt.txt": (
        ["gpu=h100", "nodes=2", "inter=32x100Gbps"],
        (2, 8, "nvlink4", 450, 32, 12.5),
    ),
    "slurm/slurm_testcase1.topology.conf": (["gpu=h100"], (10000, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_testcase2.topology.conf": (["gpu=h100"], (10000, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_testcase3.topology.conf": (["gpu=h100"], (400, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_testcase4.topology.conf": (["gpu=h100", "switch=grp11"], (200, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_testcase5.topology.conf": (["gpu=h100", "switch=grp10"], (200, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_testcase6.topology.conf": (["gpu=h100", "switch=leafC"], (8, 8, "nvlink4", 450, 8, 50)),
    "slurm/slurm_unit_backfill.topology.conf": (["gpu=h100"], (32, 8, "nvlink4", 450, 8, 50)),
    "slurm/topograph_expected.slinky-dra-block.conf": (["gpu=gb200"], (96, 4, "nvlink5", 900, 4, 50)),
    "k8s/topograph_small-tree_model.yaml": (["gpu=gb200"], (6, 4, "nvlink5", 900, 4, 50)),
}
"""Sample -> facts beside it, and nodes, GPUs of a node, class and GB/s inside, interfaces of a node and GB/s of one."""

REFUSED = {
    f"{XML}/rccl_topo_16p1h.xml": "no file names the GPU",
    f"{XML}/rccl_topo_4p3l.xml": "no file names the GPU",
    f"{XML}/rccl_topo_8p_90a.xml": "no file names the GPU",
    f"{XML}/rccl_topo_collnet_n1.xml": "no file names the GPU",
    "nccl_tests/all_gather_2node_gb10_v2.18.3_new_header.txt": "gpu 'gb10' is not known",
    "nccl_tests/all_gather_4node_mi250x_srun_label.txt": "no file tells how many nodes",
    "nccl_tests/all_reduce_4node_mi250x_srun_label.txt": "no file tells how many nodes",
    "slurm/tree_not_dict.yaml": "list 'switches' is needed",
}
"""Sample -> why not: MI50 to MI250X and GB10 are in no table, and two excerpts have no header."""


def test_no_sample_is_forgotten(shared: Path) -> None:
    rooms = (SMI, XML, ROCM, "nccl_tests", "slurm", "k8s")
    present = {f"{room}/{path.name}" for room in rooms for path in (shared / "samples" / room).iterdir()}
    assert present == set(READ) | set(REFUSED)


@pytest.mark.parametrize("name", READ, ids=lambda name: name.split("/")[1])
def test_samples_that_are_clusters(shared: Path, name: str) -> None:
    words, (nodes, gpus, inside, inside_gb, nics, nic_gb) = READ[name]
    cluster = read_cluster(",".join([str(shared / "samples" / name), *words]))
    (pool,) = cluster.pools
    kind = pool.kind
    assert (pool.num_nodes, kind.gpus_per_node, kind.intra.name, kind.num_nics) == (nodes, gpus, inside, nics)
    assert kind.intra.bandwidth_bytes_per_s == pytest.approx(inside_gb * 1e9)
    assert kind.nic.bandwidth_bytes_per_s == pytest.approx(nic_gb * 1e9)
    holds_together(cluster)


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: name.split("/")[1])
def test_samples_that_are_refused_with_a_reason(shared: Path, name: str) -> None:
    with pytest.raises(InputError) as error:
        read_cluster(str(shared / "samples" / name))
    assert REFUSED[name] in str(error.value)
    assert str(error.value).count("\n") == 0


def holds_together(cluster: Cluster) -> None:
    """Connected; nothing carries more than its kind of link nominally does, nor nothing; both ends of an edge agree."""
    view = graph(cluster, "all" if cluster.num_nodes <= 64 else "domain")
    assert nx.is_connected(view) or len(cluster.pools) > 1
    bounds = {link.name: link.bandwidth_bytes_per_s for p in cluster.pools for link in (p.kind.intra, p.kind.nic)}
    for a, b, data in view.edges(data=True):
        assert view.edges[b, a] is data
        assert data[BANDWIDTH] > 0
        if "switch" not in (view.nodes[a]["kind"], view.nodes[b]["kind"]) or data["link"] in bounds:
            assert data[BANDWIDTH] <= bounds[data["link"]] * (1 + 1e-9)


def test_hives_are_islands_and_a_hive_of_eight_is_a_mesh(shared: Path) -> None:
    two = read_cluster(f"{shared}/samples/{ROCM}/showtopo_8gpu_two_xgmi_hives.txt,gpu=mi300x").pools[0].kind
    one = read_cluster(f"{shared}/samples/{XML}/rccl_topo_8p_940.xml").pools[0].kind
    assert two.island is not None
    assert (two.island.num_gpus, two.island.link.bandwidth_bytes_per_s) == (4, 3 * 64e9)
    assert (one.island, one.shape, one.numa_nodes) == (None, DomainShape.MESH, 2)


def test_the_inside_of_a_node_from_one_file_and_the_fabric_from_another(shared: Path) -> None:
    samples = shared / "samples"
    found = read_joined(
        [
            str(samples / SMI / "hgx_8gpu_10nic_glued_affinity.txt"),
            str(samples / "slurm" / "slurm_testcase3.topology.conf"),
            "gpu=h100",
            "oversubscription=2:1",
        ]
    )
    assert found.cluster.num_gpus == 3200
    assert [(level.name, level.radix, level.oversubscription) for level in found.cluster.fabric] == [
        ("leaf", 20, 2.0),
        ("spine", 10, 1.0),
    ]
    assert any("mlx5_stor_0" in text for text in found.assumptions)


def test_links_from_the_matrix_beside_a_file_that_has_none(shared: Path) -> None:
    xml, matrix = shared / "samples" / XML / "azure_ndv5.xml", shared / "samples" / SMI / "h100_8gpu_2numa_stas.txt"
    alone = read_joined([f"{xml},gpu=h100"])
    both = read_joined([f"{xml},{matrix},gpu=h100"])
    assert any("nvlink4 inside a node, as in" in text for text in alone.assumptions)
    assert not any("inside a node" in text for text in both.assumptions)
    assert both.cluster.pools[0].kind.num_nics == 8


def test_measured_curves_lie_over_the_links_that_bind_them(shared: Path) -> None:
    table = shared / "samples" / "nccl_tests" / "all_reduce_2node_4xH100_each.txt"
    found = read_joined([f"{table}"])
    assert found.measured is not None
    assert list(found.measured.curves) == ["all_reduce/8/ib-ndr"]
    curve = found.measured.curves["all_reduce/8/ib-ndr"]
    assert list(curve.seconds) == sorted(curve.seconds)
    assert 2097152.0 not in curve.sizes_bytes  # half as fast as both neighbours
    over = read_joined([f"h100x16,{table}"])
    assert over.cluster == read_cluster("h100x16")
    assert over.measured == replace(found.measured, machine="h100x16")


@settings(max_examples=60)
@given(
    gpus=st.sampled_from([1, 2, 4, 8]),
    usual=st.sampled_from(["NV18", "NV12", "NV4", "PIX", "SYS"]),
    odd=st.dictionaries(
        st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]),
        st.sampled_from(["NV18", "NV6", "NODE", "SYS"]),
        max_size=6,
    ),
    nics=st.integers(0, 9),
    leaves=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    narrow=st.sampled_from([1, 2, 7.5]),
)
def test_generated_files_hold_together(
    gpus: int, usual: str, odd: dict[tuple[int, int], str], nics: int, leaves: list[int], narrow: float
) -> None:
    """Any matrix over any tree of two levels: a cluster that holds together, or one error."""
    with tempfile.TemporaryDirectory() as folder:
        topo, conf = Path(folder, "topo.txt"), Path(folder, "topology.conf")
        topo.write_text(matrix(gpus, usual, {pair: word for pair, word in odd.items() if max(pair) < gpus}, nics))
        lines = [f"SwitchName=l{n} Nodes=n{n}x[1-{size}]" for n, size in enumerate(leaves)]
        conf.write_text("\n".join(["SwitchName=r Switches=" + ",".join(f"l{n}" for n in range(len(leaves))), *lines]))
        found = read_joined([str(topo), str(conf), "gpu=h100", f"oversubscription={narrow}"])
    holds_together(found.cluster)
    assert found.cluster.num_nodes == sum(leaves)
    assert found.cluster.pools[0].kind.gpus_per_node == gpus
    for finding in findings(found):
        assert finding.cost is None or finding.cost.times > 1
