"""The nouns: JSON there and back, schemas, golden files, faults with their words, whole writes, the layout's text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import records_for_tests as samples
from hypothesis import given
from hypothesis import strategies as st

from cost_models.records import (
    SCHEMA_VERSION,
    Cluster,
    FabricException,
    FabricLevel,
    Gather,
    Layout,
    Model,
    Plan,
    RecordError,
    Schedule,
    Workload,
    dumps,
    from_json,
    load,
    load_plan,
    loads,
    normalised,
    parse_layout,
    parse_tokens,
    print_layout,
    save,
    to_json,
    write_atomic,
)
from cost_models.records.codec import parse
from cost_models.records.layout import LEGAL_GATHER
from cost_models.records.schema_files import FOLDER, RECORDS, schema_text

# JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_reads_back_equal_and_is_written_as_before(name, golden):
    record = samples.RECORDS[name]
    text = dumps(record)
    assert loads(RECORDS[name], text) == record
    assert dumps(loads(RECORDS[name], text)) == text
    golden(f"{name}.json", text)


@pytest.mark.parametrize("name", RECORDS)
def test_the_committed_schema_is_that_of_the_dataclass(name):
    assert (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8") == schema_text(name), (
        "run `python -m cost_models.records.schema_files`"
    )


def test_no_schema_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.schema.json" for name in RECORDS}


@pytest.mark.parametrize("name", RECORDS)
def test_schemas_take_the_golden_files_and_refuse_unknown_fields(name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(schema_text(name))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    data = to_json(samples.RECORDS[name])
    validator.validate(data)
    assert not validator.is_valid(data | {"surplus": 1})
    assert not validator.is_valid([])


def test_every_field_is_documented_in_its_schema():
    undocumented = [
        f"{name}: {record}.{field}"
        for name in RECORDS
        for record, definition in json.loads(schema_text(name))["$defs"].items()
        for field, described in definition["properties"].items()
        if not described.get("description")
    ]
    assert undocumented == []


def test_infinite_is_null():
    model = replace(samples.CERTIFICATE, bound_s=float("inf"))
    assert to_json(model)["bound_s"] is None
    assert loads(type(model), dumps(model)) == model


degrees = st.sampled_from([1, 2, 3, 4, 8])
models = st.builds(
    lambda kv, group, **fields: Model(heads=kv * group, kv_heads=kv, **fields),
    kv=degrees,
    group=degrees,
    name=st.text(max_size=8),
    num_layers=st.integers(1, 200),
    hidden=st.integers(1, 2**15),
    ffn=st.integers(1, 2**17),
    head_dim=st.integers(1, 512),
    vocab=st.integers(1, 2**20),
    tie_embeddings=st.booleans(),
    gated_mlp=st.booleans(),
    qkv_bias=st.booleans(),
    sliding_window=st.none() | st.integers(1, 2**20),
)


@given(models)
def test_any_model_reads_back_equal(model):
    assert loads(Model, dumps(model)) == model


@given(
    num_nodes=st.integers(1, 5000),
    rails=st.booleans(),
    share=st.floats(0.0, 1.0, exclude_min=True),
    over=st.floats(1.0, 16.0),
    memory=st.integers(1, 2**45),
)
def test_any_cluster_reads_back_equal(num_nodes, rails, share, over, memory):
    base = samples.cluster(
        num_nodes,
        rails=rails,
        fabric=(FabricLevel(name="leaf", radix=3, oversubscription=over),),
        exceptions=(FabricException(node=num_nodes - 1, nic_factor=share),),
    )
    kind = base.pools[0].kind
    pool = replace(base.pools[0], kind=replace(kind, device=replace(kind.device, memory_bytes=memory)))
    cluster = replace(base, pools=(pool, *base.pools))
    assert loads(Cluster, dumps(cluster)) == cluster


# Faults ------------------------------------------------------------------------------------------------------------


def test_a_truncated_file_says_so(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(dumps(samples.plan())[:-200], encoding="utf-8")
    with pytest.raises(
        RecordError, match=r"plan\.json: not JSON: it ends in the middle \(line \d+, column \d+\).*truncated or damaged"
    ):
        load(Plan, path)


@pytest.mark.parametrize("cut", [0, 1, 10, 500])
def test_every_cut_of_a_plan_is_one_clear_error(cut):
    with pytest.raises(RecordError, match="truncated or damaged"):
        loads(Plan, dumps(samples.plan())[:cut])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b": 2,\n}', r"line 2, column 8: a comma behind the last entry; remove it"),
        ('{"a": [1, 2,]}', r"line 1, column 12: a comma behind the last entry"),
        ("{'a': 1}", r"line 1, column 2: single quotes \('a': 1\}\); JSON takes double quotes"),
        ("{\"a\": 'b'}", r"line 1, column 7: single quotes"),
        ('{"a": 1, // layers\n "b": 2}', r"line 1, column 10: a comment \(// layers\)"),
        ('{\n # why\n "b": 2}', r"line 2, column 2: a comment \(# why\)"),
        ('{"a": True}', r"line 1, column 7: True; JSON writes true"),
        ('{"a": None}', r"None; JSON writes null"),
        ('{"a": 1 "b": 2}', r'line 1, column 9: a comma is absent before "b": 2'),
        ('{"a" 1}', r"a colon is absent before 1"),
        ('{"a": 1} {"a": 2}', r'\{"a": 2\} stands behind the end of the document'),
        ("{a: 1}", r"line 1, column 2: a: 1\} where a key in double quotes belongs"),
        ('{"a": llama}', r"llama\} is no value"),
        ('{"a": "b\nc"}', r"line 1, column 9: a line break"),
        ('{"a": "C:\\data"}', r"is no escape of JSON"),
        ('{"a": tru', r"truncated or damaged"),
        ('{"a": NaN}', r"NaN is no JSON; infinite and unknown are written null"),
        ('{"a": -Infinity}', r"-Infinity is no JSON"),
        ('{"a": 1e999}', r"1e999: beyond what a number of 64 bits holds"),
    ],
)
def test_what_is_no_json_is_told_by_its_place_and_its_kind(text, words):
    with pytest.raises(RecordError, match=words):
        parse(text, "request.json")


def test_a_newer_file_says_update():
    data = to_json(samples.plan()) | {"schema_version": SCHEMA_VERSION + 1, "from the future": 1}
    with pytest.raises(
        RecordError, match=rf"schema_version {SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}.*update"
    ):
        loads(Plan, json.dumps(data), "plan.json")


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_a_version_that_never_was_is_refused(version):
    data = to_json(samples.plan()) | {"schema_version": version}
    with pytest.raises(RecordError, match=r"schema_version is .*; legal values: 1 to"):
        loads(Plan, json.dumps(data), "plan.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d.update(hiden=1),
            r"model has an unknown field 'hiden'; did you mean 'hidden'\? Known fields: name",
        ),
        (lambda d: d.update(zzz=1), r"unknown field 'zzz'\. Known fields: name"),
        (lambda d: d.pop("hidden"), r"model lacks the field 'hidden'"),
        (lambda d: d.update(hidden="64"), r'model\.hidden is "64"; expected a whole number'),
        (lambda d: d.update(hidden=64.5), r"model\.hidden is 64\.5; expected a whole number"),
        (lambda d: d.update(hidden=True), r"model\.hidden is true; expected a whole number"),
        (lambda d: d.update(hidden=None), r"model\.hidden is null; expected a whole number"),
        (lambda d: d.update(tie_embeddings=0), r"model\.tie_embeddings is 0; expected true or false"),
        (lambda d: d.update(norm="batchnorm"), r'model\.norm is "batchnorm"; legal values: rmsnorm, layernorm'),
        (lambda d: d.update(moe=[]), r"model\.moe is \[\]; expected an object"),
        (lambda d: d.update(hidden=0), r"model: hidden=0 of model 'tiny': a whole number from 1"),
        (lambda d: d.update(kv_heads=3), r"heads=4 is not divisible by kv_heads=3; legal kv_heads: 1, 2, 4"),
    ],
)
def test_what_a_model_may_not_say(change, words):
    data = to_json(samples.MODEL)
    change(data)
    with pytest.raises(RecordError, match=words):
        from_json(Model, data)


def test_the_place_of_a_fault_is_named_to_the_end():
    data = to_json(samples.plan())
    data["decision"]["stages"][1]["device"] = "one"
    with pytest.raises(RecordError, match=r"plan\.decision\.stages\[1\]\.device is \"one\"; expected a whole number"):
        from_json(Plan, data)


def test_what_is_no_object_or_no_file(tmp_path):
    with pytest.raises(RecordError, match="expected an object with name, num_layers"):
        loads(Model, "[1]")
    with pytest.raises(RecordError, match=r"absent\.json: cannot be read \(No such file"):
        load(Model, tmp_path / "absent.json")
    with pytest.raises(RecordError, match="this is a folder; name a file in it"):
        load(Model, tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\x80\xfe\x00")
    with pytest.raises(RecordError, match="not UTF-8 text; the file is damaged"):
        load(Model, tmp_path / "binary.json")
    (tmp_path / "wide.json").write_bytes("{}".encode("utf-16"))
    with pytest.raises(RecordError, match="it is UTF-16: save it as UTF-8"):
        load(Model, tmp_path / "wide.json")


def test_a_plan_that_names_other_ranks_than_there_are():
    request = replace(samples.plan().request, cluster=samples.cluster(1))
    layout = parse_layout("pp2 dps8 zero1 rc=stages")
    decision = replace(
        samples.DECISION, layout=layout, num_micro_batches=1, ranks=replace(samples.DECISION.ranks, permutation=None)
    )
    with pytest.raises(RecordError, match=r"needs 16 ranks, but cluster 'toy' has 4 GPUs"):
        samples.plan(request=request, decision=decision)
    with pytest.raises(RecordError, match=r"permutation has 3 entries; it must be a permutation of 0\.\.3"):
        replace(samples.DECISION, ranks=replace(samples.DECISION.ranks, permutation=(0, 1, 2)))


def test_stages_are_a_partition_of_the_blocks():
    first, second = samples.DECISION.stages
    with pytest.raises(RecordError, match="not a partition"):
        replace(samples.DECISION, stages=(first, replace(second, blocks=(4, 5))))
    with pytest.raises(RecordError, match=r"cover 5 blocks, but model 'tiny' has 6"):
        samples.plan(decision=replace(samples.DECISION, stages=(first, replace(second, blocks=(3, 4)))))


def test_an_edited_decision_loses_its_promises(tmp_path):
    path = tmp_path / "plan.json"
    save(samples.plan(), path)
    assert load_plan(path) == samples.plan()
    data = json.loads(path.read_text())
    data["decision"]["collectives"]["dp_shard"]["algorithm"] = "tree"
    path.write_text(json.dumps(data))
    edited = load_plan(path)
    assert edited.edited
    assert edited.predicted is None
    assert edited.certificate is None


# Writing -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "model.json"
    save(samples.MODEL, path)
    old = path.read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"model\.json: cannot be written \(No space left"):
        save(replace(samples.MODEL, vocab=1), path)
    assert path.read_text() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.json"]


def test_an_interrupt_from_the_keyboard_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "model.json"
    save(samples.MODEL, path)
    old = path.read_text()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(replace(samples.MODEL, vocab=1), path)
    assert path.read_text() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.json"]


def test_a_written_file_is_whole_and_readable_by_others(tmp_path):
    path = tmp_path / "text"
    mask = os.umask(0o022)
    try:
        write_atomic(path, "first\n")
        write_atomic(path, "second ü\n")
    finally:
        os.umask(mask)
    assert path.read_text(encoding="utf-8") == "second ü\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_place_that_does_not_exist():
    with pytest.raises(RecordError, match=r"the folder .* does not exist; make it"):
        write_atomic(Path("/nonexistent/folder/file.json"), "")


# Layouts and their text --------------------------------------------------------------------------------------------

words = st.sampled_from(["none", "selective", "full", "stages", "core_attn"])


@st.composite
def layouts(draw):
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    fields = {name: draw(degrees) for name in ("dp_replicate", "cp", "tp", "ep", "etp", "pp", "vpp", "mbs")}
    shard = draw(degrees) if zero else 1
    if zero and shard * fields["cp"] == 1:
        zero = 0
    gather = Gather(draw(st.sampled_from(LEGAL_GATHER[zero])))
    schedule = draw(st.sampled_from(list(Schedule)))
    return Layout(dp_shard=shard, zero=zero, gather=gather, schedule=schedule, recompute=draw(words), **fields)


@given(layouts())
def test_parsing_undoes_printing(layout):
    assert parse_layout(print_layout(layout)) == layout


@given(layouts(), st.randoms(use_true_random=False), st.data())
def test_case_order_and_separators_do_not_matter(layout, random, data):
    tokens = print_layout(layout).split()
    random.shuffle(tokens)
    text = ""
    for token in tokens:
        key = token.rstrip("0123456789")
        if key != token and "=" not in token:
            form = data.draw(st.sampled_from(["as is", "equals", "value first"]))
            value = token[len(key) :]
            token = {"as is": token, "equals": f"{key}={value}", "value first": value + key}[form]
        if text:
            legal = [" ", ",", ";", ".", ", "] + (["_", "-"] if text[-1].isdigit() else [])
            text += data.draw(st.sampled_from(legal))
        text += token.upper() if data.draw(st.booleans()) else token
    assert parse_layout(text) == layout


def test_the_canonical_text_of_the_design():
    text = "pp4 vpp2 dpr1 dps16 cp1 tp8 ep1 etp1 mbs1 zero1 gather=step sched=interleaved rc=selective"
    assert print_layout(parse_layout(text)) == text
    assert parse_layout("tp8_pp4-dps16,zero1;vp2.1mbs SCHED=Interleaved rc=selective") == parse_layout(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp8 tp4", "says tp twice"),
        ("vpp2 vp2", "says vpp twice"),
        ("xp8", "'xp8' is not a key with a value; keys: dpr, dps, dp, cp"),
        ("tp", "'tp' is not a key with a value"),
        ("dp8 dps2", "dp beside dpr or dps"),
        ("sched=fancy", r"sched=fancy; legal values: gpipe, 1f1b, interleaved"),
        ("tp=many", "tp=many needs a whole number"),
        ("tp0", "tp=0: a degree is a whole number from 1"),
        ("zero4", "zero=4; legal values: 0, 1, 2, 3"),
        ("dps2 zero3 gather=step", "gather=step with zero=3; legal gather there: use"),
        ("dps2", "dp_shard=2 with zero=0, which divides nothing; write dp_replicate=2"),
    ],
)
def test_what_a_layout_may_not_say(text, words):
    with pytest.raises(RecordError, match=words):
        parse_layout(text)


def test_dp_alone_and_zero():
    assert parse_layout("dp8 zero1").dp_shard == 8
    assert parse_layout("dp8").dp_replicate == 8
    assert parse_layout("dp1 tp8 zero3") == parse_layout("tp8")
    assert normalised(dp=4, zero=2, micro_gather="step").gather is Gather.STEP
    assert parse_tokens("TP8") == {"tp": 8}


def test_the_batch_is_divided_exactly():
    layout = parse_layout("dp4 mbs2")
    assert layout.num_micro_batches(16) == 2
    with pytest.raises(RecordError, match=r"gbs=12 is not divisible by dp·mbs=4·2"):
        layout.num_micro_batches(12)
    with pytest.raises(RecordError, match="at least one gbs"):
        Workload(seq=1, gbs=0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (f'{{"a": {"9" * 5000}}}', "whole numbers are legal"),
        ('{"a": 9007199254740992}', "whole numbers are legal"),
    ],
)
def test_json_on_which_readers_do_not_agree_is_an_error(text: str, told: str) -> None:
    with pytest.raises(RecordError, match=told):
        parse(text, "file")


def test_json_with_a_byte_order_mark_is_read() -> None:
    assert parse('\ufeff{"a": 9007199254740991}') == {"a": 2**53 - 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d["operations_s"].update({"memory_bound/bf16/1000": 0.0}),
            "'memory_bound/bf16/1000' is 0 s; a positive",
        ),
        (
            lambda d: d["operations_s"].update({"matmul/bf16/1x": 1.0}),
            "no operation reads; legal: matmul/<precision>/MxNxK",
        ),
        (lambda d: d["operations_s"].update({"atention/bf16/1": 1.0}), "'atention/bf16/1', which no operation reads"),
        (lambda d: d["operations_s"].update({"launch/bf16": -1.0}), "'launch/bf16' is -1 s"),
        (lambda d: d["operations_s"].update({"launch/bf16": None}), "'launch/bf16' is inf s"),
        (lambda d: next(iter(d["coefficients"].values())).update(value=None), "is inf; a .*number is needed"),
    ],
)
def test_what_a_calibration_may_not_say(change, words):
    data = to_json(samples.CALIBRATION)
    change(data)
    with pytest.raises(RecordError, match=words):
        from_json(type(samples.CALIBRATION), data)
