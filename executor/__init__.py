"""Make a plan true in torch, and tell what happened.

`import executor` loads no torch; `executor.apply` and `executor.selfcheck` load it on first use.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.parallelize import Parallel as Parallel
    from executor.parallelize import apply as apply
    from executor.verify import selfcheck as selfcheck

_LAZY = {
    "apply": "executor.parallelize",
    "Parallel": "executor.parallelize",
    "selfcheck": "executor.verify",
}
"""Public name -> the module that holds it."""

__all__ = ["Parallel", "apply", "selfcheck"]


def _check_ownership(paths: list[str]) -> None:
    """Another package, or a local folder, of this name would be mixed with ours silently: better to stop here."""
    ours = Path(__file__).resolve().parent
    strangers = [path for path in paths if Path(path).resolve() != ours]
    if strangers or not (ours / "parallelize.py").is_file():
        found = strangers[0] if strangers else str(ours)
        raise ImportError(
            f"the import name 'executor' leads to {found}, which is not Meshwright's package. Legal: Meshwright's alone. "
            "Rename a local folder of this name, or run `pip uninstall executor` and install meshwright again."
        )


_check_ownership(list(__path__))


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'executor' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
