"""Where the ranks of a probe agree: notes in a store, with time-outs that say who is late.

No process group of all ranks: making one needs every pair to answer, and whether it does is what a probe asks.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

POLL_S = 0.01
LEADER = 0


class LateError(RuntimeError):
    """The leader of the probe did not answer in time."""

    exit_code = 1


def open_store(rank: int, ranks: int, timeout_s: float) -> "dist.Store":
    """The store of the processes that `run_ranks` or torchrun started; waits for nobody."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    path = os.environ.get("MESHWRIGHT_RENDEZVOUS")
    if path:
        store: dist.Store = dist.FileStore(path, ranks)
        store.set_timeout(timeout)
        return store
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == LEADER and not hosted,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


class Meeting:
    """This rank's seat."""

    def __init__(self, store: "dist.Store", rank: int) -> None:
        self.store = store
        self.rank = rank

    def note(self, name: str, value: Any) -> None:
        """Leave a note of this rank."""
        self.store.set(f"note/{name}/{self.rank}", json.dumps(value))

    def notes(self, name: str, ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
        """The notes of `ranks`: of all, or of those that left one before the time was over."""
        return self.notes_of_pairs(name, ranks, {}, timeout_s, timeout_s)

    def notes_of_pairs(
        self, name: str, ranks: Iterable[int], partners: Mapping[int, int], timeout_s: float, after_s: float
    ) -> dict[int, Any]:
        """As `notes`; a rank whose partner has left a note has no more than `after_s` to leave its own."""
        missing = set(ranks)
        found: dict[int, Any] = {}
        deadlines = dict.fromkeys(missing, time.monotonic() + timeout_s)
        while missing:
            for rank in sorted(missing):
                if self.store.check([f"note/{name}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"note/{name}/{rank}"))
                    missing.discard(rank)
                    partner = partners.get(rank)
                    if partner in missing:
                        deadlines[partner] = min(deadlines[partner], time.monotonic() + after_s)
            if missing and time.monotonic() > max(deadlines[rank] for rank in missing):
                break
            time.sleep(POLL_S if missing else 0)
        return found

    def say(self, name: str, value: Any) -> None:
        """The leader's word to all."""
        assert self.rank == LEADER
        self.store.set(f"word/{name}", json.dumps(value))

    def hear(self, name: str, timeout_s: float) -> Any:
        """The leader's word. LateError where it does not come."""
        deadline = time.monotonic() + timeout_s
        while not self.store.check([f"word/{name}"]):
            if time.monotonic() > deadline:
                raise LateError(
                    f"rank {self.rank}: rank {LEADER} has not said {name!r} after {timeout_s:.0f} s; it leads the probe"
                )
            time.sleep(POLL_S)
        return json.loads(self.store.get(f"word/{name}"))
