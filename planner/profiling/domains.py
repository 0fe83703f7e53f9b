"""Which ranks are close to one another, from the bandwidths of pairs alone.

Bandwidths of one class of links lie close together, classes lie apart: the widest gap between sorted bandwidths, if it is
wide enough and if cutting there leaves groups whose members are (nearly) all fast among themselves, separates the fast
domains from what is between them. A slow pair inside a domain, or a slow node, does not make a domain.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import networkx as nx

Pair = tuple[int, int]
Domains = tuple[tuple[int, ...], ...]

LEAST_GAP = 1.5
"""Ratio between classes of links: an NVLink domain is 4 to 30 times its NICs, PCIe 1.6 to 4 times; runs of one class differ by less."""
LEAST_COHESION = 0.8
"""Share of the measured pairs inside a domain that are fast: a domain with a few slow pairs is a domain with a fault."""


def both_ways(bandwidths: Mapping[Pair, float]) -> dict[Pair, float]:
    """(low, high) -> the slower direction."""
    found: dict[Pair, float] = {}
    for (one, other), value in bandwidths.items():
        pair = (min(one, other), max(one, other))
        found[pair] = min(value, found.get(pair, math.inf))
    return found


def fast_domains(
    ranks: Sequence[int], bandwidths: Mapping[Pair, float], spreads: Mapping[Pair, float] | None = None
) -> Domains:
    """The domains, sorted; every rank is in one. All ranks in one domain where no gap separates them.

    `bandwidths`: bytes/s from a rank to another; pairs may be missing. `spreads`: of their samples, relative; a gap that is no
    wider than these are is noise (three processes on two busy cores differ by a factor of ten).
    """
    pairs = both_ways(bandwidths)
    noise = median(spreads.values()) if spreads else 0.0
    ordered = sorted(set(pairs.values()))
    gaps = sorted(pairwise(ordered), key=lambda gap: gap[0] / gap[1])
    for slow, fast in gaps:
        if fast < LEAST_GAP * (1 + 2 * noise) * slow:
            break
        domains = _cut(ranks, pairs, math.sqrt(slow * fast))
        if domains is not None:
            return domains
    return (tuple(sorted(ranks)),)


def _cut(ranks: Sequence[int], pairs: Mapping[Pair, float], threshold: float) -> Domains | None:
    """Groups that are joined by pairs above the threshold; None where that is one group, or one that does not hold together."""
    graph = nx.Graph()
    graph.add_nodes_from(ranks)
    graph.add_edges_from(pair for pair, value in pairs.items() if value > threshold)
    groups = [set(group) for group in nx.connected_components(graph)]
    if len(groups) < 2:
        return None
    for group in groups:
        inside = [value > threshold for (one, other), value in pairs.items() if one in group and other in group]
        if inside and sum(inside) < LEAST_COHESION * len(inside):
            return None
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def leaves(domains: Domains, bandwidths: Mapping[Pair, float]) -> Domains:
    """Numbers of domains that are closer to one another than to the rest; each domain in one group, or all in one."""
    numbers = {rank: number for number, domain in enumerate(domains) for rank in domain}
    between: dict[Pair, list[float]] = {}
    for (one, other), value in both_ways(bandwidths).items():
        pair = tuple(sorted((numbers[one], numbers[other])))
        if pair[0] != pair[1]:
            between.setdefault((pair[0], pair[1]), []).append(value)
    return fast_domains(range(len(domains)), {pair: median(values) for pair, values in between.items()})
