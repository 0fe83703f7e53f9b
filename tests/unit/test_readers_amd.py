"""rocm-smi --showtopo and amd-smi topology: sections, weights, names; what is damaged."""

from pathlib import Path

import pytest

from planner.errors import InputError
from planner.readers.clusters import read_cluster
from planner.readers.topology.amd import is_amd, read_amd
from planner.readers.topology.seen import SeenDevices, SeenNode, Way
from planner.readers.topology.smi_topo import is_smi_topo
from planner.readers.topology.text import read_text

Matrix = list[list[str]]


def section(title: str, labels: list[str], cells: Matrix) -> str:
    rows = [" " * 7 + "".join(f"{label:<13}" for label in labels)]
    rows += [
        f"{label:<{max(7, len(label) + 1)}}" + "".join(f"{cell:<13}" for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
    return "\n".join([title, *rows, ""])


def mesh(count: int, near: str, far: str = "", hive: int = 99) -> Matrix:
    return [["0" if i == j else near if i // hive == j // hive else far for j in range(count)] for i in range(count)]


def rocm(weights: Matrix, types: Matrix, numa: str = "GPU[{0}]\t\t: (Topology) Numa Node: {1}") -> str:
    labels = [f"GPU{n}" for n in range(len(weights))]
    hops = [["0" if cell == "0" else "1" for cell in row] for row in weights]
    places = "\n".join(numa.format(n, n // 4) for n in range(len(labels)))
    return (
        "============================ ROCm System Management Interface ============================\n"
        + section(
            "================================ Weight between two GPUs =================================",
            labels,
            weights,
        )
        + section(
            "================================= Hops between two GPUs ==================================", labels, hops
        )
        + section(
            "=============================== Link Type between two GPUs ===============================", labels, types
        )
        + f"======================================= Numa Nodes =======================================\n{places}\n"
        + "================================== End of ROCm SMI Log ===================================\n"
    )


def node_of(text: str) -> SeenNode:
    assert is_amd(text)
    found = read_amd(text, "topo.txt")[0]
    assert isinstance(found, SeenNode)
    return found


@pytest.mark.parametrize(
    "numa", ["GPU[{0}]\t\t: (Topology) Numa Node: {1}", "GPU {0}          : (Topology) Numa Node: {1}"]
)
def test_a_whole_log_of_rocm_smi(numa: str) -> None:
    text = rocm(mesh(8, "15"), mesh(8, "XGMI"), numa)
    node = node_of(text)
    assert not is_smi_topo(text)
    assert {(path.way, path.links) for path in node.paths.values()} == {(Way.XGMI, 1)}
    assert [gpu.place for gpu in node.gpus] == ["0"] * 4 + ["1"] * 4


def test_weights_tell_near_from_far_and_hops_do_not() -> None:
    weights = mesh(8, "15", "30", hive=4)
    node = node_of(rocm(weights, mesh(8, "XGMI")))
    assert (node.paths[0, 1].links, node.paths[0, 7].links, node.paths[0, 7].way) == (1, 0, Way.XGMI)


def test_processors_are_told_by_weight() -> None:
    node = node_of(rocm(mesh(8, "40", "72", hive=4), mesh(8, "PCIE")))
    assert (node.paths[0, 1].way, node.paths[0, 7].way) == (Way.NODE, Way.SYS)


def test_amd_smi_labels_by_address() -> None:
    labels = [f"0000:{n:02x}:00.0" for n in range(8)]
    types = mesh(8, "XGMI")
    for n in range(8):
        types[n][n] = "SELF"
    enabled = [["ENABLED"] * 8 for _ in range(8)]
    text = "".join(
        section(title, labels, cells)
        for title, cells in (("ACCESS TABLE:", enabled), ("WEIGHT TABLE:", mesh(8, "15")), ("LINK TYPE TABLE:", types))
    )
    node = node_of(text)
    assert node.command == "amd-smi topology"
    assert {path.links for path in node.paths.values()} == {1}


def test_names_of_its_companions(tmp_path: Path) -> None:
    names = "\n".join(f"GPU[{n}]\t\t: Card Series: \t\tAMD Instinct MI300X VF" for n in range(8))
    vram = "\n".join(f"GPU[{n}]\t\t: VRAM Total Memory (B): 206141652992" for n in range(8))
    found = read_amd(names + "\n" + vram, "names.txt")[0]
    assert isinstance(found, SeenDevices)
    assert found.gpus[7].name == "AMD Instinct MI300X VF"
    assert found.gpus[0].memory_bytes == 206141652992
    path = tmp_path / "all.txt"
    path.write_text(rocm(mesh(8, "15"), mesh(8, "XGMI")) + names)
    kind = read_cluster(str(path)).pools[0].kind
    assert (kind.device.name, kind.intra.name, kind.intra.bandwidth_bytes_per_s) == ("mi300x", "xgmi3", 448e9)


def test_a_broken_link_of_a_mesh_slows_its_node(tmp_path: Path) -> None:
    types, weights = mesh(8, "XGMI"), mesh(8, "15")
    types[2][5] = types[5][2] = "PCIE"
    weights[2][5] = weights[5][2] = "72"
    path = tmp_path / "topo.txt"
    path.write_text(rocm(weights, types))
    (odd,) = read_cluster(f"{path},gpu=mi300x").exceptions
    assert odd.intra_factor == pytest.approx(6 / 7)


def test_a_ring_of_links_has_no_more_than_its_links(tmp_path: Path) -> None:
    """Three of seven peers have a link of their own: three sevenths of what a GPU of a full mesh has."""
    types = [["0" if i == j else "XGMI" for j in range(8)] for i in range(8)]
    weights = [["0" if i == j else "15" if (i - j) % 8 in (1, 4, 7) else "30" for j in range(8)] for i in range(8)]
    path = tmp_path / "topo.txt"
    path.write_text(rocm(weights, types))
    cluster = read_cluster(f"{path},gpu=mi300x")
    assert cluster.pools[0].kind.intra.bandwidth_bytes_per_s == pytest.approx(448e9 * 3 / 7)
    assert cluster.exceptions == ()


def test_the_sample(shared: Path) -> None:
    node = node_of(read_text(shared / "samples" / "rocm" / "showtopo_8gpu_two_xgmi_hives.txt"))
    assert [node.paths[0, other].way.value for other in range(1, 8)] == ["XGMI"] * 3 + ["SYS"] * 4


TYPES = section("=== Link Type between two GPUs ===", ["GPU0", "GPU1"], mesh(2, "XGMI"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TYPES.replace("XGMI", "WARP"), "reads 'WARP'; legal: XGMI, PCIE"),
        (TYPES[: TYPES.rindex("GPU1   ")], "row GPU1 of 2 words"),
        ("=== Link Type between two GPUs ===\n", "a header of GPUs is needed"),
        (
            section("=== Weight between two GPUs ===", ["GPU0", "GPU1"], mesh(2, "x")),
            "the weight between GPU 0 and 1 reads 'x'",
        ),
        (
            TYPES + section("=== Weight between two GPUs ===", ["GPU0", "GPU1", "GPU2"], mesh(3, "15")),
            "different numbers of GPUs",
        ),
        ("GPU[3]\t\t: Card Series: X\n", "has gaps"),
    ],
)
def test_what_is_damaged_is_told(text: str, words: str) -> None:
    assert is_amd(text)
    with pytest.raises(InputError) as error:
        read_amd(text, "topo.txt")
    assert words in str(error.value)
