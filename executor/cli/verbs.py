"""One function a verb: arguments in, an Outcome out. Each calls one library function and imports what it needs itself."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.records import Calibration, Plan, load, load_plan, save, to_json, write_atomic
from cost_models.records.plan import plan_of
from executor.cli.arguments import VERBS, installed_version
from executor.cli.heartbeat import still_at
from executor.cli.outcome import Outcome

if TYPE_CHECKING:
    from planner.readers.requests import CompleteRequest


def progress(text: str) -> None:
    """One line on stderr: what long work is at."""
    print(text, file=sys.stderr, flush=True)


def plan(arguments: argparse.Namespace) -> Outcome:
    """Choose the layout, prove it, print it as an argument."""
    from planner.plan import make_plan
    from planner.readers.requests import complete, read_request
    from planner.report.plan_text import plan_text

    request = complete(read_request(_document(arguments)))
    if arguments.sweep is not None:
        return _sweep(arguments, request)
    _without(arguments, ("price",), "goes with --sweep alone")
    chosen = make_plan(
        request,
        gpus=arguments.gpus,
        calibration=_calibration(arguments),
        time_limit_s=arguments.time_limit,
        version=installed_version(),
        tell=progress,
    )
    if arguments.out is not None:
        save(chosen, arguments.out)
        progress(f"wrote {arguments.out}")
    return Outcome(document=to_json(chosen), text=lambda: plan_text(chosen))


def _sweep(arguments: argparse.Namespace, request: "CompleteRequest") -> Outcome:
    """The plans of many sizes; `-o` draws a picture (.png) or writes the document."""
    from planner.errors import InputError
    from planner.report.sweep_text import sweep_text
    from planner.what_if.sweep import sweep

    if arguments.out is not None and not arguments.out.lower().endswith((".png", ".json")):
        raise InputError(f"-o {arguments.out}: a sweep is drawn as FILE.png, or written as FILE.json")
    document = sweep(
        request,
        arguments.sweep,
        gpus=arguments.gpus,
        calibration=_calibration(arguments),
        time_limit_s=arguments.time_limit,
        price_per_gpu_hour=arguments.price,
        version=installed_version(),
        progress=progress,
    )
    if arguments.out is not None:
        if arguments.out.lower().endswith(".png"):
            from planner.report.sweep_plot import sweep_plot

            workload = request.workload
            sweep_plot(
                document,
                arguments.out,
                title=f"{request.model.name} on {request.cluster.pools[0].kind.device.name}, {request.runtime.name}: "
                f"{workload.gbs:,} sequences x {workload.seq:,}, sweep {arguments.sweep}",
            )
        else:
            write_atomic(arguments.out, (json.dumps(document, indent=1) + "\n").encode())
        progress(f"wrote {arguments.out}")
    return Outcome(document=document, text=lambda: sweep_text(document))


def predict(arguments: argparse.Namespace) -> Outcome:
    """Step time, throughput and memory of one layout, of a plan, or of a table of runs."""
    if arguments.runs is not None:
        return _predict_runs(arguments)
    from planner.advice import problem_of
    from planner.decisions import decision_of_layout
    from planner.plan import worlds_of
    from planner.predict import predict as predict_decision
    from planner.readers.requests import complete, read_request
    from planner.report.predict_text import predict_text
    from planner.rests_on import rests_on

    read = _read_file(arguments.request)
    if read is not None and "decision" in read:
        existing = plan_of(read, arguments.request)
        _only(arguments, "predict PLAN.json", ("request", "calibration"))
        problem = problem_of(existing.request, _calibration(arguments))
        decision, defaults = existing.decision, {}
    else:
        asked = _document(arguments)
        request = complete(read_request(asked if read is None else read, arguments.request), needs_layout=True)
        problem = problem_of(request, _calibration(arguments))
        assert request.layout is not None
        world = worlds_of(arguments.gpus, request.cluster.num_gpus, request.cluster.gpus_per_node)[-1]
        decision = decision_of_layout(problem, request.layout, world=world, pools=request.pools)
        defaults = dict(request.defaults)
    predicted = predict_decision(problem, decision)
    terms = rests_on(problem, decision)
    document = {
        "decision": to_json(decision),
        "predicted": to_json(predicted),
        "rests_on": [to_json(term) for term in terms],
        "defaults": defaults,
    }
    return Outcome(
        document=document,
        text=lambda: predict_text(problem, decision, predicted, defaults, terms),
        exit_code=1 if predicted.verdict == "no" else 0,
    )


def _anchor(arguments: argparse.Namespace, shown: Plan) -> Outcome:
    """The run on few GPUs that says most of the plan; `-o` writes the plan that `run` takes, or the request."""
    from planner.anchor import anchor
    from planner.report.anchor_text import anchor_text

    _only(
        arguments,
        "explain PLAN.json --anchor GPUS",
        ("plan", "anchor", "calibration", "out"),
        "it is an answer of its own",
    )
    found = anchor(shown, arguments.anchor, _calibration(arguments), version=installed_version())
    if arguments.out is not None:
        if found.is_run_here:
            save(found.plan, arguments.out)
        else:
            Path(arguments.out).write_text(json.dumps(found.document["request"], indent=1) + "\n", encoding="utf-8")
        progress(f"wrote {arguments.out}")
    return Outcome(document=found.document, text=lambda: anchor_text(shown, found, arguments.out))


def _predict_runs(arguments: argparse.Namespace) -> Outcome:
    """Each row of a table of runs; the exit code is 0 where each has an answer or a reason."""
    from planner.predict_runs import predict_runs
    from planner.report.runs_text import runs_text

    _only(arguments, "predict --runs RUNS.csv", ("runs", "calibration"), "each row says it")
    document = predict_runs(arguments.runs, _calibration(arguments), progress)
    return Outcome(document=document, text=lambda: runs_text(document))


def check(arguments: argparse.Namespace) -> Outcome:
    """Laws, memory and speed of a layout that somebody runs."""
    from planner.advice import advise
    from planner.report.check_text import check_text

    document = advise(_document(arguments))
    return Outcome(
        document=document, text=lambda: check_text(document), exit_code=1 if document["verdict"] == "no" else 0
    )


_QUESTIONS = ("why_not", "against", "binds", "neighbours", "certificate")
"""Flags of `explain` that ask; --anchor refuses what is beside it by itself."""


def explain(arguments: argparse.Namespace) -> Outcome:
    """Why not another layout; two plans side by side; the proof; what to measure on few GPUs; the plan itself."""
    from planner.certificate import derived_again
    from planner.explain import against, why_not
    from planner.report.explain_text import against_text, certificate_text, why_not_text
    from planner.report.plan_text import plan_text
    from planner.what_if.elsewhere import elsewhere

    asked = [name for name in _QUESTIONS if getattr(arguments, name) not in (None, False)]
    if len(asked) > 1:
        from planner.errors import InputError

        flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise InputError(f"{flags}: each is an answer of its own; ask one at a time")
    shown = load_plan(arguments.plan)
    if arguments.anchor is not None:
        return _anchor(arguments, shown)
    if arguments.out is not None:
        from planner.errors import InputError

        raise InputError("-o goes with --anchor alone: it writes the reduced run")
    if arguments.why_not is not None:
        with still_at("searching for the best plan of it", progress):
            reasons = why_not(shown, arguments.why_not, _calibration(arguments))
        return Outcome(document=reasons, text=lambda: why_not_text(reasons))
    if arguments.against is not None:
        other = load_plan(arguments.against)
        differences = against(shown, other) | {"elsewhere": elsewhere(shown, other, _calibration(arguments))}
        return Outcome(document=differences, text=lambda: against_text(differences))
    if arguments.binds:
        from planner.report.around_text import binds_text
        from planner.what_if.what_binds import what_binds

        with still_at("solving again with each limit relaxed", progress):
            limits = what_binds(shown, _calibration(arguments))
        return Outcome(document=limits, text=lambda: binds_text(limits))
    if arguments.neighbours:
        from planner.report.around_text import neighbours_text
        from planner.what_if.around import around

        with still_at("pricing the neighbours", progress):
            near = around(shown, _calibration(arguments))
        return Outcome(document=near, text=lambda: neighbours_text(near))
    if arguments.certificate:
        with still_at("deriving the proof again", progress):
            proof = derived_again(shown, _calibration(arguments))
        return Outcome(document=proof, text=lambda: certificate_text(proof), exit_code=1 if proof["faults"] else 0)
    return Outcome(document=to_json(shown), text=lambda: plan_text(shown))


def profile(arguments: argparse.Namespace) -> Outcome:
    """A model's blocks; with --measure its operations on this machine."""
    from planner.readers.models import model_document, read_model
    from planner.report.profile_text import measurements_text, profile_text

    if not arguments.measure:
        _without(arguments, ("mbs", "precision", "ranks"), "says how to measure; give --measure too")
    if ":" in arguments.model and not Path(arguments.model).exists():
        from planner.profiling.trace import trace_module

        progress(f"making {arguments.model} in a process of its own")
        model = trace_module(arguments.model)
    else:
        model = read_model(arguments.model)
    if arguments.measure:
        from planner.profiling.session import profile_model

        taken = profile_model(
            model,
            seq=arguments.seq,
            mbs=1 if arguments.mbs is None else arguments.mbs,
            precision=arguments.precision,
            ranks=1 if arguments.ranks is None else arguments.ranks,
            layer="executor.decoder:Layer",
            progress=progress,
        )
        if arguments.out is not None:
            save(taken, arguments.out)
        return Outcome(document=to_json(taken), text=lambda: measurements_text(taken))
    if arguments.out is not None:
        save(model, arguments.out)
    document = model_document(model, 4096 if arguments.seq is None else arguments.seq)
    return Outcome(document=document, text=lambda: profile_text(document))


def probe(arguments: argparse.Namespace) -> Outcome:
    """A cluster, by name or from pasted files; without one the links between ranks, measured."""
    if not arguments.cluster:
        _without(arguments, ("gpu",), "goes with pasted files; name them")
        return _probe_live(arguments)
    from executor.cli.probing import probe_seen

    _without(arguments, ("ranks", "backend", "timeout"), "is for links measured here; leave the cluster out")
    return probe_seen(arguments, progress)


def _probe_live(arguments: argparse.Namespace) -> Outcome:
    """Every pair of ranks, their domains and collectives; under torchrun rank 0 alone has something to say."""
    from planner.profiling.probe import TIMEOUT_S, ProbeRequest, backend_here, probe_live
    from planner.report.live_probe_text import live_probe_text

    joined = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    ranks = 2 if arguments.ranks is None else arguments.ranks
    request = ProbeRequest(
        ranks=ranks if joined is None else int(joined),
        backend=arguments.backend or backend_here(),
        timeout_s=TIMEOUT_S if arguments.timeout is None else arguments.timeout,
    )
    found = probe_live(request, progress=progress)
    if found is None:
        return Outcome(document={"rank": int(os.environ["RANK"])}, text=lambda: "")
    if arguments.out is not None:
        save(found, arguments.out)
        progress(f"wrote {arguments.out}")
    return Outcome(document=to_json(found), text=lambda: live_probe_text(found), exit_code=1 if found.silent else 0)


def compare(arguments: argparse.Namespace) -> Outcome:
    """What was promised beside what was measured."""
    from planner.compare import compare as compare_plan
    from planner.compare import fitted, read_measurements
    from planner.report.tables import comparison_table

    promised = load_plan(arguments.plan)
    measured = read_measurements(arguments.measurements)
    document = compare_plan(promised, measured)
    if arguments.fit is not None:
        save(fitted(promised, measured), arguments.fit)
        progress(f"wrote {arguments.fit}")
    return Outcome(document=document, text=lambda: comparison_table(document))


def run(arguments: argparse.Namespace) -> Outcome:
    """Run a plan in torch and measure it."""
    from executor.cli.running import run_plan

    return run_plan(arguments, progress)


def demo(arguments: argparse.Namespace) -> Outcome:
    """The main job on this machine."""
    from executor.cli.demo import demo as whole_job

    return whole_job(Path(arguments.out), progress)


def help(arguments: argparse.Namespace) -> Outcome:
    """One topic in full."""
    from planner.report.help_text import TOPICS, topic_text

    text = topic_text(arguments.topic, VERBS, arguments.runtime)
    document: dict[str, Any] = {"topics": list(TOPICS), "text": text}
    if arguments.topic == "support":
        from planner.report.support_text import support_document

        document["support"] = support_document(arguments.runtime)
    return Outcome(document=document, text=lambda: text)


# Arguments ---------------------------------------------------------------------------------------------------------

_FLAGS: Mapping[str, tuple[str, str]] = {
    "model": ("model", ""),
    "cluster": ("cluster", ""),
    "runtime": ("runtime", ""),
    "pin": ("pin", ""),
    "layout": ("layout", ""),
    "current": ("layout", ""),
    "batch": ("workload", "gbs"),
    "seq": ("workload", "seq"),
    "precision": ("workload", "precision"),
    "optimizer": ("workload", "optimizer"),
}
"""Flag -> where it stands in a request."""


def _document(arguments: argparse.Namespace) -> Any:
    """The request: a file's path, or the document that the flags amount to."""
    from planner.errors import InputError

    said = {flag: getattr(arguments, flag, None) for flag in _FLAGS}
    given = [flag for flag, value in said.items() if value is not None]
    if arguments.request is not None:
        if given:
            raise InputError(
                f"--{given[0]} beside the request file {arguments.request}: say it in the file, or leave the file out"
            )
        return arguments.request
    if not given:
        raise InputError(
            "nothing was asked: give a request file, or --model, --cluster, --batch and --seq "
            "(as in `--model llama3-8b --cluster h100x64 --batch 512 --seq 8192`)"
        )
    if said["runtime"] is not None:
        from planner.readers.runtimes import read_runtime

        read_runtime(
            said["runtime"], typed=True
        )  # a request file may name a framework that nobody knows; a flag may not
    document: dict[str, Any] = {"workload": {}}
    for flag in given:
        section, key = _FLAGS[flag]
        if key:
            document["workload"][key] = said[flag]
        else:
            document[section] = said[flag]
    return document


def _read_file(path: str | None) -> dict[str, Any] | None:
    """The document in `path`, a plan or a request; read once, for it may be a pipe."""
    if path is None:
        return None
    from planner.readers.documents import named_path, read_document

    return read_document(named_path(path)[0], "a plan or a request")


def _only(
    arguments: argparse.Namespace, form: str, allowed: tuple[str, ...], because: str = "the plan says it already"
) -> None:
    from planner.errors import InputError

    for name, value in vars(arguments).items():
        if value not in (None, False) and name not in (*allowed, "verb", "json"):
            said = value if name == "request" else f"--{name}"
            raise InputError(f"{said} does not go with `{form}`: {because}")


def _without(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    from planner.errors import InputError

    for name in names:
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} {getattr(arguments, name)}: {why}")


def _calibration(arguments: argparse.Namespace) -> Calibration:
    """The one that was named, or the shipped one; with what a probe measured, where the cluster or the calibration is a probe."""
    from cost_models.calibrations import shipped
    from planner.readers.probes import calibration_with, can_be_read_again, is_probe

    base = shipped()
    if arguments.calibration:
        named = arguments.calibration
        base = calibration_with(named) if is_probe(named) else load(Calibration, named)
    cluster = getattr(arguments, "cluster", None) or _cluster_of_request(getattr(arguments, "request", None))
    return calibration_with(cluster, base) if cluster and can_be_read_again(cluster) else base


def _cluster_of_request(path: str | None) -> str | None:
    """The name or the files that a request file gives its cluster by."""
    if path is None or not Path(path).is_file():
        return None
    said = (_read_file(path) or {}).get("cluster")
    return said if isinstance(said, str) else None
