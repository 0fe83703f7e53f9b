"""A training run in which one rank fails at one step.

kill: SIGKILL. raise: an exception. hang: it sleeps. absent: it never joins. idle: no training, one rank behind the others.
"""

import os
import signal
import sys
import time

from executor.launch import note_progress

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: (_ for _ in ()).throw(ArithmeticError("planted fault")),
    "hang": lambda: time.sleep(3600),
}


def main(kind: str, rank: int, step: int, timeout_s: float) -> None:
    mine = int(os.environ["RANK"])
    if kind == "idle":
        note_progress(mine, step - 1 if mine == rank else step)
    if kind == "idle" or (kind == "absent" and mine == rank):
        time.sleep(3600)

    from executor.mesh import start_process_group
    from executor.train import train
    from tests.processes.layouts import Case

    def fail_at(number: int) -> None:
        if number == step and mine == rank:
            FAULTS[kind]()

    start_process_group(timeout_s)
    plan = Case(layout="dpr2").plan
    train(plan, num_steps=4, check=False, on_step=fail_at, timeout_s=timeout_s)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
