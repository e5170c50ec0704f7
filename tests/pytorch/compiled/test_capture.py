"""A compiled model is captured as the graphs that AOTAutograd makes of it."""

import pytest
import torch
from torch import nn

from legato.pytorch.compiled import functions
from legato.pytorch.recording.capture import capture


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x))).mean((2, 3))
        return self.head(torch.tanh(self.left(x)) * torch.relu(self.right(x)))


def training(backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Branches()
    model.compile(backend=backend)
    x = torch.randn(2, 3, 6, 6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(x).square().mean()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_tensors_have_the_names_of_the_model_that_is_not_compiled(whole, part):
    model = Branches()
    expected = dict(model.named_parameters()).keys()
    if part:
        model.left = torch.compile(model.left, backend="aot_eager")
    model = torch.compile(model, backend="aot_eager") if whole else model
    x = torch.randn(2, 3, 6, 6)
    workload = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(x).sum(), runs=1, warmup=1)
    assert {tensor.name for tensor in workload.tensors} == expected
    assert not any("_orig_mod" in op.name for op in workload.ops)


@pytest.fixture(scope="module", params=[pytest.param("aot_eager"), pytest.param("inductor", marks=pytest.mark.slow)])
def captured(request):
    """The workload of a training, and the graphs that were compiled, by the prefix of their ops' names."""
    from torch._inductor import config

    found = {}

    class Recorded(functions._Recorded):
        def __init__(self, module, prefix):
            super().__init__(module, prefix)
            found[prefix] = module

    # Without caches inductor compiles each graph, which changes the graph.
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        patch.setattr(functions, "_Recorded", Recorded)
        return capture(*training(request.param), runs=1, warmup=1), found


def closure(nodes, inputs):
    """All that each node depends on."""
    found = {}
    for node in nodes:
        found[node] = frozenset().union(*({i} | found[i] for i in inputs(node)))
    return found


def test_ops_and_dependencies_are_those_of_the_graphs(captured):
    workload, modules = captured
    names = [op.name for op in workload.ops]
    assert set(modules) == {"graph 0/forward", "graph 0/backward"}
    depends = closure(range(len(names)), lambda i: workload.ops[i].deps)
    for prefix, module in modules.items():
        nodes = {f"{prefix}/{node.name}": node for node in module.graph.nodes if node.op == "call_function"}
        ours = {name: i for i, name in enumerate(names) if name.startswith(prefix)}
        assert set(ours) <= set(nodes)
        assert len(ours) >= 8  # all but views
        body = [node for node in module.graph.nodes if node.op == "call_function"]
        reach = closure(body, lambda node: [n for n in node.all_input_nodes if n.op == "call_function"])
        for name, i in ours.items():
            wanted = {ours[f"{prefix}/{n.name}"] for n in reach[nodes[name]] if f"{prefix}/{n.name}" in ours}
            assert wanted == {d for d in depends[i] if d in ours.values()}, name
        nodes = set(ours.values())
        for i in set(workload.phase_ops(prefix.rpartition("/")[2])) - nodes:  # eager: before the graph, or after it
            assert nodes <= depends[i] or all(i in depends[node] for node in nodes)


def test_each_gradient_is_ready_after_its_node(captured):
    workload, _ = captured
    assert {t.name for t in workload.tensors} == {name for name, _ in Branches().named_parameters()}
    ready = {workload.ops[t.ready_after].name for t in workload.tensors}
    assert all(name.startswith("graph 0/backward/") for name in ready)
    assert len(ready) >= 6


def test_a_captured_model_goes_on_training_as_if_nothing_had_happened():
    trained = []
    for captured in (False, True):
        model, optimizer, loss = training("aot_eager")
        if captured:
            capture(model, optimizer, loss, runs=1, warmup=1)
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        trained.append(model.state_dict())
    assert all(torch.equal(a, trained[1][name]) for name, a in trained[0].items())
    assert not functions.one_by_one.wanted
