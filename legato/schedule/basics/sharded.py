"""Convert plans of all-reduces to plans that shard the optimizer (ZeRO-1) or the gradients as well (ZeRO-2).

Idea: every worker keeps the optimizer's states only for its own part of the parameters, its shard. Gradients are
reduced and scattered, each worker updates its shard, and all workers gather the updated parameters. A reduce-scatter
and an all-gather together send as many bytes as an all-reduce. The reduce-scatters overlap with the backward pass. The
all-gathers overlap with the next forward pass, because they run in the order in which the forward pass reads the
parameters.
Papers: ZeRO (Rajbhandari, Rasley, Ruwase, He, SC 2020, section 5 on sharding, and section 7 on the volume) and DeAR
(Zhang et al., ICDCS 2023: one half during each pass).
"""

from __future__ import annotations

import msgspec

from legato.core.errors import unknown_name
from legato.core.plan import SHARDS, Plan, Shard
from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["check_shard", "sharded", "with_sharded_updates", "without_updates"]


def check_shard(shard: str) -> None:
    """Raise `InputError` unless `shard` is one of `SHARDS`."""
    if shard not in SHARDS:
        raise unknown_name("shard", shard, SHARDS)


def sharded(plan: Plan, workload: Workload, shard: Shard) -> Plan:
    """Return a sharded plan with the same groups of tensors as this plan of all-reduces or their halves.

    `Plan.sharded` makes the messages, with the all-gathers in the order in which the forward pass first reads their
    parameters. The optimizer ops run between the passes, in the order in which their reduced gradients arrive. Backward
    and forward ops keep their order. With `shard="none"`, the plan is returned unchanged. Raises the same errors as
    `Plan.sharded`.
    """
    if shard == "none":
        return plan
    order = plan.op_order or workload.iteration_order()
    plan = plan.sharded(shard, _first_reads(workload, order))
    scattered = [message for message in plan.messages if message.kind == "reduce_scatter"]
    backward, forward = ([op for op in order if workload.ops[op].phase == phase] for phase in ("backward", "forward"))
    op_order = (*backward, *Period.of(workload).updates_by_arrival(scattered), *forward)
    return msgspec.structs.replace(plan, op_order=() if op_order == workload.iteration_order() else op_order)


def _first_reads(workload: Workload, order: tuple[int, ...]) -> dict[str, int]:
    """Return, for each tensor, the position of the first forward op that reads it (if none does, the number of ops)."""
    place = {op: k for k, op in enumerate(order)}
    return {
        tensor.name: min((place[r] for r in tensor.readers if workload.ops[r].phase == "forward"), default=len(order))
        for tensor in workload.tensors
    }


def with_sharded_updates(workload: Workload, workers: int) -> Workload:
    """Return the workload of a worker that updates only its shard, so that its optimizer ops take less time."""
    ops = (
        msgspec.structs.replace(op, duration_s=op.duration_s / workers) if op.phase == "optimizer" else op
        for op in workload.ops
    )
    return msgspec.structs.replace(workload, ops=tuple(ops))


def without_updates(workload: Workload) -> Workload:
    """Return the workload without its optimizer ops, so that forward ops wait for messages instead of updates."""
    kept = len(workload.ops) - len(workload.phase_ops("optimizer"))  # optimizer ops come last
    tensors = (
        msgspec.structs.replace(tensor, readers=tuple(r for r in tensor.readers if r < kept))
        for tensor in workload.tensors
    )
    return msgspec.structs.replace(workload, ops=workload.ops[:kept], tensors=tuple(tensors))
