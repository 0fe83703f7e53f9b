"""NCCL's topology XML: generated dumps, files by hand, the samples, and XML that is no such thing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.readers.topology.nccl_xml import is_nccl_xml, read_nccl_xml
from planner.readers.topology.seen import SeenNode, Way
from planner.readers.topology.text import read_text


def node_of(text: str) -> SeenNode:
    assert is_nccl_xml(text)
    (found,) = read_nccl_xml(text, "topo.xml")
    return found


def dump(num_gpus: int, *, links: int = 18, per_cpu: int = 4, nic_gbit: int = 400, switched: bool = True) -> str:
    """An NVIDIA dump: two processors, a PCIe switch with an interface for each GPU, NVLinks to switches or to each other."""
    lines = ['<system version="1">']
    for cpu in range(-(-num_gpus // per_cpu)):
        lines.append(
            f'<cpu host_hash="0xabc" numaid="{cpu}" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">'
        )
        for gpu in range(cpu * per_cpu, min(num_gpus, (cpu + 1) * per_cpu)):
            lines.append(
                f'<pci busid="0000:{gpu:02x}:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
            )
            lines.append(
                f'<pci busid="0000:{gpu:02x}:02.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">'
            )
            lines.append(f'<gpu dev="{gpu}" sm="90" rank="{gpu}" gdr="1">')
            if switched:
                lines += [f'<nvlink target="0000:f{n}:00.0" count="{links // 3}" tclass="0x068000"/>' for n in range(3)]
            else:
                lines += [
                    f'<nvlink target="0000:{peer:02X}:02.0" count="{links}" tclass="0x030200"/>'
                    for peer in range(num_gpus)
                    if peer != gpu
                ]
            lines.append("</gpu></pci>")
            lines.append(
                f'<pci busid="0000:{gpu:02x}:03.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">'
            )
            lines.append(
                f'<nic><net name="mlx5_{gpu}" dev="{gpu}" speed="{nic_gbit}000" port="1" gdr="1"/></nic></pci></pci>'
            )
        lines.append('<nic><net name="eth0" dev="99" speed="100000" port="0" gdr="0"/></nic></cpu>')
    return "\n".join([*lines, "</system>"])


def test_a_dump_with_switches() -> None:
    node = node_of(dump(8))
    assert {(path.way, path.links) for path in node.paths.values()} == {(Way.NVLINK, 18)}
    assert [nic.name for nic in node.nics] == [f"mlx5_{n}" for n in range(8)]
    assert {nic.bytes_per_s for nic in node.nics} == {50e9}
    assert [node.nic_ways[gpu, gpu] for gpu in range(8)] == [Way.PIX] * 8
    assert (node.nic_ways[0, 1], node.nic_ways[0, 7]) == (Way.PHB, Way.SYS)
    assert node.gpus[0].name == "H100 80GB HBM3"
    assert node.gpus[0].pcie_bytes_per_s == pytest.approx(63e9, rel=0.001)
    assert "eth0" in node.notes[0]


def test_a_dump_with_links_between_gpus_whatever_the_case_of_addresses() -> None:
    node = node_of(dump(4, links=4, switched=False))
    assert {path.links for path in node.paths.values()} == {4}


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([100, 200, 400]), st.booleans())
def test_what_is_dumped_is_read_back(num_gpus: int, per_cpu: int, gbit: int, switched: bool) -> None:
    node = node_of(dump(num_gpus, per_cpu=per_cpu, nic_gbit=gbit, switched=switched))
    assert len(node.gpus) == len(node.nics) == num_gpus
    assert len(node.paths) == num_gpus * (num_gpus - 1) // 2
    assert all(path.way is Way.NVLINK for path in node.paths.values())
    assert {nic.bytes_per_s for nic in node.nics} == {gbit * 125e6}
    assert [gpu.place for gpu in node.gpus] == [str(gpu // per_cpu) for gpu in range(num_gpus)]


def test_several_nodes_of_one_fast_domain() -> None:
    two = dump(4).replace("</system>", "") + dump(4).replace('<system version="1">', "").replace("0xabc", "0xdef")
    node = node_of(two)
    assert (len(node.gpus), node.num_hosts) == (4, 2)


def test_files_by_hand_know_no_links(shared: Path) -> None:
    folder = shared / "samples" / "nccl_topo_xml"
    assert not node_of(read_text(folder / "azure_ndv5.xml")).knows_links
    assert not node_of(read_text(folder / "azure_ncv4.xml")).knows_links  # its GPUs name themselves as peers
    assert node_of(read_text(folder / "rccl_topo_8p_pcie.xml")).knows_links


def test_xgmi_of_a_mesh_and_of_a_ladder(shared: Path) -> None:
    folder = shared / "samples" / "nccl_topo_xml"
    mesh = node_of(read_text(folder / "rccl_topo_8p_940.xml"))
    assert {(path.way, path.links) for path in mesh.paths.values()} == {(Way.XGMI, 1)}
    ladder = node_of(read_text(folder / "rccl_topo_16p1h.xml"))
    assert sorted({path.links for path in ladder.paths.values()}) == [0, 1, 2, 4]


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(8))
    + ']><system version="1">&i;</system>'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "document type"),
        ('<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log/>', "document type"),
        ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><system/>', "document type"),
        ('<graphs version="1"/>', "NCCL_TOPO_DUMP_FILE"),
        ("<html/>", "begins with <html>"),
        ('<system version="1"/>', "has no <cpu>"),
        ('<system version="1"><cpu numaid="0"/></system>', "no GPU"),
        (dump(8)[:2000], "not XML"),
        ("<system>" * 100 + "</system>" * 100, "nested deeper than 64"),
        ("<system>" + "<cpu/>" * 30_000 + "</system>", "more than 20,000 elements"),
        ("<system>" + " " * 9_000_000 + "</system>", "9 MiB of XML"),
        ("<" * 100_000, "not XML"),
    ],
)
def test_xml_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_nccl_xml(text, "topo.xml")
    assert words in str(error.value)
