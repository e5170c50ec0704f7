"""Runs a forward or backward graph of a compiled model as a function: whole, in pieces, or node by node.

[Note: recorded graphs] Inside `one_by_one`, a graph does not run as it was compiled, but node by node, so that a
recorder sees each op and knows the name of its node.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from legato.pytorch.compiled import graphs

__all__ = ["CompilePiece", "GraphFunction", "one_by_one"]

_log = logging.getLogger("legato")
#: `compile_piece(graph, inputs, whole)` compiles a graph, or a piece of one, for inputs like these.
#: For a piece, it also returns example results; for a whole graph, no examples.
CompilePiece = Callable[[fx.GraphModule, Sequence[Any], bool], tuple[graphs.Boxed, Sequence[Any]]]


class _OneByOne(threading.local):
    """The state of this thread: whether graphs run node by node (`wanted`), and the `node` that runs now."""

    wanted = False
    node = ""


one_by_one = _OneByOne()


class _Recorded(fx.Interpreter):
    """An interpreter that runs a graph node by node; the names of ops are `prefix`/node."""

    def __init__(self, module: fx.GraphModule, prefix: str) -> None:
        super().__init__(module)
        self._prefix = prefix

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        values = args.copy()
        args.clear()
        try:
            return self.run(*values)
        finally:
            self.env.clear()  # otherwise autograd would copy the gradients, because this object holds them

    def run_node(self, n: fx.Node) -> Any:
        one_by_one.node = f"{self._prefix}/{n.name}"
        try:
            return super().run_node(n)
        finally:
            one_by_one.node = ""


class GraphFunction:
    """A forward or backward graph as a function, whole or cut; each version is compiled when it first runs."""

    def __init__(
        self, number: int, phase: str, module: fx.GraphModule, inputs: Sequence[Any], compile_piece: CompilePiece
    ) -> None:
        self.phase = phase
        self._module = _copy(module)
        self._recorded = _Recorded(self._module, f"graph {number}/{phase}")
        self.placeholders = [n for n in self._module.graph.nodes if n.op == "placeholder"]
        self.outputs = graphs.outputs(self._module.graph)
        self._inputs = list(inputs)
        self._examples = dict(zip(self.placeholders, inputs, strict=True))
        self._compile_piece = compile_piece
        self._whole: graphs.Boxed | None = None
        self._strides: dict[fx.Node, tuple[int, ...]] = {}
        self._orders: dict[tuple[str, ...], list[fx.Node]] = {}
        self._cut: dict[tuple[tuple[str, ...], tuple[int, ...]], list[graphs.Piece]] = {}
        self._failed = False

    def in_order(self, node_order: tuple[str, ...]) -> list[fx.Node]:
        """Return the nodes in the order in which they run."""
        if node_order not in self._orders:
            of_graph: dict[str, list[str]] = {}
            for name in node_order:
                graph, _, node = name.rpartition("/")
                if graph.endswith(self.phase):
                    of_graph.setdefault(graph, []).append(node)
            # Graphs may be compiled in another order than when the plan was made, so their numbers do not identify
            # them.
            mine = {node.name for node in self._module.graph.nodes}
            chosen = next((names for names in of_graph.values() if mine.issuperset(names)), ())
            if of_graph and not chosen:
                _log.debug("the plan's order of nodes is not for this %s graph of %d nodes", self.phase, len(mine))
            self._orders[node_order] = graphs.sort(self._module.graph, chosen)
        return self._orders[node_order]

    def compile_whole(self) -> graphs.Boxed:
        """Compile the uncut graph if necessary, and return it as a function."""
        if self._whole is None:
            self._whole = self._compile_piece(_copy(self._module), self._inputs, True)[0]
        return self._whole

    def run_whole(self, args: list[Any]) -> Sequence[Any]:
        """Run the uncut graph: compiled, or node by node while it is being recorded.

        The first compiled run of the uncut graph records the strides of its results. From then on, results of pieces
        get the same strides.
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
        """Return whether the uncut graph has run."""
        return bool(self._strides)

    @property
    def has_one_shape(self) -> bool:
        """Return whether the sizes in the graph are constants."""
        return all(hasattr(value, "stride") for value in self._inputs)

    def cut(self, node_order: tuple[str, ...], starts: tuple[int, ...]) -> list[graphs.Piece]:
        """Return the pieces that begin at these node indices. Without cuts, or while recording, there are no pieces."""
        key = node_order, starts
        if one_by_one.wanted:
            return []
        if key not in self._cut and not self._failed:
            try:
                self._cut[key] = graphs.cut(self._module, self.in_order(node_order), starts, self._compile)
            except Exception as error:
                self._failed = True
                _log.debug("a compiled %s graph is not cut: %s: %s", self.phase, type(error).__name__, error)
        return self._cut.get(key, [])

    def run(
        self,
        pieces: Sequence[graphs.Piece],
        args: list[Any],
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[graphs.Piece, dict[fx.Node, Any]], None] = lambda *_: None,
    ) -> Sequence[Any]:
        """Run the graph in pieces; call `before(i)` before piece i, and `after(piece, values)` after each piece."""
        values = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        graphs.run(pieces, values, before, after)
        # The uncut graph may return inputs with a new memory layout, such as the weights of convolutions.
        return [_with_strides(values[o], self._wanted(o)) if isinstance(o, fx.Node) else o for o in self.outputs]

    def _compile(self, piece: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> graphs.Boxed:
        """Compile a piece. All earlier pieces must be compiled already: they determine the inputs of this piece."""
        function, values = self._compile_piece(piece, [self._examples[n] for n in inputs], False)
        wanted = [self._wanted(n) for n in results]
        for node, value, strides in zip(results, values, wanted, strict=True):
            self._examples[node] = value if strides is None else value.new_empty_strided(value.shape, strides)
        if not any(wanted):
            return function

        def run(args: list[Any]) -> Sequence[Any]:
            return [_with_strides(r, s) for r, s in zip(function(args), wanted, strict=True)]

        return run

    def _wanted(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the strides that the backward graph expects of this forward result, or None if it expects none."""
        return self._strides.get(node) if self.phase == "forward" else None


def _with_strides(value: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or value.stride() == strides:
        return value
    return value.new_empty_strided(value.shape, strides).copy_(value)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the module with its own graph, because compilation may change the graph."""
    copied = copy.copy(module)
    copied.graph = copy.deepcopy(module.graph)
    return copied
