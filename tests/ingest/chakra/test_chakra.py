"""Chakra traces: what legato writes it reads, what others write it understands, and hostile files get one line."""

import os
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples, workloads

import legato
from legato.core.errors import FileError, InputError, PlanError
from legato.core.plan import Message, Plan, Slice
from legato.ingest.chakra.export import export_chakra
from legato.ingest.chakra.file import frame, read_nodes
from legato.ingest.chakra.importer import import_chakra, import_chakra_program
from legato.ingest.chakra.schema import COMPUTE, SEND_RECEIVE, TRANSFER, GlobalMetadata, Node
from legato.schedule import SCHEDULERS
from legato.schedule.basics.sharded import sharded
from legato.simulator.collective import simulate
from legato.whole_jobs.traced import replay

TRACES = Path(os.environ.get("LEGATO_TRACES", "/nonexistent"))
SEND, RECEIVE = SEND_RECEIVE
CLUSTER = legato.Cluster.derive(4, 10e9, 30e-6)


def node(key, name="op", kind=COMPUTE, micros=10, data=(), control=(), **attributes):
    made = Node(id=key, name=name, type=kind, duration_micros=micros)
    made.data_deps.extend(data)
    made.ctrl_deps.extend(control)
    for attribute, value in attributes.items():
        sort = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
        made.attr.add(name=attribute, **{f"{sort}_val": value})
    return made


def trace(path, *nodes):
    path.write_bytes(b"".join(map(frame, [GlobalMetadata(version="0.0.4"), *nodes])))
    return path


def exported(path, job, plan):
    path.write_bytes(export_chakra(job, plan, simulate(job, plan, CLUSTER)))
    return path


def same(a, b):
    """The same computation and gradients; what the backward pass needs of the forward pass is not in a period."""
    forward = set(a.phase_ops("forward"))

    def ops(job):
        return [
            (op.phase, op.duration_s, set(op.deps) - (forward if op.phase != "forward" else set()))
            for op in job.ops
            if op.phase != "optimizer"
        ]

    def tensors(job):
        return sorted((t.name, t.nbytes, t.ready_after, {r for r in t.readers if r in forward}) for t in job.tensors)

    return ops(a) == ops(b) and tensors(a) == tensors(b)


@examples(40)
@given(workloads(max_ops=6, max_tensors=4, optimizer=False))
def test_what_is_exported_is_imported(tmp_path_factory, job):
    """With a message a tensor, and every tensor read by the next forward pass, nothing is lost."""
    job = legato.Workload(
        job.name,
        job.ops,
        tuple(legato.Tensor(t.name, t.nbytes, t.ready_after, tuple(sorted(set(t.readers) | {0}))) for t in job.tensors)
        if job.ops[0].phase == "forward"
        else job.tensors,
    )
    if job.ops[0].phase != "forward":
        return
    plan = Plan("fifo", tuple(Message((Slice(t.name, 0, t.nbytes),)) for t in job.tensors), forward_overlap=True)
    path = exported(tmp_path_factory.mktemp("t") / "t.et", job, plan)
    assert same(import_chakra([path]).workload, job)


@pytest.mark.parametrize("scheduler", ["ddp", "p3", "dear", "legato"])
def test_a_plan_of_any_sort_is_written_with_its_bytes_and_times(tmp_path, scheduler):
    from legato import zoo

    job = zoo.workload("alexnet-v2")
    plan = SCHEDULERS[scheduler](job, CLUSTER)
    timeline = simulate(job, plan, CLUSTER)
    path = exported(tmp_path / "t.et", job, plan)
    nodes = read_nodes(path)
    sent = [n for n in nodes if n.type == TRANSFER]
    assert [n.attributes["comm_size"] for n in sorted(sent, key=lambda n: n.id)] == [m.nbytes for m in plan.messages]
    assert len(nodes) == len(job.ops) + len(plan.messages)
    ends = {n.id: n.start_micros + n.micros for n in nodes}
    assert max(ends.values()) == round(max(s.end_s for s in timeline.spans) * 1e6)
    assert all(ends[d] <= n.start_micros for n in nodes for d in n.data_deps)
    back = import_chakra([path]).workload
    assert back.nbytes == job.nbytes and back.compute_s == pytest.approx(job.compute_s)


def test_a_timeline_of_another_plan_is_refused():
    job = legato.Workload(
        "w", (legato.Op("f", "forward", 1e-3), legato.Op("b", "backward", 1e-3)), (legato.Tensor("t", 8, 1, (0,)),)
    )
    plan = SCHEDULERS["fifo"](job, CLUSTER)
    halves = Plan("x", (Message((Slice("t", 0, 4),)), Message((Slice("t", 4, 8),))))
    with pytest.raises(PlanError, match=r"has 1 messages .expected 2"):
        export_chakra(job, halves, simulate(job, plan, CLUSTER))


def test_a_sharded_plan_is_refused():
    job = legato.Workload(
        "w", (legato.Op("f", "forward", 1e-3), legato.Op("b", "backward", 1e-3)), (legato.Tensor("t", 8, 1, (0,)),)
    )
    plan = sharded(SCHEDULERS["fifo"](job, CLUSTER), job, "gradients")
    with pytest.raises(InputError, match="a plan with shard 'gradients' cannot be written as Chakra"):
        export_chakra(job, plan, simulate(job, plan, CLUSTER))


def test_a_plan_with_wire_formats_is_refused():
    job = legato.Workload(
        "w", (legato.Op("f", "forward", 1e-3), legato.Op("b", "backward", 1e-3)), (legato.Tensor("t", 8, 1, (0,)),)
    )
    plan = Plan("p", (Message((Slice("t", 0, 8),), wire="fp16"),))
    with pytest.raises(InputError, match="a plan with messages in a wire format cannot be written as Chakra"):
        export_chakra(job, plan, simulate(job, plan, CLUSTER))


def iteration(**all_reduce):
    """A usual iteration, forward first: two layers, an all-reduce of the lower one's gradient, an update."""
    size = {"comm_type": 0, "comm_size": 4000} | all_reduce
    return [
        node(1, "fwd 1"),
        node(2, "fwd 2", data=[1]),
        node(3, "bwd 2", data=[2], micros=30),
        node(4, "bwd 1", data=[3], micros=20),
        node(5, "ncclAllReduce", TRANSFER, 99, data=[3], **size),
        node(6, "optimizer", data=[5]),
    ]


def test_names_say_the_phases_where_nothing_else_does(tmp_path):
    found = import_chakra([trace(tmp_path / "t.et", *iteration())])
    job = found.workload
    assert [(op.name, op.phase) for op in job.ops] == [
        ("fwd 1", "forward"),
        ("fwd 2", "forward"),
        ("bwd 2", "backward"),
        ("bwd 1", "backward"),
        ("update bucket 00", "optimizer"),
    ]
    (tensor,) = job.tensors
    assert (tensor.nbytes, job.ops[tensor.ready_after].name) == (4000, "bwd 2")
    assert "which forward ops read which parameter" in found.notes.missing


def test_file_order_does_not_matter_and_ranks_are_compared(tmp_path):
    first = trace(tmp_path / "j.0.et", *iteration())
    second = trace(tmp_path / "j.1.et", *reversed(iteration()))
    assert import_chakra([second, first], rank=1).workload == import_chakra([first]).workload
    other = trace(tmp_path / "j.2.et", *iteration(comm_size=8))
    with pytest.raises(FileError, match="other collectives than in"):
        import_chakra([first, other])
    with pytest.raises(InputError, match="rank 7 is in none"):
        import_chakra([first], rank=7)


def test_a_transfer_with_no_dependencies_and_one_without_a_size(tmp_path):
    nodes = iteration()
    del nodes[4].data_deps[:]
    found = import_chakra([trace(tmp_path / "t.et", *nodes)])
    assert "what some gradient transfers depend on" in found.notes.missing
    unsized = [*iteration(), node(9, "allreduce", TRANSFER, comm_type=0, is_cpu_op=False, data=[4])]
    found = import_chakra([trace(tmp_path / "u.et", *unsized)])
    assert len(found.workload.tensors) == 1 and any("comm_size of node 9" in line for line in found.notes.missing)


def test_a_trace_larger_than_memory_may_be_is_refused(tmp_path, monkeypatch):
    path = trace(tmp_path / "t.et", *iteration())
    monkeypatch.setattr("legato.ingest.chakra.file.MOST_BYTES", 20)
    with pytest.raises(FileError, match=r"more than 0 MiB .too large for this kind of trace"):
        import_chakra([path])


def test_hostile_files_get_one_line(tmp_path):
    good = trace(tmp_path / "good.et", *iteration()).read_bytes()
    cases = {
        b"": "no nodes",
        good[:-3]: "cut off",
        b"\xff" * 40: "more than 16 MiB",
        b"\xff\xff\xff\xff\x7f": "more than 16 MiB",
        b"\x05hello": "GlobalMetadata|no nodes",
        b"\x00" * 10: "occurs twice",
        b"PK\x03\x04 a zip": "cut off|Metadata|Node",
    }
    path = tmp_path / "t.et"
    for data, says in cases.items():
        path.write_bytes(data)
        with pytest.raises(FileError, match=says) as error:
            import_chakra([path])
        assert str(error.value).isprintable()
    for nodes, says in (
        ([node(1), node(1)], "id 1 occurs twice"),
        ([node(1, data=[3]), node(2, data=[1]), node(3, data=[2])], "cycle: 1 -> 2 -> 3 -> 1"),
        ([node(1, data=[1])], "cycle: 1 -> 1"),
        ([node(1, micros=2**63)], "duration_micros"),
        ([node(5, "x", TRANSFER, comm_type=0, comm_size=4)], "no computation"),
    ):
        with pytest.raises(FileError, match=says):
            import_chakra([trace(path, *nodes)])
    with pytest.raises(InputError, match="no gradient transfers"):
        import_chakra([trace(path, node(1, "fwd"), node(2, "bwd", data=[1]))])


@examples(50)
@given(st.data())
def test_a_changed_file_is_imported_or_refused(tmp_path_factory, data):
    path = trace(tmp_path_factory.mktemp("t") / "t.et", *iteration())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        import_chakra([path])
    except InputError as error:
        assert str(error).isprintable()


def test_a_chain_of_many_nodes_is_read_without_recursion(tmp_path):
    count = 3 * sys.getrecursionlimit()
    chain = [node(i, "fwd" if i < 9 else "bwd", data=[i - 1] if i else []) for i in range(count)]
    sent = node(count, "all_reduce", TRANSFER, data=[count - 1], comm_type=0, comm_size=4)
    assert len(import_chakra([trace(tmp_path / "t.et", *chain, sent)]).workload.ops) == count
    chain[0].data_deps.append(count - 1)
    with pytest.raises(FileError, match="cycle"):
        import_chakra([trace(tmp_path / "t.et", *chain)])


@pytest.mark.skipif(not TRACES.is_dir(), reason="set LEGATO_TRACES to a folder of real traces")
def test_a_converted_pytorch_trace(tmp_path):
    with tarfile.open(TRACES / "chakra_et_sample.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    job = import_chakra([next(tmp_path.rglob("*.et"))]).workload
    assert [t.nbytes for t in job.tensors] == [8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160]
    assert [t.ready_after for t in job.tensors] == sorted(t.ready_after for t in job.tensors)
    assert 0.08 < sum(job.ops[i].duration_s for i in job.phase_ops("forward")) < 0.1


@examples(40)
@given(st.data())
def test_the_program_of_a_written_plan_takes_as_long_as_the_plan(tmp_path_factory, data):
    """Each rank computes and sends as predicted; whole microseconds are all that a file tells of messages."""
    job = data.draw(workloads(optimizer=False))
    plan = SCHEDULERS["fifo"](job, CLUSTER)
    folder = tmp_path_factory.mktemp("t")
    paths = [exported(folder / f"j.{rank}.et", job, plan) for rank in range(4)]
    program = import_chakra_program(paths).whole.program
    sent = [(one.kind, one.nbytes, one.groups) for one in program.communications]
    assert sent == [("data", message.nbytes, ((0, 1, 2, 3),)) for message in plan.messages]
    off_s = 2e-6 * (len(plan.messages) + 1)
    assert replay(program).seconds == pytest.approx(simulate(job, plan, CLUSTER).iteration_s, abs=off_s)


def pipeline(rank, **more):
    """A stage of two, each of two tensor-parallel ranks: an all-reduce in each pass, and a send between the stages."""
    stage, first = rank // 2, rank < 2
    sums = {"comm_type": 0, "comm_size": 1000, "pg_name": f"tp{stage}"} | more
    sent = node(4, "send", SEND, comm_dst=rank + 2, comm_size=500) if first else None
    received = node(1, "recv", RECEIVE, comm_src=rank - 2, comm_size=500)
    if first:
        sent.data_deps.append(3)
        return [node(2, "fwd", micros=100), node(3, "sum", TRANSFER, 7, data=[2], **sums), sent]
    return [received, node(2, "fwd", micros=200, data=[1]), node(3, "sum", TRANSFER, 9, data=[2], **sums)]


def test_the_program_of_a_pipeline_has_its_groups_and_sends(tmp_path):
    paths = [trace(tmp_path / f"p.{rank}.et", *pipeline(rank)) for rank in range(4)]
    found = import_chakra_program(paths)
    ones = {(one.kind, one.operation, one.groups, one.nbytes) for one in found.whole.program.communications}
    assert ones == {
        ("tensor", "all_reduce", ((0, 1),), 1000),
        ("tensor", "all_reduce", ((2, 3),), 1000),
        ("send", "send", ((0, 2),), 500),
        ("send", "send", ((1, 3),), 500),
    }
    assert replay(found.whole.program).seconds * 1e6 == pytest.approx(100 + 7 + 10 + 200 + 9)
    assert "the ranks of a pg_name are those whose graphs have it" in found.notes.assumed


def test_programs_of_graphs_that_contradict_each_other_are_refused(tmp_path):
    paths = [trace(tmp_path / f"p.{rank}.et", *pipeline(rank)) for rank in range(4)]
    for some, says in (
        (paths[:1], r"graphs of rank 0 .expected graphs of all ranks"),
        ([paths[0], paths[2]], r"graphs of ranks 0, 2 .expected graphs of all ranks"),
    ):
        with pytest.raises(FileError, match=says):
            import_chakra_program(some)
    trace(paths[1], *pipeline(1, comm_size=8))
    with pytest.raises(FileError, match=r"bytes of all_reduce of ranks 0, 1: 1,000, 8 .expected the same"):
        import_chakra_program(paths)
    host, kernel = (node(key, "op", is_cpu_op=key == 1) for key in (1, 2))
    trace(paths[1], host, kernel, node(3, "sum", TRANSFER, 7, data=[1], comm_type=0, comm_size=8))
    with pytest.raises(FileError, match=r"p.1.et: no node depends on a collective .expected to be told what waits"):
        import_chakra_program(paths)
