"""Modules added and compute scaled (Network Operator Edition, sections 8.5 and 8.6)."""

import pytest

from legato import Op, Tensor, Workload, zoo
from legato.core.errors import InputError
from legato.lab.hypothetical import add_modules, scale_compute
from legato.zoo import image
from legato.zoo.builder import Builder
from legato.zoo.inception import Conv, Pool, module
from legato.zoo.lower import lower

DEVICE = zoo.DEVICES["k80"]
BRANCHES = [[Conv(4)], [Conv(2), Conv(2, 3)], [Pool(), Conv(2)]]


def inception(*names):
    """A stem, these modules one after the other, one more, and a classifier."""
    net = Builder("toy", 4)
    x = image.conv_norm(net.input(9, 9, 3), "stem", 8, 3)
    for name in (*names, "last"):
        x = module(x, name, BRANCHES, image.conv_norm)
    image.loss(image.dense(image.global_pool(x, "pool"), "logits", 10))
    return lower(net.build(), DEVICE)


def residual(*names):
    """Like `inception`, of residual units between two others: their gradients pass by the units too."""
    net = Builder("toy", 4)
    x = image.conv_norm(net.input(9, 9, 3), "stem", 8, 3)
    for name in ("first", *names, "last"):
        with net.scope(name):
            y = image.conv_norm(image.activation(image.batch_norm(x, "bn"), "relu"), "conv", 8, 3)
            x = image.add(x, y, "add")
    image.loss(image.dense(image.global_pool(image.activation(x, "relu"), "pool"), "logits", 10))
    return lower(net.build(), DEVICE)


@pytest.mark.parametrize("model", [inception, residual])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_adding_modules_is_building_the_longer_model(model, count):
    added = add_modules(model("m"), "m", count)
    built = model("m", *(f"m+{i}" for i in range(1, count + 1)))
    assert added.name == f"toy+{count}xm"
    assert added.ops == built.ops
    assert sorted(added.tensors, key=lambda t: (t.ready_after, t.name)) == sorted(
        built.tensors, key=lambda t: (t.ready_after, t.name)
    )


def test_the_paper_s_two_modules():
    """One is compute intensive, the other network intensive: seconds of computation a byte, of what is added."""
    base = zoo.workload("inception-v3", device="k80")
    seconds_per_byte = []
    for name in ("mixed_35x35x288b", "mixed_17x17x768e"):
        assert add_modules(base, name, 0) is base
        once, most = add_modules(base, name, 1), add_modules(base, name, 125)
        compute_s, nbytes = once.compute_s - base.compute_s, once.nbytes - base.nbytes
        assert most.nbytes - base.nbytes == 125 * nbytes
        assert most.compute_s - base.compute_s == pytest.approx(125 * compute_s)
        seconds_per_byte.append(compute_s / nbytes)
    assert seconds_per_byte[0] > 3 * seconds_per_byte[1]


def test_optimizer_ops_stay_where_they_are():
    ops = (
        Op("in.f", "forward", 1.0), Op("m.f", "forward", 2.0, (0,)), Op("out.f", "forward", 1.0, (1,)),
        Op("out.b", "backward", 1.0, (2,)), Op("m.b", "backward", 4.0, (1, 3)), Op("in.b", "backward", 1.0, (4,)),
        Op("step", "optimizer", 1.0, (4,)),
    )  # fmt: skip
    base = Workload("w", ops, (Tensor("m.w", 8, 4, (6, 1)),), untraced_s=9.0)
    longer = add_modules(base, "m", 1)
    names = [op.name for op in longer.ops]
    assert names == ["in.f", "m.f", "m+1.f", "out.f", "out.b", "m+1.b", "m.b", "in.b", "step"]
    assert [op.deps for op in longer.ops] == [(), (0,), (1,), (2,), (3,), (2, 4), (1, 5), (6,), (6,)]
    assert longer.tensors == (Tensor("m+1.w", 8, 5, (8, 2)), Tensor("m.w", 8, 6, (8, 1)))
    assert longer.untraced_s is None


@pytest.mark.parametrize(
    ("name", "part", "count", "expected"),
    [
        ("inception-v3", "mixed_35x35x288", 1, "unknown module 'mixed_35x35x288'; did you mean 'mixed_35x35x288"),
        ("inception-v3", "mixed_35x35x288b", -1, "count: -1"),
        ("inception-v3", "mixed_35x35x288b", 99_999_999_999, "count: 99999999999"),
        ("inception-v3", "conv0", 1, "reads 0 values"),
        ("inception-v3", "aux_logits", 1, "gives 0 to others"),
        ("transformer", "decoder_3", 1, "reads 2 values"),
        ("vgg-16", "", 1, "unknown module ''"),
    ],
)
def test_what_is_no_module(name, part, count, expected):
    with pytest.raises(InputError, match=expected):
        add_modules(zoo.workload(name), part, count)


def test_faster_compute():
    base = zoo.workload("resnet-v2-200")
    fast = scale_compute(base, 2.5)
    assert fast.compute_s == pytest.approx(base.compute_s / 2.5)
    assert fast.tensors == base.tensors and [op.deps for op in fast.ops] == [op.deps for op in base.ops]
    assert fast.device == "v100 x 2.5"
    for speedup in (0, -1, float("inf")):
        with pytest.raises(InputError, match="speedup"):
            scale_compute(base, speedup)
