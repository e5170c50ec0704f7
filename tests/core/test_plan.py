"""Plans: what they refuse, and whether they carry out a workload."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, op_orders, plans, workloads

from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.plan import MOST_CHUNKS, Message, Plan, Slice, check_messages, check_plan
from legato.core.workload import Op, Tensor, Workload

WORK = Workload(
    "w",
    (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0, (0,)),
        Op("b1", "backward", 1.0, (1,)),
        Op("b0", "backward", 1.0, (0, 2)),
        Op("u", "optimizer", 1.0),
    ),
    (Tensor("x", 8, 2, (1, 4)), Tensor("y", 4, 3, (0,))),
)
X, Y = Slice("x", 0, 8), Slice("y", 0, 4)


def plan(*groups, **fields):
    """A plan of messages, each written as (kind, slices)."""
    return Plan("p", tuple(Message(tuple(slices), kind) for kind, *slices in groups), **fields)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 2)])
def test_a_slice_holds_bytes(start, stop):
    with pytest.raises(InputError, match=rf"slice of 'x': {start} to {stop} \(expected 0 <= start < stop\)"):
        Slice("x", start, stop)


def test_what_a_message_and_a_plan_refuse():
    with pytest.raises(InputError, match="message with no slices"):
        Message(())
    with pytest.raises(InputError, match="depth: 0"):
        Message((X,), depth=0)
    with pytest.raises(InputError, match="messages: none given"):
        Plan("p", ())
    with pytest.raises(InputError, match=r"depth: 2147483648 \(expected 1 to 1,000,000\)"):
        Message((X,), depth=2**31)
    most = Message((X,), depth=MOST_CHUNKS)
    assert Plan("p", (most,)).messages == (most,)
    with pytest.raises(TooLargeError, match="messages: 2 messages of 1,000,001 chunks in all"):
        Plan("p", (most, Message((Y,))))


def test_ddp_carries_out_exact_all_reduces():
    plan = Plan("p", (Message((X,)), Message((Y,))), carrier="ddp")
    assert plan.in_wire_format("bf16").carrier == "legato"
    assert plan.sharded("optimizer", {}).carrier == "legato"
    with pytest.raises(InputError, match="carrier: 'ddp'"):
        Plan("p", (Message((X,), wire="bf16"),), carrier="ddp")


def test_sizes():
    assert X.nbytes == 8 and Message((X, Slice("y", 1, 4))).nbytes == 11


@pytest.mark.parametrize(
    "groups",
    [
        [("all_reduce", X, Y)],
        [("all_reduce", Y), ("all_reduce", Slice("x", 5, 8)), ("all_reduce", Slice("x", 0, 5))],
        [("reduce_scatter", X), ("all_gather", X), ("push", Y), ("pull", Y)],
        [("all_reduce", Slice("x", 0, 3), Y), ("push", Slice("x", 3, 8)), ("pull", Slice("x", 3, 8))],
        # What was aggregated in two pieces is handed out in one, and the other way round.
        [
            ("push", Slice("x", 0, 3), Y),
            ("push", Slice("x", 3, 8)),
            ("pull", X),
            ("pull", Slice("y", 2, 4), Slice("y", 0, 2)),
        ],
    ],
)
def test_plans_that_carry_out_the_workload(groups):
    check_plan(plan(*groups), WORK)


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ([("all_reduce", X)], r"'y': byte 0 is never sent \(expected exactly once\)"),
        ([("all_reduce", Y, Slice("x", 0, 7))], "'x': byte 7 is never sent"),
        ([("all_reduce", Y, Slice("x", 0, 3), Slice("x", 4, 8))], "'x': byte 3 is never sent"),
        ([("all_reduce", Y, Slice("x", 0, 5), Slice("x", 4, 8))], "'x': byte 4 is sent twice"),
        ([("all_reduce", X, Y), ("all_reduce", Y)], "'y': byte 0 is sent twice"),
        ([("all_reduce", X, Y), ("push", X), ("pull", X)], "'x': byte 0 is sent twice"),
        ([("all_reduce", Y, Slice("x", 0, 9))], r"messages\[0\]: byte 9 of 'x', which has only 8 bytes"),
        ([("all_reduce", X, Y), ("all_reduce", Slice("z", 0, 1))], r"messages\[1\]: the workload has no tensor 'z'"),
        (
            [("reduce_scatter", X), ("all_reduce", Y)],
            "'x': reduce_scatter and all_gather messages carry different bytes",
        ),
        (
            [("reduce_scatter", X), ("all_gather", Slice("x", 0, 7)), ("all_reduce", Y)],
            "reduce_scatter and all_gather messages carry different bytes",
        ),
        (
            [("reduce_scatter", X), ("pull", X), ("all_reduce", Y)],
            "'x': reduce_scatter and all_gather messages carry different bytes",
        ),
        ([("push", X), ("all_gather", X), ("all_reduce", Y)], "carry different bytes"),
        ([("all_reduce", X, Y), ("pull", X)], "'x': push and pull messages carry different bytes"),
        ([("all_gather", X), ("all_reduce", Y)], "'x': byte 0 is never sent"),
    ],
)
def test_plans_that_do_not(groups, error):
    with pytest.raises(PlanError, match=error):
        check_plan(plan(*groups), WORK)


SHARDED = [
    [("reduce_scatter", X), ("reduce_scatter", Y), ("all_gather", Y), ("all_gather", X)],
    [("reduce_scatter", X), ("all_gather", X), ("reduce_scatter", Y), ("all_gather", Y)],
    [("reduce_scatter", Y, X), ("all_gather", Y, X)],
]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("groups", SHARDED)
def test_sharded_plans_that_carry_out_the_workload(groups, shard):
    check_plan(plan(*groups, shard=shard), WORK)


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        (
            [("all_reduce", X, Y)],
            r"messages\[0\]: all_reduce in a sharded plan \(expected reduce_scatter or all_gather\)",
        ),
        (
            [("reduce_scatter", X), ("all_gather", X), ("push", Y), ("pull", Y)],
            r"messages\[2\]: push in a sharded plan",
        ),
        (
            [("reduce_scatter", X), ("reduce_scatter", Y), ("all_gather", X, Y)],
            r"messages\[2\]: all_gather of 'x' in a sharded plan \(expected the slices of one reduce_scatter before",
        ),
        ([("reduce_scatter", X, Y), ("all_gather", Y, X)], r"messages\[1\]: all_gather of 'y'"),
        ([("all_gather", X), ("reduce_scatter", X), ("all_reduce", Y)], r"messages\[0\]: all_gather of 'x'"),
        ([("reduce_scatter", X, Y), ("all_gather", X, Y), ("all_gather", X, Y)], r"messages\[2\]: all_gather of 'x'"),
        ([("reduce_scatter", X, Y)], "'x': reduce_scatter and all_gather messages carry different bytes"),
    ],
)
def test_sharded_plans_that_do_not(groups, error):
    with pytest.raises(PlanError, match=error):
        check_plan(plan(*groups, shard="optimizer"), WORK)


def test_an_unknown_shard():
    with pytest.raises(InputError, match="unknown shard 'optimiser'; did you mean 'optimizer'"):
        plan(("all_reduce", X, Y), shard="optimiser")


def test_messages_can_be_checked_against_sizes_alone():
    check_messages(plan(("all_reduce", X, Y)), {"x": 8, "y": 4})
    with pytest.raises(PlanError, match="'x': byte 8 is never sent"):
        check_messages(plan(("all_reduce", X, Y)), {"x": 9, "y": 4})


#: Every order of the ops of WORK that its dependencies allow: backward 2 before 3, forward 0 before 1; x is ready after
#: 2, updated by 4 and read by 1; y is ready after 3 and read by 0.
ALLOWED = [
    order
    for order in itertools.permutations(range(5))
    if all(order.index(a) < order.index(b) for a, b in [(2, 3), (0, 1), (2, 4), (2, 1), (4, 1), (3, 0)])
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_op_orders(order):
    ordered = plan(("all_reduce", X, Y), op_order=order)
    if order in ALLOWED:
        check_plan(ordered, WORK)
    else:
        with pytest.raises(
            PlanError, match=r"^op_order: (op \d runs before op \d|op 1 reads 'x' before|'[xy]' is read)"
        ):
            check_plan(ordered, WORK)


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (2, 3, 4, 0, 1, 1), (2, 3, 4, 0, 5), (2, 3, 3, 0, 1)])
def test_an_op_order_names_every_op_once(order):
    with pytest.raises(PlanError, match="op_order: not an order of the workload's 5 ops"):
        check_plan(plan(("all_reduce", X, Y), op_order=order), WORK)


@given(st.data(), workloads(), clusters())
def test_random_plans_are_valid_until_a_slice_is_lost_or_doubled(data, workload, cluster):
    found = data.draw(plans(workload, cluster, op_order=op_orders(workload)))
    check_plan(found, workload)
    k = data.draw(st.integers(0, len(found.messages) - 1))
    doubled = Plan("p", (*found.messages, found.messages[k]))
    if found.messages[k].kind in ("all_reduce", "reduce_scatter", "push"):
        with pytest.raises(PlanError, match="is sent twice"):
            check_plan(doubled, workload)
    if len(found.messages) > 1:
        with pytest.raises(PlanError):
            check_plan(Plan("p", found.messages[:k] + found.messages[k + 1 :]), workload)


def test_a_plan_is_a_schedule_that_one_can_read():
    plan = Plan(
        "mine",
        (
            Message((X, Slice("y", 0, 1)), collective="ring", depth=2),
            Message((Slice("y", 1, 4),), "push", server=1),
            Message((Slice("y", 1, 4),), "pull", server=1),
        ),
        forward_overlap=True,
    )
    assert str(plan).split("\n") == [
        "mine: 3 messages, 12 B of gradients, with forward overlap",
        "#  size  kind                        tensors",
        "0   9 B  all_reduce (ring, depth 2)  x, y[0:1]",
        "1   3 B  push (server 1)             y[1:4]",
        "2   3 B  pull (server 1)             y[1:4]",
    ]
    assert plan.describe(WORK).split("\n")[1:] == [
        "#  size  kind                        tensors    sent after  needed by",
        "0   9 B  all_reduce (ring, depth 2)  x, y[0:1]  b0          f0",
        "1   3 B  push (server 1)             y[1:4]     b0          message 2",
        "2   3 B  pull (server 1)             y[1:4]     message 1   f0",
    ]


def test_a_sharded_plan_says_what_waits_for_what():
    """The optimizer op u updates x; nothing updates y, whose gradient is read as it is."""
    halves = [("reduce_scatter", X), ("reduce_scatter", Y), ("all_gather", Y), ("all_gather", X)]
    sharded = plan(*halves, forward_overlap=True, shard="optimizer")
    assert sharded.describe(WORK).split("\n") == [
        "p: 4 messages, 12 B of gradients, with forward overlap, "
        "optimizer sharded: reduce_scatter, update of the shard, all_gather of parameters",
        "#  size  kind            tensors  sent after  needed by",
        "0   8 B  reduce_scatter  x        b1          u",
        "1   4 B  reduce_scatter  y        b0          message 2",
        "2   4 B  all_gather      y        message 1   f0",
        "3   8 B  all_gather      x        u           f1",
    ]


def test_a_plan_says_what_is_rounded():
    """x travels in bf16, a quarter of y in fp16."""
    y0, y1 = Slice("y", 0, 1), Slice("y", 1, 4)
    messages = (
        Message((X,), wire="bf16"),
        Message((y0,), "reduce_scatter", wire="fp16"),
        Message((y1,)),
        Message((y0,), "all_gather", wire="fp16"),
    )
    rounded = Plan("p", messages)
    assert rounded.wires == ["bf16", "fp16"] and Plan("p", (Message((X,)),)).wires == []
    assert [message.wire_nbytes for message in messages] == [4, 1, 3, 1]
    assert str(rounded).split("\n")[:3] == [
        "p: 4 messages, 12 B of gradients, messages in bf16 and fp16, forward ops wait for the last message",
        "#  size  kind                   tensors",
        "0   8 B  all_reduce (bf16)      x",
    ]


def test_a_long_plan_is_shown_whole_and_a_long_message_by_its_ends():
    name = "a" * 30 + "\n" + "b" * 30
    slices = [Slice(f"t{i}", 0, 4) for i in range(20)]
    alone = tuple(Message((piece,)) for piece in slices)
    lines = str(Plan("many", (*alone, Message((Slice(name, 0, 4), Slice("u", 0, 4), Slice("v", 0, 4)))))).split("\n")
    assert lines[0] == "many: 21 messages, 92 B of gradients, forward ops wait for the last message"
    assert len(lines) == 23
    assert lines[-1].endswith(f" {'a' * 13}...{'b' * 24} ... v (3 tensors)")


def test_describing_a_plan_for_another_workload_is_refused():
    with pytest.raises(PlanError, match="the workload has no tensor 'z'"):
        plan(("all_reduce", Slice("z", 0, 4))).describe(WORK)


@given(st.data())
def test_every_plan_can_be_described(data):
    workload, cluster = data.draw(workloads()), data.draw(clusters())
    drawn = data.draw(plans(workload, cluster))
    assert len(drawn.describe(workload).split("\n")) == len(str(drawn).split("\n")) == len(drawn.messages) + 2


def test_a_plan_of_all_reduces_sharded():
    found = plan(("all_reduce", X), ("all_reduce", Y)).sharded("gradients", {"y": 0, "x": 1})
    assert [(m.kind, m.slices) for m in found.messages] == [
        ("reduce_scatter", (X,)),
        ("reduce_scatter", (Y,)),
        ("all_gather", (Y,)),
        ("all_gather", (X,)),
    ]
    assert found.shard == "gradients" and found.forward_overlap
    assert found.sharded("gradients", {"y": 0}) == found  # what has no place comes last
    assert found.sharded("none", {}) is found
    with pytest.raises(InputError, match="shard: 'optimizer', but the plan has 'gradients'"):
        found.sharded("optimizer", {})
    with pytest.raises(InputError, match="unknown shard 'optimiser'; did you mean 'optimizer'"):
        found.sharded("optimiser", {})


def test_a_notebook_shows_a_plan_by_its_first_messages():
    evil = "<script>alert(1)</script>"
    sent = Plan(evil, tuple(Message((Slice(f"{evil}{i}", 0, 4),)) for i in range(1000)))
    shown = sent._repr_html_()
    assert "1,000 messages, 3.91 KiB of gradients" in shown and "and 970 more messages" in shown
    assert shown.count("<tr>") == 31 and "<script" not in shown and len(shown) < 20_000
    assert "more" not in Plan("one", sent.messages[:1])._repr_html_()


@given(st.data(), workloads(), clusters())
def test_every_plan_can_be_shown(data, workload, cluster):
    drawn = data.draw(plans(workload, cluster))
    shown = ElementTree.fromstring(f"<div>{drawn._repr_html_()}</div>")
    assert len(list(shown.iter("td"))) == 4 * len(drawn.messages)
