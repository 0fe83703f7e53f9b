"""Is a hand-made cluster or workload one of this world? Wrong units are off by 10^3 or 10^9, and nothing else would notice."""

from collections.abc import Iterator

from cost_models.data import rows
from cost_models.records import Cluster, Device, NodeKind, Workload
from cost_models.records.near_names import did_you_mean
from planner.errors import InputError

LINK_BYTES_PER_S = (1e6, 1e14)
"""From 10 Mbit/s over the internet to 50 times an NVLink 5 domain (1.8e12, data sheet)."""
MEMORY_BYTES = (2**24, 2**44)
"""Of one device: from a share of a small machine's to 16 TiB of a host's."""
MEMORY_BYTES_PER_S = (1e8, 1e15)
"""From a tenth of a DDR channel to 100 times HBM3e (8e12, data sheet)."""
FLOPS_PER_S = (1e7, 1e18)
"""From a thousandth of a CPU core to 100 times a B300 in fp8 (5e15, data sheet)."""
MOST_GPUS = 2**20
"""GPUs of a cluster: ten times the largest that anybody has trained on."""


MOST_TOKENS_OF_SEQUENCE = 2**27
"""A hundred times the longest context that anybody has trained on (1 Mi tokens)."""
MOST_TOKENS_OF_STEP = 2**40
"""Ten thousand times the largest global batch that anybody has reported (some 10^8 tokens)."""


def refuse_implausible_workload(workload: Workload) -> None:
    """Raises InputError for a sequence or a step of more tokens than anybody trains with."""
    if workload.seq > MOST_TOKENS_OF_SEQUENCE:
        raise InputError(
            f"seq={workload.seq:,}: up to {MOST_TOKENS_OF_SEQUENCE:,} is plausible; it is the tokens of one sequence, as in 8192"
        )
    if workload.tokens > MOST_TOKENS_OF_STEP:
        raise InputError(
            f"gbs·seq = {workload.gbs:,}·{workload.seq:,} = {workload.tokens:,} tokens a step: up to {MOST_TOKENS_OF_STEP:,} is "
            "plausible; gbs is the sequences of one step, over all ranks"
        )


def refuse_implausible(cluster: Cluster) -> None:
    """Raises InputError for the first number that no device, link or cluster has, with the range and the unit."""
    for index, pool in enumerate(cluster.pools):
        for place, value, (least, most), unit, example in _numbers(pool.kind):
            if not least <= value <= most:
                raise InputError(
                    f"cluster.pools[{index}].kind.{place}={value:g}: between {least:g} and {most:g} is plausible; the unit is "
                    f"{unit}, as in {example}"
                )
        _refuse_device(pool.kind.device, f"cluster.pools[{index}].kind.device")
    refuse_too_many(cluster.num_gpus)


def refuse_too_many(num_gpus: int) -> None:
    """Raises InputError for more GPUs than a cluster may have."""
    if num_gpus > MOST_GPUS:
        raise InputError(f"a cluster of {num_gpus:,} GPUs: up to {MOST_GPUS:,} are planned for")


def _numbers(kind: NodeKind) -> Iterator[tuple[str, float, tuple[float, float], str, str]]:
    device = kind.device
    yield "intra.bandwidth_bytes_per_s", kind.intra.bandwidth_bytes_per_s, LINK_BYTES_PER_S, "bytes a second", "4.5e11"
    yield "nic.bandwidth_bytes_per_s", kind.nic.bandwidth_bytes_per_s, LINK_BYTES_PER_S, "bytes a second", "5e10"
    yield "device.memory_bytes", device.memory_bytes, MEMORY_BYTES, "bytes", "85520809984"
    bandwidth = device.memory_bandwidth_bytes_per_s
    yield "device.memory_bandwidth_bytes_per_s", bandwidth, MEMORY_BYTES_PER_S, "bytes a second", "3.35e12"
    for field in ("peak_flops_per_s", "matmul_flops_per_s"):
        for precision, rate in getattr(device, field).items():
            yield f"device.{field}.{precision}", rate, FLOPS_PER_S, "FLOP a second", "9.89e14"


def _refuse_device(device: Device, place: str) -> None:
    for precision, rate in device.matmul_flops_per_s.items():
        peak = device.peak_flops_per_s.get(precision)
        if peak is not None and rate > 1.01 * peak:
            raise InputError(
                f"{place}.matmul_flops_per_s.{precision}={rate:g} is above peak_flops_per_s.{precision}={peak:g}; no device "
                "multiplies faster than its peak"
            )
    families = sorted({row["family"] for row in rows("devices").values()} | {"cpu"})
    if device.family not in families:
        hint = did_you_mean(device.family, families)
        raise InputError(f"{place}.family={device.family!r} is not known{hint} Known families: {', '.join(families)}")
