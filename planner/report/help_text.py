"""`meshwright help TOPIC`: made from the tables, the laws and the records, so that it cannot say what no longer holds."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cost_models.calibrations import shipped
from cost_models.data import rows
from cost_models.laws import LAWS
from cost_models.records import Gather, Layout, Runtime, Schedule, Severity
from cost_models.records.codec import json_schema
from cost_models.records.layout import LEGAL_GATHER, print_layout
from cost_models.records.layout_text import KEYS
from planner.errors import InputError, MeshwrightError
from planner.readers.models import model_names, read_model
from planner.readers.node_presets import cluster_names, node_kind
from planner.readers.pins import Op
from planner.readers.request_keys import GROUP_KEYS, SECTION_KEYS, SECTIONS
from planner.readers.runtimes import read_runtime, runtime_names
from planner.readers.topology.formats import KNOWN
from planner.readers.topology.words import MEANINGS
from planner.report.runs_text import columns_of_runs
from planner.report.support_text import support_lines
from planner.report.words import billions, columns, joined, memory, paragraph, row

Verbs = Mapping[str, tuple[str, Any]]
"""Verb -> what it does, and its arguments (not read here)."""

EXAMPLE = Layout(dp_shard=16, tp=8, pp=4, vpp=2, zero=1, schedule=Schedule.INTERLEAVED, recompute="selective")
"""The layout that the topics show."""


def topic_text(topic: str | None, verbs: Verbs, runtime: str | None = None) -> str:
    """One topic in full; without one, the verbs and the topics; `runtime` is the one that `support` is asked of.

    InputError with the near names for an unknown topic, and for a runtime beside any topic but support.
    """
    if topic is None:
        return _overview(verbs)
    name = topic.strip().lower().replace("_", "-")
    if name == SUPPORT:
        return "\n".join([f"{name}: {TOPICS[name]}", "", *support_lines(runtime)])
    if runtime is not None:
        raise InputError(
            f"help {topic} {runtime}: a topic stands alone; `help support RUNTIME` alone takes a second word"
        )
    for one in (name, f"{name}s", name.removesuffix("s")):
        if one in _TEXTS:
            return "\n".join([f"{one}: {TOPICS[one]}", "", *_TEXTS[one]()])
    if name in verbs:
        return f"{name}: {verbs[name][0]}\n\n`meshwright {name} --help` lists its arguments"
    near = difflib.get_close_matches(name, [*TOPICS, *verbs], n=3, cutoff=0.5)
    hint = f"; did you mean {joined(near, 'or')}?" if near else "."
    raise InputError(f"help topic {topic!r} is not known{hint} Topics: {', '.join(TOPICS)}")


def _overview(verbs: Verbs) -> str:
    return "\n".join(
        [
            "verbs (`meshwright VERB --help` lists the arguments of one)",
            *columns([[f"  {name}", summary] for name, (summary, _) in verbs.items()]),
            "",
            "topics (`meshwright help TOPIC`)",
            *columns([[f"  {name}", summary] for name, summary in TOPICS.items()]),
        ]
    )


def _documented(record: type) -> dict[str, str]:
    """Field of a record -> the text under it."""
    properties = json_schema(record)["$defs"][record.__name__]["properties"]
    return {name: schema.get("description", "") for name, schema in properties.items()}


# Layout and pins ---------------------------------------------------------------------------------------------------


_DEFAULTS = {"etp": "1; Megatron's: tp"}
"""Field of a layout -> its default, where that is the runtime's matter."""


def _layout() -> list[str]:
    fields = _documented(Layout)
    keys: dict[str, list[str]] = {}
    for key, field in KEYS.items():
        keys.setdefault(field, []).append(key)
    table = [["key", "field", "default", "meaning"]]
    for field, spellings in keys.items():
        default = getattr(Layout(), field) if field in fields else "world/(tp·pp·cp)"
        meaning = fields.get(field, "dp_replicate·dp_shard; with zero ≥ 1 all of it is dp_shard, else dp_replicate")
        table.append([" or ".join(spellings), field, _DEFAULTS.get(field, str(default)), meaning])
    gathers = "; ".join(f"zero={level}: {' or '.join(legal)}" for level, legal in LEGAL_GATHER.items())
    return [
        row(
            "law",
            "world = dp·cp·tp·pp, dp = dp_replicate·dp_shard, dp·cp·tp = edp·ep·etp, gbs = dp·mbs·num_micro_batches",
        ),
        row(
            "text",
            "tokens key=value, keyvalue or valuekey (tp=8, tp8, 8tp), in any order, separated by blanks , ; or .",
        ),
        row("canonical", print_layout(EXAMPLE)),
        row("absent", "in a layout to predict or check: the default below; in a pin or in --why-not: free"),
        "",
        *columns(table),
        "",
        row("sched", joined(schedule.value for schedule in Schedule)),
        row("gather", gathers),
        row(
            "",
            f"{Gather.USE}: at each use (FSDP that reshards); {Gather.MICRO}: once a micro-batch; {Gather.STEP}: once a step",
        ),
        row("rc", "the kinds are the runtime's own: `meshwright help runtimes`"),
    ]


_OPS = {
    Op.EQUAL: ("tp=4|8", "one of the alternatives"),
    Op.UNEQUAL: ("sched!=gpipe", "none of them"),
    Op.AT_MOST: ("cp<=2", "at most; one number"),
    Op.AT_LEAST: ("pp>=2", "at least; one number"),
}
"""How a pin compares -> an example and its meaning."""


def _pins() -> list[str]:
    return [
        paragraph(
            "A pin is `key op value`; pins are separated by commas and hold together. What no pin names is free."
        ),
        "",
        *columns([["op", "as in", "the field is"], *([op.value, *_OPS[op]] for op in Op)]),
        "",
        row("keys", ", ".join(KEYS)),
        row("example", f'--pin "{", ".join(example for example, _ in _OPS.values())}"'),
        row(
            "why not", "`meshwright explain plan.json --why-not` takes a layout in part: what it names is pinned with ="
        ),
    ]


# Requests, models, clusters ----------------------------------------------------------------------------------------


_SECTION_WORDS = {
    "model": "a preset's name, a path, or dimensions",
    "cluster": "preset x GPUs, a path, or facts",
    "workload": "what is trained on",
    "runtime": "a name of `meshwright help runtimes`",
    "layout": "text or fields; in `plan` it is today's layout",
    "pin": "text, as in --pin",
}
"""Section of a request -> what may stand there."""


def _requests() -> list[str]:
    lines = [
        paragraph(
            "One JSON document in place of the flags of plan, predict and check; null counts as absent. plan and predict fill in "
            "what is absent and list it as defaults; check leaves it unknown and lists what it could not judge."
        ),
        "",
    ]
    for section in SECTIONS:
        lines.append(row(section, _SECTION_WORDS[section]))
        if section in SECTION_KEYS:
            lines.append(row("", f"keys: {', '.join(sorted(SECTION_KEYS[section]))}"))
        if section == "model":
            lines.append(row("", f"keys of each of layer_groups: {', '.join(sorted(GROUP_KEYS))}"))
    example = (
        '{"model": "llama3-8b", "cluster": "h100x64", "workload": {"seq": 8192, "gbs": 512}, '
        '"runtime": "torch", "layout": "tp4 pp2 dp8 zero2"}'
    )
    return [*lines, "", row("example", example)]


def _models() -> list[str]:
    table = [["preset", "parameters", "active", "layers", "hidden", "heads", "kv", "vocabulary", "also called"]]
    for name in model_names():
        model = read_model(name)
        active = "" if model.active_params == model.num_params else billions(model.active_params)
        numbers = [f"{n:,}" for n in (model.num_layers, model.hidden, model.heads, model.kv_heads, model.vocab)]
        aliases = ", ".join(rows("models")[name]["aliases"][:2])
        table.append([name, f"{model.num_params:,}", active, *numbers, aliases])
    return [
        paragraph(
            "A preset, the path of a Hugging Face config.json (or its folder), a saved model, a request or a plan."
        ),
        "",
        *columns(table, right=range(1, 8)),
    ]


def _clusters() -> list[str]:
    table = [["preset", "node", "GPUs", "memory", "in the domain", "domain", "fabric of a node", "also called"]]
    for name in cluster_names():
        kind = node_kind(name)
        nics = f"{kind.num_nics} x {kind.nic.name}"
        aliases = [alias for alias in rows("nodes")[name]["aliases"] if alias != kind.name][:2]
        table.append(
            [
                name,
                kind.name,
                str(kind.gpus_per_node),
                memory(kind.device.memory_bytes),
                kind.intra.name,
                str(kind.domain_size),
                nics,
                ", ".join(aliases),
            ]
        )
    return [
        paragraph(
            "Preset x GPUs, as in h100x64 or a100-80x1024; several kinds joined by +, as in h100x64+a100-80x128; or the path of a "
            "cluster file. Fewer GPUs than a node has make one "
            "smaller node, more must fill whole nodes. `meshwright probe h100x64` shows one in full, and -o writes it as a file."
        ),
        "",
        *columns(table, right=(2, 3, 5)),
        "",
        "memory of one GPU is what its driver shows; domain: GPUs that share a fast domain",
        "",
        *_pasted(),
    ]


def _pasted() -> list[str]:
    """Files that people paste, and the facts beside them."""
    return [
        paragraph(
            "Or files that people have or paste, with commas between (in `probe` with blanks): the inside of a node from one, the fabric "
            "from another, measured tables over both, as in topo.txt,topology.conf,all_reduce.txt,gpu=h100. What no file says is taken as "
            "the GPU is sold, and listed. `meshwright probe FILE ...` draws the cluster, says what is odd and what that costs; -o writes "
            "FILE.json, which --cluster reads, or draws FILE.png."
        ),
        "",
        row("files", KNOWN),
        *(row(f"{word}=", meaning) for word, meaning in MEANINGS.items()),
    ]


# Runtimes and laws -------------------------------------------------------------------------------------------------


def _runtimes() -> list[str]:
    blocks = []
    for name in runtime_names():
        blocks += [*_runtime_lines(read_runtime(name), rows("runtimes")[name]["aliases"]), ""]
    return [*blocks, row("untested", "nobody has checked this part of the record against the framework itself")]


def _runtime_lines(runtime: Runtime, aliases: Iterable[str]) -> list[str]:
    also = f"; also for {', '.join(aliases)}" if aliases else ""
    flags = [
        text
        for holds, text in (
            (runtime.sequence_parallel, "sequence parallelism beside tp"),
            (runtime.scatters_hops, "each tp rank sends its part of what passes between stages"),
            (runtime.overlaps_dp, "gradients are synchronised behind the backward pass"),
            (runtime.overlaps_tp, "tp collectives hide behind products"),
            (runtime.unsharded_gradients_with_pp, "gradients stay whole in a pipeline"),
            (not runtime.executes_gpus, "no accelerators"),
        )
        if holds
    ]
    per_param = [f"{precision} {state.total:g}" for precision, state in runtime.state_bytes.items()]
    lines = [
        row(runtime.name, f"{runtime.version}{also}"),
        row("  sched", ", ".join(runtime.schedules) or "none"),
        row("  zero", f"{_levels(runtime.zero_levels)}; where pp > 1: {_levels(runtime.zero_levels_with_pp)}"),
        row("  rc", ", ".join(runtime.recompute_kinds)),
        row("  bytes", f"of states for a parameter, with Adam: {', '.join(per_param) or 'unknown'}"),
        row("  uneven", runtime.uneven_stages or "no way is known to split layers unevenly over stages"),
        row("  does", "; ".join(flags) or "none of what is recorded"),
    ]
    if runtime.untested:
        lines.append(row("  untested", "; ".join(runtime.untested)))
    return [*lines, row("  source", runtime.source)]


def _levels(levels: Iterable[int]) -> str:
    return ", ".join(map(str, levels)) or "none"


def _laws() -> list[str]:
    """Every law with its own severity, and the runtimes that take it otherwise."""
    table = [["code", "severity", "law"]]
    for law in LAWS:
        table.append([law.code, "silent" if law.severity is Severity.NONE else law.severity.value, law.statement])
    lines = columns(table)
    runtimes = [read_runtime(name) for name in runtime_names()]
    lines += ["", "runtimes that take a breach otherwise"]
    for law in LAWS:
        others: dict[str, list[str]] = {}
        for runtime in runtimes:
            severity = law.severity_of(runtime)
            if severity is not law.severity:
                others.setdefault("silent" if severity is Severity.NONE else severity.value, []).append(runtime.name)
        lines += [paragraph(f"{law.code} {word}: {', '.join(names)}", 2) for word, names in others.items()]
    return lines


# Exit codes and calibration ----------------------------------------------------------------------------------------


_EXITS = {
    0: "done; a risky verdict too",
    1: "the answer is no: infeasible, does not fit, errors found, a rank failed",
    2: "the input is wrong, or not supported yet",
    3: "a bug in Meshwright: an uncaught exception, or two of its own answers disagree",
    4: "the time limit came before any plan",
    130: "interrupted",
}
"""Exit code -> what it means."""


def _exit_codes() -> list[str]:
    errors: dict[int, list[str]] = {}
    for kind in MeshwrightError.__subclasses__():
        errors.setdefault(kind.exit_code, []).append(kind.__name__)
    table = [["code", "meaning", "raised as"]]
    table += [[str(code), meaning, ", ".join(errors.get(code, []))] for code, meaning in _EXITS.items()]
    return columns(table)


def _calibration() -> list[str]:
    found = shipped()
    families: dict[str, list[Any]] = {}
    for name, coefficient in found.coefficients.items():
        families.setdefault(name.split(".")[0], []).append(coefficient)
    table = [["family", "values", "fitted", "rows", "residual up to"]]
    for family, members in sorted(families.items()):
        fitted = [one for one in members if one.rows > 0]
        residuals = [one.residual for one in members if one.residual is not None]
        most = f"{max(residuals):.1%}" if residuals else "-"
        table.append([family, str(len(members)), str(len(fitted)), f"{sum(one.rows for one in fitted):,}", most])
    return [
        row("shipped", f"{found.name}, for {found.machine}, of {found.date}"),
        row(
            "measured", f"{len(found.operations_s)} operations and {len(found.curves)} curves of collectives lie in it"
        ),
        paragraph(
            "A prediction says what its time rests on: measured (this very operation was timed), calibrated (a coefficient fitted "
            "on runs), or table (a data sheet, a publication, a prior). Its interval is as wide as that deserves."
        ),
        "",
        *columns(table, right=range(1, 5)),
        "",
        row(
            "better",
            "`meshwright profile M --measure` and `meshwright probe` measure this machine, `meshwright compare plan.json "
            "measurement.json --fit calibration.json` refits, and --calibration takes the file",
        ),
        row("priors", "values that are not fitted; each names its source in the file"),
    ]


SUPPORT = "support"
"""The topic that may be asked of one runtime."""

TOPICS: Mapping[str, str] = {
    "layout": "how a layout is written, and what its keys mean",
    "pins": "how to say what must hold of a plan",
    "requests": "the request file, in place of the flags",
    "models": "models by name, with their parameters",
    "clusters": "clusters by name, and what is in a node",
    "runtimes": "frameworks: what each can do, and what of it nobody has tested",
    SUPPORT: "runtime x device x feature: what is measured, calibrated, from tables, or untested",
    "laws": "what makes a layout illegal, by code",
    "exit-codes": "what the exit status says",
    "calibration": "the numbers that predictions rest on",
    "tables": "a table of runs for `predict --runs`: its columns",
}
"""Topic -> what it tells, in the order in which they are listed."""

_TEXTS: Mapping[str, Callable[[], list[str]]] = {
    "layout": _layout,
    "pins": _pins,
    "requests": _requests,
    "models": _models,
    "clusters": _clusters,
    "runtimes": _runtimes,
    "laws": _laws,
    "exit-codes": _exit_codes,
    "calibration": _calibration,
    "tables": columns_of_runs,
}
