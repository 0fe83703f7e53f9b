"""Which of several plans to take where the model cannot tell them apart: the simplest.

Predictions of two layouts of one model on one cluster are off against each other by 5% and more, so a plan that is predicted
to be 1% faster is not known to be. What the model knows least (hops, bubbles, exchanges between many ranks) grows with the
number of ways in which a model is cut; what runs out of memory first is the larger micro-batch. In the published sweeps, the
simplest plan within 2% of the fastest prediction was measured within 0.5% of the best in the mean, the fastest one within 3.1%;
`python -m benchmarks picks` measures it again.
"""

from collections.abc import Sequence

from cost_models.records import Layout

TIE = 0.02
"""Share of the least time within which the simplest plan is taken; well below the model's pairwise error."""


def complexity(layout: Layout) -> tuple[int, ...]:
    """How much a layout cuts a model: ranks that hold one copy, chunks of a device, parts of the experts, micro-batch."""
    return layout.tp * layout.cp * layout.pp, layout.vpp, layout.ep * layout.etp, layout.mbs


def simplest(layouts: Sequence[Layout], seconds: Sequence[float]) -> int:
    """Number of the simplest layout within `TIE` of the least seconds; of equally simple ones the fastest."""
    least_s = min(seconds)
    close = [place for place, one_s in enumerate(seconds) if one_s <= least_s * (1 + TIE)]
    return min(close, key=lambda place: (complexity(layouts[place]), seconds[place]))
