"""The surface of the command line, as data: verbs, their arguments and their help."""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from cost_models.records.layout_text import KEYS
from cost_models.records.near_names import near_names

DESCRIPTION = """\
Finds the fastest way to split a training run across a cluster, proves how close to the best it is,
runs it in torch, and compares what it promised with what happened."""

EPILOG = """\
start here:
  meshwright plan --model llama3-8b --cluster h100x64 --batch 512 --seq 8192 -o plan.json
  meshwright help            topics: layout, pins, requests, models, clusters, runtimes, support, laws,
                             exit-codes, calibration, tables"""

_Argument = tuple[str, dict[str, object]]

_MODEL: _Argument = ("--model", {"metavar": "M", "help": "a preset, an HF config.json, or a saved model"})
_CLUSTER: _Argument = (
    "--cluster",
    {
        "metavar": "C",
        "help": "preset x GPUs (h100x64, a100-80x1024), several joined by + (h100x64+a100-80x128), a cluster file, a probe, or "
        "files that people paste (topo.txt,topology.conf,gpu=h100)",
    },
)
_BATCH: _Argument = ("--batch", {"metavar": "SEQUENCES", "type": int, "help": "sequences in a step, over all ranks"})
_SEQ: _Argument = ("--seq", {"metavar": "TOKENS", "type": int, "help": "tokens in a sequence"})
_GPUS: _Argument = ("--gpus", {"metavar": "N|..N", "help": "exactly N GPUs of the cluster, or at most N"})
_PRECISION: _Argument = ("--precision", {"metavar": "P", "help": "bf16 (default), fp16, fp32, fp8, mxfp8 or nvfp4"})
_OPTIMIZER: _Argument = ("--optimizer", {"metavar": "O", "help": "adamw (default), adam or sgd"})
_RUNTIME: _Argument = (
    "--runtime",
    {"metavar": "R", "help": "torch (default), megatron, torchtitan, ...: `meshwright help runtimes`"},
)
_PIN: _Argument = (
    "--pin",
    {"metavar": "PINS", "help": 'what must hold, as in "tp=8, cp<=2, zero=1|3": `meshwright help pins`'},
)
_CURRENT: _Argument = (
    "--current",
    {"metavar": "LAYOUT", "help": "the layout that you run today; the answer is never predicted to be worse"},
)
_CALIBRATION: _Argument = (
    "--calibration",
    {"metavar": "FILE", "help": "fitted coefficients; the shipped ones by default"},
)
_TIME_LIMIT: _Argument = (
    "--time-limit",
    {"metavar": "S", "type": float, "help": "seconds for the search; the best plan so far is returned"},
)
_SWEEP: _Argument = (
    "--sweep",
    {
        "metavar": "AXIS=SIZES",
        "help": "plan many sizes: gpus=64..1024 (doubling), gpus=64,96,128, batch=256..2048, seq=...; tells which is enough, "
        "fastest and cheapest; -o FILE.png draws it, -o FILE.json writes it",
    },
)
_PRICE: _Argument = (
    "--price",
    {"metavar": "P", "type": float, "help": "of a GPU for an hour: --sweep then tells the price of a token"},
)
_OUT: _Argument = ("-o", {"metavar": "FILE", "dest": "out", "help": "write the result here"})
_LAYOUT: _Argument = (
    "--layout",
    {"metavar": "LAYOUT", "help": 'for example "tp4 pp2 dp8 zero1 mbs1": `meshwright help layout`'},
)
_REQUEST: _Argument = (
    "request",
    {"metavar": "REQUEST.json", "nargs": "?", "help": "a request file, in place of the flags"},
)
_STEPS: _Argument = ("--steps", {"metavar": "N", "type": int, "help": "measured optimizer steps (after 2 of warm-up)"})
_RANKS: _Argument = ("--ranks", {"metavar": "N", "type": int, "help": "processes on this machine"})
_TIMEOUT: _Argument = (
    "--timeout",
    {"metavar": "S", "type": float, "help": "seconds after which a run that does not end is stopped"},
)
_PROBLEM: list[_Argument] = [_MODEL, _CLUSTER, _BATCH, _SEQ, _GPUS, _PRECISION, _OPTIMIZER, _RUNTIME, _CALIBRATION]

VERBS: dict[str, tuple[str, list[_Argument]]] = {
    "demo": (
        "the main job on this machine: profile, probe, plan, run, compare",
        [("--out", {"metavar": "DIR", "default": "demo-results", "help": "folder of the results"})],
    ),
    "profile": (
        "show a model's blocks, or measure its operations on this machine",
        [
            (
                "model",
                {"metavar": "M", "help": "a preset, an HF config.json, a saved model, or package.module:factory"},
            ),
            _SEQ,
            ("--measure", {"action": "store_true", "help": "time its operations here"}),
            ("--mbs", {"metavar": "N", "type": int, "help": "sequences in a micro-batch, for --measure (default 1)"}),
            _PRECISION,
            _RANKS,
            _OUT,
        ],
    ),
    "probe": (
        "show a cluster, by name or from what people paste, or measure the links between ranks here (under torchrun: of many "
        "machines)",
        [
            (
                "cluster",
                {
                    "metavar": "C|FILE|KEY=VALUE",
                    "nargs": "*",
                    "help": "a preset x GPUs, a cluster file, or outputs of nvidia-smi, rocm-smi, NCCL, Slurm, Kubernetes ... with "
                    "facts beside them (nodes=16 inter=8x400Gbps); absent = measure here; `meshwright help clusters`",
                },
            ),
            (
                "--gpu",
                {"metavar": "NAME", "help": "what the GPUs of pasted files are, where no file names them (gpu=NAME)"},
            ),
            _RANKS,
            (
                "--backend",
                {
                    "choices": ("gloo", "nccl"),
                    "help": "between CPU processes or GPUs; default: nccl where there are GPUs",
                },
            ),
            (
                "--timeout",
                {"metavar": "S", "type": float, "help": "seconds after which a pair is given up (default 10)"},
            ),
            _OUT,
        ],
    ),
    "plan": (
        "choose the layout, and prove it",
        [_REQUEST, *_PROBLEM, _PIN, _CURRENT, _TIME_LIMIT, _SWEEP, _PRICE, _OUT],
    ),
    "predict": (
        "step time, throughput and memory of one layout, or of a table of runs",
        [
            (
                "request",
                {"metavar": "PLAN|REQUEST", "nargs": "?", "help": "a plan or a request file, in place of the flags"},
            ),
            *_PROBLEM,
            _LAYOUT,
            (
                "--runs",
                {
                    "metavar": "RUNS.csv",
                    "help": "a table of runs, one a row: each is predicted; `meshwright help tables`",
                },
            ),
        ],
    ),
    "check": (
        "what is wrong with a layout that somebody runs today",
        [_REQUEST, _MODEL, _CLUSTER, _BATCH, _SEQ, _PRECISION, _OPTIMIZER, _RUNTIME, _LAYOUT],
    ),
    "explain": (
        "why not another layout; what binds; its neighbours; two plans side by side; the proof; what to measure on few GPUs",
        [
            ("plan", {"metavar": "PLAN.json", "help": "a plan"}),
            ("--why-not", {"metavar": "LAYOUT", "help": 'what is not said is free, as in "tp4 pp8"'}),
            ("--against", {"metavar": "OTHER.json", "help": "another plan"}),
            (
                "--binds",
                {
                    "action": "store_true",
                    "help": "what binds, and what more memory, batch, links or fewer pins would give",
                },
            ),
            ("--neighbours", {"action": "store_true", "help": "all layouts one change away, each with its reason"}),
            ("--certificate", {"action": "store_true", "help": "all cells with their bounds, and why each is out"}),
            (
                "--anchor",
                {
                    "metavar": "GPUS",
                    "type": int,
                    "help": "the run on so few GPUs that says most of the plan; -o writes it, `run` and `compare --fit` take it",
                },
            ),
            _CALIBRATION,
            _OUT,
        ],
    ),
    "run": (
        "run a plan in torch and measure it",
        [
            ("plan", {"metavar": "PLAN.json", "help": "a plan"}),
            (
                "--module",
                {"metavar": "package.module:factory", "help": "your own model; Meshwright's decoder by default"},
            ),
            _STEPS,
            _TIMEOUT,
            (
                "--no-selfcheck",
                {"action": "store_true", "help": "do not compare gradients with those of one process first"},
            ),
            (
                "--trace",
                {"metavar": "DIR", "help": "trace one more step of each rank: DIR/rank0.json, ... for Perfetto"},
            ),
            _OUT,
        ],
    ),
    "compare": (
        "what was promised beside what was measured",
        [
            ("plan", {"metavar": "PLAN.json", "help": "a plan"}),
            ("measurements", {"metavar": "MEASUREMENT.json", "nargs": "+", "help": "what `run` wrote"}),
            (
                "--fit",
                {"metavar": "CALIBRATION.json", "help": "write the calibration, refitted with these measurements"},
            ),
        ],
    ),
    "help": (
        "one topic in full",
        [
            ("topic", {"metavar": "TOPIC", "nargs": "?", "help": "without one: the topics"}),
            ("runtime", {"metavar": "RUNTIME", "nargs": "?", "help": "of `help support`: one runtime in full"}),
        ],
    ),
}
"""Verb -> what it does, and its arguments as argparse takes them."""


class _Parser(argparse.ArgumentParser):
    """Says what an unknown verb or flag may mean, and what a value must be, in words."""

    said: tuple[str, ...] = ()
    """What was asked, for errors."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does."""
        self.said = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends with 2, the usage, and the message."""
        message = message.replace("invalid int value:", "a whole number is needed, not")
        message = message.replace("invalid float value:", "a number is needed, not")
        verb = next((word for word in self.said if not word.startswith("-")), "")
        if message.startswith("unrecognized arguments: ") and verb in VERBS:
            unknown = message.removeprefix("unrecognized arguments: ").split()
            meant = next((_meant(verb, word) for word in unknown if word.startswith("--")), "")
            message += f"{meant} (`meshwright {verb} --help` lists what it takes)"
        elif message.startswith("argument VERB: invalid choice") and (near := near_names(verb, VERBS)):
            message += f"; did you mean {' or '.join(map(repr, near))}?"
        super().error(message)


def _meant(verb: str, word: str) -> str:
    """What an unknown flag of a verb may mean, as words behind the error; may be empty."""
    name = word.removeprefix("--").partition("=")[0]
    flags = [flag.removeprefix("--") for flag, _ in VERBS[verb][1] if flag.startswith("--")]
    if name in KEYS or name in KEYS.values():
        home = next((flag for flag in ("pin", "layout") if flag in flags), None)
        return f"; the degrees of a layout are said in --{home}" if home else ""
    near = near_names(name, flags) or [_FLAG_OF.get(key, key) for key in near_names(name, (*_FLAG_OF, *flags))]
    return f"; did you mean --{' or --'.join(near)}?" if near and set(near) <= set(flags) else ""


_FLAG_OF = {"gbs": "batch", "world": "gpus", "seq": "seq", "precision": "precision", "optimizer": "optimizer"}
"""Key of a request -> its flag."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(
        prog="meshwright", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"meshwright {installed_version()}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (summary, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        for flag, options in arguments:
            verb.add_argument(flag, **options)  # type: ignore[arg-type]
        verb.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else there")
    return top


def installed_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "0 (not installed)"
