"""The `ddp` scheduler, and `bucket_caps`, against the buckets of the real reducer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nets import in_turn
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice
from legato.schedule import schedule
from legato.schedule.published.ddp import bucket_caps, ddp

MIB = 2**20
NETWORK = Cluster(2, {"ring": LinearCost(1e-3, 1e-9)})


def buckets(plan):
    return [[piece.tensor for piece in message.slices] for message in plan.messages]


def sizes(plan):
    return [message.nbytes for message in plan.messages]


def test_default_buckets_by_hand():
    workload = in_turn([1e-3] * 7, [mib * MIB for mib in [1, 24, 2, 25, 30, 3, 4]])
    assert [size // MIB for size in sizes(ddp(workload, NETWORK))] == [1, 26, 25, 30, 7]
    assert [size // MIB for size in sizes(ddp(workload, NETWORK, bucket_bytes=4 * MIB))] == [25, 27, 30, 7]
    assert [size // MIB for size in sizes(ddp(workload, NETWORK, first_bucket_bytes=26 * MIB))] == [27, 25, 30, 7]
    plan = ddp(workload, NETWORK, bucket_cap_mb_list=[1, 50, 3])
    assert [size // MIB for size in sizes(plan)] == [1, 51, 30, 3, 4]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bucket_bytes": 0}, "bucket of 0 bytes"),
        ({"first_bucket_bytes": -1}, "bucket of -1 bytes"),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket of 0 bytes"),
        ({"bucket_cap_mb_list": []}, "expected at least one finite size"),
        ({"bucket_cap_mb_list": [float("nan")]}, "expected at least one finite size"),
        ({"bucket_cap_mb_list": [1], "bucket_bytes": 5}, "expected one of them"),
    ],
)
def test_caps_that_make_no_sense(options, error):
    with pytest.raises(InputError, match=error):
        ddp(in_turn([1e-3], [4]), NETWORK, **options)


@pytest.mark.parametrize("name", ["fifo", "single", "ddp", "mg-wfbp", "merge-optimal"])
@given(workload=workloads(max_tensors=8), cluster=clusters())
def test_bucket_caps_form_the_same_messages(name, workload, cluster):
    plan = schedule(name, workload, cluster)
    assert buckets(ddp(workload, cluster, bucket_cap_mb_list=bucket_caps(plan))) == buckets(plan)


@given(st.integers(1, 2**50))
def test_bucket_caps_are_exact(nbytes):
    (cap,) = bucket_caps(Plan("p", (Message((Slice("t", 0, nbytes),)),)))
    assert int(cap * MIB) == nbytes


@pytest.mark.parametrize(
    ("slices", "kind", "error"),
    [
        ([("a", 0, 2), ("a", 2, 4)], "all_reduce", r"messages\[1\]: 'a' is partitioned"),
        ([("a", 2, 4)], "all_reduce", r"messages\[0\]: 'a' is partitioned"),
        ([("a", 0, 4)], "reduce_scatter", r"messages\[0\].kind: 'reduce_scatter'"),
    ],
)
def test_no_buckets_for_what_ddp_cannot_do(slices, kind, error):
    with pytest.raises(PlanError, match=error):
        bucket_caps(Plan("p", tuple(Message((Slice(*piece),), kind) for piece in slices)))


class Reducer:
    """The real one, on a group of one process."""

    def __init__(self, torch, build):
        self.torch, self.build = torch, build

    def workload(self):
        """Gradients in the order in which a plain backward pass produces them."""
        model, batch = self.build()
        ready = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: ready.append((name, p.numel() * 4)))
        model(batch).sum().backward()
        names, nbytes = zip(*ready, strict=True)
        return in_turn([1e-3] * len(ready), nbytes, names=names)

    def buckets(self, steps=3, **options):
        """Names of the parameters in each bucket, in the last of some steps."""
        model, batch = self.build()
        names = {id(p): name for name, p in model.named_parameters()}
        wrapped = self.torch.nn.parallel.DistributedDataParallel(model, **options)
        seen = {}

        def hook(state, bucket):
            seen[bucket.index()] = [names[id(p)] for p in bucket.parameters()]
            done = self.torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, hook)
        for _ in range(steps):
            seen.clear()
            wrapped(batch).sum().backward()
        return [seen[k] for k in sorted(seen)]


def small(torch):
    """Odd sizes, a branch, a tied weight, a bias that stands before its weight."""
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(13))
            self.embed = nn.Embedding(17, 13)
            self.left = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 13))
            self.right = nn.Linear(13, 13, bias=False)
            self.out = nn.Linear(13, 17)
            self.out.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            x = self.embed(x) + self.shift
            return self.out(self.left(x) + self.right(x)) * self.scale

    return Model(), torch.arange(6)


def large(torch):
    """Sizes at, one float below and one above the default caps of 1 MiB and 25 MiB."""
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            mib = MIB // 4
            counts = [3, 25 * mib, 5, mib // 2, 25 * mib + 1, 24 * mib, mib - 1, 1, mib - 1]
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(count)) for count in counts])

        def forward(self, x):
            for weight in self.weights:
                x = x + weight[:1] * x
            return x

    return Model(), torch.ones(1)


@pytest.fixture(scope="module")
def reducers(tmp_path_factory):
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs torch.distributed, and a process group of its own")
    store = tmp_path_factory.mktemp("ddp") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield {build.__name__: Reducer(torch, lambda build=build: build(torch)) for build in (small, large)}
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "theirs", "ours"),
    [
        ("small", {}, {}),
        ("large", {}, {}),
        ("large", {"bucket_cap_mb": 1}, {"bucket_bytes": MIB}),
        ("large", {"bucket_cap_mb": 30}, {"bucket_bytes": 30 * MIB}),
        ("small", {"bucket_cap_mb": 300 / MIB}, {"bucket_bytes": 300}),
        ("small", {"bucket_cap_mb": 1 / MIB}, {"bucket_bytes": 1}),
        ("small", {"bucket_cap_mb_list": [4 / MIB, 1500.5 / MIB, 53 / MIB]}, None),
        ("small", {"bucket_cap_mb_list": [4 / MIB, 1500 / MIB, 53 / MIB], "static_graph": True}, None),
        ("large", {"bucket_cap_mb_list": [1, 50, 2.5]}, None),
    ],
    ids=repr,
)
def test_predicts_the_reducer(reducers, model, theirs, ours):
    reducer = reducers[model]
    if ours is None:
        ours = {"bucket_cap_mb_list": theirs["bucket_cap_mb_list"]}
    assert reducer.buckets(**theirs) == buckets(ddp(reducer.workload(), NETWORK, **ours))


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("name", ["merge-optimal", "mg-wfbp", "fifo", "single"])
def test_the_reducer_forms_a_plans_messages_as_its_buckets(reducers, name, static_graph):
    found = set()
    for alpha in (1e-4, 2.5e-3):
        for beta in (1e-7, 1e-5):
            workload = reducers["small"].workload()
            plan = schedule(name, workload, Cluster(2, {"c": LinearCost(alpha, beta)}))
            real = reducers["small"].buckets(bucket_cap_mb_list=bucket_caps(plan), static_graph=static_graph)
            assert real == buckets(plan)
            found.add(len(real))
    assert len(found) > 1 or name in ("fifo", "single")
