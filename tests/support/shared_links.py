"""What the workers of a program do on shared links, worker by worker in fractions: slow, and written apart."""

import itertools
import math
from fractions import Fraction

import numpy as np

from legato.core.program import Compute, Start
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.network.topology import Topology
from support.rates import served


def simulated(program, machine, network):
    """The end of each worker's last action, as fractions."""
    return _Simulation([program], [range(10**6)], machine, network, [1], [0]).run()


def simulated_jobs(programs, places, machine, network, counts, shifts):
    """(the end of each worker's last action, the ends of all steps of each program), as fractions.

    Worker w of program j is `places[j][w]`, and makes `counts[j]` steps from `shifts[j]` on, each when all of the
    program's workers are through with the one before it.
    """
    simulation = _Simulation(programs, places, machine, network, counts, shifts)
    return simulation.run(), simulation.step_ends


class _Simulation:
    def __init__(self, programs, places, machine, network, counts, shifts):
        self.machine, self.network, self.counts = machine, network, counts
        self.topology = Topology(Graph(), network, network.workers, 0, network.host_shape)
        self.now = Fraction(0)
        self.communications, self.groups, self.actions, self.job = {}, {}, {}, {}
        for j, (program, place) in enumerate(zip(programs, places, strict=True)):
            for number, one in enumerate(program.communications):
                self.communications[j, number] = one
                self.groups[j, number] = [tuple(place[w] for w in group) for group in one.groups]
            for lane in program.lanes:
                self.actions |= {place[w]: lane.actions for w in lane.workers}
                self.job |= {place[w]: j for w in lane.workers}
        self.position = dict.fromkeys(self.actions, 0)
        self.busy = {w: Fraction(shifts[j]) for w, j in self.job.items() if shifts[j]}  # worker: end of its computing
        self.starts = {}  # ((program, communication, step), group): workers that have started it
        self.queues = {}  # (workers, whether sends): communications in the order of their starts
        self.latent, self.moving, self.left, self.ended = {}, {}, {}, set()
        self.links, self.ends, self.step_ends = {}, {}, [[] for _ in programs]

    def run(self):
        while True:
            self.settle()
            rates = self.rates()
            moments = [*self.busy.values(), *self.latent.values()]
            moments += [self.now + self.left[one] / rate for one, rate in rates.items() if rate]
            if moments or self.left:
                moments += [t for t in self.changes() if t > self.now]
            if not moments:
                assert list(map(len, self.step_ends)) == list(self.counts)
                return self.ends
            then = min(moments)
            for one, rate in rates.items():
                self.left[one] -= rate * (then - self.now)
            self.now = then

    def settle(self):
        """All that happens at this moment."""
        while True:
            for worker in [w for w, end in self.busy.items() if end <= self.now]:
                del self.busy[worker]
            for one in [one for one, end in self.latent.items() if end <= self.now]:
                del self.latent[one]
                self.left[one] = self.nbytes(one)
            for one in [one for one, left in self.left.items() if left == 0]:
                del self.left[one]
                self.ended.add(one)
            if not any(self.step(worker) for worker in self.actions) and not self.begin() and not self.next_step():
                return

    def next_step(self):
        """End the steps with which all workers of their program are through; whether there is one."""
        again = False
        for j, ends in enumerate(self.step_ends):
            mine = [w for w, own in self.job.items() if own == j]
            through = all(self.position[w] == len(self.actions[w]) and w not in self.busy for w in mine)
            if through and len(ends) < self.counts[j]:
                ends.append(self.now)
                if len(ends) < self.counts[j]:
                    self.position |= dict.fromkeys(mine, 0)
                again = True
        return again

    def step(self, worker):
        """Whether the worker has done an action at this moment."""
        if worker in self.busy or self.position[worker] == len(self.actions[worker]):
            return False
        action = self.actions[worker][self.position[worker]]
        if isinstance(action, Compute):
            slower = [d for d in self.network.disturbances if d.kind == "compute" and d.number == worker]
            self.busy[worker] = self.ends[worker] = served(self.now, Fraction(action.seconds), slower)
        else:
            j = self.job[worker]
            group = next(group for group in self.groups[j, action.communication] if worker in group)
            one = ((j, action.communication, len(self.step_ends[j])), group)
            if isinstance(action, Start):
                self.starts.setdefault(one, set()).add(worker)
                kind = self.of(one).operation == "send"
                queue = self.queues.setdefault((one[1], kind), [])
                queue += [] if one[0] in queue else [one[0]]
            elif one in self.ended:
                self.ends[worker] = max(self.now, self.ends.get(worker, 0))
            else:
                return False
        self.position[worker] += 1
        return True

    def of(self, one):
        return self.communications[one[0][:2]]

    def begin(self):
        """Begin the first communication of each queue once all have started it; whether there was one."""
        begun = False
        for (group, kind), queue in self.queues.items():
            waiting = [number for number in queue if (number, group) not in self.ended]
            one = (waiting[0], group) if waiting else None
            if one is None or one in self.latent or one in self.left:
                continue
            if len(self.starts[one]) == (1 if kind else len(group)) and self.may_begin(one):
                self.latent[one] = self.now + self.latency(one)
                begun = True
        return begun

    def may_begin(self, one):
        """Whether what its workers did before it, if it runs after another one, has ended."""
        (j, _, step), group = one
        after = self.of(one).after
        before = [] if after is None else [other for other in self.groups[j, after] if set(other) & set(group)]
        return all(((j, after, step), other) in self.ended for other in before)

    def hosts(self, group):
        return list(dict.fromkeys(w // self.machine.gpus_per_host for w in group))

    def latency(self, one):
        further = len(self.hosts(one[1])) - 1
        machine = self.machine
        seconds = Fraction(machine.latency_s)
        if further:
            seconds = Fraction(machine.network_latency_s) + further * Fraction(machine.hop_s)
        return self.of(one).times * seconds

    def connections(self, one):
        """{link: connections}, and how many times the bytes are divided among them."""
        group = one[1]
        if one in self.links:
            return self.links[one]
        operation, by_host = self.of(one).operation, {}
        for worker in group:
            by_host.setdefault(worker // self.machine.gpus_per_host, []).append(worker)
        found, pairs, rings = [], [], 1
        if operation == "send":
            pairs = [group]
        elif operation == "all_to_all":
            pairs = list(itertools.permutations(group, 2))
        else:
            rings = max(map(len, by_host.values()))
            order = list(by_host.values())
            for k, mine in enumerate(order):
                other = order[(k + 1) % len(order)]
                if len(order) > 1:
                    pairs += [(mine[ring % len(mine)], other[ring % len(other)]) for ring in range(rings)]
                if len(mine) > 1:
                    found += [int(x) for w in mine for x in self.topology.local_links(w)] * rings
        for a, b in pairs:
            found += [int(x) for x in self.topology.route(np.array([a]), np.array([b]))[0] if x >= 0]
        self.links[one] = {link: found.count(link) for link in found}, rings
        return self.links[one]

    def nbytes(self, one):
        communication, size = self.of(one), len(one[1])
        sent = Fraction(communication.nbytes) * communication.times / self.connections(one)[1]
        whole = {"send": 1, "broadcast": 1, "all_to_all": Fraction(1, size), "all_reduce": 2 * Fraction(size - 1, size)}
        return sent * whole.get(communication.operation, Fraction(size - 1, size))

    def changes(self):
        return [Fraction(t) for d in self.network.disturbances for t in (d.start_s, d.end_s) if t < math.inf]

    def capacity(self, link):
        rate = 1 / Fraction(float(self.topology.s_per_byte()[link]))
        for d in self.network.disturbances:
            if (
                d.kind != "compute"
                and d.start_s <= self.now < d.end_s
                and link in self.topology.links_of(d.kind, d.number)
            ):
                rate = Fraction(0) if d.factor == math.inf else rate / Fraction(d.factor)
        return rate

    def rates(self):
        """Progressive filling, one bottleneck after another."""
        uses = {one: self.connections(one)[0] for one in self.left}
        left = {link: self.capacity(link) for own in uses.values() for link in own}
        rates = {}
        while len(rates) < len(uses):
            users = {link: sum(own.get(link, 0) for one, own in uses.items() if one not in rates) for link in left}
            share, full = min((left[link] / count, link) for link, count in users.items() if count)
            for one in [one for one, own in uses.items() if one not in rates and full in own]:
                rates[one] = share
                for link, count in uses[one].items():
                    left[link] -= count * share
        return rates
