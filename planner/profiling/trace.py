"""Any module as a Model: a user's factory runs in a process of its own, and what it made is read from its parameters.

A Hugging Face module is read by its configuration, everything else by its structure. Whichever way: the Model has exactly
as many parameters as the module, or there is none.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from cost_models.records import Model, RecordError, load
from planner.errors import InputError
from planner.profiling.contents import CONTENTS_FILE, ERROR_FILE, STAGE_FILE, Contents
from planner.profiling.factory import TAIL_LINES, has_form
from planner.profiling.structure import REMEDY, model_from_structure
from planner.readers.hf_config import FAMILIES, REFUSED, model_from_hf_config

TIMEOUT_S = 120.0
"""The import of torch and transformers takes 2 to 20 s, a model of 405 B parameters on the meta device 4 s."""
LAST_WORDS_S = 1.0
"""For a process that hangs to say where."""
_CHILD = """\
import sys
sys.path[:] = sys.argv[3:]
from planner.profiling.contents import main
main(sys.argv[1], sys.argv[2])
"""
"""The parent's path, without the current folder: a user's folder may be called as one of our packages is."""


def trace_module(factory: str, timeout_s: float = TIMEOUT_S) -> Model:
    """The Model of what `package.module:factory` makes; the factory takes no arguments and returns a torch.nn.Module.

    The current folder is on the path. Raises InputError, whatever is wrong: with the factory (its last lines), with the
    time (what hung), with the module (what was looked for and not found, or both numbers of parameters).
    """
    if not has_form(factory):
        raise InputError(f"{factory!r}: package.module:factory is needed, as in my_package.models:build")
    try:
        contents = _read(factory, timeout_s)
        return model_of(contents, factory)
    except (InputError, RecordError) as error:
        raise InputError(f"{factory}: {error}") from None


def model_of(contents: Contents, name: str) -> Model:
    """The Model of a module's contents; InputError where there is none with exactly its parameters."""
    # of a type that the reader does not know, the structure may still be a plain decoder's
    known = contents.config is not None and contents.config.get("model_type") in (*FAMILIES, *REFUSED)
    if known:
        assert contents.config is not None
        model = model_from_hf_config(contents.config, name)
        if not _has_head(contents, model):
            raise InputError(
                f"{contents.kind} has no head: no nn.Linear of shape ({model.vocab}, {model.hidden}). Let the factory make the "
                "class for causal language modelling"
            )
    else:
        model = model_from_structure(contents, name)
    own = _num_params(contents, model)
    if own != model.num_params:
        raise InputError(
            f"{contents.kind} has {own:,} parameters, and the model that its {'configuration' if known else 'structure'} "
            f"describes has {model.num_params:,}: something is shared, added or left out that a Model cannot say. {REMEDY}"
        )
    return model


def _has_head(contents: Contents, model: Model) -> bool:
    return any(
        one.shape == (model.vocab, model.hidden) and one.name.rpartition(".")[0] not in contents.embeddings
        for one in contents.parameters
    )


def _num_params(contents: Contents, model: Model) -> int:
    """Parameters, each once; a router's bias is a parameter to the record and a buffer to transformers."""
    tensors = [one for one in contents.parameters if one.same_as is None]
    if model.moe is not None and model.moe.router_bias:
        tensors += [one for one in contents.buffers if one.shape == (model.moe.num_experts,)]
    return sum(math.prod(one.shape) for one in tensors)


# The process -------------------------------------------------------------------------------------------------------


def _read(factory: str, timeout_s: float) -> Contents:
    """What the process found; InputError with its words where it found nothing, or not in time."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        place, log = Path(folder), Path(folder) / "log.txt"
        home = str(Path(__file__).resolve().parents[2])
        path = [entry for entry in sys.path if entry] + [home]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, factory, folder, *path],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise InputError(
                f"not done after {timeout_s:g} s; it hung while {_text(place / STAGE_FILE) or 'starting python'}"
                f"{_where(process, log)}. It was ended. Let the factory do nothing but make the module. {REMEDY}"
            ) from None
        finally:
            _end(process)
        if (place / ERROR_FILE).is_file():
            raise InputError(_text(place / ERROR_FILE))
        if not (place / CONTENTS_FILE).is_file():
            raise InputError(
                f"the process ended with {process.returncode} while {_text(place / STAGE_FILE) or 'starting python'}"
                f"{' (out of memory?)' if process.returncode == -signal.SIGKILL else ''}. Its last lines:\n  "
                + "\n  ".join(_text(log).splitlines()[-TAIL_LINES:])
            )
        return load(Contents, place / CONTENTS_FILE)


def _where(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The line at which a process hangs, as it says itself; empty where it cannot."""
    before = len(_text(log).splitlines())
    process.send_signal(signal.SIGUSR1)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    frames = [line.strip() for line in _text(log).splitlines()[before:] if line.strip().startswith("File ")]
    own = [frame for frame in frames if str(Path.cwd()) in frame]  # rather the user's line than the library's below it
    return f", at: {(own or frames)[0]}" if frames else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Leave no orphan, nor a process that the factory started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
