"""Rehearsals with parameter servers: what is predicted of them, and orders of pulls that are really carried out."""

import json

import pytest
from support.rehearsing import legato, needs_hosts, workload

from legato.core import files
from legato.core.errors import InputError
from legato.core.measurement import Measurement
from legato.core.timeline import Timeline
from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed.servers.model import ServerCosts, own_updates, predict
from legato.lab.testbed.servers.rehearsal import ServerTask, rehearse_servers, select_orders
from legato.schedule import schedule

COSTS = ServerCosts(bandwidth_bps=8e8, message_s=1e-4, turn_s=0.01, copy_s_per_byte=0.0)
S_PER_BYTE = 1e-8
KEYS = {
    "scheduler", "measured_s", "quartiles_s", "predicted_s", "error", "speedup_over_random", "iterations_per_s",
    "overlap", "straggler", "variation", "agent_s", "out_of_order", "num_messages",
}  # fmt: skip


def predicted(job, name="pull-optimal", workers=1, servers=1, costs=COSTS):
    job = own_updates(job)
    return predict(job, schedule(name, job, costs.cluster(workers, servers)), costs, workers, servers)


@pytest.mark.parametrize(
    ("workers", "servers", "slowest"),
    [(1, 1, 6), (3, 1, 18), (1, 2, 6), (4, 2, 12)],
    ids=["a worker's", "the server's", "a worker's of two servers", "a server's of two"],
)
def test_pushes_and_pulls_alone_take_what_the_slowest_link_carries(workers, servers, slowest):
    message_s = COSTS.message_s + 200_000 * S_PER_BYTE
    found = predicted(workload(op_s=0.0), workers=workers, servers=servers)
    # Pulls begin when both servers have all that is theirs, so the turn is the only gap.
    assert found.iteration_s == pytest.approx(COSTS.turn_s + 2 * slowest * message_s, rel=1e-4)
    assert found.communication_s == pytest.approx(found.iteration_s, rel=1e-4)


def test_computation_hides_what_it_can():
    """Six layers of 2.1 ms of transfers and 4 ms (backward 8 ms) of computation."""
    message_s = COSTS.message_s + 200_000 * S_PER_BYTE
    found = predicted(workload())
    backward_s, forward_s = 6 * 0.008, 6 * 0.004
    assert found.iteration_s == pytest.approx(backward_s + message_s + COSTS.turn_s + message_s + forward_s, rel=1e-4)


def test_updates_hold_up_the_first_value_only_where_they_are_shorter_than_transfers():
    plain = workload(op_s=0.0)
    update = Op("update", "optimizer", 6 * 0.001, tuple(range(6, 12)))
    tensors = tuple(Tensor(t.name, t.nbytes, t.ready_after, (*t.readers, 12)) for t in plain.tensors)
    updated = Workload("chain", (*plain.ops, update), tensors)
    assert predicted(updated).iteration_s == pytest.approx(predicted(plain).iteration_s + 0.001, rel=1e-4)


def test_random_order_is_slower_where_order_matters():
    job = workload(op_s=0.002)
    best, random = predicted(job).iteration_s, predicted(job, "random").iteration_s
    assert predicted(job, "tic").iteration_s == pytest.approx(best, rel=1e-6)
    assert random > best * 1.02


def test_copies_delay_the_op_that_reads():
    slow = ServerCosts(8e8, 1e-4, 0.01, copy_s_per_byte=1e-8)  # 2 ms a tensor
    more = predicted(workload(), costs=slow).iteration_s - predicted(workload()).iteration_s
    assert more == pytest.approx(6 * 0.002 + 0.002, rel=1e-3)  # at the worker, and before the server's first


def test_every_tensor_gets_an_update_of_its_own():
    plain = workload()
    update = Op("update", "optimizer", 0.012, tuple(range(6, 12)))
    tensors = tuple(Tensor(t.name, t.nbytes, t.ready_after, (*t.readers, 12)) for t in plain.tensors)
    own = own_updates(Workload("chain", (*plain.ops, update), tensors))
    assert len(own.ops) == 18 and sum(own.ops[i].duration_s for i in own.phase_ops("optimizer")) == pytest.approx(0.012)
    assert all(own.ops[t.readers[-1]].name == f"update {t.name}" for t in own.tensors)
    assert own_updates(plain) == plain


def test_a_plan_in_pieces_is_not_predicted_wrongly(tmp_path):
    timeline = predicted(workload()).timeline
    assert {span.nbytes for span in timeline.spans if span.kind == "message"} == {200_000}  # without what it costs


@needs_hosts
@pytest.mark.slow
def test_orders_between_hosts(tmp_path, chain):
    done = legato(
        "rehearse", chain, "--workers", 2, "--servers", 2, "--agents", 1, "--bandwidth", "1Gbit", "--iterations", 3,
        "--scheduler", "tic,pull-optimal", "--json", "-o", tmp_path / "found",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["scheduler"] for row in rows] == ["random", "tic", "pull-optimal"]
    assert all(set(row) == KEYS for row in rows)
    for row in rows:
        assert row["measured_s"] >= 0.999 * workload().compute_s  # the device takes its time
        assert row["predicted_s"] >= 0.999 * workload().compute_s
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["num_messages"] == 12 and row["agent_s"] > 0 and row["out_of_order"] == 0
        assert 0 <= row["straggler"] < 1
    assert rows[0]["speedup_over_random"] == 1
    assert files.read(tmp_path / "found" / "tic.predicted.json", Timeline).iteration_s == rows[1]["predicted_s"]
    saved = files.read(tmp_path / "found" / "measured.json", Measurement)
    assert saved.network == "2 workers and 2 servers, 1 Gbit/s"
    assert [plan.measured_s for plan in saved.plans] == [row["measured_s"] for row in rows]
    report = legato("report", tmp_path / "found", "-o", tmp_path / "r.html")
    assert report.returncode == 0, report.stderr
    assert "under the random order (measured)" in (tmp_path / "r.html").read_text()


def test_random_order_is_always_measured_and_first():
    assert select_orders(["tic"]) == ("random", "tic")
    assert select_orders(["all"]) == ("random", "tic", "tac", "pull-optimal")


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("schedulers", ("random", "fifo"), "fifo"),
        ("schedulers", ("tic", "tic"), "twice"),
        ("servers", 0, "servers: 0"),
        ("agents", -1, "agents: -1"),
        ("iterations", 0, "expected at least 1"),
        ("ratio", float("inf"), "expected 1e-6 to 1e6"),
    ],
)
def test_tasks_that_make_no_sense(field, value, said):
    with pytest.raises(InputError, match=said):
        ServerTask(**{"workload": workload(), "schedulers": ("random",), field: value})


def test_no_host_is_no_worker():
    with pytest.raises(InputError, match="0 hosts: there is no worker"):
        rehearse_servers(ServerTask(workload(), ("random",)), 0, 1e9, lambda *_: None)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--servers", "1", "--scheduler", "fifo"], "fifo"),
        (["--agents", "1"], "servers: 0"),
        (["--servers", "1", "--workers", "0"], "there is no worker"),
    ],
)
def test_bad_input_is_one_line(chain, arguments, said):
    done = legato("rehearse", chain, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr
