"""`meshwright probe FILE...`: text, JSON, picture, and the way back through `--cluster`."""

import json
from pathlib import Path

import pytest

from cost_models.records import Cluster, from_json
from executor.cli import main
from planner.readers.clusters import read_cluster, read_joined
from tests.unit.test_fabric_findings import matrix, off
from tests.unit.test_readers_nccl_tests import SIZES, table

CONF = "SwitchName=r Switches=a,b\nSwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A node with a GPU off NVLink, a tree of four nodes, and a measured table."""
    (tmp_path / "topo.txt").write_text(matrix(cells=off(2), nics=4))
    (tmp_path / "topology.conf").write_text(CONF)
    (tmp_path / "all_reduce.txt").write_text(table("all_reduce", 32, SIZES))
    return [str(tmp_path / name) for name in ("topo.txt", "topology.conf", "all_reduce.txt")]


def test_the_text_draws_and_judges(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *files, "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    for words in (
        "+- 2 x leaf, 2 below each",
        "+- 4 x dgx-h100: 8 h100 = nvlink4 450 GB/s each = 4 x ib-ndr",
        "node 0: 14%: GPU 2 has no NVLink",
        "verdict    broken: ",
        "GPU_OFF_NVLINK",
        "FEW_INTERFACES",
        "assumed, since no file says it",
        "all_reduce     32",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 160


def test_json_is_one_document_that_cluster_reads_back(
    files: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "probe.json"
    assert main(["probe", *files, "gpu=h100", "--json", "-o", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert document["verdict"] == "broken"
    assert {finding["code"] for finding in document["findings"]} >= {"GPU_OFF_NVLINK", "FEW_INTERFACES"}
    again = read_joined([str(out)])
    seen = read_joined([*files, "gpu=h100"])
    assert again.cluster == seen.cluster == from_json(Cluster, document["cluster"])
    assert again.measured == seen.measured
    assert read_cluster(",".join([*files, "gpu=h100"])) == again.cluster


def test_a_picture(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fabric.png"
    assert main(["probe", *files, "gpu=h100", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {out}" in capsys.readouterr().err
    assert main(["probe", "h100x64+a100-80x128", "-o", str(out)]) == 0


def test_a_preset_is_shown_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    assert main(["probe", "h100x64", "--json", "-o", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert from_json(Cluster, document) == read_cluster("h100x64") == read_cluster(str(out))


def test_a_file_is_not_written_over(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *files, "gpu=h100", "-o", files[0]]) == 2
    assert "this file is read, and would be lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h100"], "goes with pasted files"),
        (["gpu=h100"], "facts alone"),
        (["h100x8", "--ranks", "2"], "is for links measured here"),
        (["h100x8", "h100x16"], "both describe the whole cluster"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_takes_the_measured_curves(files: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same layout on the same files, with and without the table: other seconds, and the calibration says why."""
    Path(files[0]).write_text(matrix(nics=4))  # what is slow takes no curve: those are of links as they should be
    layout = ["--model", "llama3-8b", "--batch", "32", "--seq", "4096", "--layout", "dpr32 mbs1"]
    steps = []
    for cluster in (",".join([*files[:2], "gpu=h100"]), ",".join([*files, "gpu=h100"])):
        main(["predict", *layout, "--cluster", cluster, "--json"])
        steps.append(json.loads(capsys.readouterr().out)["predicted"]["step_s"])
    assert steps[0] != steps[1]
    probe = tmp_path / "probe.json"
    assert main(["probe", *files, "gpu=h100", "-o", str(probe)]) == 0
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps(
            {"model": "llama3-8b", "cluster": str(probe), "workload": {"gbs": 32, "seq": 4096}, "layout": "dpr32 mbs1"}
        )
    )
    capsys.readouterr()
    main(["predict", str(request), "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["step_s"] == pytest.approx(steps[1])


def test_the_readme_prints_a_verdict_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "topo.txt"
    path.write_text(matrix(cells=off(2)))
    assert main(["probe", str(path), "gpu=b200"]) == 0
    text = capsys.readouterr().out
    assert text[text.index("verdict ") : text.index("\n\nassumed")] in readme


def test_help_names_every_word_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "clusters"]) == 0
    text = capsys.readouterr().out
    for words in ("nccl-tests (table or -J)", "hostfile", "gpu=", "inter=", "oversubscription="):
        assert words in text


def test_files_that_do_not_name_the_gpu_are_shown_without_it(
    files: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["probe", *files[:2]]) == 0
    text = capsys.readouterr().out
    for words in ("4 nodes of 8 GPUs", "+- 2 x leaf", "GPU_OFF_NVLINK", "missing", "add the output of `nvidia-smi -L`"):
        assert words in text
    assert "h100x" not in text.split("missing")[0]
    assert "costs" not in text
    assert main(["probe", *files[:2], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"] is None
    assert document["node"]["domains"][1:] == [[2]]
    # what is written, or planned on, must name it
    assert main(["probe", *files[:2], "-o", str(tmp_path / "x.json")]) == 2
    assert (
        main(["predict", "--model", "llama3-8b", "--cluster", ",".join(files[:2]), "--batch", "8", "--seq", "4096"])
        == 2
    )
    assert "no file names the GPU" in capsys.readouterr().err
