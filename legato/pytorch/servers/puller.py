"""Parameters that come from servers: a worker's, or an inference agent's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from legato.pytorch.runtime import gate
from legato.pytorch.runtime.buckets import PENDING, Slot
from legato.pytorch.servers.arrivals import Arrivals
from legato.pytorch.servers.protocol import BYE, Post, Sent
from legato.pytorch.servers.shards import Arena, Share

__all__ = ["Puller"]


class Puller:
    """Parameters that come from servers: where they are put, and who waits for them."""

    def __init__(
        self, post: Post, shares: Sequence[Share], pulls: Sequence[int], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.post, self.shares = post, list(shares)
        self.by_index = {share.index: share for share in shares}
        self.pulls = list(pulls)
        self.slots = {name: Slot(name, p, type(p)) for name, p in parameters.items()}
        self.shares_of: dict[str, list[Share]] = {name: [] for name in parameters}
        for share in shares:
            self.shares_of[share.name].append(share)
        self.values = Arena(shares)
        self._works: dict[int, Any] = {}
        self.arrivals: Arrivals | None = None
        self.waited_s = 0.0
        self.reads: list[str] = []  # parameters in the order in which they were waited for
        self.servers = range(post.layout.servers)

    def expect(self, iteration: int, order: Sequence[int]) -> None:
        """Say where the values are to be put; from here on, reading a parameter waits for its own."""
        for index in order:
            share = self.by_index[index]
            source = self.post.layout.server_rank(share.server)
            what = f"the value of {share.label}"
            self._works[index] = self.post.receive(self.values.message[index], source, 1 + index, what)
        if self.arrivals is not None:
            self.arrivals.begin(iteration, order)
        self.reads.clear()
        for slot in self.slots.values():
            slot.stage = PENDING
            gate.close(slot, self.resolve)

    def resolve(self, slot: Slot) -> None:
        """Bring one parameter up to date."""
        if slot.stage != PENDING:
            return
        started = time.perf_counter()
        for share in self.shares_of[slot.name]:
            work = self._works.pop(share.index, None)
            if work is not None:
                self.post.wait(work, self.post.layout.server_rank(share.server), f"the value of {share.label}")
        self.waited_s += time.perf_counter() - started
        gate.open_(slot)
        self.reads.append(slot.name)
        with gate.unseen():
            self.values.unpack(self.shares_of[slot.name], slot.parameter)

    def settle(self) -> None:
        """Bring every parameter up to date, in the order in which they come."""
        seen = dict.fromkeys(self.by_index[index].name for index in self.pulls)
        for name in seen:
            if self.slots[name].stage == PENDING:
                self.resolve(self.slots[name])

    def tell_servers(self, kind: int, iteration: int, content: bytes = b"") -> list[Sent]:
        """A command to all servers, on its way."""
        sent: list[Sent] = []
        for server in self.servers:
            share = next((share for share in self.shares if share.server == server), None)
            rank, before = self.post.layout.server_rank(server), share.label if share is not None else ""
            sent += self.post.begin_command(rank, kind, iteration, content, before=before)
        return sent

    def receive_all(self, kind: int, iteration: int, arena: Arena) -> None:
        """Ask all servers for something of each share, and wait until it is in."""
        started = time.perf_counter()
        works = []
        for share in self.shares:
            source, what = self.post.layout.server_rank(share.server), f"the averaged gradient of {share.label}"
            works.append((self.post.receive(arena.message[share.index], source, 1 + share.index, what), source, what))
        self.post.finish(self.tell_servers(kind, iteration))
        for work, source, what in works:
            self.post.wait(work, source, what)
        self.waited_s += time.perf_counter() - started

    def leave(self) -> None:
        """Needs nothing any more."""
        self.settle()
        self.post.finish(self.tell_servers(BYE, 0))
