"""What else DDP offers: hooks on communication, options, groups, and copies of what it wraps."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.rows import SHARDED, in_mode, row
from support.training import (
    OPTIONS,
    STEPS,
    Dense,
    Partial,
    adam,
    build,
    first_passes,
    random_plan,
    sgd,
    train,
    trained,
    wrap,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from legato.auto import default_buckets
from legato.pytorch import attach, attachment

# ---- hooks on communication ------------------------------------------------------------


def wrap_whole(kind, model, optimizer, **options):
    """As `wrap`, by a plan of whole tensors: hooks on communication want it."""
    if kind == "ddp":
        return wrap(kind, model, optimizer, **options)
    return attach(model, optimizer, default_buckets(model), **options, **OPTIONS)


def hooked(kind, hook, state=None):
    model = Dense()
    wrapped, optimizer = wrap_whole(kind, model, sgd(model.parameters()))
    wrapped.register_comm_hook(state, hook)
    return train(wrapped, optimizer, STEPS)


@row("views")
def test_the_fp16_hook(kind):
    return hooked(kind, default_hooks.fp16_compress_hook)


@row("views")
def test_a_wrapped_hook(kind):
    return hooked(kind, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@row("views", "four ranks")
def test_the_power_sgd_hook(kind):
    """Compresses from the third step on, with a state of its own."""
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    return hooked(kind, powerSGD_hook, state)


@row("views", "four ranks")
def test_a_hook_of_ones_own(kind):
    """It returns another tensor, and looks at everything that a bucket shows."""
    seen = []

    def hook(state, bucket):
        shapes = [g.shape for g in bucket.gradients()]
        assert [p.shape for p in bucket.parameters()] == shapes
        seen.append(torch.tensor([bucket.index(), bucket.is_last(), *(size for shape in shapes for size in shape)]))
        future = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 0.5)

    return hooked(kind, hook), seen[1:]  # DDP orders its first buckets otherwise


@row()
def test_a_hook_of_a_users_own_ddp(kind):
    """A DDP that has a hook already keeps it."""
    model = Dense()
    wrapped, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "legato":
        wrapped, optimizer = attach(wrapped, optimizer, default_buckets(model))
    return train(wrapped, optimizer, STEPS)


@row("views", "four ranks")
def test_a_hook_and_missing_gradients(kind):
    """What counts gradients is sent beside a hook."""
    model = Partial()
    wrapped, optimizer = wrap_whole(kind, model, sgd(model.parameters()), find_unused_parameters=True)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    return train(wrapped, optimizer, STEPS)


# ---- layouts ---------------------------------------------------------------------------


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


@row("views", "four ranks")
def test_sparse_gradients(kind):
    def look(wrapped, *_):
        assert wrapped.module.words.weight.grad.is_sparse

    return trained(kind, Sparse(), "sgd", inner=look)


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


@row("views", "four ranks")
def test_strides_of_another_memory_format(kind):
    """Gradients that are views, and are added to."""
    model = Depthwise()
    wrapped, optimizer = wrap_whole(kind, model, adam(model.parameters()))
    return train(wrapped, optimizer, STEPS, set_to_none=False)


# ---- options ---------------------------------------------------------------------------


class Twice(Dense):
    """Re-entrant checkpointing of a layer that is used twice: two gradients in one backward pass."""

    def forward(self, x):
        x = F.gelu(self.first(x.to(self.first.weight.dtype)))
        for _ in range(2):
            x = checkpoint(lambda x: F.gelu(self.second(x)), x, use_reentrant=True)
        return self.third(x)


@row("views", "four ranks", *SHARDED)
def test_static_graph(kind):
    model = Twice()
    with first_passes(2):
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()), static_graph=True)
    return train(wrapped, optimizer, STEPS)


@row("views", "four ranks", *SHARDED)
def test_parameters_that_are_ignored_are_each_ranks_own(kind):
    model = Dense()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])
    return trained(kind, model, sgd)


@row("views", "four ranks")
def test_parameters_that_are_ignored_may_have_other_shapes(kind):
    model = Dense()
    model.own = nn.Linear(4, 4 + dist.get_rank())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.weight", "own.bias"])
    return trained(kind, model, sgd)


@row("views", "four ranks")
def test_device_mesh_in_place_of_a_group(kind):
    model, mesh = Dense(), init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), device_mesh=mesh)
    return train(wrapped, optimizer, STEPS)


@row("views", "four ranks")
def test_the_default_group_is_destroyed_and_made_anew(kind):
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


def uneven_inputs(kind):
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    with wrapped.join():
        train(wrapped, optimizer, 4 if dist.get_rank() == 1 else 9)
    return wrapped


@row("views", "four ranks")
def test_join(kind):
    """Rank 1 has fewer batches than the others, which go on."""
    return uneven_inputs(kind)


@on_ranks(2)
def test_join_is_refused_where_gradients_are_sharded():
    with pytest.raises(ValueError, match=r"join\(\) under a sharded plan"):
        in_mode(["sharded optimizer"], uneven_inputs, "legato")


# ---- what is wrapped -------------------------------------------------------------------


@row("four ranks", *SHARDED)
def test_a_users_own_ddp_stays_the_same_object(kind):
    """And one for everybody who asks."""
    model = Dense()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(model.parameters())
    if kind == "legato":
        same, optimizer = attach(wrapped, optimizer, random_plan(model, 3))
        assert same is wrapped and isinstance(same, DistributedDataParallel)
    return train(wrapped, optimizer, STEPS)


def pickled(wrapped):
    return pickle.loads(pickle.dumps(wrapped))


@row("views", "four ranks")
@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_copies_are_plain_ddps_which_train_on(kind, how):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    other = how(train(wrapped, optimizer, 5))
    assert type(other) is DistributedDataParallel
    return train(other, sgd(other.parameters()), 5)
