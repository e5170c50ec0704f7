"""The times of steps: hosts that run ahead of their device, launches and sizes that a trace lacks."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kineto_samples as samples
from support.strategies import examples

from legato.core.errors import FileError, InputError
from legato.ingest.kineto.importer import import_kineto


def written(folder, recorder, name="t.json"):
    path = folder / name
    path.write_text(recorder.text() if not isinstance(recorder, str) else recorder)
    return path


def test_a_step_lasts_as_long_as_on_the_device(tmp_path):
    """The host's marks are 400, 100, 1,900 and 500 us long; the device's period is 1,000 us."""
    found = import_kineto([written(tmp_path, samples.ahead())])
    first, *steady = found.steps
    assert first.iteration_s == pytest.approx(2200e-6) and first.idle_s == pytest.approx(1200e-6)
    for step in steady:
        times = step.iteration_s, step.computation_s, step.communication_s, step.exposed_comm_s, step.idle_s
        assert times == pytest.approx((1000e-6, 940e-6, 310e-6, 60e-6, 0))
        assert step.overlap == pytest.approx((310 + 940 - 1000) / 310) and step.utilization == pytest.approx(0.94)
    assert found.ranks[0].iteration_s == pytest.approx(1000e-6)
    assert found.workload.compute_s == pytest.approx(940e-6)
    assert [m.nbytes for m in found.plan.messages] == [4 * n for n in reversed(samples.ELEMENTS)]


def test_what_was_launched_before_the_trace_began_belongs_to_no_step(tmp_path):
    first, *_ = import_kineto([written(tmp_path, samples.ahead(unlaunched=True))]).steps
    assert first.iteration_s == pytest.approx(1000e-6)
    assert (first.computation_s, first.communication_s) == pytest.approx((940e-6, 310e-6))


def test_a_launch_that_got_lost_in_the_middle(tmp_path):
    r = samples.ahead()
    lost = [e for e in r.events if e["name"] == "backward0"][2]["args"]["correlation"]
    r.events = [e for e in r.events if e["cat"] != "cuda_runtime" or e["args"]["correlation"] != lost]
    steps = import_kineto([written(tmp_path, r)]).steps
    assert [step.computation_s for step in steps[1:]] == pytest.approx([940e-6] * 3)


def test_an_empty_step_is_not_taken(tmp_path):
    r = samples.ahead()
    r.event("user_annotation", "ProfilerStep#4", 1, samples.HOST_US[-1], 5)
    found = import_kineto([written(tmp_path, r)])
    assert {step.step for step in found.steps} == {f"ProfilerStep#{k}" for k in range(4)}
    with pytest.raises(FileError, match="nothing takes time in step ProfilerStep#4"):
        import_kineto([written(tmp_path, r)], step="4")


def test_without_sizes_the_times_are_known_and_what_a_plan_lacks_is_said(tmp_path):
    found = import_kineto([written(tmp_path, samples.ahead(shapes=False, sized=False))])
    assert found.workload is None and found.plan is None
    assert found.ranks[0].communication_s == pytest.approx(310e-6)
    assert "2 gradient transfers without sizes" in found.lacking and "record_shapes=True" in found.lacking
    assert any("the size of 2 gradient transfers" in line for line in found.notes.missing)


def test_without_transfers_or_a_backward_pass(tmp_path):
    r = samples.ahead()
    r.events = [e for e in r.events if not e["name"].startswith(("nccl", "autograd", "torch", "MmBackward"))]
    found = import_kineto([written(tmp_path, r)])
    assert found.workload is None and "no gradient transfers and no parameters" in found.lacking
    assert found.ranks[0].communication_s == 0 and found.timeline is not None


def test_one_worker_has_gradients_but_no_transfers(tmp_path):
    r = samples.ahead(workers=1)
    r.events = [e for e in r.events if not e["name"].startswith("nccl")]
    found = import_kineto([written(tmp_path, r)])
    assert found.workload.nbytes == 4 * sum(samples.ELEMENTS) and found.plan is None


def test_categories_of_old_profilers(tmp_path):
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    text = samples.ahead().text().replace('"Input Dims"', '"Input dims"')
    changed = json.loads(text)
    for event in changed["traceEvents"]:
        event["cat"] = old[event["cat"]]
    now = import_kineto([written(tmp_path, samples.ahead())])
    then = import_kineto([written(tmp_path, json.dumps(changed), "t.old.json")])
    assert then.workload == now.workload and then.steps == now.steps


def test_late_ranks_are_told_from_transfer_in_every_step(tmp_path):
    paths = [written(tmp_path, samples.ahead(0, late_us=200), "0.json"), written(tmp_path, samples.ahead(1), "1.json")]
    found = import_kineto(paths)
    late = [step for step in found.steps if step.rank == 0][1:]
    assert [s.exposed_waiting_s for s in late] == pytest.approx([200e-6] * 3)
    assert [s.exposed_comm_s for s in late] == pytest.approx([60e-6] * 3)
    assert [s.undelayed_s for s in late] == pytest.approx([1000e-6] * 3)
    assert [s.waiting_s for s in found.steps if s.rank == 1] == pytest.approx([0] * 4)


def test_of_a_long_trace_the_steps_in_the_middle_are_read(tmp_path, monkeypatch):
    path = written(tmp_path, samples.ahead())
    monkeypatch.setattr("legato.ingest.kineto.importer._MOST_EVENTS", len(samples.ahead().events) // 2)
    assert [s.step for s in import_kineto([path]).steps] == ["ProfilerStep#1", "ProfilerStep#2"]


@examples(60)
@given(st.data())
def test_no_share_of_a_step_is_larger_than_the_step(tmp_path_factory, data):
    """Whatever the times of kernels, marks and launches are."""
    r = samples.ahead(unlaunched=data.draw(st.booleans()))
    for event in data.draw(st.lists(st.sampled_from(r.events), max_size=12)):
        event["ts"] = data.draw(st.integers(0, 6000))
        event["dur"] = data.draw(st.integers(0, 3000))
    r.events = [e for e in r.events if e["cat"] != "cuda_runtime" or data.draw(st.booleans())]
    try:
        found = import_kineto([written(tmp_path_factory.mktemp("t"), r)])
    except InputError:
        return
    for s in found.steps:
        least = -1e-12
        assert least <= s.exposed_comm_s <= s.communication_s + 1e-12 <= s.iteration_s + 2e-12
        assert least <= s.idle_s and s.computation_s <= s.iteration_s + 1e-12 and s.overlap <= 1 + 1e-9
        whole = s.computation_s + s.exposed_comm_s + s.exposed_waiting_s + s.idle_s
        assert whole == pytest.approx(s.iteration_s, abs=1e-12)
    if found.workload is not None:
        assert found.workload.compute_s <= found.ranks[0].iteration_s + 1e-12
    assert dataclasses.asdict(found.notes)["missing"]
