"""Collectives in chunks: one chunk is Table II, many are a pipeline, and the closed form is what the pipeline does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.collectives import COLLECTIVES, DIVIDED
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.simulator.pipelining import message_s, pipelined_s, second_half_s


def test_more_chunks_than_a_plan_can_have_are_refused():
    with pytest.raises(InputError, match=r"8 workers, depth 2147483648 .* and 1,000,000 chunks"):
        seconds("halving-doubling", 8, 2**40, 2**31, 0.0, 1e-9, 1e-10)


workers = st.integers(1, 40)
powers = st.integers(1, 6).map(lambda k: 2**k)
rates = st.floats(1e-11, 1e-8)
latencies = st.floats(0, 1e-3)
sizes = st.integers(1, 2**30)


def seconds(collective, n, nbytes, depth, latency_s, byte, reduce):
    return pipelined_s(
        collective, n, nbytes, depth, bandwidth_bps=8 / byte, latency_s=latency_s, reduce_s_per_byte=reduce
    )


def rounds_of(collective, n, chunk):
    """Bytes of a chunk in each reducing round, from the definitions of the collectives."""
    if collective == "shuffle":
        return [chunk * (n - 1) / n] if n > 1 else []
    if collective == "ring":
        return [chunk / n] * (n - 1)
    return [chunk / 2**k for k in range(1, n.bit_length())]


def played(collective, n, nbytes, depth, latency_s, byte, reduce):
    """Every transfer and every sum as an event of its own: link and adder take theirs in a fixed order."""
    moved = rounds_of(collective, n, nbytes / depth)
    done = {}
    link, adder, jobs = None, None, []
    for r, b in enumerate(moved):
        for c in range(depth):
            jobs.append((("send", r, c), latency_s + byte * b, [link, ("add", r - 1, c)]))
            link = jobs[-1][0]
            jobs.append((("add", r, c), reduce * b, [adder, link]))
            adder = jobs[-1][0]
    for c in range(depth):
        before = ("add", len(moved) - 1, c)
        for r, b in reversed(list(enumerate(moved))):
            jobs.append((("hand out", r, c), latency_s + byte * b, [link, before]))
            link = before = jobs[-1][0]
    for name, duration, needs in jobs:
        done[name] = max((done.get(job, 0.0) for job in needs), default=0.0) + duration
    return max(done.values(), default=0.0)


@pytest.mark.parametrize("collective", DIVIDED)
@given(n=workers, nbytes=sizes, latency_s=latencies, byte=rates, reduce=st.just(0.0) | rates)
def test_one_chunk_is_the_linear_cost(collective, n, nbytes, latency_s, byte, reduce):
    cluster = Cluster.derive(n, 8 / byte, latency_s, send_s=0.0, reduce_s_per_byte=reduce)
    assert seconds(collective, n, nbytes, 1, latency_s, byte, reduce) == pytest.approx(
        cluster.cost(collective).cost(nbytes), rel=1e-9
    )


@pytest.mark.parametrize("collective", DIVIDED)
@given(n=powers, nbytes=sizes, depth=st.integers(1, 9), latency_s=latencies, byte=rates, reduce=st.just(0.0) | rates)
def test_many_chunks_are_a_pipeline(collective, n, nbytes, depth, latency_s, byte, reduce):
    args = (collective, n, nbytes, depth, latency_s, byte, reduce)
    assert seconds(*args) == pytest.approx(played(*args), rel=1e-9)


@given(n=workers, nbytes=sizes, depth=st.integers(1, 9), latency_s=latencies, byte=rates, reduce=rates)
def test_a_ring_of_any_size_is_a_pipeline(n, nbytes, depth, latency_s, byte, reduce):
    args = ("ring", n, nbytes, depth, latency_s, byte, reduce)
    assert seconds(*args) == pytest.approx(played(*args), rel=1e-9)


@pytest.mark.parametrize("collective", DIVIDED)
@given(n=st.integers(2, 40), nbytes=sizes, depth=st.integers(2, 9), latency_s=latencies, byte=rates, reduce=rates)
def test_no_depth_beats_the_link_or_the_adder(collective, n, nbytes, depth, latency_s, byte, reduce):
    cost = Cluster.derive(n, 8 / byte, latency_s, send_s=0.0).cost(collective)
    link = depth * cost.alpha_s + cost.beta_s_per_byte * nbytes
    adder = reduce * nbytes * (n - 1) / n
    assert seconds(collective, n, nbytes, depth, latency_s, byte, reduce) >= max(link, adder) * (1 - 1e-9)


def test_a_shuffle_by_hand():
    # 4 workers, 8 bytes: 6 bytes a round at 1 s a byte and 1 s latency; adding them up takes 2 s a byte.
    assert seconds("shuffle", 4, 8, 1, 1.0, 1.0, 2.0) == 7 + 12 + 7
    # Two chunks of 3 bytes: sent by 4 and 8, added up from 4 to 10 and to 16, handed out by 14 and 20.
    assert seconds("shuffle", 4, 8, 2, 1.0, 1.0, 2.0) == 20
    # Free sums: the second chunk only costs its latencies.
    assert seconds("shuffle", 4, 8, 2, 1.0, 1.0, 0.0) == 7 + 7 + 2


def test_each_chunk_of_a_shuffle_pays_for_its_sends():
    # As above, with sends of half a second: the second and the third begin so much later, in each round.
    given = {"bandwidth_bps": 8.0, "latency_s": 1.0, "reduce_s_per_byte": 0.0, "send_s": 0.5}
    assert [pipelined_s("shuffle", 4, 8, depth, **given) for depth in (1, 2)] == [8 + 8, 4 * (4 / 2 + 3)]


def test_the_second_half_adds_nothing_up():
    """Of 6 bytes, sent in 1 + 6 s and added up in 12 s: the first half takes 19 s, and the second 7 s."""
    cluster = Cluster.derive(4, 8.0, 1.0, send_s=0.0, reduce_s_per_byte=2.0, collectives=["shuffle"])
    assert (message_s(cluster, None, 1, 8), second_half_s(cluster, None, 1, 8)) == (26, 7)
    assert second_half_s(cluster, None, 2, 8) == 8
    measured = Cluster(4, {"ring": LinearCost(2.0, 1.0, 4.0)}, reduce_s_per_byte=2.0)
    assert [second_half_s(measured, None, 1, nbytes) for nbytes in (1, 10)] == [2, 6]


def test_a_ring_by_hand():
    # 3 workers, 6 bytes, two chunks: 1 byte a round each, 2 s to send (1 s latency), 3 s to add up. The adder is the
    # narrowest: it runs from 2 to 14 (two rounds of two chunks). The first chunk's sum is there at 11, the second's at
    # 14; handing a chunk out takes two rounds of 2 s: 11 to 15, 15 to 19.
    assert seconds("ring", 3, 6, 2, 1.0, 1.0, 3.0) == 19


@pytest.mark.parametrize(
    ("collective", "n", "depth", "error"),
    [
        ("rings", 2, 1, "unknown pipelined collective 'rings'; did you mean 'ring'"),
        ("tree", 2, 1, "unknown pipelined collective 'tree'"),
        ("ring", 0, 1, "0 workers, depth 1"),
        ("ring", 2, 0, "2 workers, depth 0"),
    ],
)
def test_what_has_no_price(collective, n, depth, error):
    with pytest.raises(InputError, match=error):
        seconds(collective, n, 8, depth, 1.0, 1.0, 1.0)


@given(
    collective=st.sampled_from(sorted(COLLECTIVES)), n=workers, nbytes=sizes, depth=st.integers(1, 9),
    latency_s=latencies, byte=rates, reduce=st.just(0.0) | rates,
)  # fmt: skip
def test_no_message_is_below_the_least_cost(collective, n, nbytes, depth, latency_s, byte, reduce):
    cluster = Cluster.derive(n, 8 / byte, latency_s, reduce_s_per_byte=reduce, collectives=[collective])
    least = min(cost.cost(nbytes) for cost in cluster.least_costs())
    assert message_s(cluster, collective, depth, nbytes) >= least * (1 - 1e-9)


def test_what_was_measured_goes_before_what_can_be_derived():
    cluster = Cluster(4, {"own": LinearCost(1, 0), "ring": LinearCost(2, 0)}, depths={"ring": {3: LinearCost(3, 1)}})
    assert [message_s(cluster, name, depth, 10) for name, depth in (("ring", 2), ("ring", 4), ("own", 3))] == [2, 13, 1]
    assert message_s(cluster, None, 1, 10) == 1
    derived = Cluster.derive(4, 8.0, 1.0, send_s=0.0, reduce_s_per_byte=2.0, collectives=["shuffle"])
    assert message_s(derived, "shuffle", 2, 8) == 20  # as by hand above
