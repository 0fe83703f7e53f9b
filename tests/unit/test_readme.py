"""The README's commands run, and print what it says they print."""

import re
import shlex
from pathlib import Path

import pytest

from executor.cli import main

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```\n\$ meshwright (?P<command>[^\n]+)\n(?P<printed>.*?)^```$", re.MULTILINE | re.DOTALL)
TIMED = re.compile(r"\((highs|cbc), [0-9.]+ s\)")
"""What no two runs print alike."""

REQUEST = """\
{"model": "llama3-70b", "cluster": "h100x64", "workload": {"seq": 8192, "gbs": 512},
 "runtime": "megatron", "layout": "tp8 pp4 dp2 mbs1 zero1 rc=full"}
"""


def test_the_commands_print_what_the_readme_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("request.json").write_text(REQUEST, encoding="utf-8")

    def rerun(block: re.Match[str]) -> str:
        assert main(shlex.split(block["command"])) == 0, block["command"]
        return (
            f"```\n$ meshwright {block['command']}\n{TIMED.sub('(highs, 1 s)', capsys.readouterr().out).rstrip()}\n```"
        )

    assert len(BLOCK.findall(text)) == 4
    fresh = BLOCK.sub(rerun, text)
    if request.config.getoption("--update-golden"):
        README.write_text(fresh, encoding="utf-8")
    assert fresh == README.read_text(encoding="utf-8"), "the README differs; --update-golden writes what is printed now"
    assert REQUEST.strip() in fresh


def test_the_readme_leads_to_files_that_exist() -> None:
    text = README.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
