"""What this package raises.

ValueError
├── RefusedError       a plan, a model or a batch that cannot be made true here; says the law and the legal values
└── CheckpointError    a folder that is no complete checkpoint of this model and optimizer, or cannot become one
RuntimeError
└── LateRankError          a wait that ran into its time-out; says who is late
"""


class RefusedError(ValueError):
    """A plan, a model or a batch that this executor does not make true, with the reason."""

    exit_code = 2


class CheckpointError(ValueError):
    """A folder that is no complete checkpoint of this model and optimizer, or cannot become one."""

    exit_code = 2


class LateRankError(RuntimeError):
    """A wait for other ranks that ended by its time-out."""

    exit_code = 1

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class WrongResultError(RuntimeError):
    """The self-check found another layout than the planned one, or another loss or gradient than one process has."""

    exit_code = 1
