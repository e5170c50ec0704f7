"""Workloads: what they refuse, and the order of one iteration."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from support.strategies import workloads

from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Op, Tensor, Workload

F, B, U = Op("f", "forward", 1.0), Op("b", "backward", 2.0, (0,)), Op("u", "optimizer", 0.5, (1,))
W = Tensor("w", 4, 1, (0, 2))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ops": ()}, "ops: none given"),
        ({"tensors": ()}, "tensors: none given"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"time_scale": 0.0}, "time_scale: 0.0"),
        ({"time_scale": math.inf}, "time_scale: inf"),
        ({"untraced_s": -1.0}, "untraced_s: -1.0"),
        ({"ops": (Op("f", "forward", -1.0), B, U)}, r"ops\[0\].duration_s: -1.0"),
        ({"ops": (F, Op("b", "backward", math.nan), U)}, r"ops\[1\].duration_s: nan"),
        ({"ops": (F, B, U, Op("g", "forward", 1.0))}, r"ops\[3\].phase: 'forward' after a later phase"),
        ({"ops": (F, B, Op("u", "optimizer", 0.5, (2,)))}, r"ops\[2\].deps: 2 .*an earlier op, 0 to 1"),
        ({"ops": (F, B, Op("u", "optimizer", 0.5, (-1,)))}, r"ops\[2\].deps: -1"),
        ({"tensors": (W, W)}, r"tensors\[1\].name: 'w' twice"),
        ({"tensors": (Tensor("w", 0, 1),)}, r"tensors\[0\].nbytes: 0"),
        ({"tensors": (Tensor("w", 4, 0),)}, r"tensors\[0\].ready_after: 0 .*a backward op"),
        ({"tensors": (Tensor("w", 4, 3),)}, r"tensors\[0\].ready_after: 3"),
        ({"tensors": (Tensor("w", 4, -1),)}, r"tensors\[0\].ready_after: -1"),
        ({"tensors": (Tensor("w", 4, 1, (1,)),)}, r"tensors\[0\].readers: 1 .*forward or optimizer"),
        ({"tensors": (Tensor("w", 4, 1, (3,)),)}, r"tensors\[0\].readers: 3"),
    ],
)
def test_what_a_workload_refuses(fields, error):
    with pytest.raises(InputError, match=error):
        Workload(**{"name": "w", "ops": (F, B, U), "tensors": (W,), **fields})


def test_totals():
    work = Workload("w", (F, B, U), (W, Tensor("v", 6, 1)))
    assert (work.compute_s, work.nbytes) == (3.5, 10)
    assert [work.phase_ops(phase) for phase in ("forward", "backward", "optimizer")] == [[0], [1], [2]]


def test_an_update_stands_just_before_the_first_op_that_reads_it():
    ops = (
        *(Op(f"f{i}", "forward", 1.0) for i in range(3)),
        *(Op(f"b{i}", "backward", 1.0) for i in range(3, 6)),
        *(Op(f"u{i}", "optimizer", 1.0) for i in range(6, 10)),
    )
    tensors = (Tensor("x", 4, 3, (2, 6)), Tensor("y", 4, 4, (1, 2, 7)), Tensor("z", 4, 5, (8,)))
    assert Workload("w", ops, tensors).iteration_order() == (3, 4, 5, 0, 7, 1, 6, 2, 8, 9)


def test_what_an_update_depends_on_stands_before_it():
    ops = (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0),
        Op("b", "backward", 1.0),
        Op("norm", "optimizer", 1.0),  # of both gradients, as in clipping
        Op("u0", "optimizer", 1.0, (3,)),
        Op("u1", "optimizer", 1.0, (3,)),
    )
    tensors = (Tensor("w1", 4, 2, (1, 3, 5)), Tensor("w0", 4, 2, (0, 3, 4)))
    assert Workload("w", ops, tensors).iteration_order() == (2, 3, 4, 0, 5, 1)


@given(workloads(max_ops=8, max_tensors=8))
def test_the_order_of_an_iteration_is_one_that_plans_accept(work):
    order = work.iteration_order()
    messages = tuple(Message((Slice(t.name, 0, t.nbytes),)) for t in work.tensors)
    check_plan(Plan("p", messages, op_order=order), work)
    phases = [work.ops[i].phase for i in order]
    assert phases[: phases.count("backward")] == ["backward"] * phases.count("backward")
    for phase in ("backward", "forward"):
        assert [i for i in order if work.ops[i].phase == phase] == work.phase_ops(phase)


def test_a_workload_as_text():
    assert str(Workload("net", (F, B, U), (W,), batch_size=8)) == (
        "net: 8 samples on cpu, 3 ops, 1 tensor of 4 B, forward 1 s, backward 2 s, optimizer 500 ms"
    )


def parsed(noun):
    """What a notebook shows, as XML."""
    return ElementTree.fromstring(f"<div>{noun._repr_html_()}</div>")


def test_a_notebook_shows_a_workload():
    shown = parsed(Workload("net", (F, B, U), (W,), 2))
    text = "".join(shown.itertext())
    assert "net: 2 samples on cpu, 3 ops, 1 tensor of 4 B" in text
    assert [cell.text for cell in shown.iter("td")] == ["4 B", "100%", "w", "b", "f"]
    assert all(op in text for op in ("b, 2 s", "u, 500 ms", "f, 1 s"))  # the bars of the lane


@given(workloads())
def test_every_workload_can_be_shown(work):
    assert not {element.tag for element in parsed(work).iter()} & {"script", "style", "link", "img"}


def test_a_workload_of_many_ops_and_of_hostile_names_is_shown_small_and_as_text():
    n, evil = 20_000, "<script>alert(1)</script>\n" * 9
    ops = [Op(evil, "forward", 1e-3), *(Op(evil, "backward", 1e-3) for _ in range(n))]
    work = Workload(evil, tuple(ops), tuple(Tensor(f"{evil}{i}", 4 + i, 1 + i, (0,)) for i in range(n)), device=evil)
    shown = work._repr_html_()
    assert len(shown) < 1_000_000 and "<script" not in shown and "the 10 largest of 20,000 tensors" in shown
    assert next(parsed(work).iter("td")).text == "19.5 KiB"
