"""What a profiler wrote and cannot have meant is repaired or left out, and said; transfers are known by many names."""

import dataclasses
import json
import re

import pytest
from support import kineto_samples as samples
from support.command import run

from legato.core.errors import FileError
from legato.ingest.kineto.importer import import_kineto
from legato.whole_jobs.traced import traffic


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
    assert "t.json: 1 event without times or of negative duration did not happen" in found.notes.assumed


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


def replaced(base, kernel):
    """The recorded step with transfers by a name that tells nothing, without what tells their sizes and kinds."""
    for event in base.events:
        if event["name"].startswith("ncclDev"):
            event["name"] = kernel
            del event["args"]["Collective name"], event["args"]["In msg nelems"], event["args"]["dtype"]
    return base


def marked_as(base, category, name):
    """What is launched beside the marks of NCCL is launched by something else of this name."""
    sizes = iter(reversed(samples.ELEMENTS))
    for event in base.events:
        if event["name"] == "nccl:all_reduce":
            event |= {"cat": category, "name": name}
            event["args"] = {"Input Dims": [[next(sizes)]], "Input type": ["float"], "Collective name": "allreduce"}
    return base


@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("user_annotation", "xccl:all_reduce"),
        ("user_annotation", "hccl:all_reduce"),
        ("cpu_op", "record_param_comms"),
        ("cpu_op", "_c10d_functional::all_reduce_"),
        ("cpu_op", "symm_mem::two_shot_all_reduce_"),
        ("cpu_op", "_C_custom_ar::all_reduce"),
        ("cpu_op", "vllm::all_reduce"),
    ],
)
@pytest.mark.parametrize("launched", [True, False])
def test_a_transfer_is_known_by_what_launched_it(tmp_path, category, name, launched):
    """Also where the launch is not in the trace, but the operator's number is."""
    expected = imported(tmp_path, samples.record().text())
    base = marked_as(replaced(samples.record(), "void k7(int4*)"), category, name)
    if not launched and category == "cpu_op":
        numbered = {e["name"]: e["args"]["correlation"] for e in base.events if e["name"] == "void k7(int4*)"}
        kernels = [e for e in base.events if e["name"] in numbered]
        for number, (kernel, by) in enumerate(
            zip(kernels, (e for e in base.events if e["name"] == name), strict=True), 9000
        ):
            base.events = [
                e
                for e in base.events
                if e is kernel or e["args"].get("correlation") != kernel["args"].get("correlation")
            ]
            kernel["args"] = {"stream": 20, "External id": number}
            by["args"]["External id"] = number
    found = imported(tmp_path, base.text())
    assert figures(found)[:-1] == pytest.approx(figures(expected)[:-1])
    assert [t.kind for t in found.transfers] == ["all_reduce", "all_reduce"]
    if category == "cpu_op":
        assert [t.nbytes for t in found.transfers] == [4 * n for n in reversed(samples.ELEMENTS)]


def test_what_computes_inside_a_collective_is_no_transfer(tmp_path):
    """Copies, and the kernels of operators of aten."""
    base = marked_as(samples.record(), "cpu_op", "c10d::allreduce_")
    expected = imported(tmp_path, base.text())
    at = next(e for e in base.events if e["name"] == "c10d::allreduce_")["ts"]
    base.event("cpu_op", "aten::mul_", 2, at + 1, 2)
    base.launch(at + 2, 2, 440, 10, "void k8(float*)", 20)
    base.launch(at + 2, 2, 450, 10, "Memcpy DtoD (Device -> Device)", 20)
    base.launch(at + 4, 2, 460, 10, "void c10d::checkForNaN<float>(float*)", 20)
    base.launch(at + 4, 2, 470, 5, "Memcpy PtoP (Device -> Device)", 20)
    found = imported(tmp_path, base.text())
    assert len(found.transfers) == len(expected.transfers) + 1
    assert {op.name for op in found.workload.ops} > {"void k8(float*)", "Memcpy DtoD (Device -> Device)"}


@pytest.mark.parametrize("on", ["void k7", "my_range"])
def test_a_user_adds_to_the_table(tmp_path, capsys, on):
    expected = imported(tmp_path, samples.record().text())
    base = marked_as(replaced(samples.record(), "void k7(int4*)"), "user_annotation", "my_range")
    (tmp_path / "t.json").write_text(base.text())
    given = "import", "kineto", tmp_path / "t.json", "-o", tmp_path / "w.json", "--json"
    status, out, _ = run(capsys, *given, "--transfer", f"{on}=all-reduce")
    rank = json.loads(out)["ranks"][0]
    assert status == 0 and rank["communication_s"] == pytest.approx(expected.ranks[0].communication_s)
    assert [kind["kind"] for kind in rank["kinds"]] == ["all_reduce"]
    status, out, _ = run(capsys, *given)
    assert json.loads(out)["ranks"][0]["communication_s"] == 0
    status, out, _ = run(capsys, "advise", tmp_path / "t.json", "--transfer", f"{on}=all-reduce")
    assert status == 0 and "│ all-reduce │" in out


@pytest.mark.parametrize("text", ["x", "=all-reduce", "x=sum", "(=all-reduce"])
def test_what_is_no_transfer_to_add(tmp_path, capsys, text):
    (tmp_path / "t.json").write_text(samples.record().text())
    status, _, err = run(capsys, "advise", tmp_path / "t.json", "--transfer", text)
    assert status == 2 and err.startswith("legato: --transfer: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("kernel", ["my_fast_allreduce<float>", "Memcpy PtoP (Device -> Device)"])
def test_what_looks_like_a_transfer_is_named(tmp_path, kernel):
    base = samples.record()
    base.launch(700, 1, 700, 50, kernel)
    said = f"{kernel} looks like a transfer, and is counted as computing (50 us of a step; --transfer says what it is)"
    assert said in imported(tmp_path, base.text()).notes.assumed
    assert not any("looks like" in line for line in imported(tmp_path, samples.record().text()).notes.assumed)


def test_what_runs_among_transfers_without_an_operator_is_named(tmp_path):
    base = samples.record()
    base.launch(690, 1, 690, 10, "ncclDevKernel_AllGather_RING_LL", 20)
    base.launch(700, 1, 700, 50, "void k7(int4*)", 20)
    base.event("cpu_op", "aten::copy_", 1, 720, 10)
    base.launch(725, 1, 750, 20, "void k8(int4*)", 20)
    said = [line for line in imported(tmp_path, base.text()).notes.assumed if "looks like a transfer" in line]
    assert len(said) == 1 and said[0].startswith("void k7(int4*)")


@pytest.mark.parametrize("late_us", [0.5, 3, 15])
def test_a_kernel_that_began_before_its_launch_waited_for_what_ended_then(tmp_path, late_us):
    base = samples.record()
    (mark,) = (e for e in base.events if e["name"].startswith("Optimizer"))
    (update,) = (e for e in base.events if e["name"] == "update")
    launch = next(e for e in base.events if e["args"] == {"correlation": update["args"]["correlation"]})
    mark["ts"], launch["ts"] = 545, 550
    assert update["ts"] == 620  # as the last transfer ends
    expected = figures(imported(tmp_path, base.text()))
    launch["ts"] = 620 + late_us
    found = imported(tmp_path, base.text())
    assert figures(found)[:-1] == pytest.approx(expected[:-1])
    said = "t.json: the clocks of host and device are apart, so 1 kernel that began before the launch waited"
    assert any(line.startswith(said) for line in found.notes.assumed)


def test_what_is_exposed_is_waited_for_whenever_launches_are_recorded(tmp_path):
    """Two figures of one output agree."""
    base = samples.ahead()
    starts = {e["args"]["correlation"]: e["ts"] for e in base.events if e["cat"] == "kernel"}
    for event in base.events:
        if event["cat"] == "cuda_runtime":
            event["ts"] = starts[event["args"]["correlation"]] + 3
        elif event["name"].startswith("ProfilerStep"):
            event["ts"] = samples.FREE_US + samples.PERIOD_US * int(event["name"][-1])
            event["dur"] = samples.PERIOD_US
    found = imported(tmp_path, base.text())
    assert sum(kind.exposed_s for kind in found.ranks[0].kinds) == pytest.approx(60e-6)
    (kind,) = traffic(found.whole.program)
    assert kind.exposed_s == pytest.approx(60e-6)


@pytest.mark.parametrize("behind_us", [3e4, 5e6])
def test_a_clock_of_the_device_that_is_behind_is_set_forward(tmp_path, behind_us):
    """By as much as the first kernel begins before its launch."""
    base = samples.ahead()
    expected = figures(imported(tmp_path, base.text()))
    for event in base.events:
        event["ts"] -= behind_us + 1200 if event["cat"] == "kernel" else 0
    found = imported(tmp_path, base.text())
    assert any("the device's clock is" in line for line in found.notes.assumed)
    assert figures(found)[2:11] == pytest.approx(expected[2:11])


@pytest.mark.parametrize("by_us", [-3e6, 3e9])
def test_an_event_far_from_where_its_launch_has_it(tmp_path, by_us):
    base = samples.ahead()
    expected = figures(imported(tmp_path, base.text()))
    base.launch(5, 1, 1300 + by_us, 10)
    found = imported(tmp_path, base.text())
    assert figures(found) == expected
    assert "t.json: 1 event far from where launches have them did not happen" in found.notes.assumed


@pytest.mark.parametrize("value", [None, "x", float("inf"), float("nan"), -3])
def test_a_kernel_without_times_did_not_happen_and_many_are_refused(tmp_path, value):
    base = samples.ahead()
    expected = figures(imported(tmp_path, base.text()))
    base.launch(5, 1, 1300, value, "lost")
    assert figures(imported(tmp_path, base.text())) == expected
    for _ in range(28):
        base.launch(6, 1, 1310, value, "lost")
    with pytest.raises(FileError, match=r"t.json: 29 of 57 kernels have no times or negative ones"):
        imported(tmp_path, base.text())


def test_steps_of_no_time_mark_nothing(tmp_path):
    base = samples.record()
    expected = figures(imported(tmp_path, base.text()))
    base.event("user_annotation", "ProfilerStep#2", 1, 0, 0)
    found = imported(tmp_path, base.text())
    assert figures(found) == expected
    assert "t.json: 1 ProfilerStep mark of no time mark nothing" in found.notes.assumed
    for event in base.events:
        event["dur"] = 0 if event["cat"] == "kernel" else event["dur"]
    with pytest.raises(FileError, match="nothing takes time in step ProfilerStep#3"):
        imported(tmp_path, base.text())


def test_devices_of_one_process(tmp_path):
    base = samples.record()
    base.events += [{**e, "args": {**e["args"], "device": 9}} for e in base.events if e["cat"] == "kernel"]
    with pytest.raises(FileError, match=r"devices 1 and 1 .device 9. .expected a trace of one rank"):
        imported(tmp_path, base.text())


def test_the_same_kernels_twice_without_their_launches(tmp_path):
    base = samples.record()
    for event in base.events:
        event["args"].pop("correlation", None)
    expected = figures(imported(tmp_path, base.text()))
    base.events += base.events
    found = imported(tmp_path, base.text())
    assert figures(found) == expected and len(found.transfers) == 2
