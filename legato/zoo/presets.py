"""Frameworks, machines and devices by name: facts of releases and data sheets, and efficiencies that were fitted.

The efficiency of a machine was fitted to steps of one framework; `whole_jobs.sure` says how far off others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from legato.core import files
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import unknown_name
from legato.core.job import Framework, Machine, WorkerGroup
from legato.zoo.device import Device

__all__ = [
    "DEVICES",
    "FRAMEWORKS",
    "MACHINES",
    "cluster_of",
    "device_named",
    "framework_named",
    "links_of",
    "machine_named",
    "with_links",
]

#: What each framework does, and where it says so:
#:
#: - `megatron-core`: Megatron-LM with its usual options (--tp-comm-overlap is off; --overlap-grad-reduce,
#:   --overlap-param-gather, asynchronous backward tensor-parallel all-reduces and sends are on; gradients are added up
#:   in float32, --make-vocab-size-divisible-by is 128, cross entropy takes a part of the logits).
#: - `nemo`: the same library in NeMo's recipes for pre-training (ub_tp_comm_overlap is on, so all tensor-parallel
#:   collectives run during products; the default of context parallelism sends keys and values during attention;
#:   grad_sync_dtype is bf16).
#: - `torchtitan`: FSDP2 and DTensor (MixedPrecisionPolicy: parameters in bfloat16, gradients reduced in float32;
#:   sharded matrices keep their gathered inputs).
#: - `megatron-2021`: arXiv 2104.04473, whose attention stores its scores, whose gradients are of 16 bits, and whose
#:   tensor-parallel workers send parts of activations between stages.
_CORE = Framework(
    "megatron-core",
    hidden=("tensor", "pipeline", "data"),
    vocabulary_multiple=128,
    schedules=("1f1b", "interleaved"),
    recomputes=("none", "core", "full"),
    shards=("none", "optimizer"),
)
FRAMEWORKS = {
    one.name: one
    for one in (
        _CORE,
        replace(
            _CORE,
            name="nemo",
            hidden=("tensor", "tensor:forward", "context", "pipeline", "data"),
            gradient_nbytes=2,
        ),
        Framework(
            "torchtitan",
            hidden=("pipeline", "data"),
            gathers_inputs=False,
            recomputes=("none", "selective", "full"),
            shards=("parameters",),
        ),
        Framework(
            "megatron-2021",
            flash=False,
            dropout=True,
            gradient_nbytes=2,
            divides_sends=True,
            vocabulary_multiple=128,
            schedules=("1f1b", "interleaved"),
            recomputes=("none", "core", "full"),
            shards=("none",),
        ),
    )
}
#: By data sheets, of the boards with the fastest links (SXM); memory is what drivers report, in whole GiB. `h100-500w`
#: is the board of torchtitan's benchmarks. Published timings of products show waves on an A100 (of 183, the mean error
#: is 5.2% with them and 5.9% without) and none on a B200 (MooreThreads/SimuMax@4dcaae5, configs/system).
MACHINES = {
    one.name: one
    for one in (
        Machine("a100", 312e12, 2039e9, 80 * 2**30, 300e9, 25e9, 0.743, 0.45, multiprocessors=108),
        Machine("h100", 989.4e12, 3350e9, 79 * 2**30, 450e9, 50e9, 0.624, 0.5, multiprocessors=132),
        Machine("h100-500w", 989.4e12, 2400e9, 95 * 2**30, 450e9, 50e9, 0.455, 0.35, multiprocessors=132),
        Machine("b200", 2250e12, 8000e9, 179 * 2**30, 900e9, 50e9, 0.4435, 0.42, link_share=0.67),
        # Of an NVL72; its efficiency was fitted to three published steps of NeMo.
        Machine("gb200", 2450e12, 8000e9, 184 * 2**30, 900e9, 50e9, 0.446, 0.42, gpus_per_host=72, link_share=0.67),
        # The chip of an h100, whose efficiencies they have: no step on them fitted any.
        Machine("h200", 989.4e12, 4800e9, 140 * 2**30, 450e9, 50e9, 0.624, 0.5, multiprocessors=132),
        Machine("h800", 989.4e12, 3350e9, 79 * 2**30, 200e9, 50e9, 0.624, 0.5, multiprocessors=132),
        # 620 TFLOP/s of products in benchmarks of SemiAnalysis (December 2024); seven links of 64 GB/s. Attention as
        # FlashAttention-2 has it on an h100.
        Machine("mi300x", 1307.4e12, 5300e9, 191 * 2**30, 448e9, 50e9, 0.474, 0.35),
    )
}


def framework_named(name: str | Framework) -> Framework:
    """Return one of `FRAMEWORKS`; a framework itself stands for its name.

    Raises `InputError`, with the nearest names, on an unknown one.
    """
    if isinstance(name, Framework):
        return name
    if name not in FRAMEWORKS:
        raise unknown_name("preset", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def machine_named(name: str | Machine) -> Machine:
    """Return one of `MACHINES`, or the one in a file whose name ends in `.json` (`legato fit-machine` writes them).

    A machine itself stands for its name.

    Raises `InputError`, with the nearest names, on an unknown one, and `FileError` on a file that holds none.
    """
    if isinstance(name, Machine):
        return name
    if name.endswith(".json"):
        return files.read(name, Machine)
    if name not in MACHINES:
        raise unknown_name("machine", name, MACHINES)
    return MACHINES[name]


#: FP32 peak with boost and memory bandwidth. 16-bit peaks where they are faster (tensor cores from `v100` on). All are
#: dense, of the boards with the fastest links (SXM). Later ones are the machines of whole jobs. `k80` is one of the two
#: processors of a K80 board: a worker in the papers has one.
DEVICES = {
    device.name: device
    for device in (
        Device("k80", 4.37e12, 240e9),
        Device("titan-x-maxwell", 6.6e12, 336.5e9),
        Device("titan-x-pascal", 10.97e12, 480e9),
        Device("titan-xp", 12.15e12, 547.7e9),
        Device("gtx-1080ti", 11.34e12, 484e9),
        Device("p100", 10.6e12, 732e9, fp16_flops_per_s=21.2e12),
        Device("v100", 15.7e12, 900e9, fp16_flops_per_s=125e12),
        *map(Device.of, MACHINES.values()),
    )
}


def device_named(name: str) -> Device:
    """Return one of `DEVICES`. Raises `InputError`, with the nearest names, on an unknown one."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name]


#: The links of a machine, by the field of the axis of a network: its own field, in how many units of the axis, and
#: the field of the share that is reached.
_LINKS = {
    "bandwidth_bps": ("card_bytes_per_s", 8, "card_share"),
    "local_bandwidth_bps": ("link_bytes_per_s", 8, "link_share"),
    "gpus_per_host": ("gpus_per_host", 1, None),
    "latency_s": ("hop_s", 1, None),
}


def with_links(machine: Machine, axes: Mapping[str, Any]) -> Machine:
    """The machine with the links of these values on axes of a network (`core/axes.py`), by field; others stay.

    A latency applies to every collective: inside a host, and between any number of hosts.
    """
    found = {
        field: axes[name] / unit if unit > 1 else axes[name]
        for name, (field, unit, _) in _LINKS.items()
        if name in axes
    }
    if (latency_s := found.get("hop_s")) is not None:
        found |= {"latency_s": latency_s, "network_latency_s": latency_s, "hop_s": 0.0}
    return replace(machine, **found)


def links_of(machine: Machine) -> dict[str, tuple[float, float]]:
    """The links of a machine as values on axes of a network, by field: what is stated, and which share is reached."""
    return {
        name: (unit * getattr(machine, field), 1.0 if share is None else getattr(machine, share))
        for name, (field, unit, share) in _LINKS.items()
    }


def cluster_of(machine: Machine, workers: int) -> Cluster:
    """Workers that fill hosts of a machine, and what they take to all-reduce in a ring, as whole jobs have it."""
    gpus = min(workers, machine.gpus_per_host)
    ring = machine.ring(WorkerGroup(workers, -(-workers // gpus), gpus))
    return Cluster(workers, {"ring": LinearCost(ring.alpha_s, 2 * ring.beta_s_per_byte * (workers - 1) / workers)})
