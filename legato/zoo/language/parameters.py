"""The numbers of parameters of a language model, and of the part that one worker holds."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from legato.core.job import Job, LanguageModel

__all__ = [
    "Parameters",
    "embeddings",
    "held",
    "layer",
    "model_flops",
    "output",
    "owned",
    "parameters",
    "vocabulary_part",
]


class Parameters(NamedTuple):
    """Two numbers: the parameters that all data-parallel workers share, and the parameters of experts."""

    shared: int
    experts: int = 0

    def plus(self, other: Parameters, times: int = 1) -> Parameters:
        return Parameters(self.shared + times * other.shared, self.experts + times * other.experts)


@lru_cache(maxsize=256)
def layer(model: LanguageModel, mixture: bool, tensor: int = 1, expert: int = 1) -> Parameters:
    """Return a layer's parameters on one worker.

    `tensor` workers divide the matrices of the layer, and `expert` workers divide its experts. Every worker has all
    vectors, the router and the narrow matrices of latent attention.
    """
    gpt, matrices = model.family == "gpt", 3 if model.family == "llama" else 2
    hidden, size, heads, kv_heads = model.hidden, model.head_size, model.heads // tensor, model.kv_heads // tensor
    if (latent := model.latent) is None:
        count = hidden * size * (2 * heads + 2 * kv_heads)
        count += (heads + 2 * kv_heads) * size + hidden if gpt else 0
    else:
        count = hidden * (latent.query + latent.key_value + latent.rope) + latent.query + latent.key_value
        count += latent.query * heads * (size + latent.rope) + latent.key_value * heads * 2 * size
        count += heads * size * hidden
    count += 2 * hidden * (2 if gpt else 1)
    if not mixture:
        count += matrices * hidden * model.intermediate // tensor
        return Parameters(count + (model.intermediate // tensor + hidden if gpt else 0))
    count += hidden * model.experts + matrices * hidden * model.shared_intermediate // tensor
    return Parameters(count, model.experts // expert * matrices * hidden * model.expert_intermediate // tensor)


def embeddings(job: Job) -> Parameters:
    """Return the parameters of the embeddings on one of the workers that divide the vocabulary."""
    return Parameters(_embeddings(job.model, vocabulary_part(job)))


def output(job: Job) -> Parameters:
    """Return the parameters of the last norm and output layer; with one stage, `embeddings` counts a tied table."""
    table = 0 if job.model.tied and job.mesh.pipeline == 1 else job.model.hidden * vocabulary_part(job)
    return Parameters(table + _norm(job.model))


def _embeddings(model: LanguageModel, vocabulary: int) -> int:
    return model.hidden * (vocabulary + (model.sequence if model.family == "gpt" else 0))


def _norm(model: LanguageModel) -> int:
    return model.hidden * (2 if model.family == "gpt" else 1)


def parameters(model: LanguageModel) -> int:
    """Return the number of parameters of the whole model, without padding."""
    mixtures = len(model.mixtures)
    total = _embeddings(model, model.vocabulary) + _norm(model)
    total += 0 if model.tied else model.hidden * model.vocabulary
    return total + (model.layers - mixtures) * sum(layer(model, False)) + mixtures * sum(layer(model, True))


def vocabulary_part(job: Job) -> int:
    """Return the number of tokens of the padded vocabulary on one of the workers that divide it."""
    multiple = job.framework.vocabulary_multiple
    return -(-job.model.vocabulary // (job.mesh.tensor * multiple)) * multiple


def held(job: Job, stage: int) -> Parameters:
    """Return the parameters that a worker of a stage (a chunk of layers) holds."""
    model, mesh, counts = job.model, job.mesh, job.split
    first = sum(counts[:stage])
    mixtures = sum(index in model.mixtures for index in range(first, first + counts[stage]))
    total = Parameters(0)
    for mixture, number in ((False, counts[stage] - mixtures), (True, mixtures)):
        total = total.plus(layer(model, mixture, mesh.tensor, mesh.expert_parts), number)
    total = total.plus(embeddings(job)) if stage == 0 else total
    return total.plus(output(job)) if stage == len(counts) - 1 else total


def owned(job: Job, parameters: Parameters) -> float:
    """Return how many of `parameters` one worker owns, if the data-parallel workers divide the parameters."""
    mesh = job.mesh
    ranks = mesh.data * mesh.context // job.replicas
    return parameters.shared / ranks + parameters.experts / (ranks / mesh.expert_parts)


def model_flops(model: LanguageModel) -> float:
    """Return the FLOPs of a token in the forward and the backward pass, without recomputation.

    There are six FLOPs for each parameter of the matrices that the token uses, plus the causal half of attention.
    """
    used = model.layers * model.heads * model.sequence * _pair(model) / 2
    mixtures = len(model.mixtures)
    for mixture, number in ((False, model.layers - mixtures), (True, mixtures)):
        shared, experts = layer(model, mixture)
        used += number * (shared + experts * model.active_experts / model.experts)
    return 6 * (used + model.hidden * model.vocabulary)


def _pair(model: LanguageModel) -> int:
    """Return the size of a query's or key's head plus the size of a value's head."""
    return 2 * model.head_size + (model.latent.rope if model.latent else 0)
