"""Transfers over switches the slow way: every link has a name, every route is spelled out, events happen in turn.

It is written apart from the simulator, from the description of the model in docs/simulator.md: nothing here is an
array, and routes are told by names such as ("up", leaf, spine).
"""

from fractions import Fraction

MASK = 2**64 - 1


def hashed(seed, *numbers):
    """SplitMix64's finalizer, once per number, in whole numbers."""
    bits = seed
    for number in numbers:
        bits = (bits + 0x9E3779B97F4A7C15 * (number + 1)) & MASK
        bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & MASK
        bits ^= bits >> 31
    return bits


class Plant:
    """The links of a network and the routes between its workers 0, 1, ... and its servers n, n + 1, ..."""

    def __init__(self, network):
        self.network, self.n = network, network.workers
        self.g, self.c = network.gpus_per_host, network.gpus_per_card
        cards, o = self.n // self.c, Fraction(network.oversubscription)
        self.pods = 1
        if network.topology == "fat-tree":
            k = next(k for k in range(2, 100, 2) if k**3 // 4 >= cards) if network.ports is None else network.ports
            self.below, self.leaves, self.spines, self.cores, self.pods = k // 2, k * k // 2, k // 2, k // 2, k
            total = self.below / o  # of a leaf's links up, in links of a host
        else:
            self.leaves = network.racks if network.topology == "leaf-spine" else self.g // self.c
            self.spines, self.cores = network.spines, 0
            total = Fraction(cards, self.leaves) / o
        core_total = total * (self.leaves // self.pods) / Fraction(network.core_oversubscription)
        if network.balance == "spray":
            self.spines, self.cores = min(self.spines, 1), min(self.cores, 1)
        self.up_speed = total / self.spines if self.spines else None
        self.core_speed = core_total / (self.spines * self.cores) if self.cores else None

    def host(self, end):
        return end // self.g if end < self.n else end

    def card(self, end):
        return end - end % self.c if end < self.n else end

    def leaf(self, end):
        network = self.network
        if end >= self.n:
            return (end - self.n) % self.leaves
        if network.topology == "rails":
            return end % self.g // self.c
        if network.topology == "fat-tree":
            return end // self.c // self.below
        first = end - end % self.g
        return first * network.racks // self.n

    def route(self, source, target, flow=None):
        """The names of the links from one end to another."""
        if self.host(source) == self.host(target):
            return [("from", source), ("to", target)]
        here, there = self.leaf(source), self.leaf(target)
        first, last = [("out", self.card(source))], [("in", self.card(target))]
        if here == there:
            return first + last
        if not self.spines:
            if source < self.n:
                twin = self.twin(source, there)
                return [("from", source), ("to", twin), ("out", self.card(twin)), *last]
            twin = self.twin(target, here)
            return [*first, ("in", self.card(twin)), ("from", twin), ("to", target)]
        choice = hashed(self.network.seed, *(flow or (source, target))) % (self.spines * max(self.cores, 1))
        spine, core = choice % self.spines, choice // self.spines
        per_pod = self.leaves // self.pods
        across = []
        if here // per_pod != there // per_pod:
            across = [("to core", here // per_pod, spine, core), ("from core", there // per_pod, spine, core)]
        return [*first, ("up", here, spine), *across, ("down", there, spine), *last]

    def twin(self, worker, leaf):
        """The worker of the same host, at the same place on its card, on another rail."""
        return worker - worker % self.g + leaf * self.c + worker % self.c

    def seconds(self, link, nbytes):
        """How long a link takes for a number of bytes."""
        network, kind, end = self.network, link[0], link[1]
        bits = 8 * Fraction(nbytes)
        if kind in ("from", "to"):
            return bits / Fraction(network.local_bandwidth_bps)
        base = bits / Fraction(network.bandwidth_bps)
        if kind in ("out", "in"):
            if end >= self.n and network.server_bandwidth_bps is not None:
                return bits / Fraction(network.server_bandwidth_bps)
            return base * Fraction(network.link_scale[end]) if network.link_scale and end < self.n else base
        return base / (self.up_speed if kind in ("up", "down") else self.core_speed)


def arrivals(plant, transfers):
    """When each transfer (source, target, bytes, ready_s, key) has arrived; links serve first come, first served."""
    network = plant.network
    routes = [plant.route(source, target) for source, target, *_ in transfers]
    free, arrived = {}, {}
    # (ready to begin, key, number, hop, the end of the last byte on the hop before)
    waiting = [(Fraction(t[3]), t[4], i, 0, Fraction(0)) for i, t in enumerate(transfers)]
    while waiting:
        ready, key, i, hop, tail = waiting.pop(waiting.index(min(waiting)))
        link = routes[i][hop]
        begin = max(ready, free.get(link, Fraction(0)))
        sending = Fraction(network.send_s) if link[0] == "out" else 0
        free[link] = begin + sending + plant.seconds(link, transfers[i][2])
        end = max(free[link], tail)
        delay = Fraction(network.latency_s) - sending if link[0] == "out" else 0
        if hop + 1 == len(routes[i]):
            arrived[i] = end
        elif network.cut_through:
            waiting.append((begin + delay, key, i, hop + 1, end + delay))
        else:
            waiting.append((end + delay, key, i, hop + 1, Fraction(0)))
    return [arrived[i] for i in range(len(transfers))]
