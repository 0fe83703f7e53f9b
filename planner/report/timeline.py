"""A simulated step as a Chrome trace: one process per pipeline device, one bar per operation. Perfetto opens it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.records.codec import write_atomic
from cost_models.schedules import FloatArray, OperationKind
from cost_models.simulation import Simulation

_US_PER_S = 1e6  # the trace format counts in microseconds

_KIND_WORDS = {
    OperationKind.FORWARD: "forward",
    OperationKind.BACKWARD: "backward",
    OperationKind.INPUT_GRAD: "input gradient",
    OperationKind.WEIGHT_GRAD: "weight gradient",
}

# Names of the palette that the Chrome trace viewer fixes; Perfetto picks colours by the bar's name and ignores them.
_KIND_COLOURS = {
    OperationKind.FORWARD: "thread_state_running",
    OperationKind.BACKWARD: "thread_state_iowait",
    OperationKind.INPUT_GRAD: "rail_response",
    OperationKind.WEIGHT_GRAD: "rail_load",
}


def timeline_events(
    simulation: Simulation, tail_parts_s: Mapping[str, FloatArray] | None = None
) -> list[dict[str, Any]]:
    """The trace events of a simulated step, in microseconds from its start.

    tail_parts_s names the pieces of the tail in the order in which they run, (pp,) seconds each, such as gradient
    synchronisation and optimizer; without it the tail is one bar. ValueError where they do not add up to the tail.
    """
    parts = {"tail": simulation.tail_s} if tail_parts_s is None else dict(tail_parts_s)
    sum_s = np.sum(list(parts.values()), axis=0)
    if np.shape(sum_s) != np.shape(simulation.tail_s) or not np.allclose(sum_s, simulation.tail_s, rtol=1e-9, atol=0):
        raise ValueError(
            f"the tail's parts {', '.join(parts)} add up to {np.asarray(sum_s).tolist()} s, "
            f"the simulated tails are {simulation.tail_s.tolist()} s; they must be equal"
        )
    events: list[dict[str, Any]] = []
    for device in range(len(simulation.tail_s)):
        events.append({"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}})
        events.append({"ph": "M", "pid": device, "name": "process_sort_index", "args": {"sort_index": device}})
    events.extend(_operation_events(simulation))
    for device, start_s in enumerate(simulation.device_end_s.tolist()):
        for name, seconds in parts.items():
            part_s = float(seconds[device])
            if part_s > 0:
                events.append(_bar(device, name, "tail", start_s, part_s, {}))
            start_s += part_s
    return events


def _operation_events(simulation: Simulation) -> list[dict[str, Any]]:
    columns = (
        simulation.device,
        simulation.kind,
        simulation.stage,
        simulation.micro_batch,
        simulation.start_s,
        simulation.end_s,
    )
    events = []
    for device, code, stage, micro_batch, start_s, end_s in zip(*(c.tolist() for c in columns), strict=True):
        kind = simulation.kinds[code]
        arguments = {"stage": stage, "micro_batch": micro_batch}
        bar = _bar(
            device, f"{kind.value} s{stage} m{micro_batch}", _KIND_WORDS[kind], start_s, end_s - start_s, arguments
        )
        events.append(bar | {"cname": _KIND_COLOURS[kind]})
    return events


def _bar(
    device: int, name: str, category: str, start_s: float, seconds: float, arguments: dict[str, int]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": device,
        "tid": 0,
        "name": name,
        "cat": category,
        "ts": start_s * _US_PER_S,
        "dur": seconds * _US_PER_S,
        "args": arguments,
    }


def timeline_json(simulation: Simulation, tail_parts_s: Mapping[str, FloatArray] | None = None) -> str:
    """The trace as a JSON document; arguments as in `timeline_events`."""
    document = {"traceEvents": timeline_events(simulation, tail_parts_s), "displayTimeUnit": "ms"}
    return json.dumps(document, separators=(",", ":")) + "\n"


def write_timeline(path: Path, simulation: Simulation, tail_parts_s: Mapping[str, FloatArray] | None = None) -> None:
    """Writes the trace to `path`, whole or not at all; arguments as in `timeline_events`."""
    write_atomic(path, timeline_json(simulation, tail_parts_s))
