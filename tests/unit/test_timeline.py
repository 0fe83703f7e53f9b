"""The trace of a step says what the simulation says, in the units of the trace viewer."""

import itertools
import json

import numpy as np
import pytest

from cost_models.records.layout import Schedule
from cost_models.schedules import Operation, OperationKind, Pipeline
from cost_models.simulation import Simulation, StageTimes, simulate, simulate_operations
from planner.report.timeline import timeline_events, timeline_json, write_timeline


def simulated(num_devices: int = 2, num_virtual: int = 2, num_micro: int = 4) -> Simulation:
    pipeline = Pipeline(
        schedule=Schedule.INTERLEAVED,
        num_devices=num_devices,
        num_virtual_per_device=num_virtual,
        num_micro_batches=num_micro,
    )
    num_stages = pipeline.num_stages
    spent = StageTimes(
        forward_s=np.full(num_stages, 0.25),
        backward_s=np.full(num_stages, 0.5),
        hop_s=np.full(num_stages - 1, 0.125),
        tail_s=np.linspace(0.0, 1.0, num_devices),
    )
    return simulate(pipeline, spent)


def test_each_operation_is_a_bar_where_the_simulation_has_it():
    simulation = simulated()
    bars = [event for event in timeline_events(simulation) if event["ph"] == "X" and event["cat"] != "tail"]
    assert len(bars) == len(simulation.start_s) == 2 * 4 * 4
    named = {bar["name"]: bar for bar in bars}
    assert len(named) == len(bars)
    assert (named["F s0 m0"]["ts"], named["F s0 m0"]["dur"], named["F s0 m0"]["pid"]) == (0.0, 250_000.0, 0)
    assert named["F s1 m0"]["ts"] == 375_000.0
    assert named["B s3 m2"]["args"] == {"stage": 3, "micro_batch": 2}
    assert {bar["pid"] for bar in bars if bar["args"]["stage"] in (1, 3)} == {1}
    last = max(bar["ts"] + bar["dur"] for bar in bars)
    assert last == pytest.approx(simulation.device_end_s.max() * 1e6)


def test_each_device_is_a_named_process_in_its_place():
    names = [e for e in timeline_events(simulated()) if e["ph"] == "M" and e["name"] == "process_name"]
    order = [e for e in timeline_events(simulated()) if e["ph"] == "M" and e["name"] == "process_sort_index"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [(0, "device 0"), (1, "device 1")]
    assert [(e["pid"], e["args"]["sort_index"]) for e in order] == [(0, 0), (1, 1)]


def test_tails_follow_the_last_operation_in_their_order():
    simulation = simulated()
    parts = {"gradient synchronisation": simulation.tail_s * 0.75, "optimizer": simulation.tail_s * 0.25}
    tails = [event for event in timeline_events(simulation, parts) if event.get("cat") == "tail"]
    end = simulation.device_end_s[1] * 1e6
    # the first device's tail takes no time, and what takes no time is no bar
    assert [(e["pid"], e["name"]) for e in tails] == [(1, "gradient synchronisation"), (1, "optimizer")]
    assert [e["ts"] for e in tails] == pytest.approx([end, end + 750_000.0])
    assert tails[-1]["ts"] + tails[-1]["dur"] == pytest.approx(simulation.step_s * 1e6)
    assert [e["name"] for e in timeline_events(simulation) if e.get("cat") == "tail"] == ["tail"]


@pytest.mark.parametrize("share", [0.5, np.zeros(3)])
def test_tail_parts_that_do_not_add_up_are_refused(share):
    simulation = simulated()
    parts = {"optimizer": share if np.ndim(share) else simulation.tail_s * share}
    with pytest.raises(ValueError, match=r"parts optimizer add up to .* must be equal"):
        timeline_events(simulation, parts)


def test_bars_of_one_device_do_not_overlap():
    bars = [event for event in timeline_events(simulated(4, 3, 8)) if event["ph"] == "X"]
    for device in range(4):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in bars if e["pid"] == device)
        assert all(start >= end - 1e-3 for (_, end), (start, _) in itertools.pairwise(mine))


def test_split_backwards_have_words_of_their_own():
    lists = (tuple(Operation(OperationKind(kind), 0, 0) for kind in "FIW"),)
    one = np.ones(1)
    spent = StageTimes(
        forward_s=one, backward_s=one, hop_s=np.zeros(0), tail_s=one, input_grad_s=one, weight_grad_s=one
    )
    categories = [event["cat"] for event in timeline_events(simulate_operations(lists, spent)) if event["ph"] == "X"]
    assert categories == ["forward", "input gradient", "weight gradient", "tail"]


def test_the_file_is_the_document(tmp_path):
    path = tmp_path / "timeline.json"
    simulation = simulated()
    write_timeline(path, simulation)
    assert path.read_text() == timeline_json(simulation)
    document = json.loads(path.read_text())
    assert document == {"traceEvents": timeline_events(simulation), "displayTimeUnit": "ms"}
    assert [child.name for child in tmp_path.iterdir()] == ["timeline.json"]
