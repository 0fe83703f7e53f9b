"""nccl-tests: tables that are printed from known times, and read back; logs, JSON; what is implausible."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError, NotYetError
from planner.readers.clusters import read_joined
from planner.readers.topology.curves import curve_of, marked, regimes
from planner.readers.topology.nccl_rows import is_nccl_json, is_nccl_tests
from planner.readers.topology.nccl_tests import read_nccl_json, read_nccl_tests
from planner.readers.topology.seen import SeenCollective
from planner.readers.topology.text import read_text

SHARE = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "alltoall": 1.0,
    "sendrecv": 0.0,
    "broadcast": 0.0,
}
"""Program -> multiple of (n-1)/n in its busbw; 0 = busbw is algbw."""
REDOP = {"all_reduce": "sum", "reduce_scatter": "sum"}


def seconds_of(size: int, latency_s: float, rate: float) -> float:
    return latency_s + size / rate


def numbers(program: str, size: int, ranks: int, seconds: float) -> tuple[int, float, float]:
    """count, algbw and busbw as nccl-tests computes them (doc/PERFORMANCE.md)."""
    algorithm = size / 1e9 / seconds
    share = SHARE[program] * (ranks - 1) / ranks or 1.0
    per_rank = program in ("all_gather", "reduce_scatter", "alltoall")
    return size // 4 // (ranks if per_rank else 1), algorithm, algorithm * share


def printed(value: float, width: int) -> str:
    """As many decimals as fit (src/util.cu, getFloatStr)."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def exact(program: str, ranks: int, sizes: list[int]) -> list[int]:
    """Sizes as they are printed: whole numbers of 16 bytes on every rank."""
    per_rank = program in ("all_gather", "reduce_scatter", "alltoall")
    return [size // (16 * ranks) * 16 * ranks if per_rank else size for size in sizes]


def table(
    program: str, ranks: int, sizes: list[int], *, header: bool = True, label: str = "", rate: float = 100e9
) -> str:
    lines = [f"# Collective test starting: {program}_perf"] if header else []
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
    )
    for size in exact(program, ranks, sizes):
        cells = []
        for _ in range(2):
            seconds = seconds_of(size, 20e-6, rate)
            count, algorithm, bus = numbers(program, size, ranks, seconds)
            cells += [printed(seconds * 1e6, 7), printed(algorithm, 6), printed(bus, 6), "0"]
        root = "0" if program == "broadcast" else "-1"
        lines.append(f"{size:12d} {count:12d} float {REDOP.get(program, 'none')} {root} {' '.join(cells)}")
    lines.append("# Avg bus bandwidth    : 1.0")
    return "\n".join(label + line for line in lines) + "\n"


SIZES = [2**power for power in range(16, 33, 2)]


def only(text: str, name: str = "log.txt", ranks: int | None = None) -> SeenCollective:
    (found,) = read_nccl_tests(text, name, ranks=ranks)
    return found


@pytest.mark.parametrize("program", ["all_reduce", "all_gather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 64])
@pytest.mark.parametrize("label", ["", " 0: ", "[1,0]<stdout>:", "   [1,0]<stdout>:"])
def test_the_number_of_ranks_is_recovered(program: str, ranks: int, label: str) -> None:
    text = table(program, ranks, SIZES, label=label)
    assert is_nccl_tests(text)
    found = only(text)
    assert found.num_ranks == ranks
    assert found.collective == {"alltoall": "all_to_all"}.get(program, program)
    assert [point.size_bytes for point in found.points] == exact(program, ranks, SIZES)
    assert not any(point.is_outlier for point in found.points)


@given(st.integers(2, 2048), st.sampled_from(["all_gather", "reduce_scatter"]), st.booleans())
def test_counts_tell_any_number_of_ranks(ranks: int, program: str, header: bool) -> None:
    sizes = [16 * ranks * 2**power for power in range(8, 22, 3)]
    assert only(table(program, ranks, sizes, header=header), f"{program}.txt").num_ranks == ranks


def test_a_ratio_that_leaves_several_counts_takes_the_header_then_eights_then_asks() -> None:
    rows = table("all_reduce", 1024, SIZES)
    devices = "".join(
        f"#  Rank {rank:2} Group  0 Pid {rank} on node{rank // 8:03} device {rank % 8} [0x63] NVIDIA H100 80GB HBM3\n"
        for rank in range(1024)
    )
    found = only(devices + rows)
    assert (found.num_ranks, found.num_nodes, found.gpu) == (1024, 128, "NVIDIA H100 80GB HBM3")
    with pytest.raises(InputError, match="say ranks=N"):
        only(rows)
    assert only(rows, ranks=1024).num_ranks == 1024
    with pytest.raises(InputError, match="ranks=8, and its bandwidths say"):
        only(rows, ranks=8)
    assert (
        "multiple of 8" in only(table("all_reduce", 72, SIZES)).notes[0]
        if only(table("all_reduce", 72, SIZES)).notes
        else True
    )


def test_without_a_name_the_columns_tell() -> None:
    for program, word in (
        ("all_reduce", "all_reduce"),
        ("reduce_scatter", "reduce_scatter"),
        ("broadcast", "broadcast"),
        ("sendrecv", "p2p"),
    ):
        text = table(program, 8, SIZES, header=False)
        assert only(text, ranks=8 if program in ("broadcast", "sendrecv") else None).collective == word
    guessed = only(table("alltoall", 8, SIZES, header=False))
    assert guessed.collective == "all_gather"
    assert "alltoall prints the same columns" in guessed.notes[0]
    assert only(table("alltoall", 8, SIZES, header=False), "logs/alltoall_8.txt").collective == "all_to_all"


def test_several_runs_in_one_log() -> None:
    found = read_nccl_tests(
        table("all_reduce", 8, SIZES) + "NCCL INFO something\n" + table("all_gather", 16, SIZES), "log.txt"
    )
    assert [(one.collective, one.num_ranks) for one in found] == [("all_reduce", 8), ("all_gather", 16)]


def test_collectives_without_a_cost_are_told_by_name() -> None:
    with pytest.raises(NotYetError, match="hypercube has no cost model"):
        only(table("all_gather", 8, SIZES).replace("all_gather_perf", "hypercube_perf"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" 4294967296 ", " 429496729 ", "its size over its time"),  # a digit is lost: bandwidth is not size over time
        ("all_reduce_perf", "sendrecv_perf", "and 1 for p2p"),
    ],
)
def test_what_no_program_prints(old: str, new: str, words: str) -> None:
    text = table("all_reduce", 8, SIZES[-2:])
    assert old in text
    with pytest.raises(InputError) as error:
        only(text.replace(old, new))
    assert words in str(error.value)


def test_rows_of_two_runs_are_not_one() -> None:
    with pytest.raises(InputError, match="rows of several runs, or invented"):
        only(
            table("all_reduce", 8, SIZES).replace("# Avg", "")
            + "\n".join(table("all_reduce", 2, SIZES, header=False).splitlines()[1:])
        )


def test_an_invented_table_is_refused(shared: Path) -> None:
    """A real table whose busbw column is replaced by pleasing numbers."""
    text = read_text(shared / "samples" / "nccl_tests" / "all_reduce_2node_4xH100_each.txt")
    with pytest.raises(InputError):
        only(text.replace("235.51", "300.00"))


def test_a_table_that_its_links_cannot_have_done(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(table("all_reduce", 16, SIZES))  # 188 GB/s of bus bandwidth
    assert read_joined([f"h100x16,{path}"]).measured is not None
    with pytest.raises(InputError, match="cannot exceed 100 GB/s"):
        read_joined([f"{path}", "gpu=h100", "nodes=2", "inter=1x400Gbps"])


def test_a_table_far_below_its_links(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(table("all_reduce", 8, SIZES, rate=2e9))
    with pytest.raises(InputError, match="NCCL ran over sockets"):
        read_joined([f"h100x8,{path}"])


# JSON --------------------------------------------------------------------------------------------------------------------


def json_of(program: str, ranks: int, sizes: list[int], *, listed: int = 1, ngpus: int = 8) -> dict[str, object]:
    results = []
    for size in exact(program, ranks, sizes):
        seconds = seconds_of(size, 20e-6, 100e9)
        count, algorithm, bus = numbers(program, size, ranks, seconds)
        half = {"time": seconds * 1e6, "alg_bw": algorithm, "bus_bw": bus, "nwrong": 0.0}
        results.append(
            {
                "size": size,
                "count": count,
                "type": "float",
                "redop": "none",
                "root": "    -1",
                "out_of_place": half,
                "in_place": half,
            }
        )
    devices = [{"rank": n * ngpus, "hostname": f"node{n}", "device_info": "NVIDIA B200"} for n in range(listed)]
    return {
        "version": 3,
        "args": [f"./build/{program}_perf", "-J", "x.json"],
        "config": {"nthreads": 1, "ngpus": ngpus, "devices": devices},
        "nccl_version": 22809,
        "results": results,
    }


@pytest.mark.parametrize("program", ["all_reduce", "all_gather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("ranks", [2, 8, 72, 1000])
def test_json_has_the_digits_that_tell_any_number_of_ranks(program: str, ranks: int) -> None:
    data = json.loads(json.dumps(json_of(program, ranks, SIZES, ngpus=min(8, ranks))))
    assert is_nccl_json(data)
    (found,) = read_nccl_json(data, "x.json")
    assert found.num_ranks == ranks
    assert found.gpu == "NVIDIA B200"


def test_json_lists_the_first_device_of_each_process() -> None:
    (found,) = read_nccl_json(json_of("sendrecv", 16, SIZES, listed=2), "x.json")
    assert (found.num_ranks, found.num_nodes) == (16, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "version 9"),
        ({"results": []}, "no result"),
        ({"results": [{"size": 8}]}, "without 'count'"),
        ({"results": ["x"]}, "a result is a str"),
        ({"config": {"nthreads": -1}}, "nthreads=-1"),
    ],
)
def test_damaged_json(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        read_nccl_json({**json_of("all_reduce", 8, SIZES), **change}, "x.json")
    assert words in str(error.value)


# Curves ------------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e-3), st.floats(1e9, 1e12), st.sets(st.integers(0, 16), max_size=3), st.floats(3.0, 50.0))
def test_a_planted_outlier_is_found_and_no_other(latency_s: float, rate: float, where: set[int], times: float) -> None:
    sizes = [2**power for power in range(13, 34)]
    seconds = {size: seconds_of(size, latency_s, rate) for size in sizes}
    planted = {sizes[index] for index in where if times * seconds[sizes[index]] > 2.0 * seconds[sizes[index + 2]]}
    for size in planted:
        seconds[size] *= times
    points = marked(seconds)
    assert {point.size_bytes for point in points if point.is_outlier} == planted
    curve = curve_of(points, "test", "2026-12-01")
    assert list(curve.seconds) == sorted(curve.seconds)
    for size, second in zip(curve.sizes_bytes, curve.seconds, strict=True):
        assert second == pytest.approx(seconds_of(int(size), latency_s, rate), rel=1e-6)


def test_two_numbers_of_a_curve() -> None:
    both = regimes(marked({size: seconds_of(size, 30e-6, 50e9) for size in [2**power for power in range(3, 33)]}))
    assert both.latency_s == pytest.approx(30e-6, rel=0.1)
    assert both.bytes_per_s == pytest.approx(50e9, rel=0.001)


def test_a_dip_is_spread_over_its_neighbours() -> None:
    points = marked({1024: 10e-6, 2048: 11e-6, 4096: 10.5e-6, 8192: 12e-6})
    assert not any(point.is_outlier for point in points)
    seconds = curve_of(points, "test", "2026-12-01").seconds
    assert seconds[1] == seconds[2] == pytest.approx(math.sqrt(11e-6 * 10.5e-6))


@pytest.mark.parametrize(
    "row",
    [
        " 1073741824 268435456 float sum -1 8687.1 123.60 216.30 0 8719.1 123.15 215.51 0",
        " 1073741824 268435456 float sum -1 8687.1 123.60 216.30 N/A 8719.1 123.15 215.51 N/A",
        " 1073741824 268435456 float sum 8687.1 123.60 216.30 2e-06 8719.1 123.15 215.51 2e-06",  # before roots were printed
        " 1073741824 268435456 float sum -1 8687.1 123.60 216.30 0 8719.1 123.15 215.51 0 2026-03-01 10:00:00",
        " 1073741824 268435456 float sum -1 8687.1 123.60 216.30 0 8600.0 8800.0 8790.0 0.50 8719.1 123.15 215.51 0 8600.0 8800.0 8790.0 0.50",
        " 1073741824 268435456 float sum -1                                  8687.1 123.60 216.30 0",  # in place alone
        "[1,0]<stdout>:  1073741824     268435456     float     sum      -1   8.7e+03  123.60  216.30      0   8719.1  123.15  215.51      0",
    ],
)
def test_rows_of_every_release(row: str) -> None:
    found = only(f"# busbw\n{row}\n")
    assert (found.collective, found.num_ranks, len(found.points)) == ("all_reduce", 8, 1)
    assert found.points[0].seconds == pytest.approx(8687.1e-6, rel=0.003)


@pytest.mark.parametrize(
    "row", [" 1073741824 268435456 float sum -1 8687.1 123.60", " 8 2 float sum -1 N/A N/A N/A 0 N/A N/A N/A 0"]
)
def test_rows_that_are_cut(row: str) -> None:
    with pytest.raises(InputError):
        only(f"# busbw\n{row}\n")
