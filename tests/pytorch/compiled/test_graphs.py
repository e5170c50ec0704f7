"""Graphs that are cut, and run in other orders, compute the same bits."""

import operator
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from legato.pytorch.compiled import graphs


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.arms = nn.ModuleList(nn.Linear(6, 5, bias=i != 1) for i in range(3))
        self.scale, self.norm = nn.Parameter(torch.rand(5)), nn.LayerNorm(6)

    def forward(self, x):
        x = self.norm(torch.tanh(self.stem(x)))
        return sum(torch.relu(arm(x)) * self.scale for arm in self.arms)


def backward_graph():
    """Loss, gradients of all parameters, and None, from the parameters and a batch."""
    torch.manual_seed(0)
    model = Branches()
    names = [name for name, _ in model.named_parameters()]

    def gradients(x, *values):
        loss = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,)).pow(2).mean()
        return (loss, *torch.autograd.grad(loss, values), None)

    inputs = [torch.rand(3, 4), *(p.detach().clone().requires_grad_() for p in model.parameters())]
    return make_fx(gradients)(*inputs), inputs


MODULE, INPUTS = backward_graph()
BODY = [node for node in MODULE.graph.nodes if node.op not in ("placeholder", "output")]


def compile_piece(piece, inputs, _):
    def run(values):
        assert len(values) == len(inputs) and all(isinstance(value, torch.Tensor) for value in values)
        return fx.Interpreter(piece).run(*values)

    return run


def results(nodes, starts):
    pieces = graphs.cut(MODULE, nodes, starts, compile_piece)
    values = dict(zip((n for n in MODULE.graph.nodes if n.op == "placeholder"), INPUTS, strict=True))
    seen, alive, begun = [], [], []
    graphs.run(pieces, values, begun.append, lambda piece, now: (seen.append(piece), alive.append(set(now))))
    assert seen == pieces and begun == list(range(len(pieces)))
    outputs = graphs.outputs(MODULE.graph)
    returned = {node for node in outputs if node is not None}
    assert alive[-1] == returned  # everything else was let go
    return [None if node is None else values[node] for node in outputs], alive


@given(st.data())
def test_every_cut_of_every_order_gives_the_same_bits(data):
    order = data.draw(st.permutations([node.name for node in BODY]))
    nodes = graphs.sort(MODULE.graph, order[: data.draw(st.integers(0, len(order)))])
    assert sorted(map(str, nodes)) == sorted(map(str, BODY))
    done = set()
    for node in nodes:
        assert all(n in done or n.op == "placeholder" for n in node.all_input_nodes)
        done.add(node)
    starts = data.draw(st.sets(st.integers(0, len(nodes)), max_size=8))
    found, _ = results(nodes, starts)
    for value, expected in zip(found, MODULE(*INPUTS), strict=True):
        assert (value is None and expected is None) or torch.equal(value, expected)


def test_without_an_order_the_graph_keeps_its_own():
    assert graphs.sort(MODULE.graph, ()) == BODY


def test_an_order_is_followed_as_far_as_inputs_allow():
    order = [node.name for node in BODY]
    random.Random(1).shuffle(order)
    nodes = graphs.sort(MODULE.graph, order)
    first = next(node for node in BODY if node.name == order[0])
    needed = {first}
    for node in reversed(BODY):
        if any(user in needed for user in node.users):
            needed.add(node)
    needed |= {user for node in needed for user in node.users if user.target is operator.getitem}
    assert set(nodes[: len(needed)]) == needed


def test_values_that_nothing_needs_are_let_go_between_pieces():
    _, alive = results(BODY, range(1, len(BODY)))
    assert min(map(len, alive)) < len(INPUTS)


@pytest.mark.parametrize("starts", [(), (0,), (len(BODY),)])
def test_cuts_at_the_ends_are_none(starts):
    assert len(graphs.cut(MODULE, BODY, starts, compile_piece)) == 1
