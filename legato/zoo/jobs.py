"""A function that makes a whole job from names and numbers; `core/job.py` defines the types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import (
    DIMENSIONS,
    Dimension,
    Framework,
    Hidden,
    Job,
    LanguageModel,
    Machine,
    Mesh,
    Recompute,
    Schedule,
    Shard,
)
from legato.zoo.language.models import model_named
from legato.zoo.presets import framework_named, machine_named

__all__ = ["job", "model_name"]


def model_name(model: str | LanguageModel) -> str:
    """Return the name of a model, or `llm` for a model without a name."""
    return model if isinstance(model, str) else "llm"


def job(  # noqa: PLR0913 (all that can be chosen about a job)
    model: str | LanguageModel,
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    data: int | None = None,
    expert: int = 1,
    expert_fold: bool = False,
    gpus: int | None = None,
    order: Sequence[Dimension] = ("pipeline", "data", "context", "tensor"),
    microbatches: int = 1,
    microbatch: int = 1,
    schedule: Schedule = "1f1b",
    chunks: int | None = None,
    layers: Sequence[int] = (),
    recompute: Recompute = "none",
    shard: Shard = "none",
    sequence_parallel: bool = False,
    replicas: int = 1,
    machine: str | Machine = "h100",
    framework: str | Framework = "megatron-core",
    overlap: Sequence[Hidden] | None = None,
    name: str = "",
) -> Job:
    """Return a whole training job: a language model, the GPUs that share it, and how one step runs.

    `model`, `machine` and `framework` are objects or names; a machine's name may be the path of a file. By default,
    `data` is 1, or if `gpus` is given, `gpus` divided by the product of the other dimensions. An interleaved schedule
    has 2 `chunks` by default. `overlap` lists the kinds of communication that run during computation; by default, the
    framework decides. All other arguments are fields of `Job` and `Mesh`. Raises `InputError` if a name is unknown (the
    error lists similar names), or if `Job` refuses its fields.
    """
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    if data is None:
        data = 1 if gpus is None else max(1, gpus // max(1, math.prod(sizes.values())))
    mesh = Mesh(**sizes, data=data, expert=expert, order=tuple(order), expert_fold=expert_fold)
    if gpus is not None and mesh.workers != gpus:
        product = " x ".join(f"{one} {getattr(mesh, one)}" for one in DIMENSIONS)
        raise InputError(f"gpus: {gpus:,} (expected {mesh.workers:,}: {product})")
    framework = framework_named(framework)
    if overlap is not None:
        if unknown := set(overlap) - set(get_args(Hidden)):
            raise InputError(f"overlap: {min(unknown)!r} (expected {', '.join(get_args(Hidden))}, or none)")
        framework = replace(framework, hidden=tuple(overlap))
    return Job(
        name or model_name(model),
        model_named(model) if isinstance(model, str) else model,
        mesh,
        framework,
        machine_named(machine),
        microbatches=microbatches,
        microbatch=microbatch,
        schedule=schedule,
        chunks=(2 if schedule == "interleaved" else 1) if chunks is None else chunks,
        layers=tuple(layers),
        recompute=recompute,
        shard=shard,
        sequence_parallel=sequence_parallel,
        replicas=replicas,
    )
