"""Clusters: what they refuse, MG-WFBP's Table II by hand, and the fit."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.collectives import COLLECTIVES
from legato.core.cluster import PARAMETER_SERVER, Cluster, Contention, LinearCost
from legato.core.errors import InputError
from legato.core.files import decode, encode
from legato.simulator.pipelining import message_s

FREE = {"c": LinearCost(0.0, 0.0)}


def test_a_linear_cost():
    assert LinearCost(3.0, 0.5).cost(10) == 8.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", ["alpha_s", "beta_s_per_byte"])
def test_a_linear_cost_has_finite_terms(field, bad):
    with pytest.raises(InputError, match=f"{field}: .* \\(expected a finite number, at least 0\\)"):
        LinearCost(**{"alpha_s": 0.0, "beta_s_per_byte": 0.0, field: bad})


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"workers": 0}, "workers: 0"),
        ({"servers": -1}, "servers: -1"),
        ({"collectives": {}}, "collectives: none given"),
        ({"bandwidth_bps": 0.0}, "bandwidth_bps: 0.0"),
        ({"bandwidth_bps": math.inf}, "bandwidth_bps: inf"),
        ({"latency_s": -1e-6}, "latency_s: -1e-06"),
        ({"reduce_s_per_byte": math.nan}, "reduce_s_per_byte: nan"),
        ({"depths": {"d": {2: FREE["c"]}}}, "unknown collective in depths 'd'"),
        ({"depths": {"c": {1: FREE["c"]}}}, "depths: c in 1 chunks \\(expected at least 2\\)"),
    ],
)
def test_what_a_cluster_refuses(fields, error):
    with pytest.raises(InputError, match=error):
        Cluster(**{"workers": 2, "collectives": FREE, **fields})


# n = 8 workers, 30 us a hop, 8 bit/ns (1 ns a byte), 0.25 ns to add a byte, 5 us a send: log2(8) = 3 rounds.
@pytest.mark.parametrize(
    ("collective", "alpha_us", "beta_ns"),
    [
        ("tree", 2 * 30 * 3, (2 * 1 + 0.25) * 3),
        ("recursive-doubling", 30 * 3, (1 + 0.25) * 3),
        ("halving-doubling", 2 * 30 * 3, 2 * 1 - (2 * 1 + 0.25) / 8 + 0.25),
        ("ring", 2 * 7 * 30, 2 * 7 / 8 * 1 + 7 / 8 * 0.25),
        (
            "shuffle",
            2 * (30 + 6 * 5),
            7 / 8 * 1 + 7 / 8 * 0.25 + 7 / 8 * 1,
        ),  # not in the table: all-to-all, sum, all-gather
    ],
)
def test_table_ii_by_hand(collective, alpha_us, beta_ns):
    cluster = Cluster.derive(8, 8e9, 30e-6, reduce_s_per_byte=0.25e-9)
    cost = cluster.cost(collective)
    assert cost.alpha_s == pytest.approx(alpha_us * 1e-6, rel=1e-12)
    assert cost.beta_s_per_byte == pytest.approx(beta_ns * 1e-9, rel=1e-12)


def test_what_a_send_is_assumed_to_cost():
    """5 us, but no more than the latency, of which it is a part; workers that send to all others pay for each."""
    million = 2**20
    assert Cluster.derive(million, 1e10, 30e-6).cost("shuffle").alpha_s == pytest.approx(2 * 5e-6 * million, rel=1e-4)
    assert [Cluster.derive(4, 1e9, s).send_s for s in (0.0, 2e-6, 1.0)] == [0.0, 2e-6, 5e-6]
    alphas = [Cluster.derive(4, 1e9, 1e-5, send_s=s).cost("shuffle").alpha_s for s in (0.0, 1e-5)]
    assert alphas == pytest.approx([2e-5, 6e-5])
    with pytest.raises(InputError, match=r"send_s: 2e-05 \(expected 0 to the latency, 10 us, of which it is a part"):
        Cluster.derive(4, 1e9, 1e-5, send_s=2e-5)
    many = Cluster.derive(10, 1e9, 1e-5, servers=2, collectives=[PARAMETER_SERVER])
    assert many.cost().alpha_s == pytest.approx(2e-5 + 4 * 5e-6)


def test_a_derived_cluster_remembers_what_it_is_from():
    cluster = Cluster.derive(8, 10e9, 30e-6, collectives=["tree", "ring"], servers=2)
    assert (cluster.workers, cluster.servers, cluster.bandwidth_bps, cluster.latency_s) == (8, 2, 10e9, 30e-6)
    assert list(cluster.collectives) == ["tree", "ring"] and cluster.default_collective == "tree"
    assert cluster.cost() == cluster.cost("tree") != cluster.cost("ring")
    assert Cluster.derive(2, 1e9, 0.0).default_collective == "ring"


@given(st.floats(1e3, 1e13), st.floats(0, 1), st.floats(0, 1e-6))
def test_one_worker_communicates_for_free(bandwidth_bps, latency_s, reduce_s_per_byte):
    cluster = Cluster.derive(1, bandwidth_bps, latency_s, reduce_s_per_byte=reduce_s_per_byte)
    assert set(cluster.collectives.values()) == {LinearCost(0.0, 0.0)}


@given(st.integers(1, 4096), st.floats(1e3, 1e13), st.floats(0, 1), st.floats(0, 1e-6))
def test_all_collectives_can_be_derived(workers, bandwidth_bps, latency_s, reduce_s_per_byte):
    cluster = Cluster.derive(workers, bandwidth_bps, latency_s, reduce_s_per_byte=reduce_s_per_byte)
    assert set(cluster.collectives) == set(COLLECTIVES)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 1e9, 1e-6), "workers: 0"),
        ((2.5, 1e9, 1e-6), "workers: 2.5"),
        ((2, 0.0, 1e-6), "bandwidth_bps: 0.0"),
        ((2, math.nan, 1e-6), "bandwidth_bps: nan"),
        ((2, 1e9, -1.0), "expected a finite number, at least 0"),
        ((2, 1e9, math.inf), "expected a finite number, at least 0"),
    ],
)
def test_what_cannot_be_derived(arguments, error):
    with pytest.raises(InputError, match=error):
        Cluster.derive(*arguments)


def test_unknown_collectives_are_told_the_nearest():
    with pytest.raises(InputError, match="unknown collective 'rings'; did you mean 'ring'"):
        Cluster.derive(2, 1e9, 0.0, collectives=["rings"])
    with pytest.raises(InputError, match="unknown collective 'tre'; did you mean 'tree'"):
        Cluster.derive(2, 1e9, 0.0).cost("tre")


@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-7), st.sets(st.integers(0, 10**9), min_size=2, max_size=8))
def test_the_fit_of_a_line_is_the_line(alpha, beta, xs):
    fit = LinearCost.fit((x, alpha + beta * x) for x in xs)
    for x in xs:
        assert fit.cost(x) == pytest.approx(alpha + beta * x, rel=1e-6)


def test_the_fit_by_hand():
    # Least squares of errors divided by y, from the normal equations.
    # sums of 1/y: 5/2, x/y: 2, x^2/y: 3, 1: 3, x: 3  ->  alpha = 6/7, beta = 3/7.
    fit = LinearCost.fit([(0, 1.0), (1, 1.0), (2, 2.0)])
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((6 / 7, 3 / 7))


@given(st.floats(1e-3, 1e-2), st.floats(1e-9, 1e-7), st.floats(0, 1e-4))
def test_a_floor_is_found(floor, beta, alpha):
    """Sizes from far below the floor to far above it; noise of one per cent, alternating."""
    true = LinearCost(alpha, beta, floor)
    sizes = [floor / beta * 4.0**k for k in range(-4, 4)]
    fit = LinearCost.fit((x, true.cost(x) * (1.01 if k % 2 else 0.99)) for k, x in enumerate(sizes))
    assert fit.floor_s > 0
    for x in sizes:
        assert fit.cost(x) == pytest.approx(true.cost(x), rel=0.1)


def test_small_messages_do_not_bend_the_line():
    """As measured on two hosts at 2 Gbit: 2 ms give or take 15%, and from 1 MiB on a line."""
    small = [(1 << 10, 2.05e-3), (1 << 12, 2.03e-3), (1 << 14, 1.57e-3), (1 << 16, 1.70e-3), (1 << 18, 2.27e-3)]
    large = [(1 << k, 0.65e-3 + 4.22e-9 * (1 << k)) for k in range(20, 27)]
    fit = LinearCost.fit(small + large)
    for x, y in large[2:]:
        assert fit.cost(x) == pytest.approx(y, rel=0.015)


def test_a_cost_with_a_floor_by_hand():
    cost = LinearCost(1.0, 2.0, 8.0)
    assert [cost.cost(n) for n in (0, 3, 3.5, 4)] == [8.0, 8.0, 8.0, 9.0]
    assert (cost.startup_s, LinearCost(3.0, 1.0, 2.0).startup_s) == (8.0, 3.0)


def test_no_term_of_the_fit_is_below_zero():
    # Steeper than a line through zero: alpha is 0, beta = sum(x) / sum(x^2/y).
    fit = LinearCost.fit([(1, 1.0), (2, 4.0)])
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((0, (1 + 2) / (1 + 4 / 4)))
    # Falling: beta is 0, alpha = 2 / sum(1/y).
    fit = LinearCost.fit([(1, 4.0), (2, 1.0)])
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((2 / (1 / 4 + 1), 0))


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0.1, 10)), min_size=2, max_size=6), st.data())
def test_no_other_cost_fits_better(samples, data):
    if len({x for x, _ in samples}) < 2:
        return
    fit = LinearCost.fit(samples)

    def error(cost):
        return sum((cost.cost(x) - y) ** 2 / y for x, y in samples)

    other = LinearCost(
        data.draw(st.floats(0, 10) | st.just(fit.alpha_s)), data.draw(st.floats(0, 1) | st.just(fit.beta_s_per_byte))
    )
    assert error(fit) <= error(other) + 1e-9


def test_sizes_that_hardly_differ():
    fit = LinearCost.fit([(1e9, 1.0), (1e9 + 1, 1.0)])
    assert fit.cost(1e9) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        ([], "at least two sizes"),
        ([(5, 1.0), (5, 2.0)], "at least two sizes"),
        ([(1, 1.0), (2, 0.0)], "finite seconds > 0"),
        ([(1, 1.0), (2, math.inf)], "finite seconds > 0"),
        ([(-1, 1.0), (2, 1.0)], "bytes >= 0"),
        ([(math.nan, 1.0), (2, 1.0)], "bytes >= 0"),
    ],
)
def test_what_cannot_be_fitted(samples, error):
    with pytest.raises(InputError, match=error):
        LinearCost.fit(samples)


def test_depths_that_were_measured():
    """The greatest one up to what is asked for; where nothing was measured, the cost of one chunk."""
    costs = [LinearCost(float(k), 1.0) for k in range(4)]
    cluster = Cluster(2, {"own": costs[0], "ring": costs[1]}, depths={"ring": {2: costs[2], 5: costs[3]}})
    assert [cluster.cost("ring", depth).alpha_s for depth in (1, 2, 4, 5, 9)] == [1, 2, 2, 3, 3]
    assert cluster.cost("ring") == cluster.cost("ring", 1)
    assert cluster.cost("own", 7) == costs[0]
    assert sorted(cost.alpha_s for cost in cluster.least_costs()) == [0, 1, 2, 3]


def test_a_cluster_file_from_before_there_were_depths():
    old = b'{"format":"legato.cluster/1","workers":2,"collectives":{"c":{"alpha_s":1.0,"beta_s_per_byte":0.0}}}'
    assert decode(old, Cluster) == Cluster(2, {"c": LinearCost(1.0, 0.0)})
    measured = Cluster(2, FREE, depths={"c": {4: LinearCost(1.0, 0.0)}})
    assert decode(encode(measured), Cluster) == measured


def test_a_cluster_as_text():
    ring = {"ring": LinearCost(1e-3, 1e-9, 2e-3), "tree": LinearCost(5e-4, 0.0)}
    measured = Cluster(2, ring, depths={"ring": {4: LinearCost(2e-3, 0.0)}})
    assert str(measured).split("\n") == [
        "2 workers",
        "  collective     cost of a message",
        "  ring           1 ms + 1.05 ms per MiB, at least 2 ms",
        "  tree           500 us + 0 s per MiB",
        "  ring, depth 4  2 ms + 0 s per MiB",
    ]
    assert str(Cluster.derive(1, 1e9, 5e-5, servers=2)).startswith(
        "1 worker, 2 servers, 1 Gbit/s per link, latency 50 us, 5 us a send\n"
    )


def test_a_cluster_for_messages_in_a_wire_format():
    """Every message costs what half of its bytes do, in chunks as well; packing costs the same."""
    cluster = Cluster.derive(6, 1e9, 5e-5, reduce_s_per_byte=1e-9)
    measured = Cluster(
        2,
        {"c": LinearCost(2.0, 1.0, 4.0)},
        depths={"c": {4: LinearCost(8.0, 0.5)}},
        unpack_s_per_byte=0.25,
        contention=Contention(LinearCost(1.0, 0.5), LinearCost(0.25, 0.125), 0.5),
    )
    for given_cluster in (cluster, measured):
        light = given_cluster.in_wire_format()
        for name in given_cluster.collectives:
            for depth in (1, 4):
                for nbytes in (0, 4, 1000, 10**9):
                    assert message_s(light, name, depth, nbytes) == message_s(given_cluster, name, depth, nbytes / 2)
        assert light.unpack_s_per_byte == given_cluster.unpack_s_per_byte
        for cost, halved in zip(given_cluster.least_costs(), light.least_costs(), strict=True):
            assert halved.cost(1000) == pytest.approx(cost.cost(500), rel=1e-12)
    assert light.contention == Contention(LinearCost(1.0, 0.25), LinearCost(0.25, 0.0625), 0.5)


def test_a_cluster_on_which_messages_and_computation_contend():
    contention = Contention(LinearCost(1.0, 0.5), LinearCost(0.25, 0.125), 0.5)
    cluster = Cluster(2, {"c": LinearCost(2.0, 1.0), "f": LinearCost(0.0, 1.0, 4.0)}, contention=contention)
    assert decode(encode(cluster), Cluster, "c.json") == cluster
    beside = cluster.while_computing()
    assert beside.contention is None and beside.cost("c") == LinearCost(3.0, 1.5)
    assert beside.cost("f") == LinearCost(1.0, 1.5, 5.0)
    assert "during computation: a message takes 1 s + " in str(cluster)
    assert Cluster(2, FREE).while_computing() == Cluster(2, FREE)
    with pytest.raises(InputError, match="pack_s_per_byte: -1"):
        Contention(FREE["c"], FREE["c"], -1.0)


#: 16 H100 on two hosts, with NCCL: another algorithm from 32 MiB on.
MEASURED = {
    8: 123.8, 64: 122.9, 2**10: 122.8, 2**14: 137.6, 2**17: 169.0, 2**19: 171.0, 2**20: 207.2, 2**22: 356.6,
    2**23: 563.5, 2**24: 951.7, 2**25: 1047.5, 2**26: 1274.0, 2**28: 2361.2, 2**30: 6736.4, 2**33: 47714.0,
}  # fmt: skip


def test_a_cost_that_no_line_is_close_to_follows_the_sizes():
    samples = [(n, us * 1e-6) for n, us in MEASURED.items()]
    line, cost = LinearCost.fit(samples), LinearCost.following(samples)
    assert min(line.cost(n) / s - 1 for n, s in samples) < -0.6
    for n, s in samples:
        assert cost.cost(n) == pytest.approx(s, rel=0.01)
    assert cost.line.cost(2**24) == pytest.approx(line.cost(2**24), rel=0.05) and cost.line.off == pytest.approx(
        0.78, 0.1
    )
    assert cost.off == 0 and cost.points[0] == (8, pytest.approx(123.17e-6, rel=1e-4))
    assert cost.cost(3 * 2**23) == pytest.approx((951.7e-6 + 1047.5e-6) / 2)
    assert cost.startup_s == cost.cost(1) == cost.points[0][1]
    assert cost.cost(2**34) == pytest.approx(47714e-6 + (47714e-6 - 6736.4e-6) * 2**33 / (2**33 - 2**30))
    assert str(cost) == "123 us to 47.7 ms for 8 B to 8 GiB, between 14 measured sizes"
    assert msgspec.json.decode(msgspec.json.encode(cost), type=LinearCost) == cost
    half, wire = cost.times(0.5), Cluster(16, {"nccl": cost}).in_wire_format().cost()
    assert half.cost(10**6) == cost.cost(10**6) / 2 and wire.cost(2 * 10**6) == pytest.approx(cost.cost(10**6))
    slower = Cluster(16, {"nccl": cost}, contention=Contention(LinearCost(1e-3, 1e-9), LinearCost(0, 0)))
    assert slower.while_computing().cost().cost(10**6) == pytest.approx(cost.cost(10**6) + 2e-3)


def test_a_line_that_is_close_stays_one():
    samples = [(2**k, (1.05 if k % 2 else 0.95) * (1e-4 + 1e-9 * 2**k)) for k in range(10, 28)]
    assert LinearCost.following(samples) == LinearCost.fit(samples)


def test_a_cost_that_is_off_says_so():
    """Larger messages that take less time get the mean of their neighbours."""
    cost = LinearCost.following([(1, 1.0), (2, 4.0), (3, 2.0), (4, 8.0)])
    assert cost.points == ((1, 1.0), (2, 3.0), (3, 3.0), (4, 8.0))
    assert cost.off == pytest.approx(0.5) and str(cost).endswith("off by up to 50% at measured sizes")


@given(st.dictionaries(st.integers(1, 10**6), st.floats(1e-6, 1e3), min_size=2, max_size=300))
def test_larger_messages_never_take_less_and_the_line_is_below(times):
    cost = LinearCost.following(times.items())
    sizes = [0, *sorted(times), 2 * max(times), 10**9]
    seconds = [cost.cost(n) for n in sizes]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(seconds)) and len(cost.points) <= 256
    for n, s in zip(sizes, seconds, strict=True):
        assert not cost.points or cost.alpha_s + cost.beta_s_per_byte * n <= s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("points", "line", "says"),
    [
        (((1, 1.0),), (0, 0), "expected 2 to 256"),
        (((1, 1.0), (2, math.inf)), (0, 0), "not finite"),
        (((2, 1.0), (1, 2.0)), (0, 0), "not in order"),
        (((1, 2.0), (2, 1.0)), (0, 0), "not in order"),
        (((1, 1.0), (2, 1.0)), (0, 0), "not in order"),
        (((1, 1.0), (2, 2.0)), (1.0, 0.5), "below the line"),
        (((1, 1.0), (2, 2.0)), (0, 1.1), "below the line"),
    ],
)
def test_points_that_are_no_cost(points, line, says):
    with pytest.raises(InputError, match=f"points: .*{says}"):
        LinearCost(*line, points=points)
