"""What was promised beside what happened: a plan and its measurements -> one document, and a refitted calibration.

A predicted and a measured quantity stand in one row only where both mean the same: the step; forward and backward passes,
their communication included; a pipeline as a whole; the update; memory of the same kind. What has no partner is listed with
the reason, never compared. error = predicted / measured - 1.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from cost_models.calibrations import shipped
from cost_models.memory import counted_context_bytes
from cost_models.peaks import memory_report
from cost_models.problem import Problem, memory_kind_of
from cost_models.records import (
    Calibration,
    Coefficient,
    Measurement,
    MeasurementKind,
    Measurements,
    MemoryKind,
    Plan,
    Prediction,
    RecordError,
    load,
    print_layout,
)
from cost_models.refit import Row, refit, with_links
from cost_models.residuals import RankMemory, residuals, without_residuals
from cost_models.units import GIB
from planner.compare_parts import MEMORY, is_inside, where_it_went_wrong
from planner.errors import InputError
from planner.predict import predict
from planner.rests_on import made_own

SPREAD_QUANTILE = 0.1
"""The measured spread holds the middle 80% of the samples, as the predicted interval does of the runs."""


def read_measurements(paths: Iterable[str | Path]) -> Measurements:
    """The measurements of all files, in order. Raises InputError where one is a plan, RecordError where it is neither."""
    return Measurements(measurements=tuple(one for path in paths for one in _measurements(path)))


def _measurements(path: str | Path) -> tuple[Measurement, ...]:
    try:
        return load(Measurements, path).measurements
    except RecordError:
        if not _is_plan(path):
            raise
    raise InputError(f"{path}: is a plan, not a measurement; `meshwright run {path} -o measurement.json` makes one")


def _is_plan(path: str | Path) -> bool:
    try:
        load(Plan, path)
    except RecordError:
        return False
    return True


def compare(plan: Plan, measured: Measurements) -> dict[str, Any]:
    """The document: one row a quantity, with predicted and measured value, error, and whether it lies inside the interval;
    `picture` is the row that planner.report.plots draws.

    Raises InputError where the plan has no prediction (it was edited), or nothing was measured of this plan.
    """
    predicted = _promise(plan)
    own = runs_of(plan, measured)
    promised = predicted_phases(predicted, plan.decision.num_micro_batches)
    rows, unmatched = [], []
    for phase, samples in measured_phases(own).items():
        if phase not in promised:
            unmatched.append(f"{phase}: measured, but no prediction names it")
            continue
        row = _row(phase, promised[phase], samples)
        if phase == "step":
            row |= {
                "predicted_low_s": predicted.step_s_low,
                "predicted_high_s": predicted.step_s_high,
                "inside": predicted.step_s_low <= row["measured_s"] <= predicted.step_s_high,
            }
        rows.append(row)
    memory, without_partner = _memory(predicted, [one for one in own if not is_inside(one)])
    step_s = spread_of(measured_phases(own)["step"])[1]
    fullest: dict[str, Any] = next((row for row in memory if row["ranks"] == "all"), {})
    return {
        "layout": print_layout(plan.decision.layout),
        "decision_sha256": plan.decision.sha256,
        "machine": own[0].machine,
        "versions": dict(own[0].versions),
        "rows": rows,
        "memory": memory,
        "memory_by_phase": _memory_by_phase(predicted, own),
        "where": where_it_went_wrong(predicted, own, _problem(plan, shipped()), plan.decision),
        "tokens_per_s_per_gpu": {
            "predicted": predicted.tokens_per_s_per_gpu,
            "measured": plan.decision.workload.tokens / step_s / plan.decision.layout.world,
        },
        "mfu": {"predicted": predicted.mfu, "measured": predicted.mfu * predicted.step_s / step_s},
        "not_compared": unmatched + without_partner,
        "picture": {
            "layout": print_layout(plan.decision.layout),
            "predicted_s": predicted.step_s,
            "low_s": predicted.step_s_low,
            "high_s": predicted.step_s_high,
            "measured_s": list(measured_phases(own).get("step", ())),
            "predicted_gib": fullest.get("predicted_gib"),
            "measured_gib": fullest.get("measured_gib"),
        },
    }


def _promise(plan: Plan) -> Prediction:
    if plan.predicted is None:
        raise InputError(
            "this plan promises nothing: its decision was edited after it was predicted. Predict it again "
            "(`meshwright predict plan.json`), or compare the plan as it was written"
        )
    return plan.predicted


def runs_of(plan: Plan, measured: Measurements) -> tuple[Measurement, ...]:
    """The run measurements of this very decision. InputError, with what there is, where there are none."""
    runs = [one for one in measured.measurements if one.kind is MeasurementKind.RUN]
    wanted = plan.decision.sha256
    own = tuple(one for one in runs if one.plan_sha256 == wanted)
    if not own:
        others = sorted({f"{str(one.plan_sha256)[:12]} ({one.note})" for one in runs})
        found = f"runs of {'; '.join(others)}" if others else "no run at all"
        raise InputError(
            f"nothing was measured of this plan (decision {wanted[:12]}): the files hold {found}. Measure it with "
            "`meshwright run plan.json -o measurement.json`"
        )
    return own


# Phases --------------------------------------------------------------------------------------------------------------


def predicted_phases(predicted: Prediction, num_micro_batches: int) -> dict[str, float]:
    """Seconds of a step's phases, as a run's phases divide it.

    Without a pipeline: forward, and backward with the gradients' synchronisation. With one: pipeline, that is all up to
    the update. Then `optimizer`, and `other`: clipping, the loss of all ranks, the step's constant.
    """
    parts = predicted.parts
    phases = {"step": predicted.step_s, "optimizer": parts.optimizer_s, "other": parts.other_s}
    if len(predicted.stages) == 1:
        stage = predicted.stages[0]
        phases["forward"] = num_micro_batches * stage.forward_s
        late_s = max(0.0, stage.tail_s - parts.optimizer_s - parts.other_s)
        phases["backward"] = num_micro_batches * stage.backward_s + late_s
    else:
        phases["pipeline"] = parts.compute_s + parts.exposed_communication_s + parts.bubble_s
    return phases


MERGED = {"reduce": "other", "clip": "other", "data": "other"}
"""Phase of a run -> the predicted phase that it is part of."""


def measured_phases(own: Sequence[Measurement]) -> dict[str, tuple[float, ...]]:
    """Samples by phase: of each step the slowest stage, and the phases that a prediction does not tell apart added up.

    Runs of one plan follow one another; a second count of the memory of the same steps is no further run. InputError where one
    stage has more steps than another.
    """
    by_phase: dict[str, dict[str, tuple[float, ...]]] = {}
    counted: dict[tuple[str, str, tuple[float, ...]], MemoryKind] = {}
    for one in own:
        if is_inside(one):
            continue
        phase, name = one.phase or one.key, one.rank_class or "all"
        stages = by_phase.setdefault(phase, {})
        kind = None if one.memory is None else one.memory.kind
        if kind is not None and counted.setdefault((phase, name, one.samples_s), kind) is not kind:
            continue
        stages[name] = (*stages.get(name, ()), *one.samples_s)
    slowest = {phase: _step_by_step(max, phase, stages) for phase, stages in by_phase.items()}
    merged: dict[str, dict[str, tuple[float, ...]]] = {}
    for phase, samples in slowest.items():
        merged.setdefault(MERGED.get(phase, phase), {})[phase] = samples
    return {name: _step_by_step(sum, name, parts) for name, parts in merged.items()}


def _step_by_step(
    join: Callable[[tuple[float, ...]], float], phase: str, samples: Mapping[str, tuple[float, ...]]
) -> tuple[float, ...]:
    if len({len(one) for one in samples.values()}) > 1:
        found = "; ".join(f"{len(one)} of {name}" for name, one in samples.items())
        raise InputError(
            f"the samples of {phase} are of unequal numbers of steps ({found}): something is missing. Measure the plan again "
            "(`meshwright run plan.json -o measurement.json`)"
        )
    return tuple(map(join, zip(*samples.values(), strict=True)))


def _row(phase: str, predicted_s: float, samples: Sequence[float]) -> dict[str, Any]:
    low, middle, high = spread_of(samples)
    return {
        "phase": phase,
        "predicted_s": predicted_s,
        "measured_s": middle,
        "measured_low_s": low,
        "measured_high_s": high,
        "samples": len(samples),
        "error": predicted_s / middle - 1 if middle > 0 else None,
    }


def spread_of(samples: Sequence[float]) -> tuple[float, float, float]:
    """(lower end of the middle 80%, median, upper end); linear between order statistics."""
    ordered = sorted(samples)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return quantile(SPREAD_QUANTILE), statistics.median(ordered), quantile(1 - SPREAD_QUANTILE)


# Memory --------------------------------------------------------------------------------------------------------------


def _memory(predicted: Prediction, own: Sequence[Measurement]) -> tuple[list[dict[str, Any]], list[str]]:
    """The fullest rank, and each stage's; only where both sides count bytes alike."""
    rows, unmatched = [], []
    for name, one in _fullest(own).items():
        assert one.memory is not None
        if one.memory.kind.value != predicted.memory_kind:
            unmatched.append(
                f"memory of {name}: measured as {one.memory.kind}, promised as {predicted.memory_kind}; kinds are never "
                "compared with one another"
            )
            continue
        expected_gib = predicted.memory_gib_max if name == "all" else _stage_gib(predicted, name)
        if expected_gib is None:
            unmatched.append(f"memory of {name}: measured, but no stage of the prediction has that name")
            continue
        measured_gib = one.memory.peak_bytes / GIB
        row: dict[str, Any] = {
            "ranks": name,
            "kind": predicted.memory_kind,
            "predicted_gib": expected_gib,
            "measured_gib": measured_gib,
            "error": expected_gib / measured_gib - 1 if measured_gib > 0 else None,
        }
        if name == "all":
            row |= {
                "predicted_low_gib": predicted.memory_gib_low,
                "predicted_high_gib": predicted.memory_gib_high,
                "inside": predicted.memory_gib_low <= measured_gib <= predicted.memory_gib_high,
            }
        rows.append(row)
    return rows, unmatched


def _memory_by_phase(predicted: Prediction, own: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Peaks by stage and phase; the promise where it names the phase and counts bytes alike."""
    rows = []
    for one in own:
        if not one.key.startswith(MEMORY) or one.memory is None:
            continue
        phase, stage = one.key.removeprefix(MEMORY), one.rank_class or "all"
        device = next((item for item in predicted.stages if stage == f"stage {item.device}"), None)
        promised = None if device is None else device.phase_memory_bytes.get(phase)
        if one.memory.kind.value != predicted.memory_kind:
            promised = None
        rows.append(
            {
                "ranks": stage,
                "phase": phase,
                "kind": one.memory.kind.value,
                "predicted_gib": None if promised is None else promised / GIB,
                "measured_gib": one.memory.peak_bytes / GIB,
            }
        )
    return rows


def _fullest(own: Sequence[Measurement]) -> dict[str, Measurement]:
    """By class of ranks the measurement with the highest peak: of several runs, and of phases that each hold the run's."""
    found: dict[str, Measurement] = {}
    for one in own:
        name = one.rank_class or "all"
        known = found.get(name)
        if one.memory is not None and (known is None or one.memory.peak_bytes > known.memory.peak_bytes):  # type: ignore[union-attr]
            found[name] = one
    return found


def _stage_gib(predicted: Prediction, name: str) -> float | None:
    for stage in predicted.stages:
        if name == f"stage {stage.device}":
            return max(stage.phase_memory_bytes.values()) / GIB
    return None


# The next calibration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan and what was measured of it."""

    plan: Plan
    """The plan."""
    measured: tuple[Measurement, ...]
    """Its run measurements."""


def fitted(plan: Plan, measured: Measurements, calibration: Calibration | None = None) -> Calibration:
    """The calibration refitted on this plan's runs; `calibration` is the prior, the shipped one by default."""
    return fitted_on((Run(plan=plan, measured=runs_of(plan, measured)),), calibration)


def fitted_on(runs: Sequence[Run], calibration: Calibration | None = None) -> Calibration:
    """The calibration refitted on the phases of several runs at once: what they do not tell apart stays as it was."""
    prior = with_links(calibration or shipped(), (run.plan.request.cluster for run in runs))
    prior = made_own(prior, [(_problem(run.plan, prior), run.plan.decision) for run in runs])
    rows: list[Row] = []
    wanted: list[tuple[Run, tuple[str, ...]]] = []
    for run in runs:
        phases = {phase: samples for phase, samples in measured_phases(run.measured).items() if min(samples) > 0}
        promised = predicted_phases(promise_with(run.plan, prior), run.plan.decision.num_micro_batches)
        names = tuple(phase for phase in phases if phase != "step" and promised.get(phase, 0.0) > 0)
        wanted.append((run, names))
        for phase in names:
            low, middle, high = spread_of(phases[phase])
            label = f"{print_layout(run.plan.decision.layout)} {phase}"
            rows.append(Row(label=label, measured_s=middle, spread=(high - low) / 2 / middle, run=str(len(wanted))))

    def predictions(found: Calibration) -> list[float]:
        seconds = []
        for run, names in wanted:
            phases = predicted_phases(promise_with(run.plan, found), run.plan.decision.num_micro_batches)
            seconds += [phases[phase] for phase in names]
        return seconds

    today = date.today().isoformat()
    refitted = refit(prior, rows, predictions, name=f"{prior.name}, refitted on runs", date=today)
    found = refitted.calibration
    if refitted.sure is None:
        found = replace(found, name=f"{found.name}, too few to tell whether it predicts other models better")
    if not refitted.width:
        found = replace(
            found, name=f"{prior.name}, kept: no refit on the other runs is sure to predict one that is left out better"
        )
    return replace(found, coefficients={**found.coefficients, **_residuals(runs, prior, today)})


def _residuals(runs: Sequence[Run], prior: Calibration, today: str) -> dict[str, Coefficient]:
    """What the fullest ranks of the runs took beside what is counted, by device and runtime (cost_models.residuals)."""
    counted = without_residuals(prior)
    groups: dict[tuple[str, str], list[tuple[Problem, RankMemory, str]]] = {}
    for run in runs:
        measured: dict[MemoryKind, float] = {}
        for one in run.measured:
            if one.memory is not None and (one.rank_class or "all") == "all":
                measured[one.memory.kind] = float(one.memory.peak_bytes)
        problem = _problem(run.plan, counted)
        peak = max(device.peak_bytes for device in memory_report(problem, run.plan.decision))
        reserved, allocated = (
            counted_context_bytes(replace(problem, memory_kind=kind))
            for kind in (MemoryKind.RESERVED, MemoryKind.ALLOCATED)
        )
        memory = RankMemory(analytic_bytes=peak, buffers_bytes=reserved - allocated, measured=measured)
        key = problem.cluster.pools[0].kind.device.family, problem.runtime.name
        groups.setdefault(key, []).append((problem, memory, run.measured[0].machine))
    found: dict[str, Coefficient] = {}
    for group in groups.values():
        problem, _, machine = group[0]
        found |= dict(residuals(problem, [memory for _, memory, _ in group], machine=machine, date=today))
    return found


def promise_with(plan: Plan, calibration: Calibration) -> Prediction:
    """What the plan's decision would be promised under another calibration."""
    return predict(_problem(plan, calibration), plan.decision)


def _problem(plan: Plan, calibration: Calibration) -> Problem:
    request = plan.request
    return Problem(
        model=request.model,
        cluster=request.cluster,
        workload=plan.decision.workload,
        runtime=request.runtime,
        calibration=calibration,
        memory_kind=memory_kind_of(request.cluster),
    )


# Several layouts -----------------------------------------------------------------------------------------------------


def ranking(promised_s: Mapping[str, float], measured_s: Mapping[str, float], pairwise_error: float) -> dict[str, Any]:
    """Is the planner's order the measured order? Two layouts whose promises differ by no more than `pairwise_error` tie.

    Every pair is one of: agrees, tie (no order was promised), disagrees.
    """
    names = sorted(promised_s, key=lambda name: promised_s[name])
    agrees, ties, disagrees = [], [], []
    for index, faster in enumerate(names):
        for slower in names[index + 1 :]:
            if promised_s[slower] <= promised_s[faster] * (1 + pairwise_error):
                ties.append((faster, slower))
            elif measured_s[faster] <= measured_s[slower]:
                agrees.append((faster, slower))
            else:
                disagrees.append((faster, slower))
    return {
        "promised_order": names,
        "measured_order": sorted(measured_s, key=lambda name: measured_s[name]),
        "agrees": agrees,
        "ties": ties,
        "disagrees": disagrees,
        "same_order": not disagrees,
    }
