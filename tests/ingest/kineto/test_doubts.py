"""What a profiler wrote and cannot have meant is repaired or left out, and said; transfers are known by many names."""

import dataclasses
import re

import pytest
from support import kineto_samples as samples

from legato.core.errors import FileError
from legato.ingest.kineto.importer import import_kineto


def imported(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_kineto([path])


def figures(found):
    (rank,) = found.ranks
    return dataclasses.astuple(rank)


#: What a profiler wrote as a name, or as a value of an argument.
NAMES = [
    "C:\\Users\\x\\train.py(3): step",
    '{"device": "cpu", "dtype": "float32"}(12): run',
    "|||S(1): <module>\x01",
    'a "b"',
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("among", [1, 5, -1])
def test_names_that_are_not_escaped(tmp_path, name, among):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    base.event("cpu_op", "PLACE", 1, 2, 3)
    base.events.insert(among, base.events.pop()) if among >= 0 else None
    found = imported(tmp_path, base.text().replace("PLACE", name))
    assert figures(found) == expected
    assert "t.json: what is not JSON means what it shows (1 value)" in found.notes.assumed


def test_a_name_is_read_as_it_is_shown(tmp_path):
    text = samples.record().text().replace("backward0", "C:\\\\k.py", 1).replace("C:\\\\k.py", NAMES[1])
    assert NAMES[1] in [op.name for op in imported(tmp_path, text).workload.ops]


@pytest.mark.parametrize("block", [700, 2**22])
def test_every_string_of_an_event_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr("legato.ingest.source.BLOCK_BYTES", block)
    monkeypatch.setattr("legato.ingest.chrome.BLOCK_BYTES", block)
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    for k in range(40):
        base.event("cpu_op", "PLACE" if k % 3 else "fine", 1, 2, 3, stack="PLACE", shape="x", module="PLACE")
    text = base.text().replace("PLACE", "C:\\Users\\x.py")
    found = imported(tmp_path, text)
    assert figures(found) == expected
    said = f"t.json: what is not JSON means what it shows ({text.count('Users')} values)"
    assert said in found.notes.assumed


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan(ind)", "Infinity", "NaN"])
def test_numbers_that_are_none(tmp_path, value):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    text = re.sub(r'"stream": 7', f'"stream": 7, "memory bandwidth (GB/s)": {value}', base.text(), count=2)
    found = imported(tmp_path, text)
    assert figures(found) == expected
    assert "t.json: what is not JSON means what it shows (2 values)" in found.notes.assumed


@pytest.mark.parametrize("seconds", [0.0005, 3, 1e5])
def test_a_kernel_that_outlasts_the_next_one_of_its_stream(tmp_path, seconds):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    (event,) = (e for e in base.events if e.get("name") == "forward0" and e["cat"] == "kernel")
    assert event["dur"] == 100  # and the next one begins when it ends
    event["dur"] = seconds * 1e6
    found = imported(tmp_path, base.text())
    assert figures(found)[:-1] == pytest.approx(expected[:-1])
    assert any(
        "1 event that would outlast the next one ended where that begins" in line for line in found.notes.assumed
    )


def test_a_few_events_of_another_device_are_left_out_and_another_rank_is_refused(tmp_path):
    base = samples.ahead()
    expected = figures(imported(tmp_path, base.text()))
    (first, *others) = (e for e in base.events if e.get("cat") == "kernel")
    base.events.append({**first, "pid": 9})
    found = imported(tmp_path, base.text())
    assert figures(found) == expected
    assert "t.json: the device of the rank is 1, without 1 event of other devices" in found.notes.assumed
    base.events += [{**e, "pid": 9} for e in others]
    with pytest.raises(FileError, match=r"t.json: devices 1 and 9 .expected a trace of one rank"):
        imported(tmp_path, base.text())


def test_the_same_events_twice(tmp_path):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    base.events += base.events
    found = imported(tmp_path, base.text())
    assert figures(found) == expected
    assert any("that are in the file twice happened once" in line for line in found.notes.assumed)


def test_what_ends_before_it_begins(tmp_path):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    base.launch(30, 1, 40, -1, "early")
    found = imported(tmp_path, base.text())
    assert figures(found) == expected
    assert "t.json: 1 event of negative duration did not happen" in found.notes.assumed


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "all_reduce"),
        ("mscclKernel_Sum_float_Simple_false", "all_reduce"),
        ("multimem_one_shot_all_reduce_kernel", "all_reduce"),
        ("void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<float, 8>", "all_reduce"),
        ("rocshmem_putmem_kernel", "all_reduce"),
    ],
)
def test_transfers_by_other_names(tmp_path, kernel, kind):
    """The mark around the launch says what they are."""
    base = samples.record()
    expected = imported(tmp_path, base.text())
    found = imported(tmp_path, base.text().replace("ncclDevKernel_AllReduce_Sum_f32_RING_LL", kernel))
    assert figures(found) == figures(expected)
    assert [t.kind for t in found.transfers] == [kind, kind] == [t.kind for t in expected.transfers]


def test_transfers_of_experts_without_a_mark(tmp_path):
    base = samples.record()
    for k, part in enumerate(("dispatch", "combine")):
        base.launch(700 + k, 1, 700 + 60 * k, 50, f"void deep_ep::internode::{part}<false, 8>(int4*)", 20)
    found = imported(tmp_path, base.text())
    assert [t.kind for t in found.transfers] == ["all_reduce", "all_reduce", "all_to_all", "all_to_all"]


def test_what_looks_like_a_transfer_is_named(tmp_path):
    base = samples.record()
    base.launch(700, 1, 700, 50, "my_fast_allreduce<float>")
    said = "my_fast_allreduce<float> looks like a transfer, and is counted as computing (50 us of a step)"
    assert said in imported(tmp_path, base.text()).notes.assumed
    assert not any("looks like" in line for line in imported(tmp_path, samples.record().text()).notes.assumed)
