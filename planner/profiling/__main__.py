"""One process of a measuring session or of a probe: started by planner.profiling.session and planner.profiling.probe."""

import sys
from pathlib import Path

from planner.profiling import probe, session

if __name__ == "__main__":
    (probe if (Path(sys.argv[1]) / probe.REQUEST_FILE).is_file() else session).main(sys.argv[1])
