"""Profiler traces: a made one, of which everything is known; hostile ones; and the real ones where they are."""

import gzip
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kineto_samples as samples
from support.strategies import examples

from legato.core.errors import FileError, InputError
from legato.ingest import chrome
from legato.ingest.kineto.importer import import_kineto
from legato.ingest.kineto.trace import events as kineto_events
from legato.ingest.names import collective_kind, tensor_bytes

TRACES = Path(os.environ.get("LEGATO_TRACES", "/nonexistent"))
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="set LEGATO_TRACES to a folder of real traces")


def written(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def trace(tmp_path):
    return written(tmp_path / "step.json", samples.record().text())


def seconds(workload, phase):
    return sum(workload.ops[i].duration_s for i in workload.phase_ops(phase))


def test_a_step_becomes_a_workload_with_the_parameters_it_sent(trace):
    job = import_kineto([trace]).workload
    assert [t.nbytes for t in job.tensors] == [4 * samples.ELEMENTS[1], 4 * samples.ELEMENTS[0]]
    assert [job.ops[t.ready_after].name for t in job.tensors] == ["backward1", "backward0"]
    assert [job.ops[t.readers[0]].name for t in job.tensors] == ["forward1", "forward0"]
    assert [job.ops[r].phase for t in job.tensors for r in t.readers] == ["forward", "optimizer"] * 2


def test_the_hosts_time_is_computation_and_the_wait_for_a_transfer_is_not(trace):
    kept, dropped = import_kineto([trace]).workload, import_kineto([trace], keep_idle=False).workload
    assert [seconds(dropped, p) for p in ("forward", "backward", "optimizer")] == pytest.approx([200e-6, 240e-6, 50e-6])
    # 25 us before the first kernel, and the 330 after the last one of the step before; 225 to 305, 425 to 455; then
    # 575 to 600, when the update was launched (and nothing was being sent until 580: 5 us), and from there it waited
    # for the transfer that ends at 620.
    assert seconds(kept, "forward") == pytest.approx(555e-6)
    assert seconds(kept, "backward") == pytest.approx((240 + 80 + 30) * 1e-6)
    assert seconds(kept, "optimizer") == pytest.approx((50 + 25) * 1e-6)


def test_times_since_1970_lose_nothing(tmp_path, trace):
    """As seconds, they would be rounded to a quarter of a microsecond."""
    late = written(tmp_path / "late.json", samples.record(at_us=1_700_000_000_000_003).text())
    found, wanted = ([op.duration_s for op in import_kineto([path]).workload.ops] for path in (late, trace))
    assert found == pytest.approx(wanted, abs=1e-10)


def test_what_overlap_there_was(trace):
    found = import_kineto([trace])
    (rank,) = found.ranks
    assert (rank.computation_s, rank.communication_s, rank.iteration_s) == pytest.approx((490e-6, 80e-6, 1000e-6))
    # The first transfer, 430 to 470, runs beside backward0 (455 to 575) for 15; the second beside nothing.
    assert rank.exposed_comm_s == pytest.approx(65e-6)
    assert rank.host_overlap == pytest.approx((80 - 20) / 80)
    assert (rank.rho, rank.utilization, rank.overlap) == pytest.approx((80 / 490, 0.49, (80 + 490 - 1000) / 80))
    timeline = found.timeline
    assert (timeline.communication_s, timeline.exposed_comm_s) == pytest.approx((80e-6, 65e-6))
    assert (timeline.computation_s, timeline.iteration_s) == pytest.approx((490e-6, 1000e-6))


def test_the_timeline_is_a_period_that_begins_with_the_backward_pass(trace):
    timeline = import_kineto([trace]).timeline
    spans = [(s.name, round(s.start_s * 1e6)) for s in sorted(timeline.spans, key=lambda s: s.start_s)]
    assert spans == [
        ("backward1", 0), ("all_reduce 00", 125), ("backward0", 150), ("all_reduce 01", 275), ("update", 315),
        ("forward0", 1000 - 280), ("forward1", 1000 - 180),
    ]  # fmt: skip


def test_only_one_step_is_kept_however_long_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_events, "NEAREST", 8)
    r = samples.record()
    for k in range(1, 60):
        samples.record(at_us=1000 * k, number=3 + k, recorder=r)
    path = written(tmp_path / "t.json", r.text())
    marks = kineto_events.read_marks(path)
    trace = kineto_events.read_trace(marks, marks.steps[30])
    assert len(trace.device) < 50 and len(trace.launch) < 50 and len(trace.operator) + len(trace.annotation) < 20
    alone = written(tmp_path / "alone.json", samples.record().text())
    job, expected = (import_kineto([p], step=s, name="x").workload for p, s in ((path, "33"), (alone, "3")))
    assert job.tensors == expected.tensors and [op.name for op in job.ops] == [op.name for op in expected.ops]
    assert [op.duration_s for op in job.ops] == pytest.approx([op.duration_s for op in expected.ops])


def test_of_several_ranks_waiting_is_told_from_transfer(tmp_path):
    early = written(tmp_path / "0.json", samples.record(0, late_us=300).text())
    late = written(tmp_path / "1.json", samples.record(1).text())
    found = import_kineto([late, early])
    assert [r.rank for r in found.ranks] == [0, 1]
    assert [r.waiting_s for r in found.ranks] == pytest.approx([600e-6, 0])
    assert [r.communication_s for r in found.ranks] == pytest.approx([80e-6, 80e-6])
    assert {s.worker for s in found.timeline.spans} == {0, 1}
    alone = import_kineto([early])
    assert alone.ranks[0].waiting_s is None and "the other ranks" in alone.notes.missing


def test_without_shapes_a_bucket_is_a_tensor_and_it_says_so(tmp_path):
    found = import_kineto([written(tmp_path / "t.json", samples.record(shapes=False).text())])
    assert [(t.name, t.nbytes) for t in found.workload.tensors] == [("bucket 00", 12000), ("bucket 01", 4000)]
    assert any("add up" in line for line in found.notes.missing)


def test_without_autograds_marks_positions_are_assumed(tmp_path):
    r = samples.record()
    r.events = [e for e in r.events if e["cat"] != "cpu_op"]
    found = import_kineto([written(tmp_path / "t.json", r.text())])
    assert sum(t.nbytes for t in found.workload.tensors) == 4 * sum(samples.ELEMENTS)
    assert {"operators of autograd", "which forward ops read which parameter"} <= set(found.notes.missing)


def test_the_median_step_or_the_one_asked_for(tmp_path):
    r = samples.record()
    for k in (1, 2):
        samples.record(at_us=1000 * k, number=3 + k, recorder=r)
    next(e for e in r.events if e["name"] == "ProfilerStep#5")["dur"] = 1500
    path = written(tmp_path / "t.json", r.text())
    assert import_kineto([path]).ranks[0].step == "ProfilerStep#3"
    assert import_kineto([path], step="5").ranks[0].iteration_s == pytest.approx(1500e-6)
    with pytest.raises(InputError, match=r"no step '9' .has ProfilerStep#3"):
        import_kineto([path], step="9")
    with pytest.raises(InputError, match="rank 4 is in none"):
        import_kineto([path], rank=4)


def test_a_device_that_lags_behind_its_host_is_not_idle(tmp_path):
    """What the step before still runs is neither an op of this step nor a wait for the host."""
    r = samples.record()
    r.launch(900, 1, 950, 350, "still running")
    before = len(r.events)
    samples.record(at_us=1000, number=4, recorder=r)
    for event in r.events[before:]:
        event["ts"] += 300 * (event["cat"] == "kernel")
    # From 1300, when the device is free, to 2000, when the host goes on; it has nothing to do from 1970.
    job = import_kineto([written(tmp_path / "t.json", r.text())], step="4").workload
    assert job.ops[0].name == "forward0" and job.ops[0].duration_s == pytest.approx(155e-6)
    assert seconds(job, "forward") == pytest.approx(255e-6)


def test_gzip_and_a_bare_array_are_the_same_trace(tmp_path, trace):
    expected = import_kineto([trace], name="x").workload
    packed = tmp_path / "step.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert import_kineto([packed], name="x").workload == expected
    bare = written(tmp_path / "bare.json", json.dumps(samples.record().events))
    assert import_kineto([bare], name="x").workload == expected


class Event(msgspec.Struct):
    name: str
    ts: int


@examples(60)
@given(st.integers(40, 4000), st.lists(st.text('},{[]"\\: a', max_size=20), max_size=40))
def test_a_trace_read_in_small_blocks_is_read_right(tmp_path_factory, block, names):
    """However the array is cut, and whatever looks like an end of an event in a name or in an argument."""
    events = [{"ph": "X", "name": n, "ts": k, "args": {"x": [{"a": n}, {"b": {}}]}} for k, n in enumerate(names)]
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(json.dumps({"a": {"traceEvents": [1]}, "traceEvents": events, "z": [{}, {}]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.ingest.source.BLOCK_BYTES", block)
        patch.setattr(chrome, "BLOCK_BYTES", block)
        read = list(chrome.events(path, Event, chrome.Header()))
    assert [(e.name, e.ts) for e in read] == [(n, k) for k, n in enumerate(names)]


HOSTILE = {
    "": "empty",
    "{": "not JSON",
    "nonsense": "not JSON",
    '{"traceEvents": [{"ph": "X"': "cut off",
    '{"traceEvents": {}}': "missing|not JSON|array",
    '{"events": []}': "traceEvents: missing",
    '{"traceEvents": []}': "no operators and no kernels",
    '{"traceEvents": [' + "[" * 100_000 + "]}": "traceEvents|nested|not JSON",
    '{"traceEvents": [{"args": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}]}": "nested|not JSON",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "then", "dur": 1}]}': "1 of them without times",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1}]}': "no operators and no kernels",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1e300, "dur": 1}]}': "1 of them without times",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 1}]}': "1 of them without times",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "nan", "dur": 1}]}': "1 of them without times",
    '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}': "1 of them without times",
    '{"traceEvents": [{"ph": "X", "cat": ["kernel"]}]}': r"traceEvents\[0\].cat",
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": ' + "9" * 10_000 + ', "dur": 1}]}': "Integer|without times",
}


@pytest.mark.parametrize("text, says", HOSTILE.items(), ids=range(len(HOSTILE)))
def test_a_hostile_file_gets_one_line(tmp_path, text, says):
    path = written(tmp_path / "t.json", text)
    with pytest.raises(InputError, match=says) as error:
        import_kineto([path])
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_damaged_gzip_and_bombs(tmp_path):
    whole = gzip.compress(samples.record().text().encode())
    path = tmp_path / "t.json.gz"
    for data in (whole[:-20], whole[:40] + b"\0\0\0\0" + whole[44:]):
        path.write_bytes(data)
        with pytest.raises(FileError, match="damaged gzip"):
            import_kineto([path])
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (80 * 2**20)))
    with pytest.raises(FileError, match=r"expands more than|in 64 MiB"):
        import_kineto([path])


def test_a_pipe_cannot_be_read_twice():
    reader, writer = os.pipe()
    with pytest.raises(FileError, match=f"^/dev/fd/{reader}: a pipe .expected a file"):
        import_kineto([Path(f"/dev/fd/{reader}")])
    os.close(reader)
    os.close(writer)


def test_the_same_rank_twice_and_steps_that_are_not_there(tmp_path, trace):
    with pytest.raises(InputError, match="rank 0 again"):
        import_kineto([trace, trace])
    other = written(tmp_path / "o.json", samples.record(1, number=9).text())
    with pytest.raises(InputError, match="none of the steps ProfilerStep#3"):
        import_kineto([trace, other])


@examples(50)
@given(st.data())
def test_a_changed_trace_is_imported_or_refused(tmp_path_factory, data):
    """Any value of any event replaced by anything: a workload, or what is missing for one, or one clear line."""
    r = samples.record()
    for _ in range(data.draw(st.integers(1, 4))):
        event = r.events[data.draw(st.integers(0, len(r.events) - 1))]
        place = (
            event["args"] if isinstance(event["args"], dict) and event["args"] and data.draw(st.booleans()) else event
        )
        key = data.draw(st.sampled_from(sorted(place)))
        place[key] = data.draw(
            st.none()
            | st.booleans()
            | st.integers(-(2**70), 2**70)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=5)
            | st.lists(st.integers() | st.lists(st.integers(-1, 2**66), max_size=3), max_size=3)
        )
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(r.text())
    try:
        found = import_kineto([path])
    except InputError as error:
        assert str(error).isprintable()
    else:
        assert found.workload.nbytes > 0 if found.workload else found.notes.missing


@examples(50)
@given(st.data())
def test_a_cut_or_flipped_trace_is_imported_or_refused(tmp_path_factory, data):
    text = bytearray(samples.record().text().encode())
    if data.draw(st.booleans()):
        del text[data.draw(st.integers(0, len(text))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if text:
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_bytes(text)
    try:
        import_kineto([path])
    except InputError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_recv"),
        ("nccl:broadcast", "broadcast"),
        ("allreduce_coalesced", "all_reduce"),
        ("ncclDevKernel_Generic", None),
    ],
)
def test_names_of_collectives(name, kind):
    assert collective_kind(name) == kind


def test_bytes_of_a_tensor_and_of_a_list_of_tensors():
    assert tensor_bytes([[2, 3], []], ["c10::Half", "Scalar"]) == 12
    assert tensor_bytes([[[2], [3, 4]]], ["float"]) == 56
    assert tensor_bytes([[-1]], ["float"]) is tensor_bytes([[2]], ["what"]) is tensor_bytes(None, []) is None


@needs_traces
def test_resnet_50_under_ddp_on_two_a100():
    found = import_kineto([TRACES / "resnet50_ddp_2xa100_rank0.kineto.json.gz"])
    job = found.workload
    assert len(job.tensors) == 161 and job.nbytes == 4 * 25_557_032
    assert job.compute_s == pytest.approx(found.ranks[0].iteration_s, rel=0.02)
    readers = [min(t.readers) for t in job.tensors]
    assert readers[0] > readers[-1] and len(set(readers)) > 100
    assert 0.9 < found.ranks[0].host_overlap <= 1 and 0.15 < found.ranks[0].utilization < 0.2


@needs_traces
def test_dlrm_on_eight_v100(tmp_path):
    import tarfile

    with tarfile.open(TRACES / "dlrm_8rank_v100_kineto.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = import_kineto(sorted(tmp_path.rglob("*.pt.trace.json")))
    assert found.workload.nbytes == 4 * (394_241 + 112 + 226_960)
    assert len(found.workload.tensors) == 15 and len(found.ranks) == 8
    # On one rank a transfer takes 10 us, on another 7,635 us: waiting, not transfer.
    assert max(r.communication_s for r in found.ranks) < 1e-3 < max(r.waiting_s for r in found.ranks)
