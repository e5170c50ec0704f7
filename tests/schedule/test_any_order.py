"""Tiny cases in which the computation may be reordered, against the true optimum, found by CP-SAT.

As in `test_oracle.py`, over every merging, cutting and order of messages; and over every order of the ops
on one stream that their dependencies allow. The bound for any order never beats it.

`PYTHONPATH=tests python tests/schedule/test_any_order.py 100` prints how far it is from it in as many random cases.
"""

import collections
import random
import sys

import pytest
from msgspec.structs import replace
from support.gaps import show_gaps
from support.optimum import UNIT, Optimum
from support.strategies import seeds

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.bound.lower_bound import lower_bound, verify_bound
from legato.simulator.collective import iteration_time
from legato.simulator.period import Period

#: How many random cases the test solves.
CASES = 12


def case(seed):
    """Two or three layers: gradients of inputs form a chain, and those of weights hang on it, as in real networks."""
    draw = random.Random(seed)
    layers = draw.randint(2, 3)
    ops = [Op(f"f{i}", "forward", draw.randint(0, 4), (i - 1,) if i else ()) for i in range(layers)]
    tensors, above = [], layers - 1
    for i in reversed(range(layers)):
        ops.append(Op(f"w{i}", "backward", draw.randint(0, 4), (above,)))
        tensors.append(Tensor(f"t{i}", UNIT * draw.randint(1, 2), len(ops) - 1, (i,)))
        if i:
            ops.append(Op(f"b{i}", "backward", draw.randint(0, 4), (above,)))
            above = len(ops) - 1
    cluster = Cluster(2, {"c": LinearCost(draw.randint(1, 8), draw.randint(1, 2) / UNIT)})
    return Workload(f"case{seed}", tuple(ops), tuple(tensors)), cluster


class AnyOrder(Optimum):
    """The best iteration over all orders of the ops; times are half seconds, as there."""

    def computation(self):
        """When ops run: one at a time, after those they depend on. Their ends are when gradients are ready."""
        model, ops = self.model, self.workload.ops
        lengths = [int(2 * op.duration_s) for op in ops]
        self.begin = [model.new_int_var(0, 2**20, "") for _ in ops]
        model.add_no_overlap(
            model.new_interval_var(start, length, start + length, "")
            for start, length in zip(self.begin, lengths, strict=True)
        )
        for i, op in enumerate(ops):
            model.add(self.period >= self.begin[i] + lengths[i])
            for dep in op.deps:
                if op.phase == "forward" or ops[dep].phase != "forward":
                    model.add(self.begin[i] >= self.begin[dep] + lengths[dep])
        self.ready = [self.begin[t.ready_after] + lengths[t.ready_after] for t in self.workload.tensors]
        times = heads_tails(self.workload, "one", "any")
        return int(2 * (min(times.release_s) + min(times.tail_s)))

    def arrives(self, t, end, holds):
        self.model.add(self.period >= end).only_enforce_if(holds)
        for reader in self.workload.tensors[t].readers:
            self.model.add(self.begin[reader] >= end).only_enforce_if(holds)

    def plan_of(self, sends):
        ops, topological = self.workload.ops, Period.of(self.workload).topological
        begin = [self.solver.value(start) for start in self.begin]
        # Of those that begin together, all but the last take no time.
        order = sorted(range(len(ops)), key=lambda i: (begin[i], ops[i].duration_s, topological.index(i)))
        return replace(super().plan_of(sends), op_order=tuple(order))


@pytest.mark.parametrize("sends", ["halves", "pairs", "all_reduces"])
@pytest.mark.parametrize("seed", seeds(CASES, quick=1))
def test_the_bound_for_any_order_is_below_the_optimum(seed, sends):
    workload, cluster = case(seed)
    best = AnyOrder(workload, cluster, sends)
    check_plan(best.plan, workload)
    assert iteration_time(workload, best.plan, cluster) == best.seconds
    bound = lower_bound(workload, cluster, order="any", sends=sends)
    verify_bound(bound, workload, cluster, order="any", sends=sends)
    assert best.seconds >= bound.seconds * (1 - 1e-12)


def survey(count):
    """How far from the optimum the bounds are."""
    gaps = collections.defaultdict(list)
    for seed in range(count):
        workload, cluster = case(seed)
        best, only = (AnyOrder(workload, cluster, sends).seconds for sends in ("halves", "all_reduces"))
        bound, sums = (
            lower_bound(workload, cluster, order="any", sends=sends).seconds for sends in ("halves", "all_reduces")
        )
        gaps["bound"].append(1 - bound / best)
        gaps["bound, all-reduces"].append(1 - sums / only)
    show_gaps(f"off the optimum, {count} cases", gaps)


if __name__ == "__main__":
    survey(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
