"""A plan printed as an argument: baseline, choice, gain, head-room, what binds, proof, then the stages."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cost_models.placement import pool_name
from cost_models.rank_orders import moved_axes
from cost_models.records import Alternative, Cluster, Decision, Layout, Model, Plan, Prediction, Stage, Verdict
from cost_models.records.plan import NO_CANDIDATE, USUAL_ORDER
from cost_models.records.runtime import ANY_ORDER
from cost_models.units import GIB
from planner.report.words import billions, columns, counted, duration, memory, memory_gib, paragraph, row, short_layout
from planner.search.ties import TIE

FITS = {Verdict.OK: "fits", Verdict.RISKY: "risky", Verdict.NO: "does not fit"}
"""A verdict in words."""

PARTS = {
    "compute": "compute_s",
    "exposed communication": "exposed_communication_s",
    "pipeline bubble": "bubble_s",
    "optimizer": "optimizer_s",
    "constant": "other_s",
}
"""A part of a step in words -> its field of Parts."""


def plan_text(plan: Plan) -> str:
    """The plan as people read it, at most some forty lines."""
    request = plan.request
    lines = [asked(request.model, request.cluster, plan.decision), ""]
    if plan.predicted is None:
        lines += [
            row("layout", str(plan.decision.layout)),
            row(
                "edited",
                "the decision was changed by hand: its prediction and its proof no longer hold; `meshwright predict` makes new ones",
            ),
        ]
        return "\n".join([*lines, "", *stage_lines(plan.decision, None, request.cluster), *chain_lines(request.model)])
    lines += _argument(plan, plan.predicted)
    lines += ["", *stage_lines(plan.decision, plan.predicted, request.cluster), *chain_lines(request.model)]
    others = [other for other in plan.alternatives if other.note not in ("baseline", "current", USUAL_ORDER)]
    if others:
        lines += ["", *_alternative_lines(plan, others)]
    if plan.defaults:
        lines += ["", row("not said", ", ".join(f"{key} = {value}" for key, value in plan.defaults.items()))]
    return "\n".join(lines)


def asked(model: Model, cluster: Cluster, decision: Decision) -> str:
    """What shall run on what, in a sentence."""
    workload, world, have = decision.workload, decision.layout.world, cluster.num_gpus
    idle = f", {_idle(cluster, decision)} idle" if world < have else ""
    tokens = workload.seq * workload.gbs
    return paragraph(
        f"{model.name} ({billions(model.num_params)} parameters) on {world:,} of {cluster.name}{idle}, "
        f"{counted(workload.gbs, 'sequence')} x {workload.seq:,} = {billions(tokens)} tokens a step, {workload.precision}, "
        f"{workload.optimizer}, runtime {decision.runtime}"
    )


def _idle(cluster: Cluster, decision: Decision) -> str:
    """GPUs that no rank runs on; of several pools, how many of each."""
    layout = decision.layout
    if len(cluster.pools) == 1:
        return f"{cluster.num_gpus - layout.world:,} GPUs"
    pools = [*{stage.device: stage.pool for stage in decision.stages}.values()]
    left = [
        pool.num_gpus - pools.count(number) * layout.world // layout.pp for number, pool in enumerate(cluster.pools)
    ]
    return ", ".join(f"{count:,} {pool_name(cluster, number)}" for number, count in enumerate(left) if count)


def _argument(plan: Plan, predicted: Prediction) -> list[str]:
    by_note = {other.note: other for other in plan.alternatives}
    lines = []
    for note in ("current", "baseline"):
        if note in by_note:
            other = by_note[note]
            lines.append(row(note, _candidate(plan, other.decision.layout, other.step_s, other.memory_gib_max)))
        if note == "current" and plan.certificate is not None:
            said = [one for one in plan.certificate.restrictions if one.startswith(NO_CANDIDATE)]
            name = "" if note in by_note else note
            lines += [row(name, f"not a candidate: {one.removeprefix(NO_CANDIDATE)}") for one in said]
    lines.append(row("choice", _candidate(plan, plan.decision.layout, predicted.step_s, predicted.memory_gib_max)))
    reference = by_note.get("current") or by_note.get("baseline")
    lines.append(row("gain", _gain(predicted, reference, plan)))
    lines += _order_lines(plan)
    lines.append(row("speed", speed(predicted)))
    lines.append(row("head-room", head_room(predicted)))
    lines.append(row("binds", _binds(predicted)))
    lines += proof_lines(plan)
    return lines


def _order_lines(plan: Plan) -> list[str]:
    """The rank order where it is not the usual one: which axis moved, how the runtime is told, what staying would have cost."""
    order, usual, moved = moved_axes(plan.decision)
    if not order:
        return []
    told = plan.request.runtime.rank_orders
    how = told.get(ANY_ORDER) or told.get(" ".join(plan.decision.ranks.order), "")
    said = f"{order} from the inside out: {moved} ({how})"
    for other in plan.alternatives:
        if other.note == USUAL_ORDER and plan.predicted is not None:
            more = other.step_s / plan.predicted.step_s - 1
            said += f"; as {usual} the same stages take {duration(other.step_s)} ({more:+.1%})"
    return [row("order", said)]


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
    if gain < -predicted.pairwise_error:
        verdict = "; that is what the pins cost" if plan.request.pin else ""
    elif gain <= predicted.pairwise_error:
        within = f"; within the model's error between two layouts ({predicted.pairwise_error:.0%})"
        verdict = within + (": keep yours" if reference.note == "current" else ": a tie")
    if gain >= 1:
        return f"{1 + gain:.1f} times the tokens/s of {name}"
    return f"{gain:+.1%} tokens/s over {name}{verdict}"


def speed(predicted: Prediction) -> str:
    """Seconds of a step with their interval, and what they amount to."""
    return (
        f"{duration(predicted.step_s)} a step (80%: {duration(predicted.step_s_low)} to {duration(predicted.step_s_high)}), "
        f"{predicted.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {predicted.tflops_per_gpu:.4g} TFLOP/s/GPU, MFU {predicted.mfu:.1%}"
    )


def head_room(predicted: Prediction) -> str:
    """Does it fit, how much is left, and where it is fullest."""
    most = predicted.memory_gib_max * GIB  # of the stage that is fullest for the size of its GPU
    stage = min(predicted.stages, key=lambda s: abs(max(s.phase_memory_bytes.values()) - most))
    free = predicted.memory_gib_usable - predicted.memory_gib_high
    fits = (
        FITS[predicted.verdict]
        if free < 0 or predicted.verdict is Verdict.OK
        else "fits on the device, not in the host"
    )
    room = f"{memory_gib(free)} left at worst" if free >= 0 else f"{memory_gib(-free)} too many at worst"
    return (
        f"{fits}: {memory_gib(predicted.memory_gib_max)} (up to {memory_gib(predicted.memory_gib_high)}) "
        f"of {memory_gib(predicted.memory_gib_usable)}, {room}; "
        f"fullest is device {stage.device}, {stage.peak_phase}, {stage.peak_operation}"
    )


def _binds(predicted: Prediction) -> str:
    parts = {name: getattr(predicted.parts, field) for name, field in PARTS.items()}
    shown = [
        f"{name} {seconds / predicted.step_s:.0%}"
        for name, seconds in parts.items()
        if seconds >= 0.005 * predicted.step_s
    ]
    return f"{', '.join(shown)} of the step; the time rests on {basis_text(predicted)}"


def basis_text(predicted: Prediction) -> str:
    """Shares of the time by what they rest on."""
    shares = [f"{share:.0%} {name}" for name, share in predicted.basis.items() if share >= 0.005]
    return f"{', '.join(shares)} values"


def gap_words(gap_objective: float | None) -> str:
    """What is proved of the objective."""
    if gap_objective is None:
        return "not proved (the solver gives no bound)"
    return "proved optimal" if gap_objective <= 1e-6 else f"within {gap_objective:.2%} of the least possible"


def proof_lines(plan: Plan) -> list[str]:
    """Both gaps in words: what is proved of the objective, and how far the plan is from any plan as simulated."""
    proof = plan.certificate
    if proof is None:
        return []
    return [
        row(
            "proof",
            f"objective {duration(proof.objective_s)}, {gap_words(proof.gap_objective)} over {counted(proof.num_cells, 'cell')}, {len(proof.cells):,} of them opened ({proof.solver}, {proof.seconds:.2f} s)",
        ),
        row(
            "",
            f"simulated {duration(proof.simulated_s)}, within {proof.gap_simulated:.1%} of any plan of this space as simulated",
        ),
    ]


_MOST_STAGES = 40
"""Lines of the table of virtual stages, beyond which it has a line a device."""


def stage_lines(decision: Decision, predicted: Prediction | None, cluster: Cluster) -> list[str]:
    """The table of stages: one line a virtual stage, or a run of equal ones; a line a device where these are too many."""
    virtual = decision.layout.vpp > 1
    lines = _virtual_stage_lines(decision, predicted, cluster)
    if virtual and len(lines) > _MOST_STAGES:
        lines = _device_lines(decision, predicted, cluster)
    elif virtual and predicted:
        lines.append("fwd, bwd, tail and memory are those of the device: all of its virtual stages together")
    return lines


def chain_lines(model: Model) -> list[str]:
    """Of a chain of unlike layers with names, which of the numbers in the table are what; nothing of any other model."""
    parts: list[tuple[str, int, int]] = []
    first = 1
    for group in model.layer_groups:
        last = first + group.count - 1
        if parts and parts[-1][0] == group.name:
            parts[-1] = (group.name, parts[-1][1], last)
        else:
            parts.append((group.name, first, last))
        first = last + 1
    if len(parts) < 2 or not all(name for name, _, _ in parts):
        return []
    spans = [f"{begin}-{end} {name}" if begin < end else f"{begin} {name}" for name, begin, end in parts]
    return [paragraph(f"layers: {', '.join(spans)}")]


def _on(stage: Stage, cluster: Cluster) -> list[str]:
    """The cell of the GPU that runs a stage, where the cluster has several kinds."""
    return [] if stage.pool is None else [pool_name(cluster, stage.pool)]


def _device_lines(decision: Decision, predicted: Prediction | None, cluster: Cluster) -> list[str]:
    on = ["on"] if decision.stages[0].pool is not None else []
    rows = [["device", *on, "recompute", *(_NUMBERS if predicted else ()), "blocks of its virtual stages"]]
    for device in range(decision.layout.pp):
        mine = [stage for stage in decision.stages if stage.device == device]
        kinds = Counter[str]()
        for stage in mine:
            kinds.update(stage.recompute)
        numbers = _numbers(predicted, device) if predicted else []
        rows.append(
            [
                str(device),
                *_on(mine[0], cluster),
                _recompute_text(kinds),
                *numbers,
                _blocks_of_device(mine, decision.num_blocks),
            ]
        )
    return columns(rows)


def _blocks_of_device(stages: Sequence[Stage], num_blocks: int) -> str:
    spans = [(max(stage.blocks[0], 1), min(stage.blocks[1], num_blocks - 2)) for stage in stages]
    layers = [str(first) if first == last else f"{first}-{last}" for first, last in spans if first <= last]
    parts = ["embedding"] if stages[0].blocks[0] == 0 else []
    if layers:
        parts.append(f"layers {', '.join(layers)}")
    if stages[-1].blocks[1] == num_blocks - 1:
        parts.append("norm, head and loss")
    return ", ".join(parts)


_NUMBERS = ("fwd", "bwd", "tail", "memory")


def _numbers(predicted: Prediction, device: int) -> list[str]:
    stage = predicted.stages[device]
    times = [duration(seconds) for seconds in (stage.forward_s, stage.backward_s, stage.tail_s)]
    return [*times, memory(max(stage.phase_memory_bytes.values()))]


def _virtual_stage_lines(decision: Decision, predicted: Prediction | None, cluster: Cluster) -> list[str]:
    on = ["on"] if decision.stages[0].pool is not None else []
    rows = [["stage", "device", *on, "blocks", "recompute", *(_NUMBERS if predicted else ())]]
    for run in _runs(decision, predicted):
        first, last = run[0], run[-1]
        name = str(first.virtual) if len(run) == 1 else f"{first.virtual}..{last.virtual}"
        devices = str(first.device) if len(run) == 1 else f"{first.device}..{last.device}"
        cells = [name, devices, *_on(first, cluster), _blocks(run, decision.num_blocks), recompute_text(first)]
        rows.append([*cells, *(_numbers(predicted, first.device) if predicted else ())])
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
    inner = a.blocks[0] not in ends and b.blocks[1] not in ends and b.device == a.device + 1 and a.pool == b.pool
    if not same or not inner or predicted is None:
        return same and inner
    left, right = predicted.stages[a.device], predicted.stages[b.device]
    peaks = [max(s.phase_memory_bytes.values()) for s in (left, right)]
    return abs(left.forward_s - right.forward_s) < 1e-3 * left.forward_s and abs(peaks[0] - peaks[1]) < 0.05 * 2**30


def _blocks(run: Sequence[Stage], num_blocks: int) -> str:
    first, last = run[0].blocks[0], run[-1].blocks[1]
    layers = [max(first, 1), min(last, num_blocks - 2)]
    parts = ["embedding"] if first == 0 else []
    if layers[0] <= layers[1]:
        each = f" ({run[0].blocks[1] - run[0].blocks[0] + 1} each)" if len(run) > 1 else ""
        one = layers[0] == layers[1]
        parts.append(f"layer {layers[0]}" if one else f"layers {layers[0]}-{layers[1]}{each}")
    if last == num_blocks - 1:
        parts.append("norm, head and loss")
    return ", ".join(parts)


def recompute_text(stage: Stage) -> str:
    """`none`, `full`, or counts where a stage mixes kinds."""
    return _recompute_text(stage.recompute)


def _recompute_text(counts: Mapping[str, int]) -> str:
    kinds = {kind: count for kind, count in counts.items() if count}
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
            memory_gib(other.memory_gib_max),
            other.verdict.value,
            _short(plan, other.decision.layout) + _in_order(other.decision),
        ]
        for other in others
    ]
    lines = columns(rows)
    if any(
        duration(other.step_s) != duration(plan.predicted.step_s) and other.step_s < plan.predicted.step_s
        for other in others
    ):
        lines.append(
            f"of plans within {TIE:.0%} of the fastest, which the model cannot tell apart, the simplest is the choice"
        )
    return lines


def _candidate(plan: Plan, layout: Layout, step_s: float, peak_gib: float) -> str:
    return f"{duration(step_s)}  {memory_gib(peak_gib)}  {_short(plan, layout)}"


def _in_order(decision: Decision) -> str:
    order = moved_axes(decision)[0]
    return f", order {order}" if order else ""


def _short(plan: Plan, layout: Layout) -> str:
    return short_layout(layout, has_experts=plan.request.model.moe is not None)
