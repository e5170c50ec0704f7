"""Small whole jobs for tests."""

from msgspec.structs import replace

from legato.core.job import Framework, Job, LanguageModel, Latent, Machine, Mesh
from legato.simulator.flow import Disturbance

GPT = LanguageModel(4, 64, 8, 8, 8, 256, 1024, 128, family="gpt", tied=True)
LLAMA = LanguageModel(6, 64, 8, 4, 8, 192, 1000, 128)
MIXTURE = LanguageModel(
    6, 64, 8, 8, 8, 192, 1024, 128, experts=8, active_experts=2, expert_intermediate=32, shared_intermediate=64,
    dense_layers=1, latent=Latent(48, 32, 4),
)  # fmt: skip
#: Round numbers, no latencies, and everything at its peak.
IDEAL = Machine(
    "ideal", 1e12, 1e12, 10**10, 1e11, 1e10, 1.0, 1.0, 8, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0
)  # fmt: skip


def job(model=LLAMA, mesh=None, framework=None, machine=IDEAL, **more):
    """A job of one GPU, unless a mesh says otherwise."""
    return Job("test", model, mesh or Mesh(), framework or Framework(), machine, **more)


LATENT = replace(IDEAL, latency_s=1e-5, network_latency_s=2e-5, hop_s=1e-6)
SMALL = replace(LLAMA, layers=2)


def small_job(draw, alone):
    """A job whose communication has links of its own if `alone`: each stage is a host, and no two kinds run at once."""
    model = draw.choice([LLAMA, replace(GPT, tied=False), MIXTURE] if alone else [SMALL, replace(GPT, layers=2)])
    pipeline, tensor, context, data = (draw.choice([1, 2]) for _ in range(4))
    if not alone:
        pipeline, data = draw.choice([1, 2, 3]) if model is not SMALL else draw.choice([1, 2]), draw.choice([1, 2, 4])
    pipeline = min(pipeline, model.layers)
    stage = tensor * context * data
    kinds = ("tensor", "context", "expert", "pipeline", "data")
    hidden = tuple(kind for kind in kinds if draw.random() < 0.5)
    shard = draw.choice(["none", "optimizer", "gradients", "parameters"])
    schedule = draw.choice(
        ["gpipe", "1f1b", "zero-bubble"] if alone else ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    )
    schedule = "1f1b" if schedule == "interleaved" and pipeline * 2 > model.layers else schedule
    if alone:
        hidden = (draw.choice(kinds[:3]),) if pipeline > 1 or shard in ("none", "optimizer") else ()
    expert = draw.choice([1, data]) if model is MIXTURE and shard in ("none", "optimizer") else 1
    fold = expert > 1 and not alone and draw.random() < 0.5
    expert *= tensor * context if fold else 1
    order = draw.sample(("data", "context"), 2) if alone else draw.sample(("pipeline", "data", "context", "tensor"), 4)
    order = ("pipeline", *order, "tensor") if alone else tuple(order)
    mesh = Mesh(tensor, context, pipeline, data, expert, order, fold)
    hosts = stage if alone and pipeline > 1 else draw.choice([1, 2, 4, 8] if alone else [1, 2, 3, 4, 8])
    return job(
        model, mesh, Framework("x", hidden=hidden, divides_sends=not alone and draw.random() < 0.5),
        replace(LATENT, gpus_per_host=hosts), microbatches=2 * pipeline if alone else draw.choice([1, 2]) * pipeline,
        schedule=schedule, chunks=2 if schedule == "interleaved" else 1, shard=shard,
        recompute=draw.choice(["none", "full"]), sequence_parallel=tensor > 1 and (draw.random() < 0.5 or fold),
    )  # fmt: skip


def disturbed(draw, gpus, workers):
    """Random topology of a network of hosts with so many GPUs, and disturbances of some of these workers."""
    options = {"disturbances": []}
    leaves = 0
    hosts = -(-len(workers) // gpus)
    topology = draw.choice(["one", "racks", "fat-tree", "rails"] if gpus > 1 else ["one", "racks", "fat-tree"])
    if topology == "racks" and hosts > 1:
        leaves = draw.choice([2, hosts])
        options |= {"racks": leaves, "spines": draw.choice([1, 2, 3])}
    elif topology == "fat-tree":
        options |= {"topology": "fat-tree", "core_oversubscription": draw.choice([1, 2])}
    elif topology == "rails":
        options |= {"topology": "rails", "spines": draw.choice([0, 1, 2])}
        leaves = gpus if options["spines"] else 0
    if topology != "one" and leaves:
        options |= {"oversubscription": draw.choice([1, 1.5, 4]), "balance": draw.choice(["ecmp", "spray"])}
    for kind in draw.sample(["link", "compute", "uplink"] if leaves else ["link", "compute"], draw.choice([0, 1, 2])):
        fails, start = draw.random() < 0.5, draw.choice([0, 2.0**-12, 2.0**-10])
        options["disturbances"].append(
            Disturbance(
                kind=kind, number=draw.choice(range(leaves) if kind == "uplink" else workers),
                factor=float("inf") if fails else draw.choice([2, 4]), start_s=start,
                end_s=start + 2.0**-11 if fails or draw.random() < 0.5 else float("inf"),
            )
        )  # fmt: skip
    return options | {"disturbances": tuple(options["disturbances"])}


__all__ = ["GPT", "IDEAL", "LATENT", "LLAMA", "MIXTURE", "disturbed", "job", "replace", "small_job"]
