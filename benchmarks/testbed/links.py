"""What the links of the testbed are: bandwidths by pair of hosts, of a host's way out and in, and delayed pairs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

NUM_HOSTS = 4
PAIR = 2
"""Hosts 2i and 2i+1 are near each other."""
MOST_BITS_PER_S = 1e9
"""What two cores carry between four hosts at once; faster links would measure the machine."""
LEAST_BITS_PER_S = 1e6
"""Below it a message of 1 MB takes eight seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Two hosts whose packets to each other take a way round through a relay."""

    hosts: tuple[int, int]
    """Both ends."""
    one_way_s: float
    """Added to each packet."""
    bits_per_s: float
    """In each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All links of the testbed. What is not said is unshaped, which on veth is the speed of the machine."""

    pairs_bits_per_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(from, to) -> its bandwidth; each pair has a link of its own in each direction."""
    out_bits_per_s: Mapping[int, float] = field(default_factory=dict)
    """Host -> all that leaves it together: its network interface."""
    in_bits_per_s: Mapping[int, float] = field(default_factory=dict)
    """Host -> all that reaches it together."""
    delays: tuple[Delay, ...] = ()
    """Delayed pairs; their own rates hold in place of those above."""
    switch_delay_s: float = 0.0
    """Added to each packet between any two hosts, at the rates of their interfaces: a switch far away."""

    def __post_init__(self) -> None:
        rates = [*self.pairs_bits_per_s.values(), *self.out_bits_per_s.values(), *self.in_bits_per_s.values()]
        for bits_per_s in (*rates, *(delay.bits_per_s for delay in self.delays)):
            if not LEAST_BITS_PER_S <= bits_per_s <= MOST_BITS_PER_S:
                raise ValueError(
                    f"a link of {bits_per_s:g} bit/s: between {LEAST_BITS_PER_S:g} and {MOST_BITS_PER_S:g} can be made here"
                )
        ends = [end for delay in self.delays for end in delay.hosts]
        ends += [host for pair in self.pairs_bits_per_s for host in pair]
        ends += [*self.out_bits_per_s, *self.in_bits_per_s]
        if strange := sorted({host for host in ends if not 0 <= host < NUM_HOSTS}):
            raise ValueError(f"host {strange[0]}: hosts are 0..{NUM_HOSTS - 1}")
        unsaid = set(range(NUM_HOSTS)) - (set(self.out_bits_per_s) & set(self.in_bits_per_s))
        if self.switch_delay_s and (unsaid or self.delays):
            raise ValueError("a switch that delays needs the rates of every host's interface, and no other delays")
        for delay in self.delays:
            if delay.hosts[0] == delay.hosts[1] or not 0 < delay.one_way_s < math.inf:
                raise ValueError(f"delay of hosts {delay.hosts}, {delay.one_way_s} s: two hosts and a positive time")


def two_pairs(near_bits_per_s: float, far_bits_per_s: float, delays: tuple[Delay, ...] = ()) -> Links:
    """Fast within (0, 1) and (2, 3), slow between them: two nodes of two devices, each pair with a link of its own."""
    return Links(
        pairs_bits_per_s={
            (one, other): near_bits_per_s if one // PAIR == other // PAIR else far_bits_per_s
            for one in range(NUM_HOSTS)
            for other in range(NUM_HOSTS)
            if one != other
        },
        delays=delays,
    )


def star(bits_per_s: float, of_host: Mapping[int, float] | None = None, delay_s: float = 0.0) -> Links:
    """Each host has one interface of `bits_per_s` in each direction, those in `of_host` another one, to a switch that is never full."""
    rates = {host: (of_host or {}).get(host, bits_per_s) for host in range(NUM_HOSTS)}
    return Links(out_bits_per_s=rates, in_bits_per_s=rates, switch_delay_s=delay_s)
