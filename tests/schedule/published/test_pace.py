"""PACE: the paper's example, its linear program, its recursion, and the optimum that it claims."""

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp
from support.strategies import clusters, costs, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.files import identity
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.compose import release_times
from legato.schedule.basics.jackson import jackson
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.pace import Chain, balanced, fuse, pace, preemptive
from legato.simulator.collective import iteration_time

#: A unit of 16 bytes takes a second.
BY_UNIT = Cluster(3, {"ring": LinearCost(0.0, 1 / 16)})

# Figure 1: dReLu, dAdd and dMul one after another, an all-reduce behind each; Mul needs AR3, Add needs Mul and AR2,
# and the last op needs Add and AR1. The text of the figures gives the order of events, not the durations; these fit it.
FIGURE_1 = Workload(
    "figure 1",
    (
        Op("Mul", "forward", 2.0),
        Op("Add", "forward", 2.0, (0,)),
        Op("ReLu", "forward", 3.0, (1,)),
        Op("dReLu", "backward", 1.0),
        Op("dAdd", "backward", 1.0, (3,)),
        Op("dMul", "backward", 1.0, (4,)),
    ),
    (Tensor("AR1", 48, 3, (2,)), Tensor("AR2", 48, 4, (1,)), Tensor("AR3", 32, 5, (0,))),
)


def sent(plan):
    return [[(p.tensor, p.start, p.stop) for p in message.slices] for message in plan.messages]


@pytest.mark.parametrize("compute", ["one", "unlimited"])
def test_the_example_of_figures_1_and_2(compute):
    plan = pace(FIGURE_1, BY_UNIT, compute=compute)
    # "AR1 is partitioned into two ..., so that the completion time of the first equals the ready time of AR2. AR2 is
    # partitioned too to allow AR3 to be executed once it is ready. After AR3 ..., the second partition of AR2 will be
    # scheduled, followed by that of AR1."
    assert sent(plan) == [
        [("AR1", 0, 16)],
        [("AR2", 0, 16)],
        [("AR3", 0, 32)],
        [("AR2", 16, 48)],
        [("AR1", 16, 48)],
    ]
    fifo = msgspec.structs.replace(schedule("fifo", FIGURE_1, BY_UNIT), forward_overlap=True)
    seconds = [iteration_time(FIGURE_1, p, BY_UNIT, compute=compute) for p in (fifo, plan)]
    assert seconds == [16, 12]  # "25% reduction of DAG execution time"


def test_fusion_by_hand():
    """A startup time of 4 s: one group waits too long, three pay too much."""
    network = Cluster(3, {"ring": LinearCost(4.0, 1 / 16)})
    chain = Chain([1, 2, 3], [48, 48, 32], [3, 5, 7])
    assert preemptive(chain.fused([3]), network.cost()) == (15 + 7, [(0, 3, 15)])
    two = chain.fused([1, 3])
    assert two == Chain([1, 3], [48, 80], [3, 7])
    assert preemptive(two, network.cost()) == (17 + 3, [(0, 1, 3), (1, 3, 12), (0, 12, 17)])
    assert preemptive(chain, network.cost())[0] == 21 + 3
    assert fuse(chain, network.cost(), 10) == [1, 3]
    assert fuse(chain, network.cost(), 22) == [3]  # as good when the computation takes 22 s itself
    # The 2 of 7 s that AR1 has before the others are ready are worth 13 bytes, less than can be sent.
    assert sent(pace(FIGURE_1, network)) == [[("AR2", 0, 48), ("AR3", 0, 32)], [("AR1", 0, 48)]]


def linear_program(release, processing, length):
    """Problem 14 of the paper without its integer constraint 8: the x_i(t), slots counted from 1.

    T is the end of any schedule that never waits. Constraint 7 forbids t <= z, not only t < z: a gradient computed
    in slot z can be sent from slot z + 1 on. Coefficients are divided by the largest.
    """
    n = len(release)
    slots = range(1, round(jackson(release, processing, length)[-1][2]) + 1)
    base, largest = len(slots) * n, slots[-1] + max(length)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    x, at_0, at_1 = ({(i, t): solver.NumVar(0, solver.infinity(), "") for i in range(n) for t in slots} for _ in "123")
    for i, t in x:
        solver.Add(x[i, t] == at_1[i, t])  # 12
        solver.Add(at_0[i, t] + at_1[i, t] == 1)  # 13
        if t <= release[i]:
            solver.Add(x[i, t] == 0)  # 7
    for i in range(n):
        solver.Add(sum(x[i, t] for t in slots) >= processing[i])  # 3
    for t in slots:
        solver.Add(sum(x[i, t] for i in range(n)) <= 1)  # 6
    solver.Minimize(
        sum(
            float(base) ** (length[i] - largest) * at_0[i, t] + float(base) ** (t + length[i] - largest) * at_1[i, t]
            for i, t in x
        )
    )
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return {key: variable.solution_value() for key, variable in x.items()}


jobs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 3)), min_size=1, max_size=3)


@examples(50)
@given(jobs)
def test_jacksons_schedule_is_as_good_as_the_papers_linear_program(rows):
    release, processing, length = ([row[k] for row in rows] for k in range(3))
    solution = linear_program(release, processing, length)
    assert all(min(abs(v), abs(v - 1)) < 1e-6 for v in solution.values())  # Theorem 2: integers by themselves
    value = max(t + length[i] for (i, t), v in solution.items() if v > 0.5)
    assert value == max(stop + length[i] for i, _, stop in jackson(release, processing, length))


def max_min_size(sizes, groups):
    """Lines 11 to 23 of Algorithm 1, as printed."""
    if groups == 1:
        return sum(sizes), [sizes]
    if groups > len(sizes):
        return -math.inf, []
    best_size, best = 0, []
    for stop in range(1, len(sizes)):
        size, rest = max_min_size(sizes[stop:], groups - 1)
        size = min(sum(sizes[:stop]), size)
        if best_size < size:
            best_size, best = size, [sizes[:stop], *rest]
    return best_size, best


def groups_of(ends, values):
    return [values[a:b] for a, b in itertools.pairwise([0, *ends])]


sizes_of_tensors = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@examples(100)
@given(sizes_of_tensors)
def test_the_groups_are_those_of_the_recursion(sizes):
    found = list(balanced(sizes))
    assert len(found) == len(sizes)
    for count, ends in enumerate(found, start=1):
        size, expected = max_min_size(sizes, count)
        assert groups_of(ends, sizes) == expected
        assert min(map(sum, expected)) == size


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=9),
    costs,
    st.integers(0, 60),
)
def test_fusion_is_algorithm_1(rows, cost, compute_s):
    chain = Chain(sorted(row[0] for row in rows), [row[1] for row in rows], [row[2] for row in rows])
    best_s, best = math.inf, None
    for count in range(1, len(rows) + 1):
        groups = max_min_size(chain.nbytes, count)[1]
        ends = list(itertools.accumulate(map(len, groups)))
        seconds = max(compute_s, preemptive(chain.fused(ends), cost)[0])
        if seconds < best_s:
            best_s, best = seconds, ends
    assert fuse(chain, cost, compute_s) == best


def test_the_table_of_groups_has_a_limit(monkeypatch):
    chain, cost = Chain([float(k) for k in range(9)], [1] * 9, [0.0] * 9), LinearCost(0.0, 1.0)
    assert len(fuse(chain, cost, 0.0)) == 9  # each gradient as soon as it is ready
    monkeypatch.setattr("legato.schedule.published.pace._MOST_ENTRIES", 9 * 4)
    assert len(fuse(chain, cost, 0.0)) <= 4


def test_of_many_groups_not_every_number_is_tried():
    draw = random.Random(0)
    release = sorted(draw.random() for _ in range(500))
    chain = Chain(release, [draw.randint(1, 99) for _ in release], [1 - r for r in release])
    cost = LinearCost(1e-5, 3e-5)
    seconds = [preemptive(chain.fused(ends), cost)[0] for ends in balanced(chain.nbytes)]
    assert seconds.index(min(seconds)) + 1 == 463  # above 399 every other number is tried
    found = fuse(chain, cost, 0.0)
    assert len(found) == 464 and preemptive(chain.fused(found), cost)[0] == pytest.approx(min(seconds), rel=1e-4)


def in_units(workload):
    tensors = (msgspec.structs.replace(t, nbytes=16 * t.nbytes) for t in workload.tensors)
    return msgspec.structs.replace(workload, tensors=tuple(tensors))


@examples(100)
@given(workloads(max_ops=6, max_tensors=6), st.sampled_from(["one", "unlimited"]), st.booleans())
def test_without_startup_times_it_is_optimal(workload, compute, fusion):
    workload, cluster = in_units(workload), Cluster(2, {"c": LinearCost(0.0, 1 / 128)})  # cuts fall between units
    plan = pace(workload, cluster, compute=compute, fusion=fusion)
    seconds = iteration_time(workload, plan, cluster, compute=compute)
    if compute == "unlimited":
        assert seconds == lower_bound(workload, cluster, compute=compute).seconds
    else:
        assert seconds == best_in_iteration_order(workload, cluster)


def best_in_iteration_order(workload, cluster):
    """What any set of tensors proves for one stream whose optimizer ops stand where `iteration_order` puts them."""
    order = workload.iteration_order()
    after = {op: sum(workload.ops[i].duration_s for i in order[k:]) for k, op in enumerate(order)}
    jobs = [
        (r, cluster.cost().cost(t.nbytes), max((after[op] for op in t.readers), default=0))
        for r, t in zip(release_times(workload), workload.tensors, strict=True)
    ]
    sets = (s for size in range(1, len(jobs) + 1) for s in itertools.combinations(jobs, size))
    return max(workload.compute_s, *(min(r) + sum(p) + min(q) for r, p, q in (zip(*s, strict=True) for s in sets)))


@given(workloads(max_tensors=8), clusters(), st.sampled_from(["one", "unlimited"]), st.booleans())
def test_plans_are_valid_and_above_the_bound(workload, cluster, compute, fusion):
    if fusion:
        workload = in_units(workload)
    plan = pace(workload, cluster, compute=compute, fusion=fusion)
    check_plan(plan, workload)
    assert plan.forward_overlap
    assert plan.workload_id == identity(workload)
    seconds = iteration_time(workload, plan, cluster, compute=compute)
    assert seconds >= lower_bound(workload, cluster, compute=compute).seconds * (1 - 1e-12)
    sizes = {t.name: t.nbytes for t in workload.tensors}
    for message in plan.messages:
        assert all(p.start % 16 == 0 and (p.stop % 16 == 0 or p.stop == sizes[p.tensor]) for p in message.slices)


def test_a_piece_too_short_for_a_byte_is_not_sent():
    # Of a, 20 of 100 bytes could go before b is ready: 16. Of c, 10 of 40 before d: none, and all of c after it.
    ops = (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0, (0,)),
        Op("b0", "backward", 1.0),
        Op("b1", "backward", 2.0, (2,)),
    )
    for nbytes, pieces in ((100, [("late", 0, 16), ("early", 0, 10), ("late", 16, 100)]), (40, None)):
        work = Workload("w", ops, (Tensor("late", nbytes, 2, (1,)), Tensor("early", 10, 3, (0,))))
        cluster = Cluster(2, {"c": LinearCost(0.0, 10 / nbytes)})  # the first takes 10 s, 2 of them before the second
        expected = pieces or [("early", 0, 10), ("late", 0, 40)]
        assert sent(pace(work, cluster)) == [[piece] for piece in expected]


def test_fused_tensors_are_cut_in_their_own_bytes():
    # Two tensors of 24 bytes fused; a third overtakes after 40 of 48 bytes: at 16 of the second one.
    ops = (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0, (0,)),
        Op("b0", "backward", 0.0),
        Op("b1", "backward", 40.0, (2,)),
    )
    tensors = (Tensor("a", 24, 2, (1,)), Tensor("b", 24, 2, (1,)), Tensor("first", 48, 3, (0,)))
    cluster = Cluster(2, {"c": LinearCost(2.0, 46 / 48)})  # a and b alone would take 50 s, fused 48
    plan = pace(Workload("w", ops, tensors), cluster)
    assert sent(plan) == [
        [("a", 0, 24), ("b", 0, 16)],
        [("first", 0, 48)],
        [("b", 16, 24)],
    ]


def test_settings_that_do_not_exist():
    with pytest.raises(InputError, match="unknown compute setting 'two'"):
        pace(FIGURE_1, BY_UNIT, compute="two")
    with pytest.raises(InputError, match="unknown collective 'rings'"):
        pace(FIGURE_1, BY_UNIT, collective="rings")
