"""The command line: its surface, its exit codes, and that each bad input gets one clear error."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.records import Plan, load, save
from executor.cli import main
from executor.cli.arguments import VERBS

PLAN = ["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--batch", "64", "--seq", "4096"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == 0
    return path


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# The surface ------------------------------------------------------------------------------------------------------------


def test_the_verbs_are_these() -> None:
    """The surface only shrinks: a new verb is a decision, and this list is where it is taken."""
    assert set(VERBS) == {"demo", "profile", "probe", "plan", "predict", "check", "explain", "run", "compare", "help"}


def test_every_verb_speaks_json() -> None:
    from executor.cli.arguments import parser

    for verb, (_, arguments) in VERBS.items():
        positional = ["x" for flag, options in arguments if not flag.startswith("-") and "nargs" not in options]
        more = ["x"] if verb == "compare" else []
        assert parser().parse_args([verb, *positional, *more, "--json"]).json is True


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["help"]])
def test_help_loads_neither_torch_nor_planner_nor_numpy(arguments: list[str]) -> None:
    heavy = ["torch", "numpy", "pulp", "networkx", "matplotlib"]
    script = (
        "import sys\n"
        "from executor.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        f"sys.exit(', '.join(name for name in {heavy if arguments != ['help'] else ['torch', 'matplotlib']!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_planning_never_loads_torch_or_matplotlib(plan_file: Path) -> None:
    check = {"model": "llama3-8b", "cluster": "h100x8", "workload": {"seq": 4096, "gbs": 64}, "layout": "tp8 mbs1"}
    request = plan_file.with_name("request.json")
    request.write_text(json.dumps(check))
    calls = [
        PLAN,
        ["predict", str(plan_file)],
        ["check", str(request)],
        ["explain", str(plan_file), "--why-not", "tp4"],
        ["profile", "llama3-8b"],
        ["probe", "h100x8"],
    ]
    script = (
        "import sys\n"
        "from executor.cli import main\n"
        f"codes = [main(call) for call in {calls!r}]\n"
        "assert codes == [0] * len(codes), codes\n"
        "sys.exit(', '.join(name for name in ('torch', 'matplotlib') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


# JSON -------------------------------------------------------------------------------------------------------------------


def test_json_is_one_document_on_stdout(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        PLAN,
        ["predict", str(plan_file)],
        ["explain", str(plan_file), "--why-not", "tp8"],
        ["help", "pins"],
    ):
        code, out, _ = told([*arguments, "--json"], capsys)
        assert code == 0
        json.loads(out)


def test_json_of_an_error_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(
        ["plan", "--model", "lama3", "--cluster", "h100x8", "--batch", "1", "--seq", "1", "--json"], capsys
    )
    assert code == 2
    assert json.loads(out)["error"]["exit_code"] == 2
    assert "near names" in err


def test_the_solver_writes_nothing_to_stdout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "executor", *PLAN, "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["certificate"]["status"] == "optimal"


# Bad input, each with its one clear error -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"--model": "lama3-8b"}, 2, "near names: llama3-8b"),
        ({"--cluster": "h10x8"}, 2, "near names"),
        ({"--cluster": "h100x0"}, 2, "zero GPUs"),
        ({"--pin": "tp=3"}, 1, "no layout is legal"),
        ({"--pin": "tq=3"}, 2, "tp"),
        ({"--pin": "tp=8, tp=4"}, 2, "tp"),
        ({"--gpus": "9"}, 2, "from 1 to the cluster's 8 GPUs"),
        ({"--gpus": "-1"}, 2, "from 1 to the cluster's 8 GPUs"),
        ({"--batch": "0"}, 2, "gbs=0"),
        ({"--seq": "-5"}, 2, "seq=-5"),
        ({"--precision": "bf17"}, 2, "Legal values: fp32, bf16, fp16, fp8"),
        ({"--optimizer": "lion"}, 2, "legal values: adamw"),
        ({"--runtime": "megatorn"}, 2, "megatron"),
        ({"--current": "tp3"}, 2, "tp"),
        ({"--current": "tp8 tp4"}, 2, "twice"),
        ({"--calibration": "nowhere.json"}, 2, "cannot be read"),
        ({"--model": "llama3-405b"}, 1, "the least number of whole nodes"),
        ({"--time-limit": "0"}, 4, "time limit"),
        ({"--time-limit": "-1"}, 2, "--time-limit -1: seconds from 0"),
        ({"--time-limit": "nan"}, 2, "--time-limit nan: seconds from 0"),
        ({"--gpus": "3", "--pin": "pp=1, tp=1"}, 1, "GBS_MOD_MBSDP"),
    ],
)
def test_bad_input_of_plan(change: dict[str, str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = dict(zip(PLAN[1::2], PLAN[2::2], strict=True)) | change
    found, out, err = told(["plan", *(word for pair in flags.items() for word in pair)], capsys)
    assert (found, out) == (code, ""), err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp3", "world"),
        ("tp8 dp2", "world"),
        ("dp8 mbs3", "gbs=64 is not divisible by mbs·dp = 3·8 = 24"),
        ("pp2 vpp64 dp4 sched=interleaved", "layers"),
        ("dp8 zero=1", "zero"),
        ("dp8 rc=everything", "legal"),
        ("dp8 sched=zbv", "zbv"),
        ("cp2 dp4", "no context parallelism yet"),
    ],
)
def test_an_illegal_layout_names_the_law(layout: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told(["predict", *PLAN[1:], "--layout", layout], capsys)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("verb", ["predict", "explain", "run"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "truncated or damaged"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99', 1), "newer"),
        (lambda text: text.replace('"num_micro_batches"', '"num_microbatches"', 1), "unknown field 'num_microbatches'"),
        (lambda text: text.replace('"blocks": [\n     0,', '"blocks": [\n     1,', 1), "partition"),
        (lambda text: "[]", "object"),
        (lambda text: "", "truncated or damaged"),
    ],
)
def test_a_damaged_plan(
    verb: str, damage: object, words: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    text = plan_file.read_text()
    broken.write_text(damage(text))  # type: ignore[operator]
    assert broken.read_text() != text
    code, _, err = told([verb, str(broken)], capsys)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_a_plan_for_more_ranks_than_there_are(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan_file.read_text()
    small = tmp_path / "small.json"
    small.write_text(text.replace('"gpus_per_node": 8', '"gpus_per_node": 4', 1))
    code, _, err = told(["explain", str(small)], capsys)
    assert code == 2
    assert "needs 8 ranks, but cluster 'h100x8' has 4 GPUs" in err


def test_a_hand_edited_plan_promises_nothing(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load(Plan, plan_file)
    stages = (replace(plan.decision.stages[0], recompute={"full": 32}),)
    layout = replace(plan.decision.layout, recompute="full")
    edited = tmp_path / "edited.json"
    save(replace(plan, decision=replace(plan.decision, stages=stages, layout=layout)), edited)
    code, out, _ = told(["explain", str(edited)], capsys)
    assert code == 0
    assert "changed by hand" in out
    assert told(["explain", str(edited), "--certificate"], capsys)[0] == 2
    assert told(["predict", str(edited)], capsys)[0] == 0


def test_check_says_no_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "llama3-8b", "cluster": "h100x8", "layout": "tp3"}))
    code, out, _ = told(["check", str(request), "--json"], capsys)
    assert code == 1
    document = json.loads(out)
    assert {"HEADS_MOD_TP", "KV_HEADS_MOD_TP", "WORLD_MOD_MP"} <= {found["code"] for found in document["findings"]}


def test_flags_beside_a_request_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "llama3-8b"}))
    code, _, err = told(["plan", str(request), "--batch", "3"], capsys)
    assert code == 2
    assert "--batch" in err


def test_todays_layout_is_never_predicted_to_be_better(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told([*PLAN, "--current", "tp8 mbs1", "--json"], capsys)
    assert code == 0
    document = json.loads(out)
    today = next(other for other in document["alternatives"] if other["note"] == "current")
    assert document["predicted"]["step_s"] <= today["step_s"]


def test_an_alternative_can_be_predicted_like_the_choice(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load(Plan, plan_file)
    assert plan.alternatives
    for other in plan.alternatives:
        if other.decision.layout.recompute != "stages":
            code, out, _ = told(["predict", *PLAN[1:], "--layout", str(other.decision.layout), "--json"], capsys)
            assert code in (0, 1)
            assert json.loads(out)["predicted"]["step_s"] > 0


def test_our_own_bug_ends_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from executor.cli import verbs

    def broken(arguments: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(verbs, "probe", broken)
    code, _, err = told(["probe", "h100x8"], capsys)
    assert code == 3
    assert "bug in Meshwright" in err


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from executor.cli import verbs

    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "probe", interrupted)
    assert told(["probe", "h100x8"], capsys)[0] == 130


def test_nothing_is_written_where_the_folder_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told([*PLAN, "-o", str(tmp_path / "absent" / "plan.json")], capsys)
    assert code == 2
    assert "does not exist" in err
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_topic() -> None:
    from executor.cli.arguments import EPILOG
    from planner.report.help_text import TOPICS

    assert not [topic for topic in TOPICS if topic not in EPILOG.split("topics:")[1]]


def test_flags_that_lack_say_which_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told(["plan", "--model", "llama3-8b", "--cluster", "h100x8", "--seq", "4096"], capsys)
    assert code == 2
    assert "the workload lacks gbs (sequences of a step; --batch on the command line)" in error


def test_a_folder_without_a_configuration_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told([*PLAN[:2], str(tmp_path), *PLAN[3:]], capsys)
    assert code == 2
    assert "this folder has no config.json" in error


def test_compare_tells_a_plan_from_a_measurement(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told(["compare", str(plan_file), str(plan_file)], capsys)
    assert code == 2
    assert "is a plan, not a measurement" in error


def test_interleaving_that_cannot_be_even_names_the_legal_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--runtime", "generic", "--layout", "tp8 pp16 vpp6 zero1 sched=interleaved"]
    asked = ["predict", "--model", "llama3-405b", "--cluster", "h100x1024", "--batch", "512", "--seq", "8192"]
    code, _, error = told([*asked, *layout], capsys)
    assert code == 2
    assert "legal pp·vpp: 1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126" in error


def test_a_run_that_cannot_fit_this_machine_starts_no_process(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}[name])
    monkeypatch.setattr("executor.cli.ranks.launch", lambda *_, **__: pytest.fail("started"))
    code, _, error = told(["run", str(plan_file)], capsys)
    assert code == 2
    assert "takes at least 119.7 GiB" in error
    assert "has no GPU and 16.0 GiB of memory" in error


def test_near_runtimes_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told([*PLAN, "--runtime", "megatorn"], capsys)
    assert code == 2
    assert "did you mean 'megatron' or 'megatron-zb'?" in error


def test_alternatives_in_a_layout_lead_to_pins(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told(["explain", str(plan_file), "--why-not", "tp=4|8"], capsys)
    assert code == 2
    assert "alternatives and bounds belong into pins" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--batch-size", "4"], "did you mean --batch?"),
        (["plan", "--global_batch_size=4"], "did you mean --batch?"),
        (["plan", "--seq-len", "4"], "did you mean --seq?"),
        (["plan", "--dtype", "bf16"], "did you mean --precision?"),
        (["plan", "--num-gpus", "4"], "did you mean --gpus?"),
        (["plan", "--tp", "4"], "the degrees of a layout are said in --pin"),
        (["predict", "--tp", "4"], "the degrees of a layout are said in --layout"),
        (["explain", "x", "--whynot", "tp4"], "did you mean --why-not?"),
        (["plam"], "did you mean 'plan'?"),
        (["plan", "--batch", "1.5"], "a whole number is needed, not '1.5'"),
        (["plan", "--time-limit", "soon"], "a number is needed, not 'soon'"),
        (["check", "--foo"], "`meshwright check --help` lists what it takes"),
    ],
)
def test_what_an_unknown_flag_may_mean(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_request_or_a_plan_may_be_a_pipe(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = json.dumps(
        {"model": "llama3-8b", "cluster": "h100x8", "workload": {"seq": 64, "gbs": 8}, "layout": "tp8"}
    )
    for text in (request, plan_file.read_text()):
        done = subprocess.run(
            [sys.executable, "-m", "executor", "predict", "/dev/stdin"],
            input=text, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["plan", "predict", "check", "explain", "run"])
def test_a_folder_in_place_of_a_file(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told([verb, str(tmp_path)], capsys)
    assert (code, out) == (2, "")
    assert "this is a folder; name a file in it" in error


def test_a_plan_is_no_request(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "check"):
        code, _, error = told([verb, str(plan_file)], capsys)
        assert code == 2
        assert "this is a plan, not a request" in error


@pytest.mark.parametrize("flag", ["--model", "--cluster", "--calibration"])
def test_names_that_can_be_no_path(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x" * 300, "~nobody-of-that-name/x.json"):
        flags = dict(zip(PLAN[1::2], PLAN[2::2], strict=True)) | {flag: name}
        code, _, error = told(["plan", *(word for pair in flags.items() for word in pair)], capsys)
        assert code == 2, error
        assert "Traceback" not in error


def test_code_in_place_of_a_model_leads_to_profile(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told([*PLAN[:2], "my.models:build", *PLAN[3:]], capsys)
    assert code == 2
    assert "`meshwright profile my.models:build -o model.json` traces it" in error


def test_results_that_cannot_be_written_are_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for arguments, words in (
        (["demo", "--out", str(taken)], "this is no folder"),
        (["probe", "h100x8", "-o", str(tmp_path / ("x" * 300))], "longer than 255 bytes"),
        (["profile", "llama3-8b", "-o", str(tmp_path)], "this is a folder"),
    ):
        code, out, error = told(arguments, capsys)
        assert (code, out) == (2, "")
        assert words in error


@pytest.mark.parametrize(
    ("verb", "change", "code", "words"),
    [
        ("plan", {"num_layers": 513}, 2, "plans are searched for up to 512 layers; `predict` prices"),
        ("predict", {"num_layers": 513}, 0, ""),
        ("plan", {"num_layers": 10**6}, 2, "num_layers=1000000 of model 'model': a whole number from 1 to 100,000"),
        ("check", {"num_layers": 10**12}, 0, ""),
        ("plan", {"heads": 2**40, "kv_heads": 3, "head_dim": 1}, 2, "heads=1099511627776 of model 'model'"),
        ("plan", {"heads": 2**30, "kv_heads": 3, "head_dim": 1}, 2, "legal kv_heads: 1, 2, 4"),
    ],
)
def test_models_of_another_world_are_one_error(
    verb: str, change: dict[str, int], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dimensions = {"num_layers": 4, "hidden": 256, "ffn": 512, "heads": 8, "vocab": 1000} | change
    request = tmp_path / "request.json"
    document = {"model": dimensions, "cluster": "h100x8", "workload": {"seq": 128, "gbs": 8}, "layout": "dp8 mbs1"}
    request.write_text(json.dumps(document))
    found, _, error = told([verb, str(request)], capsys)
    assert found == code, error
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["help", "layout"], ["help", "layout", "--json"], ["probe", "nowhere"]])
def test_a_terminal_without_unicode_gets_what_it_can_show(arguments: list[str]) -> None:
    ascii_only = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "executor", *arguments],
        capture_output=True, timeout=60, check=False, env={**os.environ, **ascii_only},
    )  # fmt: skip
    assert done.returncode == (2 if "nowhere" in arguments else 0), done.stderr
    assert b"Traceback" not in done.stderr
    if "--json" in arguments:
        assert "world = dp·cp·tp·pp" in json.loads(done.stdout)["text"]


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_an_output_that_takes_nothing_is_told(redirection: str) -> None:
    command = f'"{sys.executable}" -m executor probe h100x8 --json {redirection}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "meshwright: the output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_is_told_where_its_results_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", ""]) == 2
    assert "a folder is needed" in capsys.readouterr().err


def test_where_torch_is_not_installed_what_needs_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("executor.cli.verbs.probe", absent)
    assert main(["probe", "--json"]) == 2
    captured = capsys.readouterr()
    assert "this needs torch, which is not installed here: pip install torch" in captured.err
    assert json.loads(captured.out)["error"]["exit_code"] == 2
