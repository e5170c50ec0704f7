"""The program of a job from the traces of its ranks: what each computes and sends, and what waits for what."""

import json
import os
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kineto_samples import Recorder
from support.mesh_samples import ACTIVATION, BEGIN_US, DATA, GRADIENT, TENSOR, MeshJob
from support.strategies import examples

from legato.core.errors import InputError
from legato.core.program import Compute
from legato.ingest.kineto.importer import import_kineto
from legato.whole_jobs.traced import replay, run

TRACES = Path(os.environ.get("LEGATO_TRACES", "/nonexistent"))
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="set LEGATO_TRACES to a folder of real traces")

jobs = st.builds(
    MeshJob,
    tensor=st.sampled_from([1, 2, 3]),
    data=st.sampled_from([2, 3]),
    layers=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    named=st.booleans(),
    apart_us=st.sampled_from([0, 50_000]),
)


def import_program(paths):
    """The program and its notes; raises `InputError` if there is none."""
    whole = import_kineto(paths).whole
    if whole.program is None:
        raise InputError(whole.lacking)
    return whole.program, whole.notes


def micros(step):
    return step.seconds * 1e6 - BEGIN_US


@given(jobs, st.integers(0, 800))
def test_the_traced_step_is_replayed(tmp_path_factory, job, late_us):
    job = MeshJob(job.tensor, job.data, job.layers, job.seed, job.named, late_us, job.apart_us)
    found, _ = import_program(job.write(tmp_path_factory.mktemp("traces")))
    assert micros(replay(found)) == pytest.approx(max(job.run()), abs=1e-3)
    assert found.traced_s * 1e6 - BEGIN_US == pytest.approx(max(job.run()), abs=1e-3)


@given(jobs, st.integers(0, 500), st.integers(0, 500))
def test_other_times_of_communications_give_the_step_that_the_job_would_have(tmp_path_factory, job, sums, gradients):
    """Where the host is never late, what waits for what is all that a step depends on."""
    found, _ = import_program(job.write(tmp_path_factory.mktemp("traces")))
    takes = {TENSOR: sums, DATA: gradients}
    seconds = [takes[DATA if one.nbytes == 4 * GRADIENT else TENSOR] * 1e-6 for one in found.communications]
    assert micros(run(found, seconds)) == pytest.approx(max(job.run(takes)), abs=1e-3)


@pytest.mark.parametrize("named", [True, False])
def test_all_communications_are_kept_with_their_groups_kinds_and_bytes(tmp_path, named):
    job = MeshJob(named=named)
    found, notes = import_program(job.write(tmp_path))
    kinds = {(one.kind, one.operation, one.groups, one.nbytes) for one in found.communications}
    tensor = "tensor" if named else "all-reduce of groups like ranks 0, 1"
    assert kinds == {(tensor, "all_reduce", ((a, b),), 4 * ACTIVATION) for a, b in job.groups(TENSOR)} | {
        ("data", "all_reduce", ((a, b),), 4 * GRADIENT) for a, b in job.groups(DATA)
    }
    assert len(found.communications) == job.layers * (2 * 2 + 2) and not notes.missing
    computed = [a.seconds for a in found.lanes[1].actions if isinstance(a, Compute) and not a.label]
    assert sum(computed) * 1e6 == pytest.approx(
        job.update[1] + sum(job.forward[1, k] + job.backward[1, k] for k in range(job.layers))
    )


def test_waits_for_late_ranks_are_found_within_each_group(tmp_path):
    job, waited = MeshJob(data=3), dict.fromkeys(range(6), 0)
    paths = job.write(tmp_path)
    takes = {TENSOR: job.sums, DATA: job.gradients}

    def record(rank, stream, _, start, end, group):
        waited[rank] += end - start - takes[stream] if group else 0

    job.run(record=record)
    assert {rank.rank: rank.waiting_s * 1e6 for rank in import_kineto(paths).ranks} == pytest.approx(waited)


def edited(tmp_path, edit, rank=1, **options):
    """The import of a job in which the arguments of one rank's collectives are changed."""
    paths = MeshJob(**options).write(tmp_path)
    trace = json.loads(paths[rank].read_text())
    found = [e["args"] for e in trace["traceEvents"] if "Collective name" in e["args"]]
    edit(trace, found)
    paths[rank].write_text(json.dumps(trace))
    return import_program(paths)[0]


def lost(trace, found):
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["args"] is not found[-1]]


def moved(trace, _):
    trace["distributedInfo"]["pg_config"][0]["ranks"] = [1, 2]


def ungrouped(trace, found):
    for args in found:
        del args["Process Group Ranks"], args["Process Group Name"]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (moved, "rank 1: 0 collectives of ranks 0, 1 (expected 6, as on rank 0)"),
        (lost, "rank 1: 5 collectives of ranks 0, 1 (expected 6, as on rank 0)"),
        (lambda _, found: found[0].update({"Collective name": "allgather"}), "rank 1: all_gather in ranks 0, 1"),
        (lambda _, found: found[0].update({"In msg nelems": 7}), "bytes of all_reduce of ranks 0, 1: 2,048, 28"),
        (lambda _, found: found[0].pop("dtype"), "rank 1: ncclDevKernel_AllReduce_Sum_f32: of unknown size"),
        (lambda _, found: found[0].update({"Collective name": "gather"}), "gather (expected a collective, or a send"),
        (ungrouped, "of an unknown group (expected NCCL's Process Group Ranks)"),
    ],
)
def test_contradictions_are_refused(tmp_path, edit, told):
    with pytest.raises(InputError) as error:
        edited(tmp_path, edit)
    assert told in str(error.value) and str(error.value).isprintable()


def changed(draw, trace):
    """One change of an event, or of what the head of the file says of a group."""
    event, kind = draw.choice(trace["traceEvents"]), draw.randint(0, 5)
    if kind == 0:
        trace["traceEvents"].remove(event)
    elif kind == 1:
        event["dur"] = draw.choice([0, 1, 3 * event["dur"], 5000])
    elif kind == 2:
        event["ts"] += draw.choice([-400, -50, 50, 900])
    elif kind == 3 and event["args"]:
        event["args"][draw.choice(list(event["args"]))] = draw.choice([None, 0, -1, "x", [0, 1], "[0, 1]", 10**9, 2.5])
    elif kind == 4:
        event["name"] = draw.choice(["ncclDevKernel_SendRecv", "ncclDevKernel_AllGather", "nccl:all_to_all", "x"])
    else:
        group = draw.choice(trace["distributedInfo"]["pg_config"])
        group[draw.choice(list(group))] = draw.choice([None, [0], [0, 1], "dp", 5, [1, 99]])


@examples(60)
@given(st.integers(0, 2**32))
def test_any_changed_traces_become_a_program_or_are_refused(tmp_path_factory, seed):
    draw = random.Random(seed)
    paths = MeshJob(seed=seed, late_us=draw.choice([0, 500])).write(tmp_path_factory.mktemp("traces"))
    for path in draw.choices(paths, k=draw.randint(1, 3)):
        trace = json.loads(path.read_text())
        changed(draw, trace)
        path.write_text(json.dumps(trace))
    try:
        found, _ = import_program(paths)
    except InputError as error:
        assert str(error).isprintable()
        return
    step = replay(found)
    parts = step.computing_s + step.idle_s + step.late_s + sum(step.exposed_s.values())
    assert parts == pytest.approx(step.seconds)


def test_a_missing_rank_is_refused_unless_one_stands_for_all(tmp_path):
    paths = MeshJob().write(tmp_path)
    with pytest.raises(InputError, match=r"traces of ranks 1, 3: missing \(expected traces of all 4 ranks\)"):
        import_program([paths[0], paths[2]])
    paths = MeshJob(tensor=1, data=2, seed=3).write(tmp_path)
    found, notes = import_program(paths[:1])
    assert found.lanes[0].workers == (0, 1) and "all 2 ranks compute what rank 0 computes" in notes.assumed


def test_sends_are_started_by_their_senders_and_awaited_by_their_receivers(tmp_path):
    """A pipeline of two ranks: the second one computes when it has received."""
    paths = []
    for rank, what in enumerate(("send", "recv")):
        r = Recorder(rank, 2)
        r.event("user_annotation", "ProfilerStep#1", 1, 0, 100)
        args = {"Collective name": what, "dtype": "BFloat16", "In msg nelems": 1000, "Group size": 2}
        peer = {"Dst Rank": 1} if what == "send" else {"Src Rank": 0}
        if what == "send":
            r.launch(10, 1, 200, 300, "forward0")
        r.launch(20, 1, (500, 300)[rank], (50, 250)[rank], "ncclDevKernel_SendRecv", 20, **args, **peer)
        if what == "recv":
            r.launch(30, 1, 550, 70, "forward1")
        paths.append(tmp_path / f"{rank}.json")
        paths[-1].write_text(r.text())
    found, _ = import_program(paths)
    (sent,) = found.communications
    assert (sent.kind, sent.operation, sent.groups, sent.nbytes) == ("send", "send", ((0, 1),), 2000)
    assert sent.traced_s == pytest.approx(50e-6)
    assert replay(found).seconds == pytest.approx(620e-6)
    assert run(found, [200e-6]).seconds == pytest.approx(770e-6)


def together(rank, busy, kernel, then, *, peers=True):
    """A rank that computes, sends and receives in one kernel, and computes what needs that."""
    r = Recorder(rank, 2)
    r.event("user_annotation", "ProfilerStep#1", 1, 0, 90)
    r.launch(10, 1, 100, busy, "forward")
    for at, what, peer in ((20, "send", "Dst Rank"), (30, "recv", "Src Rank")):
        told = {"Collective name": what, "dtype": "Float", "In msg nelems": 1000 + 10 * (rank != (what == "recv"))}
        told |= {"Process Group Description": "mesh_pp"} | ({peer: 1 - rank} if peers else {})
        r.event("cpu_op", "record_param_comms", 1, at, 5, **told)
    r.event("user_annotation", "nccl:coalesced", 1, 40, 6)
    r.launch(42, 1, 100 + busy, kernel, "ncclDevKernel_SendRecv", 20)
    r.launch(50, 1, 100 + busy + kernel, then, "backward")
    return r.text()


def test_sends_and_receives_of_one_kernel(tmp_path):
    """Both ranks send to each other; the first one is ready 200 us earlier. What each sends has a size of its own."""
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    for path, text in zip(paths, (together(0, 100, 250, 70), together(1, 300, 50, 50)), strict=True):
        path.write_text(text)
    found, _ = import_program(paths)
    assert {(one.kind, one.operation, one.groups, one.nbytes) for one in found.communications} == {
        ("pipeline", "send", ((0, 1),), 4000),
        ("pipeline", "send", ((1, 0),), 4040),
    }
    assert [one.traced_s for one in found.communications] == pytest.approx([50e-6, 50e-6])
    assert replay(found).seconds * 1e6 == pytest.approx(100 + 420) == found.traced_s * 1e6
    seconds = [350e-6 if one.groups == ((0, 1),) else 50e-6 for one in found.communications]
    assert run(found, seconds).seconds * 1e6 == pytest.approx(100 + 100 + 350 + 70)
    paths[1].write_text(together(1, 300, 50, 50, peers=False))
    with pytest.raises(
        InputError, match="send and receive \\(expected a collective, or a send or receive with its peer"
    ):
        import_program(paths)


def test_an_all_gather_has_the_bytes_of_its_result_and_is_of_data_beside_reduce_scatters(tmp_path):
    def edit(trace, found):
        sharded = [args for args in found if args["In msg nelems"] == GRADIENT]
        sharded[0]["Collective name"] = "allgather"
        for args in sharded[1:]:
            args["Collective name"] = "reduce_scatter"

    paths = MeshJob(named=False).write(tmp_path)
    for path in paths:
        trace = json.loads(path.read_text())
        edit(trace, [e["args"] for e in trace["traceEvents"] if "Collective name" in e["args"]])
        path.write_text(json.dumps(trace))
    found, _ = import_program(paths)
    gathers, scatters = (
        {(one.kind, one.nbytes) for one in found.communications if one.operation == operation}
        for operation in ("all_gather", "reduce_scatter")
    )
    assert gathers == {("data", 2 * 4 * GRADIENT)} and scatters == {("data", 4 * GRADIENT)}


@pytest.mark.parametrize(
    ("purpose", "kind"),
    [
        ("mesh_dp_shard", "data"),
        ("mesh_tp", "tensor"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("mesh_ep", "expert"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "tensor_and_data_parallel_group"),
        ("MODEL_PARALLEL_GROUP", "model_parallel_group"),
    ],
)
def test_names_of_groups_are_kinds_if_they_say_so_and_stay_names_otherwise(tmp_path, purpose, kind):
    paths = MeshJob().write(tmp_path)
    for path in paths:
        path.write_text(path.read_text().replace("mesh_tp", purpose))
    found, _ = import_program(paths)
    assert {one.kind for one in found.communications if one.nbytes == 4 * ACTIVATION} == {kind}


@needs_traces
def test_dlrm_on_eight_v100_is_replayed(tmp_path):
    with tarfile.open(TRACES / "dlrm_8rank_v100_kineto.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found, _ = import_program(sorted(tmp_path.rglob("*.pt.trace.json")))
    assert [one.operation for one in found.communications].count("all_to_all") == 5
    assert {one.kind for one in found.communications} == {"data", "all-to-all of all ranks"}
    assert replay(found).seconds == pytest.approx(found.traced_s, rel=0.001)


@needs_traces
def test_resnet_50_on_two_a100_is_replayed_from_one_of_them():
    found, _ = import_program([TRACES / "resnet50_ddp_2xa100_rank0.kineto.json.gz"])
    assert sum(one.nbytes for one in found.communications if one.kind == "data") == 4 * 25_557_032
    assert {one.kind for one in found.communications} == {"data", "broadcast of all ranks"}  # of buffers
    assert found.lanes[0].workers == (0, 1)
    assert replay(found).seconds == pytest.approx(found.traced_s, rel=0.01)
