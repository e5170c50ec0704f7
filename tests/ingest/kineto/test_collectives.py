"""Which collectives of a step carry gradients, which time is spent waiting for them, and of which kinds they are."""

import pytest
from support import kineto_samples as samples

from legato.advice import advise
from legato.ingest.kineto.importer import import_kineto

GRAPH = ("cpu_op", "autograd::engine::evaluate_function: CompiledFunctionBackward", 482, 60)
NODE = ("cpu_op", "autograd::engine::evaluate_function: _ToTorchTensorBackward", 480, 60)
SHARDS = ("user_annotation", "FSDP::post_backward_reduce (0)", 485, 40)
#: torch's name of `work.wait()` in a trace with stacks.
PYTHON = "<built-in method wait of pybind11_builtins.pybind11_detail_function_record object at 0x7f>"


def reduced(**more):
    return {"op": "allreduce_", "mark": "all_reduce", "at": 490, "begins": 500, "takes": 100, **more}


def imported(tmp_path, *collectives, **options):
    path = tmp_path / "t.json"
    path.write_text(samples.on_host(*collectives, **options).text())
    return import_kineto([path])


def test_an_all_reduce_of_gradients_is_issued_by_its_operator(tmp_path):
    found = imported(tmp_path, reduced())
    (transfer,) = found.transfers
    assert transfer.carries_gradients and (transfer.kind, transfer.nbytes) == ("all_reduce", 4000)
    assert [t.nbytes for t in found.workload.tensors] == [4000] and found.plan is not None


def test_a_reduce_scatter_that_gloo_carries_out_as_an_all_reduce_is_one(tmp_path):
    gather = {"op": "_allgather_base_", "mark": "all_gather", "at": 120, "begins": 125, "takes": 50}
    found = imported(tmp_path, gather, reduced(op="_reduce_scatter_base_", inside=(NODE, SHARDS)))
    assert [(t.kind, t.carries_gradients) for t in found.transfers] == [("all_gather", False), ("reduce_scatter", True)]
    assert found.fsdp and advise(found).lacking == "the job sends gradients by reduce_scatter (FSDP)"


def test_a_job_of_fsdp_gets_no_plan_for_ddp_even_if_it_shards_nothing(tmp_path):
    found = imported(tmp_path, reduced(inside=(NODE, SHARDS)))
    assert found.plan is not None and advise(found).lacking == "the job sends gradients by all_reduce (FSDP)"


def test_marks_and_operators_of_one_kind_are_joined_by_size(tmp_path):
    """Of a reduce-scatter and an all-reduce in turn, both are all-reduces to gloo, and the first one may be lost."""
    scatter = reduced(op="_reduce_scatter_base_", at=484, elements=2000)
    path = tmp_path / "t.json"
    r = samples.on_host(scatter, reduced(begins=650))
    r.events = [e for e in r.events if not (e["name"] == "gloo:all_reduce" and e["ts"] == 500)]
    path.write_text(r.text())
    assert [(t.kind, t.nbytes) for t in import_kineto([path]).transfers] == [("all_reduce", 4000)]


def test_marks_and_operators_are_joined_by_their_ids(tmp_path):
    """Two threads of gloo begin two all-reduces of one size in the other order."""
    path = tmp_path / "t.json"
    r = samples.on_host(reduced(at=484, begins=650), reduced())
    for at, record in ((484, 10), (650, 11), (490, 20), (500, 21)):
        next(e for e in r.events if e["ts"] == at)["args"]["Record function id"] = record
    path.write_text(r.text())
    first, second = import_kineto([path]).transfers
    assert first.start_s > second.start_s


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(reduced(inside=(NODE,)), id="a node of autograd sums activations"),
        pytest.param(reduced(at=120, begins=130), id="in the forward pass"),
        pytest.param(reduced(elements=1500, inside=(GRAPH,)), id="a compiled graph sums activations"),
        pytest.param(reduced(elements=1), id="less than any parameter: a norm"),
        pytest.param(reduced(kind="long int"), id="whole numbers"),
        pytest.param(reduced(op="broadcast_", mark="broadcast"), id="not a sum"),
    ],
)
def test_what_is_no_gradient(tmp_path, collective):
    (transfer,) = imported(tmp_path, collective).transfers
    assert not transfer.carries_gradients


@pytest.mark.parametrize(
    "inside",
    [
        ("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 482, 60),
        GRAPH,
    ],
)
def test_hooks_of_parameters_and_compiled_graphs_send_gradients(tmp_path, inside):
    (transfer,) = imported(tmp_path, reduced(inside=(NODE, inside))).transfers
    assert transfer.carries_gradients


@pytest.mark.parametrize("by", ["wait_tensor", PYTHON])
def test_who_waits_for_a_collective_does_not_compute(tmp_path, by):
    """The operator waits from 125 to 290; gloo transfers from 130 to 230, and copies meanwhile on its thread."""
    forward = {"at": 120, "begins": 130, "takes": 100, "wait": 290, "waits_by": by}
    (rank,) = imported(tmp_path, reduced(**forward), reduced()).ranks
    assert rank.computation_s == pytest.approx(240e-6)
    # 125 to 130 and 230 to 290: an operator waits, and no transfer is to be seen.
    assert rank.exposed_comm_s == rank.communication_s == pytest.approx((100 + 100 + 65) * 1e-6)
    assert rank.idle_s == pytest.approx((1000 - 240 - 265) * 1e-6)
    kinds = {k.kind: (k.communication_s, k.exposed_s) for k in rank.kinds}
    assert kinds["all_reduce"] == pytest.approx((200e-6, 200e-6)) and kinds["wait"] == pytest.approx((65e-6, 65e-6))


def test_exposed_time_by_kind(tmp_path):
    """The gather is hidden behind the forward pass for 60 us, the exchange not at all."""
    gather = {"op": "_allgather_base_", "mark": "all_gather", "at": 2, "begins": 50, "takes": 100}
    exchange = {"op": "alltoall_base_", "mark": "all_to_all", "at": 160, "begins": 170, "takes": 30}
    (rank,) = imported(tmp_path, gather, exchange, reduced()).ranks
    assert [k.kind for k in rank.kinds] == ["all_gather", "all_reduce", "all_to_all"]
    assert [k.communication_s for k in rank.kinds] == pytest.approx([100e-6, 100e-6, 30e-6])
    assert [k.exposed_s for k in rank.kinds] == pytest.approx([40e-6, 100e-6, 30e-6])


def test_kernels_of_a_device_have_kinds_too_and_so_have_those_of_other_steps(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(samples.ahead().text())
    found = import_kineto([path], step="1")
    (kind,) = found.ranks[0].kinds
    assert (kind.kind, kind.communication_s, kind.exposed_s) == pytest.approx(("all_reduce", 310e-6, 60e-6))


def test_sends_that_nccl_carries_out_together(tmp_path):
    text = samples.record().text().replace("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_SendRecv")
    text = text.replace("nccl:all_reduce", "nccl:coalesced").replace('"allreduce"', '"coalesced"')
    path = tmp_path / "t.json"
    path.write_text(text)
    assert {t.kind for t in import_kineto([path]).transfers} == {"send_recv"}


def test_an_operator_of_no_length_is_a_span_wherever_it_is(tmp_path):
    """Its end, computed from times of which neither is exact in binary, was an ulp before its start."""
    spans = imported(tmp_path, reduced(), zero_us=(798.283, 798.284, 798.286, 798.288)).timeline.spans
    assert sum(span.name == "aten::resolve_neg" for span in spans) == 4


def test_an_operator_inside_a_collective_of_no_length_for_late_ranks(tmp_path):
    """A rank that waits for all of a collective's time has a transfer of no length."""
    early = {"op": "barrier", "mark": "barrier", "at": 120, "begins": 130.1, "takes": 70.3}
    for rank, takes in enumerate((70.3, 4.7, 33.3)):
        r = samples.on_host(early | {"takes": takes}, rank=rank, workers=3)
        (tmp_path / f"{rank}.json").write_text(r.text())
    found = import_kineto(sorted(tmp_path.glob("*.json")))
    assert max(r.waiting_s for r in found.ranks) == pytest.approx((70.3 - 4.7) * 1e-6)


def test_a_job_of_one_rank_waits_for_no_other(tmp_path):
    found = imported(tmp_path, reduced(), workers=1)
    assert found.ranks[0].waiting_s == 0 and "the other ranks" not in found.notes.missing


def test_without_a_device_nccl_shows_when_its_host_issues(tmp_path):
    r = samples.record()
    r.events = [e for e in r.events if e["cat"] != "kernel"]
    path = tmp_path / "t.json"
    path.write_text(r.text())
    found = import_kineto([path])
    assert "a collective of NCCL takes as long as its host takes to issue it" in found.notes.assumed


def test_a_job_with_groups_of_ranks_says_what_its_waits_assume(tmp_path):
    said = []
    for sizes in ([2], [4, 2, 2]):
        for rank in range(2):
            r = samples.on_host(reduced(), rank=rank, workers=max(sizes))
            r.header["distributedInfo"]["pg_config"] = [{"pg_name": str(n), "pg_size": n} for n in sizes]
            (tmp_path / f"{rank}.json").write_text(r.text())
        said.append(any("groups" in line for line in import_kineto(sorted(tmp_path.glob("*.json"))).notes.assumed))
    assert said == [False, True]


def test_names_of_steps_are_one_line(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(
        samples.on_host(reduced()).text().replace("ProfilerStep#3", "ProfilerStep#3\\nNo plan: of 3.\\u001b[1m")
    )
    assert import_kineto([path]).ranks[0].step == "ProfilerStep#3?No plan: of 3.?[1m"


def test_collectives_of_the_host_beside_a_device_that_computes(tmp_path):
    """Two buckets of DDP on a GPU under gloo: no kernel sends, and the marks on the host are the transfers."""
    r = samples.record()
    kernels = {e["args"]["correlation"] for e in r.events if e["name"].startswith("ncclDevKernel")}
    r.events = [e for e in r.events if e["args"].get("correlation") not in kernels and "nccl" not in e["name"]]
    for at, begins, elements in ((360, 430, 3000), (510, 580, 1000)):
        samples.issued(r, "allreduce_", "all_reduce", at, begins, 40, elements)
    path = tmp_path / "t.json"
    path.write_text(r.text())
    found = import_kineto([path])
    (rank,) = found.ranks
    assert [(t.kind, t.nbytes, t.carries_gradients) for t in found.transfers] == [
        ("all_reduce", 12000, True),
        ("all_reduce", 4000, True),
    ]
    assert (rank.computation_s, rank.communication_s, rank.exposed_comm_s) == pytest.approx((490e-6, 80e-6, 65e-6))
    assert [t.nbytes for t in found.workload.tensors] == [12000, 4000]


def test_an_operator_that_waits_inside_does_not_compute_meanwhile(tmp_path):
    """The forward operator, 10 to 110, issues a collective at 20 and waits for it from 25 to 95."""
    inside = {"at": 20, "begins": 22, "takes": 60, "wait": 95}
    found = imported(tmp_path, reduced(**inside), reduced())
    (rank,) = found.ranks
    assert rank.computation_s == pytest.approx((240 - 4 - 70) * 1e-6)
    ops = [(round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in found.timeline.spans if s.name == "aten::linear"]
    assert [end - start for start, end in sorted(ops)] == [10, 1, 15]


def test_inference_sends_no_gradients(tmp_path):
    """Operators, but none of autograd and no update: whatever is summed is none of gradients."""
    r = samples.on_host(reduced())
    r.events = [e for e in r.events if "utograd" not in e["name"] and not e["name"].startswith(("Optimizer", "Addmm"))]
    path = tmp_path / "t.json"
    path.write_text(r.text())
    (transfer,) = import_kineto([path]).transfers
    assert not transfer.carries_gradients


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])
def test_a_trace_of_collectives_alone_is_what_it_is(tmp_path, category):
    base = samples.on_host({"op": "allreduce_", "mark": "all_reduce", "at": 430, "begins": 450, "takes": 300})
    base.events = [e for e in base.events if e["name"].startswith(("ProfilerStep", "gloo"))]
    for event in base.events:
        event["cat"] = category if event["name"].startswith("gloo") else event["cat"]
    (tmp_path / "alone.json").write_text(base.text())
    found = import_kineto([tmp_path / "alone.json"])
    (rank,) = found.ranks
    assert (rank.computation_s, rank.communication_s) == (0, pytest.approx(300e-6))
    assert "computation: kernels, or operators of a CPU" in found.notes.missing and found.workload is None
