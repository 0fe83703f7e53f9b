"""Which reader a file is for. One file may hold what several commands printed, one below the other."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.records import RecordError
from cost_models.records.codec import parse
from planner.errors import InputError
from planner.readers.topology import (
    amd,
    hostfile,
    kubernetes,
    nccl_rows,
    nccl_tests,
    nccl_xml,
    slurm,
    smi_lists,
    smi_topo,
    topograph,
)
from planner.readers.topology.seen import Seen
from planner.readers.topology.text import read_text
from planner.readers.topology.words import Words
from planner.readers.topology.yaml_text import first_lines, parse_yaml

KNOWN = (
    "nvidia-smi topo -m, topo -p2p r, -L, nvlink -s, plain nvidia-smi, --query-gpu=name,memory.total,... --format=csv; rocm-smi --showtopo; "
    "amd-smi topology; NCCL's topology XML; nccl-tests (table or -J); Slurm's topology.conf, topology.yaml, scontrol show topology; "
    "kubectl get nodes -o json|yaml; topograph's models; a hostfile; a cluster or a probe of Meshwright's own (JSON)"
)
"""What is read, for errors."""

_YAML = re.compile(r"(?:---|apiVersion:|kind:|items:|blocks:|switches:|-\s+topology:)")


def read_seen(path: Path, words: Words) -> list[Seen] | dict[str, Any]:
    """What a file holds; a JSON object that is none of the formats is given back as it is: one of our own documents.

    Raises InputError, led by the path.
    """
    text = read_text(path)
    source = str(path)
    start = text.lstrip()
    if nccl_xml.is_nccl_xml(text):
        return list(nccl_xml.read_nccl_xml(start, source))
    if start.startswith("{") or re.match(r"\[\s*(?:\{|\])", start):
        return _json(text, source, words)
    if _YAML.match(first_lines(text, 1)):
        return _of_data(parse_yaml(text, source), source, words) or _refuse(source, "YAML of another kind")
    return _texts(text, source, words) or _refuse(source, "none of the formats that are read")


def _refuse(source: str, what: str) -> list[Seen]:
    raise InputError(f"{source}: {what}. Read are: {KNOWN}")


def _json(text: str, source: str, words: Words) -> list[Seen] | dict[str, Any]:
    try:
        data = parse(text, source)
    except RecordError as error:
        raise InputError(str(error)) from None
    found = _of_data(data, source, words)
    if found is not None:
        return found
    if not isinstance(data, dict):
        return _refuse(source, f"expected an object that describes a cluster, found a {type(data).__name__}")
    return data


def _of_data(data: Any, source: str, words: Words) -> list[Seen] | None:
    """What plain data holds; None where it is of no known kind."""
    if nccl_rows.is_nccl_json(data):
        return list(nccl_tests.read_nccl_json(data, source, ranks=words.ranks))
    if kubernetes.is_kubernetes(data):
        return list(kubernetes.read_kubernetes(data, source))
    if topograph.is_topograph(data):
        return list(topograph.read_topograph(data, source, below=words.switch))
    if slurm.is_slurm_yaml(data):
        return list(slurm.read_slurm_yaml(data, source, topology=words.topology, below=words.switch))
    if isinstance(data, list) and data and all(kubernetes.is_kubernetes(item) for item in data):
        whole = {"kind": "List", "apiVersion": "v1", "items": data}
        return list(kubernetes.read_kubernetes(whole, source))
    return None


def _texts(text: str, source: str, words: Words) -> list[Seen]:
    """Everything that the text readers find in it."""
    readers: tuple[tuple[Callable[[str], bool], Callable[[str, str], Any]], ...] = (
        (smi_topo.is_smi_topo, smi_topo.read_smi_topo),
        (smi_lists.is_smi_list, smi_lists.read_smi_list),
        (smi_lists.is_smi_table, smi_lists.read_smi_table),
        (smi_lists.is_smi_query, smi_lists.read_smi_query),
        (amd.is_amd, amd.read_amd),
        (nccl_rows.is_nccl_tests, lambda some, name: nccl_tests.read_nccl_tests(some, name, ranks=words.ranks)),
        (slurm.is_slurm, lambda some, name: slurm.read_slurm(some, name, below=words.switch)),
        (kubernetes.is_labelled_list, kubernetes.read_labelled_list),
    )
    found: list[Seen] = []
    for is_it, read in readers:
        if is_it(text):
            found += read(text, source)
    if not found and hostfile.is_hostfile(text):
        found += hostfile.read_hostfile(text, source)
    return found
