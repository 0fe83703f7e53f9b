"""Where nothing fits: the smallest single changes that would do."""

from dataclasses import replace

from cost_models.memory import state_bytes, usable_bytes
from cost_models.problem import Problem
from cost_models.records import Cluster
from cost_models.units import GIB
from planner.baseline import handbook
from planner.space import Space

MOST_TIMES = 4096
"""How many times the cluster's nodes are looked at before giving up."""


def relaxations(problem: Problem, space: Space, world: int) -> tuple[str, ...]:
    """Single changes that make a plan possible, in words with their numbers; empty where none was found."""
    found = []
    least = least_gpus(problem, world)
    if least is not None:
        found.append(
            f"take {least} GPUs of this kind instead of {world}: the least number of whole nodes that would do"
        )
    per_param = state_bytes(problem).total
    states_gib = per_param * problem.model.num_params / GIB
    found.append(
        f"model states alone are {states_gib:,.0f} GiB ({per_param:g} bytes a parameter), of "
        f"{world * usable_bytes(problem) / GIB:,.0f} GiB that {world} GPUs have; take GPUs with more memory, or an optimizer with less state"
    )
    return tuple(found)


def least_gpus(problem: Problem, world: int) -> int | None:
    """The least number of GPUs, in whole nodes beyond `world`, on which a handbook layout surely fits."""
    kind = problem.cluster.pools[0].kind
    states = state_bytes(problem).total * problem.model.num_params
    nodes = max(world // kind.gpus_per_node + 1, int(states / usable_bytes(problem) / kind.gpus_per_node))
    limit = max(nodes, 1) * MOST_TIMES
    while nodes <= limit:
        gpus = nodes * kind.gpus_per_node
        if handbook(on_nodes(problem, nodes), gpus) is not None:
            return gpus
        nodes += 1 if nodes < 64 else nodes // 32
    return None


def on_nodes(problem: Problem, num_nodes: int) -> Problem:
    """The same problem on so many nodes of the first kind."""
    pool = replace(problem.cluster.pools[0], num_nodes=num_nodes)
    cluster = Cluster(
        name=problem.cluster.name, pools=(pool,), fabric=problem.cluster.fabric, rails=problem.cluster.rails
    )
    return replace(problem, cluster=cluster)
