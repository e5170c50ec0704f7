"""Execution traces beside profiler traces: fresh ones from two gloo processes, and broken ones."""

import importlib.util
import itertools
import json
import os
import tarfile
from pathlib import Path

import pytest
from support import kineto_samples as samples
from support.ranks import run_script

from legato.core.errors import FileError, InputError
from legato.ingest.execution_trace import _arguments, import_execution_traces
from legato.ingest.kineto.importer import import_kineto

TRACES = Path(os.environ.get("LEGATO_TRACES", "/nonexistent"))

TRAINING = """
import os
import torch, torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

rank, folder = int(os.environ["RANK"]), os.getcwd()
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.Linear(128, 10)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
observer = ExecutionTraceObserver()
observer.register_callback(f"{folder}/graph{rank}.json")
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=True,
    schedule=schedule(wait=1, warmup=2, active=1),
    execution_trace_observer=observer,
    on_trace_ready=lambda p: p.export_chrome_trace(f"{folder}/times{rank}.json"),
) as profiler:
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        profiler.step()
dist.destroy_process_group()
"""
SIZES = sorted(4 * n for n in (64 * 128, 128, 128 * 128, 128, 128 * 10, 10))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A folder with the two traces of each of two ranks, made just now."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    folder = tmp_path_factory.mktemp("traced")
    run_script(["-c", TRAINING], folder, ranks=2, GLOO_SOCKET_IFNAME="lo")
    return folder


@pytest.fixture(scope="module")
def without_shapes(traced):
    """The profiler trace of rank 0 as it is written without `record_shapes`."""
    times = json.loads((traced / "times0.json").read_text())
    for event in times["traceEvents"]:
        for key in ("Input Dims", "Input type"):
            event.get("args", {}).pop(key, None)
    (traced / "times.json").write_text(json.dumps(times))
    return traced / "times.json"


def test_collectives_that_the_graph_lost_as_it_ended(traced, without_shapes, tmp_path):
    graph = json.loads((traced / "graph0.json").read_text())
    marks = [node for node in graph["nodes"] if node["name"] == "gloo:all_reduce"]
    graph["nodes"] = [node for node in graph["nodes"] if node not in marks]
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    found = import_execution_traces([tmp_path / "graph.json", without_shapes])
    assert marks and sorted(t.nbytes for t in found.workload.tensors) == SIZES


def test_shapes_that_only_the_graph_has(traced, without_shapes):
    assert import_kineto([without_shapes]).workload is None
    found = import_execution_traces([traced / "graph0.json", without_shapes])
    expected = import_execution_traces([traced / "graph0.json", traced / "times0.json"], name=found.workload.name)
    assert sorted(t.nbytes for t in found.workload.tensors) == SIZES
    assert found.workload == expected.workload and found.plan == expected.plan is not None


def test_traces_of_two_processes_are_no_pair(traced):
    with pytest.raises(FileError, match=r"graph0.json: a trace of process \d+, but .*times1.json is one of \d+ "):
        import_execution_traces([traced / "graph0.json", traced / "times1.json"])


def test_a_pair_a_rank_gives_data_dependencies(traced):
    paths = [traced / f"{sort}{rank}.json" for rank in (1, 0) for sort in ("graph", "times")]
    found = import_execution_traces(paths)
    job = found.workload
    assert sorted(t.nbytes for t in job.tensors) == SIZES
    assert len(found.ranks) == 2 and found.ranks[0].waiting_s is not None
    assert not any("dependencies" in line or "operators of" in line for line in found.notes.missing)
    names = [op.name for op in job.ops]
    relu = names.index("aten::relu")
    assert [names[d] for d in job.ops[relu].deps] == ["aten::linear"]
    # The two products of a layer's backward pass need the gradient of its output, and not one another.
    products = [i for i in job.phase_ops("backward") if names[i] == "aten::mm"]
    assert any(a not in job.ops[b].deps for a, b in itertools.pairwise(products))


def test_the_profilers_trace_of_a_cpu_alone(traced):
    found = import_kineto([traced / "times0.json", traced / "times1.json"])
    job = found.workload
    assert sorted(t.nbytes for t in job.tensors) == SIZES
    assert "device kernels" in found.notes.missing
    first = [job.ops[min(t.readers)].name for t in job.tensors]
    assert set(first) == {"aten::linear"}
    assert all(0 < r.communication_s < r.iteration_s for r in found.ranks)


def graph(*nodes):
    return json.dumps({"schema": "1.0.1", "pid": 1, "nodes": list(nodes)})


@pytest.mark.parametrize(
    "text, says",
    [
        (graph({"id": 1, "name": "a", "rf_id": 1}, {"id": 1, "name": "b"}), "id 1 occurs twice"),
        (graph({"id": 1, "name": "nothing", "rf_id": 1}), "none of its operators"),
        (graph({"id": "x", "name": "a"}), "nodes\\[0\\].id"),
        (graph({"id": 1, "name": "a"})[:-2], "truncated"),
        ('{"schema": "1", "nodes": ' + "[" * 100_000 + "}", "nested|not an execution trace"),
        ('{"schema": "1", "nodes": [{"id": 1, "name": "a", "inputs": [NaN]}]}', "not an execution trace"),
    ],
)
def test_a_broken_graph_gets_one_line(tmp_path, text, says):
    (tmp_path / "g.json").write_text(text)
    (tmp_path / "t.json").write_text(samples.record().text())
    with pytest.raises(FileError, match=says) as error:
        import_execution_traces([tmp_path / "g.json", tmp_path / "t.json"])
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_graph_alone_has_no_times(tmp_path):
    path = tmp_path / "g.json"
    path.write_text(graph({"id": 1, "name": "a"}))
    with pytest.raises(InputError, match="has no times"):
        import_execution_traces([path])
    times = tmp_path / "t.json"
    times.write_text(samples.record().text())
    with pytest.raises(InputError, match="2 execution traces and 1 profiler"):
        import_execution_traces([path, path, times])


def test_arguments_of_a_schema():
    assert _arguments("aten::f(Tensor(a!) self, int[2] size, Tensor(b!)? x=None, *, bool y=False) -> Tensor(a!)") == [
        "Tensor(a!) self",
        "int[2] size",
        "Tensor(b!)? x=None",
        "*",
        "bool y=False",
    ]
    assert _arguments("") == []


@pytest.mark.skipif(not TRACES.is_dir(), reason="set LEGATO_TRACES to a folder of real traces")
def test_dlrm_with_its_graphs(tmp_path):
    for name in ("dlrm_8rank_v100_et.tar.gz", "dlrm_8rank_v100_kineto.tar.gz"):
        with tarfile.open(TRACES / name) as archive:
            archive.extractall(tmp_path, filter="data")
    found = import_execution_traces([*sorted(tmp_path.rglob("dlrm_eg_*")), *sorted(tmp_path.rglob("*.pt.trace.json"))])
    assert not any("operators of" in line for line in found.notes.missing)
    alone = import_kineto(sorted(tmp_path.rglob("*.pt.trace.json")))
    assert found.workload.tensors == alone.workload.tensors
    assert sum(not op.deps for op in found.workload.ops) > sum(not op.deps for op in alone.workload.ops)
