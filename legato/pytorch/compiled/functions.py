"""The forward and backward graphs of a compiled model, as functions that hand out gradients while they run.

[Note: cut graphs] A compiled backward graph returns all of its gradients when it
ends, so that no message could go out before. Here it is cut where a message of
the plan becomes complete; between two pieces, gradients go to the reducer. No
piece communicates, and the reducer sends messages in the plan's order only, so
cuts, recompilations and graphs that cannot be cut change when a message goes out,
never which (docs/runtime.md, "The same order on every rank").

A forward graph that is all of the forward pass is cut where it first reads what a
message brings, if updates may wait; what runs before and after it reads no parameter.

[Note: recorded graphs] Inside `one_by_one`, a graph is not run as it was compiled,
but node by node, so that a recorder sees each op, and knows the name of its node.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, fx, nn

from legato.pytorch._private import backend_name, compile_graphs, current_node
from legato.pytorch.compiled import graphs

__all__ = ["GraphCompiler", "Sender", "one_by_one"]

_log = logging.getLogger("legato")
#: Compiles a graph for inputs like these; the last argument is None for a whole one, or has the strides of a piece's
#: results (None where they are free).
CompilePiece = Callable[[fx.GraphModule, Sequence[Any], Sequence[tuple[int, ...] | None] | None], graphs.Boxed]


class _OneByOne(threading.local):
    """Whether graphs run node by node on this thread (`wanted`), and the `node` that runs now."""

    wanted = False
    node = ""


one_by_one = _OneByOne()


class Sender(Protocol):
    """Sends gradients and lets updates wait: a reducer."""

    @property
    def node_order(self) -> tuple[str, ...]:
        """The order in which nodes run, as `graph N/phase/node`; empty for the captured order."""

    def messages_of(self, parameter: nn.Parameter) -> Iterable[int]:
        """The places, in the order of the plan, of the messages that carry the parameter's gradient."""

    def hand_over(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take a gradient that autograd will add to the parameter's afterwards."""

    def late_message_of(self, parameter: nn.Parameter) -> int:
        """The place of the message for which the parameter's update may wait in a forward pass; -1 if for none."""

    def update(self, parameter: nn.Parameter) -> None:
        """Bring the parameter up to date."""

    def settle(self) -> None:
        """Bring every parameter up to date."""


class GraphCompiler:
    """Compiles the graphs of a forward pass, and their backward graphs, with the user's backend, to be cut.

    `sender_of(parameter)` says who sends a parameter's gradients when a graph
    runs. `whole_pass(graph)` says of a graph that dynamo has traced whether it is
    all of the model's forward pass. `others` are the names of backends whose
    graphs are left alone: all but `inductor` and `aot_eager`. `ran` lists the
    forward graphs that have run, as the ids of their parameters, or as None for
    one that is not the whole pass; the caller empties it.
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
        """Compile a graph; None if it is left to the backend."""
        number = self._graphs
        self._graphs += 1
        whole_pass = self._whole_pass(module)

        def function_of(phase: str, module: fx.GraphModule, inputs: Sequence[Any], compile_piece: CompilePiece) -> Any:
            graph = _Graph(number, phase, module, inputs, compile_piece)
            if phase == "backward":
                function: Any = functools.partial(_run_backward, graph, self._sender_of)
            else:
                graph.compile_whole()  # at once: the backward graph is compiled for the strides of its results
                function = functools.partial(_run_forward, graph, self._sender_of, self.ran, whole_pass)
            function._boxed_call = True
            return function

        compiled = compile_graphs(backend, module, inputs, function_of)
        if compiled is None:
            self.others.add(backend_name(backend))
        return compiled


class _Recorded(fx.Interpreter):
    """Runs a graph node by node; its ops are called `prefix`/node."""

    def __init__(self, module: fx.GraphModule, prefix: str) -> None:
        super().__init__(module)
        self._prefix = prefix

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        values = args.copy()
        args.clear()
        try:
            return self.run(*values)  # type: ignore[no-any-return]
        finally:
            self.env.clear()  # else autograd would copy the gradients: somebody else has them

    def run_node(self, n: fx.Node) -> Any:
        one_by_one.node = f"{self._prefix}/{n.name}"
        try:
            return super().run_node(n)
        finally:
            one_by_one.node = ""


class _Graph:
    """A forward or backward graph as a function, whole or cut; each way is compiled when it first runs."""

    def __init__(
        self, number: int, phase: str, module: fx.GraphModule, inputs: Sequence[Any], compile_piece: CompilePiece
    ) -> None:
        self.phase = phase
        self._module = _copy(module)
        self._recorded = _Recorded(self._module, f"graph {number}/{phase}")
        self.placeholders = [n for n in self._module.graph.nodes if n.op == "placeholder"]
        self.outputs = graphs.outputs(self._module.graph)
        self._inputs = dict(zip(self.placeholders, inputs, strict=True))
        self._compile_piece = compile_piece
        self._whole: graphs.Boxed | None = None
        self._strides: dict[fx.Node, tuple[int, ...]] = {}
        self._orders: dict[tuple[str, ...], list[fx.Node]] = {}
        self._cut: dict[tuple[tuple[str, ...], tuple[int, ...]], list[graphs.Piece]] = {}
        self._failed = False

    def in_order(self, node_order: tuple[str, ...]) -> list[fx.Node]:
        """The nodes in the order in which they run."""
        if node_order not in self._orders:
            of_graph: dict[str, list[str]] = {}
            for name in node_order:
                graph, _, node = name.rpartition("/")
                if graph.endswith(self.phase):
                    of_graph.setdefault(graph, []).append(node)
            # Graphs may be compiled in another order than when the plan was made: their numbers say nothing.
            mine = {node.name for node in self._module.graph.nodes}
            chosen = next((names for names in of_graph.values() if mine.issuperset(names)), ())
            if of_graph and not chosen:
                _log.info("the plan's order of nodes is not for this %s graph of %d nodes", self.phase, len(mine))
            self._orders[node_order] = graphs.sort(self._module.graph, chosen)
        return self._orders[node_order]

    def compile_whole(self) -> graphs.Boxed:
        """The uncut graph as a function."""
        if self._whole is None:
            self._whole = self._compile_piece(_copy(self._module), list(self._inputs.values()), None)
        return self._whole

    def run_whole(self, args: list[Any]) -> Sequence[Any]:
        """Run the uncut graph, compiled, or node by node while it is recorded.

        Pieces return results with the strides of the compiled one from then on.
        """
        if one_by_one.wanted:
            return self._recorded(args)
        results = self.compile_whole()(args)
        if not self._strides:
            self._strides = {
                node: result.stride()
                for node, result in zip(self.outputs, results, strict=True)
                if isinstance(node, fx.Node) and isinstance(result, Tensor)
            }
        return results

    @property
    def has_run(self) -> bool:
        """Whether the uncut graph has run."""
        return bool(self._strides)

    @property
    def has_one_shape(self) -> bool:
        """Whether its sizes are constants."""
        return all(hasattr(value, "stride") for value in self._inputs.values())

    def cut(self, node_order: tuple[str, ...], starts: tuple[int, ...]) -> list[graphs.Piece]:
        """The pieces before which the nodes, sorted, have these indices; none if it cannot be cut, or is recorded."""
        key = node_order, starts
        if one_by_one.wanted:
            return []
        if key not in self._cut and not self._failed:
            try:
                self._cut[key] = graphs.cut(self._module, self.in_order(node_order), starts, self._compile)
            except Exception as error:
                self._failed = True
                _log.info("a compiled %s graph is not cut: %s: %s", self.phase, type(error).__name__, error)
        return self._cut.get(key, [])

    def run(
        self,
        pieces: Sequence[graphs.Piece],
        args: list[Any],
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[graphs.Piece, dict[fx.Node, Any]], None] = lambda *_: None,
    ) -> Sequence[Any]:
        """Run it in pieces; `before(i)` is called before piece i, and `after(piece, values)` after each."""
        values = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        graphs.run(pieces, values, before, after)
        return [values[o] if isinstance(o, fx.Node) else o for o in self.outputs]

    def _compile(self, piece: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> graphs.Boxed:
        """Compile a piece. A forward graph's results keep their strides: the backward graph is compiled for them."""
        forward = self.phase == "forward"
        wanted = [self._strides.get(n) if forward else None for n in results]
        function = self._compile_piece(piece, [self._example(n) for n in inputs], wanted)
        if not forward:
            return function

        def run(args: list[Any]) -> Sequence[Any]:
            return [_with_strides(r, s) for r, s in zip(function(args), wanted, strict=True)]

        return run

    def _example(self, node: fx.Node) -> Any:
        """A value as the node has it at run time."""
        value = self._inputs.get(node, node.meta.get("val"))
        if self.phase == "forward" and node in self._strides and node not in self._inputs:
            return cast(Tensor, value).new_empty_strided(cast(Tensor, value).shape, self._strides[node])
        return value


def _with_strides(value: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or value.stride() == strides:
        return value
    return value.new_empty_strided(value.shape, strides).copy_(value)


def _run_forward(
    graph: _Graph,
    sender_of: Callable[[nn.Parameter], Sender | None],
    ran: list[set[int] | None],
    whole_pass: bool,
    args: list[Any],
) -> Sequence[Any]:
    """Run a forward graph, in pieces if updates may wait for messages: each is waited for before it is first read."""
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
    graph: _Graph, sender: Sender, parameters: dict[int, nn.Parameter]
) -> tuple[tuple[int, ...], list[list[nn.Parameter]]]:
    """Where to cut a forward graph: before the first read of each message, or of a later one.

    Also the parameters that each piece reads first.
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


def _run_backward(graph: _Graph, sender_of: Callable[[nn.Parameter], Sender | None], args: list[Any]) -> Sequence[Any]:
    """Run a backward graph, in pieces if it is known who sends its gradients, which are handed over after each."""
    parameters = _parameters(len(graph.outputs))
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


def _completions(graph: _Graph, sender: Sender, parameters: Sequence[nn.Parameter | None]) -> tuple[int, ...]:
    """Where to cut a backward graph: behind the last gradient of each message, or of those before it."""
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


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, for compilation may change one."""
    copied = copy.copy(module)
    copied.graph = copy.deepcopy(module.graph)
    return copied


def _parameters(count: int) -> list[nn.Parameter | None]:
    """The parameters whose gradients the graph returns, which runs now as a node of a backward pass."""
    node = current_node()
    ends = node.next_functions if node is not None else ()
    if len(ends) != count:
        return [None] * count
    return [getattr(function, "variable", None) for function, _ in ends]
