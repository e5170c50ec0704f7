"""Schedules of few messages, each with the order of computation that it needs."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE_S
from support.strategies import clusters, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.annealing import _Problem, annealing
from legato.schedule.search.annealing_kernel import Halves, anneal, iteration_s
from legato.schedule.search.budget import Budget
from legato.simulator.collective import iteration_time


def problem_of(workload, cluster):
    return _Problem(workload, cluster, cluster.default_collective)


def slowly(problem, place, first):
    """Seconds of an iteration, said as plainly as can be: what `iteration_s` must return."""
    instance = problem.instance

    def needs(op):
        waits = instance.waits[instance.waits_from[op] : instance.waits_from[op + 1]]
        return {op}.union(*map(needs, waits))

    computed, now, late = set(), 0.0, instance.compute_s
    for k, collects in enumerate(first):
        members = np.flatnonzero(place[0 if collects else 1] == k)
        if collects:
            computed = computed.union(*(needs(op) for op in instance.op[members]))
            now = max(now, sum(instance.duration_s[op] for op in computed))
        elif (place[0, members] > k).any():
            return np.inf
        nbytes = sum(instance.nbytes[members])
        now += problem.cluster.cost(problem.collective).cost(nbytes) / 2
        if not collects:
            late = max(late, now + max(instance.tail_s[members]))
    return late


def checked(problem, halves):
    """What a schedule takes, its sequence of halves being one."""
    count = halves.number[0]
    place, first = halves.place, halves.first[:count]
    assert set(place[0]) == set(np.flatnonzero(first)) and set(place[1]) == set(np.flatnonzero(~first))
    assert (place[0] < place[1]).all()
    seconds = iteration_s(problem.instance, halves)
    assert seconds == slowly(problem, place, first)
    return seconds


@examples(40)
@given(workloads(), clusters(), st.integers(0, 2**32))
def test_every_change_leaves_a_schedule_that_takes_what_it_says(workload, cluster, seed):
    problem, rng = problem_of(workload, cluster), np.random.default_rng(seed)
    for start in list(problem.starts())[::5]:
        least = checked(problem, start)
        best = Halves(*(array.copy() for array in start))
        for _ in range(20):
            anneal(problem.instance, start, best, np.array([1e9]), rng)  # hot enough to accept anything
            least = min(least, checked(problem, start))
        assert checked(problem, best) == least


@examples(40)
@given(workloads(), clusters(), st.integers(0, 2**32))
def test_its_plan_takes_as_long_and_no_less_than_the_bound(workload, cluster, seed):
    problem, rng = problem_of(workload, cluster), np.random.default_rng(seed)
    for start in list(problem.starts())[::3]:
        anneal(problem.instance, start, start, np.array([1e9] * 10), rng)
        seconds, plan = checked(problem, start), problem.plan(start)
        check_plan(plan, workload)
        assert iteration_time(workload, plan, cluster) == seconds
        assert seconds >= lower_bound(workload, cluster, order="any").seconds * (1 - 1e-9)


def test_out_of_order_halves_take_for_ever():
    ops = (Op("b", "backward", 1.0),)
    problem = problem_of(Workload("w", ops, (Tensor("t", 1, 0),)), Cluster(2, {"c": LinearCost(1.0, 1.0)}))
    halves = Halves(np.array([[1], [0]]), np.array([False, True]), np.array([2]))
    assert iteration_s(problem.instance, halves) == np.inf


def in_order(things):
    """All sequences of sets that hold each thing once, as the place of each."""
    for count in range(1, len(things) + 1):
        for place in np.ndindex(*[count] * len(things)):
            if len(set(place)) == count:
                yield count, np.array(place)


def best_of_all(problem):
    """The least seconds over all ways to send gradients in halves."""
    sequences = list(in_order(problem.updates))
    least = np.inf
    for (firsts, collects), (seconds, hands_out) in ((a, b) for a in sequences for b in sequences):
        for places in combinations(range(firsts + seconds), firsts):
            first = np.isin(np.arange(firsts + seconds), places)
            place = np.array([np.flatnonzero(first)[collects], np.flatnonzero(~first)[hands_out]])
            least = min(least, iteration_s(problem.instance, Halves(place, first, np.array([len(first)]))))
    return least


@examples(25, derandomize=True)
@given(workloads(max_ops=4, max_tensors=3), clusters())
def test_annealing_finds_the_best_of_all_ways_to_send_three_gradients(workload, cluster):
    name = cluster.default_collective
    plan = annealing(workload, cluster, name, rounds=3000, budget=Budget(), seed=0)
    assert iteration_time(workload, plan, cluster) == best_of_all(problem_of(workload, cluster))


def test_halves_share_a_message():
    """Each of 4 s, alpha 2: one all-reduce waits for both; two pay twice; the halves can share their second message."""
    ops = (Op("f", "forward", 0.0), Op("b0", "backward", 0.0), Op("b1", "backward", 4.0, (1,)))
    workload = Workload("w", ops, (Tensor("x", 4, 1), Tensor("y", 1, 2)))
    cluster = Cluster(2, {"c": LinearCost(4.0, 1.0)})
    plan = annealing(workload, cluster, "c", rounds=200, budget=Budget(), seed=0)
    assert iteration_time(workload, plan, cluster) == pytest.approx(11)


@given(workloads(), clusters(), st.integers(0, 5))
@examples(10)
def test_the_same_seed_gives_the_same_plan_and_no_budget_gives_one(workload, cluster, seed):
    name = cluster.default_collective
    one, other = (annealing(workload, cluster, name, rounds=300, budget=Budget(), seed=seed) for _ in range(2))
    assert one == other
    check_plan(annealing(workload, cluster, name, rounds=300, budget=Budget(0.0), seed=seed), workload)


def test_plans_to_be_run_compile_nothing():
    code = (
        "import sys; from legato.schedule import schedule; from legato.core.cluster import Cluster, LinearCost\n"
        "from legato.core.workload import Op, Tensor, Workload\n"
        "workload = Workload('w', (Op('b', 'backward', 1.0),), (Tensor('t', 1, 0),))\n"
        "schedule('legato', workload, Cluster(2, {'c': LinearCost(1.0, 1.0)}))\n"
        "assert 'legato.schedule.search.annealing_kernel' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
