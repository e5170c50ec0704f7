"""Which plans the runtime carries out, and what it has to know of their order."""

from msgspec.structs import replace

from legato.core.cluster import Cluster, LinearCost
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.compose import is_runnable, with_node_order
from legato.schedule.compare import compare

CLUSTER = Cluster(2, {"c": LinearCost(4.0, 1.0)})
OPS = (
    Op("graph 0/forward/f0", "forward", 2.0),
    Op("graph 0/forward/f1", "forward", 1.0, (0,)),
    Op("graph 0/backward/b", "backward", 1.0, (1,)),
    Op("graph 0/backward/slow", "backward", 3.0, (2,)),
    Op("graph 0/backward/fast", "backward", 1.0, (2,)),
)
#: The gradient that the next forward pass reads first is computed last, though it takes no time.
COMPILED = Workload("fork", OPS, (Tensor("late", 1, 3, (1,)), Tensor("soon", 1, 4, (0,))))
EAGER = replace(COMPILED, ops=tuple(replace(op, name=op.name.rpartition("/")[2]) for op in OPS))
BROKEN = replace(COMPILED, ops=(*OPS[:4], replace(OPS[4], name="graph 1/backward/fast")))
TWICE = replace(COMPILED, ops=(*OPS[:4], replace(OPS[4], name="graph 0/backward/slow")))


def test_a_compiled_graph_runs_in_any_order():
    for name in ("caramel", "legato"):
        plan = schedule(name, COMPILED, CLUSTER)
        assert plan.op_order[:3] == (2, 4, 3) and is_runnable(plan, COMPILED)
        assert plan.node_order[:3] == tuple(f"graph 0/backward/{node}" for node in ("b", "fast", "slow"))


def test_what_is_not_a_node_of_one_graph_keeps_its_place():
    order = schedule("caramel", COMPILED, CLUSTER)
    for workload in (EAGER, BROKEN, TWICE):
        assert not is_runnable(order, workload)
        assert not with_node_order(replace(order, node_order=()), workload).node_order
        assert not schedule("legato", workload, CLUSTER).op_order


def test_the_captured_order_needs_no_names():
    order = COMPILED.iteration_order()
    plan = replace(schedule("fifo", COMPILED, CLUSTER), op_order=order)
    assert is_runnable(plan, EAGER) and not with_node_order(plan, COMPILED).node_order


def test_comparisons_know_what_can_be_run():
    names = ["ddp", "caramel", "legato"]
    assert [c.runnable for c in compare(COMPILED, CLUSTER, names)] == [True, True, True]
    assert [c.runnable for c in compare(EAGER, CLUSTER, names)] == [True, False, True]
