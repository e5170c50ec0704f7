"""What real ranks do in the tests of the parameter servers; run by `ranks.Ranks`."""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.pytorch.servers import parameter_servers

STEPS = 5
#: The parameter servers' own patience. Where a rank that refuses does not end, the others learn of it by waiting.
PATIENCE_S = 20.0
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}


class Net(nn.Module):
    """A convolution, attention whose weights no module reads by itself, and a parameter used every other time."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.sometimes = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x)[0]
        self.calls += 1
        if self.calls % 2:
            x = x + self.sometimes(x)
        return self.out(x.mean(1))


def build(optimizer="momentum"):
    torch.manual_seed(7)
    model = Net()
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(step, part=0, parts=1, size=12):
    random = torch.Generator().manual_seed(100 + step)
    images = torch.randn(size, 3, 5, 5, generator=random)
    labels = torch.randint(0, 5, (size,), generator=random)
    return images.chunk(parts)[part], labels.chunk(parts)[part]


def loop(model, optimizer, parts=1, part=0, steps=STEPS, first=0, scheduler=None):
    for step in range(first, first + steps):
        images, labels = batch(step, part, parts)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(model):
    return {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}


def distance(one, other):
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def alone(optimizer="momentum", steps=STEPS):
    """One process on the whole batch."""
    model, chosen = build(optimizer)
    loop(model, chosen, steps=steps)
    return values(model)


def over_ddp(workers, optimizer="momentum", run=loop):
    """The values that DDP gives to the same workers, which only they train."""
    group = dist.new_group(range(workers))
    if dist.get_rank() >= workers:
        return None
    model, chosen = build(optimizer)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    run(ddp, chosen, workers, dist.get_rank())
    return values(ddp)


def served(servers, optimizer="momentum", run=loop, **options):
    """The values of the trained model on workers, None on servers."""
    model, chosen = build(optimizer)

    def train(model, optimizer):
        run(model, optimizer, model.workers, model.worker)
        return values(model)

    return parameter_servers(model, chosen, train, servers=servers, **options)


def against_ddp(servers, optimizer="momentum", options=(), run="loop"):
    """Largest difference from DDP on the same workers; 0.0 on servers."""
    run = globals()[run]
    workers = dist.get_world_size() - servers
    theirs, ours = over_ddp(workers, optimizer, run), served(servers, optimizer, run, **dict(options))
    return 0.0 if ours is None else distance(theirs, ours)


def against_one_process(servers, optimizer="sgd"):
    """Largest difference from a single process that trains on the whole batch."""
    ours = served(servers, optimizer)
    return 0.0 if ours is None else distance(alone(optimizer), ours)


def loop_with_schedule(model, optimizer, parts, part):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loop(model, optimizer, parts, part, scheduler=scheduler)


def loop_with_accumulation(model, optimizer, parts, part):
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            images, labels = batch(2 * step, part, parts)
            F.cross_entropy(model(images), labels).backward()
        images, labels = batch(2 * step + 1, part, parts)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def loop_with_evaluation(model, optimizer, parts, part):
    for step in range(3):
        loop(model, optimizer, parts, part, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            model(batch(50)[0])
        model.train()


def by_plan(servers, seed):
    """Difference from DDP with a plan that cuts, pushes and pulls in random orders."""
    import random

    from legato.core.plan import Message, Plan, Slice

    draw = random.Random(seed)
    pieces = []
    for name, p in build()[0].named_parameters():
        cuts = sorted({0, p.nbytes, *(4 * draw.randrange(p.numel()) for _ in range(draw.randint(0, 2)))})
        pieces += [(Slice(name, a, b), draw.randrange(servers)) for a, b in itertools.pairwise(cuts)]
    draw.shuffle(pieces)
    messages = [Message((piece,), "push", server=server) for piece, server in pieces]
    draw.shuffle(pieces)
    messages += [Message((piece,), "pull", server=server) for piece, server in pieces]
    return against_ddp(servers, "adamw", (("plan", Plan("any", tuple(messages), True)),))


def resumed(before, after, optimizer):
    """Training of two workers that was saved on `before` servers and went on with `after`, against one that was not."""
    groups = {servers: dist.new_group(range(2 + servers)) for servers in sorted({before, after})}
    through = served(2, optimizer)

    def save(model, optimizer):
        loop(model, optimizer, 2, model.worker, steps=3)
        saved = values(model), optimizer.state_dict(), model.module.calls
        loop(model, optimizer, 2, model.worker, steps=1, first=50)  # is lost
        return saved

    def go_on(model, optimizer):
        loop(model, optimizer, 2, model.worker, steps=STEPS - 3, first=3)
        return values(model)

    saved = None
    if dist.get_rank() < 2 + before:
        saved = parameter_servers(*build(optimizer), save, servers=before, process_group=groups[before])
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, saved)
    if dist.get_rank() >= 2 + after:
        return 0.0
    model, chosen = build(optimizer)
    state, optimizer_state, model.calls = everywhere[0]
    model.load_state_dict(state)
    chosen.load_state_dict(optimizer_state)
    options = {"servers": after, "placement": "equal", "process_group": groups[after]}
    ours = parameter_servers(model, chosen, go_on, **options)
    return 0.0 if ours is None else distance(through, ours)


def state_of_one_process(servers, placement):
    """Whether the gathered optimizer state has the very form of a single process's, and about its values."""
    model, chosen = build("adamw")

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker)
        return optimizer.state_dict()

    ours = parameter_servers(model, chosen, train, servers=servers, placement=placement)
    if ours is None:
        return True
    model, chosen = build("adamw")
    loop(model, chosen)
    theirs = chosen.state_dict()
    same = ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for i, state in theirs["state"].items():
        same &= list(state) == list(ours["state"][i])
        same &= all(torch.allclose(state[k], ours["state"][i][k], atol=1e-4) for k in state)
    return same


def deferral():
    """What is gated after a step, before and after one parameter is read."""
    from legato.pytorch.runtime.waiting.gate import GatedParameter

    model, chosen = build()

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker, steps=1)
        net = model.module
        gated = all(isinstance(p, GatedParameter) for p in net.parameters())
        shape = tuple(net.out.weight.shape)  # no question about shape waits
        net.conv.weight.sum()
        read, others = type(net.conv.weight) is nn.Parameter, isinstance(net.out.weight, GatedParameter)
        optimizer.zero_grad()  # nor does this
        still = isinstance(net.out.weight, GatedParameter)
        model.flush()
        return gated, shape, read, others, still, type(net.out.weight) is nn.Parameter

    return parameter_servers(model, chosen, train)


def measured(plan, steps=8):
    """(iterations, transfers of each, out of order in all) on workers."""
    model, chosen = build()

    def train(model, optimizer):
        with model.measure() as record:
            loop(model, optimizer, model.workers, model.worker, steps=steps)
        return [(i.transfers, i.out_of_order, i.seconds > i.waited_s >= 0) for i in record]

    return parameter_servers(model, chosen, train, servers=1, plan=plan)


def watched_by_an_agent():
    """The values after every step on workers; what an agent saw, by the step."""
    model, chosen = build()

    def train(model, optimizer):
        seen = [values(model)]
        for step in range(6):
            loop(model, optimizer, model.workers, model.worker, steps=1, first=step)
            seen.append(values(model))
        return seen

    def infer(model):
        seen = []
        while model.training_goes_on:
            model.pull()
            with torch.no_grad():
                model(batch(3)[0])
            seen.append((model.iteration, values(model)))
        return seen

    return parameter_servers(model, chosen, train, infer=infer, servers=1, agents=1)


def for_ever(servers, patience_s, begun):
    """Train until something fails; the file `begun` says that the first steps are done."""
    model, chosen = build()

    def train(model, optimizer):
        for step in itertools.count():
            loop(model, optimizer, model.workers, model.worker, steps=1, first=step)
            if step == 2 and model.worker == 0:
                Path(begun).touch()

    parameter_servers(model, chosen, train, servers=servers, patience_s=patience_s)


def survives_its_agent():
    """Workers go on for some steps after the agent is gone."""
    import os

    model, chosen = build()

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker, steps=40)
        return "trained"

    def infer(model):
        model.pull()
        os._exit(1)

    return parameter_servers(model, chosen, train, servers=1, agents=1, infer=infer)


# ---- what is refused ------------------------------------------------------------------


def refused(case):
    model, chosen = build()
    options = {"servers": 1, "patience_s": PATIENCE_S}
    train = loop
    if case == "other parameters":
        if dist.get_rank() == 1:
            model.out = nn.Linear(8, 6)
            chosen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elif case == "lbfgs on one rank":
        if dist.get_rank() == 1:
            chosen = torch.optim.LBFGS(model.parameters())
    elif case == "no worker":
        options["servers"] = dist.get_world_size()
    elif case == "lbfgs":
        chosen = torch.optim.LBFGS(model.parameters())
    elif case == "strangers":
        chosen.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    elif case == "all-reduces":
        from legato.core.plan import Message, Plan, Slice

        sizes = {k: p.nbytes for k, p in model.named_parameters()}
        options["plan"] = Plan("a", tuple(Message((Slice(k, 0, n),)) for k, n in sizes.items()))
    elif case == "other settings":

        def train(model, optimizer):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + model.worker)
            loop(model, optimizer, steps=2)

    elif case == "uneven":

        def train(model, optimizer):
            loop(model, optimizer, steps=2 + 2 * model.worker)

    elif case == "step twice":

        def train(model, optimizer):
            loop(model, optimizer, steps=1)
            optimizer.step()

    elif case == "no agents' work":
        options["agents"] = 1
    parameter_servers(model, chosen, train, **options)


def late():
    """The last rank does not come."""
    model, chosen = build()
    if dist.get_rank() < dist.get_world_size() - 1:
        parameter_servers(model, chosen, loop, patience_s=PATIENCE_S)
