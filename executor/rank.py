"""What `launch` has torchrun start on each rank: dies with torchrun from its first moment on, then becomes what it was given.

Importing torch takes seconds, on a busy machine tens of them. A rank that asks the kernel to die with its parent only after
that outlives a parent that was killed meanwhile.
"""

import faulthandler
import os
import runpy
import signal
import sys

from executor.launch import ASK_WHERE, die_with_parent

ORPHANED = 113
"""Exit code of a rank whose parent was gone before it could ask."""


def main() -> None:
    """`python -m executor.rank -m MODULE ARGUMENT...`, or a script in place of -m MODULE."""
    die_with_parent()
    faulthandler.register(ASK_WHERE, all_threads=False)
    # torchrun ends the others where one rank failed; the one that all waited for then says where it was
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    if os.getppid() == 1:
        sys.exit(ORPHANED)
    del sys.argv[0]
    if sys.argv[0] != "-m":
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
