"""A live probe as people read it: who is close to whom, what links carry, what is odd or silent, and the cluster that it makes."""

from collections.abc import Iterable
from statistics import median

from cost_models.records import PairLink, Probe
from cost_models.units import gigabits
from planner.report.probe_text import probe_text
from planner.report.words import columns, counted, duration, row

MOST_SHOWN = 16
"""Ranks up to which every pair is shown."""


def live_probe_text(probe: Probe) -> str:
    """Domains, classes of links, the matrix of pairs, silence, notes, and the cluster."""
    ranks = sorted({rank for link in probe.pairs for rank in link.ranks})
    lines = [
        row("probe", f"{counted(len(ranks), 'rank')} over {probe.backend}, {counted(len(probe.pairs) // 2, 'pair')}")
    ]
    for number, domain in enumerate(probe.domains):
        lines.append(row("domains" if number == 0 else "", f"{number}: ranks {_ranks(domain)}"))
        if number == MOST_SHOWN:
            lines.append(row("", f"and {len(probe.domains) - number - 1} more"))
            break
    lines += ["", *_classes(probe)]
    if len(ranks) <= MOST_SHOWN:
        lines += ["", *_matrix(probe, ranks)]
    lines += [row("SILENT", f"{_who(one.ranks)}: {one.reason}") for one in probe.silent]
    lines += [row("note", note) for note in probe.notes]
    return "\n".join([*lines, "", probe_text(probe.cluster)])


def _ranks(domain: Iterable[int]) -> str:
    return " ".join(map(str, domain))


def _who(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[1]}"


def _classes(probe: Probe) -> list[str]:
    number = {rank: place for place, domain in enumerate(probe.domains) for rank in domain}
    inside: list[PairLink] = []
    between: list[PairLink] = []
    for link in probe.pairs:
        one, other = (number.get(rank) for rank in link.ranks)
        (inside if one == other else between).append(link)
    table = [["links", "directions", "Gbit/s", "least", "most", "latency", "spread"]]
    for name, links in (("in a domain", inside), ("between", between)):
        if links:
            rates = [gigabits(link.bandwidth_bytes_per_s) for link in links]
            table.append(
                [
                    name,
                    str(len(links)),
                    *(f"{rate:.3g}" for rate in (median(rates), min(rates), max(rates))),
                    duration(median(link.latency_s for link in links)),
                    f"±{median(link.spread for link in links):.0%}",
                ]
            )
    return columns(table, right=(1, 2, 3, 4, 5, 6))


def _matrix(probe: Probe, ranks: list[int]) -> list[str]:
    """Gbit/s from the rank of the line to that of the column."""
    found: dict[tuple[int, ...], PairLink] = {link.ranks: link for link in probe.pairs}
    table = [["Gbit/s to", *map(str, ranks)]]
    for one in ranks:
        cells = [
            "."
            if one == other
            else f"{gigabits(link.bandwidth_bytes_per_s):.3g}"
            if (link := found.get((one, other)))
            else "-"
            for other in ranks
        ]
        table.append([f"from {one}", *cells])
    return columns(table, right=tuple(range(1, len(ranks) + 1)))
