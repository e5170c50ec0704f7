"""Rows of the equality matrix: what else DDP offers. Everything here runs on the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.auto import default_buckets
from legato.pytorch import attach, attachment
from support.matrix_rows import STEPS, Dense, adam, compared, sgd
from support.training import OPTIONS, distance, first_passes, random_plan, train, under_both, wrap


def plain(model, optimizer, **options):
    """The model under legato, by a plan of whole tensors, as communication hooks want it."""
    return attach(model, optimizer, default_buckets(model), **options, **OPTIONS)


@under_both
def hooked(kind, register):
    """`register(ddp)` registers the same hook under both."""
    model = Dense()
    wrapped, optimizer = (wrap if kind == "ddp" else lambda _, *args: plain(*args))(
        kind, model, sgd(model.parameters())
    )
    register(wrapped)
    return train(wrapped, optimizer, STEPS)


def fp16_hook():
    return hooked(lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))


def wrapped_hook():
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    return hooked(lambda ddp: ddp.register_comm_hook(None, hook))


def power_sgd_hook():
    """Compresses from the third step on, with a state of its own."""

    def register(ddp):
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook)

    return hooked(register)


def own_hook():
    """A hook that returns another tensor, and looks at everything that a bucket shows."""
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), [tuple(g.shape) for g in bucket.gradients()]))
        assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
        future = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 0.5)

    found = hooked(lambda ddp: ddp.register_comm_hook(None, hook))
    same = seen[1:STEPS] == seen[STEPS + 1 :]  # DDP orders its first buckets otherwise
    return found if same else seen


@under_both
def hook_of_a_users_ddp(kind):
    """A DDP that has a hook already keeps it."""
    model = Dense()
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), sgd(model.parameters())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "legato":
        wrapped, optimizer = attach(wrapped, optimizer, default_buckets(model))
    return train(wrapped, optimizer, STEPS)


def hook_and_missing_gradients():
    """What counts gradients is sent beside a hook."""
    from support.training import Partial

    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Partial()
        optimizer = sgd(model.parameters())
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:
            wrapped, optimizer = plain(model, optimizer, find_unused_parameters=True)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        trained.append(train(wrapped, optimizer, STEPS))
    return distance(*trained)


class Sparse(nn.Module):
    """An embedding and a bag with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        self.bag = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.words(x).mean(1) + self.bag(x))

    def batch(self, generator):
        return torch.randint(0, 20, (4, 6), generator=generator), torch.randint(0, 10, (4,), generator=generator)


def sparse_embeddings():
    def look(wrapped, *_):
        assert wrapped.module.words.weight.grad.is_sparse

    return compared(Sparse, lambda parameters: torch.optim.SGD(parameters, lr=0.1), inner=look)


class Twice(Dense):
    """Re-entrant checkpointing of a layer that is used twice: two gradients in one backward pass."""

    def forward(self, x):
        x = F.gelu(self.first(x.to(self.first.weight.dtype)))
        for _ in range(2):
            x = checkpoint(lambda x: F.gelu(self.second(x)), x, use_reentrant=True)
        return self.third(x)


@under_both
def static_graph(kind):
    model = Twice()
    optimizer = adam(model.parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=True)
    else:
        with first_passes(2):
            wrapped, optimizer = attach(model, optimizer, random_plan(model, 0), static_graph=True, **OPTIONS)
    return train(wrapped, optimizer, STEPS)


@under_both
def ignored(kind):
    """Parameters and buffers that DDP was told to ignore are each rank's own."""
    model = Dense()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    return train(wrapped, optimizer, STEPS)


@under_both
def own_group_again(kind):
    """The default group is destroyed and made anew between two trainings."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    train(wrapped, optimizer, 4)
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if kind == "legato":
        attachment(wrapped).flush()
    del wrapped
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"again/{kind}", store), rank=rank, world_size=size)
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), seed=5)
    return train(wrapped, optimizer, 4, seed=3)


class Depthwise(nn.Module):
    """A convolution of one input channel per group, whose weight has the strides of another memory format."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, groups=3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(3 * 36, 10)

    def forward(self, x):
        return self.head(F.gelu(self.conv(x)).flatten(1))

    def batch(self, generator):
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


@under_both
def depthwise(kind):
    """Gradients that are views, and are added to."""
    model = Depthwise()
    make = wrap if kind == "ddp" else lambda _, *given: plain(*given)
    wrapped, optimizer = make(kind, model, adam(model.parameters()))
    return train(wrapped, optimizer, STEPS, set_to_none=False)


ROWS = [
    fp16_hook, wrapped_hook, power_sgd_hook, own_hook, hook_of_a_users_ddp, hook_and_missing_gradients,
    sparse_embeddings, static_graph, ignored, own_group_again, depthwise,
]  # fmt: skip
