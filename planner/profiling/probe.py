"""The live probe: every pair of ranks, the domains that they form, collectives inside and between these; a file that plans read.

All that waits has a time-out. A pair that does not answer is noted and left; a rank that nobody heard of is left out of what
follows; the others are measured, and the file names the silent ones. Rank 0 leads: what it says, all do.
"""

import json
import os
import queue
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cost_models.records import Measurement, Probe, RecordError, Silence, from_json, load, save, to_json
from planner.profiling.clock import threads_per_rank
from planner.profiling.domains import Domains, fast_domains
from planner.profiling.meeting import LEADER, Meeting, open_store
from planner.profiling.pairs import curve_of, join_pair, measure_pair
from planner.profiling.probed_cluster import Answers, probe_of
from planner.profiling.ranks import run_ranks, say
from planner.profiling.tournament import Tournament, tournament

BACKENDS = ("gloo", "nccl")
REQUEST_FILE = "probe-request.json"
"""By which a process that was started knows that it probes."""
TIMEOUT_S = 10.0
"""After which a pair is given up: ten thousand times a message across a continent."""
JOIN_S = 60.0
"""Until which ranks must have come: starting a process and importing torch takes up to ten seconds on a busy machine."""
PAIR_S = 40.0
"""Longest that a pair may take: both directions of seven decades whose longest message takes 0.3 s, ten times each."""
REST_S = 300.0
"""For operations and collectives after the pairs."""

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe."""

    ranks: int
    """Processes; under torchrun those that it started."""
    backend: str
    """gloo, between CPU processes; nccl, between GPUs."""
    timeout_s: float = TIMEOUT_S
    """After which a pair, or a rank, is given up."""

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise RecordError(f"ranks={self.ranks}: links are between at least 2 ranks; give --ranks 2 or more")
        if self.backend not in BACKENDS:
            raise RecordError(f"backend={self.backend!r}; legal values: {', '.join(BACKENDS)}")
        if not 0 < self.timeout_s < 3600:
            raise RecordError(
                f"timeout_s={self.timeout_s}: seconds after which a pair is given up, above 0 and below 3600"
            )


def backend_here() -> str:
    """nccl where torch sees GPUs and can talk over NCCL, else gloo."""
    import torch
    import torch.distributed as dist

    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def probe_live(request: ProbeRequest, *, progress: Tell) -> Probe | None:
    """Probe in processes started here; where RANK is set (torchrun), as one of them: rank 0 gets the probe, the others None."""
    if "RANK" in os.environ:
        return take_part(request, progress)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        place = Path(folder)
        (place / REQUEST_FILE).write_text(json.dumps(to_json(request)), encoding="utf-8")
        rounds = len(tournament(request.ranks).rounds) + 2
        run_ranks(
            "planner.profiling",
            [str(place)],
            ranks=request.ranks,
            threads=threads_per_rank(request.ranks),
            timeout_s=JOIN_S + rounds * (PAIR_S + 2 * request.timeout_s) + REST_S,
            progress=progress,
            leader_decides=True,
        )
        return load(Probe, place / "probe.json")


def main(folder: str) -> None:
    """What each process of `probe_live` runs: reads the request, rank 0 leaves probe.json."""
    place = Path(folder)
    request = from_json(ProbeRequest, json.loads((place / REQUEST_FILE).read_text(encoding="utf-8")))
    found = take_part(request, lambda text: say(LEADER, text))
    if found is not None:
        save(found, place / "probe.json")


def take_part(request: ProbeRequest, tell: Tell) -> Probe | None:
    """This rank's part; on rank 0 the probe."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = "cpu"
    if request.backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a silent pair must not end the process
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    meeting = Meeting(open_store(rank, ranks, JOIN_S + request.timeout_s), rank)
    return _Part(request=request, meeting=meeting, ranks=ranks, device=device, tell=tell).run()


class _Eta:
    """How long it still takes, from how long it took."""

    def __init__(self, steps: int, tell: Tell) -> None:
        self._steps, self._tell, self._done, self._started = steps, tell, 0, time.monotonic()

    def step(self, what: str) -> None:
        """One more step is done."""
        self._done += 1
        left_s = (time.monotonic() - self._started) / self._done * max(0, self._steps - self._done)
        self._tell(f"{what}; about {left_s:.0f} s left")


@dataclass(slots=True, kw_only=True)
class _Part:
    """One rank on its way through the probe."""

    request: ProbeRequest
    meeting: Meeting
    ranks: int
    device: str
    tell: Tell

    @property
    def leads(self) -> bool:
        return self.meeting.rank == LEADER

    def run(self) -> Probe | None:
        """All of it."""
        answers = Answers(backend=self.request.backend)
        alive = self._join(answers)
        games = tournament(self.ranks)
        eta = _Eta(len(games.rounds) + 3, self.tell)
        for number, pairs in enumerate(games.rounds):
            alive = self._round(f"round {number + 1}", pairs, alive, answers.samples, answers)
            if self.leads:
                eta.step(f"round {number + 1} of {len(games.rounds)}: {len(pairs)} pairs at once")
        domains = self._agree("domains", lambda: _domains(answers, alive))
        alive = self._crossings(domains, alive, answers)
        if self.leads:
            eta.step(f"found {len(domains)} fast domains")
        members = self._agree("members", lambda: answering(alive, answers.silent))
        if self.meeting.rank in members:
            self._together(members, domains, answers, eta)
        return self._result(games, domains, members, answers)

    def _agree(self, name: str, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, on all ranks."""
        if self.leads:
            self.meeting.say(name, decide())
        wait_s = JOIN_S + PAIR_S + 3 * self.request.timeout_s
        return self.meeting.hear(name, wait_s)

    def _join(self, answers: Answers) -> list[int]:
        from planner.profiling.blocks import machine_of

        self.meeting.note("here", {"host": socket.gethostname(), "machine": machine_of(self.device)})
        if self.leads:
            self.tell(f"waiting for {self.ranks} ranks")
            found = self.meeting.notes("here", range(self.ranks), JOIN_S)
            answers.hosts = {rank: note["host"] for rank, note in found.items()}
            answers.machine = found[LEADER]["machine"]
            for rank in sorted(set(range(self.ranks)) - set(found)):
                answers.silent.append(Silence(ranks=(rank,), reason=f"did not join within {JOIN_S:.0f} s"))
        joined: list[int] = self._agree("joined", lambda: sorted(answers.hosts))
        if len(joined) < 2:
            raise RecordError(f"of {self.ranks} ranks only rank {joined[0]} joined: nothing to probe")
        return joined

    def _round(
        self, name: str, pairs: Sequence[tuple[int, int]], alive: list[int], samples: dict[Any, Any], answers: Answers
    ) -> list[int]:
        """Each of the pairs measures, all at once; who is still there afterwards."""
        silent = {one.ranks for one in answers.silent}
        playing = [pair for pair in pairs if set(pair) <= set(alive)]
        for pair in sorted(set(pairs) - set(playing) - silent):
            lost = next(rank for rank in pair if rank not in alive)
            answers.silent.append(Silence(ranks=pair, reason=f"not tried: rank {lost} was lost before"))
        own = next((pair for pair in playing if self.meeting.rank in pair), None)
        kept = None
        if own is not None:
            kept, note = self._meet(name, own)
            self.meeting.note(name, note)
        if self.leads:
            partners = {one: other for pair in playing for one, other in (pair, pair[::-1])}
            notes = self.meeting.notes_of_pairs(name, partners, partners, PAIR_S, 2 * self.request.timeout_s)
            _keep(playing, notes, samples, answers)
            alive = [rank for rank in alive if rank not in partners or rank in notes]
        alive = self._agree(f"{name} is over", lambda: alive)
        del kept  # the connection stays open until both have said what they found
        return alive

    def _meet(self, name: str, pair: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
        """The connection, to be kept, and what this rank has to say of it."""
        from torch.distributed import PrefixStore

        place = pair.index(self.meeting.rank)
        store = PrefixStore(f"pair/{name}/{pair[0]}-{pair[1]}", self.meeting.store)
        timeout_s, backend = self.request.timeout_s, self.request.backend
        joined = None
        try:
            # in a thread: gloo connects again and again for a multiple of its own time-out
            joined = within(timeout_s, lambda: join_pair(store, place, backend, self.device, timeout_s))
            taken = measure_pair(joined, place, backend)
            return joined, {"samples": {str(size): samples for size, samples in taken.items()}}
        except (RuntimeError, OSError) as error:  # gloo, NCCL and the store have no narrower one
            return joined, {"error": first_words(error)}

    def _crossings(self, domains: Domains, alive: list[int], answers: Answers) -> list[int]:
        """One pair alone from each domain to the next, then all of a domain's members at once: do they share a way out?"""
        width = min(map(len, domains))
        if len(domains) < 2 or width < 2:
            return alive
        twos = list(zip(domains[::2], domains[1::2], strict=False))
        for name, members, samples in (("alone", 1, answers.alone), ("together", width, answers.together)):
            pairs = [(min(pair), max(pair)) for a, b in twos for pair in zip(a[:members], b[:members], strict=True)]
            alive = self._round(name, pairs, alive, samples, answers)
        return alive

    def _together(self, members: list[int], domains: Domains, answers: Answers, eta: _Eta) -> None:
        """Operations on all ranks at once, and collectives in groups."""
        from planner.profiling.groups import time_groups

        if len(members) < 2:
            return

        def told(what: str) -> None:
            if self.leads:
                eta.step(what)

        try:
            taken = time_groups(members, domains, self.meeting, self.device, self.request, told)
            self.meeting.note("measured", [to_json(one) for one in taken])
        except (RuntimeError, OSError) as error:
            self.meeting.note("measured", first_words(error))
        if self.leads:
            notes = self.meeting.notes("measured", members, REST_S)
            for rank in members:
                said = notes.get(rank, "said nothing")
                if isinstance(said, str):
                    answers.notes.append(f"collectives: rank {rank} failed: {said}")
                else:
                    answers.measurements += [from_json(Measurement, one) for one in said]

    def _result(self, games: Tournament, domains: Domains, members: list[int], answers: Answers) -> Probe | None:
        if not self.leads:
            return None
        if games.num_meetings < games.num_pairs:
            answers.notes.append(
                f"sampled: {games.num_meetings:,} of {games.num_pairs:,} pairs met, in {len(games.rounds)} rounds; a slow pair among "
                "the others is not seen, and domains are found where their ranks follow one another"
            )
        if left := sorted(set(answers.hosts) - set(members)):
            answers.notes.append(
                f"left out of the cluster: ranks {', '.join(map(str, left))}, which others do not reach"
            )
        return probe_of(answers, tuple(tuple(rank for rank in domain if rank in members) for domain in domains))


T = TypeVar("T")


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """What `work` gives, or its error; RuntimeError where it takes longer. It is then left to itself."""
    results: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(work())
        except BaseException as error:  # noqa: BLE001 -- raised below, in the thread that waits
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        found = results.get(timeout=timeout_s)
    except queue.Empty:
        raise RuntimeError(f"no connection within {timeout_s:.0f} s") from None
    if isinstance(found, BaseException):
        raise found
    return found


def first_words(error: Exception) -> str:
    """The first line of an error, without the place in somebody else's source."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"\[(enforce fail at )?/[^\]]*\] ?", "", line)[:200] or type(error).__name__


def _keep(playing: Sequence[tuple[int, int]], notes: dict[int, Any], samples: dict[Any, Any], answers: Answers) -> None:
    """What pairs said: samples by direction, or why there are none."""
    for pair in playing:
        said = [notes.get(rank, {"error": f"rank {rank} said nothing in time"}) for rank in pair]
        errors = [f"rank {rank}: {note['error']}" for rank, note in zip(pair, said, strict=True) if "error" in note]
        if errors:
            if pair not in (one.ranks for one in answers.silent):
                answers.silent.append(Silence(ranks=pair, reason="; ".join(errors)))
            continue
        for way, note in zip((pair, pair[::-1]), said, strict=True):
            samples[way] = {int(size): tuple(taken) for size, taken in note["samples"].items()}


def _domains(answers: Answers, alive: list[int]) -> Domains:
    found = {way: curve_of(taken) for way, taken in answers.samples.items()}
    bandwidths = {way: one.bandwidth_bytes_per_s for way, one in found.items()}
    return fast_domains(alive, bandwidths, {way: one.spread for way, one in found.items()})


def answering(alive: Sequence[int], silent: Sequence[Silence]) -> list[int]:
    """Ranks that all reach one another: whoever has the most silent pairs is left out, until there are none."""
    left = set(alive)
    while True:
        broken = [one.ranks for one in silent if len(one.ranks) == 2 and set(one.ranks) <= left]
        if not broken:
            return sorted(left)
        count = {rank: sum(rank in pair for pair in broken) for rank in left}
        left.discard(max(sorted(left, reverse=True), key=count.__getitem__))
