"""Jobs that share a network: alone as before, closed forms, and an independent simulation of events."""

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace as replaced
from support.flows import COMPUTE, MANY, M, hosts_of, job, network
from support.oracle import hashed
from support.strategies import examples, some

from legato.core.errors import InputError, TooLargeError
from legato.core.plan import Message, Plan, Slice
from legato.simulator.flow import (
    FABRICS,
    Disturbance,
    Network,
    SharedJob,
    SharedNetwork,
    fabric,
    place,
    simulate_flow,
)
from legato.simulator.flow.fabrics import fitting
from legato.simulator.flow.shared.placement import num_hosts

SECOND = 125_000_000  # bytes that a link of 1 Gbit/s carries in a second
QUICK = Network(workers=2, bandwidth_bps=1e9)
ANY_IN_FLIGHT = fabric("ring", in_flight=None)
SHARING = ["fifo", "fair"]


def simulate_jobs(jobs, net, **options):
    return SharedNetwork(jobs, net, **options).run()


ALONE = {
    "one switch": (4, {}),
    "racks": (4, {"racks": 2, "oversubscription": 2.0}),
    "jitter": (4, {"jitter": 0.3, "link_scale": (1.0, 1.0, 2.0, 2.0), "reduce_s_per_byte": 1e-10}),
    "fair": (4, {"sharing": "fair"}),
    "spines": (8, {"racks": 4, "spines": 3, "oversubscription": 2.0}),
    "fat tree": (8, {"topology": "fat-tree", "core_oversubscription": 2.0, "sharing": "fair"}),
    "sprayed fat tree": (8, {"topology": "fat-tree", "balance": "spray", "seed": 3}),
    "rails": (8, {"topology": "rails", "gpus_per_host": 4, "spines": 2}),
    "rail only": (8, {"topology": "rails", "gpus_per_host": 4, "spines": 0}),
    "shared cards": (8, {"gpus_per_host": 4, "gpus_per_card": 2, "racks": 2, "spines": 3}),
}


@pytest.mark.parametrize("kind", some(ALONE, ["jitter", "spines"]))
@pytest.mark.parametrize("name", FABRICS)
def test_a_job_alone_is_what_it_was(name, kind):
    """To the last bit, and for as many iterations; the workers' order is that of the hosts."""
    workers, options = ALONE[kind]
    net = network(workers, **hosts_of(2, name) | options)
    found = simulate_jobs(
        [SharedJob(name="a", workload=MANY, hosts=tuple(range(workers)), fabric=name)], net, iterations=4
    )
    count = len(found.ends_s[0])
    wanted = simulate_flow(MANY, None, name, net, iterations=count, symmetry=False)
    assert (found.ends_s[0] == wanted.end_s).all()
    (alone,) = found.jobs
    assert alone.slowdown == 1.0 and alone.iterations >= 2


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", some(FABRICS, [*list(FABRICS)[::3], "sharp"]))
def test_jobs_that_share_nothing_are_alone(name, sharing):
    """On hosts of their own behind a switch that never blocks, and with servers of their own."""
    net = network(6, sharing=sharing, **hosts_of(2, name))
    second = job((900, 70_000), forward=2e-5, backward=3e-5)
    hosts = [(4, 5, 0, 1), (2, 3)] if net.gpus_per_host > 1 else [(4, 1, 5, 3), (2, 0)]
    chosen = fitting(name, {"in_flight": None})
    jobs = [
        SharedJob(name="a", workload=MANY, hosts=hosts[0], fabric=chosen),
        SharedJob(name="b", workload=second, hosts=hosts[1], fabric=chosen),
    ]
    found = simulate_jobs(jobs, net, iterations=5)
    for one, ends, times in zip(jobs, found.ends_s, found.jobs, strict=True):
        own = replace(net, workers=len(one.hosts))
        wanted = simulate_flow(one.workload, None, chosen, own, iterations=len(ends), symmetry=False)
        if sharing == "fifo":
            assert (ends == wanted.end_s).all() and times.slowdown == 1.0
        else:  # a change of one job makes the rates of the other be computed again, from what is left
            assert ends == pytest.approx(wanted.end_s, rel=1e-9) and times.slowdown == pytest.approx(1.0, rel=1e-9)


def disturbed(net, *these):
    """The network with (kind, number, factor, from, to) slower for a while."""
    names = ("kind", "number", "factor", "start_s", "end_s")
    return replace(net, disturbances=tuple(Disturbance(**dict(zip(names, one, strict=False))) for one in these))


#: In the first two iterations of `MANY`, or from then on.
BROKEN = [
    ("link", 1, 3.0, 1e-4, 2e-2),
    ("link", 0, math.inf, 2e-3, 5e-3),
    ("uplink", 0, 7.0, 3e-3),
    ("compute", 2, 5.0, 1e-3, 9e-2),
]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", FABRICS)
def test_a_disturbed_job_alone_is_what_it_was(name, sharing):
    """To the last bit, and for as many iterations."""
    net = network(4, racks=2, oversubscription=2.0, sharing=sharing, **hosts_of(2, name))
    broken = [*BROKEN, ("server", 0, 2.0, 1e-3)] if FABRICS[name].servers else BROKEN
    jobs = [SharedJob(name="a", workload=MANY, hosts=(0, 1, 2, 3), fabric=name)]
    found, quiet = simulate_jobs(jobs, disturbed(net, *broken), iterations=4), simulate_jobs(jobs, net, iterations=4)
    count = len(found.ends_s[0])
    wanted = simulate_flow(MANY, None, name, disturbed(net, *broken), iterations=count)
    assert (found.ends_s[0] == wanted.end_s).all() and found.ends_s[0][-1] > quiet.ends_s[0][-1]
    assert found.jobs[0].alone_s == pytest.approx(quiet.jobs[0].alone_s, rel=1e-3)  # the mean over other iterations
    (timeline,), iteration = found.timelines(), wanted.timeline()
    assert {span.name for span in timeline.spans} == {span.name for span in iteration.spans}


@pytest.mark.slow
@pytest.mark.parametrize("priorities", [(0, 0), (0, 1)])
@pytest.mark.parametrize("sharing", SHARING)
def test_what_is_slower_all_the_time_is_slower(sharing, priorities):
    """Links and workers, of hosts that both jobs have; factors of 1 change nothing. The jobs may run more iterations
    where they are expected to take longer, but these are later."""
    net = network(4, racks=2, oversubscription=2.0, sharing=sharing)
    jobs = [
        SharedJob(name=name, workload=MANY, hosts=hosts, priority=priority)
        for name, hosts, priority in zip("ab", [(2, 1, 3), (1, 0, 3, 2)], priorities, strict=True)
    ]
    never = disturbed(net, ("link", 1, 1.0), ("compute", 0, 1.0, 1e-3, 2e-3))
    plain, same = simulate_jobs(jobs, net, iterations=6), simulate_jobs(jobs, never, iterations=6)
    assert same.jobs == plain.jobs and all((a == b).all() for a, b in zip(same.ends_s, plain.ends_s, strict=True))
    slow = disturbed(net, ("link", 1, 4.0), ("compute", 2, 2.0))
    scaled = replace(net, link_scale=(1.0, 4.0, 1.0, 1.0), compute_scale=(1.0, 1.0, 2.0, 1.0))
    found, wanted = simulate_jobs(jobs, slow, iterations=6), simulate_jobs(jobs, scaled, iterations=6)
    for mine, theirs, before in zip(found.ends_s, wanted.ends_s, plain.ends_s, strict=True):
        most = min(len(mine), len(theirs)) - 2  # the other job may be through when the last ones run
        assert mine[:most] == pytest.approx(theirs[:most], rel=1e-9) and (mine[1:] > before[1 : len(mine)]).all()


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("failing_s, late", [(67.0, 0.0), (77.0, 3.0)])
def test_a_link_that_fails_delays_who_sends(sharing, failing_s, late):
    """The first job computes for 10 s of 16 s and sends for 6 s; host 1 has no link for 3 s of its fifth iteration,
    from 64 s on: while it computes, or while it sends. Host 2, and with it the second job, has one all the time."""
    net = network(4, sharing=sharing)
    net = disturbed(replace(net, latency_s=0.0), ("link", 1, math.inf, failing_s, failing_s + 3))
    jobs = [on_off("a", 10, 6), replace(on_off("b", 10, 6), hosts=(2, 3))]
    found = simulate_jobs(jobs, net, iterations=8)
    first, second = found.ends_s
    assert first[:5] == pytest.approx([16, 32, 48, 64, 80 + late])
    assert second[:5] == pytest.approx([16, 32, 48, 64, 80])
    assert found.jobs[0].alone_s == pytest.approx(16) and found.jobs[0].longest_s == pytest.approx(16 + late)


def test_a_worker_that_is_slower_computes_longer():
    """Of 10 s of computation and 6 s of sending; one of two workers takes 20 s for it, and the other one waits."""
    found = simulate_jobs([on_off("a", 10, 6)], disturbed(QUICK, ("compute", 1, 2.0)), iterations=8)
    assert found.jobs[0].iteration_s == pytest.approx(26) and found.jobs[0].alone_s == pytest.approx(16)
    assert found.jobs[0].utilization == pytest.approx((10 + 20) / 2 / 26)


def test_servers_of_all_jobs_are_numbered_through():
    net = network(4)
    jobs = [
        SharedJob(name=name, workload=MANY, hosts=hosts, fabric="parameter-server")
        for name, hosts in zip("ab", [(0, 1), (2, 3)], strict=True)
    ]
    plain, found = (simulate_jobs(jobs, one, iterations=4) for one in (net, disturbed(net, ("server", 1, 3.0))))
    assert (found.ends_s[0][:4] == plain.ends_s[0][:4]).all()
    wanted = simulate_flow(
        MANY, None, "parameter-server", disturbed(network(2), ("server", 0, 3.0)), iterations=len(found.ends_s[1])
    )
    assert (found.ends_s[1] == wanted.end_s).all()


def test_a_worker_has_the_speed_and_the_link_of_its_host():
    net = network(4, link_scale=(1.0, 4.0, 1.0, 2.0), compute_scale=(1.0, 1.0, 3.0, 1.0))
    found = simulate_jobs([SharedJob(name="a", workload=MANY, hosts=(2, 1))], net, iterations=4)
    own = network(2, link_scale=(1.0, 4.0), compute_scale=(3.0, 1.0))
    wanted = simulate_flow(MANY, None, "ring", own, iterations=len(found.ends_s[0]))
    assert (found.ends_s[0] == wanted.end_s).all()


def on_off(name, compute, send, period=None, **options):
    """A job of two workers that computes for some seconds, and then keeps all links busy for others.

    A ring of two sends half of the bytes in either direction, twice, one after the other, without latency.
    """
    workload = job((round(send * SECOND),), forward=0.0, backward=compute)
    return SharedJob(name=name, workload=workload, hosts=(0, 1), **options)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@given(st.integers(0, 15), st.integers(1, 14), st.integers(1, 14))
@examples(25)
def test_two_jobs_fit_on_a_link_if_it_can_carry_both(sharing, shift, first, second):
    """Both have the period T = 16 s alone, and communicate for N1 and N2 seconds of it.

    If N1 + N2 <= T, the second one may communicate when the first one has, and both take T. If not, whatever the
    shift: jobs that take P1 and P2 need N1 / P1 + N2 / P2 of the link, which is at most 1, so not both of P1 and P2
    are less than N1 + N2.
    """
    net, fits = replace(QUICK, sharing=sharing), first + second <= 16
    # The second one computes for T - N2, and shall begin to communicate N1 after the first one does, at T.
    begin = second if fits else shift
    jobs = [on_off("a", 16 - first, first), on_off("b", 16 - second, second, shift_s=float(begin))]
    one, other = simulate_jobs(jobs, net, iterations=40).jobs
    assert one.alone_s == pytest.approx(16) and other.alone_s == pytest.approx(16)
    if fits:
        assert [one.iteration_s, other.iteration_s] == pytest.approx([16, 16])
    else:
        assert max(one.iteration_s, other.iteration_s) >= (first + second) * (1 - 1e-2)


def test_two_jobs_that_alternate_can_stay_in_a_bad_phase():
    """The first one sends twice half a second, the second one twice a second, both from 15 s on.

    They take turns: 15 to 15.5, 15.5 to 16.5, 16.5 to 17 and 17 to 18 s. Both are a second late, so they meet in the
    same phase for ever, although 13 of 16 s are free. Shifted by 1.5 s, they would not meet.
    """
    jobs = [on_off("a", 15, 1), on_off("b", 14, 2, shift_s=1.0)]
    assert [times.iteration_s for times in simulate_jobs(jobs, QUICK).jobs] == pytest.approx([17, 17])
    jobs[1] = replace(jobs[1], shift_s=2.5)
    assert [times.iteration_s for times in simulate_jobs(jobs, QUICK).jobs] == pytest.approx([16, 16])


@pytest.mark.slow
@given(st.lists(st.integers(0, 40), min_size=2, max_size=4), st.integers(0, 12), st.integers(1, 12))
@examples(40)
def test_jobs_with_one_transfer_on_a_link_take_what_they_need(shifts, compute, send):
    """A tree of two sends N up and N down: a job has a link for N of its T = C + 2 N seconds.

    n jobs take turns. While a job computes and uses the other link, for T - N, the others need (n - 1) N. If that is
    less, it waits for none of them in a steady state, and takes T; if it is more, the link is never free, and
    everyone takes n N. On the second link they arrive N apart, and do not wait.
    """
    jobs = [
        SharedJob(
            name=str(j), workload=on_off("", compute, send).workload, hosts=(0, 1), fabric="tree", shift_s=float(shift)
        )
        for j, shift in enumerate(shifts)
    ]
    wanted = max(compute + 2 * send, len(jobs) * send)
    for times in simulate_jobs(jobs, QUICK, iterations=60).jobs:
        assert times.iteration_s == pytest.approx(wanted)


@given(st.integers(0, 31), st.integers(1, 28), st.integers(1, 28))
@examples(40)
def test_two_jobs_that_share_a_link_fairly_keep_their_phase(shift, first, second):
    """The first job begins to communicate at 0, the second one at d, and N1 > d: they meet.

    From d on, each has half of the link. If N1 - d <= N2, the first one ends at d + 2 (N1 - d), and the second one,
    with N2 - (N1 - d) left, at N1 + N2. Both are N1 - d late. If N1 - d > N2, the second one ends at d + 2 N2 and the
    first one at N1 + N2: both are N2 late. So the phase does not change, and all iterations take T + min(N1 - d, N2).
    Nobody meets, and they take T, if N1 <= d and d + N2 <= T. If d + N2 > T, the second job begins first, and the
    first one T - d later. If they meet on both sides, the phases do change; such shifts are left out.
    """
    period = 32
    d = shift
    meets = [max(0.0, min(first - d, second)), max(0.0, min(second - (period - d), first))]
    assume(min(meets) == 0)
    # The second job computes C2 before it communicates: it begins so much later that this is at d after the first.
    begin = (period - first) + d - (period - second)
    shifts = (max(0.0, -begin), max(0.0, begin))
    jobs = [
        on_off("a", period - first, first, shift_s=shifts[0]),
        on_off("b", period - second, second, shift_s=shifts[1]),
    ]
    found = simulate_jobs(jobs, replace(QUICK, sharing="fair"), iterations=12)
    assert [times.iteration_s for times in found.jobs] == pytest.approx([period + max(meets)] * 2, rel=1e-6)


def test_jobs_whose_periods_differ_drift():
    """6 s of communication each, in periods of 16 and 16.8 s: fairly shared, they drift, and meet in 12 of 16.8 s of
    phases, by half of it on average."""
    jobs = [on_off("a", 10, 6), on_off("b", 10.8, 6, shift_s=9.0)]
    found = simulate_jobs(jobs, replace(QUICK, sharing="fair"), iterations=40)
    assert all(times.slowdown > 1.02 and times.longest_s > times.shortest_s + 1 for times in found.jobs)


ring_jobs = st.lists(
    st.tuples(
        st.permutations(range(4)),
        st.integers(2, 4),  # workers
        st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=3),
        st.integers(10**5, 10**6),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=3,
)


def ring_job(backward, sizes, forward):
    """A workload whose backward ops take so many seconds, each with a gradient of so many bytes."""
    plain = job(sizes, forward=forward)
    ops = [op for op in plain.ops if op.phase == "forward"]
    ops += [replaced(op, duration_s=s) for op, s in zip(plain.ops[len(ops) :], backward, strict=True)]
    return replaced(plain, ops=tuple(ops))


@dataclass
class RingJob:
    """A job on shared links, simulated one event at a time: plain and explicit, and written apart from the engine.

    It is a ring: its workers compute the backward pass op by op, each op makes one message ready, messages go
    around in two rounds, and the forward pass waits for the last one. A byte takes
    `s_per_byte[host]` on the links of a host.
    """

    hosts: list[int]
    backward: list[float]  # seconds of each op, whose gradient is a message
    nbytes: list[float]
    forward: float
    shift: float = 0.0
    priority: int = 0
    ends: list = field(default_factory=list)


class Link:
    """Serves one transfer at a time: the highest priority first, then the one that has waited longest.

    It decides after everything else of the same moment: in a ring, the next chunk often arrives just when the one
    before it has gone.
    """

    def __init__(self, world):
        self.world, self.busy, self.waiting = world, False, []

    def arrive(self, priority, seconds, begun, done):
        self.waiting.append((-priority, self.world.now, next(self.world.tickets), seconds, begun, done))
        self.world.after(0.0, self.serve, late=True)

    def serve(self):
        if self.busy or not self.waiting:
            return
        self.waiting.sort(key=lambda entry: entry[:3])
        *_, seconds, begun, done = self.waiting.pop(0)
        self.busy = True
        begun()

        def free():
            self.busy = False
            done()
            self.world.after(0.0, self.serve, late=True)

        self.world.after(seconds, free)


class World:
    def __init__(self, jobs, s_per_byte, latency, iterations):
        self.now, self.events, self.tickets = 0.0, [], itertools.count()
        self.links = defaultdict(lambda: Link(self))
        self.s_per_byte, self.latency = s_per_byte, latency
        for each in jobs:
            JobRun(self, each, iterations).begin(0)
        while self.events:
            self.now, *_, what = heapq.heappop(self.events)
            what()

    def after(self, seconds, what, late=False):
        heapq.heappush(self.events, (self.now + seconds, late, next(self.tickets), what))

    def send(self, priority, source, target, nbytes, arrived):
        """Cut through: the target's link may carry the first byte `latency` after the source's link does."""
        here, there = nbytes * self.s_per_byte[source], nbytes * self.s_per_byte[target]
        left = {"tail", "head"}  # the tail has passed, and the target's link has carried all of it

        def part(which):
            left.discard(which)
            if not left:
                arrived()

        def begun():
            enter = self.links["in", target].arrive
            self.after(self.latency, lambda: enter(priority, there, lambda: None, lambda: part("head")))

        def sent():
            self.after(self.latency, lambda: part("tail"))

        self.links["out", source].arrive(priority, here, begun, sent)


class JobRun:
    def __init__(self, world, job, iterations):
        self.world, self.job, self.iterations = world, job, iterations
        self.n = len(job.hosts)
        self.free = [0] * self.n  # the iteration that a worker may begin
        self.computed = defaultdict(int)
        self.left = {}

    def begin(self, k):
        for r in range(self.n):
            self.begin_worker(k, r)

    def begin_worker(self, k, r):
        if k == self.iterations:
            return
        self.left[k, r] = len(self.job.nbytes)
        self.world.after(self.job.shift if k == 0 else 0.0, lambda: self.compute(k, r, 0))

    def compute(self, k, r, op):
        if op == len(self.job.backward):
            return

        def done():
            self.own_is_ready(k, r, op)
            self.compute(k, r, op + 1)

        self.world.after(self.job.backward[op], done)

    # One message: n - 1 steps that add up, then n - 1 steps that pass on. What arrives in a step is sent in the next.

    def own_is_ready(self, k, r, m):
        self.computed[k, r, m] = True
        self.step(k, r, m, 0)
        for s in range(1, self.n):
            if self.computed.get(("arrived", k, r, m, s)):
                self.step(k, r, m, s)

    def step(self, k, r, m, s):
        """Worker r holds what it sends in step s of 2 (n - 1), or, after the last one, everything."""
        if s == 2 * (self.n - 1):
            self.received(k, r)
            return
        right, job = (r + 1) % self.n, self.job

        def arrived():
            self.computed["arrived", k, right, m, s + 1] = True
            if self.computed.get((k, right, m)):  # it adds its own
                self.step(k, right, m, s + 1)

        self.world.send(job.priority, job.hosts[r], job.hosts[right], job.nbytes[m] / self.n, arrived)

    def received(self, k, r):
        self.left[k, r] -= 1
        if self.left[k, r] == 0:
            self.world.after(self.job.forward, lambda: self.end(k, r))

    def end(self, k, r):
        self.computed["ended", k] += 1
        if self.computed["ended", k] == self.n:
            self.job.ends.append(self.world.now)
        self.begin_worker(k + 1, r)


@pytest.mark.parametrize("priorities", [(0, 0, 0), (1, 3, 2), (2, 1, 2)])
@given(ring_jobs, st.integers(1, 1000))
@examples(40)
def test_a_simulation_of_single_events_agrees(priorities, drawn, latency):
    """Random jobs of rings on four hosts.

    Where links are of one speed, jobs that wait for one another fall into step, and transfers of several jobs become
    ready at the same time. Here every host has its own speed, and times have so many digits that none do.
    """
    scale, latency_s = (1.0, 1.137, 1.291, 1.523), latency * 1e-6 * math.sqrt(3)
    jobs, by_hand = [], []
    for (order, workers, ops, forward, shift), priority in zip(drawn, priorities, strict=False):
        hosts, sizes = tuple(order[:workers]), [size for _, size in ops]
        backward = [(seconds + math.sqrt(2 + len(jobs))) * 1e-6 for seconds, _ in ops]
        workload = ring_job(backward, sizes, forward * 1e-6)
        options = {"shift_s": shift * 1e-6, "priority": priority}
        jobs.append(SharedJob(name=str(len(jobs)), workload=workload, hosts=hosts, fabric=ANY_IN_FLIGHT, **options))
        by_hand.append(RingJob(hosts, backward, sizes, forward * 1e-6, *options.values()))
    net = Network(workers=4, bandwidth_bps=8e6, latency_s=latency_s, send_s=0.0, link_scale=scale)
    found = simulate_jobs(jobs, net, iterations=4)
    World(by_hand, [1e-6 * factor for factor in scale], latency_s, max(len(ends) for ends in found.ends_s))
    for ends, one in zip(found.ends_s, by_hand, strict=True):
        # By hand, all jobs run equally many iterations. Until the window ends, they do the same.
        inside = ends <= found.end_s
        assert ends[inside] == pytest.approx(np.array(one.ends[: len(ends)])[inside], rel=1e-9)


def test_the_higher_priority_goes_first():
    """Two jobs ask for a link that they keep busy all the time: fairly shared, the urgent one is as if alone, and the
    other one has what is left; by turns, it waits for one transfer at most."""
    jobs = [on_off("a", 4, 12, priority=1), on_off("b", 4, 12)]
    urgent, other = simulate_jobs(jobs, replace(QUICK, sharing="fair"), iterations=20).jobs
    assert urgent.slowdown == pytest.approx(1.0) and other.iteration_s == pytest.approx(16 * 3)
    urgent, other = simulate_jobs(jobs, QUICK, iterations=20).jobs
    assert urgent.iteration_s <= 16 + 2 * 6 and other.slowdown > urgent.slowdown


def test_a_job_can_starve():
    """The urgent one leaves no gap: it communicates all the time. The other one ends no iteration."""
    plan = Plan("halves", tuple(Message((Slice("w0", at, at + 6 * SECOND),)) for at in (0, 6 * SECOND)))
    jobs = [on_off("a", 0, 12, plan=plan, priority=1), on_off("b", 1, 1)]
    found = simulate_jobs(jobs, replace(QUICK, sharing="fair"), iterations=8)
    urgent, other = found.jobs
    assert urgent.slowdown == pytest.approx(1.0)
    assert other.slowdown is None and other.iteration_s is None and other.alone_s == pytest.approx(2.0)
    assert found.slowdown == math.inf and len(found.timelines()) == 1


def test_all_jobs_run_until_the_slowest_one_has_its_iterations():
    """Also if it begins a period after the others."""
    jobs = [
        on_off("slow", 10, 6, shift_s=16.0),
        SharedJob(name="quick", workload=on_off("b", 1, 1).workload, hosts=(2, 3)),
    ]
    found = SharedNetwork(jobs, network(4), iterations=5).run()
    assert found.end_s >= 16 + 5 * 16 and all(job.slowdown == pytest.approx(1.0) for job in found.jobs)


def test_timelines_are_of_one_moment_and_have_an_iteration_each():
    jobs = [on_off("a", 10, 6), on_off("b", 12, 4, shift_s=3.0)]
    found = simulate_jobs(jobs, QUICK)
    for timeline, times, one in zip(found.timelines(), found.jobs, jobs, strict=True):
        assert timeline.name == one.name and timeline.iteration_s == times.iteration_s
        assert {span.worker for span in timeline.spans} == {0, 1}
        assert min(span.start_s for span in timeline.spans) >= 0
        assert max(span.end_s for span in timeline.spans) <= timeline.iteration_s * (1 + 1e-12)
        assert timeline.computation_s == pytest.approx(one.workload.compute_s)
        assert timeline.utilization == pytest.approx(times.utilization)


def test_hosts_of_jobs():
    net = network(8, racks=2)
    assert place([3, 2], "packed", net) == [(0, 1, 2), (3, 4)]
    assert place([3, 2], "spread", net) == [(0, 4, 1), (5, 2)]
    assert place([3, 2], "together", network(3)) == [(0, 1, 2), (0, 1)]
    drawn = place([3, 5], "random", net)
    assert sorted(drawn[0] + drawn[1]) == list(range(8)) and drawn == place([3, 5], "random", net)
    assert drawn != place([3, 5], "random", replace(net, seed=1))
    two = replace(net, gpus_per_host=2)
    assert place([4, 2], "spread", two) == [(0, 1, 4, 5), (2, 3)]
    assert place([3, 4], "packed", two) == [(0, 1, 2), (3, 4, 5, 6)]
    assert place([2, 4], "random", two)[0] in [(0, 1), (2, 3), (4, 5), (6, 7)]
    tree = network(16, topology="fat-tree")
    assert place([8, 3], "spread", tree) == [tuple(range(0, 16, 2)), (1, 3, 5)]
    rails = network(8, topology="rails", gpus_per_host=4)
    assert place([8], "spread", rails) == [tuple(range(8))]
    assert [num_hosts([5, 4], how, 4) for how in ("packed", "together")] == [3, 2]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["packed", "spread", "random"]))
@examples(40)
def test_every_host_has_one_worker_at_most(workers, how):
    hosts = sum(workers)
    net = network(hosts, racks=min(3, hosts), seed=5)
    found = place(workers, how, net)
    assert [len(own) for own in found] == workers
    assert len({host for own in found for host in own}) == hosts
    if how == "spread":  # neighbours are in different racks as long as there are hosts left in several
        racks = net.switches.leaf_of_worker([host for own in found for host in own])
        assert sorted(racks[: min(3, hosts)]) == list(range(min(3, hosts)))


def test_jobs_meet_on_uplinks_only_where_their_racks_have_hosts_of_several():
    """Two jobs of two workers in two racks with uplinks of 1/4: packed, a rack each, they do not meet."""
    net = network(4, racks=2, oversubscription=4)
    slowdown = {}
    for how in ("packed", "spread"):
        jobs = [SharedJob(name=n, workload=job(), hosts=h) for n, h in zip("ab", place([2, 2], how, net), strict=True)]
        slowdown[how] = simulate_jobs(jobs, net).slowdown
        alone = simulate_jobs(jobs[:1], net).jobs[0].iteration_s
        assert alone == pytest.approx(simulate_jobs(jobs, net).jobs[0].alone_s)
    assert slowdown["packed"] == 1.0 < slowdown["spread"]


def test_jobs_meet_where_ecmp_lets_them_collide():
    """Two jobs of two workers, one in either rack, below two spines: each job's flow has a path by a hash of its own.

    Sent as a tree, M goes up and then down, one flow at a time. Where both jobs take the same spine in a direction,
    and begin together, they share its link, which is as fast as a host's; else they are alone.
    """
    seen = set()
    for seed in range(12):
        net = Network(workers=4, bandwidth_bps=1e9, racks=2, spines=2, seed=seed, sharing="fair")
        jobs = [SharedJob(name=n, workload=job(), hosts=h, fabric="tree") for n, h in (("a", (0, 2)), ("b", (1, 3)))]
        paths = [
            [hashed(seed + k, *ends) % 2 for ends in (pair, pair[::-1])] for k, pair in enumerate([(0, 2), (1, 3)])
        ]
        times = simulate_jobs(jobs, net, iterations=6).jobs
        assert [one.alone_s for one in times] == pytest.approx([COMPUTE + 2 * M] * 2)
        meet = sum(a == b for a, b in zip(*paths, strict=True))
        assert [one.iteration_s for one in times] == pytest.approx([COMPUTE + (2 + meet) * M] * 2)
        seen.add(meet)
    assert seen == {0, 1, 2}


def test_jobs_share_the_network_cards_of_a_host():
    """Two jobs on the GPUs of two hosts: with one card a host they have half of it each, with two they are alone."""
    for cards in (1, 2):
        net = Network(workers=8, bandwidth_bps=1e9, gpus_per_host=4, gpus_per_card=4 // cards, sharing="fair")
        assert place([4, 4], "packed", net) == [(0, 1, 2, 3), (4, 5, 6, 7)]
        hosts = [(0, 4), (2, 6)]
        jobs = [SharedJob(name=n, workload=job(), hosts=h, fabric="tree") for n, h in zip("ab", hosts, strict=True)]
        for times in simulate_jobs(jobs, net, iterations=6).jobs:
            assert times.alone_s == pytest.approx(COMPUTE + 2 * M)
            assert times.iteration_s == pytest.approx(COMPUTE + (4 if cards == 1 else 2) * M)


A = SharedJob(name="a", workload=job(), hosts=(0, 1))


@pytest.mark.parametrize(
    "jobs, options, words",
    [
        ([], {}, "0 jobs"),
        ([A] * 65, {}, "65 jobs"),
        ([replace(A, hosts=(0, 2))], {}, "a: host 2"),
        ([A], {"iterations": 3}, "iterations: 3 .expected 4 to 1000"),
        ([A], {"iterations": 1001}, "iterations: 1001"),
        ([A, replace(A, name="b", workload=job(forward=3e3))], {"iterations": 900}, "a: .* iterations while"),
        ([replace(A, workload=job(forward=0.0, backward=0.0), hosts=(0,))], {}, "take no time"),
        (
            [replace(A, fabric="hierarchical")],
            {},
            "a: hierarchical on a shared .* gpus_per_host above 1",
        ),
    ],
)
def test_impossible_jobs_are_refused(jobs, options, words):
    with pytest.raises(InputError, match=words):
        simulate_jobs(jobs, QUICK, **options)


def test_impossible_values_are_refused():
    for values, words in (
        ({"hosts": ()}, "a: 0 hosts"),
        ({"hosts": (0, 0)}, "a: 2 hosts"),
        ({"shift_s": -1.0}, "a: shift_s"),
        ({"shift_s": math.nan}, "a: shift_s"),
    ):
        with pytest.raises(InputError, match=words):
            replace(A, **values)
    for kind, number in (("server", 0), ("link", 2)):
        with pytest.raises(InputError, match=f"{kind}: {number}"):
            simulate_jobs([A], replace(QUICK, disturbances=(Disturbance(kind=kind, number=number, factor=2.0),)))
    with pytest.raises(InputError, match="5 workers of jobs on 4 hosts"):
        place([3, 2], "packed", network(4))
    with pytest.raises(InputError, match="did you mean 'spread'"):
        place([3], "spred", network(4))
    with pytest.raises(InputError, match="9 workers of jobs on 8 GPUs"):
        place([9], "packed", network(8, gpus_per_host=4))
    for hosts in ((0, 3), (0, 1, 2), (1, 0), (1, 2)):
        for name in ("hierarchical", "sharp"):
            with pytest.raises(InputError, match=f"a: {name} on parts of hosts"):
                simulate_jobs([replace(A, fabric=name, hosts=hosts)], network(4, gpus_per_host=2))


def test_what_is_too_large_is_refused_before_it_is_simulated(monkeypatch):
    monkeypatch.setattr(SharedNetwork, "_run", None)
    for sharing, workers, words in (("fifo", 1000, "20,000,000"), ("fair", 200, "1,000,000")):
        with pytest.raises(TooLargeError, match=words):
            simulate_jobs([replace(A, hosts=tuple(range(workers)))], network(workers, sharing=sharing))
