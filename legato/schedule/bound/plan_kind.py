"""Kinds of plans, each with its own bound: what plans may send, and in which order they compute."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple, get_args

from legato.core.cluster import Cluster
from legato.core.errors import unknown_name
from legato.core.plan import Plan, Shard
from legato.core.workload import Workload
from legato.schedule.basics.compose import gathers_what_it_scatters
from legato.schedule.basics.heads_tails import Order

__all__ = ["PlanKind", "Sends", "check_sends", "cluster_for_bound", "kind_of", "wider_kinds"]

#: Which messages plans may send: only all-reduces; also pairs of a reduce-scatter and an all-gather of the same slices;
#: or any halves.
Sends = Literal["all_reduces", "pairs", "halves"]


def check_sends(sends: Sends) -> None:
    """Raise `InputError` if `sends` is unknown, because no plan would be of such a kind."""
    if sends not in get_args(Sends):
        raise unknown_name("sends", sends, get_args(Sends))


class PlanKind(NamedTuple):
    """A kind of plans; its fields are arguments of `lower_bound`, which then returns a bound for plans of this kind."""

    order: Order
    sends: Sends
    shard: Shard = "none"
    step_last: bool = False


def wider_kinds(kind: PlanKind) -> list[PlanKind]:
    """Return the kinds that include all plans of this kind, beginning with this kind."""
    every = get_args(Sends)
    axes = (
        dict.fromkeys((kind.order, "any")),
        every[every.index(kind.sends) :] if kind.shard == "none" else (kind.sends,),
        (kind.shard,),
        dict.fromkeys((kind.step_last, False)),
    )
    return [PlanKind(*values) for values in itertools.product(*axes)]  # pyrefly: ignore[bad-argument-type]


def kind_of(plan: Plan, workload: Workload) -> PlanKind:
    """Return the kind of a plan, which decides which bound holds for the plan.

    `step_last` is set if the plan shards something and all its optimizer ops follow the backward pass.
    """
    order = plan.op_order or workload.iteration_order()
    phases = [workload.ops[op].phase for op in order]
    ops = [op for op, phase in zip(order, phases, strict=True) if phase != "optimizer"]
    backward = workload.phase_ops("backward")
    kept = ops == backward + workload.phase_ops("forward")
    sends: Sends = "pairs" if gathers_what_it_scatters(plan) else "halves"
    if all(message.kind == "all_reduce" for message in plan.messages):
        sends = "all_reduces"
    step_last = plan.shard != "none" and "optimizer" not in phases[: len(backward)]
    return PlanKind("captured" if kept else "any", sends, plan.shard, step_last)


def cluster_for_bound(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the cluster for a plan's bound: if any message is rounded, the cluster on which all messages are."""
    return cluster.in_wire_format() if plan.wires else cluster
