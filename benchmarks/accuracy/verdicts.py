"""Does a published run fit? Held against what was answered before, so that no change turns yes into no, or back, unsaid.

python -m benchmarks.accuracy.verdicts PUBLISHED                       compare; exit code 1 where a row turned
python -m benchmarks.accuracy.verdicts PUBLISHED --because "TEXT"      write the new answers; TEXT is a line of CHANGELOG.md
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_models.calibrations import identity, shipped
from cost_models.memory import memory_upper, usable_bytes
from cost_models.peaks import memory_report
from cost_models.records import Calibration
from planner.predict import verdict_of
from planner.readers.runs import decision_of_run, read_rows, read_run

EXPECTED = Path(__file__).with_name("verdicts.json")
CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
FILES = ("throughput.csv", "memory.csv")
UNANSWERED = "unanswered"

Verdicts = Mapping[str, Mapping[str, str]]
"""File -> row -> ok, risky, no or unanswered."""


def verdicts(folder: Path, calibration: Calibration) -> dict[str, dict[str, str]]:
    """Of every row as it stands in the tables, by its fullest rank."""
    found: dict[str, dict[str, str]] = {}
    for name in FILES:
        found[name] = {row["id"]: _verdict(row, calibration) for row in read_rows(folder / name)}
    return found


def _verdict(row: Mapping[str, str], calibration: Calibration) -> str:
    try:
        run = read_run(row, calibration)
        fullest = max(device.peak_bytes for device in memory_report(run.problem, decision_of_run(run)))
    except ValueError:
        return UNANSWERED
    return verdict_of(fullest, memory_upper(run.problem, fullest), usable_bytes(run.problem)).value


def turned(before: Verdicts, after: Verdicts) -> list[str]:
    """Rows that fitted and do not, or the other way round, or are no longer answered; one line each."""
    lines = []
    for name, rows in before.items():
        for one, was in rows.items():
            now = after.get(name, {}).get(one, UNANSWERED)
            if was != UNANSWERED and (now == UNANSWERED or (was == "no") != (now == "no")):
                lines.append(f"{name} {one}: {was} -> {now}")
    return lines


def expectation(found: Verdicts, calibration: Calibration, because: str) -> dict[str, Any]:
    """The committed file: rows by verdict, the calibration that gave them, and the word in the changelog."""
    by_verdict = {
        name: {
            verdict: " ".join(one for one, is_ in rows.items() if is_ == verdict)
            for verdict in sorted(set(rows.values()))
        }
        for name, rows in found.items()
    }
    return {"calibration": identity(calibration), "changelog": because, "verdicts": by_verdict}


def expected() -> tuple[Verdicts, str, str]:
    """(verdicts, line of the changelog, calibration) of the committed file."""
    data = json.loads(EXPECTED.read_text(encoding="utf-8"))
    found = {
        name: {one: verdict for verdict, ids in rows.items() for one in ids.split()}
        for name, rows in data["verdicts"].items()
    }
    return found, data["changelog"], data["calibration"]


def in_changelog(text: str) -> bool:
    """The changelog says these words, whatever its lines are broken like."""
    return " ".join(text.split()) in " ".join(CHANGELOG.read_text(encoding="utf-8").split())


ADVICE = (
    "if that is meant, say so in a line of CHANGELOG.md, then run "
    '`python -m benchmarks.accuracy.verdicts PUBLISHED --because "that line"` and commit verdicts.json'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, or writes; 0 = nothing turned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.verdicts", description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("--because", metavar="TEXT", help="a line of CHANGELOG.md: write the new answers")
    arguments = parser.parse_args(argv)
    calibration = shipped()
    found = verdicts(arguments.published, calibration)
    if arguments.because is not None:
        if not arguments.because.strip() or not in_changelog(arguments.because):
            print(f"CHANGELOG.md does not say {arguments.because!r}: write the line there first", file=sys.stderr)
            return 2
        text = json.dumps(expectation(found, calibration, arguments.because), indent=1, ensure_ascii=False)
        EXPECTED.write_text(text + "\n", encoding="utf-8")
        return 0
    lines = turned(expected()[0], found)
    print("\n".join([*lines, ADVICE] if lines else ["no row turned"]))
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
