"""Frameworks, machines and devices by name: facts from releases and data sheets, and fitted efficiencies.

The efficiency of a machine was fitted to steps of one framework; `whole_jobs.sure` says how accurate predictions for
other frameworks are.
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

#: Frameworks, each with the sources of its fields:
#:
#: - `megatron-core`: Megatron-LM with its usual options. --tp-comm-overlap is off. --overlap-grad-reduce,
#:   --overlap-param-gather, and asynchronous backward tensor-parallel all-reduces and sends are on. Gradients are added
#:   up in float32, --make-vocab-size-divisible-by is 128, and each worker computes cross entropy on a part of the
#:   logits.
#: - `nemo`: the same library in NeMo's recipes for pre-training. ub_tp_comm_overlap is on, so all tensor-parallel
#:   collectives run during products. By default, context parallelism sends keys and values during attention.
#:   grad_sync_dtype is bf16.
#: - `torchtitan`: FSDP2 and DTensor. MixedPrecisionPolicy has parameters in bfloat16 and reduces gradients in float32.
#:   Sharded matrices keep their gathered inputs. Checkpointing is torch's checkpoint_wrapper, which is not reentrant.
#: - `megatron-2021`: the system of arXiv 2104.04473. Attention stores its scores, gradients have 16 bits, and
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
            stops_early=True,
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
#: Machines from data sheets, with the boards that have the fastest links (SXM). Memory is the size that drivers report,
#: in whole GiB. `h100-500w` is the board of torchtitan's benchmarks. Published timings of 183 products on an
#: A100 show waves of tiles (with waves the mean error is 5.2%, without 5.9%). Timings on a B200 show none
#: (MooreThreads/SimuMax@4dcaae5, configs/system).
MACHINES = {
    one.name: one
    for one in (
        Machine("a100", 312e12, 2039e9, 80 * 2**30, 300e9, 25e9, 0.743, 0.45, multiprocessors=108),
        Machine("h100", 989.4e12, 3350e9, 79 * 2**30, 450e9, 50e9, 0.624, 0.5, multiprocessors=132),
        Machine("h100-500w", 989.4e12, 2400e9, 95 * 2**30, 450e9, 50e9, 0.455, 0.35, multiprocessors=132),
        Machine("b200", 2250e12, 8000e9, 179 * 2**30, 900e9, 50e9, 0.4435, 0.42, link_share=0.67),
        # A GPU of an NVL72. Its efficiency was fitted to three published steps of NeMo.
        Machine("gb200", 2450e12, 8000e9, 184 * 2**30, 900e9, 50e9, 0.446, 0.42, gpus_per_host=72, link_share=0.67),
        # Both have the chip of an h100 and use its efficiencies, since no steps on these boards were available.
        Machine("h200", 989.4e12, 4800e9, 140 * 2**30, 450e9, 50e9, 0.624, 0.5, multiprocessors=132),
        Machine("h800", 989.4e12, 3350e9, 79 * 2**30, 200e9, 50e9, 0.624, 0.5, multiprocessors=132),
        # Products reach 620 TFLOP/s in benchmarks of SemiAnalysis (December 2024). There are seven links of 64 GB/s.
        # Attention is as efficient as FlashAttention-2 on an h100.
        Machine("mi300x", 1307.4e12, 5300e9, 191 * 2**30, 448e9, 50e9, 0.474, 0.35),
    )
}


def framework_named(name: str | Framework) -> Framework:
    """Return the framework with this name from `FRAMEWORKS`; a `Framework` is returned as it is.

    Raises `InputError`, which lists the nearest names, on an unknown name.
    """
    if isinstance(name, Framework):
        return name
    if name not in FRAMEWORKS:
        raise unknown_name("preset", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def machine_named(name: str | Machine) -> Machine:
    """Return the machine with this name from `MACHINES`; a `Machine` is returned as it is.

    If the name ends in `.json`, the machine is read from this file (`legato fit-machine` writes such files).

    Raises `InputError`, which lists the nearest names, on an unknown name, and `FileError` on a file without a machine.
    """
    if isinstance(name, Machine):
        return name
    if name.endswith(".json"):
        return files.read(name, Machine)
    if name not in MACHINES:
        raise unknown_name("machine", name, MACHINES)
    return MACHINES[name]


#: Devices with their FP32 peak at boost clock, their memory bandwidth, and their 16-bit peak if that is higher (tensor
#: cores from `v100` on). All peaks are without sparsity, for the boards with the fastest links (SXM). Later devices are
#: the machines of whole jobs. `k80` is one of the two processors of a K80 board, as a worker in the papers has.
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
    """Return the device with this name. Raises `InputError`, which lists the nearest names, on an unknown name."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name]


#: The links of a machine, by the axis of a network: the machine's field, the number by which to multiply the field to
#: get the axis's value, and the field with the share of the value that is reached.
_LINKS = {
    "bandwidth_bps": ("card_bytes_per_s", 8, "card_share"),
    "local_bandwidth_bps": ("link_bytes_per_s", 8, "link_share"),
    "gpus_per_host": ("gpus_per_host", 1, None),
    "latency_s": ("hop_s", 1, None),
}


def with_links(machine: Machine, axes: Mapping[str, Any]) -> Machine:
    """Return the machine with other links; `axes` maps names of axes (`core/axes.py`) to values of the links.

    Links without a value stay as they are. A latency applies to every collective, inside a host and between any number
    of hosts.
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
    """Return the stated value of each axis of a machine's links, and the share of this value that is reached."""
    return {
        name: (unit * getattr(machine, field), 1.0 if share is None else getattr(machine, share))
        for name, (field, unit, share) in _LINKS.items()
    }


def cluster_of(machine: Machine, workers: int) -> Cluster:
    """Return a cluster of workers on hosts of this machine, with the cost of a ring all-reduce as in whole jobs."""
    gpus = min(workers, machine.gpus_per_host)
    ring = machine.ring(WorkerGroup(workers, -(-workers // gpus), gpus))
    return Cluster(workers, {"ring": LinearCost(ring.alpha_s, 2 * ring.beta_s_per_byte * (workers - 1) / workers)})
