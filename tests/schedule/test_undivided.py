"""Collectives that cannot be sent in halves: no plan sends them so."""

import pytest
from msgspec.structs import replace
from support.flows import job

from legato.core.cluster import UNDIVIDED, Cluster, LinearCost
from legato.core.errors import PlanError
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.compare import compare
from legato.schedule.search.collectives import Collectives
from legato.simulator.collective import simulate
from legato.simulator.flow import Network, fabric
from legato.simulator.flow.pricing import cluster_for

TWO = job((3000, 5_000_000), forward=0.01, backward=0.02)


@pytest.mark.parametrize("name", UNDIVIDED)
def test_what_has_no_halves_is_not_planned_in_halves(name):
    network = Network(workers=8, bandwidth_bps=1e9)
    cluster = cluster_for(name, fabric(name), network)
    assert {message.kind for message in schedule("legato", TWO, cluster).messages} == {"all_reduce"}
    for scheduler, options in (("dear", {}), ("legato", {"shard": "optimizer"}), ("fifo", {"shard": "gradients"})):
        with pytest.raises(PlanError, match=r"has no reduce-scatter \(expected ring, halving-doubling, shuffle"):
            schedule(scheduler, TWO, cluster, **options)
    halves = schedule("dear", TWO, Cluster.derive(8, 1e9, 1e-5))
    with pytest.raises(PlanError, match=r"for reduce_scatter \(expected one that has halves, or all_reduce"):
        simulate(TWO, replace(halves, messages=tuple(replace(m, collective=None) for m in halves.messages)), cluster)


def test_halves_take_another_collective_where_there_is_one():
    """A tree of two workers costs as much as a ring, and comes first."""
    both = Cluster.derive(2, 1e9, 1e-3, collectives=["tree", "ring"])
    for plan in (schedule("dear", TWO, both), *(schedule(n, TWO, both, shard="optimizer") for n in SCHEDULERS)):
        assert {(m.kind != "all_reduce", m.collective) for m in plan.messages} == {(True, "ring")}
    assert schedule("fifo", TWO, both).messages[0].collective == "tree"


def test_halves_too_large_for_a_message_take_as_long_as_their_parts():
    """On the ring, since the tree, which takes less time, has no halves."""
    cluster = Cluster(8, {"tree": LinearCost(1.0, 0.5), "ring": LinearCost(1.0, 1.0)})
    half_s = Collectives(cluster, ["tree", "ring"], 100).half_s
    assert [half_s(nbytes) for nbytes in (50, 100, 250)] == [51 / 2, 101 / 2, (101 + 101 + 51) / 2]


def test_a_scheduler_that_needs_halves_is_left_out():
    left_out = {}
    found = compare(TWO, Cluster.derive(8, 1e9, 1e-5, collectives=["tree"]), left_out=left_out.__setitem__)
    assert [candidate.plan.scheduler for candidate in found] == [name for name in SCHEDULERS if name != "dear"]
    assert "dear: tree has no reduce-scatter" in str(left_out["dear"])
