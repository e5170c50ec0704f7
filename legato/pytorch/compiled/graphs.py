"""Cuts a graph of operators into pieces that run one after another, in any valid order."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

__all__ = ["Piece", "cut", "outputs", "run", "sort"]

#: A function that takes the list of its inputs, which it may empty, and returns the outputs.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Piece:
    """A function that consists of some nodes of a graph.

    `inputs` and `results` are nodes of the whole graph. `last` has the inputs that no later piece needs.
    """

    run: Boxed
    inputs: tuple[fx.Node, ...]
    last: frozenset[fx.Node]
    results: tuple[fx.Node, ...]


def outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """Return a graph's outputs: nodes, and None for an output without a value."""
    (values,) = graph.output_node().args
    assert isinstance(values, Sequence)
    return tuple(values)


def sort(graph: fx.Graph, order: Sequence[str]) -> list[fx.Node]:
    """Return the nodes between placeholders and output, in an order in which each node follows its inputs.

    Nodes that `order` names come in this order, if the graph allows it. Any other node comes right before the first
    named node that needs the node or, if none needs it, right after the node's inputs. Without an order, the graph's
    own order is kept. If a result is a tuple, its parts (`getitem`) always come right after the result.
    """
    place = {name: i for i, name in enumerate(order)}
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not place:
        return _with_parts(body)
    named = sorted((node for node in body if node.name in place), key=lambda node: place[node.name])
    done = _behind_inputs(named)
    position = {node: i for i, node in enumerate(done)}
    for node in body:
        if node not in done:
            position[node] = max((position[n] for n in node.all_input_nodes if n in position), default=-1)
    return _with_parts(sorted(body, key=lambda node: (position[node], node not in done)))


def _behind_inputs(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return `nodes` in their order; before each node, insert the nodes that it needs, except placeholders."""
    done: dict[fx.Node, None] = {}
    for first in nodes:
        stack = [first]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in done and n.op != "placeholder"]
            if missing:
                stack += reversed(missing)
            else:
                done[stack.pop()] = None
    return done


def _with_parts(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes, with the parts that `getitem` takes from a result moved to right after the result."""
    ordered: dict[fx.Node, None] = {}
    for node in nodes:
        stack = [node]
        while stack:
            ordered[stack[-1]] = None
            stack += [user for user in reversed(stack.pop().users) if user.target is operator.getitem]
    return list(ordered)


def cut(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    starts: Iterable[int],
    compile_piece: Callable[[fx.GraphModule, tuple[fx.Node, ...], tuple[fx.Node, ...]], Boxed],
) -> list[Piece]:
    """Cut `nodes`, which are in the order of `sort`, before each index in `starts`, and return the pieces.

    A cut that would separate a result from its parts moves to after the parts, so that pieces pass each other tensors,
    never tuples of tensors. `compile_piece(piece, inputs, results)` compiles a piece; `inputs` and `results`
    are nodes of the whole graph.
    """
    sizes = [n for n in module.graph.nodes if n.op == "placeholder" and not hasattr(n.meta.get("val"), "stride")]
    parts = _parts(nodes, starts)
    last_user = _last_users(module.graph, parts) | dict.fromkeys(sizes, len(parts))
    pieces = []
    for i, part in enumerate(parts):
        own = dict.fromkeys(node for node in part if node.op != "get_attr")
        needed = _needed(own)
        constants = [n for n in needed if n.op == "get_attr"]
        inputs = tuple(n for n in dict.fromkeys([*sizes, *needed]) if n.op != "get_attr")
        results = tuple(n for n in own if last_user[n] > i)
        graph = _copied(inputs, (*constants, *own), results)
        run_piece = compile_piece(fx.GraphModule(module, graph), inputs, results)
        last = frozenset(n for n in inputs if last_user[n] <= i)
        pieces.append(Piece(run_piece, inputs, last, results))
    return pieces


def _needed(nodes: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes outside `nodes` whose values `nodes` need."""
    return dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)


def _parts(nodes: Sequence[fx.Node], starts: Iterable[int]) -> list[Sequence[fx.Node]]:
    """Divide the nodes into parts that begin at `starts`; each result stays together with its parts."""
    ends = [i for i, node in enumerate(nodes) if node.target is not operator.getitem] + [len(nodes)]
    bounds = sorted({0, len(nodes), *(ends[bisect.bisect_left(ends, start)] for start in starts)})
    return [nodes[a:b] for a, b in itertools.pairwise(bounds)]


def _last_users(graph: fx.Graph, parts: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, int]:
    """Return, for each node, the last part that needs it: -1 if no part does, the number of parts for an output."""
    number = {node: i for i, part in enumerate(parts) for node in part}
    found = {n: max((number[u] for u in n.users if u in number), default=-1) for n in graph.nodes}
    return found | {value: len(parts) for value in outputs(graph) if isinstance(value, fx.Node)}


def _copied(inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """Return a copy of `nodes` as a separate graph, which takes `inputs` and returns `results`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return graph


def run(
    pieces: Sequence[Piece],
    values: dict[fx.Node, Any],
    before: Callable[[int], None],
    after: Callable[[Piece, dict[fx.Node, Any]], None],
) -> None:
    """Run the pieces on the placeholders' `values`; call `before(i)` and `after(piece, values)` around piece i."""
    for i, piece in enumerate(pieces):
        before(i)
        results = piece.run([values.pop(n) if n in piece.last else values[n] for n in piece.inputs])
        values.update(zip(piece.results, results, strict=True))
        del results
        after(piece, values)
