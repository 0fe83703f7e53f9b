"""How far off are predictions of published runs? python -m benchmarks.accuracy PUBLISHED_DIR [-o FOLDER] [--against RESULT.json]

Writes DATE-accuracy.json (every number), .txt (the table that is printed) and .png (predicted over measured) to the folder.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.anchoring import anchored
from benchmarks.accuracy.causes import cause
from benchmarks.accuracy.fit_published import Configuration, configurations, fit, linearised, priors
from benchmarks.accuracy.memory import memory_scores, refused_though_ran
from benchmarks.accuracy.picture import picture
from benchmarks.accuracy.pricing import Pricer
from benchmarks.accuracy.published import Table, read_published
from benchmarks.accuracy.report import against_text, report_text
from benchmarks.accuracy.scores import asked_widths, baseline_logs, by_source, coverage, errors, macro, orders, worst
from benchmarks.accuracy.splits import Draw, Predicted, after_few_rows, in_sample, left_out
from cost_models.calibrations import identity, shipped


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit code 2 where the published tables are not there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("published", type=Path, help="folder with throughput.csv and memory.csv")
    parser.add_argument("-o", dest="out", type=Path, default=Path("benchmark-results"), help="folder of the results")
    parser.add_argument("--against", type=Path, metavar="RESULT.json", help="which rows moved since this result")
    arguments = parser.parse_args(argv)
    missing = [name for name in ("throughput.csv", "memory.csv") if not (arguments.published / name).is_file()]
    if missing:
        print(f"{arguments.published}: there is no {' and no '.join(missing)}", file=sys.stderr)
        return 2
    before = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else None
    result, pairs = measured(arguments.published)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{date.today().isoformat()}-accuracy"
    text = report_text(result)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stem.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    picture(pairs, stem.with_suffix(".png"))
    print(text)
    if before is not None:
        print("\n" + against_text(before, result))
    print(f"\nwrote {stem}.json, .txt and .png")
    return 0


def say(started: float, text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)


def measured(folder: Path) -> tuple[dict[str, Any], list[tuple[str, float, float]]]:
    """The result, and (source, measured, predicted) of each configuration for the picture."""
    started = time.monotonic()

    def progress(text: str) -> None:
        say(started, text)

    calibration = shipped()
    before, pricer = priors(calibration), Pricer()
    table = read_published(folder / "throughput.csv", calibration)
    configured = configurations(table.rows)
    seen = in_sample(pricer, configured, calibration)
    progress(f"{len(configured)} configurations predicted by the shipped calibration")
    linear = linearised(pricer, configured, calibration)
    refitted = fit(pricer, linear, before)
    progress("slopes taken, refitted on all")
    by_model, _, _ = left_out(pricer, linear, before, lambda one: one.model, lambda text: None, exact=False)
    progress("each model left out once")
    strangers, calibrations, dropped = left_out(pricer, linear, before, lambda one: one.source, progress)
    few = after_few_rows(pricer, configured, calibrations, progress)
    largest = anchored(pricer, configured, calibrations, progress)
    logs = {
        name: _logs(configured, found)
        for name, found in (("in_sample", seen), ("by_model", by_model), ("by_source", strangers))
    }
    memory_table = read_published(folder / "memory.csv", calibration, memory=True)
    memory = memory_scores(memory_table)
    progress("memory")
    result = {
        "schema_version": 1,
        "kind": "accuracy",
        "date": date.today().isoformat(),
        "machine": _machine(),
        "versions": {name: version(name) for name in ("numpy", "networkx")} | {"python": platform.python_version()},
        "inputs": {name: _sha256(folder / name) for name in ("throughput.csv", "memory.csv")},
        "calibration": {
            "identity": identity(calibration),
            "fitted_coefficients": len(linear.names),
            "refit_moves": _moves(calibration.coefficients, refitted.coefficients, linear.names),
        },
        "seconds": round(time.monotonic() - started, 1),
        "step_time": {
            "rows": _rows(table),
            "configurations": len(configured),
            "in_sample": by_source(configured, logs["in_sample"]),
            "leave_one_model_out": by_source(configured, logs["by_model"]),
            "leave_one_source_out": by_source(configured, logs["by_source"]),
            "baseline": by_source(configured, baseline_logs(configured)),
            "after_few_rows": _few(few),
            "anchoring": largest,
            "dropped_with_a_source": {source: list(names) for source, names in dropped.items()},
            "order": {
                "in_sample": orders(configured, [one.step_s for one in seen]),
                "leave_one_source_out": orders(configured, [one.step_s for one in strangers]),
            },
            "intervals": {
                "in_sample": coverage(configured, seen),
                "leave_one_model_out": coverage(configured, by_model),
                "leave_one_source_out": coverage(configured, strangers),
            },
            "asked_widths": {
                "leave_one_model_out": asked_widths(configured, by_model),
                "leave_one_source_out": asked_widths(configured, strangers),
            },
            "worst": worst(configured, logs["in_sample"], cause),
            "predictions": {
                one.ids[0]: {"ids": list(one.ids), "measured_s": one.measured_s, "step_s": round(answer.step_s, 6)}
                for one, answer in zip(configured, seen, strict=True)
            },
        },
        "memory": {"rows": _rows(memory_table), **memory, "timed_but_refused": refused_though_ran(table)},
    }
    return result, [(one.source, one.measured_s, answer.step_s) for one, answer in zip(configured, seen, strict=True)]


def _logs(configured: Sequence[Configuration], found: Sequence[Predicted]) -> list[float]:
    return [float(np.log(answer.step_s / one.measured_s)) for one, answer in zip(configured, found, strict=True)]


def _few(few: Mapping[int, Mapping[str, Sequence[Draw]]]) -> dict[str, Any]:
    scored = {}
    for count, sources in few.items():
        found = {
            source: {
                **errors(log for draw in draws for log in draw.after),
                "worse": round(float(np.mean([draw.worse for draw in draws])), 3),
                "most_rise": round(max(0.0, *(draw.rise for draw in draws)), 4),
            }
            for source, draws in sorted(sources.items())
        }
        scored[str(count)] = {**found, "macro": macro(found)}
    return scored


def _moves(shipped_ones: Mapping[str, Any], refitted: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Coefficients that a refit today would move by more than 2%: the shipped calibration was fitted with other code or rows."""
    moved = {name: refitted[name].value / shipped_ones[name].value - 1 for name in names}
    return {name: round(change, 3) for name, change in moved.items() if abs(change) > 0.02}


def _rows(table: Table) -> dict[str, Any]:
    answered: dict[str, int] = dict.fromkeys(table.sources, 0)
    for row in table.rows:
        answered[row.source] += 1
    return {
        "answered": answered,
        "of": dict(table.sources),
        "kept_apart": dict(table.apart),
        "not_priced": dict(table.refused),
        "corrected": dict(table.corrected),
        "source_of": {one: table.source_of[one] for one in (*table.apart, *table.refused)},
    }


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
