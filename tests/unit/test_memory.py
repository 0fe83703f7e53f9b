"""Bytes on each rank: recounted tensor by tensor for a small model, and against published allocator figures."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cost_models import activations, memory, memory_phases
from cost_models.calibrations import value
from cost_models.memory import block_memory, memory_upper, usable_bytes
from cost_models.peaks import memory_report
from cost_models.problem import RANK_ORDER, Cells, Problem
from cost_models.records import (
    Decision,
    Layout,
    MemoryKind,
    Model,
    Moe,
    Norm,
    Optimizer,
    Positions,
    Precision,
    Ranks,
    RecordError,
    Runtime,
    Schedule,
    Stage,
    Workload,
    normalised,
    parse_layout,
)
from cost_models.shares import share
from tests.unit.cost_cases import CPU, MODEL, NODE, RUNTIME, cluster, problem

GIB = 2**30


def decision(whole: Problem, layout: Layout, recompute: str = "none") -> Decision:
    """Equal layers in every virtual stage, embedding in the first, head in the last."""
    layers, stages = whole.model.num_layers, layout.num_virtual_stages
    each = layers // stages
    edges = [0, *(1 + each * (virtual + 1) for virtual in range(stages - 1)), whole.model.num_blocks]
    return Decision(
        runtime=whole.runtime.name,
        layout=layout,
        workload=whole.workload,
        num_micro_batches=layout.num_micro_batches(whole.workload.gbs),
        stages=tuple(
            Stage(
                virtual=virtual,
                device=virtual % layout.pp,
                blocks=(edges[virtual], edges[virtual + 1] - 1),
                recompute={recompute: each},
            )
            for virtual in range(stages)
        ),
        ranks=Ranks(order=RANK_ORDER),
        collectives={},
    )


def tensors_of_rank(model: Model, tp: int, blocks: range, vocab_multiple: int = 1) -> list[int]:
    """Elements of every parameter tensor that one tensor-parallel rank holds of these blocks."""
    kv_heads = max(model.kv_heads // tp, 1)
    vocab = -(-model.vocab // (vocab_multiple * tp)) * vocab_multiple
    norm = [model.hidden] * (2 if model.norm is Norm.LAYERNORM else 1)
    tensors: list[int] = []
    for block in blocks:
        if block == 0:
            tensors += [model.hidden * vocab, model.hidden * model.max_positions]
        elif block == model.num_blocks - 1:
            tensors += [*norm, *([] if model.tie_embeddings and 0 in blocks else [model.hidden * vocab])]
        else:
            q, kv, ffn = model.heads * model.head_dim // tp, kv_heads * model.head_dim, model.ffn // tp
            tensors += [*norm, *norm, model.hidden * q, model.hidden * kv, model.hidden * kv, q * model.hidden]
            tensors += [model.hidden * ffn] * (3 if model.gated_mlp else 2)
    return tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_states_equal_a_recount_tensor_by_tensor(tied: bool, learned: bool, tp: int, pp: int) -> None:
    model = replace(MODEL, tie_embeddings=tied, gated_mlp=not tied, norm=Norm.LAYERNORM if learned else Norm.RMSNORM)
    if learned:
        model = replace(model, positions=Positions.LEARNED, max_positions=2048)
    whole = problem(model=model)
    plan = decision(whole, normalised(dp=4, tp=tp, pp=pp))
    for device, stage in zip(memory_report(whole, plan), plan.stages, strict=True):
        elements = sum(tensors_of_rank(model, tp, range(stage.blocks[0], stage.blocks[1] + 1)))
        assert device.kinds["weights"] == pytest.approx(2 * elements)
        assert device.kinds["gradients"] == pytest.approx(4 * elements)
        assert device.kinds["optimizer"] == pytest.approx(12 * elements)


@pytest.mark.parametrize(
    ("zero", "gather", "divided"),
    [
        (1, "step", {"optimizer"}),
        (2, "step", {"optimizer", "gradients"}),
        (2, "micro", {"optimizer", "gradients", "weights"}),
        (3, "use", {"optimizer", "gradients", "weights"}),
    ],
)
def test_zero_divides_what_it_says(zero: int, gather: str, divided: set[str]) -> None:
    whole = problem()
    (full,) = memory_report(whole, decision(whole, normalised(dp=8)))
    (cut,) = memory_report(whole, decision(whole, normalised(dp=8, zero=zero, gather=gather)))
    for kind in memory.STATE_KINDS:
        assert cut.kinds[kind] == pytest.approx(full.kinds[kind] / (8 if kind in divided else 1))


def test_gathered_copies() -> None:
    whole = problem()
    params = sum(tensors_of_rank(MODEL, 1, range(MODEL.num_blocks)))
    (micro,) = memory_report(whole, decision(whole, normalised(dp=8, zero=2)))
    assert micro.kinds["gathered"] == pytest.approx(2 * params)
    (use,) = memory_report(whole, decision(whole, normalised(dp=8, zero=3)))
    assert 0 < use.kinds["gathered"] < micro.kinds["gathered"]


def test_torch_pipelines_keep_gradients_whole_and_parameters_gathered() -> None:
    layout = normalised(dp=4, pp=2, zero=3)
    torch = problem()
    other = problem(runtime=replace(RUNTIME, name="other", unsharded_gradients_with_pp=False))
    for kept, cut in zip(
        memory_report(torch, decision(torch, layout)), memory_report(other, decision(other, layout)), strict=True
    ):
        assert kept.kinds["gradients"] == pytest.approx(4 * cut.kinds["gradients"])
        assert kept.kinds["gathered"] > cut.kinds["gathered"]


def test_activations_follow_the_schedule() -> None:
    whole = problem()

    def activations(layout: Layout) -> list[float]:
        return [device.kinds["activations"] for device in memory_report(whole, decision(whole, layout))]

    one = activations(normalised(dp=1, pp=4, mbs=1))  # 1F1B: 4, 3, 2, 1 micro-batches in flight
    per_layer = one[3] / 2
    assert one[1:] == pytest.approx([3 * 2 * per_layer, 2 * 2 * per_layer, 2 * per_layer])
    gpipe = activations(normalised(dp=1, pp=4, mbs=1, schedule=Schedule.GPIPE))
    assert gpipe[3] == pytest.approx(64 * 2 * per_layer)
    looped = activations(normalised(dp=1, pp=4, vpp=2, mbs=1, schedule=Schedule.INTERLEAVED))
    # the last device of an interleaved pipeline holds (vpp - 1)·pp + 1 chunks (Narayanan 2021, section 2.2)
    assert looped[3] == pytest.approx(((2 - 1) * 4 + 1) * per_layer)


def test_activations_of_a_layer_in_closed_form() -> None:
    whole = problem(runtime=replace(RUNTIME, name="megatron", sequence_parallel=True))
    cells = Cells.of([normalised(dp=4, tp=2, mbs=3)])
    part = share(whole, cells)
    tokens = 3 * 2048
    found = {
        what: value(whole.calibration, f"memory.activation.{what}_bytes", "megatron")
        for what in ("residual", "attention", "gated_mlp")
    }
    per_token = found["residual"] * 2048 + found["attention"] * (2 * 16 + 2 * 8) * 128 + found["gated_mlp"] * 2 * 5632
    expected = tokens * per_token / 2
    assert activations.layer_activation_bytes(whole, part, "none") == pytest.approx([expected])
    assert activations.layer_activation_bytes(whole, part, "full") == pytest.approx([2 * tokens * 2048 / 2])


def test_narrow_formats_keep_what_products_take_in_in_8_bits() -> None:
    bf16 = problem(runtime=replace(RUNTIME, name="megatron", sequence_parallel=True))
    fp8 = replace(bf16, workload=replace(bf16.workload, precision=Precision.FP8))
    part = share(bf16, Cells.of([normalised(dp=4, tp=2)]))
    less = activations.layer_activation_bytes(bf16, part, "none") - activations.layer_activation_bytes(
        fp8, part, "none"
    )
    assert less == pytest.approx([2048 * (2 * 2048 + 16 * 128 + 5632) / 2])  # both norms, the heads, the MLP


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_a_torch_layer_on_a_cpu_keeps_what_autograd_was_seen_to_keep(kv_heads: int) -> None:
    """torch 2.13, fp32, one layer of our decoder, saved_tensors_hooks: elements a token without the rotary tables."""
    seen = {4: 6 * 512 + 2 * 512 + 2 * 256 + 4 * 1408, 8: 6 * 512 + 2 * 512 + 2 * 512 + 4 * 1408}
    model = replace(MODEL, hidden=512, ffn=1408, heads=8, kv_heads=kv_heads, head_dim=64)
    kind = replace(NODE, device=CPU)
    workload = Workload(seq=256, gbs=8, precision=Precision.FP32)
    whole = problem(model=model, cluster=cluster(1, kind), workload=workload)
    kept = activations.layer_activation_bytes(whole, share(whole, Cells.of([normalised(dp=4, mbs=2)])), "none")
    assert kept == pytest.approx([4.0 * 2 * 256 * seen[kv_heads]])


def test_recompute_keeps_less_and_unfused_attention_keeps_scores() -> None:
    whole = problem()
    held = block_memory(whole, Cells.of([normalised(dp=4)])).activations[0, 0]
    assert held[0] > held[1] > held[2] > 0
    unfused = problem(runtime=replace(RUNTIME, name="megatron-deepspeed"))
    fused = problem(runtime=replace(RUNTIME, name="megatron"))
    cells = Cells.of([normalised(dp=4)])
    scores = value(whole.calibration, "memory.activation.score_bytes") * 16 * 2048**2
    difference = block_memory(unfused, cells).activations - block_memory(fused, cells).activations
    assert difference[0, 0].tolist() == pytest.approx([scores, 0.0, 0.0])


def test_fp32_doubles_activations_and_sgd_has_no_moments() -> None:
    narrow = problem()
    wide = problem(workload=replace(narrow.workload, precision=Precision.FP32))
    layout = normalised(dp=4, tp=2)
    (bf16,) = memory_report(narrow, decision(narrow, layout))
    (fp32,) = memory_report(wide, decision(wide, layout))
    tokens_bytes = 8.0 * 2048
    assert fp32.kinds["activations"] - tokens_bytes == pytest.approx(2 * (bf16.kinds["activations"] - tokens_bytes))
    sgd = problem(workload=replace(wide.workload, optimizer=Optimizer.SGD))
    assert memory_report(sgd, decision(sgd, layout))[0].kinds["optimizer"] == 0


def test_the_answer_names_rank_phase_and_operation() -> None:
    whole = problem()
    first, last = memory_report(whole, decision(whole, normalised(dp=4, tp=2, pp=2)))
    assert (first.ranks, last.ranks) == ((0, 7), (8, 15))
    assert first.peak_phase == "step 2"
    assert tuple(first.phases) == memory_phases.PHASES
    assert first.phases["step 2"] == pytest.approx(first.peak_bytes)
    assert first.phases["build"] < first.phases["step 1"] <= first.phases["step 2"]
    assert "block 4" in first.peak_operation
    assert "2 of stage 0" in first.peak_operation
    assert "head and loss" in last.peak_operation


def test_usable_bytes_and_margin() -> None:
    whole = problem()
    assert 0 < usable_bytes(whole) < whole.cluster.pools[0].kind.device.memory_bytes
    assert memory_upper(whole, 1e9) > 1e9
    assert memory.memory_lower(whole, 1e9) < 1e9
    seen = replace(whole, memory_kind=MemoryKind.NVIDIA_SMI)
    assert usable_bytes(seen) == whole.cluster.pools[0].kind.device.memory_bytes
    kind = replace(NODE, device=CPU)
    here = problem(cluster=cluster(1, kind), memory_kind=MemoryKind.RSS)
    assert usable_bytes(here) == CPU.memory_bytes


def test_an_unknown_precision_lists_the_known_ones() -> None:
    runtime = replace(RUNTIME, state_bytes={"bf16": RUNTIME.state_bytes["bf16"]})
    whole = problem(runtime=runtime, workload=Workload(seq=8, gbs=8, precision=Precision.FP16))
    with pytest.raises(RecordError, match=r"'fp16'; known: bf16"):
        memory.state_bytes(whole)


def test_an_unknown_kind_of_recompute_lists_the_known_ones() -> None:
    whole = problem()
    with pytest.raises(RecordError, match=r"recompute 'moe_act' of virtual stage 0 .* known: none, selective, full"):
        memory_report(whole, decision(whole, normalised(dp=4), recompute="moe_act"))


def test_allocator_figures_of_megatron_core(shared: Path) -> None:
    """The 7B rows of its CI, exact bytes of the last rank: these test layers, states and logits together."""
    with (shared / "published" / "memory.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["model"] == "ci-gpt-h4096-l32" and not row["experts"]]
    assert len(rows) >= 3
    errors = []
    for row in rows:
        model = Model(
            name=row["model"],
            num_layers=32,
            hidden=4096,
            ffn=int(row["ffn_hidden"]),
            heads=32,
            kv_heads=int(row["kv_heads"]),
            head_dim=128,
            vocab=int(row["vocab"]),
            gated_mlp=False,
        )
        runtime = replace(RUNTIME, name="megatron", vocab_multiple=128, sequence_parallel=row["sp"] == "yes")
        whole = problem(
            model=model,
            runtime=replace(runtime, unsharded_gradients_with_pp=False),
            workload=Workload(seq=int(row["seq"]), gbs=int(row["gbs"])),
        )
        vpp = int(row["vpp"] or 1)
        layout = normalised(
            dp=int(row["dp"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            vpp=vpp,
            mbs=int(row["mbs"]),
            zero=1,
            schedule=Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B,
        )
        last = memory_report(whole, decision(whole, layout))[-1]
        errors.append(abs(last.peak_bytes / GIB / float(row["memory_gib"]) - 1))
    assert np.median(errors) < 0.03
    assert max(errors) < 0.06


def test_torchtitan_keeps_every_second_product_and_what_torch_keeps_of_the_loss() -> None:
    titan, torch = (replace(RUNTIME, name=name) for name in ("torchtitan", "torch"))
    layout = parse_layout("dps8 zero3 gather=use mbs1")

    def kinds(runtime: Runtime, recompute: str, **more: object) -> Mapping[str, float]:
        whole = problem(runtime=runtime, **more)
        return memory_report(whole, decision(whole, layout, recompute))[0].kinds

    none, selective, full = (kinds(titan, kind) for kind in ("none", "selective", "full"))
    assert full["activations"] < selective["activations"] < 0.6 * none["activations"]
    assert selective["activations"] < kinds(torch, "selective")["activations"], "torch's own kind keeps every product"
    assert none["activations"] == kinds(torch, "none")["activations"]
    assert none["logits"] == kinds(torch, "none")["logits"]
    narrow = replace(problem().workload, precision=Precision.FP8)
    assert kinds(titan, "none", workload=narrow)["logits"] == none["logits"], "the loss stays in 16 bits"


def test_experts_one_after_the_other_have_no_workspaces_of_grouped_products() -> None:
    grouped = problem(model=replace(MODEL, moe=Moe(num_experts=16, top_k=2, moe_ffn=1408)))
    single = replace(grouped, runtime=replace(grouped.runtime, groups_experts=False))
    workspaces = value(grouped.calibration, "memory.grouped_workspace_bytes", "hopper")
    assert memory.context_bytes(grouped) - memory.context_bytes(single) == pytest.approx(workspaces)
    assert workspaces == pytest.approx(
        4 * 32 * 2**20, rel=0.25
    )  # four streams of 32 MiB, as the source of the prior says
    assert memory.context_bytes(problem()) == memory.context_bytes(single)
