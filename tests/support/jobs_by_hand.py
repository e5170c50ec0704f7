"""Jobs on shared links, one event at a time: plain and explicit, and written apart from the engine.

Every job is a ring: its workers compute the backward pass op by op, each op makes one message ready, messages go
around in two rounds, and the forward pass waits for the last one. A byte takes
`s_per_byte[host]` on the links of a host.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class RingJob:
    hosts: list[int]
    backward: list[float]  # seconds of each op, whose gradient is a message
    nbytes: list[float]
    forward: float
    shift: float = 0.0
    pace: float = 0.0
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
        for job in jobs:
            JobRun(self, job, iterations).begin(0)
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
        at = self.job.shift + k * self.job.pace if k == 0 or self.job.pace else 0.0
        wait = max(at - self.world.now, 0.0)
        self.left[k, r] = len(self.job.nbytes)
        self.world.after(wait, lambda: self.compute(k, r, 0))

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
