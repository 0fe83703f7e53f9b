"""The command line: the composition root. It loads neither torch nor planner until a verb needs them."""

from executor.cli.main import main

__all__ = ["main"]
