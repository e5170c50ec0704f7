"""Steps of whole jobs: FLOPs, bytes, memory and times against the formulas of papers, and what always holds."""

import itertools
import random
from dataclasses import asdict

import pytest
from support.jobs import GPT, IDEAL, LLAMA, MIXTURE, job, replace
from support.strategies import seeds

import legato
from legato import zoo
from legato.core.errors import InputError
from legato.core.job import HIDDEN, Framework, Mesh, WorkerGroup
from legato.whole_jobs.cost import all_to_all, collective, send
from legato.whole_jobs.flow.step import network_of, simulate
from legato.whole_jobs.memory import Memory, activations
from legato.whole_jobs.step import predict
from legato.zoo.language import layer
from legato.zoo.language.models import MODELS
from legato.zoo.language.parameters import held, model_flops, parameters
from legato.zoo.presets import FRAMEWORKS, MACHINES, framework_named, machine_named

STORED = Framework(flash=False, gradient_nbytes=2)
#: No memory traffic and no communication to speak of.
PRODUCTS = replace(IDEAL, memory_bytes_per_s=1e25, link_bytes_per_s=1e25, card_bytes_per_s=1e25)


def sent(step, kind):
    return sum(nbytes for (own, _), nbytes in step.sent.items() if own == kind)


@pytest.mark.parametrize("name", zoo.SHAPES)
def test_parameters_are_the_published_ones(name):
    assert parameters(MODELS[name]) == zoo.model(name).parameters


@pytest.mark.parametrize(
    ("name", "total", "used"),
    [
        ("deepseek-v2", 236, 21),  # arXiv 2405.04434, abstract
        ("deepseek-v3", 671, 37),  # arXiv 2412.19437, abstract
    ],
)
def test_deepseek_has_its_published_parameters(name, total, used):
    model = MODELS[name]
    idle = (model.layers - model.dense_layers) * (model.experts - model.active_experts)
    idle *= 3 * model.hidden * model.expert_intermediate
    assert round(parameters(model) / 1e9) == total
    # the embeddings of a token are one row of their table
    assert round((parameters(model) - idle - model.hidden * model.vocabulary) / 1e9) == used


@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_what_workers_hold_adds_up_to_the_model(model, pipeline):
    if model.layers % pipeline:
        return
    one = job(model, Mesh(pipeline=pipeline))
    tied_again = model.hidden * model.vocabulary if model.tied and pipeline > 1 else 0
    assert sum(sum(held(one, stage)) for stage in range(pipeline)) == parameters(model) + tied_again


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_flops_of_a_step_that_recomputes_all(tensor, pipeline):
    """96 B s l h^2 (1 + s/6h + V/16lh) with all activations recomputed (arXiv 2104.04473, section 5.1)."""
    one = job(
        GPT, Mesh(tensor=tensor, pipeline=pipeline, data=2), STORED, PRODUCTS, microbatches=3, microbatch=2,
        recompute="full",
    )  # fmt: skip
    batch, hidden, layers, sequence, vocabulary = 12, 64, 4, 128, 1024
    more = sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96 * batch * sequence * layers * hidden**2 * (1 + more)
    if pipeline == 2:  # the second stage is the busiest, with half of the layers and the output layer
        flops = (flops + 6 * batch * sequence * hidden * vocabulary) / 2
    assert predict(one).computing_s == pytest.approx(flops / (2 * tensor) / 1e12, rel=1e-9)


def test_products_take_whole_waves_of_whole_tiles():
    """The examples of NVIDIA's guide, and a step of which every product is counted tile by tile."""
    # 7 x 14 tiles fit in one wave of an A100, and 8 x 15 need two (section 3.2)
    for size, waves in ((1792, 1), (1793, 2)):
        assert layer._waves(108, size, size) == waves * 108 * 256 * 128 / size**2
    one = job(LLAMA, machine=PRODUCTS, recompute="full")
    width, keys, inner, tokens, vocabulary = 64, 32, 192, 128, 1000
    matrices = [(width, width), (width, keys), (width, keys), (width, width)]
    matrices += [(width, inner), (width, inner), (inner, width)]
    more = 0
    for matrix, layers, passes in (*((own, 6, 4) for own in matrices), ((width, vocabulary), 1, 3)):
        results = (tokens, matrix[0]), (tokens, matrix[1]), matrix
        tiles = [min(-(-a // 256) * -(-b // 128), -(-a // 128) * -(-b // 256)) for a, b in results]
        flops = 2 * tokens * matrix[0] * matrix[1]
        shares = [-(-own // 3) * 3 * 256 * 128 / (a * b) for own, (a, b) in zip(tiles, results, strict=True)]
        more += layers * passes * flops * (sum(shares) / 3 - 1) / 1e12
    steps = [predict(replace(one, machine=replace(PRODUCTS, multiprocessors=units))) for units in (0, 3)]
    assert steps[1].computing_s - steps[0].computing_s == pytest.approx(more, rel=1e-9)


def test_flash_attention_computes_the_causal_half_and_scores_again():
    """Of 2 T s h FLOPs a product: one and two halves forward and backward, which computes scores again."""
    pairs = 128 * 128 * 64
    more = [
        predict(job(LLAMA, framework=Framework(flash=flash), machine=PRODUCTS)).computing_s for flash in (True, False)
    ]
    assert more[1] - more[0] == pytest.approx(6 * (12 * pairs - (2 + 5) * pairs) / 1e12, rel=1e-9)
    assert predict(job(LLAMA, machine=PRODUCTS)).utilization == pytest.approx(
        model_flops(LLAMA) * 128 / 1e12 / more[0], rel=1e-9
    )


def test_model_flops_of_llama_405b():
    """Six a parameter and token, but for the embeddings, and half of the 12 l h s of arXiv 2204.02311, appendix B."""
    model = MODELS["llama-3-405b"]
    matrices = 405_853_388_800 - 128_256 * 16_384 - 16_384
    assert model_flops(model) == 6 * matrices + 6 * 126 * 16_384 * 8192


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_bytes_of_tensor_parallelism(tensor):
    """Four all-reduces of 2 s b h bytes a layer, two each way (arXiv 1909.08053, section 3); under sequence
    parallelism as many bytes in gathers and reduce-scatters, and Megatron's two gathers of inputs again."""
    share, layers, microbatches = (tensor - 1) / tensor, 4, 3
    activation = 2 * 128 * 64 * microbatches
    mesh = Mesh(tensor=tensor)
    plain = predict(job(GPT, mesh, STORED, microbatches=microbatches))
    # and one of the embeddings forward, one of the output layer backward
    assert sent(plain, "tensor") == pytest.approx((4 * layers + 2) * 2 * share * activation)
    for again in (True, False):
        framework = replace(STORED, gathers_inputs=again)
        step = predict(job(GPT, mesh, framework, microbatches=microbatches, sequence_parallel=True))
        halves = (10 if again else 8) * layers + 2 + (3 if again else 2)
        assert sent(step, "tensor") == pytest.approx(halves * share * activation)
    full = predict(job(GPT, mesh, STORED, microbatches=microbatches, recompute="full"))
    assert sent(full, "tensor") - sent(plain, "tensor") == pytest.approx(2 * layers * 2 * share * activation)
    framework = replace(STORED, stops_early=True)
    early = predict(job(GPT, mesh, framework, microbatches=microbatches, recompute="full"))
    assert sent(early, "tensor") - sent(plain, "tensor") == pytest.approx(layers * 2 * share * activation)


def test_recomputation_that_stops_early_leaves_out_the_product_that_torch_leaves_out():
    torch = pytest.importorskip("torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.flop_counter import FlopCounterMode

    mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    counted = []
    for module in (mlp, checkpoint_wrapper(mlp)):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counted.append(counter.get_total_flops())
    product = 2 * 4 * 8 * 32
    assert counted == [6 * product, 7 * product]  # not 8: the second product is not computed again
    at_once = replace(PRODUCTS, attention_efficiency=1.0)
    plain, full, early = (
        predict(job(GPT, Mesh(), replace(STORED, stops_early=stops), at_once, recompute=recompute)).computing_s
        for recompute, stops in (("none", True), ("full", False), ("full", True))
    )
    down_s = 2 * 128 * GPT.hidden * GPT.intermediate / PRODUCTS.flops_per_s / PRODUCTS.efficiency
    assert plain < early and full - early == pytest.approx(GPT.layers * down_s)


@pytest.mark.parametrize("data", [2, 4, 16])
def test_volumes_of_zero(data):
    """Two times the parameters for stages 0 to 2 and three times for stage 3 (arXiv 1910.02054, section 7)."""
    size = parameters(LLAMA) * (data - 1) / data
    framework = Framework(gradient_nbytes=2)
    for shard, times in (("none", 2), ("optimizer", 2), ("gradients", 2), ("parameters", 3)):
        step = predict(job(LLAMA, Mesh(data=data), framework, shard=shard))
        assert sent(step, "data") == pytest.approx(2 * times * size)
    # sharded gradients are reduced, and sharded parameters gathered, in each micro-batch
    for shard, times in (("none", 2), ("optimizer", 2), ("gradients", 5), ("parameters", 12)):
        step = predict(job(LLAMA, Mesh(data=data), framework, shard=shard, microbatches=4))
        assert sent(step, "data") == pytest.approx(2 * times * size)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas_of_sharded_parameters(replicas, pipeline):
    """HSDP: the shards' collectives among 8 / replicas neighbours, and an all-reduce of what each owns."""
    machine, mesh = replace(IDEAL, gpus_per_host=8 // replicas), Mesh(data=8, pipeline=pipeline)
    one, whole = (
        job(LLAMA, mesh, Framework(gradient_nbytes=2), machine, shard="parameters", replicas=copies)
        for copies in (replicas, 1)
    )
    size, shards = parameters(LLAMA) / pipeline, 8 // replicas
    step, times = predict(one), 3 if pipeline == 1 else 2  # a pipeline gathers once a step
    summed = 2 * (replicas - 1) / replicas * size / shards
    assert sent(step, "data") == pytest.approx(2 * (times * size * (shards - 1) / shards + summed))
    assert step.sent["data", "network"] == pytest.approx(2 * summed)
    assert step.memory.optimizer == pytest.approx(replicas * predict(whole).memory.optimizer)
    links = simulate(one, network_of(machine, one.mesh.workers)).step
    assert sum(links.sent.values()) == pytest.approx(sum(step.sent.values()))


@pytest.mark.parametrize("more", [{"replicas": 3}, {"replicas": 2, "shard": "optimizer"}])
def test_where_there_are_no_replicas(more):
    with pytest.raises(InputError, match=r"replicas: . .expected a divisor of the 8 workers of data, and that these"):
        job(LLAMA, Mesh(data=8), **{"shard": "parameters", **more})


def test_stages_are_even_with_or_without_the_ends():
    even, ends, uneven = (replace(LLAMA, layers=layers) for layers in (8, 6, 7))
    found = [job(one, Mesh(pipeline=4), microbatches=4) for one in (even, ends, uneven)]
    assert [one.uneven for one in found] == [False, False, True] and found[1].split == (1, 2, 2, 1)
    assert not job(uneven).uneven


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_bytes_of_experts(expert):
    """Dispatch and combine, T h x active experts each, forward and backward; experts are reduced among replicas."""
    step = predict(job(MIXTURE, Mesh(data=8, expert=expert), Framework(gradient_nbytes=2), microbatches=3))
    share = (expert - 1) / expert
    assert sent(step, "expert") == pytest.approx(3 * 5 * 4 * share * 2 * 128 * 64 * 2)
    experts = 5 * 8 * 3 * 64 * 32
    shared = parameters(MIXTURE) - experts
    replicas = 8 // expert
    assert sent(step, "data") == pytest.approx(2 * 2 * (shared * 7 / 8 + experts / expert * (replicas - 1) / replicas))


@pytest.mark.parametrize(("tensor", "context"), [(4, 1), (2, 2)])
def test_folded_experts_are_whole(tensor, context):
    """Each of eight workers has one whole expert, and computes what it computes if experts are divided."""
    divided, folded = (
        predict(job(MIXTURE, mesh, machine=PRODUCTS, sequence_parallel=True, shard="optimizer"))
        for mesh in (
            Mesh(tensor, context, data=2, expert=2),
            Mesh(tensor, context, data=2, expert=8, expert_fold=True),
        )
    )
    assert folded.computing_s == pytest.approx(divided.computing_s)
    experts = 5 * 8 * 3 * 64 * 32
    more = 2 * experts * (1 / (2 * tensor) - 1 / 8)
    assert divided.memory.parameters - folded.memory.parameters == pytest.approx(more)
    # both copies of a token may go to any worker, and its tensor-parallel gathers carry one copy instead of two
    activation = 2 * 128 // context * 64
    assert sent(folded, "expert") == pytest.approx(5 * 4 * 2 * activation / tensor * 7 / 8)
    one_way = activation * (tensor - 1) / tensor
    assert sent(divided, "tensor") - sent(folded, "tensor") == pytest.approx(5 * 5 * one_way)


def test_layouts_with_folded_experts():
    """NVIDIA's layout of DeepSeek-V3 on 1,024 GPUs; and what cannot be folded is refused in a line."""
    layout = {"tensor": 2, "pipeline": 16, "data": 32, "expert": 64, "expert_fold": True}
    one = legato.job("deepseek-v3", **layout, sequence_parallel=True, microbatches=16)
    assert one.mesh.workers == 1024 and "expert 64 folded" in str(one)
    with pytest.raises(InputError, match="expected sequence parallelism"):
        legato.job("deepseek-v3", **layout)
    with pytest.raises(InputError, match="expected a multiple of the 2 workers of tensor x context"):
        legato.job("deepseek-v3", **layout | {"expert": 1}, sequence_parallel=True)
    odd = legato.job(
        replace(MIXTURE, expert_intermediate=33), tensor=2, expert=2, expert_fold=True, sequence_parallel=True
    )
    assert odd.mesh.data == 1  # nothing divides an expert
    found = legato.layouts("mixtral-8x7b", gpus=8, batch=8, memory_nbytes=2**40)
    assert any(step.job.mesh.expert_fold for step in found.best) and " folded" in str(found)


def test_bytes_of_contexts_and_pipelines():
    """Keys and values of all tokens, gathered, gathered again and reduced; an activation each way between stages."""
    step = predict(job(LLAMA, Mesh(context=4), Framework(gradient_nbytes=2), microbatches=2))
    assert sent(step, "context") == pytest.approx(2 * 6 * 3 * 3 / 4 * 2 * 128 * 2 * 4 * 8)
    step = predict(job(LLAMA, Mesh(pipeline=3), microbatches=5))
    assert sent(step, "pipeline") == pytest.approx(2 / 3 * 5 * 2 * 2 * 128 * 64)
    divided = predict(job(GPT, Mesh(tensor=8, pipeline=2), replace(STORED, divides_sends=True), microbatches=5))
    table = 2 * 64 * 128
    assert sent(divided, "pipeline") == pytest.approx(1 / 2 * 5 * 2 * 2 * 128 * 64 / 8 + table)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_a_layer(tensor):
    """s b h (34 + 5 a s / h) / t, without sequence parallelism 10 of the 34 undivided, s b h 34 / t without scores,
    and 2 s b h / t (arXiv 2205.05198, Table 2)."""
    tokens, hidden, scores = 2 * 128, 64, 5 * 8 * 128 / 64
    framework = replace(STORED, dropout=True)
    parallel = tensor > 1
    for sequence_parallel in {False, parallel}:
        one = job(GPT, Mesh(tensor=tensor), framework, microbatch=2, sequence_parallel=sequence_parallel)
        ends = 10 if not sequence_parallel else 10 / tensor
        assert activations(one, False) == tokens * hidden * (ends + (24 + scores) / tensor)
        core = replace(one, recompute="core")
        assert activations(core, False) == tokens * hidden * (ends + 24 / tensor)
        full = replace(one, recompute="full")
        assert activations(full, False) == 2 * tokens * hidden / (tensor if sequence_parallel else 1)


@pytest.mark.parametrize("data", [1, 4])
def test_memory_of_states(data):
    """16 bytes a parameter, of which each stage of ZeRO divides a part more (arXiv 1910.02054, Figure 1)."""
    size = parameters(LLAMA)
    for shard, states in (
        ("none", (2, 2, 12)),
        ("optimizer", (2, 2, 12 / data)),
        ("gradients", (2, 2 / data, 12 / data)),
        ("parameters", (2 / data, 2 / data, 12 / data)),
    ):
        memory = predict(job(LLAMA, Mesh(data=data), Framework(gradient_nbytes=2), shard=shard)).memory
        layer = held(job(LLAMA, Mesh(pipeline=6)), 1).shared if shard == "parameters" else 0
        found = (memory.parameters - 2 * 2 * layer, memory.gradients, memory.optimizer)
        assert found == pytest.approx([times * size for times in states])


def test_what_is_not_fused_keeps_more():
    """torch's eager kernels: norms keep their inputs in 32 bits and what comes before the weights, a gated MLP its
    activated gate, attention the scores before they are cast; and cross entropy all logits in 32 bits three times."""
    tokens, hidden = LLAMA.sequence, LLAMA.hidden
    eager, fused = (job(LLAMA, Mesh(), Framework(fused=fused)) for fused in (False, True))
    more = activations(eager, False) - activations(fused, False)
    assert more == 8 * tokens * hidden + 2 * tokens * LLAMA.intermediate
    stored = [
        activations(job(LLAMA, Mesh(), Framework(flash=False, fused_softmax=one)), False) for one in (False, True)
    ]
    assert stored[0] - stored[1] == 4 * tokens * LLAMA.sequence * LLAMA.heads
    for tensor in (1, 2):
        mesh = Mesh(tensor=tensor)
        memory = [predict(job(LLAMA, mesh, Framework(fused_loss=one))).memory for one in (True, False)]
        logits = tokens * LLAMA.vocabulary
        assert memory[1].activations - memory[0].activations == 14 * logits - 4 * logits / tensor
        assert memory[1].largest == max(asdict(memory[1]), key=lambda part: getattr(memory[1], part))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_parallel_collectives_are_hidden_in_both_passes(recompute):
    """All but those of the embeddings, the output layer's gather and, of a layer, what is longer than its products."""
    fast = replace(IDEAL, link_bytes_per_s=1e14)
    steps = [
        predict(job(LLAMA, Mesh(tensor=2), Framework(hidden=hidden), fast, recompute=recompute, sequence_parallel=True))
        for hidden in ((), ("tensor",), ("tensor", "tensor:forward"))
    ]
    ends = 2 * LLAMA.sequence * LLAMA.hidden * 2 / 2  # reduce-scatter and gather of the embeddings
    ends += 2 * LLAMA.sequence * LLAMA.hidden / 2  # the output layer's gather
    assert steps[0].exposed_s["tensor"] > steps[1].exposed_s["tensor"] > steps[2].exposed_s["tensor"]
    assert steps[2].exposed_s["tensor"] == pytest.approx(ends / 1e14, rel=1e-9)
    assert steps[0].sent == steps[1].sent == steps[2].sent


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_gradients_are_hidden_and_gathers_of_parameters_are_not(shard):
    fast = replace(IDEAL, link_bytes_per_s=1e15)
    exposed = {
        hidden: predict(job(LLAMA, Mesh(data=4), Framework(hidden=hidden), fast, shard=shard)).exposed_s["data"]
        for hidden in ((), ("data:gradients",), ("data",))
    }
    gather = 2 * parameters(LLAMA) * 3 / 4 / 1e15 if shard == "optimizer" else 0
    assert exposed["data",] == 0 and exposed[()] > exposed["data:gradients",]
    assert exposed["data:gradients",] == pytest.approx(gather, rel=1e-9)
    for hidden in ((), ("data:gradients",), ("data",)):
        one = job(LLAMA, Mesh(data=4), Framework(hidden=hidden), fast, shard=shard)
        assert simulate(one, network_of(fast, 4)).step.seconds == pytest.approx(predict(one).seconds, rel=1e-9)


def test_copies_of_a_token_cross_the_network_once():
    """Two experts of a token on hosts of 2: of both copies, 4 (1 - (3/4)^2) / 2 are sent."""
    machine = replace(IDEAL, gpus_per_host=2)
    sent_nbytes = [
        sent(predict(job(MIXTURE, Mesh(data=data, expert=data), Framework(deduplicates=one), machine)), "expert")
        for data in (8, 2)
        for one in (True, False)
    ]
    assert sent_nbytes[0] == pytest.approx(4 * (1 - 0.75**2) / 2 * sent_nbytes[1])
    assert sent_nbytes[2] == sent_nbytes[3]


def test_gradients_are_sent_in_another_precision_than_added_up():
    one = job(LLAMA, Mesh(data=4), Framework(gradient_nbytes=2, sent_nbytes=4))
    two, four = (predict(job(LLAMA, Mesh(data=4), Framework(gradient_nbytes=nbytes))) for nbytes in (2, 4))
    step = predict(one)
    assert step.memory == two.memory and step.sent == four.sent and two.sent != four.sent


def test_a_job_fits_is_near_the_limit_or_does_not_fit():
    memory = Memory(30.0, 20.0, 20.0, 15.0)
    assert [memory.room_in(nbytes) for nbytes in (100, 99, 85, 84)] == [
        "fits", "near the limit", "near the limit", "does not fit"
    ]  # fmt: skip


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_stages_of_a_pipeline_hold_whole_gradients(shard):
    """They reduce once a step, and gather once a step, so only the optimizer's states stay divided."""
    memory = [
        predict(job(LLAMA, Mesh(data=4, pipeline=2), shard=one, microbatches=2)).memory for one in (shard, "optimizer")
    ]
    assert memory[0] == memory[1]


def test_collectives_by_hand():
    """10^9 bytes; links of 10^11 bytes/s and cards of 10^10 at their peaks."""
    machine = replace(IDEAL, latency_s=0.1, network_latency_s=0.2, hop_s=0.3)
    inside, across = WorkerGroup(8, 1, 8), WorkerGroup(16, 4, 4)
    assert collective("data", machine, WorkerGroup(1, 1, 1), 1e9).total_s == 0
    assert collective("data", machine, inside, 1e9).total_s == pytest.approx(0.1 + 7 / 8 * 0.01)
    assert collective("data", machine, inside, 1e9, halves=2).total_s == pytest.approx(0.1 + 14 / 8 * 0.01)
    away = collective("data", machine, across, 1e9)
    assert away.total_s == pytest.approx(0.2 + 0.9 + 15 / 16 * 0.025)  # four cards of a host together
    assert away.sent == pytest.approx({("data", "host"): 15 / 16 * 0.75e9, ("data", "network"): 15 / 16 * 0.25e9})
    exchange = all_to_all("expert", machine, across, 1e9)
    assert exchange.total_s == pytest.approx(0.2 + 0.9 + 12 / 16 * 0.1)  # each its own card
    assert exchange.sent == pytest.approx({("expert", "host"): 3 / 16 * 1e9, ("expert", "network"): 12 / 16 * 1e9})
    assert send("pipeline", machine, 1e9, True).total_s == pytest.approx(0.2 + 0.3 + 0.1)
    assert send("pipeline", machine, 1e9, False).total_s == pytest.approx(0.1 + 0.01)


def random_job(draw):
    model = draw.choice([GPT, LLAMA, MIXTURE])
    tensor, pipeline = draw.choice([1, 2, 4]), draw.choice([1, 2])
    data = draw.choice([1, 2, 4])
    schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    order = draw.choice(list(itertools.permutations(("tensor", "context", "pipeline", "data"))))
    hidden = tuple(kind for kind in ("tensor", "context", "expert", "pipeline", "data") if draw.random() < 0.5)
    framework = Framework(
        "x", draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5, draw.choice([2, 4]), hidden,
        draw.random() < 0.5, draw.random() < 0.5, 1, draw.choice([0, 1e-3]), draw.choice([0, 1e-3]),
    )  # fmt: skip
    expert = draw.choice([one for one in (1, 2, 4) if data % one == 0 and model.experts % one == 0])
    machine = replace(IDEAL, latency_s=1e-5, network_latency_s=2e-5, gpus_per_host=draw.choice([1, 2, 8]))
    return job(
        model, Mesh(tensor, draw.choice([1, 2]), pipeline, data, expert, order), framework, machine,
        microbatches=2 * pipeline, microbatch=draw.choice([1, 2]), schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1, recompute=draw.choice(["none", "core", "selective", "full"]),
        shard=draw.choice(["none", "optimizer", "gradients", "parameters"]),
        sequence_parallel=tensor > 1 and draw.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(60))
def test_what_holds_for_every_job(seed):
    one = random_job(random.Random(seed))
    step = predict(one)
    parts = [step.computing_s, step.bubble_s, *step.exposed_s.values()]
    assert sum(parts) == pytest.approx(step.seconds, rel=1e-9)
    assert min(parts) >= -1e-9 * step.seconds
    # what is hidden makes no step longer, and sends as much
    everything = HIDDEN
    hidden = predict(replace(one, framework=replace(one.framework, hidden=everything)))
    exposed = predict(replace(one, framework=replace(one.framework, hidden=())))
    assert hidden.seconds <= step.seconds * (1 + 1e-9) <= exposed.seconds * (1 + 2e-9)
    assert sum(hidden.sent.values()) == pytest.approx(sum(exposed.sent.values()))
    # on one host nothing crosses the network, and each kind sends the same bytes
    inside = predict(replace(one, machine=replace(one.machine, gpus_per_host=one.mesh.workers)))
    assert not any(nbytes for (_, tier), nbytes in inside.sent.items() if tier == "network")
    for kind in ("tensor", "context", "expert", "data"):
        if not (one.framework.divides_sends and kind == "tensor"):
            assert sent(inside, kind) == pytest.approx(sent(step, kind))
    # a network without cost exposes nothing
    free = replace(one.machine, latency_s=0, network_latency_s=0, hop_s=0, link_bytes_per_s=1e25, card_bytes_per_s=1e25)
    exposed_s = predict(replace(one, machine=free)).exposed_s
    assert sum(seconds for kind, seconds in exposed_s.items() if kind != "optimizer") < 1e-12


def test_named_frameworks_and_machines():
    assert framework_named("torchtitan") is FRAMEWORKS["torchtitan"]
    assert machine_named("b200") is MACHINES["b200"]
    with pytest.raises(InputError, match="did you mean 'megatron-core'"):
        framework_named("megatron")
    with pytest.raises(InputError, match="unknown machine 'h1000'"):
        machine_named("h1000")


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("data", [1, 3, 4])
def test_a_stage_alone_has_no_bubble_that_rounding_leaves(tensor, data):
    one = job(MODELS["llama-3-8b"], Mesh(tensor=tensor, data=data), machine=MACHINES["h100"], shard="optimizer")
    assert predict(one).bubble_s == 0.0
