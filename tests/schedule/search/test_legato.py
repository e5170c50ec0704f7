"""Our own scheduler: exact steps, never worse than any other, never better than the bound."""

import itertools
import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, examples, seeds, workloads

import legato
from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.layout import scattered_tensors
from legato.core.plan import check_messages, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.anneal import anneal
from legato.schedule.search.budget import Budget
from legato.schedule.search.collectives import CheapestCollective
from legato.schedule.search.fill import Instance, fill
from legato.schedule.search.in_halves.halves import halves
from legato.schedule.search.op_orders import times_in_order
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.simulator.collective import iteration_time

PIECES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8)


class State(NamedTuple):
    seconds: float
    place: int


@given(st.lists(st.floats(0, 10), min_size=2, max_size=9), st.floats(0, 1), st.integers(0, 99))
def test_annealing_returns_the_best_state_that_it_has_seen(values, heat, seed):
    rng, seen = random.Random(seed), [State(values[0], 0)]

    def change(state):
        if rng.random() < 0.2:
            return None
        place = rng.randrange(len(values))
        seen.append(State(values[place], place))
        return seen[-1]

    found = anneal(seen[0], change, changes=30, heat=heat, rng=rng, done=lambda best: best.seconds < 0.1)
    assert found.seconds == min(seen).seconds
    assert all(state.seconds >= 0.1 for state in seen[:-1])  # it ends when the best one is good enough


def random_sizes(units, rng):
    sizes, left = [], sum(units)
    while left:
        sizes.append(rng.randint(1, left))
        left -= sizes[-1]
    return sizes


@given(PIECES, st.integers(0, 6), st.randoms(use_true_random=False))
def test_refilling_is_exact_for_its_sizes(pieces, alpha, rng):
    """Against dealing the units out at random: nothing that keeps sizes is less late."""
    ready, tail, units = map(list, zip(*pieces, strict=True))
    nbytes, sizes = [ALIGNMENT * n for n in units], random_sizes(units, rng)
    cost = lambda n: alpha + n / ALIGNMENT  # noqa: E731
    found = fill([ALIGNMENT * n for n in sizes], ready, tail, nbytes, cost)
    assert [sum(p.nbytes for p in m) for m in found.messages] == [ALIGNMENT * n for n in sizes]
    for _ in range(20):
        unsent = [t for t, n in enumerate(units) for _ in range(n)]
        now = late = sent = 0
        for size in sizes:
            sent += size
            start = max(now, sorted(ready[t] for t in (t for t, n in enumerate(units) for _ in range(n)))[sent - 1])
            possible = [t for t in unsent if ready[t] <= start]
            dealt = rng.sample(possible, size)
            for t in dealt:
                unsent.remove(t)
            now = start + alpha + size
            late = max(late, now + max(tail[t] for t in dealt))
        assert found.seconds <= late + 1e-9


@given(PIECES, st.integers(0, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_refilling_in_one_piece(pieces, alpha, units_whole, rng):
    """Everything is sent once and lies together, what is small is not cut, and the lateness is what is said."""
    ready, tail, units = map(list, zip(*pieces, strict=True))
    nbytes, sizes = [ALIGNMENT * n for n in units], random_sizes(units, rng)
    cost = lambda n: alpha + n / ALIGNMENT  # noqa: E731
    whole_below = ALIGNMENT * units_whole
    found = fill([ALIGNMENT * n for n in sizes], ready, tail, nbytes, cost, whole_below=whole_below)
    names = {str(t): n for t, n in enumerate(nbytes)}
    messages = [
        legato.Message(tuple(legato.Slice(str(p.tensor), p.start, p.start + p.nbytes) for p in m))
        for m in found.messages
    ]
    check_messages(legato.Plan("x", tuple(messages)), names)
    assert scattered_tensors(messages, names, 2) == []
    assert all(p.nbytes == nbytes[p.tensor] for m in found.messages for p in m if nbytes[p.tensor] < whole_below)
    now = late = 0
    for message in found.messages:
        now = max(now, *(ready[p.tensor] for p in message)) + cost(sum(p.nbytes for p in message))
        late = max(late, now + max(tail[p.tensor] for p in message))
    assert found.seconds >= late - 1e-9


@examples(60)
@given(
    workloads() | workloads(compiled=True),
    clusters(contended=True),
    st.sampled_from([0.0, 0.0, 0.125]),
)
def test_never_slower_than_any_other_and_never_below_the_bound(workload, cluster, unpack_s_per_byte):
    """Than any other that can be run as predicted; and it can be run as predicted itself."""
    cluster = replace(cluster, unpack_s_per_byte=unpack_s_per_byte)
    plan = schedule("legato", workload, cluster, rounds=20)
    assert is_runnable(plan, workload)
    check_plan(plan, workload)
    ours = iteration_time(workload, plan, cluster)
    assert ours >= lower_bound(workload, cluster, order="any").seconds * (1 - 1e-9)
    for name in set(SCHEDULERS) - {"legato"}:
        other = schedule(name, workload, cluster)
        if is_runnable(other, workload):
            assert ours <= iteration_time(workload, other, cluster) * (1 + 1e-12), name
    assert plan.scheduler == "legato" and plan.workload_id == legato.identity(workload)


@given(workloads(), st.randoms(use_true_random=False))
def test_a_busy_order_is_an_order_and_never_slower(workload, rng):
    arrival = [rng.uniform(0, 3) for _ in workload.tensors]
    order, _ = WorkConserving(workload)(arrival)
    plan = legato.Plan("x", (legato.Message(tuple(legato.Slice(t.name, 0, t.nbytes) for t in workload.tensors)),), True)
    check_plan(replace(plan, op_order=order), workload)


@given(workloads(), st.randoms(use_true_random=False))
def test_the_stream_is_idle_only_if_nothing_can_run(workload, rng):
    """At every moment, the next forward op goes before the update that is needed first among those that can run."""
    arrival, ops = [rng.choice((0.0, rng.uniform(0, 3))) for _ in workload.tensors], workload.ops
    order = [op for op in workload.iteration_order() if ops[op].phase == "backward"]
    updates = [op for op in workload.iteration_order() if ops[op].phase == "optimizer"]
    forward = [op for op in workload.iteration_order() if ops[op].phase == "forward"]
    reads = {op: [t for t, tensor in enumerate(workload.tensors) if op in tensor.readers] for op in updates + forward}

    def from_s(op):
        """When an op can run, once the updates that it waits for have run."""
        needed = {dep for dep in ops[op].deps if dep in updates}
        if op in forward:
            needed |= {update for update in updates if set(reads[update]) & set(reads[op])}
        return max((arrival[t] for t in reads[op]), default=0.0) if needed <= set(order) else math.inf

    now = sum(ops[op].duration_s for op in order)
    while left := [op for op in (*forward[:1], *updates) if op not in order]:
        chosen = next((op for op in left if from_s(op) <= now), None)
        if chosen is None:
            now = min(map(from_s, left))
            continue
        order.append(chosen)
        forward = forward[1:] if chosen in forward else forward
        now += ops[chosen].duration_s
    assert WorkConserving(workload)(arrival) == (tuple(order), now)


@given(workloads(), clusters(max_collectives=1), st.integers(1, 6), st.integers(0, 6))
def test_messages_are_valued_by_the_iteration_with_their_updates_arranged(workload, cluster, count, first_come):
    captured = workload.iteration_order()
    ready, tails = times_in_order(workload, captured)
    name = cluster.default_collective
    collectives = CheapestCollective(((name, 1),), (cluster.cost(name),))
    instance = Instance(ready, tails, [t.nbytes for t in workload.tensors], collectives, 0.0, Budget())
    total = workload.nbytes
    sizes = [total * (k + 1) // count - total * k // count for k in range(count)]
    filled = instance.fill([size for size in sizes if size], first_come)
    order, seconds = WorkConserving(workload)(instance.arrival_s(filled))
    messages = tuple(
        legato.Message(
            tuple(legato.Slice(workload.tensors[p.tensor].name, p.start, p.start + p.nbytes) for p in pieces),
            collective=name,
        )
        for pieces in filled.messages
    )
    plan = legato.Plan("x", messages, True, op_order=order)
    assert iteration_time(workload, plan, cluster) == pytest.approx(max(seconds, max(instance.arrival_s(filled))))


@given(workloads(), clusters())
@examples(10)
def test_without_a_budget_there_is_a_plan_all_the_same(workload, cluster):
    check_plan(schedule("legato", workload, cluster, work=0.0, gap=0.0), workload)


def test_a_budget_ends_a_search_by_work_and_by_time():
    budget = Budget(2.0)
    part = budget.part(0.5)
    part.spend(1.0)
    assert part.spent and not budget.spent
    budget.spend(1.0)
    assert budget.spent and not budget.cut
    late = Budget(1.0, limit_s=0.0)
    assert late.part(0.5).spent and late.cut and late.spent


def test_a_search_that_is_cut_says_so(caplog):
    ops = [Op(f"f{i}", "forward", 0.01) for i in range(12)] + [Op(f"b{i}", "backward", 0.02) for i in range(12)]
    tensors = tuple(Tensor(f"t{i}", 4096 * (7 * i % 12 + 1) ** 3, 12 + i, (11 - i,)) for i in range(12))
    workload, cluster = Workload("w", tuple(ops), tensors), Cluster.derive(8, 1e9, 1e-3)
    schedule("legato", workload, cluster, gap=0.0)
    assert not caplog.records
    schedule("legato", workload, cluster, gap=0.0, limit_s=0.0)
    assert "ended after 0 s" in caplog.text


@given(workloads(max_tensors=4, optimizer=False), clusters(max_collectives=1))
def test_halves_are_the_best_of_all_plans_that_scatter_first(workload, cluster):
    """Against every way to merge neighbours at either end."""
    times = heads_tails(workload, "one", "captured")
    name, cost = cluster.default_collective, cluster.cost()
    plan = halves(workload, cluster, times.release_s, times.tail_s, name)
    check_plan(plan, workload)
    ends = []
    for near in (times.release_s, times.tail_s):
        order = sorted(range(len(near)), key=near.__getitem__)
        n, finishes = len(order), []
        for k in range(n):
            for cuts in itertools.combinations(range(1, n), k):
                now = 0.0
                for start, stop in itertools.pairwise((0, *cuts, n)):
                    group_bytes = sum(workload.tensors[t].nbytes for t in order[start:stop])
                    now = max(now, near[order[stop - 1]]) + cost.cost(group_bytes) / 2
                finishes.append(now)
        ends.append(min(finishes))
    assert iteration_time(workload, plan, cluster) == pytest.approx(max(sum(ends), workload.compute_s))


def test_a_message_takes_the_depth_that_is_cheapest_for_it():
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 1.0))
    workload = Workload("one", ops, (Tensor("w", 2**20, 1, (0,)),))
    measured = Cluster(4, {"ring": legato.LinearCost(0.1, 1e-6)}, depths={"ring": {4: legato.LinearCost(0.2, 5e-7)}})
    derived = Cluster.derive(4, 1e9, 1e-5, reduce_s_per_byte=4e-9, collectives=["ring"])
    for cluster in (measured, derived):
        plan = schedule("legato", workload, cluster)
        assert {message.depth for message in plan.messages} != {1}
        whole = replace(plan, messages=tuple(replace(message, depth=1) for message in plan.messages))
        assert iteration_time(workload, plan, cluster) < iteration_time(workload, whole, cluster)


def test_the_same_seed_gives_the_same_plan():
    ops = [Op(f"f{i}", "forward", 0.01, (i - 1,) if i else ()) for i in range(6)]
    ops += [Op(f"b{i}", "backward", 0.02, (5 + i,)) for i in range(6)]
    tensors = tuple(Tensor(f"t{i}", 4096 * (7 * i % 6 + 1) ** 3, 6 + i, (5 - i,)) for i in range(6))
    workload, cluster = Workload("chain", tuple(ops), tensors), Cluster.derive(8, 1e9, 1e-3)
    plans = [schedule("legato", workload, cluster, gap=0.0, seed=5) for _ in range(2)]
    assert plans[0] == plans[1]


def test_updates_run_while_the_forward_pass_waits():
    """Two tensors; the first layer's comes last. The other's update fits into the wait for it."""
    ops = (
        Op("f0", "forward", 1.0), Op("f1", "forward", 1.0, (0,)),
        Op("b1", "backward", 1.0, (1,)), Op("b0", "backward", 1.0, (2,)),
        Op("u1", "optimizer", 2.0), Op("u0", "optimizer", 0.0),
    )  # fmt: skip
    workload = Workload("two", ops, (Tensor("w1", 16, 2, (1, 4)), Tensor("w0", 16 * 3, 3, (0, 5))))
    cluster = Cluster(2, {"c": legato.LinearCost(0.0, 1 / 16)})
    plan = schedule("legato", workload, cluster)
    # w1 travels from 1 to 2, w0 from 2 to 5; u1 runs from 2 to 4, u0 at 5, the forward pass until 7.
    assert iteration_time(workload, plan, cluster) == pytest.approx(7.0)


def test_a_plan_for_contention_is_no_slower_than_those_of_other_schedulers():
    """Packing delays some gradients, which changes PACE's order; without that it is faster here."""
    ops = (Op("f0", "forward", 0.0), Op("f1", "forward", 4.0), Op("b0", "backward", 0.0), Op("b1", "backward", 0.0))
    tensors = Tensor("t0", 5, 2, (0,)), Tensor("t1", 4, 2), Tensor("t2", 6, 2)
    workload = Workload("packed", (*ops, Op("u", "optimizer", 2.125)), tensors)
    contention = Contention(LinearCost(0.0, 0.75), LinearCost(0.5, 0.5))
    cluster = Cluster(1, {"c": LinearCost(0.0, 1.0)}, contention=contention)
    times = {name: iteration_time(workload, schedule(name, workload, cluster), cluster) for name in SCHEDULERS}
    assert times["legato"] == min(times.values()) and min(times.values()) < times["fifo"]


@pytest.mark.parametrize("seed", seeds(6))
def test_a_small_tensor_goes_before_a_long_one_is_ready(seed):
    """Three tensors; two are ready at 1, and only the one that is needed last travels until the long one is ready."""
    ops = (
        Op("f0", "forward", 3.0), Op("f1", "forward", 1.0, (0,)),
        Op("b1", "backward", 1.0, (1,)), Op("b0", "backward", 2.0, (2,)),
        Op("uc", "optimizer", 2.0), Op("us", "optimizer", 1.0), Op("ua", "optimizer", 1.0),
    )  # fmt: skip
    tensors = Tensor("c", 48, 2, (1, 4)), Tensor("s", 16, 2, (1, 5)), Tensor("a", 128, 3, (0, 6))
    workload, cluster = Workload("three", ops, tensors), Cluster(2, {"c": LinearCost(1.0, 1 / 16)})
    plan = schedule("legato", workload, cluster, seed=seed)
    # s travels from 1 to 3, a to 12, c to 16. us runs at 3, ua at 12, f0 from 13 to 16, uc until 18, f1 until 19.
    assert iteration_time(workload, plan, cluster) == pytest.approx(19.0)


def chain_with_updates(seed, layers):
    """A chain of layers of random times and sizes, whose updates take 30% of the time of both passes."""
    rng, numbers = random.Random(seed), range(layers)
    times = [rng.lognormvariate(0, 1) for _ in numbers]
    sizes = [16 * int(1 + 100 * rng.lognormvariate(0, 2)) for _ in numbers]
    ops = [Op(f"f{i}", "forward", times[i], (i - 1,) if i else ()) for i in numbers]
    ops += [Op(f"b{i}", "backward", 2 * times[i], (2 * layers - 2 - i,)) for i in reversed(numbers)]
    ops += [Op(f"u{i}", "optimizer", 0.9 * sum(times) * sizes[i] / sum(sizes)) for i in numbers]
    tensors = (Tensor(f"t{i}", sizes[i], 2 * layers - 1 - i, (i, 2 * layers + i)) for i in reversed(numbers))
    return Workload("chain", tuple(ops), tuple(tensors))


@pytest.mark.parametrize("work", [0.0, 1e-3, math.inf])
def test_any_work_gives_a_plan(work):
    workload = chain_with_updates(24, 8)
    cluster = Cluster(2, {"c": LinearCost(0.05, workload.compute_s / workload.nbytes)})
    plan = schedule("legato", workload, cluster, rounds=20, work=work, limit_s=math.inf)
    check_plan(plan, workload)
    assert iteration_time(workload, plan, cluster) <= iteration_time(
        workload, schedule("pace", workload, cluster), cluster
    )
