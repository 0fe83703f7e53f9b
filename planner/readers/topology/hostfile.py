"""Hostfiles: plain lists, `slots=` (OpenMPI, DeepSpeed), `host:8` (MPICH), and the hostlists of Slurm."""

import re

from planner.errors import InputError
from planner.readers.topology.hostlists import MOST_HOSTS, expand
from planner.readers.topology.seen import SeenFabric, SeenHost
from planner.readers.topology.text import plain_lines, shown

_HOST = re.compile(
    r"^([A-Za-z0-9_][\w.\-]*(?:\[[\d,\-]+\][\w.\-]*)*(?:,[\w.\-\[\],]+)?)(?::(\d{1,6}))?((?:\s+[\w-]+\s*=\s*\S+)*)$"
)
_SLOTS = re.compile(r"(?:slots|gpus|cpu|np)\s*=\s*(\d{1,6})(?=\s|$)", re.IGNORECASE)


def _entries(text: str) -> list[tuple[int, str]]:
    lines = (
        (number, re.split(r"[#;]|//", line, maxsplit=1)[0].strip()) for number, line in enumerate(plain_lines(text), 1)
    )
    return [(number, line) for number, line in lines if line]


def is_hostfile(text: str) -> bool:
    """Every line is one host or hostlist, with options behind it."""
    entries = _entries(text[: 2**16].rpartition("\n")[0] if len(text) > 2**16 else text)
    return bool(entries) and all(_HOST.match(line) for _, line in entries)


def read_hostfile(text: str, source: str) -> list[SeenFabric]:
    """The hosts in their order; one that is written several times has as many slots. Raises InputError."""
    slots: dict[str, int | None] = {}
    for number, line in _entries(text):
        place = f"{source}, line {number}"
        found = _HOST.match(line)
        if found is None:
            raise InputError(
                f"{place}: {shown(line)} is no line of a hostfile; legal: `host`, `host slots=8`, `host:8`"
            )
        said = _SLOTS.search(found[3] or "")
        if said is None and re.search(r"slots\s*=", found[3] or ""):
            raise InputError(f"{place}: {shown(line)}: slots= takes a whole number up to 999999")
        count = int(said[1]) if said else int(found[2]) if found[2] else None
        if count == 0:
            continue  # a host without slots is one that is not used
        for name in expand(found[1], place, MOST_HOSTS):
            before = slots.get(name)
            slots[name] = count if name not in slots else (before or 1) + (count or 1)
        if len(slots) > MOST_HOSTS:
            raise InputError(f"{source}: more than {MOST_HOSTS:,} hosts")
    if not slots:
        raise InputError(f"{source}: no host has a slot")
    return [
        SeenFabric(
            source=f"{source} (hostfile)",
            hosts=tuple(SeenHost(name=name, num_gpus=count) for name, count in slots.items()),
        )
    ]
