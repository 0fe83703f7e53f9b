"""nvidia-smi's matrix and its companions: the grammar, the samples, and matrices that are generated and then read back."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.readers.clusters import read_cluster
from planner.readers.topology.products import device_of
from planner.readers.topology.seen import SeenDevices, SeenNode, SeenNvlinks, SeenP2p, Way
from planner.readers.topology.smi_lists import (
    is_smi_list,
    is_smi_query,
    is_smi_table,
    read_smi_list,
    read_smi_query,
    read_smi_table,
)
from planner.readers.topology.smi_topo import is_smi_topo, read_smi_topo
from planner.readers.topology.text import read_text

FOLDER = "samples/nvidia_smi_topo"


def node_of(text: str) -> SeenNode:
    (found,) = read_smi_topo(text, "topo.txt")
    assert isinstance(found, SeenNode)
    return found


def sample(shared: Path, name: str) -> SeenNode:
    return node_of(read_text(shared / FOLDER / f"{name}.txt"))


# The samples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_gpus", "num_nics", "links"),
    [
        ("a100_8gpu_edited_spacing_stas", 8, 0, {12}),
        ("h100_8gpu_2numa_stas", 8, 0, {18}),
        ("hgx_8gpu_10nic_glued_affinity", 8, 10, {18}),
        ("gb200_4gpu_8nic", 4, 8, {18}),
        ("v100_8gpu_4nic_old_driver_mlx_names_tabs", 8, 4, {0, 1, 2}),
        ("pcie_only_8gpu_pix_node_sys", 8, 0, {0}),
        ("workstation_2x5090_phb_tabs", 2, 0, {0}),
        ("workstation_mixed_5090_4090_5gpu", 5, 0, {0}),
    ],
)
def test_the_samples(shared: Path, name: str, num_gpus: int, num_nics: int, links: set[int]) -> None:
    node = sample(shared, name)
    assert (len(node.gpus), len(node.nics)) == (num_gpus, num_nics)
    assert {path.links for path in node.paths.values()} == links
    assert len(node.paths) == num_gpus * (num_gpus - 1) // 2
    assert len(node.nic_ways) == num_gpus * num_nics
    assert not node.asymmetric


def test_a_glued_affinity_does_not_move_a_cell(shared: Path) -> None:
    node = sample(shared, "hgx_8gpu_10nic_glued_affinity")
    assert [nic.name for nic in node.nics][:3] == ["mlx5_0", "mlx5_gdr_0", "mlx5_gdr_1"]
    assert [node.nic_ways[gpu, gpu + 1] for gpu in range(8)] == [Way.PIX] * 8
    assert len({gpu.place for gpu in node.gpus}) == 2


def test_two_ports_of_one_card_are_twins(shared: Path) -> None:
    assert sample(shared, "gb200_4gpu_8nic").twins == {(2, 3), (6, 7)}


def test_which_pairs_may_not_copy(shared: Path) -> None:
    (refused,) = read_smi_topo(read_text(shared / FOLDER / "topo_p2p_r_2xL4_cns.txt"), "p2p.txt")
    assert isinstance(refused, SeenP2p)
    assert refused.refused == {(0, 1): "CNS, chipset not supported"}
    (free,) = read_smi_topo(read_text(shared / FOLDER / "topo_p2p_r_8gpu_ok.txt"), "p2p.txt")
    assert isinstance(free, SeenP2p)
    assert (free.num_gpus, dict(free.refused)) == (8, {})


# The grammar -------------------------------------------------------------------------------------------------------------

TWO = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-15\t0\nGPU1\tNV4\t X \t16-31\t1\n"


def test_labels_of_launchers_colours_and_words_around_the_matrix() -> None:
    dressed = "$ nvidia-smi topo -m\n" + "\n".join(f"[1,0]<stdout>:{line}" for line in TWO.splitlines()) + "\n\nbye\n"
    assert node_of(dressed).paths == node_of(TWO).paths
    labelled = "\n".join(f" 3: {line}" for line in TWO.splitlines())
    assert node_of(labelled).paths == node_of(TWO).paths


def test_headers_that_are_glued() -> None:
    text = "GPU0 GPU1 NIC0NIC1CPU Affinity\nGPU0 X NV1 PIX SYS 0-3\nGPU1 NV1 X SYS PIX 0-3\n"
    assert [nic.name for nic in node_of(text).nics] == ["NIC0", "NIC1"]


def test_a_pair_that_reads_differently_either_way_counts_as_the_worse() -> None:
    node = node_of(TWO.replace("GPU1\tNV4", "GPU1\tPHB"))
    assert node.asymmetric == ((0, 1),)
    assert node.paths[0, 1].way is Way.PHB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.replace("NV4\t0-15", "ERR\t0-15"), "row GPU0, column GPU1 reads 'ERR'"),
        (TWO.split("\nGPU1")[0], "no row GPU1: it was cut off"),
        (TWO.replace("GPU1\tNV4\t X ", "GPU1\tNV4"), "row GPU1, column GPU1 reads '16-31'"),
        (TWO.replace("GPU0\t X \tNV4", "GPU0\tNV4\t X "), "has NV4 for itself in place of X"),
        (TWO.replace("NV4", "NV0"), "NV0"),
        (TWO.replace("\tGPU0\tGPU1\tCPU", "\tGPU0\tGPU1\tGPU1\tCPU"), "names GPU1 twice"),
        ("\tGPU0 " + " ".join(f"NIC{n}" for n in range(600)) + "\nGPU0 X\n", "601 columns"),
    ],
)
def test_what_is_damaged_is_told(text: str, words: str) -> None:
    assert is_smi_topo(text)
    with pytest.raises(InputError) as error:
        read_smi_topo(text, "topo.txt")
    assert words in str(error.value)


@given(st.integers(1, 16), st.integers(0, 10), st.integers(0, 2**32), st.sampled_from(["\t", "  ", "      "]))
def test_what_is_printed_is_read_back(num_gpus: int, num_nics: int, seed: int, blank: str) -> None:
    """A random symmetric matrix, printed as a driver does, then read: the same words."""
    draw = random.Random(seed)
    names = [f"GPU{n}" for n in range(num_gpus)] + [f"NIC{n}" for n in range(num_nics)]
    words = {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            choices = ["SYS", "NODE", "PHB", "PXB", "PIX"] + ["NV1", "NV18"] * (other.startswith("GPU"))
            words[one, other] = words[other, one] = draw.choice(choices)
    lines = [blank.join(["", *names, "CPU Affinity", "NUMA Affinity"])]
    for one in names:
        tail = [f"0-{draw.randrange(99)}", "0"] if one.startswith("GPU") else []
        lines.append(blank.join([one, *(words.get((one, other), " X ") for other in names), *tail]))
    node = node_of("\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n")
    for (i, j), path in node.paths.items():
        word = words[f"GPU{i}", f"GPU{j}"]
        assert path.links == (int(word[2:]) if word.startswith("NV") else 0)
        assert path.way.name == (word if not path.links else "NVLINK")
    assert {(i, j): way.name for (i, j), way in node.nic_ways.items()} == {
        (i, j): words[f"GPU{i}", f"NIC{j}"] for i in range(num_gpus) for j in range(num_nics)
    }


# Companions --------------------------------------------------------------------------------------------------------------

LIST = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
LINKS = "GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"


def test_the_list_of_gpus() -> None:
    assert is_smi_list(LIST)
    (found,) = read_smi_list(LIST, "gpus.txt")
    assert isinstance(found, SeenDevices)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"] * 2


def test_the_state_of_links() -> None:
    _, links = read_smi_list(LINKS, "links.txt")
    assert isinstance(links, SeenNvlinks)
    assert links.bytes_per_s == ((26.562e9, None),)
    assert links.names == ("NVIDIA H100 PCIe",)


def test_a_list_with_a_gap_was_cut_off() -> None:
    with pytest.raises(InputError, match="GPU 1 is listed, and GPU 0 is not"):
        read_smi_list(LIST.splitlines()[1], "gpus.txt")


def test_a_query_in_any_order_with_and_without_units() -> None:
    text = (
        "index, name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max\n0, NVIDIA H200, 143771 MiB, 5, 16\n"
    )
    assert is_smi_query(text)
    (found,) = read_smi_query(text, "query.csv")
    gpu = found.gpus[0]
    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H200", 143771 * 2**20)
    assert gpu.pcie_bytes_per_s == pytest.approx(63e9, rel=0.001)
    (bare,) = read_smi_query("name, memory.total [MiB]\nNVIDIA L4, 23034\n", "query.csv")
    assert (bare.gpus[0].memory_bytes, bare.gpus[0].pcie_bytes_per_s) == (23034 * 2**20, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name, memory.total [MiB]\n", "without a row"),
        ("name, memory.total [MiB]\nNVIDIA L4\n", "has 1 fields, and the header 2"),
        ("name, memory.total [MiB]\n" + "NVIDIA L4, 23034\n" * 300, "more than 256 GPUs"),
    ],
)
def test_a_damaged_query(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_smi_query(text, "query.csv")
    assert words in str(error.value)


TABLE = """\
+-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:9D:00.0 Off |                    0 |
| N/A   31C    P0             72W /  700W |       0MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA A100-SXM...             Off | 00000000:C3:00.0   Off |                    0 |
| N/A   29C    P0             69W /  400W |       3MiB /  40960MiB |      0%      Default |
"""


def test_the_table_of_plain_nvidia_smi() -> None:
    assert is_smi_table(TABLE)
    (found,) = read_smi_table(TABLE, "smi.txt")
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM..."]
    assert [device_of(gpu.name or "", gpu.memory_bytes, "smi.txt").name for gpu in found.gpus] == ["h100", "a100-40"]


def test_a_name_that_was_cut_is_the_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n")
    (tmp_path / "smi.txt").write_text(
        "|   0  NVIDIA A100-SXM...  On  | 00000000:C3:00.0 Off | 0 |\n| N/A  29C  P0  69W / 400W |  3MiB / 81920MiB | 0% |\n"
    )
    for order in (("list.txt", "smi.txt"), ("smi.txt", "list.txt")):
        kind = read_cluster(",".join(str(tmp_path / name) for name in order)).pools[0].kind
        assert kind.device.name == "a100-80"
    (tmp_path / "list.txt").write_text("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n")
    with pytest.raises(InputError, match="list different GPUs"):
        read_cluster(f"{tmp_path}/list.txt,{tmp_path}/smi.txt")


def test_a_variant_with_other_memory_has_the_memory_that_is_shown() -> None:
    assert device_of("NVIDIA H20-3e", 143771 * 2**20, "x").memory_bytes == 143771 * 2**20
    assert device_of("NVIDIA H100 NVL", 95830 * 2**20, "x").memory_bytes == 95830 * 2**20
