"""A plan printed as an argument: baseline, choice, gain, head-room, what binds, proof, then the stages."""

from collections.abc import Iterable, Sequence

from cost_models.records import Alternative, Decision, Layout, Plan, Prediction, Stage

GIB = 2**30


def plan_text(plan: Plan) -> str:
    """The plan as people read it, at most some forty lines."""
    lines = [_asked(plan), ""]
    if plan.predicted is None:
        lines += [
            _row("layout", str(plan.decision.layout)),
            _row(
                "edited",
                "the decision was changed by hand: its prediction and its proof no longer hold; `meshwright predict` makes new ones",
            ),
        ]
        return "\n".join([*lines, "", *stage_lines(plan.decision, None)])
    lines += _argument(plan, plan.predicted)
    lines += ["", *stage_lines(plan.decision, plan.predicted)]
    others = [other for other in plan.alternatives if other.note not in ("baseline", "current")]
    if others:
        lines += ["", *_alternative_lines(plan, others)]
    if plan.defaults:
        lines += ["", _row("not said", ", ".join(f"{key} = {value}" for key, value in plan.defaults.items()))]
    return "\n".join(lines)


def _asked(plan: Plan) -> str:
    request, workload = plan.request, plan.decision.workload
    world, have = plan.decision.layout.world, request.cluster.num_gpus
    idle = f", {have - world} GPUs idle" if world < have else ""
    tokens = workload.seq * workload.gbs
    return (
        f"{request.model.name} ({billions(request.model.num_params)} parameters) on {world} of {request.cluster.name}{idle}, "
        f"{workload.gbs:,} sequences x {workload.seq:,} = {tokens / 1e6:.3g} M tokens a step, {workload.precision}, "
        f"{workload.optimizer}, runtime {plan.decision.runtime}"
    )


def _argument(plan: Plan, predicted: Prediction) -> list[str]:
    by_note = {other.note: other for other in plan.alternatives}
    lines = []
    for note in ("current", "baseline"):
        if note in by_note:
            lines.append(
                _row(
                    note, _candidate(by_note[note].decision.layout, by_note[note].step_s, by_note[note].memory_gib_max)
                )
            )
    lines.append(_row("choice", _candidate(plan.decision.layout, predicted.step_s, predicted.memory_gib_max)))
    reference = by_note.get("current") or by_note.get("baseline")
    lines.append(_row("gain", _gain(predicted, reference, plan)))
    lines.append(_row("speed", _speed(predicted)))
    lines.append(_row("head-room", _head_room(plan, predicted)))
    lines.append(_row("binds", _binds(predicted)))
    lines += proof_lines(plan)
    return lines


def _gain(predicted: Prediction, reference: Alternative | None, plan: Plan) -> str:
    if reference is None:
        return "no other layout fits, so there is nothing to gain on"
    gain = reference.step_s / predicted.step_s - 1
    name = (
        "today's layout"
        if reference.note == "current"
        else "the baseline (smallest tp·pp that fits, tp inside the fast domain, the rest dp)"
    )
    if reference.decision == plan.decision:
        return f"none: the choice is {name}"
    verdict = ""
    if gain <= predicted.pairwise_error:
        within = f"; within the model's error between two layouts ({predicted.pairwise_error:.0%})"
        verdict = within + (": keep yours" if reference.note == "current" else ": a tie")
    return f"{gain:+.1%} tokens/s over {name}{verdict}"


def _speed(predicted: Prediction) -> str:
    return (
        f"{duration(predicted.step_s)} a step (80%: {duration(predicted.step_s_low)} to {duration(predicted.step_s_high)}), "
        f"{predicted.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {predicted.tflops_per_gpu:.4g} TFLOP/s/GPU, MFU {predicted.mfu:.1%}"
    )


def _head_room(plan: Plan, predicted: Prediction) -> str:
    stage = max(predicted.stages, key=lambda s: max(s.phase_memory_bytes.values()))
    free = predicted.memory_gib_usable - predicted.memory_gib_high
    word = {"ok": "fits", "risky": "risky", "no": "does not fit"}[predicted.verdict.value]
    return (
        f"{word}: {predicted.memory_gib_max:.1f} GiB (up to {predicted.memory_gib_high:.1f}) of {predicted.memory_gib_usable:.1f} GiB, "
        f"{free:+.1f} GiB left; fullest is stage {stage.device}, {stage.peak_phase}, {stage.peak_operation}"
    )


def _binds(predicted: Prediction) -> str:
    parts = {
        "compute": predicted.parts.compute_s,
        "exposed communication": predicted.parts.exposed_communication_s,
        "pipeline bubble": predicted.parts.bubble_s,
        "optimizer": predicted.parts.optimizer_s,
        "constant": predicted.parts.other_s,
    }
    shown = [
        f"{name} {seconds / predicted.step_s:.0%}"
        for name, seconds in parts.items()
        if seconds >= 0.005 * predicted.step_s
    ]
    basis = ", ".join(f"{share:.0%} {name}" for name, share in predicted.basis.items() if share >= 0.005)
    return f"{', '.join(shown)} of the step; the time rests on {basis} values"


def proof_lines(plan: Plan) -> list[str]:
    """Both gaps in words: what is proved of the objective, and how far the plan is from any plan as simulated."""
    proof = plan.certificate
    if proof is None:
        return []
    of_objective = (
        "proved optimal"
        if proof.gap_objective is not None and proof.gap_objective <= 1e-6
        else "not proved (the solver gives no bound)"
        if proof.gap_objective is None
        else f"within {proof.gap_objective:.2%} of the least possible"
    )
    cells = len(proof.cells)
    return [
        _row(
            "proof",
            f"objective {duration(proof.objective_s)}, {of_objective} over {cells} cells, {proof.cells_opened} of them opened ({proof.solver}, {proof.seconds:.2f} s)",
        ),
        _row(
            "",
            f"simulated {duration(proof.simulated_s)}, within {proof.gap_simulated:.1%} of any plan of this space as simulated",
        ),
    ]


def stage_lines(decision: Decision, predicted: Prediction | None) -> list[str]:
    """The table of stages: one line a virtual stage, or a run of equal ones."""
    header = ["stage", "device", "blocks", "recompute"]
    numbers = ["fwd", "bwd", "tail", "memory"] if predicted else []
    rows = [header + numbers]
    for run in _runs(decision, predicted):
        first, last = run[0], run[-1]
        name = str(first.virtual) if len(run) == 1 else f"{first.virtual}..{last.virtual}"
        devices = str(first.device) if len(run) == 1 else f"{first.device}..{last.device}"
        row = [name, devices, _blocks(run, decision.num_blocks), recompute_text(first)]
        if predicted:
            stage = predicted.stages[first.device]
            peak = max(stage.phase_memory_bytes.values()) / GIB
            row += [duration(stage.forward_s), duration(stage.backward_s), duration(stage.tail_s), f"{peak:.1f} GiB"]
        rows.append(row)
    return columns(rows)


def _runs(decision: Decision, predicted: Prediction | None) -> list[list[Stage]]:
    """Neighbouring virtual stages that print the same, grouped."""
    runs: list[list[Stage]] = []
    for stage in decision.stages:
        if runs and _alike(runs[-1][-1], stage, decision, predicted):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _alike(a: Stage, b: Stage, decision: Decision, predicted: Prediction | None) -> bool:
    ends = (0, decision.num_blocks - 1)
    same = a.blocks[1] - a.blocks[0] == b.blocks[1] - b.blocks[0] and a.recompute == b.recompute
    inner = a.blocks[0] not in ends and b.blocks[1] not in ends and b.device == a.device + 1
    if not same or not inner or predicted is None:
        return same and inner
    left, right = predicted.stages[a.device], predicted.stages[b.device]
    peaks = [max(s.phase_memory_bytes.values()) for s in (left, right)]
    return abs(left.forward_s - right.forward_s) < 1e-3 * left.forward_s and abs(peaks[0] - peaks[1]) < 0.05 * GIB


def _blocks(run: Sequence[Stage], num_blocks: int) -> str:
    first, last = run[0].blocks[0], run[-1].blocks[1]
    layers = [max(first, 1), min(last, num_blocks - 2)]
    parts = ["embedding"] if first == 0 else []
    if layers[0] <= layers[1]:
        each = f" ({run[0].blocks[1] - run[0].blocks[0] + 1} each)" if len(run) > 1 else ""
        parts.append(f"layers {layers[0]}-{layers[1]}{each}")
    if last == num_blocks - 1:
        parts.append("norm, head and loss")
    return ", ".join(parts)


def recompute_text(stage: Stage) -> str:
    """`none`, `full`, or counts where a stage mixes kinds."""
    kinds = {kind: count for kind, count in stage.recompute.items() if count}
    if not kinds:
        return "none"
    return next(iter(kinds)) if len(kinds) == 1 else " + ".join(f"{count} {kind}" for kind, count in kinds.items())


def _alternative_lines(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    assert plan.predicted is not None
    rows = [["also", "step", "against", "memory", "fits", "layout"]]
    rows += [
        [
            other.note,
            duration(other.step_s),
            f"{other.step_s / plan.predicted.step_s - 1:+.1%}",
            f"{other.memory_gib_max:.1f} GiB",
            other.verdict.value,
            short_layout(other.decision.layout),
        ]
        for other in others
    ]
    return columns(rows)


def _candidate(layout: Layout, step_s: float, memory_gib: float) -> str:
    return f"{duration(step_s)}  {memory_gib:.1f} GiB  {short_layout(layout)}"


def short_layout(layout: Layout) -> str:
    """The layout's text without the degrees that are 1."""
    words = str(layout).split()
    silent = {"vpp1", "dpr1", "dps1", "cp1", "tp1", "ep1", "etp1", "pp1", "gather=step", "rc=none"}
    if layout.pp == 1:
        silent.add(f"sched={layout.schedule}")
    return " ".join(word for word in words if word not in silent)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as left-aligned columns, two blanks apart."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _row(name: str, text: str) -> str:
    return f"{name:<10} {text}"


def duration(seconds: float) -> str:
    """Seconds as people read them: three significant digits in s, ms or µs."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.9995 or unit == "µs":
            return f"{seconds / scale:.3g} {unit}" if seconds / scale < 1000 else f"{seconds / scale:,.0f} {unit}"
    raise AssertionError("unreachable")


def billions(count: float) -> str:
    """A number of parameters, with its unit."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,.0f}"


def joined(words: Iterable[str]) -> str:
    """`a, b and c`."""
    listed = list(words)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
