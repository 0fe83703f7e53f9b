"""`python -m executor`: the command line, also where the console script is not on the PATH."""

import sys

from executor.cli import main

sys.exit(main())
