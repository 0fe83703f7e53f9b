"""What makes the worst rows wrong, as far as anybody knows: by row where there is evidence, else by what the row is."""

from collections.abc import Mapping

from benchmarks.accuracy.fit_published import Configuration

KNOWN: Mapping[tuple[str, ...], str] = {
    ("r0120", "r0121"): "an A100-80 slower than an A100-40 at the same shape (3.30 against 2.94 s): not physical",
    ("r0179",): "1.32 s between 1.08 s on twice the GPUs and equal work elsewhere (173, 141, 172 TFLOP/s): noise",
    ("r0282",): "gbs 1568 takes as long as gbs 2048 on the same layout: mis-recorded, it seems",
    ("r0307",): "a single iteration; the same micro-batch on twice the stages (r0305) takes 131 s",
    (
        "r1167",
        "r1169",
        "r1173",
        "r1174",
        "r1176",
        "r1206",
        "r1211",
    ): "vTrain's 39 B model on pp 8 or 16 with tp 2 or 4: sisters "
    "with tp 1 and 8 fit, and so do some of their own with other micro-batches; no term that grows or falls with a size does that",
    (
        "r1139",
        "r1146",
    ): "a 3.6 B model without pipeline, gradients exposed: slower at mbs 2 than its neighbours at 1 and 4",
    (
        "r0143",
        "r0144",
        "r0149",
        "r0150",
        "r0151",
    ): "mpt-13b on 8 A100-40, 137 TFLOP/s against 162 to 164 on more GPUs: short of memory",
    ("r0318", "r0343", "r0274", "r0280"): "a single iteration; sisters with the same head_dim differ the other way",
    ("r0921", "r0930"): "two layers of Grok: head and router are exaggerated",
    ("r0742",): "first release with DeepSeek-V3, no captured graphs",
    ("r0587", "r0633"): "launch floor and slow expert exchange added up; in truth they overlap",
    (
        "r1157",
    ): "its neighbours with half and twice the micro-batch measured 10.03 and 10.86 s, not monotone: noise or an unknown",
}
"""Rows -> evidence (published/README.md, and the notes of the source)."""


def cause(one: Configuration) -> str:
    """In words; says so where nobody knows."""
    for ids, told in KNOWN.items():
        if set(ids) & set(one.ids):
            return told
    layout, model = one.run.layout, one.run.problem.model
    if model.moe is not None:
        return "mixture of experts: exchange, permutation and launch are known from three models alone"
    micro = layout.num_micro_batches(one.run.problem.workload.gbs)
    bubble = (layout.pp - 1) / (layout.vpp * micro + layout.pp - 1)
    if bubble > 0.2:
        return f"a bubble of {bubble:.0%} of the step multiplies every error of the slowest stage"
    if layout.tp > one.run.problem.cluster.pools[0].kind.domain_size:
        return "tensor parallelism across nodes: all its collectives are seen"
    return "not known"
