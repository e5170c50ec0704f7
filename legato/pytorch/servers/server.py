"""A parameter server: adds up gradients, lets the optimizer step, hands parameters out in order.

[Note: one thread decides] A thread for each worker and agent listens to it and
reports what came in; everything else, sums, updates, transfers, is done by the
main thread, one report after another. A gradient is added up when all workers'
are there, in the order of the workers, so that the result is the same every
time; the update waits for every worker's `step()`, whose settings it uses.

Order enforced where it is decided: at the sender, just before the network (TicTac, section 5.1).

Each transfer of an iteration has a number. A counter for each receiver says how
many transfers were handed to the network; a transfer waits until the counter
has come to its number, whenever it was offered. Nothing waits for a transfer to
*arrive*, so they follow one another without a gap, and the receiver holds
nothing back.
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
from legato.pytorch.servers.held import Holdings
from legato.pytorch.servers.protocol import (
    AVERAGES,
    BYE,
    DROP,
    GRADIENTS,
    REPLY,
    STATE,
    STEP,
    Command,
    Post,
    Sent,
    Step,
)
from legato.pytorch.servers.shards import Arena, Share

__all__ = ["Sender", "Server", "shuffled"]

#: Parameters are updated in lots of at least so many bytes; the first lot goes out while the next is updated.
_LOT_BYTES = 2**20

_log = logging.getLogger(__name__)


class _Report(NamedTuple):
    """Something came in from a rank: a gradient, a command, or the end of its connection."""

    rank: int
    share: Share | None = None
    command: Command | None = None
    error: BaseException | None = None


def shuffled(pulls: Sequence[int], seed: int, worker: int, iteration: int) -> list[int]:
    """The order of one worker's pulls in one iteration, where no order is enforced."""
    order = list(pulls)
    random.Random(f"{seed} {worker} {iteration}").shuffle(order)
    return order


class Server:
    """`shares` and `pulls` are those of this server; `seed` is given if the pulls are to be in random orders."""

    def __init__(
        self, post: Post, shares: Sequence[Share], pulls: Sequence[int], holdings: Holdings, seed: int | None
    ) -> None:
        self.post, self.shares, self.pulls, self.holdings, self._seed = post, shares, list(pulls), holdings, seed
        self._of = {share.index: share for share in shares}
        layout = post.layout
        self.workers = list(range(layout.workers))
        self.agents = list(range(layout.workers + layout.servers, layout.size))
        self._gradients = {worker: Arena(shares) for worker in self.workers}
        self._values = Arena(shares)  # what goes to the workers
        self._copies = {agent: Arena(shares) for agent in self.agents}  # ... and to each agent
        self._reports: SimpleQueue[_Report] = SimpleQueue()
        self._sent: dict[int, list[Sent]] = {rank: [] for rank in (*self.workers, *self.agents)}
        self._senders = {worker: Sender(self._hand_over(worker)) for worker in self.workers}
        self._here: dict[int, int] = dict.fromkeys(self._of, 0)  # gradients of this iteration
        self._steps: dict[int, Command] = {}
        self._asking: list[int] = []  # workers that want the optimizer's state
        self._looking: list[int] = []  # ... the averaged gradients
        self._agents_served = 0
        self.iteration = 0  # updates that were made

    @property
    def standing(self) -> str:
        """What it is doing, for the others' error messages."""
        lacking = next((share for share in self.shares if self._here[share.index] < len(self.workers)), None)
        which = f"lacks gradients of {lacking.label}" if lacking and any(self._here.values()) else "waits for workers"
        return f"serves, {self.iteration} updates made, and {which}"

    def serve(self) -> None:
        """Until all workers and agents have left. Raises `RankError` when a worker fails."""
        for rank in (*self.workers, *self.agents):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        present, agents = set(self.workers), set(self.agents)
        while present or agents:
            report = self._reports.get()
            if report.rank in agents:
                if report.error is not None:
                    _log.warning("agent lost, training goes on: %s", report.error)
                gone = report.command is None or report.command.kind == BYE
                agents -= {report.rank} if gone else set()
                if not gone:
                    self._serve_agent(report.rank, training=bool(present))
            elif report.error is not None:
                raise report.error
            elif report.share is not None:
                self._gradient(report.share)
            elif report.command is not None:
                if report.command.kind == BYE:
                    present.discard(report.rank)
                self._command(report.rank, report.command)
                self._check_even(present)

    # ---- on the listening threads --------------------------------------------------

    def _listen(self, rank: int) -> None:
        awaited = f"the gradient of {self.shares[0].label}" if self.shares else "a step"
        try:
            while True:
                command = self.post.next_command(rank, awaited, ever=rank in self.agents)
                if command.kind == GRADIENTS:
                    self._take_gradients(rank, command.iteration)
                else:
                    if command.kind == STEP and rank == self.workers[0]:
                        self._take_changed(rank, msgspec.json.decode(command.content, type=Step))
                    self._reports.put(_Report(rank, command=command))
                if command.kind == BYE:
                    return
        except Exception as error:
            self._reports.put(_Report(rank, error=error))

    def _take_gradients(self, worker: int, iteration: int) -> None:
        arena = self._gradients[worker]
        works = []
        for share in self.shares:
            what = f"the gradient of {share.label}"
            works.append(self.post.receive(arena.message[share.index], worker, 1 + share.index, what))
        for share, work in zip(self.shares, works, strict=True):
            self.post.wait(work, worker, f"the gradient of {share.label}")
            stamp = int(arena.stamp[share.index][0])
            if stamp != iteration:
                raise RankError(f"{self.post.named(worker)}: {share.label} of iteration {stamp}, not {iteration}")
            self._reports.put(_Report(worker, share))

    def _take_changed(self, worker: int, step: Step) -> None:
        """What the user made of the averages. They are in already, so nobody else needs this memory."""
        arena = self._gradients[worker]
        for share in [self._of[index] for index, there in step.changed if there and index in self._of]:
            what = f"the changed gradient of {share.label}"
            self.post.wait(self.post.receive(arena.message[share.index], worker, 1 + share.index, what), worker, what)

    # ---- on the main thread ----------------------------------------------------------

    def _gradient(self, share: Share) -> None:
        self._here[share.index] += 1
        if self._here[share.index] == len(self.workers):
            arenas = [self._gradients[worker] for worker in self.workers]
            there = [a.elements[share.index] for a in arenas if int(a.stamp[share.index][1])]
            self.holdings.aggregate(share, there)
            self._show_averages()

    def _command(self, worker: int, command: Command) -> None:
        if command.kind in (STEP, DROP):
            self._steps[worker] = command
            if len(self._steps) == len(self.workers):
                self._check_equal()
                self._update() if command.kind == STEP else self._drop()
        elif command.kind == STATE:
            self._asking.append(worker)
        elif command.kind == AVERAGES:
            self._looking.append(worker)
            self._show_averages()
        for asking in [w for w in self._asking if w not in self._steps]:
            self._asking.remove(asking)
            listed, tensors = self.holdings.state()
            self.post.command(asking, REPLY, tensors.numel(), listed)
            if tensors.numel():
                self.post.finish([self.post.send(tensors, asking, 0, "optimizer state")])

    def _check_even(self, present: set[int]) -> None:
        left = sorted(set(self.workers) - present)
        if left and (self._steps or any(self._here.values())):
            raise RankError(
                f"{self.post.named(left[0])} left after {self.iteration} steps, and others go on: "
                f"the gradient of {self.shares[0].label if self.shares else 'nothing'} will never be complete"
            )

    def _check_equal(self) -> None:
        first = self._steps[0]
        for worker, command in self._steps.items():
            who = self.post.named(worker)
            if command.kind != first.kind:
                did, other = ("optimizer.step()", "zero_grad()")[:: 1 if command.kind == STEP else -1]
                raise RankError(f"{who}: {did} after the backward pass, {other} on rank 0")
            if command.content == first.content:
                continue
            here, there = (msgspec.json.decode(c.content, type=Step) for c in (command, first))
            if here.groups != there.groups:
                raise RankError(f"{who}: settings of the optimizer {here.groups}, {there.groups} on rank 0"[:700])
            odd = min(set(map(tuple, here.changed)) ^ set(map(tuple, there.changed)))[0]
            name = self._of[odd].label if odd in self._of else f"share {odd}"
            raise RankError(f"{who}: gradients were changed before optimizer.step(), and others on rank 0 ({name})")

    def _drop(self) -> None:
        """`zero_grad()` instead of `step()`, on all workers."""
        self._begin_anew()
        for worker in self.workers:
            self.post.command(worker, REPLY, self.iteration)

    def _begin_anew(self) -> None:
        self._steps.clear()
        self._here = dict.fromkeys(self._here, 0)

    def _show_averages(self) -> None:
        """To those who asked, once all gradients are here. Every worker has the values that lay in this memory."""
        if not self._looking or any(here < len(self.workers) for here in self._here.values()):
            return
        self._finish_sending(self.workers)
        for share in self.shares:
            gradient = self.holdings.parameters[share.index].grad
            self._values.stamp[share.index][1] = int(gradient is not None)
            if gradient is not None:
                self._values.elements[share.index].copy_(gradient.reshape(-1))
        for worker in self._looking:
            for share in self.shares:
                self._hand_over(worker)(share.index)
        self._looking.clear()

    def _update(self) -> None:
        step = msgspec.json.decode(self._steps[self.workers[0]].content, type=Step)
        self._finish_sending(self.workers)
        self.holdings.configure(step.groups)
        for index, there in step.changed:
            if index in self._of:
                changed = [self._gradients[self.workers[0]].elements[index]] if there else []
                self.holdings.aggregate(self._of[index], changed)
        self._begin_anew()
        self.iteration += 1
        for worker, sender in self._senders.items():
            fixed = self._seed is None
            sender.begin(self.pulls if fixed else shuffled(self.pulls, self._seed or 0, worker, self.iteration))
        for lot in self._lots():
            self.holdings.update(lot)
            for share in lot:
                self._pack(share, self._values)
                for sender in self._senders.values():
                    sender.offer(share.index)

    def _lots(self) -> list[list[Share]]:
        """The shares in the order of the pulls, in lots that are updated together."""
        lots: list[list[Share]] = [[]]
        for index in self.pulls:
            if sum(share.nbytes for share in lots[-1]) >= _LOT_BYTES:
                lots.append([])
            lots[-1].append(self._of[index])
        return lots

    def _pack(self, share: Share, arena: Arena) -> None:
        with torch.no_grad():
            arena.elements[share.index].copy_(self.holdings.parameters[share.index].reshape(-1))
        arena.stamp[share.index][0] = self.iteration

    def _hand_over(self, worker: int) -> Any:
        def send(index: int) -> None:
            message = self._values.message[index]
            what = f"the value of {self._of[index].label}"
            self._sent[worker].append(self.post.send(message, worker, 1 + index, what))

        return send

    def _serve_agent(self, agent: int, training: bool) -> None:
        """A copy of all parameters as they are now, which may take its time."""
        try:
            self._finish_sending([agent])
            reply = msgspec.json.encode({"iteration": self.iteration, "training": training})
            self.post.command(agent, REPLY, self.iteration, reply)
            arena = self._copies[agent]
            self._agents_served += 1
            fixed = self._seed is None
            order = self.pulls if fixed else shuffled(self.pulls, self._seed or 0, agent, self._agents_served)
            for index in order:
                self._pack(self._of[index], arena)
                what = f"the value of {self._of[index].label}"
                self._sent[agent].append(self.post.send(arena.message[index], agent, 1 + index, what))
        except RankError as error:
            _log.warning("agent lost, training goes on: %s", error)

    def _finish_sending(self, ranks: Sequence[int]) -> None:
        """What was sent before is out, and its memory can be used again."""
        for rank in ranks:
            self.post.finish(self._sent[rank])


class Sender:
    """The transfers to one receiver."""

    def __init__(self, hand_over: Callable[[int], None]) -> None:
        self._hand_over = hand_over
        self._number: dict[int, int] = {}
        self._offered: dict[int, int] = {}
        self.counter = 0

    def begin(self, order: Sequence[int]) -> None:
        """An iteration, whose transfers are to go out in this order."""
        self._number = {transfer: number for number, transfer in enumerate(order)}
        self._offered = {}
        self.counter = 0

    def offer(self, transfer: int) -> None:
        """A transfer can go out, as far as its content is concerned."""
        self._offered[self._number[transfer]] = transfer
        while self.counter in self._offered:
            self._hand_over(self._offered.pop(self.counter))
            self.counter += 1
