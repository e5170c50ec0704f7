"""Steps of traced programs on other networks and on more workers: closed forms on small ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.mesh_samples import MeshJob

from legato.core.errors import InputError
from legato.core.program import Communication, Compute, Lane, Program, Start, Wait
from legato.ingest.kineto.importer import import_kineto
from legato.whole_jobs.flow.step import network_of, simulate_program
from legato.whole_jobs.traced import Traffic, predict, repeated, replay, run, traffic
from legato.zoo.presets import machine_named

MACHINE = replace(
    machine_named("h100"),
    gpus_per_host=2,
    link_bytes_per_s=1e9,
    card_bytes_per_s=1e8,
    link_share=1.0,
    card_share=1.0,
    latency_s=1e-3,
    network_latency_s=2e-3,
    hop_s=1e-4,
)


def blocking(*communications, workers=2):
    actions = [Compute(0.5)]
    for number in range(len(communications)):
        actions += [Start(number), Wait(number)]
    return Program("p", (Lane(tuple(range(workers)), tuple(actions)),), communications)


def traced(paths):
    return import_kineto(paths).whole.program


def everyone(operation, nbytes, workers, kind="data"):
    return Communication(kind, operation, (tuple(range(workers)),), nbytes, traced_s=0.25)


@pytest.mark.parametrize(
    ("operation", "one_host_s", "four_hosts_s"),
    [
        ("all_reduce", 1e-3 + 2 * 1e6 / 2 / 1e9, 2.3e-3 + 2 * 1e6 * 7 / 8 / 2e8),
        ("all_gather", 1e-3 + 1e6 / 2 / 1e9, 2.3e-3 + 1e6 * 7 / 8 / 2e8),
        ("reduce_scatter", 1e-3 + 1e6 / 2 / 1e9, 2.3e-3 + 1e6 * 7 / 8 / 2e8),
        ("broadcast", 1e-3 + 1e6 / 1e9, 2.3e-3 + 1e6 / 2e8),
        ("all_to_all", 1e-3 + 1e6 / 2 / 1e9, 2.3e-3 + 1e6 * 6 / 8 / 1e8),
    ],
)
def test_what_is_waited_for_is_priced_on_the_links_of_its_group(operation, one_host_s, four_hosts_s):
    for workers, seconds in ((2, one_host_s), (8, four_hosts_s)):
        step = predict(blocking(everyone(operation, 1e6, workers), workers=workers), MACHINE)
        assert step.exposed_s["data"] == pytest.approx(seconds)
        assert step.seconds == pytest.approx(0.5 + seconds)
        program = blocking(everyone(operation, 1e6, workers), workers=workers)
        linked = simulate_program(program, MACHINE, network_of(MACHINE, workers))
        assert linked.seconds == pytest.approx(step.seconds) and linked.exposed_s == pytest.approx(step.exposed_s)
        assert (linked.computing_s, linked.idle_s, linked.sent) == (0.5, 0.0, step.sent)
    assert step.computing_s == 0.5


def test_gradients_of_a_repeated_job_go_to_all_copies_and_the_rest_stays_in_each():
    """Two workers of a host that sum activations and gradients, on three hosts."""
    program = blocking(everyone("all_reduce", 1e6, 2, "tensor"), everyone("all_reduce", 4e6, 2))
    many = repeated(program, 6)
    tensor, data = many.communications
    assert tensor.groups == ((0, 1), (2, 3), (4, 5)) and tensor.traced_s == 0.25
    assert data.groups == ((0, 1, 2, 3, 4, 5),) and data.traced_s is None
    step = predict(many, MACHINE)
    assert step.exposed_s == pytest.approx({"tensor": 1e-3 + 2 * 1e6 / 2 / 1e9, "data": 2.2e-3 + 2 * 4e6 * 5 / 6 / 2e8})
    assert step.seconds == pytest.approx(0.5 + sum(step.exposed_s.values()))
    assert step.sent["tensor", "host"] == 1e6 and sum(step.sent.values()) == pytest.approx(1e6 + 2 * 4e6 * 5 / 6)
    assert repeated(program, 2) == program
    with pytest.raises(InputError, match="traced_s of communication 1"):
        replay(many)


def test_only_data_parallel_jobs_are_repeated_a_whole_number_of_times():
    with pytest.raises(InputError, match="workers: 3 \\(expected a multiple of the program's 2\\)"):
        repeated(blocking(everyone("all_reduce", 1e6, 2)), 3)
    with pytest.raises(InputError, match="nothing in the program is data-parallel"):
        repeated(blocking(everyone("all_reduce", 1e6, 2, "tensor")), 4)


@given(st.integers(0, 1000), st.integers(1, 3), st.sampled_from([1, 2, 3]))
def test_a_repeated_job_takes_as_long_if_its_communications_do(tmp_path_factory, seed, copies, tensor):
    program = traced(MeshJob(tensor=tensor, seed=seed).write(tmp_path_factory.mktemp("traces")))
    seconds = [one.traced_s for one in program.communications]
    many = repeated(program, copies * tensor * 2)
    own, repeated_ = run(program, seconds), run(many, seconds)
    assert repeated_.seconds == own.seconds and repeated_.exposed_s == pytest.approx(own.exposed_s)


def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    program = traced(MeshJob(late_us=900, seed=5).write(tmp_path))
    for step in (replay(program), predict(program, MACHINE)):
        parts = step.computing_s + step.idle_s + step.late_s + sum(step.exposed_s.values())
        assert parts == pytest.approx(step.seconds)
        assert min(step.idle_s, step.late_s, *step.exposed_s.values()) >= 0


def test_communications_of_one_group_run_one_after_another_and_of_two_at_the_same_time():
    def step_s(*groups):
        ones = tuple(Communication("data", "all_reduce", (group,), 0) for group in groups)
        lane = Lane((0, 1), (Start(0), Start(1), Wait(0), Wait(1)))
        return run(Program("p", (lane,), ones), [2.0, 3.0]).seconds

    assert step_s((0, 1), (0, 1)) == 5.0
    assert step_s((0, 1), (1, 0)) == 3.0


def test_a_send_begins_when_the_sender_starts_it_and_the_receiver_waits_for_other_workers_until_then():
    sent = Communication("pipeline", "send", ((0, 1),), 1e6)
    program = Program("p", (Lane((0,), (Compute(0.5), Start(0))), Lane((1,), (Wait(0), Compute(0.25)))), (sent,))
    step = predict(program, MACHINE)
    assert step.seconds == pytest.approx(0.5 + 2e-3 + 0.25)
    assert step.exposed_s == {"pipeline": pytest.approx(2e-3 / 2)}
    assert step.late_s == pytest.approx((0.5 + 0.25 + 2e-3) / 2)
    away = predict(program, replace(MACHINE, gpus_per_host=1))
    assert away.seconds == pytest.approx(0.5 + 2.1e-3 + 1e6 / 1e8 + 0.25)


def test_twice_the_bandwidth_halves_what_grows_with_the_bytes_of_a_kind():
    """Two sizes tell latency (1 s) from bandwidth (1 s per MB); one size does not."""
    ones = [Communication("tensor", "all_reduce", ((0, 1),), mb * 1e6, traced_s=1.0 + mb) for mb in (1, 3)]
    other = Communication("data", "all_reduce", ((0, 1),), 1e6, traced_s=2.0)
    tensor, data, both = traffic(blocking(*ones, other))
    assert (tensor.kind, tensor.seconds, tensor.exposed_s, tensor.at_most) == ("tensor", 6.0, 6.0, False)
    assert (data.kind, data.seconds, data.at_most) == ("data", 2.0, True)
    assert tensor.win == pytest.approx((0.5 + 1.5) / 8.5) and data.win == pytest.approx(1 / 8.5)
    assert (both.kind, both.exposed_s, both.at_most) == ("all kinds", 8.0, True)
    assert both.win == pytest.approx(3 / 8.5)
    assert traffic(blocking(other)) == [Traffic("data", 2.0, 2.0, pytest.approx(1 / 2.5), True)]


def test_what_has_no_bytes_wins_nothing_and_tells_nothing_of_bandwidth():
    barriers = [Communication("tensor", "all_reduce", ((0, 1),), 0, traced_s=seconds) for seconds in (1.0, 2.0)]
    assert traffic(blocking(*barriers)) == [Traffic("tensor", 3.0, 3.0, 0.0, False)]
    sized = Communication("tensor", "all_reduce", ((0, 1),), 1e6, traced_s=1.0)
    (tensor,) = traffic(blocking(*barriers, sized))
    assert tensor.at_most and tensor.win == pytest.approx(0.5 / 4.5)
