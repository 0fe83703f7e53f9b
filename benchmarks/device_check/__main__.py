"""`python -m benchmarks.device_check [--dry] [--out FOLDER]`: one GPU, under 8 minutes; says so and ends well where there is none."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 480.0
"""The whole check."""
LAST_START_S = 300.0
"""No part starts later than this: the longest takes no more than the rest."""


def run(
    place: Any, progress: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> Mapping[str, Any]:
    """All parts in turn; those that could not start in time are named."""
    from benchmarks.device_check.checks import attentions, blocks, out_of_memory, products

    def last(place: Any) -> Iterator[dict[str, Any]]:
        yield out_of_memory(place)

    start_s, found, left_out = clock(), {}, []
    for name, part in {"products": products, "attention": attentions, "block": blocks, "out of memory": last}.items():
        if clock() - start_s > LAST_START_S:
            left_out.append(name)
            continue
        rows = []
        for row in part(place):
            rows.append(row)
            progress(line_of(row))
        found[name] = rows
    seconds = clock() - start_s
    return {"device": place.name, "seconds": round(seconds, 1), "parts": found, "left_out": left_out}


def line_of(row: Mapping[str, Any]) -> str:
    """A row for people."""
    if "skipped" in row:
        return f"{row['what']}: skipped, {row['skipped']}"
    if "runs_out" in row:
        told = {True: "ran out of memory", False: "fitted"}
        return (
            f"out of memory: mbs {row['mbs']} was promised {row['predicted_gib']:.1f} GiB (no) and {told[row['runs_out']]}; "
            f"half of it {row['half_gib']:.1f} GiB ({row['half_predicted']}) and {told[row['half_runs_out']]}"
        )
    line = (
        f"{row['what']:<52}{1e3 * row['predicted_s']:10.3f} ms {1e3 * row['measured_s']:10.3f} ms {row['error']:+7.0%}"
    )
    if "flops_per_s" in row:
        line += f"  {row['flops_per_s'] / 1e12:.1f} TFLOP/s"
    for way, held in row.get("memory_gib", {}).items():
        promised = "-" if held["predicted"] is None else f"{held['predicted']:.2f}"
        line += f"\n    {way:<12}{promised:>8} GiB promised, {held['measured']:8.2f} GiB measured"
    return line


def alone() -> None:
    """A process group of this process: the executor runs in one."""
    import torch.distributed as dist

    from executor.mesh import local_device, start_process_group

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    if not dist.is_initialized():
        backend = "gloo" if local_device().type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    start_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 too where there is no GPU: nothing is wrong then."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="the same way on a CPU, small")
    parser.add_argument("--out", type=Path, help="folder for the dated result")
    asked = parser.parse_args(arguments)
    try:
        import torch.distributed as dist
    except ImportError:
        print("device check: skipped, torch is not installed")
        return 0
    from benchmarks.device_check.place import dry, gpu

    if asked.dry:
        os.environ["MESHWRIGHT_DEVICE"] = "cpu"
    place = dry() if asked.dry else gpu()
    if place is None:
        print("device check: skipped, torch sees no GPU here that the planner knows (--dry goes the same way on a CPU)")
        return 0
    alone()
    try:
        found = run(place, lambda line: print(line, flush=True))
    finally:
        dist.destroy_process_group()
    print(
        f"{place.name}: {found['seconds']:.0f} s"
        + (f"; left out: {', '.join(found['left_out'])}" if found["left_out"] else "")
    )
    if asked.out:
        from benchmarks.registry import write_result

        print(f"wrote {write_result('device-check', found, asked.out)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
