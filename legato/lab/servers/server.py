"""A parameter server: sums gradients, lets the optimizer step, and sends the parameters in the planned order.

[Note: threads] For each worker and each agent, one thread receives the messages from this rank and reports them. The
main thread handles one report after another, and does everything else: sums, updates and transfers. A gradient is
summed when the gradients of all workers have arrived, in the order of the workers, so the result is reproducible. The
update waits until every worker has called `step()`, and uses the optimizer's settings at this call.

[Note: enforced order] The server enforces the order of transfers where TicTac does (section 5.1): at the sender, just
before a transfer enters the network. Each transfer of an iteration has a number. For each receiver, a counter counts
the transfers that were launched, and a transfer waits until the counter reaches the transfer's number. No transfer
waits until another one has *arrived*, so transfers follow each other without a gap.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import torch

from legato.core.errors import RankError
from legato.core.text import count
from legato.lab.servers.held import HeldState
from legato.lab.servers.protocol import (
    AVERAGES,
    BYE,
    DROP,
    GRADIENTS,
    REPLY,
    STATE,
    STEP,
    Command,
    PendingSend,
    StepRequest,
    Transport,
)
from legato.lab.servers.shards import Arena, Shard

__all__ = ["Sender", "Server", "shuffled"]

#: Parameters are updated in chunks of at least this number of bytes; each chunk is sent while the next is updated.
_CHUNK_BYTES = 2**20

_log = logging.getLogger(__name__)


class _Report(NamedTuple):
    """An event from a rank: its gradient or its command has arrived, or its connection has failed."""

    rank: int
    shard: Shard | None = None
    command: Command | None = None
    error: BaseException | None = None


def shuffled(pulls: Sequence[int], seed: int, worker: int, iteration: int) -> list[int]:
    """Return a random order for one worker's pulls in one iteration, used when no order is enforced."""
    order = list(pulls)
    random.Random(f"{seed} {worker} {iteration}").shuffle(order)
    return order


class Server:
    """A server of `shards`, which it sends in the order of `pulls`, or in random orders if a `seed` is given."""

    def __init__(
        self, transport: Transport, shards: Sequence[Shard], pulls: Sequence[int], held: HeldState, seed: int | None
    ) -> None:
        self.transport, self.shards, self.pulls, self.held, self._seed = transport, shards, list(pulls), held, seed
        self._of = {shard.index: shard for shard in shards}
        roles = transport.roles
        self.workers = list(range(roles.workers))
        self.agents = list(range(roles.workers + roles.servers, roles.size))
        self._gradients = {worker: Arena(shards) for worker in self.workers}
        self._values = Arena(shards)  # sent to the workers
        self._copies = {agent: Arena(shards) for agent in self.agents}  # sent to each agent
        self._reports: SimpleQueue[_Report] = SimpleQueue()
        self._sent: dict[int, list[PendingSend]] = {rank: [] for rank in (*self.workers, *self.agents)}
        self._senders = {worker: Sender(self._send_value(worker)) for worker in self.workers}
        self._arrived: dict[int, int] = dict.fromkeys(self._of, 0)  # gradients in this iteration, by shard
        self._steps: dict[int, Command] = {}
        self._state_requests: list[int] = []  # workers that asked for the optimizer's state
        self._average_requests: list[int] = []  # workers that asked for the averaged gradients
        self._agents_served = 0
        self.iteration = 0  # the number of updates so far

    @property
    def status(self) -> str:
        """Describe what the server is doing, for the error messages of other ranks."""
        lacking = next((shard for shard in self.shards if self._arrived[shard.index] < len(self.workers)), None)
        which = (
            f"lacks gradients of {lacking.label}" if lacking and any(self._arrived.values()) else "waits for workers"
        )
        return f"serves, {self.iteration} updates made, and {which}"

    def serve(self) -> None:
        """Serve until all workers and agents are done. Raises `RankError` when a worker fails."""
        for rank in (*self.workers, *self.agents):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        present, agents = set(self.workers), set(self.agents)
        while present or agents:
            report = self._reports.get()
            if report.rank in agents:
                if report.error is not None:
                    _log.warning("lost an agent; training continues: %s", report.error)
                gone = report.command is None or report.command.kind == BYE
                agents -= {report.rank} if gone else set()
                if not gone:
                    self._serve_agent(report.rank, training=bool(present))
            elif report.error is not None:
                raise report.error
            elif report.shard is not None:
                self._gradient(report.shard)
            elif report.command is not None:
                if report.command.kind == BYE:
                    present.discard(report.rank)
                self._command(report.rank, report.command)
                self._check_leavers(present)

    # ---- on the listening threads --------------------------------------------------

    def _listen(self, rank: int) -> None:
        awaited = f"the gradient of {self.shards[0].label}" if self.shards else "a step"
        try:
            while True:
                command = self.transport.next_command(rank, awaited, ever=rank in self.agents)
                if command.kind == GRADIENTS:
                    self._take_gradients(rank, command.iteration)
                else:
                    if command.kind == STEP and rank == self.workers[0]:
                        self._take_changed(rank, msgspec.json.decode(command.content, type=StepRequest))
                    self._reports.put(_Report(rank, command=command))
                if command.kind == BYE:
                    return
        except Exception as error:
            self._reports.put(_Report(rank, error=error))

    def _take_gradients(self, worker: int, iteration: int) -> None:
        arena = self._gradients[worker]
        works = []
        for shard in self.shards:
            what = f"the gradient of {shard.label}"
            works.append(self.transport.receive(arena.message[shard.index], worker, 1 + shard.index, what))
        for shard, work in zip(self.shards, works, strict=True):
            self.transport.wait(work, worker, f"the gradient of {shard.label}")
            found = int(arena.trailer[shard.index][0])
            if found != iteration:
                raise RankError(f"{self.transport.named(worker)}: {shard.label} of iteration {found}, not {iteration}")
            self._reports.put(_Report(worker, shard))

    def _take_changed(self, worker: int, step: StepRequest) -> None:
        """Receive the gradients that the script changed, and overwrite the original gradients with them.

        The original gradients are summed already.
        """
        arena = self._gradients[worker]
        for shard in [self._of[index] for index, there in step.changed if there and index in self._of]:
            what = f"the changed gradient of {shard.label}"
            self.transport.wait(
                self.transport.receive(arena.message[shard.index], worker, 1 + shard.index, what), worker, what
            )

    # ---- on the main thread ----------------------------------------------------------

    def _gradient(self, shard: Shard) -> None:
        self._arrived[shard.index] += 1
        if self._arrived[shard.index] == len(self.workers):
            arenas = [self._gradients[worker] for worker in self.workers]
            there = [a.elements[shard.index] for a in arenas if int(a.trailer[shard.index][1])]
            self.held.aggregate(shard, there)
            self._send_averages()

    def _command(self, worker: int, command: Command) -> None:
        if command.kind in (STEP, DROP):
            self._steps[worker] = command
            if len(self._steps) == len(self.workers):
                self._check_equal()
                self._update() if command.kind == STEP else self._drop()
        elif command.kind == STATE:
            self._state_requests.append(worker)
        elif command.kind == AVERAGES:
            self._average_requests.append(worker)
            self._send_averages()
        for asking in [w for w in self._state_requests if w not in self._steps]:
            self._state_requests.remove(asking)
            listed, tensors = self.held.state()
            self.transport.command(asking, REPLY, tensors.numel(), listed)
            if tensors.numel():
                self.transport.finish([self.transport.send(tensors, asking, 0, "optimizer state")])

    def _check_leavers(self, present: set[int]) -> None:
        left = sorted(set(self.workers) - present)
        if left and (self._steps or any(self._arrived.values())):
            raise RankError(
                f"{self.transport.named(left[0])} left after {count(self.iteration, 'step')}, but other workers "
                f"continue: the gradient of {self.shards[0].label if self.shards else 'nothing'} will never be complete"
            )

    def _check_equal(self) -> None:
        first = self._steps[0]
        for worker, command in self._steps.items():
            who = self.transport.named(worker)
            if command.kind != first.kind:
                did, other = ("optimizer.step()", "zero_grad()")[:: 1 if command.kind == STEP else -1]
                raise RankError(f"{who}: {did} after the backward pass, but {other} on rank 0")
            if command.content == first.content:
                continue
            here, there = (msgspec.json.decode(c.content, type=StepRequest) for c in (command, first))
            if here.groups != there.groups:
                raise RankError(f"{who}: settings of the optimizer {here.groups}, but {there.groups} on rank 0"[:700])
            odd = min(set(map(tuple, here.changed)) ^ set(map(tuple, there.changed)))[0]
            name = self._of[odd].label if odd in self._of else f"shard {odd}"
            raise RankError(f"{who}: changed other gradients before optimizer.step() than rank 0 ({name})")

    def _drop(self) -> None:
        """Discard the gradients, because all workers called `zero_grad()` instead of `step()`."""
        self._reset()
        for worker in self.workers:
            self.transport.command(worker, REPLY, self.iteration)

    def _reset(self) -> None:
        self._steps.clear()
        self._arrived = dict.fromkeys(self._arrived, 0)

    def _send_averages(self) -> None:
        """Send the averages to the workers that asked for them, once all gradients have arrived.

        The averages overwrite the parameters' values in memory; every worker has received these values by now.
        """
        if not self._average_requests or any(here < len(self.workers) for here in self._arrived.values()):
            return
        self._finish_sending(self.workers)
        for shard in self.shards:
            gradient = self.held.parameters[shard.index].grad
            self._values.trailer[shard.index][1] = int(gradient is not None)
            if gradient is not None:
                self._values.elements[shard.index].copy_(gradient.reshape(-1))
        for worker in self._average_requests:
            for shard in self.shards:
                self._send_value(worker)(shard.index)
        self._average_requests.clear()

    def _update(self) -> None:
        step = msgspec.json.decode(self._steps[self.workers[0]].content, type=StepRequest)
        self._finish_sending(self.workers)
        self.held.configure(step.groups)
        for index, there in step.changed:
            if index in self._of:
                changed = [self._gradients[self.workers[0]].elements[index]] if there else []
                self.held.aggregate(self._of[index], changed)
        self._reset()
        self.iteration += 1
        for worker, sender in self._senders.items():
            fixed = self._seed is None
            sender.begin(self.pulls if fixed else shuffled(self.pulls, self._seed or 0, worker, self.iteration))
        for chunk in self._chunks():
            self.held.update(chunk)
            for shard in chunk:
                self._pack(shard, self._values)
                for sender in self._senders.values():
                    sender.offer(shard.index)

    def _chunks(self) -> list[list[Shard]]:
        """Return the shards in chunks, in the order of the pulls; the shards of a chunk are updated together."""
        chunks: list[list[Shard]] = [[]]
        for index in self.pulls:
            if sum(shard.nbytes for shard in chunks[-1]) >= _CHUNK_BYTES:
                chunks.append([])
            chunks[-1].append(self._of[index])
        return chunks

    def _pack(self, shard: Shard, arena: Arena) -> None:
        with torch.no_grad():
            arena.elements[shard.index].copy_(self.held.parameters[shard.index].reshape(-1))
        arena.trailer[shard.index][0] = self.iteration

    def _send_value(self, worker: int) -> Any:
        def send(index: int) -> None:
            message = self._values.message[index]
            what = f"the value of {self._of[index].label}"
            self._sent[worker].append(self.transport.send(message, worker, 1 + index, what))

        return send

    def _serve_agent(self, agent: int, training: bool) -> None:
        """Send an agent a copy of all current parameters, without waiting until the copy is sent."""
        try:
            self._finish_sending([agent])
            reply = msgspec.json.encode({"iteration": self.iteration, "training": training})
            self.transport.command(agent, REPLY, self.iteration, reply)
            arena = self._copies[agent]
            self._agents_served += 1
            fixed = self._seed is None
            order = self.pulls if fixed else shuffled(self.pulls, self._seed or 0, agent, self._agents_served)
            for index in order:
                self._pack(self._of[index], arena)
                what = f"the value of {self._of[index].label}"
                self._sent[agent].append(self.transport.send(arena.message[index], agent, 1 + index, what))
        except RankError as error:
            _log.warning("lost an agent; training continues: %s", error)

    def _finish_sending(self, ranks: Sequence[int]) -> None:
        """Wait until earlier sends to these ranks are done, so that their memory can be reused."""
        for rank in ranks:
            self.transport.finish(self._sent[rank])


class Sender:
    """Launches the transfers to one receiver in the planned order; `counter` counts the launched transfers."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._number: dict[int, int] = {}
        self._offered: dict[int, int] = {}
        self.counter = 0

    def begin(self, order: Sequence[int]) -> None:
        """Start an iteration whose transfers are to be launched in this order."""
        self._number = {transfer: number for number, transfer in enumerate(order)}
        self._offered = {}
        self.counter = 0

    def offer(self, transfer: int) -> None:
        """Mark a transfer as ready, and launch every transfer whose turn has come."""
        self._offered[self._number[transfer]] = transfer
        while self.counter in self._offered:
            self._send(self._offered.pop(self.counter))
            self.counter += 1
