"""Seconds that offloading to host memory adds to a step, on each position of the pipeline.

  optimizer   gradients to the host, the update there, weights back. The update moves `offload.update_bytes` of host memory per
              parameter at a share of `offload.host_bandwidth_bytes_per_s`, which the ranks of a node share (ZeRO-Offload,
              arXiv 2101.06840, section 4). Gradients leave while the backward pass runs: the share `overlap.offload` of
              their time is hidden; the way back is not, since the next forward pass waits for it.
  param       a rank's part of the weights comes from the host for each forward and each backward pass of a micro-batch
              (ZeRO-Infinity, arXiv 2104.07857, section 5), hidden to the same share.

Each way over the host link takes bytes / (bandwidth·efficiency); a link is one device's own.
"""

from collections.abc import Sequence

import numpy as np

from cost_models.calibrations import value
from cost_models.collectives import link_bytes_per_s
from cost_models.compute import FloatArray, element_bytes
from cost_models.memory import moved_states, state_bytes
from cost_models.peaks import DeviceMemory
from cost_models.problem import Problem
from cost_models.records import Decision, RecordError


def offload_s(problem: Problem, decision: Decision, devices: Sequence[DeviceMemory]) -> FloatArray:
    """(pp,) seconds beside the step without offloading; RecordError where the way to the host is not known."""
    if not problem.offload:
        return np.zeros(len(devices))
    if len(problem.cluster.pools) > 1:
        raise RecordError("offloading on a cluster of several kinds of nodes has no price yet")
    node = problem.cluster.pools[0].kind
    link = node.host_link
    if link is None:
        raise RecordError(
            f"node kind {node.name!r} does not say how its devices reach the host (host_link), so offloading has no price; "
            "name a known GPU, or give host_link"
        )
    calibration, moved, per = problem.calibration, moved_states(problem), state_bytes(problem)
    rate = link_bytes_per_s(link, calibration)
    exposed = 1.0 - value(calibration, "overlap.offload", problem.runtime.name)
    host_rate = value(calibration, "offload.host_bandwidth_bytes_per_s") / node.gpus_per_node
    found = []
    for device in devices:
        always = device.host.get("step 2", 0.0)
        params = always / sum(getattr(per, name) for kind, name in _FIELDS.items() if kind in moved)
        seconds = 0.0
        if "optimizer" in moved:
            seconds += (
                params * per.gradient / rate * exposed + params * element_bytes(problem.workload.precision) / rate
            )
            seconds += params * value(calibration, "offload.update_bytes") / host_rate
        if "weights" in moved:
            seconds += 2 * decision.num_micro_batches * params * per.weight / rate * exposed
        found.append(seconds)
    return np.array(found)


_FIELDS = {"weights": "weight", "gradients": "gradient", "optimizer": "optimizer"}
