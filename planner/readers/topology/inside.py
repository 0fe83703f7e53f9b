"""The fast links inside a node that was seen: their rate and shape, islands, and what is odd about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from cost_models.data import rows
from cost_models.links import cube_links
from cost_models.records import DomainShape, FabricException, Island, Link, NodeKind
from planner.errors import InputError
from planner.readers.topology.pieces import Pieces
from planner.readers.topology.seen import SeenNode, Way
from planner.readers.topology.shape import PAYLOAD, Domains, domains_of, nvlinks_of

BUILT_SO = 0.2
"""Share of the pairs of a domain that may lack a link of their own before that is how it was built, and no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What was seen inside a node."""

    domains: Domains
    """Which GPUs reach one another over links of their own."""
    odd: tuple[FabricException, ...] = ()
    """What is not as its kind, of node 0."""
    notes: tuple[str, ...] = ()
    """What had to be decided."""


def with_links(kind: NodeKind, node: SeenNode, pieces: Pieces, host: Link) -> tuple[NodeKind, Inside]:
    """The kind with the links that were seen; `host` is a GPU's link to its host. Raises InputError for another GPU's links."""
    own = nvlinks_of(kind.device.name, kind.device.family)
    domains = domains_of(node, own[0] if own else None)
    kind = replace(kind, numa_nodes=_numa_nodes(node))
    if kind.gpus_per_node == 1 and kind.domain_nodes == 1:
        return kind, Inside(domains=domains)
    largest = domains.groups[0]
    if len(largest) == 1:
        return replace(kind, intra=host, domain_nodes=1), Inside(domains=domains)
    link = _fast_link(kind, node, domains, pieces, own)
    if not domains.whole and not domains.off:
        return _with_islands(kind, domains, link, host)
    whole = max(domains.links[gpu] for gpu in largest)
    weakest = min(largest, key=lambda gpu: domains.links[gpu])
    shape, notes = _shape(kind, node, domains)
    factor, faults = 1.0, []
    if domains.links[weakest] < whole and (domains.is_switched or _is_mesh(domains)):
        factor = max(domains.links[weakest], 1) / whole
        faults.append(f"GPU {weakest} has {domains.links[weakest]} of {whole} links")
    elif domains.links[weakest] < whole:
        link = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * domains.links[weakest] / whole)
    if domains.off:
        factor = min(factor, host.bandwidth_bytes_per_s / link.bandwidth_bytes_per_s)
        faults.append(f"GPU {', '.join(map(str, domains.off))} has no {_way(node).value}: it goes over {host.name}")
    odd = (FabricException(node=0, intra_factor=factor, note="; ".join(faults)),) if factor < 1 else ()
    return replace(kind, intra=link, shape=shape), Inside(domains=domains, odd=odd, notes=notes)


def _way(node: SeenNode) -> Way:
    return next(path.way for path in node.paths.values() if path.way.is_fast)


def _with_islands(kind: NodeKind, domains: Domains, link: Link, host: Link) -> tuple[NodeKind, Inside]:
    """Groups of GPUs with links of their own, which the host's links join."""
    sizes = {len(group) for group in domains.groups}
    size = len(domains.groups[0])
    kind = replace(kind, intra=host, domain_nodes=1)
    if len(sizes) > 1:
        note = (
            f"fast groups of {' and '.join(map(str, sorted(sizes)))} GPUs in one node: priced as if all links were {host.name}, which "
            "joins them; a group that stays in one of them is faster than predicted"
        )
        return kind, Inside(domains=domains, notes=(note,))
    kind = replace(kind, island=Island(num_gpus=size, link=link))
    order = [gpu for group in sorted(domains.groups) for gpu in group]
    if order == list(range(kind.gpus_per_node)):
        return kind, Inside(domains=domains)
    listed = ",".join(map(str, order))
    note = f"groups of {size} GPUs are no neighbours by number: predictions hold with CUDA_VISIBLE_DEVICES={listed}"
    return kind, Inside(domains=domains, notes=(note,))


def _shape(kind: NodeKind, node: SeenNode, domains: Domains) -> tuple[DomainShape, tuple[str, ...]]:
    """How the links of a whole domain join its GPUs."""
    if domains.is_switched or domains.off or kind.gpus_per_node < 3 or kind.domain_nodes > 1:
        return DomainShape.SWITCHED, ()
    count = len(node.gpus)
    cube = cube_links()
    each = [sorted(node.paths[min(i, j), max(i, j)].links for j in range(count) if j != i) for i in range(count)]
    if count == 8 and all(one == sorted(cube[0, 1:].tolist()) for one in each):
        same = all(node.paths[i, j].links == cube[i, j] for i in range(8) for j in range(i + 1, 8))
        note = "a cube mesh whose GPUs are numbered otherwise than a DGX-1V's: neighbours may have more or fewer links"
        return DomainShape.CUBE_MESH, () if same else (note,)
    return DomainShape.MESH, ()


def _numa_nodes(node: SeenNode) -> int:
    """NUMA nodes, where the GPUs are divided over them in order and evenly; else 1."""
    places = [gpu.place for gpu in node.gpus]
    count = len(set(places))
    if None in places or len(places) % count:
        return 1
    each = len(places) // count
    in_order = all(len(set(places[at : at + each])) == 1 for at in range(0, len(places), each))
    return count if in_order else 1


def _is_mesh(domains: Domains) -> bool:
    """Nearly every pair of the group has a link of its own: one that has none is broken, not built so."""
    size = len(domains.groups[0])
    return len(domains.indirect) <= BUILT_SO * size * (size - 1) / 2


def _fast_link(
    kind: NodeKind, node: SeenNode, domains: Domains, pieces: Pieces, own: tuple[int, float, str] | None
) -> Link:
    """What one GPU has into its group."""
    row = rows("links").get(kind.intra.name, {})
    is_domain = row.get("kind") == "domain"
    count = max(domains.links[gpu] for gpu in domains.groups[0])
    if _way(node) is Way.XGMI:
        if "num_peers" not in row:
            raise InputError(f"{node.source} shows xGMI, and a {kind.device.name} has none; say the right gpu=")
        rate = count * kind.intra.bandwidth_bytes_per_s / row["num_peers"]
        return replace(kind.intra, bandwidth_bytes_per_s=min(rate, kind.intra.bandwidth_bytes_per_s))
    if own is None:
        raise InputError(f"{node.source} shows NVLink, and a {kind.device.name} has none; say the right gpu=")
    most, each, name = own
    if count > most:
        raise InputError(
            f"{node.source} shows {count} NVLinks on one GPU, and a {kind.device.name} has {most}; say the right gpu="
        )
    rate = count * _each(pieces, each)
    if is_domain and abs(rate / kind.intra.bandwidth_bytes_per_s - 1) < 0.01:
        return kind.intra
    return Link(name=kind.intra.name if is_domain else name, bandwidth_bytes_per_s=rate)


def _each(pieces: Pieces, table: float) -> float:
    """Bytes/s of one NVLink: as `nvlink -s` shows it, else the table's."""
    rates: Sequence[float] = [
        rate for gpu in (pieces.nvlinks.bytes_per_s if pieces.nvlinks else ()) for rate in gpu if rate
    ]
    if not rates:
        return table
    shown = median_low(rates) / 1e9
    return PAYLOAD.get(round(shown, 3), shown) * 1e9
