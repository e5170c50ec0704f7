"""A whole training job: a language model, the mesh of GPUs that share it, the machine, and what a framework does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import islice, product
from typing import Literal, get_args

import msgspec

from legato.core.cluster import LinearCost
from legato.core.errors import InputError, TooLargeError
from legato.core.pictures import draw_hosts
from legato.core.text import count, percent, shorten
from legato.core.units import Int64, format_bandwidth

__all__ = [
    "DIMENSIONS",
    "HIDDEN",
    "Framework",
    "Job",
    "LanguageModel",
    "Latent",
    "Machine",
    "Mesh",
    "Recompute",
    "Schedule",
    "Shard",
    "WorkerGroup",
]

Dimension = Literal["tensor", "context", "pipeline", "data"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "pipeline", "data")
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "core", "selective", "full"]
Shard = Literal["none", "optimizer", "gradients", "parameters"]
Hidden = Literal["tensor", "tensor:forward", "context", "expert", "pipeline", "data", "data:gradients"]
#: The kinds of communication that may be hidden.
HIDDEN: tuple[Hidden, ...] = get_args(Hidden)

#: GPUs of a job, and passes of a micro-batch through a stage: a prediction takes minutes beyond them.
_MOST_WORKERS, _MOST_PASSES = 2**20, 2**22
#: Every number of a shape; the product of a few is within a float's exact range or far from its end.
_MOST = 2**24
#: Hosts in a picture, and GPUs.
_MOST_DRAWN, _MOST_GPUS = 16, 1024


def _within(value: msgspec.Struct, fields: Iterable[str], least: int = 1, most: int = _MOST) -> None:
    for field in fields:
        if not least <= getattr(value, field) <= most:
            raise InputError(f"{field}: {getattr(value, field):,} (expected {least:,} to {most:,})")


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latent attention (arXiv 2405.04434, section 2.1): the widths from which queries, keys and values are made.

    Each head of queries and keys has `rope` elements more than `head_size`; for keys, all heads share these elements.
    """

    query: Int64
    key_value: Int64
    rope: Int64

    def __post_init__(self) -> None:
        _within(self, self.__struct_fields__)


class LanguageModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a decoder.

    `gpt` has layer normalizations, biases, learned positions and an MLP of two matrices of `intermediate`; `llama` has
    RMS normalizations, no biases, rotary positions and a gated MLP of three. With `experts`, all layers but the first
    `dense_layers` send each token to `active_experts` of `experts` MLPs of `expert_intermediate`, and all tokens to one
    of `shared_intermediate`. `tied`: one table for the embeddings and the output layer.
    """

    layers: Int64
    hidden: Int64
    heads: Int64
    kv_heads: Int64
    head_size: Int64
    intermediate: Int64
    vocabulary: Int64
    sequence: Int64
    family: Literal["gpt", "llama"] = "llama"
    tied: bool = False
    experts: Int64 = 1
    active_experts: Int64 = 1
    expert_intermediate: Int64 = 0
    shared_intermediate: Int64 = 0
    dense_layers: Int64 = 0
    latent: Latent | None = None

    def __post_init__(self) -> None:
        numbers = [field for field in self.__struct_fields__ if isinstance(getattr(self, field), int)]
        may_be_zero = {"expert_intermediate", "shared_intermediate", "dense_layers", "tied"}
        _within(self, [field for field in numbers if field not in may_be_zero])
        _within(self, may_be_zero - {"tied"}, 0)
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads: {self.kv_heads} (expected a divisor of the {self.heads} heads)")
        if self.active_experts > self.experts:
            raise InputError(f"active_experts: {self.active_experts} (expected at most the {self.experts} experts)")
        if self.experts > 1 and not self.expert_intermediate:
            raise InputError("expert_intermediate: 0 (expected the width of an expert)")
        if self.dense_layers > self.layers:
            raise InputError(f"dense_layers: {self.dense_layers} (expected at most the {self.layers} layers)")

    @property
    def mixtures(self) -> range:
        """The layers that have experts."""
        return range(self.dense_layers if self.experts > 1 else self.layers, self.layers)


class WorkerGroup(msgspec.Struct, frozen=True):
    """The workers of a collective: how many, on how many hosts, and at least how many of them on each."""

    size: int
    hosts: int
    per_host: int


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the workers of a job are divided, as in torch's `DeviceMesh`: `order` names the dimensions, outermost first.

    Neighbours in the last dimension have neighbouring ranks. `expert` divides the dimension `data`: experts are
    distributed over `expert` neighbours in it, and tensor-parallel workers divide each expert. With `expert_fold`, no
    expert is divided: the `expert` workers over which experts are distributed are all workers of `tensor` and
    `context`, and neighbours in `data` (MoE parallel folding, arXiv 2504.14960, section 3).
    """

    tensor: Int64 = 1
    context: Int64 = 1
    pipeline: Int64 = 1
    data: Int64 = 1
    expert: Int64 = 1
    order: tuple[Dimension, ...] = ("pipeline", "data", "context", "tensor")
    expert_fold: bool = False

    def __post_init__(self) -> None:
        _within(self, (*DIMENSIONS, "expert"), most=_MOST_WORKERS)
        if sorted(self.order) != sorted(DIMENSIONS):
            raise InputError(f"order: {', '.join(self.order)} (expected each of {', '.join(DIMENSIONS)} once)")
        if self.expert_fold and self.expert % (self.tensor * self.context):
            folded = self.tensor * self.context
            raise InputError(f"expert: {self.expert} (expected a multiple of the {folded} workers of tensor x context)")
        if self.data % self.data_expert:
            raise InputError(f"expert: {self.expert} (expected a divisor of the {self.data} workers of data)")
        if self.workers > _MOST_WORKERS:
            raise TooLargeError(f"mesh: {self.workers:,} workers (expected at most {_MOST_WORKERS:,})")

    def __str__(self) -> str:
        """The dimensions above 1 in words."""
        sizes = [f"{name} {size}" for name in DIMENSIONS if (size := getattr(self, name)) > 1]
        sizes += [self.experts_in_words] if self.expert > 1 else []
        return ", ".join(sizes) or "one GPU"

    @property
    def experts_in_words(self) -> str:
        return f"expert {self.expert}{' folded' if self.expert_fold else ''}"

    @property
    def workers(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def data_expert(self) -> int:
        """The neighbours in `data` over which experts are distributed."""
        return self.expert // (self.tensor * self.context) if self.expert_fold else self.expert

    @property
    def expert_parts(self) -> int:
        """The parts of a layer's experts, each of which `tensor` workers share."""
        return self.expert // self.tensor if self.expert_fold else self.expert

    @property
    def expert_dimensions(self) -> tuple[str, ...]:
        """The dimensions over which experts are distributed."""
        return ("tensor", "context", "expert") if self.expert_fold else ("expert",)

    def offset(self, stage: int, gpus_per_host: int) -> int:
        """The place on its host of a stage's first worker. Groups of stages with the same offset lie alike."""
        inside: list[int] = [getattr(self, name) for name in self.order[self.order.index("pipeline") + 1 :]]
        return stage * math.prod(inside) % gpus_per_host

    def placements(self, names: Iterable[str], gpus_per_host: int, stage: int | None = None) -> list[tuple[int, ...]]:
        """Return where groups in these dimensions lie: the host of each worker of a group, in the order of its workers.

        Groups that lie alike are there once, and hosts are counted from the first worker's. Dimensions are
        `DIMENSIONS`, `expert`, and `replica` (what is left of `data`). Of a `stage`, only its own groups count.
        """
        names = set(names) | ({"expert", "replica"} if "data" in names else set())
        gpus_per_host = min(gpus_per_host, self.workers)
        ranges: list[range] = []
        offsets, stride = {0}, 1
        for name in reversed(self.order):
            inside = {"data": (("expert", self.data_expert), ("replica", self.data // self.data_expert))}
            for part, size in inside.get(name, ((str(name), getattr(self, name)),)):
                if part in names:
                    ranges.insert(0, range(0, size * stride, stride))
                else:  # of the first workers of other groups, where on its host each is
                    mine = range(min(size, gpus_per_host)) if part != "pipeline" or stage is None else (stage,)
                    steps = {index * stride % gpus_per_host for index in mine}
                    offsets = {(offset + step) % gpus_per_host for offset in offsets for step in steps}
                stride *= size
        # Offsets between multiples of what divides all ranks of a group and a host make no difference.
        aligned = math.gcd(gpus_per_host, *(ranks.step for ranks in ranges if len(ranks) > 1))
        firsts = sorted({offset - offset % aligned for offset in offsets})
        found = (tuple((first + sum(ranks)) // gpus_per_host for ranks in product(*ranges)) for first in firsts)
        return list(dict.fromkeys(found))


class Framework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a framework that change a step.

    - `flash`: attention keeps its scores in the kernel; otherwise they go through memory, and no product is left out.
    - `fused_softmax`: of stored scores: scale, mask and softmax are one kernel; otherwise each is one, in 32 bits.
    - `dropout`: after attention's softmax and before each residual addition.
    - `fused`: chains of elementwise operations are one kernel; otherwise each is one, and norms compute in 32 bits.
    - `fused_loss`: the loss reads logits of 16 bits, of which each worker has a part; otherwise torch's cross entropy
      takes the whole logits, in 32 bits, on every worker.
    - `gradient_nbytes`: of a gradient where it is added up. `sent_nbytes`: where it is sent, if not the same.
    - `hidden`: the collectives that run during computation. With `tensor` these are the backward pass's that belong to
      matrices divided by columns, and with `tensor:forward` all others, in parts during the products that they feed or
      that feed them. With `data` gradients and gathers of parameters; with `data:gradients` only gradients.
    - `gathers_inputs`: the backward pass under sequence parallelism gathers the inputs of layers again.
    - `divides_sends`: tensor-parallel workers send 1/tensor of an activation each to the next stage of a pipeline.
    - `vocabulary_multiple`: the vocabulary's part of a worker is padded to a multiple of it.
    - `deduplicates`: of a token's copies that go to experts on one host, one crosses the network.
    - `mixture_s`: seconds of host work and small kernels of a mixture of experts, a layer and micro-batch. Only a
      measured step says them.
    - `host_s`: seconds that no GPU work hides, a layer and micro-batch.
    - `schedules`, `recomputes`, `shards`: what it offers to a search for layouts.
    """

    name: str = "custom"
    flash: bool = True
    dropout: bool = False
    fused: bool = True
    gradient_nbytes: Literal[2, 4] = 4
    hidden: tuple[Hidden, ...] = ()
    gathers_inputs: bool = True
    divides_sends: bool = False
    vocabulary_multiple: Int64 = 1
    mixture_s: float = 0.0
    host_s: float = 0.0
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    recomputes: tuple[Recompute, ...] = ("none", "core", "selective", "full")
    shards: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")
    fused_softmax: bool = True
    fused_loss: bool = True
    sent_nbytes: Literal[2, 4] | None = None
    deduplicates: bool = False

    @property
    def hides_gradients(self) -> bool:
        """Return whether data-parallel gradients are reduced during the backward pass."""
        return not {"data", "data:gradients"}.isdisjoint(self.hidden)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of a gradient where it is sent."""
        return self.sent_nbytes or self.gradient_nbytes

    def __post_init__(self) -> None:
        _within(self, ["vocabulary_multiple"])
        for field in ("mixture_s", "host_s"):
            if not 0 <= getattr(self, field) <= 1e6:
                raise InputError(f"{field}: {getattr(self, field)} (expected seconds, 0 to 1,000,000)")


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.machine/1"):
    """A GPU, its links and its host: the figures of data sheets, and the shares of these that are reached.

    `link_bytes_per_s` (in one direction) connects the GPUs of a host, `card_bytes_per_s` each GPU with other hosts.
    `efficiency`, of matrix products, is the one number to fit to a measured step. `multiprocessors` compute the tiles
    of a product in waves; with 0 of them, products are not divided into waves. Latencies belong to a collective within
    a job, with its skew: inside a host, between two hosts, and for each further host.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_nbytes: Int64
    link_bytes_per_s: float
    card_bytes_per_s: float
    efficiency: float
    attention_efficiency: float
    gpus_per_host: Int64 = 8
    grouped_efficiency: float = 0.5
    memory_share: float = 0.75
    link_share: float = 0.78
    card_share: float = 0.8
    latency_s: float = 60e-6
    network_latency_s: float = 70e-6
    hop_s: float = 3e-6
    multiprocessors: Int64 = 0

    def __post_init__(self) -> None:
        _within(self, ["gpus_per_host"])
        _within(self, ["multiprocessors"], least=0)
        for field in self.__struct_fields__:
            value = getattr(self, field)
            share = field.endswith(("efficiency", "share"))
            if field.endswith("_s") and not field.endswith("per_s"):
                if not 0 <= value <= 1:
                    raise InputError(f"{field}: {value} (expected seconds, 0 to 1)")
            elif field not in ("name", "multiprocessors") and not (
                math.isfinite(value) and 0 < value <= (1 if share else 1e30)
            ):
                raise InputError(
                    f"{field}: {value} (expected {'a share, above 0 to 1' if share else 'a number above 0'})"
                )

    @property
    def links_in_words(self) -> str:
        """The nominal rates of the links, and the shares of these that are reached."""
        card, link = (format_bandwidth(8 * rate) for rate in (self.card_bytes_per_s, self.link_bytes_per_s))
        return (
            f"hosts of {self.gpus_per_host} x {self.name}: {card} a GPU and {link} inside hosts (nominal rates, "
            f"of which {percent(self.card_share, 0)} and {percent(self.link_share, 0)} are reached)"
        )

    def ring(self, group: WorkerGroup) -> LinearCost:
        """Return the cost of a ring of these workers: its latency, and the seconds for each byte that a worker sends.

        It goes through each host once, on all cards of the group's workers there (nccl-tests' bus bandwidth).
        """
        bus = self.link_bytes_per_s * self.link_share
        if group.hosts == 1:
            return LinearCost(self.latency_s, 1 / bus)
        cards = self.card_bytes_per_s * group.per_host * self.card_share
        latency_s = self.network_latency_s + self.hop_s * (group.hosts - 1)
        return LinearCost(latency_s, 1 / (min(bus, cards) if group.per_host > 1 else cards))


class Job(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, tag_field="format", tag="legato.job/1"):
    """A training job: the model, the mesh, and how one step of it runs.

    Each pipeline computes `microbatches` of `microbatch` sequences a step. Every stage of the pipeline has `chunks`
    chunks of layers, and `layers` has the number of layers of each chunk in the model's order: chunk c is on stage
    c mod pipeline. The first chunk also has the embeddings, the last one the output layer. Without `layers`, these
    count as a layer each unless the layers divide evenly without them.

    `recompute` in the backward pass: attention's `core`; every second matrix product and all elementwise operations
    (`selective`, as torchtitan's per-operator option); or the whole layer (`full`). `shard`: what each data-parallel
    worker keeps only its own part of, as `Plan.shard`, or the parameters as well. `replicas` divides the data-parallel
    workers into this number of groups of neighbours, each of which shards on its own (HSDP). Raises `InputError` on
    what does not divide or is empty, and `TooLargeError` beyond four million passes.
    """

    name: str
    model: LanguageModel
    mesh: Mesh
    framework: Framework
    machine: Machine
    microbatches: Int64 = 1
    microbatch: Int64 = 1
    schedule: Schedule = "1f1b"
    chunks: Int64 = 1
    layers: tuple[Int64, ...] = ()
    recompute: Recompute = "none"
    shard: Shard = "none"
    sequence_parallel: bool = False
    replicas: Int64 = 1

    def __post_init__(self) -> None:
        _within(self, ["microbatches", "microbatch", "chunks", "replicas"])
        self._check_divides()
        if self.chunks > 1 and self.schedule != "interleaved":
            raise InputError(f"chunks: {self.chunks} (expected 1: only the schedule interleaved has more)")
        if self.schedule == "interleaved" and self.microbatches % self.mesh.pipeline:
            raise InputError(
                f"microbatches: {self.microbatches} (expected a multiple of the {self.mesh.pipeline} stages)"
            )
        if self.sequence_parallel and self.mesh.tensor == 1:
            raise InputError("sequence_parallel: true (expected a mesh with a tensor dimension above 1)")
        if self.mesh.pipeline * self.chunks * self.microbatches > _MOST_PASSES:
            raise TooLargeError(f"stages x chunks x microbatches: more than {_MOST_PASSES:,}")
        self._check_layers()

    def _check_divides(self) -> None:
        model, mesh = self.model, self.mesh
        widths = {"intermediate": model.intermediate}
        if model.experts > 1:
            widths |= {"expert_intermediate": model.expert_intermediate}
            widths |= {"shared_intermediate": model.shared_intermediate}
        for what, number in {"heads": model.heads, "kv_heads": model.kv_heads, **widths}.items():
            if number % mesh.tensor:
                raise InputError(f"model.{what}: {number} (expected a multiple of the {mesh.tensor} workers of tensor)")
        if model.sequence % (2 * mesh.context if mesh.context > 1 else 1):
            raise InputError(f"model.sequence: {model.sequence} (expected a multiple of 2 x {mesh.context} of context)")
        if self.replicas > 1 and (mesh.data % self.replicas or self.shard != "parameters" or mesh.expert > 1):
            raise InputError(
                f"replicas: {self.replicas} (expected a divisor of the {mesh.data} workers of data, and that these "
                "shard parameters but no experts)"
            )
        if mesh.expert_fold and mesh.tensor > 1 and not self.sequence_parallel:
            raise InputError("expert_fold: true (expected sequence parallelism, as tensor is above 1)")
        if model.experts % mesh.expert:
            raise InputError(f"mesh.expert: {mesh.expert} (expected a divisor of the {model.experts} experts)")

    def _check_layers(self) -> None:
        stages = self.mesh.pipeline * self.chunks
        if self.layers and (len(self.layers) != stages or min(self.layers) < 0):
            raise InputError(
                f"layers: {len(self.layers)} numbers (expected one of at least 0 for each of {stages} chunks)"
            )
        if self.layers and sum(self.layers) != self.model.layers:
            raise InputError(f"layers: {sum(self.layers)} together (expected the model's {self.model.layers})")
        if (self.layers and 0 in self.layers[1:-1]) or stages > self.model.layers + 2:
            raise InputError(f"layers: {self.model.layers} for {stages} chunks (expected one or more a chunk)")

    def __str__(self) -> str:
        """One line: the model, the GPUs and how they are divided, and the framework."""
        sizes = ", ".join(
            f"{name} {getattr(self.mesh, name)}" for name in self.mesh.order if getattr(self.mesh, name) > 1
        )
        sizes += f", {self.mesh.experts_in_words}" if self.mesh.expert > 1 else ""
        sizes = f" ({sizes})" if sizes else ""
        chunks = f" with {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"{self.name} on {self.mesh.workers:,} x {self.machine.name}{sizes}, {self.framework.name}, "
            f"{self.microbatches:,} micro-batch{'es' if self.microbatches > 1 else ''} of "
            f"{count(self.microbatch, 'sequence')}, {self.schedule}{chunks}"
        )

    def _repr_html_(self) -> str:
        """A picture for notebooks: the hosts and their GPUs, each with the number of its stage of the pipeline."""
        order, in_a_host = self.mesh.order, min(self.machine.gpus_per_host, self.mesh.workers)
        places = product(*(range(getattr(self.mesh, name)) for name in order))
        gpus = [
            (place[order.index("pipeline")], ", ".join(f"{name} {at}" for name, at in zip(order, place, strict=True)))
            for place in islice(places, min(_MOST_DRAWN * in_a_host, _MOST_GPUS))
        ]
        stages = f"{count(self.mesh.pipeline, 'stage')}, whose numbers are in the picture; layers of each chunk: "
        layers = shorten(", ".join(map(str, self.split)), 80)
        picture = draw_hosts(gpus, in_a_host, -(-self.mesh.workers // in_a_host), str(self))
        return f"{picture}<p>{stages}{layers}</p>"

    @cached_property
    def split(self) -> tuple[int, ...]:
        """The layers of each chunk, in the model's order."""
        stages = self.mesh.pipeline * self.chunks
        if self.layers:
            return self.layers
        if self.model.layers % stages == 0:
            return (self.model.layers // stages,) * stages
        each, more = divmod(self.model.layers + 2, stages)
        counts = [each + (0 < chunk <= more) for chunk in range(stages)]
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)

    @property
    def uneven(self) -> bool:
        """Return whether chunks differ in layers, whether or not embeddings and the output layer count as one each."""
        whole = [self.split[0] + 1, *self.split[1:-1], self.split[-1] + 1]
        return len(set(self.split)) > 1 and len(set(whole)) > 1

    @cached_property
    def divided(self) -> Mesh:
        """The mesh, whose dimension `expert` are the workers that divide parameters if these have replicas."""
        mesh = self.mesh
        return mesh if self.replicas == 1 else msgspec.structs.replace(mesh, expert=mesh.data // self.replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatch * self.microbatches * self.mesh.data * self.model.sequence

    def group(self, *names: str, stage: int | None = None) -> WorkerGroup:
        """The workers that share a collective in these dimensions of the mesh: of a stage of the pipeline, or of any.

        Where groups lie differently on their hosts, it stands for the slowest: all others wait for it.
        """
        groups = self.divided.placements(names, self.machine.gpus_per_host, stage)
        workers = [Counter(hosts).values() for hosts in groups]
        return WorkerGroup(len(groups[0]), max(map(len, workers)), min(map(min, workers)))
