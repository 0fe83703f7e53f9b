"""What the planner would have picked, beside what the sources of published sweeps ran.

A sweep is one model on one cluster with one batch, run under at least four layouts. Restricted to the layouts that were run, the
planner picks one; its regret is how much longer that one was measured to take than the best of them. From the whole space it
picks what it likes, once with the source's recompute and once with any; there only a predicted gain can be told.

The shipped calibration was fitted on these runs among others; `python -m benchmarks.accuracy` tells the regret of calibrations
that have not seen the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.accuracy.fit_published import Configuration, configurations
from benchmarks.accuracy.pricing import Pricer
from benchmarks.accuracy.published import read_published
from benchmarks.accuracy.scores import sweeps
from benchmarks.registry import benchmark
from cost_models.calibrations import shipped
from cost_models.records import Layout
from planner.choose import Answer, choose
from planner.errors import MeshwrightError
from planner.predict import simulated
from planner.readers.pins import parse_pins
from planner.search.best_first import search
from planner.search.pooled import price
from planner.search.space import enumerate_cells

GOAL_REGRET = 0.02
"""Of the mean over sweeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The runs of one sweep, the fastest first, and what is predicted of each."""

    runs: Sequence[Configuration]
    predicted_s: Sequence[float]

    @property
    def recompute(self) -> str:
        """The kind that all its runs had, as far as they had any."""
        return max((kind for run in self.runs for kind in run.run.counts), default="none")


def read_sweeps(folder: Path | None) -> list[Sweep]:
    """All sweeps of throughput.csv. FileNotFoundError where there is none."""
    path = (folder or Path()) / "throughput.csv"
    if folder is None or not path.is_file():
        raise FileNotFoundError(f"{path} is absent")
    pricer, configured = Pricer(), configurations(read_published(path, shipped()).rows)
    found = []
    for group in sweeps(configured):
        runs = sorted((configured[place] for place in group), key=lambda run: run.measured_s)
        steps = [simulated(run.run.problem, pricer.decision(run.run)).simulation.step_s for run in runs]
        found.append(Sweep(runs=runs, predicted_s=steps))
    return found


@benchmark("picks")
def picks(published: Path | None) -> Mapping[str, Any]:
    """By sweep: the pick among what was run with its regret, and the picks from the whole space with their predicted gain."""
    rows = [_row(sweep) for sweep in read_sweeps(published)]
    by_source: dict[str, list[float]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row["regret"])
    regret = {source: round(mean(found), 4) for source, found in by_source.items()}
    overall = round(mean(row["regret"] for row in rows), 4)
    return {
        "goal_mean_regret": GOAL_REGRET,
        "mean_regret": overall,
        "reached": overall <= GOAL_REGRET,
        "mean_regret_by_source": regret,
        "sweeps": rows,
        "text": _text(rows, overall),
    }


def _row(sweep: Sweep) -> dict[str, Any]:
    best, problem = sweep.runs[0], sweep.runs[0].run.problem
    place = _picked_by_search(sweep)
    first = min(range(len(sweep.runs)), key=lambda one: sweep.predicted_s[one])
    return {
        "source": best.source,
        "model": best.model,
        "parameters_b": round(problem.model.num_params / 1e9, 1),
        "gpus": f"{best.run.layout.world} x {problem.cluster.pools[0].kind.device.name}",
        "batch": problem.workload.gbs,
        "layouts_run": len(sweep.runs),
        "best": {"layout": _short(best.run.layout), "measured_s": round(best.measured_s, 2), "ids": list(best.ids)},
        "picked": {
            "layout": _short(sweep.runs[place].run.layout),
            "measured_s": round(sweep.runs[place].measured_s, 2),
            "predicted_s": round(sweep.predicted_s[place], 2),
            "measured_rank": place + 1,
        },
        "regret": round(sweep.runs[place].measured_s / best.measured_s - 1, 4),
        "regret_of_least_prediction": round(sweep.runs[first].measured_s / best.measured_s - 1, 4),
        "whole_space": {
            f"recompute {sweep.recompute} as they had it": _from_all(sweep, f"recompute={sweep.recompute}"),
            "any recompute": _from_all(sweep, ""),
        },
    }


def _picked_by_search(sweep: Sweep) -> int:
    """The place of the run whose layout the search picks of those that were run; all of them fitted."""
    problem, layouts = sweep.runs[0].run.problem, [run.run.layout for run in sweep.runs]
    space = enumerate_cells(
        model=problem.model,
        cluster=problem.cluster,
        workload=problem.workload,
        runtime=problem.runtime,
        worlds=(),
        extra=layouts,
    )
    priced = price(problem, replace(space, recompute_kinds=(sweep.recompute,))).without_limit()
    chosen = search(priced).chosen.cell.layout
    return next(place for place, layout in enumerate(layouts) if replace(layout, recompute="none") == chosen)


def _from_all(sweep: Sweep, pins: str) -> dict[str, Any]:
    """The plan on the same GPUs, and how much less time than the best of the source's layouts is predicted of it."""
    best = sweep.runs[0]
    try:
        answer = choose(best.run.problem, pins=parse_pins(pins), worlds=(best.run.layout.world,))
    except MeshwrightError as error:
        return {"no_plan": str(error).splitlines()[0]}
    return {
        "layout": _short(answer.layout(answer.choice.chosen)),
        "predicted_s": round(answer.choice.simulated_s, 2),
        "predicted_gain": round(sweep.predicted_s[0] / answer.choice.simulated_s - 1, 4),
        "was_run": _was_run(answer, sweep),
        "fits_on_expectation_only": answer.at_risk,
    }


def _was_run(answer: Answer, sweep: Sweep) -> bool:
    """Whether the source ran this layout, recompute aside."""
    chosen = answer.choice.chosen.cell.layout
    return any(replace(run.run.layout, recompute=chosen.recompute) == chosen for run in sweep.runs)


def _short(layout: Layout) -> str:
    """A layout as people write it: what is 1 left out."""
    degrees = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "ep": layout.ep}
    told = [f"{name}{value}" for name, value in degrees.items() if value > 1]
    told += [f"dp{layout.dp_replicate * layout.dp_shard}", f"mbs{layout.mbs}", f"zero{layout.zero}"]
    told += [layout.schedule.value] if layout.pp > 1 and layout.schedule.value != "1f1b" else []
    return " ".join(told + ([] if layout.recompute == "none" else [f"rc={layout.recompute}"]))


def _text(rows: Sequence[Mapping[str, Any]], overall: float) -> str:
    """The result as a table."""
    lines = [
        f"Picks among the layouts that were run: {overall:.1%} above the best in the mean (goal {GOAL_REGRET:.0%})",
        "",
        f"{'sweep':56} {'run':>4}  {'best as measured':36} {'picked of these':36} {'regret':>7}",
    ]
    for row in rows:
        sweep = f"{row['source'][:10]} {row['model'][:20]} {row['gpus']}, batch {row['batch']}"
        best, picked = (f"{row[one]['measured_s']:7.2f} s  {row[one]['layout']}" for one in ("best", "picked"))
        lines.append(f"{sweep:56} {row['layouts_run']:4}  {best:36} {picked:36} {row['regret']:7.1%}")
    lines += [
        "",
        "From the whole space, on the same GPUs (gain: predicted, over the prediction of the source's best)",
        "",
    ]
    for row in rows:
        lines.append(
            f"{row['source'][:10]} {row['model']} ({row['parameters_b']} B) on {row['gpus']}, batch {row['batch']}: "
            f"they ran {row['best']['layout']}"
        )
        for how, plan in row["whole_space"].items():
            told = plan.get("no_plan") or (
                f"{plan['predicted_s']:7.2f} s {plan['predicted_gain']:+7.1%}  {plan['layout']}"
                f"{', which they ran too' if plan['was_run'] else ''}"
                f"{', fits on expectation only' if plan['fits_on_expectation_only'] else ''}"
            )
            lines.append(f"    {how:30} {told}")
    return "\n".join(lines)
