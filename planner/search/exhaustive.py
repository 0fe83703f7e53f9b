"""Brute force: every plan of a small space, one by one, in plain arithmetic. The oracle of the search and of the ILP.

It shares nothing with what it judges but the numbers of the columns: its J, its memory and its bound R are written here a
second time, straight from the definitions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.search.stages import CellProblem

Picks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan of all."""

    objective_s: float
    cell: CellProblem
    picks: Picks


def best_plan(cells: Sequence[CellProblem]) -> Best | None:
    """The plan of least J among all plans of all cells that fit; None where nothing fits."""
    best: Best | None = None
    for cell in cells:
        for picks in plans(cell):
            objective = objective_of(cell, picks)
            if best is None or objective < best.objective_s:
                best = Best(objective_s=objective, cell=cell, picks=picks)
    return best


def plans(cell: CellProblem) -> Iterator[Picks]:
    """Every plan of the cell that fits: chains of columns from block 0 to the last, one per virtual stage."""
    if cell.played is not None and len(cell.columns):
        every = tuple(range(len(cell.columns)))
        if not overfull(cell, every):
            yield every
        return
    by_start: dict[tuple[int, int], list[int]] = {}
    for number, (stage, first) in enumerate(zip(cell.columns.stage.tolist(), cell.columns.first.tolist(), strict=True)):
        by_start.setdefault((stage, first), []).append(number)
    last = cell.columns.last.tolist()

    def extend(stage: int, block: int, chosen: Picks) -> Iterator[Picks]:
        if stage == cell.num_stages:
            if block == cell.num_blocks and not overfull(cell, chosen):
                yield chosen
            return
        for number in by_start.get((stage, block), ()):
            yield from extend(stage + 1, last[number] + 1, (*chosen, number))

    yield from extend(0, 0, ())


def objective_of(cell: CellProblem, picks: Sequence[int]) -> float:
    """J from its definition, one micro-batch's seconds at a time."""
    if cell.played is not None:
        return cell.played.objective_s
    columns, pp, vpp = cell.columns, cell.layout.pp, cell.layout.vpp
    forward, backward, tail = [0.0] * pp, [0.0] * pp, [0.0] * pp
    for stage, pick in enumerate(picks):
        hops = (float(columns.hop_in_s[pick]) + float(columns.hop_out_s[pick])) / 2
        forward[stage % pp] += float(columns.forward_s[pick]) + hops
        backward[stage % pp] += float(columns.backward_s[pick]) + hops
        tail[stage % pp] += float(columns.tail_s[pick])
    through = sum(forward) + sum(backward)
    if cell.layout.schedule.value == "gpipe":
        fullest = max(forward) + max(backward)
    else:
        fullest = max(f + b for f, b in zip(forward, backward, strict=True))
    return (cell.num_micro_batches - 1 / vpp) * fullest + through / vpp + max(tail)


def lower_bound_of(cell: CellProblem, picks: Sequence[int]) -> float:
    """R from its definition."""
    if cell.played is not None:
        return cell.played.lower_bound_s
    columns, pp = cell.columns, cell.layout.pp
    work, tail = [0.0] * pp, [0.0] * pp
    for stage, pick in enumerate(picks):
        work[stage % pp] += float(columns.forward_s[pick]) + float(columns.backward_s[pick])
        tail[stage % pp] += float(columns.tail_s[pick])
    forward_before = both_before = bound = 0.0
    for device in range(pp):
        busy = cell.num_micro_batches * work[device]
        bound = max(bound, both_before + busy + tail[0], forward_before + busy + tail[device])
        forward_before += float(columns.forward_s[picks[device]])
        both_before += float(columns.forward_s[picks[device]]) + float(columns.backward_s[picks[device]])
    return bound


def overfull(cell: CellProblem, picks: Sequence[int], tolerance: float = 0.0) -> str | None:
    """The first device that holds more than it may, in words; None where the plan fits."""
    columns, pp = cell.columns, cell.layout.pp
    played = cell.played
    for device, vectors in enumerate(cell.in_flight if played is None else played.held):
        mine = picks[device::pp]
        if played is not None:
            mine = [pick for pick, there in zip(picks, played.devices.tolist(), strict=True) if there == device]
        for vector in vectors:
            held = 0.0
            for alive, pick in zip(vector[: len(mine)], mine, strict=True):
                held += float(columns.state_bytes[pick]) + alive * float(columns.activation_bytes[pick])
            if played is not None:
                for waiting, pick in zip(vector[len(mine) :], mine, strict=True):
                    held += waiting * float(played.waiting_bytes[pick])
            if held > cell.limits_bytes[device] * (1 + tolerance):
                return (
                    f"device {device} holds {held:.0f} of {cell.limits_bytes[device]:.0f} bytes with {vector} in flight"
                )
    return None


def flaw(cell: CellProblem, picks: Sequence[int], objective_s: float, tolerance: float = 1e-9) -> str | None:
    """What is wrong with a claimed plan and its J, in words; None where nothing is. No arithmetic of a solver."""
    columns = cell.columns
    if [int(columns.stage[pick]) for pick in picks] != list(range(cell.num_stages)):
        return f"picks {list(picks)} are not one column for each of {cell.num_stages} virtual stages"
    block = 0
    for stage, pick in enumerate(picks):
        if int(columns.first[pick]) != block:
            return f"virtual stage {stage} begins at block {int(columns.first[pick])}, but block {block} is next"
        block = int(columns.last[pick]) + 1
    if block != cell.num_blocks:
        return f"the plan ends after {block} of {cell.num_blocks} blocks"
    too_full = overfull(cell, picks, tolerance)
    if too_full:
        return too_full
    true_s = objective_of(cell, picks)
    if abs(true_s - objective_s) > tolerance * max(true_s, objective_s):
        return f"J is {true_s!r} s, not {objective_s!r} s"
    return None
