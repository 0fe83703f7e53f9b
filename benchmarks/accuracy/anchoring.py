"""What do a source's smallest runs say of its largest? python -m benchmarks.accuracy.anchoring PUBLISHED [-o FOLDER]

Each published source in the place of a user who has a node or two: a calibration that has seen none of its rows is refitted,
as `compare --fit` does it, on small runs, and predicts large ones. Two ways:

    own      what `explain --anchor` makes: of each model, with all its layers or fewer, in one sequence length, precision and
             device, the runs on the fewest GPUs predict those on the most
    others   the source's runs on the fewest GPUs, of whatever models, predict each model's on the most
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.fit_published import Configuration, configurations, linearised, priors
from benchmarks.accuracy.pricing import Pricer
from benchmarks.accuracy.published import read_published
from benchmarks.accuracy.scores import errors, macro
from benchmarks.accuracy.splits import Predicted, Progress, left_out, predicted, refitted
from cost_models.calibrations import identity, shipped
from cost_models.records import Calibration, Positions

LEAST = 3
"""Configurations that a user measures at least: of the fewest GPUs on which there are so many."""
APART = 4
"""Large runs have at least so many times the GPUs of the largest small one."""
GOAL = (0.04, 0.10)
"""Median and 90th percentile, macro over sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Runs of one source, by their GPUs."""

    small: tuple[Configuration, ...]
    """On few: what is measured."""
    large: tuple[Configuration, ...]
    """On many: what is predicted."""


def own_halves(configured: Sequence[Configuration]) -> list[Halves]:
    """Of each model, sequence, precision and device of one source the runs on the fewest GPUs and on the most, where these are
    far enough apart."""
    models: dict[str, list[Configuration]] = {}
    for one in configured:
        models.setdefault(_kept(one), []).append(one)
    found = []
    for mine in models.values():
        worlds = [one.run.layout.world for one in mine]
        if max(worlds) >= APART * min(worlds):
            found.append(
                Halves(
                    small=tuple(one for one in mine if one.run.layout.world == min(worlds)),
                    large=tuple(one for one in mine if one.run.layout.world == max(worlds)),
                )
            )
    return found


def _kept(one: Configuration) -> str:
    """What an anchor keeps: the model's dimensions but for its layers (learned positions follow the sequence), sequence, precision
    and device."""
    problem = one.run.problem
    model, workload = problem.model, problem.workload
    moe = None if model.moe is None else replace(model.moe, num_dense_layers=0)
    model = replace(model, name="", num_layers=1, moe=moe, positions=Positions.NONE, max_positions=0)
    return repr((model, workload.seq, workload.precision, problem.cluster.pools[0].kind.device.name))


def other_halves(configured: Sequence[Configuration]) -> list[Halves]:
    """The source's runs on the fewest GPUs, and of each model those on the most."""
    worlds = sorted({one.run.layout.world for one in configured})
    most = next(world for world in worlds if _up_to(configured, world) >= LEAST or world == worlds[-1])
    largest: dict[str, int] = {}
    for one in configured:
        largest[one.model] = max(largest.get(one.model, 0), one.run.layout.world)
    large = tuple(
        one for one in configured if one.run.layout.world == largest[one.model] and one.run.layout.world >= APART * most
    )
    small = tuple(one for one in configured if one.run.layout.world <= most)
    return [Halves(small=small, large=large)] if large else []


def _up_to(configured: Sequence[Configuration], world: int) -> int:
    return sum(one.run.layout.world <= world for one in configured)


WAYS: Mapping[str, Callable[[Sequence[Configuration]], list[Halves]]] = {"own": own_halves, "others": other_halves}
"""Way -> the runs of one source that are measured and predicted together."""


def anchored(
    pricer: Pricer, configured: Sequence[Configuration], calibrations: Mapping[str, Calibration], progress: Progress
) -> dict[str, Any]:
    """Way -> sources and macro: errors on the large runs before and after the refit, coverage, what the time rests on.

    calibrations: source -> the calibration that has not seen it.
    """
    found: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    for source, calibration in calibrations.items():
        mine = [one for one in configured if one.source == source]
        for way, cut in WAYS.items():
            parts = cut(mine)
            if parts:
                found[way][source] = _scored(pricer, parts, calibration)
        progress(f"anchored: {source}")
    return {
        way: {
            "sources": rows,
            "macro": {
                name: macro({source: row[name] for source, row in rows.items()}) for name in ("unseen", "anchored")
            },
        }
        for way, rows in found.items()
    }


def _scored(pricer: Pricer, parts: Sequence[Halves], calibration: Calibration) -> dict[str, Any]:
    before: list[float] = []
    after: list[tuple[Configuration, Predicted]] = []
    for part in parts:
        learnt = refitted(pricer, part.small, calibration)
        before += [predicted(pricer, one, calibration).step_s for one in part.large]
        after += [(one, predicted(pricer, one, learnt)) for one in part.large]
    measured = np.log([one.measured_s for one, _ in after])
    inside = [answer.low_s <= one.measured_s <= answer.high_s for one, answer in after]
    return {
        "small_gpus": _range([one for part in parts for one in part.small]),
        "large_gpus": _range([one for part in parts for one in part.large]),
        "small": sum(len(part.small) for part in parts),
        "unseen": errors(np.log(before) - measured),
        "anchored": errors(np.log([answer.step_s for _, answer in after]) - measured),
        "inside_80": round(float(np.mean(inside)), 3),
        "table_share": round(float(np.mean([answer.basis["table"] for _, answer in after])), 3),
        "rows": {
            one.ids[0]: {"model": one.model, "measured_s": one.measured_s, "step_s": round(answer.step_s, 6)}
            for one, answer in after
        },
    }


def _range(configured: Sequence[Configuration]) -> list[int]:
    worlds = [one.run.layout.world for one in configured]
    return [min(worlds), max(worlds)]


_TITLES = {
    "own": "each model's runs on the fewest GPUs predict its runs on the most",
    "others": "the source's runs on the fewest GPUs predict each model's on the most",
}


def anchoring_text(found: Mapping[str, Any]) -> str:
    """The tables."""
    lines = []
    for way, title in _TITLES.items():
        lines += [
            f"from few GPUs to many: {title}; median / p90 (bias), %",
            f"  {'source':34} {'GPUs':>20} {'runs':>9}  {'nothing measured':>18}  {'anchored':>18}  {'inside 80%':>10}",
        ]
        for source, row in found[way]["sources"].items():
            gpus = f"{_span(row['small_gpus'])} -> {_span(row['large_gpus'])}"
            runs = f"{row['small']} -> {row['anchored']['n']}"
            lines.append(
                f"  {source[:34]:34} {gpus:>20} {runs:>9}  {_cell(row['unseen']):>18}  {_cell(row['anchored']):>18}  "
                f"{row['inside_80']:10.0%}"
            )
        whole = found[way]["macro"]
        lines.append(f"  {'macro':34} {'':20} {'':9}  {_cell(whole['unseen']):>18}  {_cell(whole['anchored']):>18}")
    lines.append(f"  goal: {100 * GOAL[0]:.0f} / {100 * GOAL[1]:.0f}%")
    return "\n".join(lines)


def _span(worlds: Sequence[int]) -> str:
    least, most = worlds
    return f"{least}" if least == most else f"{least}..{most}"


def _cell(scores: Mapping[str, Any]) -> str:
    return f"{100 * scores['median']:.1f} / {100 * scores['p90']:.1f} ({100 * scores['bias']:+.0f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this part of the benchmark alone; exit code 2 where the published table is not there."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.anchoring", description=__doc__.splitlines()[0]
    )
    parser.add_argument("published", type=Path, help="folder with throughput.csv")
    parser.add_argument("-o", dest="out", type=Path, default=Path("benchmark-results"), help="folder of the result")
    arguments = parser.parse_args(argv)
    table = arguments.published / "throughput.csv"
    if not table.is_file():
        print(f"{arguments.published}: there is no throughput.csv", file=sys.stderr)
        return 2

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    calibration, pricer = shipped(), Pricer()
    configured = configurations(read_published(table, calibration).rows)
    linear = linearised(pricer, configured, calibration)
    progress("slopes taken")
    _, calibrations, _ = left_out(pricer, linear, priors(calibration), lambda one: one.source, progress, exact=False)
    found = anchored(pricer, configured, calibrations, progress)
    result = {
        "schema_version": 1,
        "kind": "anchoring",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "calibration": identity(calibration),
        "goal": {"median": GOAL[0], "p90": GOAL[1]},
        **found,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{date.today().isoformat()}-anchoring"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = anchoring_text(found)
    stem.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nwrote {stem}.json and .txt")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
