"""The least R over the plans of a cell with v = 1.

From the last stage backwards, with A and F counted from the stage in hand:
    V1(p) = max(m W_p, t_p + V1(p+1)),   V2(p) = max(m W_p + tail_p, f_p + V2(p+1)),   R = max(V1(0) + tail_0, V2(0)).
"""

from planner.search.stages import CellProblem


def least_lower_bound_s(cell: CellProblem, cutoff_s: float) -> float:
    """The least R over the plans of the cell (v = 1), or `cutoff_s` where every R is at least that."""
    assert cell.layout.vpp == 1
    columns, num_micro = cell.columns, cell.num_micro_batches
    stage_s = columns.forward_s + columns.backward_s
    # node (blocks done before the stage) -> pairs (V1, V2) that none beats; behind the last block nothing is left
    after: dict[int, list[tuple[float, float]]] = {cell.num_blocks: [(0.0, 0.0)]}
    best = cutoff_s
    for stage in reversed(range(cell.num_stages)):
        where = cell.stage_slices[stage]
        here: dict[int, list[tuple[float, float]]] = {}
        for first, last, t, f, tail in zip(
            columns.first[where].tolist(),
            columns.last[where].tolist(),
            stage_s[where].tolist(),
            columns.forward_s[where].tolist(),
            columns.tail_s[where].tolist(),
            strict=True,
        ):
            work = num_micro * t
            if work >= best:
                continue
            for one, two in after.get(last + 1, ()):
                pair = max(work, t + one), max(work + tail, f + two)
                if stage == 0:
                    best = min(best, max(pair[0] + tail, pair[1]))
                elif max(pair) < best:
                    here.setdefault(first, []).append(pair)
        after = {node: _frontier(pairs) for node, pairs in here.items()}
    return best


def _frontier(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs that no other beats in both."""
    kept: list[tuple[float, float]] = []
    for pair in sorted(pairs):
        if not kept or pair[1] < kept[-1][1]:
            kept.append(pair)
    return kept
