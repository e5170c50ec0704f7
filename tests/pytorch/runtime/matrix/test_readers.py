"""Ways to reach a parameter past its gate, while its update waits."""

import copy
import gc
import os
import threading
import warnings
from multiprocessing import get_context
from unittest import mock

import pytest
import torch
from support import PATIENCE_S
from support.ranks import on_ranks
from support.rows import SHARDED, row
from support.training import STEPS, Dense, adam, build, sgd, train, wrap
from torch import nn
from torch.nn import functional as F

from legato.core.errors import RankError
from legato.pytorch import attachment
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.gate import GatedParameter
from legato.pytorch.runtime.waiting.readers import WATCHED


def looking(kind, model, look):
    """The trained model, and what `look()` has returned after each step."""
    seen = []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))

    def step(optimizer, i):
        optimizer.step()
        seen.extend(value.clone() for value in look())

    return train(wrapped, optimizer, STEPS, step=step), seen


# ---- what was taken before the first step ----------------------------------------------


@row("views", "four ranks", *SHARDED)
def test_data_that_is_held(kind):
    model = Dense()
    held = [p.data for p in model.parameters()]
    return looking(kind, model, lambda: held)


@row("views", "four ranks", *SHARDED)
def test_a_state_dict_that_is_kept(kind):
    model = Dense()
    kept = model.state_dict()
    return looking(kind, model, kept.values)


@row("views", "four ranks", *SHARDED)
def test_arrays_that_are_held(kind):
    model = Dense()
    arrays = [p.detach().numpy() for p in model.parameters()]
    return looking(kind, model, lambda: map(torch.tensor, arrays))


@row("views", "four ranks", *SHARDED)
def test_parameters_that_are_views_of_one_buffer(kind):
    model = Dense()
    flat, at = torch.cat([p.data.view(-1) for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return looking(kind, model, lambda: [flat])


# ---- readers below Python, or in other threads and processes ---------------------------


@row("views", "four ranks", *SHARDED)
def test_a_scripted_module(kind):
    """It reads its parameters below `__torch_function__`."""
    model = Dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.second = torch.jit.script(nn.Linear(16, 16, bias=False))
    return looking(kind, model, lambda: [model.second(torch.ones(2, 16)).detach()])


def doubled(x: float):
    return torch.tensor(x) * 2


@on_ranks(2)
def test_a_function_is_scripted_while_updates_wait():
    """One that makes a tensor."""
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    train(wrapped, optimizer, 3)
    assert gate.functions._before
    assert torch.jit.script(doubled)(1.5).item() == 3.0


@row("views", "four ranks", *SHARDED)
def test_programs_that_are_made_of_the_model(kind):
    """Between `step()` and the next forward pass."""
    model, x = Dense(), torch.ones(2, 12)

    def look():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced, scripted = torch.jit.trace(model, x), torch.jit.script(model.third)
        return traced(x), scripted(torch.ones(2, 16)), torch.fx.symbolic_trace(model.second)(traced.second.weight)

    return looking(kind, model, look)


@row("views", "four ranks", *SHARDED)
def test_functional_transforms(kind):
    """`torch.func.grad` and `vmap` over named_parameters(), as for per-sample gradients."""
    model, xs, ys = Dense(), torch.ones(3, 12), torch.tensor([1, 2, 3])

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return looking(kind, model, lambda: gradients(dict(model.named_parameters()), xs, ys).values())


@row("views", "four ranks", *SHARDED)
def test_nested_inputs(kind):
    """Evaluation on a jagged nested tensor, which takes operators before a gate does."""
    model = Dense()

    def look():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(3, 12)], layout=torch.jagged)
            return [model.first(x).values()]

    return looking(kind, model, look)


@row("views", "four ranks", *SHARDED)
def test_threads(kind):
    model = Dense()

    def look():
        found = [None] * 4
        parameters = list(model.parameters())

        def read(k):
            found[k] = parameters[k % len(parameters)].detach().clone()

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return looking(kind, model, look)


def read_in_child(module, pipe):
    gc.disable()  # a group of an earlier row that was let go here would wait for threads that a fork has not
    pipe.send([p.detach().numpy().tobytes() for p in module.parameters()])


@row("views", "four ranks", *SHARDED)
def test_a_process_that_is_forked_while_updates_wait(kind):
    model = Dense()

    def look():
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=read_in_child, args=(model, theirs))
        process.start()
        assert ours.poll(PATIENCE_S), "the child hangs"
        found = ours.recv()
        process.kill()  # at its end it would let go of groups, too
        process.join()
        return [torch.frombuffer(bytearray(data), dtype=torch.get_default_dtype()) for data in found]

    torch.multiprocessing.current_process()._config["daemon"] = False
    return looking(kind, model, look)


# ---- readers that a gate cannot see ----------------------------------------------------


class Unseen(Dense):
    """Reads a weight below Python, as an extension would."""

    def forward(self, x):
        with torch._C.DisableTorchFunctionSubclass():
            x = F.gelu(x @ self.first.weight.t())
        return self.third(F.gelu(self.second(x)))


@row("views", "four ranks", *SHARDED)
def test_what_the_first_passes_read_unseen_never_waits(kind):
    """The rest does."""
    model = Unseen()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    train(wrapped, optimizer, STEPS)
    waits = [type(p) is GatedParameter for p in model.parameters()]
    assert kind == "ddp" or waits == [False, True, True]
    return wrapped


@on_ranks(2)
def test_an_unseen_reader_that_appears_later_is_named_in_debug_mode():
    model = Dense()
    with mock.patch.dict(os.environ, LEGATO_DEBUG="reads"):
        wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
        train(wrapped, optimizer, WATCHED + 1)
        model.forward = lambda x: Unseen.forward(model, x)
        with pytest.raises(RankError, match=r"first.weight is read by aten.t.default, which its gate"):
            train(wrapped, optimizer, 1)


@on_ranks(2)
def test_a_backward_pass_from_values_of_before_their_update():
    """They were read, unseen by any gate: one clear error."""
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    train(wrapped, optimizer, 6)
    x, y = model.batch(torch.Generator())
    with torch._C.DisableTorchFunctionSubclass():
        loss = F.cross_entropy((x @ model.first.weight.T)[:, :10], y)
    attachment(wrapped).reducer.armed = True  # as after a forward pass
    said = "first.weight was read before its last update, by something that legato cannot see; "
    with pytest.raises(RankError, match=said):
        loss.backward()


# ---- between the steps -----------------------------------------------------------------


@row("views", "four ranks", *SHARDED)
def test_averages_of_the_weights(kind):
    """Of the model, and of the wrapped model."""
    model, swa = build("Convolutional"), torch.optim.swa_utils
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    ema = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    outer = swa.AveragedModel(wrapped, use_buffers=True)
    shadow = copy.deepcopy(wrapped)
    x, _ = model.batch(torch.Generator().manual_seed(3))
    for i in range(6):
        train(wrapped, optimizer, 2, seed=i)
        ema.update_parameters(model)
        outer.update_parameters(wrapped)
    shadow.eval()
    assert list(wrapped.state_dict()) == list(shadow.state_dict())
    return wrapped, [*ema.parameters(), *outer.parameters(), *outer.buffers(), shadow(x)]


@row("views", "four ranks", "compiled", *SHARDED)
def test_inference_mode_right_after_a_step(kind):
    """Its updates are then still to come."""
    model, seen = build("Attention"), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    x, _ = model.batch(torch.Generator().manual_seed(0))
    for i in range(4):
        train(wrapped, optimizer, 1 + i % 2, seed=i)
        with torch.inference_mode(), torch.random.fork_rng():
            seen.append(wrapped(x).sum().item())
    return wrapped, [torch.tensor(seen)]


@row()
def test_a_parameter_made_of_another_one_under_a_default_device(kind):
    model = Dense()

    def made():
        with torch.device("cpu"):
            return [nn.Parameter(p).detach() for p in model.parameters()]

    return looking(kind, model, made)
