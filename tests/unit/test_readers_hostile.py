"""Every reader against files that are empty, cut, binary, huge, mutated or made to hurt: one clear error, in bounded time and memory.

Time is held by counting (hosts before names, elements, nesting, lines) and by the tests' own time-out; memory by tracemalloc.
"""

import contextlib
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.records import RecordError
from executor.cli import main
from planner.errors import InputError, NotYetError
from planner.readers.clusters import read_joined
from planner.readers.topology.join import Joined
from planner.readers.topology.text import MOST_BYTES, decoded
from planner.readers.topology.yaml_text import parse_yaml
from tests.conftest import SHARED

MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-15\nGPU1\tNV4\t X \tSYS\t16-31\nNIC0\tPIX\tSYS\t X \n"
)
VALID = {
    "topo.txt": MATRIX,
    "p2p.txt": " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n",
    "list.txt": "GPU 0: NVIDIA L4 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n\t Link 0: <inactive>\n",
    "query.csv": "name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max\nNVIDIA L4, 23034 MiB, 4, 16\n",
    "rocm.txt": "=== Weight between two GPUs ===\n       GPU0  GPU1\nGPU0   0     15\nGPU1   15    0\n",
    "topo.xml": '<system version="1"><cpu numaid="0"><pci busid="1" class="0x030200" link_speed="16 GT/s" link_width="16">'
    '<gpu dev="0" sm="80"><nvlink target="2" count="4" tclass="0x068000"/></gpu></pci><pci busid="2" class="0x030200">'
    '<gpu dev="1"><nvlink target="9" count="4" tclass="0x068000"/></gpu></pci><nic><net name="mlx5_0" speed="200000"/></nic></cpu></system>',
    "tree.conf": "SwitchName=r Switches=a[0-1]\nSwitchName=a0 Nodes=n[00-03]\nSwitchName=a1 Nodes=n[04-07]\n",
    "block.conf": "BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n[5-8]\nBlockSizes=4,8\n",
    "topology.yaml": "---\n- topology: t\n  cluster_default: true\n  tree:\n    switches:\n      - {switch: s, nodes: 'n[1-4]'}\n",
    "nodes.json": '{"apiVersion": "v1", "kind": "List", "items": [{"metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": '
    '"NVIDIA-L4", "nvidia.com/gpu.count": "8", "fabric.topograph.run/tier-0": "s"}}}]}',
    "nodes.yaml": "apiVersion: v1\nkind: Node\nmetadata:\n  name: a\n  labels:\n    nvidia.com/gpu.count: '8'\n",
    "model.yaml": "switches:\n  c:\n    switches: [l]\nblocks:\n- switch: l\n  nodes: ['n[1-2]']\n",
    "hostfile": "a slots=8\nb slots=8\n",
    "all_reduce.txt": "# busbw\n 67108864 16777216 float sum -1 754.3 88.97 155.69 0 738.5 90.87 159.02 0\n"
    " 268435456 67108864 float sum -1 2352.7 114.10 199.67 0 2371.0 113.22 198.13 0\n",
    "all_reduce.json": '{"version": 3, "args": ["all_reduce_perf"], "config": {"nthreads": 1, "ngpus": 8, "devices": [{"hostname": "a"}]}, '
    '"results": [{"size": 67108864, "count": 16777216, "type": "float", "redop": "sum", "root": "-1", '
    '"out_of_place": {"time": 1000.0, "alg_bw": 67.108864, "bus_bw": 117.440512, "nwrong": 0}}]}',
}
"""One small valid file of every format."""

WORDS = ["gpu=l4", "nodes=4"]


def outcome(path: Path, *words: str) -> Joined | str:
    """The cluster, or the one error; nothing else may come."""
    try:
        return read_joined([str(path), *words])
    except (InputError, NotYetError) as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 3000
        return text


@pytest.mark.parametrize("name", VALID)
def test_the_valid_ones_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(VALID[name])
    words = ["gpu=h100"] if name in ("topo.txt", "topo.xml") else ["gpu=mi300x"] if name == "rocm.txt" else ["gpu=l4"]
    if name.startswith("all_reduce"):
        words = ["gpu=h100", "nodes=1"]
    found = outcome(path, *words)
    assert isinstance(found, Joined), found


@pytest.mark.parametrize("name", VALID)
def test_cut_at_every_place(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = VALID[name]
    for end in range(0, len(text), max(1, len(text) // 60)):
        path.write_text(text[:end])
        outcome(path, *WORDS)


@pytest.mark.parametrize("name", VALID)
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_mutated(name: str, seed: int) -> None:
    """Bytes changed, lines doubled, dropped or shuffled, numbers blown up, pieces of other formats between them."""
    draw = random.Random(seed)
    lines = VALID[name].splitlines(keepends=True)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        match draw.randrange(7):
            case 0:
                lines[at] = lines[at] * draw.randint(0, 3)
            case 1:
                draw.shuffle(lines)
            case 2:
                lines.insert(at, draw.choice(draw.choice(list(VALID.values())).splitlines(keepends=True)))
            case 3:
                lines[at] = lines[at].replace(
                    draw.choice("0123456789"), draw.choice(["", "9" * 30, "-1", "0", "1e9", "x"])
                )
            case 4:
                place = draw.randrange(len(lines[at]) + 1)
                lines[at] = (
                    lines[at][:place]
                    + draw.choice(["[", "]", "{", "<", '"', "=", ",", "\t", "\x00", "é", "&a", "*a", "!", "#", ":"])
                    + lines[at][place:]
                )
            case 5:
                cut = draw.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][cut:]
            case _:
                lines[at] = "".join(draw.sample(lines[at], len(lines[at])))
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"meshwright-fuzz-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(lines) or " ", encoding="utf-8")
    try:
        outcome(path, *WORDS)
        outcome(path)
    finally:
        path.unlink()
        folder.rmdir()


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_any_bytes(content: bytes) -> None:
    try:
        text = decoded(content, "file")
    except InputError:
        return
    assert "\0" not in text


@given(st.text(alphabet="[]{}:,-&*!|>#'\"ab \n", max_size=80))
def test_any_yaml(text: str) -> None:
    with contextlib.suppress(InputError):
        parse_yaml(text, "file.yaml")


# Made to hurt ------------------------------------------------------------------------------------------------------------

ALIASES = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)

HOSTILE = {
    "empty": (b"", "empty"),
    "blank": (b" \n\n", "empty"),
    "binary": (bytes(range(256)) * 40, "not a text"),
    "zeros": (b"\0" * 100, "binary file"),
    "picture": (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "not a text"),
    "a million lines": (b"\n" * 3_000_000 + b"x", "more than 2,097,152 lines"),
    "xml bomb": (b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 1000 + b'">]><system>&b;</system>', "document type"),
    "deep xml": (b"<system>" * 100_000, "nested deeper"),
    "alias bomb": (b"kind: List\n" + ALIASES.encode(), "anchors and aliases"),
    "deep yaml": (b"kind: " + b"[" * 10_000, "nesting depth"),
    "deep json": (b'{"a": ' + b"[" * 200_000, "nested too deep"),
    "python tag": (b"kind: !!python/object/apply:os.system ['true']\n", "tags"),
    "million nodes": (b"SwitchName=a Nodes=n[1-1000000][1-1000000]\n", "names 1,000,000,000,000 nodes in all"),
    "many millions": (
        b"".join(b"SwitchName=s%d Nodes=n%dx[1-900000]\n" % (n, n) for n in range(2000)),
        "names 1,800,000,000 nodes in all",
    ),
    "a hostfile of a trillion": (b"n[0-999999][0-999999] slots=8\n", "1,000,000,000,000 hosts"),
    "wide matrix": (b"\t" + b"\t".join(b"GPU%d" % n for n in range(5000)) + b"\nGPU0\tX\n", "5,000 columns"),
    "json of another kind": (b"[1, 2]", "none of the formats"),
    "list of nothing": (b"[]", "found a list"),
    "prose": (b"Dear all,\nplease find attached the topology.\n", "none of the formats"),
    "long line": (b"x" * 5_000_000, "none of the formats"),
    "nested brackets": (b"SwitchName=a Nodes=" + b"[" * 100_000 + b"\n", "brackets"),
    "a billion slots": (b"a slots=999999999999\n", "takes a whole number"),
    "rows without end": (b"GPU0 GPU1 CPU Affinity\n" + b"GPU0 X NV4 0-3\n" * 40_000, "no row GPU1"),
    "headers without end": (b"\tGPU0\tGPU1\n" * 40_000, "no row GPU0"),
    "ranks without end": (
        b"# busbw\n" + b"#  Rank  1 Group  0 Pid 1 on a device 0 [0x63] X\n" * 100_000,
        "without a row",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_error_within_bounds(name: str, tmp_path: Path) -> None:
    content, words = HOSTILE[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    tracemalloc.start()
    found = outcome(path, "gpu=h100")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, str)
    assert words in found
    assert str(path) in found
    assert peak < 20 * len(content) + 120 * 2**20


def test_a_file_larger_than_any_output_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(200 * MOST_BYTES)  # a sparse file of 12 GiB
    tracemalloc.start()
    assert "larger than 64 MiB" in str(outcome(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * MOST_BYTES


def test_utf16_is_read_as_windows_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_bytes(MATRIX.replace("\n", "\r\n").encode("utf-16"))
    assert isinstance(outcome(path, "gpu=h100"), Joined)


def test_the_command_ends_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(HOSTILE["alias bomb"][0])
    assert main(["probe", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("meshwright: ")
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared samples")
def test_samples_cut_in_the_middle(tmp_path: Path) -> None:
    for room in ("nvidia_smi_topo", "nccl_topo_xml", "rocm", "nccl_tests", "slurm", "k8s"):
        for sample in sorted((SHARED / "samples" / room).iterdir()):
            content = sample.read_bytes()
            path = tmp_path / sample.name
            for share in (0.2, 0.5, 0.9):
                path.write_bytes(content[: int(len(content) * share)])
                try:
                    outcome(path, "gpu=h100", "nodes=2")
                except RecordError as error:  # pragma: no cover - what a record refuses is led by the path
                    pytest.fail(f"{sample.name}: {error}")
