"""The program of a job from the Chakra graphs of all ranks.

A rank computes its nodes in the order of their dependencies, with ties broken by id. A rank starts a communication once
it has computed everything on which the communication depends. Communications of one group start in order. A node waits
for the communications on which it depends, directly or through nodes without computation. At the end of its graph, a
rank waits for all communications for which no node has waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from legato.core.errors import FileError, InputError
from legato.core.program import Action, Compute, Lane, Program, Start, Wait
from legato.ingest.chakra.file import TraceNode
from legato.ingest.chakra.schema import SEND_RECEIVE
from legato.ingest.communications import Joint, check, communications, matched, numbered
from legato.ingest.names import ranks_in_words
from legato.ingest.traced import Notes, TracedTransfer

__all__ = ["MOST_NEEDS", "RankGraph", "program"]

#: The most dependencies. A trace of a gigabyte has fewer, and more would not fit into memory.
MOST_NEEDS = 2**25


class RankGraph(NamedTuple):
    """One rank's nodes in the order in which they run.

    `computing` has the nodes that compute, and `collectives` the kind and bytes of each collective.
    """

    order: Sequence[TraceNode]
    computing: Set[int]
    collectives: Mapping[int, tuple[str, int | None]]

    @classmethod
    def of(
        cls, order: Sequence[TraceNode], computing: Set[int], collectives: Mapping[int, tuple[str, int | None]]
    ) -> RankGraph:
        """Return the graph, with nodes in order of dependencies, and nodes without computation as early as possible."""
        behind: dict[int, int] = {}  # by node, how many computing nodes run before it
        latest: dict[object, int] = {}
        computed = 0
        for node in order:
            behind[node.id] = max((behind.get(dep, 0) for dep in node.data_deps), default=0)
            if node.id in computing:
                computed += 1
                behind[node.id] = computed
            elif node.id in collectives:
                behind[node.id] = latest[_group(node)] = max(behind[node.id], latest.get(_group(node), 0))
        in_turn = sorted(order, key=lambda node: (behind[node.id], node.id not in computing))
        return cls(in_turn, computing, collectives)

    def seconds(self, node: TraceNode) -> float:
        exact = node.attributes.get("duration_s")
        return float(exact) if isinstance(exact, float) and 0 <= exact < 1e18 else node.micros * 1e-6


def program(name: str, graphs: Mapping[int, RankGraph], notes: Notes) -> Program:
    """Return the program of all ranks' graphs. Raises `InputError` on contradictions or a missing rank."""
    number = len(graphs)
    if number < 2 or set(range(number)) != graphs.keys():
        raise InputError(f"graphs of {ranks_in_words(sorted(graphs))} (expected graphs of all ranks, from 0 on)")
    members = _members(graphs)
    if members.keys() - {None}:
        notes.assume("the ranks of a pg_name are those whose graphs have it")
    nodes = {
        rank: [n for n in graph.order if n.id in graph.collectives or n.type in SEND_RECEIVE]
        for rank, graph in sorted(graphs.items())
    }
    transfers = {rank: tuple(_transfer(graphs[rank], node, members) for node in own) for rank, own in nodes.items()}
    check(transfers, number, notes, grouped=False)
    joints = matched(transfers)
    lanes = []
    for rank, own in numbered(joints, nodes).items():
        by_node = {nodes[rank][part].id: k for part, k in own.items()}
        lanes.append(Lane((rank,), tuple(_actions(graphs[rank], by_node, joints))))
    notes.assume("an op runs when the ops before it have ended, and the end waits for what nothing depends on")
    return Program(name, tuple(lanes), tuple(communications(joints, transfers, number, notes)))


def _members(graphs: Mapping[int, RankGraph]) -> dict[object, list[int]]:
    """Return the ranks whose graphs have collectives of a process group, by the name of the group."""
    found: dict[object, list[int]] = {}
    for rank, graph in sorted(graphs.items()):
        for group in {_group(node) for node in graph.order if node.id in graph.collectives}:
            found.setdefault(group, []).append(rank)
    return found


def _group(node: TraceNode) -> object:
    return node.attributes.get("pg_name")


def _transfer(graph: RankGraph, node: TraceNode, members: Mapping[object, list[int]]) -> TracedTransfer:
    """Return a node as a transfer. Only nodes that legato wrote (they have a `phase`) are known to carry gradients."""
    told, seconds = node.attributes, graph.seconds(node)
    if node.type in SEND_RECEIVE:
        sends = node.type == SEND_RECEIVE[0]
        kind, peer = ("send", told.get("comm_dst")) if sends else ("recv", told.get("comm_src"))
        size = told.get("comm_size")
    else:
        (kind, size), peer = graph.collectives[node.id], None
    purpose, group = str(_group(node) or ""), tuple(members.get(_group(node), ())) if _group(node) is not None else ()
    if kind == "all_gather" and "phase" in told and size is not None:
        size = -(-size // max(len(group), 1))
    return TracedTransfer(
        node.name,
        kind,
        size if isinstance(size, int) and 0 < size < 2**62 else None,
        0.0,
        seconds,
        "backward",
        carries_gradients="phase" in told,
        group=group,
        purpose="" if purpose.isdecimal() else purpose,
        peer=peer if isinstance(peer, int) and peer >= 0 else None,
    )


def _actions(graph: RankGraph, numbers: Mapping[int, int], joints: Sequence[Joint]) -> list[Action]:
    """Return the actions of a rank. `numbers` has the number of each node's communication.

    Communications of one group need no dependencies, since they run one after another anyway.
    """
    result: list[Action] = []
    needs: dict[int, set[int]] = {}  # the communications that each node needs and for which no earlier node has waited
    waited: set[int] = set()
    total = 0
    for node in graph.order:
        awaited = set[int]().union(*(needs.get(dep, ()) for dep in node.data_deps)) - waited
        computes = node.id in graph.computing
        if node.id in graph.collectives:
            mine = joints[numbers[node.id]]
            awaited = {k for k in awaited if joints[k].kind == "send" or joints[k].group != mine.group}
        if computes or (node.id in numbers and node.type != SEND_RECEIVE[1]):
            result += [Wait(number) for number in sorted(awaited)]
            waited |= awaited
            awaited = set()
            result.append(Compute(graph.seconds(node)) if computes else Start(numbers[node.id]))
        needs[node.id] = awaited | ({numbers[node.id]} if node.id in numbers else set())
        total += len(needs[node.id])
        if total > MOST_NEEDS:
            raise FileError(f"more than {MOST_NEEDS} dependencies through nodes without computation")
    return result + [Wait(number) for number in sorted(set(numbers.values()) - waited)]
