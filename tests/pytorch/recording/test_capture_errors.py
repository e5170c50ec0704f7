"""Whatever cannot be captured is said in one line."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from support.captured import record, workload_of
from torch import nn

from legato.core.errors import CaptureError
from legato.core.workload import Op
from legato.pytorch.recording.capture import capture, load_training

EXPECTED = "(expected (model, optimizer, loss): a torch.nn.Module, a torch.optim.Optimizer, a function of no arguments)"
GOOD = """
import torch
from beside import size
def training():
    model = torch.nn.Linear(size, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(torch.ones(2, size)).sum()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write train.py; return its path."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def put(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return put


def message(function, *args, **kwargs):
    with pytest.raises(CaptureError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_load_training(write):
    write("size = 3", "beside.py")
    model, optimizer, loss = load_training(write(GOOD) + ":training")
    workload = capture(model, optimizer, loss, runs=1)
    assert workload.name == "Linear" and [t.name for t in workload.tensors] == ["bias", "weight"]


@pytest.mark.parametrize("spec", ["", "train.py", "train.py:", ":training"])
def test_spec_is_not_file_and_function(spec):
    assert message(load_training, spec) == f"{spec!r} (expected FILE.py:FUNCTION)"


def test_file_is_missing():
    assert message(load_training, "no/train.py:f") == "no/train.py: no such file (expected FILE.py:FUNCTION)"


def test_file_is_not_python(write):
    path = write("hello", "notes.txt")
    assert message(load_training, path + ":f") == f"{path}: not a Python file (expected FILE.py:FUNCTION)"


@pytest.mark.parametrize(
    ("text", "raised"),
    [
        ("x = 1\nimport no_such_module", "ModuleNotFoundError: No module named 'no_such_module' ({path}:2)"),
        ("\n\nx = = 1", "SyntaxError: invalid syntax (train.py, line 3) ({path}:3)"),
        ("import sys\nsys.exit('use --data')", "SystemExit: use --data ({path}:2)"),
        ("def f():\n    raise ValueError\nf()", "ValueError: no message ({path}:2)"),
        ("import torch\ntorch.ones(2) @ torch.ones(3)", None),
    ],
)
def test_import_fails(write, text, raised):
    path = write(text)
    found = message(load_training, path + ":f")
    assert found.startswith(f"{path}: importing it raised ")
    if raised:
        assert found == f"{path}: importing it raised {raised.format(path=path)}"
    else:
        assert found.endswith(f"({path}:2)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def train(): pass", "no function 'training'; did you mean 'train'?"),
        ("def xyz(): pass\ndef uvw(): pass", "no function 'training'; it has: xyz, uvw"),
        ("training = 3", "no function 'training'; it has: none"),
        ("def training(): return None", f"training() returned None {EXPECTED}"),
        ("def training(): return 1, 2", f"training() returned a tuple of 2 {EXPECTED}"),
        ("def training(): return 1, 2, 3", f"training() returned an int as model {EXPECTED}"),
        (
            "import torch\ndef training(): return torch.nn.ReLU(), 2, 3",
            f"training() returned an int as optimizer {EXPECTED}",
        ),
        (GOOD.replace("lambda: ", ""), f"training() returned a Tensor as loss {EXPECTED}"),
        ("def training():\n    return 1 / 0", "training() raised ZeroDivisionError: division by zero ({path}:2)"),
    ],
)
def test_function_is_wrong(write, text, said):
    write("size = 3", "beside.py")
    path = write(text)
    assert message(load_training, path + ":training") == f"{path}: {said.format(path=path)}"


def training():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(torch.ones(2, 3)).sum()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda: None, "loss() returned None (expected a scalar tensor that requires grad)"),
        (lambda: 1.5, "loss() returned a float (expected a scalar tensor that requires grad)"),
        (lambda: torch.ones(2, requires_grad=True), "a tensor of shape (2,) (expected a scalar"),
        (lambda: torch.ones(()), "a tensor that does not require grad (expected a scalar"),
        (lambda: {}["x"], r"loss() raised KeyError: 'x' ("),
    ],
)
def test_loss_is_wrong(loss, said):
    model, optimizer, _ = training()
    found = message(capture, model, optimizer, loss)
    assert said in found
    if "raised" in found:
        assert re.search(r"\(.*test_capture_errors\.py:\d+\)$", found)


def test_backward_pass_fails():
    model, optimizer, loss = training()
    model.weight.register_hook(lambda grad: 1 / 0)
    assert message(capture, model, optimizer, loss).startswith(
        "the backward pass raised ZeroDivisionError: division by"
    )


def test_optimizer_fails():
    model, optimizer, loss = training()
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    assert message(capture, model, optimizer, loss).startswith(
        "the optimizer's step raised ZeroDivisionError: division"
    )


def test_loss_does_not_depend_on_the_model():
    model, optimizer, _ = training()
    other = torch.ones((), requires_grad=True)
    assert message(capture, model, optimizer, lambda: other * 2) == (
        "no parameter got a gradient (expected a loss that depends on the model's parameters)"
    )


def test_model_has_nothing_to_train():
    model, optimizer, loss = training()
    model.requires_grad_(False)
    assert message(capture, model, optimizer, loss) == (
        "the model has no trainable parameter (expected at least one that requires grad)"
    )


def test_optimizer_is_of_another_model():
    _, optimizer, _ = training()
    model, _, loss = training()
    assert "the optimizer has none of the model's trainable parameters" in message(capture, model, optimizer, loss)


def test_models_that_other_backends_compile_are_refused():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = Own(2, 1)
    model.compile(backend="eager")
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(torch.ones(1, 2)).sum()
    said = "the model is compiled by the backend eager (expected inductor or aot_eager)"
    assert message(capture, model, optimizer, loss) == said


def test_closure_optimizers_are_refused():
    model, _, loss = training()
    optimizer = torch.optim.LBFGS(model.parameters())
    assert message(capture, model, optimizer, loss) == "LBFGS.step needs a closure (expected one without)"


def test_lazy_parameters_are_refused():
    model = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "lazy parameters without values" in message(capture, model, optimizer, lambda: None)


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta",)])
def test_several_devices_and_devices_that_compute_nothing_are_refused(devices):
    model = nn.Sequential(*(nn.Linear(1, 1, device=device) for device in devices))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = f"the model is on {', '.join(devices)} (expected cpu or one device of an accelerator)"
    assert said in message(capture, model, optimizer, list)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = message(capture, model, optimizer, lambda: model(torch.tensor([1, 2])).sum())
    assert found == "weight: an embedding with sparse=True (expected dense gradients only)"


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"warmup": 0}, {"batch_size": 0}])
def test_numbers_are_wrong(wrong):
    ((what, value),) = wrong.items()
    assert message(capture, *training(), **wrong) == f"{what}: {value} (expected at least 1)"


def test_arguments_are_of_the_wrong_kind():
    assert message(capture, 3, None, list) == "given an int and None (expected a Module and an Optimizer)"


def test_step_is_not_the_same_every_time():
    calls = []
    model, optimizer, _ = training()

    def changing():
        calls.append(1)
        x = model(torch.ones(2, 3))
        return (x.exp() if len(calls) > 4 else x.sin()).sum()

    assert message(capture, model, optimizer, changing, warmup=1) == (
        "the step is not the same every time: op 2 was 'forward/sin' in the forward pass, "
        "then 'forward/exp' in the forward pass (expected the same ops in every run)"
    )


def test_step_does_more_in_some_runs():
    step, _ = record(*training())
    longer = replace(step, ops=(*step.ops, Op("more/exp", "backward", 1.0)))
    for steps in ([step, longer], [longer, step]):
        found = message(workload_of, *steps)
        assert f": {len(step.ops)} ops in one run, in another also 'more/exp' in the backward pass" in found


def test_gradients_come_in_another_order():
    step, _ = record(*training())
    other = replace(step, tensors=step.tensors[::-1])
    found = message(workload_of, step, other)
    assert ": the gradient of 'bias' was complete first, then the gradient of 'weight'" in found
