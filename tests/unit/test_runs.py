"""Tables of runs: which columns decide, what is refused and in which words, and that nothing measured leaks in."""

import csv
import json
from pathlib import Path

import pytest

from cost_models.calibrations import shipped
from cost_models.peaks import memory_report
from cost_models.units import GIB
from executor.cli import main
from planner.errors import InputError
from planner.predict import predict
from planner.predict_runs import ANSWERS, answer_of_row, predict_runs
from planner.readers.runs import (
    INPUTS,
    NEEDED,
    decision_of_run,
    digest_of,
    read_rows,
    read_run,
    stage_edges,
    warnings_of,
)

ROW = {
    "id": "a1",
    "framework": "NeMo 2 / Megatron-Core",
    "gpu": "H100",
    "gpu_mem_gb": "80",
    "gpus_per_node": "8",
    "n_gpus": "64",
    "interconnect": "400Gb/GPU",
    "hidden": "8192",
    "layers": "80",
    "heads": "64",
    "kv_heads": "8",
    "head_dim": "128",
    "ffn_hidden": "28672",
    "glu": "True",
    "vocab": "128256",
    "tied_emb": "False",
    "attn_type": "gqa",
    "seq": "8192",
    "tp": "4",
    "pp": "4",
    "vpp": "5",
    "cp": "2",
    "zero_stage": "1",
    "sp": "yes",
    "mbs": "1",
    "gbs": "128",
    "precision": "bf16",
    "recompute": "none",
    "flash_attn": "yes(TE)",
    "optimizer": "adam(dist-opt)",
}
OLD = ROW | {
    "id": "b2",
    "framework": "Megatron-DeepSpeed",
    "gpu": "A100-80",
    "interconnect": "NVLink3 + 4 Omni-Path links per 8-GPU node",
    "n_gpus": "96",
    "hidden": "2048",
    "layers": "25",
    "heads": "16",
    "kv_heads": "16",
    "ffn_hidden": "8192",
    "glu": "False",
    "seq": "2048",
    "pp": "12",
    "vpp": "",
    "cp": "1",
    "gbs": "64",
    "precision": "fp16",
    "recompute": "full",
    "flash_attn": "no",
    "sp": "no",
    "memory_kind": "nvidia-smi max node, GB as printed",
}
MEASURED = (
    "step_s_best",
    "measured_step_s",
    "tokens_per_s_per_gpu",
    "memory_gib",
    "outcome",
    "source",
    "model",
    "params_b",
)


def table(path: Path, *rows: dict[str, str]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def answered(path: Path) -> list[dict[str, object]]:
    return predict_runs(path, shipped())["rows"]


def test_each_row_has_the_fields_of_the_contract_in_the_files_order(tmp_path):
    rows = answered(table(tmp_path / "runs.csv", ROW, OLD, ROW | {"id": "c3", "gpu": "H1000"}))
    assert [row["id"] for row in rows] == ["a1", "b2", "c3"]
    assert all(list(row) == ["id", *ANSWERS, "error"] for row in rows)
    assert all(row["error"] is None and row["fits"] in ("ok", "risky", "no") for row in rows[:2])
    assert all(row["step_s_low"] < row["step_s"] < row["step_s_high"] for row in rows[:2])
    assert all(row["memory_gib_low"] < row["memory_gib"] < row["memory_gib_high"] for row in rows[:2])
    assert rows[2]["step_s"] is None
    assert "h100" in rows[2]["error"]


def test_a_row_is_predicted_as_the_same_decision_is():
    run = read_run(ROW, shipped())
    decision = decision_of_run(run)
    expected, answer = predict(run.problem, decision), answer_of_row(ROW, shipped())
    assert answer["step_s"] == expected.step_s
    assert (answer["step_s_low"], answer["step_s_high"]) == (expected.step_s_low, expected.step_s_high)
    assert answer["memory_gib"] == expected.memory_gib_max
    assert answer["fits"] == expected.verdict.value


def test_other_columns_change_no_byte(tmp_path, capsys):
    full = table(tmp_path / "full.csv", *({**row, **dict.fromkeys(MEASURED, "17.5")} for row in (ROW, OLD)))
    bare = table(tmp_path / "bare.csv", ROW | {"id": "x"}, OLD | {"id": "y"})
    texts = []
    for path in (full, bare):
        assert main(["predict", "--runs", str(path), "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].replace('"a1"', '"x"').replace('"b2"', '"y"') == texts[1]


def test_a_column_that_leaked_would_be_seen(tmp_path):
    """The guard can fail: a column of INPUTS does change bytes."""
    changed = [answer_of_row(ROW | {name: value}, shipped()) for name, value in (("mbs", "2"), ("precision", "fp8-cs"))]
    assert answer_of_row(ROW, shipped()) not in changed


@pytest.mark.parametrize("name", ["throughput.csv", "memory.csv"])
def test_published_rows_do_not_look_at_what_was_measured(shared, tmp_path, name):
    with (shared / "published" / name).open(newline="") as stream:
        rows = list(csv.DictReader(stream))[::40]
    blank = [{key: value if key in INPUTS else "" for key, value in row.items()} for row in rows]
    before, after = answered(table(tmp_path / "a.csv", *rows)), answered(table(tmp_path / "b.csv", *blank))
    assert [{**row, "id": ""} for row in before] == [{**row, "id": ""} for row in after]


def test_memory_is_of_the_row_s_rank_and_fits_of_the_fullest():
    first_is_fullest = ROW | {"framework": "Megatron-Core", "memory_kind": "torch max_memory_allocated on LAST rank"}
    run = read_run(first_is_fullest, shipped())
    peaks = [device.peak_bytes / GIB for device in memory_report(run.problem, decision_of_run(run))]
    answer = answer_of_row(first_is_fullest, shipped())
    whole = answer_of_row(first_is_fullest | {"memory_kind": ""}, shipped())
    assert answer["memory_gib"] == peaks[-1] < max(peaks) == whole["memory_gib"]
    assert answer["fits"] == whole["fits"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "H1000"}, "gpu 'H1000' is not known"),
        ({"framework": "MyTrainer"}, "framework 'MyTrainer' is not known; known: Composer FSDP1"),
        ({"precision": "fp6"}, "precision='fp6' is not known; known: fp32, bf16"),
        ({"optimizer": "muon"}, "optimizer='muon' is not known; known: adamw, adam, sgd"),
        ({"hidden": "NaN"}, "hidden='NaN': a whole number from 1 is needed"),
        ({"layers": "-4"}, "layers='-4': a whole number from 1"),
        ({"mbs": "0"}, "mbs='0': a whole number from 1"),
        ({"gbs": "inf"}, "gbs='inf'"),
        ({"seq": "8k"}, "seq='8k'"),
        ({"gpu_mem_gb": "-80", "gpu": "A100"}, "gpu_mem_gb='-80': a positive number"),
        ({"n_gpus": "60"}, "n_gpus=60 does not fill whole nodes"),
        ({"tp": "3"}, "not divisible by tp·pp·cp=3·4·2"),
        ({"mbs": "3"}, "gbs=128 is not divisible by dp·mbs=2·3"),
        ({"zero_stage": "7"}, "zero=7; legal values: 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute='some' is not known; known: none, selective, full, full-block"),
        ({"recompute": "full-block"}, "it says how many"),
        ({"memory_kind": "top"}, "memory_kind='top' is not known"),
        ({"attn_type": "linear"}, "attn_type='linear' is not known"),
        ({"framework": ""}, "framework is empty"),
        ({"glu": "maybe"}, "glu='maybe' is not known"),
        ({"pp": "64", "tp": "1", "cp": "1", "vpp": "2", "gbs": "128"}, "but only 82 blocks"),
        ({"seq": "2047"}, "SEQ_MOD_TPCP: seq=2047 is not a multiple"),
        ({"ep": "8", "experts": ""}, "EXPERTS_MOD_EP: ep=8, but the model has no experts"),
        ({"seq": "100000000000"}, "seq=100,000,000,000: up to 134,217,728 is plausible"),
        ({"gbs": str(2**50)}, "tokens a step: up to"),
        ({"gpu": "H100", "gpu_mem_gb": "81920"}, "gpu_mem_gb=81920: H100 is sold with 80; the unit is GB"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(change, words):
    answer = answer_of_row(ROW | change, shipped())
    assert words in answer["error"]
    assert answer["step_s"] is None


def test_damaged_tables_are_one_clear_error(tmp_path):
    good = table(tmp_path / "good.csv", ROW, OLD).read_text()
    for text, words in (
        ("", "the file is empty"),
        (good.splitlines()[0] + "\n", "no row below it"),
        ("id,model\nr1,llama\n", "no column framework, gpu"),
        (good + "r9,only,three\n", "row 3 has 3 fields"),
        (good.replace("heads,", "hidden,", 1), "no column heads|two columns are called hidden"),
        ('id,"gpu\n', "cannot be read as a CSV table"),
    ):
        path = tmp_path / "bad.csv"
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            read_rows(path)
    (tmp_path / "raw.csv").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("raw.csv", "absent.csv", "."):
        with pytest.raises(InputError, match="cannot be read as a CSV table"):
            read_rows(tmp_path / name)


def test_only_the_needed_columns_are_needed(tmp_path):
    row = {name: ROW[name] for name in NEEDED} | {"n_gpus": "8", "hidden": "4096", "layers": "32", "heads": "32"}
    assert answered(table(tmp_path / "short.csv", row))[0]["error"] is None


def test_a_configuration_is_known_again_whatever_its_id_and_spelling():
    assert digest_of(ROW) == digest_of(ROW | {"id": "z", "mbs": "1.0", "memory_kind": "allocated", "model": "x"})
    assert digest_of(ROW) != digest_of(ROW | {"mbs": "2"})


def test_experts_and_latent_attention_are_read():
    v3 = ROW | {"hidden": "7168", "layers": "61", "heads": "128", "attn_type": "mla", "experts": "256", "topk": "8"}
    v3 |= {"moe_ffn": "2048", "shared_ffn": "2048", "dense_layers": "3", "ep": "8", "etp": "1", "pp": "1", "vpp": ""}
    try:
        run = read_run(v3, shipped())
    except ValueError as error:
        assert "not built yet" in str(error)  # noqa: PT017
    else:
        model = run.problem.model
        assert (model.moe.num_experts, model.moe.num_dense_layers, model.num_mtp_layers) == (256, 3, 1)
        assert (model.mla.q_lora_rank, model.mla.kv_lora_rank, model.mla.v_head_dim) == (1536, 512, 128)
        assert (run.layout.ep, run.layout.etp) == (8, 1)


def test_modules_of_recompute_are_read_by_name():
    assert read_run(ROW | {"recompute": "full-block", "recompute_detail": "2 layers"}, shipped()).counts == {"full": 2}
    with pytest.raises(InputError, match=r"recompute 'mlp\+wings' has no price"):
        read_run(ROW | {"recompute": "selective", "recompute_detail": "modules=mlp+wings"}, shipped())


def test_stages_are_equal_where_layers_divide_else_ends_count_as_layers():
    assert stage_edges(10, 4).tolist() == [0, 3, 5, 7, 10]
    assert stage_edges(12, 4).tolist() == [0, 3, 6, 9, 12]
    assert stage_edges(11, 4).tolist() == [0, 3, 6, 9, 11]


def test_flags_that_a_row_says_are_refused_beside_a_table(tmp_path, capsys):
    path = str(table(tmp_path / "runs.csv", ROW))
    assert main(["predict", "--runs", path, "--model", "llama3-8b"]) == 2
    assert "--model does not go with `predict --runs RUNS.csv`: each row says it" in capsys.readouterr().err
    assert main(["predict", "--runs", path]) == 0
    assert "1 of 1 rows answered" in capsys.readouterr().out
    assert main(["predict", "--runs", str(tmp_path / "absent.csv"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


def test_a_law_that_an_option_lifts_refuses_no_row():
    row = ROW | {"tp": "1", "pp": "4", "cp": "1", "vpp": "2", "n_gpus": "8", "mbs": "1", "gbs": "10", "ga": ""}
    answer = answer_of_row(row, shipped())
    assert answer["error"] is None
    assert answer["step_s"] > 0


def warned(path: Path) -> list[str]:
    lines: list[str] = []
    predict_runs(path, shipped(), lines.append)
    return [line for line in lines if line.startswith("warning: ")]


def test_a_column_with_almost_the_name_of_an_input_is_warned_of(tmp_path, capsys):
    typed = {
        "tensor_parallel_size": "4",
        "recompte": "none",
        "Zero": "1",
        "vpp": "5",
        "memory_gib": "3",
        "measured_step_s": "2",
    }
    rows = {name: value for name, value in ROW.items() if name not in ("tp", "recompute", "zero_stage")} | typed
    path = table(tmp_path / "runs.csv", rows)
    assert [line.split("'")[1:4:2] for line in warned(path)] == [
        ["tensor_parallel_size", "tp"],
        ["recompte", "recompute"],
        ["Zero", "zero_stage"],
    ]
    assert main(["predict", "--runs", str(path), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rows"][0]["id"] == "a1"
    assert told.err.count("warning: ") == 3


def test_a_needed_column_with_another_name_is_named(tmp_path):
    row = {"num_layers" if name == "layers" else name: value for name, value in ROW.items()}
    with pytest.raises(InputError, match=r"no column layers \(is it 'num_layers'\?\)"):
        read_rows(table(tmp_path / "runs.csv", row))


def test_columns_that_contradict_what_decides_are_warned_of_once_each(tmp_path):
    """64 GPUs over tp4 pp4 cp2 are dp 2; 128 sequences over dp2 mbs1 are 64 micro-batches."""
    wrong = [ROW | {"id": f"w{place}", "dp": "8", "ga": "16"} for place in range(5)]
    found = warned(table(tmp_path / "runs.csv", *wrong, ROW | {"id": "right", "dp": "2", "ga": "64"}))
    assert len(found) == 2
    assert "5 of 6 rows say otherwise (w0: dp=8, but n_gpus=64 over tp4 pp4 cp2 makes 2; w1: dp=8" in found[0]
    assert "5 of 6 rows say otherwise (w0: ga=16, but gbs=128 over dp2 mbs1 makes 64; w1: ga=16" in found[1]
    assert not warned(table(tmp_path / "right.csv", ROW | {"dp": "2", "ga": "64"}, OLD))


def test_published_tables_are_warned_of_where_they_are_wrong_alone(shared):
    path = shared / "published" / "throughput.csv"
    assert [line.split("(")[-1][:5] for line in warnings_of(path, read_rows(path))] == ["r0258"] * 2


@pytest.mark.parametrize(("gpus", "domain"), [(256, 64), (72, 72), (144, 72), (128, 64), (8, 8), (76, 72)])
def test_a_run_fills_its_fast_domains_evenly(gpus, domain):
    """76 GPUs are 19 nodes, which two racks cannot share evenly: the rack's own domain stays."""
    row = ROW | {"gpu": "GB200", "gpu_mem_gb": "", "gpus_per_node": "4", "n_gpus": str(gpus), "interconnect": ""}
    row |= {"tp": "1", "pp": "1", "vpp": "", "cp": "1", "gbs": str(gpus)}
    found = read_run(row, shipped()).problem.cluster
    assert (found.num_gpus, min(found.domain_size, gpus)) == (gpus, domain)
