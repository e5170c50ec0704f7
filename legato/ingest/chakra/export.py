"""Write the execution of a plan as a Chakra trace, which other simulators can run.

The trace shows one iteration: the backward pass, the messages, the updates, the next forward pass. Data dependencies
express the inputs of nodes: a message needs the ops that produce its gradients, and an op needs the ops and messages
whose results it reads. Control dependencies express the decisions of the plan: the order of the messages, and the order
of the ops on the one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, check_plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.ingest.chakra.file import frame
from legato.ingest.chakra.schema import COLLECTIVES, COMPUTE, TRANSFER, GlobalMetadata, Node

__all__ = ["export_chakra"]

_NOTHING_S = 1e-9


def export_chakra(workload: Workload, plan: Plan, timeline: Timeline) -> bytes:
    """Return the bytes of one rank's `.et` file, which is the same for all ranks of a data-parallel job.

    The times come from `timeline`, a predicted or measured timeline of the plan. Starts and ends are rounded to whole
    microseconds, so rounding errors do not add up; the attribute `duration_s` has the exact duration. Raises
    `PlanError` if the plan or the timeline does not fit the workload. Raises `InputError` for a plan with shards, with
    messages in a wire format, or with parameter servers, since pushes and pulls are not collectives.
    """
    check_plan(plan, workload)
    if plan.shard != "none":
        raise InputError(f"a plan with shard {plan.shard!r} cannot be written as Chakra (expected one without shards)")
    if plan.wires:
        raise InputError("a plan with messages in a wire format cannot be written as Chakra (expected exact ones)")
    if any(message.kind in ("push", "pull") for message in plan.messages):
        raise InputError("a plan with parameter servers cannot be written as Chakra (expected collectives)")
    order = plan.op_order or workload.iteration_order()
    compute, network = _spans(workload, plan, timeline, order)
    first_message = len(workload.ops)
    covering = _covering(workload, plan)
    data = [frame(_metadata(workload, plan))]
    nodes: list[tuple[float, int, Any]] = []
    for position, (op, span) in enumerate(zip(order, compute, strict=True)):
        needs = _op_needs(workload, plan, op, covering)
        node = _node(
            op, workload.ops[op].name, COMPUTE, span, needs, order[position - 1 : position] if position else ()
        )
        _attribute(node, "phase", "string", workload.ops[op].phase)
        _attribute(node, "duration_s", "double", workload.ops[op].duration_s)
        nodes.append((span.start_s, op, node))
    for number, (message, span) in enumerate(zip(plan.messages, network, strict=True)):
        key = first_message + number
        before = (key - 1,) if number else ()
        name, needs = _message_name(message, number, workload), _message_needs(workload, plan, number)
        node = _node(key, name, TRANSFER, span, needs, before)
        _attribute(node, "phase", "string", "backward")
        _attribute(node, "comm_type", "int64", COLLECTIVES.index(message.kind))
        _attribute(node, "comm_size", "int64", message.nbytes)
        _attribute(node, "comm_priority", "int32", number)
        _attribute(node, "pg_name", "string", "0")
        nodes.append((span.start_s, key, node))
    data += [frame(node) for _, _, node in sorted(nodes, key=lambda entry: entry[:2])]
    return b"".join(data)


def _spans(workload: Workload, plan: Plan, timeline: Timeline, order: Sequence[int]) -> tuple[list[Span], list[Span]]:
    """Return the spans of the first worker's ops and of its messages, in order of start."""
    first = min((s.worker for s in timeline.spans), default=0)
    mine = sorted((s for s in timeline.spans if s.worker == first), key=lambda s: (s.start_s, s.end_s))
    network = [s for s in mine if s.kind == "message"]
    if len(network) != len(plan.messages):
        raise PlanError(f"the timeline has {len(network)} messages (expected {len(plan.messages)}, as in this plan)")
    left = [s for s in mine if s.kind != "message"][::-1]
    compute, clock = [], 0.0
    for index in order:
        op = workload.ops[index]
        if left and left[-1].name == op.name and (op.duration_s > 0 or left[-1].end_s == left[-1].start_s):
            compute.append(left.pop())
        elif op.duration_s < _NOTHING_S:  # such a short op may have no span
            compute.append(Span(first, "compute", op.name, clock, clock, op.phase))
        else:
            raise PlanError(
                f"the timeline lacks op {index} in its place (expected a timeline of this plan on one stream)"
            )
        clock = compute[-1].end_s
    return compute, network


def _covering(workload: Workload, plan: Plan) -> dict[str, list[int]]:
    """Return, for each tensor, the messages after which all workers have its reduced gradient."""
    found: dict[str, list[int]] = {tensor.name: [] for tensor in workload.tensors}
    for number, message in enumerate(plan.messages):
        for piece in message.slices:
            if message.kind != "reduce_scatter":
                found[piece.tensor].append(number)
    return found


def _op_needs(workload: Workload, plan: Plan, op: int, covering: dict[str, list[int]]) -> set[int]:
    """Return the nodes on which an op depends: ops of this iteration, and messages."""
    ops, first_message = workload.ops, len(workload.ops)
    phase = ops[op].phase
    needs = {dep for dep in ops[op].deps if phase == "forward" or ops[dep].phase != "forward"}
    if phase == "backward":
        return needs
    for tensor in workload.tensors:
        if op in tensor.readers:
            needs |= {first_message + number for number in covering[tensor.name]}
            if phase == "forward":
                needs |= {r for r in tensor.readers if ops[r].phase == "optimizer"}
    if phase == "forward" and not plan.forward_overlap:
        needs.add(first_message + len(plan.messages) - 1)
    return needs


def _message_needs(workload: Workload, plan: Plan, number: int) -> set[int]:
    """Return the nodes that a message needs: the ops of its gradients, or the reduce-scatters before an all-gather."""
    names = {piece.tensor for piece in plan.messages[number].slices}
    if plan.messages[number].kind != "all_gather":
        return {tensor.ready_after for tensor in workload.tensors if tensor.name in names}
    return {
        len(workload.ops) + k
        for k, message in enumerate(plan.messages)
        if message.kind == "reduce_scatter" and any(piece.tensor in names for piece in message.slices)
    }


def _message_name(message: Message, number: int, workload: Workload) -> str:
    """Return the name of the tensor if the message is exactly one tensor, and otherwise the message's number."""
    piece = message.slices[0]
    size = next(tensor.nbytes for tensor in workload.tensors if tensor.name == piece.tensor)
    return piece.tensor if len(message.slices) == 1 and piece.nbytes == size else f"message {number}"


def _node(key: int, name: str, kind: int, span: Span, data: set[int], control: Sequence[int]) -> Any:
    start, end = round(span.start_s * 1e6), round(span.end_s * 1e6)
    node = Node(id=key, name=name, type=kind, start_time_micros=start, duration_micros=end - start)
    node.data_deps.extend(sorted(data))
    node.ctrl_deps.extend(control)
    _attribute(node, "is_cpu_op", "bool", False)
    return node


def _metadata(workload: Workload, plan: Plan) -> Any:
    message = GlobalMetadata(version="0.0.4")
    _attribute(message, "schema", "string", "1.0.2-chakra.0.0.4")
    _attribute(message, "workload", "string", workload.name)
    _attribute(message, "scheduler", "string", plan.scheduler)
    return message


def _attribute(message: Any, name: str, kind: str, value: Any) -> None:
    message.attr.add(name=name, **{f"{kind}_val": value})
