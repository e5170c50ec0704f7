"""Receives parameters from the servers, on a worker or an inference agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from legato.lab.servers.protocol import BYE, PendingSend, Transport
from legato.lab.servers.shards import Arena, Shard
from legato.lab.servers.worker.arrivals import Arrivals
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import PENDING, Slot

__all__ = ["Puller"]


class Puller:
    """Receives the values of all parameters, and makes each read of a parameter wait for its value.

    `shards` has the shards of all servers, and `pulls` their indices in the order of the plan. `waited_s` is the total
    time during which computation waited for values.
    """

    def __init__(
        self,
        transport: Transport,
        shards: Sequence[Shard],
        pulls: Sequence[int],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.transport, self.shards = transport, list(shards)
        self.by_index = {shard.index: shard for shard in shards}
        self.pulls = list(pulls)
        self.slots = {name: Slot(name, p, type(p), p.nbytes) for name, p in parameters.items()}
        self.shards_of: dict[str, list[Shard]] = {name: [] for name in parameters}
        for shard in shards:
            self.shards_of[shard.name].append(shard)
        self.values = Arena(shards)
        self._works: dict[int, Any] = {}
        self.arrivals: Arrivals | None = None
        self.waited_s = 0.0
        self.reads: list[str] = []  # names of the parameters, in the order in which the worker waited for their values
        self.servers = range(transport.roles.servers)

    def expect(self, order: Sequence[int]) -> None:
        """Begin to receive all values, and return at once. Code that reads a parameter then waits for its value."""
        if self.arrivals is not None:
            self.arrivals.begin(order)
        for index in order:
            shard = self.by_index[index]
            source = self.transport.roles.server_rank(shard.server)
            what = f"the value of {shard.label}"
            self._works[index] = self.transport.receive(self.values.message[index], source, 1 + index, what)
        self.reads.clear()
        for slot in self.slots.values():
            slot.mark_stepped()
            gate.install(slot, self.resolve)

    def resolve(self, slot: Slot) -> None:
        """Wait for the value of one parameter, and copy it into the parameter."""
        if slot.stage != PENDING:
            return
        started = time.perf_counter()
        for shard in self.shards_of[slot.name]:
            work = self._works.pop(shard.index, None)
            if work is not None:
                self.transport.wait(work, self.transport.roles.server_rank(shard.server), f"the value of {shard.label}")
        self.waited_s += time.perf_counter() - started
        gate.remove(slot)
        self.reads.append(slot.name)
        with gate.invisible():
            self.values.unpack(self.shards_of[slot.name], slot.parameter)

    def settle(self) -> None:
        """Bring every parameter up to date, in the order of the pulls."""
        seen = dict.fromkeys(self.by_index[index].name for index in self.pulls)
        for name in seen:
            if self.slots[name].stage == PENDING:
                self.resolve(self.slots[name])

    def tell_servers(self, kind: int, iteration: int, content: bytes = b"") -> list[PendingSend]:
        """Launch the send of a command to all servers, and return the pending sends."""
        sent: list[PendingSend] = []
        for server in self.servers:
            shard = next((shard for shard in self.shards if shard.server == server), None)
            rank, before = self.transport.roles.server_rank(server), shard.label if shard is not None else ""
            sent += self.transport.begin_command(rank, kind, iteration, content, before=before)
        return sent

    def receive_all(self, kind: int, iteration: int, arena: Arena) -> None:
        """Send a command to all servers, and wait until they have filled `arena` with the averaged gradients."""
        started = time.perf_counter()
        works = []
        for shard in self.shards:
            source, what = self.transport.roles.server_rank(shard.server), f"the averaged gradient of {shard.label}"
            works.append(
                (self.transport.receive(arena.message[shard.index], source, 1 + shard.index, what), source, what)
            )
        self.transport.finish(self.tell_servers(kind, iteration))
        for work, source, what in works:
            self.transport.wait(work, source, what)
        self.waited_s += time.perf_counter() - started

    def leave(self) -> None:
        """Bring all parameters up to date, and tell the servers that this rank is done."""
        self.settle()
        self.transport.finish(self.tell_servers(BYE, 0))
