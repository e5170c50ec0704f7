"""What the zoo makes of a network: the graph of an iteration, its times, its tensors."""

import subprocess
import sys

import pytest

from legato import zoo
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.zoo import image, sequence
from legato.zoo.builder import Builder
from legato.zoo.lower import lower

#: One value of 32 bits a second is moved, and arithmetic is free, or the other way round.
MEMORY = zoo.Device("memory", 1e30, 4.0, 0.0, 1.0)
ARITHMETIC = zoo.Device("arithmetic", 1.0, 1e30, 0.0, 1.0, bf16_flops_per_s=1.0)


def residual():
    """conv1, then conv2 beside a shortcut, then a loss."""
    net = Builder("residual", 2)
    x = image.conv(net.input(4, 4, 3), "conv1", 8, 3, bias=False)
    image.loss(image.add(image.conv(x, "conv2", 8, 3), x, "add"))
    return net.build()


def test_a_residual_network_by_hand():
    job = lower(residual(), ARITHMETIC)
    by_name = {op.name: op for op in job.ops}
    depends = {op.name: [job.ops[dep].name for dep in op.deps] for op in job.ops}
    assert depends == {
        "conv1": [], "conv2": ["conv1"], "add": ["conv1", "conv2"], "loss": ["add"],
        "loss/grad": ["loss"],
        "conv2/grad-input": ["loss/grad"], "conv2/grad-weights": ["loss/grad"],
        "conv1/grad-sum": ["loss/grad", "conv2/grad-input"],
        "conv1/grad-weights": ["conv1/grad-sum"],
    }  # fmt: skip
    flops = {"conv1": 2 * 2 * 16 * 9 * 3 * 8, "conv2": 2 * 2 * 16 * 9 * 8 * 8}  # batch, multiply-add, pixels, window
    for name, expected in flops.items():
        assert by_name[name].duration_s == by_name[f"{name}/grad-weights"].duration_s == expected
    assert by_name["conv2/grad-input"].duration_s == flops["conv2"]
    tensors = [(t.name, t.nbytes, job.ops[t.ready_after].name, t.readers) for t in job.tensors]
    assert tensors == [
        ("conv2/weights", 4 * 9 * 8 * 8, "conv2/grad-weights", (1,)),
        ("conv2/biases", 4 * 8, "conv2/grad-weights", (1,)),
        ("conv1/weights", 4 * 9 * 3 * 8, "conv1/grad-weights", (0,)),
    ]


def test_memory_traffic_by_hand():
    times = {op.name: op.duration_s for op in lower(residual(), MEMORY).ops}
    x, y = 2 * 48, 2 * 128  # values of a batch of two: images, and what each convolution gives
    assert times["conv1"] == times["conv1/grad-weights"] == x + y + 216
    assert times["conv2"] == times["conv2/grad-input"] == y + y + 576 + 8
    assert times["add"] == times["conv1/grad-sum"] == 3 * y
    assert times["loss"] == 3 * y and times["loss/grad"] == 3 * y + 2


def test_tied_weights_are_one_tensor_with_two_readers():
    for name, tied, readers in [
        ("gpt2", "wte", ["wte/lookup", "lm_head"]),
        ("bert-base", "word_embeddings", ["word_embeddings/lookup", "mlm/decoder"]),
        (
            "transformer-shared",
            "embed_weight",
            ["source_embed_weight/lookup", "target_embed_weight/lookup", "output"],
        ),
    ]:
        job = zoo.workload(name)
        (tensor,) = [t for t in job.tensors if t.name == tied]
        assert [job.ops[r].name for r in tensor.readers] == readers
        parts = [job.ops[dep].name for dep in job.ops[tensor.ready_after].deps]
        assert sorted(parts) == sorted(f"{reader}/grad-weights" for reader in readers)


def masks(job: Workload):
    """For every op, a bit for each op that must run before it."""
    before = []
    for op in job.ops:
        mask = 0
        for dep in op.deps:
            mask |= before[dep] | 1 << dep
        before.append(mask)
    return before


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_gradient_waits_for_exactly_the_layers_behind_it(name):
    """Before a variable's gradient come the input gradients of all layers that its value flows through, no others."""
    network, job = zoo.model(name), zoo.workload(name)
    before, ids = masks(job), {op.name: i for i, op in enumerate(job.ops)}
    assert len(ids) == len(job.ops)
    passing = []  # the op that passes a gradient through layer i to its inputs
    for layer in network.layers:
        op = ids.get(f"{layer.name}/grad", ids.get(f"{layer.name}/grad-input"))
        passing.append(0 if op is None else 1 << op)
    behind = [0] * len(network.layers)
    for i in range(len(network.layers) - 1, -1, -1):
        for j in network.layers[i].inputs:
            behind[j] |= behind[i] | passing[i]
    counted = sum(passing)
    for tensor in job.tensors:
        parts = [tensor.ready_after]
        if job.ops[tensor.ready_after].name == f"{tensor.name}/grad-sum":
            parts = list(job.ops[tensor.ready_after].deps)
        assert len(parts) == len(tensor.readers)
        expected = 0
        for reader in tensor.readers:
            expected |= behind[reader]
        found = 0
        for part in parts:
            found |= before[part]
        assert found & counted == expected


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_workload_holds_every_trained_variable_once(name):
    network, job = zoo.model(name), zoo.workload(name)
    width = zoo.PRECISIONS[network.precision]
    assert sorted((t.name, t.nbytes) for t in job.tensors) == sorted(
        (v.name, width * v.size) for v in network.trainable
    )
    assert job.nbytes == network.nbytes
    assert [t.ready_after for t in job.tensors] == sorted(t.ready_after for t in job.tensors)
    assert all(t.readers for t in job.tensors)
    assert job.name == network.name == name and job.batch_size == network.batch_size
    assert job.device == ("h100 bf16" if name in zoo.SHAPES else "v100")
    leaves = {dep for op in job.ops for dep in op.deps}
    for i, op in enumerate(job.ops):
        if op.name.endswith("/grad-weights") and i in leaves:
            sums = [other.name for other in job.ops if i in other.deps]
            assert len(sums) == 1 and sums[0] in {f"{t.name}/grad-sum" for t in job.tensors}


@pytest.mark.parametrize("name", zoo.MODELS)
def test_backward_is_twice_forward(name):
    """In arithmetic, but for the first layer's input gradient, which nobody needs."""
    network = zoo.model(name)
    job = lower(network, ARITHMETIC)
    forward = sum(op.duration_s for op in job.ops if op.phase == "forward")
    backward = sum(op.duration_s for op in job.ops if op.phase == "backward")
    assert forward == pytest.approx(network.batch_size * network.flops)
    first = network.layers[0]
    missing = first.flops if first.gradient == "split" else 0
    if name == "resnet-v2-50-mxnet":
        assert first.name == "bn_data" and missing == 0  # the images are normalized by what is trained
    assert backward == pytest.approx(2 * forward - network.batch_size * missing)


def test_published_totals_scale_each_pass_on_its_own():
    free = zoo.workload("inception-v3", device="k80")
    fixed = zoo.workload("inception-v3", device="k80", forward_s=0.176, backward_s=0.296)
    sums = [sum(op.duration_s for op in fixed.ops if op.phase == phase) for phase in ("forward", "backward")]
    assert sums == pytest.approx([0.176, 0.296])
    ratios = {op.phase: b.duration_s / op.duration_s for op, b in zip(free.ops, fixed.ops, strict=True)}
    for op, scaled in zip(free.ops, fixed.ops, strict=True):
        assert scaled.duration_s / op.duration_s == pytest.approx(ratios[op.phase])
    half = zoo.workload("inception-v3", device="k80", backward_s=0.296)
    assert [a.duration_s for a in half.ops[:9]] == [b.duration_s for b in free.ops[:9]]


def test_batch_size_scales_the_work_and_not_the_tensors():
    one, many = (zoo.workload("resnet-v1-50", batch_size=n) for n in (1, 64))
    assert one.tensors == many.tensors and [op.deps for op in one.ops] == [op.deps for op in many.ops]
    assert 10 * one.compute_s < many.compute_s < 64 * one.compute_s


def test_sequence_layers_by_hand():
    net = Builder("lstm", 1)
    x = sequence.embedding(net.input(5), "words", 10, 4)
    image.loss(sequence.lstm(x, "lstm", 6))
    network = net.build()
    assert [v.shape for v in network.variables] == [(10, 4), (24, 4), (24,), (24, 6), (24,)]
    assert network.flops == 2 * 5 * 24 * (4 + 6)
    net = Builder("attention", 1)
    q, k = (sequence.embedding(net.input(n), name, 10, 8) for name, n in (("q", 3), ("k", 5)))
    assert sequence.attention("core", q, k, k, 2).shape == (3, 8)
    assert net.build().flops == 2 * (3 * 5 * 8 + 3 * 5 * 8)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"batch_size": 0}, "batch_size: 0"),
        ({"forward_s": 0.0}, "forward_s: 0.0"),
        ({"backward_s": float("nan")}, "backward_s: nan"),
        ({"device": "v1000"}, "did you mean 'v100'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; did you mean"),
        ({"gradients": "float"}, "unknown precision 'float'"),
        (
            {"device": "v100", "precision": "bf16"},
            r"device 'v100': no peak in bf16 \(expected precision fp32 or fp16\)",
        ),
        ({"recompute": True}, "recompute: vgg-16 is not made of blocks"),
        ({"accumulate": 0}, "accumulate: 0"),
        ({"accumulate": 5}, "batch_size: 32 .*multiple of the 5 micro-batches"),
        ({"replica_devices": 0}, "replica_devices: 0"),
    ],
)
def test_wrong_arguments(arguments, expected):
    with pytest.raises(InputError, match=expected):
        zoo.workload("vgg-16", **arguments)


def test_wrong_names_and_devices():
    for call in (zoo.model, zoo.variables, zoo.workload):
        with pytest.raises(InputError, match="did you mean 'resnet-v1-50'"):
            call("resnet-v1-5")
    with pytest.raises(InputError, match="flops_per_s: 0"):
        zoo.Device("slow", 0, 1.0)
    with pytest.raises(InputError, match="overhead_s: -1"):
        zoo.Device("early", 1.0, 1.0, -1)
    with pytest.raises(InputError, match=r"efficiency: 1\.5"):
        zoo.Device("magic", 1.0, 1.0, efficiency=1.5)
    with pytest.raises(InputError, match="bf16_flops_per_s: 0"):
        zoo.Device("none", 1.0, 1.0, bf16_flops_per_s=0.0)


def test_sixteen_bits_are_faster_and_half_as_many_bytes():
    full, half = (zoo.workload("resnet-v1-50", device="v100", precision=precision) for precision in ("fp32", "fp16"))
    assert half.nbytes * 2 == full.nbytes and half.device == "v100 fp16"
    assert [op.deps for op in half.ops] == [op.deps for op in full.ops]
    device = zoo.DEVICES["v100"]
    arithmetic = [device.time_s(1e12, 0, precision) - device.overhead_s for precision in ("fp32", "fp16")]
    assert arithmetic == pytest.approx([1e12 / (0.5 * 15.7e12), 1e12 / (0.5 * 125e12)])
    mixed = zoo.workload("resnet-v1-50", device="v100", precision="fp16", gradients="fp32")
    assert mixed.ops == half.ops and mixed.nbytes == full.nbytes


def test_the_zoo_needs_nothing_heavy():
    code = "import sys, legato.zoo; print({'numpy', 'torch'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
