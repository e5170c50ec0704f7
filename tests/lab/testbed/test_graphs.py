"""The emulated accelerator as compiled graphs: ops are nodes, run in any order that their dependencies allow."""

import pytest
import torch
from support.strategies import seeds, shuffled

from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed.accelerator import EmulatedModel
from legato.lab.testbed.graphs import CompiledModel, with_nodes
from legato.pytorch.compiled import compiler, functions, graphs
from legato.pytorch.private.dynamo import compiles_with

WORKLOAD = with_nodes(
    Workload(
        "branches",
        (
            Op("f0", "forward", 1.0),
            Op("f1", "forward", 2.0, (0,)),
            Op("f2", "forward", 3.0, (0,)),
            Op("b2", "backward", 4.0, (2,)),
            Op("w2", "backward", 5.0, (3,)),
            Op("b1", "backward", 6.0, (1,)),
            Op("w1", "backward", 7.0, (5,)),
            Op("w0", "backward", 8.0, (3, 5)),
            Op("input", "backward", 9.0, (7,)),
            Op("update", "optimizer", 10.0),
        ),
        (Tensor("zero", 8, 7, (0, 9)), Tensor("one", 40, 6, (1, 9)), Tensor("two", 6, 4, (2, 9))),
    )
)


class Recording(CompiledModel):
    """Notes the ops that run."""

    def run_op(self, op, reads):
        self.ran.append(op)


class NoClock:
    def ask(self):
        pass

    begin = meet = ask


@pytest.fixture
def model():
    torch._dynamo.reset()
    model = Recording(WORKLOAD, clock=NoClock(), seed=3)
    model.ran = []
    return model


def test_a_pass_runs_every_op_once_and_has_all_gradients(model):
    for _ in range(2):
        model.ran.clear()
        model.zero_grad()
        model().backward()
        assert model.ran == list(range(9))
        for parameter, gradient in zip(model.ordered, model.gradients, strict=True):
            assert torch.equal(parameter.grad, gradient) and parameter.grad[0] == 1 + 3 / 8


@pytest.mark.parametrize("seed", seeds(5))
def test_nodes_are_named_after_ops(model, monkeypatch, seed):
    """So a sorted graph runs ops in the order of a plan."""
    order = shuffled(WORKLOAD, seed)
    names = [WORKLOAD.ops[i].name for i in order]

    class Sorted(functions.GraphFunction):
        def __init__(self, *args):
            super().__init__(*args)
            self._pieces = graphs.cut(self._module, self.in_order(tuple(names)), (), self._compile)

        def run_whole(self, args):
            return self.run(self._pieces, args)

    monkeypatch.setattr(compiler, "GraphFunction", Sorted)
    with compiles_with(compiler.GraphCompiler()):
        model().backward()
    assert model.ran == [0, 1, 2, *(i for i in order if 3 <= i < 9)]


def test_a_graph_has_each_gradient_right_behind_its_op(model, monkeypatch):
    graph = {}

    class Kept(functions.GraphFunction):
        def __init__(self, *args):
            super().__init__(*args)
            graph[self.phase] = self._module.graph

    monkeypatch.setattr(compiler, "GraphFunction", Kept)
    with compiles_with(compiler.GraphCompiler()):
        model().backward()
    names = [str(node.target).split(".")[1] for node in graph["backward"].nodes if "legato_testbed" in str(node.target)]
    assert names == ["run", "run", "gradient", "run", "run", "gradient", "run", "gradient", "run"]


def test_it_shares_the_memory_of_another_model():
    first = EmulatedModel(WORKLOAD, clock=NoClock())
    second = CompiledModel(WORKLOAD, clock=NoClock(), shared=first)
    assert [p.data_ptr() for p in first.ordered] == [p.data_ptr() for p in second.ordered]
