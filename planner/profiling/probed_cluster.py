"""What pairs said, as a cluster, its calibration and a probe's file. Pure: no torch, no clock but the day's date."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from statistics import median

from cost_models.records import (
    Calibration,
    Cluster,
    Coefficient,
    Curve,
    Device,
    FabricException,
    FabricLevel,
    Link,
    Measurement,
    MeasurementKind,
    NodeKind,
    PairLink,
    Pool,
    Probe,
    RecordError,
    Silence,
)
from planner.profiling.clock import summarise
from planner.profiling.domains import Domains, leaves
from planner.profiling.local import BYTES_LEFT, total_memory_bytes
from planner.profiling.pairs import Samples, curve_of, robust_s
from planner.profiling.session import joined_by_key
from planner.readers.cluster_facts import device_from_facts

NEAR, FAR = "probed-near", "probed-far"
"""Classes of the links inside and between fast domains, as this probe found them."""
ODD_SHARE = 0.8
"""A pair, or a node, below this share of its class's median is odd, and is said."""

LEAST_SIZES, PAST_LATENCY = 3, 3.0
"""Of a curve: sizes, and times that its largest message takes the seconds of its smallest. Without these the closed form stands."""

Way = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Answers:
    """What rank 0 has heard, as it comes."""

    backend: str
    samples: dict[Way, Samples] = field(default_factory=dict)
    alone: dict[Way, Samples] = field(default_factory=dict)
    together: dict[Way, Samples] = field(default_factory=dict)
    silent: list[Silence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)
    machine: str = ""


def probe_of(answers: Answers, domains: Domains) -> Probe:
    """The file of a probe. RecordError where no pair answered."""
    sizes = list(dict.fromkeys(len(domain) for domain in domains if domain))
    domains = tuple(sorted((domain for domain in domains if domain), key=lambda domain: sizes.index(len(domain))))
    pairs = tuple(
        PairLink(
            ranks=way,
            latency_s=found.latency_s,
            bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
            spread=found.spread,
            sizes_bytes=found.sizes_bytes,
            seconds=found.seconds,
        )
        for way, found in sorted((way, curve_of(taken)) for way, taken in answers.samples.items())
    )
    members = {rank for domain in domains for rank in domain}
    if not pairs or len(members) < 2:
        silent = "; ".join(f"{one.ranks}: {one.reason}" for one in answers.silent)
        raise RecordError(f"no two ranks answered one another: {silent}")
    links = [pair for pair in pairs if set(pair.ranks) <= members]
    classes = _by_class(links, domains)
    notes = [*answers.notes, *_odd(classes)]
    if [rank for domain in domains for rank in domain] != sorted(members):
        listed = ", ".join(
            f"node {number} = ranks {' '.join(map(str, domain))}" for number, domain in enumerate(domains)
        )
        notes.append(f"the cluster's devices are numbered domain by domain, not by rank: {listed}")
    return Probe(
        cluster=_cluster(answers, domains, classes),
        calibration=_calibration(answers, classes),
        pairs=pairs,
        domains=domains,
        silent=tuple(answers.silent),
        notes=tuple(notes),
        backend=answers.backend,
        measurements=joined_by_key(answers.measurements),
    )


def _by_class(links: Iterable[PairLink], domains: Domains) -> dict[str, list[PairLink]]:
    number = {rank: place for place, domain in enumerate(domains) for rank in domain}
    classes: dict[str, list[PairLink]] = defaultdict(list)
    for link in links:
        one, other = link.ranks
        classes[NEAR if number[one] == number[other] else FAR].append(link)
    return classes


def _odd(classes: dict[str, list[PairLink]]) -> list[str]:
    """Pairs that are slower than their class."""
    found = []
    for name, links in classes.items():
        usual = median(link.bandwidth_bytes_per_s for link in links)
        for link in links:
            share = link.bandwidth_bytes_per_s / usual
            if share < ODD_SHARE:
                found.append(
                    f"rank {link.ranks[0]} to rank {link.ranks[1]}: {share:.0%} of the bandwidth of {name} links"
                )
    return found


def _cluster(answers: Answers, domains: Domains, classes: dict[str, list[PairLink]]) -> Cluster:
    """Domains as nodes: their links, their ways out, and what is slow."""
    near, far = (_bandwidth(classes.get(name, [])) for name in (NEAR, FAR))
    near = near or far
    assert near is not None
    ranks_per_host = max(list(answers.hosts.values()).count(host) for host in answers.hosts.values())
    device = _device(answers, ranks_per_host)
    nic, num_nics = _ways_out(answers, min(map(len, domains)), far)
    kinds: dict[int, NodeKind] = {}
    for domain in domains:
        hosts = len({answers.hosts[rank] for rank in domain})
        spans = hosts if len(domain) % hosts == 0 else 1
        kinds[len(domain)] = NodeKind(
            name=f"probed-{len(domain)}",
            device=device,
            gpus_per_node=len(domain) // spans,
            domain_nodes=spans,
            intra=Link(name=NEAR if len(domain) > 1 else FAR, bandwidth_bytes_per_s=near),
            nic=Link(name=FAR if far else NEAR, bandwidth_bytes_per_s=nic or near),
            num_nics=max(1, num_nics // spans),
            host_memory_bytes=total_memory_bytes() if answers.backend == "gloo" else None,
        )
    pools = tuple(
        Pool(
            kind=kind,
            num_nodes=kind.domain_nodes * sum(len(domain) == size for domain in domains),
        )
        for size, kind in kinds.items()
    )
    return Cluster(
        name=f"probed {sum(map(len, domains))} ranks",
        pools=pools,
        fabric=_levels(domains, classes.get(FAR, [])),
        rails=num_nics > 1,
        exceptions=_exceptions(domains, classes) if all(kind.domain_nodes == 1 for kind in kinds.values()) else (),
    )


def _bandwidth(links: list[PairLink]) -> float | None:
    return median(link.bandwidth_bytes_per_s for link in links) if links else None


def _ways_out(answers: Answers, width: int, far: float | None) -> tuple[float | None, int]:
    """Bandwidth of one interface of a node, and how many it has: what all members get at once over what one gets alone."""
    if not answers.alone or not answers.together:
        return far, 1
    alone, together = (
        median(curve_of(taken).bandwidth_bytes_per_s for taken in some.values())
        for some in (answers.alone, answers.together)
    )
    num_nics = max(1, min(width, round(width * together / alone)))
    return width * together / num_nics, num_nics


def _levels(domains: Domains, far: list[PairLink]) -> tuple[FabricLevel, ...]:
    """Groups of domains that are closer to one another: a switch for each, and a thinner way between them."""
    bandwidths = {(link.ranks[0], link.ranks[1]): link.bandwidth_bytes_per_s for link in far}
    groups = leaves(domains, bandwidths)
    sizes = {len(group) for group in groups}
    if len(groups) < 2 or sizes == {1} or len(sizes) > 1:
        return ()
    number = {rank: place for place, group in enumerate(groups) for domain in group for rank in domains[domain]}
    below = median(value for way, value in bandwidths.items() if number[way[0]] == number[way[1]])
    above = median(value for way, value in bandwidths.items() if number[way[0]] != number[way[1]])
    return (FabricLevel(name="leaf", radix=sizes.pop(), oversubscription=max(1.0, below / above)),)


def _exceptions(domains: Domains, classes: dict[str, list[PairLink]]) -> tuple[FabricException, ...]:
    """Nodes whose links are slower than the others'."""
    factors: dict[int, dict[str, float]] = defaultdict(dict)
    for name, key in ((NEAR, "intra_factor"), (FAR, "nic_factor")):
        links = classes.get(name, [])
        usual = _bandwidth(links)
        for number, domain in enumerate(domains):
            own = _bandwidth([link for link in links if set(link.ranks) & set(domain)])
            if usual and own and len(domains) > 2 and own < ODD_SHARE * usual:
                factors[number][key] = own / usual
    return tuple(
        FabricException(node=number, note="slower than the others in this probe", **found)
        for number, found in sorted(factors.items())
    )


def _device(answers: Answers, ranks_per_host: int) -> Device:
    """An accelerator from the table; a CPU process as measured."""
    if answers.backend == "nccl":
        return device_from_facts(answers.machine)
    rates: dict[str, float] = {}
    memory_rates = []
    for one in answers.measurements:
        family, *parts = one.key.split("/")
        seconds = summarise(one.samples_s).median
        if family == "matmul":
            m, n, k = (int(side) for side in parts[1].split("x"))
            rates[parts[0]] = max(rates.get(parts[0], 0.0), 2.0 * m * n * k / seconds)
        elif family == "memory_bound":
            memory_rates.append((one.bytes or 0) / seconds)
    if not rates or not memory_rates:
        raise RecordError(
            f"{answers.machine}: its operations could not be timed, so it is no device to plan for: "
            f"{'; '.join(answers.notes) or 'no reason was given'}"
        )
    return Device(
        name="cpu",
        family="cpu",
        memory_bytes=int(total_memory_bytes() * (1 - BYTES_LEFT)) // ranks_per_host,
        memory_bandwidth_bytes_per_s=max(memory_rates),
        peak_flops_per_s=rates,
        matmul_flops_per_s=rates,
    )


def _calibration(answers: Answers, classes: dict[str, list[PairLink]]) -> Calibration:
    """Latency and curves of both classes; bandwidths are the cluster's own, so their efficiency is 1."""
    today = date.today().isoformat()
    source = f"live probe on {answers.machine}, {answers.backend}"
    coefficients: dict[str, Coefficient] = {}
    curves: dict[str, Curve] = {}
    for name, links in classes.items():
        latency_s = median(link.latency_s for link in links)
        rows = len(links)
        for what, value, unit in (
            ("link.efficiency", 1.0, "1"),
            ("link.latency_s", latency_s, "s"),
            ("link.small_latency_s", latency_s, "s"),
        ):
            coefficients[f"{what}.{name}"] = Coefficient(value=value, unit=unit, source=source, date=today, rows=rows)
        sizes = sorted(set.intersection(*(set(link.sizes_bytes) for link in links)))
        by_size = [
            median(dict(zip(link.sizes_bytes, link.seconds, strict=True))[size] for link in links) for size in sizes
        ]
        curves[f"p2p/2/{name}"] = Curve(
            sizes_bytes=tuple(map(float, sizes)), seconds=tuple(by_size), source=source, date=today
        )
    curves |= _collective_curves(answers.measurements, source, today)
    return Calibration(
        name=f"probe-{today}", machine=answers.machine, date=today, coefficients=coefficients, curves=curves
    )


def _collective_curves(measurements: Iterable[Measurement], source: str, today: str) -> dict[str, Curve]:
    """A collective takes as long as its slowest rank."""
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for one in measurements:
        if one.kind is MeasurementKind.COLLECTIVE:
            name, ranks, size, link_class = one.key.split("/")
            known = points[f"{name}/{ranks}/{link_class}"]
            known[float(size)] = max(known.get(float(size), 0.0), robust_s(one.samples_s))
    curves = {
        key: Curve(sizes_bytes=tuple(sorted(known)), seconds=_rising(known), source=source, date=today)
        for key, known in points.items()
    }
    return {key: curve for key, curve in curves.items() if _says_bandwidth(curve)}


def _says_bandwidth(curve: Curve) -> bool:
    """Whether larger messages may be read off it: one that ends where latency decides would make them cost nothing, or all."""
    return len(curve.seconds) >= LEAST_SIZES and curve.seconds[-1] >= PAST_LATENCY * curve.seconds[0]


def _rising(points: dict[float, float]) -> tuple[float, ...]:
    """Seconds by size; a smaller message is never slower."""
    seconds: list[float] = []
    for size in sorted(points, reverse=True):
        seconds.append(min(points[size], seconds[-1]) if seconds else points[size])
    return tuple(reversed(seconds))
