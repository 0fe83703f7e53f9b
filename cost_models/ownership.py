"""Are the import names ours? `planner` and `executor` are also other people's packages and many a local folder."""

import importlib.util
from pathlib import Path

PACKAGES = ("cost_models", "planner", "executor")
_ROOT = Path(__file__).resolve().parent.parent


class ForeignPackageError(ImportError):
    """Another package answers to one of Meshwright's import names."""

    exit_code = 2


def verify(names: tuple[str, ...] = PACKAGES, root: Path = _ROOT) -> None:
    """Raises ForeignPackageError where one of `names` would be imported from elsewhere than `root`."""
    for name in names:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).resolve().parent.parent != root:
            where = origin or (list(spec.submodule_search_locations or []) if spec else "nowhere")
            raise ForeignPackageError(
                f"the import name {name!r} leads to {where}, not to Meshwright's package in {root}. "
                f"Rename that folder or uninstall that distribution (`pip list` names it), or run Meshwright in a virtual "
                f"environment and a working directory without it"
            )
