"""What this package raises.

ValueError
└── Refused           a plan, a model or a batch that cannot be made true here; says the law and the legal values
RuntimeError
└── LateRank          a wait that ran into its time-out; says who is late
"""


class Refused(ValueError):
    """A plan, a model or a batch that this executor does not make true, with the reason."""


class LateRank(RuntimeError):
    """A wait for other ranks that ended by its time-out."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks
