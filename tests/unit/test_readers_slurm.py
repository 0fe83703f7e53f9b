"""Slurm's topology: hostlists, trees, blocks, topology.yaml and what scontrol prints."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError, NotYetError
from planner.readers.topology.hostlists import expand
from planner.readers.topology.seen import SeenFabric
from planner.readers.topology.slurm import is_slurm, is_slurm_yaml, read_slurm, read_slurm_yaml
from planner.readers.topology.text import read_text
from planner.readers.topology.yaml_text import parse_yaml


def fabric(text: str, below: str | None = None) -> SeenFabric:
    (found,) = read_slurm(text, "topology.conf", below=below)
    return found


def shape(found: SeenFabric) -> list[tuple[str, tuple[int, ...]]]:
    return [(level.name, level.sizes) for level in found.levels]


# Hostlists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("rack[0-1]n[0-1]-ib", ["rack0n0-ib", "rack0n1-ib", "rack1n0-ib", "rack1n1-ib"]),
        ("[1101-1102]", ["1101", "1102"]),
        ("im[0],grp[23-24]", ["im0", "grp23", "grp24"]),
    ],
)
def test_hostlists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n[1-3", "a bracket is not closed"),
        ("n]1[", "in pairs"),
        ("n[1-[2-3]]", "never in one another"),
        ("n[3-1]", "runs backwards"),
        ("n[a-b]", "numbers and ranges"),
        ("n[]", "numbers and ranges"),
        ("a,,b", "no name of a host"),
        ("a b", "no name of a host"),
        ("n[1-1000000][1-1000000]", "names 1,000,000,000,000 hosts"),
        ("n[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]", "names 1,000,000,000 hosts"),
        ("n[1-99999999999999999999]", "numbers and ranges"),
        ("x" * 2_000_000, "2,000,000 characters"),
    ],
)
def test_hostlists_that_are_refused_before_a_name_is_made(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        expand(text)
    assert words in str(error.value)


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "r0c"]), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=8
    )
)
def test_ranges_are_as_long_as_they_say(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first}-{first + more}]" for name, first, more in parts)
    assert expand(text) == [f"{name}{n}" for name, first, more in parts for n in range(first, first + more + 1)]


# Trees and blocks --------------------------------------------------------------------------------------------------------

TREE = """\
# a comment
SwitchName=root Switches=s[0-1]
switchname=s0 nodes=n[00-03] LinkSpeed=100
SwitchName = s1 Nodes = \\
    n[04-07]   # another
"""


def test_a_tree() -> None:
    found = fabric(TREE)
    assert [host.name for host in found.hosts] == [f"n{number:02}" for number in range(8)]
    assert shape(found) == [("leaf", (4, 4))]


def test_one_switch_is_no_level() -> None:
    assert shape(fabric("SwitchName=s0 Nodes=n[1-4]")) == []


def test_what_scontrol_prints_is_the_same_tree() -> None:
    printed = (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[00-03]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[04-07]\n"
        "SwitchName=root Level=1 LinkSpeed=1 Nodes=n[00-07] Switches=s[0-1]\n"
    )
    assert (fabric(printed).hosts, shape(fabric(printed))) == (fabric(TREE).hosts, shape(fabric(TREE)))


def test_a_part_of_a_tree() -> None:
    assert [host.name for host in fabric(TREE, below="s1").hosts] == ["n04", "n05", "n06", "n07"]


def test_parallel_spines_count_as_one() -> None:
    text = "SwitchName=spineA Switches=l[0-1]\nSwitchName=spineB Switches=l[0-1]\nSwitchName=l0 Nodes=a\nSwitchName=l1 Nodes=b\n"
    found = fabric(text)
    assert shape(found) == [("leaf", (1, 1))]
    assert "have the same children" in found.notes[0]


def test_blocks_pair_up() -> None:
    text = "".join(f"BlockName=b{n} Nodes=n[{4 * n}-{4 * n + 3}]\n" for n in range(8)) + "BlockSizes=4,8,16,64\n"
    assert shape(fabric(text)) == [("block", (4,) * 8), ("block of 8", (2,) * 4), ("block of 16", (2, 2))]
    assert fabric(text).hosts[5].domain == "b1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=root Switches=s[0-1]\nSwitchName=s0 Nodes=a\n", "root names s1, and nothing describes s1"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n", "2 trees that no switch joins (a, b)"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "form a ring"),
        ("SwitchName=r Switches=a,b\nSwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "node n1 hangs on two switches"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "line 2: switch a is described twice"),
        ("SwitchName=a Nodes=\n", "Nodes= has no value"),
        ("SwitchName=a Nodes=ALL\n", "nodes=ALL names no nodes"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", "both SwitchName and BlockName"),
        ("BlockName=b Nodes=n[1-4]\nBlockSizes=4,12\n", "BlockSizes 4, 12: each is a power of two"),
        ("BlockName=b Nodes=n[1-4]\nBlockSizes=x\n", "BlockSizes=x"),
        ("BlockName=b Nodes=n[1-4]\nBlockSizes=8\n", "smaller than the least of BlockSizes"),
        ("BlockSizes=4\n", "names no block"),
        ("SwitchName=a Nodes=n[1-1000000][1-1000000]\n", "names 1,000,000,000,000 nodes in all"),
        ("".join(f"SwitchName=s{n} Nodes=n{n}x[1-400000]\n" for n in range(3)), "names 1,200,000 nodes in all"),
        ("SwitchName=a Nodes=n1\nSwitchNames=b Nodes=n2\n", "line 2: 'SwitchNames' begins no line"),
    ],
)
def test_what_is_damaged_is_told(text: str, words: str) -> None:
    assert is_slurm(text)
    with pytest.raises(InputError) as error:
        fabric(text)
    assert words in str(error.value)


def test_rings_are_told_by_name() -> None:
    with pytest.raises(NotYetError, match="ring"):
        fabric("RingName=r Nodes=n[1-4]")


# topology.yaml -----------------------------------------------------------------------------------------------------------

YAML = """\
---
- topology: flat
  flat: true
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: node[03-04]
- topology: topo2
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "node[01-02]"}
      - {block: b2, nodes: "node[03-04]"}
- topology: torus
  torus3d: {toruses: []}
"""


def yaml_fabric(text: str, topology: str | None = None) -> SeenFabric:
    data = parse_yaml(text, "topology.yaml")
    assert is_slurm_yaml(data)
    (found,) = read_slurm_yaml(data, "topology.yaml", topology=topology)
    return found


def test_the_default_topology_and_another() -> None:
    assert shape(yaml_fabric(YAML)) == [("leaf", (2, 2))]
    assert shape(yaml_fabric(YAML, "topo2")) == [("block", (2, 2))]


@pytest.mark.parametrize(
    ("topology", "kind", "words"),
    [
        ("flat", InputError, "tells no nodes"),
        ("torus", NotYetError, "torus3d is not read yet"),
        ("none", InputError, "topology=none is not there; it has flat, topo1, topo2, torus"),
    ],
)
def test_topologies_that_cannot_be_had(topology: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        yaml_fabric(YAML, topology)
    assert words in str(error.value)


def test_no_default_among_several() -> None:
    with pytest.raises(InputError, match="none of them the default"):
        yaml_fabric(YAML.replace("  cluster_default: true\n", ""))


# The samples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hosts", "levels"),
    [
        ("slurm_testcase1.topology.conf", 10000, [("leaf", 500), ("spine", 26), ("core", 2)]),
        ("slurm_testcase2.topology.conf", 10000, [("leaf", 500), ("spine", 26), ("core", 1)]),
        ("slurm_testcase3.topology.conf", 400, [("leaf", 20), ("spine", 2)]),
        ("slurm_unit_backfill.topology.conf", 32, [("block", 8), ("block of 8", 4), ("block of 16", 2)]),
        ("topograph_expected.slinky-dra-block.conf", 96, [("block", 12), ("block of 16", 6), ("block of 32", 3)]),
    ],
)
def test_samples(shared: Path, name: str, hosts: int, levels: list[tuple[str, int]]) -> None:
    found = fabric(read_text(shared / "samples" / "slurm" / name))
    assert len(found.hosts) == hosts
    assert [(level.name, len(level.sizes)) for level in found.levels] == levels


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slurm_testcase4.topology.conf", "2 trees that no switch joins (grp10, grp11)"),
        ("slurm_testcase6.topology.conf", "3 trees that no switch joins (spineA, spineB, leafC)"),
    ],
)
def test_samples_that_are_refused_with_a_choice(shared: Path, name: str, words: str) -> None:
    text = read_text(shared / "samples" / "slurm" / name)
    with pytest.raises(InputError) as error:
        fabric(text)
    assert words in str(error.value)
    assert len(fabric(text, below=words.split("(")[1].split(",")[0]).hosts) in (200, 16)


def test_a_sample_whose_tree_is_a_text(shared: Path) -> None:
    with pytest.raises(InputError, match="list 'switches' is needed here, and the text"):
        yaml_fabric(read_text(shared / "samples" / "slurm" / "tree_not_dict.yaml"))
