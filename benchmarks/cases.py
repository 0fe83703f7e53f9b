"""What `check` says of layouts that people reported: the codes that are expected beside those that are found, and the verdict.

The cases lie beside the published runs, in a folder `cases`; tests/unit/test_cases.py holds the same list, and what each case's
message says. A case states only what its report stated, so `check` judges many of them by few laws.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import benchmark
from planner.check import check
from planner.errors import MeshwrightError


@benchmark("cases")
def cases_judged(published: Path | None) -> Mapping[str, Any]:
    """One row a case, and how many came out as expected. FileNotFoundError where there are no cases."""
    folder = (published or Path()).resolve().parent / "cases"
    paths = sorted(folder.glob("*.json")) if published is not None else []
    if not paths:
        raise FileNotFoundError(f"{folder} is absent")
    rows = [_row(json.loads(path.read_text(encoding="utf-8")), path) for path in paths]
    counts = Counter("agreed" if row["agreed"] else "differs" for row in rows)
    found = {
        "cases": len(rows),
        "agreed": counts["agreed"],
        "with_expected_codes": sum(bool(row["expected"]) for row in rows),
        "feasibility_known": sum(row["known_feasible"] is not None for row in rows),
        "verdicts": dict(Counter(row["verdict"] for row in rows)),
        "codes": dict(sorted(Counter(code for row in rows for code in row["found"]).items())),
        "rows": rows,
    }
    return {**found, "text": _text(found)}


def _row(case: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Expected beside found; `agreed`: the same codes, and refused exactly where the report says that it cannot run."""
    feasible = case.get("expect_feasible")
    asked = {
        "id": case["id"],
        "framework": (case.get("their_config") or {}).get("framework"),
        "expected": sorted(case["expect_codes"]),
        "known_feasible": feasible,
    }
    try:
        answer = check(path)
    except MeshwrightError as error:
        told = str(error).splitlines()[0]
        return {**asked, "found": {}, "verdict": "error", "agreed": False, "told": told}
    found = {finding["code"]: str(finding["severity"]) for finding in answer["findings"]}
    agreed = set(found) == set(asked["expected"])
    if feasible is not None:
        agreed &= (answer["verdict"] == "no") == (feasible is False)
    return {
        **asked,
        "found": dict(sorted(found.items())),
        "verdict": str(answer["verdict"]),
        "agreed": agreed,
        "unchecked": len(answer["unchecked"]),
    }


def _text(found: Mapping[str, Any]) -> str:
    """The result as a table; cases of which nothing is expected or found in one line at the end."""
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    told = [row for row in rows if row["expected"] or row["found"] or not row["agreed"]]
    lines = [
        f"{found['agreed']} of {found['cases']} reported cases come out as expected; {found['with_expected_codes']} expect codes",
        "",
        f"{'case':6} {'verdict':7} {'agreed':6}  {'expected':62} found",
    ]
    for row in told:
        mine = ", ".join(f"{code} ({severity})" for code, severity in row["found"].items()) or "none"
        theirs = ", ".join(row["expected"]) or "none"
        lines.append(f"{row['id']:6} {row['verdict']:7} {'yes' if row['agreed'] else 'NO':6}  {theirs:62} {mine}")
    silent = [row["id"] for row in rows if row not in told]
    lines += ["", f"nothing expected and nothing found ({len(silent)}): {' '.join(silent)}"]
    return "\n".join(lines)
