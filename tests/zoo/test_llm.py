"""Language models: sizes and arithmetic in closed form, published steps, and how large models are trained."""

import math
import runpy
from pathlib import Path

import pytest

from legato import zoo
from legato.core.errors import InputError, TooLargeError
from legato.zoo import image, language_model, shaped
from legato.zoo.builder import Builder

ROOT = Path(__file__).resolve().parents[2]
#: One FLOP a second; everything else is free.
ARITHMETIC = zoo.Device("arithmetic", 1.0, 1e30, 0.0, 1.0, bf16_flops_per_s=1.0)
NUMBERS = {"layers": 3, "hidden": 64, "heads": 4, "vocabulary": 100, "sequence": 32, "kv_heads": 2}
SMALL = shaped(**NUMBERS)
MIXTURE = shaped(**NUMBERS, experts=4, active_experts=2)
GPT = shaped(layers=2, hidden=48, heads=4, vocabulary=100, sequence=16, family="gpt")

published = runpy.run_path(str(ROOT / "benchmarks" / "language_models.py"))


@pytest.mark.parametrize("name", zoo.SHAPES)
def test_published_sizes(name):
    printed, _, exact = published["SIZES"][name]
    parameters = zoo.model(name).parameters
    assert exact in (None, parameters)
    billions = float(printed.removesuffix("billion").removesuffix("B"))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_mixtral_s_active_parameters():
    """12.9 billion: of the experts, a token uses a quarter (Mixtral, section 1)."""
    network = zoo.model("mixtral-8x7b")
    experts = sum(v.size for v in network.variables if "/expert" in v.name)
    assert network.parameters - experts * 3 // 4 == published["MIXTRAL_ACTIVE"]


def test_the_default_mlp_is_that_of_llama_3():
    network = language_model(shaped(layers=80, hidden=8192, heads=64, vocabulary=128_256, kv_heads=8))
    assert (network.name, network.parameters) == ("llm-70.6b", 70_553_706_496)
    assert language_model(SMALL).name == "llm-179k"
    assert language_model(published["gpt"](128, 25_600, 160)).name == "llm-1.01t"


def test_parameters_of_a_gpt():
    """Narayanan et al. 2021, Eq. 2, which leaves out the last normalization."""
    for layers, hidden, heads in [(24, 2304, 24), (96, 12_288, 96)]:
        shape = published["gpt"](layers, hidden, heads)
        first = 12 * layers * hidden**2 + 13 * layers * hidden
        expected = first + (shape.vocabulary + shape.sequence) * hidden
        assert language_model(shape).parameters == expected + 2 * hidden


def total(job, *phases):
    return math.fsum(op.duration_s for op in job.ops if op.phase in phases)


def compute(shape, device=ARITHMETIC, **options):
    return zoo.workload(language_model(shape), device=device, **options)


@pytest.mark.parametrize("batch", [1, 4])
def test_flops_of_a_gpt(batch):
    """Narayanan et al. 2021, section 5.1: with recomputation. They count all pairs of tokens, a causal kernel half."""
    for shape in (GPT, published["gpt"](24, 2304, 24)):
        hidden, length = shape.hidden, shape.sequence
        unseen = 8 * batch * shape.layers * hidden * length * (length - 1)
        job = compute(shape, batch_size=batch, recompute=True)
        assert job.compute_s == pytest.approx(published["megatron_flops"](shape, batch) - unseen, rel=1e-12)


@pytest.mark.parametrize("shape", [SMALL, zoo.SHAPES["llama-3-8b"], MIXTURE, zoo.SHAPES["mixtral-8x7b"]])
def test_flops_are_six_a_parameter_and_token_and_the_attention(shape):
    network = language_model(shape)
    used = sum(
        v.size * (shape.active_experts if "/expert" in v.name else shape.experts) // shape.experts
        for v in network.variables
        if len(v.shape) == 2 and v.name != "embeddings"
    )
    pairs = shape.sequence * (shape.sequence + 1) // 2
    attention = 4 * shape.layers * shape.hidden * pairs
    assert network.flops == 2 * used * shape.sequence + attention
    assert compute(shape).compute_s == pytest.approx(3 * network.flops)


def test_published_steps():
    """Computing is a part of a step; the page shows what the benchmark prints."""
    ratios = [step.ours().compute_s / step.published_s for step in published["STEPS"]]
    assert min(ratios) > 0.55 and max(ratios) < 1.02
    page = (ROOT / "docs" / "language_models.md").read_text(encoding="utf-8")
    for row in published["rows"]():
        assert row in page


def test_a_layer_by_hand():
    job = compute(
        shaped(layers=1, hidden=8, heads=2, vocabulary=10, sequence=4, kv_heads=1, intermediate=12), batch_size=3
    )
    flops = {op.name: op.duration_s for op in job.ops if op.duration_s > 1e-9}
    tokens = 3 * 4
    forward = {
        "attention/query": 2 * tokens * 8 * 8,
        "attention/key": 2 * tokens * 8 * 4, "attention/value": 2 * tokens * 8 * 4,
        "attention/core": 3 * 4 * 8 * (1 + 2 + 3 + 4), "attention/output": 2 * tokens * 8 * 8,
        "mlp/gate": 2 * tokens * 8 * 12, "mlp/up": 2 * tokens * 8 * 12, "mlp/down": 2 * tokens * 12 * 8,
    }  # fmt: skip
    forward = {f"layer0/{name}": count for name, count in forward.items()} | {"output": 2 * tokens * 8 * 10}
    assert {name: count for name, count in flops.items() if "grad" not in name} == forward
    for name, count in forward.items():
        fused = name.endswith("core")
        parts = ["grad"] if fused else ["grad-input", "grad-weights"]
        assert [flops[f"{name}/{part}"] for part in parts] == [2 * count if fused else count] * len(parts)
    assert {t.name: t.nbytes for t in job.tensors} == {
        "embeddings": 2 * 80, "output/weights": 2 * 80, "norm/gamma": 16,
        "layer0/attention/norm/gamma": 16, "layer0/attention/query/weights": 2 * 64,
        "layer0/attention/key/weights": 2 * 32, "layer0/attention/value/weights": 2 * 32,
        "layer0/attention/output/weights": 2 * 64, "layer0/mlp/norm/gamma": 16,
        "layer0/mlp/gate/weights": 2 * 96, "layer0/mlp/up/weights": 2 * 96, "layer0/mlp/down/weights": 2 * 96,
    }  # fmt: skip


def test_the_experts_of_a_layer_are_computed_together_and_sent_one_by_one():
    job = compute(MIXTURE)
    experts = [t for t in job.tensors if t.name.startswith("layer1/experts/gate")]
    assert len(experts) == 4 and {t.nbytes for t in experts} == {2 * 64 * 224}
    assert {job.ops[t.ready_after].name for t in experts} == {"layer1/experts/gate/grad-weights"}


@pytest.mark.parametrize("shape", [SMALL, MIXTURE, GPT])
def test_recomputation_repeats_each_block_before_its_gradients(shape):
    plain, again = compute(shape, "h100"), compute(shape, "h100", recompute=True)
    added = [op for op in again.ops if op.name.endswith("/recompute")]
    assert [op.name for op in added] == [f"layer{i}/recompute" for i in reversed(range(shape.layers))]
    forward = {i: total_of(plain, f"layer{i}/") for i in range(shape.layers)}
    assert [op.duration_s for op in added] == pytest.approx([forward[i] for i in reversed(range(shape.layers))])
    assert total(again, "forward") == total(plain, "forward")
    assert total(again, "backward") == pytest.approx(total(plain, "backward") + sum(forward.values()))
    assert [(t.name, t.nbytes) for t in again.tensors] == [(t.name, t.nbytes) for t in plain.tensors]
    ids = {op.name: i for i, op in enumerate(again.ops)}
    before = behind(again)
    for tensor in again.tensors:
        for i in range(shape.layers):
            waits = before[tensor.ready_after] >> ids[f"layer{i}/recompute"] & 1
            layer = int(tensor.name[5 : tensor.name.index("/")]) if tensor.name.startswith("layer") else None
            if layer is not None:
                assert waits == (i >= layer)
            elif tensor.name in ("norm/gamma", "output/weights"):
                assert not waits


def total_of(job, prefix):
    return math.fsum(op.duration_s for op in job.ops if op.phase == "forward" and op.name.startswith(prefix))


def behind(job):
    """For every op, a bit for each op that must run before it."""
    found = []
    for op in job.ops:
        mask = 0
        for dep in op.deps:
            mask |= found[dep] | 1 << dep
        found.append(mask)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_accumulation_sends_the_gradients_of_the_last_micro_batch(recompute):
    one = compute(SMALL, "h100", batch_size=2, recompute=recompute)
    many = compute(SMALL, "h100", batch_size=10, accumulate=5, recompute=recompute)
    (at,) = [i for i, op in enumerate(many.ops) if op.name == "accumulation"]
    assert many.batch_size == 10 and many.compute_s == pytest.approx(5 * one.compute_s)
    assert many.ops[:at] == one.ops[:at] and many.ops[at].phase == "forward"
    assert total(many, "backward") == pytest.approx(total(one, "backward"))
    assert [(op.name, op.duration_s) for op in many.ops[at + 1 :]] == [(op.name, op.duration_s) for op in one.ops[at:]]
    assert many.ops[at].deps == one.ops[at].deps  # after the loss, as the backward pass of a single batch
    assert many.ops[at + 1].deps == (at,)
    assert [(t.name, t.nbytes, t.ready_after - 1, t.readers) for t in many.tensors] == [
        (t.name, t.nbytes, t.ready_after, t.readers) for t in one.tensors
    ]
    fixed = compute(SMALL, "h100", batch_size=10, accumulate=5, recompute=recompute, forward_s=1.0, backward_s=2.0)
    assert (total(fixed, "forward"), total(fixed, "backward")) == (pytest.approx(1 + 4 * 3), pytest.approx(2))


def test_a_device_of_a_replica_has_its_part():
    whole, part = (compute(SMALL, batch_size=6, replica_devices=n) for n in (1, 3))
    assert part.device == "arithmetic bf16 (1 of 3)"
    assert [(op.name, op.deps) for op in part.ops] == [(op.name, op.deps) for op in whole.ops]
    assert part.compute_s == pytest.approx(whole.compute_s / 3)
    for one, third in zip(whole.tensors, part.tensors, strict=True):
        matrix = "weights" in one.name or one.name == "embeddings"
        assert third.nbytes == (2 * -(-one.nbytes // 6) if matrix else one.nbytes)


def test_other_transformers_recompute_too():
    for name, blocks in (("gpt2", 12), ("bert-base", 12), ("transformer", 12)):
        job = zoo.workload(name, recompute=True)
        assert sum(op.name.endswith("/recompute") for op in job.ops) == blocks
        assert job.compute_s > 1.2 * zoo.workload(name).compute_s


def test_a_model_of_one_s_own_is_lowered_as_a_named_one():
    net = Builder("own", 2, device="k80")
    image.loss(image.dense(net.input(4), "dense", 3))
    job = zoo.workload(net.build())
    assert (job.name, job.batch_size, job.device) == ("own", 2, "k80")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"layers": 0}, "layers: 0"),
        ({"layers": 4097}, r"layers: 4,097 \(expected 1 to 4,096\)"),
        ({"vocabulary": -1}, "vocabulary: -1"),
        ({"sequence": 2**40}, "sequence: 1,099,511,627,776"),
        ({"heads": 5}, r"hidden: 64 \(expected a multiple of the 5 heads\)"),
        ({"kv_heads": 3}, r"kv_heads: 3 \(expected a divisor of the 4 heads\)"),
        ({"experts": 2, "active_experts": 3}, "active_experts: 3"),
        ({"experts": 2, "family": "gpt"}, "these experts only in whole jobs"),
    ],
)
def test_wrong_shapes(wrong, expected):
    with pytest.raises(InputError, match=expected):
        language_model(shaped(**NUMBERS | wrong))


def test_too_large_shapes():
    with pytest.raises(TooLargeError, match="layers x experts"):
        language_model(shaped(**NUMBERS | {"layers": 65, "experts": 512}))
    language_model(shaped(**NUMBERS | {"layers": 61, "experts": 512}))
