"""`meshwright VERB ...`: reads arguments, calls one library function, prints its document or its text.

Exit codes: 0 done; 1 the answer is no; 2 the input is wrong, or not supported yet; 3 our bug; 4 time limit without any
plan; 130 interrupted.
"""

import argparse
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from cost_models.ownership import verify
from cost_models.records.codec import RecordError, check_writable
from executor.cli.arguments import parser
from executor.cli.outcome import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    _show_what_can_be_shown()
    arguments = parser().parse_args(argv)
    _end_in_order_when_told_to()
    as_json = bool(getattr(arguments, "json", False))
    try:
        verify()
        _check_outputs(arguments)
        verbs = importlib.import_module("executor.cli.verbs")
        outcome: Outcome = getattr(verbs, arguments.verb)(arguments)
        _print(_json(outcome.document) if as_json else outcome.text())
        return outcome.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`meshwright plan | head`): nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the last door: what is not for people is our bug, and said so
        return _failed(error, as_json)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Where the result cannot be written, or would be written over what is read, is told before the work."""
    if arguments.verb == "demo":  # whose --out is a folder
        if not arguments.out:
            raise RecordError('--out "": a folder is needed, "." for the present one')
        return
    read = [
        getattr(arguments, name, None) or ()
        for name in ("plan", "request", "measurements", "against", "calibration", "cluster")
    ]
    names = {os.path.realpath(name) for one in read for name in ([one] if isinstance(one, str) else one)}
    for flag, shown in (("out", "-o"), ("fit", "--fit")):
        path = getattr(arguments, flag, None)
        if path is not None:
            if os.path.realpath(path) in names:
                raise RecordError(f"{shown} {path}: this file is read, and would be lost; name another one")
            check_writable(path)


def _end_in_order_when_told_to() -> None:
    """SIGTERM (a scheduler's, or `timeout`'s) unwinds like an error does, so that whoever started ranks ends them."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class _NoTorchError(Exception):
    """What measures or runs was asked where torch is not installed."""

    exit_code = 2


class _OutputError(Exception):
    """stdout is closed, or its disk is full."""

    exit_code = 2


def _print(text: str) -> None:
    try:
        if sys.stdout is None:
            raise _OutputError("the output cannot be written (stdout is closed)")
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # what is left in the buffer would fail once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _OutputError(f"the output cannot be written ({error.strerror})") from None


def _show_what_can_be_shown() -> None:
    """A terminal or a locale without Unicode gets a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _json(document: object) -> str:
    plain = getattr(sys.stdout, "encoding", None) or "ascii"
    return json.dumps(document, ensure_ascii=plain.lower() not in ("utf-8", "utf8"), allow_nan=False)


def _failed(error: Exception, as_json: bool) -> int:
    """Tells people what is wrong; an error that was not made for them is our bug (exit code 3)."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        error = _NoTorchError(
            "this needs torch, which is not installed here: pip install torch. plan, predict, check, explain and compare do "
            "without it"
        )
    code: int = getattr(error, "exit_code", 3)
    if code == 3:
        traceback.print_exception(error, file=sys.stderr)
        print("meshwright: this is a bug in Meshwright; please report it with the lines above", file=sys.stderr)
    else:
        print(f"meshwright: {error}", file=sys.stderr)
    if as_json and not isinstance(error, _OutputError):
        detail = getattr(error, "document", None)
        message = {"error": {"kind": type(error).__name__, "message": str(error), "exit_code": code}}
        _print(_json(message | (detail or {})))
    return code
