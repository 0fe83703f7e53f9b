"""NCCL's topology XML: what NCCL_TOPO_DUMP_FILE writes, what RCCL writes (version 2), and files that clouds write by hand.

The tree is system, cpu, pci (bridges in bridges), and below a device `gpu` with its links or `nic` with its `net`s. Files by
hand often have neither: there a PCI class tells a GPU (0x03.., 0x12..) from an interface (0x02..), and no link is known.
No document type and no entity is accepted: a page of them grows to gigabytes.
"""

import re
import xml.parsers.expat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.errors import InputError
from planner.readers.topology.seen import Path, SeenGpu, SeenNic, SeenNode, Way
from planner.readers.topology.smi_lists import PCIE_BYTES_PER_S_OF_LANE
from planner.readers.topology.text import shown

MOST_ELEMENTS = 20_000
"""Elements of one file; NCCL itself reads 640 children of one."""
MOST_DEPTH = 64
MOST_CHARACTERS = 8 * 2**20
"""Of one file: the largest dump is a hundredth of it."""

_GENERATION = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64": 6, "64.0": 6}
"""Transfers a second of a lane -> PCIe generation."""

PRODUCTS = {
    ("0x10de", "0x1db1"): "V100-SXM2-16GB",
    ("0x10de", "0x1db5"): "V100-SXM2-32GB",
    ("0x10de", "0x20b0"): "A100-SXM4-40GB",
    ("0x10de", "0x20b2"): "A100-SXM4-80GB",
    ("0x10de", "0x20b5"): "A100-PCIE-80GB",
    ("0x10de", "0x2330"): "H100 80GB HBM3",
    ("0x10de", "0x2331"): "H100 PCIe",
    ("0x10de", "0x2324"): "H800",
    ("0x10de", "0x2329"): "H20",
    ("0x10de", "0x2335"): "H200",
    ("0x10de", "0x2901"): "B200",
    ("0x10de", "0x2941"): "GB200",
    ("0x1002", "0x74a1"): "AMD Instinct MI300X",
    ("0x1002", "0x74b5"): "AMD Instinct MI300X VF",
    ("0x1002", "0x74a5"): "AMD Instinct MI325X",
    ("0x1002", "0x75a3"): "AMD Instinct MI355X",
}
"""(vendor, device) -> product (the PCI ID Repository, pci.ids)."""

_EMULATED = 1e9
"""Slower bridges are those of virtual machines, which say 2.5 GT/s and one lane whatever is behind them."""

_SWITCH_CLASS = "0x0680"
"""Class of what an NVLink ends at where that is an NVSwitch."""
_ETHERNET = re.compile(r"(?:eth|en[opsx]|veth|docker|br-|bond|lo\b|ib\d+$)")
"""Interfaces of the kernel's network, which sockets use: RDMA devices have names of their own."""


def is_nccl_xml(text: str) -> bool:
    """XML with an element `system`, or any other XML: it is told here what it is not."""
    return text.lstrip().startswith("<") and not re.match(r"\s*<std", text)


@dataclass(slots=True)
class _Element:
    """One element of the file."""

    name: str
    attributes: Mapping[str, str]
    parent: "_Element | None"
    children: "list[_Element]" = field(default_factory=list)

    def walk(self, name: str) -> "Iterator[_Element]":
        """All elements of that name below, in the order of the file."""
        waiting = list(reversed(self.children))
        while waiting:
            element = waiting.pop()
            if element.name == name:
                yield element
            waiting.extend(reversed(element.children))

    def get(self, key: str) -> str:
        """An attribute; empty where it is absent."""
        return self.attributes.get(key, "")

    def above(self) -> "Iterator[_Element]":
        """The elements that it lies in, nearest first."""
        element = self.parent
        while element is not None:
            yield element
            element = element.parent


def read_nccl_xml(text: str, source: str) -> list[SeenNode]:
    """The node that the file describes. Raises InputError for other XML, a document type, and what is damaged."""
    root = _parsed(text, source)
    if root.name == "graphs":
        raise InputError(
            f"{source}: NCCL's graphs (NCCL_GRAPH_DUMP_FILE); the topology is wanted: NCCL_TOPO_DUMP_FILE=topo.xml"
        )
    if root.name != "system":
        raise InputError(
            f"{source}: XML that begins with <{root.name[:40]}>; NCCL's topology begins with <system version=...>"
        )
    hosts = list(dict.fromkeys(cpu.get("host_hash") for cpu in root.children if cpu.name == "cpu"))
    if not hosts:
        raise InputError(f"{source}: <system> has no <cpu>: the file was cut off, or written by hand without one")
    cpus = [cpu for cpu in root.children if cpu.name == "cpu" and cpu.get("host_hash") == hosts[0]]
    gpus = _gpus(cpus, source)
    if not gpus:
        raise InputError(f"{source}: no GPU: neither a <gpu>, nor a <pci> of class 0x03.... or 0x12....")
    nics, left_out = _nics(cpus)
    paths, notes = _paths(gpus)
    itself = bool(notes)
    if len(hosts) > 1:
        notes = (*notes, f"describes {len(hosts)} nodes together; the first stands for all")
    if left_out:
        notes = (*notes, f"interfaces of the kernel's network left out: {', '.join(left_out[:6])}")
    return [
        SeenNode(
            source=f"{source} (NCCL topology)",
            command="NCCL topology XML",
            gpus=tuple(_seen_gpu(gpu) for gpu in gpus),
            nics=tuple(nic for nic, _ in nics),
            paths=paths,
            nic_ways={(i, j): _way(gpu, place) for i, gpu in enumerate(gpus) for j, (_, place) in enumerate(nics)},
            twins=frozenset(
                (i, j) for i, (_, one) in enumerate(nics) for j, (_, other) in enumerate(nics) if i < j and one is other
            ),
            knows_nics=bool(nics),
            knows_links=any(child.name == "gpu" for gpu in gpus for child in gpu.children) and not itself,
            num_hosts=len(hosts),
            notes=notes,
        )
    ]


def _parsed(text: str, source: str) -> _Element:
    """The root of the file."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{source}: {len(text) / 2**20:,.0f} MiB of XML; {MOST_CHARACTERS // 2**20} at most")
    roots: list[_Element] = []
    stack: list[_Element] = []
    count = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MOST_ELEMENTS or len(stack) >= MOST_DEPTH:
            raise InputError(
                f"{source}: more than {MOST_ELEMENTS:,} elements, or nested deeper than {MOST_DEPTH}: no topology of a node"
            )
        element = _Element(name=name, attributes=attributes, parent=stack[-1] if stack else None)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def refuse(*_: object) -> None:
        raise InputError(
            f"{source}: XML with a document type (<!DOCTYPE or <!ENTITY): never read; `nvidia-smi -q -x` is not needed here, `nvidia-smi topo -m` is"
        )

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop() and None
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except xml.parsers.expat.ExpatError as error:
        words = xml.parsers.expat.errors.messages.get(error.code, "damaged")
        raise InputError(f"{source}, line {error.lineno}: not XML ({words}): the file was cut off?") from None
    return roots[0]


# Devices -----------------------------------------------------------------------------------------------------------


def _gpus(cpus: list[_Element], source: str) -> list[_Element]:
    """PCI elements that are GPUs, by the number of the driver where all have one, else in the order of the file."""
    found = [pci for cpu in cpus for pci in cpu.walk("pci") if _is_gpu(pci)]
    if len(found) > 256:
        raise InputError(f"{source}: {len(found)} GPUs in one node; 256 at most")
    numbers = [gpu.get("dev") for pci in found for gpu in pci.children if gpu.name == "gpu"]
    if len(numbers) == len(found) == len(set(numbers)) and all(
        number.isdigit() and len(number) < 5 for number in numbers
    ):
        return [pci for _, pci in sorted(zip(map(int, numbers), found, strict=True), key=lambda pair: pair[0])]
    return found


def _is_gpu(pci: _Element) -> bool:
    named = any(child.name == "gpu" for child in pci.children)
    return named or (
        pci.get("class")[:4].lower() in ("0x03", "0x12") and not any(child.name == "pci" for child in pci.children)
    )


def _seen_gpu(pci: _Element) -> SeenGpu:
    cpu = next(element for element in pci.above() if element.name == "cpu")
    rates = [rate for element in (pci, *pci.above()) if element.name == "pci" and (rate := _pcie(element)) is not None]
    return SeenGpu(
        name=PRODUCTS.get((pci.get("vendor").lower(), pci.get("device").lower())),
        place=cpu.get("numaid") or None,
        pcie_bytes_per_s=min(rates, default=None),
    )


def _pcie(pci: _Element) -> float | None:
    """A link's bandwidth; None where the file leaves it open, as virtual machines do."""
    generation = _GENERATION.get((pci.get("link_speed").split() or [""])[0])
    lanes = pci.get("link_width")
    if generation is None or not lanes.isdigit() or not 0 < int(lanes[:4]) <= 32:
        return None
    rate = PCIE_BYTES_PER_S_OF_LANE[generation] * int(lanes)
    return rate if rate > _EMULATED else None


def _nics(cpus: list[_Element]) -> tuple[list[tuple[SeenNic, _Element]], list[str]]:
    """(interface, where it hangs), those of the kernel's network apart where there are others, and these by name."""
    found: list[tuple[SeenNic, _Element]] = []
    for cpu in cpus:
        place = cpu.get("numaid") or None
        for nic in cpu.walk("nic"):
            for net in nic.walk("net"):
                speed = net.get("speed")
                rate = int(speed) * 125_000.0 if speed.isdigit() and 0 < len(speed) < 9 and int(speed) else None
                found.append((SeenNic(name=net.get("name") or "net", bytes_per_s=rate, place=place), nic.parent or cpu))
        for pci in cpu.walk("pci"):
            if pci.get("class")[:4].lower() == "0x02" and not any(
                child.name in ("nic", "pci") for child in pci.children
            ):
                found.append((SeenNic(name=pci.get("busid") or "nic", place=place), pci))
    rdma = [pair for pair in found if not _ETHERNET.match(pair[0].name)]
    if rdma and len(rdma) < len(found):
        return rdma, [nic.name for nic, _ in found if _ETHERNET.match(nic.name)]
    return found, []


# Ways --------------------------------------------------------------------------------------------------------------


def _way(one: _Element, other: _Element) -> Way:
    """What lies between two devices of the tree."""
    above = [one, *one.above()]
    meeting = next((element for element in (other, *other.above()) if any(element is here for here in above)), None)
    if meeting is None or meeting.name == "system":
        return Way.SYS
    if meeting.name == "cpu":
        return Way.PHB
    return Way.PIX if one.parent is meeting and other.parent is meeting else Way.PXB


def _paths(gpus: list[_Element]) -> tuple[dict[tuple[int, int], Path], tuple[str, ...]]:
    numbers = {pci.get("busid").lower(): index for index, pci in enumerate(gpus)}
    direct: dict[tuple[int, int], int] = {}
    switched = [0] * len(gpus)
    way, notes = Way.NVLINK, []
    for index, pci in enumerate(gpus):
        for kind in ("nvlink", "xgmi"):
            for link in (
                link for gpu in pci.children if gpu.name == "gpu" for link in gpu.children if link.name == kind
            ):
                count = int(link.get("count")) if link.get("count").isdigit() and len(link.get("count")) < 4 else 0
                target = link.get("target").lower()
                way = Way.XGMI if kind == "xgmi" else way
                if link.get("tclass").lower().startswith(_SWITCH_CLASS):
                    switched[index] += count
                elif target == pci.get("busid").lower():
                    notes.append(
                        f"GPU {index} names itself as the end of its {kind}s ({shown(target)}): they are left out"
                    )
                elif target in numbers:
                    direct[index, numbers[target]] = direct.get((index, numbers[target]), 0) + count
    paths = {}
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[i + 1 :], i + 1):
            links = min(direct.get((i, j), 0), direct.get((j, i), 0)) or min(switched[i], switched[j])
            paths[i, j] = Path(way=way, links=links) if links else Path(way=_way(one, other))
    return paths, tuple(notes)
