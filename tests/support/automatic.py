"""Training under `plan="auto"`; everything here runs on the ranks."""

import functools
import io
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import torch
from torch.nn import functional as F

import legato
import legato.auto
from legato.core import files
from legato.core.errors import CaptureError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attachment
from legato.pytorch._private import default_store
from legato.pytorch.network import agreement
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.recording.observed import StepObserver
from legato.pytorch.runtime.attached import tournament
from support import training
from support.training import OPTIMIZERS, build, distance, random_plan, train, wrap

#: Steps until the tournament begins, and until a short one has ended.
OBSERVED, DECIDED = 13, 35


@contextmanager
def short_tournaments(again=False):
    """Tournaments of two rounds, in which a turn has one timed step.

    Unless what comes before is done `again`, these ranks measure their network once for all decisions, and rank 0 plans
    without another process.
    """
    usual = {
        name: getattr(tournament, name)
        for name in ("FEWEST_ROUNDS", "MOST_ROUNDS", "FEWEST_STEPS", "TURN_S", "FIRST_UNTIMED")
    }
    decides = legato.auto.calibrate, legato.auto._planned
    vars(tournament).update(FEWEST_ROUNDS=2, MOST_ROUNDS=2, FEWEST_STEPS=1, TURN_S=0.0, FIRST_UNTIMED=1)
    if not again:
        legato.auto.calibrate, legato.auto._planned = _calibrated_once, _planned_here
    try:
        yield
    finally:
        vars(tournament).update(usual)
        legato.auto.calibrate, legato.auto._planned = decides


@contextmanager
def hasty(contest):
    """`training.wrap` leaves the plan to legato, which observes two steps, and lets these compete: DDP's passes alone
    (`ddp`), a random plan with forward overlap alone (`plan`), or both and a plan without it, in `turns`.
    """

    def planned(task):
        tensors = {tensor.name: tensor.nbytes for tensor in task.workload.tensors}
        every = Plan("ddp", (Message(tuple(Slice(name, 0, size) for name, size in tensors.items())),))
        flat = Plan("flat", tuple(Message((Slice(name, 0, size),)) for name, size in tensors.items()))
        overlapped = msgspec.structs.replace(flat, scheduler="overlapped", forward_overlap=task.overlap)
        return {"ddp": [every], "plan": [overlapped], "turns": [every, overlapped, flat]}[contest]

    steps = legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS
    with short_tournaments():
        legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS = 0, 2
        legato.auto._planned = planned
        training.AUTOMATIC.append(True)
        try:
            with training.first_passes(2):
                yield
        finally:
            training.AUTOMATIC.clear()
            legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS = steps


def hastily(contest, case, *arguments):
    """A case in which plans are legato's own."""
    with hasty(contest):
        return case(*arguments)


@functools.cache
def _network_of(ranks):
    return calibrate(None, sizes=sizes_up_to(100_000), compute=lambda: None)


def _calibrated_once(group, sizes, compute):
    return _network_of(torch.distributed.get_world_size(group))


def _planned_here(contest):
    from legato.schedule.compare import hold_contest

    streams, said = (sys.stdin, sys.stdout), io.BytesIO()
    sys.stdin, sys.stdout = (SimpleNamespace(buffer=b) for b in (io.BytesIO(msgspec.json.encode(contest)), said))
    try:
        hold_contest()
    finally:
        sys.stdin, sys.stdout = streams
    return [files.decode(plan, Plan, "a plan") for plan in said.getvalue().splitlines()]


def _closures(model, optimizer, steps):
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        x, y = model.module.batch(generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def _accumulating(model, optimizer, steps, sending=False):
    """Three backward passes a step; all but the last are under `no_sync()`, or none."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        for i in range(3):
            x, y = model.module.batch(generator)
            model.require_backward_grad_sync = sending or i == 2
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _evaluating(model, optimizer, steps):
    """Between steps the weights are read, and a module runs."""
    x, _ = model.module.batch(torch.Generator().manual_seed(0))
    for i in range(steps):
        train(model, optimizer, 1, seed=i)
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        model.state_dict()


#: Ways to train for a number of steps.
LOOPS = {
    "plain": train,
    "skipping": lambda m, o, steps: train(
        m, o, 2 * steps, step=lambda o, i: None if i % 3 == 1 else o.step(), zero="after"
    ),
    "closures": _closures,
    "accumulating": _accumulating,
    "accumulating averages": lambda m, o, steps: _accumulating(m, o, steps, sending=True),
    "evaluating": _evaluating,
}


def automatic(model_name, steps=DECIDED, loop="plain", again=False, **options):
    """Weights under plan="auto" against DDP's, plans of all passes, hooks at the end, and what was measured."""
    trained, plans = [], []
    with short_tournaments(again):
        for kind in ("ddp", "auto"):
            model = build(model_name)
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            if kind == "ddp":
                wrapped, optimizer = wrap("ddp", model, optimizer)
            else:
                wrapped, optimizer = legato.distribute(model, optimizer, **options)
                model.register_forward_pre_hook(
                    lambda *_, model=wrapped: plans.append(attachment(model).plan.scheduler)
                )
            LOOPS[loop](wrapped, optimizer, steps)
            trained.append(wrapped)
    hooks = len(wrapped._forward_pre_hooks) - 1 + len(optimizer._optimizer_step_post_hooks)  # but for legato's own
    return distance(*trained), [*plans, attachment(wrapped).plan.scheduler], hooks, attachment(wrapped).tournament


def automatic_lending(model_name):
    return automatic(model_name, gradient_as_bucket_view=True)


def automatic_sharding(shard, model_name, steps=DECIDED, loop="plain"):
    return automatic(model_name, steps, loop, shard=shard)


def join_while_plans_are_tried(steps):
    """Ranks that run out of batches while the steps are watched, or in the tournament; passes are DDP's from then on.

    The distance from DDP, and why.
    """
    trained = []
    with short_tournaments():
        for kind in ("ddp", "auto"):
            model = build("Convolutional")
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
            train(wrapped, optimizer, steps)
            with wrapped.join():
                train(wrapped, optimizer, 1 + 2 * torch.distributed.get_rank())
            trained.append(train(wrapped, optimizer, 3))
    return distance(*trained), attachment(wrapped).reason


def hook_while_plans_are_tried(steps):
    """A communication hook that is registered while the steps are watched, or in the tournament, as above."""
    trained = []
    with short_tournaments():
        for kind in ("ddp", "auto"):
            model = build("Convolutional")
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
            train(wrapped, optimizer, steps)
            wrapped.register_comm_hook(None, _all_reduce)
            trained.append(train(wrapped, optimizer, 5))
    return distance(*trained), attachment(wrapped).reason


def _all_reduce(state, bucket):
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def competing():
    """Three plans compete: (distance from DDP, names in turn, what was measured, the plan that stays)."""
    trained, names = [], []
    with short_tournaments():
        for kind in ("ddp", "legato"):
            model = build("Partial")
            wrapped, optimizer = wrap(kind, model, OPTIMIZERS["adam"](model.parameters()), find_unused_parameters=True)
            if kind == "legato":
                plans = [legato.core.plan.Plan(f"p{i}", random_plan(model, i).messages, i > 0) for i in range(3)]
                train(wrapped, optimizer, 3)
                attachment(wrapped).compete(plans)
                model.register_forward_pre_hook(
                    lambda *_, model=wrapped: names.append(attachment(model).plan.scheduler)
                )
                train(wrapped, optimizer, 17, seed=12)
            else:
                train(wrapped, optimizer, 3)
                train(wrapped, optimizer, 17, seed=12)
            trained.append(wrapped)
    return distance(*trained), names, attachment(wrapped).tournament, attachment(wrapped).plan.scheduler


@short_tournaments()
def automatic_with_changing_steps():
    """Steps whose ops differ, but not the order of their gradients, can be planned for."""
    trained = []
    for kind in ("ddp", "auto"):
        model = build("Checkpointed")
        plain = model.forward
        calls = [0]

        def changing(x, plain=plain, calls=calls):
            calls[0] += 1
            return plain(x) if calls[0] % 3 else plain(x) + torch.sin(x[:, :10])

        model.forward = changing
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        trained.append(train(wrapped, optimizer, 14))
    return distance(*trained), attachment(wrapped).plan.scheduler, attachment(wrapped).observed


@short_tournaments()
def automatic_that_cannot_be_recorded():
    """The recorder refuses this optimizer's step every time: DDP's passes stay, on all ranks, and none hangs."""

    def refuse(*_):
        raise CaptureError("not this one")

    workload, StepObserver.workload = StepObserver.workload, refuse
    try:
        model = build("Convolutional")
        wrapped, optimizer = legato.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        train(wrapped, optimizer, 14)
    finally:
        StepObserver.workload = workload
    return attachment(wrapped).plan.scheduler


def calibrated():
    from legato.core import files
    from legato.pytorch import calibrate

    found = calibrate(sizes=(1024, 65536, 2**20))
    cost = found.cluster.cost("gloo")
    return files.identity(found.cluster), found.cluster.workers, cost.cost(2**20), [s.seconds for s in found.samples]


@short_tournaments()
def automatic_with_sparse_inputs():
    """The recorder knows dense tensors only: DDP's passes stay, and training goes on."""
    trained = []
    for kind in ("ddp", "auto"):
        model = build("Checkpointed")
        plain = model.forward
        model.forward = lambda x, plain=plain: torch.sparse.mm(torch.eye(len(x)).to_sparse(), plain(x))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        trained.append(train(wrapped, optimizer, 14))
    return distance(*trained), attachment(wrapped).plan.scheduler


def automatic_for_two_models():
    """An encoder and a decoder, each with its own wrapper and optimizer, are observed in the same steps."""
    trained = []
    with short_tournaments():
        for kind in ("ddp", "auto"):
            torch.manual_seed(7)
            pair = []
            for layers in ((8, 16, 4), (4, 16, 8)):
                model = torch.nn.Sequential(torch.nn.Linear(*layers[:2]), torch.nn.GELU(), torch.nn.Linear(*layers[1:]))
                optimizer = OPTIMIZERS["momentum"](model.parameters())
                pair.append(wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer))
            (encoder, first), (decoder, second) = pair
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            for _ in range(DECIDED):
                x = torch.randn(4, 8, generator=generator)
                first.zero_grad()
                second.zero_grad()
                F.mse_loss(decoder(encoder(x)), x).backward()
                first.step()
                second.step()
            trained.append(torch.nn.ModuleList([encoder.module, decoder.module]))
    return (
        distance(*trained),
        [attachment(model).plan.scheduler for model in (encoder, decoder)],
        [attachment(encoder).observed, attachment(decoder).observed],
    )


def refused(what):
    """What `legato.distribute` says of a model, an optimizer or an option that is none."""
    model = build("Checkpointed")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {}
    match what:
        case "sharded":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        case "meta":
            model = model.to("meta")
        case "scheduler":
            optimizer = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        case "parameters":
            optimizer = list(model.parameters())
        case "option":
            options["shrad"] = "optimizer"
    try:
        legato.distribute(model, optimizer, **options)
    except legato.InputError as error:
        return str(error)


def late_call():
    """What a rank says that calls `legato.distribute` long before another one."""
    model, store = build("Checkpointed"), default_store()

    class Telling(io.StringIO):
        def write(self, text):
            store.set("told", "")
            return super().write(text)

    stderr, sys.stderr = sys.stderr, Telling()
    agreement.SAY_S, usual = 0.1, agreement.SAY_S
    try:
        if torch.distributed.get_rank() == 1:
            store.wait(["told"])
        legato.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        return sys.stderr.getvalue()
    finally:
        sys.stderr, agreement.SAY_S = stderr, usual


@short_tournaments()
def said_and_undone():
    """What rank 0 says in a training in which planning fails, the distance from DDP, and the plan."""
    stderr, sys.stderr = sys.stderr, io.StringIO()

    def fail(contest):
        raise ZeroDivisionError("no")

    legato.auto._planned = fail
    try:
        trained = []
        for kind in ("ddp", "auto"):
            model = build("Convolutional")
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
            trained.append(train(wrapped, optimizer, 16))
        return sys.stderr.getvalue(), distance(*trained), attachment(wrapped).plan.scheduler
    finally:
        sys.stderr = stderr
