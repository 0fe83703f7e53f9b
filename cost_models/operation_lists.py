"""The order in which each device of a pipeline works, schedule by schedule.

A device's order is written as a word over (kind, chunk): which of its virtual stages goes forward or backward next. The
micro-batches need no letters of their own: every virtual stage takes them in ascending order (looped breadth-first: its
backwards in descending order). `letter` makes the words' letters, `arrays_of_words` adds stages and micro-batches.

Orders of torch.distributed.pipelining 2.13 (the tests compare them with torch itself): gpipe, 1f1b, interleaved (Narayanan 2021),
loopedbfs (Lamy-Poirier 2022), interleavedzb and zbv (Qi 2023), dualpipev (DeepSeek 2024).
vhalf and vmin are the building blocks of Qi 2024, "Pipeline Parallelism with Controllable Memory": see `_stable`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.intp]


class OperationKind(StrEnum):
    """What an operation computes, in the letters that torch prints too."""

    FORWARD = "F"
    BACKWARD = "B"
    """Whole backward: gradients of inputs and weights in one go."""
    INPUT_GRAD = "I"
    """Gradient of the inputs alone: all that the previous stage waits for."""
    WEIGHT_GRAD = "W"
    """Gradient of the weights alone: nobody waits for it before the end of the step."""


KINDS = tuple(OperationKind)
"""What the numbers of kinds in arrays mean."""
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = range(len(KINDS))


class Operation(NamedTuple):
    """One entry of a device's list. A tuple, not a dataclass: a large step has 65,000 of them."""

    kind: OperationKind
    stage: int
    """Virtual stage, 0 .. num_devices * num_virtual_per_device - 1."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value} s{self.stage} m{self.micro_batch}"


Operations = tuple[tuple[Operation, ...], ...]
"""For each device of the pipeline, its operations in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationArrays:
    """Operation lists as arrays: N operations, device by device, each device's in its order."""

    lengths: IntArray
    """(pp,) operations of each device."""
    kind: IntArray
    """(N,) index into `KINDS`."""
    stage: IntArray
    """(N,) virtual stage."""
    micro_batch: IntArray
    """(N,)"""

    @property
    def first(self) -> IntArray:
        """(pp,) index of each device's first operation."""
        return (np.cumsum(self.lengths) - self.lengths).astype(np.intp)

    @property
    def device(self) -> IntArray:
        """(N,)"""
        return np.repeat(np.arange(len(self.lengths), dtype=np.intp), self.lengths)

    def operation(self, index: int) -> Operation:
        """Entry `index`, spelt out."""
        return Operation(KINDS[self.kind[index]], int(self.stage[index]), int(self.micro_batch[index]))

    def lists(self) -> Operations:
        """The same as tuples, one a device."""
        rows = zip(self.kind.tolist(), self.stage.tolist(), self.micro_batch.tolist(), strict=True)
        flat = [Operation(KINDS[kind], stage, micro) for kind, stage, micro in rows]
        ends = np.cumsum(self.lengths).tolist()
        return tuple(tuple(flat[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def arrays_of_lists(lists: Operations) -> OperationArrays:
    """Any operation lists as arrays."""
    code = {kind: index for index, kind in enumerate(KINDS)}
    flat = [operation for listed in lists for operation in listed]
    return OperationArrays(
        lengths=np.array([len(listed) for listed in lists], dtype=np.intp),
        kind=np.array([code[operation.kind] for operation in flat], dtype=np.intp),
        stage=np.array([operation.stage for operation in flat], dtype=np.intp),
        micro_batch=np.array([operation.micro_batch for operation in flat], dtype=np.intp),
    )


def arrays_of_words(
    words: Sequence[Sequence[int] | IntArray], stages: Sequence[Sequence[int]], descending: bool
) -> OperationArrays:
    """Words of the devices with stages and micro-batches; `stages[p]` are those of device p by chunk.

    The n-th backward of a virtual stage, whole or of its inputs, is of its n-th micro-batch, its n-th W of the micro-batch
    of its n-th I. `descending` counts the micro-batches of the backwards down.
    """
    spelt = [np.asarray(word, dtype=np.intp) for word in words]
    micros = [_micro_batches(word, len(own), descending) for word, own in zip(spelt, stages, strict=True)]
    own_stages = [np.asarray(own, dtype=np.intp)[word % len(own)] for word, own in zip(spelt, stages, strict=True)]
    return OperationArrays(
        lengths=np.array([len(word) for word in spelt], dtype=np.intp),
        kind=np.concatenate(spelt) // len(stages[0]),
        stage=np.concatenate(own_stages),
        micro_batch=np.concatenate(micros),
    )


def _micro_batches(word: IntArray, num_chunks: int, descending: bool) -> IntArray:
    kind, chunk = word // num_chunks, word % num_chunks
    micro = np.empty(len(word), dtype=np.intp)
    for own in range(num_chunks):
        forwards = np.flatnonzero((chunk == own) & (kind == FORWARD))
        backwards = np.flatnonzero((chunk == own) & ((kind == BACKWARD) | (kind == INPUT_GRAD)))
        micro[forwards] = np.arange(len(forwards))
        count = np.arange(len(backwards))
        micro[backwards] = count[::-1] if descending else count
        weights = np.flatnonzero((chunk == own) & (kind == WEIGHT_GRAD))
        if len(weights):
            micro[weights] = micro[backwards[kind[backwards] == INPUT_GRAD]]
    return micro


def letter(kind: int, chunk: int, num_chunks: int) -> int:
    """The letter of a kind of operation on the device's `chunk`-th virtual stage."""
    return kind * num_chunks + chunk


# --- looped placement ---------------------------------------------------------------------------------------------------


def micro_batches_per_round(num_devices: int, num_micro_batches: int) -> int:
    """Micro-batches that the interleaved schedules take through one chunk before they turn to the next chunk.

    torch 2.13 makes max(1, num_micro_batches // num_devices) equal rounds of them.
    """
    return num_micro_batches // max(1, num_micro_batches // num_devices)


def gpipe(num_devices: int, num_chunks: int, num_micro: int, device: int) -> list[int]:
    """All forwards, then all backwards."""
    return [FORWARD] * num_micro + [BACKWARD] * num_micro


def one_f_one_b(num_devices: int, num_chunks: int, num_micro: int, device: int) -> list[int]:
    """As many forwards ahead as stages behind, then one forward and one backward in turn."""
    ahead = min(num_devices - 1 - device, num_micro)
    return [FORWARD] * ahead + [FORWARD, BACKWARD] * (num_micro - ahead) + [BACKWARD] * ahead


def looped_bfs(num_devices: int, num_chunks: int, num_micro: int, device: int) -> list[int]:
    """Every micro-batch through one chunk before the next chunk; backwards in the opposite order."""
    forwards = np.repeat(np.arange(num_chunks), num_micro)
    return [*forwards.tolist(), *(BACKWARD * num_chunks + forwards[::-1]).tolist()]


def _rounds(num_devices: int, num_chunks: int, num_micro: int) -> IntArray:
    """(v*m,) chunk of each forward: a round of micro-batches through each chunk, then the next round."""
    per_round = micro_batches_per_round(num_devices, num_micro)
    return (np.arange(num_chunks * num_micro, dtype=np.intp) // per_round) % num_chunks


def interleaved(num_devices: int, num_chunks: int, num_micro: int, device: int) -> IntArray:
    """1f1b over the chunks in rounds; the backwards run through the chunks from the last to the first."""
    chunks = _rounds(num_devices, num_chunks, num_micro)
    per_round = micro_batches_per_round(num_devices, num_micro)
    ahead = min((num_chunks - 1) * per_round + 2 * (num_devices - 1 - device), len(chunks))
    forwards, backwards = chunks, BACKWARD * num_chunks + num_chunks - 1 - chunks
    steady = np.stack([forwards[ahead:], backwards[: len(chunks) - ahead]], axis=1).ravel()
    return np.concatenate([forwards[:ahead], steady, backwards[len(chunks) - ahead :]])


def interleaved_zero_bubble(num_devices: int, num_chunks: int, num_micro: int, device: int) -> IntArray:
    """interleaved with half the warm-up, I in place of B, and the W of each I `device` places later."""
    chunks = _rounds(num_devices, num_chunks, num_micro)
    per_round = micro_batches_per_round(num_devices, num_micro)
    total = len(chunks)
    ahead = min((num_chunks - 1) * per_round + num_devices - 1 - device, total)
    inputs = INPUT_GRAD * num_chunks + num_chunks - 1 - chunks
    weights = WEIGHT_GRAD * num_chunks + num_chunks - 1 - chunks
    none = -1
    turns = np.full((total, 3), none, dtype=np.intp)  # forward, input gradient, weight gradient
    turns[: total - ahead, 0] = chunks[ahead:]
    turns[:, 1] = inputs
    late = min(device, total)
    turns[late:, 2] = weights[: total - late]
    word = np.concatenate([chunks[:ahead], turns.ravel(), weights[total - late :]])
    return np.asarray(word[word != none])


# --- V placement: two chunks, device p holds stages p and 2*pp-1-p ------------------------------------------------------

_F0, _F1, _B0, _B1, _I0, _I1, _W0, _W1 = range(8)


def zero_bubble_v(num_devices: int, num_chunks: int, num_micro: int, device: int) -> list[int]:
    """Warm-up down the V and up again, then F I W of either chunk in turn; the W that are left fill the end."""
    planned = max(2 * num_devices - 1, num_micro)  # a short step is a longer one without its last micro-batches
    to_turn, after = 2 * (num_devices - device) - 1, num_devices - device
    word = [_F0] * to_turn + [_F1, _F0] * device + [_F1, _I1, _W1] * after
    forwards = [to_turn + device, num_devices]
    rest = planned - forwards[0]
    word += [_F0, _I0, _W0, _F1, _I1, _W1] * rest
    word += [_I0, _W0, _F1, _I1, _W1] * (planned - rest - forwards[1])
    word += [_I0, _I1] * device + [_I0, _W0] * after
    word += [_W1] * (planned - word.count(_W1)) + [_W0] * (planned - word.count(_W0))
    return word if planned == num_micro else _without_later(word, num_micro)


def _without_later(word: list[int], num_micro: int) -> list[int]:
    """The word without what it does for micro-batches from `num_micro` on."""
    seen = [0] * 8
    kept = []
    for one in word:
        if seen[one] < num_micro:
            kept.append(one)
        seen[one] += 1
    return kept


def dual_pipe_v(num_devices: int, num_chunks: int, num_micro: int, device: int) -> list[int]:
    """Forwards of one chunk beside backwards of the other; backwards are split where that fills the start and the end.

    torch runs the two sides of an overlapped pair one after the other, forward first; so do we.
    """
    behind = num_devices - 1 - device
    word = [_F0] * (2 * behind) + [_F0, _F1] * (device + 1) + [_I1, _W1, _F1] * behind
    steady = num_micro - 2 * num_devices + device + 1
    word += [_F0, _B1, _F1, _B0] * steady + [_B1, _F1, _B0] * behind
    waiting: list[int] = []
    turns, half, odd = device + 1, (device + 1) // 2, device % 2
    splits = False
    for turn in range(turns):
        splits |= turn == half and odd == 1
        word.append(_I1 if splits else _B1)
        waiting += [_W1] * splits
        splits |= turn == half and odd == 0
        word.append(_I0 if splits else _B0)
        waiting += [_W0] * splits
    for _ in range(behind):
        word += waiting[:1]
        del waiting[:1]
        word.append(_I0 if splits else _B0)
        waiting += [_W0] * splits
    return word + waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Slots of unit length by which a neighbouring device runs an operation of one micro-batch later, along the dependency."""

    forward_down: int
    """Forward on the first chunk: device p waits for p - 1."""
    forward_up: int
    """Forward on the second chunk: device p waits for p + 1."""
    backward_down: int
    """Backward on the second chunk."""
    backward_up: int
    """Backward on the first chunk."""


V_MIN = Slopes(forward_down=1, forward_up=1, backward_down=1, backward_up=1)
"""Every operation follows its neighbour at once: the shortest life of activations, 4*pp slots on each device."""
V_HALF = Slopes(forward_down=2, forward_up=1, backward_down=2, backward_up=1)
"""6*pp slots on each device, half of what 1f1b keeps."""

PERIOD = 6
"""Slots between two micro-batches: F, I and W of two chunks, as if each took one slot."""


@lru_cache(maxsize=64)
def stable_slots(slopes: Slopes, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """For each device, the slots of F0, F1, I1, I0, W1, W0 of micro-batch 0 in the stable pattern.

    Micro-batch k runs PERIOD*k slots later, so the six must differ modulo PERIOD on every device. Of the patterns that allow
    that, the one in which activations live shortest on the device where they live longest; of these the shortest.
    """
    patterns = (_pattern(slopes, num_devices, delays) for delays in itertools.product(range(PERIOD), repeat=3))
    legal = [pattern for pattern in patterns if pattern is not None]
    assert legal, f"no stable pattern of {slopes} on {num_devices} devices"
    return min(legal, key=lambda pattern: (max(map(_life, pattern)), max(map(max, pattern)), pattern))


def _pattern(slopes: Slopes, num_devices: int, delays: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The slots of each device where the three turns of the V wait so long: the first F1, the first I1, the first I0."""
    last = num_devices - 1
    turn = slopes.forward_down * last + 1 + delays[0]
    loss = turn + slopes.forward_up * last + 1 + delays[1]
    inner = loss + slopes.backward_down * last + 1 + delays[2]
    slots = [
        (
            slopes.forward_down * device,
            turn + slopes.forward_up * (last - device),
            loss + slopes.backward_down * device,
            inner + slopes.backward_up * (last - device),
        )
        for device in range(num_devices)
    ]
    if any(len({slot % PERIOD for slot in own}) < len(own) for own in slots):
        return None
    return tuple((*own, *_weight_slots(own)) for own in slots)


def _life(slots: tuple[int, ...]) -> int:
    """Slots from F to the end of W, of both chunks."""
    first, second, _, _, weight_second, weight_first = slots
    return weight_first + 1 - first + weight_second + 1 - second


def _weight_slots(own: tuple[int, ...]) -> tuple[int, int]:
    """Slots of W1 and W0: the two residues that are free, so that the activations of both chunks live shortest together."""
    taken = {slot % PERIOD for slot in own}
    free = [residue for residue in range(PERIOD) if residue not in taken]

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    _, _, inner, outer = own
    return min(
        ((after(inner, one), after(outer, other)) for one, other in itertools.permutations(free)),
        key=lambda pair: (sum(pair), pair),
    )


def _stable(slopes: Slopes) -> Callable[[int, int, int, int], IntArray]:
    """Repeats the stable pattern for every micro-batch and keeps its order; idle slots at the ends are squeezed out."""

    def word(num_devices: int, num_chunks: int, num_micro: int, device: int) -> IntArray:
        slots = np.array(stable_slots(slopes, num_devices)[device])
        letters = np.array([_F0, _F1, _I1, _I0, _W1, _W0], dtype=np.intp)
        when = slots[None, :] + PERIOD * np.arange(num_micro)[:, None]
        order = np.argsort(when, axis=None, kind="stable")
        return np.asarray(np.tile(letters, num_micro)[order])

    return word


v_half = _stable(V_HALF)
v_min = _stable(V_MIN)
