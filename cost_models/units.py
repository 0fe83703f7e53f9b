"""The one place where a unit changes. Inside: seconds, bytes, FLOP, bytes per second."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def gib(num_bytes: float) -> float:
    """Bytes as GiB (2**30)."""
    return num_bytes / GIB


def from_gib(value_gib: float) -> float:
    """GiB as bytes."""
    return value_gib * GIB


def from_gigabytes(value_gb: float) -> float:
    """Decimal GB, and GB/s, as bytes and bytes per second."""
    return value_gb * 1e9


def from_gigabits(value_gbit: float) -> float:
    """Gbit/s of a network interface as bytes per second."""
    return value_gbit * 1e9 / 8


def gigabytes(num_bytes: float) -> float:
    """Bytes, and bytes per second, as decimal GB and GB/s."""
    return num_bytes / 1e9


def gigabits(bytes_per_s: float) -> float:
    """Bytes per second as Gbit/s."""
    return bytes_per_s * 8 / 1e9


def ms(seconds: float) -> float:
    """Seconds as milliseconds."""
    return seconds * 1e3


def from_ms(value_ms: float) -> float:
    """Milliseconds as seconds."""
    return value_ms / 1e3


def tflops(flops: float) -> float:
    """FLOP, and FLOP/s, as TFLOP and TFLOP/s."""
    return flops / 1e12


def from_tflops(value_tflops: float) -> float:
    """TFLOP/s as FLOP/s."""
    return value_tflops * 1e12
