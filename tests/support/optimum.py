"""The best iteration of tiny cases, found by CP-SAT."""

import itertools

from ortools.sat.python import cp_model

from legato.core.plan import Message, Plan, Slice
from legato.schedule import schedule
from legato.schedule.basics.compose import priorities, release_times
from legato.simulator.collective import iteration_time

#: Bytes of a unit: no scheduler cuts finer.
UNIT = 16


class Optimum:
    """The best iteration there is: `seconds`, and a `plan` that takes them.

    `sends`: what messages may be, as for `lower_bound`. In the model times are half seconds, as a half costs half. A
    slot is one message or, at the end, nothing.
    """

    KINDS = ("all_reduce", "reduce_scatter", "all_gather")

    def __init__(self, workload, cluster, sends="halves"):
        self.workload, self.sends_only, cost = workload, sends, cluster.cost()
        self.alpha, self.beta = int(cost.alpha_s), int(cost.beta_s_per_byte * UNIT)
        self.units = [tensor.nbytes // UNIT for tensor in workload.tensors]
        known = int(2 * iteration_time(workload, schedule("merge-optimal", workload, cluster), cluster))
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(int(2 * workload.compute_s), known, "")
        # So many messages at most: a unit is in two, and all of them must find time on the network.
        time_for_alpha = known - self.computation() - 2 * self.beta * sum(self.units)
        self.slots = range(min(2 * sum(self.units), time_for_alpha // self.alpha))
        self.sends, self.holds = {}, {}  # (kind, slot, tensor) -> units; whether there are any
        free, used_before = 0, 1
        for k in self.slots:
            free, used_before = self.slot(k, free, used_before)
        self.whole_tensors()
        if sends == "pairs":
            self.pairs()
        self.model.minimize(self.period)
        self.solver = cp_model.CpSolver()
        self.solver.parameters.num_workers = 1
        assert self.solver.solve(self.model) == cp_model.OPTIMAL
        self.seconds = self.solver.objective_value / 2
        self.plan = self.plan_of({key: self.solver.value(count) for key, count in self.sends.items()})

    def computation(self):
        """When gradients are ready, and what follows their arrival; returns the time without any network at least."""
        self.ready = [int(2 * r) for r in release_times(self.workload)]
        order = self.workload.iteration_order()
        rest = [sum(self.workload.ops[i].duration_s for i in order[place:]) for place in priorities(self.workload)]
        self.tail = [int(2 * tail) for tail in rest]
        return min(self.ready) + min(self.tail)

    def arrives(self, t, end, holds):
        """What a message that ends then means for the rest of the period, if it holds something of a tensor."""
        self.model.add(self.period >= end + self.tail[t]).only_enforce_if(holds)

    def slot(self, k, free, used_before):
        """A message that starts when the network is free and its gradients are ready."""
        model, tensors = self.model, range(len(self.units))
        kind_of = {kind: model.new_bool_var("") for kind in self.KINDS}
        used = sum(kind_of.values())
        model.add(used <= used_before)
        if self.sends_only == "all_reduces":
            model.add(used == kind_of["all_reduce"])
        for kind in self.KINDS:
            for t in tensors:
                self.sends[kind, k, t] = model.new_int_var(0, self.units[t], "")
                self.holds[kind, k, t] = model.new_bool_var("")
                model.add(self.sends[kind, k, t] <= self.units[t] * self.holds[kind, k, t])
                model.add(self.holds[kind, k, t] <= kind_of[kind])
        start, end = (model.new_int_var(0, 2**20, "") for _ in range(2))
        halves = {kind: self.alpha * kind_of[kind] + self.beta * self.total(kind, [k]) for kind in self.KINDS}
        model.add(start >= free)
        model.add(end == start + sum(halves.values()) + halves["all_reduce"])
        for t in tensors:
            for kind in ("all_reduce", "reduce_scatter"):
                model.add(start >= self.ready[t]).only_enforce_if(self.holds[kind, k, t])
            for kind in ("all_reduce", "all_gather"):
                self.arrives(t, end, self.holds[kind, k, t])
        return end, used

    def total(self, kind, slots, tensors=None):
        return sum(self.sends[kind, k, t] for k in slots for t in tensors or range(len(self.units)))

    def whole_tensors(self):
        """Every unit is aggregated once; no all-gather of a tensor before its last reduce-scatter."""
        for t, count in enumerate(self.units):
            all_reduced, scattered, gathered = (self.total(kind, self.slots, [t]) for kind in self.KINDS)
            self.model.add(all_reduced + scattered == count)
            self.model.add(scattered == gathered)
            for k, later in itertools.combinations(self.slots, 2):
                self.model.add(self.holds["all_gather", k, t] + self.holds["reduce_scatter", later, t] <= 1)

    def pairs(self):
        """Every reduce-scatter has an all-gather of the same units, and the other way round."""
        pairs = {(k, later): self.model.new_bool_var("") for k, later in itertools.combinations(self.slots, 2)}
        for k in self.slots:
            for kind, own in (("reduce_scatter", 0), ("all_gather", 1)):
                possible = [pair for slots, pair in pairs.items() if slots[own] == k]
                for t in range(len(self.units)):
                    self.model.add(self.holds[kind, k, t] <= sum(possible))
                self.model.add(sum(possible) <= 1)
        for (k, later), pair in pairs.items():
            for t in range(len(self.units)):
                scattered, gathered = self.sends["reduce_scatter", k, t], self.sends["all_gather", later, t]
                self.model.add(scattered == gathered).only_enforce_if(pair)

    def plan_of(self, sends):
        unsent = [list(range(count)) for count in self.units]
        ungathered = [[] for _ in self.units]
        messages = []
        for (kind, _), group in itertools.groupby(sends.items(), key=lambda item: item[0][:2]):
            slices = []
            for (_, _, t), count in group:
                source = ungathered[t] if kind == "all_gather" else unsent[t]
                taken, source[:count] = source[:count], []
                if kind == "reduce_scatter":
                    ungathered[t] += taken
                slices += [Slice(self.workload.tensors[t].name, u * UNIT, (u + 1) * UNIT) for u in taken]
            if slices:
                messages.append(Message(tuple(slices), kind))
        return Plan("optimum", tuple(messages), forward_overlap=True)
