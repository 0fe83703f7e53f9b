"""Pins: parsed to data, judged on layouts, refused with the legal keys and values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.records import RecordError, Schedule, parse_layout
from planner.errors import InputError
from planner.readers.pins import Op, parse_pins, pins_of_layout

LAYOUT = parse_layout("tp8 pp4 dps4 zero1 mbs2 vpp2 sched=interleaved rc=full")


def test_the_ops_and_alternatives():
    pins = parse_pins("tp=4|8, cp<=2, pp>=2, zero!=3, dp=4, sched=interleaved, rc=full")
    assert pins.allows(LAYOUT)
    assert pins.fields == {"tp", "cp", "pp", "zero", "dp", "schedule", "recompute"}
    assert pins.pins[0].op is Op.EQUAL
    assert pins.pins[0].values == (4, 8)


def test_each_op_can_refuse():
    for text in ("tp=4", "tp!=8", "tp<=4", "tp>=16", "dp=2", "dps=2", "sched=gpipe", "rc!=full", "gather=use"):
        pins = parse_pins(text)
        assert pins.broken(LAYOUT) == pins.pins, text


def test_field_names_are_keys_too():
    assert parse_pins("dp_shard=4, schedule=interleaved, recompute=full").allows(LAYOUT)


def test_empty_text_is_free():
    assert parse_pins("").pins == ()
    assert parse_pins(" , ").allows(LAYOUT)


def test_a_partial_layout_leaves_the_rest_free():
    pins = pins_of_layout("tp4 pp8")
    assert str(pins) == "tp=4, pp=8"
    assert pins.allows(parse_layout("tp4 pp8 dp3 zero1 rc=full"))
    assert not pins.allows(LAYOUT)
    assert pins.allows_value("cp", 16)
    assert not pins.allows_value("tp", 16)


@pytest.mark.parametrize(
    "text, words",
    [
        ("tq=4", r"'tq' is not a key of a layout.*Legal keys: dpr, dps, dp"),
        ("microbatch=4", r"Legal keys"),
        ("tp", r"is not `key op value`"),
        ("tp=8 cp<=2", r"separated by commas"),
        ("tp<8", r"no op '<'; legal ops"),
        ("tp=eight", r"legal values of tp: whole numbers from 1"),
        ("tp=0", r"a degree is a whole number from 1"),
        ("zero=4", r"legal values: 0, 1, 2, 3"),
        ("sched=fast", r"legal values: gpipe, 1f1b"),
        ("sched<=gpipe", r"takes one number"),
        ("tp<=4|8", r"takes one number"),
        ("rc=stages", r"name a kind"),
        ("tp=4, tp=8", r"no tp satisfies tp=4 and tp=8"),
        ("tp>=8, tp<=4", r"no tp satisfies"),
        ("zero>=2, zero!=2|3", r"no zero satisfies"),
        ("tp<=2, tp!=1|2", r"no tp satisfies"),
    ],
)
def test_errors_say_what_is_legal(text, words):
    with pytest.raises(InputError, match=words):
        parse_pins(text)


def test_a_partial_layout_is_refused_like_a_layout():
    with pytest.raises(RecordError, match="twice"):
        pins_of_layout("tp4 tp8")
    with pytest.raises(InputError, match="says nothing"):
        pins_of_layout("  ")
    with pytest.raises(InputError, match="whole number from 1"):
        pins_of_layout("tp0")


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["=", "!=", "<=", ">="]))
def test_ops_are_those_of_arithmetic(value, bound, op):
    truth = {"=": value == bound, "!=": value != bound, "<=": value <= bound, ">=": value >= bound}[op]
    assert parse_pins(f"tp{op}{bound}").allows_value("tp", value) is truth


@given(st.lists(st.sampled_from(["tp=4", "cp<=2", "pp!=3", "zero>=1", "sched=1f1b|gpipe"]), unique=True))
def test_text_of_pins_reads_back(parts):
    pins = parse_pins(", ".join(parts))
    assert parse_pins(str(pins)) == pins


def test_schedules_are_all_legal_words():
    assert all(parse_pins(f"sched={schedule}").allows_value("schedule", schedule) for schedule in Schedule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor_parallel=4", r"did you mean 'tp'\? Legal keys: dpr"),
        ("zero_stage=1", "did you mean 'zero'"),
        ("world=8", "the number of GPUs is --gpus"),
        ("rc=full|fulll", r"'fulll' is no kind of recompute; did you mean 'full'\? Legal kinds: none, full"),
        ("rc!=some", r"'some' is no kind of recompute\. Legal kinds: none, full"),
    ],
)
def test_an_unknown_key_or_kind_names_what_it_may_mean(text, words):
    with pytest.raises(InputError, match=words):
        parse_pins(text, ("none", "full"))
