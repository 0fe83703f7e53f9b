"""One process of a measuring session: started by planner.profiling.session."""

import sys

from planner.profiling.session import main

if __name__ == "__main__":
    main(sys.argv[1])
