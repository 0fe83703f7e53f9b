"""Make a plan true in torch, and tell what happened.

`import executor` loads no torch; `apply`, `selfcheck`, `save` and `load` load it on first use.
"""

from typing import TYPE_CHECKING, Any

from cost_models.ownership import verify

if TYPE_CHECKING:
    from executor.checkpoint import load as load
    from executor.checkpoint import save as save
    from executor.parallelize import Parallel as Parallel
    from executor.parallelize import apply as apply
    from executor.verify import selfcheck as selfcheck

_LAZY = {
    "apply": "executor.parallelize",
    "Parallel": "executor.parallelize",
    "load": "executor.checkpoint",
    "save": "executor.checkpoint",
    "selfcheck": "executor.verify",
}
"""Public name -> the module that holds it."""

__all__ = ["Parallel", "apply", "load", "save", "selfcheck"]


verify(("cost_models", "executor"))


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'executor' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
