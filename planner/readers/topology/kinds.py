"""One kind of node from the pieces: its device, its fast domain, its interfaces; what no file says as the device is sold."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_models.data import rows
from cost_models.records import Device, Link, NodeKind
from planner.errors import InputError, NoDeviceError
from planner.readers.cluster_facts import cluster_and_defaults, read_interconnect
from planner.readers.node_presets import host_link
from planner.readers.topology.inside import Inside, with_links
from planner.readers.topology.pieces import Pieces
from planner.readers.topology.products import device_of
from planner.readers.topology.seen import SeenHost, SeenNode, Way
from planner.readers.topology.shape import fabric_nics
from planner.readers.topology.words import Words


def device_of_node(product: str | None, memory: int | None, pieces: Pieces, words: Words) -> Device:
    """The device of some nodes. Raises InputError that names what would tell, where nobody does."""
    listed = next(iter(names(pieces)), None)
    shown = next(
        (gpu.memory_bytes for gpu in (pieces.devices.gpus if pieces.devices else ()) if gpu.memory_bytes), memory
    )
    if product is None:
        product = listed[0] if listed else None
    found = device_of(product, shown, listed[1] if listed else "files") if product is not None else None
    if words.gpu is not None:
        meant = device_of(words.gpu, shown, f"gpu={words.gpu}")
        if found is not None and found.name != meant.name:
            raise InputError(f"gpu={words.gpu}, and the files say {product}; leave gpu= out")
        return meant
    if found is not None:
        return found
    sources = ", ".join(
        piece.source for piece in (pieces.node, pieces.p2p, pieces.fabric, *pieces.collectives) if piece
    )
    is_amd = pieces.node is not None and any(path.way is Way.XGMI for path in pieces.node.paths.values())
    raise NoDeviceError(
        f"{sources}: no file names the GPU; add the output of `nvidia-smi -L` (AMD: `rocm-smi --showproductname`) to the files, or say "
        f"gpu=NAME, one of: {', '.join(rows('devices'))}",
        stand_in="mi300x" if is_amd else "h100",
    )


def names(pieces: Pieces) -> dict[tuple[str, str], int]:
    """(product, where it was read) -> GPUs of a node that are one."""
    found: Counter[tuple[str, str]] = Counter()
    for piece in (pieces.devices, pieces.node):
        if piece is not None and not found:
            found.update((gpu.name, piece.source) for gpu in piece.gpus if gpu.name)
    if not found and pieces.nvlinks is not None:
        found.update((name, pieces.nvlinks.source) for name in pieces.nvlinks.names if name)
    if not found:
        found.update((one.gpu, one.source) for one in pieces.collectives if one.gpu)
    return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a look into a node of a kind told."""

    inside: Inside | None = None
    """Its fast links; None where no file tells of them."""
    nics: tuple[int, ...] = ()
    """Its interfaces that count, by number in the file."""


def kind_of(
    device: Device, count: int | None, hosts: Sequence[SeenHost], pieces: Pieces, words: Words, said: list[str]
) -> tuple[NodeKind, Looked]:
    """A kind of node, and what was seen inside of it."""
    facts = {"gpu": device.name, "nodes": len(hosts), "gpus_per_node": count}
    cluster, defaults = cluster_and_defaults({key: value for key, value in facts.items() if value is not None})
    kind = replace(cluster.pools[0].kind, device=device)
    sold = kind.name
    if count is None:
        said.append(f"{kind.gpus_per_node} GPUs in a node, as in a {sold} (gpus_per_node=N)")
    if "cluster.host_mem_gb" in defaults:
        said.append(f"host memory as in a {sold}")
    kind = _with_domain_nodes(kind, hosts, said)
    node = pieces.node if pieces.node is not None and len(pieces.node.gpus) == kind.gpus_per_node else None
    host = host_link_of(device, pieces) or kind.host_link
    inside: Inside | None = None
    if node is not None and node.knows_links:
        kind, inside = with_links(kind, node, pieces, host or kind.intra)
        said += inside.notes
    elif kind.gpus_per_node > 1 and _is_card(pieces) and kind.host_link is not None:
        kind = replace(kind, intra=kind.host_link, domain_nodes=1)
        said.append(f"{kind.intra.name} inside a node: the GPUs are PCIe cards (`nvidia-smi topo -m` tells of bridges)")
    elif kind.gpus_per_node > 1:
        tells = "rocm-smi --showtopo" if device.family.startswith("cdna") else "nvidia-smi topo -m"
        said.append(f"{kind.intra.name} inside a node, as in a {sold} (`{tells}` tells)")
    kind, nics = _with_nics(kind, node, words, said)
    return replace(kind, host_link=host), Looked(inside=inside, nics=nics)


def _is_card(pieces: Pieces) -> bool:
    """The product is the PCIe card of a GPU that is also sold on a board with NVLink."""
    return any("pcie" in product.lower() for product, _ in names(pieces))


def _with_domain_nodes(kind: NodeKind, hosts: Sequence[SeenHost], said: list[str]) -> NodeKind:
    """Nodes of one fast domain, where the device is sold in such: by what the hosts say, else as sold."""
    if kind.domain_nodes == 1:
        return kind
    sizes = Counter(host.domain for host in hosts if host.domain)
    if not sizes:
        said.append(
            f"{kind.domain_nodes} nodes share NVLink, as in a {kind.name} (labels nvidia.com/gpu.clique, or Slurm's blocks, tell)"
        )
        return kind
    least = min(sizes.values())
    if max(sizes.values()) != least:
        said.append(f"fast domains of {least} to {max(sizes.values())} nodes: all are taken as the smallest")
    return replace(kind, domain_nodes=least)


def host_link_of(device: Device, pieces: Pieces) -> Link | None:
    """A GPU's link to its host: the slowest that was seen, else the table's."""
    table = host_link(device.name)
    gpus = [*(pieces.devices.gpus if pieces.devices else ()), *(pieces.node.gpus if pieces.node else ())]
    seen = [gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s]
    if not seen:
        return table
    rate = min(seen)
    near = [
        n
        for n, row in rows("links").items()
        if row["kind"] == "host" and abs(row["bandwidth_bytes_per_s"] / rate - 1) < 0.01
    ]
    if near:
        return Link(name=near[0], bandwidth_bytes_per_s=rows("links")[near[0]]["bandwidth_bytes_per_s"])
    return Link(name=table.name if table else "pcie4", bandwidth_bytes_per_s=rate)


def _with_nics(
    kind: NodeKind, node: SeenNode | None, words: Words, said: list[str]
) -> tuple[NodeKind, tuple[int, ...]]:
    """The kind with the interfaces that were seen or said, and their numbers in the file."""
    found, left = fabric_nics(node, kind.num_nics) if node is not None else ((), "")
    sold = f"{kind.num_nics} x {kind.nic.name}"
    if words.inter is not None:
        stated = read_interconnect(words.inter, replace(kind, num_nics=len(found) or kind.num_nics))
        if stated is None:
            raise InputError(
                f"inter={words.inter} is not understood; say a rate as in 8x400Gbps, or a class of: {', '.join(rows('links'))}"
            )
        return replace(kind, nic=stated[0], num_nics=stated[1]), found
    if not found or node is None:
        said.append(f"interfaces {sold}, as in a {kind.name} (inter=8x400Gbps says others)")
        return kind, ()
    if left:
        said.append(f"interfaces left out: {left}")
    rates = [rate for nic in found if (rate := node.nics[nic].bytes_per_s) is not None]
    if not rates:
        said.append(
            f"each interface is {kind.nic.name}, as in a {kind.name}: {node.command} does not show rates (inter=8x400Gbps says them)"
        )
        return replace(kind, num_nics=len(found)), found
    rate = Counter(rates).most_common(1)[0][0]
    same = [n for n, row in rows("links").items() if row["kind"] == "network" and row["bandwidth_bytes_per_s"] == rate]
    name = kind.nic.name if kind.nic.bandwidth_bytes_per_s == rate or not same else same[0]
    return replace(kind, nic=Link(name=name, bandwidth_bytes_per_s=rate), num_nics=len(found)), found
