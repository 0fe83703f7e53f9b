"""What can go wrong in planning, and the exit code that each kind ends in.

MeshwrightError                 everything below; carries `exit_code`
├── InputError (ValueError)     2  the value, the law it breaks, the legal values, what to do
│   └── NoDeviceError           2  files that tell a machine's structure, and not what its GPUs are
├── NotYetError                 2  a known thing that is not supported yet, by its name
├── InfeasibleError             1  no plan exists: with the smallest things to change
├── TimeLimitError              4  the time ended before any plan was known
└── InternalError               3  our bug: two of our own answers disagree

Bad values inside records are `cost_models.records.RecordError`, a ValueError too; the command line ends it with 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class MeshwrightError(Exception):
    """Base of all errors that are meant for people."""

    exit_code: ClassVar[int] = 3


class InputError(MeshwrightError, ValueError):
    """The input is wrong."""

    exit_code: ClassVar[int] = 2


class NoDeviceError(InputError):
    """Files tell how GPUs are joined, and none says which they are; carries a device whose links fit, to show the rest with."""

    def __init__(self, message: str, stand_in: str):
        self.stand_in = stand_in
        """A device of the table of which nothing may be shown."""
        super().__init__(message)


class NotYetError(MeshwrightError):
    """The input is right, but Meshwright cannot do it yet."""

    exit_code: ClassVar[int] = 2


class InfeasibleError(MeshwrightError):
    """No plan satisfies everything that was asked."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, relaxations: tuple[str, ...] = (), changes: Sequence[Mapping[str, Any]] = ()):
        self.relaxations = relaxations
        """The smallest single changes that make a plan possible, each in words with its number."""
        self.document = {"changes": list(changes)}
        """The same for programs: kind, value, what is too little, and the plan found with it."""
        super().__init__("\n".join([message, *(f"  - {relaxation}" for relaxation in relaxations)]))


class TimeLimitError(MeshwrightError):
    """The time limit came before the first plan."""

    exit_code: ClassVar[int] = 4


class InternalError(MeshwrightError):
    """Two of our own computations disagree."""

    exit_code: ClassVar[int] = 3
