"""Four hosts on one machine: network namespaces with links of chosen bandwidth and delay (root, Linux, iproute2)."""

from pathlib import Path


def probe_ranks_file() -> Path:
    """The program that probes from every host."""
    return Path(__file__).with_name("probe_ranks.py")


def plan_ranks_file() -> Path:
    """The program that runs plans from every host."""
    return Path(__file__).with_name("plan_ranks.py")


def server_ranks_file() -> Path:
    """The program that sums gradients by rings and by servers."""
    return Path(__file__).with_name("server_ranks.py")
