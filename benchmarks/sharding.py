"""Milliseconds of an iteration with sharded optimizers (simulated): schedulers, the bound, and `legato` without shards.

    python benchmarks/sharding.py

V100s with Adam, which moves 28 bytes of memory for each parameter of 4 bytes, at 900 GB/s.
"""

from __future__ import annotations

from msgspec.structs import replace

import legato
from legato import Cluster, Workload, zoo
from legato.core.workload import Op
from legato.schedule import schedule

ADAM_S_PER_BYTE = 28 / 4 / 900e9
SCHEDULERS = ("ddp", "dear", "legato")


def with_adam(workload: Workload) -> Workload:
    """The workload with an optimizer op for each tensor."""
    updates = [Op(f"adam {tensor.name}", "optimizer", ADAM_S_PER_BYTE * tensor.nbytes) for tensor in workload.tensors]
    first = len(workload.ops)
    tensors = (replace(t, readers=(*t.readers, first + k)) for k, t in enumerate(workload.tensors))
    return replace(workload, ops=(*workload.ops, *updates), tensors=tuple(tensors))


def main() -> None:
    print("".join(f"{what:>20}" for what in ("model", "workers", *SCHEDULERS, "bound", "legato, no shards")))
    for name in ("resnet-v1-50", "vgg-16", "bert-base"):
        workload = with_adam(zoo.workload(name))
        for workers, bandwidth_bps in ((8, 10e9), (32, 25e9)):
            cluster = Cluster.derive(workers, bandwidth_bps, latency_s=30e-6, collectives=["ring"])
            plans = [schedule(scheduler, workload, cluster, shard="optimizer") for scheduler in SCHEDULERS]
            *sharded, whole = (
                legato.simulate(workload, plan, cluster).iteration_s
                for plan in (*plans, legato.plan(workload, cluster))
            )
            bound = legato.lower_bound(workload, cluster, shard="optimizer", step_last=True)
            figures = (1e3 * seconds for seconds in (*sharded, bound.seconds, whole))
            print(f"{name:>20}{workers:>20}" + "".join(f"{figure:>20.1f}" for figure in figures))


if __name__ == "__main__":
    main()
