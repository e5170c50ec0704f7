"""Steps of several backward passes: a made trace, and real ones of two gloo ranks, recorded here."""

import itertools
from pathlib import Path

import pytest
from support import kineto_samples as samples
from support.ranks import run_script

from legato.advice import advise
from legato.core.cluster import Cluster
from legato.ingest.kineto.importer import import_kineto
from legato.simulator.collective import simulate
from legato.whole_jobs.traced import replay

KINDS = ("once", "unrolled", "accumulated", "sent_twice", "alternating", "exchanged")


def names(job, phase):
    return [job.ops[i].name for i in job.phase_ops(phase)]


def imported(tmp_path, recorder):
    path = tmp_path / "step.json"
    path.write_text(recorder.text())
    return import_kineto([path])


def test_of_accumulated_gradients_the_last_are_sent_and_the_first_forward_pass_reads(tmp_path):
    found = imported(tmp_path, samples.accumulated())
    job = found.workload
    assert names(job, "forward") == ["forward0", "forward1"]
    assert names(job, "backward") == ["backward1", "backward0", "forward0", "forward1", "backward1", "backward0"]
    assert [t.nbytes for t in job.tensors] == [4 * samples.ELEMENTS[1], 4 * samples.ELEMENTS[0]]
    assert [t.ready_after for t in job.tensors] == [6, 7]
    assert [min(t.readers) for t in job.tensors] == [1, 0]
    assert "the gradients of backward pass 2 of 2 are sent; the other passes are computation" in found.notes.assumed
    assert not any("sends gradients" in line for line in found.notes.missing)


def test_gradients_that_are_sent_more_than_once_a_step(tmp_path):
    found = imported(tmp_path, samples.accumulated(sends_early=True))
    job = found.workload
    assert job.nbytes == 4 * sum(samples.ELEMENTS)
    assert sum("AllReduce" in name for name in names(job, "backward")) == 2
    assert "a single backward pass that sends gradients: 2 of 2 do" in found.notes.missing


@pytest.mark.parametrize("operator, updates_us", [("aten::mul_", [290]), ("aten::linalg_vector_norm", [170, 120])])
def test_what_runs_between_the_backward_pass_and_the_update_waits_for_the_transfer(tmp_path, operator, updates_us):
    sent = {"op": "allreduce_", "mark": "all_reduce", "at": 500, "begins": 505, "takes": 150, "wait": 660}
    recorder = samples.on_host(sent)
    recorder.event("cpu_op", operator, 1, 670, 60)
    found = imported(tmp_path, recorder)
    job, updates = found.workload, found.workload.phase_ops("optimizer")
    # The operators take 60 and 40 us. The host is idle for 110 us and 80 us before them, without the transfer's time.
    assert [1e6 * job.ops[i].duration_s for i in updates] == pytest.approx(updates_us)
    assert job.tensors[0].readers[-len(updates) :] == tuple(updates)
    assert job.ops[updates[-1]].deps == tuple(updates[:-1])
    cluster = Cluster.derive(2, 8e9, 0.0)
    assert simulate(job, found.plan, cluster).iteration_s == pytest.approx(job.compute_s + 4000 / 1e9)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profiled")
    run_script([str(Path(samples.__file__).with_name("profiled.py")), *KINDS], folder, ranks=2)
    return folder


def read(traces, kind):
    return import_kineto([traces / f"{kind}.{rank}.json" for rank in range(2)])


@pytest.mark.parametrize("kind, passes", [("once", 1), ("unrolled", 1), ("accumulated", 3), ("sent_twice", 2)])
def test_real_steps_of_one_model(traces, kind, passes):
    found = read(traces, kind)
    job = found.workload
    widths = (96, 96, 64) if kind == "unrolled" else (96, 128, 128, 64)
    sizes = [size for a, b in itertools.pairwise(widths) for size in (4 * b, 4 * a * b)]
    assert sorted(t.nbytes for t in job.tensors) == sorted(sizes)
    assert any(f"of {passes} are sent" in line for line in found.notes.assumed) == (passes > 1)
    assert any("sends gradients" in line for line in found.notes.missing) == (kind == "sent_twice")
    # All are read in the first of the forward passes, the first layer's first, and ready in the last backward pass.
    assert "which forward ops read which parameter" not in found.notes.missing
    products = [i for i in job.phase_ops("forward") if "linear" in job.ops[i].name or "addmm" in job.ops[i].name]
    assert len(products) == (5 if kind == "unrolled" else 3)
    assert {r for t in job.tensors for r in t.readers if job.ops[r].phase == "forward"} <= set(products)
    backward = job.phase_ops("backward")
    assert min(t.ready_after for t in job.tensors) > backward[0] + (passes - 1) * len(backward) // (passes + 1)


def test_two_models_that_take_turns(traces):
    found = read(traces, "alternating")
    missing = " ".join(found.notes.missing)
    assert "a single update" in missing and "a single backward pass that sends gradients: 2 of 2 do" in missing
    assert found.workload.nbytes == 4 * (96 * 160 + 160 + 160 * 32 + 32)  # of the second


@pytest.mark.parametrize("kind", KINDS)
def test_real_steps_get_a_verdict_that_adds_up(traces, kind):
    network = Cluster.derive(2, 1e9, 5e-5)  # on a busy machine, the traces' own may be none that a network can be
    found = advise(read(traces, kind), network)
    assert found.workers == 2 and len(found.ranks) == 2 and found.verdict and not found.lacking
    for rank in found.ranks:
        parts = (rank.computation_s, rank.exposed_s, rank.late_s, rank.host_s)
        assert sum(part.mean for part in parts) == pytest.approx(rank.iteration_s.mean)
        assert rank.steps == 3 and rank.communication_s.mean > 0
    _, *plans = found.predictions
    ours = plans[-1]
    assert not found.code or max(plan.win for plan in plans) > 0  # a plan for one step may lose in others
    assert ours.iteration_s >= found.lower_bound_s * (1 - 1e-9)


def test_the_program_of_a_real_job_with_an_all_to_all(traces):
    """Both ranks, all communications with their bytes, and parts that add up."""
    found = read(traces, "exchanged")
    program = found.whole.program
    exchanged, *reduced = sorted(program.communications, key=lambda one: one.kind)
    assert (exchanged.kind, exchanged.operation, exchanged.nbytes) == (
        "all-to-all of all ranks",
        "all_to_all",
        4 * 64 * 96,
    )
    assert {(one.kind, one.operation, one.groups) for one in reduced} == {("data", "all_reduce", ((0, 1),))}
    assert sum(one.nbytes for one in reduced) == found.workload.nbytes
    step = replay(program)
    parts = step.computing_s + step.idle_s + step.late_s + sum(step.exposed_s.values())
    assert parts == pytest.approx(step.seconds) and step.computing_s > 0
    assert [row.kind for row in advise(found).traffic][-1] == "all kinds"
