"""The accelerator without a GPU: it has the CPU's bits, and shows what nothing orders."""

import contextlib
from unittest import mock

import pytest
import torch
from support import late, programs
from support.ranks import Ranks
from support.training import OPTIMIZERS, Convolutional, Dense, wrap

pytestmark = pytest.mark.skipif(not late.can_be_built(), reason="no g++ or no ninja")


@pytest.fixture(scope="module")
def rank():
    """A function that runs another one in a process that has the device."""
    ranks = Ranks(1, "late")
    yield lambda function, *arguments: ranks.run(function, *arguments)[0]
    ranks.close()


def _trained(device, seed):
    from support.late import device as late

    late.seed(seed)
    torch.manual_seed(7)
    model = Convolutional().to(device)
    optimizer = OPTIMIZERS["adam-fused"](model.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, y = (t.to(device) for t in model.batch(generator))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [value.cpu().tolist() for value in model.state_dict().values()], late.races()


def test_it_has_the_bits_of_the_cpu(rank):
    expected = rank(_trained, "cpu", 0)
    for seed in range(3):
        assert rank(_trained, "late", seed) == expected


def _not_waited_for(waits):
    side, a = torch.Stream("late"), torch.ones(1000, device="late")
    torch.accelerator.synchronize()
    a.mul_(3)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        b = a + 1
    side.synchronize()
    return (b.sum() if waits else b).cpu()


def _not_kept(keeps):
    side, a = torch.Stream("late"), torch.ones(1000, device="late")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        b = a * 2
    if keeps:
        a.record_stream(side)
    del a
    torch.full((1000,), 5.0, device="late")
    torch.accelerator.synchronize()
    return b


def _read_in_flight(waits):
    a = torch.ones(1000, device="late")
    work = torch.distributed.all_reduce(a, async_op=True)
    if waits:
        work.wait()
    a.mul_(2)
    work.wait()


def _races(function, right):
    from support.late import device as late

    torch.accelerator.synchronize()
    late.races()
    with contextlib.suppress(RuntimeError):
        function(right)
    torch.accelerator.synchronize()
    return late.races()


@pytest.mark.parametrize("function", [_not_waited_for, _not_kept, _read_in_flight])
def test_it_finds_what_nothing_orders(rank, function):
    assert rank(_races, function, False) and not rank(_races, function, True)


@pytest.mark.parametrize(
    ("kind", "seeds"), [("legato", range(20)), pytest.param("auto", range(40), marks=pytest.mark.slow)]
)
def test_programs_with_streams_give_the_bits_of_ddp_without_races(kind, seeds):
    programs.check(seeds, kind, "late")


def _on(stream, function):
    """The function, with what it queues on another stream."""

    def aside(*arguments):
        with stream:
            return function(*arguments)

    return aside


def _updated_aside(stream, apply):
    def aside(*arguments):
        stream.wait_stream(torch.accelerator.current_stream())
        return _on(stream, apply)(*arguments)

    return aside


FAULTS = (
    "none",
    "messages are not waited for",
    "buffers are written while they are sent",
    "gradients are packed aside",
    "updates run aside",
    "readers do not wait",
)


def _planted(fault):
    """A fault in legato: a wait is forgotten."""
    from legato.pytorch.runtime.sending import delivery, messages, packing
    from legato.pytorch.runtime.waiting.update import Update

    def not_waited_for(_, bucket):
        bucket.work = None

    def not_prepared(_, bucket):
        bucket.work, bucket.writable = None, True
        if bucket.flags is not None:
            bucket.flags.fill_(1.0)

    aside = torch.Stream("late")
    faults = (
        (Update, "apply", Update.apply),
        (messages.Messages, "wait", not_waited_for),
        (delivery.Delivery, "_prepare_buffer", not_prepared),
        (packing, "pack", _on(aside, packing.pack)),
        (Update, "apply", _updated_aside(aside, Update.apply)),
        (delivery.Delivery, "_at_home", lambda _: contextlib.nullcontext()),
    )
    return mock.patch.object(*faults[FAULTS.index(fault)])


def _trained_with(fault):
    from support.late import device as late

    torch.accelerator.synchronize()
    late.races()
    side, model = torch.Stream("late"), Dense().to("late")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["adam"](model.parameters()))
    average = [torch.zeros_like(p) for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    with _planted(fault):
        for i in range(8):
            x, y = (t.to("late") for t in model.batch(generator))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            torch.accelerator.current_stream().wait_stream(side)
            if i < 2:  # the gradients are dropped
                continue
            optimizer.step()
            side.wait_stream(torch.accelerator.current_stream())
            with torch.no_grad(), side:
                for a, p in zip(average, model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
    torch.accelerator.synchronize()
    return late.races()


@pytest.mark.parametrize("fault", FAULTS)
def test_it_finds_waits_that_legato_forgets(rank, fault):
    assert bool(rank(_trained_with, fault)) == (fault != "none")
