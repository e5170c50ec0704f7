"""A whole training job: a language model, the mesh of GPUs that share it, the machine, and the framework."""

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

#: The most GPUs of a job, and the most passes of micro-batches through stages. Larger predictions would take minutes.
_MOST_WORKERS, _MOST_PASSES = 2**20, 2**22
#: The largest value of each number of a shape. Products of a few such numbers are exact as floats, or far from
#: overflow.
_MOST = 2**24
#: The most hosts and the most GPUs in a picture.
_MOST_DRAWN, _MOST_GPUS = 16, 1024


def _within(value: msgspec.Struct, fields: Iterable[str], least: int = 1, most: int = _MOST) -> None:
    for field in fields:
        if not least <= getattr(value, field) <= most:
            raise InputError(f"{field}: {getattr(value, field):,} (expected {least:,} to {most:,})")


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The widths of latent attention (arXiv 2405.04434, section 2.1), from which queries, keys and values are computed.

    Each head of queries and keys has `rope` elements in addition to `head_size`. All heads of keys share the same
    `rope` elements.
    """

    query: Int64
    key_value: Int64
    rope: Int64

    def __post_init__(self) -> None:
        _within(self, self.__struct_fields__)


class LanguageModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a decoder.

    `gpt` has layer normalizations, biases, learned positions and an MLP of two matrices; `llama` has RMS
    normalizations, no biases, rotary positions and a gated MLP of three matrices. The width of the MLP is
    `intermediate`. With `experts`, each layer after the first `dense_layers` has `experts` MLPs of width
    `expert_intermediate`, and sends each token to `active_experts` of them. All tokens also go to a shared MLP of width
    `shared_intermediate`. If `tied`, the embeddings and the output layer share a table.
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
        """Return the indices of the layers that have experts."""
        return range(self.dense_layers if self.experts > 1 else self.layers, self.layers)


class WorkerGroup(msgspec.Struct, frozen=True):
    """The workers of a collective: their number, the number of hosts, and the least number of workers on a host."""

    size: int
    hosts: int
    per_host: int


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of workers in each dimension of a job, as in torch's `DeviceMesh`.

    `order` names the dimensions, the outermost first: neighbours in the last dimension have neighbouring ranks.
    `expert` divides the dimension `data`: experts are distributed over groups of `expert` neighbours in `data`, and
    each expert is divided among tensor-parallel workers. With `expert_fold`, no expert is divided. Experts are then
    distributed over `expert` workers: all workers of `tensor` and `context`, and neighbours in `data` (MoE parallel
    folding, arXiv 2504.14960, section 3).
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
        """Return, in words, the dimensions with more than one worker, and their sizes."""
        sizes = [f"{name} {size}" for name in DIMENSIONS if (size := getattr(self, name)) > 1]
        sizes += [self.experts_in_words] if self.expert > 1 else []
        return ", ".join(sizes) or "one GPU"

    @property
    def experts_in_words(self) -> str:
        """Return the number of workers over which experts are distributed, in words."""
        return f"expert {self.expert}{' folded' if self.expert_fold else ''}"

    @property
    def workers(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def data_expert(self) -> int:
        """Return the number of neighbours in `data` over which experts are distributed."""
        return self.expert // (self.tensor * self.context) if self.expert_fold else self.expert

    @property
    def expert_parts(self) -> int:
        """Return the number of parts into which a layer's experts are divided; `tensor` workers share each part."""
        return self.expert // self.tensor if self.expert_fold else self.expert

    @property
    def expert_dimensions(self) -> tuple[str, ...]:
        """Return the dimensions over which experts are distributed."""
        return ("tensor", "context", "expert") if self.expert_fold else ("expert",)

    def offset(self, stage: int, gpus_per_host: int) -> int:
        """Return the position of a stage's first GPU in its host; stages with equal positions use hosts alike."""
        inside: list[int] = [getattr(self, name) for name in self.order[self.order.index("pipeline") + 1 :]]
        return stage * math.prod(inside) % gpus_per_host

    def placements(self, names: Iterable[str], gpus_per_host: int, stage: int | None = None) -> list[tuple[int, ...]]:
        """Return the placements of groups of workers along these dimensions: for each group, the host of each worker.

        Equal placements are listed once, and hosts are counted from the host of the group's first worker. `names` may
        contain names of `DIMENSIONS`, `expert`, and `replica` (`data` divided by `expert`). If a `stage` is given, only
        the groups of this stage count.
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
                else:  # the places of other groups' first workers within their hosts
                    mine = range(min(size, gpus_per_host)) if part != "pipeline" or stage is None else (stage,)
                    steps = {index * stride % gpus_per_host for index in mine}
                    offsets = {(offset + step) % gpus_per_host for offset in offsets for step in steps}
                stride *= size
        # Offsets are rounded down to multiples of the common divisor of host size and strides; smaller shifts change
        # nothing.
        aligned = math.gcd(gpus_per_host, *(ranks.step for ranks in ranges if len(ranks) > 1))
        firsts = sorted({offset - offset % aligned for offset in offsets})
        found = (tuple((first + sum(ranks)) // gpus_per_host for ranks in product(*ranges)) for first in firsts)
        return list(dict.fromkeys(found))


class Framework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a framework that change a step.

    - `flash`: attention keeps its scores in the kernel. Without `flash`, attention writes scores to memory, and also
      computes the products for masked pairs of tokens.
    - `fused_softmax`: without `flash`, scale, mask and softmax are one kernel; otherwise each is a kernel, in 32 bits.
    - `dropout`: there is dropout after attention's softmax and before each residual addition.
    - `fused`: a chain of elementwise operations is one kernel; otherwise each operation is a kernel, and norms compute
      in 32 bits.
    - `fused_loss`: each worker computes the loss of its part of the logits, in 16 bits; otherwise torch's cross entropy
      reads all logits, in 32 bits, on every worker.
    - `gradient_nbytes`: the bytes of each element of a gradient that is added up. `sent_nbytes`: the bytes of each
      element when it is sent, if this number differs.
    - `hidden`: the collectives that run during computation. `tensor` means the collectives of the backward pass that
      belong to matrices divided by columns; `tensor:forward` means all other tensor-parallel collectives, which run
      piece by piece during the matrix product before or after the collective. `data` means gradients and gathers of
      parameters; `data:gradients` means only gradients.
    - `gathers_inputs`: under sequence parallelism, the backward pass gathers the inputs of layers again.
    - `stops_early`: full recomputation leaves out a dense layer's last product and its collective, because no backward
      pass needs their results (torch's checkpointing that is not reentrant, from torch 2.1 on).
    - `divides_sends`: each tensor-parallel worker sends 1/tensor of an activation to the next stage of the pipeline.
    - `vocabulary_multiple`: each worker's part of the vocabulary is padded to a multiple of this number.
    - `deduplicates`: a token that goes to several experts on one host crosses the network once.
    - `mixture_s`: seconds of host work and small kernels that a mixture of experts needs for each layer and
      micro-batch, known only from a measured step.
    - `host_s`: seconds of host work for each layer and micro-batch that no GPU work hides.
    - `schedules`, `recomputes`, `shards`: the options of the framework that a search for layouts tries.
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
    stops_early: bool = False

    @property
    def hides_gradients(self) -> bool:
        """Return whether data-parallel gradients are reduced during the backward pass."""
        return not {"data", "data:gradients"}.isdisjoint(self.hidden)

    @property
    def reduced_nbytes(self) -> int:
        """Return the number of bytes in which each element of a gradient is sent."""
        return self.sent_nbytes or self.gradient_nbytes

    def __post_init__(self) -> None:
        _within(self, ["vocabulary_multiple"])
        for field in ("mixture_s", "host_s"):
            if not 0 <= getattr(self, field) <= 1e6:
                raise InputError(f"{field}: {getattr(self, field)} (expected seconds, 0 to 1,000,000)")


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.machine/1"):
    """A GPU, its links and its host: figures from data sheets, and the shares of these figures that jobs reach.

    `link_bytes_per_s` is the rate (in one direction) between the GPUs of a host, and `card_bytes_per_s` the rate from
    each GPU to other hosts. `efficiency` is the share of the peak that matrix products reach, and should be fitted to
    measured steps. A GPU computes the tiles of a product in waves, one tile per multiprocessor; if `multiprocessors` is
    0, waves are ignored. Each latency is the latency of a whole collective in a job, including the wait for late
    workers: inside a host (`latency_s`), between two hosts (`network_latency_s`), or for each additional host
    (`hop_s`).
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
        """Return the nominal rates of the links in words, with the shares of these rates that jobs reach."""
        card, link = (format_bandwidth(8 * rate) for rate in (self.card_bytes_per_s, self.link_bytes_per_s))
        return (
            f"hosts of {self.gpus_per_host} x {self.name}: {card} a GPU and {link} inside hosts (nominal rates, "
            f"of which {percent(self.card_share, 0)} and {percent(self.link_share, 0)} are reached)"
        )

    def ring(self, group: WorkerGroup) -> LinearCost:
        """Return the latency of a ring of these workers, and the seconds in which a worker sends a byte.

        The ring goes through each host once and uses the network cards of all its workers on that host (nccl-tests' bus
        bandwidth).
        """
        bus = self.link_bytes_per_s * self.link_share
        if group.hosts == 1:
            return LinearCost(self.latency_s, 1 / bus)
        cards = self.card_bytes_per_s * group.per_host * self.card_share
        latency_s = self.network_latency_s + self.hop_s * (group.hosts - 1)
        return LinearCost(latency_s, 1 / (min(bus, cards) if group.per_host > 1 else cards))


class Job(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, tag_field="format", tag="legato.job/1"):
    """A training job: the model, the mesh, and how one step runs.

    In a step, each pipeline computes `microbatches` micro-batches of `microbatch` sequences. Every stage of the
    pipeline has `chunks` chunks of layers, and `layers` has the number of layers of each chunk in the model's order:
    chunk c is on stage c mod pipeline. The first chunk also has the embeddings, and the last chunk has the output
    layer. Without `layers`, the layers are divided evenly if possible. If the layers cannot be divided evenly, the
    embeddings and the output layer count as a layer each.

    `recompute` says what the backward pass computes again: attention's `core`; every second matrix product and all
    elementwise operations (`selective`, as torchtitan's per-operator option); or the whole layer (`full`). `shard` says
    what is divided among data-parallel workers: one of the values of `Plan.shard`, or `parameters`. With `replicas`,
    the data-parallel workers form this number of groups of neighbours, and each group shards the model within itself
    (HSDP). Raises `InputError` if the numbers do not fit each other (`tensor` must divide the heads, for example), or
    if a chunk has nothing to compute. Raises `TooLargeError` if a step has over four million passes of micro-batches
    through chunks.
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
            widths |= {"expert_intermediate": 0 if mesh.expert_fold else model.expert_intermediate}
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
        """Return one line: the model, the GPUs and how they are divided, and the framework."""
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
        """Return a picture for notebooks: the hosts and their GPUs, each with the number of its pipeline stage."""
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
        """Return the number of layers of each chunk, in the model's order."""
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
        """Return whether chunks differ in size, whether or not the embeddings and the output layer count as layers."""
        whole = [self.split[0] + 1, *self.split[1:-1], self.split[-1] + 1]
        return len(set(self.split)) > 1 and len(set(whole)) > 1

    @cached_property
    def divided(self) -> Mesh:
        """Return the mesh, in which, if there are replicas, `expert` is the number of workers that share a replica."""
        mesh = self.mesh
        return mesh if self.replicas == 1 else msgspec.structs.replace(mesh, expert=mesh.data // self.replicas)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step."""
        return self.microbatch * self.microbatches * self.mesh.data * self.model.sequence

    def group(self, *names: str, stage: int | None = None) -> WorkerGroup:
        """Return the workers of a collective along these dimensions of the mesh, in one stage or (None) in all stages.

        If groups are placed differently on their hosts, the result describes the slowest group, since all others wait
        for it.
        """
        groups = self.divided.placements(names, self.machine.gpus_per_host, stage)
        workers = [Counter(hosts).values() for hosts in groups]
        return WorkerGroup(len(groups[0]), max(map(len, workers)), min(map(min, workers)))
