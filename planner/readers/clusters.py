"""A cluster by name (`h100x64`), from a file, or from what people paste: the door that tells them apart."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cost_models.data import rows
from cost_models.records import Calibration, Cluster, NodeKind, Pool, RecordError, from_json
from cost_models.records.codec import refuse_version
from cost_models.records.near_names import did_you_mean
from planner.errors import InputError
from planner.readers.cluster_facts import FACT_KEYS, cluster_and_defaults, read_interconnect
from planner.readers.documents import There, named_path, part_of
from planner.readers.node_presets import cluster_names, node_name, preset_cluster, spelling
from planner.readers.plausible import refuse_implausible, refuse_too_many
from planner.readers.topology.join import Joined, joined
from planner.readers.topology.pieces import Pieces, gathered
from planner.readers.topology.words import is_word, read_words

_PRESET_AND_COUNT = re.compile(r"(.+?)\s*[x×*]\s*(-?\d+)")


def read_cluster(name_or_path: str) -> Cluster:
    """The cluster that a person names: preset x GPUs (`a100-80x1024`), several joined by + (`h100x64+a100-80x128`), or the path
    of a file; several files and facts beside them (`topo.txt,topology.conf,gpu=h100`) are joined.

    A file holds a Cluster record, its short form (`cluster_from_facts`), a request, a plan or a probe, or what people paste
    (planner/readers/topology). Fewer GPUs than a node has make one smaller node; more must fill whole nodes. Raises InputError;
    unknown names list the near ones.
    """
    return read_joined([name_or_path]).cluster


def read_joined(texts: Sequence[str]) -> Joined:
    """The same with everything that it was made of: each text is a name, a path, a fact, or several with commas between."""
    parts = [part.strip() for text in texts for part in _parts(text)]
    said = [part for part in parts if is_word(part) and named_path(part)[1] is There.NOTHING]
    names = [part for part in parts if part not in said]
    words = read_words(said)
    if len(names) == 1 and not said and named_path(names[0])[1] is not There.FILE:
        return Joined(cluster=_named_cluster(names[0]), assumptions=(), pieces=Pieces())
    if not names:
        raise InputError(
            f"cluster {', '.join(said)}: facts alone; give a file that they complete, or preset x GPUs as in h100x64"
        )
    files = [name for name in names if named_path(name)[1] is There.FILE]
    pieces, documents = gathered(files, words)
    measured = [found for path, data in documents if (found := _measured(path, data)) is not None]
    whole = [_whole(path, data) for path, data in documents] + [
        _named_cluster(name) for name in names if name not in files
    ]
    if len(whole) > 1:
        raise InputError(
            f"{whole[0].name} and {whole[1].name} both describe the whole cluster; pools of presets are joined by +"
        )
    try:
        return joined(replace(pieces, base=next(iter(whole), None), measured=next(iter(measured), None)), words)
    except RecordError as error:
        raise InputError(f"{', '.join(files)}: {error}") from None


def _parts(text: str) -> list[str]:
    """What stands between commas; a path that has one is one."""
    return [text] if named_path(text.strip())[1] is not There.NOTHING else text.split(",")


def _named_cluster(name_or_path: str) -> Cluster:
    text = name_or_path.strip()
    _, there = named_path(text)
    if there is There.FOLDER:
        raise InputError(
            f"cluster {text!r}: this is a folder; name a cluster file in it, or preset x GPUs as in h100x64"
        )
    if re.search(r"[/\\]|\.[a-z]{2,4}$", text):
        raise InputError(
            f"cluster {text!r}: there is no such file; give the path of a cluster file, or preset x GPUs as in h100x64"
        )
    parts = [part.strip() for part in text.split("+")]
    if len(parts) > 1:
        return _mixed_cluster(text, parts)
    match = _PRESET_AND_COUNT.fullmatch(text.lower())
    if match is None:
        return _refuse_name(text)
    name = node_name(match[1])
    if name is None:
        return _refuse_name(match[1], match[2])
    return preset_cluster(name, int(match[2]))


def _mixed_cluster(text: str, parts: list[str]) -> Cluster:
    """Pools of presets side by side on one network, in the order given."""
    pools: list[Pool] = []
    for part in parts:
        match = _PRESET_AND_COUNT.fullmatch(part.lower())
        name = None if match is None else node_name(match[1])
        try:
            if not part:
                raise InputError("there is nothing on one side of a +")
            if match is None or name is None:
                _refuse_name(part if match is None else match[1], "64" if match is None else match[2])
            else:
                pools += preset_cluster(name, int(match[2])).pools
        except InputError as error:
            raise InputError(f"cluster {text!r} (pools joined by +, as in h100x64+a100-80x128): {error}") from None
    cluster = _with_joined_pools(Cluster(name="+".join(parts), pools=tuple(pools)))
    refuse_too_many(cluster.num_gpus)
    return cluster


def _refuse_name(text: str, count: str = "64") -> Cluster:
    if spelling(text).startswith(("cpu", "local")):
        raise InputError(
            f"cluster {text!r}: this machine is measured, not looked up; `meshwright probe --ranks N -o cluster.json` does it"
        )
    name = node_name(text)
    if name is not None:
        per_node = rows("nodes")[name]["gpus_per_node"]
        raise InputError(f"cluster {text!r} does not say how many GPUs; write preset x GPUs, as in {name}x{per_node}")
    base = re.sub(r"x\d+$", "", spelling(text))
    variants = [other for other in cluster_names() if other.startswith(f"{base}-")]
    near = variants or difflib.get_close_matches(base, cluster_names(), n=4, cutoff=0.5)
    hint = f"near names: {', '.join(f'{other}x{count}' for other in near)}" if near else "no name is near"
    raise InputError(
        f"cluster {text!r} is not a preset, and there is no such file; {hint}. Presets, each with x and a number of GPUs: "
        f"{', '.join(cluster_names())}"
    )


def _measured(path: str, data: Mapping[str, Any]) -> Calibration | None:
    """What a probe's document holds beside the cluster."""
    inner = data.get("calibration")
    if "cluster" not in data or not isinstance(inner, Mapping):
        return None
    try:
        return from_json(Calibration, inner, "calibration")
    except RecordError as error:
        raise InputError(f"{path}: {error}") from None


def _whole(path: str, data: Mapping[str, Any]) -> Cluster:
    """The cluster of a document of our own."""
    try:
        refuse_version(data, "")
        inner = part_of(dict(data), "cluster")
        if isinstance(inner, str):
            return read_cluster(inner)
        if isinstance(inner, dict) and {"pools", "gpu", "gpus_per_node", "nodes", "world"} & set(inner):
            return cluster_of_document(inner)[0]
        raise InputError(
            f"neither a saved cluster (it has pools), nor its short form (keys: {', '.join(FACT_KEYS)}), nor a request or plan"
        )
    except (InputError, RecordError) as error:
        raise InputError(f"{path}: {error}") from None


def cluster_of_document(data: Mapping[str, Any]) -> tuple[Cluster, dict[str, str]]:
    """The cluster of a document, a whole record or the short form, and what was not said: `cluster.<key>` -> how it was taken.

    Raises InputError or RecordError for an unknown key or word, and for what no cluster has.
    """
    if "pools" not in data:
        return _strictly_from_facts(data)
    cluster = _with_joined_pools(from_json(Cluster, data))
    refuse_implausible(cluster)
    families = {pool.kind.device.family == "cpu" for pool in cluster.pools}
    if len(families) > 1:
        raise InputError(
            f"cluster {cluster.name!r} has pools of CPU processes and of GPUs: one run counts its memory in one way and talks over "
            "one backend; legal: pools of GPUs, or of CPU processes"
        )
    return _told_apart(cluster), {}


def _strictly_from_facts(facts: Mapping[str, Any]) -> tuple[Cluster, dict[str, str]]:
    for key, value in facts.items():
        if key not in FACT_KEYS:
            hint = did_you_mean(key, FACT_KEYS)
            raise InputError(f"cluster has an unknown key {key!r}{hint} Known keys: {', '.join(FACT_KEYS)}")
        if key in ("name", "gpu", "intra", "inter") and not isinstance(value, str | None):
            raise InputError(f"cluster {key}={value!r}: a text is needed")
    cluster, defaults = cluster_and_defaults(facts)
    for key, words in (
        ("intra", "nvlink, pcie, shm, or a class"),
        ("inter", "a rate as in `8 x 400 Gbps`, `400 Gbps per GPU`, `3200 Gbps per node` or `8x NDR`, or a class"),
    ):
        if facts.get(key) is not None and not _is_understood(key, facts[key], cluster.pools[0].kind):
            raise InputError(
                f"cluster {key}={facts[key]!r} is not understood; say {words} of: {', '.join(rows('links'))}"
            )
    refuse_implausible(cluster)
    if facts.get("world") not in (None, cluster.num_gpus):
        raise InputError(
            f"world={facts['world']} is not nodes·gpus_per_node = {cluster.num_gpus}; leave world out (--gpus N plans on fewer)"
        )
    return cluster, defaults


def _is_understood(key: str, text: str, kind: NodeKind) -> bool:
    if key == "inter":
        return read_interconnect(text, kind) is not None
    return text.lower() in rows("links") or text.lower().startswith(("pcie", "shm", "nv"))


def _with_joined_pools(cluster: Cluster) -> Cluster:
    """Neighbouring pools of one kind are one pool."""
    pools = [cluster.pools[0]]
    for pool in cluster.pools[1:]:
        if pool.kind == pools[-1].kind:
            pools[-1] = replace(pool, num_nodes=pool.num_nodes + pools[-1].num_nodes)
        else:
            pools.append(pool)
    return replace(cluster, pools=tuple(pools))


def _told_apart(cluster: Cluster) -> Cluster:
    """A cluster that has a preset's name and is not it says so."""
    match = _PRESET_AND_COUNT.fullmatch(cluster.name)
    if match is None or node_name(match[1]) is None:
        return cluster
    try:
        is_it = preset_cluster(node_name(match[1]) or "", int(match[2])) == cluster
    except InputError:
        is_it = False
    return cluster if is_it else replace(cluster, name=f"{cluster.name} (changed)")
