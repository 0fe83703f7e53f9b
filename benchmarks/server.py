"""Ring against parameter server on a star of four hosts: where one overtakes the other, predicted and measured in one run.

Three sweeps: bytes (a server of its own has fewer steps, a ring fewer bytes), workers (a server on a link three times as fast), and how
slow one worker's link is (a ring sends more through it than a worker that only pushes and pulls). Needs root, Linux, iproute2.
"""

import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.registry import benchmark
from benchmarks.testbed import server_ranks_file
from benchmarks.testbed.links import Links, star
from benchmarks.testbed.network import network, unavailable
from cost_models.server import Star, server_s, star_ring_s

BITS_PER_S = 4e7
DELAY_S = 0.02
"""One way, where bytes are swept: latency that decides, and not the machine's own."""
PAYLOAD = 0.95
"""Share of the rate that is payload: 1448 of 1538 bytes on the wire (packets of 1500), measured 0.955 by p2p."""
PAYLOAD_FAR = 0.994
"""The same with packets of 9000 bytes, as the far switch has them: 8948 of 9000."""
WAIT_S = 600.0
"""For another testbed to end."""
SERVER = 3
"""The host that is no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of a sweep."""

    x: float
    """What is swept."""
    star: Star
    """As the cost model sees it."""
    servers: tuple[int, ...]
    """Hosts of the star, which numbers workers first."""
    num_bytes: int
    num_chunks: int
    links: Links

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds."""
        return {
            "ring": star_ring_s(self.star, self.num_bytes),
            "server": server_s(self.star, self.num_bytes, self.servers, num_chunks=self.num_chunks),
        }

    def asked(self, links: int) -> dict[str, Any]:
        """As the ranks read it: workers are hosts 0, 1 ..., and the star's next host is the server."""
        workers = list(range(self.star.num_workers))
        hosts = [*workers, SERVER]
        return {
            "workers": workers,
            "servers": [hosts[server] for server in self.servers],
            "bytes": self.num_bytes,
            "chunks": self.num_chunks,
            "links": links,
        }


def bytes_sweep() -> list[Case]:
    """Three workers and a server of its own behind a far switch."""
    rate = BITS_PER_S / 8 * PAYLOAD_FAR
    alike = Star(bytes_per_s=(rate,) * 4, num_workers=3, step_s=DELAY_S)
    return [
        Case(x=size, star=alike, servers=(3,), num_bytes=size, num_chunks=1, links=star(BITS_PER_S, delay_s=DELAY_S))
        for size in (12_000, 24_000, 36_000, 48_000, 72_000, 120_000)
    ]


def workers_sweep() -> list[Case]:
    """Two and three workers, a server whose link is three times as fast; eight chunks."""
    rate = BITS_PER_S / 8 * PAYLOAD
    return [
        Case(
            x=workers,
            star=Star(bytes_per_s=(rate,) * workers + (3 * rate,), num_workers=workers, step_s=0.0),
            servers=(workers,),
            num_bytes=1_200_000,
            num_chunks=8,
            links=star(BITS_PER_S, {SERVER: 3 * BITS_PER_S}),
        )
        for workers in (2, 3)
    ]


def slow_sweep() -> list[Case]:
    """Three workers, the last one's link slower and slower; a server whose link is twice as fast, eight chunks."""
    rate = BITS_PER_S / 8 * PAYLOAD
    return [
        Case(
            x=factor,
            star=Star(bytes_per_s=(rate, rate, rate * factor, 2 * rate), num_workers=3, step_s=0.0),
            servers=(3,),
            num_bytes=600_000,
            num_chunks=8,
            links=star(BITS_PER_S, {2: factor * BITS_PER_S, SERVER: 2 * BITS_PER_S}),
        )
        for factor in (0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
    ]


SWEEPS: Mapping[str, tuple[str, Callable[[], list[Case]]]] = {
    "bytes": ("bytes at which the ring overtakes a server of its own", bytes_sweep),
    "workers": ("workers from which a server on a link three times as fast overtakes the ring", workers_sweep),
    "slow worker": (
        "share of one worker's link below which a server on a link twice as fast overtakes the ring",
        slow_sweep,
    ),
}


@benchmark("server")
def ring_against_server(published: Path | None = None) -> Mapping[str, Any]:
    """Seconds of both along three sweeps, and where they cross."""
    why_not = unavailable()
    if why_not is not None:
        return {"skipped": why_not, "text": f"server: skipped: {why_not}"}
    cases = {name: make() for name, (_, make) in SWEEPS.items()}
    flat = [case for some in cases.values() for case in some]
    taken = iter(measured(flat))
    found: dict[str, Any] = {}
    for name, some in cases.items():
        x, seconds = [case.x for case in some], [next(taken) for _ in some]
        rows = [
            {"x": case.x, "predicted": case.predicted, "measured": one} for case, one in zip(some, seconds, strict=True)
        ]
        crossings = {"predicted": crossing(x, [case.predicted for case in some]), "measured": crossing(x, seconds)}
        found[name] = {"question": SWEEPS[name][0], "rows": rows, "crossing": crossings}
    return found | {"text": text(found)}


def measured(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Seconds of ring and server of each case."""
    shapes: list[Links] = []
    for case in cases:
        if case.links not in shapes:
            shapes.append(case.links)
    asked = [case.asked(shapes.index(case.links)) for case in cases]
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as place, network(shapes[0], wait_s=WAIT_S) as net:
        folder = Path(place)
        (folder / "cases.json").write_text(json.dumps(asked), encoding="utf-8")

        def shape() -> None:
            for number, links in enumerate(shapes):
                while not (folder / f"wanted-{number}").exists():
                    if ended.is_set():
                        return
                    time.sleep(0.05)
                net.shape(links)
                (folder / f"shaped-{number}").touch()

        shaper = threading.Thread(target=shape)
        shaper.start()
        try:
            net.run(server_ranks_file(), [place], timeout_s=420)
        finally:
            ended.set()
            shaper.join()
        found: list[dict[str, float]] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return found


def crossing(x: Sequence[float], rows: Sequence[Mapping[str, float]]) -> float | None:
    """Where the server's seconds over the ring's pass 1, between two points along log x; None where they do not."""
    ratios = [math.log(row["server"] / row["ring"]) for row in rows]
    for (x0, y0), (x1, y1) in zip(zip(x, ratios, strict=True), list(zip(x, ratios, strict=True))[1:], strict=False):
        if y0 * y1 <= 0 and y0 != y1:
            return math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * y0 / (y0 - y1))
    return None


def text(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"star of four hosts, {BITS_PER_S / 1e6:.0f} Mbit/s each"]
    for name, sweep in found.items():
        at = sweep["crossing"]
        both = at["predicted"] is not None and at["measured"] is not None
        error = f" ({at['predicted'] / at['measured'] - 1:+.1%})" if both else ""
        lines += [
            f"{sweep['question']}: predicted {_number(at['predicted'])}, measured {_number(at['measured'])}{error}"
        ]
        lines += [f"  {name:>12s}{'ring':>20s}{'server':>20s}   predicted / measured, ms"]
        for row in sweep["rows"]:
            pairs = [
                f"{1e3 * row['predicted'][how]:.0f} / {1e3 * row['measured'][how]:.0f}" for how in ("ring", "server")
            ]
            lines.append(f"  {row['x']:12,g}{pairs[0]:>20s}{pairs[1]:>20s}")
    return "\n".join(lines)


def _number(x: float | None) -> str:
    return "nowhere" if x is None else f"{x:,.3g}" if x < 1000 else f"{x:,.0f}"
