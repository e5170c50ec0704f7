"""The file codec: what is valid comes back equal, what is not is one `FileError` of one line."""

import copy
import json
import os
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import FileError
from legato.core.files import decode, encode, identity, load, read, write, write_text
from legato.core.measurement import MeasuredPlan, Measurement
from legato.core.plan import Message, Plan, Slice
from legato.core.timeline import Span, Timeline
from legato.core.workload import Op, Tensor, Workload

seconds = st.floats(0, 1e6)
names = st.text(max_size=12)
count = st.integers(1, 2**63 - 1)


@st.composite
def workloads(draw):
    phases = ["forward"] * draw(st.integers(0, 4)) + ["backward"] * draw(st.integers(1, 4))
    phases += ["optimizer"] * draw(st.integers(0, 3))
    ops = tuple(
        Op(draw(names), phase, draw(seconds), tuple(draw(st.lists(st.integers(0, i - 1), max_size=3))) if i else ())
        for i, phase in enumerate(phases)
    )
    backward = [i for i, phase in enumerate(phases) if phase == "backward"]
    others = [i for i, phase in enumerate(phases) if phase != "backward"]
    readers = st.lists(st.sampled_from(others), max_size=3) if others else st.just([])
    tensors = tuple(
        Tensor(name, draw(count), draw(st.sampled_from(backward)), tuple(draw(readers)))
        for name in draw(st.lists(names, min_size=1, max_size=4, unique=True))
    )
    untraced = draw(st.none() | st.floats(1e-9, 1e6))
    return Workload(draw(names), ops, tensors, draw(count), draw(names), untraced, draw(st.floats(1e-9, 1e9)))


clusters = st.builds(
    Cluster,
    workers=count,
    collectives=st.dictionaries(names, st.builds(LinearCost, seconds, seconds), min_size=1, max_size=4),
    servers=st.integers(0, 9),
    bandwidth_bps=st.none() | st.floats(1, 1e15),
    latency_s=st.none() | seconds,
    reduce_s_per_byte=seconds,
)
slices = st.builds(
    lambda name, start, length: Slice(name, start, start + length), names, st.integers(0, 2**40), st.integers(1, 2**40)
)
messages = st.builds(
    Message,
    slices=st.lists(slices, min_size=1, max_size=3).map(tuple),
    kind=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "push", "pull"]),
    collective=st.none() | names,
    depth=st.integers(1, 64),
    server=st.none() | st.integers(0, 9),
)
plans = st.builds(
    Plan,
    scheduler=names,
    messages=st.lists(messages, min_size=1, max_size=4).map(tuple),
    forward_overlap=st.booleans(),
    op_order=st.lists(st.integers(0, 2**63 - 1), max_size=5).map(tuple),
    workload_id=names,
)
spans = st.builds(
    lambda worker, lane, name, start, length, kind, size: Span(worker, lane, name, start, start + length, kind, size),
    st.integers(0, 64),
    names,
    names,
    seconds,
    seconds,
    st.sampled_from(["forward", "backward", "optimizer", "message"]),
    st.none() | count,
)
timelines = st.builds(
    Timeline,
    name=names,
    source=st.sampled_from(["predicted", "measured"]),
    iteration_s=seconds,
    spans=st.lists(spans, max_size=5).map(tuple),
    lower_bound_s=st.none() | seconds,
    job=names,
    network=names,
)
timelines = st.builds(lambda t, base: msgspec.structs.replace(t, baseline=base), timelines, st.none() | timelines)
measurements = st.builds(
    Measurement,
    job=names,
    network=names,
    plans=st.lists(st.builds(MeasuredPlan.of, names, st.lists(seconds, min_size=1, max_size=5)), min_size=1).map(tuple),
    doubts=st.lists(names, max_size=2).map(tuple),
)
nouns = st.one_of(workloads(), clusters, plans, timelines, measurements)

WORKLOAD = Workload(
    "net",
    (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 2.0, (0,)),
        Op("b1", "backward", 2.0, (1,)),
        Op("u", "optimizer", 0),
    ),
    (Tensor("w1", 400, 2, (1, 3)), Tensor("w0", 100, 2, (0,))),
    batch_size=32,
    untraced_s=5.0,
)
CLUSTER = Cluster.derive(4, 1e9, 30e-6)
PLAN = Plan(
    "fifo", (Message((Slice("w1", 0, 400),)), Message((Slice("w0", 0, 100),), "push", "ring", 2, 0)), True, (2, 0)
)
TIMELINE = Timeline(
    "fifo",
    "predicted",
    6.0,
    (Span(0, "compute", "b1", 0.0, 2.0, "backward"), Span(0, "net", "m", 2, 3, "message")),
    4.0,
)
MEASUREMENT = Measurement("net", "4 workers", (MeasuredPlan.of("fifo", [3.0, 1.0, 2.0], predicted_s=1.0),), ("busy",))
ALL = [WORKLOAD, CLUSTER, PLAN, TIMELINE, MEASUREMENT]


def value_or_file_error(data: bytes, kind: type):
    """What `decode` makes of the data; anything but a value that can be written again or one good line fails."""
    try:
        value = decode(data, kind, "some.json")
    except FileError as error:
        line = str(error)
        assert line.startswith("some.json: ") and len(line) < 1000
        assert line.isprintable(), repr(line)
        return error
    assert isinstance(value, kind)
    assert decode(encode(value), kind) == value
    return value


def refusal(data: bytes, kind: type = Workload) -> str:
    outcome = value_or_file_error(data, kind)
    assert isinstance(outcome, FileError), outcome
    return str(outcome).removeprefix("some.json: ")


def changed(noun, path, new=None, literal=None) -> bytes:
    """The noun's JSON with the node at `path` replaced; by raw text if `literal`, removed if neither is given."""
    tree = json.loads(encode(noun))
    node = tree
    for key in path[:-1]:
        node = node[key]
    if literal is not None:
        node[path[-1]] = "@@"
    elif new is None:
        del node[path[-1]]
    else:
        node[path[-1]] = new
    text = json.dumps(tree)
    return (text.replace('"@@"', literal) if literal is not None else text).encode()


@given(nouns)
def test_what_is_written_comes_back_equal(noun):
    again = decode(encode(noun), type(noun))
    assert again == noun and identity(again) == identity(noun)


@given(nouns, st.sampled_from([Workload, Cluster, Plan, Timeline, Measurement]))
def test_a_file_is_never_taken_for_another_noun(noun, kind):
    if kind is not type(noun):
        tag, own = (k.__struct_config__.tag for k in (kind, type(noun)))
        assert refusal(encode(noun), kind) == f'format: "{own}" (expected "{tag}")'


@given(st.binary(max_size=200), st.sampled_from(ALL))
def test_random_bytes(data, noun):
    value_or_file_error(data, type(noun))


@given(st.sampled_from(ALL), st.data())
def test_truncated(noun, data):
    whole = encode(noun)
    assert "JSON" in refusal(whole[: data.draw(st.integers(0, len(whole) - 1))], type(noun))


@given(st.sampled_from(ALL), st.data())
def test_flipped_bytes(noun, data):
    damaged = bytearray(encode(noun))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    value_or_file_error(bytes(damaged), type(noun))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**18, 10**30),
    st.floats(allow_nan=True),
    names,
    st.sampled_from([10**400, -1, 0, 2**63, 2**64, "", "forward", "legato.plan/1"]),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=5
)


def nodes(tree):
    """(container, key) of every node of a JSON tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in list(pairs):
        yield tree, key
        yield from nodes(child)


@examples(300)
@given(st.sampled_from(ALL), st.data())
def test_mutated_nodes(noun, data):
    tree = json.loads(encode(noun))
    container, key = data.draw(st.sampled_from(list(nodes(tree))))
    match data.draw(st.sampled_from(["replace", "remove", "add", "copy"])):
        case "replace":
            container[key] = data.draw(anything)
        case "remove":
            del container[key]
        case "add" if isinstance(container, dict):
            container[data.draw(names)] = data.draw(anything)
        case _:
            other, other_key = data.draw(st.sampled_from(list(nodes(tree))))
            container[key] = copy.deepcopy(other[other_key])
    value_or_file_error(json.dumps(tree).encode(), type(noun))


@pytest.mark.parametrize("noun", ALL, ids=lambda noun: type(noun).__name__)
def test_deep_nesting(noun):
    brackets, objects = b"[" * 100_000, b'{"a":' * 100_000
    for deep in (brackets, brackets + b"]" * 100_000, objects, objects + b"1" + b"}" * 100_000):
        refusal(deep, type(noun))
        field = encode(noun)[1:].replace(b'"format":', b'"x":' + deep + b',"format":', 1)
        assert refusal(b"{" + field, type(noun)) == "nested too deeply"


@pytest.mark.parametrize(
    ("path", "literal", "line"),
    [
        (["ops", 0, "duration_s"], "-1", "ops[0].duration_s: -1.0 (expected 0 to 1e+15 seconds)"),
        (["ops", 0, "duration_s"], "1e999", "ops[0].duration_s: 1e999 (number out of range)"),
        (["ops", 2, "duration_s"], "null", "ops[2].duration_s: null (expected float)"),
        (["ops", 2, "duration_s"], '"2 ms"', 'ops[2].duration_s: "2 ms" (expected float)'),
        (["ops", 1, "name"], "7", "ops[1].name: 7 (expected str)"),
        (
            ["ops", 1, "phase"],
            '"side\\nways"',
            "ops[1].phase: \"side\\nways\" (expected one of 'forward', 'backward', ",
        ),
        (["ops", 2, "phase"], '"forward"', "tensors[0].ready_after: 2 (expected the id of a backward op)"),
        (["ops", 3, "phase"], '"backward"', "tensors[0].readers: 3 (expected ids of forward or optimizer ops)"),
        (
            ["ops", 1, "phase"],
            '"optimizer"',
            "ops[2].phase: 'backward' after a later phase (expected forward, backward",
        ),
        (["ops", 1, "deps"], "0", "ops[1].deps: 0 (expected array)"),
        (["ops", 1, "deps"], "[1]", "ops[1].deps: 1 (expected the id of an earlier op, 0 to 0)"),
        (["ops", 1, "deps"], "[2]", "ops[1].deps: 2 (expected the id of an earlier op"),
        (["ops", 1, "deps"], "[-1]", "ops[1].deps: -1 (expected the id of an earlier op"),
        (["ops", 1, "deps"], "[0.5]", "ops[1].deps[0]: 0.5 (expected int)"),
        (["ops"], "[]", "ops: none given (expected at least one)"),
        (["ops"], "{}", "ops: an object (expected array)"),
        (["ops", 0], "[]", "ops[0]: an array (expected object)"),
        (["tensors"], "[]", "tensors: none given (expected at least one"),
        (["tensors", 1, "name"], '"w1"', "tensors[1].name: 'w1' twice (expected a unique name)"),
        (["tensors", 0, "nbytes"], "0", "tensors[0].nbytes: 0 (expected at least 1)"),
        (["tensors", 0, "nbytes"], "1.5", "tensors[0].nbytes: 1.5 (expected int)"),
        (["tensors", 0, "nbytes"], "1" + "0" * 400, "tensors[0].nbytes: 1000000000000"),
        (
            ["tensors", 0, "nbytes"],
            "9223372036854775808",
            "tensors[0].nbytes: 9223372036854775808 (expected int <= 9223372036854775807)",
        ),
        (["tensors", 0, "ready_after"], "4", "tensors[0].ready_after: 4 (expected the id of a backward op)"),
        (["tensors", 0, "ready_after"], "0", "tensors[0].ready_after: 0 (expected the id of a backward op)"),
        (["tensors", 0, "ready_after"], "-2", "tensors[0].ready_after: -2 (expected the id of a backward op)"),
        (["tensors", 0, "readers"], "[9]", "tensors[0].readers: 9 (expected ids of forward or optimizer ops)"),
        (["tensors", 0, "readers"], "[2]", "tensors[0].readers: 2 (expected ids of forward or optimizer ops)"),
        (["batch_size"], "0", "batch_size: 0 (expected at least 1)"),
        (["untraced_s"], "-0.5", "untraced_s: -0.5 (expected finite seconds above 0)"),
        (["untraced_s"], "true", "untraced_s: true (expected float or null)"),
        (["time_scale"], "0", "time_scale: 0.0 (expected a finite number above 0)"),
        (["colour"], "1", "colour: unknown field (expected name, ops, tensors, batch_size, device, "),
        (["ops", 0, "x\ny"], "1", "ops[0].x\\ny: unknown field (expected name, phase, duration_s, deps)"),
        (["format"], '"legato.workload/2"', 'format: "legato.workload/2" (expected "legato.workload/1")'),
        (["format"], "3", 'format: 3 (expected "legato.workload/1")'),
    ],
)
def test_a_wrong_workload_says_what_where_and_what_was_expected(path, literal, line):
    assert refusal(changed(WORKLOAD, path, literal=literal)).startswith(line)


@pytest.mark.parametrize(
    ("noun", "path", "literal", "line"),
    [
        (CLUSTER, ["workers"], "0", "workers: 0 (expected at least 1)"),
        (CLUSTER, ["servers"], "-1", "servers: -1 (expected at least 0)"),
        (CLUSTER, ["collectives"], "{}", "collectives: none given (expected at least one)"),
        (CLUSTER, ["collectives"], "[]", "collectives: an array (expected object)"),
        (CLUSTER, ["collectives", "ring", "alpha_s"], '"x"', 'collectives["ring"].alpha_s: "x" (expected float)'),
        (CLUSTER, ["collectives", "tree", "beta_s_per_byte"], "-1", 'collectives["tree"].beta_s_per_byte: -1.0 (expec'),
        (CLUSTER, ["collectives", "a\nb"], "[]", 'collectives["a\\nb"]: an array (expected object)'),
        (CLUSTER, ["collectives", "new"], "{}", 'collectives["new"].alpha_s: missing (required)'),
        (CLUSTER, ["bandwidth_bps"], "0", "bandwidth_bps: 0.0 (expected a finite number above 0)"),
        (CLUSTER, ["latency_s"], "-1", "latency_s: -1.0 (expected a finite number, at least 0)"),
        (PLAN, ["messages"], "[]", "messages: none given (expected at least one)"),
        (PLAN, ["messages", 0, "slices"], "[]", "messages[0]: message with no slices (expected at least one)"),
        (
            PLAN,
            ["messages", 0, "slices", 0, "stop"],
            "0",
            "messages[0].slices[0]: slice of 'w1': 0 to 0 (expected 0 <=",
        ),
        (PLAN, ["messages", 0, "slices", 0, "start"], "-5", "messages[0].slices[0]: slice of 'w1': -5 to 400 (expec"),
        (PLAN, ["messages", 1, "kind"], '"shout"', "messages[1].kind: \"shout\" (expected one of 'all_reduce', "),
        (PLAN, ["messages", 1, "depth"], "0", "messages[1].depth: 0 (expected 1 to 1,000,000)"),
        (PLAN, ["op_order", 0], "1" + "0" * 20, "op_order[0]: 100000000000000000000 (expected int <= 9"),
        (PLAN, ["forward_overlap"], "1", "forward_overlap: 1 (expected bool)"),
        (TIMELINE, ["iteration_s"], "-1", "iteration_s: -1.0 (expected 0 to 1e+18 seconds)"),
        (TIMELINE, ["source"], '"guessed"', "source: \"guessed\" (expected one of 'predicted', 'measured')"),
        (
            TIMELINE,
            ["spans", 0, "end_s"],
            "-1",
            "spans[0]: span 'b1': 0.0 to -1.0 (expected start <= end, at most 1e+18)",
        ),
        (TIMELINE, ["spans", 1, "nbytes"], "-1", "spans[1].nbytes: -1 (expected at least 0)"),
        (TIMELINE, ["spans", 1, "nbytes"], '"1 MB"', 'spans[1].nbytes: "1 MB" (expected int or null)'),
        (TIMELINE, ["spans", 1, "kind"], "null", "spans[1].kind: null (expected one of 'forward', "),
    ],
)
def test_the_other_nouns_say_it_too(noun, path, literal, line):
    assert refusal(changed(noun, path, literal=literal), type(noun)).startswith(line)


@pytest.mark.parametrize(
    ("noun", "path", "line"),
    [
        (WORKLOAD, ["format"], 'format: missing (expected "legato.workload/1")'),
        (WORKLOAD, ["tensors"], "tensors: missing (required)"),
        (WORKLOAD, ["ops", 1, "duration_s"], "ops[1].duration_s: missing (required)"),
        (CLUSTER, ["workers"], "workers: missing (required)"),
        (CLUSTER, ["collectives"], "collectives: missing (required)"),
        (PLAN, ["messages", 0, "slices", 0, "tensor"], "messages[0].slices[0].tensor: missing (required)"),
        (TIMELINE, ["source"], "source: missing (required)"),
    ],
)
def test_missing_fields(noun, path, line):
    assert refusal(changed(noun, path), type(noun)) == line


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("path", [["ops", 0, "duration_s"], ["batch_size"]])
def test_numbers_that_json_does_not_have(path, literal):
    assert refusal(changed(WORKLOAD, path, literal=literal)).startswith("not JSON: invalid character (byte ")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "not JSON: "),
        (b"  \n", "not JSON: "),
        (b"\xef\xbb\xbf" + encode(WORKLOAD), "not JSON: a byte order mark (expected UTF-8 without one)"),
        (encode(WORKLOAD).decode().encode("utf-16"), "not UTF-8: "),
        (encode(WORKLOAD).replace(b'"net"', b'"\xff"'), "not UTF-8: "),
        (encode(WORKLOAD).replace(b'"batch_size"', b'"\xff"'), "not UTF-8: "),
        (encode(WORKLOAD).replace(b'"net"', b'"\\ud800"'), "not JSON: "),
        (encode(WORKLOAD) + b"x", "not JSON: trailing characters"),
        (b"[" + encode(WORKLOAD) + b"]", "file: an array (expected object)"),
        (b"null", "file: null (expected object)"),
        (b'"text"', 'file: "text" (expected object)'),
        (b"1" * 6000, "file: 111"),
    ],
)
def test_what_is_no_json_object_of_utf8(data, line):
    assert refusal(data).startswith(line)


def test_read_names_the_path(tmp_path):
    (tmp_path / "broken.json").write_bytes(changed(WORKLOAD, ["batch_size"], literal='"many"'))
    with pytest.raises(FileError) as error:
        read(tmp_path / "broken.json", Workload)
    assert str(error.value) == f'{tmp_path}/broken.json: batch_size: "many" (expected int)'


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing.json", "No such file"), (".", "Is a directory"), ("a\0b", "null"), ("x" * 999, "long")],
)
def test_a_file_that_cannot_be_read(tmp_path, name, reason):
    with pytest.raises(FileError, match=reason) as error:
        read(tmp_path / name, Workload)
    assert str(error.value).isprintable() and str(error.value).startswith(str(tmp_path))


def test_a_file_without_an_end(monkeypatch):
    monkeypatch.setattr("legato.core.files.MOST_BYTES", 3 * 2**20)
    with pytest.raises(FileError) as error:
        read("/dev/zero", Workload)
    assert str(error.value) == "/dev/zero: more than 3 MiB (too large for a legato file)"


def test_a_file_of_just_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("legato.core.files.MOST_BYTES", 5)
    (tmp_path / "five").write_bytes(b"12345")
    assert load(tmp_path / "five") == b"12345"


def test_a_pipe_is_read_like_a_file():
    reader, writer = os.pipe()
    os.write(writer, encode(WORKLOAD))
    os.close(writer)
    assert read(f"/dev/fd/{reader}", Workload) == WORKLOAD
    os.close(reader)


@pytest.mark.parametrize("noun", ALL, ids=lambda noun: type(noun).__name__)
def test_write_then_read(tmp_path, noun):
    write(tmp_path / "new.json", noun)
    assert read(tmp_path / "new.json", type(noun)) == noun
    assert os.listdir(tmp_path) == ["new.json"]


@pytest.mark.parametrize("noun", ALL, ids=lambda noun: type(noun).__name__)
def test_a_file_says_what_it_holds(tmp_path, noun):
    write(tmp_path / "some.json", noun)
    assert read(tmp_path / "some.json") == noun
    assert decode(encode(noun)) == noun


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"{}", "format: missing (expected "),
        (b'{"format": "legato.workload/2"}', 'format: "legato.workload/2" (expected "legato.workload/1" or '),
        (b'{"format": "legato.plan/1"}', "scheduler: missing (required)"),
        (b"[]", "file: an array (expected object)"),
        (b"", "not JSON: "),
        (b'{"schemaVersion": 1, "traceEvents": []}', "a trace (`legato advise` reads "),
        (b'[{"ph": "X", "name": "aten::mm"}]', "a trace (`legato advise` reads "),
        (b"\x1f\x8b\x08", "a trace (`legato advise` reads "),
    ],
)
def test_a_file_that_is_no_noun(tmp_path, data, line):
    (tmp_path / "some.json").write_bytes(data)
    with pytest.raises(FileError) as error:
        read(tmp_path / "some.json")
    assert str(error.value).startswith(f"{tmp_path}/some.json: {line}")


@pytest.mark.parametrize(
    "name", ["missing/out.json", "file/out.json", "directory", "", "a\0b", "x" * 999, "x" * 250 + "/a"]
)
def test_a_place_that_cannot_be_written(tmp_path, name, monkeypatch):
    (tmp_path / "file").write_text("old")
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="cannot write") as error:
        write(name, WORKLOAD)
    assert str(error.value).isprintable()
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    target = tmp_path / "plan.json"
    write(target, PLAN)

    def full(*args):
        raise OSError(28, "No space left on device")

    if step == "rename":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr("pathlib.Path.write_bytes", lambda self, data: (open(self, "wb").close(), full()))
    with pytest.raises(FileError) as error:
        write(target, TIMELINE)
    assert str(error.value) == f"{target}: cannot write: No space left on device"
    assert os.listdir(tmp_path) == ["plan.json"] and read(target, Plan) == PLAN


def test_text_that_utf8_cannot_hold_is_refused(tmp_path):
    with pytest.raises(FileError, match="cannot write"):
        write_text(tmp_path / "t", "\ud800")
    with pytest.raises(FileError, match="cannot write"):
        write(tmp_path / "t", Plan("\ud800", PLAN.messages))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs named pipes")
def test_what_is_not_a_regular_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, PLAN)
    assert decode(os.read(reader, 65536), Plan) == PLAN
    os.close(reader)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_name_of_any_length_leaves_a_line_of_a_thousand_characters():
    long = FileError(f"first {'x' * 10**6} last")
    assert len(str(long)) == 1000 and str(long).startswith("first x") and str(long).endswith("x last")
