"""The accelerator without a GPU: it has the CPU's bits, and shows what nothing orders."""

import contextlib
import copy
import io
import itertools
import random
import statistics
from unittest import mock

import msgspec
import pytest
import torch
from support import chaos, late, programs
from support.training import OPTIMIZERS, Convolutional, Dense, first_passes, random_plan, sharded_plan, wrap

import legato
import legato.auto
from legato.core.cluster import LinearCost
from legato.core.plan import Message, Plan, Slice
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.rules import run
from legato.fsdp.units import Precision, units_of
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.runtime.attached import drift, tournament

BACKEND = "late"
pytestmark = pytest.mark.skipif(not late.can_be_built(), reason="no g++ or no ninja")


@pytest.fixture
def rank(ranks_of):
    """A function that runs another one in a process that has the device."""
    return lambda function, *arguments: ranks_of(1).run(function, *arguments)[0]


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
    ("kind", "seeds"), [("legato", range(12)), pytest.param("auto", range(40), marks=pytest.mark.slow)]
)
def test_programs_with_streams_give_the_bits_of_ddp_without_races(kind, seeds):
    programs.check(seeds, kind, "late")


def _chaos(count):
    from support.late import device as late

    late.races()
    return chaos.rounds(0, count), late.races()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 2)])
def test_chaos_changes_nothing(ranks_of, ranks, count):
    assert ranks_of(ranks).run(_chaos, count) == [([], [])] * ranks


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


class Unused(Dense):
    """Five layers that no rank uses, and one that only even ranks use."""

    def __init__(self):
        super().__init__()
        self.never = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
        self.sometimes = torch.nn.Linear(10, 10)

    def forward(self, x):
        out = super().forward(x)
        return self.sometimes(out) if torch.distributed.get_rank() % 2 == 0 else out


def _host_waits(kind, case):
    return _counted(kind, **case)


def _counted(kind, unused=False, clipped=False, scaled=False, wire=None):
    """In a step, in the long run; and whether a rank had races."""
    from support.late import device as late

    torch.accelerator.synchronize()
    late.races()
    model = (Unused() if unused else Dense()).to("late")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
    else:
        plan = random_plan(model, 3)
        if kind != "none":
            plan = sharded_plan(plan, random.Random(3), kind)
        messages = tuple(msgspec.structs.replace(message, wire=wire) for message in plan.messages)
        plan = msgspec.structs.replace(plan, messages=messages)
        wrapped, optimizer = legato.distribute(model, optimizer, plan, find_unused_parameters=unused)
    scaler = legato.GradScaler("late", enabled=scaled)
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(t.to("late") for t in model.batch(generator)) for _ in range(10)]
    for i, (x, y) in enumerate(batches):
        if i == 6:
            before = late.stats()["syncs"]
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(wrapped(x), y)).backward()
        scaler.unscale_(optimizer)
        if clipped:
            clip = torch.nn.utils.clip_grad_norm_ if kind == "ddp" else legato.attachment(wrapped).clip_grad_norm_
            clip(*([model.parameters()] if kind == "ddp" else []), 0.1)
        scaler.step(optimizer)
        scaler.update()
    waits = (late.stats()["syncs"] - before) / 4
    torch.accelerator.synchronize()
    return waits, late.races()


CASES = [{}, {"unused": True}, {"clipped": True}, {"scaled": True}]


@pytest.mark.parametrize(
    ("kind", "case"),
    [*itertools.product(["ddp", "none", "optimizer", "gradients"], CASES), ("none", {"wire": "bf16"})],
    ids=str,
)
def test_the_host_seldom_waits(two_ranks, kind, case):
    """At most once a step where DDP does not; with shards, for each message that has a parameter without a gradient."""
    messages = 8 if case.get("unused") and kind in ("optimizer", "gradients") else 0
    scaler = 1 if case.get("scaled") else 0  # torch's own looks whether to skip the step
    for waits, races in two_ranks.run(_host_waits, kind, case):
        assert waits <= 1 + messages + scaler and not races


#: Of the device in virtual time, in microseconds and nanoseconds; and otherwise.
TIMES = {"launch_us": 1, "op_us": 20, "ns_per_byte": 0, "alpha_us": 3000, "message_ns_per_byte": 1}
USUAL = {"launch_us": 5, "op_us": 5, "ns_per_byte": 0, "alpha_us": 20, "message_ns_per_byte": 0}


@contextlib.contextmanager
def _virtual_times(**times):
    from support.late import device as late

    for name, value in (TIMES | times).items():
        late.emulate(name, value)
    try:
        yield late
    finally:
        torch.accelerator.synchronize()
        for name, value in USUAL.items():
            late.emulate(name, value)


def _steps(wrapped, optimizer, count):
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(t.to("late") for t in wrapped.module.batch(generator)) for _ in range(count)]
    for x, y in batches:
        mark = torch.Event("late", enable_timing=True)
        mark.record()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        yield mark


def _traced():
    model = Dense().to("late")
    plan = Plan("flat", (Message(tuple(Slice(n, 0, p.nbytes) for n, p in model.named_parameters())),))
    wrapped, optimizer = legato.distribute(model, OPTIMIZERS["adam"](model.parameters()), plan)
    with _virtual_times():
        list(_steps(wrapped, optimizer, 3))
        with legato.attachment(wrapped).trace() as timelines:
            marks = list(_steps(wrapped, optimizer, 4))
        steps_s = [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    messages = [s.end_s - s.start_s for t in timelines for s in t.spans if s.kind == "message"]
    return steps_s, [t.iteration_s for t in timelines], messages


def test_a_trace_shows_the_times_of_the_device(two_ranks):
    for steps_s, iterations_s, messages in two_ranks.run(_traced):
        assert len(messages) == len(iterations_s) == 3
        assert messages == pytest.approx([3e-3] * 3, rel=0.05)
        assert iterations_s == pytest.approx(steps_s, rel=0.05)


def _paces():
    """What is said while messages take the same time, and once they take 1.5 times as long."""
    said, model = [], Dense().to("late")
    plan = Plan("flat", (Message(tuple(Slice(n, 0, p.nbytes) for n, p in model.named_parameters())),))
    with mock.patch.multiple(drift, SAMPLE=5, WINDOW=10), contextlib.redirect_stderr(io.StringIO()) as out:
        wrapped, optimizer = legato.distribute(model, OPTIMIZERS["adam"](model.parameters()), plan)
        for alpha_us in (2000, 3000):
            with _virtual_times(alpha_us=alpha_us):
                list(_steps(wrapped, optimizer, 50))
            said.append(out.getvalue())
    return said


def test_drift_sees_a_network_that_slows_down_and_nothing_else(two_ranks):
    (before, after), _ = two_ranks.run(_paces)
    assert before == "" and "communication takes 1.50 times as long" in after


def _step_s(model, plan, **times):
    """The median step of a model in virtual time, under DDP, which unpacks nothing, or under a plan."""
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if plan is None:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        wrapped, optimizer = legato.distribute(model, optimizer, plan)
    with _virtual_times(**times):
        marks = list(_steps(wrapped, optimizer, 10))
    return statistics.median(1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks[3:]))


def _decided(alpha_us, message_ns_per_byte):
    """The computing that auto observes and that of DDP; the network that it measures; the winner and the fastest."""
    times = {"alpha_us": alpha_us, "message_ns_per_byte": message_ns_per_byte}
    model, contests = Dense().to("late"), []
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    flat = Plan("flat", (Message(tuple(Slice(n, 0, size) for n, size in sizes.items())),))
    single = Plan("single", tuple(Message((Slice(n, 0, size),)) for n, size in reversed(sizes.items())))
    overlapped = msgspec.structs.replace(single, scheduler="overlapped", forward_overlap=True)
    plans = [flat, single, overlapped]
    expected_s = [_step_s(model, plan, **times) for plan in plans]
    computing_s = _step_s(model, None, alpha_us=0, message_ns_per_byte=1e-6)

    def planned(contest, _):
        contests.append(contest)
        return plans

    trained = copy.deepcopy(model)
    with _virtual_times(**times), mock.patch.object(legato.auto, "_planned", planned), first_passes(12):
        wrapped, optimizer = legato.distribute(trained, OPTIMIZERS["adam"](trained.parameters()))
        with mock.patch.multiple(tournament, TURN_S=0.0, FEWEST_STEPS=2, FIRST_UNTIMED=3, MOST_ROUNDS=3):
            list(_steps(wrapped, optimizer, 90))
    seen = [(c.workload.compute_s, c.cluster.cost().alpha_s, c.cluster.cost().beta_s_per_byte) for c in contests]
    attached = legato.attachment(wrapped)
    assert not attached.observed
    return computing_s, seen, attached.plan.scheduler, plans[expected_s.index(min(expected_s))].scheduler


@pytest.mark.parametrize(("alpha_us", "message_ns_per_byte"), [(5, 200), pytest.param(400, 1, marks=pytest.mark.slow)])
def test_auto_decides_by_the_times_of_the_device(two_ranks, alpha_us, message_ns_per_byte):
    (computing_s, [(compute_s, alpha_s, beta_s_per_byte)], winner, fastest), other = two_ranks.run(
        _decided, alpha_us, message_ns_per_byte
    )
    assert compute_s == pytest.approx(computing_s, rel=0.05)
    assert (alpha_s, beta_s_per_byte) == pytest.approx((1e-6 * alpha_us, 1e-9 * message_ns_per_byte), rel=0.1)
    assert winner == fastest == other[2]


class Chain(torch.nn.Module):
    """Layers of one size."""

    def __init__(self, width=64, depth=6):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = torch.nn.Linear(width, 11)
        self.width = width

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def batch(self, generator):
        return torch.randn(8, self.width, generator=generator), torch.randint(0, 11, (8,), generator=generator)


def _groups(size, kept=0):
    """So many layers a group; the last groups keep their parameters."""
    names = [tuple(f"layers.{k}" for k in range(i, i + size)) for i in range(0, 6, size)]
    return tuple(Group(layers, reshard=i < len(names) - kept) for i, layers in enumerate(names))


WRAPPINGS = {
    "one": Wrapping("one", _groups(1)),
    "two": Wrapping("two", _groups(2)),
    "ahead": Wrapping("ahead", _groups(1), forward_prefetch=2, backward_prefetch=2),
    "kept": Wrapping("kept", _groups(1, kept=2)),
}


def _sharded_steps(name, alpha_us, ns_per_byte):
    """Seconds of a step of FSDP2, without that of the optimizer: predicted, and on the device; kinds of collectives."""
    from support.late import device as late

    x, y = torch.randn(32, 64).to("late"), torch.randint(0, 11, (32,)).to("late")

    def training():
        model = Chain().to("late")
        return model, lambda: torch.nn.functional.cross_entropy(model(x), y)

    times = {"launch_us": 0, "op_us": 1, "ns_per_byte": 2, "alpha_us": alpha_us, "message_ns_per_byte": ns_per_byte}
    with _virtual_times(**times):
        model, loss = training()
        workload = legato.pytorch.capture(model, torch.optim.SGD(model.parameters(), lr=1e-2), loss, runs=2)
        cost = LinearCost(1e-6 * alpha_us, 1e-9 * ns_per_byte)
        costs = Costs(2, cost, cost, cost, copy_s_per_byte=4e-9)
        predicted = run(units_of(workload, 2, Precision()), WRAPPINGS[name], costs, Precision())
        model, loss = training()
        legato.fully_shard(model, WRAPPINGS[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i in range(3):
            optimizer.zero_grad()
            torch.accelerator.synchronize()
            late.trace(i == 2)
            marks = [torch.Event("late", enable_timing=True) for _ in range(2)]
            marks[0].record()
            loss().backward()
            marks[1].record()
            torch.accelerator.synchronize()
            found = sorted((start, kind) for _, kind, start, _ in late.rows())
            optimizer.step()
        late.trace(False)
    kinds = {"allgather_base": "gather", "reduce_scatter_base": "reduce_scatter"}
    seen = [kinds[kind] for _, kind in found if kind in kinds]
    pieces = sorted((p.start_s, p.kind) for p in predicted.pieces if p.kind in kinds.values())
    return predicted.seconds, 1e-3 * marks[0].elapsed_time(marks[1]), seen, [kind for _, kind in pieces]


NETWORKS = [(150, 2), (20, 8), (500, 0.5), (50, 1)]


@pytest.mark.parametrize(
    ("alpha_us", "ns_per_byte"),
    [NETWORKS[0], *(pytest.param(*network, marks=pytest.mark.slow) for network in NETWORKS[1:])],
)
@pytest.mark.parametrize("name", WRAPPINGS)
def test_steps_of_fsdp2_take_what_is_predicted(two_ranks, name, alpha_us, ns_per_byte):
    for predicted_s, took_s, seen, planned in two_ranks.run(_sharded_steps, name, alpha_us, ns_per_byte):
        assert predicted_s == pytest.approx(took_s, rel=0.05)
        assert seen == planned


def _steps_under_plans(alpha_us, ns_per_byte):
    """Seconds of a step under several plans: predicted for the network that calibration finds, and on the device."""
    times = {"launch_us": 0, "op_us": 10, "ns_per_byte": 0.5, "alpha_us": alpha_us, "message_ns_per_byte": ns_per_byte}
    model = Chain(128).to("late")
    x, y = (tensor.to("late") for tensor in model.batch(None))
    with _virtual_times(**times):
        optimizer = OPTIMIZERS["adam"](model.parameters())
        workload = legato.pytorch.capture(
            model, optimizer, lambda: torch.nn.functional.cross_entropy(model(x), y), runs=2
        )
        cluster = calibrate(None, sizes=sizes_up_to(workload.nbytes)).cluster
    pieces = [Slice(tensor.name, 0, tensor.nbytes) for tensor in workload.tensors]
    found = []
    for count, overlap in [(len(pieces), False), (4, False), (4, True), (1, True)]:
        messages = tuple(Message(tuple(pieces[i : i + count])) for i in range(0, len(pieces), count))
        plan = Plan(f"{count} a message", messages, forward_overlap=overlap)
        found.append((legato.simulate(workload, plan, cluster).iteration_s, _step_s(model, plan, **times)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("alpha_us", "ns_per_byte"), NETWORKS)
def test_steps_under_plans_take_what_is_predicted(two_ranks, alpha_us, ns_per_byte):
    for found in two_ranks.run(_steps_under_plans, alpha_us, ns_per_byte):
        for predicted_s, took_s in found:
            assert predicted_s == pytest.approx(took_s, rel=0.05)
