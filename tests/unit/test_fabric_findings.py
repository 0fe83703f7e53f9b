"""What is odd about a cluster that was seen: each oddity planted alone is found, priced and named, and a sound one has none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.calibrations import shipped
from cost_models.collectives import collective_s, fabric
from cost_models.records import DomainShape, FabricLevel, Island, Link, SlowUplink, save
from executor.cli import main
from planner.fabric_findings import Finding, Severity, findings, verdict
from planner.readers.clusters import read_cluster, read_joined
from planner.readers.topology.join import Joined

Cells = dict[tuple[int, int], str]


def matrix(
    count: int = 8, usual: str = "NV18", cells: Cells | None = None, nics: int = 8, one_way: Cells | None = None
) -> str:
    """`nvidia-smi topo -m` of GPUs that are all `usual` to each other but for some pairs; interfaces shared evenly."""
    words = {pair: word for (i, j), word in (cells or {}).items() for pair in ((i, j), (j, i))} | (one_way or {})
    lines = ["\t" + "\t".join([*(f"GPU{n}" for n in range(count)), *(f"NIC{n}" for n in range(nics)), "CPU Affinity"])]
    for i in range(count):
        row = [" X " if i == j else words.get((i, j), usual) for j in range(count)]
        near = i * nics // count
        row += [
            "PIX" if nic == near else "NODE" if nic * 2 // max(nics, 1) == i * 2 // count else "SYS"
            for nic in range(nics)
        ]
        lines.append("\t".join([f"GPU{i}", *row, f"{i // 4 * 32}-{i // 4 * 32 + 31}"]))
    return "\n".join(lines) + "\n"


def seen(tmp_path: Path, text: str, *words: str) -> tuple[Joined, dict[str, Finding]]:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    found = read_joined([str(path), *(words or ("gpu=h100",))])
    return found, {one.code: one for one in findings(found)}


def off(gpu: int, count: int = 8) -> Cells:
    return {(gpu, other): "NODE" if other // 4 == gpu // 4 else "SYS" for other in range(count) if other != gpu}


def test_a_sound_node_has_nothing_odd(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix())
    assert codes == {}
    assert verdict(()) == "as it should be"
    assert found.cluster.exceptions == ()


def test_a_gpu_off_nvlink_is_priced_by_the_same_model_as_plans(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix(cells=off(2)))
    one = codes["GPU_OFF_NVLINK"]
    assert one.severity is Severity.ERROR
    assert "GPU2 has no NVLink" in one.message
    assert verdict(tuple(codes.values())) == "broken"
    (odd,) = found.cluster.exceptions
    assert odd.intra_factor == pytest.approx(63 / 450)
    assert one.cost is not None
    now = float(collective_s(fabric(found.cluster, shipped()), "all_reduce", 1e9, 8, 1).total)
    assert one.cost.now_s == now
    assert one.cost.times > 5


def test_links_that_are_down_on_one_gpu(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix(cells={(5, other): "NV12" for other in range(8) if other != 5}))
    assert "GPU5 has 12 links where the others have 18" in codes["LINKS_DOWN"].message
    assert found.cluster.exceptions[0].intra_factor == pytest.approx(12 / 18)
    assert "SLOW_PAIR" not in codes


def test_a_slow_pair_does_not_slow_rings(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix(cells={(1, 6): "NV9"}))
    assert "GPU1-GPU6 (9 of 18 links)" in codes["SLOW_PAIR"].message
    assert found.cluster.exceptions == ()


def test_a_pair_without_a_link_of_its_own(tmp_path: Path) -> None:
    _, codes = seen(tmp_path, matrix(cells={(1, 6): "SYS"}))
    assert "GPU1-GPU6 (SYS)" in codes["SLOW_PAIR"].message


def test_links_that_read_differently_either_way(tmp_path: Path) -> None:
    _, codes = seen(tmp_path, matrix(one_way={(3, 4): "SYS"}))
    assert "GPU3-GPU4 read differently" in codes["ASYMMETRIC_LINKS"].message


def test_four_interfaces_for_eight_gpus(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix(nics=4), "gpu=h100", "nodes=2")
    one = codes["FEW_INTERFACES"]
    assert found.cluster.pools[0].kind.num_nics == 4
    assert (one.severity, one.values["interfaces"]) == (Severity.WARNING, 4)
    assert one.cost is not None
    assert one.cost.times == pytest.approx(2.0, rel=0.1)


def test_pairs_of_bridged_cards(tmp_path: Path) -> None:
    pairs = {(i, j): "SYS" for i in range(8) for j in range(i + 1, 8) if i // 2 != j // 2}
    found, codes = seen(tmp_path, matrix(usual="NV12", cells=pairs, nics=2), "gpu=h100-pcie")
    assert codes["SEVERAL_DOMAINS"].values["groups"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    kind = found.cluster.pools[0].kind
    assert kind.intra.name == "pcie5"
    assert kind.island == Island(num_gpus=2, link=Link(name="nvlink4", bandwidth_bytes_per_s=300e9))
    links = fabric(found.cluster, shipped())
    pair, all_of_it = (float(collective_s(links, "all_reduce", 1e9, size, 1).total) for size in (2, 8))
    assert pair < all_of_it / 3


def test_pairs_that_are_no_neighbours_are_told_how_to_be(tmp_path: Path) -> None:
    pairs = {(i, j): "SYS" for i in range(4) for j in range(i + 1, 4) if j - i != 2}
    found, _ = seen(tmp_path, matrix(count=4, usual="NV12", cells=pairs, nics=2), "gpu=h100-pcie")
    assert found.cluster.pools[0].kind.island is not None
    assert any("CUDA_VISIBLE_DEVICES=0,2,1,3" in text for text in found.assumptions)


def test_groups_of_unlike_sizes_are_priced_as_the_host_joins_them(tmp_path: Path) -> None:
    pairs = {(i, j): "SYS" for i in range(3) for j in range(i + 1, 3) if (i, j) != (0, 1)}
    found, codes = seen(tmp_path, matrix(count=3, usual="NV4", cells=pairs, nics=1), "gpu=a6000")
    assert found.cluster.pools[0].kind.island is None
    assert "SEVERAL_DOMAINS" in codes
    assert any("faster than predicted" in text for text in found.assumptions)


def test_the_shape_of_a_domain(tmp_path: Path, shared: Path) -> None:
    switched, _ = seen(tmp_path, matrix())
    mesh, _ = seen(tmp_path, matrix(count=4, usual="NV4", nics=4), "gpu=a100-80")
    path = shared / "samples" / "nvidia_smi_topo" / "v100_8gpu_4nic_old_driver_mlx_names_tabs.txt"
    cube = read_joined([str(path), "gpu=v100-32"])
    shapes = [one.cluster.pools[0].kind.shape for one in (switched, mesh, cube)]
    assert shapes == [DomainShape.SWITCHED, DomainShape.MESH, DomainShape.CUBE_MESH]
    assert mesh.cluster.pools[0].kind.intra.bandwidth_bytes_per_s == 300e9
    assert [one.cluster.pools[0].kind.numa_nodes for one in (switched, mesh)] == [2, 1]


def test_hidden_gpus(tmp_path: Path) -> None:
    _, codes = seen(tmp_path, matrix(count=6, nics=6))
    assert (codes["GPUS_HIDDEN"].severity, codes["GPUS_HIDDEN"].values["visible"]) == (Severity.WARNING, 6)
    _, codes = seen(tmp_path, matrix(count=4, nics=4))
    assert codes["GPUS_HIDDEN"].severity is Severity.INFO


def test_fewer_links_than_sold(tmp_path: Path) -> None:
    found, codes = seen(tmp_path, matrix(usual="NV12"))
    assert "12 NVLinks on every GPU, and a h100 is sold with 18" in codes["FEWER_LINKS_THAN_SOLD"].message
    assert found.cluster.pools[0].kind.intra.bandwidth_bytes_per_s == 12 * 25e9


def test_an_interface_beyond_the_processors(tmp_path: Path) -> None:
    text = matrix().replace("\tPIX\tNODE\tNODE\tNODE\tSYS", "\tSYS\tSYS\tSYS\tSYS\tSYS", 1)
    _, codes = seen(tmp_path, text)
    assert "FAR_INTERFACE" in codes


def test_pairs_that_may_not_copy(tmp_path: Path) -> None:
    p2p = tmp_path / "p2p.txt"
    p2p.write_text(" \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n")
    found = read_joined([str(p2p), "gpu=l4"])
    (one,) = [one for one in findings(found) if one.code == "NO_PEER_COPIES"]
    assert "1 of 1 pairs" in one.message


def test_an_oversubscribed_leaf_costs_what_its_ratio_says(tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=r Switches=a,b\nSwitchName=a Nodes=n[1-8]\nSwitchName=b Nodes=n[9-16]\n")
    _, codes = seen(tmp_path, matrix(), "gpu=h100", str(conf), "oversubscription=4")
    one = codes["OVERSUBSCRIBED"]
    assert one.cost is not None
    assert one.cost.times == pytest.approx(4.0, rel=0.05)
    assert "64 GPUs" in one.advice


def test_a_slow_uplink_of_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What no pasted file says stands in a cluster file; it is judged and priced alike."""
    cluster = read_cluster("h100x64")
    levels = (FabricLevel(name="leaf", radix=2), FabricLevel(name="spine", radix=4))
    slow = replace(
        cluster,
        fabric=levels,
        slow_uplinks=(SlowUplink(level="leaf", switch=1, factor=0.25, note="one cable of four"),),
    )
    path = tmp_path / "cluster.json"
    save(slow, path)
    (one,) = findings(read_joined([str(path)]))
    assert (one.code, one.values["switch"]) == ("SLOW_UPLINK", 1)
    assert one.cost is not None
    assert one.cost.times == pytest.approx(4.0, rel=0.05)
    assert main(["probe", str(path)]) == 0
    assert "! leaf 1: 25% of its links upwards: one cable of four" in capsys.readouterr().out
    assert main(["probe", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "odd"


def test_a_cube_mesh_is_built_so(shared: Path) -> None:
    path = shared / "samples" / "nvidia_smi_topo" / "v100_8gpu_4nic_old_driver_mlx_names_tabs.txt"
    found = read_joined([str(path), "gpu=v100-32"])
    assert {one.code for one in findings(found)} == {"FEW_INTERFACES"}
    assert found.cluster.exceptions == ()
    assert found.cluster.pools[0].kind.intra.bandwidth_bytes_per_s == 150e9


def test_the_state_of_links_corrects_their_rate(tmp_path: Path) -> None:
    links = tmp_path / "nvlink.txt"
    links.write_text(
        "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n})\n" + "\t Link 0: 26.562 GB/s\n" for n in range(8))
    )
    found, _ = seen(tmp_path, matrix(), str(links))
    assert found.cluster.pools[0].kind.intra.bandwidth_bytes_per_s == 450e9


def test_mixed_gpus_of_one_node_are_pools(shared: Path, tmp_path: Path) -> None:
    path = shared / "samples" / "nvidia_smi_topo" / "workstation_mixed_5090_4090_5gpu.txt"
    names = tmp_path / "gpus.txt"
    names.write_text(
        "".join(f"GPU {n}: NVIDIA GeForce RTX {5090 if n in (1, 2) else 4090} (UUID: GPU-{n})\n" for n in range(5))
    )
    found = read_joined([str(path), str(names)])
    assert [(pool.kind.device.name, pool.num_gpus) for pool in found.cluster.pools] == [("rtx4090", 3), ("rtx5090", 2)]
    assert any("CUDA_VISIBLE_DEVICES=0,3,4,1,2" in text for text in found.assumptions)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no file names the GPU; add the output of `nvidia-smi -L`"),
        (("gpu=h100", "gpus_per_node=4"), "gpus_per_node=: 4"),
        (("gpu=a100-80",), "shows 18 NVLinks on one GPU, and a a100-80 has 12"),
        (("gpu=l40s",), "shows NVLink, and a l40s has none"),
        (("gpu=mi300x",), "shows NVLink, and a mi300x has none"),
        (("gpu=h100", "inter=fast"), "inter=fast is not understood"),
        (("gpu=h100", "oversubscription=2"), "needs the switches"),
        (("gpu=h100", "nodes=0"), "nodes=0: a whole number"),
        (("gpu=h100", "nods=4"), "'nods' is no word of a cluster"),
        (("gpu=h100", "gpu=a100"), "gpu is said twice"),
        (("gpu=h100", "h100x8"), "describes the whole cluster"),
        (("gpu=h100", "/nowhere/topology.conf"), "there is no such file"),
    ],
)
def test_what_is_missing_or_contradicts_is_one_error(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(matrix())
    with pytest.raises(ValueError) as error:
        read_joined([str(path), *words])
    assert message in str(error.value)
