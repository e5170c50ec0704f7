"""Messages by every collective, and trainings that send by them; everything here runs on the ranks."""

import datetime
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from legato.core.cluster import Cluster
from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.pytorch import attach, attachment
from legato.pytorch.network.channel import channel_for
from legato.pytorch.network.rounds import ROUNDS
from legato.pytorch.parameters import trained_parameters
from legato.schedule.compare import compare
from legato.schedule.published.dear import dear
from support import PATIENCE_S, runtime_cases, training

SLICES = (Slice("any", 0, 4),)
SIZES = (1, 2, 3, 4, 7, 24, 1000, 4099)
DEPTHS = (1, 2, 5)


def sums(dtype="float32", device="cpu"):
    """Every collective, depth and size, whole and in halves, handed over at once: those whose sum is not exact."""
    rank, ranks, channel = dist.get_rank(), dist.get_world_size(), channel_for(dist.new_group())
    sent = []
    for name in (None, "gloo", *ROUNDS):
        for depth in DEPTHS if name in ROUNDS else (1,):
            for size in SIZES:
                for kinds in (("all_reduce",), ("reduce_scatter", "all_gather")):
                    numbers = [
                        ((torch.arange(size) * 7 + 13 * r + len(sent)) % 31).to(device, getattr(torch, dtype))
                        for r in range(ranks)
                    ]
                    buffer = numbers[rank].clone()
                    works = [channel(buffer, Message(SLICES, kind, name, depth)) for kind in kinds]
                    sent.append(((name, depth, size, kinds), works, buffer, sum(numbers)))
    for _, works, _, _ in sent:
        for work in works:
            work.wait()
            assert work.is_completed()
    return len(sent), [what for what, _, buffer, expected in sent if not torch.equal(buffer, expected)]


def same_everywhere(name, depth):
    """Numbers whose sum depends on the order of additions: the difference between the ranks."""
    rank, ranks, channel = dist.get_rank(), dist.get_world_size(), channel_for(dist.new_group())
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    channel(buffer, Message(SLICES, "all_reduce", name, depth)).wait()
    everyones = [torch.empty_like(buffer) for _ in range(ranks)]
    dist.all_gather(everyones, buffer)
    return max((other - buffer).abs().max().item() for other in everyones)


def threads():
    """Threads of channels: with the backend's own all-reduces alone, with steps, and when the channel is gone."""
    counts = []
    channel = channel_for(dist.new_group())
    for name in (None, "ring"):
        channel(torch.zeros(10), Message(SLICES, "all_reduce", name)).wait()
        counts.append(_links())
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("legato-channel")]
    del channel
    for thread in ours:
        thread.join(10)
    return [*counts, _links()]


def spinning():
    """The policies of gloo's own threads in a channel, and of this thread after it was made."""
    group = dist.new_group()
    before = set(os.listdir("/proc/self/task"))
    channel = channel_for(group)
    mine = set(os.listdir("/proc/self/task")) - before
    policies = {os.sched_getscheduler(int(task)) for task in mine}
    channel(torch.zeros(10), Message(SLICES)).wait()
    return policies, os.sched_getscheduler(0)


class Seen(torch.optim.Optimizer):
    """Says which parameters it updates."""

    steps_parameters_alone = True

    def __init__(self, model, say):
        super().__init__(model.parameters(), {})
        self.names, self.say = {id(p): name for name, p in model.named_parameters()}, say

    def step(self):
        self.say([self.names[id(p)] for g in self.param_groups for p in g["params"] if p.grad is not None])


def updates_while_waiting():
    """Rank 1 sends `late` only when rank 0, which asks for it first, has updated `early`. What was updated together."""
    rank, store, updated = dist.get_rank(), _get_default_store(), []

    def say(names):
        updated.append(names)
        store.set(f"updated on {rank}", "")

    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("late", "early")})
    messages = tuple(Message((Slice(f"{name}.weight", 0, 12),)) for name in ("early", "late"))
    wrapped, optimizer = attach(model, Seen(model, say), Plan("p", messages, forward_overlap=True))
    attachment(wrapped)._forward.readers.may_wait = lambda _: True  # there is no forward pass to watch,
    attachment(wrapped).reducer.armed = True  # nor one of the wrapped model
    late, early = (model[name](torch.ones(1, 3)).sum() for name in ("late", "early"))
    if rank == 1:
        late.register_hook(lambda _: store.wait(["updated on 0"], datetime.timedelta(seconds=PATIENCE_S)))
    (late + early).backward()
    optimizer.step()
    if rank == 0:
        attachment(wrapped).reducer.buckets[0].work.wait()  # `early` is in
        model["late"].weight.sum()
    attachment(wrapped).flush()
    dist.barrier()
    store.delete_key(f"updated on {rank}")
    return updated


def packed_and_sent():
    """What happens to the gradient of one tensor in two messages, in order."""
    model, happened = nn.Linear(4, 2, bias=False), []
    messages = tuple(Message((Slice("weight", start, start + 16),)) for start in (0, 16))
    wrapped, optimizer = attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Plan("p", messages, forward_overlap=True)
    )
    reducer = attachment(wrapped).reducer
    pack, launch = reducer.delivery.pack, reducer.messages.launch

    def packing(bucket):
        happened.append(f"packed {bucket.index}")
        pack(bucket)

    def sending(bucket):
        happened.append(f"sent {bucket.index}")
        launch(bucket)

    reducer.delivery.pack, reducer.messages.launch = packing, sending
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    attachment(wrapped).flush()
    return happened


def _links():
    return sum(thread.name.startswith("legato-channel") for thread in threading.enumerate())


def mixed(plan, seed):
    """The same slices by random collectives and depths, some in halves, whose second ones come at any later place."""
    rng = random.Random(seed)
    messages, waiting = [], []
    for message in plan.messages:
        name = rng.choice([None, "gloo", *ROUNDS])
        depth = rng.choice([1, 2, 5]) if name in ROUNDS else 1
        whole = rng.random() < 0.5
        sent = msgspec.structs.replace(
            message, collective=name, depth=depth, kind="all_reduce" if whole else "reduce_scatter"
        )
        messages.append(sent)
        if not whole:
            waiting.append(msgspec.structs.replace(sent, kind="all_gather", slices=sent.slices[::-1]))
        while waiting and rng.random() < 0.4:
            messages.append(waiting.pop(rng.randrange(len(waiting))))
    return msgspec.structs.replace(plan, messages=(*messages, *waiting))


def equality(model_name, optimizer_name, seed, overlap=True, **options):
    """Distance of the weights from DDP's under a plan that mixes everything."""
    trained = []
    for kind in ("ddp", "legato"):
        model = training.build(model_name)
        optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(
                model, **({"find_unused_parameters": True} if model_name == "Partial" else {})
            )
        else:
            wrapped, optimizer = attach(model, optimizer, mixed(training.random_plan(model, seed, overlap), seed))
        trained.append(training.train(wrapped, optimizer, 8, **options))
    return training.distance(*trained)


def workload(model):
    """A workload that computes these parameters' gradients in reverse order."""
    parameters = trained_parameters(model)
    n = len(parameters)
    ops = [Op(f"forward {i}", "forward", 1e-3, (i - 1,) if i else ()) for i in range(n)]
    ops += [Op(f"backward {i}", "backward", 1e-3, (n + i - 1,)) for i in range(n)]
    tensors = [
        Tensor(name, p.numel() * p.element_size(), 2 * n - 1 - i, (i,))
        for i, (name, p) in enumerate(parameters.items())
    ]
    return Workload("model", tuple(ops), tuple(tensors), 4, "cpu")


def equality_dear(collective, buffer_bytes, **options):
    """Distance of the weights from DDP's under DeAR's own plan."""
    trained = []
    for kind in ("ddp", "dear"):
        model = training.build("Convolutional")
        optimizer = training.OPTIMIZERS["adam"](model.parameters())
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            cluster = Cluster.derive(dist.get_world_size(), 1e9, 1e-5)
            plan = dear(workload(model), cluster, collective=collective, buffer_bytes=buffer_bytes)
            wrapped, optimizer = attach(model, optimizer, plan)
        trained.append(training.train(wrapped, optimizer, 8, **options))
    return training.distance(*trained)


def plans():
    """What can be run of what the schedulers make of a model on two ranks, with several collectives to choose from."""
    cluster = Cluster.derive(2, 1e9, 1e-6, reduce_s_per_byte=1e-8)
    return [c.plan for c in compare(workload(training.build("Convolutional")), cluster) if c.runnable]


def under(plans):
    """Distances of the weights from DDP's under these plans, by their schedulers."""
    model = training.build("Convolutional")
    wrapped = nn.parallel.DistributedDataParallel(model)
    ddp = training.train(wrapped, training.OPTIMIZERS["adam"](model.parameters()), 4)
    found = {}
    for plan in plans:
        model = training.build("Convolutional")
        wrapped, optimizer = attach(model, training.OPTIMIZERS["adam"](model.parameters()), plan)
        found[plan.scheduler] = training.distance(ddp, training.train(wrapped, optimizer, 4))
    return found


def dropped_gradients():
    """Gradients in halves that are thrown away, now and then, while their second halves are still to come."""
    return equality("Convolutional", "momentum", 5, step=lambda o, i: None if i % 3 == 1 else o.step(), zero="after")


def within_the_rounding_bound(seed):
    """`runtime_cases.reduced_gradient` under a plan that mixes everything."""
    plain, training.random_plan = training.random_plan, lambda model, seed: mixed(plain(model, seed), seed)
    try:
        return runtime_cases.reduced_gradient(seed)
    finally:
        training.random_plan = plain


def peer_dies():
    """Rank 1 goes when all collectives have its messages under way; what the others are told, by collective."""
    patience = datetime.timedelta(seconds=10)
    channels = {name: channel_for(dist.new_group(timeout=patience)) for name in ROUNDS}
    for name, channel in channels.items():
        channel(torch.zeros(10), Message(SLICES, "all_reduce", name, 2)).wait()
    dist.barrier()
    works = {
        name: channel(torch.zeros(2**22), Message(SLICES, "all_reduce", name, 2)) for name, channel in channels.items()
    }
    if dist.get_rank() == 1:
        os._exit(0)

    def told(name):
        errors = []
        for work in works[name], channels[name](torch.zeros(2**22), Message(SLICES, "all_reduce", name, 2)):
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(str(error))
        return errors[-1]

    with ThreadPoolExecutor(len(ROUNDS)) as waiting:  # all at once, each until patience ends
        return dict(zip(ROUNDS, waiting.map(told, ROUNDS), strict=True))


def peer_dies_in_training():
    """Rank 1 goes in the middle of a backward pass; what the other is told."""
    model = training.build("Recurrent")
    optimizer = training.OPTIMIZERS["sgd"](model.parameters())
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
    steps = Message(tuple(slices[:2]), "all_reduce", "halving-doubling", 2)
    halves = [Message(tuple(slices[2:]), kind, "ring") for kind in ("reduce_scatter", "all_gather")]
    wrapped, optimizer = attach(model, optimizer, Plan("mortal", (steps, *halves), forward_overlap=True))
    training.train(wrapped, optimizer, 2)
    if dist.get_rank() == 1:
        model.embed.weight.register_post_accumulate_grad_hook(lambda _: os._exit(0))
    try:
        training.train(wrapped, optimizer, 2)
    except RankError as error:
        return str(error)
    return "nobody noticed"


# ---- plans that are refused -----------------------------------------------------------


def _refused(change):
    model = nn.Linear(4, 2, bias=False)
    whole = Message((Slice("weight", 0, 32),))
    attach(model, training.OPTIMIZERS["sgd"](model.parameters()), Plan("odd", tuple(change(whole))))


def unknown_collective():
    _refused(lambda m: [msgspec.structs.replace(m, collective="butterfly")])


def depth_of_the_backends_own():
    _refused(lambda m: [msgspec.structs.replace(m, depth=2)])


def push_and_pull():
    _refused(lambda m: [msgspec.structs.replace(m, kind=kind) for kind in ("push", "pull")])


def push_alone():
    _refused(lambda m: [msgspec.structs.replace(m, kind="push")])


def gathered_before_scattered():
    _refused(lambda m: [msgspec.structs.replace(m, kind=kind) for kind in ("all_gather", "reduce_scatter")])


def gathered_otherwise():
    _refused(
        lambda m: [
            msgspec.structs.replace(m, kind="reduce_scatter", collective="ring"),
            msgspec.structs.replace(m, kind="all_gather", collective="tree"),
        ]
    )


def gathered_in_pieces():
    _refused(
        lambda m: [
            msgspec.structs.replace(m, kind="reduce_scatter"),
            Message((Slice("weight", 0, 16),), "all_gather"),
            Message((Slice("weight", 16, 32),), "all_gather"),
        ]
    )
