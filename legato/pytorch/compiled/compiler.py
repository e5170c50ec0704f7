"""Compiles the graphs of a model so that they hand over gradients, and wait for parameters, while they run.

[Note: cut graphs] A compiled backward graph returns all of its gradients when it ends, so no message could be sent
earlier. legato cuts the graph where a message of the plan becomes complete; between two pieces, gradients go to the
reducer. The pieces do not communicate themselves, and the reducer sends messages only in the plan's order. So cuts,
recompilations and graphs that cannot be cut change when a message is sent, but never which message is sent
(docs/runtime.md, "The same order on every rank").

If updates may wait until the forward pass, and a forward graph is the whole forward pass, the graph is cut where it
first reads the parameters of a message. No code outside such a graph reads parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, fx, nn

from legato.pytorch.compiled import graphs
from legato.pytorch.compiled.functions import CompilePiece, GraphFunction
from legato.pytorch.private.dynamo import backend_name, compile_graphs
from legato.pytorch.private.tensors import current_node

__all__ = ["GraphCompiler", "Sender"]


class Sender(Protocol):
    """The interface of a reducer for compiled graphs; a reducer sends gradients, and lets updates wait."""

    @property
    def node_order(self) -> tuple[str, ...]:
        """Return the nodes (`graph N/phase/node`) in the order in which they run, or () for the captured order."""

    def messages_of(self, parameter: nn.Parameter) -> Iterable[int]:
        """Return the positions, in the plan, of the messages that carry the parameter's gradient."""

    def hand_over(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take a gradient that autograd will later add to the parameter's `.grad`."""

    def late_message_of(self, parameter: nn.Parameter) -> int:
        """Return the position of the message that a forward pass may have to await for this parameter, or -1."""

    def update(self, parameter: nn.Parameter) -> None:
        """Bring the parameter up to date."""

    def settle(self) -> None:
        """Bring every parameter up to date."""


class GraphCompiler:
    """Compiles the forward and backward graphs of a forward pass with the user's backend, so that they can be cut.

    `sender_of(parameter)` returns the object that sends a parameter's gradients when a graph runs. `whole_pass(graph)`
    returns whether a graph that dynamo has traced is the model's whole forward pass. `others` has the names of backends
    whose graphs are left alone: all except `inductor` and `aot_eager`. `ran` has an entry for each forward graph that
    has run: the `id()`s of its parameters, or None if the graph is not the whole forward pass. The caller empties the
    list.
    """

    def __init__(
        self,
        sender_of: Callable[[nn.Parameter], Sender | None] = lambda _: None,
        whole_pass: Callable[[fx.GraphModule], bool] = lambda _: False,
    ) -> None:
        self._sender_of, self._whole_pass = sender_of, whole_pass
        self._graphs = 0
        self.others: set[str] = set()
        self.ran: list[set[int] | None] = []

    def __call__(self, backend: Any, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph; return None if the graph is left to the backend."""
        number = self._graphs
        self._graphs += 1
        whole_pass = self._whole_pass(module)
        sender_of, ran = (
            self._sender_of,
            self.ran,
        )  # the functions below live for good: they must not hold `self`
        are_tensors: list[bool] = []  # for each input: whether it is a tensor and not a size

        def function_of(phase: str, module: fx.GraphModule, inputs: Sequence[Any], compile_piece: CompilePiece) -> Any:
            graph = GraphFunction(number, phase, module, inputs, compile_piece)
            if phase == "backward":
                function = functools.partial(_run_backward, graph, sender_of, are_tensors)
            else:
                are_tensors[:] = [hasattr(value, "stride") for value in inputs]
                graph.compile_whole()  # at once, because the backward graph is compiled for the strides of its results
                function = functools.partial(_run_forward, graph, sender_of, ran, whole_pass)
            function._boxed_call = True  # pyrefly: ignore[missing-attribute]
            return function

        compiled = compile_graphs(backend, module, inputs, function_of)
        if compiled is None:
            self.others.add(backend_name(backend))
        return compiled


def _run_forward(
    graph: GraphFunction,
    sender_of: Callable[[nn.Parameter], Sender | None],
    ran: list[set[int] | None],
    whole_pass: bool,
    args: list[Any],
) -> Sequence[Any]:
    """Run a forward graph; if updates may wait, run it in pieces that wait only for the messages that they need."""
    parameters = {i: arg for i, arg in enumerate(args) if isinstance(arg, nn.Parameter)}
    ran.append({id(p) for p in parameters.values()} if whole_pass else None)
    sender = next((s for p in parameters.values() if (s := sender_of(p)) is not None), None)
    if sender is None:
        return graph.run_whole(args)
    pieces: list[graphs.Piece] = []
    reads: list[list[nn.Parameter]] = []
    if whole_pass and graph.has_run and graph.has_one_shape:
        starts, reads = _first_reads(graph, sender, parameters)
        if starts:
            pieces = graph.cut(sender.node_order, starts)
    if not pieces:
        sender.settle()
        return graph.run_whole(args)

    def update(i: int) -> None:
        for parameter in reads[i]:
            sender.update(parameter)

    results = graph.run(pieces, args, before=update)
    sender.settle()
    return results


def _first_reads(
    graph: GraphFunction, sender: Sender, parameters: dict[int, nn.Parameter]
) -> tuple[tuple[int, ...], list[list[nn.Parameter]]]:
    """Return where to cut a forward graph, and the parameters that each piece reads first.

    The graph is cut before it first reads a parameter of a message. It is not cut there if it has already read a
    parameter of a later message.
    """
    place = {node: i for i, node in enumerate(graph.in_order(sender.node_order))}
    reads = []
    for i, parameter in parameters.items():
        users = [place[user] for user in graph.placeholders[i].users if user in place]
        if users and (message := sender.late_message_of(parameter)) >= 0:
            reads.append((min(users), message, parameter))
    starts, last = [0], -1
    read: list[list[nn.Parameter]] = [[]]
    for at, message, parameter in sorted(reads, key=lambda r: r[:2]):
        if message > last and at > starts[-1]:
            starts.append(at)
            read.append([])
        last = max(last, message)
        read[-1].append(parameter)
    return tuple(starts[1:]), read


def _run_backward(
    graph: GraphFunction,
    sender_of: Callable[[nn.Parameter], Sender | None],
    are_tensors: Sequence[bool],
    args: list[Any],
) -> Sequence[Any]:
    """Run a backward graph; if its gradients have a known sender, give the sender the gradients after each piece."""
    parameters = _parameters(len(graph.outputs), are_tensors)
    sender = next((s for p in parameters if p is not None and (s := sender_of(p)) is not None), None)
    pieces: list[graphs.Piece] = []
    if sender is not None and (starts := _completions(graph, sender, parameters)):
        pieces = graph.cut(sender.node_order, starts)
    if not pieces or sender is None:
        return graph.run_whole(args)
    of_node: dict[fx.Node, nn.Parameter] = {}
    for output, parameter in zip(graph.outputs, parameters, strict=True):
        if isinstance(output, fx.Node) and parameter is not None:
            of_node[output] = parameter

    def hand_over(piece: graphs.Piece, values: dict[fx.Node, Any]) -> None:
        for node in piece.results:
            if node in of_node:
                sender.hand_over(of_node[node], values[node])

    return graph.run(pieces, args, after=hand_over)


def _completions(graph: GraphFunction, sender: Sender, parameters: Sequence[nn.Parameter | None]) -> tuple[int, ...]:
    """Return where to cut a backward graph: after the last gradient of each message and all earlier messages."""
    nodes = graph.in_order(sender.node_order)
    place = {node: i for i, node in enumerate(nodes)}
    complete: dict[int, int] = {}
    for output, parameter in zip(graph.outputs, parameters, strict=True):
        if parameter is not None and output in place:
            for message in sender.messages_of(parameter):
                complete[message] = max(complete.get(message, 0), place[output] + 1)
    starts: list[int] = []
    for message in sorted(complete):
        if complete[message] > max(starts, default=0):
            starts.append(complete[message])
    return tuple(start for start in starts if start < len(nodes))


def _parameters(count: int, are_tensors: Sequence[bool]) -> list[nn.Parameter | None]:
    """Return the parameters whose gradients a graph returns. The graph is the node that the backward pass is running.

    The graph returns a value for each input of the forward graph, but autograd knows only those inputs that are tensors
    (`are_tensors`).
    """
    node = current_node()
    ends = node.next_functions if node is not None else ()
    if (len(are_tensors), sum(are_tensors)) != (count, len(ends)):
        return [None] * count
    functions = iter(ends)
    return [getattr(next(functions)[0], "variable", None) if is_tensor else None for is_tensor in are_tensors]
