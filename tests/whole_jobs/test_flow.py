"""Whole jobs link by link: formulas where nothing is shared, and worker by worker in fractions where much is."""

import random

import pytest
from support.jobs import GPT, IDEAL, LATENT, LLAMA, MIXTURE, disturbed, job, replace, small_job
from support.shared_links import simulated
from support.strategies import seeds

from legato.core.errors import TooLargeError
from legato.core.job import Framework, Mesh
from legato.core.program import Communication, Compute, Lane, Program, Start, Wait
from legato.simulator.flow import Disturbance
from legato.whole_jobs.flow import simulation
from legato.whole_jobs.flow.programs import program
from legato.whole_jobs.flow.quotient import Quotient
from legato.whole_jobs.flow.simulation import run
from legato.whole_jobs.flow.step import network_of, simulate
from legato.whole_jobs.step import predict


@pytest.mark.parametrize("seed", seeds(80))
def test_alone_on_its_links_it_is_the_formula(seed):
    one = small_job(random.Random(seed), alone=True)
    step, formula = simulate(one, network_of(one.machine, one.mesh.workers)).step, predict(one)
    assert step.seconds == pytest.approx(formula.seconds, rel=1e-9)
    assert step.computing_s == pytest.approx(formula.computing_s, rel=1e-9)
    assert step.bubble_s == pytest.approx(formula.bubble_s, rel=1e-9, abs=1e-12)
    assert step.exposed_s == pytest.approx(formula.exposed_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mesh", [Mesh(data=12), Mesh(pipeline=2, data=12), Mesh(tensor=4, pipeline=2, data=3)])
def test_the_slowest_group_where_hosts_are_not_filled(mesh):
    """Of 12 workers four are alone on their host; of three groups of four one is, or two are, on another host."""
    machine = replace(LATENT, gpus_per_host=8)
    one = job(LLAMA, mesh, Framework(), machine, microbatches=4, shard="optimizer", sequence_parallel=mesh.tensor > 1)
    step, formula = simulate(one, network_of(machine, mesh.workers)).step, predict(one)
    assert step.seconds == pytest.approx(formula.seconds, rel=1e-9)
    assert step.exposed_s == pytest.approx(formula.exposed_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_gradients_that_are_hidden_run_beside_exposed_communication_too(data, shard):
    """Between hosts, beside tensor parallelism inside them; the formula counts computing alone."""
    machine = replace(LATENT, gpus_per_host=2, card_bytes_per_s=1e9)
    one = job(LLAMA, Mesh(tensor=2, data=data), Framework(hidden=("data",)), machine, shard=shard)
    step, formula = simulate(one, network_of(one.machine, one.mesh.workers)).step, predict(one)
    assert 0 < formula.exposed_s["data"] - step.exposed_s["data"] <= formula.exposed_s["tensor"] * (1 + 1e-9)
    assert step.seconds + formula.exposed_s["data"] - step.exposed_s["data"] == pytest.approx(formula.seconds)
    fast = replace(one, machine=replace(machine, card_bytes_per_s=1e13))
    assert predict(fast).exposed_s["data"] == 0
    assert simulate(fast, network_of(fast.machine, fast.mesh.workers)).step.seconds == pytest.approx(
        predict(fast).seconds, rel=1e-9
    )


@pytest.mark.parametrize("seed", seeds(60))
def test_like_workers_stand_for_all_and_all_are_as_in_fractions(seed):
    draw = random.Random(seed)
    one = small_job(draw, alone=False)
    network = network_of(
        one.machine, one.mesh.workers, **disturbed(draw, one.machine.gpus_per_host, range(one.mesh.workers))
    )
    made = program(one)
    quotient, whole = (Quotient(made, one.machine, network, alike=alike) for alike in (True, False))
    assert quotient.num_classes <= whole.num_classes == one.mesh.workers
    ends = [{}, {}]
    for found, these in zip(ends, (quotient, whole), strict=True):
        for lane in run(these):
            found |= dict.fromkeys(lane.workers.tolist(), lane.end_s)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    if one.mesh.workers * sum(len(lane.actions) for lane in made.lanes) < 3000:
        exact = simulated(made, one.machine, network)
        assert ends[1] == pytest.approx({worker: float(end) for worker, end in exact.items()}, rel=1e-9)


def random_program(draw):
    """Collectives and sends of random groups, which all workers start in one order and wait for at once or later; some
    run after one that the same workers started before."""
    workers = draw.choice([4, 8])
    actions, communications = [[] for _ in range(workers)], []
    later = [[] for _ in range(workers)]
    for number in range(draw.randint(1, 8)):
        operation = draw.choice(["all_reduce", "all_gather", "all_to_all", "broadcast", "send"])
        group = tuple(
            draw.sample(range(workers), 2 if operation == "send" else draw.choice([2, 3, 4, workers, workers]))
        )
        before = [k for k, one in enumerate(communications) if {*one.groups[0]} == {*group} and one.operation != "send"]
        after = draw.choice(before) if before and operation != "send" and draw.random() < 0.7 else None
        sizes = draw.choice([1e6, 3e6]), draw.choice([1, 2])
        communications.append(Communication("data", operation, (group,), *sizes, after=after))
        for place, worker in enumerate(group):
            if draw.random() < 0.5:
                actions[worker].append(Compute(draw.choice([1e-4, 2e-4])))
            if place == 0 or operation != "send":
                actions[worker].append(Start(number))
            (actions if draw.random() < 0.5 else later)[worker].append(Wait(number))
    lanes = [Lane((k,), tuple(mine + rest)) for k, (mine, rest) in enumerate(zip(actions, later, strict=True))]
    return Program("random", tuple(lanes), tuple(communications))


@pytest.mark.parametrize("seed", seeds(40))
def test_random_programs_are_as_in_fractions(seed):
    draw = random.Random(seed)
    made, machine = random_program(draw), replace(LATENT, gpus_per_host=draw.choice([1, 2, 4]))
    one = job(GPT, Mesh(data=len(made.lanes)), machine=machine)
    network = network_of(
        one.machine, one.mesh.workers, **disturbed(draw, machine.gpus_per_host, range(one.mesh.workers))
    )
    found = {lane.lane: lane.end_s for lane in run(Quotient(made, machine, network))}
    exact = simulated(made, machine, network)
    assert found == pytest.approx({lane: float(exact.get(lane, 0)) for lane in found}, rel=1e-9)


def times_of(communications, machine, starts):
    """The ends of communications that are all started at once, by workers as `starts` says, and then waited for."""
    workers = 1 + max(worker for one in communications for group in one.groups for worker in group)
    lanes = []
    for worker in range(workers):
        own = [k for k, one in enumerate(communications) if worker in one.groups[0]]
        mine = [Start(k) for k in own if worker in starts[k]]
        lanes.append(Lane((worker,), tuple(mine + [Wait(k) for k in own])))
    one = job(GPT, Mesh(data=workers), machine=machine)
    made = Program("by hand", tuple(lanes), tuple(communications))
    lanes_s = {
        lane.lane: lane.end_s for lane in run(Quotient(made, machine, network_of(one.machine, one.mesh.workers)))
    }
    return [lanes_s[worker] for worker in range(workers)]


def test_what_shares_a_card_by_hand():
    """Cards of 10^10 bytes/s. Two sends of a worker, of 1 and 3 x 10^10 bytes: halves until 2, and the rest at 4. A
    send beside a reduce-scatter of four workers on two hosts, two rings of 10^10 bytes a connection: 2 s for both."""
    alone = replace(IDEAL, gpus_per_host=1)
    sends = [Communication("pipeline", "send", ((0, k),), k * 1e10) for k in (1, 3)]
    assert times_of(sends, alone, [(0,), (0,)]) == pytest.approx([4, 2, 0, 4])
    both = [
        Communication("data", "reduce_scatter", ((0, 1, 2, 3),), 2e10 * 4 / 3),
        Communication("pipeline", "send", ((0, 2),), 1e10),
    ]
    assert times_of(both, replace(IDEAL, gpus_per_host=2), [(0, 1, 2, 3), (0,)]) == pytest.approx([2, 2, 2, 2])


def test_a_worker_that_waits_for_a_late_one_is_idle():
    """Each of two is half as fast for a while, first the one, then the other one: both wait for each other, but for the
    pass of a layer, by which they may be ahead."""
    machine = replace(IDEAL, gpus_per_host=1, card_bytes_per_s=1e25)
    one = job(LLAMA, Mesh(data=2), machine=machine, shard="gradients", microbatches=4)
    whole_s = predict(one).seconds
    late = Disturbance(kind="compute", number=0, factor=2, start_s=0, end_s=whole_s / 4)
    later = Disturbance(kind="compute", number=1, factor=2, start_s=whole_s * 3 / 4, end_s=whole_s * 7 / 8)
    step = simulate(one, network_of(one.machine, one.mesh.workers, disturbances=(late, later))).step
    assert step.seconds == pytest.approx(whole_s * (1 + 1 / 8 + 1 / 16), rel=0.02)
    assert step.computing_s == pytest.approx(predict(one).computing_s + whole_s / 8, rel=1e-9)
    assert step.bubble_s == pytest.approx(whole_s / 16, rel=0.2) and step.exposed_s["data"] == pytest.approx(0)


def test_backward_passes_go_from_the_last_layer_to_the_first():
    """Of a mixture, layers 1 to 5 exchange tokens, but not the embeddings and layer 0."""
    made = program(job(MIXTURE, Mesh(tensor=2, data=2, expert=2), microbatches=1))
    starts = [action.communication for action in made.lanes[0].actions if isinstance(action, Start)]
    kinds = [made.communications[number].kind for number in starts if made.communications[number].kind != "data"]
    first, last = kinds.index("expert"), kinds[::-1].index("expert")
    assert first == 4  # the embeddings', two of layer 0 as one, and two of the first mixture
    assert last == 1 and made.communications[starts[-2]].times == 2  # those of layer 0, before all gradients


def test_hidden_data_parallelism_is_beside_the_first_and_the_last_micro_batch():
    one = job(LLAMA, Mesh(data=2), Framework(hidden=("data",)), shard="optimizer", microbatches=2)
    made = program(one)
    actions = [
        action.label
        if isinstance(action, Compute)
        else (type(action), made.communications[action.communication].operation)
        for action in made.lanes[0].actions
    ]
    passes = dict.fromkeys(label for label in actions if isinstance(label, str))
    assert list(passes) == ["forward 0", "backward 0", "forward 1", "backward 1", "optimizer"]
    plain = [one for one in actions if not isinstance(one, str)]
    gather, reduce = "all_gather", "reduce_scatter"
    assert plain == [(Start, gather), (Wait, gather), (Start, reduce), (Wait, reduce)]
    assert actions[0] == (Start, gather) and actions[actions.index((Wait, gather)) + 1] == "backward 0"
    assert actions[actions.index((Start, reduce)) + 1] == "backward 1" and actions[-2:] == [(Wait, reduce), "optimizer"]


def test_too_many_workers_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(simulation, "_MOST_SERVICES", 1000)
    one = job(LLAMA, Mesh(data=32), machine=replace(LATENT, gpus_per_host=1), microbatches=4)
    assert simulate(one, network_of(one.machine, one.mesh.workers)).step.seconds == pytest.approx(predict(one).seconds)
    uneven = tuple(Disturbance(kind="compute", number=k, factor=1 + k / 32) for k in range(32))
    with pytest.raises(TooLargeError, match="more than 1,000 flows and computations of 32 workers that differ"):
        simulate(one, network_of(one.machine, one.mesh.workers, disturbances=uneven))
