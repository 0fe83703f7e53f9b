"""Who meets whom when: rounds of disjoint pairs, so that N ranks take N - 1 rounds and not N² / 2 turns.

Up to ALL_PAIRS_RANKS ranks every pair meets (the circle method of round-robin tournaments). Beyond, a sample: neighbours at
distances 1, 2, 4, 8 ... in rank order, which joins every fast domain whose ranks follow one another, and random rounds.
"""

import random
from dataclasses import dataclass

Pair = tuple[int, int]

ALL_PAIRS_RANKS = 64
"""Above it pairs are sampled: 63 rounds of a few seconds each are some minutes."""
RANDOM_ROUNDS = 16
"""Of a sample: each rank meets as many others anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tournament:
    """All meetings."""

    rounds: tuple[tuple[Pair, ...], ...]
    """Pairs (low, high) of one round; no rank is in two of them."""
    num_pairs: int
    """Pairs that there are, whether they meet or not."""

    @property
    def num_meetings(self) -> int:
        """Pairs that meet."""
        return sum(map(len, self.rounds))


def tournament(ranks: int, *, all_pairs_ranks: int = ALL_PAIRS_RANKS, seed: int = 0) -> Tournament:
    """The meetings of `ranks` ranks. ValueError below 2."""
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: links are between at least 2 ranks")
    rounds = _circle(ranks) if ranks <= all_pairs_ranks else _sampled(ranks, random.Random(seed))
    return Tournament(rounds=tuple(rounds), num_pairs=ranks * (ranks - 1) // 2)


def _circle(ranks: int) -> list[tuple[Pair, ...]]:
    """One rank stands still, the others move around it; an odd one out rests."""
    places: list[int] = list(range(ranks + ranks % 2))
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < ranks)))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _sampled(ranks: int, dice: random.Random) -> list[tuple[Pair, ...]]:
    met: set[Pair] = set()
    rounds = []
    distance = 1
    while distance < ranks:
        for half in (0, 1):
            rounds.append(
                tuple((i, i + distance) for i in range(ranks - distance) if i // distance % 2 == half),
            )
        distance *= 2
    met.update(pair for pairs in rounds for pair in pairs)
    for _ in range(RANDOM_ROUNDS):
        order = list(range(ranks))
        dice.shuffle(order)
        pairs = {(min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=False)}
        rounds.append(tuple(sorted(pairs - met)))
        met |= pairs
    return [pairs for pairs in rounds if pairs]
