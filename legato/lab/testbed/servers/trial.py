"""One rank of a rehearsal with parameter servers: calibrate, plan, and try every order of pulls.

The iterations of the orders are interleaved in blocks, so that other work on the
machine slows all orders alike. An iteration lasts from the start of one backward
pass to the start of the next, on worker 0.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import torch.distributed as dist

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.lab.hypothetical import scale_compute
from legato.lab.testbed.launch import Advance
from legato.lab.testbed.rank import rehearse_task
from legato.lab.testbed.rehearsal import STAGES
from legato.lab.testbed.servers.calibration import calibrate_servers
from legato.lab.testbed.servers.loop import ServerLoop, WorkerRun
from legato.lab.testbed.servers.model import Prediction, ServerCosts, own_updates, predict
from legato.lab.testbed.servers.rehearsal import ServerRehearsal, ServerTask, ServerTrial
from legato.pytorch.network.agreement import broadcast_bytes
from legato.schedule import schedule

__all__ = ["rehearse_here"]

_BLOCK = 10  # the most iterations that are timed together


class _Order(msgspec.Struct, frozen=True):
    """An order of pulls and its prediction."""

    plan: Plan
    prediction: Prediction


class _Plans(msgspec.Struct, frozen=True):
    """The message that rank 0 sends to the other ranks: the workload to run, and all orders of pulls."""

    workload: Workload
    orders: list[_Order]


def rehearse_here(task: ServerTask, advance: Advance) -> ServerRehearsal:
    """Calibrate these ranks, plan for them, and measure every order of the task. All ranks must call this.

    `advance(stage, done, total)` reports progress.
    """
    calibrated = calibrate_servers(task.servers, task.agents, lambda done, total: advance(STAGES[0], done, total))
    plans = _plan(task, calibrated.costs, advance)
    loop = ServerLoop(plans.workload, task.servers, task.agents)
    rounds = -(-task.iterations // _BLOCK)
    blocks: dict[str, list[list[Any]]] = {order.plan.scheduler: [] for order in plans.orders}
    passes: dict[str, list[float]] = {name: [] for name in blocks}
    looks: dict[str, list[WorkerRun]] = {}
    for k in range(rounds):
        for i, order in enumerate(plans.orders):
            name = order.plan.scheduler
            count = min(_BLOCK, task.iterations)
            blocks[name].append(loop.run(order.plan, count, seed=k))
            if task.agents:
                found = loop.run(order.plan, count, seed=k, infer=True)
                passes[name] += [s for seconds in found if isinstance(seconds, list) for s in seconds]
            if k == 0:
                looks[name] = [seen for seen in loop.run(order.plan, 2, look=True) if isinstance(seen, WorkerRun)]
            advance(STAGES[2], k * len(plans.orders) + i + 1, rounds * len(plans.orders))
    trials = tuple(
        _trial(plans.workload, o, blocks[name], passes[name], looks[name])
        for o in plans.orders
        for name in [o.plan.scheduler]
    )
    return ServerRehearsal(plans.workload, calibrated.costs, calibrated.fit_error, trials)


def _plan(task: ServerTask, costs: ServerCosts, advance: Advance) -> _Plans:
    """Make the plans on rank 0, and return the plans on all ranks."""
    content = b""
    if dist.get_rank() == 0:
        workers = dist.get_world_size() - task.servers - task.agents
        workload, cluster = own_updates(task.workload), costs.cluster(workers, task.servers)
        if task.ratio is not None:
            plan = schedule("pull-optimal", workload, cluster)
            alone_s = predict(workload, plan, costs, workers, task.servers).communication_s
            workload = scale_compute(workload, workload.compute_s * task.ratio / alone_s)
        orders = []
        for i, name in enumerate(task.schedulers):
            plan = schedule(name, workload, cluster)
            orders.append(_Order(plan, predict(workload, plan, costs, workers, task.servers)))
            advance(STAGES[1], i + 1, len(task.schedulers))
        content = msgspec.json.encode(_Plans(workload, orders))
    return msgspec.json.decode(broadcast_bytes(content, dist.group.WORLD), type=_Plans)


def _trial(
    workload: Workload, order: _Order, blocks: list[list[Any]], passes: list[float], looks: list[WorkerRun]
) -> ServerTrial:
    workers = [[found for found in block if isinstance(found, WorkerRun)] for block in blocks]
    first = [seen[0] for seen in workers]
    stragglers = [
        max(ends) - min(ends) for seen in workers for ends in zip(*(worker.stepped for worker in seen), strict=True)
    ]
    return ServerTrial(
        scheduler=order.plan.scheduler,
        computation_s=sum(op.duration_s for op in workload.ops if op.phase != "optimizer"),
        measured_s=tuple(chain.from_iterable(seen.seconds for seen in first)),
        waited_s=tuple(chain.from_iterable(seen.waited_s for seen in first)),
        straggler_s=tuple(stragglers),
        predicted_s=order.prediction.iteration_s,
        communication_s=order.prediction.communication_s,
        predicted=order.prediction.timeline,
        num_messages=len(order.plan.messages),
        agent_s=tuple(passes),
        transfers=sum(seen.transfers for seen in looks),
        out_of_order=sum(seen.out_of_order for seen in looks),
    )


if __name__ == "__main__":
    rehearse_task(ServerTask, rehearse_here)
