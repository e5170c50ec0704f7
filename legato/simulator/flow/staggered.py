"""Identical workers on parameter servers: in turn, each does what the worker before it has done.

A server sends parameters to one worker after another, so that no two workers do
the same at the same time, and one cannot stand for all. But they all do the
same in the same order, and meet only on the servers' links. So an iteration is
four loops (`staggered_loops.py`) instead of a graph of all transfers:

1. each server's outgoing link, which sends rounds to all workers in turn;
2. each worker: its incoming link, its ops, its outgoing link;
3. each server's incoming link, which merges what becomes ready, part by part;
4. from the sums, what is distributed in the next iteration.

Only the moments at which pushes begin are kept for all workers; with in-network
aggregation, only the last ones. With multicast all workers receive at the same
time, so one is simulated in 2, and its pushes count as many times as there are
workers in 3. All times are equal to the engine's to the last bit.

[Note: what is kept] The result has the first workers, and those that attain the
extremes of which metrics are made: the first and the last to begin and to end
the backward pass, and the last to receive everything.

[Note: one iteration after another] The loops run one iteration after another,
so nothing of an iteration may become ready on a link before the one before it is
through. Tensors that no op reads can violate this; then `simulate_staggered`
returns None, and the engine has to do it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fragments import REDUCING, Fragments
from legato.simulator.flow.result import FlowResult, IterationTimes
from legato.simulator.flow.staggered_loops import Job, serve_pushes, serve_turns, turns_of, work
from legato.simulator.flow.unroll import Unrolled

__all__ = ["simulate_staggered"]

Times = NDArray[np.float64]

#: Workers that are simulated at a time: their times fit into the processor's cache, in rows that do not collide there.
_BLOCK = 248
#: Always kept; a timeline for looking at shows no more.
_FIRST_WORKERS = 32


class _Round(NamedTuple):
    """What a server sends to each worker in turn, once it is ready."""

    ready_s: float
    parts: list[int]


@dataclass(frozen=True)
class _Turns:
    """What a server sends in an iteration: the rounds' parts (flat), and when its link is free at each block."""

    first: NDArray[np.int64]
    parts: NDArray[np.int64]
    checkpoint: Times  # [block, round]


def simulate_staggered(unrolled: Unrolled) -> FlowResult | None:
    """Simulate identical workers on parameter servers; `unrolled` is for one worker, and is not built.

    Returns None if an iteration begins on a link before the one before it has
    ended there.
    """
    return _Staggered(unrolled).run()


class _Staggered:
    def __init__(self, unrolled: Unrolled) -> None:
        assert isinstance(unrolled.fabric, Servers)
        self.unrolled, self.fabric, self.network = unrolled, unrolled.fabric, unrolled.topology.network
        self.iterations = len(unrolled.slowdown)
        workers = self.network.workers
        self.simulated, self.copies = (1, workers) if self.fabric.multicast else (workers, 1)
        self.pull_from, self.pulled = self._parts(unrolled.distributing)
        self.push_to, self.pushed = self._parts(unrolled.reducing)
        self.worker_s_per_byte, *servers = self.network.host_s_per_byte(1, self.fabric.servers).tolist()
        self.server_s_per_byte = servers[0]
        # For how long each part keeps the link of its sender busy.
        self.sent_s = self.pulled * self.server_s_per_byte + self.network.sending_s
        self.pushed_s = self.pushed * self.worker_s_per_byte + self.network.sending_s
        # When each part of what each worker pushes begins; with aggregation, only the last worker's.
        self.begin_s = np.full((len(self.pushed), 1 if self.fabric.aggregation else self.simulated), 0.0)
        self._jobs = [self._job(k) for k in range(self.iterations)]
        self.turns: list[list[_Turns]] = []  # of each iteration and server
        self.out_free_s, self.in_free_s = [0.0] * self.fabric.servers, [0.0] * self.fabric.servers
        self.last_sent_s, self.last_received_s = [-1.0] * self.fabric.servers, [-1.0] * self.fabric.servers

    def _parts(self, fragments: Fragments) -> tuple[NDArray[np.int64], Times]:
        """[fragment * shards + shard]: the server, and the bytes."""
        hosts = self.fabric.hosts(self.unrolled.topology, fragments) - self.unrolled.topology.size
        return hosts.ravel(), self.fabric.shard_bytes(fragments).ravel()

    def run(self) -> FlowResult | None:
        """Simulate all iterations, and then once more the workers that are kept."""
        unrolled = self.unrolled
        released = np.zeros((len(unrolled.distributing), 1))
        blocks = range(-(-self.simulated // _BLOCK))
        state = [self._start(b) for b in blocks]
        sums: list[tuple[Times, Times]] = []
        extremes = _Extremes()
        for k in range(self.iterations):
            if not self._send(released):
                return None
            for b in blocks:
                times = self._work(k, b, state[b])
                if times is None:
                    return None
                self._push(b, times.begin_s)
                if k == self.iterations - 1:
                    extremes.add(b * _BLOCK, times)
            summed = self._receive()
            if summed is None:
                return None
            sums.append((summed, released))
            released = self._released(summed)
        kept = sorted({*range(min(_FIRST_WORKERS, self.simulated)), *extremes.workers()})
        return self._result(kept, sums)

    def _start(self, b: int) -> Times:
        """The state of the workers of a block before the first iteration (`staggered_loops.work`)."""
        state = np.zeros((min(_BLOCK, self.simulated - b * _BLOCK), 5))
        state[:, [0, 4]] = -1.0
        return state

    def _send(self, released: Times) -> bool:
        """Let the servers send what is released; whether it is after all that they sent before."""
        count, shards = len(self.unrolled.distributing), self.fabric.shards
        ready_s = np.full((count, shards), released.max(initial=0.0)) if self.fabric.barrier else released
        ready_s = np.broadcast_to(ready_s, (count, shards)).ravel()
        self.turns.append([])
        for server in range(self.fabric.servers):
            rounds = self._rounds(np.flatnonzero(self.pull_from == server).tolist(), ready_s.tolist())
            if rounds and rounds[0].ready_s <= self.last_sent_s[server]:
                return False
            first = np.cumsum([0, *(len(each.parts) for each in rounds)])
            parts = np.array([part for each in rounds for part in each.parts], dtype=np.int64)
            checkpoint = np.empty((len(rounds), -(-self.simulated // _BLOCK)))
            self.out_free_s[server] = serve_turns(
                np.array([each.ready_s for each in rounds]),
                first,
                parts,
                self.sent_s,
                self.out_free_s[server],
                self.simulated,
                _BLOCK,
                checkpoint,
            )
            self.turns[-1].append(_Turns(first, parts, np.ascontiguousarray(checkpoint.T)))
            self.last_sent_s[server] = max((each.ready_s for each in rounds), default=self.last_sent_s[server])
        return True

    def _rounds(self, parts: Sequence[int], ready_s: Sequence[float]) -> list[_Round]:
        """What a server sends, in the order of its link; block distribution sends all that is ready to each worker."""
        order = sorted(parts, key=lambda part: ready_s[part])
        if self.fabric.distribution == "round-robin":
            return [_Round(ready_s[part], [part]) for part in order]
        groups = itertools.groupby(order, key=lambda part: ready_s[part])
        return [_Round(moment, list(group)) for moment, group in groups]

    def _job(self, k: int) -> Job:
        unrolled, network = self.unrolled, self.network
        forward, backward, slowdown = unrolled.forward, unrolled.backward, unrolled.slowdown[k, 0]
        reads: list[list[int]] = [[] for _ in range(forward.segments)]
        for at, tensors in unrolled.reads.items():
            if at < len(forward.ops):
                reads[forward.segment[at]] = sorted({i for t in tensors for i in unrolled.readable[t]})
        pushes = [i for i, message in enumerate(unrolled.plan.messages) if message.kind in REDUCING]
        return Job(
            latency_s=network.on_the_way_s,
            cut_through=network.cut_through,
            parts=self.fabric.shards,
            sent_s=self.sent_s,
            pulled_s=self.pulled * self.worker_s_per_byte,
            reads=np.array([i for each in reads for i in each], dtype=np.int64),
            first_read=np.cumsum([0, *map(len, reads)]),
            forward_s=forward.duration_s[0] * slowdown,
            backward_s=backward.duration_s[0] * slowdown,
            pushes=np.array(pushes, dtype=np.int64),
            after=np.array([unrolled.ready_segment(i) for i in pushes], dtype=np.int64),
            message=unrolled.reducing.message,
            pushed_s=self.pushed_s,
        )

    def _work(self, k: int, b: int, state: Times) -> _Block | None:
        """Run iteration k of block b, and carry its state on; None if one iteration overtakes another."""
        unrolled, count = self.unrolled, len(state)
        sent_begin_s = np.empty((len(self.pulled), count))
        job = self._jobs[k]
        for turns in self.turns[k]:
            turns_of(turns.first, turns.parts, job.sent_s, turns.checkpoint[b], sent_begin_s)
        block = _Block(
            received_s=np.empty((len(unrolled.distributing), count)),
            forward_s=np.empty((unrolled.forward.segments, count)),
            backward_s=np.empty((unrolled.backward.segments, count)),
            launched_s=np.zeros((len(unrolled.plan.messages), count)),
            begin_s=np.empty((len(self.pushed), count)),
        )
        return block if work(job, sent_begin_s, state, *block) else None

    def _push(self, b: int, begin_s: Times) -> None:
        if self.fabric.aggregation is None:
            self.begin_s[:, b * _BLOCK : b * _BLOCK + begin_s.shape[1]] = begin_s
        else:
            last = begin_s.max(axis=1, keepdims=True)
            self.begin_s = np.maximum(self.begin_s, last) if b else last

    def _receive(self) -> Times | None:
        """[fragment, shard]: when the sums are complete; None if servers still receive what was pushed before."""
        fabric, network = self.fabric, self.network
        cut_through = network.cut_through if fabric.aggregation is None else fabric.aggregation == "cut-through"
        reduce_s = network.reduce_s_per_byte * self.pushed if fabric.aggregation is None else 0.0
        end_s = np.zeros(len(self.pushed))
        for server in range(fabric.servers):
            parts = np.flatnonzero(self.push_to == server)
            if not len(parts):
                continue
            mine = np.zeros(len(parts))
            first, last, self.in_free_s[server] = serve_pushes(
                self.begin_s,
                self.pushed_s,
                network.on_the_way_s,
                cut_through,
                parts,
                self.pushed[parts] * self.server_s_per_byte,
                self.in_free_s[server],
                1 if fabric.aggregation else self.copies,
                mine,
            )
            if first <= self.last_received_s[server]:
                return None
            self.last_received_s[server] = last
            end_s[parts] = mine
        return np.asarray(end_s + reduce_s).reshape(-1, fabric.shards)

    def _released(self, summed: Times) -> Times:
        """[distributing fragment, shard]: when all that the fragment distributes is summed."""
        first, second = self.unrolled.shared
        complete = np.zeros((len(self.unrolled.distributing), self.fabric.shards))
        np.maximum.at(complete, second, summed[first])
        return complete

    def _result(self, kept: Sequence[int], sums: Iterable[tuple[Times, Times]]) -> FlowResult:
        found: list[list[_Block]] = [[] for _ in range(self.iterations)]
        for b, members in itertools.groupby(kept, key=lambda worker: worker // _BLOCK):
            columns, state = [worker % _BLOCK for worker in members], self._start(b)
            for k in range(self.iterations):
                block = self._work(k, b, state)
                assert block is not None  # it was not, the first time
                found[k].append(_Block(*(times[:, columns] for times in block)))
        runs = []
        for blocks, (summed, released) in zip(found, sums, strict=True):
            received, forward, backward, launched, _ = (
                np.concatenate(each, axis=1) for each in zip(*blocks, strict=True)
            )
            runs.append(IterationTimes(forward, backward, launched, summed, released, received, 0.0))
        transfers = len(self.pulled) + len(self.pushed)
        segments = self.unrolled.forward.segments + self.unrolled.backward.segments
        return FlowResult.read(
            self.unrolled,
            runs,
            ranks=np.array(kept),
            members=np.full(len(kept), self.copies),
            num_events=self.iterations * self.network.workers * (2 * transfers + segments),
        )


class _Block(NamedTuple):
    """The times of a block of workers, in the order in which `staggered_loops.work` takes them."""

    received_s: Times
    forward_s: Times
    backward_s: Times
    launched_s: Times
    begin_s: Times


class _Extremes:
    """The workers that attain the extremes of a block's times."""

    def __init__(self) -> None:
        self._best: dict[str, tuple[float, int]] = {}

    def add(self, first: int, block: _Block) -> None:
        """Look at the workers from number `first` on."""
        values = {"received": block.received_s.max(axis=0, initial=0.0)}
        if len(block.backward_s):
            begin, end = block.backward_s[0], block.backward_s[-1]
            values |= {"first to begin": -begin, "last to begin": begin, "first to end": -end, "last to end": end}
        for name, value in values.items():
            at = int(value.argmax())
            if name not in self._best or value[at] > self._best[name][0]:
                self._best[name] = float(value[at]), first + at

    def workers(self) -> list[int]:
        return [worker for _, worker in self._best.values()]
