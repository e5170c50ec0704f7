"""Whole jobs that share a network: closed forms, and worker by worker in fractions."""

import random

import pytest
from support.jobs import GPT, IDEAL, LATENT, LLAMA, disturbed, job, replace, small_job
from support.shared_links import simulated_jobs
from support.strategies import seeds

from legato.core.errors import InputError, TooLargeError
from legato.core.job import Framework, Mesh
from legato.simulator.flow import Disturbance, place
from legato.whole_jobs.flow import simulation
from legato.whole_jobs.flow.programs import program
from legato.whole_jobs.flow.quotient import Quotient
from legato.whole_jobs.flow.shared import simulate_shared, together
from legato.whole_jobs.flow.simulation import run_steps
from legato.whole_jobs.flow.step import network_of, seconds_of, simulate, simulate_program
from legato.whole_jobs.step import predict


def shared(jobs, how, **options):
    """The window and the steps of jobs on full hosts."""
    sizes = [one.mesh.workers for one in jobs]
    network = network_of(jobs[0].machine, sum(sizes), **options)
    return simulate_shared(jobs, place(sizes, how, network), network, jobs[0].machine)


@pytest.mark.parametrize("seed", seeds(60))
def test_jobs_are_as_in_fractions_step_by_step(seed):
    draw = random.Random(seed)
    gpus, jobs = draw.choice([1, 2, 4]), []
    while len(jobs) < 2:
        one = small_job(draw, alone=False)
        jobs += [replace(one, machine=replace(one.machine, gpus_per_host=gpus))] if one.mesh.workers <= 8 else []
    sizes, made = [one.mesh.workers for one in jobs], [program(one) for one in jobs]
    number = sum(sizes) + draw.choice([0, 0, 1, 3])
    workers = draw.sample(range(number), sum(sizes))
    places = [workers[: sizes[0]], workers[sizes[0] :]]
    network = network_of(jobs[0].machine, number, **disturbed(draw, gpus, range(number)))
    if draw.random() < 0.5:
        places = [[*own] for own in place(sizes, draw.choice(["packed", "spread", "random"]), network)]
    counts, shift_s = [draw.choice([1, 2, 3]) for _ in jobs], [draw.choice([0.0, 2.0**-12]) for _ in jobs]
    every, first = together(made, places, network.workers), len(made[0].lanes)
    lanes = [range(first), range(first, first + len(made[1].lanes))]
    found = []
    for alike in (True, False):
        quotient = Quotient(every, jobs[0].machine, network, alike=alike)
        steps = run_steps(quotient, lanes, counts, shift_s)
        assert [len(own) for own in steps] == counts
        assert all(
            sorted(worker for lane in step for worker in lane.workers.tolist()) == sorted(own)
            for own, mine in zip(places, steps, strict=True)
            for step in mine
        )
        found.append([[seconds_of(step) for step in mine] for mine in steps])
    for alike, every_worker in zip(*found, strict=True):
        assert alike == pytest.approx(every_worker, rel=1e-9)
    if sum(own * len(one.lanes[0].actions) * n for own, one, n in zip(sizes, made, counts, strict=True)) < 4000:
        _, ends = simulated_jobs(made, places, jobs[0].machine, network, counts, shift_s)
        for own, exact, begin_s in zip(found[1], ends, shift_s, strict=True):
            exact_s = [float(end - begin) for begin, end in zip([begin_s, *exact[:-1]], exact, strict=True)]
            assert own == pytest.approx(exact_s, rel=1e-9)


@pytest.mark.parametrize("seed", seeds(20))
def test_a_program_takes_as_long_as_its_job_alone_and_beside_others(seed):
    draw = random.Random(seed)
    one = small_job(draw, alone=False)
    workers, made = one.mesh.workers, program(one)
    slow = (Disturbance(kind="link", number=draw.randrange(workers), factor=3),)
    quiet, network = (network_of(one.machine, 2 * workers, disturbances=some) for some in ((), slow))
    places = [range(workers), range(workers, 2 * workers)]
    found = [simulate_shared(jobs, places, network, one.machine, steps=2)[1] for jobs in ([made, one], [one, one])]
    for mine, own in zip(*found, strict=True):
        assert mine.steps_s == pytest.approx(own.steps_s, rel=1e-9)
        assert mine.alone.seconds == pytest.approx(own.alone.seconds, rel=1e-9)
        for step in (mine.alone, mine.beside):
            assert sum(step.parts.values()) == pytest.approx(step.seconds, rel=1e-9)
    first = found[0][0]
    same = simulate_program(made, one.machine, quiet)
    assert (first.alone.seconds, first.alone.parts) == (pytest.approx(same.seconds), pytest.approx(same.parts))
    assert sum(first.longer_s.values()) == pytest.approx(first.beside.seconds - first.alone.seconds, abs=1e-12)


@pytest.mark.parametrize("seed", seeds(20))
def test_a_job_alone_is_as_simulate_says(seed):
    draw = random.Random(seed)
    one = small_job(draw, alone=False)
    slow = (Disturbance(kind="link", number=draw.randrange(one.mesh.workers), factor=3),)
    quiet, network = (network_of(one.machine, one.mesh.workers, disturbances=some) for some in ((), slow))
    window_s, (found,) = simulate_shared([one], [range(one.mesh.workers)], network, one.machine, steps=2)
    for mine, there in ((found.alone, quiet), (found.beside, network)):
        expected = simulate(one, there).step
        assert mine.seconds == pytest.approx(expected.seconds, rel=1e-9)
        assert mine.parts == pytest.approx(expected.parts, rel=1e-9, abs=1e-12)
    assert found.steps_s == pytest.approx([simulate(one, network).step.seconds] * 2, rel=1e-9)
    assert window_s == pytest.approx((0, sum(found.steps_s)))


@pytest.mark.parametrize("how", ["packed", "spread"])
def test_jobs_on_links_of_their_own_are_alone(how):
    """In a rack each; and alternately in both, on links that have room for all."""
    meshes = Mesh(tensor=2, pipeline=2, data=2), Mesh(tensor=2, data=4)
    machine = replace(LATENT, gpus_per_host=2)
    jobs = [job(LLAMA, mesh, machine=machine, microbatches=4, shard="optimizer") for mesh in meshes]
    _, found = shared(jobs, how, racks=2, oversubscription=8 if how == "packed" else 1, balance="spray")
    for one in found:
        assert one.slowdown == pytest.approx(1, rel=1e-9)
        assert one.longer_s == pytest.approx(dict.fromkeys(one.alone.parts, 0), abs=1e-12)
        assert one.steps_s == pytest.approx([one.alone.seconds] * len(one.steps_s), rel=1e-9)


def test_two_equal_jobs_below_one_uplink_send_gradients_for_twice_as_long():
    """Each has a host in both racks, and two rings between them: an uplink of one card's rate carries two, or four."""
    machine = replace(IDEAL, gpus_per_host=2, card_bytes_per_s=1e7)
    one = job(GPT, Mesh(tensor=2, data=2), machine=machine)
    window_s, found = shared([one, one], "spread", racks=2, oversubscription=4)
    own_s = predict(one).exposed_s["data"]
    for mine in found:
        alone = mine.alone.parts
        assert alone["data"] == pytest.approx(2 * own_s, rel=1e-9)
        assert mine.beside.parts == pytest.approx(alone | {"data": 4 * own_s}, rel=1e-9)
        assert mine.longer_s == pytest.approx(dict.fromkeys(alone, 0) | {"data": 2 * own_s}, abs=1e-9 * own_s)
        assert mine.steps_s == pytest.approx([mine.alone.seconds + 2 * own_s] * 3, rel=1e-9)
    assert window_s == pytest.approx((0, 3 * found[0].beside.seconds))


def test_a_step_is_the_sum_of_its_parts_and_computes_as_long_as_alone():
    machine = replace(LATENT, gpus_per_host=2, card_bytes_per_s=3e8)
    jobs = [
        job(LLAMA, Mesh(tensor=2, pipeline=2, data=2), machine=machine, microbatches=4),
        job(GPT, Mesh(pipeline=2, data=4), Framework(hidden=("data", "pipeline")), machine, microbatches=2),
    ]
    (begin_s, end_s), found = shared(jobs, "spread", racks=2, oversubscription=4)
    assert begin_s == 0 and min(len(one.steps_s) for one in found) >= 3
    for one in found:
        assert sum(one.beside.parts.values()) == pytest.approx(one.beside.seconds, rel=1e-9)
        assert sum(one.longer_s.values()) == pytest.approx(one.beside.seconds - one.alone.seconds, rel=1e-9)
        assert one.longer_s["computing"] == pytest.approx(0, abs=1e-12) and one.longer_s["data"] > 0
        assert one.beside.seconds == pytest.approx(sum(one.steps_s) / len(one.steps_s))
        assert end_s - max(one.steps_s) < sum(one.steps_s) <= end_s * (1 + 1e-9)
        assert one.slowdown > 1.01 and one.longest.step.seconds == max(one.steps_s)
    assert found[0].longer_s["tensor"] == pytest.approx(0, abs=1e-12)


def test_short_steps_go_on_until_the_longest_ones_are_over():
    """Many steps of one job to one of the other, which begins later, and both of which share a link."""
    machine = replace(IDEAL, gpus_per_host=1)
    jobs = [job(GPT, Mesh(data=2), machine=machine, microbatches=number) for number in (1, 40)]
    network = network_of(machine, 4, racks=2, oversubscription=2)
    places = place([2, 2], "spread", network)
    (begin_s, end_s), (short, long) = simulate_shared(
        jobs, places, network, jobs[0].machine, steps=2, shift_s=[0.0, 2e-4]
    )
    assert begin_s == 2e-4 and len(long.steps_s) == 2
    assert end_s - begin_s >= sum(long.steps_s) * (1 - 1e-9)
    assert len(short.steps_s) > 20 and sum(short.steps_s) >= end_s - begin_s - 2 * max(short.steps_s)
    assert min(short.steps_s) == pytest.approx(short.alone.seconds)  # most of them meet no gradients
    assert max(short.steps_s) > 1.01 * short.alone.seconds and short.longest.step.seconds == max(short.steps_s)


def test_a_timeline_is_that_of_the_job_on_its_gpus():
    machine = replace(LATENT, gpus_per_host=2)
    jobs = [job(LLAMA, Mesh(tensor=2, pipeline=2), machine=machine, microbatches=2)] * 2
    _, found = shared(jobs, "packed")
    first, second = (one.longest.timeline("somewhere") for one in found)
    assert {span.worker for span in first.spans} == {0, 2} and {span.worker for span in second.spans} == {4, 6}
    assert second.iteration_s == pytest.approx(max(span.end_s for span in second.spans))
    assert min(span.start_s for span in second.spans) == 0 and second.network == "somewhere"


def test_what_is_refused(monkeypatch):
    one, two = (job(LLAMA, Mesh(data=2), machine=replace(LATENT, gpus_per_host=gpus)) for gpus in (1, 2))
    with pytest.raises(InputError, match=r"job 2, test: gpus_per_host 2 \(expected 1, as on the network\)"):
        shared([one, two], "packed")
    network = network_of(one.machine, 4)
    with pytest.raises(InputError, match=r"iterations: 0 \(expected 1 to 1,000 steps\)"):
        simulate_shared([one, one], [(0, 1), (2, 3)], network, one.machine, steps=0)
    monkeypatch.setattr(simulation, "_MOST_SERVICES", 1000)
    simulate_shared([one], [(0, 1)], network, one.machine, steps=1)
    with pytest.raises(TooLargeError, match="more than 1,000 flows and computations"):
        simulate_shared([one, one], [(0, 1), (2, 3)], network, one.machine, steps=50)
