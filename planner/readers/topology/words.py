"""Facts that no file has, as words beside the files: `gpu=h100`, `nodes=16`, `inter=8x400Gbps`."""

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.records.near_names import did_you_mean
from planner.errors import InputError

MEANINGS: Mapping[str, str] = {
    "gpu": "product of every GPU, as in gpu=h100",
    "nodes": "number of nodes, as in nodes=16",
    "gpus_per_node": "GPUs of a node, as in gpus_per_node=8",
    "inter": "interfaces of a node, as in inter=8x400Gbps or inter=ib-ndr",
    "oversubscription": "bandwidth below a leaf switch over that above it, as in oversubscription=2",
    "switch": "the part of a tree below one switch, as in switch=grp10",
    "topology": "one of the topologies of a topology.yaml",
    "ranks": "ranks of a measured table whose header is lost",
    "name": "what to call the cluster",
}
"""Word -> what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What was said beside the files; None = not."""

    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    inter: str | None = None
    oversubscription: float | None = None
    switch: str | None = None
    topology: str | None = None
    ranks: int | None = None
    name: str | None = None


def is_word(text: str) -> bool:
    """`key=value`, where key is one of ours or looks like one."""
    key, sign, _ = text.partition("=")
    return bool(sign) and key.strip().replace("_", "").isalpha() and "/" not in key and "." not in key


def read_words(texts: list[str]) -> Words:
    """The words of a command. Raises InputError: unknown, twice, empty, or no number where one is needed."""
    said: dict[str, str] = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in MEANINGS:
            listed = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
            raise InputError(f"{text}: {key!r} is no word of a cluster{did_you_mean(key, MEANINGS)} Known: {listed}")
        if key in said:
            raise InputError(f"{text}: {key} is said twice")
        if not value:
            raise InputError(f"{text}: {key} has no value; {MEANINGS[key]}")
        said[key] = value
    numbers = {key: _whole(key, said[key]) for key in ("nodes", "gpus_per_node", "ranks") if key in said}
    ratio = {"oversubscription": _ratio(said["oversubscription"])} if "oversubscription" in said else {}
    return Words(**{key: value for key, value in said.items() if key not in (*numbers, *ratio)}, **numbers, **ratio)  # type: ignore[arg-type]


def _whole(key: str, text: str) -> int:
    if not (text.isdigit() and len(text) < 8 and int(text)):
        raise InputError(f"{key}={text}: a whole number from 1 is needed")
    return int(text)


def _ratio(text: str) -> float:
    number = text.removesuffix(":1")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1000:
        raise InputError(f"oversubscription={text}: a number from 1 (full bisection) to 1000 is needed, as in 2 or 2:1")
    return value
