"""A language model that a single GPU trains: the job, and the seconds of each part of the passes."""

from __future__ import annotations

from msgspec.structs import replace

from legato.core.job import Job, LanguageModel, Machine, Mesh
from legato.core.workload import Phase
from legato.zoo.language.layer import Passes, embeddings, layer, output
from legato.zoo.presets import framework_named

__all__ = ["job_of_one_gpu", "part_times"]


def job_of_one_gpu(name: str, model: LanguageModel, machine: Machine, microbatch: int, *, recompute: bool) -> Job:
    """Return the job of one GPU with one micro-batch, in the default framework of whole jobs."""
    return Job(
        name,
        model,
        Mesh(),
        framework_named("megatron-core"),
        machine,
        microbatch=microbatch,
        recompute="full" if recompute else "none",
    )


def part_times(job: Job) -> dict[tuple[str, Phase], float]:
    """Return for how many seconds each part of the model computes on a micro-batch, by part and phase.

    The parts are `embeddings`, `layer0` and so on, `layer0/recompute` and so on, and `output`. The name of an op says
    to which part it belongs (`legato.zoo.lower`).
    """
    plain = replace(job, recompute="none")
    kinds = {mixture: (layer(plain, mixture), layer(job, mixture)) for mixture in (False, True)}
    times = _times("embeddings", embeddings(job)) | _times("output", output(job))
    for i in range(job.model.layers):
        once, passes = kinds[i in job.model.mixtures]
        times |= _times(f"layer{i}", once)
        times[f"layer{i}/recompute", "backward"] = passes.backward.computing_s - once.backward.computing_s
    return times


def _times(part: str, passes: Passes) -> dict[tuple[str, Phase], float]:
    backward_s = passes.backward.computing_s + passes.weights.computing_s
    return {(part, "forward"): passes.forward.computing_s, (part, "backward"): backward_s}
