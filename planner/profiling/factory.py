"""`package.module:factory`, a user's own code: found and called, and whatever is wrong with it told in words."""

import difflib
import importlib
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

TAIL_LINES = 8
"""Lines of a user's traceback that an error repeats."""
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class FactoryError(Exception):
    """What is wrong with the factory, in words."""


def has_form(text: str) -> bool:
    """Is it `package.module:factory`, whether there is one or not?"""
    return _FORM.fullmatch(text) is not None


def factory_of(text: str) -> Callable[[], Any]:
    """The function that `package.module:factory` names. Raises FactoryError, also where the import raises."""
    name, _, attribute = text.partition(":")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything)
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise FactoryError(
                f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages; run the command in the "
                "folder that holds it, or install it"
            ) from None
        raise FactoryError(f"importing {name} raised {told(error)}") from None
    build = getattr(module, attribute, None)
    if callable(build):
        return build  # type: ignore[no-any-return]
    if build is not None:
        raise FactoryError(f"{attribute} of {name} is a {type(build).__name__}; a function without arguments is needed")
    callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(attribute, callables, n=5, cutoff=0.5) or callables[:8]
    raise FactoryError(f"{name} has no {attribute!r}; it has: {', '.join(near) or 'nothing that can be called'}")


def made_by(build: Callable[[], Any]) -> "nn.Module":
    """The module that a factory makes. Raises FactoryError where it raises, or makes anything else."""
    from torch import nn

    try:
        made = build()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything)
        raise FactoryError(f"the factory raised {told(error)}") from None
    if not isinstance(made, nn.Module):
        raise FactoryError(f"the factory returned a {type(made).__name__}; a torch.nn.Module is needed")
    return made


def told(error: BaseException) -> str:
    """An error of the user's code: what, and the last lines of where."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return f"{type(error).__name__}. Its last lines:\n  " + "\n  ".join(lines[-TAIL_LINES:])
